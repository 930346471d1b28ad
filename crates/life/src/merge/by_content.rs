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
    let written = written.filter(|layer| !layer.image().format().has_lasting_identities()).map(|layer| layer.path());
    let others = others
        .iter()
        .filter(|other| Format::from_extension(other).is_some_and(|format| !format.has_lasting_identities()));
    let mut images = Vec::new();
    for image in written.chain(others.map(PathBuf::as_path)) {
        images.push(work.files.canonical(image).await?);
    }
    refuse_children(work, &images).await
}

fn is_by_content(named: &ParentRef) -> bool {
    named.identity.is_some_and(|identity| !Format::lasts(identity))
}

/// Refuses a child of one of `images`, canonical paths, that knows it by its content. A folder is looked through once, however many of them lie in it.
async fn refuse_children<F: Files>(work: &Work<'_, F>, images: &[PathBuf]) -> Result<()> {
    let mut asked: Vec<&Path> = Vec::new();
    for image in images {
        let folder = image.parent().unwrap_or(Path::new("/"));
        if asked.contains(&folder) {
            continue;
        }
        asked.push(folder);
        for file in work.neighbours.beside(image).await? {
            for format in Format::ALL.iter().filter(|format| format.about().has_parents) {
                match known_by(work, &file, *format, images).await {
                    Ok(Some(image)) => return Err(parts(&file, image)),
                    Err(error) if !is_no_image(error.kind()) => return Err(error.at_path(&file)),
                    Ok(None) | Err(_) => {}
                }
            }
        }
    }
    Ok(())
}

/// That of `images` that `file`, an image of `format`, knows by its content as its parent.
async fn known_by<'i, F: Files>(
    work: &Work<'_, F>,
    file: &Path,
    format: Format,
    images: &'i [PathBuf],
) -> Result<Option<&'i Path>> {
    let store = work.asking.open(&file.into(), OpenMode::ReadOnly).await?;
    let named = format.named_parent(&store).await?;
    drop(store);
    if !named.is_some_and(|named| is_by_content(&named)) {
        return Ok(None);
    }
    for image in images {
        if is_child_of(work.asking, file, format, image, None).await? {
            return Ok(Some(image));
        }
    }
    Ok(None)
}

fn parts(child: &Path, parent: &Path) -> Error {
    let (child, name) = (child.display(), parent.display());
    let what =
        format!("{child} knows its parent {name} by what lies where in that, and would not know it after a merge");
    refuse(ErrorKind::Unsupported, what, parent, "flatten that child: then it needs no parent")
}
