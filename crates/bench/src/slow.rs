//! [`SlowStore`]: a store on a device that takes a stated time ([`Timing`]) for each transfer, whatever is below it.
//!
//! Only direct transfers take longer: what goes through the page cache (a format's metadata) is as fast as ever, as on a host with a slow
//! device. [`SlowWrites`] has one time for all writes; [`Ssd`](crate::ssd::Ssd) is a device with channels. All experiments that open
//! disks by themselves use this one type, for the compiler makes all code of disks again for each type of a store.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use spile_core::{Files, Locator, OpenMode, Result, Segments, Store, StoreExtent, StoreInfo, StoreOffset, Via};
use spile_store::{AnyStore, OsFiles};

/// How long a device takes for transfers.
pub trait Timing: Send + Sync + 'static {
    /// How long a read of `len_bytes` at `offset`, which begins now, takes on the device.
    fn read(&self, offset: StoreOffset, len_bytes: u64) -> Duration;

    /// How long such a write takes.
    fn write(&self, offset: StoreOffset, len_bytes: u64) -> Duration;
}

/// Every write takes so long, and reads take no time.
#[derive(Clone, Copy, Debug, Default)]
pub struct SlowWrites(pub Duration);

impl Timing for SlowWrites {
    fn read(&self, _: StoreOffset, _: u64) -> Duration {
        Duration::ZERO
    }

    fn write(&self, _: StoreOffset, _: u64) -> Duration {
        self.0
    }
}

/// A store whose direct transfers take as long as its timing says.
pub struct SlowStore {
    inner: AnyStore,
    timing: Arc<dyn Timing>,
}

impl SlowStore {
    /// `inner` on a device with this timing.
    pub fn new(inner: AnyStore, timing: Arc<dyn Timing>) -> Self {
        Self { inner, timing }
    }

    /// `inner` as it is.
    pub fn no_slower(inner: AnyStore) -> Self {
        Self::new(inner, Arc::new(SlowWrites::default()))
    }
}

/// Lets the time pass that a transfer takes. A direct transfer that takes none waits for nothing.
async fn pass(time: Duration) {
    if !time.is_zero() {
        spile_engine::sleep(time).await;
    }
}

impl Store for SlowStore {
    fn info(&self) -> StoreInfo {
        self.inner.info()
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn path(&self) -> &Path {
        self.inner.path()
    }

    fn set_path(&self, path: &Path) {
        self.inner.set_path(path);
    }

    async fn read_at(&self, offset: StoreOffset, into: &Segments, via: Via) -> Result<()> {
        if via == Via::Direct {
            pass(self.timing.read(offset, into.len() as u64)).await;
        }
        self.inner.read_at(offset, into, via).await
    }

    async fn write_at(&self, offset: StoreOffset, from: &Segments, via: Via) -> Result<()> {
        if via == Via::Direct {
            pass(self.timing.write(offset, from.len() as u64)).await;
        }
        self.inner.write_at(offset, from, via).await
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

/// Files on a device with slow writes.
pub struct SlowFiles {
    inner: OsFiles,
    timing: Arc<SlowWrites>,
}

impl SlowFiles {
    /// The files of `inner`, whose direct writes take `write_delay` longer.
    pub fn new(inner: OsFiles, write_delay: Duration) -> Self {
        Self { inner, timing: Arc::new(SlowWrites(write_delay)) }
    }

    fn slow(&self, inner: AnyStore) -> SlowStore {
        SlowStore::new(inner, self.timing.clone())
    }
}

impl Files for SlowFiles {
    type Store = SlowStore;

    async fn open(&self, at: &Locator, mode: OpenMode) -> Result<Self::Store> {
        Ok(self.slow(self.inner.open(at, mode).await?))
    }

    async fn create(&self, path: &Path, len_bytes: u64) -> Result<Self::Store> {
        Ok(self.slow(self.inner.create(path, len_bytes)?))
    }

    async fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.inner.rename(from, to).await
    }

    async fn link(&self, from: &Path, to: &Path) -> Result<()> {
        self.inner.link(from, to).await
    }

    async fn is_at(&self, store: &Self::Store, path: &Path) -> Result<bool> {
        self.inner.is_at(&store.inner, path).await
    }

    async fn rename_file(
        &self,
        (store, from): (&Self::Store, &Path),
        (to, over): (&Path, Option<&Self::Store>),
    ) -> Result<()> {
        self.inner.rename_file((&store.inner, from), (to, over.map(|over| &over.inner))).await
    }

    async fn link_file(&self, (store, from): (&Self::Store, &Path), to: &Path) -> Result<()> {
        self.inner.link_file((&store.inner, from), to).await
    }

    async fn remove_file(&self, store: &Self::Store, path: &Path) -> Result<()> {
        self.inner.remove_file(&store.inner, path).await
    }

    async fn copy_access(&self, from: &Self::Store, to: &Self::Store) -> Result<()> {
        self.inner.copy_access(&from.inner, &to.inner).await
    }

    async fn reopen(&self, store: &Self::Store, mode: OpenMode) -> Result<Self::Store> {
        Ok(self.slow(self.inner.reopen(&store.inner, mode).await?))
    }

    async fn remove(&self, path: &Path) -> Result<()> {
        self.inner.remove(path).await
    }

    async fn sync_names(&self, path: &Path) -> Result<()> {
        self.inner.sync_names(path).await
    }

    async fn canonical(&self, path: &Path) -> Result<PathBuf> {
        self.inner.canonical(path).await
    }
}
