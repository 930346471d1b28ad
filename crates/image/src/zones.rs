//! The merged map of a chain's parents: for each sector, which layer has it.
//!
//! Parents do not change while a leaf is open, so the walk through all of them is done once for each zone of the
//! disk and kept. A read through thirty layers then costs what it costs through two. The cache is bounded; a zone
//! of 2 MiB takes 1 byte, 512 bytes (when layers change on 4 KiB boundaries) or 4 KiB.

use std::sync::Arc;

use quick_cache::Weighter;
use quick_cache::sync::Cache;
use spile_core::SECTOR_BYTES;

/// Guest bytes of a zone.
pub(crate) const ZONE_BYTES: u64 = 2 << 20;
const ZONE_SECTORS: usize = (ZONE_BYTES / SECTOR_BYTES) as usize;
/// The layer number that means "in none: zeroes". The leaf, number 0, is never in a zone.
pub(crate) const NOWHERE: u8 = 0;

/// Which layer has each sector of a zone.
pub(crate) enum Zone {
    Whole(u8),
    Pages(Box<[u8]>),
    Sectors(Box<[u8]>),
}

impl Zone {
    /// From one layer number a sector; short at the end of the disk.
    pub(crate) fn new(mut layers: Vec<u8>) -> Self {
        layers.resize(ZONE_SECTORS, NOWHERE);
        if layers.iter().all(|&layer| layer == layers[0]) {
            return Self::Whole(layers[0]);
        }
        match layers.chunks(8).all(|page| page.iter().all(|&layer| layer == page[0])) {
            true => Self::Pages(layers.iter().copied().step_by(8).collect()),
            false => Self::Sectors(layers.into()),
        }
    }

    /// The layer that has byte `within` of the zone, and how many bytes from there are the same layer's, looking no
    /// further than `len_bytes`.
    pub(crate) fn find(&self, within: u64, len_bytes: u64) -> (u8, u64) {
        let (map, unit) = match self {
            Self::Whole(layer) => return (*layer, len_bytes.min(ZONE_BYTES - within)),
            Self::Pages(map) => (map, SECTOR_BYTES * 8),
            Self::Sectors(map) => (map, SECTOR_BYTES),
        };
        let first = (within / unit) as usize;
        let last = map.len().min((within + len_bytes).div_ceil(unit) as usize);
        let same = map[first..last].iter().take_while(|&&layer| layer == map[first]).count() as u64;
        (map[first], len_bytes.min((first as u64 + same) * unit - within))
    }

    fn bytes(&self) -> u64 {
        64 + match self {
            Self::Whole(_) => 0,
            Self::Pages(map) | Self::Sectors(map) => map.len() as u64,
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

/// The zones that are in memory.
pub(crate) struct Zones {
    cache: Cache<u64, Arc<Zone>, ByBytes>,
}

impl Zones {
    /// At most about `budget_bytes` of zones.
    pub(crate) fn new(budget_bytes: usize) -> Self {
        let budget = budget_bytes.max(64 << 10);
        Self { cache: Cache::with_weighter(budget / 576, budget as u64, ByBytes) }
    }

    pub(crate) fn get(&self, zone: u64) -> Option<Arc<Zone>> {
        self.cache.get(&zone)
    }

    pub(crate) fn insert(&self, number: u64, zone: Zone) -> Arc<Zone> {
        let zone = Arc::new(zone);
        self.cache.insert(number, zone.clone());
        zone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zones_take_the_smallest_form() {
        assert!(matches!(Zone::new(vec![3; ZONE_SECTORS]), Zone::Whole(3)));
        let mut pages = vec![1; ZONE_SECTORS];
        pages[8..16].fill(2);
        let zone = Zone::new(pages.clone());
        assert!(matches!(zone, Zone::Pages(_)));
        assert_eq!(
            [zone.find(0, ZONE_BYTES), zone.find(4096 + 512, ZONE_BYTES), zone.find(8192, ZONE_BYTES)],
            [(1, 4096), (2, 3584), (1, ZONE_BYTES - 8192)]
        );
        pages[9] = 7;
        let zone = Zone::new(pages);
        assert!(matches!(zone, Zone::Sectors(_)));
        assert_eq!(
            [zone.find(4096, ZONE_BYTES), zone.find(4608, ZONE_BYTES), zone.find(5120, ZONE_BYTES)],
            [(2, 512), (7, 512), (2, 3072)]
        );
    }
}
