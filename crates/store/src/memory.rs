//! Stores without a file: [`MemStore`] keeps bytes in memory, sparsely; [`NullStore`] keeps nothing.

use std::collections::BTreeMap;
use std::future::{Future, ready};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use spile_core::{Error, ErrorKind, Result, Segments, Store, StoreExtent, StoreInfo, StoreOffset, Via};

/// The unit that is allocated, locked and freed.
const PAGE: u64 = 16 << 10;
const SHARDS: u64 = 64;

type Pages = BTreeMap<u64, Box<[u8]>>;

/// A store's length at most, as the kernel has it.
const MAX_LEN: u64 = i64::MAX as u64;
/// Pages of data that one answer about extents covers at most.
const MAX_RUN_PAGES: u64 = 1 << 12;

/// Bytes in memory. What was never written takes no space and reads as zeroes. Clones are the same store.
///
/// A page belongs to one of the shards by its number, and each shard has its lock: an operation takes effect page by page.
#[derive(Clone)]
pub struct MemStore {
    inner: Arc<MemInner>,
}

struct MemInner {
    len: AtomicU64,
    shards: Vec<RwLock<Pages>>,
}

/// Locks a shard, also after another holder has panicked: pages are whole at every moment.
macro_rules! locked {
    ($shard:expr, $how:ident) => {
        $shard.$how().unwrap_or_else(|poisoned| poisoned.into_inner())
    };
}

/// Cuts `range` at page borders: page number, part of that page, bytes of the range before it.
fn pieces(range: Range<u64>) -> impl Iterator<Item = (u64, Range<usize>, usize)> {
    let first = range.start / PAGE;
    (first..range.end.div_ceil(PAGE)).map(move |page| {
        let base = page * PAGE;
        let start = range.start.max(base);
        let part = (start - base) as usize..(range.end.min(base + PAGE) - base) as usize;
        (page, part, (start - range.start) as usize)
    })
}

fn end_of(offset: u64, len: u64, limit: u64) -> Result<u64> {
    offset
        .checked_add(len)
        .filter(|end| *end <= limit)
        .ok_or_else(|| Error::new(ErrorKind::OutOfRange, "past the end of the store").at_offset(offset))
}

fn memory_info(grows_zeroed: bool) -> StoreInfo {
    StoreInfo {
        offset_align_bytes: 1,
        memory_align_bytes: 1,
        grows_zeroed,
        punches: true,
        read_only: false,
        is_local: true,
    }
}

impl MemStore {
    /// A store of `len_bytes` zeroes, at most `i64::MAX`. It grows when it is written past its end.
    pub fn new(len_bytes: u64) -> Self {
        let len_bytes = len_bytes.min(MAX_LEN);
        let shards = (0..SHARDS).map(|_| RwLock::default()).collect();
        Self { inner: Arc::new(MemInner { len: AtomicU64::new(len_bytes), shards }) }
    }

    /// Memory taken by pages now, in bytes.
    pub fn allocated_bytes(&self) -> u64 {
        let pages: usize = self.inner.shards.iter().map(|shard| locked!(shard, read).len()).sum();
        pages as u64 * PAGE
    }

    fn shard(&self, page: u64) -> &RwLock<Pages> {
        &self.inner.shards[(page % SHARDS) as usize]
    }

