//! Guests that die with requests at work (case 39): each is this test program once more, in a process of its own.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use spile_front_blkif::device::{Config, Device, End};
use spile_front_blkif::keeping::FailedSyncs;
use spile_front_blkif::pages::Access;
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op};
use spile_lab::xen::toolstack::{Vbd, add_vbd, remove_domain};
use spile_lab::xen::{Blkfront, Guest, Hypervisor};
use spile_xen::DomId;
use spile_xen::store::{Tx, XenStore};

use crate::common::disk::TestDisk;
use crate::common::hostile::{Street, options};
use crate::common::{ACCESSES, PATIENCE, SIZE, wait_until};

const DIR: &str = "SPILE_BLKIF_TEST_GUEST";
const DOOMED: DomId = DomId(9);

/// The guest's side: requests of 128 KiB without end.
fn be_a_guest(dir: &Path) {
    let guest = Arc::new(Guest::create(dir, DOOMED, 32 << 20).unwrap());
    let mut store = XenStore::open(&guest.xenstored()).unwrap();
    store.write(Tx::NONE, "data/ready", "1").unwrap();
    std::io::stdin().read_exact(&mut [0]).unwrap();
    let sizes = BlkfrontOptions { indirect_segments: 32, data_bytes: 128 << 10, ..options(Access::Persistent) };
    let mut front = Blkfront::new(guest, Vbd::new(DOOMED, "").device, sizes).unwrap();
    let mut queue = front.start().unwrap().remove(0);
    for round in 0u64.. {
        for slot in (0..queue.slots()).filter(|slot| slot % 4 != round as usize % 4) {
            if !queue.is_outstanding(slot) {
                let op = if slot % 2 == 0 { Op::Read } else { Op::Write };
                queue.submit(slot, op, slot as u64 * 65536, 128 << 10);
            }
        }
        queue.publish();
        assert!(queue.sleep(PATIENCE).unwrap());
        while queue.take().unwrap().is_some() {}
    }
}

/// A guest in a process of its own, and its disk.
struct Doomed {
    process: Child,
    device: Device,
    disk: Arc<TestDisk>,
}

impl Doomed {
    fn new(street: &mut Street, test: &str) -> Self {
        let dir = street.world.dir.path();
        let mut process = Command::new(std::env::current_exe().unwrap());
        process.args(["--exact", test]).env(DIR, dir).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut process = process.spawn().unwrap();
        let store = &mut street.world.store;
        let ready = format!("/local/domain/{DOOMED}/data/ready");
        wait_until("the guest's process", || store.read_optional(Tx::NONE, &ready).unwrap().is_some());
        let vbd = Vbd::new(DOOMED, "doomed");
        add_vbd(store, &vbd).unwrap();
        std::io::Write::write_all(process.stdin.as_mut().unwrap(), b"!").unwrap();
        let failed_syncs = FailedSyncs::new(dir, &vbd.backend_path()).unwrap();
        let (name, backend_path, params) = ("doomed".into(), vbd.backend_path(), vbd.params.clone());
        let config = Config { name, backend_path, params, failed_syncs, ..street.world.config.clone() };
        let xenstored = street.world.host.xenstored();
        let open_store = move || XenStore::open(&xenstored);
        let hypervisor = Arc::new(Hypervisor::connect(dir).unwrap());
        let (engine, disk) = (street.world.engine.clone(), Arc::new(TestDisk::new(SIZE)));
        let device = Device::start(engine, disk.clone(), open_store, hypervisor.clone(), hypervisor, config, || {});
        Self { process, device: device.unwrap(), disk }
    }

    fn answered(&self) -> u64 {
        self.device.metrics().iter().map(|ring| ring.answered()).sum()
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Doomed {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        self.disk.release();
        self.device.stop();
        let _ = self.device.wait();
    }
}

/// Runs `end` on a guest that has answers coming, or with a disk that holds them; then it is dead, and its disk ends when
/// the toolstack cleans up.
fn dies(test: &str, holds: bool, end: impl Fn(&mut Street, &mut Doomed)) {
    if let Some(dir) = std::env::var_os(DIR) {
        return be_a_guest(Path::new(&dir));
    }
    for access in ACCESSES {
        let mut street = Street::new(access);
        for _ in 0..3 {
            let mut doomed = Doomed::new(&mut street, test);
            wait_until("the guest's requests", || doomed.answered() > 300);
            if holds {
                doomed.disk.hold();
                wait_until("requests at work", || doomed.disk.held() >= 8);
            }
            end(&mut street, &mut doomed);
            street.neighbour.assert_served();
            doomed.disk.release();
            doomed.kill();
            remove_domain(&mut street.world.store, DOOMED).unwrap();
            wait_until("the device's end", || doomed.device.has_ended());
            assert_eq!(doomed.device.wait().unwrap(), End::Closed, "{access:?}");
            let ring = doomed.device.metrics().remove(0);
            let total = ring.requests.total();
            let (taken, ended) = (total.begun, total.ended);
            // Those that had not begun when the guest was seen to be gone get no answer.
            assert!(ring.rings_at_work() == 0 && taken == ended && taken >= ring.answered(), "{access:?} {ring:?}");
            street.neighbour.assert_served();
        }
        street.rest();
        let (front, queue) = street.connect(options(access));
        street.assert_well(front, vec![queue]);
    }
}

#[test]
fn a_guest_that_is_killed_in_the_middle_of_copies() {
    dies("hostile_ends::a_guest_that_is_killed_in_the_middle_of_copies", false, |_, doomed| doomed.kill());
}

#[test]
fn a_guest_that_is_killed_with_requests_at_work() {
    dies("hostile_ends::a_guest_that_is_killed_with_requests_at_work", true, |_, doomed| doomed.kill());
}

#[test]
fn a_domain_that_is_destroyed_in_the_middle_of_copies() {
    dies("hostile_ends::a_domain_that_is_destroyed_in_the_middle_of_copies", false, |street, _| {
        Hypervisor::connect(street.world.dir.path()).unwrap().destroy(DOOMED).unwrap();
    });
}
