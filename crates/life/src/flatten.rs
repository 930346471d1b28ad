//! Copies into a disk's leaf what it lacks and its parents have, so that it needs no parent any more. The parents stay as they are.
//!
//! Guests go on meanwhile. What is being copied is kept from their changes piece by piece, so no copy overwrites what a guest has
//! written ([`spile_image::Graph::filling`]). What the leaf lacks is what is left to do, so a process that is killed loses
//! nothing but the piece that it was at.

use std::sync::Arc;

use spile_core::{Extent, Files, Result, Segments};
use spile_image::layer::Layer as _;
use spile_image::{Broken, RangeLock};

use crate::jobs::Plan;
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
    Plan::Flatten.write(work.files, graph.handles()[0].path()).await?;
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

/// Copies all that the leaf lacks, and makes it durable.
async fn fill<F: Files>(work: &Work<'_, F>, graph: &GraphOf<F>, ranges: &RangeLock) -> Result<()> {
    let size_bytes = crate::work::size_of(&graph.handles()[0]);
    let piece_bytes = work.sizes.piece_bytes;
    let buffer = Segments::zeroed(piece_bytes as usize);
    work.job.set_total(size_bytes);
    let mut at = 0;
    while let Some(next) = graph.next_below(Extent::from_range(at..size_bytes)).await? {
        let start = next.start() / piece_bytes * piece_bytes;
        let piece = Extent::from_range(start..size_bytes.min(start + piece_bytes));
        work.job.set_done(start);
        let copy = async {
            let _alone = match work.broken {
                Broken::CopyWithoutLock => None,
                _ => Some(ranges.exclusive(piece.start()..piece.end()).await),
            };
            graph.copy_up(piece, &buffer).await.map(drop)
        };
        work.job.piece(work.timer, piece.len_bytes, || work.guests(), copy).await?;
        at = piece.end();
    }
    work.job.set_done(size_bytes);
    graph.flush_own().await
}
