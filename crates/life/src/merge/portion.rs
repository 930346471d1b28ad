//! [`Portion`]: how much of a file is given back at once.

use std::time::Duration;

/// The first portion, in bytes: a block of a VHD as most are.
const FIRST_BYTES: u64 = 2 << 20;
/// The least that is given back at once. A portion waits for the requests to the file that are under way, and a device may take as long for
/// each command: smaller ones would not keep guests waiting for less, but more often.
const LEAST_BYTES: u64 = 512 << 10;
/// The most while guests have requests.
const MOST_BESIDE_GUESTS_BYTES: u64 = 4 << 20;
/// The most while they have none.
const MOST_BYTES: u64 = 64 << 20;
/// A portion that took longer than this is followed by smaller ones.
const TOO_LONG: Duration = Duration::from_millis(4);
/// One that took no longer than this, by larger ones.
const SHORT: Duration = Duration::from_millis(1);

/// How much is given back at once: the time that the last portions took says it. Some file systems tell their device of each run of freed
/// blocks, one after the other, and all requests to the file wait for that: how long does not depend on the bytes, but on how many runs they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Portion {
    bytes: u64,
}

impl Default for Portion {
    fn default() -> Self {
        Self { bytes: FIRST_BYTES }
    }
}

impl Portion {
    /// How many bytes to give back next.
    pub fn next_bytes(&mut self, beside_guests: bool) -> u64 {
        if beside_guests {
            self.bytes = self.bytes.min(MOST_BESIDE_GUESTS_BYTES);
        }
        self.bytes
    }

    /// Takes note of how long the last portion took, which had `given_bytes`.
    pub fn note(&mut self, given_bytes: u64, took: Duration) {
        if took > TOO_LONG {
            self.bytes = (self.bytes / 2).max(LEAST_BYTES);
        } else if took <= SHORT && given_bytes >= self.bytes / 2 {
            self.bytes = (self.bytes * 2).min(MOST_BYTES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portions_follow_the_time_that_they_take() {
        let mut portion = Portion::default();
        let mut take = |took_us: u64, beside_guests: bool| {
            let bytes = portion.next_bytes(beside_guests);
            portion.note(bytes, Duration::from_micros(took_us));
            bytes >> 10
        };
        assert_eq!([take(1001, true), take(4000, true), take(1000, true), take(100, true)], [2048, 2048, 2048, 4096]);
        assert_eq!([take(4001, true), take(9000, true), take(9000, true)], [4096, 2048, 1024]);
        assert_eq!([take(9000, true), take(9000, true), take(9000, true)], [512, 512, 512], "no less than that");
        // Without guests there is more to gain, and with the first request of one there is less at once.
        let most = (0..20).map(|_| take(100, false)).max();
        assert_eq!((most, take(100, true)), (Some(MOST_BYTES >> 10), MOST_BESIDE_GUESTS_BYTES >> 10));
    }

    #[test]
    fn the_end_of_a_block_says_nothing_of_larger_portions() {
        let mut portion = Portion { bytes: 1 << 20 };
        portion.note(4096, Duration::from_micros(10));
        assert_eq!(portion.next_bytes(false), 1 << 20);
    }
}
