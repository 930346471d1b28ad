//! Logging at a bounded rate: a guest or a client decides how often it makes a mistake, but not how long our log gets.

use std::fmt::{Debug, Display};
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts events of one kind and says which of them go to the log: the first, then each time their number has doubled.
#[derive(Debug, Default)]
pub struct LogLimit(AtomicU64);

impl LogLimit {
    /// Counts one more event. Its number, counted from 1, when it is to be logged.
    pub fn count(&self) -> Option<u64> {
        Some(self.0.fetch_add(1, Ordering::Relaxed) + 1).filter(|number| number.is_power_of_two())
    }
}

/// A request that has failed.
pub struct FailedRequest<'a> {
    /// The front's name.
    pub front: &'static str,
    /// The disk's name.
    pub disk: &'a str,
    /// What the request asked for.
    pub command: &'a dyn Debug,
    /// Where it begins, in bytes, if it says so.
    pub offset_bytes: Option<u64>,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// What became of it, such as `failed`.
    pub outcome: &'static str,
    /// Why.
    pub reason: &'a dyn Display,
}

/// Logs a request that has failed, if `limit` allows.
pub fn log_failure(limit: &LogLimit, failed: &FailedRequest<'_>) {
    let Some(count) = limit.count() else { return };
    let FailedRequest { front, disk, command, offset_bytes, len_bytes, outcome, reason } = failed;
    tracing::warn!(%disk, ?command, offset_bytes, len_bytes, count, error = %reason, "{front} request {outcome}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_logged_and_then_each_doubling() {
        let limit = LogLimit::default();
        let logged: Vec<_> = (0..20).filter_map(|_| limit.count()).collect();
        assert_eq!(logged, [1, 2, 4, 8, 16]);
    }
}
