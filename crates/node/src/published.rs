//! [`Published`]: the graph that requests take now, the gate before it, and the epochs.
//!
//! Each worker has a shard with a share of the current [`Lease`] in it. A request clones that share and keeps the clone until it
//! ends. So the share's count of references is the worker's count of requests in this epoch, on the worker's own cache
//! line, and it keeps the graph alive. When the last share of an epoch is gone, the epoch has ended.
//!
//! To close the gate, each shard's share is taken out; to open it, a share of the next lease is put in. Closing
//! waits for no request: only for workers that are just cloning a share, a few instructions. A request never waits in a lock:
//! when it finds its shard locked or empty, it waits as any future does.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use event_listener::Event;
use spile_core::{
    Disk, DiskInfo, Epoch, Error, ErrorKind, Extent, ExtentStatus, Io, Result, SHARDS, shard_number, yield_now,
};

use crate::aligned::{Enter, Steps};
use crate::end::{End, Ender};
use crate::shape::{Shape, Shaper, Shaping};
use crate::stage::{Attached, Place, Stages};

/// What a request meets on its way to the graph.
#[derive(Clone)]
pub(crate) enum Way {
    /// Nothing.
    Free,
    /// The disk's shape, and no stage.
    Shaped(Arc<Shaper>),
    /// Stages, and the disk's shape unless that is off.
    Staged(Stages, Option<Arc<Shaper>>),
    /// The stage that holds requests back, and then what is behind it.
    Limited(Arc<Attached>, Box<Way>),
    /// The disk is closed.
    Closed,
}

impl Way {
    /// What a request meets that was not held back, or is not any more.
    fn behind_limit(&self) -> &Self {
        match self {
            Self::Limited(_, behind) => behind,
            way => way,
        }
    }
}

/// One worker's share of what is published in an epoch, on a cache line of its own.
#[repr(align(128))]
pub(crate) struct Lease<G> {
    graph: Arc<G>,
    way: Way,
    /// After the graph, so that nobody has the graph any more when the epoch has ended.
    _epoch: Arc<Ender>,
}

/// A request's share of an epoch in which requests go straight to the graph.
pub(crate) struct FreeLease<G>(Arc<Lease<G>>);

impl<G> Deref for FreeLease<G> {
    type Target = G;

    fn deref(&self) -> &G {
        &self.0.graph
    }
}

/// How a request of several steps enters the current epoch: all of them take its graph and its stages.
pub(crate) struct InOneEpoch;

impl<G: Disk> Enter<Published<G>> for InOneEpoch {
    async fn enter(disk: &Published<G>) -> impl Steps {
        disk.enter().await
    }
}

impl<G: Disk> Steps for Arc<Lease<G>> {
    async fn execute(&self, io: Io<'_>) -> Result<()> {
        match self.way.behind_limit() {
            Way::Shaped(shaper) if shaper.concerns(&io) => {
                Box::pin(shaper.execute(io, async |part| self.graph.execute(part).await)).await
            }
            Way::Free | Way::Shaped(_) => self.graph.execute(io).await,
            Way::Staged(stages, shaper) if shaper.as_ref().is_none_or(|shaper| !shaper.concerns(&io)) => {
                let stages = stages.behind_shape();
                // Not in a function of its own: its future would make those of all requests longer.
                let (mut result, mut passed) = (Ok(()), 0);
                while result.is_ok() && passed < stages.len() {
                    if let Some(pending) = stages[passed].as_ref().and_then(|one| one.stage().before(io)) {
                        result = pending.await;
                    }
                    passed += usize::from(result.is_ok());
                }
                if result.is_ok() {
                    result = self.graph.execute(io).await;
                }
                while passed > 0 {
                    passed -= 1;
                    if let Some(pending) = stages[passed].as_ref().and_then(|one| one.stage().after(io, &result)) {
                        result = pending.await;
                    }
                }
                result
            }
            Way::Staged(stages, shaper) => Box::pin(stages.execute(&*self.graph, shaper.as_deref(), io)).await,
            Way::Limited(..) | Way::Closed => Err(closed()),
        }
    }
}

