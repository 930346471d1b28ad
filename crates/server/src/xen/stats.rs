//! Statistics of a disk in the files and the layout of tapdisk3, so that tools made for tapdisk3 can read them.
//!
//! Two files of a page each in `/dev/shm`, for the device `DEV` of domain `DOM`, served by process `PID`; all numbers are
//! little-endian and of 64 bits where nothing else is said, times are in µs, sectors have 512 bytes, numbers only rise:
//!
//! 1. `td3-PID/vbd-DOM-DEV` (`struct stats` of blktap's drivers/tapdisk-metrics-stats.h, path in tapdisk-metrics.h):
//!
//!    | at | what |
//!    |---|---|
//!    | 0 | version, 32 bits: 1; then 32 bits of nothing |
//!    | 8 | requests that found no memory |
//!    | 16, 24, 32, 40 | reads taken; reads ended; sectors of the reads taken; time of those ended, all together |
//!    | 48, 56, 64, 72 | the same of writes |
//!    | 80 | requests that failed |
//!    | 88 | flags: bit 0, memory is low |
//!
//! 2. `vbd3-DOM-DEV/statistics` (`struct blkback_stats` of blktap's include/blktap3.h, path in drivers/td-blkif.c): discards
//!    at 0; flushes, 8; requests that found no memory, 16; then of reads: taken, 24; ended, 32; sectors, 40; time, 48; the
//!    longest time, 56; the same of writes from 64 to 96; flags as above, 104.
//!
//! Who reads them. *xsiostat* (xsiostat_vbd.c) lists `/dev/shm` for folders `vbd3-DOM-DEV`, reads the pid from the key
//! `/local/domain/0/backend/vbd3/DOM/DEV/kthread-pid`, maps a page of the first file, and forgets a disk whose file has
//! been removed. *rrdp-iostat* (xcp-rrdd's plugin) does the same, but is told of folders by inotify: it looks again
//! only when the folder has been removed and made anew, which is why a successor does that, and does it last. Tools of
//! XenServer 6.5 read the second file and need no pid. Both tools' key says `vbd3`: they see disks that are served with
//! `spile xen-backend --type vbd3`, which is the type that their toolstack uses for tapdisk3.
//!
//! Where we differ from tapdisk3: everyone may read the files, as /proc/diskstats; flushes and discards, which it does
//! not know, are counted; a request that makes no sense counts as failed. One that finds no memory waits here, so that
//! number stays 0, and so does the flag. There is no `io_ring` beside the second file: xen-ringwatch takes indices that
//! stand still for a ring that is stuck, and they would have to be written by a clock to be right.
//!
//! With the stand-in for Xen the files are in the folder `shm` of the stand-in, because two stand-ins may have a domain of the same
//! number.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, ErrorKind as IoErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::process::geteuid;
use spile_core::metrics::OpSums;
use spile_core::{Error, Result, SECTOR_BYTES};
use spile_front_blkif::metrics::{Board, RequestSums};
use spile_mem::Segment;

use crate::xen::Place;
use crate::xen::claim::file_stem;

/// Bytes of each file: the tools map a page.
const FILE_BYTES: usize = 4096;
/// The version in the first file.
const VERSION: u32 = 1;
const NS_IN_US: u64 = 1000;

/// The files of one disk. They are removed when this is dropped.
pub struct Stats {
    pages: Arc<Pages>,
    root: PathBuf,
    stem: String,
}

/// The files' memory, which may be used for longer than the files have names.
struct Pages {
    /// `td3-PID/vbd-DOM-DEV`
    tapdisk: Segment,
    /// `vbd3-DOM-DEV/statistics`
    blkback: Segment,
}

impl Stats {
    /// Makes the files of the disk of the back end at `backend_path`. The caller holds the claim on that disk, so files that another
    /// process has left of it are removed. When the files cannot be made, the log says why, and the disk is served without them.
    pub fn begin(place: &impl Place, backend_path: &str) -> Option<Self> {
        let root = place.stats_root();
        let stats = file_stem(backend_path).and_then(|stem| Self::create(&root, &stem));
        stats.inspect_err(|error| tracing::warn!(%error, "no statistics for tools that read those of tapdisk3")).ok()
    }

