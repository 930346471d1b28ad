//! What the tests share: a Xen of ordinary processes with one guest ([`World`]), the disk behind it ([`TestDisk`]), and
//! the back end under test.
#![allow(dead_code, reason = "each test program uses its part")]

// The other fronts' test disk.
#[path = "../../../front/tests/common/disk.rs"]
pub mod disk;
pub mod hostile;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use disk::TestDisk;
use spile_engine::{Config as EngineConfig, Engine, EngineKind};
use spile_front_blkif::device::{Config, Device, End};
use spile_front_blkif::keeping::FailedSyncs;
use spile_front_blkif::pages::Access;
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op, Queue};
use spile_lab::xen::toolstack::{Vbd, add_vbd};
use spile_lab::xen::{Blkfront, Guest, Host, Hypervisor};
use spile_xen::DomId;
use spile_xen::blkif::status;
use spile_xen::store::{Tx, XenStore};

/// After so long, a test that waits has failed. No test's outcome depends on it otherwise.
pub const PATIENCE: Duration = Duration::from_secs(600);
/// The size of the test disks, in bytes.
pub const SIZE: u64 = 4 << 20;
/// The guest.
pub const GUEST: DomId = DomId(7);

/// How a back end is started.
pub struct Setup {
    pub kind: EngineKind,
    pub access: Access,
    pub disk: TestDisk,
    pub vbd: Vbd,
    pub max_indirect: u16,
    pub max_queues: u16,
}

impl Setup {
    pub fn new(access: Access) -> Self {
        let (disk, vbd) = (TestDisk::new(SIZE), Vbd::new(GUEST, "test"));
        Self { kind: EngineKind::Auto, access, disk, vbd, max_indirect: 256, max_queues: 4 }
    }

    pub fn start(self) -> World {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::start(dir.path()).unwrap();
        let guest = Arc::new(Guest::create(dir.path(), GUEST, 64 << 20).unwrap());
        let mut store = XenStore::open(&host.xenstored()).unwrap();
        add_vbd(&mut store, &self.vbd).unwrap();
        let engine = EngineConfig { kind: self.kind, workers: 2, pool_bytes: 4 << 20, ..EngineConfig::default() };
        let engine = Engine::start(engine).expect("the engine starts");
        let config = Config {
            name: "disk".into(),
            backend_path: self.vbd.backend_path(),
            params: self.vbd.params.clone(),
            access: self.access,
            max_queues: self.max_queues,
            max_order: 4,
            max_indirect: self.max_indirect,
            read_only: false,
            splits_rings: true,
            trace_records: 0,
            run_dir: dir.path().to_owned(),
            failed_syncs: FailedSyncs::new(dir.path(), &self.vbd.backend_path()).unwrap(),
        };
        let disk = Arc::new(self.disk);
        let mut world = World { engine, disk, config, store, guest, host, vbd: self.vbd, device: None, dir };
        world.serve();
        world
    }
}

/// A guest, its disk, and the back end.
pub struct World {
    pub device: Option<Device>,
    pub engine: Engine,
    pub disk: Arc<TestDisk>,
    pub config: Config,
    /// Domain 0's.
    pub store: XenStore,
    pub guest: Arc<Guest>,
    pub host: Host,
    pub vbd: Vbd,
    pub dir: tempfile::TempDir,
}

impl World {
    /// Starts a back end, when there is none.
    pub fn serve(&mut self) {
        let xenstored = self.host.xenstored();
        let open_store = move || XenStore::open(&xenstored);
        let hypervisor = Arc::new(Hypervisor::connect(self.dir.path()).unwrap());
        self.config.failed_syncs = FailedSyncs::new(self.dir.path(), &self.config.backend_path).unwrap();
        let (engine, disk, config) = (self.engine.clone(), self.disk.clone(), self.config.clone());
        let device = Device::start(engine, disk, open_store, hypervisor.clone(), hypervisor, config, || {});
        self.device = Some(device.unwrap());
    }

