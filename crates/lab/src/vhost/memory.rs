//! The memory of a guest: one memory file, cut into regions of guest addresses. This process and the server both map it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use spile_core::{Error, ErrorKind, Result};
use spile_mem::Segment;

use super::proto::RegionPayload;

const PAGE_BYTES: u64 = 4096;
const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// The shape of a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryOptions {
    /// Bytes in all; rounded up to whole pages in every region.
    pub len_bytes: u64,
    /// Regions, at least one.
    pub regions: usize,
    /// The number of unused guest addresses between two regions.
    pub gap_bytes: u64,
    /// The guest address of the first region.
    pub guest_base: u64,
    /// Pages of 2 MiB instead of 4 KiB.
    pub huge_pages: bool,
}

impl MemoryOptions {
    /// One region of at least `len_bytes` at guest address 1 MiB, in small pages.
    pub fn new(len_bytes: u64) -> Self {
        Self { len_bytes, regions: 1, gap_bytes: 0, guest_base: 1 << 20, huge_pages: false }
    }
}

/// One region.
#[derive(Clone, Debug)]
pub struct Region {
    /// The guest address of its first byte.
    pub guest_address: u64,
    /// The offset of its first byte in the file.
    pub file_offset: u64,
    /// Its bytes.
    pub bytes: Segment,
    /// The number of bytes that were handed out.
    taken: usize,
}

impl Region {
    /// As the messages describe it; user addresses are those of this process.
    pub fn payload(&self) -> RegionPayload {
        RegionPayload {
            guest_address: self.guest_address,
            len_bytes: self.bytes.len() as u64,
            user_address: self.bytes.as_ptr() as u64,
            file_offset: self.file_offset,
        }
    }
}

/// A piece of guest memory.
#[derive(Clone, Debug)]
pub struct Area {
    /// The guest address of its first byte.
    pub address: u64,
    /// Its bytes.
    pub bytes: Segment,
}

impl Area {
    /// Where it is in the front end's memory, which is how ring addresses are sent.
    pub fn user_address(&self) -> u64 {
        self.bytes.as_ptr() as u64
    }

    /// The part from `at` to `at + len` bytes.
    ///
    /// # Panics
    /// When it is not inside.
    pub fn part(&self, at: usize, len: usize) -> Self {
        Self { address: self.address + at as u64, bytes: self.bytes.slice(at..at + len) }
    }
}

/// A guest's memory. Areas that were taken are never given back.
#[derive(Debug)]
pub struct GuestMemory {
    file: OwnedFd,
    regions: Vec<Region>,
}

impl GuestMemory {
    /// Makes zeroed memory.
    ///
    /// # Errors
    /// `Exhausted` or `NoSpace` when there is not so much memory, or there are not so many huge pages.
    pub fn new(options: &MemoryOptions) -> Result<Self> {
        let page = if options.huge_pages { HUGE_PAGE_BYTES } else { PAGE_BYTES };
        let regions = options.regions.max(1) as u64;
        let region_bytes = options.len_bytes.div_ceil(regions).next_multiple_of(page).max(page);
        let file = make_file(regions * region_bytes, options.huge_pages)?;
        let all = Segment::map_shared(&file, 0, (regions * region_bytes) as usize);
        let all = all.map_err(|e| Error::io("cannot map the guest's memory", e))?;
        let region = |number: u64| Region {
            guest_address: options.guest_base + number * (region_bytes + options.gap_bytes),
            file_offset: number * region_bytes,
            bytes: all.slice((number * region_bytes) as usize..((number + 1) * region_bytes) as usize),
            taken: 0,
        };
        Ok(Self { file, regions: (0..regions).map(region).collect() })
    }

    /// The file that holds the memory.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The regions, by rising addresses.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// One past the highest guest address.
    pub fn end_address(&self) -> u64 {
        self.regions.last().map_or(0, |last| last.guest_address + last.bytes.len() as u64)
    }

