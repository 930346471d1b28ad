//! The stores on files, on both reactors.

#[path = "../../engine/tests/common/mod.rs"]
mod common;

use std::future::Future;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use common::loop_device::LoopDevice;
use common::*;
use spile_core::{ErrorKind, Files, Locator, OpenMode, Segments, Store, Via};
use spile_engine::{Engine, EngineKind, pool, sleep, spawn};
use spile_store::{AnyStore, CacheMode, FileStore, OsFiles};

each_engine!(
    every_way_reads_what_was_written,
    the_end_of_the_file_is_an_error,
    unaligned_direct_transfers_are_refused,
    a_file_cut_behind_our_back_is_an_error,
    growing_and_cutting,
    holes_are_punched_and_seen,
    zeroes_are_written,
    zeroing_keeps_the_space,
    many_more_operations_than_slots,
    a_dropped_read_keeps_its_buffer,
    syncs_go_together,
    a_read_only_store_refuses_writes,
    two_writers_are_refused,
    closing_frees_the_descriptors,
    a_full_file_system_says_so,
    a_file_system_without_holes_says_so,
    a_block_device_is_a_store_that_does_not_grow,
    many_vectors_and_large_transfers,
    one_store_on_both_workers,
    pinned_memory_is_read_and_written_as_any_other,
    every_ring_holds_a_locked_file,
    direct_transfers_go_to_aio_together,
);

/// How many rings of this process have a file at `path` registered, by what the kernel tells of them.
fn rings_that_hold(path: &Path) -> usize {
    let rings = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
        let entry = entry.ok()?;
        let is_ring = std::fs::read_link(entry.path()).ok()?.to_string_lossy().contains("io_uring");
        // Another test may have closed it meanwhile.
        let info = std::fs::read_to_string(Path::new("/proc/self/fdinfo").join(entry.file_name()));
        is_ring.then(|| info.unwrap_or_default())
    });
    rings.filter(|info| info.contains(&*path.to_string_lossy())).count()
}

/// A killed process's lock lasts as long as its rings: see `shared::hold_everywhere`.
fn every_ring_holds_a_locked_file(engine: &Engine) {
    if engine.kind() != EngineKind::Uring {
        return;
    }
    let (_dir, path, store) = patterned(MIB);
    (0..2).for_each(|worker| engine.run_on(worker, || async {}));
    // The engines of other tests in this process hold it too.
    let told = rings_that_hold(&path);
    if told == 0 && !kernel_tells_of_files() {
        return println!("SKIP every ring holds a locked file: this kernel does not tell what a ring holds");
    }
    assert!(told >= 2, "{told}");
    drop(store);
    for _ in 0..1000 {
        if rings_that_hold(&path) == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{} rings hold a file that was closed", rings_that_hold(&path));
}

fn kernel_tells_of_files() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map(|word| word.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(1))
}

fn pinned_memory_is_read_and_written_as_any_other(engine: &Engine) {
    const LEN: usize = 2 * MIB;
    let (_dir, _path, store) = patterned(MIB);
    let file = tempfile::tempfile().unwrap();
    file.set_len(LEN as u64).unwrap();
    let memory = spile_mem::Segment::map_shared(&file, 0, LEN).unwrap();
    engine.run_on(0, move || async move {
        // More often than the table of registered buffers has places.
        for turn in 0..600 {
            let first = spile_engine::pin_memory(&memory);
            let second = spile_engine::pin_memory(&memory);
            assert!([0, LEN].contains(&first.len_bytes()) && first.len_bytes() == second.len_bytes(), "turn {turn}");
            drop(first);
            if turn % 100 == 0 {
                let into = Segments::from(memory.slice(8192..8192 + 65536));
                store.read_at(at(4 * 65536), &into, Via::Direct).await.unwrap();
                assert_eq!(into.to_vec(), pattern(4 * 65536, 65536), "turn {turn}");
                store.write_at(at(0), &into, Via::Direct).await.unwrap();
                into.fill(0);
                store.read_at(at(0), &into, Via::Cached).await.unwrap();
                assert_eq!(into.to_vec(), pattern(4 * 65536, 65536), "turn {turn}");
            }
        }
        // The future is dropped while a transfer is in flight.
        let pinned = spile_engine::pin_memory(&memory);
        let into = Segments::from(memory.slice(0..65536));
        let mut reading = pin!(store.read_at(at(65536 * 2), &into, Via::Direct));
        let started = std::future::poll_fn(|context| std::task::Poll::Ready(reading.as_mut().poll(context))).await;
        drop(pinned);
        if started.is_pending() {
            reading.await.unwrap();
        }
        assert_eq!(into.to_vec(), pattern(65536 * 2, 65536));
    });
}

