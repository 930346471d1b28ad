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
//! loses its name first and has another one then ([`old_image`]), and then the new image gets its own. So **where there is an image at the old path, that is the
//! disk; where there is none, the disk is at the new path**. An old image that has been left behind is
//! never opened by a server that does not know of the move: it finds no file at the path. A note beside the old path
//! ([`names::moved`]) tells where the disk is. A process that ends between the two names leaves neither; both images hold the same then, and
//! the next one that opens the old path gives the old image its name back ([`take_back`]).
//!
//! A process that ends before the hand-over leaves the old image as it was, and half a new one. The note of the job has the next server
//! go on with both: it copies what was not copied yet, and what has changed since the move began ([`progress`]).
//!
//! An export of another host has no hidden name. It is the disk as soon as the old image has lost its name; until then it is half a copy. When
//! it fails, the mirror goes on to mark, and the export is tried again: what was not flushed there is copied again, and what has changed.

mod back;
mod blocks;
mod copier;
mod handover;
mod mirror;
mod note;
mod order;
mod parents;
mod parents_there;
mod pauses;
mod place;
mod progress;
mod received;
mod status;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use spile_core::{Code, Disk, Error, ErrorKind, Files, Locator, OpenMode, Result};
use spile_image::layer::{Identity, Layer};
use spile_image::{Broken, Format, Graph};
use spile_node::{OldEpoch, Stage};

use crate::jobs::note::{Copied, There};
use crate::jobs::{Note, Plan, State, which};
use crate::names;
use crate::snapshot::remove_if_there;
use crate::work::{GraphOf, Work, grain_bytes, refuse_data_file};
pub(crate) use back::BACK_THERE;
use back::Left;
pub use back::{CameFrom, forget_what_is_over};
use copier::{Copier, Failure, Over};
use mirror::Mirror;
pub use note::{Moved, take_back};
pub use order::{ANSWER, ANSWER_BYTES, Below, InChain, Like, Order, is_name, not_now};
use parents::JOINT;
use pauses::Pauses;
use place::Place;
use progress::Progress;
pub(crate) use received::forget_parent;
pub use received::{Place as ReceivedPlace, Received, ReceivedState, Receiver, is_free_here, is_parent};
pub use status::{Motion, Phase, Status};

/// A disk that is to be moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Its new place: the path of a file that is not there, or an export.
    pub to: Locator,
    /// The format of the new image.
    pub format: Format,
    /// The old image is removed once the disk has been handed over.
    pub deletes_source: bool,
    /// The disk's parents are copied as files of their own, and the new image is a child of these. Else it holds all that they show.
    pub keeps_chain: bool,
    /// The disk is not handed over. Its copy stays in step until the job is told to finish.
    pub stays: bool,
    /// The old place, a device or an export, may be left although nothing tells there that the disk is elsewhere.
    pub has_no_mark: bool,
    /// What the other host knows the move by, where it takes disks in: the half-made image there is that of this move.
    pub id: Option<Identity>,
}

/// What a copy marks as a whole, in bytes.
fn block_bytes<F: Files>(work: &Work<'_, F>, size_bytes: u64) -> u64 {
    work.sizes.marked_bytes.unwrap_or_else(|| grain_bytes(size_bytes)).min(work.sizes.piece_bytes)
}

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

/// The path of the disk whose old image is at `image`, if that has the name of one.
pub fn disk_of_old_image(image: &Path) -> Option<PathBuf> {
    let name = image.file_name()?.to_str()?;
    let disk = match name.strip_suffix(".moved") {
        Some(stem) => stem.to_owned(),
        None => {
            let (stem, extension) = name.rsplit_once('.')?;
            format!("{}.{extension}", stem.strip_suffix(".moved")?)
        }
    };
    (!disk.is_empty()).then(|| image.with_file_name(disk))
}

