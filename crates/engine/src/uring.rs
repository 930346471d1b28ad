//! The reactor on io_uring: one ring for each worker, used by its thread only.
//!
//! Operations become entries in the submission queue, and go to the kernel together in the one system call of the
//! worker's next [`Uring::turn`]. Each operation has a slot, which does not move in memory until the completion has
//! come: vectors and message headers lie in the slot, and it owns the buffers and the file. The number of transfers in
//! the ring is bounded; each store has its share of the places (module `shares`), and the rest waits. The number of
//! socket operations is not bounded, because an idle connection must not take a place from transfers. The reactor needs
//! Linux 5.11 (EXT_ARG, NODROP), and uses newer features where the kernel has them.
//!
//! Operations that may have to wait (sync, fallocate, truncate, cached transfers) go to the helper threads (module `file_pool`),
//! all of a turn together. The ring would give them to threads of the kernel, which wake every five seconds for as long as the ring
//! lives, and an idle process must not cause any wake-up; or a cached read would wait on the worker, for the file system's maps or
//! the device's queue. A direct write that needs new space goes by AIO (module `aio`), or to a helper thread where there is none.
//!
//! Two waits are left on the worker. A direct transfer in a part of an ext4 file that nobody has used since the file was opened may
//! read that part's map from the device. And a kernel without the fix "io_uring/rw: fix missing NOWAIT check for O_DIRECT start
//! write" (Linux 6.12, and stable versions since then) lets a direct write wait for a frozen file system.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use io_uring::types::{self, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use spile_core::Result;
use spile_mem::Pool;

use crate::aio::{self, Aio, Readiness};
use crate::file_pool::{FilePool, Job, Outbox};
use crate::file_table::FileTable;
use crate::fixed::FixedBuffers;
use crate::op::{self, Kind, Op, Outcome, Started};
use crate::refusal;
use crate::ring_setup::{build_ring, check_features};
use crate::shared::{Held, WorkerLink};
use crate::shares::Shares;
use crate::uring_slot::{Slot, State};
use crate::wake::Found;

/// The most transfers in the ring at a time. A store that is alone may have half of them (module `shares`). What helper threads
/// and AIO do is bounded there.
pub(crate) const MAX_TRANSFERS: usize = 2048;
/// The transfers that each store may have in any case: so many keep a device busy.
const LEAST_TRANSFERS: usize = 32;
/// The most transfers that go to the kernel together. The kernel holds back what it gets in one call until it has
/// seen the last of it, so that the block layer can join neighbours. A batch of 16 thus reaches the device late, and
/// comes back as a batch. Random reads of 4 KiB at depth 32 through a guest's queue: 61 k a second with 4, 52 k without
/// this limit, for the same processor time. With 2, sequential reads are not joined any more (66 k instead of 92 k).
const SUBMIT_ENTRIES: usize = 4;

const DOORBELL: u64 = u64::MAX;
const CANCELLED: u64 = u64::MAX - 1;
/// Writes by AIO have ended.
const AIO_BELL: u64 = u64::MAX - 2;

pub(crate) struct Uring {
    ring: IoUring,
    shared: Arc<WorkerLink>,
    helpers: Outbox,
    pool: Pool,
    #[expect(clippy::vec_box, reason = "the kernel holds addresses inside the slots: they must not move")]
    slots: Vec<Box<Slot>>,
    free: Vec<u32>,
    /// Operations that have not ended, also those that nobody waits for any more.
    in_flight: usize,
    /// Of these, the number of writes to eventfds. A peer can keep such a write there for ever, so the end of a worker
    /// does not wait for them.
    rings: usize,
    /// The transfers in the ring, and those that wait for a place there.
    shares: Shares,
    /// Entries that wait because the submission queue was full.
    unqueued: VecDeque<squeue::Entry>,
    reaped: Vec<(u64, i32)>,
    ended_by_aio: Vec<(u64, i32)>,
    /// The memory into which the kernel reads the counts of the two eventfds.
    doorbell: Box<u64>,
    aio_bell: Box<u64>,
    doorbell_armed: bool,
    files: FileTable,
    fixed: FixedBuffers,
    aio: Aio,
    /// What has ended since the worker's last sleep began.
    pub(crate) found: Found,
}

