//! The hand-over: the new image takes the place of the old one under the running disk.
//!
//! In this order:
//!
//! 1. The new image is flushed while guests go on, so that little is left; and the old one, which shows whether a sync of it has failed. The note
//!    [`Moved`](super::Moved) is made durable. A host that takes disks in hears that its image may be the disk from now on.
//! 2. The disk's gates close, and all requests that began before end. When that takes too long, the gates open again, and it is tried later.
//! 3. What was marked meanwhile is copied, and the new image is flushed. That has a bound, too.
//! 4. The mirror is asked: nothing is marked, nothing is in flight, no flush of a guest has failed. Any doubt ends the move, loudly, and the gates open
//!    to the old image.
//! 5. The old image, which has got its other name before, loses its own, durably. That is the moment from which on the old image is not the disk any more.
//! 6. The new image gets its name, durably. When that fails, the last step is taken back: where there is an image at the old path, it is the disk.
//! 7. The gates open to the new image. Until now nobody has written to it but the copier.

use std::cell::Cell;
use std::fmt::Write as _;
use std::path::Path;
use std::pin::{Pin, pin};
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use spile_core::{
    Disk, Error, ErrorKind, Files, Locator, OpenMode, Result, ResultExt, Segments, Store, StoreOffset, Via,
};
use spile_image::Broken;
use spile_image::layer::Layer;
use spile_node::{ClosedGates, close_gates};

use super::back::{BACK, back_there};
use super::copier::{Copier, Failure, Over};
use super::note::{is_free, refuse_taken, refuse_unfinished, rename_to_free};
use super::order;
use super::place::Place;
use crate::names;
use crate::snapshot::remove_if_there;
use crate::work::{GraphOf, Later, Marks};

/// How long requests that began before may take to their end while the gates are closed, and then the rest, as long as the gates can open
/// again: at first.
const FIRST_BOUND: Duration = Duration::from_millis(80);
/// Both bounds are doubled so often at most: to 1.28 s.
const MOST_DOUBLINGS: u32 = 4;

/// So often the disk's checkpoints are sent to another host whose link fails.
const MOST_SENDINGS: u32 = 10;

/// What a hand-over may cost. The more of them were put off, the more.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    /// How often [`FIRST_BOUND`] is doubled.
    doublings: u32,
}

impl Bounds {
    /// After so many hand-overs that were put off.
    pub fn after(put_off: u32) -> Self {
        Self { doublings: (put_off / 2).min(MOST_DOUBLINGS) }
    }

    fn each(self) -> Duration {
        FIRST_BOUND * (1 << self.doublings)
    }

    /// How long guests are left alone after a hand-over that was put off.
    pub fn pause(self) -> Duration {
        self.each() * 4
    }
}

