//! Direct writes that need space on the file system, by Linux AIO (io_submit).
//!
//! io_uring does not do such a write itself. With RWF_NOWAIT it answers EAGAIN; without that flag it gives the write to
//! a kernel thread, and once such a thread was needed, it wakes every five seconds for as long as the ring lives. A
//! helper thread that calls pwritev keeps the file system's lock on the file until the device has answered, and all
//! other writes into holes wait meanwhile. fallocate before the write is no better: on ext4 it first waits for every
//! direct transfer of that file.
//!
//! io_submit does what is needed: it allocates the bytes of the write and no others, starts the transfer, releases the
//! lock and returns. All writes of a turn go to the kernel in one call. The end of each write is announced by an
//! eventfd, which the ring reads.
//!
//! When the process is killed, the kernel waits for these transfers before it closes the process's files, so the locks on
//! the files last as long as the transfers. The kernel does not wait while another process shares the memory, as the
//! child of vfork does until it calls exec. Each transfer keeps its own descriptor open, though, so that descriptor is
//! locked, too (see the module `lock`).
//!
//! io_submit makes the worker wait where the file system makes every writer wait: while it is frozen, while it reads its
//! maps of free space, and until the device has answered for a write past the end of the file or for a part of a file
//! system block in a hole.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use crate::shared::Counters;
use crate::sys::{self, IoVecs, last_errno};

/// The most writes of one worker that are in the kernel at a time; more go to helper threads. The system has a limit
/// for all processes together (`fs.aio-max-nr`, usually 65536).
const MAX_WRITES: u32 = 256;

/// `struct iocb` of linux/aio_abi.h, on a little-endian machine.
#[repr(C)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: i32,
    opcode: u16,
    priority: i16,
    fd: u32,
    address: u64,
    count: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

const IOCB_CMD_PWRITEV: u16 = 8;
const IOCB_FLAG_RESFD: u32 = 1;

/// `struct io_event` of linux/aio_abi.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IoEvent {
    data: u64,
    iocb: u64,
    result: i64,
    result2: i64,
}

/// How many writes go to helper threads after AIO was refused, before it is tried again.
const RETRY_WRITES: u32 = 1024;

/// Linux AIO as one worker uses it.
pub(crate) struct Aio {
    context: Context,
    /// The eventfd that the kernel rings at the end of each write. It is made with the worker, so that a worker's number
    /// of descriptors does not depend on what it writes.
    bell: OwnedFd,
    /// The memory into which the ring reads the eventfd's count.
    count: Box<u64>,
    queued: Vec<Iocb>,
}

/// The kernel's context for the writes of one worker. It is made when the first write needs it.
enum Context {
    Untried,
    Open(libc::c_ulong),
    /// The kernel has refused one, and so many writes have asked since.
    Refused(u32),
}

/// Whether a write can go by AIO.
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
        Ok(Self { context: Context::Untried, bell: sys::eventfd()?, count: Box::new(0), queued: Vec::new() })
    }

    /// Tells whether a write can be queued. Makes the context by `set_up` if there is none; after a refusal that is tried
    /// again for one write in [`RETRY_WRITES`].
    pub(crate) fn prepare(&mut self, set_up: impl FnOnce() -> io::Result<libc::c_ulong>) -> Readiness {
        match &mut self.context {
            Context::Open(_) => return Readiness::Ready,
            Context::Refused(writes) if *writes < RETRY_WRITES => {
                *writes += 1;
                return Readiness::Refused;
            }
            Context::Untried | Context::Refused(_) => {}
        }
        match set_up() {
            Ok(context) => {
                self.context = Context::Open(context);
                Readiness::Opened
            }
            Err(error) => {
                warn_once(&error);
                self.context = Context::Refused(0);
                Readiness::Refused
            }
        }
    }

    /// The eventfd, and the memory into which its count is to be read.
    pub(crate) fn bell(&mut self) -> (RawFd, *mut u64) {
        (self.bell.as_raw_fd(), &raw mut *self.count)
    }

    /// True when a write is queued.
    pub(crate) fn has_queued(&self) -> bool {
        !self.queued.is_empty()
    }

    /// Queues a write of the bytes that `iovecs` describes. The vectors and the bytes must not move until the write has
    /// ended.
    pub(crate) fn queue(&mut self, key: u64, fd: RawFd, offset: u64, iovecs: &IoVecs) {
        self.queued.push(Iocb {
            data: key,
            key: 0,
            rw_flags: 0,
            opcode: IOCB_CMD_PWRITEV,
            priority: 0,
            fd: fd as u32,
            address: iovecs.as_ptr() as u64,
            count: iovecs.len() as u64,
            offset: offset as i64,
            reserved: 0,
            flags: IOCB_FLAG_RESFD,
            eventfd: self.bell.as_raw_fd() as u32,
        });
    }

    /// Starts the queued writes. Returns the keys of those that the kernel has refused.
    pub(crate) fn submit(&mut self, counters: &Counters) -> impl Iterator<Item = u64> {
        let mut started = 0;
        while started < self.queued.len() {
            counters.enter();
            match self.submit_from(started) {
                Ok(count) if count > 0 => started += count,
                Err(libc::EINTR) => (),
                _ => break,
            }
        }
        counters.submitted_to_aio(started as u64);
        self.queued.drain(..started);
        self.queued.drain(..).map(|iocb| iocb.data)
    }

    /// Starts the queued writes from number `first` on with one call. Returns how many were started.
    fn submit_from(&mut self, first: usize) -> Result<usize, i32> {
        let Context::Open(context) = self.context else { return Ok(0) };
        let mut pointers: smallvec::SmallVec<[*mut Iocb; 32]> =
            self.queued[first..].iter_mut().map(std::ptr::from_mut).collect();
        let count = pointers.len().min(MAX_WRITES as usize);
        // SAFETY: the control blocks are live for the call, which copies them and the vectors. What the vectors
        // describe is owned by the operation in the ring's slot, which stays until the end of the write is reaped, and
        // `drop` waits for what is not reaped.
        let started =
            unsafe { libc::syscall(libc::SYS_io_submit, context, count as libc::c_long, pointers.as_mut_ptr()) };
        usize::try_from(started).map_err(|_| last_errno())
    }

    /// Puts each write that has ended into `ended`: its key, and the bytes written or a negative errno.
    pub(crate) fn reap(&self, counters: &Counters, ended: &mut Vec<(u64, i32)>) {
        const BATCH: usize = 32;
        let Context::Open(context) = self.context else { return };
        let mut events = [IoEvent::default(); BATCH];
        loop {
            let none = std::ptr::null_mut::<libc::timespec>();
            // SAFETY: the buffer is live and has the length given; with no event asked for, the call does not wait.
            let got = unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    context,
                    0 as libc::c_long,
                    BATCH as libc::c_long,
                    events.as_mut_ptr(),
                    none,
                )
            };
            let count = usize::try_from(got).unwrap_or(0);
            counters.enter();
            counters.completed(count as u64);
            ended.extend(events[..count].iter().map(|event| (event.data, event.result as i32)));
            if count < BATCH {
                return;
            }
        }
    }
}

