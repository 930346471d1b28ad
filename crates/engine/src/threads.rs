//! The reactor without io_uring. Operations on sockets are tried at once, and wait by epoll if they must. File
//! operations go to helper threads. The nearest deadline of a sleeping task is the time-out of epoll_wait.
//!
//! A socket is added to the epoll set when it first has to wait, once and edge-triggered for both directions: no
//! system call re-arms it. An operation is therefore always tried before it waits.

use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use slab::Slab;
use smallvec::SmallVec;

use crate::file_pool::{FilePool, Job};
use crate::op::{Kind, Op, Outcome, Started};
use crate::shared::WorkerLink;
use crate::sys;

/// The eventfd's tag in the epoll set; the sockets' are their ids, which start at 1.
const DOORBELL: u64 = 0;
const EVENTS: usize = 256;

pub(crate) struct Threads {
    shared: Arc<WorkerLink>,
    files: Arc<FilePool>,
    slots: Slab<Slot>,
    /// The operations that wait, by socket.
    sockets: HashMap<u64, Waiting>,
    events: Vec<libc::epoll_event>,
    /// File operations at the helper threads.
    at_files: usize,
}

struct Slot {
    state: State,
    kind: Kind,
    /// A socket operation that waits; a file operation is with its helper thread.
    op: Option<Op>,
}

enum State {
    Waits(Waker),
    Ended(Outcome),
    Abandoned,
}

#[derive(Default)]
struct Waiting {
    readers: SmallVec<[usize; 1]>,
    writers: SmallVec<[usize; 1]>,
}

impl Waiting {
    fn side(&mut self, kind: Kind) -> &mut SmallVec<[usize; 1]> {
        if kind == Kind::Send { &mut self.writers } else { &mut self.readers }
    }
}

impl Threads {
    pub(crate) fn new(shared: Arc<WorkerLink>, files: Arc<FilePool>) -> std::io::Result<Self> {
        let this = Self {
            shared,
            files,
            slots: Slab::new(),
            sockets: HashMap::new(),
            events: vec![libc::epoll_event { events: 0, u64: 0 }; EVENTS],
            at_files: 0,
        };
        sys::epoll_add(this.epoll(), this.shared.event.as_raw_fd(), libc::EPOLLIN, DOORBELL)?;
        Ok(this)
    }

    fn epoll(&self) -> i32 {
        self.shared.epoll().expect("a threads worker has an epoll set").as_raw_fd()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.at_files == 0
    }

    pub(crate) fn start(&mut self, op: Op, waker: &Waker) -> Started {
        if op.kind.is_file() { self.start_file(op, waker) } else { self.start_socket(op, waker) }
    }

    fn start_file(&mut self, op: Op, waker: &Waker) -> Started {
        let key = self.insert(waker, op.kind, None) as u64;
        self.at_files += 1;
        self.shared.counters.submitted(1);
        self.files.push(Job { op, key, worker: self.shared.clone() });
        Started::Waits(key)
    }

    fn start_socket(&mut self, mut op: Op, waker: &Waker) -> Started {
        if let Some(outcome) = try_socket(&mut op) {
            return Started::Ended(outcome);
        }
        if let Err(errno) = self.watch(&op) {
            return Started::Ended(Err(errno));
        }
        let (kind, id) = (op.kind, op.fd.id);
        let key = self.insert(waker, kind, Some(op));
        self.sockets.entry(id).or_default().side(kind).push(key);
        Started::Waits(key as u64)
    }

    fn insert(&mut self, waker: &Waker, kind: Kind, op: Option<Op>) -> usize {
        self.slots.insert(Slot { state: State::Waits(waker.clone()), kind, op })
    }

    /// Adds the socket to the epoll set when it is not in there. What became ready before that is reported then.
    fn watch(&mut self, op: &Op) -> Result<(), i32> {
        if self.sockets.contains_key(&op.fd.id) {
            return Ok(());
        }
        let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
        sys::epoll_add(self.epoll(), op.fd.raw(), events, op.fd.id)
            .map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        op.fd.known_to(&self.shared);
        self.sockets.insert(op.fd.id, Waiting::default());
        Ok(())
    }

    pub(crate) fn poll(&mut self, key: u64, waker: &Waker) -> Poll<Outcome> {
        let slot = &mut self.slots[key as usize];
        match &mut slot.state {
            State::Waits(old) => {
                old.clone_from(waker);
                Poll::Pending
            }
            State::Ended(outcome) => {
                let outcome = *outcome;
                self.slots.remove(key as usize);
                Poll::Ready(outcome)
            }
            State::Abandoned => unreachable!("an abandoned operation has no future"),
        }
    }