/// Refuses to write to the image at `image`, a whole path, where that is the old image of a disk that was moved away: it lacks what was written since.
///
/// # Errors
/// `Denied` with the place that the disk was moved to, where that is known; the system's.
pub async fn refuse_old_image<F: Files>(files: &F, image: &Path) -> Result<()> {
    let Some(disk) = disk_of_old_image(image) else { return Ok(()) };
    let moved = Moved::read(files, &disk).await?.filter(|moved| moved.image.file_name() == image.file_name());
    let where_to = match &moved {
        Some(moved) => format!(", which was moved to {}", moved.to),
        // The disk is back by another image, and this one was left.
        None if is_marked(files, &disk).await => String::new(),
        None => return Ok(()),
    };
    let name = disk.display();
    let what = format!("this is the old image of the disk {name}{where_to}: it lacks what was written since");
    Err(Error::new(ErrorKind::Denied, what).at_path(image).hint(format!(
        "serve the disk where it is now; `spile delete` removes this image; to give up what was written since and go back to it, rename it to {name}, \
         or say --write-moved to `spile serve`"
    )))
}

/// True when a note beside the path `disk` tells that a disk has gone from there, or come back.
async fn is_marked<F: Files>(files: &F, disk: &Path) -> bool {
    for note in [names::came(disk), names::left(disk), names::received(disk), names::moved(disk)] {
        if !note::is_free(files, &note).await {
            return true;
        }
    }
    false
}

/// Moves the disk as `plan` says, and says in the job how it ended. The note beside the disk is there while it works.
///
/// # Errors
/// What refuses the move; the stores'. The disk is where it was then, with all that it held, unless the error says that the names of both images
/// could not be put back.
pub async fn run<F: Files>(work: &Work<'_, F>, plan: &Move) -> Result<()> {
    let disk = work.disk_path().await;
    let mut place = None;
    let (plan, result) = match next_attempt(work, &disk, plan).await {
        Ok(plan) => {
            let result = begin(work, &plan, &mut place).await;
            (plan, result)
        }
        Err(error) => (plan.clone(), Err(error)),
    };
    let ended = crate::finish(work, &disk, &Plan::Move(plan.clone()), result).await;
    // A job that was stopped may have been cancelled since: nobody goes on with its half.
    if let Some(place) = place.filter(Place::may_have_left)
        && work.job.state() == State::Cancelled
    {
        place.give_left_half_up(work).await;
    }
    ended
}

/// The move `plan` as this process is to do it. When a process before has begun it, and it goes to another host with the disk's parents, this is another attempt,
/// and the note says so first: the other host knows by that which orders are late.
async fn next_attempt<F: Files>(work: &Work<'_, F>, disk: &Path, plan: &Move) -> Result<Move> {
    let is_counted = plan.keeps_chain && matches!(plan.to, Locator::Nbd(_));
    let Some(id) = plan.id.filter(|_| is_counted) else { return Ok(plan.clone()) };
    let next = Move { id: Some(order::next_attempt(id)), ..plan.clone() };
    let (now, then) = (Plan::Move(plan.clone()), Plan::Move(next.clone()));
    Ok(if Note::say_plan(work.files, disk, &now, then).await? { next } else { plan.clone() })
}

async fn begin<F: Files>(work: &Work<'_, F>, plan: &Move, kept: &mut Option<Place>) -> Result<()> {
    let source = work.settled().await?;
    for layer in source.handles() {
        refuse_data_file(layer, "a disk with it is not moved", "copy the disk into one file first: spile convert")?;
    }
    if has_named_copy(work, plan).await? {
        nothing_to_copy(work).set_phase(Phase::Done);
        return Ok(());
    }
    let place = kept.insert(Box::pin(Place::find(work, &source, plan)).await?);
    if let Some(disk) = &place.disk {
        crate::finish_left(work, disk).await?;
        let of = which(&source);
        let note = Note::new(Plan::Move(plan.clone()), work.job.wishes(), of);
        note.write(work.files, disk).await?;
        let note = Note::read(work.files, disk).await?.unwrap_or(note);
        if place.go_on(plan, &note) {
            return Box::pin(name_copy(work, place, plan, &nothing_to_copy(work))).await;
        }
    }
    let progress = Progress::new(place.disk.clone(), &Plan::Move(plan.clone()));
    let moved = Box::pin(move_disk(work, &source, place, plan, &progress)).await;
    if work.job.outcome(&moved.as_ref().map_err(Error::duplicate).map(drop)) != State::Stopped {
        // What stays noted costs a little at each write, and nothing else.
        let _ = progress.end(work).await;
    }
    moved
}

