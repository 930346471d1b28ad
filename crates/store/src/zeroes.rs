//! Zeroes and holes in a file or a block device.
//!
//! A file system zeroes and punches any range. A block device does that in whole sectors only (EINVAL). It refuses a range, too, of which the page
//! cache has something that is not written back, while somebody has claimed the device: a mount, a volume above it, or Spile itself (EBUSY).
//!
//! So on a device the kernel gets the whole sectors of a range, and the ends are written. What keeps the sectors busy is written back first. Where
//! they are busy all the same, or the device turns out to have no such command, zeroes are written there, too: whoever asks for zeroes gets them.

use std::ops::Range;
use std::sync::atomic::Ordering;

use spile_core::{ErrorKind, Result, Segments, Store, StoreOffset, Via};
use spile_engine::run_blocking;
use spile_mem::Segment;

use crate::file::FileStore;

/// Zeroes written at a time where the kernel cannot zero a range itself.
const ZERO_CHUNK_BYTES: usize = 1 << 20;

const KEEP: i32 = libc::FALLOC_FL_KEEP_SIZE;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | KEEP;
const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | KEEP;

impl FileStore {
    /// Makes `range`, which the store has and may be written, zero, and keeps its space where that can be done.
    pub(crate) async fn zero(&self, range: Range<u64>) -> Result<()> {
        if self.is_device() {
            return self.zero_on_device(ZERO, range).await;
        }
        let failed = |errno| Err(self.fail("zero a range", errno).at_offset(range.start));
        match self.fallocate(ZERO, &range).await {
            Ok(()) => return Ok(()),
            Err(errno) if is_unsupported(errno) => (),
            Err(errno) => return failed(errno),
        }
        match self.fallocate(PUNCH, &range).await {
            Ok(()) => (),
            Err(errno) if is_unsupported(errno) => return self.write_zeroes(range).await,
            Err(errno) => return failed(errno),
        }
        // NFS and tmpfs cannot zero, but punch and allocate.
        match self.fallocate(KEEP, &range).await {
            Err(errno) if !is_unsupported(errno) => failed(errno),
            _ => Ok(()),
        }
    }

    /// Makes `range`, which the store has and may be written, zero, and frees its space.
    pub(crate) async fn punch(&self, range: Range<u64>) -> Result<()> {
        if self.is_device() {
            return self.zero_on_device(PUNCH, range).await;
        }
        match self.fallocate(PUNCH, &range).await {
            Ok(()) => Ok(()),
            Err(errno) if is_unsupported(errno) => {
                Err(self.refuse(ErrorKind::Unsupported, "holes cannot be punched here", range.start))
            }
            Err(errno) => Err(self.fail("punch a hole", errno).at_offset(range.start)),
        }
    }

    fn is_device(&self) -> bool {
        self.inner.sector_bytes > 1
    }

    /// Makes `range` of a device zero: the whole sectors by the kernel's `command`, the ends by writing.
    async fn zero_on_device(&self, command: i32, range: Range<u64>) -> Result<()> {
        let sectors = whole_sectors(&range, self.inner.sector_bytes);
        if sectors.is_empty() {
            return self.write_zeroes(range).await;
        }
        self.write_zeroes(range.start..sectors.start).await?;
        self.write_zeroes(sectors.end..range.end).await?;
        match self.fallocate_written_back(command, &sectors).await {
            Ok(()) => Ok(()),
            Err(libc::EBUSY) => self.write_zeroes(sectors).await,
            Err(errno) if is_unsupported(errno) => {
                if command == PUNCH {
                    self.inner.punches.store(false, Ordering::Relaxed);
                }
                self.write_zeroes(sectors).await
            }
            Err(errno) => Err(self.fail("zero a range", errno).at_offset(range.start)),
        }
    }

    /// As [`FileStore::fallocate`]. Where the range is busy, what the page cache has of it is written back, and it is tried once more.
    async fn fallocate_written_back(&self, flags: i32, range: &Range<u64>) -> Result<(), i32> {
        match self.fallocate(flags, range).await {
            Err(libc::EBUSY) => {
                let (file, busy) = (self.inner.cached.clone(), range.clone());
                run_blocking(self.path(), move || file.leave_page_cache(busy)).await?;
                self.fallocate(flags, range).await
            }
            done => done,
        }
    }

    async fn fallocate(&self, flags: i32, range: &Range<u64>) -> Result<(), i32> {
        self.inner.cached.fallocate(flags, range.start, range.end - range.start).await.map(drop)
    }

    /// Writes zeroes as data: directly where that can be, for the range may share a page with data written directly.
    async fn write_zeroes(&self, range: Range<u64>) -> Result<()> {
        let (mut at, len) = (range.start, range.end - range.start);
        let unit = u64::from(self.info().offset_align_bytes);
        let via = if (at | len) & (unit - 1) == 0 { Via::Direct } else { Via::Cached };
        let chunk = Segment::zeroed(len.min(ZERO_CHUNK_BYTES as u64) as usize);
        while at < range.end {
            let part = (range.end - at).min(chunk.len() as u64);
            let zeroes = Segments::from(chunk.slice(0..part as usize));
            self.write_at(StoreOffset(at), &zeroes, via).await?;
            at += part;
        }
        Ok(())
    }
}

/// The whole sectors within `range`.
fn whole_sectors(range: &Range<u64>, sector_bytes: u64) -> Range<u64> {
    range.start.next_multiple_of(sector_bytes)..range.end / sector_bytes * sector_bytes
}

fn is_unsupported(errno: i32) -> bool {
    matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV | libc::ENOTTY)
}

#[cfg(test)]
mod tests {
    use spile_core::OpenMode;
    use spile_engine::{Config, Engine};

    use super::*;
    use crate::files::CacheMode;

    #[test]
    fn only_whole_sectors_are_left_to_the_kernel() {
        assert_eq!(whole_sectors(&(4095..12289), 4096), 4096..12288);
        assert_eq!(whole_sectors(&(4096..8192), 4096), 4096..8192);
        assert!(whole_sectors(&(4097..8191), 4096).is_empty() && whole_sectors(&(1..4097), 4096).is_empty());
    }

    #[test]
    fn zeroes_are_written_where_the_file_system_cannot() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, vec![7; 3 << 20]).unwrap();
        let engine = Engine::start(Config { workers: 1, ..Config::default() }).unwrap();
        let store = FileStore::open(&path, OpenMode::ReadWrite, CacheMode::Direct).unwrap();
        engine.run_on(0, move || async move {
            store.write_zeroes(4096..(2 << 20) + 12288).await.unwrap();
            store.write_zeroes((3 << 20) - 5..(3 << 20) - 2).await.unwrap();
            store.write_zeroes(0..0).await.unwrap();
        });
        engine.shutdown();
        let mut expected = vec![7; 3 << 20];
        expected[4096..(2 << 20) + 12288].fill(0);
        expected[(3 << 20) - 5..(3 << 20) - 2].fill(0);
        assert!(std::fs::read(&path).unwrap() == expected);
    }
}
