//! How much of a guest's memory the queues need, and where the data of requests lie.

use spile_core::{Error, ErrorKind, Result};
use spile_mem::Segments;

use super::QueueOptions;
use crate::vhost::config::BlkConfig;
use crate::vhost::memory::{Area, GuestMemory};
use crate::vhost::proto::feature;
use crate::vhost::queue::{QueueMemory, SlotMemory};
use crate::vhost::request::META_BYTES;
use crate::vhost::ring::{DESC_BYTES, RingParts};

const PAGE_BYTES: usize = 4096;
/// Descriptors of a request beside those of its data: header and status. A discard has its range between them.
const FRAME: usize = 2;
const MAX_RING_SIZE: usize = 32768;

/// Sizes of the parts of one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Descriptors of the ring.
    pub ring_size: u16,
    /// Descriptors of the longest chain.
    chain: usize,
    indirect: bool,
    depth: usize,
    /// Bytes of a piece of data that lies in one run, and how many such a slot has.
    run_bytes: usize,
    runs: usize,
    /// The longest segment in bytes: a run that is longer has several.
    segment_bytes: usize,
}

impl Layout {
    /// The layout for `options` on a device with these `features` and this `config`.
    ///
    /// # Errors
    /// `InvalidInput` when the device or a ring cannot take such requests.
    pub fn new(options: &QueueOptions, features: u64, config: &BlkConfig) -> Result<Self> {
        let data_bytes = options.data_bytes.max(1) as usize;
        let run_bytes = options.segment_bytes.map_or(data_bytes, |bytes| bytes.max(1) as usize);
        let segment_bytes = run_bytes.min(config.max_segment_bytes(features) as usize);
        let runs = data_bytes.div_ceil(run_bytes);
        let segments = runs * run_bytes.div_ceil(segment_bytes);
        let most = config.max_segments(features) as usize;
        if segments > most {
            let message = format!("a request of {data_bytes} bytes has {segments} segments; the server takes {most}");
            return Err(Error::new(ErrorKind::InvalidInput, message).hint("ask for less at once, or longer segments"));
        }
        let (depth, chain) = (usize::from(options.depth.max(1)), FRAME + segments.max(1));
        let indirect = features & feature::INDIRECT_DESC != 0;
        let descriptors = if indirect { depth.max(chain) } else { depth * chain };
        let ring_size = descriptors.next_power_of_two().max(usize::from(options.ring_size).next_power_of_two());
        if ring_size > MAX_RING_SIZE {
            let message = format!("{depth} requests of {chain} descriptors do not fit into a ring");
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        Ok(Self { ring_size: ring_size as u16, chain, indirect, depth, run_bytes, runs, segment_bytes })
    }

    /// Bytes of guest memory that all queues need, with what is wasted at the end of each region.
    pub fn memory_bytes(&self, options: &QueueOptions) -> u64 {
        let page = |len: usize| len.next_multiple_of(PAGE_BYTES) as u64;
        let ring: u64 = RingParts::lengths(self.ring_size).map(page).iter().sum();
        let meta = page(self.depth * META_BYTES);
        let tables = page(self.depth * self.chain * DESC_BYTES);
        let run = self.run_bytes.next_multiple_of(self.align()) as u64;
        let data = (self.depth * self.runs) as u64 * (run + self.spacer() as u64);
        let longest = page(self.run_bytes).max(meta).max(tables).max(page(9 * usize::from(self.ring_size)));
        let one = ring + meta + tables + data + 4 * PAGE_BYTES as u64;
        u64::from(options.queues) * one + options.regions as u64 * (longest + PAGE_BYTES as u64)
    }

    /// The three parts of a ring, on pages of their own.
    pub fn take_ring(&self, memory: &mut GuestMemory) -> Result<[Area; 3]> {
        let [descriptors, available, used] = RingParts::lengths(self.ring_size);
        let mut take = |len| memory.take(len, PAGE_BYTES);
        Ok([take(descriptors)?, take(available)?, take(used)?])
    }

    /// Everything else of a queue.
    pub fn take_queue(&self, memory: &mut GuestMemory) -> Result<QueueMemory> {
        let meta = memory.take(self.depth * META_BYTES, PAGE_BYTES)?;
        let tables = match self.indirect {
            true => Some(memory.take(self.depth * self.chain * DESC_BYTES, PAGE_BYTES)?),
            false => None,
        };
        let mut slots: Vec<Vec<Area>> = vec![Vec::new(); self.depth];
        // The slots take turns, so that no two runs of one request are neighbours.
        for _ in 0..self.runs {
            for slot in &mut slots {
                slot.push(memory.take(self.run_bytes, self.align())?);
                if self.spacer() > 0 {
                    memory.take(self.spacer(), 1)?;
                }
            }
        }
        let slots = slots.iter().map(|runs| self.slot(runs)).collect();
        Ok(QueueMemory { meta, tables, chain: self.chain, slots })
    }

    fn slot(&self, runs: &[Area]) -> SlotMemory {
        let cut = |run: &Area| {
            let (address, len) = (run.address, run.bytes.len());
            let pieces = (0..len).step_by(self.segment_bytes);
            let piece = move |at: usize| (address + at as u64, (len - at).min(self.segment_bytes) as u32);
            pieces.map(piece).collect::<Vec<_>>()
        };
        let data: Segments = runs.iter().map(|run| run.bytes.clone()).collect();
        SlotMemory { pieces: runs.iter().flat_map(cut).collect(), data }
    }

    /// Runs are aligned as a guest's allocator would have them.
    fn align(&self) -> usize {
        if self.run_bytes.is_multiple_of(512) { (1 << self.run_bytes.trailing_zeros()).min(PAGE_BYTES) } else { 1 }
    }

    /// Bytes between two runs: none, unless a single slot would have neighbours.
    fn spacer(&self) -> usize {
        if self.depth == 1 && self.runs > 1 { self.align() } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vhost::memory::MemoryOptions;

    const ALL: u64 = feature::INDIRECT_DESC | feature::BLK_SEG_MAX | feature::BLK_SIZE_MAX;

    fn config() -> BlkConfig {
        BlkConfig { size_max: 65536, seg_max: 126, ..BlkConfig::default() }
    }

    fn slots(options: QueueOptions) -> Vec<SlotMemory> {
        let layout = Layout::new(&options, ALL, &config()).unwrap();
        let len = layout.memory_bytes(&options);
        let shape = MemoryOptions { regions: options.regions, ..MemoryOptions::new(len) };
        let mut memory = GuestMemory::new(&shape).unwrap();
        layout.take_ring(&mut memory).unwrap();
        layout.take_queue(&mut memory).unwrap().slots
    }

    #[test]
    fn scattered_segments_are_no_neighbours() {
        for depth in [1, 2, 5] {
            let options = QueueOptions { depth, segment_bytes: Some(4096), ..QueueOptions::default() };
            for slot in slots(options) {
                assert_eq!((slot.pieces.len(), slot.data.len()), (16, 65536));
                assert!(slot.pieces.windows(2).all(|w| w[0].0 + u64::from(w[0].1) != w[1].0), "depth {depth}");
                assert!(slot.pieces.iter().all(|(address, _)| address % 4096 == 0));
            }
        }
    }

    #[test]
    fn one_piece_is_cut_at_the_longest_segment_only() {
        let options = QueueOptions { data_bytes: 150_000, ..QueueOptions::default() };
        let pieces = &slots(options)[3].pieces;
        let lens: Vec<u32> = pieces.iter().map(|piece| piece.1).collect();
        assert_eq!(lens, [65536, 65536, 18928]);
        assert_eq!(pieces[0].0 + 65536, pieces[1].0);
    }

    #[test]
    fn there_is_room_in_any_number_of_regions() {
        for regions in [1, 2, 3, 7] {
            for (depth, segment_bytes) in [(1, None), (33, Some(4096)), (4, Some(700))] {
                slots(QueueOptions { depth, segment_bytes, regions, ..QueueOptions::default() });
            }
        }
    }

    #[test]
    fn rings_are_as_large_as_their_chains_need() {
        let size = |features, depth, data_bytes| {
            let options = QueueOptions { depth, data_bytes, segment_bytes: Some(4096), ..QueueOptions::default() };
            Layout::new(&options, features, &config()).map(|layout| layout.ring_size).ok()
        };
        assert_eq!(size(ALL, 32, 4096), Some(128));
        assert_eq!(size(ALL, 129, 4096), Some(256));
        assert_eq!(size(feature::BLK_SEG_MAX, 32, 65536), Some(1024));
        assert_eq!(size(feature::BLK_SEG_MAX, 32768, 65536), None);
        assert_eq!(size(ALL, 1, 127 * 4096), None);
        assert_eq!(size(0, 1, 4096), Some(128));
    }
}
