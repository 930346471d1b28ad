//! The merged map of a graph's sealed parents: for each sector, which layer has it.
//!
//! Sealed layers do not change, so the walk through all of them is done once for each zone of the disk and kept. A read
//! through thirty layers then costs what it costs through two. The cache is bounded; a zone of 2 MiB takes 1 byte, 512
//! bytes (when layers change on 4 KiB boundaries) or 4 KiB.
//!
//! A layer is named by its rank: the base has 1, its child 2. So a zone stays true when layers are put on top, and a graph
//! that is an older one with layers on top shares its zones. A zone says how many layers it covers; when more of them are
//! sealed, it is painted over by those, and not made anew.

use std::sync::{Arc, Mutex};

use quick_cache::Weighter;
use quick_cache::sync::Cache;
use spile_core::{Result, SECTOR_BYTES};

use super::layers::LayerId;
use crate::loads::Loads;

/// Guest bytes of a zone.
pub(super) const ZONE_BYTES: u64 = 2 << 20;
/// Sectors of a zone.
pub(super) const ZONE_SECTORS: usize = (ZONE_BYTES / SECTOR_BYTES) as usize;
/// The rank that means "in no layer: zeroes".
pub(super) const NOWHERE: u8 = 0;

/// Which layer has each sector of a zone.
pub(super) struct Zone {
    covers: usize,
    map: Map,
}

enum Map {
    Whole(u8),
    Pages(Box<[u8]>),
    Sectors(Box<[u8]>),
}

impl Zone {
    /// From one rank for each sector, taken from the lowest `covers` layers.
    pub(super) fn new(ranks: Vec<u8>, covers: usize) -> Self {
        let map = if ranks.iter().all(|&rank| rank == ranks[0]) {
            Map::Whole(ranks[0])
        } else if ranks.chunks(8).all(|page| page.iter().all(|&rank| rank == page[0])) {
            Map::Pages(ranks.iter().copied().step_by(8).collect())
        } else {
            Map::Sectors(ranks.into())
        };
        Self { covers, map }
    }

    /// How many layers, from the base up, the zone is merged from.
    pub(super) fn covers(&self) -> usize {
        self.covers
    }

    /// One rank for each sector, to be painted over.
    pub(super) fn owners(&self) -> Vec<u8> {
        match &self.map {
            Map::Whole(rank) => vec![*rank; ZONE_SECTORS],
            Map::Pages(map) => map.iter().flat_map(|&rank| [rank; 8]).collect(),
            Map::Sectors(map) => map.to_vec(),
        }
    }

    /// The rank of the layer that has byte `within` of the zone, and how many bytes from there are the same layer's,
    /// looking no further than `len_bytes`.
    pub(super) fn find(&self, within: u64, len_bytes: u64) -> (u8, u64) {
        let (map, unit) = match &self.map {
            Map::Whole(rank) => return (*rank, len_bytes.min(ZONE_BYTES - within)),
            Map::Pages(map) => (map, SECTOR_BYTES * 8),
            Map::Sectors(map) => (map, SECTOR_BYTES),
        };
        let first = (within / unit) as usize;
        let last = map.len().min((within + len_bytes).div_ceil(unit) as usize);
        let same = map[first..last].iter().take_while(|&&rank| rank == map[first]).count() as u64;
        (map[first], len_bytes.min((first as u64 + same) * unit - within))
    }

    fn bytes(&self) -> u64 {
        64 + match &self.map {
            Map::Whole(_) => 0,
            Map::Pages(map) | Map::Sectors(map) => map.len() as u64,
        }
    }
}

#[derive(Clone)]
struct ByBytes;

impl Weighter<u64, Arc<Zone>> for ByBytes {
    fn weight(&self, _: &u64, zone: &Arc<Zone>) -> u64 {
        zone.bytes()
    }
}

/// The zones that are in memory, for all graphs of one line: each of them has the layers of the one before and more on top.
pub(super) struct Zones {
    cache: Cache<u64, Arc<Zone>, ByBytes>,
    budget_bytes: usize,
    /// By zone and the number of layers it is to cover.
    loads: Loads<(u64, usize), Arc<Zone>>,
    /// The layers of the longest of these graphs, base first: what the ranks stand for.
    line: Mutex<Vec<LayerId>>,
}

impl Zones {
    /// None yet, for a graph of the layers of `line`, base first; at most about `budget_bytes` in memory.
    pub(super) fn new(budget_bytes: usize, line: Vec<LayerId>) -> Self {
        let budget = budget_bytes.max(64 << 10);
        Self {
            cache: Cache::with_weighter(budget / 576, budget as u64, ByBytes),
            budget_bytes,
            loads: Loads::default(),
            line: Mutex::new(line),
        }
    }

    pub(super) fn budget_bytes(&self) -> usize {
        self.budget_bytes
    }

    /// True when a graph of these layers, base first, can share these zones: they are the layers so far, or those with
    /// more on top.
    pub(super) fn extend_to(&self, ids: &[LayerId]) -> bool {
        let mut line = self.line.lock().unwrap_or_else(|e| e.into_inner());
        let extends = ids.starts_with(&line);
        if extends {
            *line = ids.to_vec();
        }
        extends
    }

    pub(super) fn get(&self, number: u64) -> Option<Arc<Zone>> {
        self.cache.get(&number)
    }

    pub(super) fn insert(&self, number: u64, zone: Arc<Zone>) {
        self.cache.insert(number, zone);
    }

    /// The outcome of `merge`, or of the merge of the same zone that is under way already.
    pub(super) async fn join(
        &self,
        number: u64,
        covers: usize,
        merge: impl Future<Output = Result<Arc<Zone>>>,
    ) -> Result<Arc<Zone>> {
        self.loads.join((number, covers), merge).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zones_take_the_smallest_form() {
        assert!(matches!(Zone::new(vec![3; ZONE_SECTORS], 3).map, Map::Whole(3)));
        let mut pages = vec![1; ZONE_SECTORS];
        pages[8..16].fill(2);
        let zone = Zone::new(pages.clone(), 3);
        assert!(matches!(zone.map, Map::Pages(_)));
        assert_eq!(zone.owners(), pages);
        assert_eq!(
            [zone.find(0, ZONE_BYTES), zone.find(4096 + 512, ZONE_BYTES), zone.find(8192, ZONE_BYTES)],
            [(1, 4096), (2, 3584), (1, ZONE_BYTES - 8192)]
        );
        pages[9] = 7;
        let zone = Zone::new(pages.clone(), 3);
        assert!(matches!(zone.map, Map::Sectors(_)));
        assert_eq!(zone.owners(), pages);
        assert_eq!(
            [zone.find(4096, ZONE_BYTES), zone.find(4608, ZONE_BYTES), zone.find(5120, ZONE_BYTES)],
            [(2, 512), (7, 512), (2, 3072)]
        );
    }
}
