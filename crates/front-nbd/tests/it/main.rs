//! The server over real sockets, on each engine: handshakes, requests, hostile clients, TLS, the end.

mod client;
mod disk;
#[path = "../../../front/tests/common/engines.rs"]
mod engines;
mod handshake;
mod hostile;
mod requests;
mod stream;
mod tls;

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use disk::StoreDisk;
use spile_engine::{Config, Engine, EngineKind};
use spile_front_nbd::{Export, Server, ServerConfig};
use spile_store::MemStore;

/// The size of the test disks, in bytes. The odd end is on purpose.
pub const SIZE: u64 = (8 << 20) + 512;

/// A server with its engine, its socket, and the disk behind its default export.
pub struct Rig {
    /// Under test.
    pub server: Server<StoreDisk<MemStore>>,
    /// Behind its exports.
    pub disk: Arc<StoreDisk<MemStore>>,
    engine: Engine,
    dir: tempfile::TempDir,
}

impl Rig {
    /// Its socket.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    /// Looks until `done` holds; a test that waits for ever fails instead.
    pub fn until(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let waited = (0..3000).find(|_| {
            let done = done(self);
            if !done {
                std::thread::sleep(Duration::from_millis(10));
            }
            done
        });
        waited.unwrap_or_else(|| panic!("in vain: {what}"));
    }

    /// Every connection has ended and nothing is left of it.
    pub fn assert_clean(&self) {
        self.until("all connections end", |rig| rig.server.connections() == 0);
        let left = self.server.metrics("");
        assert_eq!((left.requests.in_flight(), left.connections), (0, 0));
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.disk.release();
        self.server.stop();
        self.server.wait_drained(Duration::from_secs(10));
        self.engine.shutdown();
    }
}

/// A rig whose disk and configuration `change` may alter.
pub fn rig_with(kind: EngineKind, change: impl FnOnce(&mut StoreDisk<MemStore>, &mut ServerConfig)) -> Rig {
    let config = Config { kind, workers: 2, pool_bytes: 16 << 20, ..Config::default() };
    let engine = Engine::start(config).expect("the engine starts");
    let mut disk = StoreDisk::new(MemStore::new(SIZE));
    let mut config = ServerConfig::default();
    change(&mut disk, &mut config);
    let disk = Arc::new(disk);
    let export = |name: &str, read_only| Export {
        name: name.to_owned(),
        description: "for tests".to_owned(),
        disk_name: "for tests".to_owned(),
        disk: disk.clone(),
        read_only,
        checkpoints: None,
        kept: |_| None,
        withdrawn: Arc::default(),
    };
    let exports = vec![export("", false), export("ro", true)];
    let server = Server::new(engine.clone(), config, exports).expect("the server starts");
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("s")).unwrap();
    server.listen(listener.into()).unwrap();
    Rig { server, disk, engine, dir }
}

/// A rig as it comes.
pub fn rig(kind: EngineKind) -> Rig {
    rig_with(kind, |_, _| {})
}
