//! The block device of the host on which a disk's bytes lie, and what the kernel counts of it in /proc/diskstats: the last layer that
//! a request passes.
//!
//! A file lies on the device that its file system is on (`st_dev`), which may be a partition or a volume of device-mapper: these are
//! taken as they are, as other disks share the device below them.
//!
//! The fields are those of the kernel's Documentation/admin-guide/iostats.rst. Of field 11, the weighted milliseconds, comes the average queue
//! size as iostat has it. Since Linux 5.7 these are the latencies of the requests that have ended, summed: a request counts
//! when it ends, and none of what is in flight is in there.
//!
//! A device's numbers and its name change from boot to boot. What is kept for a device is kept by its identity ([`HostDevice::identity`]).

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{Mode, OFlags, major, minor, open};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use spile_core::metrics::now_ns;
use spile_core::{Error, ErrorKind, Locator, Result};
use utoipa::ToSchema;

use crate::serving::api::rates::{LayerRates, OperationRates, per_s};

const DISKSTATS: &str = "/proc/diskstats";
/// The mounts of this process, as [`Mount`] reads them.
pub const MOUNTS: &str = "/proc/self/mountinfo";
const SECTOR_BYTES: u64 = 512;

/// Takes a block device for this process alone, as long as the file lives. Whoever writes over a device asks for this before.
///
/// # Errors
/// `Busy` when the device is mounted, or a part of another device; the system's.
pub fn claim(device: &Path) -> Result<File> {
    let fd = open(device, OFlags::RDWR | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty());
    fd.map(File::from).map_err(|errno| match errno {
        Errno::BUSY => Error::new(ErrorKind::Busy, "the device is in use: mounted, or a part of another device")
            .at_path(device)
            .hint("unmount it first"),
        _ => Error::io("open", errno.into()).at_path(device),
    })
}

/// A block device of this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostDevice {
    /// Its name as in /proc/diskstats, such as `sda1` or `dm-3`.
    pub name: String,
    /// Its major number.
    pub major: u32,
    /// Its minor number.
    pub minor: u32,
}

/// What the kernel has counted of a device up to one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceReading {
    /// The moment, in nanoseconds of CLOCK_MONOTONIC.
    at_ns: u64,
    reads: Counted,
    writes: Counted,
    discards: Counted,
    flushes: Counted,
    in_flight: u64,
    /// Field 11: all times together, in milliseconds. It wraps at 2^32.
    weighted_ms: u64,
}

/// What the kernel has counted of one kind of request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counted {
    ended: u64,
    merged: u64,
    sectors: u64,
    /// It wraps at 2^32.
    time_ms: u64,
}

/// Why a disk's bytes lie on no block device of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoDevice(String);

/// How long [`HostDevice::below_soon`] waits.
const PATIENCE: Duration = Duration::from_secs(1);

type Found = std::result::Result<HostDevice, NoDevice>;

/// A look for the device below a disk, on a thread of its own. Others that ask for the same disk meanwhile wait for the same answer.
#[derive(Default)]
struct Look {
    found: Mutex<Option<Found>>,
    is_over: Condvar,
}