    pub fn device(&mut self) -> &mut Device {
        self.device.as_mut().expect("it is served")
    }

    /// Ends the back end, and leaves the guest waiting.
    pub fn stop(&mut self) -> End {
        let mut device = self.device.take().unwrap();
        device.stop();
        device.wait().unwrap()
    }

    /// A front end that is not connected.
    pub fn front(&self, options: BlkfrontOptions) -> Blkfront {
        Blkfront::new(self.guest.clone(), self.vbd.device, options).unwrap()
    }

    /// A front end and its queues.
    pub fn connect(&self, options: BlkfrontOptions) -> (Blkfront, Vec<Queue>) {
        let mut front = self.front(options);
        let queues = front.start().unwrap();
        (front, queues)
    }

    /// A front end of one queue.
    pub fn connect_one(&self, options: BlkfrontOptions) -> (Blkfront, Queue) {
        let (front, mut queues) = self.connect(options);
        assert_eq!(queues.len(), 1);
        (front, queues.remove(0))
    }

    /// A key of the back end's.
    pub fn backend_key(&mut self, key: &str) -> Option<String> {
        self.store.read_optional(Tx::NONE, &format!("{}/{key}", self.vbd.backend_path())).unwrap()
    }

    pub fn set_backend_key(&mut self, key: &str, value: &str) {
        self.store.write(Tx::NONE, &format!("{}/{key}", self.vbd.backend_path()), value).unwrap();
    }

    pub fn remove_backend_key(&mut self, key: &str) {
        self.store.remove(Tx::NONE, &format!("{}/{key}", self.vbd.backend_path())).unwrap();
    }

    /// Waits until the device has ended by itself.
    pub fn ended(&mut self) -> End {
        wait_until("the device's end", || self.device.as_ref().unwrap().has_ended());
        self.device.take().unwrap().wait().unwrap()
    }

    pub fn run_file(&self, extension: &str) -> PathBuf {
        self.dir.path().join(format!("{}-{}.{extension}", self.vbd.guest, self.vbd.device))
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // It ends when nothing is in flight any more, also after a test that has failed.
        self.disk.release();
        if let Some(device) = &mut self.device {
            device.stop();
            let _ = device.wait();
        }
        self.engine.shutdown();
    }
}

/// Waits until `is_so`.
///
/// # Panics
/// When it takes too long.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "not in {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The next answer: slot and status.
pub fn next(queue: &mut Queue) -> (usize, i16) {
    loop {
        if let Some(done) = queue.take().unwrap() {
            return (done.slot, done.status);
        }
        assert!(queue.sleep(PATIENCE).unwrap(), "no answer");
    }
}

/// Does one request in slot 0; its status.
pub fn request(queue: &mut Queue, op: Op, at: u64, len: u32) -> i16 {
    queue.submit(0, op, at, len);
    queue.publish();
    let (slot, status) = next(queue);
    assert_eq!(slot, 0);
    status
}

/// Writes; it has to be done.
pub fn write(queue: &mut Queue, at: u64, bytes: &[u8]) {
    queue.data(0).copy_from_slice(0, bytes);
    assert_eq!(request(queue, Op::Write, at, bytes.len() as u32), status::OKAY);
}

/// Reads; it has to be done.
pub fn read(queue: &mut Queue, at: u64, len: u32) -> Vec<u8> {
    queue.data(0).fill(0xee);
    assert_eq!(request(queue, Op::Read, at, len), status::OKAY);
    queue.data(0).slice(0..len as usize).to_vec()
}

/// Bytes that tell where they belong.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (seed.wrapping_mul(31).wrapping_add(at * 7 + at / 251)) as u8).collect()
}

/// All ways to a guest's pages.
pub const ACCESSES: [Access; 4] = [Access::Copy, Access::Map, Access::MapCopy, Access::Persistent];
