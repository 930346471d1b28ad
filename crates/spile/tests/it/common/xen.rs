//! A Xen of ordinary processes with `spile xen-backend` on it, and a guest under a load whose answers are checked.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op, Queue};
use spile_lab::xen::toolstack::{Vbd, add_vbd};
use spile_lab::xen::{Blkfront, Guest, Host};
use spile_xen::DomId;
use spile_xen::blkif::status;
use spile_xen::store::{Tx, XenStore};

use super::{ok, spile};

/// Nothing here takes longer, on the slowest machine.
pub const PATIENCE: Duration = Duration::from_secs(600);
/// Bytes of a block that is written as a whole, and how many there are.
pub const BLOCK: u32 = 16 << 10;
pub const BLOCKS: u64 = 512;

/// A Xen, and the back end on it.
pub struct Xen {
    pub store: XenStore,
    pub backend: Child,
    _host: Host,
    pub dir: tempfile::TempDir,
}

impl Xen {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// With more arguments for the back end.
    pub fn start_with(args: &[&str]) -> Self {
        Self::start_by(spile(), args)
    }

    /// With another program, or more of an environment.
    pub fn start_by(command: Command, args: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::start(dir.path()).unwrap();
        let store = XenStore::open(&host.xenstored()).unwrap();
        let backend = start_backend_by(command, dir.path(), args);
        Self { store, backend, _host: host, dir }
    }

    /// Another back end in the place of the one that is there.
    pub fn replace_backend(&mut self, command: Command) {
        self.backend.kill().unwrap();
        self.backend.wait().unwrap();
        self.backend = start_backend_by(command, self.dir.path(), &[]);
    }

    /// A raw disk of 1 MiB, `a.raw`, with its guest.
    pub fn attach(&mut self) -> (Vbd, Blkfront, Queue) {
        ok(self.dir.path(), &["create", "a.raw", "--size", "1M"]);
        let vbd = Vbd::new(DomId(3), format!("raw:{}", self.path("a.raw").display()));
        add_vbd(&mut self.store, &vbd).unwrap();
        let mut front = Blkfront::new(self.guest(3), vbd.device, BlkfrontOptions::default()).unwrap();
        let queue = front.start().unwrap().remove(0);
        (vbd, front, queue)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn guest(&self, id: u16) -> Arc<Guest> {
        Arc::new(Guest::create(self.dir.path(), DomId(id), 32 << 20).unwrap())
    }

    /// The disk's process, once there is one that is not `old`.
    pub fn process(&self, vbd: &Vbd, old: Option<i32>) -> i32 {
        let mut found = None;
        wait_until("the disk's process", || {
            found = self.process_now(vbd).filter(|pid| Some(*pid) != old);
            found.is_some()
        });
        found.unwrap()
    }

    /// The disk's process, if there is one.
    pub fn process_now(&self, vbd: &Vbd) -> Option<i32> {
        let file = self.path(&format!("run/{}-{}.pid", vbd.guest, vbd.device));
        std::fs::read_to_string(file).ok()?.trim().parse().ok()
    }

    pub fn key(&mut self, vbd: &Vbd, key: &str) -> Option<String> {
        self.store.read_optional(Tx::NONE, &format!("{}/{key}", vbd.backend_path())).unwrap()
    }

    pub fn remove_key(&mut self, vbd: &Vbd, key: &str) {
        self.store.remove(Tx::NONE, &format!("{}/{key}", vbd.backend_path())).unwrap();
    }

    /// Asks for a pause, and waits until the image is ours.
    pub fn pause(&mut self, vbd: &Vbd) {
        self.set_key(vbd, "pause", "");
        wait_until("the pause", || self.key(vbd, "pause-done").is_some());
    }

    /// Ends a pause, and waits until Spile has the image.
    pub fn go_on(&mut self, vbd: &Vbd) {
        self.remove_key(vbd, "pause");
        wait_until("the end of the pause", || self.key(vbd, "pause-done").is_none());
    }

    pub fn set_key(&mut self, vbd: &Vbd, key: &str, value: &str) {
        self.store.write(Tx::NONE, &format!("{}/{key}", vbd.backend_path()), value).unwrap();
    }
}

impl Drop for Xen {
    fn drop(&mut self) {
        let _ = self.backend.kill();
        let _ = self.backend.wait();
        for entry in std::fs::read_dir(self.path("run")).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "pid") {
                let pid = std::fs::read_to_string(entry.path()).unwrap_or_default();
                let _ = pid.trim().parse().map(|pid| kill(Pid::from_raw(pid), Signal::SIGKILL));
            }
        }
    }
}

pub fn start_backend(dir: &Path, args: &[&str]) -> Child {
    start_backend_by(spile(), dir, args)
}

