//! Helper threads for what may wait: for a device, a file server, a frozen file system, a page that is written back. A worker
//! does none of that itself, because it serves disks of other stores, too.
//!
//! The reactor without io_uring gives all file operations to helpers. The reactor with io_uring gives them those that cannot be
//! done without waiting. A cached write is never tried on the worker: even with RWF_NOWAIT, pwritev2 waits as long as the file system
//! is frozen.
//!
//! The module `lanes` says which job is next, and how many threads one store may keep busy. For the threads:
//!
//! - A thread is started when there is work for it and no other thread is free. Threads that are free sleep on a condition
//!   variable, without a timer; where more than [`KEPT_IDLE`] would, they end.
//! - A worker hands over all jobs of a turn at once and calls one thread. A thread that has taken a job calls the next one if
//!   there is more work. So short jobs are done by few threads, and one that waits holds up no other.
//! - Short jobs of one file are announced together: one lock and one doorbell.
//! - When the system refuses a further thread, the job waits for one that is there: no worker does it, and it does not fail. The
//!   first thread starts with the first engine, so there is always one. The places of a store shrink to a part of the
//!   threads that could be had. The next job that finds no free thread tries to start one again.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use spile_core::{Error, Result};

use crate::aio::Batch;
use crate::fd::Fd;
use crate::lanes::{Class, LaneKey, Lanes};
use crate::op::{Kind, Op, Outcome};
use crate::shared::{Message, WorkerLink, relock};
use crate::sys;
use crate::worker::AbortOnPanic;

/// The helper threads of which the stores have their shares. Only stores that hang can keep so many. A store that has none gets one
/// more, so that no number of dead stores stops a healthy one.
pub(crate) const SHARED_THREADS: usize = 512;
/// The most threads that sleep because they have nothing to do.
const KEPT_IDLE: usize = 16;
const STACK_BYTES: usize = 512 << 10;
/// The longest that the end of a job is kept back, so that it is announced with the ends of the next ones; the job that runs
/// meanwhile comes on top.
const SHORT: Duration = Duration::from_micros(50);

/// What a helper thread is to do.
pub(crate) enum Job {
    /// A file operation; the worker that is told of its end, and the name by which that worker knows it.
    Op { op: Op, key: u64, worker: Arc<WorkerLink> },
    /// Writes of one file to be started by AIO.
    Submit(Batch),
    /// Anything else, in this lane.
    Call(Arc<Lane>, Box<dyn FnOnce() + Send>),
}

impl Job {
    fn lane(&self) -> usize {
        match self {
            Self::Op { op, .. } => lane_of(&op.fd).index,
            Self::Submit(batch) => batch.lane().index,
            Self::Call(lane, _) => lane.index,
        }
    }

    fn class(&self) -> Class {
        match self {
            Self::Op { op, .. } => match op.kind {
                Kind::Write if !op.fd.direct => Class::CachedWrite,
                Kind::Fallocate(_) => Class::Change,
                Kind::Sync => Class::Sync,
                _ => Class::Transfer,
            },
            Self::Submit(_) => Class::Transfer,
            Self::Call(..) => Class::Change,
        }
    }
}

fn lane_of(fd: &Fd) -> &Lane {
    fd.lane().expect("a helper thread works on files only")
}

/// The lane of one file. It lasts as long as this handle.
pub(crate) struct Lane {
    pool: Arc<FilePool>,
    index: usize,
    store: usize,
    key: LaneKey,
}

impl Lane {
    pub(crate) fn key(&self) -> &LaneKey {
        &self.key
    }

    /// The number of the file system or device of the file. No other has it as long as one of its lanes lasts.
    pub(crate) fn store(&self) -> usize {
        self.store
    }

    /// Has a helper thread call `call`.
    pub(crate) fn call(self: &Arc<Self>, call: impl FnOnce() + Send + 'static) {
        self.pool.push_all(&mut vec![Job::Call(self.clone(), Box::new(call))]);
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        relock(&self.pool.state).lanes.leave(self.index);
    }
}

/// All helper threads and their jobs.
pub(crate) struct FilePool {
    state: Mutex<State>,
    called: Condvar,
    /// Starts a thread. Tests let it fail.
    start: fn(Arc<FilePool>) -> io::Result<()>,
}

