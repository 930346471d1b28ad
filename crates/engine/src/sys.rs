//! The system calls of this crate, each behind a function that is safe to call. Results are `Result<_, errno>` on
//! the hot paths and `io::Error` elsewhere.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use smallvec::SmallVec;
use spile_mem::Segment;

use crate::op::{Kind, Op, Outcome};

/// The most vectors of one system call; more go to the next one.
pub(crate) const MAX_IOVECS: usize = 1024;
/// The most bytes of one system call; the kernel itself stops just under 2 GiB.
pub(crate) const MAX_TRANSFER: usize = 1 << 30;

/// The most that one call writes to the page cache, in bytes; the calls meet at multiples of it. The kernel keeps a file's bytes there in pieces as long as the calls that
/// brought them, and ext4 looks at each block of a piece when a part of it is written again: 4 KiB into a piece of 1 MiB took 25 µs of processor, into one of
/// 128 KiB 6 µs (Linux 6.18).
const CACHED_AT_ONCE: usize = 128 << 10;

/// The addresses and lengths of a scatter list. A few of them need no allocation.
pub(crate) type IoVecs = SmallVec<[libc::iovec; 4]>;

/// Describes the bytes of `segments` after the first `skip` in `out`, up to the limits of one system call.
pub(crate) fn fill_iovecs(segments: &[Segment], skip: usize, out: &mut IoVecs) {
    fill_up_to(MAX_TRANSFER, segments, skip, out);
}

/// As [`fill_iovecs`], with `room` bytes at most.
fn fill_up_to(mut room: usize, segments: &[Segment], mut skip: usize, out: &mut IoVecs) {
    out.clear();
    for segment in segments {
        if skip >= segment.len() {
            skip -= segment.len();
            continue;
        }
        let len = (segment.len() - skip).min(room);
        let base = segment.as_ptr().wrapping_add(skip).cast();
        out.push(libc::iovec { iov_base: base, iov_len: len });
        (skip, room) = (0, room - len);
        if out.len() == MAX_IOVECS || room == 0 {
            return;
        }
    }
}

pub(crate) fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// The result of a system call: its count, or the errno.
fn counted(result: isize) -> Result<usize, i32> {
    usize::try_from(result).map_err(|_| last_errno())
}

/// Repeats a call that a signal interrupted.
fn uninterrupted(mut call: impl FnMut() -> isize) -> Result<usize, i32> {
    loop {
        match counted(call()) {
            Err(libc::EINTR) => (),
            result => return result,
        }
    }
}

fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call before has just made this descriptor, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A blocking eventfd: io_uring reads wait on it, and so does epoll.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: takes plain numbers.
    owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) })
}

/// Rings an eventfd. This can fail only by overflow, and then the eventfd is rung already.
pub(crate) fn eventfd_write(fd: RawFd) {
    let one = 1u64;
    // SAFETY: the buffer is eight live bytes.
    let _ = unsafe { libc::write(fd, (&raw const one).cast(), 8) };
}

/// Rings an eventfd unless it is full, which means that it is rung already. Another process that shares it may fill it
/// between the two steps and set it to block, and then this would wait. So it is used only where no ring can do it.
pub(crate) fn ring_if_room(fd: RawFd) {
    let mut room = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: the pollfd is live.
    if unsafe { libc::poll(&raw mut room, 1, 0) } == 1 {
        eventfd_write(fd);
    }
}

/// Empties an eventfd without waiting, also when another process that shares it has set it to block. EAGAIN when it was empty;
/// EOPNOTSUPP before Linux 5.8, where no read of an eventfd can be told not to wait: then it stays as it is.
pub(crate) fn eventfd_drain(fd: RawFd) -> Outcome {
    let mut count = [0u8; 8];
    let iovec = libc::iovec { iov_base: count.as_mut_ptr().cast(), iov_len: 8 };
    // SAFETY: the vector describes eight live bytes.
    uninterrupted(|| unsafe { libc::preadv2(fd, &raw const iovec, 1, -1, libc::RWF_NOWAIT) })
}

