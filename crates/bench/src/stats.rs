//! [`Measured`]: a disk that is counted. Its type is static: a disk that is not wrapped pays nothing.

use std::sync::Arc;

use spile_core::metrics::{Meter, Op};
use spile_core::{Disk, DiskInfo, Epoch, Extent, ExtentStatus, Io, Result};

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

    fn follows(&self, epochs: &[Arc<dyn Epoch>]) {
        self.inner.follows(epochs);
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}
