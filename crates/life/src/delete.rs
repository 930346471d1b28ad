//! An image that its user does not need any more: one without a child goes at once, one with a child is marked ([`crate::gone`]).

use std::path::{Path, PathBuf};

use spile_core::{Disk, Error, ErrorKind, Files, Locator, OpenMode, Result, Store};
use spile_image::layer::{Identity, Layer as _};
use spile_image::{Format, Graph, MAX_LAYERS};

use crate::gc::{Family, Tools, described, keeps_data_elsewhere, named_data_file, named_parents};
use crate::gone::Gone;
use crate::motion::forget_parent;
use crate::names;
use crate::snapshot::{refuse_job, remove_if_there};

/// Marks `image` as one that goes when it can be merged with `child`, the only one that it has. It may be in use. `list` gives the files of its folder.
///
/// # Errors
/// `Unsupported` when that could never be done; `Denied` while the child is being moved; `Busy` while somebody else changes its mark, and while a merge of it
/// or into it is not finished; the storage's.
pub async fn mark<F: Files>(
    tools: &Tools<'_, F>,
    image: &Path,
    format: Option<Format>,
    child: &Path,
    list: impl AsyncFn() -> Result<Vec<PathBuf>>,
) -> Result<()> {
    if names::disk_of_half(child).is_some() {
        return Err(is_needed(image, child).hint("it is being moved: wait until that is over, and delete this then"));
    }
    if names::format_of(child).is_none() {
        let hint = "the name of that image does not say its format: give it the extension of that, or delete it first";
        return Err(is_needed(image, child).hint(hint));
    }
    if let Some(format) = names::format_of(child)
        && named_data_file(tools.asking, child, format).await?.is_some_and(|data| data == image)
    {
        let what = format!("{} keeps its data in this file, and would be of no use without it", child.display());
        let error = Error::new(ErrorKind::Denied, what).at_path(image);
        return Err(error.hint(format!("spile delete {} --with-data-file removes both", child.display())));
    }
    let is_far = image.parent() != child.parent();
    let (parent, leaf) = (described(tools, image, format).await?, described(tools, child, None).await?);
    let refuse = |why: String| {
        let child = child.display();
        let hint = format!("spile flatten {child}, and then delete this; or merge {child} by hand: spile coalesce");
        Err(Error::new(ErrorKind::Unsupported, why).at_path(image).hint(hint))
    };
    if is_far {
        return refuse(format!("its child {} lies in another folder, and it cannot take that name", child.display()));
    }
    let (Some(identity), Some(child_identity)) = (parent.which, leaf.which) else {
        return refuse(
            "nobody could tell later which image that was: its file system does not say when files were made"
                .to_owned(),
        );
    };
    for image in [image, child] {
        if keeps_data_elsewhere(tools, image).await? {
            return refuse(format!("{} keeps its data in another file, and is not merged", image.display()));
        }
    }
    if parent.format != leaf.format {
        return refuse(format!("a {} image cannot take the name of {}", parent.format, child.display()));
    }
    if parent.virtual_bytes > leaf.virtual_bytes {
        let child = child.display();
        return refuse(format!("it is longer than its child {child}, which hides what lies behind its end"));
    }
    if parent.virtual_bytes < leaf.virtual_bytes && longest_beneath(tools, image).await? > parent.virtual_bytes {
        let child = child.display();
        return refuse(format!(
            "it is shorter than its child {child}, and one of its own parents is longer: what it hides of that would come to light"
        ));
    }
    let _alone = Gone::lock(tools.files, image).await?;
    match Gone::read(tools.asking, image).await?.filter(|there| there.identity == identity) {
        Some(there) if there.child == child_identity => return forget_parent(tools.files, image).await,
        Some(there) if there.is_merged => return Err(is_half_merged(image)),
        _ => {}
    }
    Gone { identity, child: child_identity, is_merged: false }.write(tools.files, image).await?;
    // A merge of this image into its own parent looks for this mark once it has the image locked.
    let may_be = match tools.files.open(&image.into(), OpenMode::ReadOnly).await {
        Ok(_alone) => match list().await {
            Ok(paths) => refuse_half_merged(tools, image, identity, &paths).await,
            Err(error) => Err(error),
        },
        Err(error) => Err(error),
    };
    match may_be {
        Err(error) => Gone::remove(tools.files, image).await.and(Err(error)),
        // No move finds a parent any more in what is about to change.
        Ok(()) => forget_parent(tools.files, image).await,
    }
}

