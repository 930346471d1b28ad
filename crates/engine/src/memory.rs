//! Stores without a file: [`MemStore`] keeps bytes in memory, sparsely; [`NullStore`] keeps nothing.

use std::collections::HashMap;
use std::future::{Future, ready};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use spile_core::{Error, ErrorKind, Result, Segments, Store, StoreExtent, StoreInfo, StoreOffset, Via};

/// The unit that is allocated, locked and freed.
const PAGE: u64 = 16 << 10;
const SHARDS: u64 = 64;

type Pages = HashMap<u64, Box<[u8]>>;

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

/// Locks without regard to a panic elsewhere: pages are whole at every moment.
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
    StoreInfo { offset_align_bytes: 1, memory_align_bytes: 1, grows_zeroed, punches: true, read_only: false }
}

impl MemStore {
    /// A store of `len_bytes` zeroes. It grows when it is written past its end.
    pub fn new(len_bytes: u64) -> Self {
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
        let end = end_of(offset, from.len() as u64, i64::MAX as u64)?;
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
        // A short range page by page; a long one, mostly never written, by what there is.
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

    fn resize(&self, len: u64) {
        let old = self.inner.len.swap(len, Ordering::AcqRel);
        if len < old {
            self.clear_long(len..u64::MAX - PAGE);
        }
    }

    fn extent(&self, offset: u64) -> Result<StoreExtent> {
        let len = self.len_bytes();
        end_of(offset, 1, len)?;
        let has = |page: u64| locked!(self.shard(page), read).contains_key(&page);
        let mut page = offset / PAGE;
        let is_hole = !has(page);
        // Bounded: an answer may be shorter than the run it tells of.
        let last = page + (1 << 16);
        while page < last && page * PAGE < len && has(page) != is_hole {
            page += 1;
        }
        Ok(StoreExtent { len_bytes: (page * PAGE).min(len) - offset, is_hole })
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
        self.resize(len_bytes);
        ready(Ok(()))
    }

    fn extent_at(&self, at: StoreOffset) -> impl Future<Output = Result<StoreExtent>> {
        ready(self.extent(at.0))
    }
}

/// Reads as zeroes and drops what is written: the data path without a store. Clones are the same store.
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
