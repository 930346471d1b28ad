//! A guest in a process of its own: this test program once more, with its folder in the environment.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use spile_lab::xen::{Guest, Host, Hypervisor};
use spile_mem::Segment;
use spile_xen::store::{Tx, XenStore};
use spile_xen::{CopyOp, DomId, GrantRef, Grants, Way};

use crate::common::{BAD_DOMAIN, DOMAIN, GENERAL_ERROR, OKAY, copy};

const DIR: &str = "SPILE_LAB_TEST_GUEST";
const PAGES: u32 = 64;
/// The first grant that a guest makes.
const FIRST: u32 = 8;
const PATIENCE: Duration = Duration::from_secs(600);

/// The guest's side: pages that hold their own number, all granted; then it waits for its end.
fn be_a_guest(dir: &Path) {
    let guest = Guest::create(dir, DOMAIN, PAGES as usize * 4096).unwrap();
    let frames = guest.take_frames(PAGES).unwrap();
    for number in 0..PAGES {
        frames.page(number).fill(number as u8);
        assert_eq!(guest.grant(DomId(0), frames.first + number, false).unwrap(), GrantRef(FIRST + number));
    }
    let mut store = XenStore::open(&guest.xenstored()).unwrap();
    store.write(Tx::NONE, "data/ready", "1").unwrap();
    // Until our parent kills us, or dies.
    let _ = std::io::stdin().read(&mut [0]);
}

struct World {
    host: Host,
    hypervisor: Hypervisor,
    store: XenStore,
    guest: Child,
    _dir: tempfile::TempDir,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.guest.kill();
        let _ = self.guest.wait();
    }
}

/// A host whose guest is this very test in another process; `None` in that process, at its end.
fn world(test: &str) -> Option<World> {
    if let Some(dir) = std::env::var_os(DIR) {
        be_a_guest(Path::new(&dir));
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(dir.path()).unwrap();
    let mut store = XenStore::open(&host.xenstored()).unwrap();
    store.watch("/local/domain/3/data/ready", "ready").unwrap();
    let mut guest = Command::new(std::env::current_exe().unwrap());
    guest.args(["--exact", test]).env(DIR, dir.path()).stdin(Stdio::piped()).stdout(Stdio::null());
    let guest = guest.spawn().unwrap();
    let hypervisor = Hypervisor::connect(dir.path()).unwrap();
    let mut world = World { host, hypervisor, store, guest, _dir: dir };
    let deadline = Instant::now() + PATIENCE;
    while world.store.read_optional(Tx::NONE, "/local/domain/3/data/ready").unwrap().is_none() {
        assert!(Instant::now() < deadline, "the guest does not come");
        world.store.next_event(Some(PATIENCE)).unwrap();
    }
    Some(world)
}

/// All pages, in pieces of 64 bytes.
fn all_pages() -> Vec<CopyOp> {
    let piece = |n: u32| CopyOp {
        gref: GrantRef(FIRST + n / 64),
        page_offset: (n % 64 * 64) as u16,
        len: 64,
        buffer: 0,
        buffer_offset: n * 64,
    };
    (0..PAGES * 64).map(piece).collect()
}

#[test]
fn bytes_go_from_one_process_to_the_other() {
    let Some(world) = world("processes::bytes_go_from_one_process_to_the_other") else { return };
    let buffer = Segment::zeroed(PAGES as usize * 4096);
    let ops = all_pages();
    assert!(copy(&world.hypervisor, DOMAIN, Way::FromGuest, &buffer, &ops).iter().all(|status| *status == OKAY));
    let numbers: Vec<u8> = (0..PAGES as u8).flat_map(|number| [number; 4096]).collect();
    assert!(buffer.to_vec() == numbers);
    let grefs: Vec<_> = (0..PAGES).map(|n| GrantRef(FIRST + n)).collect();
    let mapped = world.hypervisor.map(DOMAIN, &grefs, true).unwrap();
    assert!(mapped.to_vec() == numbers);
    buffer.fill(0xaa);
    assert!(copy(&world.hypervisor, DOMAIN, Way::ToGuest, &buffer, &ops).iter().all(|status| *status == OKAY));
    assert_eq!(mapped.to_vec(), vec![0xaa; PAGES as usize * 4096], "one memory, whichever way");
}

#[test]
fn a_guest_that_is_killed_in_the_middle_of_copies_harms_nobody() {
    let name = "processes::a_guest_that_is_killed_in_the_middle_of_copies_harms_nobody";
    let Some(mut world) = world(name) else { return };
    world.store.watch("@releaseDomain", "gone").unwrap();
    while world.store.next_event(Some(Duration::from_millis(1))).unwrap().is_some() {}
    let grefs: Vec<_> = (0..PAGES).map(|n| GrantRef(FIRST + n)).collect();
    let mapped = world.hypervisor.map(DOMAIN, &grefs, true).unwrap();
    let (ops, buffer) = (all_pages(), Segment::zeroed(PAGES as usize * 4096));
    let (mut good, mut failed, mut rounds) = (0u32, Vec::new(), 0);
    let deadline = Instant::now() + PATIENCE;
    while failed.is_empty() {
        assert!(Instant::now() < deadline, "copies go on without a guest");
        let way = if rounds % 2 == 0 { Way::FromGuest } else { Way::ToGuest };
        let statuses = copy(&world.hypervisor, DOMAIN, way, &buffer, &ops);
        good += statuses.iter().filter(|status| **status == OKAY).count() as u32;
        failed.extend(statuses.into_iter().filter(|status| *status != OKAY));
        rounds += 1;
        if rounds == 10 {
            world.guest.kill().unwrap();
        }
    }
    assert!(good >= 10 * PAGES * 64, "{good} pieces before the end");
    assert!(failed.iter().all(|status| [GENERAL_ERROR, BAD_DOMAIN].contains(status)), "{failed:?}");
    let told = world.store.next_event(Some(PATIENCE)).unwrap().expect("the end is told");
    assert_eq!(told.path, "@releaseDomain");
    assert_eq!(copy(&world.hypervisor, DOMAIN, Way::FromGuest, &buffer, &ops[..1]), [BAD_DOMAIN]);
    mapped.fill(1);
    assert_eq!(mapped.as_slice()[5].read_array(7), [1], "what is mapped stays so");
    assert!(!world.host.dir().join("xenstored-3").exists());
}
