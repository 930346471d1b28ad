//! A worker: one thread with a reactor and a single-threaded executor.
//!
//! The loop: take the messages of other threads → run the ready tasks (a bounded number) → let the reactor submit all
//! new operations in one system call, which waits only when no task is ready → wake the tasks whose operations have
//! ended. There is no timer unless a task sleeps.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use async_task::Runnable;
use io_uring::IoUring;
use spile_core::metrics::begin_turn;
use spile_core::{Error, Result};
use spile_mem::{Pool, Segment};

use crate::aio::Aio;
use crate::config::EngineKind;
use crate::epoll::Epoll;
use crate::fd::Fd;
use crate::file_pool::FilePool;
use crate::fixed::FixedBuffers;
use crate::op::{Op, Outcome, Started};
use crate::refusal;
use crate::shared::{Held, Message, WorkerLink};
use crate::spin::{Gap, Watches, Windows};
use crate::sys;
use crate::time::Timers;
use crate::uring::Uring;
use crate::wake::{Cause, Found};

/// The most tasks that are polled before the reactor gets its turn, so that busy tasks cannot hold up completions.
const BATCH: usize = 256;
/// How often the worker looks for work between two looks at the clock.
const LOOKS: usize = 8;

thread_local! {
    static WORKER: RefCell<Option<Rc<Worker>>> = const { RefCell::new(None) };
}

/// One of the two reactors.
pub(crate) enum Reactor {
    Uring(Box<Uring>),
    Epoll(Box<Epoll>),
}

impl Reactor {
    /// Starts an operation, and wakes `waker` when it has ended.
    pub(crate) fn start(&mut self, op: Op, waker: &Waker) -> Started {
        match self {
            Self::Uring(r) => r.start(op, waker),
            Self::Epoll(r) => r.start(op, waker),
        }
    }

    /// Takes the outcome of an operation that has ended.
    pub(crate) fn poll(&mut self, key: u64, waker: &Waker) -> Poll<Outcome> {
        match self {
            Self::Uring(r) => r.poll(key, waker),
            Self::Epoll(r) => r.poll(key, waker),
        }
    }

    /// Notes that nobody waits for this operation any more.
    pub(crate) fn abandon(&mut self, key: u64) {
        match self {
            Self::Uring(r) => r.abandon(key),
            Self::Epoll(r) => r.abandon(key),
        }
    }

    /// Submits operations and takes those that have ended. With `wait` it sleeps until something happens or the time is
    /// over.
    fn turn(&mut self, wait: Option<Option<Duration>>, woken: &mut Vec<Waker>) {
        match self {
            Self::Uring(r) => r.turn(wait, woken),
            Self::Epoll(r) => r.turn(wait, woken),
        }
    }

    fn forget(&mut self, id: u64, table_index: Option<u32>) {
        match self {
            Self::Uring(r) => r.forget(id, table_index),
            Self::Epoll(r) => r.forget(id),
        }
    }

    fn done(&mut self, key: u64, outcome: Outcome, woken: &mut Vec<Waker>) {
        match self {
            Self::Uring(r) => r.done(key, outcome, woken),
            Self::Epoll(r) => r.done(key, outcome, woken),
        }
    }

    /// AIO has refused a write.
    fn refused(&mut self, key: u64) {
        match self {
            Self::Uring(r) => r.refused(key),
            Self::Epoll(r) => r.refused(key),
        }
    }

    /// True when a turn would find something, without a system call.
    fn has_news(&mut self) -> bool {
        match self {
            Self::Uring(r) => r.has_news(),
            Self::Epoll(r) => r.has_news(),
        }
    }

    pub(crate) fn has_ring(&self) -> bool {
        matches!(self, Self::Uring(_))
    }

    /// Rings an eventfd that another process shares, without ever waiting for it.
    pub(crate) fn ring(&mut self, fd: &Arc<Fd>, one: &Segment) {
        match self {
            Self::Uring(r) => r.start_alone(Op::ring(fd, one)),
            Self::Epoll(_) => sys::ring_if_room(fd.raw()),
        }
    }