/// A worker's share of the current lease; none while the gate is closed.
#[repr(align(128))]
struct Shard<G>(Mutex<Option<Arc<Lease<G>>>>);

/// What changes only by an exchange, a stage, a new size or a close. These wait for each other.
pub(crate) struct Control<G> {
    pub(crate) graph: Arc<G>,
    pub(crate) stages: Stages,
    pub(crate) is_closed: bool,
    /// The gate stays closed, whatever else changes, until the disk is closed.
    pub(crate) is_held: bool,
    /// The ends of epochs that may not have ended; the last one is the current.
    pub(crate) epochs: Vec<Arc<End>>,
}

/// A disk whose graph can be exchanged.
pub(crate) struct Published<G> {
    shards: Box<[Shard<G>]>,
    is_gate_closed: AtomicBool,
    gate_opened: Event,
    pub(crate) control: async_lock::Mutex<Control<G>>,
    /// A stage may hold back requests that begin now.
    is_limited: AtomicBool,
    size_bytes: AtomicU64,
    /// But for the size.
    info: DiskInfo,
    shaping: Shaping,
}

impl<G: Disk> Published<G> {
    pub(crate) fn new(graph: Arc<G>) -> Self {
        let info = graph.info();
        graph.follows(&[]);
        let control = Control {
            graph: graph.clone(),
            stages: Stages::default(),
            is_closed: false,
            is_held: false,
            epochs: Vec::new(),
        };
        let mut new = Self {
            shards: (0..SHARDS).map(|_| Shard(Mutex::new(None))).collect(),
            is_gate_closed: AtomicBool::new(true),
            gate_opened: Event::new(),
            control: async_lock::Mutex::new(control),
            is_limited: AtomicBool::new(false),
            size_bytes: AtomicU64::new(info.size_bytes),
            shaping: Shaping::new(&info),
            info,
        };
        let end = new.open_gate(&graph, &Way::Free);
        new.control.get_mut().epochs.push(end);
        new
    }

    /// From now on requests wait at the gate, until it is opened.
    pub(crate) fn close_gate(&self) {
        self.is_gate_closed.store(true, Ordering::SeqCst);
        for shard in &self.shards {
            let _share = shard.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
    }

    /// Begins an epoch, and lets requests in again. The result comes when the epoch has ended.
    pub(crate) fn open_gate(&self, graph: &Arc<G>, way: &Way) -> Arc<End> {
        let (end, ender) = End::new();
        let epoch = Arc::new(ender);
        for shard in &self.shards {
            let lease = Lease { graph: graph.clone(), way: way.clone(), _epoch: epoch.clone() };
            *shard.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(lease));
        }
        self.is_gate_closed.store(false, Ordering::SeqCst);
        self.gate_opened.notify(usize::MAX);
        end
    }

    /// Counts a request in the current epoch until the result is dropped.
    async fn enter(&self) -> Arc<Lease<G>> {
        match self.try_enter() {
            Some(lease) => lease,
            None => self.enter_late().await,
        }
    }

