//! Statistics in tapdisk3's places: what a tool finds that knows only blktap's headers, as xsiostat goes about it.

use std::fs;
use std::ops::Sub;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Instant;

use crate::common::{eventually, ok, spile};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op, Queue};
use spile_lab::xen::toolstack::{Vbd, add_vbd};
use spile_lab::xen::{Blkfront, Guest, Host};
use spile_xen::DomId;
use spile_xen::blkif::status;
use spile_xen::store::{Tx, XenStore};

const DISK_BYTES: u64 = 1 << 20;

/// `struct stats`, and the fields of `struct blkback_stats` that are not in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    reads: u64,
    reads_ended: u64,
    read_sectors: u64,
    read_us: u64,
    read_max_us: u64,
    writes: u64,
    writes_ended: u64,
    write_sectors: u64,
    write_us: u64,
    write_max_us: u64,
    failed: u64,
    flushes: u64,
    discards: u64,
}

impl Counts {
    /// Without times, which cannot be known before.
    fn untimed(self) -> Self {
        Self { read_us: 0, read_max_us: 0, write_us: 0, write_max_us: 0, ..self }
    }
}

/// A Xen with one guest, whose disk is of the type that tapdisk3's tools look for.
struct World {
    store: XenStore,
    vbd: Vbd,
    front: Blkfront,
    _host: Host,
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::start(dir.path()).unwrap();
        let mut store = XenStore::open(&host.xenstored()).unwrap();
        ok(dir.path(), &["create", "disk.raw", "--size", &DISK_BYTES.to_string()]);
        fs::create_dir(dir.path().join("run")).unwrap();
        let params = format!("raw:{}", dir.path().join("disk.raw").display());
        let vbd = Vbd { kind: "vbd3".into(), ..Vbd::new(DomId(5), params) };
        add_vbd(&mut store, &vbd).unwrap();
        let guest = Guest::create(dir.path(), DomId(5), 16 << 20).unwrap();
        let options = BlkfrontOptions { queues: 2, ..BlkfrontOptions::default() };
        let front = Blkfront::new(guest.into(), vbd.device, options).unwrap();
        Self { store, vbd, front, _host: host, dir }
    }

    /// The process of the disk.
    fn serve(&self) -> Server {
        let mut command = spile();
        command.arg("xen-disk").arg("--lab").arg(self.dir.path()).arg("--run-dir").arg(self.dir.path().join("run"));
        command.args(["--workers", "2"]).arg(self.vbd.backend_path());
        Server(command.stdout(Stdio::null()).spawn().expect("the program starts"))
    }

    /// What is in the folder that stands for /dev/shm, sorted.
    fn shared(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir.path().join("shm")).into_iter().flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// As xsiostat: the folder's name has domain and device, xenstore the pid, and with these there is a path.
    fn tapdisk_file(&mut self) -> Option<PathBuf> {
        let name = self.shared().into_iter().find(|name| name.starts_with("vbd3-"))?;
        let (domain, device) = name.strip_prefix("vbd3-")?.split_once('-')?;
        let key = format!("/local/domain/0/backend/vbd3/{domain}/{device}/kthread-pid");
        let pid = self.store.read_optional(Tx::NONE, &key).unwrap()?;
        let file = self.dir.path().join(format!("shm/td3-{pid}/vbd-{domain}-{device}"));
        file.exists().then_some(file)
    }

    fn counts(&mut self) -> Option<Counts> {
        let file = self.tapdisk_file()?;
        let (tapdisk, blkback) = (page(&file)?, page(&self.dir.path().join("shm/vbd3-5-51712/statistics"))?);
        assert_eq!(u32::from_le_bytes(tapdisk[..4].try_into().unwrap()), 1, "the version");
        let [
            oo,
            reads,
            reads_ended,
            read_sectors,
            read_us,
            writes,
            writes_ended,
            write_sectors,
            write_us,
            failed,
            flags,
        ] = numbers(&tapdisk[8..]);
        assert_eq!((oo, flags), (0, 0));
        let [discards, flushes, _, old @ .., flags] = numbers::<14>(&blkback);
        assert_eq!(flags, 0);
        let counts = Counts {
            reads,
            reads_ended,
            read_sectors,
            read_us,
            read_max_us: old[4],
            writes,
            writes_ended,
            write_sectors,
            write_us,
            write_max_us: old[9],
            failed,
            flushes,
            discards,
        };
        // The two files are written one after the other.
        let same = [reads, reads_ended, read_sectors, read_us, writes, writes_ended, write_sectors, write_us];
        let is_whole = [&old[..4], &old[5..9]].concat() == same;
        is_whole.then_some(counts)
    }

    /// The counts, once they are those but for the times.
    fn wait_for(&mut self, wanted: Counts) -> Counts {
        let mut found = None;
        eventually("the counts of what was asked", || {
            found = self.counts().filter(|counts| counts.untimed() == wanted);
            found.is_some()
        });
        found.unwrap()
    }
}

