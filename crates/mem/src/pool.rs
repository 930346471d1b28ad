//! A bounded pool of page-aligned buffers, carved from one arena so that an engine may register it once.
//!
//! Buffers come in power-of-two classes from 4 KiB to 2 MiB; each class keeps its free chunks in a list. Once the whole
//! arena is carved, a larger free chunk is cut where a small one is wanted, for good: else one burst of large requests
//! would leave the small ones, of which there are more, without the arena for ever. What does not fit the arena's
//! budget, and what is larger than the largest class, comes from the heap: slower, and an error only when the system has no memory.
//! A pool is meant to be one worker's: its lock is then never contended.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::mm::{MapFlags, ProtFlags};

use crate::segment::{PAGE_BYTES, Segment};

const CLASSES: usize = 10; // 4 KiB << 0 ..= 4 KiB << 9 = 2 MiB

/// A pool of page-aligned buffers. Clones are handles to the same pool.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<PoolInner>,
}

/// Numbers about what a pool has given out, for metrics and tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolStats {
    /// Arena bytes carved into chunks so far.
    pub carved_bytes: usize,
    /// Chunks now in use.
    pub in_use_chunks: usize,
    /// Buffers that came from the heap because the arena had none left.
    pub heap_buffers: u64,
}

struct PoolInner {
    base: NonNull<u8>,
    len: usize,
    /// One counter for each page: the references to the chunk that starts there.
    refs: Box<[AtomicU32]>,
    free: Mutex<Free>,
    heap_buffers: AtomicU64,
}

struct Free {
    lists: [Vec<u32>; CLASSES],
    carved_pages: usize,
    in_use: usize,
}

// SAFETY: the arena is plain memory that lives as long as the inner; all state beside it is atomic or locked.
unsafe impl Send for PoolInner {}
// SAFETY: as for Send.
unsafe impl Sync for PoolInner {}

impl Pool {
    /// A pool whose arena is `len` bytes (rounded up to 2 MiB); memory is taken from the system as it is used.
    ///
    /// # Errors
    /// When the address space cannot be mapped.
    pub fn new(len: usize) -> std::io::Result<Self> {
        let len = len.max(1).next_multiple_of(PAGE_BYTES << (CLASSES - 1));
        // SAFETY: a new anonymous mapping at an address of the kernel's choosing.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let refs = (0..len / PAGE_BYTES).map(|_| AtomicU32::new(0)).collect();
        let free = Mutex::new(Free { lists: Default::default(), carved_pages: 0, in_use: 0 });
        let base = NonNull::new(base.cast()).expect("a mapping is never at address zero");
        Ok(Self { inner: Arc::new(PoolInner { base, len, refs, free, heap_buffers: AtomicU64::new(0) }) })
    }

    /// A buffer of `len` bytes, page-aligned, its content undefined (but never another process's).
    pub fn alloc(&self, len: usize) -> Segment {
        self.chunk(len).unwrap_or_else(|| Segment::zeroed(len))
    }

    /// As [`Pool::alloc`]; `None` when the arena has none left and the system has no memory for it.
    pub fn try_alloc(&self, len: usize) -> Option<Segment> {
        self.chunk(len).or_else(|| Segment::try_zeroed(len))
    }

    /// A buffer of the arena. One that has to come from the heap is counted.
    #[inline]
    fn chunk(&self, len: usize) -> Option<Segment> {
        let chunk = class_of(len).and_then(|class| Some((self.inner.take(class)?, class as u8)));
        let Some((page, class)) = chunk else {
            self.inner.heap_buffers.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        // SAFETY: the page number came from this arena.
        let ptr = unsafe { self.inner.base.add(page as usize * PAGE_BYTES) };
        Some(Segment::from_chunk(ptr, len, ChunkRef { pool: self.inner.clone(), page, class }))
    }

    /// The arena's address and length in bytes, for registration with a kernel. Valid while a clone of the pool lives.
    pub fn arena(&self) -> (*mut u8, usize) {
        (self.inner.base.as_ptr(), self.inner.len)
    }

    /// What is in use.
    pub fn stats(&self) -> PoolStats {
        let free = self.inner.free.lock().unwrap_or_else(|e| e.into_inner());
        PoolStats {
            carved_bytes: free.carved_pages * PAGE_BYTES,
            in_use_chunks: free.in_use,
            heap_buffers: self.inner.heap_buffers.load(Ordering::Relaxed),
        }
    }
}

fn class_of(len: usize) -> Option<usize> {
    let pages = len.div_ceil(PAGE_BYTES).max(1).next_power_of_two();
    let class = pages.trailing_zeros() as usize;
    (class < CLASSES).then_some(class)
}

impl PoolInner {
    fn take(&self, class: usize) -> Option<u32> {
        let mut free = self.free.lock().unwrap_or_else(|e| e.into_inner());
        let pages = self.len / PAGE_BYTES;
        let page = free.lists[class].pop().or_else(|| free.carve(class, pages)).or_else(|| free.cut(class))?;
        free.in_use += 1;
        self.refs[page as usize].store(1, Ordering::Relaxed);
        Some(page)
    }

