//! Copies into a disk's leaf what it lacks and its parents have, so that it needs no parent any more. The parents stay as they are.
//!
//! Guests go on meanwhile. What is being copied is kept from their changes piece by piece, so no copy overwrites what a guest has
//! written ([`spile_image::Graph::filling`]). What the leaf lacks is what is left to do, so a process that is killed loses
//! nothing but the piece that it was at.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use spile_core::{Extent, Files, Result};
use spile_image::layer::Layer as _;
use spile_image::{Broken, Known, RangeLock};

use crate::jobs::{Note, Plan, which};
use crate::lanes::{A_TURN, COUNTED_AT_ONCE, Lane, Lanes};
use crate::work::{GraphOf, Work, refuse_inner_snapshots};

/// Flattens the disk, from wherever that was left, and says in the job how it ended.
///
/// # Errors
/// `ReadOnly`; the stores'. What is done by then is valid.
pub async fn flatten<F: Files>(work: &Work<'_, F>) -> Result<()> {
    let disk = work.disk_path().await;
    let result = begin(work).await;
    crate::finish(work, &disk, &Plan::Flatten, result).await
}

async fn begin<F: Files>(work: &Work<'_, F>) -> Result<()> {
    let graph = work.settled().await?;
    if graph.handles().len() == 1 {
        return Ok(());
    }
    refuse_inner_snapshots(&graph.handles()[0], "they read what they lack from its parent")?;
    crate::finish_left(work, graph.handles()[0].path()).await?;
    let note = Note::new(Plan::Flatten, work.job.wishes(), which(&graph));
    note.write(work.files, graph.handles()[0].path()).await?;
    work.job.accept();
    let ranges = Arc::new(RangeLock::default());
    let filling = work.put(graph.filling(&ranges)).await?;
    let filled = fill(work, &filling, &ranges).await;
    let result = match filled {
        Ok(()) => filling.handles()[0].image().set_parent(None).await,
        failed => failed,
    };
    let layers = match &result {
        Ok(()) => graph.handles()[..1].to_vec(),
        Err(_) => graph.handles().to_vec(),
    };
    work.put(graph.with_layers(layers)?).await?;
    result
}

/// Has the leaf hold all that it lacks, piece by piece, and makes it durable. Where it has space, but neither it nor a parent has bytes, it
/// gets zeroes of its own: so little is left to do in the one last step that nobody can pause or stop.
async fn fill<F: Files>(work: &Work<'_, F>, graph: &GraphOf<F>, ranges: &RangeLock) -> Result<()> {
    let size_bytes = crate::work::size_of(&graph.handles()[0]);
    let filler = Filler { work, graph, ranges, size_bytes, lanes: Lanes::new(work), copied_bytes: Cell::new(0) };
    work.job.set_total(filler.lacking_bytes().await?);
    // Guests may give the leaf more space behind a pass.
    for _ in 0..MOST_PASSES {
        if filler.pass().await? <= FEW_PIECES {
            break;
        }
    }
    // What guests wrote themselves needs no copy any more.
    work.job.set_total(filler.copied_bytes.get());
    graph.flush_own().await
}

/// The most passes over a disk. What guests have begun in the last one is left to the last step.
const MOST_PASSES: u32 = 8;
/// A pass that has found no more pieces than this was the last one.
const FEW_PIECES: u64 = 16;

/// So much of a disk is searched at a time.
const WINDOW_BYTES: u64 = 4 << 30;

/// Fills a leaf.
struct Filler<'a, 'w, F: Files> {
    work: &'a Work<'w, F>,
    graph: &'a GraphOf<F>,
    ranges: &'a RangeLock,
    size_bytes: u64,
    lanes: Lanes<'a, 'w, F>,
    copied_bytes: Cell<u64>,
}

/// How far a pass is.
#[derive(Default)]
struct Cursor {
    at: u64,
    pieces: u64,
    /// What parents have next, as it was last looked up: there is nothing before it.
    below: Option<Extent>,
    is_looked_up: bool,
    /// Where the parents' files have data.
    known: Known,
}

impl<F: Files> Filler<'_, '_, F> {
    /// How many bytes the leaf lacks that its parents have.
    async fn lacking_bytes(&self) -> Result<u64> {
        let (mut bytes, mut at, mut known) = (0, 0, Known::default());
        for counted in 1_u64.. {
            let below = async |window| self.graph.next_stored_below(window, &mut known).await;
            let Some(run) = self.search(at..self.size_bytes, below).await? else { break };
            (bytes, at) = (bytes + run.len_bytes, run.end());
            if counted.is_multiple_of(COUNTED_AT_ONCE) {
                self.work.timer.sleep(A_TURN).await;
                // Cold maps of a large disk take hours.
                self.work.job.go_on().await?;
            }
        }
        Ok(bytes)
    }

    /// The first that `look` finds in `range`. The way to it may lead over terabytes of holes, so the job is asked in between whether it may go on.
    async fn search(
        &self,
        range: Range<u64>,
        mut look: impl AsyncFnMut(Extent) -> Result<Option<Extent>>,
    ) -> Result<Option<Extent>> {
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min(at + WINDOW_BYTES);
            if let Some(found) = look(Extent::from_range(at..end)).await? {
                return Ok(Some(found));
            }
            at = end;
            self.work.job.go_on().await?;
        }
        Ok(None)
    }

    /// Fills all that the leaf lacks, from the start of the disk to its end. Returns how many pieces that were.
    async fn pass(&self) -> Result<u64> {
        let cursor = async_lock::Mutex::new(Cursor::default());
        let step = async |lane: &Lane<'_, '_, F>| {
            let next = self.next(&mut *cursor.lock().await, lane.piece_bytes()).await?;
            let Some(piece) = next else { return Ok(false) };
            self.piece(lane, piece).await.map(|()| true)
        };
        self.lanes.run(step).await?;
        Ok(cursor.into_inner().pieces)
    }

    /// The next piece that lacks something, `most_bytes` long at most.
    async fn next(&self, cursor: &mut Cursor, most_bytes: u64) -> Result<Option<Extent>> {
        let at = cursor.at;
        if !cursor.is_looked_up || cursor.below.is_some_and(|below| below.start() < at) {
            let known = &mut cursor.known;
            let below = async |window| self.graph.next_stored_below(window, known).await;
            cursor.below = self.search(at..self.size_bytes, below).await?;
            cursor.is_looked_up = true;
        }
        let until = cursor.below.map_or(self.size_bytes, |below| below.start());
        let unfilled = self.search(at..until, async |window| self.graph.next_unfilled(window).await).await?;
        let Some(next) = unfilled.or(cursor.below) else { return Ok(None) };
        let start = (next.start() / most_bytes * most_bytes).max(at);
        let piece = Extent::from_range(start..self.size_bytes.min((start / most_bytes + 1) * most_bytes));
        (cursor.at, cursor.pieces) = (piece.end(), cursor.pieces + 1);
        Ok(Some(piece))
    }

    /// Fills `piece`.
    async fn piece(&self, lane: &Lane<'_, '_, F>, piece: Extent) -> Result<()> {
        let fill = async {
            let _alone = match self.work.broken {
                Broken::CopyWithoutLock => None,
                _ => Some(self.ranges.exclusive(piece.start()..piece.end()).await),
            };
            let copied_bytes = self.graph.copy_up(piece, lane.buffer()).await?;
            self.copied_bytes.set(self.copied_bytes.get() + copied_bytes);
            self.graph.own_zeroes(piece).await?;
            Ok(copied_bytes)
        };
        lane.piece(fill).await?;
        self.work.job.set_done(self.copied_bytes.get());
        Ok(())
    }
}
