//! Where and when something was measured.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use spile_server::host_device::{HostDevice, MOUNTS, Mount};
use spile_server::units::format_size;
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
    /// True when the host is itself a virtual machine.
    #[serde(default)]
    pub is_virtual: bool,
    /// The host's memory.
    #[serde(default)]
    pub memory_bytes: u64,
    /// The governor of the first processor's frequency; none where the kernel does not set it.
    #[serde(default)]
    pub governor: Option<String>,
    /// What the kernel does against faults of the processor, such as `spectre_v2: Mitigation: Retpolines`; those that the processor does
    /// not have are left out.
    #[serde(default)]
    pub mitigations: Vec<String>,
    /// The file system where the experiment has measured, such as `ext4 on /dev/sda1`; none when it has measured on no file.
    #[serde(default)]
    pub file_system: Option<String>,
    /// The block device below that file system, where the kernel names one.
    #[serde(default)]
    pub device: Option<String>,
}

impl HostFacts {
    /// This host, now, for an experiment that measures on no file or device.
    pub fn now() -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            cpu_model: cpu_model().unwrap_or_default(),
            date_utc: utc(since_1970.as_secs()),
            spile_version: env!("CARGO_PKG_VERSION").to_owned(),
            is_virtual: cpu_line("flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
            memory_bytes: memory_bytes().unwrap_or(0),
            governor: first_line(Path::new("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
            mitigations: mitigations(Path::new("/sys/devices/system/cpu/vulnerabilities")),
            file_system: None,
            device: None,
        }
    }

    /// This host, now, for an experiment that measures on `place`, or in memory where there is none.
    pub fn at_some(place: Option<&Path>) -> Self {
        place.map_or_else(Self::now, Self::at)
    }

    /// This host, now, with the file system and the device below `place`: the folder, file or device that is measured.
    pub fn at(place: &Path) -> Self {
        Self { file_system: file_system(place), device: device(place), ..Self::now() }
    }

    /// Each fact with its name, for a page; what is not known is said so.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let or = |text: &Option<String>, other: &str| text.clone().unwrap_or_else(|| other.to_owned());
        let cpu = if self.cpu_model.is_empty() { "not named by the kernel" } else { &self.cpu_model };
        let is_virtual = if self.is_virtual { "; a virtual machine" } else { "" };
        let memory = if self.memory_bytes > 0 { format_size(self.memory_bytes) } else { "not known".to_owned() };
        let mitigations = self.mitigations.join("; ");
        vec![
            ("processor", format!("{} × {cpu}{is_virtual}", self.cpus)),
            ("memory", memory),
            ("kernel", format!("Linux {}", self.kernel)),
            ("governor", or(&self.governor, "none: the kernel does not set the frequency")),
            ("mitigations", if mitigations.is_empty() { "none".to_owned() } else { mitigations }),
            ("Spile", self.spile_version.clone()),
        ]
    }

    /// Where it was measured, for a page.
    pub fn storage(&self) -> String {
        match (&self.file_system, &self.device) {
            (None, None) => "no file or device".to_owned(),
            (Some(file_system), None) => format!("{file_system}; no device that the kernel names"),
            (None, Some(device)) => device.clone(),
            (Some(file_system), Some(device)) => format!("{file_system}; {device}"),
        }
    }

    /// It in one line, for the note of a figure.
    pub fn summary(&self) -> String {
        format!("Linux {}, {} × {} · {}", self.kernel, self.cpus, self.cpu_model, self.date_utc)
    }
}

fn cpu_model() -> Option<String> {
    cpu_line("model name")
}

/// What the kernel says of the first processor under that name.
fn cpu_line(name: &str) -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn first_line(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().next().map(|line| line.trim().to_owned())
}

fn memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib << 10)
}

/// One line for each fault that the processor has.
fn mitigations(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let line = |entry: std::fs::DirEntry| {
        let status = first_line(&entry.path())?;
        (status != "Not affected").then(|| format!("{}: {status}", entry.file_name().to_string_lossy()))
    };
    let mut lines: Vec<String> = entries.flatten().filter_map(line).collect();
    lines.sort();
    lines
}