fn key_of(index: u32, generation: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(index)
}

fn index_of(key: u64) -> usize {
    key as u32 as usize
}

impl Uring {
    /// Sets up a ring and enters it once, so that an io_uring that is forbidden in part is noticed here and not later.
    ///
    /// # Errors
    /// `Denied`, `Exhausted` or `Unsupported`, with a hint.
    pub(crate) fn new(shared: Arc<WorkerLink>, helpers: Arc<FilePool>, pool: Pool) -> Result<Self> {
        Self::set_up(shared, helpers, pool).map_err(refusal::of_uring)
    }

    fn set_up(shared: Arc<WorkerLink>, helpers: Arc<FilePool>, pool: Pool) -> io::Result<Self> {
        let ring = build_ring()?;
        check_features(&ring)?;
        let files = FileTable::register(&ring)?;
        let mut this = Self {
            ring,
            aio: Aio::new()?,
            shared,
            helpers: Outbox::new(helpers),
            pool,
            slots: Vec::new(),
            free: Vec::new(),
            in_flight: 0,
            rings: 0,
            shares: Shares::new(MAX_TRANSFERS, LEAST_TRANSFERS),
            unqueued: VecDeque::new(),
            reaped: Vec::new(),
            ended_by_aio: Vec::new(),
            doorbell: Box::new(0),
            aio_bell: Box::new(0),
            doorbell_armed: false,
            files,
            fixed: FixedBuffers::default(),
            found: Found::default(),
        };
        this.arm_doorbell();
        this.try_enter(None)?;
        Ok(this)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight == self.rings
    }

    pub(crate) fn start(&mut self, op: Op, waker: &Waker) -> Started {
        let key = self.occupy(op, waker);
        self.launch(key);
        Started::Waits(key)
    }