fn page(path: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(path).ok()?;
    assert_eq!(bytes.len(), 4096, "tools map a page of {}", path.display());
    Some(bytes)
}

fn numbers<const N: usize>(bytes: &[u8]) -> [u64; N] {
    std::array::from_fn(|at| u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().unwrap()))
}

/// A process that does not outlive a test that fails.
struct Server(Child);

impl Server {
    fn signal(&mut self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
        self.0.wait().unwrap();
    }

    fn folder(&self) -> String {
        format!("td3-{}", self.0.id())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One of each kind on the first ring, some on the second.
fn work(queues: &mut [Queue]) -> Counts {
    for op in [Op::Write, Op::Barrier, Op::Read] {
        queues[0].run_well(op, 4096, 8192).unwrap();
    }
    queues[0].run_well(Op::Flush, 0, 0).unwrap();
    queues[0].run_well(Op::Discard(false), 65536, 65536).unwrap();
    assert_eq!(queues[0].run(Op::Read, DISK_BYTES, 512).unwrap().status, status::ERROR);
    for number in 0..5 {
        queues[1].run_well(Op::Read, number * 4096, 4096).unwrap();
    }
    Counts {
        reads: 7,
        reads_ended: 7,
        read_sectors: 16 + 1 + 5 * 8,
        writes: 2,
        writes_ended: 2,
        write_sectors: 32,
        failed: 1,
        flushes: 1,
        discards: 1,
        ..Counts::default()
    }
}

/// Requests came one by one, so their times are parts of the time that all took.
fn check_times(counts: Counts, began: Instant) {
    let all = began.elapsed().as_micros() as u64;
    assert!((1..=all.sub(counts.write_us)).contains(&counts.read_us), "{counts:?} in {all} µs");
    assert!(counts.write_us > 0, "{counts:?}");
    assert!((counts.read_us / 7..=counts.read_us).contains(&counts.read_max_us), "{counts:?}");
    assert!((counts.write_us / 2..=counts.write_us).contains(&counts.write_max_us), "{counts:?}");
}

#[test]
fn tools_of_tapdisk3_find_what_a_disk_has_done() {
    let mut world = World::new();
    let began = Instant::now();
    let mut first = world.serve();
    let mut queues = world.front.start().unwrap();
    assert_eq!(queues.len(), 2);
    let wanted = work(&mut queues);
    check_times(world.wait_for(wanted), began);
    assert_eq!(world.shared(), [first.folder(), "vbd3-5-51712".into()]);

    // A successor removes what a killed process has left, and counts from zero.
    first.signal(Signal::SIGKILL);
    assert_eq!(world.shared(), [first.folder(), "vbd3-5-51712".into()]);
    let began = Instant::now();
    let mut second = world.serve();
    let wanted = work(&mut queues);
    check_times(world.wait_for(wanted), began);
    assert_eq!(world.shared(), [second.folder(), "vbd3-5-51712".into()]);

    // A second time, the counts go on.
    let before = wanted;
    work(&mut queues);
    world.wait_for(Counts {
        reads: 2 * before.reads,
        reads_ended: 2 * before.reads,
        read_sectors: 2 * before.read_sectors,
        writes: 2 * before.writes,
        writes_ended: 2 * before.writes,
        write_sectors: 2 * before.write_sectors,
        failed: 2,
        flushes: 2,
        discards: 2,
        ..Counts::default()
    });
    second.signal(Signal::SIGTERM);
    assert!(world.shared().is_empty(), "{:?}", world.shared());
}