/// The file system that has `place`; none for a device, whose name lies on another file system than its bytes.
fn file_system(place: &Path) -> Option<String> {
    let place = place.canonicalize().ok()?;
    let is_device = place.metadata().ok()?.file_type().is_block_device();
    let mounts = std::fs::read_to_string(MOUNTS).ok()?;
    mount_of(&place, &mounts).filter(|_| !is_device)
}

/// The kind and the source of the mount that has a path, from the text of [`MOUNTS`].
fn mount_of(path: &Path, mounts: &str) -> Option<String> {
    Mount::of(mounts, path).map(|mount| format!("{} on {}", mount.kind, mount.source))
}

fn device(place: &Path) -> Option<String> {
    let name = HostDevice::below(&place.canonicalize().ok()?.display().to_string()).ok()?.name;
    let folder = PathBuf::from("/sys/class/block").join(&name);
    // A partition's queue is that of its disk, whose folder is above.
    let of_queue = |field: &str| {
        let own = first_line(&folder.join("queue").join(field));
        own.or_else(|| first_line(&std::fs::canonicalize(&folder).ok()?.parent()?.join("queue").join(field)))
    };
    let model = first_line(&folder.join("device/model")).map(|model| format!("{model}, "));
    let sectors = first_line(&folder.join("size")).and_then(|sectors| sectors.parse::<u64>().ok());
    let size = sectors.map(|sectors| format!("{}, ", format_size(sectors << 9)));
    let kind = of_queue("rotational").map(|kind| if kind == "1" { "says that it spins, " } else { "solid-state, " });
    let scheduler = of_queue("scheduler").unwrap_or_default();
    let text = format!("{name}: {}{}{}", model.unwrap_or_default(), size.unwrap_or_default(), kind.unwrap_or_default());
    Some(format!("{text}scheduler {}", scheduler.split(['[', ']']).nth(1).unwrap_or(&scheduler)))
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

    #[test]
    fn the_deepest_mount_has_a_path() {
        let mounts = "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / /srv rw - xfs /dev/b rw\n\
                      3 2 0:9 / /srv/tmp rw - tmpfs tmpfs rw\nbroken\n";
        let of = |path: &str| mount_of(Path::new(path), mounts);
        assert_eq!(of("/srv/disks").unwrap(), "xfs on /dev/b");
        assert_eq!(of("/srvs").unwrap(), "ext4 on /dev/a");
        assert_eq!(of("/srv/tmp/x").unwrap(), "tmpfs on tmpfs");
    }

    #[test]
    fn the_storage_is_that_of_the_place_and_not_of_the_start() {
        // /proc is on no device, wherever this test is started.
        let host = HostFacts::at(Path::new("/proc/self"));
        assert!(host.file_system.as_deref().is_some_and(|text| text.starts_with("proc on ")) && host.device.is_none());
        assert!(host.storage().ends_with("; no device that the kernel names"), "{}", host.storage());
        assert_eq!(HostFacts::now().storage(), "no file or device");
        assert_eq!(HostFacts::at(Path::new("/nowhere/at/all")).storage(), "no file or device");
    }

    #[test]
    fn faults_that_the_processor_does_not_have_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        for (name, status) in
            [("meltdown", "Not affected\n"), ("spectre_v1", "Mitigation: fences\n"), ("mds", "Vulnerable\n")]
        {
            std::fs::write(dir.path().join(name), status).unwrap();
        }
        assert_eq!(mitigations(dir.path()), ["mds: Vulnerable", "spectre_v1: Mitigation: fences"]);
        assert!(mitigations(Path::new("/nowhere")).is_empty());
    }

    #[test]
    fn results_of_an_earlier_version_have_fewer_facts() {
        let json = r#"{"kernel":"6.1.0","cpus":2,"cpu_model":"","date_utc":"","spile_version":"0.1.0"}"#;
        let host: HostFacts = serde_json::from_str(json).unwrap();
        assert!(host.facts().iter().any(|(name, value)| *name == "memory" && value == "not known"));
    }
}