/// The looks that are under way, by disk.
static LOOKS: Mutex<BTreeMap<String, Arc<Look>>> = Mutex::new(BTreeMap::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Look {
    /// The look at `disk` that is under way, or a new one by `look`.
    fn at(disk: &str, look: fn(&str) -> Found) -> Arc<Self> {
        let mut looks = lock(&LOOKS);
        if let Some(under_way) = looks.get(disk) {
            return under_way.clone();
        }
        let new = Arc::<Self>::default();
        looks.insert(disk.to_owned(), new.clone());
        let (disk, told) = (disk.to_owned(), new.clone());
        std::thread::spawn(move || {
            let found = look(&disk);
            lock(&LOOKS).remove(&disk);
            *lock(&told.found) = Some(found);
            told.is_over.notify_all();
        });
        new
    }

    fn answer(&self, patience: Duration) -> Found {
        let waited = self.is_over.wait_timeout_while(lock(&self.found), patience, |found| found.is_none());
        let (found, _) = waited.unwrap_or_else(PoisonError::into_inner);
        found.clone().unwrap_or_else(|| Err(NoDevice("the disk's file system does not answer".to_owned())))
    }
}

impl fmt::Display for NoDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl HostDevice {
    /// The device below `disk`, a path or a URI as the server names its leaf.
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn below(disk: &str) -> std::result::Result<Self, NoDevice> {
        match disk.parse() {
            Ok(Locator::Path(path)) => Self::below_path(&path),
            Ok(Locator::Nbd(_)) => Err(NoDevice(format!("{disk} is an NBD export, which another server has"))),
            Ok(_) => Err(NoDevice(format!("{disk} is in memory"))),
            Err(error) => Err(NoDevice(error.to_string())),
        }
    }

    /// As [`HostDevice::below`], but it waits a second at most: a file system that hangs answers no more. However many ask, one
    /// thread at a time waits for the answer about one disk.
    ///
    /// # Errors
    /// As there; when there is no answer.
    pub fn below_soon(disk: &str) -> std::result::Result<Self, NoDevice> {
        Look::at(disk, Self::below).answer(PATIENCE)
    }

    /// The device that `path` is, or that it lies on.
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn below_path(path: &Path) -> std::result::Result<Self, NoDevice> {
        let disk = path.display();
        let seen = |error| NoDevice(format!("{disk} cannot be looked at: {error}"));
        let path = path.canonicalize().map_err(seen)?;
        let meta = path.metadata().map_err(seen)?;
        let device = if meta.file_type().is_block_device() { meta.rdev() } else { meta.dev() };
        let stats =
            std::fs::read_to_string(DISKSTATS).map_err(|e| NoDevice(format!("{DISKSTATS} cannot be read: {e}")))?;
        let mounts = std::fs::read_to_string(MOUNTS).unwrap_or_default();
        let mount = Mount::of(&mounts, &path);
        // btrfs and others have a number of their own for each file system, which is no device's.
        let source = mount.as_ref().and_then(|mount| Path::new(&mount.source).metadata().ok());
        let source = source.filter(|source| source.file_type().is_block_device()).map(|source| source.rdev());
        let found = [Some(device), source].into_iter().flatten().find_map(|device| Self::find(&stats, device));
        found.ok_or_else(|| match mount {
            Some(mount) => NoDevice(format!("{disk} lies on {}, which is on no block device of this host", mount.kind)),
            None => NoDevice(format!("the device of {disk} is not in {DISKSTATS}")),
        })
    }

    /// What the device itself tells of who it is, as a part of a file's name; `None` when it tells nothing. A partition is a part of its disk.
    pub fn identity(&self) -> Option<String> {
        let number = format!("{}:{}", self.major, self.minor);
        identity_at(&Path::new("/sys/dev/block").join(number).canonicalize().ok()?)
    }

    /// The device with this number in the text of /proc/diskstats.
    fn find(stats: &str, device: u64) -> Option<Self> {
        let (major, minor) = (major(device), minor(device));
        lines(stats).find(|line| (line.major, line.minor) == (major, minor)).map(|line| Self {
            name: line.name.to_owned(),
            major,
            minor,
        })
    }

    /// What was counted of the device up to now.
    ///
    /// # Errors
    /// `NotFound` when it has gone; the system's.
    pub fn read(&self) -> Result<DeviceReading> {
        let stats = std::fs::read_to_string(DISKSTATS)
            .map_err(|e| Error::io("read what is counted of devices", e).at_path(Path::new(DISKSTATS)))?;
        let at_ns = now_ns();
        let line = lines(&stats).find(|line| (line.major, line.minor) == (self.major, self.minor));
        line.map(|line| line.reading(at_ns)).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("the device {} has gone", self.name)).at_path(Path::new(DISKSTATS))
        })
    }

    /// What the device did between two readings. It has no quantiles, and no queue size but iostat's.
    pub fn rates(&self, earlier: &DeviceReading, later: &DeviceReading) -> LayerRates {
        let elapsed_ns = later.at_ns.saturating_sub(earlier.at_ns);
        let of = |name, of: fn(&DeviceReading) -> &Counted| rates_of(name, of(earlier), of(later), elapsed_ns);
        let operations = [
            of("read", |reading| &reading.reads),
            of("write", |reading| &reading.writes),
            of("flush", |reading| &reading.flushes),
            of("discard", |reading| &reading.discards),
        ];
        let ended: f64 = operations.iter().map(|op| op.requests_per_s).sum();
        let time_s: f64 = operations.iter().map(|op| op.queue_size_iostat).sum();
        let merged = |of: fn(&DeviceReading) -> u64| per_s(of(later).saturating_sub(of(earlier)), elapsed_ns);
        LayerRates {
            name: format!("device {}", self.name),
            kind: "device".to_owned(),
            interval_s: elapsed_ns as f64 / 1e9,
            reads_per_s: operations[0].requests_per_s,
            writes_per_s: operations[1].requests_per_s,
            flushes_per_s: operations[2].requests_per_s,
            requests_per_s: ended,
            read_bytes_per_s: operations[0].bytes_per_s,
            write_bytes_per_s: operations[1].bytes_per_s,
            queue_size_iostat: per_s(rise_ms(earlier.weighted_ms, later.weighted_ms), elapsed_ns) / 1e3,
            in_flight: later.in_flight,
            latency_mean_us: (ended > 0.0).then(|| time_s / ended * 1e6),
            counters_per_s: [
                ("merged_reads_total".to_owned(), merged(|reading| reading.reads.merged)),
                ("merged_writes_total".to_owned(), merged(|reading| reading.writes.merged)),
            ]
            .into(),
            operations: operations.into_iter().filter(|op| op.requests_per_s > 0.0).collect(),
            ..LayerRates::default()
        }
    }
}