/// The status of a job that has nothing to copy any more.
fn nothing_to_copy<F: Files>(work: &Work<'_, F>) -> Arc<Status> {
    let status = Arc::new(Status::new(Arc::new(Mirror::new(0, block_bytes(work, 0), work.broken))));
    work.job.set_status(status.clone());
    work.job.accept();
    status
}

/// True when a process before has given a copy on this host its name, which it gets when it is whole, and has ended right after that: the file of that name is
/// the half that the note names. Its hidden name goes, and so does what was noted of the disk's changes.
async fn has_named_copy<F: Files>(work: &Work<'_, F>, plan: &Move) -> Result<bool> {
    let (Locator::Path(to), true) = (&plan.to, plan.stays) else { return Ok(false) };
    let note = Note::read(work.files, &work.disk_path().await).await?;
    let note = note.filter(|note| note.plan == Plan::Move(plan.clone()));
    let Some(copied) = note.and_then(|note| note.copied) else { return Ok(false) };
    // Somebody may use it by now.
    let copy = match work.asking.open(&to.into(), OpenMode::ReadOnly).await {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        opened => opened?,
    };
    // Where the parents were copied, too, they are named behind it.
    if place::name_of_half(&copy).as_deref() != copied.half.split(JOINT).next() {
        return Ok(false);
    }
    let hidden = names::moving(to);
    if work.files.is_at(&copy, &hidden).await? {
        work.files.remove_file(&copy, &hidden).await?;
    }
    if let Some(marks) = work.marks {
        // What stays noted costs a little at each write, and nothing else.
        let _ = progress::forget_marks(marks).await;
    }
    Ok(true)
}

/// [`begin`], of a disk whose job has its note.
async fn move_disk<F: Files>(
    work: &Work<'_, F>,
    source: &Arc<GraphOf<F>>,
    place: &mut Place,
    plan: &Move,
    progress: &Progress,
) -> Result<()> {
    let size_bytes = source.size_bytes();
    let mirror = Arc::new(Mirror::new(size_bytes, block_bytes(work, size_bytes), work.broken));
    let status = Arc::new(Status::new(mirror.clone()));
    let target = match Box::pin(open_place(work, source, place, plan, progress, &status)).await {
        Ok(target) => Arc::new(target),
        Err(error) => {
            let was_left = place.keeps_half.get();
            place.keeps_half.set(was_left && has_stopped(work, &error));
            let _ = place.remove(work.files, source, None).await;
            match was_left {
                true if !place.keeps_half.get() => place.give_left_half_up(work).await,
                false if !has_stopped(work, &error) => place.drop_there(work).await,
                _ => {}
            }
            return Err(error);
        }
    };
    let mirroring = Mirroring { mirror, status, place: &*place, progress, plan };
    let error = match Box::pin(mirrored(work, source, target.clone(), &mirroring)).await {
        Ok(()) => return Ok(()),
        Err(Failure::Names(error)) => return Err(error),
        Err(Failure::Disk(error) | Failure::Place(error)) => error,
    };
    place.keeps_half.set(progress.is_noted() && has_stopped(work, &error));
    // Nobody goes on with a job that has failed, either.
    if !has_stopped(work, &error) {
        place.drop_there(work).await;
    }
    let removed = place.remove(work.files, source, Some(&target)).await;
    Err(match removed {
        Err(left) if work.job.outcome(&Err(error.duplicate())) == State::Failed => {
            error.hint(format!("and what was begun could not be removed: {left}"))
        }
        _ => error,
    })
}

