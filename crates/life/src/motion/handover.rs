//! The hand-over: the new image takes the place of the old one under the running disk.
//!
//! In this order:
//!
//! 1. The new image is flushed while guests go on, so that little is left; and the old one, which shows whether a sync of it has failed. The note
//!    [`Moved`] is made durable.
//! 2. The disk's gates close, and all requests that began before end. When that takes too long, the gates open again, and it is tried later.
//! 3. What was marked meanwhile is copied, and the new image is flushed. That has a bound, too.
//! 4. The mirror is asked: nothing is marked, nothing is in flight, no flush of a guest has failed. Any doubt ends the move, loudly, and the gates open
//!    to the old image.
//! 5. The old image gets its other name, durably. That is the moment from which on the old image is not the disk any more.
//! 6. The new image gets its name, durably. When that fails, the last step is taken back.
//! 7. The gates open to the new image. Until now nobody has written to it but the copier.

use std::path::Path;
use std::pin::{Pin, pin};
use std::time::Duration;

use futures_util::future::{Either, select};
use spile_core::{Disk, Error, ErrorKind, Files, Locator, Result, ResultExt, Store};
use spile_image::Broken;
use spile_image::layer::Layer;
use spile_node::{ClosedGates, close_gates};

use super::copier::{Copier, Failure, Over};
use super::place::Place;
use crate::work::GraphOf;

/// How long requests that began before may take to their end while the gates are closed.
const IN_FLIGHT_BOUND: Duration = Duration::from_millis(80);
/// How long the rest may take, as long as the gates can open again.
const REST_BOUND: Duration = Duration::from_millis(80);

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
pub(super) async fn attempt<F: Files>(copier: &Copier<'_, '_, F>) -> Result<Tried<F>, Failure> {
    Box::pin(prepare(copier)).await?;
    let new = if copier.place.stays { copier.source.clone() } else { copier.target() };
    let gates = close_gates(vec![(copier.work.node, new)]).await.map_err(Failure::Disk)?;
    let closed_at = gates.closed_at();
    let tried = Box::pin(with_closed_gates(copier, gates)).await;
    copier.status.note_stall(closed_at.elapsed());
    tried
}

/// Step 1.
async fn prepare<F: Files>(copier: &Copier<'_, '_, F>) -> Result<(), Failure> {
    copier.flush().await?;
    let flushed = copier.source.flush().await;
    flushed.map_err(|e| Failure::Disk(e.hint("a flush of the disk fails: what was lost cannot be known")))?;
    Box::pin(prepare_names(copier)).await.map_err(Failure::Disk)
}

async fn prepare_names<F: Files>(copier: &Copier<'_, '_, F>) -> Result<()> {
    let (files, Place { disk, moved, stays, .. }) = (copier.work.files, copier.place);
    if let Locator::Path(to) = &moved.to
        && files.canonical(to).await.is_ok()
    {
        return Err(Error::new(ErrorKind::Exists, "there is a file of the new name by now").at_path(to));
    }
    let Some(disk) = disk.as_ref().filter(|_| !stays) else { return Ok(()) };
    if !files.is_at(copier.source.handles()[0].image().store(), disk).await? {
        return Err(Error::new(ErrorKind::NotFound, "the disk's file is not at its path any more").at_path(disk));
    }
    moved.write(files, disk).await
}

/// Steps 2 to 7.
async fn with_closed_gates<F: Files>(
    copier: &Copier<'_, '_, F>,
    gates: ClosedGates<'_, GraphOf<F>>,
) -> Result<Tried<F>, Failure> {
    let timer = copier.work.timer;
    // Those that are held back have a share of the epoch that is to end.
    copier.mirror.release();
    if copier.work.broken != Broken::HandOverInFlight {
        match select(pin!(gates.quiet()), timer.sleep(IN_FLIGHT_BOUND)).await {
            Either::Left(_) => {}
            Either::Right(_) => return Ok(Tried::PutOff("requests in flight took too long to their end")),
        }
    }
    let Some(gates) = Box::pin(rest(copier, gates)).await? else {
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
) -> Result<Option<ClosedGates<'g, GraphOf<F>>>, Failure> {
    let mut late = copier.work.timer.sleep(REST_BOUND);
    let mut gates = Some(gates);
    let mut at = 0;
    loop {
        let batch = copier.take(&mut at);
        if batch.is_empty() {
            break;
        }
        until_late(&mut gates, &mut late, Box::pin(copier.copy(&batch))).await?;
        if gates.is_none() {
            return Ok(None);
        }
    }
    if copier.work.broken != Broken::HandOverUnflushed {
        until_late(&mut gates, &mut late, Box::pin(copier.flush())).await?;
    }
    Ok(gates)
}