/// What has become of a hand-over.
pub(super) enum Tried<F: Files> {
    /// It is done.
    Over(Over<F>),
    /// It would have taken too long: why. Guests go on with the old image.
    PutOff(&'static str),
}

/// Tries to hand the disk over; or, when it is to stay, to end its copy at one point in time.
///
/// # Errors
/// Those of both images, and what the mirror says. Guests go on with the old image.
pub(super) async fn attempt<F: Files>(copier: &Copier<'_, '_, F>, bounds: Bounds) -> Result<Tried<F>, Failure> {
    forget_what_was_there(copier).await.map_err(Failure::Disk)?;
    carry(copier).await?;
    let tried = Box::pin(attempt_prepared(copier, bounds)).await;
    if let Some(marks) = copier.work.marks {
        let is_there = matches!(tried, Ok(Tried::Over(Over::HandedOver(_))));
        if let Err(error) = marks.carried(is_there).await {
            copier.not_carried.set(Some(error));
        }
    }
    tried
}

/// Removes what a process before, or a disk that was there, has left beside the new path: it would be taken for what has changed of this disk, or for where it came from.
async fn forget_what_was_there<F: Files>(copier: &Copier<'_, '_, F>) -> Result<()> {
    let Locator::Path(to) = &copier.place.moved.to else { return Ok(()) };
    // Another disk may have got the name since the move began: these files are its own then.
    refuse_taken(copier.work.files, to).await?;
    remove_if_there(copier.work.files, &names::changes(to)).await?;
    remove_if_there(copier.work.files, &names::came(to)).await
}

/// Has the disk's checkpoints lie beside the new image, too. False when there is none, or they cannot go along, which is no reason to stay.
///
/// # Errors
/// Of a place that may come back: then it is tried again.
async fn carry<F: Files>(copier: &Copier<'_, '_, F>) -> Result<bool, Failure> {
    let Place { disk, moved, stays, .. } = copier.place;
    let Some(marks) = copier.work.marks else { return Ok(false) };
    if copier.place.taken_in().is_some() {
        return Box::pin(send(copier, marks)).await;
    }
    let (Some(_), Some(half), Locator::Path(to), false) = (disk, &moved.half, &moved.to, *stays) else {
        return Ok(false);
    };
    // The way back to where the disk was before this place is not known any more.
    let _ = marks.end(BACK).await;
    let since = (!copier.place.deletes_source).then_some(BACK);
    let carries = marks.carry(half, to, since).await;
    copier.not_carried.set(None);
    Ok(carries.unwrap_or_else(|error| copier.leave_checkpoints(error)))
}

/// [`carry`], to a host that takes the disk in. Nothing is copied meanwhile: so what changes from now on comes to that host after it has these, and is noted there.
async fn send<F: Files>(copier: &Copier<'_, '_, F>, marks: &dyn Marks) -> Result<bool, Failure> {
    let place = copier.place;
    copier.not_carried.set(None);
    let is_kept = place.disk.is_some() && !place.stays && !place.deletes_source;
    let since = place.taken_in().filter(|_| is_kept).map(back_there);
    let packed = match marks.pack(since.as_deref(), !place.stays).await {
        Ok(Some(len_bytes)) => place.marks_there(len_bytes).map(|there| (len_bytes, there)),
        Ok(None) => None,
        Err(error) => return Ok(copier.leave_checkpoints(error)),
    };
    let Some((len_bytes, (file, whole))) = packed else { return Ok(false) };
    let sent = pin!(send_to(copier, marks, (&file, len_bytes), &whole));
    let sent = match select(sent, pin!(copier.work.job.told_to_end())).await {
        Either::Left((sent, _)) => sent,
        Either::Right(_) => Err(Error::new(ErrorKind::Shutdown, "the job was told to end")),
    };
    let Err(error) = sent else { return Ok(true) };
    let _ = marks.carried(false).await;
    if error.kind() == ErrorKind::Shutdown {
        return Err(Failure::Disk(error));
    }
    let is_refused = matches!(error.kind(), ErrorKind::Denied | ErrorKind::NotFound | ErrorKind::Unsupported);
    copier.unsent.set(copier.unsent.get() + 1);
    match is_refused || copier.unsent.get() >= MOST_SENDINGS {
        true => Ok(copier.leave_checkpoints(error)),
        false => Err(Failure::Place(error)),
    }
}

async fn send_to<F: Files>(
    copier: &Copier<'_, '_, F>,
    marks: &dyn Marks,
    (file, len_bytes): (&Locator, u64),
    whole: &Locator,
) -> Result<()> {
    let files = copier.work.files;
    let store = files.open(file, OpenMode::ReadWrite).await?;
    if store.len_bytes() != len_bytes {
        let what = "this is not the file of changed blocks that was asked for";
        return Err(Error::new(ErrorKind::Denied, what).at_path(Path::new(&file.to_string())));
    }
    let there = &store;
    let put = move |at: u64, bytes: Segments| -> Later<'_, ()> {
        Box::pin(async move { there.write_at(StoreOffset(at), &bytes, Via::Direct).await })
    };
    marks.send(&put).await?;
    store.sync().await?;
    drop(store);
    order::give(files, whole).await
}

async fn attempt_prepared<F: Files>(copier: &Copier<'_, '_, F>, bounds: Bounds) -> Result<Tried<F>, Failure> {
    // Guests went on while checkpoints were copied.
    Box::pin(copier.catch_up()).await?;
    Box::pin(prepare(copier)).await?;
    // From here on nothing ends the hand-over from outside.
    copier.work.job.go_on().await.map_err(Failure::Disk)?;
    if copier.mirror.lag_bytes() > copier.rest_bytes() << bounds.doublings {
        return Ok(Tried::PutOff("guests wrote too much while the new place was flushed"));
    }
    let new = if copier.place.stays { copier.source.clone() } else { copier.target() };
    let gates = close_gates(vec![(copier.work.node, new)]).await.map_err(Failure::Disk)?;
    let closed_at = gates.closed_at();
    let late = Late { each: bounds.each(), closed_at, opened_after: Cell::new(None) };
    let tried = Box::pin(with_closed_gates(copier, gates, &late)).await;
    copier.status.note_stall(late.opened_after.get().unwrap_or_else(|| closed_at.elapsed()));
    tried
}

