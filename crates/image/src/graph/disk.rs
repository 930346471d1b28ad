//! A graph as a disk, for tools and tests that need no node.

use std::pin::pin;
use std::sync::Arc;

use spile_core::{Disk, DiskInfo, Epoch, Error, ErrorKind, Extent, ExtentStatus, Io, Op, Result, Store, metrics};

use super::Graph;
use crate::layer::Layer;

impl<S: Store> Graph<S> {
    async fn answer(&self, io: Io<'_>) -> Result<()> {
        match io.op {
            Op::Read => self.read_extent(io.extent, io.segments).await,
            Op::Write { fua } => self.write_extent(io.extent, io.segments, fua).await,
            Op::Flush => self.flush_all().await,
            Op::Discard => self.discard_extent(io.extent).await,
            Op::WriteZeroes(how) => self.zero_extent(io.extent, how).await,
        }
    }
}

impl<S: Store> Disk for Graph<S> {
    fn info(&self) -> DiskInfo {
        DiskInfo { size_bytes: self.size_bytes(), ..self.info.clone() }
    }

    fn size_bytes(&self) -> u64 {
        self.leaf().size_bytes()
    }

    fn execute(&self, io: Io<'_>) -> impl Future<Output = Result<()>> {
        self.meter(0).measure_by_turns(io.op.into(), io.extent.len_bytes, self.answer(io))
    }

    async fn extents(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        let found = pin!(self.extents_of(extent, max_runs));
        self.meter(0).measure_by_turns(metrics::Op::Extents, extent.len_bytes, found).await
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        match self.is_read_only() {
            true => {
                let error = Error::new(ErrorKind::ReadOnly, "the disk is open for reading only");
                Err(error.at_path(self.leaf().store().path()))
            }
            false if self.is_sinking() => {
                let what = "the disk cannot grow while its leaf is merged into the parent";
                let error = Error::new(ErrorKind::Busy, what).at_path(self.leaf().store().path());
                Err(error.hint("wait until the merge is done, or cancel it"))
            }
            false => {
                self.check_hides_parent(size_bytes)?;
                self.leaf().resize(size_bytes).await
            }
        }
    }

    fn follows(&self, epochs: &[Arc<dyn Epoch>]) {
        self.layers[0].becomes_leaf(epochs);
    }

    async fn close(&self) -> Result<()> {
        self.seal_parents().await?;
        self.layers[0].seal().await
    }
}
