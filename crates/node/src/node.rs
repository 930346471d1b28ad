//! [`Node`]: see the crate.

use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;

use spile_core::metrics::{Meter, Op};
use spile_core::{Disk, DiskInfo, Error, Extent, ExtentStatus, Io, Result};

use crate::aligned::{Aligned, from_heap};
use crate::bounce::Allocate;
use crate::exchange::{OldEpoch, exchange};
use crate::published::Published;
use crate::shape::{Shape, Shaping};
use crate::stage::{Attached, Place, Stage};
use crate::trouble::Troubles;

/// A disk as a front sees it: any alignment, metered, over a graph that can be exchanged while requests run.
pub struct Node<G: Disk> {
    disk: Aligned<Published<G>>,
    meter: Meter,
    troubles: Option<Troubles>,
}

impl<G: Disk> Node<G> {
    /// A disk over `graph`, whose bounce buffers come from the heap.
    pub fn new(graph: G) -> Self {
        Self::with_buffers(graph, from_heap)
    }

    /// A disk over `graph`, whose bounce buffers `allocate` makes: from the worker's pool, where there is one.
    pub fn with_buffers(graph: G, allocate: Allocate) -> Self {
        let disk = Aligned::with_buffers(Published::new(Arc::new(graph)), allocate);
        Self { disk, meter: Meter::new(), troubles: None }
    }

    /// The same disk with a policy for trouble below it. Without one, every error is reported.
    pub fn with_troubles(self, troubles: Troubles) -> Self {
        Self { troubles: Some(troubles), ..self }
    }

    /// The policy for trouble below the disk, and the requests that wait, if the disk has a policy.
    pub fn troubles(&self) -> Option<&Troubles> {
        self.troubles.as_ref()
    }

    /// As [`Disk::flush`], but it never waits for trouble to pass.
    ///
    /// # Errors
    /// As there.
    pub async fn flush_once(&self) -> Result<()> {
        self.disk.flush().await
    }

    /// Counts of all requests since the disk was made.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// How often a request was copied through a bounce buffer because it was not aligned, and how many bytes that were.
    pub fn bounced(&self) -> (u64, u64) {
        self.disk.bounced()
    }

    /// The graph that is published now. While an exchange is under way, the result comes after it.
    pub async fn graph(&self) -> Arc<G> {
        self.published().control.lock().await.graph.clone()
    }

    /// The graph that is published now, without a wait. `None` in the moment of an exchange.
    pub fn graph_now(&self) -> Option<Arc<G>> {
        self.published().graph_now()
    }

    /// Has `look` see the graph that is published now, for what no [`Disk`] can tell. It counts as a request: neither the end of
    /// an exchange nor a close comes before it has ended.
    ///
    /// # Errors
    /// `Shutdown` when the disk is closed; those of `look`.
    pub async fn look<T>(&self, look: impl AsyncFnOnce(&G) -> Result<T>) -> Result<T> {
        self.published().look(look).await
    }

    /// [`exchange`](crate::exchange) for this disk alone.
    ///
    /// # Errors
    /// As there.
    pub async fn exchange(&self, graph: Arc<G>) -> Result<OldEpoch<G>> {
        let old = exchange(vec![(self, graph)]).await?;
        Ok(old.into_iter().next().expect("one change has one old epoch"))
    }

    /// Puts `stage` at `place`. Requests that begin from now on meet it.
    ///
    /// # Errors
    /// `Busy` when the place is taken; `Shutdown` when the disk is closed.
    pub async fn attach(&self, place: Place, stage: Arc<dyn Stage>) -> Result<()> {
        self.published().attach(place, Attached::new(stage)).await
    }

    /// Takes the stage at `place` away and waits for the requests that met it, and for no others.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    pub async fn detach(&self, place: Place) -> Result<()> {
        let end = self.published().detach(place).await?;
        end.wait().await;
        Ok(())
    }

    /// Gives requests that begin from now on the shape `shape`.
    ///
    /// # Errors
    /// `Shutdown` when the disk is closed.
    pub async fn set_shape(&self, shape: Shape) -> Result<()> {
        self.published().set_shape(shape).await
    }

    /// The shape that requests get now, and what was counted of shaping since the disk was made.
    pub fn shaping(&self) -> &Shaping {
        self.published().shaping()
    }

    pub(crate) fn published(&self) -> &Published<G> {
        self.disk.inner()
    }

    /// A request that needs no bounce buffer, has nothing to wait for and meets no stage goes straight to the graph. All
    /// others take the way through [`Aligned`] and [`Published`], where each obstacle has its place. What fails is tried again
    /// as the disk's policy says.
    async fn execute_unmetered(&self, io: Io<'_>, gone: impl Future<Output = ()>) -> Result<()> {
        let error = 'failed: {
            if let Some(_held) = self.disk.try_pass(&io)
                && let Some(graph) = self.published().try_enter_free(&io)
            {
                match graph.execute(io).await {
                    Ok(()) => return Ok(()),
                    Err(error) => break 'failed error,
                }
            }
            match self.disk.execute(io).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            }
        };
        self.see_through(io, error, gone).await
    }

    /// Takes a request that has failed with `error` to its end, as the disk's policy says. Its future is in a box, so that the futures
    /// of all other requests stay small.
    #[cold]
    fn see_through<'a>(
        &'a self,
        io: Io<'a>,
        error: Error,
        gone: impl Future<Output = ()> + 'a,
    ) -> Pin<Box<impl Future<Output = Result<()>> + 'a>> {
        Box::pin(async move {
            let Some(troubles) = &self.troubles else { return Err(error) };
            let again = async || self.disk.execute(io).await;
            troubles.see_through(io.op.into(), error, gone, again).await
        })
    }
}

impl<G: Disk> Disk for Node<G> {
    fn info(&self) -> DiskInfo {
        self.disk.info()
    }

    fn size_bytes(&self) -> u64 {
        self.published().size_bytes()
    }

    fn execute(&self, io: Io<'_>) -> impl Future<Output = Result<()>> {
        self.execute_for(io, pending())
    }

    fn execute_for(&self, io: Io<'_>, gone: impl Future<Output = ()>) -> impl Future<Output = Result<()>> {
        self.meter.measure_by_turns(io.op.into(), io.extent.len_bytes, self.execute_unmetered(io, gone))
    }

    async fn extents(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        self.meter.measure(Op::Extents, extent.len_bytes, self.disk.extents(extent, max_runs)).await
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.disk.resize(size_bytes).await
    }

    async fn close(&self) -> Result<()> {
        self.disk.close().await
    }
}