/// The size of the longest image beneath `image`, in bytes.
async fn longest_beneath<F: Files>(tools: &Tools<'_, F>, image: &Path) -> Result<u64> {
    let (mut at, mut longest) = (image.to_owned(), 0);
    for _ in 0..MAX_LAYERS {
        let Some(format) = names::format_of(&at) else { break };
        let Some(parent) = named_parents(tools.asking, &at, format).await?.into_iter().next() else { break };
        longest = longest.max(described(tools, &parent, None).await?.virtual_bytes);
        at = parent;
    }
    Ok(longest)
}

/// Refuses an image that was to keep its name while it is merged into its parent, which was deleted, when children of the image name that parent already;
/// and a file that has the names of both. Until that is done, what is said of one name is not true for the other.
async fn refuse_half_merged<F: Files>(
    tools: &Tools<'_, F>,
    image: &Path,
    identity: Identity,
    paths: &[PathBuf],
) -> Result<()> {
    let store = tools.asking.open(&image.into(), OpenMode::ReadOnly).await?;
    let family = Family::ask(tools, paths).await;
    for path in paths.iter().filter(|path| names::is_gone(path)) {
        let Some(other) = names::disk_of(path).filter(|other| other != image) else { continue };
        let Some(gone) = Gone::read(tools.asking, &other).await?.filter(|gone| gone.is_merged) else { continue };
        let is_other_name = gone.identity == identity && tools.asking.is_at(&store, &other).await?;
        let has_others = gone.child == identity && family.children_of(&other)?.iter().any(|child| child != image);
        if is_other_name || has_others {
            return Err(is_half_merged(image));
        }
    }
    Ok(())
}

fn is_half_merged(image: &Path) -> Error {
    let what = "a merge of it with its parent or its child, which was deleted, has begun and is not finished";
    Error::new(ErrorKind::Busy, what).at_path(image).hint("spile gc finishes it; then delete this")
}

/// Takes the mark of `image` back: it is an image as every other one.
///
/// # Errors
/// `NotFound` when it has none; `Denied` when its child may be in it by now, in part; `Busy` while somebody else works on the mark; the
/// system's. The mark is left then.
pub async fn unmark<F: Files>(tools: &Tools<'_, F>, image: &Path) -> Result<()> {
    let Some(_alone) = Gone::lock(tools.files, image).await? else {
        let error = Error::new(ErrorKind::NotFound, "it is not marked as deleted").at_path(image);
        return Err(
            error.hint("what has no child is gone at once; what was marked is gone when spile gc has merged it")
        );
    };
    if Gone::read(tools.asking, image).await?.is_some_and(|gone| gone.is_merged) {
        let error = Error::new(ErrorKind::Denied, "its child is merged into it, and it holds some of that by now");
        return Err(error.at_path(image).hint("spile gc finishes that"));
    }
    Gone::remove(tools.files, image).await
}

/// Removes the image whose disk `graph` is. It is open for writing here, and nowhere else: so nobody makes a child of it meanwhile. `list`
/// gives the files of its folder. A file that holds the image's data goes only `with_data_file`. Returns the paths of both.
///
/// # Errors
/// `Busy` while a job on it is not finished; `Denied` when another image needs it, or cannot be asked, and when it has a data file that is not to go;
/// the storage's. The image is whole then, but for its checkpoints.
pub async fn remove<F: Files>(
    tools: &Tools<'_, F>,
    graph: &Graph<F::Store>,
    with_data_file: bool,
    list: impl AsyncFn() -> Result<Vec<PathBuf>>,
) -> Result<(PathBuf, Option<PathBuf>)> {
    let leaf = &graph.handles()[0];
    refuse_device(leaf.image().store(), leaf.path())?;
    refuse_needed(tools, leaf.path(), &list).await?;
    let (image, data) = (leaf.image().store(), leaf.image().data_store());
    let data = (!std::ptr::eq(image, data)).then_some(data);
    if let Some(data) = data {
        refuse_device(data, data.path())?;
        refuse_needed_data(tools, leaf.path(), data.path(), list).await?;
        if !with_data_file {
            let shown = data.path().display();
            let error =
                Error::new(ErrorKind::Denied, format!("the image keeps its data in {shown}, which would go, too"));
            return Err(error.at_path(leaf.path()).hint("--with-data-file removes both"));
        }
    }
    graph.close().await?;
    // First, for nobody would look for it without its image.
    let mut gone = None;
    if let Some(data) = data
        && tools.files.is_at(data, data.path()).await?
    {
        tools.files.remove_file(data, data.path()).await?;
        gone = Some(data.path().to_owned());
    }
    Ok((remove_file(tools, leaf.path(), image).await?, gone))
}

