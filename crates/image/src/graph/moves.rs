//! Moves of data between the layers of a graph: down into the leaf's parent, or up into the leaf.

use std::ops::Range;

use futures_util::future::join_all;
use spile_core::{Disk, Extent, Io, Result, Segments, Store, WriteZeroes, yield_now};

use super::Graph;
use super::extents::Known;
use super::map::{At, LastZone, Step};
use super::moving::Change;
use crate::layer::{Found, Layer};

/// A run of a piece that is to be copied.
struct Run {
    extent: Extent,
    /// Where it lies; `None` when it reads as zeroes.
    at: Option<At>,
}

/// So many runs are looked at in one turn.
const LOOKED_AT_ONCE: u64 = 4096;

/// Zeroes are told from other bytes in parts of this length.
const PART_BYTES: usize = 64 << 10;

/// Zeroes that are moved take no space where that can be done.
const ZEROES: WriteZeroes = WriteZeroes { may_unmap: true, only_if_fast: false };

impl<S: Store> Graph<S> {
    /// Copies what the leaf itself has of `piece` to the same place of `to`, through `buffer`, which is as long as the piece or
    /// longer. Whoever calls this keeps changes out of the piece. Returns how many bytes that were.
    ///
    /// # Errors
    /// Those of both.
    pub async fn copy_own(&self, piece: Extent, to: &impl Disk, buffer: &Segments) -> Result<u64> {
        let _readers = self.enter();
        let runs = self.own_runs(piece).await?;
        let copies = runs.iter().map(async |run| {
            let Some(at) = run.at else { return to.write_zeroes(run.extent, ZEROES).await.map(|()| 0) };
            let start = (run.extent.start() - piece.start()) as usize;
            let memory = buffer.slice(start..start + run.extent.len_bytes as usize);
            self.read_at(0, at, &memory).await?;
            for Part { extent, memory, is_zero } in parts_alike(run.extent, &memory) {
                match is_zero {
                    true => to.write_zeroes(extent, ZEROES).await?,
                    false => to.execute(Io::write(extent, &memory, false)).await?,
                }
            }
            Ok(run.extent.len_bytes)
        });
        join_all(copies).await.into_iter().sum()
    }

    /// Where the unit that the leaf has at `extent` lies in its file; 0 when that says nothing.
    pub fn own_offset(&self, extent: Extent) -> u64 {
        match self.leaf().locate(extent.start(), extent.len_bytes).0 {
            Found::Data(offset) => offset.0,
            _ => 0,
        }
    }