/// The identity of the device whose folder in sysfs is `folder`, without links. The kernel's Documentation/ABI/stable/sysfs-block and
/// testing/sysfs-block-dm name the files. Numbers such as 253:0 are given out anew at each boot: they are no identity.
fn identity_at(folder: &Path) -> Option<String> {
    let whole = if folder.join("partition").exists() { folder.parent()? } else { folder };
    let files = ["wwid", "device/wwid", "dm/uuid", "md/uuid", "serial", "device/serial"];
    let read = |file| std::fs::read_to_string(whole.join(file)).ok().map(|text| plain(text.trim()));
    files.into_iter().filter_map(read).find(|text| !text.is_empty())
}

/// `text` as a part of a file's name.
fn plain(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let text: String = text.chars().map(|c| if is_plain(c) { c } else { '-' }).take(100).collect();
    text.trim_matches(['.', '-']).to_owned()
}

fn rates_of(operation: &str, earlier: &Counted, later: &Counted, elapsed_ns: u64) -> OperationRates {
    let ended = later.ended.saturating_sub(earlier.ended);
    let time_ms = rise_ms(earlier.time_ms, later.time_ms);
    OperationRates {
        operation: operation.to_owned(),
        requests_per_s: per_s(ended, elapsed_ns),
        bytes_per_s: per_s(later.sectors.saturating_sub(earlier.sectors).saturating_mul(SECTOR_BYTES), elapsed_ns),
        queue_size_iostat: per_s(time_ms, elapsed_ns) / 1e3,
        latency_mean_us: (ended > 0).then(|| time_ms as f64 * 1e3 / ended as f64),
        ..OperationRates::default()
    }
}

/// The rise of a time in milliseconds that wraps at 2^32.
fn rise_ms(earlier: u64, later: u64) -> u64 {
    u64::from((later as u32).wrapping_sub(earlier as u32))
}

/// One line of /proc/diskstats.
struct Line<'a> {
    major: u32,
    minor: u32,
    name: &'a str,
    /// Fields 1 to 17; old kernels have 11 or 15.
    fields: [u64; 17],
}

fn lines(stats: &str) -> impl Iterator<Item = Line<'_>> {
    stats.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let (major, minor, name) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?, words.next()?);
        let mut fields = [0; 17];
        fields.iter_mut().zip(words).for_each(|(field, word)| *field = word.parse().unwrap_or(0));
        Some(Line { major, minor, name, fields })
    })
}

