//! Moves a disk to another place while it is used.
//!
//! 1. A new image is made beside its place to be, under a hidden name ([`names::moving`]), and a [`mirror`] marks what guests change.
//! 2. What the disk holds is copied, and then again what has changed meanwhile, until little is left ([`copier`]). When guests write faster than
//!    that, their writes are held back for a bounded time each.
//! 3. The disk is handed over ([`handover`]): for a moment no request runs, the rest is copied, and the new image takes the place of the old one.
//!
//! # Which image is the disk
//!
//! Until the hand-over it is the old one, and nobody can take the new one for it: it has no name but the hidden one. At the hand-over the old image
//! gets another name first ([`old_image`]), and then the new image gets its own. So **where there is an image at the old path, that is the
//! disk; where there is none, the disk is at the new path**, at every moment and for every program. An old image that has been left behind is
//! never opened by a server that does not know of the move: it finds no file at the path. A note beside the old path
//! ([`names::moved`]) tells where the disk is. A process that ends between the two names leaves neither; both images hold the same then, and
//! the next one that opens the old path gives the old image its name back ([`take_back`]).
//!
//! A process that ends before the hand-over leaves the old image as it was, and half a new one. The note of the job has the next server
//! begin anew.

mod blocks;
mod copier;
mod handover;
mod mirror;
mod note;
mod status;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use spile_core::{Disk, Error, ErrorKind, Files, Locator, OpenMode, Result, ResultExt, Store};
use spile_image::create::NewImage;
use spile_image::layer::Layer;
use spile_image::{Format, Graph, OpenOptions};
use spile_node::{Aligned, Place, Stage};

use crate::jobs::{Note, Plan};
use crate::names;
use crate::snapshot::remove_if_there;
use crate::work::{GraphOf, Work};
use copier::Copier;
use mirror::Mirror;
pub use note::{Moved, take_back};
pub use status::{Motion, Phase, Status};

/// A disk that is to be moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Its new place.
    pub to: Locator,
    /// The format of the new image.
    pub format: Format,
    /// The old image is removed once the disk has been handed over.
    pub deletes_source: bool,
}

/// What is marked as a whole, unless less is copied at once.
const BLOCK_BYTES: u64 = 64 << 10;

/// The name that the old image at `disk` gets at the hand-over.
pub fn old_image(disk: &Path) -> PathBuf {
    let mut name = disk.file_stem().unwrap_or_default().to_owned();
    name.push(".moved");
    if let Some(extension) = disk.extension() {
        name.push(".");
        name.push(extension);
    }
    disk.with_file_name(name)
}

/// Moves the disk as `plan` says, and says in the job how it ended. The note beside the disk is there while it works.
///
/// # Errors
/// What refuses the move; the stores'. The disk is where it was then, with all that it held, unless the error says that the rest of a hand-over
/// could not be taken back.
pub async fn run<F: Files>(work: &Work<'_, F>, plan: &Move) -> Result<()> {
    let disk = work.disk_path().await;
    let result = begin(work, plan).await;
    crate::finish(work, &disk, &Plan::Move(plan.clone()), result).await
}

async fn begin<F: Files>(work: &Work<'_, F>, plan: &Move) -> Result<()> {
    let source = work.settled().await?;
    let disk = source.handles()[0].path().to_owned();
    let Locator::Path(to) = &plan.to else {
        return Err(Error::new(ErrorKind::Unsupported, format!("a disk cannot be moved to {}", plan.to)));
    };
    check(work, &source, &disk, to).await?;
    crate::finish_left(work, &disk).await?;
    let note = Note { plan: Plan::Move(plan.clone()), wishes: work.job.wishes() };
    note.write(work.files, &disk).await?;
    let half = names::moving(to);
    let target = match Box::pin(make(work, plan.format, &source, &half)).await {
        Ok(target) => Arc::new(target),
        Err(error) => {
            remove_if_there(work.files, &half).await?;
            return Err(error);
        }
    };
    let moved = Moved { to: to.clone(), image: old_image(&disk), half: half.clone() };
    let done = Box::pin(mirrored(work, &source, &target, &moved, plan)).await;
    match done {
        Ok(()) => Ok(()),
        Err((error, handover::Left::Nothing)) => {
            // What it says does not matter any more, but its tasks must end.
            let _ = target.close().await;
            drop(target);
            let removed = remove_if_there(work.files, &half).await;
            let noted = remove_if_there(work.files, &names::moved(&disk)).await;
            Err(match removed.and(noted) {
                Err(left) if work.job.outcome(&Err(error.duplicate())) == crate::jobs::State::Failed => {
                    error.hint(format!("and what was begun is left at {} ({left})", half.display()))
                }
                _ => error,
            })
        }
        Err((error, handover::Left::BothImages)) => Err(error),
    }
}

/// Refuses what cannot be moved, before anything is made, and removes what an earlier move has left.
async fn check<F: Files>(work: &Work<'_, F>, source: &GraphOf<F>, disk: &Path, to: &Path) -> Result<()> {
    let store = source.handles()[0].image().store();
    if !disk.is_absolute() || !store.info().grows_zeroed {
        let what = "only a disk in a file can be moved: a device or an export cannot tell the next server that it is not the disk any more";
        return Err(Error::new(ErrorKind::Unsupported, what).at_path(disk).hint("copy it: spile convert"));
    }
    if !work.files.is_at(store, disk).await? {
        return Err(Error::new(ErrorKind::NotFound, "the disk's file is not at its path any more").at_path(disk));
    }
    for (path, what) in [(to.to_owned(), "there is a file of the new name already"), (old_image(disk), OLD_IMAGE)] {
        if work.files.canonical(&path).await.is_ok() {
            return Err(Error::new(ErrorKind::Exists, what).at_path(&path).hint("remove it, or give it another name"));
        }
    }
    remove_half(work.files, &names::moving(to)).await
}