/// True when a job that has ended with `error` is gone on with by the next process.
fn has_stopped<F: Files>(work: &Work<'_, F>, error: &Error) -> bool {
    work.job.outcome(&Err(error.duplicate())) == State::Stopped
}

/// How often a half of this host is tried that somebody has open: for some seconds.
const MOST_TRIES: u32 = 10;

/// Opens the new image: the half of a process before, as long as all is known of it; else a new one.
async fn open_place<F: Files>(
    work: &Work<'_, F>,
    source: &Arc<GraphOf<F>>,
    place: &mut Place,
    plan: &Move,
    progress: &Progress,
    status: &Arc<Status>,
) -> Result<GraphOf<F>> {
    let left = match (progress.left(work).await?, &place.disk) {
        (None, Some(disk)) => match &plan.to {
            Locator::Nbd(_) => back::take_there(work, plan, place, source.size_bytes(), (progress, status)).await?,
            _ => back::take_old_image(work, disk, plan, source.size_bytes(), progress).await?,
        },
        (left, _) => left,
    };
    if let Some(copied) = left {
        place.keeps_half.set(true);
        let (pauses, mut tries) = (Pauses::new(), 0);
        let taken = loop {
            tries += 1;
            match place.take_up(work, source, plan, &copied).await {
                // It is a disk of that host by now, and stays so; or nobody knows what it is.
                Err(error) if matches!(error.code(), Some(Code::CopyComplete | Code::CopyUnknown)) => {
                    return Err(error);
                }
                // The other host may come back; and the kernel may not have wound up the process that was killed.
                Err(error) if place.may_come_back() || error.kind() == ErrorKind::Busy && tries < MOST_TRIES => {
                    work.job.set_status(status.clone());
                    status.note_failure(error.to_string());
                    pauses.pass(work).await?;
                }
                taken => break taken?,
            }
        };
        if let Some(target) = taken {
            let half = place.which::<F>(&target).unwrap_or_else(|| copied.half.clone());
            let copied = Copied { half, ..copied };
            progress.say(work, &copied).await?;
            progress.go_on(copied);
            return Ok(target);
        }
        place.keeps_half.set(false);
    }
    if progress.forget(work).await? {
        let why = "all is copied anew: what was copied before, or what has changed since, is not known for certain";
        status.set_trouble(Some(why.to_owned()));
    }
    place.make(work, source, plan, status).await
}

/// What a disk is mirrored with.
struct Mirroring<'a> {
    mirror: Arc<Mirror>,
    status: Arc<Status>,
    place: &'a Place,
    progress: &'a Progress,
    plan: &'a Move,
}

/// Mirrors the disk until it is handed over, or its copy is to be left as it is.
async fn mirrored<F: Files>(
    work: &Work<'_, F>,
    source: &Arc<GraphOf<F>>,
    target: Arc<GraphOf<F>>,
    mirroring: &Mirroring<'_>,
) -> Result<(), Failure> {
    let Mirroring { mirror, status, place, progress, plan } = mirroring;
    work.job.set_status(status.clone());
    work.job.accept();
    let stage: Arc<dyn Stage> = mirror.clone();
    work.node.replace(spile_node::Place::Mirror, Some(stage)).await.map_err(Failure::Disk)?;
    if progress.reached_bytes() == 0
        && let Err(error) = progress.begin(work, place.which::<F>(&target)).await
    {
        status.set_trouble(Some(format!("a kill has the next process begin the move anew: {error}")));
    }
    let copier = Copier::new(work, source, target, mirror, status, (place, progress));
    let done = Box::pin(copier.until_over()).await;
    mirror.release();
    // It can only have been closed: then no request meets the stage any more.
    let _ = work.node.replace(spile_node::Place::Mirror, None).await;
    let target = copier.target();
    let mut is_named = true;
    let tidied = match done {
        Ok(Over::HandedOver(old)) => {
            let doubt = copier.doubt.take();
            let tell = |error: &Error| status.set_trouble(Some(not_named(&plan.to, error)));
            status.set_phase(Phase::Naming);
            let finished = Box::pin(place.finish(work, tell)).await;
            is_named = finished.is_ok();
            let finished = finished.map_err(|_| Error::new(ErrorKind::Busy, not_named_yet(&plan.to)));
            let deletes_source = plan.deletes_source && doubt.is_none() && finished.is_ok();
            let is_left = place.disk.is_some() && !deletes_source;
            status.set_old_image(is_left.then(|| place.moved.image.clone()));
            let left = Leaving { place, source, target: &target, plan, deletes_source };
            let tidied = Box::pin(tidy(work, old, &left, doubt.is_none() && finished.is_ok())).await;
            let carried = copier.not_carried.take().map_or(Ok(()), Err);
            doubt.map_or(Ok(()), Err).and(finished).and(tidied).and(carried)
        }
        Ok(Over::Copied) => {
            let closed = target.close().await;
            Box::pin(name_copy(work, place, plan, status)).await.map_err(Failure::Disk)?;
            closed.and(place.remove_hidden_name(work.files, &target).await)
        }
        Err(failure) => {
            // What it says does not matter any more, but its tasks must end. A place on another host may not answer.
            if !place.may_come_back() && !matches!(failure, Failure::Names(_)) {
                let _ = target.close().await;
            }
            return Err(failure);
        }
    };
    // The disk is at its new place, or its copy is whole, whatever else fails.
    status.set_trouble(tidied.err().map(|error| error.to_string()));
    status.set_phase(if is_named { Phase::Done } else { Phase::Naming });
    Ok(())
}