/// Whether [`eventfd_drain`] can empty an eventfd on this kernel.
pub(crate) fn drains_eventfds() -> bool {
    static DRAINS: OnceLock<bool> = OnceLock::new();
    *DRAINS.get_or_init(|| eventfd().is_ok_and(|fd| eventfd_drain(fd.as_raw_fd()) == Err(libc::EAGAIN)))
}

/// Asks whether an eventfd has been rung: EAGAIN when it has not.
pub(crate) fn is_rung(fd: RawFd) -> Outcome {
    let mut rung = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: the pollfd is live.
    match uninterrupted(|| unsafe { libc::poll(&raw mut rung, 1, 0) as isize })? {
        0 => Err(libc::EAGAIN),
        _ => Ok(0),
    }
}

/// Empties an eventfd of our own that is known to be ringing.
pub(crate) fn eventfd_read(fd: RawFd) {
    let mut count = 0u64;
    // SAFETY: the buffer is eight live bytes.
    let _ = unsafe { libc::read(fd, (&raw mut count).cast(), 8) };
}

pub(crate) fn epoll_create() -> io::Result<OwnedFd> {
    // SAFETY: takes plain numbers.
    owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })
}

/// Adds a descriptor to an epoll set; `data` comes back with its events.
pub(crate) fn epoll_add(epoll: RawFd, fd: RawFd, events: i32, data: u64) -> io::Result<()> {
    let mut event = libc::epoll_event { events: events as u32, u64: data };
    // SAFETY: the event is live.
    match unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &raw mut event) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes a descriptor out of an epoll set, if it is in there.
pub(crate) fn epoll_delete(epoll: RawFd, fd: RawFd) {
    // SAFETY: no event is read for a deletion.
    unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
}

/// Waits at most `timeout_ms` (-1: without end) and returns how many of `events` were filled.
pub(crate) fn epoll_wait(epoll: RawFd, events: &mut [libc::epoll_event], timeout_ms: i32) -> usize {
    // SAFETY: the buffer is live and its length is passed with it.
    let count = unsafe { libc::epoll_wait(epoll, events.as_mut_ptr(), events.len() as i32, timeout_ms) };
    // An interrupted wait is a wait that found nothing.
    usize::try_from(count).unwrap_or(0)
}

