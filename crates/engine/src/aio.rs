//! Linux AIO (io_submit): direct transfers that are in flight while the worker goes on.
//!
//! The engine `aio` does all direct transfers this way. Reads, and writes to devices, carry RWF_NOWAIT: a transfer that would have
//! to wait comes back with EAGAIN, and goes to a helper thread. Writes to files do not: io_submit waits for a frozen file system
//! before it looks at that flag, so a helper thread calls it.
//!
//! The engine `uring` does only those direct writes this way that need space on the file system, because io_uring does not
//! do such a write itself. With RWF_NOWAIT it answers EAGAIN; without that flag it gives the write to a kernel thread, and
//! once such a thread was needed, it wakes every five seconds for as long as the ring lives. A helper thread that calls
//! pwritev keeps the file system's lock on the file until the device has answered, and all other writes into holes wait
//! meanwhile. fallocate before the write is no better: on ext4 it first waits for every direct transfer of that file.
//! io_submit without RWF_NOWAIT does what is needed: it allocates the bytes of the write and no others, starts the
//! transfer, releases the lock and returns.
//!
//! io_submit without RWF_NOWAIT waits where the file system makes every writer wait: while it is frozen, while it reads its
//! maps of free space, and until the device has answered for a write past the end of the file or for a part of a file system
//! block in a hole. So a helper thread calls it, in the lane of the file: all such writes to a file of a worker's turn are one
//! job ([`Batch`]). The worker and these jobs share the context, and it is destroyed with the last of them.
//!
//! A device that lies over others, such as a volume of LVM, refuses RWF_NOWAIT on older kernels. The engine `aio` then has a
//! helper thread start the transfers to it in the same way. They are as asynchronous as others, so that one thread starts them
//! all.
//!
//! All transfers of a turn go to the kernel together. The end of each is announced by an eventfd, which the reactor waits
//! for, and noted in a ring of memory that the kernel shares with the process: no system call is needed to read it.
//!
//! When the process is killed, the kernel waits for these transfers before it closes the process's files, so the locks on
//! the files last as long as the transfers. The kernel does not wait while another process shares the memory, as the
//! child of vfork does until it calls exec. Each transfer keeps its own descriptor open, though, so that descriptor is
//! locked, too (see the module `lock`).

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};

use smallvec::SmallVec;

use crate::aio_context::{AioContext, Iocb};
use crate::file_pool::{Job, Lane, Outbox};
use crate::op::{Kind, Op};
use crate::shared::{Counters, Message, WorkerLink, relock};
use crate::shares::Shares;
use crate::sys::{self, IoVecs};

/// The most transfers of one worker that are in the kernel at a time; more wait. The system has a limit for all processes together
/// (`fs.aio-max-nr`, usually 65536).
const MAX_TRANSFERS: u32 = 512;
/// The places of which each store has a share (module `shares`). The rest is for the stores that find hardly any left.
pub(crate) const SHARED_TRANSFERS: usize = 448;
/// The transfers that each store may have in any case.
const LEAST_TRANSFERS: usize = 4;
/// With so many queued transfers a reactor starts them, and does not wait for the end of its turn. It is the number of
/// entries that a ring of io_uring is given at a time (module `uring`), for the same reason.
pub(crate) const SUBMIT_TRANSFERS: usize = 4;
/// The most transfers of one system call.
const BATCH: usize = 32;

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_CMD_PWRITE: u16 = 1;
const IOCB_CMD_PREADV: u16 = 7;
const IOCB_CMD_PWRITEV: u16 = 8;
const IOCB_FLAG_RESFD: u32 = 1;

/// How many transfers go another way after AIO was refused, before it is tried again.
const RETRY_TRANSFERS: u32 = 1024;