struct State {
    lanes: Lanes<Job>,
    threads: usize,
    /// The threads that sleep.
    idle: usize,
    /// The threads that were called, or started, and have not looked for work yet: one at most.
    coming: usize,
    /// How many threads the stores may share: as many as the system gives.
    limit: usize,
}

impl FilePool {
    /// The helper threads of this process.
    pub(crate) fn shared() -> Arc<Self> {
        static SHARED: OnceLock<Arc<FilePool>> = OnceLock::new();
        SHARED.get_or_init(|| Self::new(start_thread)).clone()
    }

    fn new(start: fn(Arc<FilePool>) -> io::Result<()>) -> Arc<Self> {
        let state = State { lanes: Lanes::default(), threads: 0, idle: 0, coming: 0, limit: SHARED_THREADS };
        Arc::new(Self { state: Mutex::new(state), called: Condvar::new(), start })
    }

    /// Sees to it that there is one thread at least, so that every job is done at some time.
    ///
    /// # Errors
    /// The system's, when there can be none.
    pub(crate) fn ensure_thread(self: &Arc<Self>) -> Result<()> {
        let mut state = relock(&self.state);
        if state.threads > 0 {
            return Ok(());
        }
        (state.threads, state.coming) = (1, 1);
        drop(state);
        (self.start)(self.clone()).map_err(|source| {
            self.note_refusal();
            Error::io("start a helper thread", source)
                .hint("raise the limit on threads (ulimit -u, or TasksMax of the service)")
        })
    }

    /// The lane of the file `key`.
    pub(crate) fn lane(self: &Arc<Self>, key: &LaneKey) -> Arc<Lane> {
        let lanes = &mut relock(&self.state).lanes;
        let index = lanes.enter(key);
        Arc::new(Lane { pool: self.clone(), index, store: lanes.group_of(index), key: key.clone() })
    }

    /// Queues the jobs.
    pub(crate) fn push_all(self: &Arc<Self>, jobs: &mut Vec<Job>) {
        if jobs.is_empty() {
            return;
        }
        let mut state = relock(&self.state);
        for job in jobs.drain(..) {
            state.lanes.push(job.lane(), job.class(), job);
        }
        self.call_thread(state);
    }

    /// Calls one more thread if there is work for it, unless one is on its way.
    fn call_thread(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let limit = state.limit;
        if state.coming > 0 || !state.lanes.has_work(limit) {
            return;
        }
        if state.idle > 0 {
            state.coming = 1;
            drop(state);
            return self.called.notify_one();
        }
        state.coming = 1;
        state.threads += 1;
        drop(state);
        if let Err(error) = (self.start)(self.clone()) {
            self.note_refusal();
            warn_once(&error);
        }
    }

    /// The system has refused a thread.
    fn note_refusal(&self) {
        let mut state = relock(&self.state);
        state.coming = 0;
        state.threads -= 1;
        state.limit = state.threads.max(1);
    }

    /// The life of a helper thread.
    fn run(self: Arc<Self>) {
        let _aborts = AbortOnPanic;
        let (mut jobs, mut ended) = (VecDeque::new(), Vec::new());
        let mut state = relock(&self.state);
        (state.coming, state.limit) = (0, SHARED_THREADS);
        loop {
            let limit = state.limit;
            if let Some(place) = state.lanes.take(limit, &mut jobs) {
                self.call_thread(state);
                do_jobs(&mut jobs, &mut ended);
                state = relock(&self.state);
                state.lanes.give_back(place);
            } else if state.idle >= KEPT_IDLE {
                state.threads -= 1;
                return;
            } else {
                state = self.sleep(state);
            }
        }
    }

    /// Waits until the thread is called.
    fn sleep<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.idle += 1;
        while state.coming == 0 {
            state = self.called.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        state.coming = 0;
        state.idle -= 1;
        state
    }
}

fn start_thread(pool: Arc<FilePool>) -> io::Result<()> {
    let builder = std::thread::Builder::new().name("spile-file".into()).stack_size(STACK_BYTES);
    builder.spawn(move || pool.run()).map(drop)
}

