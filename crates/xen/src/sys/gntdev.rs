//! Granted pages through /dev/xen/gntdev: copied by the hypervisor, or mapped.
//!
//! IOCTL_GNTDEV_SET_MAX_GRANTS is not called. In Xen's own old kernels it raised a limit for each open file. The driver
//! in Linux does not know the call, although the header still has it. There the limit is the module's parameter `limit`
//! (65536): for all mapped pages together, or in newer kernels for the pages of one call.

use std::cell::RefCell;
use std::fs::File;
use std::mem::offset_of;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags};
use spile_core::{Error, ErrorKind, Result};
use spile_mem::{Segment, Segments};

use super::{call, open_device, request};
use crate::{CopyOp, DomId, GrantRef, GrantStatus, Grants, Way, XEN_PAGE_BYTES};

const DEVICE: &str = "/dev/xen/gntdev";
const MODULE: &str = "xen-gntdev";

/// struct ioctl_gntdev_grant_ref.
#[repr(C)]
#[derive(Clone, Copy)]
struct MapRef {
    domid: u32,
    gref: u32,
}

/// struct ioctl_gntdev_map_grant_ref; more entries follow the first.
#[repr(C)]
struct MapGrantRef {
    count: u32,
    pad: u32,
    index: u64,
    refs: [MapRef; 1],
}

/// struct ioctl_gntdev_unmap_grant_ref.
#[repr(C)]
struct UnmapGrantRef {
    index: u64,
    count: u32,
    pad: u32,
}

/// struct gntdev_grant_copy_segment.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CopySegment {
    /// Source and destination: each is an address in our memory, or a place in a granted page ([`foreign`]).
    source: u64,
    dest: u64,
    len: u16,
    flags: u16,
    status: i16,
}

/// struct ioctl_gntdev_grant_copy.
#[repr(C)]
struct GrantCopy {
    count: u32,
    segments: *mut CopySegment,
}

/// GNTCOPY_source_gref: the source is in a granted page.
const SOURCE_IS_GRANT: u16 = 1;
/// GNTCOPY_dest_gref: the destination is in a granted page.
const DEST_IS_GRANT: u16 = 2;

const MAP_GRANT_REF: u32 = request(b'G', 0, size_of::<MapGrantRef>());
const UNMAP_GRANT_REF: u32 = request(b'G', 1, size_of::<UnmapGrantRef>());
const GRANT_COPY: u32 = request(b'G', 8, size_of::<GrantCopy>());

/// Where the entries of a [`MapGrantRef`] begin, in words of 8 bytes.
const MAP_HEADER_WORDS: usize = offset_of!(MapGrantRef, refs) / 8;

const _: () = {
    assert!(size_of::<MapGrantRef>() == 24 && offset_of!(MapGrantRef, index) == 8 && MAP_HEADER_WORDS == 2);
    assert!(size_of::<MapRef>() == 8 && offset_of!(MapRef, gref) == 4);
    assert!(size_of::<UnmapGrantRef>() == 16 && offset_of!(UnmapGrantRef, count) == 8);
    assert!(size_of::<CopySegment>() == 24 && offset_of!(CopySegment, dest) == 8);
    assert!(offset_of!(CopySegment, len) == 16 && offset_of!(CopySegment, status) == 20);
    assert!(size_of::<GrantCopy>() == 16 && offset_of!(GrantCopy, segments) == 8);
};

thread_local! {
    /// The pieces of one call. The list keeps its room, so that a copy allocates nothing. Each thread has its own list,
    /// so that no thread waits for another.
    static PIECES: RefCell<Vec<CopySegment>> = const { RefCell::new(Vec::new()) };
}

/// The pages that guests have granted to this domain.
#[derive(Debug)]
pub struct Gntdev {
    device: Arc<File>,
    path: PathBuf,
}

impl Gntdev {
    /// Opens /dev/xen/gntdev.
    ///
    /// # Errors
    /// When it cannot be opened; the message says what to do. `Unsupported` when the pages of this kernel do not have
    /// the size of Xen's.
    pub fn open() -> Result<Self> {
        Self::open_at(Path::new(DEVICE))
    }

    fn open_at(path: &Path) -> Result<Self> {
        if rustix::param::page_size() != XEN_PAGE_BYTES {
            let message = format!(
                "this kernel's pages have {} bytes, and Xen's have {XEN_PAGE_BYTES}",
                rustix::param::page_size()
            );
            return Err(Error::new(ErrorKind::Unsupported, message).at_path(path));
        }
        Ok(Self { device: Arc::new(open_device(path, MODULE, 0)?), path: path.to_owned() })
    }

