//! A disk in memory, or in a file, that notes what it is asked, and can be made to wait or to fail.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};

use spile_core::{
    Disk, DiskInfo, Epoch, Error, ErrorKind, Extent, ExtentKind, ExtentStatus, Io, Op, Result, Segment, Segments,
    Store, StoreOffset, Via, WriteZeroes,
};
use spile_store::FileStore;

/// What the disk can grow to, in bytes.
const MOST: u64 = 8 << 20;

/// One thing that the disk was asked: offsets and lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Did {
    Read(u64, u64),
    Write { at: u64, len: u64, fua: bool },
    Flush,
    Discard(u64, u64),
    Zeroes { at: u64, len: u64, may_unmap: bool },
}

impl Did {
    fn start(self) -> u64 {
        match self {
            Self::Read(at, _) | Self::Discard(at, _) | Self::Write { at, .. } | Self::Zeroes { at, .. } => at,
            Self::Flush => u64::MAX,
        }
    }
}

/// See the module.
pub struct TestDisk {
    bytes: Segment,
    size: AtomicU64,
    pub read_only: bool,
    /// Where reads and writes go, if not to the memory: the kernel copies then.
    pub file: Option<FileStore>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    did: Vec<Did>,
    holds: bool,
    /// What waits ends when its client goes.
    forsakes: bool,
    fails: Option<ErrorKind>,
    panics: bool,
    /// Those that wait, in the order in which they came.
    held: BTreeMap<u64, (Did, Option<Waker>)>,
    tickets: u64,
}

