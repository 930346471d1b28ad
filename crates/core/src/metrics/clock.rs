//! The clock of all counters: CLOCK_MONOTONIC in nanoseconds.
//!
//! Reading the clock costs 20 to 25 ns, as much as everything else that counting does. A worker therefore marks where
//! each of its turns begins, and what begins within that turn shares one reading.

use std::cell::Cell;

use nix::time::{ClockId, clock_gettime};

/// This thread has no turns.
const NO_TURNS: u64 = 0;
/// Nobody has asked for the time in this turn.
const NOT_READ: u64 = 1;

thread_local!(static TURN_NS: Cell<u64> = const { Cell::new(NO_TURNS) });

/// The time now.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every Linux has this clock");
    now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64
}

/// The time when this thread's turn was first asked for it; the time now on a thread that has no turns.
#[inline]
pub fn turn_ns() -> u64 {
    match TURN_NS.get() {
        NO_TURNS => now_ns(),
        NOT_READ => {
            let now = now_ns();
            TURN_NS.set(now);
            now
        }
        turn => turn,
    }
}

/// Begins a turn of this thread: [`turn_ns`] reads the clock once more. A worker calls it each time it goes round its
/// loop.
#[inline]
pub fn begin_turn() {
    TURN_NS.set(NOT_READ);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_has_one_time() {
        let before = now_ns();
        begin_turn();
        let turn = turn_ns();
        std::thread::sleep(std::time::Duration::from_millis(1));
        assert_eq!(turn_ns(), turn);
        begin_turn();
        assert!(before <= turn && turn < turn_ns());
    }

    #[test]
    fn a_thread_without_turns_reads_the_clock_each_time() {
        let first = turn_ns();
        std::thread::sleep(std::time::Duration::from_millis(1));
        assert!(first < turn_ns());
    }
}
