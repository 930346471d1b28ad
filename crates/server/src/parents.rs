//! How a new child names its parent.

use std::path::{Path, PathBuf};

use spile_core::{Error, ErrorKind, Result, ResultExt as _};
use spile_image::create::NewParent;
use spile_image::{LayerInfo, check_parents};
use spile_life::names::relative;

use crate::new_file::folder_of;

/// Looks whether a child at `child` could be opened with these as its parents, in its folder or in the `allowed` ones.
///
/// # Errors
/// `Denied`; the system's when there is no such folder.
pub fn check_place(child: &Path, parents: &[&Path], allowed: &[PathBuf]) -> Result<()> {
    check_parents(&real(folder_of(child))?, parents, &all_real(allowed)?)
}

/// The path without links and `..`.
///
/// # Errors
/// The system's.
pub fn real(path: &Path) -> Result<PathBuf> {
    path.canonicalize().map_err(|e| Error::io("find", e)).at_path(path)
}

/// As [`real`], of several paths.
///
/// # Errors
/// The system's.
pub fn all_real(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    paths.iter().map(|path| real(path)).collect()
}

/// How a child at `child` names the image `parent`.
///
/// # Errors
/// `InvalidInput` when the parent's path cannot be written down in an image; the system's.
pub fn new_parent(child: &Path, parent: &LayerInfo) -> Result<NewParent> {
    let folder = real(folder_of(child))?;
    let path = real(&parent.path)?;
    let relative_path = relative(&folder, &path).ok_or_else(|| {
        let error = Error::new(ErrorKind::InvalidInput, "an image cannot name a parent whose path is not UTF-8");
        error.at_path(&path).hint("rename the parent, or its folder")
    })?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(NewParent {
        relative_path,
        name,
        format: parent.format,
        identity: parent.identity,
        changed_unix_s: parent.facts.changed_unix_s,
    })
}
