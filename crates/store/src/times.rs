//! [`FileTimes`]: when a file was made and last changed.

use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt as _;
use std::time::{SystemTime, UNIX_EPOCH};

/// What a file system tells of a file from outside. Times are in nanoseconds since 1970 UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileTimes {
    /// The number of the file in its file system.
    pub inode: u64,
    /// When it was made; 0 where the file system does not tell.
    pub born_ns: u64,
    /// Its length.
    pub len_bytes: u64,
    /// When it was last written.
    pub modified_ns: u64,
    /// When its content or its properties were last changed.
    pub changed_ns: u64,
}

impl FileTimes {
    /// What `stat` tells.
    pub fn of(stat: &std::fs::Metadata) -> Self {
        let born = stat.created().ok().and_then(|time: SystemTime| time.duration_since(UNIX_EPOCH).ok());
        Self {
            inode: stat.ino(),
            born_ns: born.map_or(0, |time| time.as_nanos() as u64),
            len_bytes: stat.len(),
            modified_ns: ns(stat.mtime(), stat.mtime_nsec()),
            changed_ns: ns(stat.ctime(), stat.ctime_nsec()),
        }
    }

    /// The same as it is now, for a file that is open.
    pub(crate) fn now(self, file: impl AsFd) -> Self {
        let Ok(stat) = rustix::fs::fstat(file) else { return self };
        Self {
            len_bytes: stat.st_size as u64,
            modified_ns: ns(stat.st_mtime, stat.st_mtime_nsec as i64),
            changed_ns: ns(stat.st_ctime, stat.st_ctime_nsec as i64),
            ..self
        }
    }
}

fn ns(seconds: i64, ns: i64) -> u64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(ns).max(0) as u64
}
