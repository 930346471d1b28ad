//! A disk goes back to what a snapshot holds: a new, empty leaf over the snapshot takes the disk's path in one step. Nobody uses the disk
//! meanwhile.
//!
//! The new leaf is made as that of a [snapshot](crate::snapshot), and a crash leaves no more: before the rename the disk is as it was, and
//! [`recover`](crate::recover) removes the new leaf.

use std::path::Path;
use std::sync::Arc;

use spile_core::{Env, Error, ErrorKind, Files, Result};
use spile_image::create::NewImage;
use spile_image::layer::Layer;
use spile_image::{Format, Graph, LayerInfo};

use crate::names;
use crate::recover::recover;
use crate::snapshot::{check_extension, child_format, refuse_job, remove_if_there};

/// Has the disk `graph`, which is open for writing here and nowhere else, begin anew as the child `new` of the image with the layers
/// `base`, leaf first. `given` is the format in which the disk is opened, if that was said. What the disk's leaf holds is lost, unless
/// the file has another name.
///
/// # Errors
/// `InvalidInput` when the snapshot needs the disk's own leaf; `Unsupported` when the disk's path would belie the new leaf's format;
/// `NotFound` when the disk's file is not at its path; `Busy` while a job on the disk is not finished; the storage's. The disk is as it
/// was then, unless the hint says that it has gone back: when the storage has failed behind the change of its path.
pub async fn revert<F: Files>(
    files: &F,
    env: Arc<dyn Env>,
    graph: &Graph<F::Store>,
    base: &[LayerInfo],
    new: &NewImage,
    given: Option<Format>,
) -> Result<()> {
    let leaf = graph.handles()[0].clone();
    let (disk, store) = (leaf.path().to_owned(), leaf.image().store());
    refuse_job(files, &disk).await?;
    for layer in base {
        if files.is_at(store, &layer.path).await? {
            let what = format!("{} needs what would be lost: it is {0} itself, or a child of it", disk.display());
            return Err(Error::new(ErrorKind::InvalidInput, what).at_path(&layer.path));
        }
    }
    let Some(format) = base.first().map(|image| child_format(image.format)) else {
        return Err(Error::new(ErrorKind::InvalidInput, "there is no snapshot to go back to"));
    };
    check_extension(&disk, given, format)?;
    if !files.is_at(store, &disk).await? {
        return Err(Error::new(ErrorKind::NotFound, "the disk's file is not at its path any more").at_path(&disk));
    }
    recover(files, graph).await?;
    let made = make(files, env, &disk, format, new).await;
    let new_leaf = names::new_leaf(&disk);
    let placed = match made {
        Ok(()) => files.rename(&new_leaf, &disk).await,
        Err(error) => Err(error),
    };
    match placed {
        Ok(()) => Ok(()),
        // The rename was done, and what failed came behind it.
        Err(error) if !files.is_at(store, &disk).await? => {
            let hint =
                "the disk has gone back, but a power cut may undo that: do it again when the storage is in order";
            Err(error.at_path(&disk).hint(hint))
        }
        Err(error) => remove_if_there(files, &new_leaf).await.and(Err(error)),
    }
}

async fn make<F: Files>(files: &F, env: Arc<dyn Env>, disk: &Path, format: Format, new: &NewImage) -> Result<()> {
    let at = names::new_leaf(disk);
    let store = files.create(&at, 0).await?;
    format.create(&store, &*env, new).await?;
    drop(store);
    files.copy_access(disk, &at).await
}