    pub(crate) fn abandon(&mut self, key: u64) {
        let key = key as usize;
        let slot = &mut self.slots[key];
        match (&slot.state, &slot.op) {
            // Its helper thread still works on it.
            (State::Waits(_), None) => slot.state = State::Abandoned,
            (State::Waits(_), Some(op)) => {
                let (kind, id) = (op.kind, op.fd.id);
                if let Some(waiting) = self.sockets.get_mut(&id) {
                    waiting.side(kind).retain(|k| *k != key);
                }
                self.slots.remove(key);
            }
            _ => {
                let slot = self.slots.remove(key);
                if let (Kind::Accept, State::Ended(Ok(fd))) = (slot.kind, slot.state) {
                    sys::close_unclaimed(fd);
                }
            }
        }
    }

    /// A helper thread is done.
    pub(crate) fn done(&mut self, key: u64, outcome: Outcome, woken: &mut Vec<Waker>) {
        self.at_files -= 1;
        self.shared.counters.completed(1);
        self.finish(key as usize, outcome, woken);
    }

    fn finish(&mut self, key: usize, outcome: Outcome, woken: &mut Vec<Waker>) {
        let slot = &mut self.slots[key];
        slot.op = None;
        match std::mem::replace(&mut slot.state, State::Ended(outcome)) {
            State::Waits(waker) => woken.push(waker),
            State::Abandoned => drop(self.slots.remove(key)),
            State::Ended(_) => unreachable!("an operation ends once"),
        }
    }

    pub(crate) fn forget(&mut self, id: u64) {
        self.sockets.remove(&id);
    }

    pub(crate) fn turn(&mut self, wait: Option<Option<Duration>>, woken: &mut Vec<Waker>) {
        let timeout_ms = match wait {
            // Nothing can have happened: no system call.
            None if self.sockets.is_empty() => return,
            None => 0,
            Some(None) => -1,
            Some(Some(left)) => round_up_ms(left),
        };
        self.shared.counters.enter();
        let epoll = self.epoll();
        let count = sys::epoll_wait(epoll, &mut self.events, timeout_ms);
        for at in 0..count {
            let event = self.events[at];
            self.on_event(event.u64, event.events as i32, woken);
        }
    }

    fn on_event(&mut self, id: u64, events: i32, woken: &mut Vec<Waker>) {
        if id == DOORBELL {
            return sys::eventfd_read(self.shared.event.as_raw_fd());
        }
        let broken = libc::EPOLLHUP | libc::EPOLLERR;
        if events & (libc::EPOLLIN | libc::EPOLLRDHUP | broken) != 0 {
            self.retry(id, Kind::Recv, woken);
        }
        if events & (libc::EPOLLOUT | broken) != 0 {
            self.retry(id, Kind::Send, woken);
        }
    }

    /// Tries the operation again that waits on this side of the socket.
    fn retry(&mut self, id: u64, side: Kind, woken: &mut Vec<Waker>) {
        let Some(waiting) = self.sockets.get_mut(&id) else { return };
        for key in std::mem::take(waiting.side(side)) {
            let op = self.slots[key].op.as_mut().expect("what waits on a socket is here");
            match try_socket(op) {
                Some(outcome) => self.finish(key, outcome, woken),
                None => self.sockets.entry(id).or_default().side(side).push(key),
            }
        }
    }
}

/// The time-out for epoll, in milliseconds. It is rounded up: rounded down, the worker would wake too early, again and
/// again.
fn round_up_ms(left: Duration) -> i32 {
    i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
}

/// Goes on with a socket operation as far as possible without waiting. `None` when it has to wait.
fn try_socket(op: &mut Op) -> Option<Outcome> {
    loop {
        let fd = op.fd.raw();
        let result = match op.kind {
            Kind::Recv | Kind::RecvExact => sys::try_recv(fd, &op.segments.as_slice()[0], op.done),
            Kind::Accept => sys::try_accept(fd),
            Kind::Event => sys::is_rung(fd),
            _ => sys::try_send(fd, op.segments.as_slice(), op.done),
        };
        match result {
            Ok(count) => {
                if let Some(outcome) = op.advance(count) {
                    return Some(outcome);
                }
            }
            Err(libc::EAGAIN) => return None,
            Err(errno) => return Some(Err(errno)),
        }
    }
}