/// Has a host that takes disks in give the copy its name, which is whole. The disk stays where it is. From the first try on this is all that is left to do, also for
/// the next process.
///
/// # Errors
/// `Shutdown` when the job is told to end, and the copy has no name yet; `TimedOut` when it is cancelled, and nobody knows whether it has.
async fn name_copy<F: Files>(work: &Work<'_, F>, place: &Place, plan: &Move, status: &Status) -> Result<()> {
    if place.moved.finish.is_none() {
        return Ok(());
    }
    if let Some(disk) = place.disk.as_ref().filter(|_| work.broken != Broken::NamingNotNoted) {
        Note::say_there(work.files, disk, &Plan::Move(plan.clone()), There::Naming).await?;
    }
    status.set_phase(Phase::Naming);
    let to = &plan.to;
    let tell = |error: &Error| {
        status
            .set_trouble(Some(format!("the copy {to} is whole, and it is not known whether it has its name: {error}")));
    };
    match place.finish(work, tell).await {
        Err(_) if !work.job.is_stopping() && place.take_copy_back(work).await? => Ok(()),
        Err(told) => Err(told),
        Ok(()) => {
            status.set_trouble(None);
            status.set_phase(Phase::Done);
            Ok(())
        }
    }
}

fn not_named(to: &Locator, error: &Error) -> String {
    format!("{to} is the disk, but its host has not given it its name yet: {error}")
}

fn not_named_yet(to: &Locator) -> String {
    format!(
        "{to} is the disk, but its host has not given it its name yet: whoever opens the disk at its old path has that done"
    )
}

/// What a hand-over leaves behind.
struct Leaving<'a, F: Files> {
    place: &'a Place,
    source: &'a Arc<GraphOf<F>>,
    target: &'a GraphOf<F>,
    plan: &'a Move,
    deletes_source: bool,
}

