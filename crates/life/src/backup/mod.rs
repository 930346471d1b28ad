//! Backups: what disks held at one point in time, read while guests go on to change them.
//!
//! # Copy before write
//! From the point in time on, a stage sees each request that changes the disk. The disk is divided into units, of 4 KiB up to 128 GiB and of
//! 64 KiB from 2 TiB on. Before a request changes a unit that the backup has not read yet, the unit is *saved*: read from the disk into memory, and
//! then written to the *fleece*, a sparse file without a name on a local disk. Whoever reads the backup takes saved units from there, and all
//! others from the disk. A request does not wait for the fleece unless more is in memory than is allowed.
//!
//! So a target that is slow, or hangs for ever, costs a guest no more than one save of each unit. A unit that was read for the backup is never
//! saved again, and its space in the fleece is freed.
//!
//! # Rules
//! 1. A request goes on once its units are *clear*: saved, or read by the backup. Several requests to one unit share one save.
//! 2. The backup reads a unit from the disk, then looks whether it was saved, and only then makes it clear: all of it under one lock. A unit
//!    that was saved by then may have been changed while it was read, so it is read again from the fleece.
//! 3. All disks get their stages while all their gates are closed ([`spile_node::hold_gates`]). Requests that began before end before anything is
//!    copied ([`OldEpoch::ended`]); nobody waits for them otherwise. What they write may be in the backup or not, as after a power cut: none of
//!    them was answered at the point in time.
//! 4. A save never fails a request. When the fleece fails, is full, or takes too long, the backup fails, alone, and requests go on.

mod copy;
mod digests;
mod put;
mod saver;

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use spile_core::{Disk, Env, ErrorKind, Extent, ExtentKind, ExtentStatus, Files, Io, Result, Segments, Store, Timer};
use spile_node::{Node, OldEpoch, Place, Stage, hold_gates};

use crate::names;
use crate::work::MOST_GRAIN_BYTES;
pub use copy::{Copied, Copy};
pub use digests::{Digests, PIECE_BYTES, Summer};
pub use put::{Beneath, data_runs, put, zero};
use saver::{Saver, Saving};

/// What [`Around::most_kept_bytes`] is in a server.
pub const KEPT_BYTES: u64 = 8 << 20;
/// Runs of a map that are asked for at a time.
const RUNS_AT_ONCE: usize = 256;

/// A rule that the simulator breaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Broken {
    /// No rule.
    #[default]
    Nothing,
    /// A unit is saved after the request that changes it.
    SavedLate,
    /// What was saved while it was read is not read again.
    NotReadAgain,
    /// The backup reads from the fleece what is still only in memory.
    FleeceTooEarly,
}

/// What a backup needs of the world around.
#[derive(Clone)]
pub struct Around {
    /// Begins saves beside the requests.
    pub env: Arc<dyn Env>,
    /// Says when a save has taken too long.
    pub timer: Arc<dyn Timer>,
    /// The unit in which requests are watched, in bytes, a power of two up to 64 KiB; `None`: what fits the disk's size.
    pub unit_bytes: Option<u64>,
    /// So many bytes at most are saved and not written to the fleece yet. With more, requests wait for the fleece.
    pub most_kept_bytes: u64,
    /// A rule that the simulator breaks.
    pub broken: Broken,
}

/// A disk of which a backup is to be made.
pub struct Subject<'a, S, G: Disk> {
    /// The disk.
    pub node: &'a Arc<Node<G>>,
    /// Where saved units are kept.
    pub fleece: S,
    /// The most bytes that the fleece may hold at once.
    pub limit_bytes: u64,
    /// How much room the fleece has.
    pub room: Room,
}

/// Says how many bytes more a fleece may take from its file system now; `None` when nobody knows.
pub type Room = Box<dyn Fn() -> Pin<Box<dyn Future<Output = Option<u64>>>> + Send + Sync>;

/// The room of a fleece that shares its space with nobody.
pub fn any_room() -> Room {
    Box::new(|| Box::pin(std::future::ready(None)))
}

/// What a disk held at a point in time. It must be ended by [`PointInTime::end`]; dropped, it has requests go on, but the stage stays.
pub struct PointInTime<S: Store, G: Disk> {
    saver: Arc<Saver<S, G>>,
    /// The stage was taken away, or somebody is just about to.
    has_ended: AtomicBool,
}

/// A part of the disk's map, of whole pieces or up to the disk's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub extent: Extent,
    pub is_hole: bool,
}