    /// Has the hypervisor copy all `pieces`, which then hold their statuses.
    ///
    /// # Safety
    /// The addresses of ours in them may be read and written as far as each piece is long.
    unsafe fn copy_pieces(&self, pieces: &mut [CopySegment]) -> std::io::Result<()> {
        let count = u32::try_from(pieces.len()).map_err(|_| std::io::ErrorKind::InvalidInput)?;
        let mut argument = GrantCopy { count, segments: pieces.as_mut_ptr() };
        // SAFETY: the argument of this call, with as many pieces as it says; their addresses are right by contract.
        unsafe { call(self.device.as_fd(), GRANT_COPY, &raw mut argument) }.map(drop)
    }

    /// Tells the device of the pages and maps them.
    fn map_pages(&self, domain: DomId, refs: &[GrantRef], is_writable: bool) -> Result<Arc<Mapping>> {
        let failed = |what: &str, e: std::io::Error| {
            Error::io(format!("{what} {} pages of domain {domain}", refs.len()), e).at_path(&self.path)
        };
        let count = u32::try_from(refs.len()).map_err(|_| failed("map", std::io::ErrorKind::InvalidInput.into()))?;
        let mut words = map_argument(domain, count, refs);
        // SAFETY: the argument of this call, with as many entries as it says; the device writes the index in it.
        unsafe { call(self.device.as_fd(), MAP_GRANT_REF, words.as_mut_ptr()) }.map_err(|e| failed("take", e))?;
        let index = words[offset_of!(MapGrantRef, index) / 8];
        Mapping::new(self.device.clone(), index, count, is_writable).map(Arc::new).map_err(|e| failed("map", e))
    }
}

impl Grants for Gntdev {
    fn copy<'a>(
        &self,
        domain: DomId,
        way: Way,
        buffer_of: impl Fn(u32) -> &'a Segment,
        ops: &[CopyOp],
        statuses: &mut Vec<GrantStatus>,
    ) -> Result<()> {
        statuses.clear();
        if ops.is_empty() {
            return Ok(());
        }
        PIECES.with_borrow_mut(|pieces| {
            pieces.clear();
            pieces.extend(ops.iter().map(|op| piece(domain, way, buffer_of(op.buffer), op)));
            // SAFETY: `piece` has checked each against its buffer, and the buffers live as long as this call.
            unsafe { self.copy_pieces(pieces) }.map_err(|e| {
                Error::io(format!("copy {} pieces of pages of domain {domain}", ops.len()), e).at_path(&self.path)
            })?;
            statuses.extend(pieces.iter().map(|piece| GrantStatus(piece.status)));
            Ok(())
        })
    }

    fn map(&self, domain: DomId, refs: &[GrantRef], is_writable: bool) -> Result<Segments> {
        if refs.is_empty() {
            return Ok(Segments::new());
        }
        let mapping = self.map_pages(domain, refs, is_writable)?;
        Ok((0..refs.len()).map(|page| mapping.segment(page, 1)).collect())
    }

    /// Direct I/O on mapped pages is not safe. The kernel reports the end of a direct read before it has released the
    /// pages. When the pages are unmapped in between, gntdev postpones the unmap and miscounts their users. That gives
    /// warnings in free_zone_device_folio and gntdev.c, after which direct I/O fails with ENOMEM (seen with Linux 6.12
    /// as a paravirtual dom0).
    fn can_be_pinned(&self) -> bool {
        false
    }

    fn map_ring(&self, domain: DomId, refs: &[GrantRef]) -> Result<Segment> {
        if refs.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, format!("domain {domain} has named a ring without pages")));
        }
        Ok(self.map_pages(domain, refs, true)?.segment(0, refs.len()))
    }
}

/// Pages of a guest in our address space, until the last segment on them is dropped.
struct Mapping {
    device: Arc<File>,
    /// The number by which the device knows the pages; it is also their offset for mmap, in bytes.
    index: u64,
    count: u32,
    base: NonNull<u8>,
}

