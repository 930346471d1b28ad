//! Where a run of the disk lies: layers one by one as long as they may change, then the merged map of the sealed ones.

use std::ops::Range;
use std::sync::Arc;

use futures_util::future::join_all;
use spile_core::{Disk, ErrorKind, Extent, Result, ResultExt, SECTOR_BYTES, Store, StoreOffset};

use super::Graph;
use super::zones::{NOWHERE, ZONE_BYTES, ZONE_SECTORS, Zone};
use crate::layer::{EncodedUnit, Found, Layer, MapPiece};

/// The maps of so many layers are read at the same time for a zone: a request waits for the zone, and a long chain would make it wait for
/// one read after the other.
const LOADED_TOGETHER: usize = 32;

/// Where a run of the disk lies.
#[derive(Clone, Copy)]
pub(super) enum Step {
    /// In that layer (0 is the leaf).
    Bytes { layer: usize, at: At },
    /// Nowhere: it reads as zeroes.
    Zero,
    /// To be asked again once that layer has loaded a piece of its map.
    Load { layer: usize, piece: MapPiece },
    /// To be asked again once that zone of the parents is loaded.
    LoadZone(u64),
}

/// Where a run lies in its layer.
#[derive(Clone, Copy)]
pub(super) enum At {
    Plain(StoreOffset),
    Encoded { unit: EncodedUnit, within_bytes: u32 },
}

/// The zone that was loaded last, for the request that needed it: the cache may be too small to keep it.
pub(super) type LastZone = Option<(u64, Arc<Zone>)>;

/// The step to take for what layer `number` has; `None` = look further down.
fn step_at(number: usize, found: Found) -> Option<Step> {
    Some(match found {
        Found::Data(offset) => Step::Bytes { layer: number, at: At::Plain(offset) },
        Found::Encoded { unit, within_bytes } => Step::Bytes { layer: number, at: At::Encoded { unit, within_bytes } },
        Found::Zero => Step::Zero,
        Found::Miss(piece) => Step::Load { layer: number, piece },
        Found::Below => return None,
    })
}

impl<S: Store> Graph<S> {
    /// Where the bytes from `at` lie, and how far that holds, at most `len_bytes`.
    pub(super) fn step(&self, at: u64, len_bytes: u64, last: &LastZone) -> (Step, u64) {
        self.step_from(self.leaf().find(at, len_bytes), at, last)
    }

    /// [`Graph::step`] with what the leaf has found at `at`.
    pub(super) fn step_from(&self, (found, len): (Found, u64), at: u64, last: &LastZone) -> (Step, u64) {
        match step_at(0, found) {
            Some(step) => (step, len),
            None => self.step_below(at, len, last),
        }
    }

    /// [`Graph::step`] for what the leaf does not have.
    fn step_below(&self, at: u64, len_bytes: u64, last: &LastZone) -> (Step, u64) {
        let walked = self.walked();
        // For a single sealed parent its own map is as good as a merged one.
        let zoned = self.layers.len() - walked > 1;
        let upper = if zoned { 1..walked } else { 1..self.layers.len() };
        match self.walk(upper, at, len_bytes) {
            (Some(step), len) => (step, len),
            (None, len) if zoned => self.step_in_zone(walked, at, len, last),
            (None, len) => (Step::Zero, len),
        }
    }

    /// Asks `layers` one by one. `None` when none of them has anything at `at`.
    pub(super) fn walk(&self, layers: Range<usize>, at: u64, len_bytes: u64) -> (Option<Step>, u64) {
        let mut len = len_bytes;
        for number in layers {
            let layer = self.image(number);
            let size = layer.size_bytes();
            if at >= size {
                return (Some(Step::Zero), len);
            }
            let (found, run) = layer.find(at, len.min(size - at));
            len = run;
            if let Some(step) = step_at(number, found) {
                return (Some(step), len);
            }
        }
        (None, len)
    }

    /// [`Graph::step`] in the layers from `walked` down, by the merged map of them.
    fn step_in_zone(&self, walked: usize, at: u64, len_bytes: u64, last: &LastZone) -> (Step, u64) {
        let (number, covers) = (at / ZONE_BYTES, self.layers.len() - walked);
        let last = last.as_ref().filter(|(last, zone)| *last == number && zone.covers() == covers);
        let (rank, len) = match last {
            Some((_, zone)) => zone.find(at % ZONE_BYTES, len_bytes),
            None => match self.zones.get(number).filter(|zone| zone.covers() == covers) {
                Some(zone) => zone.find(at % ZONE_BYTES, len_bytes),
                None => return (Step::LoadZone(number), len_bytes),
            },
        };
        if rank == NOWHERE {
            return (Step::Zero, len);
        }
        let number = self.layers.len() - usize::from(rank);
        let layer = self.image(number);
        let size = layer.size_bytes();
        if at >= size {
            return (Step::Zero, len.min(SECTOR_BYTES - at % SECTOR_BYTES));
        }
        let (found, len) = layer.locate(at, len.min(size - at));
        match step_at(number, found) {
            Some(step) => (step, len),
            // In the sector where this layer ends, its bytes need not be its own.
            None => match self.walk(number + 1..self.layers.len(), at, len) {
                (Some(step), len) => (step, len),
                (None, len) => (Step::Zero, len),
            },
        }
    }

