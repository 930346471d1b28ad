//! Pages of a guest's memory that are put into this process's page tables and taken out again.
//!
//! A [`Window`] is one mapping of the whole memory. A map of grants does the same work here as on Xen: it makes page table
//! entries for the pages (`MADV_POPULATE_*`). When the pages are given back, the entries are removed and the TLBs are
//! flushed (`MADV_DONTNEED`). The mapping itself stays, as Xen does not make or remove one either.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags};
use spile_mem::{Segment, Segments};
use spile_xen::XEN_PAGE_BYTES;

use super::remote::BATCH;

/// The calling process (PIDFD_SELF in linux/pidfd.h).
const PIDFD_SELF: libc::c_int = -10000;

thread_local! {
    /// Room for one call, kept so that it is allocated once.
    static VECTORS: RefCell<Vec<libc::iovec>> = const { RefCell::new(Vec::new()) };
}

/// A mapping of a file whose length is sealed.
pub(crate) struct Window {
    base: NonNull<u8>,
    len: usize,
    is_writable: bool,
}

// SAFETY: plain memory that lives as long as the window, reached by raw copies only.
unsafe impl Send for Window {}
// SAFETY: as for Send.
unsafe impl Sync for Window {}

/// Frames that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    first: u32,
    count: u32,
}