/// How long the gates may be closed, and were when it took too long.
struct Late {
    each: Duration,
    closed_at: Instant,
    opened_after: Cell<Option<Duration>>,
}

/// Step 1.
async fn prepare<F: Files>(copier: &Copier<'_, '_, F>) -> Result<(), Failure> {
    copier.flush().await?;
    let flushed = copier.source.flush().await;
    flushed.map_err(|e| Failure::Disk(e.hint("a flush of the disk fails: what was lost cannot be known")))?;
    Box::pin(prepare_names(copier)).await.map_err(Failure::Disk)?;
    // Last of all, and before the old image loses its name: what is there is nobody's half any more that may be removed.
    Box::pin(copier.place.tell_hand_over(copier.work)).await.map_err(Failure::Place)
}

/// Once for all attempts: the note, and the second name of the old image.
async fn prepare_names<F: Files>(copier: &Copier<'_, '_, F>) -> Result<()> {
    if copier.is_named.get() {
        return Ok(());
    }
    let (files, Place { disk, moved, stays, .. }) = (copier.work.files, copier.place);
    if let Locator::Path(to) = &moved.to {
        refuse_taken(files, to).await?;
    }
    check_names(copier).await?;
    if let Some(disk) = disk.as_ref().filter(|_| !stays) {
        if let Locator::Path(to) = &moved.to {
            // Where a disk went that was there says nothing about this one, once it has got there.
            refuse_unfinished(files, to, None).await?;
            remove_if_there(files, &names::moved(to)).await?;
        }
        // In this order: whoever finds the disk with both names knows that the note is of this hand-over, and removes it.
        let old = copier.source.handles()[0].image().store();
        match files.link_file((old, disk), &moved.image).await {
            // Without second names it is renamed at the hand-over.
            Err(error) if error.kind() == ErrorKind::Unsupported => refuse_taken(files, &moved.image).await?,
            linked => linked?,
        }
        if copier.work.broken != Broken::NotNoted {
            moved.write(files, disk).await?;
        }
    }
    copier.is_named.set(true);
    Ok(())
}

/// Refuses to go on when one of the images has lost its name.
async fn check_names<F: Files>(copier: &Copier<'_, '_, F>) -> Result<()> {
    let (files, Place { disk, stays, .. }) = (copier.work.files, copier.place);
    copier.place.check_half(files, copier.target().handles()[0].image().store()).await?;
    match disk.as_ref().filter(|_| !stays) {
        Some(disk) if !files.is_at(copier.source.handles()[0].image().store(), disk).await? => {
            Err(Error::new(ErrorKind::NotFound, "the disk's file is not at its path any more").at_path(disk))
        }
        _ => Ok(()),
    }
}

/// Steps 2 to 7.
async fn with_closed_gates<F: Files>(
    copier: &Copier<'_, '_, F>,
    gates: ClosedGates<'_, GraphOf<F>>,
    late: &Late,
) -> Result<Tried<F>, Failure> {
    let timer = copier.work.timer;
    // Those that are held back have a share of the epoch that is to end.
    copier.mirror.release();
    if copier.work.broken != Broken::HandOverInFlight {
        match select(pin!(gates.quiet()), timer.sleep(late.each)).await {
            Either::Left(_) => {}
            Either::Right(_) => return Ok(Tried::PutOff("requests in flight took too long to their end")),
        }
    }
    let Some(gates) = Box::pin(rest(copier, gates, late)).await? else {
        return Ok(Tried::PutOff("the rest took too long to be copied"));
    };
    ask(copier).map_err(Failure::Disk)?;
    Box::pin(take_names(copier)).await?;
    if copier.place.stays {
        return Ok(Tried::Over(Over::Copied));
    }
    let old = gates.open().into_iter().next().expect("one disk has one old epoch");
    Ok(Tried::Over(Over::HandedOver(old)))
}