/// Does `work` to its end. When that takes too long, the gates open.
async fn until_late<G>(
    gates: &mut Option<G>,
    late: &mut Pin<Box<dyn Future<Output = ()>>>,
    work: impl Future<Output = Result<(), Failure>>,
) -> Result<(), Failure> {
    match select(pin!(work), late).await {
        Either::Left((done, _)) => done,
        Either::Right(((), work)) => {
            drop(gates.take());
            work.await
        }
    }
}

/// Step 4.
fn ask<F: Files>(copier: &Copier<'_, '_, F>) -> Result<()> {
    if copier.mirror.has_flush_failed() {
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
    let (files, Place { disk, moved, stays, .. }) = (copier.work.files, copier.place);
    let target = copier.target();
    let (old, new) = (copier.source.handles()[0].image().store(), target.handles()[0].image().store());
    let disk = disk.as_deref().filter(|_| !stays);
    if copier.work.broken == Broken::TwoNames {
        give_name(files, copier.place).await.map_err(Failure::Disk)?;
    }
    if let Some(disk) = disk
        && let Err(error) = files.rename(disk, &moved.image).await
    {
        return Err(name_back(files, old, copier.place, error).await);
    }
    let named = match copier.work.broken {
        Broken::TwoNames => Ok(()),
        _ => give_name(files, copier.place).await,
    };
    if let (Err(error), Locator::Path(to)) = (named, &moved.to) {
        // A name that could not be made durable may be there all the same.
        if is_at(files, new, to).await && files.remove(to).await.is_err() && is_at(files, new, to).await {
            // It stays, so the disk is there.
            copier.status.set_trouble(Some(format!("the disk's new name may not survive a power cut: {error}")));
        } else {
            return Err(name_back(files, old, copier.place, error).await);
        }
    }
    if disk.is_some() {
        old.set_path(&moved.image);
    }
    if let Locator::Path(to) = &moved.to {
        new.set_path(to);
    }
    Ok(())
}

async fn is_at<F: Files>(files: &F, store: &F::Store, path: &Path) -> bool {
    files.is_at(store, path).await.unwrap_or(true)
}

/// Gives the new image its name, which no other file has. An export has its name already.
async fn give_name<F: Files>(files: &F, place: &Place) -> Result<()> {
    let (Locator::Path(to), Some(half)) = (&place.moved.to, &place.moved.half) else { return Ok(()) };
    match files.link(half, to).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            if files.canonical(to).await.is_ok() {
                return Err(Error::new(ErrorKind::Exists, "there is a file of the new name by now").at_path(to));
            }
            files.rename(half, to).await
        }
        linked => linked,
    }
    .at_path(to)
}

/// Gives the old image its name back.
async fn name_back<F: Files>(files: &F, old: &F::Store, place: &Place, error: Error) -> Failure {
    let Some(disk) = place.disk.as_deref().filter(|_| !place.stays) else { return Failure::Disk(error) };
    let image = &place.moved.image;
    // What has failed may have happened.
    let back = match is_at(files, old, image).await {
        true => files.rename(image, disk).await,
        false => Ok(()),
    };
    match back {
        Ok(()) => Failure::Disk(error),
        Err(left) => {
            let (disk, image) = (disk.display(), image.display());
            let hint = format!(
                "the disk goes on with its old image, which could not get its name {disk} back ({left}): rename {image} to {disk} \
                 before the disk is opened anew"
            );
            Failure::Names(error.hint(hint))
        }
    }
}
