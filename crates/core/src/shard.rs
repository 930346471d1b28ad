//! A number for each thread, by which it finds its own part of what is split so that threads do not share cache lines.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many parts such things have. Threads beyond this many share parts.
pub const SHARDS: usize = 16;

/// This thread has not asked for a number.
const UNKNOWN: usize = usize::MAX;

thread_local!(static MINE: Cell<usize> = const { Cell::new(UNKNOWN) });

/// This thread's number, below [`SHARDS`].
#[inline]
pub fn shard_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    match MINE.get() {
        UNKNOWN => {
            let number = NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS;
            MINE.set(number);
            number
        }
        // Known to be in bounds already, but not to the compiler.
        number => number % SHARDS,
    }
}

/// Gives this thread another number, so that a simulator with one thread can be several workers by turns.
pub fn act_as_shard(number: usize) {
    MINE.set(number % SHARDS);
}
