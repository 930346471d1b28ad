//! What `stat` and `top` share: how long intervals are, and how many there are.

use std::time::{Duration, Instant};

use clap::Args;

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
