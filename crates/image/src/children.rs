//! Does an image name another one as its parent, or as the file that holds its data? Whoever is about to write to an image asks that of its
//! neighbours, because a write there changes what they show.

use std::path::Path;

use spile_core::{Files, OpenMode, Result};

use crate::formats::Format;
use crate::layer::Identity;

/// True when the file at `path` is an image of `format` that names the image at `parent` as its parent: by a path
/// that leads to it, and by its identity if the child expects one and `identity` is known; or as the file that holds its data. `parent` is a canonical path. An identity that
/// does not last says nothing here: the image may have been written to since, and is its child's parent all the same.
///
/// It reads the image's header only, and takes no more from it than the names. The caller must not lock the files that it opens
/// here, for a child may be in use.
///
/// # Errors
/// When the file cannot be opened or read, and when it is no image of `format`.
pub async fn is_child_of<F: Files>(
    files: &F,
    path: &Path,
    format: Format,
    parent: &Path,
    identity: Option<Identity>,
) -> Result<bool> {
    let store = files.open(&path.into(), OpenMode::ReadOnly).await?;
    let folder = path.parent().unwrap_or(Path::new("/"));
    // A name that makes no sense leads to no file.
    if let Ok(Some(name)) = format.named_data_file(&store).await
        && files.canonical(&folder.join(name)).await.is_ok_and(|found| found == parent)
    {
        return Ok(true);
    }
    let Some(named) = format.named_parent(&store).await? else { return Ok(false) };
    let is_other = |expected: Identity, found: Identity| expected != found && Format::lasts(found);
    if matches!((named.identity, identity), (Some(expected), Some(found)) if is_other(expected, found)) {
        return Ok(false);
    }
    for name in &named.names {
        if files.canonical(&folder.join(name)).await.is_ok_and(|found| found == parent) {
            return Ok(true);
        }
    }
    Ok(false)
}
