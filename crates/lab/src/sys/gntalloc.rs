//! The device files by which a program on a real Xen can be a front end: /dev/xen/gntalloc for pages that it grants, and
//! /dev/xen/evtchn for event channels that the other side binds to. The numbers and structures are those of
//! include/uapi/xen/gntalloc.h and evtchn.h.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MapFlags, ProtFlags};
use spile_core::{Error, Result};
use spile_mem::Segment;
use spile_xen::{DomId, GrantRef, Port, XEN_PAGE_BYTES};

const GNTALLOC: &str = "/dev/xen/gntalloc";
const EVTCHN: &str = "/dev/xen/evtchn";

/// struct ioctl_gntalloc_alloc_gref; more numbers follow the first.
#[repr(C)]
struct AllocGref {
    domid: u16,
    flags: u16,
    count: u32,
    index: u64,
    refs: [u32; 1],
}

/// struct ioctl_gntalloc_dealloc_gref.
#[repr(C)]
struct DeallocGref {
    index: u64,
    count: u32,
}

/// struct ioctl_evtchn_bind_unbound_port, and ioctl_evtchn_notify.
type Number = u32;

/// GNTALLOC_FLAG_WRITABLE.
const WRITABLE: u16 = 1;
const ALLOC_GREF: u32 = request(b'G', 5, size_of::<AllocGref>());
const DEALLOC_GREF: u32 = request(b'G', 6, size_of::<DeallocGref>());
const BIND_UNBOUND_PORT: u32 = request(b'E', 2, size_of::<Number>());
const NOTIFY: u32 = request(b'E', 4, size_of::<Number>());

/// The index of the first grant reference in an [`AllocGref`], in words of 8 bytes.
const REFS_WORD: usize = offset_of!(AllocGref, refs) / 8;

const _: () = {
    assert!(size_of::<AllocGref>() == 24 && offset_of!(AllocGref, index) == 8 && REFS_WORD == 2);
    assert!(size_of::<DeallocGref>() == 16 && offset_of!(DeallocGref, count) == 8);
};

/// The number of a call: _IOC(_IOC_NONE, device, number, bytes of the argument).
const fn request(device: u8, number: u8, argument_bytes: usize) -> u32 {
    (argument_bytes as u32) << 16 | (device as u32) << 8 | number as u32
}

/// Calls a device with the address of an argument.
///
/// # Safety
/// `argument` is what `request` takes: as long, and writable where the device writes.
unsafe fn call<T>(device: &File, request: u32, argument: *mut T) -> io::Result<u32> {
    // SAFETY: the descriptor is open as long as it is borrowed; the argument is right by this function's contract.
    let answer = unsafe { libc::ioctl(device.as_raw_fd(), request as libc::Ioctl, argument.cast::<u8>()) };
    u32::try_from(answer).map_err(|_| io::Error::last_os_error())
}

fn open(path: &Path, flags: i32) -> Result<File> {
    let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    opened.map_err(|e| Error::io("open the device", e).at_path(path))
}

/// Memory that this domain grants to others.
#[derive(Clone, Debug)]
pub struct Gntalloc {
    device: Arc<File>,
}

impl Gntalloc {
    /// Opens the device. It grants at most 1024 pages for all programs together.
    ///
    /// # Errors
    /// When /dev/xen/gntalloc cannot be opened.
    pub fn open() -> Result<Self> {
        Self::open_at(Path::new(GNTALLOC))
    }

    fn open_at(path: &Path) -> Result<Self> {
        Ok(Self { device: Arc::new(open(path, 0)?) })
    }

    /// Allocates pages, zeroed, and grants them to `domain`, which need not exist.
    ///
    /// # Errors
    /// `NoSpace` when the device grants too many pages already; else the system's error.
    ///
    /// # Panics
    /// When `pages` is zero.
    pub fn grant(&self, domain: DomId, pages: u32, is_writable: bool) -> Result<Granted> {
        assert!(pages > 0, "a grant of no pages");
        let flags = if is_writable { WRITABLE } else { 0 };
        let header = u64::from(domain.0) | u64::from(flags) << 16 | u64::from(pages) << 32;
        let mut words = vec![header; REFS_WORD + (pages as usize).div_ceil(2)];
        // SAFETY: the argument of this call, with room for as many numbers as it says.
        unsafe { call(&self.device, ALLOC_GREF, words.as_mut_ptr()) }
            .map_err(|e| Error::io(format!("grant {pages} pages to domain {domain}"), e))?;
        let numbers = words[REFS_WORD..].iter().flat_map(|word| [*word as u32, (*word >> 32) as u32]);
        let refs = numbers.take(pages as usize).map(GrantRef).collect();
        let index = words[offset_of!(AllocGref, index) / 8];
        let pages = Pages::new(self.device.clone(), index, pages).map_err(|e| Error::io("map granted pages", e))?;
        Ok(Granted { refs, bytes: pages.into_segment() })
    }
}

/// Granted pages. The grants end when this value is dropped. The kernel keeps pages that the other domain has mapped
/// until they are unmapped.
#[derive(Debug)]
pub struct Granted {
    /// The grant references, by which the other domain names the pages.
    pub refs: Vec<GrantRef>,
    /// The bytes of the pages.
    pub bytes: Segment,
}