    /// Calls `f` with the ring and its registered buffers. Does nothing where there is no ring.
    pub(crate) fn with_fixed(&mut self, f: impl FnOnce(&IoUring, &mut FixedBuffers)) {
        if let Self::Uring(r) = self {
            r.with_fixed(f);
        }
    }

    /// What has ended since the worker's last sleep began.
    fn found(&mut self) -> &mut Found {
        match self {
            Self::Uring(r) => &mut r.found,
            Self::Epoll(r) => &mut r.found,
        }
    }

    /// True when nothing is in flight.
    fn is_idle(&self) -> bool {
        match self {
            Self::Uring(r) => r.is_idle(),
            Self::Epoll(r) => r.is_idle(),
        }
    }
}

pub(crate) struct Worker {
    pub(crate) shared: Arc<WorkerLink>,
    ready: RefCell<VecDeque<Runnable>>,
    pub(crate) timers: RefCell<Timers>,
    tasks: Cell<usize>,
    // The reactor is dropped before the pool, whose arena it may have registered.
    pub(crate) reactor: RefCell<Reactor>,
    pool: Pool,
    pub(crate) watches: RefCell<Watches>,
    windows: RefCell<Windows>,
    /// A sleep has ended by a message, which tells the cause.
    is_rung: Cell<bool>,
}

impl Worker {
    /// Makes a worker with its reactor. Has to be called on the worker's own thread.
    pub(crate) fn new(
        index: usize,
        kind: EngineKind,
        files: Arc<FilePool>,
        pool_bytes: usize,
        poll: Duration,
    ) -> Result<Self> {
        let failed = |source| Error::io("set up a worker", source);
        let pool = Pool::new(pool_bytes).map_err(failed)?;
        let (shared, reactor) = match kind {
            EngineKind::Uring | EngineKind::Auto => {
                let shared = Arc::new(WorkerLink::new(index, None).map_err(failed)?);
                let uring = Uring::new(shared.clone(), files, pool.clone())?;
                shared.has_ring();
                (shared, Reactor::Uring(Box::new(uring)))
            }
            EngineKind::Aio | EngineKind::Threads => {
                let aio = (kind == EngineKind::Aio).then(Aio::open).transpose().map_err(refusal::of_aio)?;
                let epoll = crate::sys::epoll_create().map_err(failed)?;
                let shared = Arc::new(WorkerLink::new(index, Some(epoll)).map_err(failed)?);
                let epoll = Epoll::new(shared.clone(), files, aio).map_err(failed)?;
                (shared, Reactor::Epoll(Box::new(epoll)))
            }
        };
        Ok(Self {
            shared,
            ready: RefCell::default(),
            timers: RefCell::default(),
            tasks: Cell::new(0),
            reactor: RefCell::new(reactor),
            pool,
            watches: RefCell::default(),
            windows: RefCell::new(Windows::new(poll)),
            is_rung: Cell::new(false),
        })
    }

    /// Runs until the worker is asked to stop and has no task left.
    pub(crate) fn run(self) {
        let worker = Rc::new(self);
        WORKER.with(|slot| *slot.borrow_mut() = Some(worker.clone()));
        let mut inbox = VecDeque::new();
        let mut woken = Vec::new();
        let _aborts = AbortOnPanic;
        while !worker.is_over() {
            begin_turn();
            worker.take_messages(&mut inbox, &mut woken);
            worker.run_ready();
            worker.turn(&mut woken);
        }
        // The worker is dropped here, and not when the thread's local variables are, whose order we cannot choose.
        let last = WORKER.with(|slot| slot.borrow_mut().take());
        drop(last);
    }

    fn is_over(&self) -> bool {
        self.shared.is_stopping() && self.tasks.get() == 0 && self.reactor.borrow().is_idle() && self.shared.close()
    }