/// The clock of the processor time that this thread uses, to be read on any thread while this one lives.
pub(crate) fn own_cpu_clock() -> io::Result<libc::clockid_t> {
    let mut clock = 0;
    // SAFETY: this thread lives, and the out parameter is live.
    match unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) } {
        0 => Ok(clock),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// The time of a clock in nanoseconds; `None` when it is the clock of a thread that has ended.
pub(crate) fn clock_ns(clock: libc::clockid_t) -> Option<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the out parameter is live.
    let result = unsafe { libc::clock_gettime(clock, &raw mut time) };
    (result == 0).then_some(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

fn msghdr(iovecs: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: a msghdr of zeroes is valid: no name, no vectors, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iovecs.as_mut_ptr();
    message.msg_iovlen = iovecs.len() as _;
    message
}

/// Sends what the socket takes at once of the bytes after the first `skip`.
pub(crate) fn try_send(fd: RawFd, parts: &[Segment], skip: usize) -> Outcome {
    let mut iovecs = IoVecs::new();
    fill_iovecs(parts, skip, &mut iovecs);
    let message = msghdr(&mut iovecs);
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the vectors describe segments that are borrowed, thus alive, during the call.
    uninterrupted(|| unsafe { libc::sendmsg(fd, &raw const message, flags) })
}

/// Receives what is there at once, behind the first `skip` bytes.
pub(crate) fn try_recv(fd: RawFd, into: &Segment, skip: usize) -> Outcome {
    let (ptr, len) = (into.as_ptr().wrapping_add(skip).cast(), into.len() - skip);
    // SAFETY: the segment is borrowed, thus alive, during the call.
    uninterrupted(|| unsafe { libc::recv(fd, ptr, len, libc::MSG_DONTWAIT) })
}

/// Takes a connection that waits on a non-blocking listening socket.
pub(crate) fn try_accept(fd: RawFd) -> Outcome {
    let null = std::ptr::null_mut();
    // SAFETY: no address is asked for.
    uninterrupted(|| unsafe { libc::accept4(fd, null, null.cast(), libc::SOCK_CLOEXEC) as isize })
}

/// Reads what can be read without waiting, such as what is in the page cache. EAGAIN when there is nothing.
pub(crate) fn read_nowait(fd: RawFd, offset: u64, into: &[Segment]) -> Outcome {
    let mut iovecs = IoVecs::new();
    fill_iovecs(into, 0, &mut iovecs);
    let (ptr, count, at) = (iovecs.as_ptr(), iovecs.len() as i32, offset as i64);
    // SAFETY: the vectors describe segments that are borrowed, thus alive, during the call.
    uninterrupted(|| unsafe { libc::preadv2(fd, ptr, count, at, libc::RWF_NOWAIT) })
}

/// Finds the end of the run of data, or of the hole, that `offset` is in: twice that offset, plus 1 for a hole. Everything after
/// `offset` is one run of data where the file system does not know. A hole up to the end of the file ends at `i64::MAX`.
fn find_extent(fd: RawFd, offset: u64) -> Outcome {
    // SAFETY: takes plain numbers.
    let seek = |whence| uninterrupted(|| unsafe { libc::lseek(fd, offset as i64, whence) as isize });
    let (until, all) = (|end: usize, is_hole: bool| end << 1 | usize::from(is_hole), i64::MAX as usize);
    match seek(libc::SEEK_DATA) {
        Ok(data) if data as u64 > offset => Ok(until(data, true)),
        // No data up to the end.
        Err(libc::ENXIO) => Ok(until(all, true)),
        Ok(_) => match seek(libc::SEEK_HOLE) {
            Ok(hole) if hole as u64 > offset => Ok(until(hole, false)),
            _ => Ok(until(all, false)),
        },
        Err(libc::EINVAL | libc::EOPNOTSUPP) => Ok(until(all, false)),
        Err(errno) => Err(errno),
    }
}

/// Does a file operation to its end, blocking this thread.
pub(crate) fn run_file_op(op: &mut Op) -> Outcome {
    match op.kind {
        Kind::Extent => return find_extent(op.fd.raw(), op.offset),
        Kind::Sync => return file_call(op).map(|_| file_len(op)),
        Kind::Len => return Ok(file_len(op)),
        _ => (),
    }
    loop {
        match op.advance(file_call(op)?) {
            None => (),
            Some(outcome) => return outcome,
        }
    }
}

/// The length of a file, as far as this host knows it; `usize::MAX` where it cannot be told.
fn file_len(op: &Op) -> usize {
    use rustix::fs::{AtFlags, StatxFlags, statx};
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    statx(&*op.fd, c"", flags, StatxFlags::SIZE).map_or(usize::MAX, |stat| stat.stx_size as usize)
}

/// One system call of a file operation.
fn file_call(op: &Op) -> Outcome {
    let (fd, at) = (op.fd.raw(), op.offset as i64 + op.done as i64);
    let mut iovecs = IoVecs::new();
    let room = match op.kind {
        Kind::Write if !op.fd.direct => CACHED_AT_ONCE - at as usize % CACHED_AT_ONCE,
        _ => MAX_TRANSFER,
    };
    fill_up_to(room, op.segments.as_slice(), op.done, &mut iovecs);
    let (ptr, count) = (iovecs.as_ptr(), iovecs.len() as i32);
    // SAFETY: the vectors describe the segments of the operation, borrowed for the call; all else is numbers.
    let call = || unsafe {
        match op.kind {
            Kind::Read => libc::preadv(fd, ptr, count, at),
            Kind::Write => libc::pwritev(fd, ptr, count, at),
            Kind::Sync => libc::fdatasync(fd) as isize,
            Kind::Fallocate(mode) => libc::fallocate(fd, mode, op.offset as i64, op.len as i64) as isize,
            Kind::Truncate => libc::ftruncate(fd, op.len as i64) as isize,
            _ => unreachable!("not a file operation"),
        }
    };
    uninterrupted(call)
}

/// Writes back what is not written back yet of a range, and waits for it (sync_file_range(2)).
pub(crate) const WHOLE_WRITE_BACK: u32 =
    libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;

/// Calls sync_file_range(2) with these flags.
pub(crate) fn sync_file_range(fd: RawFd, range: &Range<u64>, flags: u32) -> Outcome {
    let (offset, len) = (range.start as i64, (range.end - range.start) as i64);
    // SAFETY: takes plain numbers.
    uninterrupted(|| unsafe { libc::sync_file_range(fd, offset, len, flags) as isize })
}

/// Closes the descriptor of an accepted connection for which nobody waits any more.
pub(crate) fn close_unclaimed(fd: usize) {
    // SAFETY: the kernel has just given this descriptor to an accept whose caller is gone.
    drop(unsafe { OwnedFd::from_raw_fd(fd as RawFd) });
}

/// Sets O_NONBLOCK.
pub(crate) fn set_nonblocking(fd: &impl AsRawFd) -> io::Result<()> {
    let fd = fd.as_raw_fd();
    // SAFETY: takes plain numbers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: as above.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use spile_mem::Segments;

    use super::*;

    fn lens(segments: &[Segment], skip: usize) -> Vec<usize> {
        lens_up_to(MAX_TRANSFER, segments, skip)
    }

    fn lens_up_to(room: usize, segments: &[Segment], skip: usize) -> Vec<usize> {
        let mut out = IoVecs::new();
        fill_up_to(room, segments, skip, &mut out);
        out.iter().map(|v| v.iov_len).collect()
    }

    #[test]
    fn a_call_takes_no_more_than_it_may() {
        let list = [Segment::zeroed(3), Segment::zeroed(5), Segment::zeroed(4)];
        let up_to = |room, skip| lens_up_to(room, &list, skip);
        assert_eq!([up_to(4, 0), up_to(4, 4), up_to(4, 8), up_to(9, 3)], [vec![3, 1], vec![4], vec![4], vec![5, 4]]);
    }

    #[test]
    fn long_writes_to_the_page_cache_come_to_their_end() {
        let file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..CACHED_AT_ONCE * 3).map(|at| (at / 512) as u8).collect();
        let segments: Segments =
            [Segment::zeroed(CACHED_AT_ONCE + 5), Segment::zeroed(CACHED_AT_ONCE * 2 - 5)].into_iter().collect();
        segments.copy_from_slice(0, &bytes);
        let fd = crate::fd::Fd::file(file.try_clone().unwrap().into());
        assert_eq!(run_file_op(&mut Op::write(&fd, 700, &segments)), Ok(bytes.len()));
        let mut read = vec![0; bytes.len()];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut read, 700).unwrap();
        assert!(read == bytes);
    }

    #[test]
    fn vectors_start_where_the_last_call_ended() {
        let list = [Segment::zeroed(3), Segment::zeroed(5), Segment::zeroed(4)];
        assert_eq!(lens(&list, 0), [3, 5, 4]);
        assert_eq!(lens(&list, 3), [5, 4]);
        assert_eq!(lens(&list, 7), [1, 4]);
        assert_eq!(lens(&list, 12), [0; 0]);
    }

    #[test]
    fn vectors_keep_to_the_kernels_limit() {
        let segment = Segment::zeroed(1);
        let list: Vec<_> = (0..MAX_IOVECS + 7).map(|_| segment.clone()).collect();
        assert_eq!(lens(&list, 0).len(), MAX_IOVECS);
        assert_eq!(lens(&list, MAX_IOVECS).len(), 7);
    }
}
