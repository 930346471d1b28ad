//! The reactor without io_uring. Operations on sockets are tried at once, and wait by epoll if they must. The nearest
//! deadline of a sleeping task is the time-out of epoll_wait.
//!
//! File operations go to helper threads. The engine `aio` does direct transfers by Linux AIO instead (module `aio`), all of
//! a turn together; only those that would have to wait go to helper threads.
//!
//! A socket is added to the epoll set when it first has to wait, once and edge-triggered for both directions: no
//! system call re-arms it. An operation is therefore always tried before it waits. The eventfd of AIO is edge-triggered
//! too, so nobody has to read it. Neither is an eventfd of another process read where that could wait (before Linux 5.8): each ring is
//! an edge, and one that finds nobody waiting is kept for the next wait.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use slab::Slab;
use smallvec::SmallVec;

use crate::aio::{Aio, SUBMIT_TRANSFERS};
use crate::file_pool::{FilePool, Job, Outbox};
use crate::op::{self, Kind, Op, Outcome, Started};
use crate::shared::WorkerLink;
use crate::sys;
use crate::wake::Found;

/// The eventfd's tag in the epoll set; the sockets' are their ids, which start at 1.
const DOORBELL: u64 = 0;
/// The tag of the eventfd of AIO.
const AIO_BELL: u64 = u64::MAX;
const EVENTS: usize = 256;
/// The most turns in a row that do not look at the sockets because transfers have ended.
const MAX_BLIND_TURNS: u32 = 8;

pub(crate) struct Epoll {
    /// Linux AIO; the engine `threads` has none.
    aio: Option<Aio>,
    shared: Arc<WorkerLink>,
    files: Outbox,
    slots: Slab<Slot>,
    /// The operations that wait, by socket.
    sockets: HashMap<u64, Waiting, BuildHasherDefault<IdHasher>>,
    events: Vec<libc::epoll_event>,
    /// File operations that have not ended.
    file_ops: usize,
    ended_by_aio: Vec<(u64, i32)>,
    /// How many turns in a row have not looked at the sockets.
    blind_turns: u32,
    /// What has ended since the worker's last sleep began.
    pub(crate) found: Found,
}

struct Slot {
    state: State,
    kind: Kind,
    /// The operation; `None` while a helper thread has it.
    op: Option<Op>,
}

enum State {
    Waits(Waker),
    Ended(Outcome),
    Abandoned,
}

/// A cheap hash of socket ids. This process counts them up, so nobody can choose ids whose hashes meet.
#[derive(Default)]
struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write_u64(&mut self, id: u64) {
        // The low bits of the product choose the place, and its high bits tell apart what lies there.
        self.0 = id.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(self.0 ^ u64::from(*byte)));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[derive(Default)]
struct Waiting {
    readers: SmallVec<[usize; 1]>,
    writers: SmallVec<[usize; 1]>,
    /// It became readable while nobody waited for that.
    was_readable: bool,
}

impl Waiting {
    fn side(&mut self, kind: Kind) -> &mut SmallVec<[usize; 1]> {
        if kind == Kind::Send { &mut self.writers } else { &mut self.readers }
    }
}

impl Epoll {
    pub(crate) fn new(shared: Arc<WorkerLink>, files: Arc<FilePool>, aio: Option<Aio>) -> std::io::Result<Self> {
        let this = Self {
            aio,
            shared,
            files: Outbox::new(files),
            slots: Slab::new(),
            sockets: HashMap::default(),
            events: vec![libc::epoll_event { events: 0, u64: 0 }; EVENTS],
            file_ops: 0,
            ended_by_aio: Vec::new(),
            blind_turns: 0,
            found: Found::default(),
        };
        sys::epoll_add(this.epoll(), this.shared.event.as_raw_fd(), libc::EPOLLIN, DOORBELL)?;
        if let Some(aio) = &this.aio {
            sys::epoll_add(this.epoll(), aio.bell(), libc::EPOLLIN | libc::EPOLLET, AIO_BELL)?;
        }
        Ok(this)
    }

    fn epoll(&self) -> i32 {
        self.shared.epoll().expect("a worker without a ring has an epoll set").as_raw_fd()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.file_ops == 0
    }

