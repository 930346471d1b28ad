//! A graph in memory whose requests can be held, and a way to poll futures by hand.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use spile_core::{
    Disk, DiskInfo, Epoch, Error, ErrorKind, Extent, ExtentKind, ExtentStatus, Io, Op, Result, Segments, WriteZeroes,
};

/// A disk of bytes in memory. A request that is held waits before it does anything.
pub struct TestGraph {
    bytes: Mutex<Vec<u8>>,
    pub info: DiskInfo,
    size_bytes: AtomicU64,
    holds: AtomicBool,
    /// Requests that have begun, and that have ended.
    pub begun: AtomicU64,
    pub ended: AtomicU64,
    pub is_closed: AtomicBool,
    /// The epochs that were told of: those before this was the disk's graph.
    pub older: Mutex<Vec<Arc<dyn Epoch>>>,
}

pub const SIZE: u64 = 64 << 10;

impl TestGraph {
    pub fn new() -> Self {
        Self::with_alignment(1)
    }

    pub fn with_alignment(align_bytes: u32) -> Self {
        let info = DiskInfo {
            size_bytes: SIZE,
            request_align_bytes: align_bytes,
            memory_align_bytes: align_bytes,
            preferred_bytes: 4096,
            discard_align_bytes: 4096,
            read_only: false,
            fast_zero: true,
        };
        Self {
            bytes: Mutex::new(vec![0; SIZE as usize]),
            info,
            size_bytes: AtomicU64::new(SIZE),
            holds: AtomicBool::new(false),
            begun: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
            older: Mutex::default(),
        }
    }

    /// Requests that begin from now on wait, and those that waited go on waiting.
    pub fn hold(&self, holds: bool) {
        self.holds.store(holds, SeqCst);
    }

    pub fn byte(&self, at: u64) -> u8 {
        self.bytes.lock().unwrap()[at as usize]
    }

    fn change(&self, io: &Io<'_>) {
        let mut bytes = self.bytes.lock().unwrap();
        let range = io.extent.start() as usize..io.extent.end() as usize;
        match io.op {
            Op::Read => io.segments.copy_from_slice(0, &bytes[range]),
            Op::Write { .. } => io.segments.copy_to_slice(0, &mut bytes[range]),
            Op::Discard | Op::WriteZeroes(_) => bytes[range].fill(0),
            Op::Flush => {}
        }
    }
}

impl Disk for TestGraph {
    fn info(&self) -> DiskInfo {
        DiskInfo { size_bytes: self.size_bytes.load(SeqCst), ..self.info.clone() }
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        assert!(io.extent.is_aligned(self.info.request_align_bytes.into()), "{:?} is not aligned", io.extent);
        self.begun.fetch_add(1, SeqCst);
        poll_fn(|_| if self.holds.load(SeqCst) { Poll::Pending } else { Poll::Ready(()) }).await;
        self.change(&io);
        self.ended.fetch_add(1, SeqCst);
        Ok(())
    }

    async fn extents(&self, extent: Extent, _: usize) -> Result<Vec<ExtentStatus>> {
        Ok(vec![ExtentStatus { extent, kind: ExtentKind::Data, depth: 0 }])
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        poll_fn(|_| if self.holds.load(SeqCst) { Poll::Pending } else { Poll::Ready(()) }).await;
        if size_bytes < self.size_bytes.load(SeqCst) {
            return Err(Error::new(ErrorKind::InvalidInput, "it only grows"));
        }
        self.bytes.lock().unwrap().resize(size_bytes as usize, 0);
        self.size_bytes.store(size_bytes, SeqCst);
        Ok(())
    }

    fn follows(&self, epochs: &[Arc<dyn Epoch>]) {
        *self.older.lock().unwrap() = epochs.to_vec();
    }

    async fn close(&self) -> Result<()> {
        self.is_closed.store(true, SeqCst);
        Ok(())
    }
}

/// Polls `future` once.
pub fn poll<F: Future + ?Sized>(future: &mut Pin<Box<F>>) -> Poll<F::Output> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// The result of a future that must not wait.
pub fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("it waits"),
    }
}

pub fn at(start: u64, len: u64) -> Extent {
    Extent::from_range(start..start + len)
}

pub type Request<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// A write of one byte value.
pub fn write<D: Disk>(disk: &D, start: u64, len: u64, byte: u8) -> Request<'_> {
    Box::pin(async move {
        let from = Segments::zeroed(len as usize);
        from.fill(byte);
        disk.write(at(start, len), &from, false).await
    })
}

/// One request of each kind.
pub async fn one_of_each<D: Disk>(disk: &D) -> Result<()> {
    let memory = Segments::zeroed(4096);
    disk.read(at(0, 4096), &memory).await?;
    disk.write(at(0, 4096), &memory, true).await?;
    disk.flush().await?;
    disk.discard(at(0, 4096)).await?;
    disk.write_zeroes(at(0, 4096), WriteZeroes::default()).await
}
