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

/// Writes how long ago something was, or how long it takes: `under 1 s`, `45 s`, `12 min`, `3 h 20 min`, `5 d 3 h`.
pub fn format_age(seconds: u64) -> String {
    let two = |large: u64, unit: &str, small: u64, of: &str| match small {
        0 => format!("{large} {unit}"),
        small => format!("{large} {unit} {small} {of}"),
    };
    match seconds {
        0 => "under 1 s".to_owned(),
        1..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => two(seconds / 3_600, "h", seconds % 3_600 / 60, "min"),
        _ => two(seconds / 86_400, "d", seconds % 86_400 / 3_600, "h"),
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

/// Writes bytes in a second with a decimal unit, as disks and networks are sold by: `950 B/s`, `12.3 kB/s`, `123 MB/s`, `1.23 GB/s`. All rates are told so.
pub fn format_rate(bytes_per_s: f64) -> String {
    match bytes_per_s {
        rate if rate < 1_000.0 => format!("{rate:.0} B/s"),
        rate if rate < 1e6 => format!("{} kB/s", three_digits(rate / 1e3)),
        rate if rate < 1e9 => format!("{} MB/s", three_digits(rate / 1e6)),
        rate => format!("{} GB/s", three_digits(rate / 1e9)),
    }
}

/// Writes a limit of bytes in a second as [`parse_size`] reads it, and what that is as a rate: `5M (5.24 MB/s)`. Units of a size are binary, those of a rate decimal.
pub fn format_limit(bytes_per_s: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("T", 40), ("G", 30), ("M", 20), ("K", 10)];
    let unit = UNITS.iter().find(|(_, shift)| bytes_per_s > 0 && bytes_per_s.is_multiple_of(1 << shift));
    let rate = format_rate(bytes_per_s as f64);
    match unit {
        Some((unit, shift)) => format!("{}{unit} ({rate})", bytes_per_s >> shift),
        None if bytes_per_s < 1_000 => rate,
        None => format!("{bytes_per_s} ({rate})"),
    }
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
    fn rates_are_decimal_and_limits_are_told_as_they_were_asked() {
        assert_eq!(
            [0.4, 999.0, 52_400.0, 5_242_880.0, 2e9].map(format_rate),
            ["0 B/s", "999 B/s", "52.4 kB/s", "5.24 MB/s", "2.00 GB/s"]
        );
        for (asked, told) in [
            ("5M", "5M (5.24 MB/s)"),
            ("1.5M", "1536K (1.57 MB/s)"),
            ("50000000", "50000000 (50.0 MB/s)"),
            ("2G", "2G (2.15 GB/s)"),
        ] {
            assert_eq!(format_limit(parse_size(asked).unwrap()), told);
        }
        assert_eq!([0, 1].map(format_limit), ["0 B/s", "1 B/s"]);
    }

    #[test]
    fn ages_have_the_unit_of_their_size() {
        let ages = [0, 1, 119, 120, 7_199, 7_200, 12_000, 172_800, 90_000 * 10, 1_795_896_786].map(format_age);
        let wanted =
            ["under 1 s", "1 s", "119 s", "2 min", "119 min", "2 h", "3 h 20 min", "2 d", "10 d 10 h", "20785 d 20 h"];
        assert_eq!(ages, wanted);
    }

    #[test]
    fn durations() {
        assert_eq!(parse_duration("10"), Ok(Duration::from_secs(10)));
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert!(parse_duration("10x").is_err() && parse_duration("").is_err());
        assert_eq!(format_us(4560.0), "4.56 ms");
    }
}
