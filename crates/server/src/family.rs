//! Keeps a parent from being written: a write to it would change, without a word, what its children show.
//!
//! A parent does not know its children. So the other images of its folder are asked, and no more than a bounded number for
//! a bounded time: children in other folders are not found, nor those that are not looked at. Children are opened without
//! locks, for reading only.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use spile_core::{Error, ErrorKind, Result, Store};
use spile_engine::run_blocking;
use spile_image::{Format, Graph, LayerInfo, is_child_of};
use spile_store::{CacheMode, OsFiles};

/// The most names in a folder that are looked at.
const MOST_NAMES: usize = 16 << 10;
/// The most images of a folder that are opened.
const MOST_IMAGES: usize = 2048;
/// How long is looked, at most about.
const PATIENCE: Duration = Duration::from_secs(3);

/// Refuses a disk whose image is the parent of another one in its folder.
///
/// # Errors
/// `Denied`, naming the child.
pub async fn refuse_parent<S: Store>(disk: &Graph<S>) -> Result<()> {
    let Some(image) = disk.layers().into_iter().next().filter(|image| image.path.is_absolute()) else { return Ok(()) };
    let path = image.path.clone();
    let images = run_blocking(&image.path, move || neighbours(&path)).await;
    let (files, end) = (OsFiles::new(CacheMode::Page).without_locks(true), Instant::now() + PATIENCE);
    for (number, other) in images.iter().enumerate() {
        if Instant::now() > end {
            let left = images.len() - number;
            tracing::warn!(
                "{}: {left} images in its folder were not asked whether they are its children",
                image.path.display()
            );
            break;
        }
        // An image that cannot be read cannot be used as a child either.
        if is_child_of(&files, other, &image).await.unwrap_or(false) {
            return Err(is_a_parent(&image, other));
        }
    }
    Ok(())
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

fn is_a_parent(image: &LayerInfo, child: &Path) -> Error {
    let what = format!("{} is a child of this disk: what is written here would change it", child.display());
    Error::new(ErrorKind::Denied, what).at_path(&image.path).hint(
        "open the child instead, or a new child of this disk (spile create --parent); or read this disk only; \
         --write-parent if the child is of no use any more",
    )
}