/// With another program, or more of an environment.
pub fn start_backend_by(mut command: Command, dir: &Path, args: &[&str]) -> Child {
    command.arg("xen-backend").arg("--lab").arg(dir).arg("--run-dir").arg(dir.join("run")).args(args);
    command.stdout(Stdio::null()).spawn().expect("the program starts")
}

pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "not in {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn take(queue: &mut Queue) -> (usize, i16) {
    loop {
        if let Some(done) = queue.take().unwrap() {
            return (done.slot, done.status);
        }
        assert!(queue.sleep(PATIENCE).unwrap(), "no answer");
    }
}

pub fn request(queue: &mut Queue, op: Op, at: u64, len: u32) {
    queue.submit(0, op, at, len);
    queue.publish();
    assert_eq!(take(queue), (0, status::OKAY));
}

/// What a block holds after its `version`th write.
pub fn content(block: u64, version: u64) -> Vec<u8> {
    let word = (block << 32 | version).to_le_bytes();
    if version == 0 { vec![0; BLOCK as usize] } else { word.repeat(BLOCK as usize / 8) }
}

/// A load that never has two requests on one block, so that each answer can be checked.
pub struct Load {
    pub queues: Vec<Queue>,
    pub versions: Vec<u64>,
    /// Of each queue's slots: the block, and whether it is being written.
    at_work: Vec<Vec<Option<(u64, bool)>>>,
    dice: u64,
    pub done: u64,
}

impl Load {
    pub fn new(queues: Vec<Queue>) -> Self {
        let at_work = queues.iter().map(|queue| vec![None; queue.slots()]).collect();
        Self { queues, versions: vec![0; BLOCKS as usize], at_work, dice: 0x9e37_79b9_7f4a_7c15, done: 0 }
    }

    pub fn roll(&mut self, sides: u64) -> u64 {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        self.dice % sides
    }

    /// Every free slot gets a request on a block of its own.
    pub fn submit(&mut self) {
        let lanes: u64 = self.queues.iter().map(|queue| queue.slots() as u64).sum();
        let mut lane = 0;
        for number in 0..self.queues.len() {
            for slot in 0..self.queues[number].slots() {
                let block = lane + lanes * self.roll(BLOCKS / lanes);
                lane += 1;
                if self.at_work[number][slot].is_some() {
                    continue;
                }
                let writes = self.roll(3) > 0;
                if writes {
                    self.versions[block as usize] += 1;
                    let bytes = content(block, self.versions[block as usize]);
                    self.queues[number].data(slot).copy_from_slice(0, &bytes);
                }
                let op = if writes { Op::Write } else { Op::Read };
                self.queues[number].submit(slot, op, block * u64::from(BLOCK), BLOCK);
                self.at_work[number][slot] = Some((block, writes));
            }
            self.queues[number].publish();
        }
    }

    /// Takes what is answered; reads have to be right.
    pub fn collect(&mut self) {
        for number in 0..self.queues.len() {
            while let Some(done) = self.queues[number].take().unwrap() {
                assert_eq!(done.status, status::OKAY, "the guest saw an error");
                let (block, writes) = self.at_work[number][done.slot].take().expect("one answer for each request");
                self.done += 1;
                if !writes {
                    let got = self.queues[number].data(done.slot).slice(0..BLOCK as usize).to_vec();
                    assert_eq!(got, content(block, self.versions[block as usize]), "block {block}");
                }
            }
        }
    }

    /// Goes on until `count` more are answered.
    pub fn run(&mut self, count: u64) {
        let end = self.done + count;
        self.run_while(|load| load.done < end);
    }

    /// Goes on until something has happened.
    pub fn run_until(&mut self, mut has_happened: impl FnMut() -> bool) {
        self.run_while(|_| !has_happened());
    }

    fn run_while(&mut self, mut goes_on: impl FnMut(&Self) -> bool) {
        let until = Instant::now() + PATIENCE;
        while goes_on(self) {
            assert!(Instant::now() < until, "the load stands still");
            self.submit();
            self.collect();
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Waits for all that is outstanding.
    pub fn drain(&mut self) {
        wait_until("the last answers", || {
            self.collect();
            self.queues.iter().all(|queue| queue.outstanding() == 0)
        });
    }
}

/// A chain of two, the parent of which is empty.
pub fn chain(dir: &Path) -> PathBuf {
    let size = format!("{}", BLOCKS * u64::from(BLOCK));
    ok(dir, &["create", "parent.vhd", "--size", &size]);
    ok(dir, &["create", "disk.vhd", "--parent", "parent.vhd"]);
    dir.join("disk.vhd")
}
