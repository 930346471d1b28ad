//! A context of Linux AIO: the kernel's side of [`crate::aio`], as thin as can be.
//!
//! The kernel maps a ring of events into the process for each context, and the context's number is the ring's address.
//! The ring can be read without a system call. Its layout is in fs/aio.c of Linux, and has not changed since Linux 2.6; fio and
//! QEMU read it too. Something that imitates Linux may have no such ring: then io_getevents is asked.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::shared::Counters;
use crate::sys::last_errno;

/// `struct iocb` of linux/aio_abi.h, on a little-endian machine.
#[repr(C)]
pub(crate) struct Iocb {
    pub(crate) data: u64,
    pub(crate) key: u32,
    pub(crate) rw_flags: i32,
    pub(crate) opcode: u16,
    pub(crate) priority: i16,
    pub(crate) fd: u32,
    pub(crate) address: u64,
    pub(crate) count: u64,
    pub(crate) offset: i64,
    pub(crate) reserved: u64,
    pub(crate) flags: u32,
    pub(crate) eventfd: u32,
}

/// `struct io_event` of linux/aio_abi.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IoEvent {
    data: u64,
    iocb: u64,
    result: i64,
    result2: i64,
}

/// `struct aio_ring` of fs/aio.c; its events come behind it.
#[repr(C)]
struct RingHead {
    id: u32,
    events: u32,
    /// The next event to read; written by the process.
    head: AtomicU32,
    /// Behind the last event; written by the kernel.
    tail: AtomicU32,
    magic: u32,
    compatible: u32,
    incompatible: u32,
    head_bytes: u32,
}

const RING_MAGIC: u32 = 0xa10a_10a1;
/// Mappings begin at pages of at least this size.
const PAGE_BYTES: libc::c_ulong = 4096;

/// A context that the kernel has made. It is destroyed with this value, which waits for the transfers in flight.
pub(crate) struct AioContext {
    id: libc::c_ulong,
    ring: Option<NonNull<RingHead>>,
}

// SAFETY: the kernel takes submissions from any thread. The events of the ring are taken by one thread only, which is the worker
// that made the context.
unsafe impl Send for AioContext {}
// SAFETY: as above.
unsafe impl Sync for AioContext {}