/// Tells once in the life of the process that a thread was refused.
fn warn_once(error: &io::Error) {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        tracing::warn!(
            "the system refuses a further helper thread ({error}): operations on files wait for those that there are \
             (raise the limit on threads: ulimit -u, or TasksMax of the service)"
        );
    });
}

/// The end of an operation that its worker has not been told of.
type Ended = (Arc<WorkerLink>, u64, Outcome);

/// Does the jobs one after the other. The ends of short ones are announced together.
fn do_jobs(jobs: &mut VecDeque<Job>, ended: &mut Vec<Ended>) {
    let mut since = (jobs.len() > 1).then(Instant::now);
    while let Some(job) = jobs.pop_front() {
        match job {
            Job::Op { op, key, worker } => ended.push((worker, key, do_op(op))),
            Job::Submit(batch) => batch.submit(),
            Job::Call(lane, call) => {
                call();
                drop(lane);
            }
        }
        if jobs.is_empty() || since.is_some_and(|since| since.elapsed() > SHORT) {
            announce(ended);
            since = since.map(|_| Instant::now());
        }
    }
}

/// Tells the workers, each once if the operations of one come together.
fn announce(ended: &mut Vec<Ended>) {
    for group in ended.chunk_by(|(a, ..), (b, ..)| Arc::ptr_eq(a, b)) {
        group[0].0.push_all(group.iter().map(|(_, key, outcome)| Message::Done(*key, *outcome)));
    }
    ended.clear();
}

/// Does an operation. Its buffers and its file are dropped before its worker learns of its end: whoever waits for that may
/// rely on it.
fn do_op(mut op: Op) -> Outcome {
    let outcome = sys::run_file_op(&mut op);
    if let (Kind::Sync, Err(errno)) = (op.kind, outcome) {
        op.fd.note_sync(errno);
    }
    outcome
}

/// The jobs that a worker hands over at the end of its turn.
pub(crate) struct Outbox {
    pool: Arc<FilePool>,
    jobs: Vec<Job>,
}

impl Outbox {
    pub(crate) fn new(pool: Arc<FilePool>) -> Self {
        Self { pool, jobs: Vec::new() }
    }

    pub(crate) fn push(&mut self, job: Job) {
        self.jobs.push(job);
    }

