//! A guest's memory: regions of files that the front end shares, looked up by the guest's or the front end's addresses.
//!
//! No address is trusted: each is looked up with its whole length, and an address in no region is an error of that
//! request only. Segments keep their mapping, so a region may be removed while a request still uses it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{FileType, fstat, fstatfs};
use spile_core::{Error, ErrorKind, Result, Segment, Segments};
use spile_engine::LOCAL_FILE_SYSTEMS;

use crate::wire::RegionInfo;

/// The most memory of one guest that is mapped: address space is shared by all disks of a process.
pub const MAX_GUEST_BYTES: u64 = 4 << 40;

/// The most regions a guest's memory may have: QEMU's own limit is 509.
pub const MAX_SLOTS: u64 = 512;

/// Memory whose files are mapped beside those of [`LOCAL_FILE_SYSTEMS`] (linux/magic.h): ramfs and hugetlbfs. On others, FUSE and what lies above it above
/// all, another program or host decides how long an access to mapped memory takes, and a worker would wait for it.
const MEMORY: [i64; 2] = [0x8584_58f6, 0x9584_58f6];

/// Maps a part of a file that the front end shares.
///
/// # Errors
/// `InvalidInput` when the file is of a kind that is not mapped, or ends before the part does; else the system's.
pub fn map_file(what: &str, file: &OwnedFd, offset_bytes: u64, len_bytes: u64) -> Result<Segment> {
    let failed = |source: std::io::Error| {
        Error::io(format!("map {what}"), source).hint("is the file as long as was said, and shared (share=on)?")
    };
    let kind = FileType::from_raw_mode(fstat(file).map_err(|errno| failed(errno.into()))?.st_mode);
    let system = fstatfs(file).map_err(|errno| failed(errno.into()))?.f_type;
    if kind != FileType::RegularFile || !(MEMORY.contains(&system) || LOCAL_FILE_SYSTEMS.contains(&system)) {
        let problem = format!(
            "the file for {what} is neither memory (memfd, hugetlbfs, tmpfs) nor a plain file on a local file system"
        );
        return Err(Error::new(ErrorKind::InvalidInput, problem));
    }
    let len = usize::try_from(len_bytes).map_err(|_| failed(std::io::ErrorKind::InvalidInput.into()))?;
    Segment::map_shared(file, offset_bytes, len).map_err(failed)
}

/// One region.
#[derive(Clone)]
pub struct Region {
    /// The region as the front end has described it.
    pub info: RegionInfo,
    /// Its file, to hand it over.
    pub file: Arc<OwnedFd>,
    pub(crate) bytes: Segment,
}

impl Region {
    /// Maps the region.
    ///
    /// # Errors
    /// `InvalidInput` when addresses overflow or the file is not as long as said or of a kind that is not mapped.
    pub fn map(info: RegionInfo, file: Arc<OwnedFd>) -> Result<Self> {
        let refuse = |what: &str| Err(Error::new(ErrorKind::InvalidInput, format!("memory region {info:x?}: {what}")));
        let overflows = |start: u64| start.checked_add(info.len_bytes).is_none();
        if info.len_bytes == 0 || overflows(info.guest_addr) || overflows(info.user_addr) {
            return refuse("its length is zero or its end overflows");
        }
        let bytes = map_file("a guest's memory", &file, info.file_offset_bytes, info.len_bytes)?;
        Ok(Self { info, file, bytes })
    }

    /// The offset of `addr` in the region that starts at `start`.
    fn offset(&self, start: u64, addr: u64) -> Option<usize> {
        addr.checked_sub(start).filter(|offset| *offset < self.info.len_bytes).map(|offset| offset as usize)
    }
}

/// All regions of a guest's memory, in the order of their guest addresses. A change makes a new value, so that rings at
/// work keep the old one.
#[derive(Clone, Default)]
pub struct GuestMemory {
    regions: Vec<Region>,
}

