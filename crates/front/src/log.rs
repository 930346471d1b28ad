//! Logging at a bounded rate: a guest or a client decides how often it makes a mistake, but not how long our log gets.

use std::error::Error;
use std::fmt::{self, Debug, Display};

use spile_core::LogLimit;

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
    pub reason: &'a (dyn Error + 'static),
}

/// A reason in words.
#[derive(Debug)]
pub struct Reason(pub &'static str);

impl Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl Error for Reason {}

/// Logs a request that has failed, if `limit` allows.
pub fn log_failure(limit: &LogLimit, failed: &FailedRequest<'_>) {
    let Some(count) = limit.count() else { return };
    let FailedRequest { front, disk, command, offset_bytes, len_bytes, outcome, reason } = failed;
    tracing::warn!(
        journal.front = front, %disk, ?command, offset_bytes, len_bytes, count, error = reason,
        "{front} request {outcome}"
    );
}
