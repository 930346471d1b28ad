//! Takes back what a process that was killed has left of a snapshot it was making.
//!
//! A new leaf under its name for the time of its making was never in use. It names the snapshot's path as its parent's; when the
//! disk's own file has that name as well, the second name was given for it. Both go: the name first, because only the new leaf
//! tells of it. When the new leaf has taken the disk's path already, it is empty, and reads as the snapshot: that name only has to be durable
//! before anything is written.

use std::path::{Path, PathBuf};

use spile_core::{ErrorKind, Files, OpenMode, Result};
use spile_image::{Format, Graph};

use crate::names;
use crate::snapshot::{child_format, remove_if_there};

/// Makes the disk's name durable, removes what is left of a snapshot of the disk that `graph` is, and returns the paths. The caller has the disk open for
/// writing, and nobody else can work on it.
///
/// # Errors
/// The system's; `Busy` while a process that was killed has the new leaf open still.
pub async fn recover<F: Files>(files: &F, graph: &Graph<F::Store>) -> Result<Vec<PathBuf>> {
    let leaf = &graph.handles()[0];
    let disk = leaf.path().to_owned();
    // A process that was killed may have given this file the disk's path, and nothing more: a power cut would give the path back to the old
    // file, and take away all that was written since.
    files.sync_names(&disk).await?;
    crate::motion::remove_second_name(files, graph).await?;
    let new_leaf = names::new_leaf(&disk);
    let Some(named) = named_parent(files, &new_leaf, child_format(leaf.image().format())).await? else {
        return Ok(Vec::new());
    };
    let mut removed = Vec::new();
    for name in named {
        let path = disk.with_file_name(name);
        let store = spile_image::layer::Layer::store(leaf.image());
        if path != disk && files.is_at(store, &path).await? {
            files.remove_file(store, &path).await?;
            remove_if_there(files, &names::set(&path)).await?;
            removed.push(path);
        }
    }
    remove_if_there(files, &new_leaf).await?;
    removed.push(new_leaf);
    Ok(removed)
}

/// The file names under which a half-made leaf has its parent; none when it was not made far enough to say. `None` when there is no
/// such leaf.
async fn named_parent<F: Files>(files: &F, at: &Path, format: Format) -> Result<Option<Vec<PathBuf>>> {
    let store = match files.open(&at.into(), OpenMode::ReadOnly).await {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        store => store?,
    };
    let parent = match format.named_parent(&store).await {
        Ok(parent) => parent,
        // What the storage does not give may be the name that is asked for.
        Err(error) if error.kind() == ErrorKind::Io => return Err(error),
        Err(_) => None,
    };
    let names = parent.map(|parent| parent.names).unwrap_or_default();
    Ok(Some(names.iter().filter_map(|name| name.file_name()).map(PathBuf::from).collect()))
}