    #[inline(always)]
    fn try_enter(&self) -> Option<Arc<Lease<G>>> {
        match self.shards[shard_number()].0.try_lock() {
            Ok(share) => share.clone(),
            Err(TryLockError::Poisoned(share)) => share.into_inner().clone(),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// As [`Published::enter`], for the request `io` that has nothing to wait for, meets no stage that sees its result and keeps its shape; else `None`.
    #[inline]
    pub(crate) fn try_enter_free(&self, io: &Io<'_>) -> Option<FreeLease<G>> {
        let is_free = |lease: &Arc<Lease<G>>| match &lease.way {
            Way::Free => true,
            Way::Shaped(shaper) => !shaper.concerns(io),
            Way::Staged(stages, shaper) => stages.are_passed_by(shaper.as_deref(), io),
            Way::Limited(..) | Way::Closed => false,
        };
        self.try_enter().filter(is_free).map(FreeLease)
    }

    /// True when [`Published::limit`] may have a stage. All but limited disks are spared a look at the lease for that.
    pub(crate) fn is_limited(&self) -> bool {
        self.is_limited.load(Ordering::Acquire)
    }

    /// The stage that holds back requests that begin now.
    pub(crate) async fn limit(&self) -> Option<Arc<Attached>> {
        match &self.enter().await.way {
            Way::Limited(limit, _) => Some(limit.clone()),
            _ => None,
        }
    }

    /// The graph of the current epoch; `None` in the moment of an exchange. It waits for another thread of this shard that is just cloning
    /// the share, a few instructions.
    pub(crate) fn graph_now(&self) -> Option<Arc<G>> {
        let share = self.shards[shard_number()].0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match share {
            Some(lease) => Some(lease.graph.clone()),
            // The gate may be closed for long. Who exchanges graphs has the lock.
            None => self.control.try_lock().map(|control| control.graph.clone()),
        }
    }

    /// Closes the gate for as long as [`Published::let_go`] does not come. Returns the ends of all epochs.
    pub(crate) async fn hold(&self) -> Result<Vec<Arc<End>>> {
        let mut control = self.control.lock().await;
        control.check_open()?;
        if std::mem::replace(&mut control.is_held, true) {
            return Err(Error::new(ErrorKind::Busy, "the disk is paused already"));
        }
        // From now on requests look whether they may go on before they take anything, as they do for a limit.
        self.is_limited.store(true, Ordering::Release);
        self.close_gate();
        Ok(control.epochs.clone())
    }

    /// True while [`Published::hold`] keeps the gate closed; false, too, while an exchange is at work.
    pub(crate) fn is_held(&self) -> bool {
        self.control.try_lock().is_some_and(|control| control.is_held)
    }

    /// Opens the gate that [`Published::hold`] has closed.
    pub(crate) async fn let_go(&self) {
        let mut control = self.control.lock().await;
        if std::mem::replace(&mut control.is_held, false) {
            self.open_with(&mut control);
        }
    }

    /// Has `look` see the graph of the current epoch. It counts as a request: the epoch does not end before it.
    pub(crate) async fn look<T>(&self, look: impl AsyncFnOnce(&G) -> Result<T>) -> Result<T> {
        let lease = self.enter().await;
        match lease.way {
            Way::Closed => Err(closed()),
            _ => look(&lease.graph).await,
        }
    }

    #[cold]
    fn enter_late(&self) -> impl Future<Output = Arc<Lease<G>>> {
        Box::pin(async {
            loop {
                let opened = self.gate_opened.listen();
                if let Some(lease) = self.try_enter() {
                    return lease;
                }
                match self.is_gate_closed.load(Ordering::SeqCst) {
                    true => opened.await,
                    // Another thread of this shard was just cloning the share.
                    false => yield_now().await,
                }
            }
        })
    }

    /// Puts `stage` at `place`.
    pub(crate) async fn attach(&self, place: Place, stage: Arc<Attached>) -> Result<()> {
        let mut control = self.control.lock().await;
        control.check_open()?;
        match control.stages.at(place) {
            Some(_) => return Err(Error::new(ErrorKind::Busy, format!("the place {place:?} has a stage already"))),
            free => *free = Some(stage),
        }
        self.republish(&mut control);
        Ok(())
    }

    /// Takes the stage at `place` away. What is returned comes when no request is in it any more.
    pub(crate) async fn detach(&self, place: Place) -> Result<Arc<End>> {
        let mut control = self.control.lock().await;
        let Some(stage) = control.stages.at(place).take() else {
            return Err(Error::new(ErrorKind::NotFound, format!("the place {place:?} has no stage")));
        };
        self.republish(&mut control);
        Ok(stage.end())
    }

    /// Puts `stage` at `place`, in the place of the stage that is there; `None` leaves the place free. Returns the ends of all epochs
    /// before.
    pub(crate) async fn replace(&self, place: Place, stage: Option<Arc<Attached>>) -> Result<Vec<Arc<End>>> {
        let mut control = self.control.lock().await;
        control.check_open()?;
        *control.stages.at(place) = stage;
        let before = control.epochs.clone();
        self.republish(&mut control);
        Ok(before)
    }

    /// Requests that begin from now on get the shape `shape`.
    pub(crate) async fn set_shape(&self, shape: Shape) -> Result<()> {
        let mut control = self.control.lock().await;
        control.check_open()?;
        self.shaping.set(shape);
        self.republish(&mut control);
        Ok(())
    }

    pub(crate) fn shaping(&self) -> &Shaping {
        &self.shaping
    }

    /// Begins an epoch with what `control` says.
    fn republish(&self, control: &mut Control<G>) {
        self.close_gate();
        self.open_with(control);
    }

    /// Opens the gate, which is closed, to what `control` says. A gate that is held stays closed.
    pub(crate) fn open_with(&self, control: &mut Control<G>) {
        if control.is_held && !control.is_closed {
            return;
        }
        let stages = &control.stages;
        let behind_limit = match (stages.are_only_limits(), self.shaping.shaper()) {
            (true, None) => Way::Free,
            (true, Some(shaper)) => Way::Shaped(shaper),
            (false, shaper) => Way::Staged(stages.clone(), shaper),
        };
        let way = match stages.limit() {
            _ if control.is_closed => Way::Closed,
            Some(limit) => Way::Limited(limit.clone(), Box::new(behind_limit)),
            None => behind_limit,
        };
        self.is_limited.store(matches!(way, Way::Limited(..)), Ordering::Release);
        control.epochs.retain(|end| !end.has_come());
        control.epochs.push(self.open_gate(&control.graph, &way));
    }

    /// Checks that requests would not notice when `graph` took the place of the present one.
    pub(crate) fn check_fits(&self, graph: &G) -> Result<()> {
        let (new, old) = (graph.info(), self.info());
        let misfit = match () {
            () if new.size_bytes != old.size_bytes => {
                Some(format!("its size is {} bytes, the disk's {}", new.size_bytes, old.size_bytes))
            }
            () if new.read_only != old.read_only => Some("one of the two is read-only".to_owned()),
            () if new.request_align_bytes > old.request_align_bytes
                || new.memory_align_bytes > old.memory_align_bytes =>
            {
                Some("it wants a larger alignment".to_owned())
            }
            () => None,
        };
        match misfit {
            Some(why) => {
                Err(Error::new(ErrorKind::InvalidInput, format!("the new graph cannot take the disk's place: {why}")))
            }
            None => Ok(()),
        }
    }
}

impl<G> Control<G> {
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.is_closed { Err(closed()) } else { Ok(()) }
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Shutdown, "the disk is closed")
}

impl<G: Disk> Disk for Published<G> {
    fn info(&self) -> DiskInfo {
        DiskInfo { size_bytes: self.size_bytes(), ..self.info.clone() }
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        self.enter().await.execute(io).await
    }

    async fn extents(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        self.look(async |graph| graph.extents(extent, max_runs).await).await
    }

    /// Waits for an exchange that is under way, and the next exchange waits for this.
    async fn resize(&self, size_bytes: u64) -> Result<()> {
        let control = self.control.lock().await;
        control.check_open()?;
        control.graph.resize(size_bytes).await?;
        self.size_bytes.store(size_bytes, Ordering::Release);
        Ok(())
    }

    /// Graphs are exchanged in it, and not it itself.
    fn follows(&self, _: &[Arc<dyn Epoch>]) {}

    /// Refuses all further requests, waits for those of every epoch, then closes the graph. After an error it may be tried
    /// again.
    async fn close(&self) -> Result<()> {
        let mut control = self.control.lock().await;
        if !control.is_closed {
            control.is_closed = true;
            self.republish(&mut control);
        }
        // The last epoch is the one in which every request is refused: it goes on.
        if let Some((_refusing, older)) = control.epochs.split_last() {
            for end in older {
                end.wait().await;
            }
        }
        control.graph.close().await
    }
}
