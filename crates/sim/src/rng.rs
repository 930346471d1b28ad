//! The one source of chance: a small seeded generator, so that a seed says everything about a run.
//!
//! The generator is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014):
//! one word of state, and streams can be split off, so that one part's draws do not shift another's.

/// A seeded generator.
#[derive(Clone, Debug)]
pub struct Rng {
    state: u64,
}

/// Spreads the bits of `word`: the output function of SplitMix64.
pub fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

impl Rng {
    /// The generator of `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: mix(seed ^ 0x5350_494C_4553_494D) }
    }

    /// An independent generator for the part named `stream`; this one is not advanced.
    pub fn split(&self, stream: u64) -> Self {
        Self::new(self.state ^ mix(stream.wrapping_add(1)))
    }

    /// The next 64 bits.
    pub fn word(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.state)
    }

    /// A number below `bound` (0 when `bound` is 0).
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.word() % bound }
    }

    /// An index into something of `len` elements (0 when empty).
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True with a chance of `chance` in `of`.
    pub fn chance(&mut self, chance: u64, of: u64) -> bool {
        self.below(of) < chance
    }

    /// A number from 1 to `high`, small ones far likelier: every doubling is as likely as the next.
    pub fn skewed(&mut self, high: u64) -> u64 {
        let doublings = u64::from(64 - high.leading_zeros());
        let top = 1u64 << self.below(doublings);
        self.between(top, (top * 2 - 1).min(high))
    }

    /// One of `items`.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.index(items.len())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_and_streams_differ() {
        let draw = |mut rng: Rng| (0..8).map(|_| rng.word()).collect::<Vec<_>>();
        assert_eq!(draw(Rng::new(7)), draw(Rng::new(7)));
        assert_ne!(draw(Rng::new(7)), draw(Rng::new(8)));
        assert_ne!(draw(Rng::new(7).split(0)), draw(Rng::new(7).split(1)));
    }

    #[test]
    fn skewed_numbers_stay_in_range_and_reach_both_ends() {
        let mut rng = Rng::new(1);
        let drawn: Vec<u64> = (0..4000).map(|_| rng.skewed(100)).collect();
        assert_eq!((drawn.iter().min(), drawn.iter().max()), (Some(&1), Some(&100)));
    }
}
