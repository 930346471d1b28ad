//! A request on the common path allocates nothing: neither here nor anywhere else in the process, the guest's side among
//! it.
//!
//! A program of its own, with an allocator that counts, and one test that has it to itself.
#![forbid(unsafe_code)]

#[path = "../../front/tests/common/bare.rs"]
mod bare;

use std::alloc::System;
use std::sync::Arc;
use std::time::Duration;

use bare::Bare;
use spile_core::Store;
use spile_engine::{Config as EngineConfig, Engine, EngineKind};
use spile_front_blkif::device::{Config, Device};
use spile_front_blkif::keeping::FailedSyncs;
use spile_front_blkif::pages::Access;
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op, Queue};
use spile_lab::xen::toolstack::{Vbd, add_vbd};
use spile_lab::xen::{Blkfront, Guest, Host, Hypervisor};
use spile_store::{CacheMode, FileStore, NullStore};
use spile_xen::DomId;
use spile_xen::blkif::{Abi, status};
use spile_xen::store::XenStore;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, Stats, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const SIZE: u64 = 4 << 20;
/// So many are counted at a time.
const REQUESTS: usize = 500;
const GUEST: DomId = DomId(7);

/// So many requests, all slots at work all the time. With `sleeps`, the guest waits for notices instead of looking.
fn run(queue: &mut Queue, (op, len): (Op, u32), count: usize, sleeps: bool) {
    let places = (SIZE / u64::from(len)) as usize;
    let mut submitted = 0;
    let mut submit = |queue: &mut Queue, slot: usize| {
        if submitted < count {
            queue.submit(slot, op, (submitted % places) as u64 * u64::from(len), len);
            submitted += 1;
        }
    };
    (0..queue.slots()).for_each(|slot| submit(queue, slot));
    queue.publish();
    while queue.outstanding() > 0 {
        while let Some(done) = queue.take().unwrap() {
            assert_eq!(done.status, status::OKAY);
            submit(queue, done.slot);
        }
        queue.publish();
        if queue.outstanding() > 0 {
            let patience = Duration::from_secs(600);
            assert!(if sleeps { queue.sleep(patience) } else { queue.spin(patience) }.unwrap(), "no answer");
        }
    }
}

/// Comes by every way once: the back end falls asleep, is woken, finds one request and many.
fn warm_up(queue: &mut Queue, what: (Op, u32), sleeps: bool) {
    for count in [1, REQUESTS, 100, 1, REQUESTS, 1] {
        run(queue, what, count, sleeps);
        std::thread::sleep(Duration::from_millis(3));
    }
}

/// What [`REQUESTS`] allocate.
fn change_of(queue: &mut Queue, what: (Op, u32), sleeps: bool) -> Stats {
    let region = Region::new(ALLOCATOR);
    run(queue, what, REQUESTS, sleeps);
    region.change()
}

/// Demands that [`REQUESTS`] allocate nothing. Requests that allocate do so in every try. Two things happen in one try only, on
/// a busy host: a list of the engine grows, because more requests end in one turn than ever before; and the test harness says that
/// the test has been running for over 60 seconds.
fn assert_free(queue: &mut Queue, what: (Op, u32), sleeps: bool, about: &str) {
    let mut changes = Vec::new();
    for _ in 0..5 {
        let change = change_of(queue, what, sleeps);
        if (change.allocations, change.reallocations, change.deallocations) == (0, 0, 0) {
            return;
        }
        changes.push(change);
    }
    panic!("{about}, {:?}, sleeps: {sleeps}: {changes:?}", what.0);
}

/// Counts what [`REQUESTS`] of each kind allocate, after a warm-up.
fn count(what: &str, kind: EngineKind, access: Access, store: impl Store, options: &BlkfrontOptions) {
    let config = EngineConfig { kind, workers: 1, pool_bytes: 4 << 20, ..EngineConfig::default() };
    let engine = Engine::start(config).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(dir.path()).unwrap();
    let guest = Arc::new(Guest::create(dir.path(), GUEST, 64 << 20).unwrap());
    let vbd = Vbd::new(GUEST, "null");
    add_vbd(&mut XenStore::open(&host.xenstored()).unwrap(), &vbd).unwrap();
    let hypervisor = Arc::new(Hypervisor::connect(dir.path()).unwrap());
    let config = config_for(&vbd, access, dir.path());
    let (disk, xenstored) = (Arc::new(Bare(store, SIZE)), host.xenstored());
    let open_store = move || XenStore::open(&xenstored);
    let device = Device::start(engine.clone(), disk, open_store, hypervisor.clone(), hypervisor, config, || {});
    let mut device = device.unwrap();
    let persistent = access == Access::Persistent;
    let mut front = Blkfront::new(guest, vbd.device, BlkfrontOptions { persistent, ..options.clone() }).unwrap();
    let mut queue = front.start().unwrap().remove(0);
    let len = options.data_bytes;
    for sleeps in [true, false] {
        for op in [Op::Read, Op::Write] {
            warm_up(&mut queue, (op, len), sleeps);
            assert_free(&mut queue, (op, len), sleeps, &format!("{what} on {kind}, {access:?}"));
        }
    }
    front.stop(vec![queue]).unwrap();
    device.stop();
    device.wait().unwrap();
    engine.shutdown();
}

fn config_for(vbd: &Vbd, access: Access, dir: &std::path::Path) -> Config {
    Config {
        name: "null".into(),
        backend_path: vbd.backend_path(),
        params: vbd.params.clone(),
        access,
        max_queues: 1,
        max_order: 0,
        max_indirect: 256,
        splits_rings: false,
        read_only: false,
        trace_records: 0,
        run_dir: dir.to_owned(),
        failed_syncs: FailedSyncs::new(dir, &vbd.backend_path()).unwrap(),
    }
}

#[test]
fn requests_allocate_nothing() {
    let small = BlkfrontOptions { data_bytes: 4096, ..BlkfrontOptions::default() };
    for kind in [EngineKind::Auto, EngineKind::Aio, EngineKind::Threads] {
        for access in [Access::Copy, Access::Persistent] {
            count("4 KiB", kind, access, NullStore::new(SIZE), &small);
            count("depth 1", kind, access, NullStore::new(SIZE), &BlkfrontOptions { depth: 1, ..small.clone() });
        }
    }
    let abi = Abi::X86_32;
    count("32 bits", EngineKind::Auto, Access::Copy, NullStore::new(SIZE), &BlkfrontOptions { abi, ..small.clone() });
    // The buffer of a copy is one however many pages there are.
    let whole = BlkfrontOptions { data_bytes: 44 << 10, ..small.clone() };
    count("44 KiB", EngineKind::Auto, Access::Copy, NullStore::new(SIZE), &whole);
    for (pages, depth) in [(32, 8), (256, 2)] {
        let large = BlkfrontOptions { data_bytes: pages << 12, depth, indirect_segments: 256, ..small.clone() };
        count("indirect", EngineKind::Auto, Access::Copy, NullStore::new(SIZE), &large);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, vec![1; SIZE as usize]).unwrap();
    let store = FileStore::open(&path, spile_core::OpenMode::ReadWrite, CacheMode::Page).unwrap();
    count("a file", EngineKind::Auto, Access::Copy, store, &small);
}
