//! Sector bitmaps in memory: which sectors of a block are in this file.
//!
//! Only blocks that are partly written have one here; full blocks are a flag in the BAT. The cache is bounded: a
//! bitmap that nobody holds may be dropped and read again. A task that has set bits which are not on disk yet holds
//! the bitmap.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

const SHARDS: usize = 16;

/// One block's bitmap. Sector 0 is the most significant bit of the first word, as on disk (MSB first).
pub(crate) struct Bits {
    words: Box<[AtomicU64]>,
    sectors: u32,
}

impl Bits {
    /// A bitmap of `sectors` zeroes.
    pub(crate) fn new(sectors: u32) -> Self {
        let words = (0..sectors.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { words, sectors }
    }

    /// Reads a bitmap from its bytes on disk (whole sectors; bits past the block's end are ignored).
    pub(crate) fn from_bytes(bytes: &[u8], sectors: u32) -> Self {
        let bits = Self::new(sectors);
        for (word, chunk) in bits.words.iter().zip(bytes.chunks(8)) {
            let mut padded = [0; 8];
            padded[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_be_bytes(padded), Ordering::Relaxed);
        }
        bits
    }

    /// The bytes for disk, zero-padded to `len`.
    pub(crate) fn to_bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.words.iter().flat_map(|w| w.load(Ordering::Acquire).to_be_bytes()).collect();
        bytes.resize(len, 0);
        bytes
    }

    /// Sets the bits of `range` (sectors in the block).
    pub(crate) fn set(&self, range: Range<u32>) {
        for (word, mask) in masks(range) {
            self.words[word].fetch_or(mask, Ordering::AcqRel);
        }
    }

    /// Clears the bits of `range` (sectors in the block).
    pub(crate) fn clear(&self, range: Range<u32>) {
        for (word, mask) in masks(range) {
            self.words[word].fetch_and(!mask, Ordering::AcqRel);
        }
    }

    /// True when no bit of `range` is set.
    pub(crate) fn has_none(&self, range: Range<u32>) -> bool {
        masks(range).all(|(word, mask)| self.words[word].load(Ordering::Acquire) & mask == 0)
    }

    /// True when all bits of `range` are set.
    pub(crate) fn has_all(&self, range: Range<u32>) -> bool {
        masks(range).all(|(word, mask)| self.words[word].load(Ordering::Acquire) & mask == mask)
    }

    /// True when every sector of the block is set.
    pub(crate) fn is_full(&self) -> bool {
        self.has_all(0..self.sectors)
    }

    /// The value at `range.start` and how many sectors from there have the same, within `range`.
    pub(crate) fn run(&self, range: Range<u32>) -> (bool, u32) {
        let value = self.word(range.start, false) >> 63 == 1;
        let mut at = range.start;
        while at < range.end {
            let same = self.word(at, value).leading_zeros().min(64 - at % 64);
            at += same;
            if !at.is_multiple_of(64) || same == 0 {
                break;
            }
        }
        (value, at.min(range.end) - range.start)
    }

    /// The word that holds `sector`, shifted so that it comes first, inverted if asked.
    fn word(&self, sector: u32, invert: bool) -> u64 {
        let word = self.words[sector as usize / 64].load(Ordering::Acquire);
        (if invert { !word } else { word }) << (sector % 64)
    }
}

/// The words and masks that cover `range`.
fn masks(range: Range<u32>) -> impl Iterator<Item = (usize, u64)> {
    let words = if range.is_empty() { 0..0 } else { range.start / 64..(range.end - 1) / 64 + 1 };
    words.map(move |word| {
        let start = range.start.max(word * 64) - word * 64;
        let end = range.end.min(word * 64 + 64) - word * 64;
        let mask = (u64::MAX >> start) & (u64::MAX << (64 - end));
        (word as usize, mask)
    })
}

/// The bitmaps of one image that are in memory.
pub(crate) struct BitsCache {
    shards: [Mutex<Shard>; SHARDS],
    most_per_shard: AtomicUsize,
}

#[derive(Default)]
struct Shard {
    map: BTreeMap<u32, Arc<Bits>>,
    /// The blocks in the map, in the order in which they came; the oldest bitmap that nobody holds is dropped first.
    /// (The order of a hash map changes from run to run, and a simulated run must be repeatable.)
    order: VecDeque<u32>,
}

impl Shard {
    /// Drops the oldest bitmaps that nobody holds, until there is room for one more or all are held.
    fn make_room(&mut self, most: usize) {
        for _ in 0..self.order.len() {
            if self.map.len() < most {
                return;
            }
            let Some(block) = self.order.pop_front() else { return };
            match self.map.get(&block).is_some_and(|bits| Arc::strong_count(bits) > 1) {
                true => self.order.push_back(block),
                false => drop(self.map.remove(&block)),
            }
        }
    }

