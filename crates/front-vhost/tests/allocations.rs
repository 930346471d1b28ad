//! A request on the common path allocates nothing: neither here nor anywhere else in the process.
//!
//! A program of its own, with an allocator that counts, and one test that has it to itself.
#![forbid(unsafe_code)]

#[path = "../../front/tests/common/bare.rs"]
mod bare;

use std::alloc::System;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use bare::Bare;
use spile_core::Store;
use spile_engine::{Config as EngineConfig, Engine, EngineKind};
use spile_front_vhost::{Config, Server};
use spile_lab::GuestQueue;
use spile_lab::vhost::{Device, DeviceOptions, Op, Queue, QueueOptions, STATUS_OK};
use spile_store::{CacheMode, FileStore, NullStore};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, Stats, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const SIZE: u64 = 1 << 20;
/// So many are counted at a time.
const REQUESTS: usize = 1000;
const LEN: u32 = 4096;

/// So many requests, all slots at work all the time. With `sleep`, the client waits for calls instead of looking.
fn run(queue: &mut Queue, op: Op, count: usize, sleep: bool) {
    let places = (SIZE / u64::from(LEN)) as usize;
    let mut submitted = 0;
    let mut submit = |queue: &mut Queue, slot: usize| {
        if submitted < count {
            queue.submit(slot, op, (submitted % places) as u64 * u64::from(LEN), LEN);
            submitted += 1;
        }
    };
    (0..queue.slots()).for_each(|slot| submit(queue, slot));
    queue.publish();
    while queue.outstanding() > 0 {
        while let Some(done) = queue.take().unwrap() {
            assert_eq!(done.status, STATUS_OK);
            submit(queue, done.slot);
        }
        queue.publish();
        if queue.outstanding() > 0 {
            let patience = Duration::from_secs(600);
            assert!(if sleep { queue.sleep(patience) } else { queue.spin(patience) }.unwrap(), "no answer");
        }
    }
}

/// Comes by every way once: the server falls asleep, is woken, finds one request and many.
fn warm_up(queue: &mut Queue, op: Op, sleep: bool) {
    for count in [1, REQUESTS, 100, 1, REQUESTS, 1] {
        run(queue, op, count, sleep);
        std::thread::sleep(Duration::from_millis(3));
    }
}

/// What [`REQUESTS`] allocate.
fn change_of(queue: &mut Queue, op: Op, sleep: bool) -> Stats {
    let region = Region::new(ALLOCATOR);
    run(queue, op, REQUESTS, sleep);
    region.change()
}

/// Counts what [`REQUESTS`] of each kind allocate, after a warm-up.
fn count(what: &str, kind: EngineKind, store: impl Store, options: &QueueOptions) {
    let config = EngineConfig { kind, workers: 1, pool_bytes: 1 << 20, ..EngineConfig::default() };
    let engine = Engine::start(config).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let server = Server::new(engine.clone(), Arc::new(Bare(store, SIZE)), Config::default()).unwrap();
    server.listen(UnixListener::bind(&path).unwrap().into()).unwrap();
    let mut device = Device::connect(&path, DeviceOptions::default()).unwrap();
    let mut queues = device.start(options).unwrap();
    for sleep in [true, false] {
        for op in [Op::Read, Op::Write] {
            warm_up(&mut queues[0], op, sleep);
            // A list that is longer than ever before, because the host was busy, grows once; requests that allocate do so
            // each time.
            let mut changes = Vec::new();
            let is_free = (0..5).any(|_| {
                let change = change_of(&mut queues[0], op, sleep);
                changes.push(change);
                (change.allocations, change.reallocations, change.deallocations) == (0, 0, 0)
            });
            assert!(is_free, "{what} on {kind}, {op:?}, sleep: {sleep}: {changes:?}");
        }
    }
    drop((queues, device));
    server.stop();
    server.wait_drained();
    engine.shutdown();
}

#[test]
fn requests_allocate_nothing() {
    let depth_32 = QueueOptions { depth: 32, data_bytes: LEN, ..QueueOptions::default() };
    for kind in [EngineKind::Auto, EngineKind::Aio, EngineKind::Threads] {
        count("the null store", kind, NullStore::new(SIZE), &depth_32);
        count("depth 1", kind, NullStore::new(SIZE), &QueueOptions { depth: 1, ..depth_32 });
        let scattered = QueueOptions { segment_bytes: Some(512), ..depth_32 };
        count("eight segments each", kind, NullStore::new(SIZE), &scattered);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, vec![1; SIZE as usize]).unwrap();
    let store = FileStore::open(&path, spile_core::OpenMode::ReadWrite, CacheMode::Page).unwrap();
    count("a file", EngineKind::Auto, store, &depth_32);
}
