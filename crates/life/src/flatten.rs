//! Copies into a disk's leaf what it lacks and its parents have, so that it needs no parent any more. The parents stay as they are.
//!
//! Guests go on meanwhile. What is being copied is kept from their changes piece by piece, so no copy overwrites what a guest has
//! written ([`spile_image::Graph::filling`]). What the leaf lacks is what is left to do, so a process that is killed loses
//! nothing but the piece that it was at.

use std::sync::Arc;

use spile_core::{Extent, Files, Result, Segments};
use spile_image::layer::Layer as _;
use spile_image::{Broken, RangeLock};

use crate::jobs::{Note, Plan};
use crate::work::{GraphOf, Work};

/// Flattens the disk, from wherever that was left, and says in the job how it ended.
///
/// # Errors
/// `ReadOnly`; `Unsupported` for a format that must have a parent; the stores'. What is done by then is valid.
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
    crate::finish_left(work, graph.handles()[0].path()).await?;
    let note = Note { plan: Plan::Flatten, wishes: work.job.wishes() };
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
    let buffer = Segments::zeroed(work.sizes.piece_bytes as usize);
    work.job.set_total(size_bytes);
    let filler = Filler { work, graph, ranges, size_bytes, buffer };
    // Guests may give the leaf more space behind a pass.
    for _ in 0..MOST_PASSES {
        if filler.pass().await? <= FEW_PIECES {
            break;
        }
    }
    work.job.set_done(size_bytes);
    graph.flush_own().await
}

/// The most passes over a disk. What guests have begun in the last one is left to the last step.
const MOST_PASSES: u32 = 8;
/// A pass that has found no more pieces than this was the last one.
const FEW_PIECES: u64 = 16;

/// Fills a leaf.
struct Filler<'a, 'w, F: Files> {
    work: &'a Work<'w, F>,
    graph: &'a GraphOf<F>,
    ranges: &'a RangeLock,
    size_bytes: u64,
    buffer: Segments,
}

impl<F: Files> Filler<'_, '_, F> {
    /// Fills all that the leaf lacks, from the start of the disk to its end. Returns how many pieces that were.
    async fn pass(&self) -> Result<u64> {
        let (mut at, mut pieces) = (0, 0);
        let mut below = self.graph.next_below(Extent::from_range(0..self.size_bytes)).await?;
        loop {
            if below.is_some_and(|below| below.start() < at) {
                below = self.graph.next_below(Extent::from_range(at..self.size_bytes)).await?;
            }
            let until = below.map_or(self.size_bytes, |below| below.start());
            let unfilled = self.graph.next_unfilled(Extent::from_range(at..until)).await?;
            let Some(next) = unfilled.or(below) else { return Ok(pieces) };
            at = self.piece(next.start()).await?;
            pieces += 1;
        }
    }

    /// Fills the piece around `at`, and returns its end.
    async fn piece(&self, at: u64) -> Result<u64> {
        let Work { job, timer, broken, sizes, .. } = self.work;
        let start = at / sizes.piece_bytes * sizes.piece_bytes;
        let piece = Extent::from_range(start..self.size_bytes.min(start + sizes.piece_bytes));
        job.set_done(start.max(job.report().done_bytes));
        let fill = async {
            let _alone = match broken {
                Broken::CopyWithoutLock => None,
                _ => Some(self.ranges.exclusive(piece.start()..piece.end()).await),
            };
            self.graph.copy_up(piece, &self.buffer).await?;
            self.graph.own_zeroes(piece).await
        };
        job.piece(*timer, piece.len_bytes, || self.work.guests(), fill).await?;
        Ok(piece.end())
    }
}
