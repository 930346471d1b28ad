//! Keeps a parent from being written: a write to it would change, without a word, what its children show.
//!
//! A parent does not know its children. So the other images of its folder are asked, and no more than a bounded number for
//! a bounded time: of children in other folders those are found that Spile has made, by a note beside the parent. Children are opened without
//! locks, for reading only.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use spile_core::{Error, ErrorKind, Files as _, Result, Store as _};
use spile_engine::run_blocking;
use spile_image::layer::{Identity, Layer as _};
use spile_image::{Graph, LayerInfo, is_child_of};
use spile_life::base::refuse_merging;
use spile_life::gc::{holds_data, may_have_parent};
use spile_life::motion::is_parent;
use spile_life::names;
use spile_store::{CacheMode, FileId, HostStore, OsFiles};

use crate::far_children;

/// The most names in a folder that are looked at.
const MOST_NAMES: usize = 16 << 10;
/// The most images of a folder that are opened.
const MOST_IMAGES: usize = 2048;
/// How long is looked, at most about.
const PATIENCE: Duration = Duration::from_secs(3);

/// Refuses a disk, by its layers, whose image is the parent of another one in its folder, or is to be one: once a merge that was broken off is done, or the disk has come
/// that is being moved here with its parents.
///
/// # Errors
/// `Denied`, naming the child or the disk of the merge; the storage's.
pub async fn refuse_parent(layers: &[LayerInfo]) -> Result<()> {
    let Some(image) = layers.first().filter(|image| image.path.is_absolute()) else { return Ok(()) };
    let path = image.path.clone();
    let others = run_blocking(&image.path, move || other_names(&path)).await;
    let is_deleted = |image: &PathBuf| names::gone(image).exists();
    if let Some(other) = others.iter().find(|other| is_deleted(other) || is_deleted(&image.path)) {
        let what = format!("it has the name {}, too, because a merge was broken off", other.display());
        return Err(Error::new(ErrorKind::Denied, what).at_path(&image.path).hint("spile gc finishes it"));
    }
    let (asking, path) = (OsFiles::new(CacheMode::Page).without_locks(true), image.path.clone());
    let is_note = |other: &Path| names::disk_of(other).is_some_and(|disk| names::job(&disk) == other);
    let notes = run_blocking(&image.path, move || neighbours(&path, MOST_NAMES, is_note)).await;
    refuse_merging(&asking, &image.path, &notes.images).await?;
    if is_parent(&asking, &image.path).await? {
        let what =
            "it has come here as the parent of a disk that is moved: what is written here would change that disk";
        return Err(Error::new(ErrorKind::Denied, what).at_path(&image.path).hint(
            "open that disk instead, or a new child of this one (spile create --parent); or read this disk only; \
             --write-parent if no disk needs it any more",
        ));
    }
    // A child names its parent by one of the names that the file has.
    for path in std::iter::once(&image.path).chain(&others) {
        match child_of(path, image.identity).await {
            Children::None => {}
            Children::NotAllAsked => {
                let path = path.display();
                tracing::warn!("{path}: not all images in its folder were asked whether they are its children");
            }
            Children::Has(child) => {
                let name = (path != &image.path).then(|| format!("it is the same file as {}: ", path.display()));
                return Err(is_a_parent(&image.path, &child, name.as_deref().unwrap_or_default()).hint(
                    "open the child instead, or a new child of this disk (spile create --parent); or read this disk only; \
                     --write-parent if the child is of no use any more",
                ));
            }
        }
    }
    Ok(())
}

