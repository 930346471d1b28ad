//! A disk without anything between it and its store, for the tests that count allocations.

use std::sync::Arc;

use spile_core::{Disk, DiskInfo, Epoch, Extent, ExtentStatus, Io, Op, Result, Store, StoreOffset, Via};

/// A disk that is its store, and its size in bytes.
pub struct Bare<S>(pub S, pub u64);

impl<S: Store> Disk for Bare<S> {
    fn info(&self) -> DiskInfo {
        DiskInfo::unaligned(self.1)
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        let at = StoreOffset(io.extent.start());
        match io.op {
            Op::Read => self.0.read_at(at, io.segments, Via::Cached).await,
            Op::Write { .. } => self.0.write_at(at, io.segments, Via::Cached).await,
            Op::Flush => self.0.sync().await,
            Op::Discard => self.0.punch_hole(at, io.extent.len_bytes).await,
            Op::WriteZeroes(_) => self.0.zero_range(at, io.extent.len_bytes).await,
        }
    }

    async fn extents(&self, _extent: Extent, _max_runs: usize) -> Result<Vec<ExtentStatus>> {
        Ok(Vec::new())
    }

    async fn resize(&self, _size_bytes: u64) -> Result<()> {
        Ok(())
    }

    fn follows(&self, _: &[Arc<dyn Epoch>]) {}

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}