fn every_way_reads_what_was_written(engine: &Engine) {
    let (_dir, path, store) = patterned(MIB);
    engine.run_on(0, move || async move {
        for (write, read) in [(Via::Direct, Via::Cached), (Via::Cached, Via::Direct)] {
            let from = segments(&[4096, 8192, 4096]);
            from.copy_from_slice(0, &pattern(777, 16384));
            store.write_at(at(65536), &from, write).await.unwrap();
            store.sync().await.unwrap();
            let into = segments(&[8192, 8192]);
            store.read_at(at(65536), &into, read).await.unwrap();
            assert_eq!(into.to_vec(), pattern(777, 16384));
            store.write_at(at(65536), &segments(&[16384]), write).await.unwrap();
        }
        let odd = segments(&[1, 4097, 513]);
        odd.copy_from_slice(0, &pattern(5, 4611));
        store.write_at(at(100_001), &odd, Via::Cached).await.unwrap();
        let into = segments(&[4611]);
        store.read_at(at(100_001), &into, Via::Cached).await.unwrap();
        assert_eq!(into.to_vec(), pattern(5, 4611));
        let pooled = Segments::from(pool().alloc(4096));
        store.read_at(at(4096), &pooled, Via::Direct).await.unwrap();
        assert_eq!(pooled.to_vec(), pattern(4096, 4096));
        store.write_at(at(0), &pooled, Via::Direct).await.unwrap();
    });
    let content = std::fs::read(path).unwrap();
    assert!(content[..4096] == pattern(4096, 4096) && content[100_001..104_612] == pattern(5, 4611));
    assert!(content[200_000..] == pattern(200_000, MIB - 200_000));
}

fn the_end_of_the_file_is_an_error(engine: &Engine) {
    let (_dir, path, store) = patterned(10_000);
    engine.run_on(0, move || async move {
        for (offset, len) in [(9_999, 2), (10_000, 1), (usize::MAX, 1), (0, 10_001)] {
            let error = store.read_at(at(offset), &segments(&[len]), Via::Cached).await.unwrap_err();
            assert_eq!((error.kind(), error.path()), (ErrorKind::OutOfRange, Some(&*path)));
            assert_eq!(error.offset_bytes(), Some(offset as u64));
        }
        store.read_at(at(9_999), &segments(&[1]), Via::Cached).await.unwrap();
        store.read_at(at(10_000), &Segments::new(), Via::Cached).await.unwrap();
        let far = store.write_at(at(i64::MAX as usize), &segments(&[1]), Via::Cached).await;
        assert_eq!(far.unwrap_err().kind(), ErrorKind::OutOfRange);
        let hole = store.punch_hole(at(8_000), 4_096).await.unwrap_err();
        assert_eq!(hole.kind(), ErrorKind::OutOfRange);
        assert!(store.extent_at(at(10_000)).await.is_err());
    });
}