const OLD_IMAGE: &str = "there is an old image of an earlier move already, of the name that the disk's image would get";

/// Removes a half-made image that nobody works on any more.
async fn remove_half<F: Files>(files: &F, half: &Path) -> Result<()> {
    match files.open(&half.into(), OpenMode::ReadWrite).await {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == ErrorKind::Busy => {
            let error = Error::new(ErrorKind::Busy, "another disk is being moved to this place").at_path(half);
            Err(error.hint("`spile jobs` shows it"))
        }
        Err(error) => Err(error),
        Ok(store) => {
            drop(store);
            files.remove(half).await
        }
    }
}

/// Makes the new image, as large as the disk, and opens it.
async fn make<F: Files>(work: &Work<'_, F>, format: Format, source: &GraphOf<F>, half: &Path) -> Result<GraphOf<F>> {
    let new = NewImage { size_bytes: source.size_bytes(), subformat: None, parent: None, unit_bytes: None };
    let store = work.files.create(half, 0).await?;
    format.create(&store, &**work.env, &new).await?;
    drop(store);
    work.files.copy_access(source.handles()[0].path(), half).await?;
    let options = OpenOptions { format: Some(format), ..OpenOptions::default() };
    let target = Graph::open(work.files, work.env.clone(), half, &options).await?;
    check_fits(source, &target).at_path(half)?;
    target.begin();
    Ok(target)
}

/// Refuses an image that could not take the disk's place, before it is filled.
fn check_fits<S: Store>(source: &Graph<S>, target: &Graph<S>) -> Result<()> {
    let (new, old) = (target.info(), source.info());
    if new.size_bytes != old.size_bytes {
        let what = format!("the new image has {} bytes, and the disk {}", new.size_bytes, old.size_bytes);
        return Err(Error::new(ErrorKind::InvalidInput, what).hint("choose a format that can have this size: raw"));
    }
    if new.request_align_bytes > old.request_align_bytes || new.memory_align_bytes > old.memory_align_bytes {
        let (new, old) = (new.request_align_bytes, old.request_align_bytes);
        let what = format!("the new image takes requests in units of {new} bytes, and guests may use units of {old}");
        return Err(Error::new(ErrorKind::Unsupported, what).hint("move the disk while nobody serves it"));
    }
    Ok(())
}

/// Mirrors the disk until it is handed over.
async fn mirrored<F: Files>(
    work: &Work<'_, F>,
    source: &Arc<GraphOf<F>>,
    target: &Arc<GraphOf<F>>,
    moved: &Moved,
    plan: &Move,
) -> Result<(), (Error, handover::Left)> {
    let nothing = |error| (error, handover::Left::Nothing);
    let mirror = Arc::new(Mirror::new(source.size_bytes(), BLOCK_BYTES.min(work.sizes.piece_bytes), work.broken));
    let status = Arc::new(Status::new(mirror.clone()));
    work.job.set_status(status.clone());
    work.job.accept();
    let stage: Arc<dyn Stage> = mirror.clone();
    work.node.replace(Place::Mirror, Some(stage)).await.map_err(nothing)?;
    let copier = Copier::new(work, Aligned::new(source.clone()), Aligned::new(target.clone()), &mirror, &status);
    let done = Box::pin(copier.until_over(moved)).await;
    mirror.release();
    let detached = work.node.replace(Place::Mirror, None).await;
    let old = match done {
        Ok(old) => old,
        Err(failed) => return Err(failed),
    };
    // From here on the disk is at its new place, whatever else fails.
    drop(detached);
    status.set_old_image((!plan.deletes_source).then(|| moved.image.clone()));
    let tidied = Box::pin(tidy(work, old, source, moved, plan)).await;
    status.set_trouble(tidied.err().map(|error| error.to_string()));
    status.set_phase(Phase::Done);
    Ok(())
}

/// What is left to do when the disk has been handed over: nobody uses the old image any more.
async fn tidy<F: Files>(
    work: &Work<'_, F>,
    old: spile_node::OldEpoch<GraphOf<F>>,
    source: &Arc<GraphOf<F>>,
    moved: &Moved,
    plan: &Move,
) -> Result<()> {
    old.ended().await;
    drop(old);
    let closed = source.close().await;
    let removed = remove_if_there(work.files, &moved.half).await;
    let deleted = match plan.deletes_source {
        true => remove_if_there(work.files, &moved.image).await,
        false => Ok(()),
    };
    closed.and(removed).and(deleted)
}

/// Removes the second name of the image of `graph` that a process has left which ended right after a hand-over.
pub(crate) async fn remove_second_name<F: Files>(files: &F, graph: &GraphOf<F>) -> Result<()> {
    let leaf = &graph.handles()[0];
    let half = names::moving(leaf.path());
    match files.is_at(leaf.image().store(), &half).await? {
        true => files.remove(&half).await,
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_image_keeps_its_folder_and_its_extension() {
        let name = |disk: &str| old_image(Path::new(disk)).display().to_string();
        assert_eq!(name("/vm/a.vhd"), "/vm/a.moved.vhd");
        assert_eq!(name("/vm/a.b.raw"), "/vm/a.b.moved.raw");
        assert_eq!(name("/vm/disk"), "/vm/disk.moved");
    }
}
