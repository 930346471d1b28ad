//! What `stat` and `top` share: how long intervals are, how many there are, and output that goes on until nobody reads it.

use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use spile_core::{Error, Result};

use crate::units::parse_duration;

/// How often is looked.
#[derive(Debug, Args)]
pub struct Pace {
    /// How long an interval is
    #[arg(long, value_name = "TIME", value_parser = parse_interval, default_value = "1")]
    pub interval: Duration,
    /// How many intervals are shown
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
}

/// The shortest interval: a shorter one has too few requests for a quantile, and asking costs the server time.
const SHORTEST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(86_400);

fn parse_interval(text: &str) -> Result<Duration, String> {
    let interval = parse_duration(text)?;
    match (SHORTEST..=LONGEST).contains(&interval) {
        true => Ok(interval),
        false => Err(format!("`{text}` is no interval to look at: 50ms is the shortest one, 24h the longest")),
    }
}

/// Sleeps until `interval` has passed since `begun`.
pub fn sleep_until(begun: Instant, interval: Duration) {
    std::thread::sleep(interval.saturating_sub(begun.elapsed()));
}

/// Prints on stdout. False when nobody reads it any more, as behind `head`.
///
/// # Errors
/// When stdout cannot be written to for another reason.
pub fn put(text: impl Display) -> Result<bool> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Error::io("write to stdout", error)),
    }
}

/// A JSON value in one line.
///
/// # Errors
/// When it cannot be written as JSON.
pub fn json_line(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|e| Error::new(spile_core::ErrorKind::InvalidInput, "cannot write JSON").caused_by(e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_neither_too_short_nor_endless() {
        assert_eq!(parse_interval("0.05"), Ok(SHORTEST));
        assert_eq!(parse_interval("2s"), Ok(Duration::from_secs(2)));
        for text in ["0", "10ms", "25h", "1e9", "x"] {
            assert!(parse_interval(text).is_err(), "{text}");
        }
    }
}