impl Window {
    /// Maps `len` bytes of `fd`, whose length is sealed and not below.
    pub fn new(fd: impl AsFd, len: usize, is_writable: bool) -> io::Result<Self> {
        let write = if is_writable { ProtFlags::WRITE } else { ProtFlags::empty() };
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choosing.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), len, ProtFlags::READ | write, flags, fd, 0)? };
        // SAFETY: the mapping just made. A guest's memory has no place in our core dump; nothing depends on it.
        let _ = unsafe { rustix::mm::madvise(base, len, Advice::LinuxDontDump) };
        let base = NonNull::new(base.cast()).expect("a mapping is never at address zero");
        Ok(Self { base, len, is_writable })
    }

    /// The address of the mapping.
    pub fn address(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// Makes a page inaccessible, for tests: every access to it faults.
    #[cfg(test)]
    pub fn forbid(&self, frame: u32) {
        let start = self.range(Run { first: frame, count: 1 });
        // SAFETY: a page of our own mapping; whoever touches it faults.
        unsafe {
            rustix::mm::mprotect(start.as_ptr().cast(), XEN_PAGE_BYTES, rustix::mm::MprotectFlags::empty()).unwrap();
        }
    }

    /// Puts the frames into the page tables, and returns one segment for each, in order. When the last segment is dropped,
    /// all are taken out together, and then `release` is dropped.
    ///
    /// # Panics
    /// When a frame is not inside the window.
    pub fn map(self: &Arc<Self>, frames: &[u32], release: impl Send + Sync + 'static) -> io::Result<Segments> {
        let owner = Arc::new(Mapped { runs: runs(frames), window: self.clone(), release });
        self.populate(&owner.runs)?;
        let mut segments = Segments::new();
        for frame in frames {
            let at = self.range(Run { first: *frame, count: 1 });
            // SAFETY: `range` has checked that the page is in the window, which the owner holds. In a window that is
            // not writable, whoever uses the segments only reads, as for any mapping that was asked for so.
            segments.push(unsafe { Segment::from_owner(at, XEN_PAGE_BYTES, owner.clone()) });
        }
        Ok(segments)
    }

    /// The start of a run that is inside the window.
    fn range(&self, run: Run) -> NonNull<u8> {
        let (start, len) = (run.first as usize * XEN_PAGE_BYTES, run.count as usize * XEN_PAGE_BYTES);
        assert!(start <= self.len && len <= self.len - start, "frames outside the window");
        // SAFETY: within the mapping, as just checked.
        unsafe { self.base.add(start) }
    }

    fn populate(&self, runs: &[Run]) -> io::Result<()> {
        let advice = if self.is_writable { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
        match self.advise(runs, advice) {
            // Kernels before 5.14 know no such advice: the pages come at the first touch.
            Ok(()) | Err(rustix::io::Errno::INVAL) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Gives advice about all runs, with one system call where the kernel can.
    fn advise(&self, runs: &[Run], advice: Advice) -> rustix::io::Result<()> {
        if runs.len() > 1 && self.advise_together(runs, advice) {
            return Ok(());
        }
        for run in runs {
            let (start, len) = (self.range(*run), run.count as usize * XEN_PAGE_BYTES);
            // SAFETY: pages of our own shared mapping of a file: the advice changes page tables, never the bytes.
            // Whoever still touches such a page gets it back by a fault.
            unsafe { rustix::mm::madvise(start.as_ptr().cast(), len, advice)? }
        }
        Ok(())
    }

    /// [`Window::advise`] with process_madvise(2) on ourselves, which takes any advice from Linux 6.15 on. False when
    /// it has not done all; it does no harm to do it again.
    fn advise_together(&self, runs: &[Run], advice: Advice) -> bool {
        VECTORS.with_borrow_mut(|vectors| {
            runs.chunks(BATCH).all(|batch| {
                vectors.clear();
                vectors.extend(batch.iter().map(|run| libc::iovec {
                    iov_base: self.range(*run).as_ptr().cast(),
                    iov_len: run.count as usize * XEN_PAGE_BYTES,
                }));
                let total: usize = vectors.iter().map(|vector| vector.iov_len).sum();
                let (list, count) = (vectors.as_ptr(), vectors.len());
                // SAFETY: as in `advise`; the list is alive for the time of the call.
                let done = unsafe {
                    libc::syscall(libc::SYS_process_madvise, PIDFD_SELF, list, count, advice as libc::c_int, 0)
                };
                usize::try_from(done) == Ok(total)
            })
        })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; every segment on it holds the window.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

struct Mapped<T> {
    runs: Vec<Run>,
    window: Arc<Window>,
    #[expect(dead_code, reason = "held for its drop, which comes after the pages are gone")]
    release: T,
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        let _ = self.window.advise(&self.runs, Advice::LinuxDontNeed);
    }
}

fn runs(frames: &[u32]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for frame in frames {
        match runs.last_mut() {
            Some(run) if run.first.checked_add(run.count) == Some(*frame) => run.count += 1,
            _ => runs.push(Run { first: *frame, count: 1 }),
        }
    }
    runs
}

/// Maps frames of a file whose length is sealed as one run of bytes, for both. When the last share of it is dropped it is
/// unmapped, and then `release` is dropped. For what happens once in a connection: each frame is a mapping of its own.
pub(crate) fn map_run(fd: BorrowedFd<'_>, frames: &[u32], release: impl Send + Sync + 'static) -> io::Result<Segment> {
    let len = frames.len() * XEN_PAGE_BYTES;
    // SAFETY: a new mapping at an address of the kernel's choosing.
    let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE)? };
    let base = NonNull::new(base.cast()).expect("a mapping is never at address zero");
    let owner = Arc::new(MappedRun { base, len, release });
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
    for (number, frame) in frames.iter().enumerate() {
        let offset = u64::from(*frame) * XEN_PAGE_BYTES as u64;
        // SAFETY: inside the range reserved above, which nobody else knows of yet.
        unsafe {
            let at = base.as_ptr().add(number * XEN_PAGE_BYTES);
            rustix::mm::mmap(at.cast(), XEN_PAGE_BYTES, prot, flags, fd, offset)?;
        }
    }
    // SAFETY: the owner holds the mapping, which has `len` bytes; its file cannot become shorter.
    Ok(unsafe { Segment::from_owner(base, len, owner) })
}

struct MappedRun<T> {
    base: NonNull<u8>,
    len: usize,
    #[expect(dead_code, reason = "held for its drop, which comes after the pages are gone")]
    release: T,
}

// SAFETY: plain memory that lives as long as the owner, reached by raw copies only.
unsafe impl<T: Send> Send for MappedRun<T> {}
// SAFETY: as for Send.
unsafe impl<T: Sync> Sync for MappedRun<T> {}

impl<T> Drop for MappedRun<T> {
    fn drop(&mut self) {
        // SAFETY: the range reserved in `map_run`, which every segment on it holds alive.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_run() {
        let run = |first, count| Run { first, count };
        assert_eq!(runs(&[3, 4, 5, 9, 8, u32::MAX, 0]), [run(3, 3), run(9, 1), run(8, 1), run(u32::MAX, 1), run(0, 1)]);
    }
}
