//! [`SlowFiles`]: files on a device that takes long to write. Data that are written directly take so much longer; what goes through
//! the page cache (a format's metadata) is as fast as ever, as on a host with a slow device.

use std::path::{Path, PathBuf};
use std::time::Duration;

use spile_core::{Files, Locator, OpenMode, Result, Segments, Store, StoreExtent, StoreInfo, StoreOffset, Via};

/// A store whose direct writes take longer.
pub struct SlowStore<S> {
    inner: S,
    write_delay: Duration,
}

impl<S: Store> Store for SlowStore<S> {
    fn info(&self) -> StoreInfo {
        self.inner.info()
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn path(&self) -> &Path {
        self.inner.path()
    }

    async fn read_at(&self, offset: StoreOffset, into: &Segments, via: Via) -> Result<()> {
        self.inner.read_at(offset, into, via).await
    }

    async fn write_at(&self, offset: StoreOffset, from: &Segments, via: Via) -> Result<()> {
        if via == Via::Direct {
            spile_engine::sleep(self.write_delay).await;
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

/// Files on such a device.
pub struct SlowFiles<F> {
    inner: F,
    write_delay: Duration,
}

impl<F: Files> SlowFiles<F> {
    /// The files of `inner`, whose direct writes take `write_delay` longer.
    pub fn new(inner: F, write_delay: Duration) -> Self {
        Self { inner, write_delay }
    }

    fn slow(&self, inner: F::Store) -> SlowStore<F::Store> {
        SlowStore { inner, write_delay: self.write_delay }
    }
}

impl<F: Files> Files for SlowFiles<F> {
    type Store = SlowStore<F::Store>;

    async fn open(&self, at: &Locator, mode: OpenMode) -> Result<Self::Store> {
        Ok(self.slow(self.inner.open(at, mode).await?))
    }

    async fn create(&self, path: &Path, len_bytes: u64) -> Result<Self::Store> {
        Ok(self.slow(self.inner.create(path, len_bytes).await?))
    }

    async fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.inner.rename(from, to).await
    }

    async fn remove(&self, path: &Path) -> Result<()> {
        self.inner.remove(path).await
    }

    async fn canonical(&self, path: &Path) -> Result<PathBuf> {
        self.inner.canonical(path).await
    }
}
