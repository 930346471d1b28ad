//! Keeps a parent from being written: a write to it would change, without a word, what its children show.
//!
//! A parent does not know its children. So the other images of its folder are asked, and no more than a bounded number for
//! a bounded time: children in other folders are not found, nor those that are not looked at. Children are opened without
//! locks, for reading only.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use spile_core::{Error, ErrorKind, Files as _, Result};
use spile_engine::run_blocking;
use spile_image::layer::Identity;
use spile_image::{Format, LayerInfo, is_child_of};
use spile_store::{CacheMode, OsFiles};

/// The most names in a folder that are looked at.
const MOST_NAMES: usize = 16 << 10;
/// The most images of a folder that are opened.
const MOST_IMAGES: usize = 2048;
/// How long is looked, at most about.
const PATIENCE: Duration = Duration::from_secs(3);

/// Refuses a disk, by its layers, whose image is the parent of another one in its folder.
///
/// # Errors
/// `Denied`, naming the child.
pub async fn refuse_parent(layers: &[LayerInfo]) -> Result<()> {
    let Some(image) = layers.first().filter(|image| image.path.is_absolute()) else { return Ok(()) };
    match child_of(&image.path, image.identity).await {
        None => Ok(()),
        Some(child) => Err(is_a_parent(&image.path, &child).hint(
            "open the child instead, or a new child of this disk (spile create --parent); or read this disk only; \
             --write-parent if the child is of no use any more",
        )),
    }
}

/// Refuses to have another disk written over the file at `path`, whatever that holds, when an image in its folder names it as
/// its parent.
///
/// # Errors
/// `Denied`, naming the child; the system's when there is no such file.
pub async fn refuse_lost_parent(path: &Path) -> Result<()> {
    let whole = OsFiles::default().canonical(path).await?;
    // What is in the file is not looked at: a child has lost its parent, too, when another image has taken its name.
    match child_of(&whole, None).await {
        None => Ok(()),
        Some(child) => Err(is_a_parent(path, &child)
            .hint("choose another place; or say --write-parent if the child is of no use any more")),
    }
}

/// An image in the folder of the image at `path`, a canonical path, that names it as its parent.
async fn child_of(path: &Path, identity: Option<Identity>) -> Option<PathBuf> {
    let ours = path.to_owned();
    let images = run_blocking(path, move || neighbours(&ours)).await;
    let (files, end) = (OsFiles::new(CacheMode::Page).without_locks(true), Instant::now() + PATIENCE);
    for (number, other) in images.iter().enumerate() {
        if Instant::now() > end {
            let left = images.len() - number;
            let path = path.display();
            tracing::warn!("{path}: {left} images in its folder were not asked whether they are its children");
            return None;
        }
        // An image that cannot be read cannot be used as a child either.
        if is_child_of(&files, other, path, identity).await.unwrap_or(false) {
            return Some(other.clone());
        }
    }
    None
}

/// The other images in the folder of `path` that can have parents.
fn neighbours(path: &Path) -> Vec<PathBuf> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    if folder.starts_with("/dev") {
        return Vec::new();
    }
    let Ok(names) = std::fs::read_dir(folder) else { return Vec::new() };
    let paths = names.take(MOST_NAMES).filter_map(|name| name.ok()).map(|name| name.path());
    let may_be_child = |other: &PathBuf| {
        other != path && Format::from_extension(other).is_some_and(|format| format.about().has_parents)
    };
    paths.filter(may_be_child).take(MOST_IMAGES).collect()
}

fn is_a_parent(image: &Path, child: &Path) -> Error {
    let what = format!("{} is a child of this disk: what is written here would change it", child.display());
    Error::new(ErrorKind::Denied, what).at_path(image)
}
