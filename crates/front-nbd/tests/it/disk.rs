//! A disk over one store, for tests and the example: raw, with holes, and with handles to make it misbehave.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use spile_core::{
    Disk, DiskInfo, Epoch, Error, ErrorKind, Extent, ExtentKind, ExtentStatus, Io, Op, Result, Segments, Store,
    StoreOffset, Via, WriteZeroes,
};

/// See the module.
pub struct StoreDisk<S> {
    store: S,
    /// Alignment it demands of requests, in bytes.
    pub align_bytes: u32,
    /// Refuses writes.
    pub read_only: bool,
    /// What the operations so far were.
    pub calls: Calls,
    /// What [`Disk::may_hold_back`] says.
    pub holds_back: AtomicBool,
    faults: Mutex<Faults>,
}

/// Counts of operations.
#[derive(Default)]
pub struct Calls {
    /// Flushes.
    pub flushes: AtomicU64,
    /// Writes with FUA.
    pub fua_writes: AtomicU64,
    /// Reads.
    pub reads: AtomicU64,
    /// Writes of zeroes.
    pub zeroes: AtomicU64,
}

#[derive(Default)]
struct Faults {
    fail_next: Option<ErrorKind>,
    panic_next: bool,
    /// Reads and writes of zeroes that start here wait.
    held: Option<u64>,
    waiting: Vec<Waker>,
}

#[allow(dead_code, reason = "the example needs no faults")]
impl<S: Store> StoreDisk<S> {
    /// A disk of the store's length.
    pub fn new(store: S) -> Self {
        let read_only = store.info().read_only;
        let (calls, faults) = (Calls::default(), Mutex::default());
        Self { store, align_bytes: 1, read_only, calls, holds_back: AtomicBool::new(false), faults }
    }

    /// The next read or write fails with this kind.
    pub fn fail_next(&self, kind: ErrorKind) {
        self.faults.lock().unwrap().fail_next = Some(kind);
    }

    /// The next read or write panics.
    pub fn panic_next(&self) {
        self.faults.lock().unwrap().panic_next = true;
    }

    /// Reads and writes of zeroes that start at `offset` wait until [`StoreDisk::release`].
    pub fn hold_at(&self, offset: u64) {
        self.faults.lock().unwrap().held = Some(offset);
    }

    /// How many wait.
    pub fn held(&self) -> usize {
        self.faults.lock().unwrap().waiting.len()
    }

    /// Lets them go.
    pub fn release(&self) {
        let mut faults = self.faults.lock().unwrap();
        faults.held = None;
        faults.waiting.drain(..).for_each(Waker::wake);
    }

    fn trip(&self) -> Result<()> {
        let mut faults = self.faults.lock().unwrap_or_else(|e| e.into_inner());
        if std::mem::take(&mut faults.panic_next) {
            drop(faults);
            panic!("a disk that panics, as the test asked");
        }
        match faults.fail_next.take() {
            Some(kind) => Err(Error::new(kind, "injected failure")),
            None => Ok(()),
        }
    }

    async fn hold(&self, offset: u64) {
        poll_fn(|cx| {
            let mut faults = self.faults.lock().unwrap();
            if faults.held != Some(offset) {
                return Poll::Ready(());
            }
            if !faults.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                faults.waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    async fn read_extent(&self, extent: Extent, into: &Segments) -> Result<()> {
        self.calls.reads.fetch_add(1, Ordering::Relaxed);
        self.trip()?;
        self.hold(extent.start()).await;
        self.store.read_at(StoreOffset(extent.start()), into, Via::Direct).await
    }

    async fn write_extent(&self, extent: Extent, from: &Segments, fua: bool) -> Result<()> {
        self.trip()?;
        self.store.write_at(StoreOffset(extent.start()), from, Via::Direct).await?;
        if fua {
            self.calls.fua_writes.fetch_add(1, Ordering::Relaxed);
            self.store.sync().await?;
        }
        Ok(())
    }

    async fn sync(&self) -> Result<()> {
        self.calls.flushes.fetch_add(1, Ordering::Relaxed);
        self.store.sync().await
    }

    async fn zero_extent(&self, extent: Extent, how: WriteZeroes) -> Result<()> {
        self.calls.zeroes.fetch_add(1, Ordering::Relaxed);
        self.hold(extent.start()).await;
        if how.only_if_fast && !how.may_unmap {
            return Err(Error::new(ErrorKind::Unsupported, "not faster than writing"));
        }
        self.store.zero_range(StoreOffset(extent.start()), extent.len_bytes).await
    }
}

impl<S: Store> Disk for StoreDisk<S> {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            request_align_bytes: self.align_bytes,
            memory_align_bytes: self.store.info().memory_align_bytes,
            read_only: self.read_only,
            ..DiskInfo::unaligned(self.store.len_bytes())
        }
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        match io.op {
            Op::Read => self.read_extent(io.extent, io.segments).await,
            Op::Write { fua } => self.write_extent(io.extent, io.segments, fua).await,
            Op::Flush => self.sync().await,
            Op::Discard => self.store.punch_hole(StoreOffset(io.extent.start()), io.extent.len_bytes).await,
            Op::WriteZeroes(how) => self.zero_extent(io.extent, how).await,
        }
    }

    fn may_hold_back(&self) -> bool {
        self.holds_back.load(Ordering::Relaxed)
    }

    async fn extents(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        let mut runs = Vec::new();
        let mut at = extent.start();
        while at < extent.end() && runs.len() < max_runs {
            let run = self.store.extent_at(StoreOffset(at)).await?;
            let end = (at + run.len_bytes).min(extent.end());
            let kind = if run.is_hole { ExtentKind::Hole } else { ExtentKind::Data };
            runs.push(ExtentStatus { extent: Extent::from_range(at..end), kind, depth: 0 });
            at = end;
        }
        Ok(runs)
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.store.set_len(size_bytes).await?;
        self.store.sync().await
    }

    fn follows(&self, _: &[Arc<dyn Epoch>]) {}

    async fn close(&self) -> Result<()> {
        self.sync().await
    }
}