/// What is left to do when the disk has been handed over: nobody uses the old image any more. `is_durable`: so is the new name. Else the new
/// image keeps its hidden one, or the note says what is left to do.
async fn tidy<F: Files>(
    work: &Work<'_, F>,
    old: OldEpoch<GraphOf<F>>,
    left: &Leaving<'_, F>,
    is_durable: bool,
) -> Result<()> {
    let (files, place, source) = (work.files, left.place, left.source);
    // First of all: nobody gives the old image its name back from now on.
    let noted = match &place.disk {
        Some(disk) => {
            let written = match is_durable || place.moved.finish.is_none() {
                true => place.moved.write_done(files, disk).await,
                false => Ok(()),
            };
            written.and(Plan::Move(left.plan.clone()).remove_own(files, disk).await)
        }
        None => Ok(()),
    };
    old.ended().await;
    drop(old);
    // Whoever goes back takes for granted that it holds all that it was given.
    let flushed = source.flush().await;
    let closed = source.close().await;
    let removed = match is_durable {
        true => place.remove_hidden_name(files, left.target).await,
        false => Ok(()),
    };
    let image = &place.moved.image;
    let is_to_go = left.deletes_source && place.disk.is_some();
    let deleted = match is_to_go && files.is_at(source.handles()[0].image().store(), image).await? {
        true => files.remove_file(source.handles()[0].image().store(), image).await,
        false => Ok(()),
    };
    let way_back = match (&place.disk, &left.plan.to) {
        (Some(disk), Locator::Path(to)) if flushed.is_ok() && closed.is_ok() && is_durable && !is_to_go => {
            old_image_of(source, disk).note(work, to).await
        }
        (Some(disk), Locator::Nbd(_)) if flushed.is_ok() && closed.is_ok() && is_durable && !is_to_go => {
            match place.taken_in() {
                Some(id) => Left { id, image: old_image_of(source, disk) }.note(work).await,
                None => Ok(()),
            }
        }
        _ => Ok(()),
    };
    let forgotten = match &place.disk {
        Some(disk) => remove_if_there(files, &names::came(disk)).await,
        None => Ok(()),
    };
    noted.and(closed).and(removed).and(deleted).and(way_back).and(forgotten)
}

/// `source`, as the old image of a disk whose path was `disk`. What it looks like is not said yet.
fn old_image_of<S: spile_core::Store>(source: &Graph<S>, disk: &Path) -> CameFrom {
    let handles = source.handles();
    CameFrom {
        from: disk.to_owned(),
        format: handles[0].image().format(),
        size_bytes: source.size_bytes(),
        look: String::new(),
        parents: handles[1..].iter().map(|layer| layer.path().to_owned()).collect(),
    }
}

/// Removes the second name of the image of `graph` that a process has left which ended right before a hand-over, or right after one.
pub(crate) async fn remove_second_name<F: Files>(files: &F, graph: &GraphOf<F>) -> Result<()> {
    let leaf = &graph.handles()[0];
    let moving = names::moving(leaf.path());
    if files.is_at(leaf.image().store(), &moving).await? {
        files.remove_file(leaf.image().store(), &moving).await?;
    }
    remove_name_of_old_image(files, leaf.image().store(), leaf.path()).await
}

/// Removes the name that the disk `store` at `disk` gets before it loses its own, and before that the note of that hand-over: it would speak for a half as soon as somebody
/// gives the disk another name.
async fn remove_name_of_old_image<F: Files>(files: &F, store: &F::Store, disk: &Path) -> Result<()> {
    let image = old_image(disk);
    if files.is_at(store, &image).await? && files.is_at(store, disk).await? {
        remove_if_there(files, &names::moved(disk)).await?;
        files.remove_file(store, &image).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn an_old_image_leads_back_to_its_disk() {
        use std::path::Path;
        for disk in ["/vm/disk.vhd", "/vm/disk", "/vm/a.b.qcow2", "/vm/x.moved.raw"] {
            let disk = Path::new(disk);
            assert_eq!(super::disk_of_old_image(&super::old_image(disk)).as_deref(), Some(disk));
        }
        for other in ["/vm/disk.vhd", "/vm/moved.vhd", "/vm/.moved"] {
            assert_eq!(super::disk_of_old_image(Path::new(other)), None, "{other}");
        }
    }

    use super::*;

    #[test]
    fn an_old_image_keeps_its_folder_and_its_extension() {
        let name = |disk: &str| old_image(Path::new(disk)).display().to_string();
        assert_eq!(name("/vm/a.vhd"), "/vm/a.moved.vhd");
        assert_eq!(name("/vm/a.b.raw"), "/vm/a.b.moved.raw");
        assert_eq!(name("/vm/disk"), "/vm/disk.moved");
    }
}