/// Refuses to write to a disk whose image keeps its data in another file, when an image beside that file needs it, too: as its data, or as its parent; and
/// when the name of that file says that it may have parents, which its guest would choose.
///
/// # Errors
/// `Denied`, naming the other image.
pub async fn refuse_shared_data(disk: &Graph<HostStore>) -> Result<()> {
    let leaf = disk.handles()[0].image();
    let (image, data) = (leaf.store(), leaf.data_store());
    if std::ptr::eq(image, data) {
        return Ok(());
    }
    if let Some(format) = names::format_of(data.path()).filter(|format| format.about().has_parents) {
        let shown = data.path().display();
        let what = format!(
            "the name of its data file {shown} is that of a {format} image: its guest could write there which images are its parents"
        );
        let error = Error::new(ErrorKind::Denied, what).at_path(image.path());
        return Err(error.hint("copy the disk: spile convert; or --write-parent, when its guest is trusted"));
    }
    let (found, are_all) = asked(data.path(), None, usize::MAX).await;
    let beside_image = image.path().with_file_name(ANY_NAME);
    let (more, are_more) = match image.path().parent() == data.path().parent() {
        true => (Vec::new(), true),
        false => asked_beside(&beside_image, data.path(), None, usize::MAX).await,
    };
    if !(are_all && are_more) {
        let path = image.path().display();
        tracing::warn!("{path}: not all images in its folder were asked whether they need its data");
    }
    // A snapshot that was broken off has left it a second name, which goes when the disk is open.
    let is_itself = |other: &Path| match (other.metadata(), image.file_id()) {
        (Ok(stat), Some(id)) => FileId::of(&stat) == id,
        _ => other == image.path(),
    };
    match found.into_iter().chain(more).find(|other| !is_itself(other)) {
        None => Ok(()),
        Some(other) => {
            let what =
                format!("{} needs {}, too, which holds the data of this disk", other.display(), data.path().display());
            let error = Error::new(ErrorKind::Denied, what).at_path(image.path());
            Err(error.hint("two images of one data file spoil each other: see which of them is right, and remove the other; --write-parent if that one is of no use"))
        }
    }
}

/// The other names that the file at `path` has in its folder: it was linked by hand, or a merge gives it the name of its child and was broken off before it has lost its own. Reads
/// the folder: not to be called on a worker.
fn other_names(path: &Path) -> Vec<PathBuf> {
    let id = |stat: &std::fs::Metadata| (stat.dev(), stat.ino());
    let (Some(stat), Some(folder)) = (path.metadata().ok().filter(|stat| stat.nlink() > 1), path.parent()) else {
        return Vec::new();
    };
    let others = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    others.filter(|other| other != path && other.metadata().is_ok_and(|other| id(&other) == id(&stat))).collect()
}

/// Refuses to have another disk written over the file at `path`, whatever that holds, when an image in its folder names it as
/// its parent.
///
/// # Errors
/// `Denied`, naming the child, and when not all images could be asked; the system's when there is no such file.
pub async fn refuse_lost_parent(path: &Path) -> Result<()> {
    let whole = OsFiles::default().canonical(path).await?;
    let at = whole.clone();
    let others = run_blocking(path, move || other_names(&at)).await;
    for name in std::iter::once(&whole).chain(&others) {
        // What is in the file is not looked at: a child has lost its parent, too, when another image has taken its name.
        match child_of(name, None).await {
            Children::None => {}
            Children::NotAllAsked => {
                let what = "an image in its folder may be a child of this disk: not all of them could be asked";
                let error = Error::new(ErrorKind::Denied, what).at_path(path);
                return Err(error.hint("choose another place; or say --write-parent if no image needs this one"));
            }
            Children::Has(child) => {
                return Err(is_a_parent(path, &child, "")
                    .hint("choose another place; or say --write-parent if the child is of no use any more"));
            }
        }
    }
    Ok(())
}

/// What the other images in an image's folder say of their parents.
enum Children {
    /// None of them is a child of the image.
    None,
    /// This one is.
    Has(PathBuf),
    /// None of those that were asked is; there are too many of them, or they take too long.
    NotAllAsked,
}

/// Asks the images in the folder of the image at `path`, a canonical path, whether it is their parent.
async fn child_of(path: &Path, identity: Option<Identity>) -> Children {
    let (mut found, are_all) = asked(path, identity, 1).await;
    match found.pop() {
        Some(child) => Children::Has(child),
        None if are_all => Children::None,
        None => Children::NotAllAsked,
    }
}

/// The first `most` images in the folder of the image at `path`, a canonical path, that say that it is their parent. False when some of
/// the folder's images were not asked.
async fn asked(path: &Path, identity: Option<Identity>, most: usize) -> (Vec<PathBuf>, bool) {
    asked_beside(path, path, identity, most).await
}

