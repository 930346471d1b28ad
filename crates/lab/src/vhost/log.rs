//! The log of pages that a server has written to, as live migration uses it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use spile_core::{Error, Result};
use spile_mem::Segment;

use super::proto::LOG_PAGE_BYTES;

/// One bit for each 4 KiB page of guest addresses, from address 0 on.
#[derive(Debug)]
pub struct DirtyLog {
    file: OwnedFd,
    bytes: Segment,
}

impl DirtyLog {
    /// A clean log for guest addresses below `end_address`.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn new(end_address: u64) -> Result<Self> {
        let failed = |e: rustix::io::Errno| Error::io("cannot make a dirty log", e.into());
        let pages = end_address.div_ceil(LOG_PAGE_BYTES);
        let len = (pages.div_ceil(8).next_multiple_of(8)).max(8);
        let file = memfd_create("dirty-log", MemfdFlags::CLOEXEC).map_err(failed)?;
        ftruncate(&file, len).map_err(failed)?;
        let bytes = Segment::map_shared(&file, 0, len as usize).map_err(|e| Error::io("cannot map a dirty log", e))?;
        Ok(Self { file, bytes })
    }

    /// The file that holds the log.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The length of the log in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// True when the page of that guest address was written to.
    pub fn is_dirty(&self, address: u64) -> bool {
        let page = (address / LOG_PAGE_BYTES) as usize;
        self.bytes.load_u8(page / 8, Ordering::Acquire) & 1 << (page % 8) != 0
    }

    /// The guest addresses of the dirty pages.
    pub fn dirty_pages(&self) -> Vec<u64> {
        let pages = (0..self.len_bytes() * 8).map(|page| page * LOG_PAGE_BYTES);
        pages.filter(|address| self.is_dirty(*address)).collect()
    }

    /// Marks every page as clean; what the server logs at the same moment may be lost.
    pub fn clear(&self) {
        self.bytes.fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bit_is_a_page() {
        let log = DirtyLog::new(100 * 4096 + 1).unwrap();
        assert_eq!(log.len_bytes(), 16);
        log.bytes.or_u8(12, 1 << 3);
        log.bytes.or_u8(0, 1);
        assert_eq!(log.dirty_pages(), [0, 99 * 4096]);
        assert!(log.is_dirty(99 * 4096 + 4095) && !log.is_dirty(100 * 4096));
        log.clear();
        assert!(log.dirty_pages().is_empty());
    }
}