impl GuestMemory {
    /// True when no region is shared.
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// The memory with one more region.
    ///
    /// # Errors
    /// `InvalidInput` when it overlaps another, `Exhausted` when there are too many.
    pub fn with(&self, region: Region) -> Result<Self> {
        let overlaps = |a: u64, b: u64, other: &RegionInfo| {
            a < b.saturating_add(other.len_bytes) && b < a.saturating_add(region.info.len_bytes)
        };
        let clash = self.regions.iter().map(|other| other.info).find(|other| {
            overlaps(region.info.guest_addr, other.guest_addr, other)
                || overlaps(region.info.user_addr, other.user_addr, other)
        });
        if let Some(other) = clash {
            let what = format!("memory region {:x?} overlaps {other:x?}", region.info);
            return Err(Error::new(ErrorKind::InvalidInput, what));
        }
        let total = self.regions.iter().fold(region.info.len_bytes, |sum, r| sum.saturating_add(r.info.len_bytes));
        if total > MAX_GUEST_BYTES {
            return Err(Error::new(ErrorKind::Exhausted, format!("more than {MAX_GUEST_BYTES} bytes of memory")));
        }
        if self.regions.len() as u64 >= MAX_SLOTS {
            return Err(Error::new(ErrorKind::Exhausted, format!("more than {MAX_SLOTS} memory regions")));
        }
        let mut regions = self.regions.clone();
        let at = regions.partition_point(|other| other.info.guest_addr < region.info.guest_addr);
        regions.insert(at, region);
        Ok(Self { regions })
    }

    /// The memory without the region of this guest address, front end's address and length.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    pub fn without(&self, info: &RegionInfo) -> Result<Self> {
        let key = |info: &RegionInfo| (info.guest_addr, info.user_addr, info.len_bytes);
        let mut regions = self.regions.clone();
        regions.retain(|region| key(&region.info) != key(info));
        match regions.len() < self.regions.len() {
            true => Ok(Self { regions }),
            false => Err(Error::new(ErrorKind::NotFound, format!("there is no memory region {info:x?}"))),
        }
    }

    /// The regions.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// True when a file was cut short and memory was lost.
    pub fn is_lost(&self) -> bool {
        self.regions.iter().any(|region| region.bytes.is_lost())
    }

    #[inline]
    fn find(&self, addr: u64) -> Option<(&Region, usize)> {
        let at = self.regions.partition_point(|region| region.info.guest_addr <= addr);
        let region = &self.regions[at.checked_sub(1)?];
        Some((region, region.offset(region.info.guest_addr, addr)?))
    }

    /// `len` bytes at an address of the front end; `None` unless they lie in one region.
    pub fn at_user(&self, addr: u64, len: usize) -> Option<Segment> {
        let offset = |region: &Region| region.offset(region.info.user_addr, addr);
        let (region, offset) = self.regions.iter().find_map(|region| Some((region, offset(region)?)))?;
        slice(region, offset, len)
    }

    /// `len` bytes at an address of the guest; `None` unless they lie in one region.
    pub fn contiguous(&self, addr: u64, len: usize) -> Option<Segment> {
        let (region, offset) = self.region_of(addr, len)?;
        Some(region.slice(offset..offset + len))
    }

    /// The region in which all `len` bytes at an address of the guest lie, and their offset in it.
    pub fn region_of(&self, addr: u64, len: usize) -> Option<(&Segment, usize)> {
        let (region, offset) = self.find(addr)?;
        let end = offset.checked_add(len)?;
        (end <= region.bytes.len()).then_some((&region.bytes, offset))
    }

    /// True when the byte at an address of the guest is in a region.
    pub fn has(&self, addr: u64) -> bool {
        self.find(addr).is_some()
    }

    /// Appends `len` bytes at an address of the guest to `to`. They may go on from one region to the next: the guest
    /// does not see where regions end. False, with nothing or a part appended, when some of the bytes are in no region.
    pub fn append(&self, mut addr: u64, len: u64, to: &mut Segments) -> bool {
        let mut left = len;
        while left > 0 {
            let Some((region, offset)) = self.find(addr) else { return false };
            let part = left.min(region.info.len_bytes - offset as u64);
            to.push_joined(region.bytes.slice(offset..offset + part as usize));
            left -= part;
            let Some(next) = addr.checked_add(part) else { return left == 0 };
            addr = next;
        }
        true
    }

    /// The `N` bytes at an address of the guest, each read once.
    pub fn read<const N: usize>(&self, addr: u64) -> Option<[u8; N]> {
        let (region, offset) = self.find(addr)?;
        if offset + N <= region.bytes.len() {
            return Some(region.bytes.read_array(offset));
        }
        let mut array = [0; N];
        let mut list = Segments::new();
        self.append(addr, N as u64, &mut list).then(|| list.copy_to_slice(0, &mut array))?;
        Some(array)
    }

    /// Writes one byte at an address of the guest; false when it is in no region.
    pub fn write_byte(&self, addr: u64, byte: u8) -> bool {
        let found = self.find(addr);
        if let Some((region, offset)) = found {
            region.bytes.store_u8(offset, byte, std::sync::atomic::Ordering::Relaxed);
        }
        found.is_some()
    }
}