    pub(crate) fn flush(&mut self) {
        self.pool.push_all(&mut self.jobs);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;
    use crate::lanes::Owner;

    /// Long enough for every thread to have run, if it was going to.
    const SETTLE: Duration = Duration::from_millis(50);
    /// A bound on what must not last for ever.
    const HANG: Duration = Duration::from_secs(60);

    fn lane(pool: &Arc<FilePool>, device: u64, inode: u64) -> Arc<Lane> {
        pool.lane(&LaneKey { owner: Owner::Device(device), inode })
    }

    /// Has a thread wait until the sender is dropped.
    fn hang(lane: &Arc<Lane>, until: Receiver<()>) {
        lane.call(move || {
            let _ = until.recv();
        });
    }

    /// A call that has to be done, and what tells of its end.
    fn wanted(lane: &Arc<Lane>) -> Receiver<()> {
        let (sender, receiver) = channel();
        lane.call(move || sender.send(()).unwrap());
        receiver
    }

    #[test]
    fn stores_that_hang_leave_threads_for_a_healthy_one() {
        let pool = FilePool::new(start_thread);
        pool.ensure_thread().unwrap();
        let mut kept: Vec<(Arc<Lane>, Sender<()>)> = Vec::new();
        for device in 0..100 {
            for inode in 0..10 {
                let (sender, until) = channel();
                let lane = lane(&pool, device, inode);
                hang(&lane, until);
                kept.push((lane, sender));
            }
        }
        std::thread::sleep(SETTLE);
        let healthy = lane(&pool, 1000, 1);
        (0..100).for_each(|_| wanted(&healthy).recv_timeout(HANG).unwrap());
    }

    #[test]
    fn each_store_gets_a_thread_however_many_are_dead() {
        let pool = FilePool::new(start_thread);
        pool.ensure_thread().unwrap();
        let (release, until) = channel::<()>();
        let until = Arc::new(Mutex::new(until));
        let (sender, works) = channel();
        let stores = SHARED_THREADS + 100;
        let lanes: Vec<_> = (0..stores as u64).map(|device| lane(&pool, device, 1)).collect();
        for lane in &lanes {
            let (until, sender) = (until.clone(), sender.clone());
            lane.call(move || {
                sender.send(()).unwrap();
                let _ = relock(&until).recv();
            });
        }
        (0..stores)
            .for_each(|number| works.recv_timeout(HANG).unwrap_or_else(|_| panic!("only {number} threads work")));
        drop(release);
    }

    #[test]
    fn without_a_further_thread_a_job_waits_and_is_done() {
        static ALLOWED: AtomicUsize = AtomicUsize::new(1);
        static CALLER: Mutex<Option<std::thread::ThreadId>> = Mutex::new(None);
        let pool = FilePool::new(|pool| {
            let take = |allowed: usize| allowed.checked_sub(1);
            match ALLOWED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
                Ok(_) => start_thread(pool),
                Err(_) => Err(io::Error::from_raw_os_error(libc::EAGAIN)),
            }
        });
        pool.ensure_thread().unwrap();
        let (release, until) = channel();
        let [dead, healthy, third] = [1, 2, 3].map(|device| lane(&pool, device, 1));
        hang(&dead, until);
        std::thread::sleep(SETTLE);
        let (sender, done) = channel();
        healthy.call(move || {
            *relock(&CALLER) = Some(std::thread::current().id());
            sender.send(()).unwrap();
        });
        std::thread::sleep(SETTLE);
        assert!(done.try_recv().is_err() && relock(&CALLER).is_none(), "the only thread is with the dead store");
        // The next job gets a thread again, and that one does both.
        ALLOWED.store(1, Ordering::Relaxed);
        wanted(&third).recv_timeout(HANG).unwrap();
        done.recv_timeout(HANG).unwrap();
        assert_ne!(*relock(&CALLER), Some(std::thread::current().id()), "the caller must not do it");
        drop(release);
        (0..10).for_each(|_| wanted(&dead).recv_timeout(HANG).unwrap());
    }

    #[test]
    fn no_helper_at_all_is_an_error_at_the_start() {
        let pool = FilePool::new(|_| Err(io::Error::from_raw_os_error(libc::EAGAIN)));
        let error = pool.ensure_thread().unwrap_err();
        assert_eq!(error.os_errno(), Some(libc::EAGAIN));
        assert!(error.hint_text().is_some());
    }

    #[test]
    fn threads_that_are_not_needed_end() {
        let pool = FilePool::new(start_thread);
        let mut kept = Vec::new();
        for device in 0..3 * KEPT_IDLE as u64 {
            let (sender, until) = channel();
            hang(&lane(&pool, device, 1), until);
            kept.push(sender);
        }
        let threads = || relock(&pool.state).threads;
        let until = |wanted: fn(usize) -> bool| {
            let began = Instant::now();
            while !wanted(threads()) {
                assert!(began.elapsed() < HANG, "{} threads", threads());
                std::thread::yield_now();
            }
        };
        until(|threads| threads == 3 * KEPT_IDLE);
        kept.clear();
        until(|threads| threads == KEPT_IDLE);
    }

    #[test]
    fn short_jobs_are_announced_together() {
        let worker = Arc::new(WorkerLink::new(0, None).unwrap());
        let file = Fd::file(tempfile::tempfile().unwrap().into());
        let job = |key| Job::Op { op: Op::sync(&file), key, worker: worker.clone() };
        let mut ended = Vec::new();
        assert!(worker.prepare_sleep());
        // Ends that were kept back, and one job more.
        ended.extend((0..3).map(|key| (worker.clone(), key, Ok(0))));
        do_jobs(&mut [job(3)].into(), &mut ended);
        let mut messages = VecDeque::new();
        worker.take(&mut messages);
        let keys = messages.iter().map(|message| match message {
            Message::Done(key, Ok(0)) => *key,
            _ => panic!("nobody else sends anything"),
        });
        assert!(keys.eq(0..4) && ended.is_empty());
        assert_eq!(worker.stats().wakes, 1);
    }
}
