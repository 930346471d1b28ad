//! [`WorkerLink`]: the part of a worker that other threads use, which is its queue of messages, its doorbell and its
//! counters.
//!
//! A message from another thread goes into a locked queue. The eventfd is written only when the worker sleeps or is
//! about to sleep. No wake-up is lost: the worker sets `asleep` and then looks into the queue once more, under its
//! lock. A sender puts its message into the queue under that lock and then reads `asleep`. Whichever of the two comes
//! second sees what the other has done.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use async_task::Runnable;
use spile_core::metrics::add;

use crate::closing::FileFd;
use crate::fd::Fd;
use crate::op::Outcome;
use crate::wake::Cause;
use crate::{sys, worker};

/// A message from another thread to a worker.
pub(crate) enum Message {
    /// A task of this worker was woken.
    Run(Runnable),
    /// Something to call on the worker, which may spawn.
    Call(Box<dyn FnOnce() + Send>),
    /// A helper thread has done the file operation of this key.
    Done(u64, Outcome),
    /// A file is locked: the reactor has to keep it open.
    Hold(Held),
    /// A file was dropped: the reactor must not keep it open any more. `kept` is the descriptor of a file, which has to stay open
    /// until then, so that the reactor is not the one that closes it.
    Forget { id: u64, table_index: Option<u32>, kept: Option<Arc<FileFd>> },
    /// AIO has refused the write of this key.
    Refused(u64),
}

/// Counts of what one worker has done so far. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerStats {
    /// System calls that submitted, waited or asked for completions: io_uring_enter, io_submit, io_getevents, epoll_wait.
    pub enters: u64,
    /// Entries submitted to the ring or to AIO; file operations handed to helper threads.
    pub sqes: u64,
    /// Of these, the transfers that went to AIO.
    pub aio_transfers: u64,
    /// Of these, the writes that helper threads give to AIO, because they may have to wait for the file system.
    pub aio_writes: u64,
    /// Completions reaped.
    pub cqes: u64,
    /// Times another thread had to ring the eventfd.
    pub wakes: u64,
    /// Times a task was polled.
    pub polls: u64,
    /// Times the worker went to sleep with nothing to do.
    pub sleeps: u64,
    /// Sleeps that a guest or a client ended: it kicked, sent something or made room for answers.
    pub wakeups_kick: u64,
    /// Sleeps that a store ended: an operation was done.
    pub wakeups_completion: u64,
    /// Sleeps that another thread of the process ended, such as the one that obeys the control socket; also those that a signal
    /// ended.
    pub wakeups_control: u64,
    /// Sleeps that ended because a time was over.
    pub wakeups_timer: u64,
}

/// Counters with one writer, the worker: plain loads and stores, no locked instruction.
#[derive(Default)]
pub(crate) struct Counters {
    enters: AtomicU64,
    sqes: AtomicU64,
    aio_transfers: AtomicU64,
    aio_writes: AtomicU64,
    cqes: AtomicU64,
    polls: AtomicU64,
    sleeps: AtomicU64,
    wakeups: [AtomicU64; 4],
    /// From here on, other threads write, too.
    wakes: AtomicU64,
    aio_enters: AtomicU64,
}

impl Counters {
    pub(crate) fn enter(&self) {
        add(&self.enters, 1);
    }

    pub(crate) fn submitted(&self, count: u64) {
        add(&self.sqes, count);
    }

    pub(crate) fn submitted_to_aio(&self, count: u64) {
        add(&self.sqes, count);
        add(&self.aio_transfers, count);
    }

    /// A write that may have to wait was queued for AIO.
    pub(crate) fn writes_by_aio(&self) {
        add(&self.aio_writes, 1);
    }

    /// A helper thread calls io_submit.
    pub(crate) fn enters_aio(&self) {
        self.aio_enters.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn completed(&self, count: u64) {
        add(&self.cqes, count);
    }

    pub(crate) fn polled(&self, count: u64) {
        add(&self.polls, count);
    }

    pub(crate) fn slept(&self) {
        add(&self.sleeps, 1);
    }

    /// A sleep has ended.
    pub(crate) fn woke(&self, cause: Cause) {
        add(&self.wakeups[cause as usize], 1);
    }

    pub(crate) fn read(&self) -> WorkerStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        WorkerStats {
            enters: get(&self.enters) + get(&self.aio_enters),
            sqes: get(&self.sqes),
            aio_transfers: get(&self.aio_transfers),
            aio_writes: get(&self.aio_writes),
            cqes: get(&self.cqes),
            wakes: get(&self.wakes),
            polls: get(&self.polls),
            sleeps: get(&self.sleeps),
            wakeups_kick: get(&self.wakeups[Cause::Kick as usize]),
            wakeups_completion: get(&self.wakeups[Cause::Completion as usize]),
            wakeups_control: get(&self.wakeups[Cause::Control as usize]),
            wakeups_timer: get(&self.wakeups[Cause::Timer as usize]),
        }
    }
}

/// A file that the rings are to keep open. It has a share of the descriptor, because the file itself may be dropped before all
/// workers have got the message.
pub(crate) struct Held {
    pub(crate) fd: Arc<FileFd>,
    pub(crate) id: u64,
    pub(crate) table_index: u32,
}

/// All workers of the process that have a ring.
static WITH_RING: Mutex<Vec<Weak<WorkerLink>>> = Mutex::new(Vec::new());