    /// How many bytes the leaf itself has of `unit`.
    ///
    /// # Errors
    /// The store's.
    pub async fn own_bytes(&self, unit: Extent) -> Result<u64> {
        let _readers = self.enter();
        Ok(self.own_runs(unit).await?.iter().filter(|run| run.at.is_some()).map(|run| run.extent.len_bytes).sum())
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
                Found::Data(offset) => Some(At::Plain(offset)),
                Found::Encoded { unit, within_bytes } => Some(At::Encoded { unit, within_bytes }),
            };
            runs.push(Run { extent, at: place });
            at += len;
        }
        Ok(runs)
    }

    /// The runs of `extent`, in order, that one of the first `layers` layers has: bytes, zeroes, or its end, behind which it hides what is below.
    /// At most `max_runs`; fewer when there are no more.
    ///
    /// # Errors
    /// The stores'.
    pub async fn own_runs_of(&self, layers: usize, extent: Extent, max_runs: usize) -> Result<Vec<Extent>> {
        let _readers = self.enter();
        let (mut runs, mut at): (Vec<Extent>, u64) = (Vec::new(), extent.start());
        for looked in 1_u64.. {
            if at >= extent.end() {
                break;
            }
            if looked.is_multiple_of(LOOKED_AT_ONCE) {
                yield_now().await;
            }
            let run = match self.walk(0..layers, at, extent.end() - at) {
                (Some(step @ Step::Load { .. }), _) => {
                    self.load(step, &mut None).await?;
                    continue;
                }
                (None, len) => {
                    at += len;
                    continue;
                }
                (Some(_), len) => Extent::from_range(at..at + len),
            };
            let is_full = runs.len() == max_runs;
            match runs.last_mut() {
                Some(last) if last.end() == at => *last = Extent::from_range(last.start()..run.end()),
                _ if is_full => break,
                _ => runs.push(run),
            }
            at = run.end();
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
        let copies = self.runs_below(piece).await?.into_iter().map(async |run| {
            let start = (run.start() - piece.start()) as usize;
            let memory = buffer.slice(start..start + run.len_bytes as usize);
            self.read_extent(run, &memory).await?;
            for Part { extent, memory, is_zero } in parts_alike(run, &memory) {
                let change = if is_zero { Change::Zero(ZEROES) } else { Change::Write(&memory) };
                self.change_leaf(extent, change).await?;
            }
            Ok(run.len_bytes)
        });
        join_all(copies).await.into_iter().sum()
    }

    /// What the leaf lacks of `piece` and its parents have, in order, on the disk's alignment.
    async fn runs_below(&self, piece: Extent) -> Result<Vec<Extent>> {
        let (mut at, mut runs): (u64, Vec<Extent>) = (piece.start(), Vec::new());
        let align = u64::from(self.info.request_align_bytes);
        while let Some(run) = self.next_below(Extent::from_range(at..piece.end())).await? {
            let (start, end) = (run.start() / align * align, run.end().next_multiple_of(align).min(piece.end()));
            at = end;
            match runs.last_mut() {
                Some(last) if last.end() == start => *last = Extent::from_range(last.start()..end),
                _ => runs.push(Extent::from_range(start..end)),
            }
        }
        Ok(runs)
    }

    /// As [`Graph::next_below`], but a hole of a parent's file is passed over: it reads as zeroes without the parent, too. `known` is what was found out
    /// on the way, by the same caller and of layers that do not change.
    ///
    /// # Errors
    /// The stores'.
    pub async fn next_stored_below(&self, extent: Extent, known: &mut Known) -> Result<Option<Extent>> {
        let mut at = extent.start();
        while let Some((run, layer, place)) = self.find_below(Extent::from_range(at..extent.end())).await? {
            let At::Plain(offset) = place else { return Ok(Some(run)) };
            let first = |len: u64| Extent::from_range(run.start()..run.start() + len.clamp(1, run.len_bytes));
            let known_bytes = known.data_bytes(layer, offset.0);
            if known_bytes > 0 {
                return Ok(Some(first(known_bytes)));
            }
            let found = self.image(layer).data_store().extent_at(offset).await?;
            if !found.is_hole {
                known.note_data(layer, offset.0..offset.0 + found.len_bytes);
                return Ok(Some(first(found.len_bytes)));
            }
            at = first(found.len_bytes).end();
        }
        Ok(None)
    }

    /// The first run of `extent` whose bytes are in a parent. Others run in between: there may be a million blocks to look at.
    ///
    /// # Errors
    /// The stores'.
    pub async fn next_below(&self, extent: Extent) -> Result<Option<Extent>> {
        Ok(self.find_below(extent).await?.map(|(run, ..)| run))
    }

    /// As [`Graph::next_below`], with the number of the parent and the place there.
    async fn find_below(&self, extent: Extent) -> Result<Option<(Extent, usize, At)>> {
        let (mut at, mut last): (u64, LastZone) = (extent.start(), None);
        for looked in 1_u64.. {
            if at >= extent.end() {
                break;
            }
            if looked.is_multiple_of(LOOKED_AT_ONCE) {
                yield_now().await;
            }
            match self.step(at, extent.end() - at, &last) {
                (Step::Bytes { layer: layer @ 1.., at: place }, len) => {
                    return Ok(Some((Extent::from_range(at..at + len), layer, place)));
                }
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
        let (mut at, mut looked) = (extent.start(), 0_u64);
        while at < extent.end() {
            looked += 1;
            if looked.is_multiple_of(LOOKED_AT_ONCE) {
                yield_now().await;
            }
            let rest = Extent::from_range(at..extent.end());
            let Some(part) = self.leaf().next_own(rest).await? else { return Ok(None) };
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

/// A part of what was read.
struct Part {
    extent: Extent,
    memory: Segments,
    is_zero: bool,
}

/// The parts of `extent`, whose bytes are in `memory`, as long as can be, that are zeroes or that are not.
fn parts_alike(extent: Extent, memory: &Segments) -> Vec<Part> {
    let mut runs: Vec<(Range<usize>, bool)> = Vec::new();
    for start in (0..memory.len()).step_by(PART_BYTES) {
        let part = start..memory.len().min(start + PART_BYTES);
        let is_zero = memory.slice(part.clone()).is_zero();
        match runs.last_mut() {
            Some((last, was_zero)) if is_zero == *was_zero => last.end = part.end,
            _ => runs.push((part, is_zero)),
        }
    }
    let part = |(range, is_zero): (Range<usize>, bool)| {
        let start = extent.start() + range.start as u64;
        let extent = Extent::from_range(start..start + range.len() as u64);
        Part { extent, memory: memory.slice(range), is_zero }
    };
    runs.into_iter().map(part).collect()
}