/// Step 3. `None`, with the gates open, when it takes too long.
async fn rest<'g, F: Files>(
    copier: &Copier<'_, '_, F>,
    gates: ClosedGates<'g, GraphOf<F>>,
    late: &Late,
) -> Result<Option<ClosedGates<'g, GraphOf<F>>>, Failure> {
    let mut bound = copier.work.timer.sleep(late.each);
    let mut gates = Some(gates);
    let mut at = 0;
    loop {
        let batch = copier.take(&mut at);
        if batch.is_empty() {
            break;
        }
        until_late(&mut gates, &mut bound, late, Box::pin(copier.copy(&batch))).await?;
        if gates.is_none() {
            return Ok(None);
        }
    }
    if copier.work.broken != Broken::HandOverUnflushed {
        until_late(&mut gates, &mut bound, late, Box::pin(copier.flush())).await?;
    }
    Ok(gates)
}

/// Does `work` to its end. When that takes too long, the gates open.
async fn until_late<G>(
    gates: &mut Option<G>,
    bound: &mut Pin<Box<dyn Future<Output = ()>>>,
    late: &Late,
    work: impl Future<Output = Result<(), Failure>>,
) -> Result<(), Failure> {
    match select(pin!(work), bound).await {
        Either::Left((done, _)) => done,
        Either::Right(((), work)) => {
            if gates.take().is_some() {
                late.opened_after.set(Some(late.closed_at.elapsed()));
            }
            work.await
        }
    }
}

/// Step 4.
fn ask<F: Files>(copier: &Copier<'_, '_, F>) -> Result<()> {
    let has_failed_sync = copier.source.handles().iter().any(|layer| layer.image().store().has_failed_sync());
    if has_failed_sync || copier.mirror.has_flush_failed() {
        let what = "a flush of the disk has failed: what was lost cannot be known, and the new image may lack it";
        return Err(Error::new(ErrorKind::Denied, what));
    }
    if !copier.mirror.is_in_step() && copier.work.broken != Broken::HandOverInFlight {
        let what = format!("the copy lacks {} bytes at the last moment: the disk stays", copier.mirror.lag_bytes());
        return Err(Error::new(ErrorKind::Busy, what));
    }
    Ok(())
}

/// Steps 5 and 6.
async fn take_names<F: Files>(copier: &Copier<'_, '_, F>) -> Result<(), Failure> {
    let (files, place) = (copier.work.files, copier.place);
    let target = copier.target();
    let (old, new) = (copier.source.handles()[0].image().store(), target.handles()[0].image().store());
    let disk = place.disk.as_deref().filter(|_| !place.stays);
    check_names(copier).await.map_err(Failure::Disk)?;
    if copier.work.broken == Broken::TwoNames {
        give_name(files, place, new).await.map_err(Failure::Disk)?;
        place.finish(copier.work, |_| {}).await.map_err(Failure::Disk)?;
    }
    if let Some(disk) = disk
        && let Err(error) = lose_name(files, old, disk, &place.moved.image).await
    {
        return Err(match name_back(files, old, place).await {
            Ok(()) => Failure::Disk(error),
            Err(left) => Box::pin(names_lost(copier, error, &left)).await,
        });
    }
    let named = match copier.work.broken {
        Broken::TwoNames => Ok(()),
        _ => give_name(files, place, new).await,
    };
    if let Err(error) = named {
        give_up(copier, old, new, error).await?;
    }
    if disk.is_some() {
        old.set_path(&place.moved.image);
    }
    if let Locator::Path(to) = &place.moved.to {
        new.set_path(to);
    }
    // All of it is durable. From now on guests write to it.
    new.set_copy(false);
    Ok(())
}

/// True when `path` is known to name the file of `store`.
async fn is_at<F: Files>(files: &F, store: &F::Store, path: &Path) -> bool {
    files.is_at(store, path).await.unwrap_or(false)
}

/// Takes the old image its name `disk`. It is at `image` then, where it has a second name already if it can have one.
async fn lose_name<F: Files>(files: &F, old: &F::Store, disk: &Path, image: &Path) -> Result<()> {
    match files.is_at(old, image).await? {
        true => files.remove_file(old, disk).await,
        false => rename_to_free(files, (old, disk), image).await,
    }
}