/// Linux AIO as one worker uses it.
pub(crate) struct Aio {
    context: Context,
    /// The eventfd that the kernel rings at the end of each transfer. It is made with the worker, so that a worker's number
    /// of descriptors does not depend on its transfers.
    bell: OwnedFd,
    /// The keys of the transfers to start, the oldest first. Each has a place in its store's share.
    queued: VecDeque<u64>,
    shares: Shares,
    in_flight: usize,
    /// The vectors of the transfers of one system call. They are here only to be allocated once.
    vectors: Box<[IoVecs; BATCH]>,
    /// The jobs of a turn, one for each file. The list is here only to be allocated once.
    batches: Vec<Batch>,
    spare: Spare,
}

/// The lists of batches that were submitted, to be used again.
type Spare = Arc<Mutex<Vec<Vec<Write>>>>;

/// The kernel's context for the transfers of one worker.
enum Context {
    Untried,
    Open(Arc<AioContext>),
    /// The kernel has refused one, and so many transfers have asked since.
    Refused(u32),
}

/// Whether a transfer can go by AIO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    /// Yes.
    Ready,
    /// Yes, and this is the first one: nobody reads the eventfd yet.
    Opened,
    /// No.
    Refused,
}

impl Aio {
    /// Makes the eventfd, and no context yet.
    ///
    /// # Errors
    /// The kernel's: there are too few descriptors.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            context: Context::Untried,
            bell: sys::eventfd()?,
            queued: VecDeque::new(),
            shares: Shares::new(SHARED_TRANSFERS, LEAST_TRANSFERS),
            in_flight: 0,
            vectors: Box::new([const { SmallVec::new_const() }; BATCH]),
            batches: Vec::new(),
            spare: Spare::default(),
        })
    }

    /// Makes the eventfd and the context.
    ///
    /// # Errors
    /// The kernel's: there are too few descriptors, or AIO is refused.
    pub(crate) fn open() -> io::Result<Self> {
        let context = Context::Open(Arc::new(set_up()?));
        Ok(Self { context, ..Self::new()? })
    }

    /// Tells whether a transfer can be queued. Makes the context by `set_up` if there is none; after a refusal that is tried
    /// again for one transfer in [`RETRY_TRANSFERS`].
    pub(crate) fn prepare(&mut self, set_up: impl FnOnce() -> io::Result<AioContext>) -> Readiness {
        match &mut self.context {
            Context::Open(_) => return Readiness::Ready,
            Context::Refused(transfers) if *transfers < RETRY_TRANSFERS => {
                *transfers += 1;
                return Readiness::Refused;
            }
            Context::Untried | Context::Refused(_) => {}
        }
        match set_up() {
            Ok(context) => {
                self.context = Context::Open(Arc::new(context));
                Readiness::Opened
            }
            Err(error) => {
                warn_once(&error);
                self.context = Context::Refused(0);
                Readiness::Refused
            }
        }
    }

    /// The eventfd.
    pub(crate) fn bell(&self) -> RawFd {
        self.bell.as_raw_fd()
    }

    /// Queues the transfer `op` of this key: to start it, or to wait until others of its store have ended.
    pub(crate) fn queue(&mut self, key: u64, op: &Op) {
        if self.shares.enter(op.fd.store, key) {
            self.queued.push_back(key);
        }
    }

    /// Takes note that a transfer has ended, or goes another way. Those that wait may start then.
    pub(crate) fn ended(&mut self, op: &Op) {
        self.shares.leave(op.fd.store);
        while let Some(key) = self.shares.next() {
            self.queued.push_back(key);
        }
    }

    /// How many transfers are queued.
    pub(crate) fn queued(&self) -> usize {
        self.queued.len()
    }

    /// True when a turn would find the end of a transfer.
    pub(crate) fn has_ended(&self) -> bool {
        self.context().is_some_and(AioContext::has_ended)
    }

    fn context(&self) -> Option<&AioContext> {
        match &self.context {
            Context::Open(context) => Some(context),
            Context::Untried | Context::Refused(_) => None,
        }
    }

    /// Has helper threads start the queued transfers that may wait, as many as there is room for. `op_of` is that of
    /// [`Aio::submit`]. The worker gets a message about each transfer that the kernel refuses.
    pub(crate) fn hand_over<'a>(
        &mut self,
        worker: &Arc<WorkerLink>,
        helpers: &mut Outbox,
        op_of: impl Fn(u64) -> &'a Op,
    ) {
        let (Context::Open(context), bell) = (&self.context, self.bell.as_raw_fd()) else { return };
        let (in_flight, batches, spare) = (&mut self.in_flight, &mut self.batches, &self.spare);
        self.queued.retain(|&key| {
            let op = op_of(key);
            let Some(lane) = op.fd.lane().filter(|_| op.may_wait_in_aio && *in_flight < MAX_TRANSFERS as usize) else {
                return true;
            };
            *in_flight += 1;
            worker.counters.submitted_to_aio(1);
            let known = batches.iter().position(|batch| Arc::ptr_eq(&batch.lane, lane));
            let index = known.unwrap_or_else(|| {
                batches.push(Batch {
                    context: context.clone(),
                    lane: lane.clone(),
                    worker: worker.clone(),
                    writes: relock(spare).pop().unwrap_or_default(),
                    spare: spare.clone(),
                });
                batches.len() - 1
            });
            batches[index].push(key, op, bell);
            false
        });
        batches.drain(..).for_each(|batch| helpers.push(Job::Submit(batch)));
    }

    /// Takes note that the kernel has refused a transfer that was handed over.
    pub(crate) fn refused(&mut self, counters: &Counters, op: &Op) {
        self.ended(op);
        self.in_flight -= 1;
        counters.completed(1);
    }

    /// Starts queued transfers, as many as there is room for. `op_of` tells the operation of a key; it must keep its buffers
    /// and its file until the end of the transfer was reaped. A transfer that the kernel does not take has ended, as far as
    /// AIO is concerned: it goes into `ended`, with an errno that asks for another way.
    pub(crate) fn submit<'a>(
        &mut self,
        counters: &Counters,
        ended: &mut Vec<(u64, i32)>,
        op_of: impl Fn(u64) -> &'a Op,
    ) {
        while !self.queued.is_empty() && self.in_flight < MAX_TRANSFERS as usize {
            counters.enter();
            match self.submit_batch(&op_of) {
                Ok(count) if count > 0 => {
                    counters.submitted_to_aio(count as u64);
                    self.queued.drain(..count);
                    self.in_flight += count;
                }
                Err(libc::EINTR) => {}
                // There is room again when a transfer has ended.
                Err(libc::EAGAIN) if self.in_flight > 0 => return,
                refused => {
                    let unsupported = refused == Err(libc::EOPNOTSUPP);
                    let errno = if unsupported { libc::EOPNOTSUPP } else { libc::EAGAIN };
                    ended.extend(self.queued.pop_front().map(|key| (key, -errno)));
                }
            }
        }
    }

    /// Starts the first queued transfers with one call. Returns how many were started.
    fn submit_batch<'a>(&mut self, op_of: impl Fn(u64) -> &'a Op) -> Result<usize, i32> {
        let Context::Open(context) = &self.context else { return Ok(0) };
        let room = BATCH.min(MAX_TRANSFERS as usize - self.in_flight);
        let keys = self.queued.iter().take(room);
        let bell = self.bell.as_raw_fd();
        let mut blocks: SmallVec<[Iocb; BATCH]> = keys
            .zip(self.vectors.iter_mut())
            .map(|(&key, vectors)| control_block(key, op_of(key), vectors, bell))
            .collect();
        let mut pointers: SmallVec<[*mut Iocb; BATCH]> = blocks.iter_mut().map(std::ptr::from_mut).collect();
        // SAFETY: the operation in the reactor's slot owns the buffers and the file, and stays until the end of its transfer
        // is reaped. The context's drop waits for what is not reaped.
        unsafe { context.submit(&mut pointers) }
    }

    /// Puts each transfer that has ended into `ended`: its key, and the number of bytes or a negative errno. The caller tells
    /// [`Aio::ended`] of everything that gets in there.
    pub(crate) fn reap(&mut self, counters: &Counters, ended: &mut Vec<(u64, i32)>) {
        if self.in_flight == 0 {
            return;
        }
        let before = ended.len();
        if let Context::Open(context) = &self.context {
            context.reap(counters, ended);
        }
        let count = ended.len() - before;
        self.in_flight -= count;
        counters.completed(count as u64);
    }
}