    /// True when the end of a transfer by AIO is noted. Only a system call could tell what has become of sockets.
    pub(crate) fn has_news(&self) -> bool {
        self.aio.as_ref().is_some_and(Aio::has_ended)
    }

    pub(crate) fn start(&mut self, op: Op, waker: &Waker) -> Started {
        if op.kind.is_file() { self.start_file(op, waker) } else { self.start_socket(op, waker) }
    }

    /// A direct write to a file may wait in io_submit, even with RWF_NOWAIT: a frozen file system makes every writer wait. So a
    /// helper thread calls that.
    fn start_file(&mut self, mut op: Op, waker: &Waker) -> Started {
        if self.aio.is_some() && !op.fd.always_waits() && op.choose_aio(libc::EAGAIN) {
            self.shared.counters.writes_by_aio();
        }
        let key = self.insert(waker, op);
        self.file_ops += 1;
        let op = self.slots[key].op.as_mut().expect("it was put there");
        let is_direct = matches!(op.kind, Kind::Read | Kind::Write) && op.fd.direct;
        match &mut self.aio {
            Some(aio) if is_direct && (!op.fd.always_waits() || op.choose_aio(libc::EOPNOTSUPP)) => {
                aio.queue(key as u64, op);
                if aio.queued() >= SUBMIT_TRANSFERS {
                    self.submit_aio();
                }
            }
            _ => self.hand_over(key),
        }
        Started::Waits(key as u64)
    }

    /// Gives an operation that must wait to a helper thread.
    fn hand_over(&mut self, key: usize) {
        let op = self.slots[key].op.take().expect("an operation in flight is in its slot");
        self.shared.counters.submitted(1);
        self.files.push(Job::Op { op, key: key as u64, worker: self.shared.clone() });
    }

    /// Starts the transfers that are queued. Those that the kernel refuses are noted among those that have ended.
    fn submit_aio(&mut self) {
        if let Some(aio) = &mut self.aio {
            let slots = &self.slots;
            let op_of = |key| slots[key as usize].op.as_ref().expect("an operation in flight is in its slot");
            aio.hand_over(&self.shared, &mut self.files, op_of);
            aio.submit(&self.shared.counters, &mut self.ended_by_aio, op_of);
        }
    }

    /// Takes the transfers that have ended. True when there were any.
    fn reap_aio(&mut self, woken: &mut Vec<Waker>) -> bool {
        let Some(aio) = &mut self.aio else { return false };
        aio.reap(&self.shared.counters, &mut self.ended_by_aio);
        if self.ended_by_aio.is_empty() {
            return false;
        }
        let mut ended = std::mem::take(&mut self.ended_by_aio);
        for (key, result) in ended.drain(..) {
            self.leave_aio(key as usize);
            self.complete(key as usize, result, woken);
        }
        self.ended_by_aio = ended;
        true
    }

    fn leave_aio(&mut self, key: usize) {
        let op = self.slots[key].op.as_ref().expect("an operation in flight is in its slot");
        self.aio.as_mut().expect("it was there for this operation").ended(op);
    }

    /// Takes the answer of AIO: the operation has ended, or goes on.
    fn complete(&mut self, key: usize, result: i32, woken: &mut Vec<Waker>) {
        let slot = &mut self.slots[key];
        let op = slot.op.as_mut().expect("an operation in flight is in its slot");
        self.found.completion();
        let must_wait = op::must_wait(-result, true);
        let outcome = match usize::try_from(result) {
            Ok(count) => op.advance(count),
            Err(_) if must_wait || result == -libc::EINTR => None,
            Err(_) => Some(Err(-result)),
        };
        match outcome {
            Some(outcome) => self.end_file_op(key, outcome, woken),
            None if matches!(slot.state, State::Abandoned) => self.end_file_op(key, Err(libc::ECANCELED), woken),
            None if must_wait => self.do_by_waiting(key, -result),
            None => self.queue_again(key),
        }
    }

    fn queue_again(&mut self, key: usize) {
        let op = self.slots[key].op.as_ref().expect("an operation in flight is in its slot");
        self.aio.as_mut().expect("it was there for the first part").queue(key as u64, op);
    }