/// A file for what is saved of the disk at `disk`, beside it or in `folder`. It has no name once this returns: it ends with the process.
///
/// # Errors
/// The system's.
pub async fn fleece<F: Files>(files: &F, disk: &Path, folder: Option<&Path>, len_bytes: u64) -> Result<F::Store> {
    let beside = names::fleece(disk);
    let path = match folder {
        Some(folder) => folder.join(beside.file_name().unwrap_or_default()),
        None => beside,
    };
    let mut tries = 0;
    let store = loop {
        match files.create(&path, len_bytes.next_multiple_of(MOST_GRAIN_BYTES)).await {
            // A process has died between the two steps, or another backup is just there: neither needs the name.
            Err(error) if error.kind() == ErrorKind::Exists && tries < MOST_TRIES => {
                tries += 1;
                remove(files, &path).await?;
            }
            created => break created?,
        }
    };
    // Where somebody has taken the name since, it is not this file's.
    crate::snapshot::remove_own(files, &store, &path).await?;
    Ok(store)
}

/// So often is a name tried that is taken.
const MOST_TRIES: u32 = 8;

async fn remove<F: Files>(files: &F, path: &Path) -> Result<()> {
    match files.remove(path).await {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// A backup's point in time, and the requests of the disk that were under way then.
pub type Begun<S, G> = (PointInTime<S, G>, OldEpoch<G>);

/// Makes this moment the point in time of a backup of all these disks.
///
/// # Errors
/// `InvalidInput` when a disk is named twice; `Busy` when there is a backup of one of them already; `Shutdown` when one is closed.
pub async fn begin<S: Store, G: Disk>(subjects: Vec<Subject<'_, S, G>>, around: &Around) -> Result<Vec<Begun<S, G>>> {
    let nodes: Vec<&Node<G>> = subjects.iter().map(|subject| &**subject.node).collect();
    let mut gates = hold_gates(&nodes).await?;
    let new = |subject: Subject<'_, S, G>| {
        Saver::new(subject.node, subject.fleece, subject.limit_bytes, subject.room, around)
    };
    let savers: Vec<_> = subjects.into_iter().map(new).collect();
    let stage = |saver: &Arc<Saver<S, G>>| Arc::new(Saving(saver.clone())) as Arc<dyn Stage>;
    gates.attach(Place::Backup, savers.iter().map(stage).collect())?;
    let points = savers.into_iter().map(|saver| PointInTime { saver, has_ended: AtomicBool::new(false) });
    Ok(points.zip(gates.open()).collect())
}

impl<S: Store, G: Disk> Drop for PointInTime<S, G> {
    fn drop(&mut self) {
        self.saver.end();
    }
}

impl<S: Store, G: Disk> PointInTime<S, G> {
    /// The size of the disk in bytes at the point in time.
    pub fn size_bytes(&self) -> u64 {
        self.saver.size_bytes()
    }

    /// Bytes that the fleece holds now.
    pub fn held_bytes(&self) -> u64 {
        self.saver.held_bytes()
    }

    /// Waits until the backup has failed.
    pub async fn failed(&self) {
        self.saver.failed().await;
    }

    /// Fails when the backup has.
    ///
    /// # Errors
    /// Why it has failed; `Shutdown` when it was ended.
    pub fn check(&self) -> Result<()> {
        self.saver.check()
    }

    /// Has requests go on as if there were no backup, and frees the fleece's space. A second call does nothing more: by then the stage may be that
    /// of the next backup.
    pub async fn end(&self) {
        self.saver.end();
        if self.has_ended.swap(true, Ordering::SeqCst) {
            return;
        }
        if let Ok(node) = self.saver.node() {
            // There is none when the disk is closed.
            let _ = node.detach(Place::Backup).await;
        }
        // Nobody waits for storage that hangs.
        let saver = self.saver.clone();
        if !self.saver.spawn(Box::pin(async move { saver.free().await })) {
            self.saver.free().await;
        }
    }

    /// The disk's map from `at`, a piece's begin, on: parts of whole pieces, in order. Holes are told as the disk is now; units that were saved
    /// in them are no holes.
    pub(crate) async fn parts(&self, at: u64) -> Result<Vec<Part>> {
        let size = self.size_bytes();
        let node = self.saver.node()?;
        let runs = node.look(async |graph| graph.extents(Extent::from_range(at..size), RUNS_AT_ONCE).await).await?;
        Ok(parts_of_map(at, size, &runs))
    }

    /// Fills `into` with the bytes of `extent`, which begins with a unit, as they were at the point in time. Each unit can be taken once.
    pub(crate) async fn take(&self, extent: Extent, into: &Segments) -> Result<()> {
        let node = self.saver.node()?;
        node.look(async |graph| graph.execute(Io::read(extent, into)).await).await?;
        drop(node);
        self.saver.take(extent, into).await
    }

    /// As [`PointInTime::take`], of an extent that [`PointInTime::take_hole`] was told of: what was not saved by then was zero. The disk is not
    /// read, as requests may have changed it since.
    pub(crate) async fn take_saved(&self, extent: Extent, into: &Segments) -> Result<()> {
        into.fill(0);
        self.saver.take(extent, into).await
    }

    /// Says that `extent` holds nothing as the disk is now. The result are the places of the units in it that were saved, and have to
    /// be taken by [`PointInTime::take_saved`].
    pub(crate) fn take_hole(&self, extent: Extent) -> Vec<u64> {
        let saved = self.saver.pass_over(extent);
        saved.into_iter().map(|unit| self.saver.offset_of(unit)).collect()
    }

    /// Says that the backup does not need `extent`, whatever it holds.
    pub(crate) async fn leave_out(&self, extent: Extent) {
        let saved = self.saver.pass_over(extent);
        self.saver.forget(saved.into_iter()).await;
    }

    /// Counts requests to the disk. It changes when there were some.
    pub(crate) fn guests(&self) -> u64 {
        use spile_core::metrics::Op;
        let Ok(node) = self.saver.node() else { return 0 };
        let reading = node.meter().read();
        Op::ALL.iter().map(|op| reading.op(*op).ended).sum()
    }
}

/// The parts that a map tells of, which was asked for from `at`, a piece's begin, to `size`: one piece at least. What the map does not
/// reach of that piece counts as data.
fn parts_of_map(at: u64, size: u64, runs: &[ExtentStatus]) -> Vec<Part> {
    let until = runs.last().map_or(at, |run| run.extent.end()).min(size);
    let whole = if until < size { until / PIECE_BYTES * PIECE_BYTES } else { size };
    let end = whole.max(size.min(at + PIECE_BYTES));
    let data = runs.iter().filter(|run| run.kind == ExtentKind::Data).map(|run| run.extent);
    let unknown = (until < end).then(|| Extent::from_range(until..end));
    parts(at, end, data.chain(unknown))
}

/// Cuts `at..end` into parts: pieces that have some of `data`, and runs of pieces that have not.
fn parts(at: u64, end: u64, data: impl Iterator<Item = Extent>) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    let mut done = at;
    let mut add = |until: u64, is_hole: bool| {
        if until > done {
            parts.push(Part { extent: Extent::from_range(done..until), is_hole });
            done = until;
        }
    };
    for run in data {
        add((run.start() / PIECE_BYTES * PIECE_BYTES).min(end), true);
        add(run.end().next_multiple_of(PIECE_BYTES).min(end), false);
    }
    add(end, true);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_whole_pieces_and_cover_everything() {
        let p = PIECE_BYTES;
        let data = [(p + 5, p + 6), (p + 9, p + 10), (4 * p - 1, 4 * p + 1)].map(|(a, b)| Extent::from_range(a..b));
        let found: Vec<_> = parts(0, 6 * p + 512, data.into_iter())
            .iter()
            .map(|part| (part.extent.start() / p, part.extent.end().div_ceil(p), part.is_hole))
            .collect();
        assert_eq!(found, [(0, 1, true), (1, 2, false), (2, 3, true), (3, 5, false), (5, 7, true)]);
        assert_eq!(parts(p, 2 * p, std::iter::empty()), [Part { extent: Extent::from_range(p..2 * p), is_hole: true }]);
    }

    #[test]
    fn what_a_map_does_not_reach_is_no_hole() {
        let p = PIECE_BYTES;
        let hole =
            |start, end| ExtentStatus { extent: Extent::from_range(start..end), kind: ExtentKind::Hole, depth: 0 };
        let part = |start, end, is_hole| Part { extent: Extent::from_range(start..end), is_hole };
        // It ends inside the first piece, at its begin, inside a later piece, and at the disk's end.
        assert_eq!(parts_of_map(p, 9 * p, &[hole(p, p + 512)]), [part(p, 2 * p, false)]);
        assert_eq!(parts_of_map(p, 9 * p, &[]), [part(p, 2 * p, false)]);
        assert_eq!(parts_of_map(p, 9 * p, &[hole(p, 3 * p + 512)]), [part(p, 3 * p, true)]);
        assert_eq!(parts_of_map(p, p + 512, &[hole(p, p + 512)]), [part(p, p + 512, true)]);
    }
}
