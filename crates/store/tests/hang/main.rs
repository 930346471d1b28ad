//! A store that hangs beside a healthy one, on the same worker: the healthy one goes on, for reads, writes, flushes, discards,
//! zeroes, maps, and opening and closing of files. When the other one answers again, everything that waited ends.

#[path = "../../../engine/tests/common/mod.rs"]
mod common;
mod dead_device;
mod frozen;
mod fuse;
mod guard;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use common::*;
use dead_device::DeadDevice;
use frozen::Frozen;
use fuse::Fuse;
use spile_core::{Files, Locator, OpenMode, Result, Store, Via};
use spile_engine::{Config, Engine, EngineKind, spawn};
use spile_store::{AnyStore, CacheMode, OsFiles};

/// A bound on what must not last for ever.
const HANG: Duration = Duration::from_secs(60);
/// The healthy store does each operation so often.
const ROUNDS: usize = 100;
/// So many of each operation wait for the store that hangs: more than a store may have threads.
const STORM: usize = 100;
/// So many writes wait for the dead device: more than a worker may have in the kernel.
const WRITES: usize = 3000;

/// What hangs.
enum Host {
    Fuse(Fuse),
    Frozen(Frozen),
}

impl Host {
    fn path(&self) -> &Path {
        match self {
            Self::Fuse(fuse) => fuse.path(),
            Self::Frozen(frozen) => frozen.path(),
        }
    }

    fn stop(&self) {
        match self {
            Self::Fuse(fuse) => fuse.stop(),
            Self::Frozen(frozen) => frozen.freeze(),
        }
    }

    fn go_on(&self) {
        match self {
            Self::Fuse(fuse) => fuse.go_on(),
            Self::Frozen(frozen) => frozen.thaw(),
        }
    }

    /// The operations that do not end while it is stopped. A frozen file system can still be read.
    fn hanging(&self) -> &'static [&'static str] {
        match self {
            Self::Fuse(_) => &["read", "write", "discard", "zero", "extent", "length", "open", "canonical", "sync"],
            Self::Frozen(_) => &["write", "discard", "zero", "length", "open"],
        }
    }
}