/// As [`asked`], of the images in the folder of `beside`, but for that itself.
async fn asked_beside(beside: &Path, path: &Path, identity: Option<Identity>, most: usize) -> (Vec<PathBuf>, bool) {
    let ours = beside.to_owned();
    // A guest can write what looks like an image into a raw one: what its name calls raw is not asked.
    let looked =
        run_blocking(path, move || neighbours(&ours, MOST_IMAGES, |other| may_have_parent(other).is_some())).await;
    let Neighbours { images, are_all } = looked;
    let (files, end) = (OsFiles::new(CacheMode::Page).without_locks(true), Instant::now() + PATIENCE);
    let mut found = Vec::new();
    for other in &images {
        if Instant::now() > end {
            return (found, false);
        }
        // An image that cannot be read cannot be used as a child either.
        let Some(format) = may_have_parent(other) else { continue };
        if is_child_of(&files, other, format, path, identity).await.unwrap_or(false)
            && !holds_data(&files, other, &images).await
            && !holds_data(&files, other, &[path.to_owned()]).await
        {
            found.push(other.clone());
        }
        if found.len() >= most {
            break;
        }
    }
    (found, are_all)
}

/// The files that lie in the folders of these images, themselves left out. Each may be a child, whatever its name.
///
/// # Errors
/// `Denied` when a folder has too many to look at, or cannot be read.
pub async fn beside(images: &[LayerInfo]) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for image in images.iter().filter(|image| image.path.is_absolute()) {
        let path = image.path.clone();
        let is_file =
            |other: &Path| other.metadata().is_ok_and(|stat| stat.is_file() || stat.file_type().is_block_device());
        let files = run_blocking(&image.path, move || neighbours(&path, MOST_NAMES, is_file)).await;
        let Neighbours { images, are_all } = files;
        if !are_all {
            let what = "not all images in its folder can be asked whether they are its children";
            return Err(Error::new(ErrorKind::Denied, what).at_path(&image.path));
        }
        found.extend(images);
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// All files that lie in `folder`, sorted, whatever they are.
///
/// # Errors
/// `Denied` when the folder has too many to look at, or cannot be read.
pub async fn files_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let any = folder.join(ANY_NAME);
    let Neighbours { mut images, are_all } = run_blocking(folder, move || neighbours(&any, MOST_NAMES, |_| true)).await;
    if !are_all {
        let error = Error::new(ErrorKind::Denied, "not all files of the folder can be looked at").at_path(folder);
        return Err(error.hint("keep less images in one folder"));
    }
    images.sort_unstable();
    Ok(images)
}

/// No file has this name.
const ANY_NAME: &str = "\0";

/// Images in a folder.
struct Neighbours {
    images: Vec<PathBuf>,
    /// False when the folder has more, or cannot be read.
    are_all: bool,
}

/// The other files in the folder of `path` for which `may_be_child` says yes, `most` at most, behind those that are noted there as children in other folders.
/// None in `/dev`.
fn neighbours(path: &Path, most: usize, may_be_child: impl Fn(&Path) -> bool) -> Neighbours {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let mut found = Neighbours { images: Vec::new(), are_all: true };
    if folder.starts_with("/dev") {
        return found;
    }
    let Ok(entries) = std::fs::read_dir(folder) else { return Neighbours { are_all: false, ..found } };
    let mut here = Vec::new();
    for (number, name) in entries.enumerate() {
        match name.map(|name| name.path()) {
            Ok(other) if number < MOST_NAMES && here.len() < most => {
                if names::disk_of(&other).is_some_and(|image| names::children(&image) == other) {
                    match far_children::read(&other) {
                        Ok(far) => found.images.extend(far.into_iter().filter(|child| may_be_child(child))),
                        // A file that Spile has not made names no children.
                        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                        Err(_) => found.are_all = false,
                    }
                }
                here.extend((other != path && may_be_child(&other)).then_some(other));
            }
            _ => {
                found.are_all = false;
                break;
            }
        }
    }
    found.images.append(&mut here);
    found
}

fn is_a_parent(image: &Path, child: &Path, name: &str) -> Error {
    let what = format!("{name}{} is a child of this disk: what is written here would change it", child.display());
    Error::new(ErrorKind::Denied, what).at_path(image)
}
