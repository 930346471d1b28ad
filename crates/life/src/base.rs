//! What a clone asks of the image that it is to be a child of.

use std::path::{Path, PathBuf};

use spile_core::{Error, ErrorKind, Files, OpenMode, Result};

use crate::gc::Tools;
use crate::jobs::note::is_there;
use crate::jobs::{Merged, Note, Plan};
use crate::names;

/// Refuses to make a child of the image at `image`, a canonical path, that would lose it or show what it never held. `paths` are the files of
/// its folder. The caller has the image open, and locked against those who write, until the child names it: what is not begun by then cannot
/// begin.
///
/// # Errors
/// `Busy` for a snapshot that was broken off half way, because the next one who opens the disk takes its name away; for an image into
/// which a merge was begun; for a disk with a job that is not finished; and for an image that was deleted, because a merge into it may have been
/// begun, and have failed. The storage's.
pub async fn refuse_unfit<F: Files>(tools: &Tools<'_, F>, image: &Path, paths: &[PathBuf]) -> Result<()> {
    let refuse = |what: String, hint: String| Err(Error::new(ErrorKind::Busy, what).at_path(image).hint(hint));
    let has = async |note: PathBuf| Result::<_>::Ok(paths.contains(&note) && is_there(tools.asking, &note).await?);
    if has(names::gone(image)).await? {
        let hint =
            "make the clone of its child, or of another snapshot; `spile delete --undo` keeps it, if gc has not begun";
        return refuse("the image was deleted, and its child may be in it by now".to_owned(), hint.to_owned());
    }
    if has(names::job(image)).await? {
        let shown = image.display();
        let hint = format!(
            "finish it first: spile gc, or serve the disk; as a parent {shown} could not be written to any more"
        );
        return refuse("a job on the image was begun, and needs to write to it".to_owned(), hint);
    }
    let store = tools.asking.open(&image.into(), OpenMode::ReadOnly).await?;
    for path in paths {
        let Some(disk) = names::disk_of(path) else { continue };
        let shown = disk.display();
        if *path == names::new_leaf(&disk) && disk != image && tools.asking.is_at(&store, &disk).await? {
            let what = format!("a snapshot of {shown} was broken off, and this name goes when the disk is opened");
            return refuse(what, format!("open the disk for writing, or run spile gc; then clone {shown}"));
        }
        if *path == names::job(&disk)
            && let Some(Note { plan: Plan::Coalesce(Merged { parent, .. }), .. }) =
                Note::look(tools.asking, &disk).await?
            && parent == image
        {
            let what = format!("a merge of {shown} into this image was begun");
            return refuse(what, format!("finish it first: spile coalesce {shown} --wait; or clone another image"));
        }
    }
    Ok(())
}

/// Refuses to write to the image at `image`, a canonical path, when the job of another disk merges it into its parent, or another image into it, and was broken
/// off: it may have no child any more and be one of that disk's images all the same. `paths` are the files of its folder.
///
/// # Errors
/// `Denied`; the storage's.
pub async fn refuse_merging<F: Files>(asking: &F, image: &Path, paths: &[PathBuf]) -> Result<()> {
    for path in paths {
        let Some(disk) = names::disk_of(path).filter(|disk| disk != image && *path == names::job(disk)) else {
            continue;
        };
        let Some(Note { plan: Plan::Coalesce(Merged { path, parent, .. }), .. }) = Note::look(asking, &disk).await?
        else {
            continue;
        };
        if path == image || parent == image {
            let what = format!("a merge of images of {} was broken off, and this is one of them", disk.display());
            return Err(Error::new(ErrorKind::Denied, what).at_path(image).hint("spile gc finishes it"));
        }
    }
    Ok(())
}
