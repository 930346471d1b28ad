//! [`Limits`]: what somebody sets, as numbers.

use std::time::Duration;

use spile_core::{Error, ErrorKind, Result};

/// How many requests and bytes may pass in a second. `None`: as many as come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Requests of all kinds in a second.
    pub iops: Option<u64>,
    /// Reads in a second.
    pub read_iops: Option<u64>,
    /// Writes in a second; discards and writes of zeroes count as writes.
    pub write_iops: Option<u64>,
    /// Bytes of reads and writes in a second.
    pub bps: Option<u64>,
    /// Bytes of reads in a second.
    pub read_bps: Option<u64>,
    /// Bytes of writes in a second, zeroes included.
    pub write_bps: Option<u64>,
    /// For so long may unused allowance add up; `None`: [`Limits::BURST`].
    pub burst: Option<Duration>,
}

impl Limits {
    /// How long unused allowance adds up when nothing is said.
    pub const BURST: Duration = Duration::from_millis(100);
    /// The shortest burst. With less, a timer that is late would cost a part of the rate.
    pub const LEAST_BURST: Duration = Duration::from_millis(10);
    /// The longest burst.
    pub const MOST_BURST: Duration = Duration::from_secs(3600);

    /// True when nothing is limited.
    pub fn is_none(&self) -> bool {
        self.rates().iter().flatten().all(Option::is_none)
    }

    /// The limits on requests and those on bytes, each in total, of reads and of writes.
    pub(super) fn rates(&self) -> [[Option<u64>; 3]; 2] {
        [[self.iops, self.read_iops, self.write_iops], [self.bps, self.read_bps, self.write_bps]]
    }

    pub(super) fn burst_ns(&self) -> u64 {
        self.burst.unwrap_or(Self::BURST).clamp(Self::LEAST_BURST, Self::MOST_BURST).as_nanos() as u64
    }

    /// Checks that the limits can be kept.
    ///
    /// # Errors
    /// `InvalidInput` for a rate of nothing, for a burst of over an hour and for one that is too short.
    pub fn check(&self) -> Result<()> {
        if self.rates().iter().flatten().any(|rate| *rate == Some(0)) {
            return Err(Error::new(ErrorKind::InvalidInput, "a limit of 0 would let nothing pass")
                .hint("give at least 1; --off takes limits away"));
        }
        if self.burst.is_some_and(|burst| burst > Self::MOST_BURST) {
            return Err(Error::new(ErrorKind::InvalidInput, "a burst is an hour at most"));
        }
        if self.burst.is_some_and(|burst| burst < Self::LEAST_BURST) {
            return Err(Error::new(ErrorKind::InvalidInput, "a burst is 10 ms at least"));
        }
        Ok(())
    }
}
