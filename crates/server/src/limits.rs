//! Limits as they are written on a command line: `iops=1000,write-bps=50M,burst=1s`, as options of a DISK or of `--group`.

use std::str::FromStr;

use spile_node::Limits;

use crate::disks::split_commas;
use crate::units::{parse_duration, parse_size};

/// The options, for messages.
pub const OPTIONS: &str = "iops=N, read-iops=N, write-iops=N, bps=SIZE, read-bps=SIZE, write-bps=SIZE, burst=TIME";

/// Reads a number of requests in a second.
///
/// # Errors
/// A message fit for a command line.
pub fn parse_iops(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("`{text}` is no number of requests in a second; write it out, such as 5000"))
}

/// Reads a number of bytes in a second.
///
/// # Errors
/// A message fit for a command line.
pub fn parse_bps(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(|why| format!("{why} (bytes in a second)"))
}

/// Reads one option of limits into `limits`. False when `key` is none.
///
/// # Errors
/// A message fit for a command line.
pub fn read_option(limits: &mut Limits, key: &str, value: &str) -> Result<bool, String> {
    match key {
        "iops" => limits.iops = Some(parse_iops(value)?),
        "read-iops" => limits.read_iops = Some(parse_iops(value)?),
        "write-iops" => limits.write_iops = Some(parse_iops(value)?),
        "bps" => limits.bps = Some(parse_bps(value)?),
        "read-bps" => limits.read_bps = Some(parse_bps(value)?),
        "write-bps" => limits.write_bps = Some(parse_bps(value)?),
        "burst" => limits.burst = Some(parse_duration(value)?),
        _ => return Ok(false),
    }
    limits.check().map(|()| true).map_err(|error| format!("{key}={value}: {error}"))
}

/// `NAME[,iops=N]…`: a group of disks with the limits that they share. A comma in the name is doubled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    /// The group's name.
    pub name: String,
    /// Its limits.
    pub limits: Limits,
}

impl FromStr for GroupSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = split_commas(text).into_iter();
        let name = parts.next().filter(|name| !name.is_empty() && !name.contains('='));
        let name = name.ok_or_else(|| format!("`{text}` does not begin with the name of a group"))?;
        let mut limits = Limits::default();
        for part in parts {
            let option = part.split_once('=').map_or(Ok(false), |(key, value)| read_option(&mut limits, key, value));
            if !option? {
                return Err(format!("`{part}` is not an option of a group; use {OPTIONS}"));
            }
        }
        Ok(Self { name, limits })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn limits_are_read() {
        let group: GroupSpec = "gold,,1,iops=5000,write-bps=50M,burst=2s".parse().unwrap();
        let limits = Limits {
            iops: Some(5000),
            write_bps: Some(50 << 20),
            burst: Some(Duration::from_secs(2)),
            ..Limits::default()
        };
        assert_eq!(group, GroupSpec { name: "gold,1".to_owned(), limits });
        assert!("gold".parse::<GroupSpec>().unwrap().limits.is_none());
    }

    #[test]
    fn what_is_no_limit_is_refused_in_words() {
        for (text, says) in [
            ("iops=5", "begin with the name"),
            ("", "begin with the name"),
            ("g,iops=5k", "write it out"),
            ("g,bps=20MB", "bytes in a second"),
            ("g,iops=0", "let nothing pass"),
            ("g,burst=2h", "an hour at most"),
            ("g,speed=5", "use iops=N"),
            ("g,iops", "use iops=N"),
        ] {
            let error = text.parse::<GroupSpec>().unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