impl Line<'_> {
    fn reading(&self, at_ns: u64) -> DeviceReading {
        let fields = &self.fields;
        let four = |at: usize| Counted {
            ended: fields[at],
            merged: fields[at + 1],
            sectors: fields[at + 2],
            time_ms: fields[at + 3],
        };
        DeviceReading {
            at_ns,
            reads: four(0),
            writes: four(4),
            in_flight: fields[8],
            weighted_ms: fields[10],
            discards: four(11),
            flushes: Counted { ended: fields[15], time_ms: fields[16], ..Counted::default() },
        }
    }
}

/// A file system that is mounted.
#[derive(Debug, PartialEq, Eq)]
pub struct Mount {
    /// Where it is mounted.
    pub point: PathBuf,
    /// Its kind, such as `tmpfs`.
    pub kind: String,
    /// What is mounted, such as `/dev/sda1`.
    pub source: String,
}

impl Mount {
    /// The file system that `path`, an absolute one without links, lies on, in the text of [`MOUNTS`]. Of several at the
    /// same place the last one is seen.
    pub fn of(mounts: &str, path: &Path) -> Option<Self> {
        let above = Self::all(mounts).filter(|mount| path.starts_with(&mount.point));
        above.max_by_key(|mount| mount.point.components().count())
    }

    /// The file systems in such a text, in its order.
    pub fn all(mounts: &str) -> impl Iterator<Item = Self> {
        mounts.lines().filter_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            let point = PathBuf::from(unescaped(left.split(' ').nth(4)?));
            let mut right = right.split(' ');
            Some(Self { point, kind: right.next()?.to_owned(), source: unescaped(right.next()?) })
        })
    }
}

/// A word of mountinfo, in which blanks and backslashes are octal numbers (proc_pid_mountinfo(5)).
fn unescaped(word: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(word.to_owned(), |word, (code, character)| word.replace(code, character))
}

#[cfg(test)]
mod tests {
    use rustix::fs::makedev;

    use super::*;

    const STATS: &str = "\
   7       0 loop0 1 0 2 3 0 0 0 0 0 3 3
 254       0 vda 100 5 800 40 50 6 1600 4294967290 3 9 4294967200 7 0 56 8 9 10
 254       1 vda1 9 0 72 1 0 0 0 0 0 0 1 0 0 0 0 0 0
";

    fn vda(stats: &str, at_ns: u64) -> DeviceReading {
        lines(stats).find(|line| line.name == "vda").unwrap().reading(at_ns)
    }

    #[test]
    fn the_device_of_a_number_is_found_and_read() {
        assert_eq!(HostDevice::find(STATS, makedev(254, 1)).unwrap().name, "vda1");
        assert_eq!(HostDevice::find(STATS, makedev(0, 40)), None);
        let reading = vda(STATS, 5);
        assert_eq!((reading.reads.ended, reading.writes.sectors, reading.in_flight), (100, 1600, 3));
        assert_eq!((reading.flushes.ended, reading.flushes.time_ms, reading.discards.sectors), (9, 10, 56));
        // A kernel before 4.18 has eleven fields.
        let old = lines(STATS).next().unwrap().reading(0);
        assert_eq!((old.weighted_ms, old.discards, old.flushes), (3, Counted::default(), Counted::default()));
    }

    #[test]
    fn an_interval_of_a_device_is_what_iostat_says() {
        // Two seconds later: 400 reads of 8 sectors took 200 ms together, 100 writes took 406 ms, and a counter has wrapped.
        let later = " 254 0 vda 500 5 4000 240 150 16 2400 400 1 9 904 7 0 56 8 9 10";
        let vda_is = HostDevice::find(STATS, makedev(254, 0)).unwrap();
        let rates = vda_is.rates(&vda(STATS, 0), &vda(later, 2_000_000_000));
        assert_eq!((rates.name.as_str(), rates.kind.as_str(), rates.interval_s), ("device vda", "device", 2.0));
        assert_eq!((rates.reads_per_s, rates.writes_per_s, rates.flushes_per_s), (200.0, 50.0, 0.0));
        assert_eq!((rates.read_bytes_per_s, rates.write_bytes_per_s), (819_200.0, 204_800.0));
        assert_eq!((rates.queue_size_avg, rates.queue_size_iostat, rates.in_flight), (None, 0.5, 1));
        assert_eq!(rates.operations.iter().map(|op| op.latency_mean_us.unwrap()).collect::<Vec<_>>(), [500.0, 4060.0]);
        assert!((rates.latency_mean_us.unwrap() - 606_000.0 / 500.0).abs() < 1e-6, "{rates:?}");
        assert_eq!((rates.latency_p99_us, rates.counters_per_s["merged_writes_total"]), (None, 5.0));
    }