fn unaligned_direct_transfers_are_refused(engine: &Engine) {
    let (_dir, _, store) = patterned(MIB);
    let info = store.info();
    if info.offset_align_bytes == 1 {
        return println!("SKIP direct I/O: not on this file system");
    }
    assert!(info.offset_align_bytes.is_power_of_two() && info.memory_align_bytes.is_power_of_two());
    engine.run_on(0, move || async move {
        let align = info.offset_align_bytes as usize;
        for (offset, len) in [(1, align), (0, align + 1)] {
            let result = store.read_at(at(offset), &segments(&[len]), Via::Direct).await;
            assert_eq!(result.unwrap_err().kind(), ErrorKind::InvalidInput);
        }
        let halves = segments(&[align / 2, align / 2]);
        let error = store.read_at(at(0), &halves, Via::Direct).await.unwrap_err();
        assert_eq!(error.os_errno(), None, "asked of the kernel: {error}");
        let shifted = segments(&[align + 1]).slice(1..align + 1);
        let result = store.write_at(at(0), &shifted, Via::Direct).await;
        assert_eq!(result.is_err(), info.memory_align_bytes > 1);
        store.read_at(at(align), &segments(&[align]), Via::Direct).await.unwrap();
    });
}

fn a_file_cut_behind_our_back_is_an_error(engine: &Engine) {
    let (_dir, path, store) = patterned(64 * KIB);
    std::fs::File::options().write(true).open(&path).unwrap().set_len(6000).unwrap();
    engine.run_on(0, move || async move {
        for via in [Via::Cached, Via::Direct] {
            let error = store.read_at(at(4096), &segments(&[4096]), via).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        }
    });
}

fn growing_and_cutting(engine: &Engine) {
    let (_dir, path, store) = patterned(8192);
    engine.run_on(1, move || async move {
        store.write_at(at(20_000), &segments(&[100]), Via::Cached).await.unwrap();
        assert_eq!(store.len_bytes(), 20_100);
        let gap = segments(&[20_100 - 8192]);
        store.read_at(at(8192), &gap, Via::Cached).await.unwrap();
        assert!(gap.is_zero());
        store.set_len(1 << 40).await.unwrap();
        assert_eq!(store.len_bytes(), 1 << 40);
        store.set_len(4096).await.unwrap();
        assert_eq!(store.len_bytes(), 4096);
        store.set_len(8192).await.unwrap();
        let tail = segments(&[4096]);
        store.read_at(at(4096), &tail, Via::Direct).await.unwrap();
        assert!(tail.is_zero());
        assert_eq!(std::fs::metadata(path).unwrap().len(), 8192);
    });
}

async fn map(store: &impl Store) -> Vec<(u64, bool)> {
    let (mut runs, mut offset) = (Vec::new(), 0);
    while offset < store.len_bytes() {
        let run = store.extent_at(spile_core::StoreOffset(offset)).await.unwrap();
        assert!(run.len_bytes > 0);
        runs.push((run.len_bytes, run.is_hole));
        offset += run.len_bytes;
    }
    runs
}

fn holes_are_punched_and_seen(engine: &Engine) {
    let (_dir, path, store) = patterned(MIB);
    engine.run_on(0, move || async move {
        assert_eq!(map(&store).await, [(MIB as u64, false)]);
        let punched = store.punch_hole(at(256 * KIB), 512 * KIB as u64).await;
        assert_eq!(store.info().punches, punched.is_ok(), "{punched:?}");
        if punched.is_err() {
            return println!("SKIP holes: not on this file system");
        }
        let quarter = 256 * KIB as u64;
        assert_eq!(map(&store).await, [(quarter, false), (2 * quarter, true), (quarter, false)]);
        let all = segments(&[MIB]);
        store.read_at(at(0), &all, Via::Direct).await.unwrap();
        assert!(all.slice(256 * KIB..768 * KIB).is_zero());
        assert_eq!(all.slice(0..256 * KIB).to_vec(), pattern(0, 256 * KIB));
        store.set_len(2 << 20).await.unwrap();
        assert_eq!(map(&store).await.last(), Some(&(1 << 20, true)));
        let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap());
        assert!(blocks * 512 < 768 * 1024, "{blocks} blocks");
    });
}

