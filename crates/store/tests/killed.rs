//! SIGKILL for a process that writes into the holes of a file: what it acknowledged is there, and its lock ends with the
//! last of its writes.

#[path = "../../engine/tests/common/mod.rs"]
mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::*;
use spile_core::{ErrorKind, OpenMode, Segment, Store, Via};
use spile_engine::{Config, Engine, EngineKind, spawn};
use spile_store::{CacheMode, FileStore};

/// Names the file to the process that is to be killed: the same test program, run once more.
const FILE: &str = "SPILE_TEST_KILLED_FILE";
const ENGINE: &str = "SPILE_TEST_KILLED_ENGINE";
const DISK_BYTES: usize = 256 * MIB;
const WRITE_BYTES: usize = 16 * KIB;
/// Parts of the disk that are each written by one task after the other.
const LANES: usize = 64;
const ACKNOWLEDGED_BEFORE: usize = 300;

#[test]
fn killed_with_io_uring() {
    kill_and_look("uring");
}

#[test]
fn killed_with_aio() {
    kill_and_look("aio");
}

#[test]
fn killed_with_threads() {
    kill_and_look("threads");
}

fn kill_and_look(engine: &str) {
    if let Some(path) = std::env::var_os(FILE) {
        return write_until_killed(Path::new(&path));
    }
    let dir = folder();
    let path = dir.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(DISK_BYTES as u64).unwrap();
    let mut writer = Writer::start(&path, engine);
    let mut said = BufReader::new(writer.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    // The first lines are the test runner's.
    let (mut offsets, mut aio_transfers): (Vec<usize>, u64) = (Vec::new(), 0);
    while offsets.len() < ACKNOWLEDGED_BEFORE {
        let line = said.next().expect("the writer goes on until it is killed");
        match line.split_once(' ') {
            Some(("skip:", why)) => return println!("SKIP {engine}: {why}"),
            Some(("ack", offset)) => offsets.push(offset.parse().unwrap()),
            Some(("aio", count)) => aio_transfers = count.parse().unwrap(),
            _ => {}
        }
    }
    writer.0.kill().unwrap();
    offsets.extend(said.filter_map(|line| line.strip_prefix("ack ")?.parse::<usize>().ok()));
    drop(writer);
    let store = open_when_unlocked(&path);
    assert!(engine == "threads" || !holes_need_aio(&path, &store) || aio_transfers > 0, "no write went by AIO");
    drop(store);
    let found = std::fs::read(&path).unwrap();
    for &offset in &offsets {
        assert!(found[offset..offset + WRITE_BYTES] == pattern(offset, WRITE_BYTES), "lost: {offset:#x}");
    }
    for offset in (0..DISK_BYTES).step_by(4 * KIB) {
        let page = &found[offset..offset + 4 * KIB];
        assert!(page == [0; 4 * KIB] || page == pattern(offset, 4 * KIB), "foreign bytes at {offset:#x}");
    }
}

/// Opens the file for writing. Its locks end when the kernel has ended the last write and taken down the ring, which may
/// be after the process is gone. From then on the file changes no more.
fn open_when_unlocked(path: &Path) -> FileStore {
    for _ in 0..2000 {
        match FileStore::open(path, OpenMode::ReadWrite, CacheMode::Direct) {
            Err(error) if error.kind() == ErrorKind::Busy => std::thread::sleep(Duration::from_millis(5)),
            opened => return opened.unwrap(),
        }
    }
    panic!("the file stays locked");
}

/// This test once more, as the process that writes.
struct Writer(Child);

impl Writer {
    fn start(path: &Path, engine: &str) -> Self {
        let name = std::thread::current().name().unwrap().to_owned();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &name, "--nocapture", "--test-threads", "1"]).env(FILE, path).env(ENGINE, engine);
        Self(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Writes into holes all over the file, and says of each write that it was acknowledged.
fn write_until_killed(path: &Path) {
    let kind: EngineKind = std::env::var(ENGINE).unwrap().parse().unwrap();
    let engine = match Engine::start(Config { kind, workers: 1, pool_bytes: 4 * MIB, ..Config::default() }) {
        Ok(engine) => engine,
        Err(error) => return say(&format!("skip: {error}")),
    };
    let store = Arc::new(FileStore::open(path, OpenMode::ReadWrite, CacheMode::Direct).unwrap());
    let stats = engine.clone();
    engine.run_on(0, move || async move {
        for lane in 0..LANES {
            let (store, stats) = (store.clone(), stats.clone());
            spawn(async move {
                let lane_bytes = DISK_BYTES / LANES;
                for offset in (lane * lane_bytes..(lane + 1) * lane_bytes).step_by(WRITE_BYTES) {
                    let from = Segment::zeroed(WRITE_BYTES);
                    from.copy_from_slice(0, &pattern(offset, WRITE_BYTES));
                    store.write_at(at(offset), &from.into(), Via::Direct).await.unwrap();
                    say(&format!("ack {offset}\naio {}", stats.stats()[0].aio_transfers));
                }
            });
        }
    });
    engine.shutdown();
}

/// One line on stdout, whole.
fn say(line: &str) {
    std::io::stdout().write_all(format!("{line}\n").as_bytes()).unwrap();
}