/// Refuses to remove the file at `data` with the image at `path`, whose data it holds, unless it is that image's alone as far as anybody can tell.
async fn refuse_needed_data<F: Files>(
    tools: &Tools<'_, F>,
    path: &Path,
    data: &Path,
    list: impl AsyncFn() -> Result<Vec<PathBuf>>,
) -> Result<()> {
    let refuse = |what: String, hint: String| Err(Error::new(ErrorKind::Denied, what).at_path(path).hint(hint));
    let shown = data.display();
    if data.parent() != path.parent() || data.starts_with("/dev") {
        let what = format!("the image keeps its data in {shown}, and what lies there may be needed by others");
        return refuse(what, format!("remove both by hand: {} and {shown}", path.display()));
    }
    let family = Family::ask(tools, &list().await?).await;
    match family.children_of(data)?.iter().find(|other| *other != path) {
        Some(other) => {
            let what = format!("the image keeps its data in {shown}, which {} needs, too", other.display());
            refuse(
                what,
                format!(
                    "two images of one data file spoil each other: see which of them is right, and remove {} by hand",
                    path.display()
                ),
            )
        }
        None => Ok(()),
    }
}

/// As [`remove`], for an image at `path`, a whole one, whose disk cannot be opened because a parent of it is gone.
///
/// # Errors
/// As [`remove`]'s; and when the file is no image of its format.
pub async fn remove_orphan<F: Files>(
    tools: &Tools<'_, F>,
    path: &Path,
    format: Option<Format>,
    list: impl AsyncFn() -> Result<Vec<PathBuf>>,
) -> Result<PathBuf> {
    let store = tools.files.open(&Locator::from(path), OpenMode::ReadWrite).await?;
    refuse_device(&store, path)?;
    let image = described(tools, path, format).await?;
    refuse_needed(tools, path, list).await?;
    if let Some(data) = named_data_file(tools.asking, path, image.format).await? {
        let what = format!("the image keeps its data in {}, which would be left behind", data.display());
        let error = Error::new(ErrorKind::Denied, what).at_path(path);
        return Err(error.hint("remove both by hand: the disk cannot be opened, for something that it needs is gone"));
    }
    remove_file(tools, path, &store).await
}

async fn refuse_needed<F: Files>(
    tools: &Tools<'_, F>,
    path: &Path,
    list: impl AsyncFn() -> Result<Vec<PathBuf>>,
) -> Result<()> {
    refuse_job(tools.files, path).await?;
    let paths = list().await?;
    let family = Family::ask(tools, &paths).await;
    if let Some(child) = family.children_of(path)?.first() {
        return Err(needed(path, child));
    }
    if let Some(child) = family.claimed(path) {
        return Err(is_needed(path, child).hint(OF_A_RAW_NAME));
    }
    let Some(identity) = described(tools, path, None).await?.which else { return Ok(()) };
    refuse_half_merged(tools, path, identity, &paths).await
}

/// What to do about a file that claims a parent.
pub(crate) const OF_A_RAW_NAME: &str = "it begins as a qcow2 image, and its name says raw: give it the extension of its format; or move it elsewhere, if it is a raw disk whose guest has written that";

/// The refusal to delete an image that this child needs.
pub fn needed(image: &Path, child: &Path) -> Error {
    let hint = "merge it into its parent by spile coalesce, or delete the child first; spile tree shows the family";
    is_needed(image, child).hint(hint)
}

fn is_needed(image: &Path, child: &Path) -> Error {
    let what = format!("{} is a child of this image, and would be of no use without it", child.display());
    Error::new(ErrorKind::Denied, what).at_path(image)
}

/// Refuses a block device: what has its name in /dev is no file that holds the image.
fn refuse_device<S: Store>(store: &S, path: &Path) -> Result<()> {
    if store.info().grows_zeroed {
        return Ok(());
    }
    let error = Error::new(ErrorKind::Unsupported, "an image on a block device is no file that could be deleted");
    Err(error.at_path(path).hint("remove the device itself, as by lvremove, or write something else to it"))
}

/// Removes the file of `store`, which is at `path`, and what is noted beside it.
async fn remove_file<F: Files>(tools: &Tools<'_, F>, path: &Path, store: &F::Store) -> Result<PathBuf> {
    let files = tools.files;
    // The checkpoints first: another disk that gets this path has none of its own.
    remove_if_there(files, &names::changes(path)).await?;
    if !files.is_at(store, path).await? {
        return Err(Error::new(ErrorKind::NotFound, "the image is not at its path any more").at_path(path));
    }
    // Before its file: another one of this name is no parent that has come here.
    forget_parent(files, path).await?;
    files.remove_file(store, path).await?;
    remove_if_there(files, &names::set(path)).await?;
    Gone::remove(files, path).await?;
    Ok(path.to_owned())
}