fn zeroes_are_written(engine: &Engine) {
    let (_dir, _, store) = patterned(MIB);
    engine.run_on(0, move || async move {
        store.zero_range(at(4096), 8192).await.unwrap();
        store.zero_range(at(100_000), 3).await.unwrap();
        store.zero_range(at(100_000), 0).await.unwrap();
        let mut expected = pattern(0, MIB);
        expected[4096..12288].fill(0);
        expected[100_000..100_003].fill(0);
        let all = segments(&[MIB]);
        store.read_at(at(0), &all, Via::Cached).await.unwrap();
        assert!(all.to_vec() == expected);
        assert_eq!(store.len_bytes(), MIB as u64);
    });
}

fn zeroing_keeps_the_space(engine: &Engine) {
    // A file system that can zero a range, in most cases, and one that can only punch and allocate.
    for dir in [Ok(folder()), tempfile::tempdir_in("/dev/shm")] {
        let Ok(dir) = dir else {
            println!("SKIP zeroing on tmpfs: no /dev/shm");
            continue;
        };
        let path = dir.path().join("disk");
        std::fs::write(&path, pattern(0, MIB)).unwrap();
        let store = FileStore::open(&path, OpenMode::ReadWrite, CacheMode::Page).unwrap();
        engine.run_on(0, move || async move {
            store.sync().await.unwrap();
            store.zero_range(at(64 * KIB), 512 * KIB as u64).await.unwrap();
        });
        let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&path).unwrap());
        assert!(blocks * 512 >= MIB as u64, "{} of {blocks} blocks", path.display());
        assert!(std::fs::read(&path).unwrap()[64 * KIB..576 * KIB].iter().all(|byte| *byte == 0));
    }
}

