//! The published map: where each block lies, and whether its bitmap is all ones. Read without locks.
//!
//! Kept in pages of 1,024 entries, and only where something is allocated: a 2 TiB image that holds little costs
//! little to open and to keep. Full pages cost 4,224 bytes for each 2 GiB of 2 MiB blocks.
//!
//! The map of a parent can be read page by page, when a page is needed ([`Bat::lazy`]): of a long chain of large disks, most pages
//! are never asked for.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::codec::bat::UNALLOCATED;

const PAGE: usize = 1024;

pub(crate) struct Bat {
    /// `None` in a slot: nothing is allocated there, which is known. In a map that is not lazy, an empty slot says the same.
    pages: Box<[OnceLock<Option<Box<Page>>>]>,
    entries: AtomicU32,
    /// Pages that have no slot filled are not read yet.
    is_lazy: bool,
}

struct Page {
    sectors: [AtomicU32; PAGE],
    full: [AtomicU64; PAGE / 64],
}

impl Page {
    fn new() -> Box<Self> {
        Box::new(Self {
            sectors: [const { AtomicU32::new(UNALLOCATED) }; PAGE],
            full: [const { AtomicU64::new(0) }; PAGE / 64],
        })
    }
}

impl Bat {
    /// A map of `entries` blocks, none allocated. It can get up to `most` entries.
    pub(crate) fn new(entries: u32, most: u32) -> Self {
        let pages = (0..most.max(entries).div_ceil(PAGE as u32)).map(|_| OnceLock::new()).collect();
        Self { pages, entries: AtomicU32::new(entries), is_lazy: false }
    }

    /// A map of `entries` blocks of which no page has been read.
    pub(crate) fn lazy(entries: u32) -> Self {
        Self { is_lazy: true, ..Self::new(entries, 0) }
    }

    pub(crate) fn is_lazy(&self) -> bool {
        self.is_lazy
    }

    /// The page of `block`, if it has to be read first.
    pub(crate) fn missing_page(&self, block: u32) -> Option<u32> {
        let page = block as usize / PAGE;
        (self.is_lazy && self.pages.get(page).is_some_and(|slot| slot.get().is_none())).then_some(page as u32)
    }

    /// The blocks of a page.
    pub(crate) fn blocks_of(&self, page: u32) -> Range<u32> {
        let start = page * PAGE as u32;
        start..(start + PAGE as u32).min(self.entries())
    }

    /// Publishes what a page was found to hold: the places of its blocks, and whether all of a block is there.
    pub(crate) fn fill(&self, page: u32, sectors: &[u32], is_full: impl Fn(u32) -> bool) {
        let found = sectors.iter().any(|&sector| sector != UNALLOCATED).then(|| {
            let found = Page::new();
            for (slot, &sector) in sectors.iter().enumerate().filter(|(_, sector)| **sector != UNALLOCATED) {
                found.sectors[slot].store(sector, Ordering::Relaxed);
                let full = u64::from(is_full(page * PAGE as u32 + slot as u32)) << (slot % 64);
                found.full[slot / 64].fetch_or(full, Ordering::Relaxed);
            }
            found
        });
        // Somebody else may have read the same page.
        drop(self.pages[page as usize].set(found));
    }

    pub(crate) fn entries(&self) -> u32 {
        self.entries.load(Ordering::Acquire)
    }

    /// Adds blocks, none of them allocated, so that there are `entries`.
    pub(crate) fn grow(&self, entries: u32) {
        self.entries.fetch_max(entries, Ordering::AcqRel);
    }

    fn page(&self, block: u32) -> Option<&Page> {
        self.pages.get(block as usize / PAGE)?.get()?.as_deref()
    }

    /// The page of `block`, with room for it: in a lazy map, only pages that hold something are changed.
    fn page_mut(&self, block: u32) -> Option<&Page> {
        self.pages[block as usize / PAGE].get_or_init(|| Some(Page::new())).as_deref()
    }

    /// The sector at which the block's bitmap lies; `None` when it is not allocated.
    pub(crate) fn get(&self, block: u32) -> Option<u32> {
        let sector = self.page(block)?.sectors[block as usize % PAGE].load(Ordering::Acquire);
        (sector != UNALLOCATED).then_some(sector)
    }