/// An operation that has ended: its name, and what went wrong.
type Ended = (&'static str, Option<String>);

/// Spawns an operation, and has its end told.
fn start<T>(name: &'static str, sender: &Sender<Ended>, operation: impl Future<Output = Result<T>> + 'static) {
    let sender = sender.clone();
    spawn(async move {
        let failed = operation.await.err().map(|error| error.to_string());
        let _ = sender.send((name, failed));
    });
}

async fn open(path: PathBuf, cache: CacheMode) -> Result<AnyStore> {
    OsFiles::new(cache).open(&Locator::Path(path), OpenMode::ReadWrite).await
}

/// Spawns one of each operation on `store`. Direct and cached writes never meet in a page.
fn start_all(store: &Arc<AnyStore>, number: usize, sender: &Sender<Ended>) {
    let slot = number % 100 * 512 * KIB;
    for (via, place) in [(Via::Direct, slot), (Via::Cached, slot + 192 * KIB)] {
        let [a, b, c] = [(); 3].map(|()| store.clone());
        start("read", sender, async move { a.read_at(at(place), &segments(&[4096]), via).await });
        start("write", sender, async move { b.write_at(at(place), &segments(&[4096]), via).await });
        start("write", sender, async move { c.write_at(at(place + 64 * KIB), &segments(&[128 * KIB]), via).await });
    }
    let [a, b, c, d, e] = [(); 5].map(|()| store.clone());
    start("discard", sender, async move { a.punch_hole(at(slot + 384 * KIB), 4096).await });
    start("zero", sender, async move { b.zero_range(at(slot + 448 * KIB), 4096).await });
    start("extent", sender, async move { c.extent_at(at(slot)).await });
    start("length", sender, async move { d.set_len(fuse::FILE_BYTES).await });
    start("sync", sender, async move { e.sync().await });
}

/// How many operations [`start_all`] starts.
const STARTED: usize = 11;

fn start_names(folder: &Path, cache: CacheMode, sender: &Sender<Ended>) {
    let path = folder.join("opened");
    start("open", sender, open(path.clone(), cache));
    start("canonical", sender, async move { OsFiles::new(cache).canonical(&path).await });
}

/// Waits until one more operation has ended, and ended well.
fn end_of(receiver: &Receiver<Ended>, what: &str) {
    let (name, failed) = receiver.recv_timeout(HANG).unwrap_or_else(|_| panic!("{what} hangs"));
    assert_eq!(failed, None, "{name} of {what}");
}

/// The healthy store does all of its operations again and again, and opens and closes.
fn use_healthy(engine: &Engine, healthy: &Arc<AnyStore>, folder: &Path, cache: CacheMode) {
    for round in 0..ROUNDS {
        let (sender, receiver) = channel();
        let (store, folder) = (healthy.clone(), folder.to_owned());
        engine.spawn_on(0, move || async move {
            start_all(&store, round, &sender);
            start_names(&folder, cache, &sender);
        });
        for _ in 0..STARTED + 2 {
            end_of(&receiver, "the healthy store");
        }
        assert!(receiver.try_recv().is_err(), "the test counts wrongly");
    }
}

/// An engine of one worker.
fn engine(kind: EngineKind) -> Option<Engine> {
    let config = Config { kind, workers: 1, pool_bytes: 16 * MIB, ..Config::default() };
    Engine::start(config).map_err(|error| println!("SKIP a store that hangs, {kind}: {error}")).ok()
}

/// A folder with the files that [`use_healthy`] uses.
fn healthy_folder() -> tempfile::TempDir {
    let dir = folder();
    for name in ["disk", "opened"] {
        std::fs::File::create(dir.path().join(name)).unwrap().set_len(fuse::FILE_BYTES).unwrap();
    }
    dir
}

fn a_store_that_hangs_stops_no_other(kind: EngineKind, host: &Host, cache: CacheMode) {
    let Some(engine) = engine(kind) else { return };
    let dir = healthy_folder();
    let paths = [dir.path().join("disk"), host.path().join("disk"), host.path().join("closed")];
    let [healthy, bad, closed] = paths.map(|path| Arc::new(engine.run_on(0, move || open(path, cache)).unwrap()));

    host.stop();
    let (sender, receiver) = channel();
    let (store, path) = (bad.clone(), host.path().to_owned());
    engine.spawn_on(0, move || async move {
        (0..STORM).for_each(|number| start_all(&store, number, &sender));
        start_names(&path, cache, &sender);
        // To close a file is a request of its file system, too.
        drop(closed);
    });
    use_healthy(&engine, &healthy, dir.path(), cache);
    let early: Vec<_> = receiver.try_iter().collect();
    for name in host.hanging() {
        let ended = early.iter().filter(|(other, _)| other == name).count();
        // A read may find what was read ahead when the file was opened.
        let found = if *name == "read" { 2 } else { 0 };
        assert!(ended <= found, "{ended} of {name} have ended: nothing hangs");
    }

    host.go_on();
    for _ in early.len()..STORM * STARTED + 2 {
        end_of(&receiver, "a request to the store that was stopped");
    }
    use_healthy(&engine, &bad, host.path(), cache);
    engine.run_on(0, move || async move { drop((healthy, bad)) });
    engine.shutdown();
}

fn on(kind: &str, host: std::result::Result<Host, String>, cache: CacheMode) {
    match host {
        Ok(host) => a_store_that_hangs_stops_no_other(kind.parse().unwrap(), &host, cache),
        Err(why) => println!("SKIP a store that hangs, {kind}: {why}"),
    }
}

/// Direct writes that a device has taken and does not answer leave places for other devices.
fn a_dead_device_stops_no_other(kind: &str) {
    let dead = match DeadDevice::new() {
        Ok(dead) => dead,
        Err(why) => return println!("SKIP a dead device, {kind}: {why}"),
    };
    let Some(engine) = engine(kind.parse().unwrap()) else { return };
    let (dir, cache) = (healthy_folder(), CacheMode::Direct);
    let paths = [dir.path().join("disk"), dead.path().to_owned()];
    let [healthy, bad] = paths.map(|path| Arc::new(engine.run_on(0, move || open(path, cache)).unwrap()));

    dead.stop();
    let (sender, receiver) = channel();
    let store = bad.clone();
    engine.spawn_on(0, move || async move {
        for number in 0..WRITES {
            let store = store.clone();
            // With gaps, so that no two of them become one request.
            let place = number * 16 * KIB;
            start("write", &sender, async move { store.write_at(at(place), &segments(&[4096]), Via::Direct).await });
        }
    });
    use_healthy(&engine, &healthy, dir.path(), cache);
    assert!(receiver.try_recv().is_err(), "the device answers");

    dead.go_on();
    (0..WRITES).for_each(|_| end_of(&receiver, "a write to the device that was dead"));
    engine.run_on(0, move || async move { drop((healthy, bad)) });
    engine.shutdown();
}

macro_rules! tests {
    ($($kind:ident),*) => {$(
        mod $kind {
            use super::*;

            #[test]
            fn a_file_server_that_is_silent_direct() {
                on(stringify!($kind), Fuse::new().map(Host::Fuse), CacheMode::Direct);
            }

            #[test]
            fn a_file_server_that_is_silent_page() {
                on(stringify!($kind), Fuse::new().map(Host::Fuse), CacheMode::Page);
            }

            #[test]
            fn a_dead_device() {
                a_dead_device_stops_no_other(stringify!($kind));
            }

            #[test]
            fn a_frozen_file_system_direct() {
                on(stringify!($kind), Frozen::new().map(Host::Frozen), CacheMode::Direct);
            }

            #[test]
            fn a_frozen_file_system_page() {
                on(stringify!($kind), Frozen::new().map(Host::Frozen), CacheMode::Page);
            }
        }
    )*};
}

tests!(uring, aio, threads);