    /// Makes the files of the device `stem` (`DOM-DEV`) in the folder `root`.
    ///
    /// # Errors
    /// What cannot be made.
    pub fn create(root: &Path, stem: &str) -> Result<Self> {
        fs::create_dir_all(root).map_err(|source| Error::io("make the folder", source).at_path(root))?;
        forget(root, stem);
        let process = root.join(format!("td3-{}", std::process::id()));
        let made = (|| {
            let tapdisk = make_file(&process, &format!("vbd-{stem}"))?;
            tapdisk.store_u32(0, VERSION, Ordering::Relaxed);
            // This one comes last, because tools wait for it.
            let blkback = make_file(&root.join(format!("vbd3-{stem}")), "statistics")?;
            Ok(Arc::new(Pages { tapdisk, blkback }))
        })();
        let made = made.map(|pages| Self { pages, root: root.to_owned(), stem: stem.to_owned() });
        made.inspect_err(|_| forget(root, stem))
    }

    /// The files, as the place where the back end writes its sums.
    pub fn board(&self) -> Arc<dyn Board> {
        self.pages.clone()
    }
}

impl Drop for Stats {
    fn drop(&mut self) {
        forget(&self.root, &self.stem);
    }
}

impl Board for Pages {
    fn show(&self, sums: &RequestSums) {
        let fields = |op: &OpSums| {
            let [time_us, max_us] = [op.latency_sum_ns, op.latency_max_ns].map(|ns| ns / NS_IN_US);
            [op.begun, op.ended, op.bytes / SECTOR_BYTES, time_us, max_us]
        };
        let (reads, writes) = (fields(&sums.reads), fields(&sums.writes));
        store(&self.tapdisk, 16, &reads[..4]);
        store(&self.tapdisk, 48, &writes[..4]);
        store(&self.tapdisk, 80, &[sums.errors()]);
        store(&self.blkback, 0, &[sums.discards.begun, sums.flushes.begun]);
        store(&self.blkback, 24, &reads);
        store(&self.blkback, 64, &writes);
    }
}

fn store(page: &Segment, at: usize, numbers: &[u64]) {
    for (index, number) in numbers.iter().enumerate() {
        page.store_u64(at + 8 * index, number.to_le(), Ordering::Relaxed);
    }
}

/// Makes a file of zeroes in a folder that is made if it is not there, and maps it.
fn make_file(folder: &Path, name: &str) -> Result<Segment> {
    let path = folder.join(name);
    let make = || {
        match DirBuilder::new().mode(0o755).create(folder) {
            Err(error) if error.kind() == IoErrorKind::AlreadyExists && is_ours(folder) => {}
            made => made?,
        }
        fs::set_permissions(folder, Permissions::from_mode(0o755))?;
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o644).open(&path)?;
        file.set_permissions(Permissions::from_mode(0o644))?;
        file.set_len(FILE_BYTES as u64)?;
        Segment::map_shared(&file, 0, FILE_BYTES)
    };
    make().map_err(|source: io::Error| Error::io("make", source).at_path(&path))
}

/// Removes the files of a device that nobody serves, whichever process has left them.
fn forget(root: &Path, stem: &str) {
    // Usually there is nothing to remove.
    let remove = |folder: PathBuf, names: &[String]| {
        if is_ours(&folder) {
            names.iter().for_each(|name| drop(fs::remove_file(folder.join(name))));
            // This fails when the process has files of another device, which stay.
            let _ = fs::remove_dir(folder);
        }
    };
    remove(root.join(format!("vbd3-{stem}")), &["statistics".into(), "io_ring".into()]);
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.strip_prefix("td3-")?.parse::<u32>().ok());
        let file = format!("vbd-{stem}");
        if pid.is_some() && entry.path().join(&file).exists() {
            remove(entry.path(), &[file]);
        }
    }
}

