//! The block device below a file, as the host's kernel counts it: what iostat shows.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};
use spile_core::{Error, ErrorKind, Result, ResultExt};

/// A block device of the host.
#[derive(Clone, Debug)]
pub struct HostDevice {
    /// Its name, such as `sda`.
    pub name: String,
    stat: PathBuf,
}

/// What the kernel has counted of a device since it was found (`Documentation/admin-guide/iostats.rst`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceCounts {
    /// Reads and writes that have ended.
    pub requests: u64,
    /// Reads and writes that went to the device as a part of a neighbour.
    pub merged: u64,
    /// The time that ended reads and writes took together, in milliseconds.
    pub latency_ms: u64,
    /// The weighted time in milliseconds, from which iostat makes `aqu-sz`: since Linux 5.0 the time that ended requests took.
    pub ticks_ms: u64,
}

impl HostDevice {
    /// The device that holds `path`, or that `path` is. `None` where the kernel does not say it, as for a file in memory or on
    /// a file system that spreads over several devices.
    pub fn of(path: &Path) -> Option<Self> {
        let about = std::fs::metadata(path).ok()?;
        let device = if about.file_type().is_block_device() { about.rdev() } else { about.dev() };
        let link = PathBuf::from(format!("/sys/dev/block/{}:{}", major(device), minor(device)));
        let name = std::fs::canonicalize(&link).ok()?.file_name()?.to_string_lossy().into_owned();
        Some(Self { name, stat: link.join("stat") })
    }

    /// What was counted up to now.
    ///
    /// # Errors
    /// When the kernel does not show it, with the path.
    pub fn read(&self) -> Result<DeviceCounts> {
        let text = std::fs::read_to_string(&self.stat).map_err(|e| Error::io("read the device's counters", e));
        let counts = text.and_then(|text| {
            parse(&text).ok_or_else(|| Error::new(ErrorKind::Protocol, "the device's counters are not understood"))
        });
        counts.at_path(&self.stat)
    }
}

impl DeviceCounts {
    /// What was counted from `earlier` up to this.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            requests: self.requests.wrapping_sub(earlier.requests),
            merged: self.merged.wrapping_sub(earlier.merged),
            latency_ms: self.latency_ms.wrapping_sub(earlier.latency_ms),
            ticks_ms: self.ticks_ms.wrapping_sub(earlier.ticks_ms),
        }
    }
}

/// The fields of `/sys/block/NAME/stat`: reads, merged, sectors, ms; the same of writes; in flight, busy ms, weighted ms; more.
fn parse(text: &str) -> Option<DeviceCounts> {
    let fields: Vec<u64> = text.split_whitespace().map_while(|field| field.parse().ok()).collect();
    let at = |field: usize| fields.get(field).copied();
    Some(DeviceCounts {
        requests: at(0)? + at(4)?,
        merged: at(1)? + at(5)?,
        latency_ms: at(3)? + at(7)?,
        ticks_ms: at(10)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_are_those_of_the_kernel() {
        let counts = parse("  100 1 800 50 20 2 160 30 5 70 85 0 0 0 0 3 4\n").unwrap();
        assert_eq!(counts, DeviceCounts { requests: 120, merged: 3, latency_ms: 80, ticks_ms: 85 });
        let earlier = DeviceCounts { requests: 20, ..DeviceCounts::default() };
        assert_eq!(counts.since(&earlier).requests, 100);
        assert_eq!(parse("1 2 3"), None);
    }

    #[test]
    fn memory_is_on_no_device() {
        assert!(HostDevice::of(Path::new("/proc/self/stat")).is_none());
    }
}