    /// Finds another way for a transfer that AIO refuses with `errno` instead of waiting: AIO that may wait, or a helper thread.
    fn do_by_waiting(&mut self, key: usize, errno: i32) {
        let op = self.slots[key].op.as_mut().expect("an operation in flight is in its slot");
        if errno == libc::EOPNOTSUPP {
            op.fd.note_waits();
        }
        if !op.choose_aio(errno) {
            return self.hand_over(key);
        }
        if errno == libc::EAGAIN {
            self.shared.counters.writes_by_aio();
        }
        self.queue_again(key);
    }

    fn start_socket(&mut self, mut op: Op, waker: &Waker) -> Started {
        let tried = if op.fd.stays_rung { self.try_edge(&op) } else { try_socket(&mut op) };
        if let Some(outcome) = tried {
            return Started::Ended(outcome);
        }
        if let Err(errno) = self.watch(&op) {
            return Started::Ended(Err(errno));
        }
        let (kind, id) = (op.kind, op.fd.id);
        let key = self.insert(waker, op);
        self.sockets.entry(id).or_default().side(kind).push(key);
        Started::Waits(key as u64)
    }

    /// Ends a wait for an eventfd that stays rung if it was rung since the wait before.
    fn try_edge(&mut self, op: &Op) -> Option<Outcome> {
        let waiting = self.sockets.get_mut(&op.fd.id)?;
        std::mem::take(&mut waiting.was_readable).then_some(Ok(0))
    }

