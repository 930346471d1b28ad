//! Moves of data between the layers of a graph: down into the leaf's parent, or up into the leaf.

use futures_util::future::join_all;
use spile_core::{Disk, Extent, Io, Result, Segments, Store, WriteZeroes};

use super::Graph;
use super::map::{At, LastZone, Step};
use super::moving::Change;
use crate::layer::{Found, Layer};

/// A run of a piece that is to be copied.
struct Run {
    extent: Extent,
    /// Where it lies; `None` when it reads as zeroes.
    at: Option<At>,
}

/// Zeroes that are moved take no space where that can be done.
const ZEROES: WriteZeroes = WriteZeroes { may_unmap: true, only_if_fast: false };

impl<S: Store> Graph<S> {
    /// Copies what the leaf itself has of `piece` to the same place of `to`, through `buffer`, which is as long as the piece or
    /// longer. Whoever calls this keeps changes out of the piece.
    ///
    /// # Errors
    /// Those of both.
    pub async fn copy_own(&self, piece: Extent, to: &impl Disk, buffer: &Segments) -> Result<()> {
        let _readers = self.enter();
        let runs = self.own_runs(piece).await?;
        let copies = runs.iter().map(async |run| {
            let Some(at) = run.at else { return to.write_zeroes(run.extent, ZEROES).await };
            let start = (run.extent.start() - piece.start()) as usize;
            let memory = buffer.slice(start..start + run.extent.len_bytes as usize);
            self.read_at(0, at, &memory).await?;
            to.execute(Io::write(run.extent, &memory, false)).await
        });
        join_all(copies).await.into_iter().collect()
    }

    async fn own_runs(&self, piece: Extent) -> Result<Vec<Run>> {
        let (mut runs, mut at) = (Vec::new(), piece.start());
        while at < piece.end() {
            let (found, len) = self.leaf().find(at, piece.end() - at);
            let extent = Extent::from_range(at..at + len);
            let place = match found {
                Found::Miss(piece) => {
                    self.load(Step::Load { layer: 0, piece }, &mut None).await?;
                    continue;
                }
                Found::Below => {
                    at += len;
                    continue;
                }
                Found::Zero => None,
                Found::Data(offset) => {
                    let found = self.leaf().data_store().extent_at(offset).await?;
                    let whole = Extent::from_range(at..at + len.min(found.len_bytes.max(1).next_multiple_of(512)));
                    let is_hole = found.is_hole && found.len_bytes >= whole.len_bytes;
                    at = whole.end();
                    runs.push(Run { extent: whole, at: (!is_hole).then_some(At::Plain(offset)) });
                    continue;
                }
                Found::Encoded { unit, within_bytes } => Some(At::Encoded { unit, within_bytes }),
            };
            runs.push(Run { extent, at: place });
            at += len;
        }
        Ok(runs)
    }

    /// Copies what the leaf lacks of `piece` and its parents have into the leaf, through `buffer`, which is as long as the piece or longer.
    /// Whoever calls this keeps changes out of the piece, which lies on the disk's alignment. Returns how many bytes were copied.
    ///
    /// # Errors
    /// The stores'.
    pub async fn copy_up(&self, piece: Extent, buffer: &Segments) -> Result<u64> {
        let _readers = self.enter();
        let (mut at, mut copied) = (piece.start(), 0);
        let align = u64::from(self.info.request_align_bytes);
        while let Some(run) = self.next_below(Extent::from_range(at..piece.end())).await? {
            let (start, end) = (run.start() / align * align, run.end().next_multiple_of(align).min(piece.end()));
            let run = Extent::from_range(start..end);
            let memory = buffer.slice(0..run.len_bytes as usize);
            self.read_extent(run, &memory).await?;
            self.change_leaf(run, Change::Write(&memory)).await?;
            copied += run.len_bytes;
            at = run.end();
        }
        Ok(copied)
    }

    /// The first run of `extent` whose bytes are in a parent.
    ///
    /// # Errors
    /// The stores'.
    pub async fn next_below(&self, extent: Extent) -> Result<Option<Extent>> {
        let (mut at, mut last): (u64, LastZone) = (extent.start(), None);
        while at < extent.end() {
            match self.step(at, extent.end() - at, &last) {
                (Step::Bytes { layer: 1.., .. }, len) => return Ok(Some(Extent::from_range(at..at + len))),
                (Step::Bytes { layer: 0, .. } | Step::Zero, len) => at += len,
                (step, _) => self.load(step, &mut last).await?,
            }
        }
        Ok(None)
    }

    /// The first run of `extent` for which the leaf has space, but no bytes of its own.
    ///
    /// # Errors
    /// The store's.
    pub async fn next_unfilled(&self, extent: Extent) -> Result<Option<Extent>> {
        let mut at = extent.start();
        while at < extent.end() {
            let Some(part) = self.leaf().next_held(Extent::from_range(at..extent.end())) else { return Ok(None) };
            at = part.start();
            while at < part.end() {
                match self.leaf().find(at, part.end() - at) {
                    (Found::Below, len) => return Ok(Some(Extent::from_range(at..at + len))),
                    (Found::Miss(piece), _) => self.load(Step::Load { layer: 0, piece }, &mut None).await?,
                    (_, len) => at += len,
                }
            }
        }
        Ok(None)
    }

    /// Has the leaf hold zeroes of its own wherever it has space in `piece`, but no bytes. Whoever calls this has copied up what the parents
    /// have of the piece, and keeps changes out of it.
    ///
    /// # Errors
    /// The store's.
    pub async fn own_zeroes(&self, piece: Extent) -> Result<()> {
        self.each_part(piece, true, async |part| self.leaf().own_zeroes(part).await).await
    }
}