    /// Takes a free slot, or makes one more.
    fn occupy(&mut self, op: Op, waker: &Waker) -> u64 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Box::new(Slot::new()));
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        slot.state = State::Waits(waker.clone());
        slot.kind = op.kind;
        slot.polls = false;
        slot.op = Some(op);
        key_of(index, slot.generation)
    }

    fn launch(&mut self, key: u64) {
        self.in_flight += 1;
        let op = self.slots[index_of(key)].op.as_ref().expect("an operation in flight is in its slot");
        self.rings += usize::from(op.kind == Kind::Ring);
        match op.kind {
            Kind::Read | Kind::Write if op.fd.direct && !op.fd.always_waits() => self.enter_ring(key),
            kind if kind.is_file() => self.hand_over(key),
            _ => self.submit(key),
        }
    }

    /// Submits a transfer if its store has a place in the ring, or has it wait for one.
    fn enter_ring(&mut self, key: u64) {
        let slot = &mut self.slots[index_of(key)];
        let store = slot.op.as_ref().expect("an operation in flight is in its slot").fd.store;
        if self.shares.enter(store, key) {
            slot.share = Some(store);
            self.submit(key);
        }
    }

    /// Gives an operation that must wait to a helper thread.
    fn hand_over(&mut self, key: u64) {
        self.leave_ring(key);
        let op = self.slots[index_of(key)].op.take().expect("an operation in flight is in its slot");
        self.shared.counters.submitted(1);
        self.helpers.push(Job::Op { op, key, worker: self.shared.clone() });
    }

    /// AIO has refused a write.
    pub(crate) fn refused(&mut self, key: u64) {
        let op = self.slots[index_of(key)].op.as_ref().expect("an operation in flight is in its slot");
        self.aio.refused(&self.shared.counters, op);
        self.hand_over(key);
    }

    /// A helper thread is done.
    pub(crate) fn done(&mut self, key: u64, outcome: Outcome, woken: &mut Vec<Waker>) {
        self.shared.counters.completed(1);
        self.found.completion();
        self.finish(key, outcome, woken);
    }

    /// The ring and its registered buffers.
    pub(crate) fn with_fixed(&mut self, f: impl FnOnce(&IoUring, &mut FixedBuffers)) {
        f(&self.ring, &mut self.fixed);
    }

    /// Queues the next part of an operation.
    fn submit(&mut self, key: u64) {
        let slot = &mut self.slots[index_of(key)];
        let op = slot.op.as_ref().expect("an operation in flight is in its slot");
        if op.fd.direct {
            self.fixed.register_arena(&self.ring, &self.pool);
        }
        let target = self.files.target(&self.ring, &self.shared, &op.fd);
        let fixed = self.fixed.covering(op).filter(|_| op.fd.direct);
        let entry = slot.entry(target, fixed).user_data(key);
        self.push(entry);
        if self.ring.submission().len() >= SUBMIT_ENTRIES {
            self.enter(None);
        }
    }

    fn push(&mut self, entry: squeue::Entry) {
        self.shared.counters.submitted(1);
        if !self.unqueued.is_empty() {
            // Entries keep their order: the cancellation of an operation must not come before the operation.
            return self.unqueued.push_back(entry);
        }
        // SAFETY: what the entry points to lies in a boxed slot, in segments that the slot's operation owns, or in
        // the boxed counts of the eventfds; all stay until the completion is reaped (and `drop` leaks what is not reaped).
        let full = unsafe { self.ring.submission().push(&entry) }.is_err();
        if full {
            self.unqueued.push_back(entry);
        }
    }

    /// Moves the entries that wait into the submission queue, as far as they fit.
    fn requeue(&mut self) {
        let mut queue = self.ring.submission();
        while let Some(entry) = self.unqueued.pop_front() {
            // SAFETY: as in `push`.
            if unsafe { queue.push(&entry) }.is_err() {
                self.unqueued.push_front(entry);
                return;
            }
        }
    }

    fn arm_doorbell(&mut self) {
        self.doorbell_armed = true;
        let fd = types::Fd(self.shared.event.as_raw_fd());
        let entry = opcode::Read::new(fd, (&raw mut *self.doorbell).cast(), 8).build();
        self.push(entry.user_data(DOORBELL));
    }

    pub(crate) fn poll(&mut self, key: u64, waker: &Waker) -> Poll<Outcome> {
        let slot = &mut self.slots[index_of(key)];
        match &mut slot.state {
            State::Waits(old) => {
                old.clone_from(waker);
                Poll::Pending
            }
            State::Ended(outcome) => {
                let outcome = *outcome;
                self.release(key);
                Poll::Ready(outcome)
            }
            State::Free | State::Abandoned => unreachable!("this operation has no future"),
        }
    }

    pub(crate) fn abandon(&mut self, key: u64) {
        let slot = &mut self.slots[index_of(key)];
        if let State::Ended(outcome) = slot.state {
            slot.close_unclaimed(outcome);
            return self.release(key);
        }
        slot.state = State::Abandoned;
        // A file operation ends by itself, but a socket operation may wait for its peer for ever.
        if !slot.kind.is_file() {
            self.push(opcode::AsyncCancel::new(key).build().user_data(CANCELLED));
        }
    }

    fn release(&mut self, key: u64) {
        let slot = &mut self.slots[index_of(key)];
        slot.generation = slot.generation.wrapping_add(1);
        slot.state = State::Free;
        slot.op = None;
        self.free.push(key as u32);
    }

    /// Starts an operation for whose end nobody waits.
    pub(crate) fn start_alone(&mut self, op: Op) {
        let key = self.occupy(op, Waker::noop());
        self.slots[index_of(key)].state = State::Abandoned;
        self.launch(key);
    }

    /// Registers a file, so that the ring keeps it open until the last of its requests has ended.
    pub(crate) fn hold(&mut self, held: &Held) {
        if !self.files.put(&self.ring, held.table_index, held.id, held.fd.as_fd().as_raw_fd()) {
            tracing::error!("{}", crate::shared::NOT_HELD);
        }
    }

    /// Ends the registration of a file that was dropped everywhere else.
    pub(crate) fn forget(&mut self, id: u64, table_index: Option<u32>) {
        if let Some(index) = table_index {
            self.files.forget(&self.ring, id, index);
        }
    }

    /// Submits the queued entries and takes the completions. With `wait` it sleeps until there is a completion.
    pub(crate) fn turn(&mut self, wait: Option<Option<Duration>>, woken: &mut Vec<Waker>) {
        self.requeue();
        self.submit_aio();
        self.helpers.flush();
        // The worker must not sleep while entries wait for room.
        let wait = wait.filter(|_| self.unqueued.is_empty());
        if wait.is_some() || self.needs_enter() {
            self.enter(wait);
        }
        self.reap(woken);
    }

    fn needs_enter(&mut self) -> bool {
        let queue = self.ring.submission();
        !queue.is_empty() || queue.taskrun() || queue.cq_overflow()
    }

    /// True when something has ended, or the kernel wants to be entered for it.
    pub(crate) fn has_news(&mut self) -> bool {
        !self.ring.completion().is_empty() || self.needs_enter()
    }

    fn enter(&mut self, wait: Option<Option<Duration>>) {
        self.try_enter(wait).unwrap_or_else(|error| panic!("io_uring_enter failed: {error}"));
    }

    fn try_enter(&self, wait: Option<Option<Duration>>) -> io::Result<()> {
        self.shared.counters.enter();
        let submitter = self.ring.submitter();
        let result = match wait {
            None => submitter.submit(),
            Some(None) => submitter.submit_and_wait(1),
            Some(Some(left)) => {
                let left = Timespec::from(left);
                submitter.submit_with_args(1, &SubmitArgs::new().timespec(&left))
            }
        };
        match result.map_err(|error| (error.raw_os_error(), error)) {
            // The time is over, a signal came, or completions have to be taken first. The worker's loop calls again.
            Ok(_) | Err((Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN), _)) => Ok(()),
            Err((_, error)) => Err(error),
        }
    }

    fn reap(&mut self, woken: &mut Vec<Waker>) {
        let mut reaped = std::mem::take(&mut self.reaped);
        reaped.extend(self.ring.completion().map(|entry| (entry.user_data(), entry.result())));
        self.shared.counters.completed(reaped.len() as u64);
        for (key, result) in reaped.drain(..) {
            match key {
                DOORBELL => {
                    self.found.bell();
                    self.arm_doorbell();
                }
                CANCELLED => (),
                AIO_BELL => {
                    self.found.completion();
                    self.reap_aio(woken);
                }
                key => self.complete(key, result, woken),
            }
        }
        self.reaped = reaped;
        self.submit_aio();
        self.helpers.flush();
    }

    /// Takes the completion of one entry: the operation has ended, or goes on with its next part.
    fn complete(&mut self, key: u64, result: i32, woken: &mut Vec<Waker>) {
        let slot = &mut self.slots[index_of(key)];
        let op = slot.op.as_mut().expect("an operation in flight is in its slot");
        self.found.end_of(op);
        let must_wait = op.kind.is_file() && op::must_wait(-result, op.fd.direct);
        let polled = std::mem::replace(&mut slot.polls, !op.kind.is_file() && result == -libc::EAGAIN);
        let outcome = match usize::try_from(result) {
            Ok(_) if polled => None,
            Ok(count) => op.advance(count),
            Err(_) if must_wait || matches!(-result, libc::EINTR | libc::EAGAIN) => None,
            Err(_) => Some(Err(-result)),
        };
        match outcome {
            Some(outcome) => self.finish(key, outcome, woken),
            None if matches!(slot.state, State::Abandoned) => {
                self.finish(key, Err(libc::ECANCELED), woken);
            }
            None if must_wait => self.do_by_waiting(key, -result),
            // AIO has done a part of it.
            None if slot.kind.is_file() && slot.share.is_none() => self.enter_ring(key),
            None => self.submit(key),
        }
    }

    /// Finds another way for a transfer that the ring has refused with `errno` instead of waiting: AIO, or a helper thread.
    fn do_by_waiting(&mut self, key: u64, errno: i32) {
        let op = self.slots[index_of(key)].op.as_mut().expect("an operation in flight is in its slot");
        if errno == libc::EOPNOTSUPP {
            op.fd.note_waits();
        }
        if errno != libc::EAGAIN || !op.choose_aio(libc::EAGAIN) || !self.queue_for_aio(key) {
            self.hand_over(key);
        }
    }

    /// Queues a write for AIO; false where that cannot be had.
    fn queue_for_aio(&mut self, key: u64) -> bool {
        match self.aio.prepare(aio::set_up) {
            Readiness::Refused => return false,
            Readiness::Opened => self.arm_aio_bell(),
            Readiness::Ready => {}
        }
        self.shared.counters.writes_by_aio();
        self.leave_ring(key);
        let op = self.slots[index_of(key)].op.as_ref().expect("an operation in flight is in its slot");
        self.aio.queue(key, op);
        true
    }

    fn arm_aio_bell(&mut self) {
        let bell = types::Fd(self.aio.bell());
        let entry = opcode::Read::new(bell, (&raw mut *self.aio_bell).cast(), 8).build();
        self.push(entry.user_data(AIO_BELL));
    }

    /// Has helper threads start the writes that are queued for AIO.
    fn submit_aio(&mut self) {
        if self.aio.queued() > 0 {
            let slots = &self.slots;
            let op_of = |key| slots[index_of(key)].op.as_ref().expect("an operation in flight is in its slot");
            self.aio.hand_over(&self.shared, &mut self.helpers, op_of);
        }
    }

    /// Takes the answers to writes by AIO.
    fn reap_aio(&mut self, woken: &mut Vec<Waker>) {
        self.arm_aio_bell();
        self.aio.reap(&self.shared.counters, &mut self.ended_by_aio);
        self.complete_aio(woken);
    }

    fn complete_aio(&mut self, woken: &mut Vec<Waker>) {
        let mut ended = std::mem::take(&mut self.ended_by_aio);
        for (key, result) in ended.drain(..) {
            let op = self.slots[index_of(key)].op.as_ref().expect("an operation in flight is in its slot");
            self.aio.ended(op);
            self.complete(key, result, woken);
        }
        self.ended_by_aio = ended;
    }

    fn finish(&mut self, key: u64, outcome: Outcome, woken: &mut Vec<Waker>) {
        let slot = &mut self.slots[index_of(key)];
        let mut again = None;
        if let (Kind::Ring, Some(op)) = (slot.kind, &slot.op) {
            self.rings -= 1;
            if op.fd.end_ring(outcome.is_ok()) {
                again = Some(Op::ring(&op.fd, &op.segments.as_slice()[0]));
            }
        }
        match std::mem::replace(&mut slot.state, State::Ended(outcome)) {
            State::Waits(waker) => woken.push(waker),
            _ => {
                slot.close_unclaimed(outcome);
                self.release(key);
            }
        }
        self.in_flight -= 1;
        self.leave_ring(key);
        again.into_iter().for_each(|op| self.start_alone(op));
    }

    /// An operation has ended, or goes on elsewhere. If it was in the ring, transfers that wait for a place may start.
    fn leave_ring(&mut self, key: u64) {
        if let Some(store) = self.slots[index_of(key)].share.take() {
            self.shares.leave(store);
            self.submit_next();
        }
    }

    /// Submits transfers that wait, as many as there are places for, unless nobody waits for their end any more.
    fn submit_next(&mut self) {
        while let Some(key) = self.shares.next() {
            let slot = &mut self.slots[index_of(key)];
            let store = slot.op.as_ref().expect("an operation in flight is in its slot").fd.store;
            if matches!(slot.state, State::Waits(_)) {
                slot.share = Some(store);
                self.submit(key);
            } else {
                self.shares.leave(store);
                self.in_flight -= 1;
                self.release(key);
            }
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            // This does not happen at an orderly end, which waits for all operations. The memory is leaked, because the
            // kernel may still write to it.
            std::mem::forget(std::mem::take(&mut self.slots));
        }
        if self.doorbell_armed {
            // The reads are cancelled when the ring is closed, but that may take effect after this drop.
            std::mem::forget(std::mem::take(&mut self.doorbell));
            std::mem::forget(std::mem::take(&mut self.aio_bell));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use spile_mem::Segment;

    use super::*;
    use crate::fd::Fd;
    use crate::ring_setup::{CQ_ENTRIES, SQ_ENTRIES};
    use crate::shared::Message;
    use crate::sys;

    struct Woken;

    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {}
    }

    fn helpers() -> Arc<FilePool> {
        let helpers = FilePool::shared();
        helpers.ensure_thread().unwrap();
        helpers
    }

    /// A ring on this thread; `None` where there is no io_uring.
    fn ring() -> Option<Uring> {
        let (shared, pool) = (Arc::new(WorkerLink::new(0, None).unwrap()), Pool::new(1).unwrap());
        Uring::new(shared, helpers(), pool).map_err(|error| println!("SKIP uring: {error}")).ok()
    }

    /// The table of Linux before 5.19, and that of a process that may have few files open.
    #[test]
    fn a_table_of_files_is_had_without_sparse_registration() {
        let Some(ring) = ring() else { return };
        ring.ring.submitter().unregister_files().unwrap();
        FileTable::register_empty(&ring.ring, 40).unwrap();
        let mut table = FileTable { ids: vec![0; 40], usable: true };
        let file = tempfile::tempfile().unwrap();
        assert!(table.put(&ring.ring, 39, 7, file.as_raw_fd()) && table.ids[39] == 7);
        assert!(!table.put(&ring.ring, 40, 8, file.as_raw_fd()), "there is no such place");
        assert!(table.put(&ring.ring, 0, 9, file.as_raw_fd()), "the table is of use all the same");
        table.forget(&ring.ring, 7, 39);
        assert_eq!(table.ids[39], 0);
    }

    #[test]
    fn completions_that_the_ring_has_no_room_for_are_not_lost() {
        let Some(mut ring) = ring() else { return };
        const ROUNDS: u32 = CQ_ENTRIES / SQ_ENTRIES + 4;
        for _ in 0..ROUNDS {
            (0..SQ_ENTRIES).for_each(|_| ring.push(opcode::Nop::new().build().user_data(CANCELLED)));
            ring.try_enter(None).unwrap();
        }
        assert!(ring.ring.submission().cq_overflow());
        let woken = &mut Vec::new();
        (0..100).for_each(|_| ring.turn(None, woken));
        assert_eq!(ring.shared.stats().cqes, u64::from(ROUNDS * SQ_ENTRIES));
    }

    #[test]
    fn an_exact_receive_goes_on_after_a_part() {
        let Some(mut ring) = ring() else { return };
        let (ours, mut peer) = UnixStream::pair().unwrap();
        let (waker, woken) = (Waker::from(Arc::new(Woken)), &mut Vec::new());
        let into = Segment::zeroed(8);
        // As launched, and answered as Linux before 5.19 answers.
        let key = ring.occupy(Op::recv_exact(&Fd::socket(ours.into()), &into), &waker);
        ring.in_flight += 1;
        into.copy_from_slice(0, b"abc");
        ring.complete(key, 3, woken);
        std::io::Write::write_all(&mut peer, b"defgh").unwrap();
        for _ in 0..10 {
            if woken.is_empty() {
                ring.turn(Some(Some(Duration::from_secs(10))), woken);
            }
        }
        assert_eq!(ring.poll(key, &waker), Poll::Ready(Ok(8)));
        assert_eq!(into.to_vec(), b"abcdefgh");
    }

    #[test]
    fn what_helper_threads_do_takes_no_room_in_the_ring() {
        let Some(mut ring) = ring() else { return };
        let cached = Fd::file(tempfile::tempfile().unwrap().into());
        for _ in 0..=MAX_TRANSFERS {
            ring.start(Op::sync(&cached), Waker::noop());
        }
        assert_eq!((ring.shares.counts(), ring.in_flight), ((0, 0), MAX_TRANSFERS + 1));
    }

    /// Starts direct reads of the first bytes of a file. Its store is the one of this number.
    fn start_reads(ring: &mut Uring, store: usize, count: usize) -> Vec<u64> {
        let file = tempfile::tempfile().unwrap();
        let mut fd = Fd::direct(file.try_clone().unwrap().into(), &Fd::file(file.into()));
        Arc::get_mut(&mut fd).unwrap().store = store;
        let into = Segment::zeroed(512).into();
        let mut start = || match ring.start(Op::read(&fd, 0, &into), Waker::noop()) {
            Started::Waits(key) => key,
            Started::Ended(_) => panic!("it waits"),
        };
        (0..count).map(|_| start()).collect()
    }

    /// A store whose transfers do not end: nobody takes their completions here.
    #[test]
    fn each_dead_store_leaves_places_in_the_ring_for_the_next() {
        let Some(mut ring) = ring() else { return };
        let dead = start_reads(&mut ring, 1, 3 * MAX_TRANSFERS);
        assert_eq!(ring.shares.counts(), (MAX_TRANSFERS / 2, 5 * MAX_TRANSFERS / 2));
        (2..20).for_each(|store| drop(start_reads(&mut ring, store, MAX_TRANSFERS)));
        let (_, waiting) = ring.shares.counts();
        start_reads(&mut ring, 20, LEAST_TRANSFERS);
        assert_eq!(ring.shares.counts().1, waiting, "a healthy store has to wait");
        // Nobody waits any more for some of them.
        dead[MAX_TRANSFERS..].iter().for_each(|key| ring.abandon(*key));
        while !ring.is_idle() {
            ring.turn(Some(Some(Duration::from_secs(10))), &mut Vec::new());
            let mut messages = VecDeque::new();
            ring.shared.take(&mut messages);
            for message in messages.drain(..) {
                let Message::Done(key, outcome) = message else { panic!("nobody else sends anything") };
                ring.done(key, outcome, &mut Vec::new());
            }
        }
        assert_eq!(ring.shares.counts(), (0, 0));
    }

    #[test]
    fn a_write_by_aio_goes_on_after_a_part() {
        let Some(mut ring) = ring() else { return };
        let file = tempfile::tempfile().unwrap();
        let fd = Fd::direct(file.try_clone().unwrap().into(), &Fd::file(file.try_clone().unwrap().into()));
        let (waker, woken) = (Waker::from(Arc::new(Woken)), &mut Vec::new());
        let from = Segment::zeroed(8192);
        from.copy_from_slice(0, &[7; 8192]);
        // As given to AIO, which has written a half.
        let mut op = Op::write(&fd, 0, &from.into());
        op.may_wait_in_aio = true;
        let key = ring.occupy(op, &waker);
        ring.in_flight = 1;
        ring.complete(key, 4096, woken);
        let mut messages = VecDeque::new();
        for _ in 0..10 {
            if woken.is_empty() {
                ring.turn(Some(Some(Duration::from_secs(10))), woken);
            }
            // Where the rest had to wait, a helper thread has done it.
            ring.shared.take(&mut messages);
            for message in messages.drain(..) {
                let Message::Done(key, outcome) = message else { panic!("nobody else sends anything") };
                ring.done(key, outcome, woken);
            }
        }
        assert_eq!(ring.poll(key, &waker), Poll::Ready(Ok(8192)));
        let mut found = [0; 8192];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut found, 0).unwrap();
        assert!(found[..4096] == [0; 4096] && found[4096..] == [7; 4096]);
    }

    #[test]
    fn a_socket_that_does_not_wait_is_polled() {
        let Some(mut ring) = ring() else { return };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sock");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (waker, woken) = (Waker::from(Arc::new(Woken)), &mut Vec::new());
        // As launched, and answered as Linux 5.15 answers.
        let key = ring.occupy(Op::accept(&Fd::socket(listener.into())), &waker);
        ring.in_flight += 1;
        ring.complete(key, -libc::EAGAIN, woken);
        assert!(ring.slots[index_of(key)].polls);
        ring.turn(None, woken);
        let submitted = ring.shared.stats().sqes;
        (0..10).for_each(|_| ring.turn(None, woken));
        assert!(woken.is_empty() && ring.shared.stats().sqes == submitted, "it tries again and again");
        let _peer = UnixStream::connect(&path).unwrap();
        for _ in 0..10 {
            if woken.is_empty() {
                ring.turn(Some(Some(Duration::from_secs(10))), woken);
            }
        }
        let Poll::Ready(Ok(fd)) = ring.poll(key, &waker) else { panic!("no connection") };
        sys::close_unclaimed(fd);
        assert!(ring.is_idle());
    }
}