    fn take_messages(&self, inbox: &mut VecDeque<Message>, woken: &mut Vec<Waker>) {
        self.shared.take(inbox);
        for message in inbox.drain(..) {
            match message {
                Message::Run(runnable) => self.ready.borrow_mut().push_back(runnable),
                Message::Call(call) => guarded(call),
                Message::Done(key, outcome) => {
                    self.reactor.borrow_mut().done(key, outcome, woken);
                }
                Message::Hold(held) => self.hold(&held),
                Message::Forget { id, table_index, kept } => {
                    self.reactor.borrow_mut().forget(id, table_index);
                    drop(kept);
                }
                Message::Refused(key) => self.reactor.borrow_mut().refused(key),
            }
        }
        if self.is_rung.take() {
            let by_helper = self.reactor.borrow_mut().found().cause(false) == Some(Cause::Completion);
            self.shared.counters.woke(if by_helper { Cause::Completion } else { Cause::Control });
        }
        wake_all(woken);
    }

    fn run_ready(&self) {
        let mut polled = 0;
        while polled < BATCH {
            let Some(runnable) = self.ready.borrow_mut().pop_front() else { break };
            polled += 1;
            guarded(|| {
                runnable.run();
            });
        }
        self.shared.counters.polled(polled as u64);
    }

    fn turn(&self, woken: &mut Vec<Waker>) {
        let may_idle = self.ready.borrow().is_empty() && !self.may_end();
        let gap = if may_idle { self.spin(woken) } else { None };
        self.watches.borrow_mut().take_ready(woken);
        let sleeps = may_idle && woken.is_empty() && self.prepare_sleep(woken);
        let wait = sleeps.then(|| {
            self.shared.counters.slept();
            self.timers.borrow().time_left()
        });
        let found = {
            let mut reactor = self.reactor.borrow_mut();
            *reactor.found() = Found::default();
            reactor.turn(wait, woken);
            *reactor.found()
        };
        self.shared.awake();
        if let Some(gap) = gap {
            self.windows.borrow_mut().learn(&gap, sleeps);
        }
        let is_due = self.timers.borrow_mut().expire(woken);
        if sleeps {
            self.note_wake(found.cause(is_due));
        }
        wake_all(woken);
    }

    /// Counts the end of a sleep, or leaves that to the worker's messages.
    fn note_wake(&self, cause: Option<Cause>) {
        match cause {
            Some(cause) => self.shared.counters.woke(cause),
            None => self.is_rung.set(true),
        }
    }

    /// Looks for work until there is some, or the window is over. Returns the gap that began when the worker ran out of work;
    /// `None` when it did not, or when nothing is watched.
    fn spin(&self, woken: &mut Vec<Waker>) -> Option<Gap> {
        if self.watches.borrow().is_empty() {
            return None;
        }
        let in_flight = self.watches.borrow().in_flight();
        let window = self.windows.borrow().length(in_flight);
        if window.is_zero() {
            return Some(Gap::begin(in_flight));
        }
        let mut reactor = self.reactor.borrow_mut();
        // Operations that were started must not wait for the end of the spin.
        reactor.turn(None, woken);
        let watches = self.watches.borrow();
        let is_over = |reactor: &mut Reactor| watches.any_ready() || reactor.has_news() || self.shared.has_messages();
        if !woken.is_empty() || is_over(&mut reactor) {
            return None;
        }
        let gap = Gap::begin(in_flight);
        let window = self.timers.borrow().time_left().map_or(window, |left| left.min(window));
        while gap.length() < window {
            for _ in 0..LOOKS {
                if is_over(&mut reactor) {
                    return Some(gap);
                }
                std::hint::spin_loop();
            }
        }
        Some(gap)
    }

    /// Asks everybody who could bring work to ring. False when there is work already.
    fn prepare_sleep(&self, woken: &mut Vec<Waker>) -> bool {
        self.watches.borrow_mut().arm(woken);
        woken.is_empty() && self.shared.prepare_sleep()
    }

