//! A graph as a disk, for tools and tests that need no node.

use spile_core::{Disk, DiskInfo, Error, ErrorKind, Extent, ExtentStatus, Io, Op, Result, Store};

use super::Graph;
use crate::layer::Layer;

impl<S: Store> Disk for Graph<S> {
    fn info(&self) -> DiskInfo {
        DiskInfo { size_bytes: self.size_bytes(), ..self.info.clone() }
    }

    fn size_bytes(&self) -> u64 {
        self.leaf().size_bytes()
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        match io.op {
            Op::Read => self.read_extent(io.extent, io.segments).await,
            Op::Write { fua } => self.write_extent(io.extent, io.segments, fua).await,
            Op::Flush => self.flush_all().await,
            Op::Discard => self.discard_extent(io.extent).await,
            Op::WriteZeroes(how) => self.zero_extent(io.extent, how).await,
        }
    }

    async fn extents(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        self.extents_of(extent, max_runs).await
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        match self.is_read_only() {
            true => {
                let error = Error::new(ErrorKind::ReadOnly, "the disk is open for reading only");
                Err(error.at_path(self.leaf().store().path()))
            }
            false => self.leaf().resize(size_bytes).await,
        }
    }

    async fn close(&self) -> Result<()> {
        self.seal_parents().await?;
        self.layers[0].seal().await
    }
}
