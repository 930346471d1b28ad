//! The pieces of L2 tables that are in memory: a cache of fixed size that is read without locks.
//!
//! A slice is 4 KiB of an L2 table (the whole table where clusters are smaller). Slices lie in sets of eight slots. A
//! slot has a version that is odd while its content changes: a reader notes the version, reads, and looks at the
//! version again; if it differs, what was read is thrown away. So a look-up takes no lock, allocates nothing and
//! writes nothing but, once, the mark that the slot is in use. To put a slice in, a task takes the set's lock and
//! replaces a slot that was not used since the last round.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Mutex, OnceLock};

/// Slots of a set.
const WAYS: usize = 8;
/// What a slot costs beside its entries, in bytes.
const SLOT_BYTES: usize = 64;

/// The entries of a slice; half of the numbers are bitmaps of subclusters where L2 entries are extended.
pub(crate) type Entries = [AtomicU64];

/// Slices by number.
pub(crate) struct Slices {
    sets: Box<[Set]>,
    /// 64-bit words of a slice.
    words: usize,
}

#[derive(Default)]
struct Set {
    slots: [Slot; WAYS],
    /// The slot to look at first for a new slice. Held while a slot changes.
    hand: Mutex<usize>,
}

#[derive(Default)]
struct Slot {
    version: AtomicU64,
    /// The slice's number plus one; 0 = none.
    tag: AtomicU64,
    used: AtomicBool,
    entries: OnceLock<Box<Entries>>,
}

impl Slot {
    /// Returns the answer of `read` for the entries, if the slot holds the slice `tag` during the whole call.
    #[inline]
    fn read<T>(&self, tag: u64, read: impl FnOnce(&Entries) -> T) -> Option<T> {
        let version = self.version.load(Ordering::Acquire);
        if version & 1 == 1 || self.tag.load(Ordering::Relaxed) != tag {
            return None;
        }
        let answer = read(self.entries.get()?);
        fence(Ordering::Acquire);
        if self.version.load(Ordering::Relaxed) != version {
            return None;
        }
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
        Some(answer)
    }

    /// Changes some words. One caller at a time.
    fn change(&self, at: usize, words: &[u64]) {
        let Some(entries) = self.entries.get().and_then(|entries| entries.get(at..at + words.len())) else { return };
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        for (entry, value) in entries.iter().zip(words) {
            entry.store(*value, Ordering::Relaxed);
        }
        self.version.store(version + 2, Ordering::Release);
    }

    /// Replaces the content. One caller at a time.
    fn replace(&self, tag: u64, words: usize, content: impl Iterator<Item = u64>) {
        let entries = self.entries.get_or_init(|| (0..words).map(|_| AtomicU64::new(0)).collect());
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.tag.store(tag, Ordering::Relaxed);
        for (entry, value) in entries.iter().zip(content) {
            entry.store(value, Ordering::Relaxed);
        }
        self.version.store(version + 2, Ordering::Release);
        self.used.store(true, Ordering::Relaxed);
    }
}

impl Slices {
    /// Changes words of a slice, from number `at` on, if the slice is in memory. Readers see all of them or none.
    pub(crate) fn update(&self, slice: u64, at: usize, words: &[u64]) {
        let (set, tag) = (self.set(slice), slice + 1);
        let _hand = set.hand.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(slot) = set.slots.iter().find(|slot| slot.tag.load(Ordering::Relaxed) == tag) {
            slot.change(at, words);
        }
    }

    /// A cache for at most `most` slices of `slice_bytes` each. It takes no more than `budget_bytes` of memory, but
    /// always has room for eight slices. A slot's entries are allocated when it is first used.
    pub(crate) fn new(budget_bytes: usize, slice_bytes: usize, most: u64) -> Self {
        let slots = (budget_bytes / (slice_bytes + SLOT_BYTES)).min(usize::try_from(most).unwrap_or(usize::MAX));
        let sets = slots.div_ceil(WAYS).max(1);
        Self { sets: (0..sets).map(|_| Set::default()).collect(), words: slice_bytes / 8 }
    }

    fn set(&self, slice: u64) -> &Set {
        // Slices that are powers of two apart must not all meet in one set.
        let mixed = slice.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        &self.sets[((mixed * self.sets.len() as u64) >> 32) as usize]
    }

    /// Returns the answer of `read` for a slice's entries; `None` when the slice is not in memory. `read` may see
    /// entries of several slices mixed, and must not panic then; that answer is thrown away.
    #[inline]
    pub(crate) fn look<T>(&self, slice: u64, read: impl Fn(&Entries) -> T) -> Option<T> {
        let tag = slice + 1;
        self.set(slice).slots.iter().find_map(|slot| slot.read(tag, &read))
    }

    /// Puts a slice into the cache. It may replace another one.
    pub(crate) fn insert(&self, slice: u64, content: impl Iterator<Item = u64>) {
        let (set, tag) = (self.set(slice), slice + 1);
        let mut hand = set.hand.lock().unwrap_or_else(|e| e.into_inner());
        if set.slots.iter().any(|slot| slot.tag.load(Ordering::Relaxed) == tag) {
            return;
        }
        // Two rounds: the first one may do nothing but clear marks.
        for _ in 0..2 * WAYS {
            let slot = &set.slots[*hand];
            *hand = (*hand + 1) % WAYS;
            if !slot.used.swap(false, Ordering::Relaxed) {
                slot.replace(tag, self.words, content);
                return;
            }
        }
        // Readers have marked all slots again meanwhile: replace the next one all the same.
        set.slots[*hand].replace(tag, self.words, content);
        *hand = (*hand + 1) % WAYS;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(slices: &Slices, slice: u64) -> Option<u64> {
        slices.look(slice, |entries| entries[0].load(Ordering::Relaxed))
    }

    #[test]
    fn what_was_brought_in_is_found_until_it_goes() {
        let slices = Slices::new(0, 512, 1000);
        assert_eq!(first(&slices, 3), None);
        for slice in 0..8 {
            slices.insert(slice, std::iter::repeat(slice * 10));
        }
        assert!((0..8).all(|slice| first(&slices, slice) == Some(slice * 10)));
        slices.insert(99, std::iter::repeat(7));
        assert_eq!(first(&slices, 99), Some(7));
        assert_eq!((0..8).filter(|slice| first(&slices, *slice).is_some()).count(), 7);
    }

    #[test]
    fn memory_follows_the_budget_and_what_is_there() {
        let slots = |budget, most| Slices::new(budget, 4096, most).sets.len() * WAYS;
        assert_eq!((slots(32 << 20, u64::MAX), slots(32 << 20, 3), slots(0, 1000)), (8072, 8, 8));
    }

    /// Readers never see a slice that is half another one.
    #[test]
    fn a_slice_that_changes_is_not_seen() {
        let slices = Slices::new(0, 4096, 1000);
        let same = |entries: &Entries| {
            let first = entries[0].load(Ordering::Relaxed);
            (first, entries.iter().all(|entry| entry.load(Ordering::Relaxed) == first))
        };
        std::thread::scope(|scope| {
            scope.spawn(|| (0..20_000).for_each(|n: u64| slices.insert(n % 24, std::iter::repeat(n % 24))));
            for _ in 0..2 {
                scope.spawn(|| {
                    for n in 0..20_000u64 {
                        if let Some((first, all_same)) = slices.look(n % 24, same) {
                            assert!(all_same && first == n % 24, "slice {} has entries of slice {first}", n % 24);
                        }
                    }
                });
            }
        });
    }
}
