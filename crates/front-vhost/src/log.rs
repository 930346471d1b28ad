//! The log of dirty pages, with which a front end moves a running guest to another machine.
//!
//! One bit for each 4 KiB of the guest's memory, set after the page was written and before the driver hears of it
//! (QEMU's `docs/interop/vhost-user.rst`, "Migration").

use std::os::fd::OwnedFd;
use std::sync::Arc;

use spile_core::{Error, ErrorKind, Result, Segment};

use crate::memory::map_file;

const PAGE_BYTES: u64 = 4096;
/// The longest log: of 32 TiB of addresses, holes included.
const MAX_LOG_BYTES: u64 = 1 << 30;

/// The log, mapped.
#[derive(Clone)]
pub struct Log {
    bytes: Segment,
    /// Its offset in its file, to hand it over.
    pub(crate) file_offset_bytes: u64,
    pub(crate) file: Arc<OwnedFd>,
}

impl Log {
    /// Maps the log.
    ///
    /// # Errors
    /// When the file is shorter than said, or cannot be mapped.
    pub fn map(file: Arc<OwnedFd>, file_offset_bytes: u64, len_bytes: u64) -> Result<Self> {
        if len_bytes > MAX_LOG_BYTES {
            return Err(Error::new(ErrorKind::InvalidInput, format!("a log of dirty pages of {len_bytes} bytes")));
        }
        let bytes = map_file("the log of dirty pages", &file, file_offset_bytes, len_bytes)?;
        Ok(Self { bytes, file_offset_bytes, file })
    }

    /// Its length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// True when its memory has been lost.
    pub fn is_lost(&self) -> bool {
        self.bytes.is_lost()
    }

    /// Marks the pages of `len` bytes at an address of the guest. Pages behind the end of the log are passed over: they
    /// are not the guest's.
    pub fn mark(&self, addr: u64, len: u64) {
        if len == 0 {
            return;
        }
        let last = addr.saturating_add(len - 1) / PAGE_BYTES;
        let end = (last + 1).min(self.len_bytes() * 8);
        for page in addr / PAGE_BYTES..end {
            self.bytes.or_u8((page / 8) as usize, 1 << (page % 8));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_touched_is_marked_and_no_other() {
        let file = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        let log = Log::map(Arc::new(file), 8, 2).unwrap();
        log.mark(0x1fff, 2);
        log.mark(0x9000, 0x1000);
        log.mark(0x5000, 0);
        log.mark(0xf000, u64::MAX);
        log.mark(u64::MAX, 1);
        assert_eq!(log.bytes.to_vec(), [0b0000_0110, 0b1000_0010]);
    }
}
