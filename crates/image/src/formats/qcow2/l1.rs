//! The first level of the map in memory: read without locks, also while it becomes longer.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::codec::MAX_L1_BYTES;

/// Entries that are added to a table that grows come in pages of so many.
const PAGE: usize = 4096;

/// The entries that the disk needs. No entry is the same as an entry that names no table.
pub(super) struct L1 {
    /// Those that there were when the image was opened.
    first: Box<[AtomicU64]>,
    /// Those that came since. An image that is never written has no place for more.
    more: Box<[OnceLock<Box<[AtomicU64]>>]>,
    len: AtomicUsize,
}

impl L1 {
    pub fn new(entries: impl Iterator<Item = u64>, can_grow: bool) -> Self {
        let first: Box<[AtomicU64]> = entries.map(AtomicU64::new).collect();
        let pages = if can_grow { (MAX_L1_BYTES as usize / 8).div_ceil(PAGE) } else { 0 };
        let len = AtomicUsize::new(first.len());
        Self { first, more: (0..pages).map(|_| OnceLock::new()).collect(), len }
    }

    pub fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    fn entry(&self, number: usize) -> Option<&AtomicU64> {
        match number.checked_sub(self.first.len()) {
            None => self.first.get(number),
            Some(number) => self.more.get(number / PAGE)?.get()?.get(number % PAGE),
        }
    }

    pub fn get(&self, number: usize) -> u64 {
        self.entry(number).map_or(0, |entry| entry.load(Ordering::Acquire))
    }

    /// Changes an entry, if the disk needs it.
    pub fn set(&self, number: usize, value: u64) {
        if let Some(entry) = self.entry(number) {
            entry.store(value, Ordering::Release);
        }
    }

    pub fn entries(&self) -> impl Iterator<Item = u64> {
        (0..self.len()).map(|number| self.get(number))
    }

    /// Adds entries that name no table, so that there are `len`.
    pub fn grow(&self, len: usize) {
        let pages = len.saturating_sub(self.first.len()).div_ceil(PAGE);
        for page in self.more.iter().take(pages) {
            page.get_or_init(|| (0..PAGE).map(|_| AtomicU64::new(0)).collect());
        }
        self.len.fetch_max(len, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_added_and_the_old_ones_stay() {
        let l1 = L1::new([7, 8, 9].into_iter(), true);
        assert_eq!((l1.len(), l1.get(2), l1.get(3)), (3, 9, 0));
        l1.grow(3 + PAGE + 1);
        l1.set(3 + PAGE, 11);
        l1.set(3, 10);
        assert_eq!((l1.len(), l1.get(2), l1.get(3), l1.get(3 + PAGE)), (PAGE + 4, 9, 10, 11));
        assert_eq!(l1.entries().filter(|entry| *entry != 0).collect::<Vec<_>>(), [7, 8, 9, 10, 11]);
        l1.grow(5);
        assert_eq!(l1.len(), PAGE + 4, "it never becomes shorter");
    }
}
