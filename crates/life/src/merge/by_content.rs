//! Children that know their parent by an identity that is made of what lies where in it, as a VHD knows a qcow2 image. When the parent
//! is written to, or names another parent, such a child is parted from it. So a merge that would do that is refused before it begins.

use std::path::{Path, PathBuf};

use spile_core::{Error, ErrorKind, Files, OpenMode, Result};
use spile_image::layer::{Layer as _, ParentRef};
use spile_image::{Format, is_child_of};

use super::refuse;
use crate::work::{GraphOf, Work, is_no_image};

/// Refuses the merge of the layer of this number when an image that it writes to has a child that knows it by its content: the layer and its
/// parent, the layer's child, and `others`, which are its children, too.
///
/// # Errors
/// `Unsupported`; the storage's.
pub(super) async fn check<F: Files>(
    work: &Work<'_, F>,
    graph: &GraphOf<F>,
    number: usize,
    others: &[PathBuf],
) -> Result<()> {
    let layers = graph.handles();
    for child in number.saturating_sub(2)..=number {
        let (child, parent) = (&layers[child], &layers[child + 1]);
        if child.image().parent().await?.is_some_and(|named| is_by_content(&named)) {
            return Err(parts(child.path(), parent.path()));
        }
    }
    let written = layers[number.saturating_sub(1)..=number].iter();
    let written = written.filter(|layer| has_no_lasting(layer.image().format())).map(|layer| layer.path());
    let others = others.iter().filter(|other| Format::from_extension(other).is_some_and(has_no_lasting));
    for image in written.chain(others.map(PathBuf::as_path)) {
        refuse_children(work, image).await?;
    }
    Ok(())
}

/// True for a format whose images have no identity that lasts.
fn has_no_lasting(format: Format) -> bool {
    format.about().identity_mark.is_some()
}

fn is_by_content(named: &ParentRef) -> bool {
    named.identity.is_some_and(|identity| !Format::lasts(identity))
}

/// Refuses a child of `image` that knows it by its content.
async fn refuse_children<F: Files>(work: &Work<'_, F>, image: &Path) -> Result<()> {
    let path = work.files.canonical(image).await?;
    for file in work.neighbours.beside(image).await? {
        for format in Format::ALL.iter().filter(|format| format.about().has_parents) {
            match knows(work, &file, *format, &path).await {
                Ok(true) => return Err(parts(&file, image)),
                Err(error) if !is_no_image(error.kind()) => return Err(error.at_path(&file)),
                Ok(false) | Err(_) => {}
            }
        }
    }
    Ok(())
}

/// True when `file` is an image of `format` that knows the image at `parent` by its content.
async fn knows<F: Files>(work: &Work<'_, F>, file: &Path, format: Format, parent: &Path) -> Result<bool> {
    let store = work.asking.open(&file.into(), OpenMode::ReadOnly).await?;
    let named = format.named_parent(&store).await?;
    drop(store);
    Ok(named.is_some_and(|named| is_by_content(&named)) && is_child_of(work.asking, file, format, parent, None).await?)
}

fn parts(child: &Path, parent: &Path) -> Error {
    let (child, name) = (child.display(), parent.display());
    let what =
        format!("{child} knows its parent {name} by what lies where in that, and would not know it after a merge");
    refuse(ErrorKind::Unsupported, what, parent, "flatten that child: then it needs no parent")
}