// SAFETY: plain memory that lives as long as the mapping; segments reach it by raw copies and atomic operations only.
unsafe impl Send for Mapping {}
// SAFETY: as for Send.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the pages that the device knows as `index`. When that fails, the device is told to forget them.
    fn new(device: Arc<File>, index: u64, count: u32, is_writable: bool) -> std::io::Result<Self> {
        let prot = if is_writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let len = count as usize * XEN_PAGE_BYTES;
        // SAFETY: a new mapping at an address of the kernel's choosing.
        let mapped = unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, &device, index) };
        match mapped {
            Ok(base) => {
                let base = NonNull::new(base.cast()).expect("a mapping is never at address zero");
                Ok(Self { device, index, count, base })
            }
            Err(errno) => {
                forget(&device, index, count);
                Err(errno.into())
            }
        }
    }

    /// The bytes of `count` pages from the page `first`.
    fn segment(self: &Arc<Self>, first: usize, count: usize) -> Segment {
        assert!(first + count <= self.count as usize, "{count} pages from {first} of {}", self.count);
        // SAFETY: within the mapping, as just checked.
        let start = unsafe { self.base.add(first * XEN_PAGE_BYTES) };
        // SAFETY: these bytes are mapped until the mapping is dropped, which the segment keeps.
        unsafe { Segment::from_owner(start, count * XEN_PAGE_BYTES, self.clone()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; every segment on it has held it alive until now.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.count as usize * XEN_PAGE_BYTES) };
        if unmapped.is_ok() {
            forget(&self.device, self.index, self.count);
        }
    }
}

/// Tells the device to forget pages that are not mapped, or not mapped any more. It also forgets all when it is closed.
fn forget(device: &File, index: u64, count: u32) {
    let mut argument = UnmapGrantRef { index, count, pad: 0 };
    // SAFETY: the argument of this call, which the device only reads.
    let _ = unsafe { call(device.as_fd(), UNMAP_GRANT_REF, &raw mut argument) };
}

/// Makes one piece for the device, and checks it: a piece that leaves its page would make the whole call fail.
fn piece(domain: DomId, way: Way, buffer: &Segment, op: &CopyOp) -> CopySegment {
    let (at, len) = (op.buffer_offset as usize, usize::from(op.len));
    assert!(usize::from(op.page_offset) + len <= XEN_PAGE_BYTES, "{len} bytes at {} of a page", op.page_offset);
    assert!(at <= buffer.len() && len <= buffer.len() - at, "{len} bytes at {at} of a buffer of {}", buffer.len());
    let ours = buffer.as_ptr() as u64 + at as u64;
    let theirs = foreign(domain, op.gref, op.page_offset);
    let (source, dest, flags) = match way {
        Way::FromGuest => (theirs, ours, SOURCE_IS_GRANT),
        Way::ToGuest => (ours, theirs, DEST_IS_GRANT),
    };
    CopySegment { source, dest, len: op.len, flags, status: 0 }
}

