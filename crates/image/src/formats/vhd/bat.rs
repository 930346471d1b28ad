//! The published map: where each block lies, and whether its bitmap is all ones. Read without locks.
//!
//! Kept in pages of 1,024 entries, and only where something is allocated: a 2 TiB image that holds little costs
//! little to open and to keep. Full pages cost 4,224 bytes for each 2 GiB of 2 MiB blocks.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::codec::bat::UNALLOCATED;

const PAGE: usize = 1024;

pub(crate) struct Bat {
    pages: Box<[OnceLock<Box<Page>>]>,
    entries: AtomicU32,
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
        Self { pages, entries: AtomicU32::new(entries) }
    }

    pub(crate) fn entries(&self) -> u32 {
        self.entries.load(Ordering::Acquire)
    }

    /// Adds blocks, none of them allocated, so that there are `entries`.
    pub(crate) fn grow(&self, entries: u32) {
        self.entries.fetch_max(entries, Ordering::AcqRel);
    }

    fn page(&self, block: u32) -> Option<&Page> {
        self.pages.get(block as usize / PAGE)?.get().map(|page| &**page)
    }

    fn page_mut(&self, block: u32) -> &Page {
        self.pages[block as usize / PAGE].get_or_init(Page::new)
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
        self.page_mut(block).sectors[block as usize % PAGE].store(sector, Ordering::Release);
    }

    /// Publishes that a block is not allocated any more.
    pub(crate) fn clear(&self, block: u32) {
        self.set(block, UNALLOCATED);
        self.set_full(block, false);
    }

    /// Publishes whether the block's bitmap is all ones.
    pub(crate) fn set_full(&self, block: u32, full: bool) {
        let slot = block as usize % PAGE;
        let word = &self.page_mut(block).full[slot / 64];
        match full {
            true => word.fetch_or(1 << (slot % 64), Ordering::AcqRel),
            false => word.fetch_and(!(1 << (slot % 64)), Ordering::AcqRel),
        };
    }

    /// The blocks that are allocated with their sectors, in order.
    pub(crate) fn allocated(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.pages.iter().enumerate().filter_map(|(at, page)| Some((at, page.get()?))).flat_map(|(at, page)| {
            page.sectors.iter().enumerate().filter_map(move |(slot, sector)| {
                let sector = sector.load(Ordering::Acquire);
                (sector != UNALLOCATED).then_some(((at * PAGE + slot) as u32, sector))
            })
        })
    }

    /// The first allocated block at or after `block` and before `until`.
    pub(crate) fn next_allocated(&self, block: u32, until: u32) -> Option<u32> {
        let mut at = block;
        while at < self.entries().min(until) {
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