/// Writes to one file that a helper thread has to start.
pub(crate) struct Batch {
    context: Arc<AioContext>,
    lane: Arc<Lane>,
    worker: Arc<WorkerLink>,
    writes: Vec<Write>,
    spare: Spare,
}

struct Write {
    block: Iocb,
    vectors: IoVecs,
}

// SAFETY: the addresses in the vectors are those of buffers that the operation in the reactor's slot owns. It stays until the
// end of the transfer is reaped, or until the worker learns that the kernel has refused it.
unsafe impl Send for Write {}

impl Batch {
    pub(crate) fn lane(&self) -> &Lane {
        &self.lane
    }

    fn push(&mut self, key: u64, op: &Op, bell: RawFd) {
        let mut vectors = IoVecs::new();
        let block = control_block(key, op, &mut vectors, bell);
        self.writes.push(Write { block, vectors });
    }

    /// Starts the writes, and tells the worker of those that the kernel refuses.
    pub(crate) fn submit(mut self) {
        let mut started = 0;
        while started < self.writes.len() {
            self.worker.counters.enters_aio();
            match self.submit_from(started) {
                Ok(count) if count > 0 => started += count,
                Err(libc::EINTR) => {}
                _ => break,
            }
        }
        if started < self.writes.len() {
            self.worker.push_all(self.writes.drain(started..).map(|write| Message::Refused(write.block.data)));
        }
        self.writes.clear();
        relock(&self.spare).push(std::mem::take(&mut self.writes));
    }

