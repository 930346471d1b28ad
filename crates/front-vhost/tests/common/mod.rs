//! What the tests share: a server on an engine ([`Rig`]), the disk behind it ([`TestDisk`]), and a front end that may be
//! as rude as it likes ([`Guest`]).
#![allow(dead_code, reason = "each test program uses its part")]

#[path = "../../../front/tests/common/disk.rs"]
pub mod disk;
#[path = "../../../front/tests/common/engines.rs"]
pub mod engines;
pub mod guest;
pub mod load;
pub mod messages;

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use disk::TestDisk;
use guest::Guest;
use spile_engine::{Config as EngineConfig, Engine, EngineKind};
use spile_front_vhost::{Config, Server};

/// After so long, a test that waits has failed. No test's outcome depends on it otherwise.
pub const PATIENCE: Duration = Duration::from_secs(600);
/// The size of the test disks, in bytes.
pub const SIZE: u64 = 1 << 20;

/// How a server under test is started.
pub struct Setup {
    pub kind: EngineKind,
    pub workers: usize,
    pub poll: Duration,
    pub config: Config,
    pub disk: TestDisk,
}

impl Setup {
    pub fn new(kind: EngineKind) -> Self {
        let config =
            Config { name: "disk".to_owned(), serial: "serial-0123456789-too-long".to_owned(), ..Config::default() };
        let poll = EngineConfig::POLL;
        Self {
            kind,
            workers: 2,
            poll,
            config: Config { queues: 4, max_connections: 16, ..config },
            disk: TestDisk::new(SIZE),
        }
    }

    pub fn start(self) -> Rig {
        let Self { kind, workers, poll, config, disk } = self;
        let engine = EngineConfig { kind, workers, poll, pool_bytes: 1 << 20 };
        let engine = Engine::start(engine).expect("the engine starts");
        let (disk, dir) = (Arc::new(disk), tempfile::tempdir().unwrap());
        let server = Server::new(engine.clone(), disk.clone(), config).unwrap();
        let rig = Rig { server, disk, engine, frozen: Mutex::default(), dir };
        rig.server.listen(UnixListener::bind(rig.path()).unwrap().into()).unwrap();
        rig
    }
}

/// A server with its engine, its socket and its disk.
pub struct Rig {
    pub server: Server<TestDisk>,
    pub disk: Arc<TestDisk>,
    pub engine: Engine,
    /// While these live, the workers stand still.
    frozen: Mutex<Vec<Sender<()>>>,
    dir: tempfile::TempDir,
}

/// A server with two workers and four queues.
pub fn rig(kind: EngineKind) -> Rig {
    Setup::new(kind).start()
}

/// [`rig`], changed before it starts.
pub fn rig_with(kind: EngineKind, change: impl FnOnce(&mut Setup)) -> Rig {
    let mut setup = Setup::new(kind);
    change(&mut setup);
    setup.start()
}

impl Rig {
    /// Where it listens.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    /// A guest with two queues at work.
    pub fn guest(&self) -> Guest {
        Guest::connect(&self.path())
    }

    /// Has the workers stand still. To a front end this is a server that was killed at that moment: it writes to
    /// nothing any more, whatever it had in hand.
    pub fn freeze(&self) {
        for worker in 0..self.engine.workers() {
            let ((until, thaw), (stands, is_still)) = (channel::<()>(), channel());
            self.engine.spawn_on(worker, move || async move {
                stands.send(()).unwrap();
                let _ = thaw.recv();
            });
            is_still.recv().unwrap();
            self.frozen.lock().unwrap().push(until);
        }
    }

    /// They go on.
    pub fn thaw(&self) {
        self.frozen.lock().unwrap_or_else(|e| e.into_inner()).clear();
    }

    /// The server and its disk are well: a new guest can work.
    pub fn assert_serves(&self) {
        self.guest().assert_works(0);
    }

    /// Every connection has ended; whoever was rude has left nothing.
    pub fn assert_quiet(&self) {
        until("all connections end", || self.server.connections() == 0);
        let metrics = self.server.metrics();
        assert_eq!(metrics.ring_starts, metrics.ring_stops, "queues that are still at work: {metrics:?}");
        assert_eq!(metrics.requests.total().begun, metrics.answered(), "{metrics:?}");
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.thaw();
        self.disk.release();
        self.server.stop();
        self.server.wait_drained();
        self.engine.shutdown();
    }
}

/// Makes the socket at `path` anew and has `server` listen there, as one that takes another's place does.
pub fn listen_again(server: &Server<TestDisk>, path: &Path) {
    std::fs::remove_file(path).unwrap();
    server.listen(UnixListener::bind(path).unwrap().into()).unwrap();
}

/// Looks until `done` holds; a test that waits for ever fails instead.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        std::thread::sleep(Duration::from_micros(300));
    }
}
