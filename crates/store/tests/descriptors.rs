//! A process has as many descriptors after its first write into a hole of a file as before: the eventfd that announces the
//! ends of such writes is made with the worker. This is a program of its own, because tests share their descriptors.

#[path = "../../engine/tests/common/mod.rs"]
mod common;

use std::sync::Arc;

use common::*;
use spile_core::{OpenMode, Segments, Store, Via};
use spile_engine::{Config, Engine, EngineKind};
use spile_store::{CacheMode, FileStore};

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn writes_into_holes_need_no_more_descriptors() {
    let config = Config { kind: EngineKind::Uring, workers: 2, pool_bytes: 4 * MIB, ..Config::default() };
    let engine = match Engine::start(config) {
        Ok(engine) => engine,
        Err(error) => return println!("SKIP uring: {error}"),
    };
    let dir = folder();
    let path = dir.path().join("disk");
    std::fs::write(&path, [1; 4 * KIB]).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(64 * MIB as u64).unwrap();
    let store = Arc::new(FileStore::open(&path, OpenMode::ReadWrite, CacheMode::Direct).unwrap());
    // Each worker has got its message about the locked file, and has closed the descriptor in it.
    for worker in 0..engine.workers() {
        let store = store.clone();
        engine.run_on(worker, move || async move {
            store.read_at(at(0), &segments(&[4 * KIB]), Via::Direct).await.unwrap();
        });
    }
    let write = |offset: usize| {
        for worker in 0..engine.workers() {
            let store = store.clone();
            engine.run_on(worker, move || async move {
                let page: Segments = segments(&[4 * KIB]);
                store.write_at(at(offset + worker * 64 * KIB), &page, Via::Direct).await.unwrap();
            });
        }
    };
    let before = descriptors();
    write(MIB);
    assert_eq!(descriptors(), before);
    let by_aio: Vec<u64> = engine.stats().iter().map(|worker| worker.aio_writes).collect();
    let is_by_aio = by_aio.iter().all(|writes| *writes > 0);
    assert!(!holes_need_aio(&path, &store) || is_by_aio, "writes by AIO of each worker: {by_aio:?}");
    engine.shutdown();
}