/// Gives the new image, which is `new`, its name, which no other file has. An export has its name already.
async fn give_name<F: Files>(files: &F, place: &Place, new: &F::Store) -> Result<()> {
    let (Locator::Path(to), Some(half)) = (&place.moved.to, &place.moved.half) else { return Ok(()) };
    match files.link_file((new, half), to).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            refuse_taken(files, to).await?;
            files.rename_file((new, half), (to, None)).await
        }
        linked => linked,
    }
    .at_path(to)?;
    match files.is_at(new, to).await? {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Busy, "another file has got the new name").at_path(to)),
    }
}

/// The new image could not get its name, durably, because of `error`: the old image gets its name back, and is the disk, whatever has the new
/// name.
///
/// # Errors
/// `error`; none when the old image cannot get its name back and the new one has its own, so that this is where the disk is found.
async fn give_up<F: Files>(
    copier: &Copier<'_, '_, F>,
    old: &F::Store,
    new: &F::Store,
    error: Error,
) -> Result<(), Failure> {
    let (files, place) = (copier.work.files, copier.place);
    let back = name_back(files, old, place).await;
    let Locator::Path(to) = &place.moved.to else {
        return Err(match back {
            Ok(()) => Failure::Disk(error),
            Err(left) => Box::pin(names_lost(copier, error, &left)).await,
        });
    };
    match back {
        Ok(()) => {
            // What has failed may have happened.
            let is_left =
                is_at(files, new, to).await && files.remove_file(new, to).await.is_err() && is_at(files, new, to).await;
            let hint = || format!("the disk stays; {} could not be removed: do that", to.display());
            Err(Failure::Disk(if is_left { error.hint(hint()) } else { error }))
        }
        // A name that has come back, but perhaps not for good, is the disk all the same.
        Err(left) if is_at(files, new, to).await && !has_disk_name(files, old, place).await => {
            let what = format!(
                "the disk's new name may not survive a power cut ({error}), and the old image could not get its name back ({left})"
            );
            copier.doubt.set(Some(Error::new(ErrorKind::Io, what).at_path(to)));
            Ok(())
        }
        Err(left) => {
            if is_at(files, new, to).await {
                let _ = files.remove_file(new, to).await;
            }
            Err(Box::pin(names_lost(copier, error, &left)).await)
        }
    }
}

async fn has_disk_name<F: Files>(files: &F, old: &F::Store, place: &Place) -> bool {
    match &place.disk {
        Some(disk) => is_at(files, old, disk).await,
        None => false,
    }
}

/// Gives the old image, which is `old`, its name back. A second name is left to [`Place::remove`].
async fn name_back<F: Files>(files: &F, old: &F::Store, place: &Place) -> Result<()> {
    let Some(disk) = place.disk.as_deref().filter(|_| !place.stays) else { return Ok(()) };
    // What has failed may not have happened.
    if is_at(files, old, disk).await {
        return Ok(());
    }
    let image = &place.moved.image;
    match files.link_file((old, image), disk).await {
        Err(error) if error.kind() == ErrorKind::Unsupported && is_free(files, disk).await => {
            files.rename_file((old, image), (disk, None)).await
        }
        linked => linked,
    }
}

/// The failure `error` of a hand-over after which the old image could not get its name back, because of `left`. The gates are still closed.
async fn names_lost<F: Files>(copier: &Copier<'_, '_, F>, error: Error, left: &Error) -> Failure {
    let place = copier.place;
    let Some(disk) = &place.disk else { return Failure::Names(error) };
    let (path, image) = (disk.display(), place.moved.image.display());
    let mut hint = format!(
        "the disk goes on with its old image, which could not get its name {path} back ({left}): rename {image} to {path} \
         before the disk is opened anew"
    );
    // What another host has is older than the disk as soon as a guest writes: nobody may take it for the disk when there is no file at the old path after
    // a crash. Once half and note are gone, nobody gives it its name.
    if place.may_come_back() {
        let note = names::moved(disk);
        if let Err(left) = remove_if_there(copier.work.files, &note).await {
            let _ = write!(hint, ", and remove {} ({left})", note.display());
        }
        place.drop_there(copier.work).await;
        let _ = write!(hint, "; {} is not the disk", place.moved.to);
    }
    Failure::Names(error.hint(hint))
}