/// A place in a granted page, encoded in the 8 bytes of an address: {ref u32, offset u16, domid u16}.
fn foreign(domain: DomId, gref: GrantRef, offset: u16) -> u64 {
    let ([a, b, c, d], [e, f], [g, h]) = (gref.0.to_ne_bytes(), offset.to_ne_bytes(), domain.0.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

/// A [`MapGrantRef`] with `count` entries, as words of 8 bytes.
fn map_argument(domain: DomId, count: u32, refs: &[GrantRef]) -> Vec<u64> {
    let pair = |first: u32, second: u32| {
        let ([a, b, c, d], [e, f, g, h]) = (first.to_ne_bytes(), second.to_ne_bytes());
        u64::from_ne_bytes([a, b, c, d, e, f, g, h])
    };
    let mut words = Vec::with_capacity(MAP_HEADER_WORDS + refs.len());
    words.extend([pair(count, 0), 0]);
    words.extend(refs.iter().map(|gref| pair(domain.0.into(), gref.0)));
    words
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::FileExt;

    use super::*;

    fn bytes_of(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn no_device() -> (tempfile::NamedTempFile, Gntdev) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let gntdev = Gntdev::open_at(file.path()).unwrap();
        (file, gntdev)
    }

    const OP: CopyOp =
        CopyOp { gref: GrantRef(0x0102_0304), page_offset: 512, len: 3584, buffer: 1, buffer_offset: 96 };

    #[test]
    fn the_numbers_are_those_of_the_header_file() {
        assert_eq!((MAP_GRANT_REF, UNMAP_GRANT_REF, GRANT_COPY), (0x0018_4700, 0x0010_4701, 0x0010_4708));
    }

    #[test]
    fn a_piece_names_the_page_where_the_way_has_it() {
        let buffer = Segment::zeroed(8192);
        let page = u64::from_le_bytes([4, 3, 2, 1, 0, 2, 5, 0]);
        let ours = buffer.as_ptr() as u64 + 96;
        let read = CopySegment { source: page, dest: ours, len: 3584, flags: 1, status: 0 };
        let write = CopySegment { source: ours, dest: page, len: 3584, flags: 2, status: 0 };
        assert_eq!(piece(DomId(5), Way::FromGuest, &buffer, &OP), read);
        assert_eq!(piece(DomId(5), Way::ToGuest, &buffer, &OP), write);
    }

    #[test]
    fn the_argument_of_a_mapping_lists_domain_and_grant() {
        let words = map_argument(DomId(5), 2, &[GrantRef(8), GrantRef(9)]);
        let numbers: Vec<u32> = bytes_of(&words).chunks(4).map(|n| u32::from_ne_bytes(n.try_into().unwrap())).collect();
        assert_eq!(numbers, [2, 0, 0, 0, 5, 8, 5, 9]);
    }

    #[test]
    #[should_panic(expected = "3584 bytes at 513 of a page")]
    fn a_piece_that_leaves_its_page_never_reaches_the_device() {
        let (_file, gntdev) = no_device();
        let (op, buffer) = (CopyOp { page_offset: 513, ..OP }, Segment::zeroed(8192));
        let _ = gntdev.copy(DomId(5), Way::FromGuest, |_| &buffer, &[op], &mut vec![]);
    }

    #[test]
    #[should_panic(expected = "3584 bytes at 96 of a buffer of 3679")]
    fn a_piece_that_leaves_its_buffer_never_reaches_the_device() {
        let (_file, gntdev) = no_device();
        let buffer = Segment::zeroed(3679);
        let _ = gntdev.copy(DomId(5), Way::FromGuest, |_| &buffer, &[OP], &mut vec![]);
    }

    #[test]
    fn a_missing_device_is_named_with_its_module() {
        let folder = tempfile::tempdir().unwrap();
        let error = Gntdev::open_at(&folder.path().join("gntdev")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        let text = error.to_string();
        assert!(text.contains("/gntdev: open the device") && text.contains("modprobe xen-gntdev"), "{text}");
    }

    #[test]
    fn what_the_device_refuses_is_an_error_with_all_names() {
        let (_file, gntdev) = no_device();
        let mut statuses = vec![GrantStatus::OKAY];
        let buffer = Segment::zeroed(8192);
        let error = gntdev.copy(DomId(5), Way::ToGuest, |_| &buffer, &[OP], &mut statuses).unwrap_err();
        assert_eq!((error.os_errno(), statuses.len()), (Some(libc::ENOTTY), 0));
        assert!(error.to_string().contains("copy 1 pieces of pages of domain 5"), "{error}");
        let error = gntdev.map(DomId(5), &[GrantRef(8)], false).unwrap_err();
        assert!(error.to_string().contains("take 1 pages of domain 5"), "{error}");
        assert_eq!(gntdev.map_ring(DomId(5), &[]).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    /// A file in the device's place: its pages are mapped as those of a guest are.
    #[test]
    fn pages_are_mapped_until_their_last_segment_goes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for page in 0..4u8 {
            file.as_file().write_all_at(&[page; XEN_PAGE_BYTES], u64::from(page) * XEN_PAGE_BYTES as u64).unwrap();
        }
        let lines_of = |part: &str| {
            let maps = fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().filter(|l| l.ends_with(file.path().to_str().unwrap()) && l.contains(part)).count()
        };
        let device = Arc::new(file.reopen().unwrap());
        let mapping = Arc::new(Mapping::new(device.clone(), XEN_PAGE_BYTES as u64, 3, true).unwrap());
        let (pages, ring) = ((0..3).map(|i| mapping.segment(i, 1)).collect::<Segments>(), mapping.segment(0, 3));
        drop(mapping);
        assert_eq!(
            pages.as_slice().iter().map(|p| (p.len(), p.read_array::<1>(0)[0])).collect::<Vec<_>>(),
            [(4096, 1), (4096, 2), (4096, 3)]
        );
        pages.as_slice()[1].copy_from_slice(0, b"ab");
        assert_eq!(ring.read_array(XEN_PAGE_BYTES), *b"ab");
        drop(ring);
        assert_eq!(lines_of(" rw-s "), 1);
        drop(pages);
        assert_eq!(lines_of(""), 0);
        let _readable = Mapping::new(device, 0, 1, false).unwrap();
        assert_eq!((lines_of(" r--s "), lines_of("")), (1, 1));
    }
}