    fn remove(&mut self, block: u32) {
        if self.map.remove(&block).is_some() {
            self.order.retain(|&other| other != block);
        }
    }
}

/// How many bitmaps of `bitmap_bytes` each shard may keep.
fn per_shard(budget_bytes: usize, bitmap_bytes: usize) -> usize {
    (budget_bytes / (bitmap_bytes + 64) / SHARDS).max(4)
}

impl BitsCache {
    /// A cache for at most about `budget_bytes` of bitmaps that nobody holds, each of `bitmap_bytes`.
    pub(crate) fn new(budget_bytes: usize, bitmap_bytes: usize) -> Self {
        Self { shards: Default::default(), most_per_shard: AtomicUsize::new(per_shard(budget_bytes, bitmap_bytes)) }
    }

    /// Lowers the budget, and drops what is over it.
    pub(crate) fn shrink(&self, budget_bytes: usize, bitmap_bytes: usize) {
        let most = per_shard(budget_bytes, bitmap_bytes);
        let most = self.most_per_shard.fetch_min(most, Ordering::Relaxed).min(most);
        for shard in &self.shards {
            shard.lock().unwrap_or_else(|e| e.into_inner()).make_room(most);
        }
    }

    fn shard(&self, block: u32) -> MutexGuard<'_, Shard> {
        self.shards[block as usize % SHARDS].lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(crate) fn get(&self, block: u32) -> Option<Arc<Bits>> {
        self.shard(block).map.get(&block).cloned()
    }

    /// Adds a bitmap unless there is one; returns the one that is there then.
    pub(crate) fn insert(&self, block: u32, bits: Bits) -> Arc<Bits> {
        self.insert_if(block, bits, |_| true)
    }

    /// [`BitsCache::insert`], but only if `still_holds` returns true. It is called while no [`BitsCache::remove_with`]
    /// of the block can run. If it returns false, the bitmap is returned and not kept.
    pub(crate) fn insert_if(&self, block: u32, bits: Bits, still_holds: impl FnOnce(&Bits) -> bool) -> Arc<Bits> {
        let mut shard = self.shard(block);
        if !still_holds(&bits) {
            return Arc::new(bits);
        }
        if let Some(bits) = shard.map.get(&block) {
            return bits.clone();
        }
        shard.make_room(self.most_per_shard.load(Ordering::Relaxed));
        let bits = Arc::new(bits);
        shard.order.push_back(block);
        shard.map.insert(block, bits.clone());
        bits
    }

    pub(crate) fn remove(&self, block: u32) {
        self.remove_with(block, || ());
    }

    /// Removes a block's bitmap and runs `also` in one step, as [`BitsCache::insert_if`] sees it.
    pub(crate) fn remove_with(&self, block: u32, also: impl FnOnce()) {
        let mut shard = self.shard(block);
        also();
        shard.remove(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_agree_with_a_plain_model(
            changes in prop::collection::vec((0u32..200, 0u32..80, prop::bool::weighted(0.7)), 0..8), start in 0u32..199,
        ) {
            let bits = Bits::new(200);
            let mut model = [false; 200];
            for (from, len, value) in changes {
                let range = from..(from + len).min(200);
                match value {
                    true => bits.set(range.clone()),
                    false => bits.clear(range.clone()),
                }
                range.for_each(|at| model[at as usize] = value);
            }
            let value = model[start as usize];
            let len = model[start as usize..].iter().take_while(|&&bit| bit == value).count() as u32;
            prop_assert_eq!(bits.run(start..200), (value, len));
            prop_assert_eq!(bits.run(start..start + 1), (value, 1));
            prop_assert_eq!(bits.has_all(start..200), model[start as usize..].iter().all(|&bit| bit));
            prop_assert_eq!(bits.has_none(start..200), model[start as usize..].iter().all(|&bit| !bit));
            let bytes = bits.to_bytes(512);
            prop_assert_eq!(bytes[start as usize / 8] & (0x80 >> (start % 8)) != 0, value);
            prop_assert_eq!(Bits::from_bytes(&bytes, 200).to_bytes(512), bytes);
        }
    }

    #[test]
    fn the_cache_drops_only_what_nobody_holds() {
        let cache = BitsCache::new(0, 512);
        let held = cache.insert(0, Bits::new(64));
        (1..100).for_each(|n| drop(cache.insert(n * SHARDS as u32, Bits::new(64))));
        assert!(Arc::ptr_eq(&cache.get(0).unwrap(), &held));
        let shard = cache.shard(0);
        assert!(shard.map.len() <= 5 && shard.order.len() == shard.map.len());
    }
}