    fn give_back(&self, page: u32, class: u8) {
        let mut free = self.free.lock().unwrap_or_else(|e| e.into_inner());
        free.in_use -= 1;
        free.lists[class as usize].push(page);
    }
}

impl Free {
    /// A chunk of what was never given out, of the arena's `pages`.
    fn carve(&mut self, class: usize, pages: usize) -> Option<u32> {
        let page = self.carved_pages;
        let end = page + (1 << class);
        (end <= pages).then(|| {
            self.carved_pages = end;
            page as u32
        })
    }

    /// The start of a larger free chunk. The rest of it becomes one chunk of each class between.
    fn cut(&mut self, class: usize) -> Option<u32> {
        let larger = (class + 1..CLASSES).find(|larger| !self.lists[*larger].is_empty())?;
        let page = self.lists[larger].pop()?;
        (class..larger).for_each(|rest| self.lists[rest].push(page + (1 << rest)));
        Some(page)
    }
}

impl Drop for PoolInner {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; every chunk holds the inner alive, so none is left.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A counted reference to one chunk of a pool: no allocation to make one, none to clone it.
pub(crate) struct ChunkRef {
    pool: Arc<PoolInner>,
    page: u32,
    class: u8,
}

impl Clone for ChunkRef {
    fn clone(&self) -> Self {
        self.pool.refs[self.page as usize].fetch_add(1, Ordering::Relaxed);
        Self { pool: self.pool.clone(), page: self.page, class: self.class }
    }
}

impl Drop for ChunkRef {
    fn drop(&mut self) {
        // Release/acquire as in Arc: all uses of the bytes come before they are given out again.
        if self.pool.refs[self.page as usize].fetch_sub(1, Ordering::AcqRel) == 1 {
            self.pool.give_back(self.page, self.class);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_returns_when_its_last_clone_goes() {
        let pool = Pool::new(1 << 21).unwrap();
        let first = pool.alloc(5000);
        let address = first.as_ptr();
        let part = first.slice(4096..5000);
        drop(first);
        assert_eq!(pool.stats().in_use_chunks, 1);
        drop(part);
        assert_eq!(pool.stats().in_use_chunks, 0);
        assert_eq!(pool.alloc(8192).as_ptr(), address);
    }

    #[test]
    fn an_empty_arena_falls_back_to_the_heap() {
        let pool = Pool::new(1).unwrap();
        let _all = pool.alloc(1 << 21);
        assert_eq!(pool.stats().heap_buffers, 0);
        assert_eq!(pool.alloc(4096).len(), 4096);
        assert_eq!(pool.alloc(64 << 20).len(), 64 << 20);
        assert_eq!(pool.stats().heap_buffers, 2);
    }

    #[test]
    fn a_lack_of_memory_is_told_and_not_the_end() {
        let pool = Pool::new(1).unwrap();
        assert!(pool.try_alloc(1 << 50).is_none(), "more than can be addressed");
        assert_eq!(pool.try_alloc(4 << 20).unwrap().len(), 4 << 20);
        assert_eq!(pool.stats().heap_buffers, 2);
    }

    #[test]
    fn a_large_chunk_is_cut_for_small_ones_that_never_overlap() {
        let pool = Pool::new(4 << 20).unwrap();
        drop([pool.alloc(2 << 20), pool.alloc(2 << 20)]);
        let mut seed = 1u32;
        for round in 0..200u32 {
            // Half the arena at most, so that all of it fits however it has been cut.
            let mut buffers = Vec::new();
            for number in 0..16u8 {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let buffer = pool.alloc(1 + (seed >> 15) as usize % (4096 << (round % 6)));
                buffer.fill(number);
                buffers.push(buffer);
            }
            for (number, buffer) in buffers.iter().enumerate() {
                assert!(buffer.to_vec().iter().all(|byte| usize::from(*byte) == number), "round {round}");
            }
        }
        assert_eq!((pool.stats().in_use_chunks, pool.stats().heap_buffers), (0, 0));
        let pages: Vec<_> = (0..1024).map(|_| pool.alloc(4096)).collect();
        let addresses: std::collections::BTreeSet<_> = pages.iter().map(|page| page.as_ptr()).collect();
        assert_eq!((addresses.len(), pool.stats().heap_buffers), (1024, 0));
    }

    #[test]
    fn an_arena_of_nothing_is_a_small_one() {
        assert_eq!(Pool::new(0).unwrap().arena().1, 2 << 20);
    }

    #[test]
    fn classes_are_powers_of_two_pages() {
        assert_eq!([1, 4096, 4097, 2 << 20, (2 << 20) + 1].map(class_of), [Some(0), Some(0), Some(1), Some(9), None]);
    }

    #[test]
    fn clones_on_other_threads_keep_the_chunk() {
        let pool = Pool::new(1 << 21).unwrap();
        let segment = pool.alloc(4096);
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let clone = segment.clone();
                std::thread::spawn(move || (0..1000).for_each(|_| drop(clone.clone())))
            })
            .collect();
        drop(segment);
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(pool.stats().in_use_chunks, 0);
    }
}