fn many_more_operations_than_slots(engine: &Engine) {
    let (_dir, _, store) = patterned(4 * MIB);
    let (store, done) = (Arc::new(store), Arc::new(AtomicUsize::new(0)));
    let finished = done.clone();
    engine.run_on(0, move || async move {
        for number in 0..10_000usize {
            let (store, done) = (store.clone(), done.clone());
            spawn(async move {
                let offset = number * 7919 % 1024 * 4096;
                let into = Segments::from(pool().alloc(4096));
                store.read_at(at(offset), &into, Via::Direct).await.unwrap();
                assert_eq!(into.to_vec(), pattern(offset, 4096));
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
    });
    engine.shutdown();
    assert_eq!(finished.load(Ordering::Relaxed), 10_000);
    let stats = engine.stats()[0];
    assert!(stats.cqes >= 10_000 && stats.enters < stats.cqes, "{stats:?}");
}

fn a_dropped_read_keeps_its_buffer(engine: &Engine) {
    let (_dir, _, store) = patterned(MIB);
    if store.info().offset_align_bytes == 1 {
        return println!("SKIP direct I/O: not on this file system");
    }
    // Helper threads may be done with all by the time we look; a ring is not looked into before.
    let is_ring = engine.kind() == EngineKind::Uring;
    engine.run_on(0, move || async move {
        let mut dropped = 0;
        for _ in 0..50 {
            let into = Segments::from(pool().alloc(MIB));
            let context = &mut Context::from_waker(Waker::noop());
            let pending = pin!(store.read_at(at(0), &into, Via::Direct)).poll(context).is_pending();
            dropped += usize::from(pending);
        }
        let in_use = pool().stats().in_use_chunks;
        assert!(dropped > 0 && (in_use > 0 || !is_ring), "all were freed at once");
        for _ in 0..1000 {
            if pool().stats().in_use_chunks == 0 {
                return;
            }
            sleep(Duration::from_millis(5)).await;
        }
        panic!("buffers were never given back");
    });
}

fn syncs_go_together(engine: &Engine) {
    let (_dir, store) = created(MIB as u64, CacheMode::Direct);
    let done = Arc::new(AtomicUsize::new(0));
    for worker in 0..2 {
        let (store, done) = (store.clone(), done.clone());
        engine.spawn_on(worker, move || async move {
            for number in 0..50 {
                let (store, done) = (store.clone(), done.clone());
                spawn(async move {
                    let page = segments(&[4096]);
                    store.write_at(at(number * 4096), &page, Via::Cached).await.unwrap();
                    store.sync().await.unwrap();
                    done.fetch_add(1, Ordering::Relaxed);
                });
            }
        });
    }
    engine.shutdown();
    assert_eq!(done.load(Ordering::Relaxed), 100);
    let operations: u64 = engine.stats().iter().map(|s| s.cqes).sum();
    assert!(operations < 190, "{operations} operations for 100 writes and their syncs");
}

fn a_read_only_store_refuses_writes(engine: &Engine) {
    let (_dir, path, store) = patterned(8192);
    drop(store);
    let store = FileStore::open(&path, OpenMode::ReadOnly, CacheMode::Direct).unwrap();
    assert!(store.info().read_only);
    engine.run_on(0, move || async move {
        let page = segments(&[4096]);
        let results = [
            store.write_at(at(0), &page, Via::Cached).await,
            store.zero_range(at(0), 512).await,
            store.punch_hole(at(0), 512).await,
            store.set_len(0).await,
        ];
        for result in results {
            assert_eq!(result.unwrap_err().kind(), ErrorKind::ReadOnly);
        }
        store.read_at(at(0), &page, Via::Direct).await.unwrap();
    });
}

fn two_writers_are_refused(engine: &Engine) {
    let (_dir, path, store) = patterned(8192);
    let open = |mode| FileStore::open(&path, mode, CacheMode::Direct);
    for mode in [OpenMode::ReadWrite, OpenMode::ReadOnly] {
        let error = open(mode).err().expect("a conflict");
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        assert!(error.hint_text().is_some() && error.path() == Some(&*path));
    }
    // The ring's table of files still knows the file when the store is dropped; the lock must go all the same.
    let store = engine.run_on(0, move || async move {
        store.read_at(at(0), &segments(&[4096]), Via::Direct).await.unwrap();
        store.write_at(at(0), &segments(&[4096]), Via::Cached).await.unwrap();
        store
    });
    drop(store);
    let readers = [open(OpenMode::ReadOnly).unwrap(), open(OpenMode::ReadOnly).unwrap()];
    assert_eq!(open(OpenMode::ReadWrite).err().map(|e| e.kind()), Some(ErrorKind::Busy));
    drop(readers);
    open(OpenMode::ReadWrite).unwrap();
}

fn open_descriptors(path: &Path) -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    links.filter(|entry| std::fs::read_link(entry.as_ref().unwrap().path()).is_ok_and(|to| to == path)).count()
}

fn closing_frees_the_descriptors(engine: &Engine) {
    let (_dir, path, store) = patterned(8192);
    drop(store);
    let file = path.clone();
    engine.run_on(0, move || async move {
        for _ in 0..1500 {
            let store = OsFiles::new(CacheMode::Direct).open(&Locator::from(&file), OpenMode::ReadWrite).await.unwrap();
            let page = Segments::from(pool().alloc(4096));
            store.read_at(at(0), &page, Via::Direct).await.unwrap();
            store.write_at(at(0), &page, Via::Cached).await.unwrap();
        }
    });
    // Duplicates may still be on their way to the rings of other workers.
    for _ in 0..1000 {
        if open_descriptors(&path) == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{} descriptors are open", open_descriptors(&path));
}

/// A mounted file system, gone at the end also when the test fails.
struct Mounted(tempfile::TempDir);

impl Mounted {
    fn path(&self) -> &Path {
        self.0.path()
    }

    fn unmount(&self, lazily: &[&str]) -> bool {
        let mut command = std::process::Command::new("umount");
        let command = command.args(lazily).arg(self.path()).stderr(std::process::Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.unmount(&["-l"]);
    }
}

/// Mounts a file system in memory; `None` where that is not allowed.
fn mounted(kind: &str, options: &str) -> Option<Mounted> {
    let dir = folder();
    let status = std::process::Command::new("mount")
        .args(["-t", kind, "-o", options, "none"])
        .arg(dir.path())
        .stderr(std::process::Stdio::null())
        .status();
    status.is_ok_and(|status| status.success()).then_some(Mounted(dir))
}

/// A store that did not say that it cannot punch would fail a guest's discards, and its image's allocation.
fn a_file_system_without_holes_says_so(engine: &Engine) {
    let Some(dir) = mounted("ramfs", "mode=700") else {
        return println!("SKIP ramfs: mounting is not allowed");
    };
    let path = dir.path().join("disk");
    std::fs::write(&path, pattern(0, MIB)).unwrap();
    let store = FileStore::open(&path, OpenMode::ReadWrite, CacheMode::Direct).unwrap();
    assert!(!store.info().punches);
    engine.run_on(0, move || async move {
        let error = store.punch_hole(at(4096), 4096).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        store.zero_range(at(4096), 8192).await.unwrap();
    });
    let mut expected = pattern(0, MIB);
    expected[4096..12288].fill(0);
    assert!(std::fs::read(&path).unwrap() == expected);
    check_unmount(&dir);
}

fn a_block_device_is_a_store_that_does_not_grow(engine: &Engine) {
    let dir = folder();
    let path = dir.path().join("disk");
    std::fs::write(&path, pattern(0, 2 * MIB)).unwrap();
    let device = match LoopDevice::over(&path) {
        Ok(device) => device,
        Err(why) => return println!("SKIP a block device: {why}"),
    };
    let store = FileStore::open(device.path.as_ref(), OpenMode::ReadWrite, CacheMode::Direct).unwrap();
    assert!(store.len_bytes() == 2 * MIB as u64 && !store.info().grows_zeroed);
    assert!(store.info().offset_align_bytes >= 512, "{:?}", store.info());
    engine.run_on(0, move || async move {
        store.write_at(at(8192), &segments(&[4096, 4096]), Via::Direct).await.unwrap();
        store.zero_range(at(MIB), 65536).await.unwrap();
        let punched = store.punch_hole(at(65536), 65536).await;
        assert_eq!(store.info().punches, punched.is_ok(), "{punched:?}");
        let mut expected = pattern(0, 2 * MIB);
        expected[8192..16384].fill(0);
        expected[MIB..MIB + 65536].fill(0);
        if punched.is_ok() {
            expected[65536..131_072].fill(0);
        }
        let all = segments(&[2 * MIB]);
        store.read_at(at(0), &all, Via::Direct).await.unwrap();
        assert!(all.to_vec() == expected);
        assert_eq!(map(&store).await, [(2 * MIB as u64, false)]);
        let past = [
            store.write_at(at(2 * MIB - 4096), &segments(&[8192]), Via::Direct).await,
            store.read_at(at(2 * MIB), &segments(&[512]), Via::Direct).await,
        ];
        assert!(past.into_iter().all(|result| result.unwrap_err().kind() == ErrorKind::OutOfRange));
        assert_eq!(store.set_len(MIB as u64).await.unwrap_err().kind(), ErrorKind::Unsupported);
        store.set_len(2 * MIB as u64).await.unwrap();
        store.sync().await.unwrap();
    });
}

fn a_full_file_system_says_so(engine: &Engine) {
    let Some(dir) = mounted("tmpfs", "size=1m") else {
        return println!("SKIP a full file system: mounting is not allowed");
    };
    let path = dir.path().join("disk");
    let store = OsFiles::new(CacheMode::Page).create(&path, 4 << 20).unwrap();
    engine.run_on(0, move || async move {
        let error = store.write_at(at(0), &segments(&[2 * MIB]), Via::Cached).await.unwrap_err();
        assert_eq!((error.kind(), error.os_errno()), (ErrorKind::NoSpace, Some(28)));
        assert_eq!((error.path(), error.offset_bytes()), (Some(&*path), Some(0)));
        store.punch_hole(at(0), 4 << 20).await.unwrap();
        store.write_at(at(MIB), &segments(&[64 * KIB]), Via::Cached).await.unwrap();
    });
    check_unmount(&dir);
}

/// Unmounts the file system. The worker closes a file in its next turn, which may come after the test.
fn check_unmount(mounted: &Mounted) {
    let unmounted = (0..200).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        mounted.unmount(&[])
    });
    assert!(unmounted, "the file is still open");
}

fn many_vectors_and_large_transfers(engine: &Engine) {
    let (_dir, store) = created(0, CacheMode::Direct);
    engine.run_on(0, move || async move {
        let lens: Vec<usize> = (0..3000).map(|n| 1 + n * 37 % 900).collect();
        let from = segments(&lens);
        from.copy_from_slice(0, &pattern(9, from.len()));
        store.write_at(at(33), &from, Via::Cached).await.unwrap();
        let into = segments(&[from.len()]);
        store.read_at(at(33), &into, Via::Cached).await.unwrap();
        assert!(into.to_vec() == pattern(9, from.len()));
        let large = segments(&[16 * MIB, 16 * MIB]);
        large.copy_from_slice(0, &pattern(1, 32 * MIB));
        store.write_at(at(0), &large, Via::Direct).await.unwrap();
        let into = segments(&[32 * MIB]);
        store.read_at(at(0), &into, Via::Direct).await.unwrap();
        assert!(into.to_vec() == pattern(1, 32 * MIB));
    });
}

fn one_store_on_both_workers(engine: &Engine) {
    let (_dir, store) = created(8 * MIB as u64, CacheMode::Direct);
    let threads: Vec<_> = (0..2)
        .map(|worker| {
            let (engine, store): (_, AnyStore) = (engine.clone(), store.clone());
            std::thread::spawn(move || {
                engine.run_on(worker, move || async move {
                    for number in (worker..1024).step_by(2) {
                        let page = Segments::from(pool().alloc(4096));
                        page.copy_from_slice(0, &pattern(number, 4096));
                        store.write_at(at(number * 4096), &page, Via::Direct).await.unwrap();
                        page.fill(0);
                        store.read_at(at(number * 4096), &page, Via::Direct).await.unwrap();
                        assert_eq!(page.to_vec(), pattern(number, 4096));
                    }
                })
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// The engine `aio` gives direct transfers to the kernel some at a time, and no other engine gives them to AIO.
fn direct_transfers_go_to_aio_together(engine: &Engine) {
    const READS: usize = 200;
    let (_dir, _, store) = patterned(4 * MIB);
    if store.info().offset_align_bytes == 1 {
        return println!("SKIP direct I/O: not on this file system");
    }
    let store = Arc::new(store);
    let stats = || engine.stats().into_iter().next().unwrap();
    let before = stats();
    engine.run_on(0, move || async move {
        let reads = (0..READS).map(|number| {
            let (store, offset) = (store.clone(), number * 16 * KIB);
            async move {
                let halves = segments(&[4 * KIB, 4 * KIB]);
                store.read_at(at(offset), &halves, Via::Direct).await.unwrap();
                assert_eq!(halves.to_vec(), pattern(offset, 8 * KIB));
            }
        });
        futures_util::future::join_all(reads).await;
        store.read_at(at(1), &segments(&[100]), Via::Cached).await.unwrap();
    });
    let after = stats();
    let by_aio = after.aio_transfers - before.aio_transfers;
    if engine.kind() != EngineKind::Aio {
        return assert_eq!(by_aio, 0);
    }
    assert_eq!(by_aio, READS as u64);
    assert!(after.enters - before.enters < READS as u64, "{before:?} {after:?}");
}
