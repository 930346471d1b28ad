//! Which request comes next: direction, block, pace.

use std::ops::Range;

/// A small fast generator (xorshift64* by Vigna): repeatable from its seed, not for secrets.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator whose row depends on `seed` and `stream` only.
    pub fn new(seed: u64, stream: u64) -> Self {
        let mixed =
            (seed ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_left(31);
        let mut rng = Self(mixed | 1);
        for _ in 0..8 {
            rng.next_u64();
        }
        rng
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `limit`, which is not zero.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(limit)) >> 64) as u64
    }
}

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

/// The row of blocks and directions of one connection.
#[derive(Clone, Debug)]
pub struct Plan {
    rng: Rng,
    blocks: Range<u64>,
    random: bool,
    read_percent: u64,
    cursor: u64,
}

impl Plan {
    /// Requests over `blocks` (not empty), `read_percent` of them reads.
    pub fn new(rng: Rng, blocks: Range<u64>, random: bool, read_percent: u8) -> Self {
        let cursor = blocks.start;
        Self { rng, blocks, random, read_percent: u64::from(read_percent), cursor }
    }

    /// The next direction.
    pub fn direction(&mut self) -> Direction {
        let read = match self.read_percent {
            0 => false,
            100 => true,
            percent => self.rng.below(100) < percent,
        };
        if read { Direction::Read } else { Direction::Write }
    }

    /// The next block.
    pub fn block(&mut self) -> u64 {
        if self.random {
            return self.blocks.start + self.rng.below(self.blocks.end - self.blocks.start);
        }
        let block = self.cursor;
        self.cursor = if block + 1 == self.blocks.end { self.blocks.start } else { block + 1 };
        block
    }
}

/// Splits `blocks` into `parts` runs of nearly one length, none of them empty unless there are too few blocks.
pub fn split(blocks: u64, parts: u64) -> Vec<Range<u64>> {
    let at = |part: u64| (u128::from(blocks) * u128::from(part) / u128::from(parts)) as u64;
    (0..parts).map(|part| at(part)..at(part + 1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_blocks_cover_the_region_evenly() {
        let mut plan = Plan::new(Rng::new(1, 0), 100..116, true, 70);
        let mut hits = [0u32; 16];
        (0..16_000).for_each(|_| hits[(plan.block() - 100) as usize] += 1);
        assert!(hits.iter().all(|n| (850..1150).contains(n)), "{hits:?}");
        let reads = (0..10_000).filter(|_| plan.direction() == Direction::Read).count();
        assert!((6800..7200).contains(&reads), "{reads}");
    }

    #[test]
    fn sequential_blocks_wrap() {
        let mut plan = Plan::new(Rng::new(1, 0), 5..8, false, 0);
        let row: Vec<u64> = (0..5).map(|_| plan.block()).collect();
        assert_eq!(row, [5, 6, 7, 5, 6]);
    }

    #[test]
    fn seeds_repeat_and_streams_differ() {
        let row = |seed, stream| {
            let mut rng = Rng::new(seed, stream);
            [rng.next_u64(), rng.next_u64()]
        };
        assert_eq!(row(3, 1), row(3, 1));
        assert_ne!(row(3, 1), row(3, 2));
        assert_ne!(row(0, 0), row(1, 0));
    }

    #[test]
    fn parts_meet() {
        assert_eq!(split(10, 3), [0..3, 3..6, 6..10]);
    }
}