    fn read(&self, offset: u64, into: &Segments) -> Result<()> {
        let end = end_of(offset, into.len() as u64, self.len_bytes())?;
        for (page, part, done) in pieces(offset..end) {
            match locked!(self.shard(page), read).get(&page) {
                Some(bytes) => into.copy_from_slice(done, &bytes[part]),
                None => into.slice(done..done + part.len()).fill(0),
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, from: &Segments) -> Result<()> {
        let end = end_of(offset, from.len() as u64, MAX_LEN)?;
        for (page, part, done) in pieces(offset..end) {
            let mut pages = locked!(self.shard(page), write);
            let bytes = pages.entry(page).or_insert_with(|| vec![0; PAGE as usize].into());
            from.copy_to_slice(done, &mut bytes[part]);
        }
        self.inner.len.fetch_max(end, Ordering::AcqRel);
        Ok(())
    }

    /// Frees whole pages and zeroes parts of them.
    fn clear(&self, range: Range<u64>) {
        // A short range is cleared page by page. Of a long one most was never written: only the pages that exist are
        // looked at.
        if range.end - range.start > 1024 * PAGE {
            return self.clear_long(range);
        }
        for (page, part, _) in pieces(range) {
            let mut pages = locked!(self.shard(page), write);
            if part.len() as u64 == PAGE {
                pages.remove(&page);
            } else if let Some(bytes) = pages.get_mut(&page) {
                bytes[part].fill(0);
            }
        }
    }

    fn clear_long(&self, range: Range<u64>) {
        for shard in &self.inner.shards {
            locked!(shard, write).retain(|page, bytes| {
                let base = page * PAGE;
                let start = range.start.clamp(base, base + PAGE) - base;
                let end = range.end.clamp(base, base + PAGE) - base;
                if start < end {
                    bytes[start as usize..end as usize].fill(0);
                }
                end.saturating_sub(start) < PAGE
            });
        }
    }

    fn punch(&self, offset: u64, len: u64) -> Result<()> {
        let end = end_of(offset, len, self.len_bytes())?;
        self.clear(offset..end);
        Ok(())
    }

    fn resize(&self, len: u64) -> Result<()> {
        end_of(0, len, MAX_LEN)?;
        let old = self.inner.len.swap(len, Ordering::AcqRel);
        if len < old {
            self.clear_long(len..MAX_LEN + 1);
        }
        Ok(())
    }

    /// Finds the run at `offset`: one look-up in each shard for a hole, one for each page of data. The answer may be
    /// shorter than the run, but is never empty, whatever other tasks write or punch meanwhile.
    fn extent(&self, offset: u64) -> Result<StoreExtent> {
        let len = self.len_bytes();
        end_of(offset, 1, len)?;
        let page = offset / PAGE;
        let first = self.first_page(page);
        let is_hole = first != Some(page);
        let end = match is_hole {
            true => first.map_or(len, |next| next * PAGE),
            false => self.run_end(page) * PAGE,
        };
        Ok(StoreExtent { len_bytes: end.min(len) - offset, is_hole })
    }

    /// The page after a run that starts with `page`.
    fn run_end(&self, page: u64) -> u64 {
        let limit = page + MAX_RUN_PAGES;
        let is_gap = |next: &u64| !locked!(self.shard(*next), read).contains_key(next);
        (page + 1..limit).find(is_gap).unwrap_or(limit)
    }

    /// The first page from `from` on that exists.
    fn first_page(&self, from: u64) -> Option<u64> {
        let first = |shard: &RwLock<Pages>| locked!(shard, read).range(from..).next().map(|(page, _)| *page);
        self.inner.shards.iter().filter_map(first).min()
    }
}

impl Store for MemStore {
    fn info(&self) -> StoreInfo {
        memory_info(true)
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len.load(Ordering::Acquire)
    }

    fn path(&self) -> &Path {
        Path::new("mem:")
    }

    fn read_at(&self, at: StoreOffset, into: &Segments, _: Via) -> impl Future<Output = Result<()>> {
        ready(self.read(at.0, into))
    }

    fn write_at(&self, at: StoreOffset, from: &Segments, _: Via) -> impl Future<Output = Result<()>> {
        ready(self.write(at.0, from))
    }

    fn sync(&self) -> impl Future<Output = Result<()>> {
        ready(Ok(()))
    }

    fn zero_range(&self, at: StoreOffset, len_bytes: u64) -> impl Future<Output = Result<()>> {
        ready(self.punch(at.0, len_bytes))
    }

    fn punch_hole(&self, at: StoreOffset, len_bytes: u64) -> impl Future<Output = Result<()>> {
        ready(self.punch(at.0, len_bytes))
    }

    fn set_len(&self, len_bytes: u64) -> impl Future<Output = Result<()>> {
        ready(self.resize(len_bytes))
    }

    fn extent_at(&self, at: StoreOffset) -> impl Future<Output = Result<StoreExtent>> {
        ready(self.extent(at.0))
    }
}

/// A store that reads as zeroes and drops what is written, to measure the data path alone. Clones are the same store.
#[derive(Clone)]
pub struct NullStore {
    len: Arc<AtomicU64>,
}

impl NullStore {
    /// A store of `len_bytes`.
    pub fn new(len_bytes: u64) -> Self {
        Self { len: Arc::new(AtomicU64::new(len_bytes)) }
    }

    fn check(&self, offset: u64, len: u64) -> Result<()> {
        end_of(offset, len, self.len_bytes()).map(drop)
    }
}

impl Store for NullStore {
    fn info(&self) -> StoreInfo {
        memory_info(false)
    }

    fn len_bytes(&self) -> u64 {
        self.len.load(Ordering::Acquire)
    }

    fn path(&self) -> &Path {
        Path::new("null:")
    }

    fn read_at(&self, at: StoreOffset, into: &Segments, _: Via) -> impl Future<Output = Result<()>> {
        ready(self.check(at.0, into.len() as u64).map(|()| into.fill(0)))
    }

    fn write_at(&self, at: StoreOffset, from: &Segments, _: Via) -> impl Future<Output = Result<()>> {
        ready(self.check(at.0, from.len() as u64))
    }

    fn sync(&self) -> impl Future<Output = Result<()>> {
        ready(Ok(()))
    }

    fn zero_range(&self, at: StoreOffset, len_bytes: u64) -> impl Future<Output = Result<()>> {
        ready(self.check(at.0, len_bytes))
    }

    fn punch_hole(&self, at: StoreOffset, len_bytes: u64) -> impl Future<Output = Result<()>> {
        ready(self.check(at.0, len_bytes))
    }

    fn set_len(&self, len_bytes: u64) -> impl Future<Output = Result<()>> {
        self.len.store(len_bytes, Ordering::Release);
        ready(Ok(()))
    }

    fn extent_at(&self, at: StoreOffset) -> impl Future<Output = Result<StoreExtent>> {
        let left = self.len_bytes().saturating_sub(at.0);
        ready(self.check(at.0, 1).map(|()| StoreExtent { len_bytes: left, is_hole: true }))
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use proptest::prelude::*;

    use super::*;

    /// These stores answer at once, without an engine.
    fn now<T>(future: impl Future<Output = T>) -> T {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => value,
            Poll::Pending => panic!("memory never waits"),
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Write(u64, usize, u8),
        Punch(u64, u64),
        Resize(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let at = 0..100_000u64;
        let write = (at.clone(), 1..40_000usize, 1..=255u8).prop_map(|(a, l, b)| Step::Write(a, l, b));
        let punch = (at.clone(), 0..60_000u64).prop_map(|(a, l)| Step::Punch(a, l));
        proptest::collection::vec(prop_oneof![write, punch, at.prop_map(Step::Resize)], 1..20)
    }

    proptest! {
        #[test]
        fn memory_behaves_as_a_vector(steps in steps()) {
            let (store, mut model) = (MemStore::new(50_000), vec![0u8; 50_000]);
            for step in steps {
                match step {
                    Step::Write(at, len, byte) => {
                        let (from, end) = (Segments::zeroed(len), at as usize + len);
                        from.fill(byte);
                        now(store.write_at(StoreOffset(at), &from, Via::Direct)).unwrap();
                        model.resize(model.len().max(end), 0);
                        model[at as usize..end].fill(byte);
                    }
                    Step::Punch(at, len) => {
                        let fits = at + len <= model.len() as u64;
                        let result = now(store.punch_hole(StoreOffset(at), len));
                        prop_assert_eq!(result.is_ok(), fits);
                        if fits {
                            model[at as usize..(at + len) as usize].fill(0);
                        }
                    }
                    Step::Resize(len) => {
                        now(store.set_len(len)).unwrap();
                        model.resize(len as usize, 0);
                    }
                }
                let all = Segments::zeroed(model.len());
                now(store.read_at(StoreOffset(0), &all, Via::Cached)).unwrap();
                prop_assert!(all.to_vec() == model);
            }
            check_extents(&store, &model);
        }
    }

    fn check_extents(store: &MemStore, model: &[u8]) {
        let mut at = 0;
        while at < model.len() {
            let run = now(store.extent_at(StoreOffset(at as u64))).unwrap();
            let end = at + run.len_bytes as usize;
            assert!(end > at && (!run.is_hole || model[at..end].iter().all(|b| *b == 0)));
            at = end;
        }
        assert_eq!(at, model.len());
    }

    #[test]
    fn punching_gives_memory_back() {
        let store = MemStore::new(1 << 40);
        now(store.write_at(StoreOffset(1 << 30), &Segments::zeroed(64 << 10), Via::Direct)).unwrap();
        assert_eq!(store.allocated_bytes(), 64 << 10);
        now(store.punch_hole(StoreOffset(0), 1 << 40)).unwrap();
        assert_eq!(store.allocated_bytes(), 0);
        let past = now(store.read_at(StoreOffset(1 << 40), &Segments::zeroed(1), Via::Direct));
        assert_eq!(past.unwrap_err().kind(), ErrorKind::OutOfRange);
    }

    #[test]
    fn a_hole_is_told_in_one_answer_and_data_in_bounded_ones() {
        let store = MemStore::new(1 << 50);
        let pages = MAX_RUN_PAGES + 1;
        let page = Segments::copied(&[1]);
        for number in 0..pages {
            now(store.write_at(StoreOffset((1 << 40) + number * PAGE), &page, Via::Direct)).unwrap();
        }
        let run = |at: u64| now(store.extent_at(StoreOffset(at))).unwrap();
        assert_eq!(run(5), StoreExtent { len_bytes: (1 << 40) - 5, is_hole: true });
        assert_eq!(run(1 << 40), StoreExtent { len_bytes: MAX_RUN_PAGES * PAGE, is_hole: false });
        let last = (1 << 40) + MAX_RUN_PAGES * PAGE;
        assert_eq!(run(last + 1), StoreExtent { len_bytes: PAGE - 1, is_hole: false });
        assert_eq!(run(last + PAGE).len_bytes, (1 << 50) - last - PAGE);
    }

    #[test]
    fn a_length_past_the_kernels_is_refused() {
        let store = MemStore::new(u64::MAX);
        assert_eq!(store.len_bytes(), MAX_LEN);
        let last = Segments::copied(&[9]);
        now(store.write_at(StoreOffset(MAX_LEN - 1), &last, Via::Direct)).unwrap();
        now(store.read_at(StoreOffset(MAX_LEN - 1), &last, Via::Direct)).unwrap();
        assert_eq!(last.to_vec(), [9]);
        assert_eq!(now(store.set_len(1 << 63)).unwrap_err().kind(), ErrorKind::OutOfRange);
        now(store.set_len(5)).unwrap();
        assert_eq!(store.allocated_bytes(), 0);
    }

    #[test]
    fn nothing_is_kept_by_the_null_store() {
        let store = NullStore::new(10_000);
        let bytes = Segments::copied(&[7; 100]);
        now(store.write_at(StoreOffset(9_900), &bytes, Via::Direct)).unwrap();
        now(store.read_at(StoreOffset(9_900), &bytes, Via::Direct)).unwrap();
        assert!(bytes.is_zero());
        let past = now(store.write_at(StoreOffset(9_901), &bytes, Via::Direct)).unwrap_err();
        assert_eq!(past.kind(), ErrorKind::OutOfRange);
        let hole = now(store.extent_at(StoreOffset(1))).unwrap();
        assert_eq!(hole, StoreExtent { len_bytes: 9_999, is_hole: true });
    }
}
