//! Transfers as `dd` makes them: a row of equal blocks, one request at a time, to or from a file or device; bare (by the system's calls, with
//! nothing of Spile between), and through each front. `layers`, `warmup` and `geometry` are made of these.

mod served;
mod system_calls;

use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use spile_core::{Error, Result, ResultExt};
use utoipa::ToSchema;

pub use served::{Side, Sides};

/// What is done with the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// Written through the page cache, and synced at the end.
    WriteBuffered,
    /// Written past the page cache.
    WriteDirect,
    /// Read past the page cache.
    ReadDirect,
}

impl Operation {
    /// In the order of the article.
    pub const ALL: [Self; 3] = [Self::WriteBuffered, Self::WriteDirect, Self::ReadDirect];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::WriteBuffered => "buffered write",
            Self::WriteDirect => "direct write",
            Self::ReadDirect => "direct read",
        }
    }

    fn is_direct(self) -> bool {
        self != Self::WriteBuffered
    }

    fn is_read(self) -> bool {
        self == Self::ReadDirect
    }
}

/// How the blocks reach their place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// By this process, which calls the system for each block, without a server.
    Bare,
    /// By an NBD client.
    Nbd,
    /// By a guest on vhost-user.
    VhostUser,
    /// By a guest of a Xen of ordinary processes, with grant copy.
    Xen,
}

impl Way {
    /// The bare one first.
    pub const ALL: [Self; 4] = [Self::Bare, Self::Nbd, Self::VhostUser, Self::Xen];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Nbd => "nbd",
            Self::VhostUser => "vhost-user",
            Self::Xen => "xen",
        }
    }
}

/// One transfer.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// What is done.
    pub operation: Operation,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// The first address.
    pub start_bytes: u64,
    /// How many bytes are moved, if the time suffices.
    pub total_bytes: u64,
    /// No block begins after this time.
    pub limit: Duration,
}

/// What came of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Moved {
    /// Bytes that were moved.
    pub bytes: u64,
    /// The time that it took in seconds, a sync included.
    pub seconds: f64,
}

impl Moved {
    /// Bytes a second.
    pub fn bytes_per_s(&self) -> f64 {
        if self.seconds > 0.0 { self.bytes as f64 / self.seconds } else { 0.0 }
    }
}

/// How many bytes of a buffered write a device takes within `limit`, when it takes `bytes_per_s`: more than these would make its sync longer than
/// the transfer may take. One block at least, and no more than `total_bytes`.
pub fn most_buffered_bytes(total_bytes: u64, block_bytes: u64, bytes_per_s: f64, limit: Duration) -> u64 {
    let in_time = (bytes_per_s * limit.as_secs_f64()) as u64;
    total_bytes.min(in_time.max(block_bytes))
}

/// Has what was written through the page cache go to the device, and takes it out of the cache; the time of the first.
fn sync(path: &Path) -> Result<Duration> {
    let failed = |e| Error::io("sync after a transfer", e);
    let file = std::fs::File::open(path).map_err(failed).at_path(path)?;
    let begun = Instant::now();
    file.sync_data().map_err(failed).at_path(path)?;
    let took = begun.elapsed();
    // Only a hint: where the cache keeps the pages, the next direct transfer writes over them or past them.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    Ok(took)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffered_write_is_no_longer_than_its_sync_may_take() {
        let of = |bytes_per_s| most_buffered_bytes(1 << 30, 1 << 20, bytes_per_s, Duration::from_secs(1));
        assert_eq!([of(100e6), of(5e9), of(1.0)], [100_000_000, 1 << 30, 1 << 20]);
    }
}