/// True for a folder that a process of this user has made. Anybody may make files in /dev/shm, but nobody else can replace a
/// folder of this user's.
fn is_ours(folder: &Path) -> bool {
    fs::symlink_metadata(folder).is_ok_and(|found| found.is_dir() && found.uid() == geteuid().as_raw())
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEM: &str = "7-51712";

    fn sums() -> RequestSums {
        let reads =
            OpSums { begun: 5, ended: 4, errors: 1, bytes: 40 * 512, latency_sum_ns: 123_999, latency_max_ns: 99_000 };
        let writes = OpSums {
            begun: 7,
            ended: 6,
            errors: 0,
            bytes: 80 * 512,
            latency_sum_ns: 2_000_000,
            latency_max_ns: 1_000_000,
        };
        let some = |begun| OpSums { begun, ..OpSums::default() };
        RequestSums { reads, writes, flushes: some(2), discards: some(3) }
    }

    fn number(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn ours() -> String {
        format!("td3-{}", std::process::id())
    }

    #[test]
    fn sums_lie_where_the_headers_say() {
        let root = tempfile::tempdir().unwrap();
        let stats = Stats::create(root.path(), STEM).unwrap();
        stats.board().show(&sums());
        let tapdisk = fs::read(root.path().join(ours()).join("vbd-7-51712")).unwrap();
        assert_eq!((tapdisk.len(), u32::from_le_bytes(tapdisk[..4].try_into().unwrap())), (4096, 1));
        let all: Vec<_> = (8..96).step_by(8).map(|at| number(&tapdisk, at)).collect();
        assert_eq!(all, [0, 5, 4, 40, 123, 7, 6, 80, 2000, 1, 0]);
        let blkback = fs::read(root.path().join("vbd3-7-51712/statistics")).unwrap();
        assert_eq!(blkback.len(), 4096);
        let all: Vec<_> = (0..112).step_by(8).map(|at| number(&blkback, at)).collect();
        assert_eq!(all, [3, 2, 0, 5, 4, 40, 123, 99, 7, 6, 80, 2000, 1000, 0]);
    }

    #[test]
    fn everyone_may_read_them_and_they_go_with_the_disk() {
        let root = tempfile::tempdir().unwrap();
        let other = Stats::create(root.path(), "7-51728").unwrap();
        let stats = Stats::create(root.path(), STEM).unwrap();
        let board = stats.board();
        assert_eq!(names(root.path()), [ours(), "vbd3-7-51712".into(), "vbd3-7-51728".into()]);
        for (path, mode) in [("vbd3-7-51712", 0o40755), ("vbd3-7-51712/statistics", 0o100_644)] {
            assert_eq!(fs::metadata(root.path().join(path)).unwrap().mode(), mode, "{path}");
        }
        drop(stats);
        assert_eq!(names(root.path()), [ours(), "vbd3-7-51728".into()]);
        assert_eq!(names(&root.path().join(ours())), ["vbd-7-51728"]);
        // A ring that ends late does no harm.
        board.show(&sums());
        drop(other);
        assert!(names(root.path()).is_empty());
    }

    #[test]
    fn a_successor_removes_what_a_killed_process_has_left_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let make = |path: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, [9; 4096]).unwrap();
        };
        ["td3-1/vbd-7-51712", "td3-2/vbd-8-51712", "td3-x/vbd-7-51712"].into_iter().for_each(make);
        ["vbd3-7-51712/statistics", "vbd3-8-51712/statistics"].into_iter().for_each(make);
        let stats = Stats::create(root.path(), STEM).unwrap();
        let page = fs::read(root.path().join("vbd3-7-51712/statistics")).unwrap();
        assert!(page.iter().all(|byte| *byte == 0));
        drop(stats);
        assert_eq!(names(root.path()), ["td3-2", "td3-x", "vbd3-8-51712"]);
        assert_eq!(names(&root.path().join("td3-2")), ["vbd-8-51712"]);
    }

    #[test]
    fn a_link_that_somebody_has_put_there_is_not_followed() {
        let (root, trap) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(trap.path().join("statistics"), "precious").unwrap();
        std::os::unix::fs::symlink(trap.path(), root.path().join("vbd3-7-51712")).unwrap();
        assert!(Stats::create(root.path(), STEM).is_err());
        assert_eq!(fs::read(trap.path().join("statistics")).unwrap(), b"precious");
        // Nothing half made is left.
        assert_eq!(names(root.path()), ["vbd3-7-51712"]);
    }
}