    /// Takes `len` bytes, zeroed, at a multiple of `align` (a power of two up to the page), within one region.
    ///
    /// # Errors
    /// `Exhausted` when no region has that much left.
    pub fn take(&mut self, len: usize, align: usize) -> Result<Area> {
        for region in &mut self.regions {
            let at = region.taken.next_multiple_of(align);
            if at + len <= region.bytes.len() {
                region.taken = at + len;
                let bytes = region.bytes.slice(at..at + len);
                return Ok(Area { address: region.guest_address + at as u64, bytes });
            }
        }
        Err(Error::new(ErrorKind::Exhausted, format!("the guest's memory has no {len} bytes left in one region")))
    }

    /// The `len` bytes at a guest address; `None` when they are not all in one region.
    pub fn at(&self, address: u64, len: usize) -> Option<Area> {
        let inside = |region: &&Region| address.checked_sub(region.guest_address) < Some(region.bytes.len() as u64);
        let region = self.regions.iter().filter(|r| address >= r.guest_address).find(inside)?;
        let at = (address - region.guest_address) as usize;
        let end = at.checked_add(len).filter(|end| *end <= region.bytes.len())?;
        Some(Area { address, bytes: region.bytes.slice(at..end) })
    }
}

fn make_file(len_bytes: u64, huge_pages: bool) -> Result<OwnedFd> {
    let failed = |e: rustix::io::Errno| Error::io("cannot make the guest's memory", e.into());
    let flags = if huge_pages { MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { MemfdFlags::empty() };
    let file = memfd_create("guest", flags | MemfdFlags::CLOEXEC).map_err(failed)?;
    ftruncate(&file, len_bytes).map_err(failed)?;
    if huge_pages {
        // Without this, a page that is not there would be noticed only when it is touched.
        fallocate(&file, FallocateFlags::empty(), 0, len_bytes).map_err(|e| {
            let pages = len_bytes / HUGE_PAGE_BYTES;
            failed(e).hint(format!("{pages} huge pages of 2 MiB are needed: sysctl vm.nr_hugepages={pages}"))
        })?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_have_gaps_and_share_one_file() {
        let options = MemoryOptions { regions: 3, gap_bytes: 8192, ..MemoryOptions::new(3 * 4096 - 5) };
        let memory = GuestMemory::new(&options).unwrap();
        let starts: Vec<_> = memory.regions().iter().map(|r| (r.guest_address, r.file_offset, r.bytes.len())).collect();
        let base = 1 << 20;
        assert_eq!(starts, [(base, 0, 4096), (base + 12288, 4096, 4096), (base + 24576, 8192, 4096)]);
        memory.regions()[1].bytes.fill(7);
        let mut byte = [0];
        rustix::io::pread(memory.file(), &mut byte, 8191).unwrap();
        assert_eq!(byte, [7]);
        assert_eq!(memory.end_address(), base + 24576 + 4096);
    }

    #[test]
    fn no_area_lies_in_two_regions() {
        let options = MemoryOptions { regions: 2, ..MemoryOptions::new(8192) };
        let mut memory = GuestMemory::new(&options).unwrap();
        let addresses: Vec<_> = [3000, 2000, 100].map(|len| memory.take(len, 64).unwrap().address).into();
        assert_eq!(addresses, [1 << 20, (1 << 20) + 4096, (1 << 20) + 3008]);
        assert_eq!(memory.take(4000, 1).unwrap_err().kind(), ErrorKind::Exhausted);
        assert!(memory.at((1 << 20) + 4000, 97).is_none() && memory.at((1 << 20) - 1, 1).is_none());
        assert_eq!(memory.at((1 << 20) + 4000, 96).unwrap().bytes.len(), 96);
    }

    #[test]
    fn huge_pages_come_or_the_error_says_how_many_are_missing() {
        let options = MemoryOptions { huge_pages: true, ..MemoryOptions::new(1) };
        match GuestMemory::new(&options) {
            Ok(memory) => assert_eq!(memory.regions()[0].bytes.len(), 2 << 20),
            Err(error) => assert!(error.to_string().contains("vm.nr_hugepages"), "{error}"),
        }
    }
}