    /// Reads what a step needs.
    pub(super) async fn load(&self, step: Step, last: &mut LastZone) -> Result<()> {
        match step {
            Step::Load { layer, piece } => self.load_piece(layer, piece).await,
            Step::LoadZone(number) => {
                *last = Some((number, self.load_zone(number).await?));
                Ok(())
            }
            Step::Bytes { .. } | Step::Zero => Ok(()),
        }
    }

    async fn load_piece(&self, layer: usize, piece: MapPiece) -> Result<()> {
        self.layers[layer].loads_map();
        let layer = self.image(layer);
        layer.load(piece).await.at_path(layer.store().path())
    }

    /// The merged map of all sealed parents for one zone. Requests that want the same zone at the same time share the work.
    async fn load_zone(&self, number: u64) -> Result<Arc<Zone>> {
        let covers = self.layers.len() - self.walked();
        self.zones.join(number, covers, self.merge_zone(number, covers)).await
    }

    /// Merges the lowest `covers` layers: each paints what it has over what is below it. Begins with a zone of fewer layers
    /// that an older graph has left.
    async fn merge_zone(&self, number: u64, covers: usize) -> Result<Arc<Zone>> {
        let kept = self.zones.get(number);
        if let Some(zone) = kept.as_ref().filter(|zone| zone.covers() == covers) {
            return Ok(zone.clone());
        }
        let base = kept.as_ref().filter(|zone| zone.covers() < covers);
        let (mut owners, done) = base.map_or((vec![NOWHERE; ZONE_SECTORS], 0), |zone| (zone.owners(), zone.covers()));
        let range = number * ZONE_BYTES..(number + 1) * ZONE_BYTES;
        let ranks: Vec<usize> = (done + 1..=covers).collect();
        for together in ranks.chunks(LOADED_TOGETHER) {
            join_all(together.iter().map(|rank| self.load_map(*rank, range.clone()))).await;
            for rank in together {
                self.paint(*rank, range.clone(), &mut owners).await?;
            }
        }
        let zone = Arc::new(Zone::new(owners, covers));
        // Another graph's zone of more layers is worth more than this one.
        if kept.is_none_or(|kept| kept.covers() < covers) {
            self.zones.insert(number, zone.clone());
        }
        Ok(zone)
    }

    /// Reads what is not in memory of the map of the layer of that rank, for `range`. What cannot be read is left to [`Graph::paint`], which says so.
    async fn load_map(&self, rank: usize, range: Range<u64>) {
        let number = self.layers.len() - rank;
        let end = self.image(number).size_bytes().min(range.end);
        let mut at = range.start;
        while at < end {
            let (found, len) = self.image(number).find(at, end - at);
            match found {
                Found::Miss(piece) if self.load_piece(number, piece).await.is_ok() => {}
                Found::Miss(_) => return,
                _ => at += len,
            }
        }
    }

    /// Enters into `owners`, one for each sector of `range`, what the layer of that rank (the base has 1) has. Past its own
    /// end a layer hides what is below.
    async fn paint(&self, rank: usize, range: Range<u64>, owners: &mut [u8]) -> Result<()> {
        let number = self.layers.len() - rank;
        let layer = self.image(number);
        let sectors = |bytes: Range<u64>| {
            let at = |byte: u64| ((byte - range.start).div_ceil(SECTOR_BYTES)) as usize;
            at(bytes.start)..at(bytes.end)
        };
        let end = layer.size_bytes().clamp(range.start, range.end);
        owners[sectors(end..range.end)].fill(NOWHERE);
        let mut at = range.start;
        while at < end {
            let (found, len) = layer.find(at, end - at);
            match found {
                Found::Data(_) | Found::Encoded { .. } => owners[sectors(at..at + len)].fill(rank as u8),
                Found::Zero => owners[sectors(at..at + len)].fill(NOWHERE),
                Found::Below => {}
                Found::Miss(piece) => {
                    let damaged_bytes = self.load_or_skip(number, piece, at, end - at).await?;
                    owners[sectors(at..at + damaged_bytes)].fill(rank as u8);
                    at += damaged_bytes;
                    continue;
                }
            }
            at += len;
        }
        // A sector has one owner: where a layer ends within a sector, it decides which bytes come from below.
        let size = layer.size_bytes();
        if range.contains(&size) && !size.is_multiple_of(SECTOR_BYTES) {
            owners[((size - range.start) / SECTOR_BYTES) as usize] = rank as u8;
        }
        Ok(())
    }

    /// Loads a piece of a layer's map. Where the map is damaged, returns how many bytes from `at` it is damaged for: an
    /// error for whoever reads those, and for nobody else.
    async fn load_or_skip(&self, number: usize, piece: MapPiece, at: u64, len_bytes: u64) -> Result<u64> {
        match self.load_piece(number, piece).await {
            Err(error) if error.kind() == ErrorKind::Corrupt => match self.image(number).find(at, len_bytes) {
                (Found::Miss(_), damaged_bytes) => Ok(damaged_bytes),
                _ => Ok(0),
            },
            other => other.map(|()| 0),
        }
    }

    /// True when the whole of `extent` reads as zeroes below the leaf, and stays so.
    pub(super) async fn below_is_zero(&self, extent: Extent) -> Result<bool> {
        if self.walked() > 1 {
            return Ok(false);
        }
        let mut at = extent.start();
        let end = extent.end().min(self.size_bytes());
        while at < end {
            match self.walk(1..self.layers.len(), at, end - at) {
                (None | Some(Step::Zero), len) => at += len,
                (Some(Step::Bytes { .. }), _) => return Ok(false),
                (Some(step), _) => self.load(step, &mut None).await?,
            }
        }
        Ok(true)
    }
}
