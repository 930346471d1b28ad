//! A disk without anything between it and its store, for the tests that count allocations.

use spile_core::{Disk, DiskInfo, Extent, ExtentStatus, Result, Segments, Store, StoreOffset, Via, WriteZeroes};

/// A disk that is its store, and its size in bytes.
pub struct Bare<S>(pub S, pub u64);

impl<S: Store> Disk for Bare<S> {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size_bytes: self.1,
            request_align_bytes: 1,
            memory_align_bytes: 1,
            preferred_bytes: 4096,
            discard_align_bytes: 4096,
            read_only: false,
            fast_zero: true,
        }
    }

    fn read(&self, extent: Extent, into: &Segments) -> impl Future<Output = Result<()>> {
        self.0.read_at(StoreOffset(extent.start()), into, Via::Cached)
    }

    fn write(&self, extent: Extent, from: &Segments, _fua: bool) -> impl Future<Output = Result<()>> {
        self.0.write_at(StoreOffset(extent.start()), from, Via::Cached)
    }

    fn flush(&self) -> impl Future<Output = Result<()>> {
        self.0.sync()
    }

    fn discard(&self, extent: Extent) -> impl Future<Output = Result<()>> {
        self.0.punch_hole(StoreOffset(extent.start()), extent.len_bytes)
    }

    fn write_zeroes(&self, extent: Extent, _how: WriteZeroes) -> impl Future<Output = Result<()>> {
        self.0.zero_range(StoreOffset(extent.start()), extent.len_bytes)
    }

    async fn extents(&self, _extent: Extent, _max_runs: usize) -> Result<Vec<ExtentStatus>> {
        Ok(Vec::new())
    }

    async fn resize(&self, _size_bytes: u64) -> Result<()> {
        Ok(())
    }

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}
