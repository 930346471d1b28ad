//! [`Pages`]: the bytes of a simulated file, sparse, so that a file of a gibibyte costs what was written to it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The size of a page in bytes.
pub const PAGE: u64 = 4096;

type Page = [u8; PAGE as usize];

/// Sparse bytes with a length. Clones share pages until one of them writes.
#[derive(Clone, Default)]
pub struct Pages {
    map: BTreeMap<u64, Arc<Page>>,
    len: u64,
}

/// The parts of `range` page by page: page number, part within the page, bytes before it.
fn parts(range: Range<u64>) -> impl Iterator<Item = (u64, Range<usize>, usize)> {
    let pages = range.start / PAGE..range.end.div_ceil(PAGE);
    pages.filter_map(move |page| {
        let start = range.start.max(page * PAGE);
        let end = range.end.min((page + 1) * PAGE);
        let within = (start - page * PAGE) as usize..(end.max(start) - page * PAGE) as usize;
        (start < end).then_some((page, within, (start - range.start) as usize))
    })
}

impl Pages {
    /// `len_bytes` that are not zero anywhere, without a memory of their own.
    pub fn old_bytes(len_bytes: u64) -> Self {
        let mut pages = Self::default();
        pages.add_old_bytes(len_bytes);
        pages
    }

    /// Makes them `len_bytes` long, if they are shorter: with bytes that are not zero anywhere.
    pub fn add_old_bytes(&mut self, len_bytes: u64) {
        let page = Arc::new([0x5A; PAGE as usize]);
        let numbers = self.len.div_ceil(PAGE)..len_bytes.div_ceil(PAGE);
        self.map.extend(numbers.map(|number| (number, page.clone())));
        self.len = self.len.max(len_bytes);
    }

    /// The length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True when there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of bytes that have memory behind them.
    pub fn allocated_bytes(&self) -> u64 {
        self.map.len() as u64 * PAGE
    }

    /// Fills `into` from `offset`; holes and what lies past the end read as zeroes.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        for (page, within, done) in parts(offset..offset + into.len() as u64) {
            let part = &mut into[done..done + within.len()];
            match self.map.get(&page) {
                Some(bytes) => part.copy_from_slice(&bytes[within]),
                None => part.fill(0),
            }
        }
    }

    /// Writes `bytes` at `offset`, growing the length where needed.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let end = offset + bytes.len() as u64;
        for (page, within, done) in parts(offset..end) {
            let target = self.map.entry(page).or_insert_with(|| Arc::new([0; PAGE as usize]));
            let len = within.len();
            Arc::make_mut(target)[within].copy_from_slice(&bytes[done..done + len]);
        }
        self.len = self.len.max(end);
    }

    /// Makes `range` read as zeroes and frees whole pages; the length stays.
    pub fn zero(&mut self, range: Range<u64>) {
        let touched: Vec<u64> = self
            .map
            .range(range.start / PAGE..range.end.div_ceil(PAGE).max(range.start / PAGE))
            .map(|(page, _)| *page)
            .collect();
        for page in touched {
            let start = range.start.max(page * PAGE) - page * PAGE;
            let end = range.end.min((page + 1) * PAGE) - page * PAGE;
            if start == 0 && end == PAGE {
                self.map.remove(&page);
            } else if let Some(bytes) = self.map.get_mut(&page) {
                Arc::make_mut(bytes)[start as usize..end as usize].fill(0);
            }
        }
    }

    /// Sets the length; what a shorter length cuts off is gone, what a longer one adds reads as zeroes.
    pub fn set_len(&mut self, len: u64) {
        if len < self.len {
            self.zero(len..self.len.next_multiple_of(PAGE));
        }
        self.len = len;
    }

    /// Length of the run of data (`false`) or hole (`true`) that starts at `offset`, up to the end.
    pub fn run_at(&self, offset: u64) -> (u64, bool) {
        let first = offset / PAGE;
        let is_hole = !self.map.contains_key(&first);
        let last = self.len.div_ceil(PAGE);
        let end = (first..last)
            .find(|page| self.map.contains_key(page) == is_hole)
            .map_or(self.len, |page| (page * PAGE).min(self.len));
        (end - offset, is_hole)
    }

    /// How many pages that have no memory yet a write of `range` would need.
    pub fn new_pages(&self, range: Range<u64>) -> u64 {
        parts(range).filter(|(page, ..)| !self.map.contains_key(page)).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pages: &Pages, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![9; len];
        pages.read(offset, &mut bytes);
        bytes
    }

    #[test]
    fn what_is_written_is_read_over_page_borders() {
        let mut pages = Pages::default();
        pages.write(PAGE - 2, &[1, 2, 3, 4]);
        assert_eq!((pages.len(), pages.allocated_bytes()), (PAGE + 2, 2 * PAGE));
        assert_eq!(read(&pages, PAGE - 3, 6), [0, 1, 2, 3, 4, 0]);
    }

    #[test]
    fn a_cut_tail_reads_as_zeroes_when_grown_again() {
        let mut pages = Pages::default();
        pages.write(0, &[7; 3 * PAGE as usize]);
        pages.set_len(PAGE + 1);
        pages.set_len(3 * PAGE);
        assert_eq!(read(&pages, PAGE - 1, 4), [7, 7, 0, 0]);
        assert_eq!(pages.allocated_bytes(), 2 * PAGE);
        assert_eq!((pages.run_at(1), pages.run_at(2 * PAGE)), ((2 * PAGE - 1, false), (PAGE, true)));
    }

    #[test]
    fn a_punch_frees_whole_pages_only_and_clones_are_apart() {
        let mut pages = Pages::default();
        pages.write(0, &[7; 3 * PAGE as usize]);
        let before = pages.clone();
        pages.zero(10..2 * PAGE);
        assert_eq!((read(&pages, 9, 2), pages.allocated_bytes()), (vec![7, 0], 2 * PAGE));
        assert_eq!(read(&before, 9, 2), [7, 7]);
        assert_eq!(pages.new_pages(0..3 * PAGE), 1);
    }
}
