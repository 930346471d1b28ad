//! The disks of [`super`]: a graph that can break a rule on purpose, and the part of a disk that the oracle watches.

use std::sync::Arc;

use spile_core::{Disk, DiskInfo, Epoch, Extent, ExtentStatus, GuestOffset, Io, Op, Result};
use spile_image::Graph;

use crate::store::SimStore;

/// A rule of the exchange that is broken on purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Broken {
    /// None.
    #[default]
    Nothing,
    /// The disks are exchanged one after the other, with requests in between.
    OneByOne,
    /// The old leaf is sealed without waiting for the old epoch; the merged map of the parents then covers a layer that changes.
    SealedEarly,
    /// A flush covers the new leaf only.
    FlushOfLeaf,
    /// The new leaf takes the disk's path before it is durable.
    LeafNotDurable,
    /// The graph is exchanged before the new leaf's name is durable.
    RenameNotDurable,
    /// The new leaf takes the disk's path before the old one has another name.
    LinkedLate,
    /// A disk is opened for writing while the name that a process before has given it is not durable.
    OldNamesNotSynced,
    /// Nothing tells that a set of snapshots is not whole.
    SetNotNoted,
    /// What a crash has left of a snapshot is not taken back.
    NotTakenBack,
    /// A way back has succeeded before the new leaf's name is durable.
    BackNotDurable,
    /// On the way back the new leaf takes the disk's path before it is durable.
    BackLeafNotDurable,
    /// A disk that is used goes back while requests are at it.
    BackInFlight,
    /// What differs counts as changed only when a disk that is used has gone back.
    BackNotedLate,
    /// Checkpoints are made while a disk that is used goes back.
    BackBesideCheckpoints,
    /// A disk grows while its snapshot is made.
    GrownMeanwhile,
    /// Requests that should wait for trouble to pass are reported instead.
    Impatient,
}

/// The graph under test, which can be made to break a rule.
pub(super) struct LiveGraph {
    pub graph: Graph<SimStore>,
    pub broken: Broken,
}

impl Disk for LiveGraph {
    fn info(&self) -> DiskInfo {
        self.graph.info()
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        let leaf = self.graph.handles()[0].image();
        match (io.op, self.broken) {
            (Op::Flush, Broken::FlushOfLeaf) => spile_image::layer::Layer::flush(leaf).await,
            _ => self.graph.execute(io).await,
        }
    }

    async fn extents(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        self.graph.extents(extent, max_runs).await
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.graph.resize(size_bytes).await
    }

    fn follows(&self, epochs: &[Arc<dyn Epoch>]) {
        self.graph.follows(epochs);
    }

    async fn close(&self) -> Result<()> {
        self.graph.close().await
    }
}

/// A disk without its first bytes, in which something else lies.
pub(super) struct Tail<D> {
    pub disk: D,
    /// How many bytes are left out: whole blocks of the images.
    pub skipped_bytes: u64,
}

impl<D> Tail<D> {
    fn inner(&self, extent: Extent) -> Extent {
        Extent { offset: GuestOffset(extent.offset.0 + self.skipped_bytes), ..extent }
    }
}

impl<D: Disk> Disk for Tail<D> {
    fn info(&self) -> DiskInfo {
        let info = self.disk.info();
        DiskInfo { size_bytes: info.size_bytes - self.skipped_bytes, ..info }
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        let extent = if io.op == Op::Flush { io.extent } else { self.inner(io.extent) };
        self.disk.execute(Io { extent, ..io }).await
    }

    async fn extents(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        let mut runs = self.disk.extents(self.inner(extent), max_runs).await?;
        runs.iter_mut().for_each(|run| run.extent.offset.0 -= self.skipped_bytes);
        Ok(runs)
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.disk.resize(size_bytes + self.skipped_bytes).await
    }

    fn follows(&self, epochs: &[Arc<dyn Epoch>]) {
        self.disk.follows(epochs);
    }

    async fn close(&self) -> Result<()> {
        self.disk.close().await
    }
}