    /// Starts the writes from number `first` on with one call. Returns how many were started.
    fn submit_from(&mut self, first: usize) -> Result<usize, i32> {
        let rest = self.writes[first..].iter_mut().take(BATCH);
        let mut pointers: SmallVec<[*mut Iocb; BATCH]> = rest.map(Write::pointer).collect();
        // SAFETY: the operation in the reactor's slot owns the buffers and the file, and stays until the end of its transfer is
        // reaped. A write that has not been started cannot have ended.
        unsafe { self.context.submit(&mut pointers) }
    }
}

impl Write {
    /// The control block, with the address that its vectors have now.
    fn pointer(&mut self) -> *mut Iocb {
        if self.block.opcode == IOCB_CMD_PWRITEV {
            self.block.address = self.vectors.as_ptr() as u64;
        }
        &raw mut self.block
    }
}

/// Describes what is left of a transfer to the kernel. Several segments are described in `vectors`, which must not move
/// until the transfer is started.
fn control_block(key: u64, op: &Op, vectors: &mut IoVecs, bell: RawFd) -> Iocb {
    sys::fill_iovecs(op.segments.as_slice(), op.done, vectors);
    let is_read = op.kind == Kind::Read;
    let (opcode, address, count) = match vectors.as_slice() {
        [one] => (if is_read { IOCB_CMD_PREAD } else { IOCB_CMD_PWRITE }, one.iov_base as u64, one.iov_len),
        many => (if is_read { IOCB_CMD_PREADV } else { IOCB_CMD_PWRITEV }, many.as_ptr() as u64, many.len()),
    };
    Iocb {
        data: key,
        key: 0,
        rw_flags: if op.may_wait_in_aio { 0 } else { libc::RWF_NOWAIT },
        opcode,
        priority: 0,
        fd: op.fd.raw() as u32,
        address,
        count: count as u64,
        offset: (op.offset + op.done as u64) as i64,
        reserved: 0,
        flags: IOCB_FLAG_RESFD,
        eventfd: bell as u32,
    }
}

/// Has the kernel make a context for [`MAX_TRANSFERS`] transfers.
///
/// # Errors
/// As [`AioContext::new`].
pub(crate) fn set_up() -> io::Result<AioContext> {
    AioContext::new(MAX_TRANSFERS)
}

