//! Memory shared with another process by a file: a guest's memory, a region of in-flight requests, a log of dirty
//! pages.
//!
//! The other process may shorten the file at any time. A touch of what is gone then raises SIGBUS, which would end this
//! process and with it the disks of all others. So the first mapping installs a handler: a fault inside a mapping puts
//! zeroed memory in the place of the whole mapping and marks it as lost ([`Segment::is_lost`]); its owner looks at the
//! mark and ends that connection. A fault anywhere else is handled as it was before. A SIGBUS that somebody has sent is no
//! fault, and nothing happens. System calls that meet the gap fail with EFAULT and need none of this.

use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::segment::Segment;

/// The bytes of all shared mappings together, and the most that they may have: half of what a process can address. A
/// front end that shares memory without end must leave some for the others.
static MAPPED_BYTES: AtomicUsize = AtomicUsize::new(0);
const MAX_MAPPED_BYTES: usize = 64 << 40;

/// A shared mapping of a file.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    guard: &'static Guard,
}

// SAFETY: plain memory that lives as long as the mapping, reached by raw copies and atomic operations only.
unsafe impl Send for Mapping {}
// SAFETY: as for Send.
unsafe impl Sync for Mapping {}

impl Segment {
    /// Maps `len` bytes of the file `fd` from `offset` (any byte), shared with whoever else maps it. Segments keep the
    /// mapping.
    ///
    /// # Errors
    /// `UnexpectedEof` when the file ends before the range does, `InvalidInput` when the range is empty or overflows,
    /// else what the system says.
    pub fn map_shared(fd: impl AsFd, offset: u64, len: usize) -> io::Result<Self> {
        Self::map(fd, offset, len, MapFlags::SHARED)
    }

    /// As [`Segment::map_shared`], but what is written to the memory stays there: the file may be open for reading only.
    ///
    /// # Errors
    /// As there.
    pub fn map_private(fd: impl AsFd, offset: u64, len: usize) -> io::Result<Self> {
        Self::map(fd, offset, len, MapFlags::PRIVATE)
    }

    fn map(fd: impl AsFd, offset: u64, len: usize, kind: MapFlags) -> io::Result<Self> {
        let stat = rustix::fs::fstat(&fd)?;
        let end = offset.checked_add(len as u64).filter(|end| len > 0 && *end <= i64::MAX as u64);
        let end = end.ok_or(io::ErrorKind::InvalidInput)?;
        if end > stat.st_size as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // On hugetlbfs this is the size of its pages, in which offset and length must be given.
        let unit = u64::try_from(stat.st_blksize).unwrap_or(4096).max(4096);
        let start = offset / unit * unit;
        let mapped_len =
            usize::try_from((end - start).next_multiple_of(unit)).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mapping = Arc::new(Mapping::new(fd, start, mapped_len, kind)?);
        let skip = (offset - start) as usize;
        let base = mapping.base;
        Ok(Self::from_mapping(base, mapped_len, mapping).slice(skip..skip + len))
    }
}

impl Mapping {
    fn new(fd: impl AsFd, start: u64, len: usize, kind: MapFlags) -> io::Result<Self> {
        install_handler()?;
        if MAPPED_BYTES.fetch_add(len, Ordering::Relaxed).saturating_add(len) > MAX_MAPPED_BYTES {
            MAPPED_BYTES.fetch_sub(len, Ordering::Relaxed);
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, "too much memory is shared with this process"));
        }
        Self::map(fd, start, len, kind).inspect_err(|_| {
            MAPPED_BYTES.fetch_sub(len, Ordering::Relaxed);
        })
    }

    fn map(fd: impl AsFd, start: u64, len: usize, kind: MapFlags) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choosing.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, kind | MapFlags::NORESERVE, fd, start)? };
        // SAFETY: the mapping just made. A guest's memory has no place in our core dump; nothing depends on it.
        let _ = unsafe { rustix::mm::madvise(base, len, Advice::LinuxDontDump) };
        let base = NonNull::new(base.cast()).expect("a mapping is never at address zero");
        Ok(Self { base, len, guard: Guard::take(base.as_ptr() as usize, len) })
    }

    /// True when a fault has replaced the memory.
    pub(crate) fn is_lost(&self) -> bool {
        self.guard.lost.load(Ordering::Relaxed)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard.release();
        // SAFETY: the mapping made in `new` (or the memory put in its place); every segment on it holds it alive.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        MAPPED_BYTES.fetch_sub(self.len, Ordering::Relaxed);
    }
}

/// One guarded range. Nodes are never freed, only used again: the handler walks their list at any moment.
struct Guard {
    /// Odd while the range is being changed, so that the handler never combines the start of one range with the length
    /// of another.
    version: AtomicUsize,
    start: AtomicUsize,
    /// 0 while the node is free.
    len: AtomicUsize,
    lost: AtomicBool,
    next: *const Guard,
}

// SAFETY: `next` is written once, before the node is published.
unsafe impl Send for Guard {}
// SAFETY: as for Send; the rest is atomic.
unsafe impl Sync for Guard {}

static GUARDS: AtomicPtr<Guard> = AtomicPtr::new(ptr::null_mut());
static FREE: Mutex<Vec<&'static Guard>> = Mutex::new(Vec::new());

