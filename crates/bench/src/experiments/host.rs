//! Where and when something was measured.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The host of a measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostFacts {
    /// The kernel's release.
    pub kernel: String,
    /// Processors that this process may use.
    pub cpus: usize,
    /// The model of the first processor, where the kernel says it.
    pub cpu_model: String,
    /// When it began, by UTC: 2026-01-31T12:00:00Z.
    pub date_utc: String,
    /// The version of this program.
    pub spile_version: String,
}

impl HostFacts {
    /// This host, now.
    pub fn now() -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            cpu_model: cpu_model().unwrap_or_default(),
            date_utc: utc(since_1970.as_secs()),
            spile_version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// It in one line, for the note of a figure.
    pub fn summary(&self) -> String {
        format!("Linux {}, {} × {} · {}", self.kernel, self.cpus, self.cpu_model, self.date_utc)
    }
}

fn cpu_model() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// A time in seconds since 1970 as ISO 8601 has it, in UTC.
fn utc(seconds: u64) -> String {
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Year, month and day of a day counted from 1970-01-01.
fn date(mut days: u64) -> (u64, usize, u64) {
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_iso_8601_has_them() {
        let cases = [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_704_067_199, "2023-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ];
        for (seconds, text) in cases {
            assert_eq!(utc(seconds), text);
        }
    }
}
