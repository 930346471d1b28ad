//! [`Bits`]: a row of bits in memory that is a part of a file.

use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, Release};

use spile_core::{Segment, yield_now};

/// So many bytes of bits are gone through at once: about a tenth of a millisecond.
const PART_BYTES: usize = 256 << 10;
/// The same as a number of bits.
pub(crate) const PART_BITS: u64 = PART_BYTES as u64 * 8;

/// A row of bits: bit 0 is the lowest of the first byte. Whoever sets or clears bits holds a lock; anybody may look at any time.
pub(crate) struct Bits {
    memory: Segment,
    count: u64,
}

/// The words that have a bit of `range`: the byte at which each begins, and the bits in it.
#[inline]
fn words(range: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let range = if range.is_empty() { 0..0 } else { range };
    (range.start / 64..range.end.div_ceil(64)).map(move |word| {
        let low = range.start.saturating_sub(word * 64);
        let high = (range.end - word * 64).min(64);
        (word as usize * 8, (u64::MAX >> (64 - (high - low))) << low)
    })
}

impl Bits {
    /// The first `count` bits in `memory`, which is a whole number of words long.
    pub fn new(memory: Segment, count: u64) -> Self {
        Self { memory, count }
    }

    /// The part of `range` that has bits.
    #[inline]
    pub fn clip(&self, range: Range<u64>) -> Range<u64> {
        let end = range.end.min(self.count);
        range.start.min(end)..end
    }

    /// True when each bit of `range` is set.
    #[inline]
    pub fn all_set(&self, range: Range<u64>) -> bool {
        words(range).all(|(at, mask)| self.word(at) & mask == mask)
    }

    pub fn set(&self, range: Range<u64>) {
        words(range).for_each(|(at, mask)| self.store(at, self.word(at) | mask));
    }

    pub fn clear(&self, range: Range<u64>) {
        words(range).for_each(|(at, mask)| self.store(at, self.word(at) & !mask));
    }

    /// Sets each bit of `range` that `other` has set or does not have.
    pub fn or(&self, other: &Bits, range: Range<u64>) {
        let range = self.clip(range);
        let known = other.clip(range.clone());
        for (at, mask) in words(known.clone()) {
            self.store(at, self.word(at) | other.word(at) & mask);
        }
        self.set(known.end.max(range.start)..range.end);
    }

    /// Sets each bit that `other` has set or does not have, where bit 0 here stands for the bit `base` of `other`, a multiple of 64.
    pub fn or_from(&self, other: &Bits, base: u64) {
        let known = other.count.saturating_sub(base).min(self.count);
        for (at, mask) in words(0..known) {
            self.store(at, self.word(at) | other.word(base as usize / 8 + at) & mask);
        }
        self.set(known..self.count);
    }

    /// The numbers of the bits that are set.
    pub fn ones(&self) -> impl Iterator<Item = u64> {
        self.ones_in(0..self.count)
    }

    /// The numbers of the bits of `range` that are set.
    pub fn ones_in(&self, range: Range<u64>) -> impl Iterator<Item = u64> {
        let words = words(range).map(|(at, mask)| (at as u64 * 8, self.word(at) & mask));
        words
            .filter(|(_, word)| *word != 0)
            .flat_map(|(first, word)| (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| first + bit))
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    /// True when the memory is no part of the file any more.
    pub fn is_lost(&self) -> bool {
        self.memory.is_lost()
    }

    /// The CRC-32 of the bits. Others run in between, who may look at the bits and not change them.
    pub async fn crc(&self) -> u32 {
        let mut hash = crc32fast::Hasher::new();
        let mut part = vec![0; PART_BYTES.min(self.memory.len())];
        for at in (0..self.memory.len()).step_by(PART_BYTES) {
            let part = &mut part[..PART_BYTES.min(self.memory.len() - at)];
            self.memory.copy_to_slice(at, part);
            hash.update(part);
            if at > 0 {
                yield_now().await;
            }
        }
        hash.finalize()
    }

    /// Adds the bits to the bytes `into`, which stand for those from the byte `at` on. Others may set bits meanwhile.
    pub fn add_to(&self, at: usize, into: &mut [u8]) {
        let len = into.len().min(self.memory.len().saturating_sub(at));
        let mut part = vec![0; len];
        if len > 0 {
            self.memory.copy_to_slice(at, &mut part);
        }
        into.iter_mut().zip(part).for_each(|(into, byte)| *into |= byte);
    }

    /// The number of bits that are set.
    pub fn count_ones(&self) -> u64 {
        words(0..self.count).map(|(at, mask)| u64::from((self.word(at) & mask).count_ones())).sum()
    }

    #[inline]
    fn word(&self, at: usize) -> u64 {
        u64::from_le(self.memory.load_u64(at, Relaxed))
    }

    fn store(&self, at: usize, word: u64) {
        self.memory.store_u64(at, word.to_le(), Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bits(count: u64) -> Bits {
        Bits::new(Segment::zeroed(4096), count)
    }

    proptest! {
        #[test]
        fn bits_behave_as_a_vector(steps in proptest::collection::vec((any::<bool>(), 0..300u64, 0..200u64), 1..20)) {
            let (bits, mut model) = (bits(300), vec![false; 300]);
            for (sets, start, len) in steps {
                let range = bits.clip(start..start + len);
                if sets { bits.set(range.clone()) } else { bits.clear(range.clone()) }
                model[range.start as usize..range.end as usize].fill(sets);
                let ones: Vec<u64> = (0..300).filter(|at| model[*at as usize]).collect();
                prop_assert_eq!(bits.ones().collect::<Vec<_>>(), ones);
                let all = model[range.start as usize / 2..range.end as usize].iter().all(|bit| *bit);
                prop_assert_eq!(bits.all_set(range.start / 2..range.end), all);
            }
        }
    }

    #[test]
    fn what_the_other_does_not_know_is_set() {
        let (many, few) = (bits(100), bits(70));
        few.set(3..5);
        many.set(9..10);
        many.or(&few, 0..100);
        assert_eq!(many.ones().collect::<Vec<_>>(), [3, 4, 9].into_iter().chain(70..100).collect::<Vec<_>>());
        few.or(&many, 0..70);
        assert_eq!(few.ones().collect::<Vec<_>>(), [3, 4, 9]);
        let (some, none) = (bits(200), bits(70));
        few.or(&bits(70), 5..70);
        some.or(&few, 4..9);
        assert_eq!((some.ones().collect::<Vec<_>>(), some.count_ones()), (vec![4], 1));
        some.or(&none, 60..100);
        some.or(&none, 150..160);
        assert_eq!(some.count_ones(), 1 + 30 + 10);
        let (part, other) = (bits(40), bits(90));
        other.set(60..66);
        part.or_from(&other, 64);
        assert_eq!(part.ones().collect::<Vec<_>>(), [0, 1].into_iter().chain(26..40).collect::<Vec<_>>());
    }
}