    /// True when every sector of the block is known to be in this file.
    pub(crate) fn is_full(&self, block: u32) -> bool {
        let slot = block as usize % PAGE;
        self.page(block).is_some_and(|page| page.full[slot / 64].load(Ordering::Acquire) & (1 << (slot % 64)) != 0)
    }

    /// Publishes where a block lies. Its bitmap and data in the file must be right already.
    pub(crate) fn set(&self, block: u32, sector: u32) {
        if let Some(page) = self.page_mut(block) {
            page.sectors[block as usize % PAGE].store(sector, Ordering::Release);
        }
    }

    /// Publishes that a block is not allocated any more.
    pub(crate) fn clear(&self, block: u32) {
        self.set(block, UNALLOCATED);
        self.set_full(block, false);
    }

    /// Publishes whether the block's bitmap is all ones.
    pub(crate) fn set_full(&self, block: u32, full: bool) {
        let slot = block as usize % PAGE;
        let Some(page) = self.page_mut(block) else { return };
        let word = &page.full[slot / 64];
        match full {
            true => word.fetch_or(1 << (slot % 64), Ordering::AcqRel),
            false => word.fetch_and(!(1 << (slot % 64)), Ordering::AcqRel),
        };
    }

    /// The blocks that are allocated with their sectors, in order. Of a lazy map, those that were read.
    pub(crate) fn allocated(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.pages.iter().enumerate().filter_map(|(at, page)| Some((at, page.get()?.as_deref()?))).flat_map(
            |(at, page)| {
                page.sectors.iter().enumerate().filter_map(move |(slot, sector)| {
                    let sector = sector.load(Ordering::Acquire);
                    (sector != UNALLOCATED).then_some(((at * PAGE + slot) as u32, sector))
                })
            },
        )
    }

    /// The first block at or after `block` and before `until` that is allocated, or may be: the first one of a page that is not read
    /// yet counts.
    pub(crate) fn next_allocated(&self, block: u32, until: u32) -> Option<u32> {
        let mut at = block;
        while at < self.entries().min(until) {
            // In this order: a page that is read meanwhile may hold something.
            if self.missing_page(at).is_some() {
                return Some(at);
            }
            match self.page(at) {
                None => at = (at / PAGE as u32 + 1).saturating_mul(PAGE as u32),
                Some(_) if self.get(at).is_some() => return Some(at),
                Some(_) => at += 1,
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lazy_map_says_what_it_does_not_know() {
        let bat = Bat::lazy(3000);
        assert_eq!((bat.get(5), bat.missing_page(5), bat.next_allocated(5, 3000)), (None, Some(0), Some(5)));
        let mut sectors = vec![UNALLOCATED; PAGE];
        bat.fill(0, &sectors, |_| true);
        assert_eq!((bat.missing_page(5), bat.next_allocated(5, 3000)), (None, Some(1024)));
        (sectors[6], sectors[7]) = (70, 80);
        bat.fill(1, &sectors, |block| block == 1031);
        assert_eq!(
            (bat.get(1030), bat.is_full(1030), bat.get(1031), bat.is_full(1031)),
            (Some(70), false, Some(80), true)
        );
        assert_eq!((bat.next_allocated(1024, 3000), bat.next_allocated(1032, 3000)), (Some(1030), Some(2048)));
        assert_eq!((bat.blocks_of(2), bat.missing_page(2999), bat.missing_page(4000)), (2048..3000, Some(2), None));
        assert_eq!(bat.allocated().collect::<Vec<_>>(), [(1030, 70), (1031, 80)]);
    }

    #[test]
    fn blocks_come_and_go() {
        let bat = Bat::new(4999, 5000);
        bat.grow(5000);
        assert_eq!((bat.get(4999), bat.next_allocated(0, 5000)), (None, None));
        bat.set(2049, 7);
        bat.set_full(2049, true);
        assert_eq!((bat.get(2049), bat.is_full(2049), bat.is_full(2050)), (Some(7), true, false));
        assert_eq!((bat.next_allocated(3, 5000), bat.next_allocated(2050, 5000)), (Some(2049), None));
        assert_eq!(bat.next_allocated(3, 2049), None);
        assert_eq!(bat.allocated().collect::<Vec<_>>(), [(2049, 7)]);
        bat.clear(2049);
        assert!(bat.get(2049).is_none() && !bat.is_full(2049));
    }
}
