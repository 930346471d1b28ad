//! [`Node`]: see the crate.

use std::future::{pending, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use spile_core::metrics::span::{Moment, go_on_from, stamp};
use spile_core::metrics::{Meter, Op};
use spile_core::{Disk, DiskInfo, Epoch, Error, ErrorKind, Extent, ExtentStatus, Io, Result};

use crate::aligned::{Aligned, from_heap};
use crate::bounce::Allocate;
use crate::end::End;
use crate::exchange::{OldEpoch, exchange};
use crate::haste::Haste;
use crate::limit::{DiskLimits, Group, Limits};
use crate::published::{InOneEpoch, Published};
use crate::shape::{Shape, Shaping};
use crate::stage::{Attached, Pending, Place, Stage};
use crate::trouble::{Troubles, forsaken};

/// The requests that were in flight when [`Node::hold`] began to hold others back.
pub struct InFlight(Vec<Arc<End>>);

impl InFlight {
    /// Waits until all of them have ended.
    pub async fn ended(&self) {
        for end in &self.0 {
            end.wait().await;
        }
    }
}

/// A disk as a front sees it: any alignment, metered, over a graph that can be exchanged while requests run.
pub struct Node<G: Disk> {
    disk: Aligned<Published<G>, InOneEpoch>,
    meter: Meter,
    troubles: Option<Troubles>,
    limits: Option<Arc<DiskLimits>>,
    haste: Haste,
}

impl<G: Disk> Node<G> {
    /// A disk over `graph`, whose bounce buffers come from the heap.
    pub fn new(graph: G) -> Self {
        Self::with_buffers(graph, from_heap)
    }

    /// A disk over `graph`, whose bounce buffers `allocate` makes: from the worker's pool, where there is one.
    pub fn with_buffers(graph: G, allocate: Allocate) -> Self {
        let disk = Aligned::with_buffers(Published::new(Arc::new(graph)), allocate);
        Self { disk, meter: Meter::new(), troubles: None, limits: None, haste: Haste::default() }
    }

    /// The same disk with a policy for trouble below it. Without one, every error is reported.
    pub fn with_troubles(self, troubles: Troubles) -> Self {
        Self { troubles: Some(troubles), ..self }
    }

    /// The policy for trouble below the disk, and the requests that wait, if the disk has a policy.
    pub fn troubles(&self) -> Option<&Troubles> {
        self.troubles.as_ref()
    }

    /// The same disk with a clock, so that it can have limits.
    pub fn with_limits(self, limits: Arc<DiskLimits>) -> Self {
        Self { limits: Some(limits), ..self }
    }

    /// The disk's limits, if it can have some.
    pub fn limits(&self) -> Option<&Arc<DiskLimits>> {
        self.limits.as_ref()
    }

    fn wanted_limits(&self) -> Result<&Arc<DiskLimits>> {
        let none = || Error::new(ErrorKind::Unsupported, "this disk was made without a clock and cannot have limits");
        self.limits.as_ref().ok_or_else(none)
    }

    /// Gives the disk limits of its own in the place of those that it had, also for requests that wait already.
    ///
    /// # Errors
    /// As [`Limits::check`]; `Unsupported` for a disk without a clock; `Shutdown` when it is closed.
    pub async fn set_limits(&self, limits: Limits) -> Result<()> {
        limits.check()?;
        self.wanted_limits()?.set_own(limits);
        self.place_limits().await
    }

    /// Limits the disk for the good of a job, beside its other limits; no limits: not any more.
    ///
    /// # Errors
    /// As [`Node::set_limits`].
    pub async fn set_job_limits(&self, limits: Limits) -> Result<()> {
        limits.check()?;
        self.wanted_limits()?.set_job(limits);
        self.place_limits().await
    }

    /// Puts the disk into a group, whose limits it shares from now on; `None`: into none.
    ///
    /// # Errors
    /// As [`Node::set_limits`].
    pub async fn join_group(&self, group: Option<Arc<Group>>) -> Result<()> {
        self.wanted_limits()?.join(group);
        self.place_limits().await
    }

    /// Has requests meet the disk's limits while there are any, and else not. It is to be called when the limits of the disk's group have
    /// changed.
    ///
    /// # Errors
    /// `Busy` when another stage has the place; `Shutdown` when the disk is closed.
    pub async fn place_limits(&self) -> Result<()> {
        let Some(limits) = &self.limits else { return Ok(()) };
        let mut is_attached = limits.is_attached.lock().await;
        match (limits.are_needed(), *is_attached) {
            (true, false) => self.attach(Place::Limit, limits.clone()).await?,
            // Those inside need not be waited for: nothing holds them back any more.
            (false, true) => drop(self.published().detach(Place::Limit).await?),
            _ => return Ok(()),
        }
        *is_attached = !*is_attached;
        Ok(())
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

    /// Refuses a graph that could not take the place of the present one, as an exchange would.
    ///
    /// # Errors
    /// `InvalidInput`.
    pub fn check_fits(&self, graph: &G) -> Result<()> {
        self.published().check_fits(graph)
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

    /// Has requests that begin from now on meet `stage` at `place` in the place of what is there, or nothing. Waits until all requests
    /// that began before have ended.
    ///
    /// # Errors
    /// `Shutdown` when the disk is closed.
    pub async fn replace(&self, place: Place, stage: Option<Arc<dyn Stage>>) -> Result<()> {
        for end in self.published().replace(place, stage.map(Attached::new)).await? {
            end.wait().await;
        }
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

    /// Holds all requests back that begin from now on, until [`Node::let_go`]: they wait without an error. An exchange or another stage may
    /// come meanwhile, and a close, which ends it. [`Node::hurried`] says when requests must not wait any more.
    ///
    /// # Errors
    /// `Busy` when requests are held back already; `Shutdown` when the disk is closed.
    pub async fn hold(&self) -> Result<InFlight> {
        self.published().hold().await.map(InFlight)
    }

    /// Lets the requests go on that [`Node::hold`] holds back.
    pub async fn let_go(&self) {
        self.published().let_go().await;
    }

    /// True while [`Node::hold`] holds requests back: for those who watch. For a moment, in which a graph is exchanged, it may be false.
    pub fn is_held(&self) -> bool {
        self.published().is_held()
    }

    /// Comes when somebody waits for the end of all requests ([`Disk::hurry`]).
    pub async fn hurried(&self) {
        self.haste.come().await;
    }

    pub(crate) fn published(&self) -> &Published<G> {
        self.disk.inner()
    }

    /// A request that needs no bounce buffer, has nothing to wait for and meets no stage goes straight to the graph. All
    /// others take the way through [`Aligned`] and [`Published`], where each obstacle has its place. What fails is tried again
    /// as the disk's policy says.
    async fn execute_unmetered(&self, io: Io<'_>, gone: impl Future<Output = ()>) -> Result<()> {
        let mut gone = pin!(gone);
        let error = 'failed: {
            if let Some(_held) = self.disk.try_pass(&io)
                && let Some(graph) = self.published().try_enter_free(&io)
            {
                match graph.execute(io).await {
                    Ok(()) => return Ok(()),
                    Err(error) => break 'failed error,
                }
            }
            match self.execute_in_turn(io, gone.as_mut()).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            }
        };
        self.see_through(io, error, gone).await
    }

    /// Executes a request that may be held back, for a client that may go away meanwhile.
    async fn execute_in_turn(&self, io: Io<'_>, mut gone: Pin<&mut impl Future<Output = ()>>) -> Result<()> {
        let limit = match self.published().is_limited() {
            // It waits there while requests are held back.
            true => self.limit_unless_gone(gone.as_mut()).await?,
            false => None,
        };
        if let Some(pending) = limit.as_ref().and_then(|limit| limit.stage().before(io)) {
            stamp(Moment::HeldBack);
            unless_gone(pending, gone.as_mut()).await?;
            go_on_from(Moment::DiskBegan);
            // Requests may be held back since: then it waits here, and not with its locks.
            self.limit_unless_gone(gone).await?;
        }
        let result = self.disk.execute(io).await;
        match limit.as_ref().and_then(|limit| limit.stage().after(io, &result)) {
            Some(pending) => pending.await,
            None => result,
        }
    }

    /// The stage that holds a request back. While all requests are held back it waits, and a request whose client goes away ends.
    async fn limit_unless_gone(&self, mut gone: Pin<&mut impl Future<Output = ()>>) -> Result<Option<Arc<Attached>>> {
        let (mut limit, mut waits) = (pin!(self.published().limit()), false);
        poll_fn(|cx| match limit.as_mut().poll(cx) {
            Poll::Ready(limit) => {
                if waits {
                    go_on_from(Moment::DiskBegan);
                }
                Poll::Ready(Ok(limit))
            }
            Poll::Pending => {
                if !std::mem::replace(&mut waits, true) {
                    stamp(Moment::HeldBack);
                }
                gone.as_mut().poll(cx).map(|()| Err(forsaken()))
            }
        })
        .await
    }

    /// Takes a request that has failed with `error` to its end, as the disk's policy says. Its future is in a box, so that the futures
    /// of all other requests stay small.
    #[cold]
    fn see_through<'a, C: Future<Output = ()>>(
        &'a self,
        io: Io<'a>,
        error: Error,
        gone: Pin<&'a mut C>,
    ) -> Pin<Box<impl Future<Output = Result<()>> + 'a>> {
        Box::pin(async move {
            let Some(troubles) = &self.troubles else { return Err(error) };
            let again = async |gone: Pin<&mut C>| {
                // Requests may be held back by now: then it waits here, and not with its locks.
                if self.published().is_limited() {
                    self.limit_unless_gone(gone).await?;
                }
                self.disk.execute(io).await
            };
            troubles.see_through(io.op.into(), error, gone, again).await
        })
    }
}

/// Waits for `pending`. A request whose client goes away meanwhile ends: the client may be back already, on another connection, and may
/// have written something newer to the same place.
async fn unless_gone(mut pending: Pending<'_>, mut gone: Pin<&mut impl Future<Output = ()>>) -> Result<()> {
    poll_fn(|cx| match gone.as_mut().poll(cx) {
        Poll::Ready(()) => Poll::Ready(Err(forsaken())),
        Poll::Pending => pending.as_mut().poll(cx),
    })
    .await
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

    fn may_hold_back(&self) -> bool {
        self.published().is_limited()
    }

    fn hurry(&self, begins: bool) {
        self.haste.hurry(begins);
        self.limits.iter().for_each(|limits| limits.hurry(begins));
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.disk.resize(size_bytes).await
    }

    fn follows(&self, epochs: &[Arc<dyn Epoch>]) {
        self.disk.follows(epochs);
    }

    async fn close(&self) -> Result<()> {
        self.disk.close().await
    }
}