impl Guard {
    fn take(start: usize, len: usize) -> &'static Self {
        let mut free = FREE.lock().unwrap_or_else(|e| e.into_inner());
        let guard = free.pop().unwrap_or_else(Self::append);
        guard.lost.store(false, Ordering::Relaxed);
        guard.set(start, len);
        guard
    }

    /// Adds a new node at the head of the list. The caller holds the lock on [`FREE`], so nobody else adds one.
    fn append() -> &'static Self {
        let next = GUARDS.load(Ordering::Relaxed);
        let guard = Box::leak(Box::new(Self {
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
            next,
        }));
        GUARDS.store(guard, Ordering::Release);
        guard
    }

    fn release(&'static self) {
        self.set(0, 0);
        FREE.lock().unwrap_or_else(|e| e.into_inner()).push(self);
    }

    /// Changes the range. Only the owner of the node may call this.
    fn set(&self, start: usize, len: usize) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(start, Ordering::SeqCst);
        self.len.store(len, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// The range, unless it is being changed at this moment. A range in which a fault happens is not being changed,
    /// because somebody uses it.
    fn range(&self) -> Option<(usize, usize)> {
        let version = self.version.load(Ordering::SeqCst);
        let (start, len) = (self.start.load(Ordering::SeqCst), self.len.load(Ordering::SeqCst));
        let is_whole = version.is_multiple_of(2) && self.version.load(Ordering::SeqCst) == version;
        is_whole.then_some((start, len))
    }

    /// Puts zeroed memory in the place of the range if `address` lies in it. Runs in the signal handler: atomics and
    /// one system call only.
    fn repair(&self, address: usize) -> bool {
        let Some((start, len)) = self.range() else { return false };
        if address < start || address - start >= len {
            return false;
        }
        self.lost.store(true, Ordering::Relaxed);
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let flags = flags | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: replaces a mapping of ours as a whole, which somebody is touching, so it is alive.
        unsafe { libc::mmap(start as *mut _, len, prot, flags, -1, 0) != libc::MAP_FAILED }
    }
}

static mut BEFORE: libc::sigaction =
    // SAFETY: a zeroed sigaction is the default one.
    unsafe { std::mem::zeroed() };

fn install_handler() -> io::Result<()> {
    static ONCE: Once = Once::new();
    let mut result = 0;
    ONCE.call_once(|| {
        // SAFETY: a zeroed sigaction is valid; the handler is async-signal-safe; `BEFORE` is written here only, before
        // the handler, its only reader, can run.
        result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_sigbus as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut BEFORE);
            libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut())
        };
    });
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

extern "C" fn on_sigbus(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo.
    let code = unsafe { (*info).si_code };
    if code <= 0 {
        // Somebody has sent it: SI_USER, SI_QUEUE, SI_TKILL. It neither ends the process nor takes its protection away.
        return;
    }
    // SAFETY: as above, and a SIGBUS of the kernel's has an address.
    let address = unsafe { (*info).si_addr() as usize };
    let mut guard = GUARDS.load(Ordering::Acquire).cast_const();
    // SAFETY: nodes are never freed, and complete before they are published.
    while let Some(node) = unsafe { guard.as_ref() } {
        if node.repair(address) {
            return;
        }
        guard = node.next;
    }
    // Not ours: as it was before. The fault comes again at once.
    // SAFETY: puts back what `install_handler` found.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const BEFORE, ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(len: u64) -> std::fs::File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        file
    }

    #[test]
    fn two_mappings_of_a_file_share_its_bytes() {
        let file = file(16384);
        let (a, b) = (Segment::map_shared(&file, 0, 16384), Segment::map_shared(&file, 5000, 100));
        let (a, b) = (a.unwrap(), b.unwrap());
        a.copy_from_slice(5001, b"guest");
        assert_eq!(b.read_array::<5>(1), *b"guest");
        a.store_u16(5002, 0xabcd, Ordering::Release);
        assert_eq!(b.load_u16(2, Ordering::Acquire), 0xabcd);
    }

    #[test]
    fn what_the_file_does_not_have_is_not_mapped() {
        let file = file(8192);
        let kind = |offset, len| Segment::map_shared(&file, offset, len).unwrap_err().kind();
        assert_eq!(kind(0, 8193), io::ErrorKind::UnexpectedEof);
        assert_eq!(kind(8192, 1), io::ErrorKind::UnexpectedEof);
        assert_eq!(kind(u64::MAX, 1), io::ErrorKind::InvalidInput);
        assert_eq!(kind(0, 0), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_file_cut_short_costs_its_mapping_only() {
        let (cut, whole) = (file(1 << 20), file(1 << 20));
        let lost = Segment::map_shared(&cut, 0, 1 << 20).unwrap();
        let kept = Segment::map_shared(&whole, 0, 1 << 20).unwrap();
        lost.fill(7);
        kept.fill(8);
        cut.set_len(4096).unwrap();
        assert!(!lost.is_lost());
        assert_eq!(lost.slice(8192..8200).to_vec(), [0; 8]);
        lost.slice(8192..8193).fill(1);
        assert!(lost.is_lost() && lost.slice(0..1).is_lost());
        assert!(!kept.is_lost());
        assert_eq!(kept.read_array::<2>(9000), [8, 8]);
        // The place in the list is used again, without the mark.
        drop(lost);
        assert!(!Segment::map_shared(&whole, 0, 4096).unwrap().is_lost());
    }

    #[test]
    fn a_signal_that_somebody_sends_neither_ends_the_process_nor_its_protection() {
        let cut = file(8192);
        let lost = Segment::map_shared(&cut, 0, 8192).unwrap();
        // SAFETY: the handler is installed, and this thread holds no lock.
        assert_eq!(unsafe { libc::raise(libc::SIGBUS) }, 0);
        assert!(!lost.is_lost());
        cut.set_len(0).unwrap();
        assert_eq!(lost.read_array::<2>(4096), [0, 0]);
        assert!(lost.is_lost());
    }
}