impl TestDisk {
    /// Zeroes.
    pub fn new(size: u64) -> Self {
        let bytes = Segment::zeroed(MOST as usize);
        Self { bytes, size: AtomicU64::new(size), read_only: false, file: None, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Everything that was asked since the last call.
    pub fn take_did(&self) -> Vec<Did> {
        std::mem::take(&mut self.state().did)
    }

    /// Its bytes.
    pub fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        self.bytes.slice(at as usize..at as usize + len).to_vec()
    }

    /// Sets its bytes.
    pub fn set_bytes(&self, at: u64, bytes: &[u8]) {
        self.bytes.copy_from_slice(at as usize, bytes);
    }

    /// Whatever comes from now on waits.
    pub fn hold(&self) {
        self.state().holds = true;
    }

    /// Whatever comes from now on waits for as long as its client is there.
    pub fn hold_back(&self) {
        let mut state = self.state();
        (state.holds, state.forsakes) = (true, true);
    }

    /// How many wait.
    pub fn held(&self) -> usize {
        self.state().held.len()
    }

    /// Lets one go that starts at `at`; a flush starts at the very end.
    pub fn release_at(&self, at: u64) {
        let mut state = self.state();
        let ticket = state.held.iter().find(|(_, (did, _))| did.start() == at).map(|(ticket, _)| *ticket);
        let (_, waker) = state.held.remove(&ticket.expect("nothing waits there")).unwrap();
        waker.into_iter().for_each(Waker::wake);
    }

    /// Lets all go, and holds nothing any more.
    pub fn release(&self) {
        let mut state = self.state();
        (state.holds, state.forsakes) = (false, false);
        let held = std::mem::take(&mut state.held);
        held.into_values().filter_map(|(_, waker)| waker).for_each(Waker::wake);
    }

    /// From now on, requests fail with this kind, or fail no more.
    pub fn fail(&self, kind: Option<ErrorKind>) {
        self.state().fails = kind;
    }

    /// The next request panics.
    pub fn panic_next(&self) {
        self.state().panics = true;
    }

    async fn gate(&self, did: Did) -> Result<()> {
        let ticket = self.enter(did);
        poll_fn(|context| match self.state().held.get_mut(&ticket) {
            Some((_, waker)) => {
                *waker = Some(context.waker().clone());
                Poll::Pending
            }
            None => Poll::Ready(()),
        })
        .await;
        match self.state().fails {
            Some(kind) => Err(Error::new(kind, "injected failure")),
            None => Ok(()),
        }
    }

    fn enter(&self, did: Did) -> u64 {
        let mut state = self.state();
        state.did.push(did);
        state.tickets += 1;
        let ticket = state.tickets;
        if state.holds {
            state.held.insert(ticket, (did, None));
        }
        if std::mem::take(&mut state.panics) {
            drop(state);
            panic!("a disk that panics, as the test asked");
        }
        ticket
    }

    fn part(&self, extent: Extent) -> Result<Segments> {
        match extent.end() <= self.size.load(Ordering::Acquire) {
            true => Ok(self.bytes.slice(extent.start() as usize..extent.end() as usize).into()),
            false => Err(Error::new(ErrorKind::OutOfRange, "past the end of the disk").at_offset(extent.start())),
        }
    }

    async fn read_extent(&self, extent: Extent, into: &Segments) -> Result<()> {
        self.gate(Did::Read(extent.start(), extent.len_bytes)).await?;
        let part = self.part(extent)?;
        match &self.file {
            Some(file) => file.read_at(StoreOffset(extent.start()), into, Via::Cached).await?,
            None => into.copy_from(&part),
        }
        Ok(())
    }

    async fn write_extent(&self, extent: Extent, from: &Segments, fua: bool) -> Result<()> {
        self.gate(Did::Write { at: extent.start(), len: extent.len_bytes, fua }).await?;
        let part = self.part(extent)?;
        match &self.file {
            Some(file) => file.write_at(StoreOffset(extent.start()), from, Via::Cached).await?,
            None => part.copy_from(from),
        }
        Ok(())
    }

    async fn discard_extent(&self, extent: Extent) -> Result<()> {
        self.gate(Did::Discard(extent.start(), extent.len_bytes)).await?;
        self.part(extent)?.fill(0);
        Ok(())
    }

    async fn zero_extent(&self, extent: Extent, how: WriteZeroes) -> Result<()> {
        let (at, len, may_unmap) = (extent.start(), extent.len_bytes, how.may_unmap);
        self.gate(Did::Zeroes { at, len, may_unmap }).await?;
        self.part(extent)?.fill(0);
        Ok(())
    }
}

impl Disk for TestDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo { read_only: self.read_only, ..DiskInfo::unaligned(self.size.load(Ordering::Acquire)) }
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        match io.op {
            Op::Read => self.read_extent(io.extent, io.segments).await,
            Op::Write { fua } => self.write_extent(io.extent, io.segments, fua).await,
            Op::Flush => self.gate(Did::Flush).await,
            Op::Discard => self.discard_extent(io.extent).await,
            Op::WriteZeroes(how) => self.zero_extent(io.extent, how).await,
        }
    }

    async fn execute_for(&self, io: Io<'_>, gone: impl Future<Output = ()>) -> Result<()> {
        let (mut work, mut gone) = (pin!(self.execute(io)), pin!(gone));
        poll_fn(|context| {
            let work = work.as_mut().poll(context);
            if work.is_pending() && self.state().forsakes && gone.as_mut().poll(context).is_ready() {
                return Poll::Ready(Err(Error::new(ErrorKind::Shutdown, "the client is gone")));
            }
            work
        })
        .await
    }

    async fn extents(&self, extent: Extent, _max_runs: usize) -> Result<Vec<ExtentStatus>> {
        self.part(extent)?;
        Ok(vec![ExtentStatus { extent, kind: ExtentKind::Data, depth: 0 }])
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        match size_bytes <= MOST {
            true => self.size.store(size_bytes, Ordering::Release),
            false => return Err(Error::new(ErrorKind::NoSpace, "a test disk is small")),
        }
        Ok(())
    }

    fn follows(&self, _: &[Arc<dyn Epoch>]) {}

    async fn close(&self) -> Result<()> {
        self.gate(Did::Flush).await
    }
}