    /// True when the worker may end, so that the loop has to check that and must not sleep.
    fn may_end(&self) -> bool {
        self.shared.is_stopping() && self.tasks.get() == 0 && self.reactor.borrow().is_idle()
    }

    /// Has the ring keep a file open ([`crate::shared::hold_everywhere`]).
    fn hold(&self, held: &Held) {
        if let Reactor::Uring(r) = &mut *self.reactor.borrow_mut() {
            r.hold(held);
        }
    }

    fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        self.tasks.set(self.tasks.get() + 1);
        let guard = TaskGuard;
        let counted = async move {
            let _guard = guard;
            future.await;
        };
        let shared = self.shared.clone();
        let (runnable, task) = async_task::spawn_local(counted, move |runnable| shared.schedule(runnable));
        task.detach();
        runnable.schedule();
    }
}

/// Ends the process when the loop itself panics. Otherwise its disks would hang for ever, because their worker is gone;
/// a supervisor can see the end of a process. Everything that was acknowledged has left the process by then.
pub(crate) struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Counts a task as ended when this is dropped, however the task ends.
struct TaskGuard;

impl Drop for TaskGuard {
    fn drop(&mut self) {
        try_with(|w| w.tasks.set(w.tasks.get() - 1));
    }
}

/// Calls `call`. A panic in it ends only its task; the panic hook has reported it by then.
fn guarded(call: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(call)).is_err() {
        tracing::error!("a task panicked; its worker goes on");
    }
}

/// Wakes all. To be called without any borrow, because a waker may run code of its owner.
fn wake_all(woken: &mut Vec<Waker>) {
    woken.drain(..).for_each(Waker::wake);
}

/// Calls `f` with this thread's worker; `None` when the thread is no worker.
pub(crate) fn try_with<R>(f: impl FnOnce(&Worker) -> R) -> Option<R> {
    WORKER.try_with(|slot| slot.try_borrow().ok().and_then(|w| w.as_deref().map(f))).ok().flatten()
}

/// True on a thread that is a worker.
pub(crate) fn is_here() -> bool {
    try_with(|_| ()).is_some()
}

/// Calls `f` with this thread's worker.
///
/// # Panics
/// When this thread is no worker.
pub(crate) fn with<R>(f: impl FnOnce(&Worker) -> R) -> R {
    try_with(f).expect("this belongs inside a task on a worker of the engine")
}

/// True when no other task of this worker is ready to run.
pub(crate) fn is_alone() -> bool {
    with(|w| w.ready.borrow().is_empty())
}

/// Has this thread's ring keep a file open, if `shared` belongs to this thread's worker; else gives the file back.
pub(crate) fn hold_here(shared: &Arc<WorkerLink>, held: Held) -> Option<Held> {
    let is_here = try_with(|w| Arc::ptr_eq(&w.shared, shared).then(|| w.hold(&held))).flatten();
    is_here.is_none().then_some(held)
}

/// Puts a task that was woken into its worker's own queue. Gives it back when this is another thread.
pub(crate) fn push_local(shared: &WorkerLink, runnable: Runnable) -> Result<(), Runnable> {
    let mut runnable = Some(runnable);
    try_with(|w| {
        if std::ptr::eq(Arc::as_ptr(&w.shared), shared) {
            w.ready.borrow_mut().extend(runnable.take());
        }
    });
    runnable.map_or(Ok(()), Err)
}

/// Runs a future on this worker, detached. A panic in it ends only itself.
///
/// # Panics
/// Outside a worker.
pub fn spawn(future: impl Future<Output = ()> + 'static) {
    with(|w| w.spawn(future));
}

/// The number of this worker, counted from 0.
///
/// # Panics
/// Outside a worker.
pub fn current_worker() -> usize {
    with(|w| w.shared.index)
}

/// This worker's buffer pool.
///
/// # Panics
/// Outside a worker.
pub fn pool() -> Pool {
    with(|w| w.pool.clone())
}