/// Has the kernel make a context for [`MAX_WRITES`] writes.
///
/// # Errors
/// The kernel's: AIO is forbidden, not built in, or used up by other processes.
pub(crate) fn set_up() -> io::Result<libc::c_ulong> {
    let mut context: libc::c_ulong = 0;
    // SAFETY: the out parameter is live.
    match unsafe { libc::syscall(libc::SYS_io_setup, MAX_WRITES, &raw mut context) } {
        0 => Ok(context),
        _ => Err(io::Error::last_os_error()),
    }
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

impl Drop for Aio {
    fn drop(&mut self) {
        if let Context::Open(context) = self.context {
            // SAFETY: takes plain numbers. It returns when no write of this context is in flight.
            unsafe { libc::syscall(libc::SYS_io_destroy, context) };
        }
        // The ring's read of the bell is cancelled when the ring is closed, which may take effect later.
        std::mem::forget(std::mem::take(&mut self.count));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_structures_have_the_kernels_sizes() {
        assert_eq!((size_of::<Iocb>(), size_of::<IoEvent>()), (64, 32));
    }

    #[test]
    fn what_the_kernel_does_not_take_comes_back() {
        let (mut aio, counters) = (Aio::new().unwrap(), Counters::default());
        if aio.prepare(set_up) == Readiness::Refused {
            return println!("SKIP aio: the kernel has none");
        }
        let iovecs = IoVecs::new();
        let file = tempfile::tempfile().unwrap();
        // No vectors: a write of nothing, which ends well. A descriptor that is not open is refused at once.
        aio.queue(1, file.as_raw_fd(), 0, &iovecs);
        aio.queue(2, -1, 0, &iovecs);
        aio.queue(3, file.as_raw_fd(), 0, &iovecs);
        assert_eq!(aio.submit(&counters).collect::<Vec<_>>(), [2, 3]);
        let mut ended = Vec::new();
        while ended.is_empty() {
            aio.reap(&counters, &mut ended);
        }
        assert_eq!(ended, [(1, 0)]);
        let stats = counters.read();
        assert_eq!((stats.aio_writes, stats.sqes, stats.cqes), (1, 1, 1));
        // One call started the first, one was refused with the second in front, and one or more asked for the end.
        assert!(stats.enters >= 3, "{stats:?}");
    }

    #[test]
    fn aio_that_was_refused_is_tried_again() {
        let mut aio = Aio::new().unwrap();
        let mut calls = 0;
        let mut ask = |aio: &mut Aio, answer: io::Result<libc::c_ulong>| {
            aio.prepare(|| {
                calls += 1;
                answer
            })
        };
        let no = || Err(io::Error::from_raw_os_error(libc::EAGAIN));
        for _ in 0..=RETRY_WRITES {
            assert_eq!(ask(&mut aio, no()), Readiness::Refused);
        }
        // The number of a context that does not exist: closing it does nothing.
        assert_eq!(ask(&mut aio, Ok(0)), Readiness::Opened);
        assert_eq!(ask(&mut aio, no()), Readiness::Ready);
        assert_eq!(calls, 2);
    }
}
