//! Human units in and out. Sizes are binary (`20G` is 20 GiB); a bare `B` after the letter (`20GB`) is refused,
//! because people mean two different things by it.

use std::time::Duration;

pub use spile_core::format_size;

pub use spile_core::parse_size;

/// Reads a length of time: `10s`, `500ms`, `2m`, `1h`; a bare number means seconds.
///
/// # Errors
/// A message fit for a command line.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("`{text}` is not a length of time; write 10s, 500ms, 2m or 1h");
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let unit_s = match suffix {
        "" | "s" => 1.0,
        "ms" => 1e-3,
        "us" | "µs" => 1e-6,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(bad()),
    };
    let value: f64 = number.parse().map_err(|_| bad())?;
    Duration::try_from_secs_f64(value * unit_s).map_err(|_| bad())
}

/// Writes a latency given in microseconds with three digits that matter: `12.3 µs`, `4.56 ms`, `1.20 s`.
pub fn format_us(us: f64) -> String {
    match us {
        us if us < 1_000.0 => format!("{} µs", three_digits(us)),
        us if us < 1_000_000.0 => format!("{} ms", three_digits(us / 1e3)),
        us => format!("{} s", three_digits(us / 1e6)),
    }
}

fn three_digits(value: f64) -> String {
    match value {
        v if v < 10.0 => format!("{v:.2}"),
        v if v < 100.0 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// Writes a count with a decimal unit where it is long: `950`, `12.3 k`, `1.23 M`.
pub fn format_count(count: f64) -> String {
    match count {
        c if c < 1_000.0 => format!("{c:.0}"),
        c if c < 1e6 => format!("{} k", three_digits(c / 1e3)),
        c => format!("{} M", three_digits(c / 1e6)),
    }
}

/// Writes a rate in decimal megabytes a second, as disks are sold by: `123 MB/s`.
pub fn format_rate(bytes_per_s: f64) -> String {
    format!("{} MB/s", three_digits(bytes_per_s / 1e6))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary() {
        let cases = [("0", 0), ("512", 512), ("4k", 4096), ("20G", 20 << 30), ("1.5TiB", 3 << 39), ("20gib", 20 << 30)];
        for (text, bytes) in cases {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for same in ["1m", "1mib", "1MIB", "1 MiB", "1048576", "1024 K", "1048576 B"] {
            assert_eq!(parse_size("1MiB"), parse_size(same), "{same}");
        }
        assert_eq!(parse_size("9223372036854775807"), Ok(i64::MAX as u64));
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        for text in ["", "G", "-1", "20GB", "1.k", "0.3", "16E", "1.2.3G", "1 G B", "G1", "1\tX"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_that_cannot_be_are_refused_in_words() {
        for text in ["8E", "16E", "99999999999999999999", "9223372036854775808"] {
            let says = parse_size(text).unwrap_err();
            assert!(says.contains("too large"), "{says}");
        }
        let says = parse_size("20 gb").unwrap_err();
        assert!(says.contains("20G or 20GiB") && says.contains("two things"), "{says}");
    }

    #[test]
    fn sizes_read_back() {
        for (bytes, text) in [(0, "0 B"), (512, "512 B"), (20 << 30, "20 GiB"), (3 << 19, "1.5 MiB")] {
            assert_eq!(format_size(bytes), text);
        }
        assert_eq!(format_size(u64::MAX), "16 EiB");
    }

    #[test]
    fn durations() {
        assert_eq!(parse_duration("10"), Ok(Duration::from_secs(10)));
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert!(parse_duration("10x").is_err() && parse_duration("").is_err());
        assert_eq!(format_us(4560.0), "4.56 ms");
    }
}
