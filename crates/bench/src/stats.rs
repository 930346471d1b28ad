//! Wrappers that count what passes: [`Measured`] around a disk, [`MeasuredStore`] around a store. Their types are static:
//! what is not wrapped pays nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use spile_core::metrics::{Meter, Op};
use spile_core::{
    Disk, DiskInfo, Extent, ExtentStatus, Files, Io, Locator, OpenMode, Result, Segments, Store, StoreExtent,
    StoreInfo, StoreOffset, Via,
};

/// A disk that is measured.
pub struct Measured<D> {
    inner: D,
    meter: Arc<Meter>,
}

impl<D: Disk> Measured<D> {
    /// Counts `inner`'s operations on `meter`.
    pub fn new(inner: D, meter: Arc<Meter>) -> Self {
        Self { inner, meter }
    }
}

impl<D: Disk> Disk for Measured<D> {
    fn info(&self) -> DiskInfo {
        self.inner.info()
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        self.meter.measure(io.op.into(), io.extent.len_bytes, self.inner.execute(io)).await
    }

    async fn extents(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        self.meter.measure(Op::Extents, extent.len_bytes, self.inner.extents(extent, max_runs)).await
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.meter.measure(Op::Other, 0, self.inner.resize(size_bytes)).await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

/// A store that is measured.
pub struct MeasuredStore<S> {
    inner: S,
    meter: Arc<Meter>,
}

impl<S: Store> MeasuredStore<S> {
    /// Counts `inner`'s operations on `meter`.
    pub fn new(inner: S, meter: Arc<Meter>) -> Self {
        Self { inner, meter }
    }
}

impl<S: Store> Store for MeasuredStore<S> {
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
        self.meter.measure(Op::Read, into.len() as u64, self.inner.read_at(offset, into, via)).await
    }

    async fn write_at(&self, offset: StoreOffset, from: &Segments, via: Via) -> Result<()> {
        self.meter.measure(Op::Write, from.len() as u64, self.inner.write_at(offset, from, via)).await
    }

    async fn sync(&self) -> Result<()> {
        self.meter.measure(Op::Flush, 0, self.inner.sync()).await
    }

    async fn zero_range(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        self.meter.measure(Op::WriteZeroes, len_bytes, self.inner.zero_range(offset, len_bytes)).await
    }

    async fn punch_hole(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        self.meter.measure(Op::Discard, len_bytes, self.inner.punch_hole(offset, len_bytes)).await
    }

    async fn set_len(&self, len_bytes: u64) -> Result<()> {
        self.meter.measure(Op::Other, 0, self.inner.set_len(len_bytes)).await
    }

    async fn extent_at(&self, offset: StoreOffset) -> Result<StoreExtent> {
        self.inner.extent_at(offset).await
    }
}

/// Files whose stores are measured, all on one meter.
pub struct MeasuredFiles<F> {
    inner: F,
    meter: Arc<Meter>,
}

impl<F: Files> MeasuredFiles<F> {
    /// Counts the operations of the stores that `inner` opens on `meter`.
    pub fn new(inner: F, meter: Arc<Meter>) -> Self {
        Self { inner, meter }
    }
}

impl<F: Files> Files for MeasuredFiles<F> {
    type Store = MeasuredStore<F::Store>;

    async fn open(&self, at: &Locator, mode: OpenMode) -> Result<Self::Store> {
        Ok(MeasuredStore::new(self.inner.open(at, mode).await?, self.meter.clone()))
    }

    async fn create(&self, path: &Path, len_bytes: u64) -> Result<Self::Store> {
        Ok(MeasuredStore::new(self.inner.create(path, len_bytes).await?, self.meter.clone()))
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