    fn insert(&mut self, waker: &Waker, op: Op) -> usize {
        self.slots.insert(Slot { state: State::Waits(waker.clone()), kind: op.kind, op: Some(op) })
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
            // A helper thread or the kernel still works on it.
            (State::Waits(_), _) if slot.kind.is_file() => slot.state = State::Abandoned,
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

    /// AIO has refused a write that a helper thread has given to it.
    pub(crate) fn refused(&mut self, key: u64) {
        let op = self.slots[key as usize].op.as_ref().expect("an operation in flight is in its slot");
        if let Some(aio) = &mut self.aio {
            aio.refused(&self.shared.counters, op);
        }
        self.hand_over(key as usize);
    }

    /// A helper thread is done.
    pub(crate) fn done(&mut self, key: u64, outcome: Outcome, woken: &mut Vec<Waker>) {
        self.shared.counters.completed(1);
        self.found.completion();
        self.end_file_op(key as usize, outcome, woken);
    }

    fn end_file_op(&mut self, key: usize, outcome: Outcome, woken: &mut Vec<Waker>) {
        self.file_ops -= 1;
        self.finish(key, outcome, woken);
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
        self.submit_aio();
        let has_ended = self.reap_aio(woken);
        self.files.flush();
        if self.is_blind_turn(wait, has_ended) {
            return;
        }
        let timeout_ms = match wait {
            Some(None) if !has_ended => -1,
            Some(Some(left)) if !has_ended => round_up_ms(left),
            _ => 0,
        };
        self.shared.counters.enter();
        let epoll = self.epoll();
        let count = sys::epoll_wait(epoll, &mut self.events, timeout_ms);
        for at in 0..count {
            let event = self.events[at];
            self.on_event(event.u64, event.events as i32, woken);
        }
        self.reap_aio(woken);
        self.submit_aio();
        self.files.flush();
    }

    /// True for a turn that makes no system call for sockets: nothing waits for one, or transfers have ended and keep the
    /// worker busy. The sockets get their look a few turns later at most.
    fn is_blind_turn(&mut self, wait: Option<Option<Duration>>, has_ended: bool) -> bool {
        let is_blind = has_ended && self.blind_turns < MAX_BLIND_TURNS;
        self.blind_turns = if is_blind { self.blind_turns + 1 } else { 0 };
        is_blind || (wait.is_none() && self.sockets.is_empty())
    }

    fn on_event(&mut self, id: u64, events: i32, woken: &mut Vec<Waker>) {
        if id == DOORBELL {
            self.found.bell();
            return sys::eventfd_read(self.shared.event.as_raw_fd());
        }
        if id == AIO_BELL {
            return;
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
        waiting.was_readable |= side == Kind::Recv && waiting.readers.is_empty();
        for key in std::mem::take(waiting.side(side)) {
            let op = self.slots[key].op.as_mut().expect("what waits on a socket is here");
            self.found.end_of(op);
            let tried = if op.fd.stays_rung { Some(Ok(0)) } else { try_socket(op) };
            match tried {
                Some(outcome) => self.finish(key, outcome, woken),
                None => self.sockets.entry(id).or_default().side(side).push(key),
            }
        }
    }
}

impl Drop for Epoll {
    fn drop(&mut self) {
        if self.file_ops > 0 {
            // This does not happen at an orderly end, which waits for all operations. The memory is leaked, because the kernel
            // may still write to it, and a helper thread may still start a transfer.
            std::mem::forget(std::mem::take(&mut self.slots));
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

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use spile_mem::{Segment, Segments};

    use super::*;
    use crate::fd::Fd;
    use crate::shared::Message;

    /// A reactor with AIO on this thread; `None` where there is none.
    fn reactor() -> Option<Epoll> {
        let helpers = FilePool::shared();
        helpers.ensure_thread().unwrap();
        let aio = Aio::open().map_err(|error| println!("SKIP aio: {error}")).ok()?;
        let shared = Arc::new(WorkerLink::new(0, Some(sys::epoll_create().unwrap())).unwrap());
        Some(Epoll::new(shared, helpers, Some(aio)).unwrap())
    }

    /// Lets the reactor work until the operation has ended.
    fn finish(reactor: &mut Epoll, key: u64) -> Outcome {
        let (woken, mut messages) = (&mut Vec::new(), VecDeque::new());
        loop {
            if let Poll::Ready(outcome) = reactor.poll(key, Waker::noop()) {
                return outcome;
            }
            reactor.turn(Some(Some(Duration::from_millis(10))), woken);
            reactor.shared.take(&mut messages);
            for message in messages.drain(..) {
                match message {
                    Message::Done(key, outcome) => reactor.done(key, outcome, woken),
                    Message::Refused(key) => reactor.refused(key),
                    _ => panic!("nobody else sends anything"),
                }
            }
        }
    }

    fn read(reactor: &mut Epoll, fd: &Arc<Fd>) -> Outcome {
        let into = Segments::from(Segment::zeroed(4096));
        let Started::Waits(key) = reactor.start(Op::read(fd, 0, &into), Waker::noop()) else { panic!("it waits") };
        let outcome = finish(reactor, key);
        assert_eq!(into.to_vec(), [7; 4096]);
        outcome
    }

    /// As a volume of LVM is on Linux 4.19, and as a file on such a file system.
    #[test]
    fn where_no_transfer_can_be_told_not_to_wait_helpers_start_those_of_devices_and_do_those_of_files() {
        let Some(mut reactor) = reactor() else { return };
        for (is_device, by_aio) in [(true, 1), (false, 0)] {
            let file = tempfile::tempfile().unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &[7; 4096], 0).unwrap();
            let mut fd = Fd::direct(file.try_clone().unwrap().into(), &Fd::file(file.into()));
            Arc::get_mut(&mut fd).unwrap().may_need_space = !is_device;
            fd.note_waits();
            let before = reactor.shared.stats();
            assert_eq!(read(&mut reactor, &fd), Ok(4096));
            let after = reactor.shared.stats();
            assert_eq!(after.aio_transfers - before.aio_transfers, by_aio, "device: {is_device}");
            assert_eq!(after.aio_writes, before.aio_writes);
            assert!(reactor.is_idle());
        }
    }

    #[test]
    fn a_refusal_to_do_without_waiting_is_remembered() {
        let Some(mut reactor) = reactor() else { return };
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[7; 4096], 0).unwrap();
        let fd = Fd::direct(file.try_clone().unwrap().into(), &Fd::file(file.into()));
        let into = Segments::from(Segment::zeroed(4096));
        // As queued, and answered by a kernel that has no such transfer.
        let key = reactor.insert(Waker::noop(), Op::read(&fd, 0, &into));
        reactor.file_ops = 1;
        reactor.complete(key, -libc::EOPNOTSUPP, &mut Vec::new());
        assert_eq!(finish(&mut reactor, key as u64), Ok(4096));
        assert!(fd.always_waits());
        assert_eq!(reactor.shared.stats().aio_transfers, 0);
    }
}