/// Has the ring of every worker keep a locked file open; this worker's ring does so at once.
///
/// When a process is killed, its descriptors are closed at once, but requests that its rings have in flight go on. They
/// go on writing to the file, where the next process may have written by then, and to guests' memory. A ring closes the
/// files that are registered with it only when the last of its requests has ended. So the lock of an image is held
/// until then, for whichever file the request is.
pub(crate) fn hold_everywhere(fd: &Arc<Fd>) {
    let mut workers = relock(&WITH_RING);
    workers.retain(|shared| shared.strong_count() > 0);
    for shared in workers.iter().filter_map(Weak::upgrade) {
        let Some(table_index) = fd.table_index else {
            tracing::error!("{NOT_HELD}");
            return;
        };
        // First, so that the message about the file's end comes after this one.
        fd.known_to(&shared);
        let held = Held { fd: fd.share().clone(), id: fd.id, table_index };
        // At once on this worker: what this task does next has to find the file kept open.
        if let Some(held) = worker::hold_here(&shared, held) {
            shared.push(Message::Hold(held));
        }
    }
}

/// The message when there are too few places in a ring's table.
pub(crate) const NOT_HELD: &str = "the lock of an image ends with this process, and not with the last of its requests: if it \
     is killed, wait until the storage is quiet before the image is used again (raise ulimit -n, or serve fewer files)";

pub(crate) struct WorkerLink {
    pub(crate) index: usize,
    queue: Mutex<Queue>,
    /// True when the queue may have a message. It saves the worker the lock when it has none.
    pending: AtomicBool,
    asleep: AtomicBool,
    stopping: AtomicBool,
    pub(crate) event: OwnedFd,
    /// The epoll instance of a worker without a ring.
    epoll: Option<OwnedFd>,
    cpu_clock: libc::clockid_t,
    pub(crate) counters: Counters,
}

#[derive(Default)]
struct Queue {
    messages: VecDeque<Message>,
    closed: bool,
}

impl WorkerLink {
    /// To be called on the worker's own thread.
    pub(crate) fn new(index: usize, epoll: Option<OwnedFd>) -> std::io::Result<Self> {
        Ok(Self {
            index,
            queue: Mutex::default(),
            pending: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            event: sys::eventfd()?,
            epoll,
            cpu_clock: sys::own_cpu_clock()?,
            counters: Counters::default(),
        })
    }

    /// Makes the worker known as one with a ring.
    pub(crate) fn has_ring(self: &Arc<Self>) {
        relock(&WITH_RING).push(Arc::downgrade(self));
    }

    pub(crate) fn epoll(&self) -> Option<&OwnedFd> {
        self.epoll.as_ref()
    }

    /// Queues a message and wakes the worker if it sleeps. False when the worker has ended.
    pub(crate) fn push(&self, message: Message) -> bool {
        let mut queue = relock(&self.queue);
        if queue.closed {
            drop(queue);
            discard(message);
            return false;
        }
        queue.messages.push_back(message);
        self.pending.store(true, Ordering::Release);
        drop(queue);
        self.ring_if_asleep();
        true
    }

    /// As [`WorkerLink::push`], for several messages, with one lock and one wake-up.
    pub(crate) fn push_all(&self, messages: impl Iterator<Item = Message>) {
        let mut queue = relock(&self.queue);
        if queue.closed {
            drop(queue);
            return messages.for_each(discard);
        }
        queue.messages.extend(messages);
        self.pending.store(true, Ordering::Release);
        drop(queue);
        self.ring_if_asleep();
    }

    fn ring_if_asleep(&self) {
        if self.asleep.swap(false, Ordering::AcqRel) {
            self.counters.wakes.fetch_add(1, Ordering::Relaxed);
            sys::eventfd_write(self.event.as_raw_fd());
        }
    }

    /// Schedules a task that was woken: in the worker's own queue when called on its thread, else by a message.
    pub(crate) fn schedule(&self, runnable: Runnable) {
        if let Err(runnable) = worker::push_local(self, runnable) {
            self.push(Message::Run(runnable));
        }
    }

    /// Moves all messages to `into`; for the worker only.
    pub(crate) fn take(&self, into: &mut VecDeque<Message>) {
        if self.pending.load(Ordering::Acquire) {
            let mut queue = relock(&self.queue);
            self.pending.store(false, Ordering::Relaxed);
            into.append(&mut queue.messages);
        }
    }

    /// True when a message may be waiting.
    pub(crate) fn has_messages(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Announces sleep; false when there is a message after all.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.asleep.store(true, Ordering::Release);
        let empty = relock(&self.queue).messages.is_empty();
        if !empty {
            self.asleep.store(false, Ordering::Relaxed);
        }
        empty
    }

    pub(crate) fn awake(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }

    /// Asks the worker to end once it has no task left.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.push(Message::Call(Box::new(|| ())));
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Refuses all further messages; false when there is one now.
    pub(crate) fn close(&self) -> bool {
        let mut queue = relock(&self.queue);
        queue.closed = queue.messages.is_empty();
        queue.closed
    }

    /// Takes a file that is about to be closed out of the epoll set, where it would stay if it was duplicated.
    pub(crate) fn unwatch(&self, fd: BorrowedFd<'_>) {
        if let Some(epoll) = &self.epoll {
            sys::epoll_delete(epoll.as_raw_fd(), fd.as_raw_fd());
        }
    }

    /// The processor time that the worker's thread has used, in nanoseconds; `None` once it has ended.
    pub(crate) fn cpu_ns(&self) -> Option<u64> {
        sys::clock_ns(self.cpu_clock)
    }

    pub(crate) fn stats(&self) -> WorkerStats {
        self.counters.read()
    }
}

fn discard(message: Message) {
    if let Message::Run(runnable) = message {
        // Dropping a task on another thread would panic, so it is forgotten. No task is left when a worker ends, so
        // that loses nothing.
        std::mem::forget(runnable);
    }
}

/// Locks a mutex, also after a panic of another holder: what these mutexes guard stays consistent then.
pub(crate) fn relock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