impl AioContext {
    /// Has the kernel make a context for `transfers` transfers at a time.
    ///
    /// # Errors
    /// The kernel's: AIO is forbidden, not built in, or used up by other processes.
    pub(crate) fn new(transfers: u32) -> io::Result<Self> {
        let mut id: libc::c_ulong = 0;
        // SAFETY: the out parameter is live.
        match unsafe { libc::syscall(libc::SYS_io_setup, transfers, &raw mut id) } {
            0 => Ok(Self { id, ring: ring_at(id) }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// A context that does not exist: destroying it does nothing.
    #[cfg(test)]
    pub(crate) fn of_nothing() -> Self {
        Self { id: 0, ring: None }
    }

    /// Starts the transfers that `blocks` describe, in their order, with one call. Returns how many were started.
    ///
    /// # Errors
    /// The errno for the first one; then none was started.
    ///
    /// # Safety
    /// What the blocks point to must stay until the end of each transfer that was started was reaped. Vectors need not:
    /// the kernel copies them.
    pub(crate) unsafe fn submit(&self, blocks: &mut [*mut Iocb]) -> Result<usize, i32> {
        let count = blocks.len() as libc::c_long;
        // SAFETY: the blocks are live during the call, which copies them; the rest is the caller's promise.
        let started = unsafe { libc::syscall(libc::SYS_io_submit, self.id, count, blocks.as_mut_ptr()) };
        usize::try_from(started).map_err(|_| last_errno())
    }

    /// True when the end of a transfer is noted in the ring.
    pub(crate) fn has_ended(&self) -> bool {
        self.ring().is_some_and(|ring| ring.head.load(Ordering::Relaxed) != ring.tail.load(Ordering::Acquire))
    }

    /// Puts each transfer that has ended into `ended`: its key, and the number of bytes or a negative errno.
    pub(crate) fn reap(&self, counters: &Counters, ended: &mut Vec<(u64, i32)>) {
        match self.ring() {
            Some(ring) => take_all(ring, ended),
            None => self.get_events(counters, ended),
        }
    }

    fn ring(&self) -> Option<&RingHead> {
        // SAFETY: the kernel keeps the ring mapped as long as the context lives. What the kernel changes in the head is
        // atomic here.
        self.ring.map(|ring| unsafe { ring.as_ref() })
    }

    fn get_events(&self, counters: &Counters, ended: &mut Vec<(u64, i32)>) {
        const BATCH: usize = 32;
        let mut events = [IoEvent::default(); BATCH];
        loop {
            let (least, most) = (0 as libc::c_long, BATCH as libc::c_long);
            let none = std::ptr::null_mut::<libc::timespec>();
            // SAFETY: the buffer is live and has the length given; with no event asked for, the call does not wait.
            let got = unsafe { libc::syscall(libc::SYS_io_getevents, self.id, least, most, events.as_mut_ptr(), none) };
            counters.enter();
            let count = usize::try_from(got).unwrap_or(0);
            ended.extend(events[..count].iter().map(|event| (event.data, event.result as i32)));
            if count < BATCH {
                return;
            }
        }
    }
}

impl Drop for AioContext {
    fn drop(&mut self) {
        // SAFETY: takes plain numbers. It returns when no transfer of this context is in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.id) };
    }
}

/// The ring of the context `id`; `None` when there is none that this code knows.
fn ring_at(id: libc::c_ulong) -> Option<NonNull<RingHead>> {
    if !id.is_multiple_of(PAGE_BYTES) {
        return None;
    }
    let ring = NonNull::new(id as *mut RingHead)?;
    // SAFETY: the number of a context that the kernel has just made is the address of its ring, which is a mapping.
    let head = unsafe { ring.as_ref() };
    let is_known = head.magic == RING_MAGIC && head.incompatible == 0 && head.events > 0;
    (is_known && head.head_bytes as usize == size_of::<RingHead>()).then_some(ring)
}

/// Moves all events of a ring to `ended`. Only one thread may do this at a time, and none may call io_getevents.
fn take_all(ring: &RingHead, ended: &mut Vec<(u64, i32)>) {
    let mut at = ring.head.load(Ordering::Relaxed);
    // The kernel writes the events before it moves the tail.
    let tail = ring.tail.load(Ordering::Acquire);
    if at == tail {
        return;
    }
    // SAFETY: the events lie behind the head of the ring, in the same mapping.
    let events = unsafe { std::ptr::from_ref(ring).add(1).cast::<IoEvent>() };
    while at != tail {
        // SAFETY: the kernel keeps both indices below the number of events. It writes to this event again only when the head
        // has moved past it.
        let event = unsafe { events.add(at as usize).read_volatile() };
        ended.push((event.data, event.result as i32));
        at = (at + 1) % ring.events;
    }
    ring.head.store(at, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_structures_have_the_kernels_sizes() {
        assert_eq!((size_of::<Iocb>(), size_of::<IoEvent>(), size_of::<RingHead>()), (64, 32, 32));
    }

    /// What a kernel without a known ring is asked.
    #[test]
    fn without_a_ring_the_kernel_is_asked() {
        let Ok(known) = AioContext::new(1) else { return println!("SKIP aio: the kernel has none") };
        assert!(known.ring.is_some(), "this kernel's ring is not known");
        let context = AioContext { ring: None, ..known };
        let file = tempfile::tempfile().unwrap();
        let mut block = Iocb {
            data: 7,
            key: 0,
            rw_flags: 0,
            opcode: 0,
            priority: 0,
            fd: std::os::fd::AsRawFd::as_raw_fd(&file) as u32,
            address: 0,
            count: 0,
            offset: 0,
            reserved: 0,
            flags: 0,
            eventfd: 0,
        };
        // SAFETY: a read of nothing.
        assert_eq!(unsafe { context.submit(&mut [&raw mut block]) }, Ok(1));
        let (counters, mut ended) = (Counters::default(), Vec::new());
        while ended.is_empty() {
            context.reap(&counters, &mut ended);
        }
        assert_eq!(ended, [(7, 0)]);
    }

    #[test]
    fn a_number_that_is_no_address_of_a_ring_is_not_read() {
        assert!(ring_at(0).is_none() && ring_at(7).is_none());
    }
}