    #[test]
    fn the_file_system_of_a_path_is_the_one_mounted_last_and_deepest() {
        let mounts = "\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:26 / /tmp rw - tmpfs tmpfs rw
31 30 0:27 / /tmp/with\\040blank rw - btrfs /dev/vdb rw
32 22 0:28 / /tmp rw - overlay overlay rw
";
        let kind = |path: &str| Mount::of(mounts, Path::new(path)).unwrap().kind;
        assert_eq!([kind("/a"), kind("/tmpfs"), kind("/tmp/x")], ["ext4", "ext4", "overlay"]);
        let source = Mount::of(mounts, Path::new("/tmp/with blank/disk.raw")).unwrap().source;
        assert_eq!((kind("/tmp/with blank/disk.raw").as_str(), source.as_str()), ("btrfs", "/dev/vdb"));
    }

    /// Makes a folder of sysfs with these files.
    fn sysfs(dir: &Path, files: &[(&str, &str)]) {
        for (file, text) in files {
            let path = dir.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn a_device_is_known_by_what_it_tells_and_not_by_its_number() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        sysfs(&at("nvme0n1"), &[("wwid", "eui.0025 38/b1\n"), ("dev", "259:0\n"), ("nvme0n1p1/partition", "1\n")]);
        assert_eq!(identity_at(&at("nvme0n1")).unwrap(), "eui.0025-38-b1");
        assert_eq!(identity_at(&at("nvme0n1/nvme0n1p1")).unwrap(), "eui.0025-38-b1");
        sysfs(&at("dm-0"), &[("dm/uuid", "LVM-abc\n"), ("dev", "253:0\n")]);
        sysfs(&at("md0"), &[("md/uuid", "1-2\n")]);
        sysfs(&at("sda"), &[("device/wwid", "../naa.5000\n"), ("device/serial", "s\n")]);
        assert_eq!(["dm-0", "md0", "sda"].map(|name| identity_at(&at(name)).unwrap()), ["LVM-abc", "1-2", "naa.5000"]);
        // A loop device, or a disk of a guest to which nobody gave a serial number.
        sysfs(&at("vda"), &[("serial", "\n"), ("dev", "254:0\n"), ("loop/backing_file", "/srv/a\n")]);
        assert_eq!(identity_at(&at("vda")), None);
    }

    #[test]
    fn one_thread_at_a_time_waits_for_a_file_system_that_hangs() {
        fn slow(_: &str) -> Found {
            std::thread::sleep(Duration::from_millis(300));
            Err(NoDevice("looked at".to_owned()))
        }
        let why = |look: &Look, patience| look.answer(patience).unwrap_err().to_string();
        let first = Look::at("hangs", slow);
        assert_eq!(why(&first, Duration::from_millis(1)), "the disk's file system does not answer");
        let second = Look::at("hangs", |_| panic!("a second look"));
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!(why(&second, Duration::from_secs(60)), "looked at");
        assert!(!lock(&LOOKS).contains_key("hangs"));
    }

    #[test]
    fn what_lies_on_no_device_says_why() {
        let why = |disk: &str| HostDevice::below(disk).unwrap_err().to_string();
        assert!(why("nbd://host/export").contains("another server"), "{}", why("nbd://host/export"));
        assert!(why("mem:1M").contains("in memory"));
        assert!(why("/proc/version").contains("proc, which is on no block device"), "{}", why("/proc/version"));
        assert!(why("/gone/disk.raw").contains("No such file"), "{}", why("/gone/disk.raw"));
    }
}
