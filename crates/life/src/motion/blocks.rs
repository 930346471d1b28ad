//! [`Blocks`]: which blocks of a disk its copy may lack.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use spile_core::Extent;

/// One bit for each block. Any thread may set bits; one task takes them.
pub(super) struct Blocks {
    words: Box<[AtomicU64]>,
    /// How many bits are set.
    count: AtomicU64,
    shift: u32,
    size_bytes: u64,
}

impl Blocks {
    /// No bit is set. `block_bytes` is a power of two.
    pub fn new(size_bytes: u64, block_bytes: u64) -> Self {
        let shift = block_bytes.ilog2();
        let words = (size_bytes >> shift) / 64 + 1;
        let words = (0..words).map(|_| AtomicU64::new(0)).collect();
        Self { words, count: AtomicU64::new(0), shift, size_bytes }
    }

    /// The size of all blocks whose bits are set.
    pub fn bytes(&self) -> u64 {
        self.count.load(SeqCst) << self.shift
    }

    /// Sets the bits of all blocks that `extent` has a part of.
    pub fn mark(&self, extent: Extent) {
        if extent.len_bytes == 0 {
            return;
        }
        let blocks = extent.start() >> self.shift..((extent.end() - 1) >> self.shift) + 1;
        for (word, mask) in masks(&blocks) {
            // Past the end of the disk there is nothing.
            let Some(bits) = self.words.get(word) else { break };
            // Counted before they are set, so that whoever clears them meanwhile never counts below zero.
            let most = u64::from(mask.count_ones());
            self.count.fetch_add(most, SeqCst);
            let before = bits.fetch_or(mask, SeqCst);
            self.count.fetch_sub(u64::from((mask & before).count_ones()), SeqCst);
        }
    }

    fn clear(&self, blocks: &Range<u64>) {
        for (word, mask) in masks(blocks) {
            let before = self.words[word].fetch_and(!mask, SeqCst);
            self.count.fetch_sub(u64::from((mask & before).count_ones()), SeqCst);
        }
    }

    fn is_set(&self, block: u64) -> bool {
        self.words[(block / 64) as usize].load(SeqCst) >> (block % 64) & 1 == 1
    }

    /// The first run of blocks whose bits are set that begins at `from` or later, `most_bytes` long at most, or one block. The bits stay.
    pub fn next(&self, from: u64, most_bytes: u64) -> Option<Extent> {
        // Whoever goes on from the end of the last block, which may be a part of one, has had it.
        let first = from.div_ceil(1 << self.shift);
        let mut word = (first / 64) as usize;
        let mut rest = self.words.get(word)?.load(SeqCst) & (u64::MAX << (first % 64));
        while rest == 0 {
            word += 1;
            rest = self.words.get(word)?.load(SeqCst);
        }
        let start = word as u64 * 64 + u64::from(rest.trailing_zeros());
        let (most, end) = ((most_bytes >> self.shift).max(1), self.words.len() as u64 * 64);
        let mut until = start + 1;
        while until < end && until < start + most && self.is_set(until) {
            until += 1;
        }
        Some(Extent::from_range(start << self.shift..(until << self.shift).min(self.size_bytes)))
    }

    /// True when a block that has some of `extent` has its bit set.
    pub fn has_any(&self, extent: Extent) -> bool {
        let blocks = extent.start() >> self.shift..extent.end().div_ceil(1 << self.shift);
        masks(&blocks).any(|(word, mask)| self.words[word].load(SeqCst) & mask != 0)
    }

    /// Clears the bits of `extent`, which [`Blocks::next`] has returned.
    pub fn take(&self, extent: Extent) {
        self.clear(&(extent.start() >> self.shift..extent.end().div_ceil(1 << self.shift)));
    }
}

/// The words that have bits of `blocks`, each with these bits.
fn masks(blocks: &Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let blocks = blocks.clone();
    (blocks.start / 64..blocks.end.div_ceil(64)).map(move |word| {
        let from = blocks.start.saturating_sub(word * 64);
        let until = (blocks.end - word * 64).min(64);
        (word as usize, (u64::MAX << from) & (u64::MAX >> (64 - until)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(range: Range<u64>) -> Extent {
        Extent::from_range(range)
    }

    #[test]
    fn what_is_marked_is_found_in_runs_and_once() {
        let blocks = Blocks::new((200 << 16) - 512, 64 << 10);
        assert!(blocks.next(0, u64::MAX).is_none());
        blocks.mark(extent(5 << 16..(9 << 16) + 1));
        blocks.mark(extent((62 << 16) + 512..66 << 16));
        blocks.mark(extent((199 << 16) + 4096..(199 << 16) + 8192));
        blocks.mark(extent(7 << 16..7 << 16));
        assert_eq!(blocks.bytes(), 10 << 16);
        for (range, has_any) in [
            (0..5 << 16, false),
            (0..(5 << 16) + 1, true),
            ((10 << 16) - 1..10 << 16, true),
            (10 << 16..62 << 16, false),
            (65 << 16..66 << 16, true),
            (66 << 16..199 << 16, false),
            (0..200 << 16, true),
        ] {
            assert_eq!(blocks.has_any(extent(range.clone())), has_any, "{range:?}");
        }
        let mut found = Vec::new();
        while let Some(run) = blocks.next(0, 3 << 16) {
            blocks.take(run);
            found.push((run.start() >> 16, run.len_bytes));
        }
        assert_eq!(found, [(5, 3 << 16), (8, 2 << 16), (62, 3 << 16), (65, 1 << 16), (199, (1 << 16) - 512)]);
        assert_eq!(blocks.bytes(), 0);
    }

    #[test]
    fn what_is_marked_twice_counts_once_and_what_is_past_the_end_does_not() {
        let blocks = Blocks::new(64 << 16, 64 << 10);
        blocks.mark(extent(1 << 16..3 << 16));
        blocks.mark(extent(2 << 16..4 << 16));
        assert_eq!(blocks.bytes(), 3 << 16);
        blocks.mark(extent(1000 << 16..1001 << 16));
        assert_eq!(blocks.bytes(), 3 << 16);
    }

    #[test]
    fn a_run_is_looked_for_from_where_it_is_asked() {
        let blocks = Blocks::new(256 << 12, 4096);
        blocks.mark(extent(0..256 << 12));
        assert_eq!(blocks.next(100 << 12, 1 << 12), Some(extent(100 << 12..101 << 12)));
        assert_eq!(blocks.next(100 << 12, u64::MAX), Some(extent(100 << 12..256 << 12)));
        assert_eq!(blocks.next(256 << 12, u64::MAX), None);
    }

    #[test]
    fn a_last_block_that_is_a_part_of_one_is_found_once() {
        // Whoever marks anew what was not flushed goes from run to run, and the bits stay.
        for size_bytes in [(3 << 16) + 512, 64 << 16, (64 << 16) + 512, 512] {
            let blocks = Blocks::new(size_bytes, 64 << 10);
            blocks.mark(extent(0..size_bytes));
            assert_eq!(blocks.next(0, u64::MAX), Some(extent(0..size_bytes)));
            assert_eq!(blocks.next(size_bytes, u64::MAX), None, "{size_bytes}");
        }
    }
}