fn slice(region: &Region, offset: usize, len: usize) -> Option<Segment> {
    let end = offset.checked_add(len).filter(|end| *end <= region.bytes.len())?;
    Some(region.bytes.slice(offset..end))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn file(len: u64) -> Arc<OwnedFd> {
        let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, len).unwrap();
        Arc::new(fd)
    }

    fn info(guest_addr: u64, len_bytes: u64) -> RegionInfo {
        RegionInfo { guest_addr, len_bytes, user_addr: guest_addr.wrapping_add(1 << 40), file_offset_bytes: 0 }
    }

    /// Memory of regions that start at these addresses and have this length each.
    pub(crate) fn memory(starts: &[u64], len: u64) -> GuestMemory {
        starts.iter().fold(GuestMemory::default(), |memory, start| {
            memory.with(Region::map(info(*start, len), file(len)).unwrap()).unwrap()
        })
    }

    #[test]
    fn bytes_go_on_from_one_region_to_the_next() {
        let memory = memory(&[0x2000, 0x1000, 0x5000], 0x1000);
        let mut list = Segments::new();
        assert!(memory.append(0x1ff0, 0x20, &mut list));
        assert_eq!(list.iter().map(Segment::len).collect::<Vec<_>>(), [16, 16]);
        list.copy_from_slice(14, b"seam");
        assert_eq!(memory.read::<4>(0x1ffe), Some(*b"seam"));
        assert!(memory.contiguous(0x1ff0, 16).is_some() && memory.contiguous(0x1ff0, 17).is_none());
    }

    #[test]
    fn holes_and_overflows_are_found() {
        let memory = memory(&[0x1000, 0x3000], 0x1000);
        let fits = |addr, len| memory.append(addr, len, &mut Segments::new());
        assert!(fits(0x1000, 0x1000) && fits(0x3fff, 1));
        assert!(
            !fits(0x1fff, 2) && !fits(0xfff, 1) && !fits(0x4000, 1) && !fits(u64::MAX, 2) && !fits(0x3000, u64::MAX)
        );
        assert_eq!(memory.read::<16>(0x1ff8), None);
        assert!(!memory.write_byte(0x2000, 1) && memory.write_byte(0x1fff, 1));
        assert!(memory.at_user((1 << 40) + 0x1000, 0x1000).is_some());
        assert!(memory.at_user((1 << 40) + 0x1001, 0x1000).is_none());
        assert!(memory.at_user(0x1000, 1).is_none() && memory.at_user(u64::MAX, 2).is_none());
    }

    #[test]
    fn regions_do_not_overlap_and_are_removed_by_what_they_are() {
        let memory = memory(&[0x1000], 0x1000);
        assert!(memory.with(Region::map(info(0x1fff, 0x1000), file(0x1000)).unwrap()).is_err());
        assert!(memory.without(&info(0x1000, 0x2000)).is_err());
        assert!(memory.without(&info(0x1000, 0x1000)).unwrap().regions().is_empty());
    }

    #[test]
    fn what_cannot_be_mapped_is_refused() {
        assert!(Region::map(info(0, 0x1001), file(0x1000)).is_err());
        assert!(Region::map(info(u64::MAX - 5, 0x1000), file(0x1000)).is_err());
        assert!(Region::map(info(0, 0), file(0x1000)).is_err());
        let (_ours, theirs) = rustix::pipe::pipe().unwrap();
        assert!(Region::map(info(0, 4096), Arc::new(theirs)).is_err());
    }
}
