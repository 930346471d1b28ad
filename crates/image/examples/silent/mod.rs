//! Stores in memory that fall silent once the counted requests begin: then they answer at once and touch no byte. So nothing
//! is counted but the way of a request through the graph and the format.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::{Future, ready};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use spile_core::{
    Env, Error, ErrorKind, Files, Locator, OpenMode, Result, Segments, Store, StoreExtent, StoreInfo, StoreOffset, Via,
    Work,
};
use spile_engine::OsEnv;
use spile_image::{Format, Graph, OpenOptions};
use spile_store::MemStore;

/// The result of a future that never has to wait. It is inlined, so that no large future is moved and counted.
#[inline(always)]
pub fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("a store in memory never waits"),
    }
}

/// A folder of files in memory, which all fall silent together.
#[derive(Clone, Default)]
pub struct Folder {
    files: Arc<Mutex<BTreeMap<PathBuf, MemStore>>>,
    is_silent: Arc<AtomicBool>,
    /// What offsets, lengths and memory of direct transfers must be multiples of, in bytes.
    align_bytes: u32,
}

impl Folder {
    /// An empty folder; direct transfers must be aligned to `align_bytes`.
    pub fn new(align_bytes: u32) -> Self {
        Self { align_bytes, ..Self::default() }
    }

    /// From now on every transfer succeeds and moves nothing.
    pub fn fall_silent(&self) {
        self.is_silent.store(true, Ordering::Relaxed);
    }

    /// The file at `path`, made when it is not there.
    pub fn file(&self, path: &Path) -> SilentStore {
        let mut files = self.files.lock().unwrap();
        let inner = files.entry(path.to_owned()).or_insert_with(|| MemStore::new(0)).clone();
        let path = path.to_owned();
        SilentStore { inner, path, is_silent: self.is_silent.clone(), align_bytes: self.align_bytes }
    }

    /// Opens the disk at `path`.
    pub fn open(&self, path: &str, format: Format, read_only: bool) -> Graph<SilentStore> {
        let options = OpenOptions { format: Some(format), read_only, ..OpenOptions::default() };
        now(Graph::open(self, Arc::new(LaterEnv), Path::new(path), &options)).unwrap()
    }
}

/// This host, with a list of the work that is to run beside requests.
struct LaterEnv;

thread_local!(static LATER: RefCell<Vec<Work>> = const { RefCell::new(Vec::new()) });

/// Does what requests have left to be done beside them.
pub fn work_beside() {
    while let Some(work) = LATER.with_borrow_mut(Vec::pop) {
        now(work);
    }
}

impl Env for LaterEnv {
    fn now_unix_s(&self) -> u64 {
        OsEnv.now_unix_s()
    }

    fn random_16(&self) -> [u8; 16] {
        OsEnv.random_16()
    }

    fn boot_id(&self) -> [u8; 16] {
        OsEnv.boot_id()
    }

    fn spawn(&self, work: Work) -> bool {
        LATER.with_borrow_mut(|later| later.push(work));
        true
    }
}

/// A store in memory. When it is silent, transfers succeed and move nothing.
#[derive(Clone)]
pub struct SilentStore {
    inner: MemStore,
    path: PathBuf,
    is_silent: Arc<AtomicBool>,
    align_bytes: u32,
}

impl SilentStore {
    #[inline]
    fn is_silent(&self) -> bool {
        self.is_silent.load(Ordering::Relaxed)
    }
}

impl Store for SilentStore {
    fn info(&self) -> StoreInfo {
        StoreInfo { offset_align_bytes: self.align_bytes, memory_align_bytes: self.align_bytes, ..self.inner.info() }
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn path(&self) -> &Path {
        &self.path
    }

    // The futures of transfers have no states: they would be counted, too.
    fn read_at(&self, offset: StoreOffset, into: &Segments, via: Via) -> impl Future<Output = Result<()>> {
        ready(if self.is_silent() { Ok(()) } else { now(self.inner.read_at(offset, into, via)) })
    }

    fn write_at(&self, offset: StoreOffset, from: &Segments, via: Via) -> impl Future<Output = Result<()>> {
        ready(if self.is_silent() { Ok(()) } else { now(self.inner.write_at(offset, from, via)) })
    }

    async fn sync(&self) -> Result<()> {
        self.inner.sync().await
    }

    async fn zero_range(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        self.inner.zero_range(offset, len_bytes).await
    }

    async fn punch_hole(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        self.inner.punch_hole(offset, len_bytes).await
    }

    async fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.inner.set_len(len_bytes).await
    }

    async fn extent_at(&self, offset: StoreOffset) -> Result<StoreExtent> {
        self.inner.extent_at(offset).await
    }
}

fn stays_as_it_is() -> Error {
    Error::new(ErrorKind::Unsupported, "names in this folder stay as they are")
}

impl Files for Folder {
    type Store = SilentStore;

    async fn open(&self, at: &Locator, _: OpenMode) -> Result<SilentStore> {
        match at {
            Locator::Path(path) => Ok(self.file(path)),
            _ => Err(stays_as_it_is()),
        }
    }

    async fn create(&self, _: &Path, _: u64) -> Result<SilentStore> {
        Err(stays_as_it_is())
    }

    async fn rename(&self, _: &Path, _: &Path) -> Result<()> {
        Err(stays_as_it_is())
    }

    async fn link(&self, _: &Path, _: &Path) -> Result<()> {
        Err(stays_as_it_is())
    }

    async fn is_at(&self, store: &SilentStore, path: &Path) -> Result<bool> {
        Ok(store.path() == path)
    }

    async fn reopen(&self, store: &SilentStore, _: OpenMode) -> Result<SilentStore> {
        Ok(self.file(store.path()))
    }

    async fn remove(&self, _: &Path) -> Result<()> {
        Err(stays_as_it_is())
    }

    async fn canonical(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_owned())
    }
}