/// The mapping of pages that the device has made.
struct Pages {
    device: Arc<File>,
    /// The device's number for the pages. It is also their offset in the device, in bytes.
    index: u64,
    count: u32,
    base: NonNull<u8>,
}

// SAFETY: plain memory that lives as long as the mapping; segments reach it by raw copies and atomic operations only.
unsafe impl Send for Pages {}
// SAFETY: as for Send.
unsafe impl Sync for Pages {}

impl Pages {
    fn new(device: Arc<File>, index: u64, count: u32) -> io::Result<Self> {
        let (prot, len) = (ProtFlags::READ | ProtFlags::WRITE, count as usize * XEN_PAGE_BYTES);
        // SAFETY: a new mapping at an address of the kernel's choosing.
        let mapped = unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, &device, index) };
        let base = mapped.map(|base| NonNull::new(base.cast()).expect("a mapping is never at address zero"));
        match base {
            Ok(base) => Ok(Self { device, index, count, base }),
            Err(errno) => {
                forget(&device, index, count);
                Err(errno.into())
            }
        }
    }

    fn into_segment(self) -> Segment {
        let (base, len) = (self.base, self.count as usize * XEN_PAGE_BYTES);
        // SAFETY: these bytes are mapped until `self` is dropped, which the segment keeps.
        unsafe { Segment::from_owner(base, len, Arc::new(self)) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; the segment on it has held it alive until now.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.count as usize * XEN_PAGE_BYTES) };
        forget(&self.device, self.index, self.count);
    }
}

/// Revokes grants. The device does that for all when it is closed, too.
fn forget(device: &File, index: u64, count: u32) {
    let mut argument = DeallocGref { index, count };
    // SAFETY: the argument of this call, which the device only reads.
    let _ = unsafe { call(device, DEALLOC_GREF, &raw mut argument) };
}

/// An event channel that another domain may bind to. It is closed when this is dropped.
#[derive(Debug)]
pub struct UnboundPort {
    device: File,
    port: Port,
}

impl UnboundPort {
    /// Makes one for `domain`.
    ///
    /// # Errors
    /// When /dev/xen/evtchn cannot be opened, or makes none.
    pub fn new(domain: DomId) -> Result<Self> {
        Self::new_at(Path::new(EVTCHN), domain)
    }

    fn new_at(path: &Path, domain: DomId) -> Result<Self> {
        let device = open(path, libc::O_NONBLOCK)?;
        let mut argument: Number = domain.0.into();
        // SAFETY: the argument of this call, which the device only reads.
        let port = unsafe { call(&device, BIND_UNBOUND_PORT, &raw mut argument) };
        let port =
            port.map_err(|e| Error::io(format!("make an event channel for domain {domain}"), e).at_path(path))?;
        Ok(Self { device, port: Port(port) })
    }

    /// The channel's port.
    pub fn port(&self) -> Port {
        self.port
    }

    /// Signals the other domain. Nothing happens when no domain is bound to the channel.
    pub fn notify(&self) {
        let mut argument: Number = self.port.0;
        // SAFETY: the argument of this call, which the device only reads.
        let _ = unsafe { call(&self.device, NOTIFY, &raw mut argument) };
    }

    /// Waits for a signal of the other domain, at most for `limit`. Takes all signals that have come. False when none came.
    ///
    /// # Errors
    /// The system's error.
    pub fn wait(&self, limit: Duration) -> Result<bool> {
        let failed = |e: io::Error| Error::io("wait for an event channel", e);
        let limit = Timespec::try_from(limit).expect("a limit is short");
        let ready = poll(&mut [PollFd::new(&self.device, PollFlags::IN)], Some(&limit));
        if ready.map_err(|errno| failed(errno.into()))? == 0 {
            return Ok(false);
        }
        let mut rung = [0; 4];
        (&self.device).read_exact(&mut rung).map_err(failed)?;
        // The number that is written back lets the next ring through.
        (&self.device).write_all(&rung).map_err(failed)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_header_files() {
        assert_eq!((ALLOC_GREF, DEALLOC_GREF), (0x0018_4705, 0x0010_4706));
        assert_eq!((BIND_UNBOUND_PORT, NOTIFY), (0x0004_4502, 0x0004_4504));
    }

    /// A file in the device's place: its pages are mapped as granted ones are.
    #[test]
    fn pages_are_mapped_until_the_segment_goes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().write_all_at(&[7; 3 * XEN_PAGE_BYTES], 0).unwrap();
        let device = Arc::new(file.reopen().unwrap());
        let segment = Pages::new(device, XEN_PAGE_BYTES as u64, 2).unwrap().into_segment();
        let is_mapped = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().any(|line| line.ends_with(file.path().to_str().unwrap()))
        };
        assert_eq!((segment.len(), segment.read_array(XEN_PAGE_BYTES), is_mapped()), (8192, [7u8, 7], true));
        drop(segment);
        assert!(!is_mapped());
    }

    #[test]
    fn what_a_device_refuses_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = Gntalloc::open_at(file.path()).unwrap().grant(DomId(3), 2, true).unwrap_err();
        assert!(error.to_string().contains("grant 2 pages to domain 3"), "{error}");
        let error = UnboundPort::new_at(file.path(), DomId(3)).unwrap_err();
        assert!(error.to_string().contains("make an event channel for domain 3"), "{error}");
    }
}
