//! Grace periods: when has every reader that may have seen an old mapping finished?
//!
//! A reader looks an address up without a lock and then reads there; the block at that address may meanwhile be freed.
//! It must not be given to another block before the reader is done. Readers count themselves in one of two phases;
//! turning the phase and waiting until the old one is empty proves that no reader from before is left.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

const SHARDS: usize = 8;

/// One counter on a cache line of its own, so that workers do not slow each other down.
#[derive(Default)]
#[repr(align(128))]
struct Counter(AtomicUsize);

/// Counts the readers of two phases.
#[derive(Default)]
pub(crate) struct Grace {
    phase: AtomicUsize,
    counts: [[Counter; SHARDS]; 2],
}

/// A reader in its phase.
pub struct Reader<'a>(&'a AtomicUsize);

impl Grace {
    /// Counts a reader in; it is counted out when the value is dropped.
    pub(crate) fn enter(&self) -> Reader<'_> {
        let shard = shard();
        loop {
            let phase = self.phase.load(Ordering::SeqCst);
            let count = &self.counts[phase][shard].0;
            count.fetch_add(1, Ordering::SeqCst);
            if self.phase.load(Ordering::SeqCst) == phase {
                return Reader(count);
            }
            count.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Turns the phase, and returns the old one for [`Grace::is_over`]. Only to be called when the phase turned
    /// to is empty, that is after the one before was over. One caller at a time.
    pub(crate) fn turn(&self) -> usize {
        let old = self.phase.load(Ordering::SeqCst);
        self.phase.store(1 - old, Ordering::SeqCst);
        old
    }

    /// True when no reader of `phase` is left.
    pub(crate) fn is_over(&self, phase: usize) -> bool {
        self.counts[phase].iter().all(|count| count.0.load(Ordering::SeqCst) == 0)
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static MINE: Cell<Option<usize>> = const { Cell::new(None) });
    MINE.with(|mine| {
        mine.get().unwrap_or_else(|| {
            let shard = NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS;
            mine.set(Some(shard));
            shard
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_is_over_when_its_last_reader_left() {
        let grace = Grace::default();
        let reader = grace.enter();
        let old = grace.turn();
        let later = grace.enter();
        assert!(!grace.is_over(old));
        drop(reader);
        assert!(grace.is_over(old));
        drop(later);
    }
}
