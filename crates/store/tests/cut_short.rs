//! A file that another program cuts short while it is a store: requests behind its end fail, and none reads zeroes there.

use spile_core::{ErrorKind, OpenMode, Segments, Store, StoreOffset, Via};
use spile_engine::{Config, Engine, EngineKind};
use spile_store::{CacheMode, FileStore};

const KIB: u64 = 1024;

/// Runs `work` with a store of 1 MiB on each engine and in each cache mode, and `cut`, which cuts the file to 256 KiB.
fn each_store<F>(work: impl Fn(FileStore, Box<dyn Fn() + Send>) -> F + Copy + Send + 'static)
where
    F: Future<Output = ()> + 'static,
{
    for kind in [EngineKind::Auto, EngineKind::Aio, EngineKind::Threads] {
        for cache in [CacheMode::Direct, CacheMode::Page] {
            let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let path = dir.path().join("disk");
            std::fs::write(&path, vec![7; 1024 * KIB as usize]).unwrap();
            let engine = Engine::start(Config { kind, workers: 1, pool_bytes: 1 << 21, ..Config::default() }).unwrap();
            engine.run_on(0, move || async move {
                let store = FileStore::open(&path, OpenMode::ReadWrite, cache).unwrap();
                let cut = move || std::fs::File::options().write(true).open(&path).unwrap().set_len(256 * KIB).unwrap();
                work(store, Box::new(cut)).await;
            });
            engine.shutdown();
        }
    }
}

fn lost<T>(result: spile_core::Result<T>) -> bool {
    matches!(result, Err(error) if error.kind() == ErrorKind::Corrupt)
}

fn page() -> Segments {
    Segments::zeroed(4096)
}

#[test]
fn reads_behind_the_end_fail_and_writes_do_from_then_on() {
    each_store(|store, cut| async move {
        let at = |kib: u64| StoreOffset(kib * KIB);
        cut();
        for via in [Via::Cached, Via::Direct] {
            assert!(lost(store.read_at(at(512), &page(), via).await));
            assert!(lost(store.write_at(at(512), &page(), via).await));
            store.read_at(at(0), &page(), via).await.unwrap();
        }
        store.write_at(at(252), &page(), Via::Direct).await.unwrap();
        assert!(lost(store.sync().await) && lost(store.zero_range(at(512), 4096).await));
        assert!(lost(store.set_len(1024 * KIB).await));
    });
}

#[test]
fn what_is_gone_is_no_hole() {
    each_store(|store, cut| async move {
        let all = store.extent_at(StoreOffset(0)).await.unwrap();
        assert!(!all.is_hole && all.len_bytes == 1024 * KIB);
        cut();
        let first = store.extent_at(StoreOffset(0)).await.unwrap();
        assert!(!first.is_hole && first.len_bytes == 256 * KIB, "{first:?}");
        assert!(lost(store.extent_at(StoreOffset(256 * KIB)).await));
    });
}

#[test]
fn a_flush_tells_of_a_cut_that_a_write_has_covered() {
    each_store(|store, cut| async move {
        store.sync().await.unwrap();
        cut();
        store.write_at(StoreOffset(768 * KIB), &page(), Via::Direct).await.unwrap();
        assert!(lost(store.sync().await));
        assert!(lost(store.sync().await), "it is not forgotten");
    });
}

#[test]
fn a_store_may_change_its_own_length() {
    each_store(|store, _| async move {
        for kib in [512, 64, 2048] {
            store.set_len(kib * KIB).await.unwrap();
            store.sync().await.unwrap();
            let end = StoreOffset(kib * KIB - 4096);
            store.read_at(end, &page(), Via::Direct).await.unwrap();
            store.extent_at(end).await.unwrap();
        }
    });
}