/// Tells once in the life of the process that AIO was refused.
fn warn_once(error: &io::Error) {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        tracing::warn!(
            "Linux AIO is refused ({error}): writes into holes of files wait for each other until it is granted \
             (raise fs.aio-max-nr if other programs use it up)"
        );
    });
}

#[cfg(test)]
mod tests {
    use spile_mem::{Segment, Segments};

    use super::*;
    use crate::fd::Fd;

    #[test]
    fn what_the_kernel_does_not_take_comes_back() {
        let (mut aio, counters) = (Aio::new().unwrap(), Counters::default());
        if aio.prepare(set_up) == Readiness::Refused {
            return println!("SKIP aio: the kernel has none");
        }
        let file = Fd::file(tempfile::tempfile().unwrap().into());
        let mut write = Op::write(&file, 0, &Segments::from(Segment::zeroed(512)));
        // So that nothing depends on the file system.
        write.may_wait_in_aio = true;
        (1..=3).for_each(|key| aio.queue(key, &write));
        let mut ended = Vec::new();
        // The kernel refuses a descriptor that it cannot write to.
        let read_only = Fd::file(std::fs::File::open("/dev/null").unwrap().into());
        let refused = Op::write(&read_only, 0, &Segments::from(Segment::zeroed(512)));
        aio.submit(&counters, &mut ended, |key| if key == 2 { &refused } else { &write });
        assert_eq!((ended.as_slice(), aio.queued()), (&[(2, -libc::EAGAIN)][..], 0));
        while ended.len() < 3 {
            aio.reap(&counters, &mut ended);
        }
        assert_eq!(ended[1..], [(1, 512), (3, 512)]);
        let stats = counters.read();
        assert_eq!((stats.aio_transfers, stats.sqes, stats.cqes, stats.enters), (2, 2, 2, 3), "{stats:?}");
    }

    #[test]
    fn more_transfers_of_a_store_than_its_share_wait() {
        let Ok(mut aio) = Aio::open() else { return println!("SKIP aio: the kernel has none") };
        let (counters, mut ended) = (Counters::default(), Vec::new());
        let file = Fd::file(tempfile::tempfile().unwrap().into());
        // Several segments, so that each transfer has vectors.
        let halves: Segments = [Segment::zeroed(512), Segment::zeroed(512)].into_iter().collect();
        let mut write = Op::write(&file, 0, &halves);
        write.may_wait_in_aio = true;
        let all = 2 * u64::from(MAX_TRANSFERS) + 5;
        (0..all).for_each(|key| aio.queue(key, &write));
        aio.submit(&counters, &mut ended, |_| &write);
        let share = SHARED_TRANSFERS / 2;
        assert_eq!((aio.queued(), aio.shares.counts()), (0, (share, all as usize - share)));
        while ended.len() < all as usize {
            let before = ended.len();
            aio.reap(&counters, &mut ended);
            ended[before..].iter().for_each(|_| aio.ended(&write));
            aio.submit(&counters, &mut ended, |_| &write);
        }
        ended.sort_unstable();
        assert!(ended.iter().map(|(key, _)| *key).eq(0..all), "each once");
        assert!(ended.iter().all(|(_, result)| *result == 1024), "{ended:?}");
        assert!(!aio.has_ended() && aio.in_flight == 0);
    }

    #[test]
    fn aio_that_was_refused_is_tried_again() {
        let mut aio = Aio::new().unwrap();
        let mut calls = 0;
        let mut ask = |aio: &mut Aio, answer: io::Result<AioContext>| {
            aio.prepare(|| {
                calls += 1;
                answer
            })
        };
        let no = || Err(io::Error::from_raw_os_error(libc::EAGAIN));
        for _ in 0..=RETRY_TRANSFERS {
            assert_eq!(ask(&mut aio, no()), Readiness::Refused);
        }
        assert_eq!(ask(&mut aio, Ok(AioContext::of_nothing())), Readiness::Opened);
        assert_eq!(ask(&mut aio, no()), Readiness::Ready);
        assert_eq!(calls, 2);
    }
}
