//! Writes into holes of a file take the space of their data, and no more.

#[path = "../../engine/tests/common/mod.rs"]
mod common;

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Waker};

use common::loop_device::LoopDevice;
use common::*;
use spile_core::{OpenMode, Segment, Store, Via};
use spile_engine::{Engine, EngineKind, pool, spawn, yield_now};
use spile_store::{CacheMode, FileStore};

each_engine!(
    random_writes_take_no_more_space_than_their_data,
    cached_writes_take_no_more_space_than_their_data,
    sequential_writes_take_no_more_space_than_their_data,
    writes_into_holes_keep_their_data,
    dropped_writes_into_holes_keep_their_buffers,
    a_block_device_is_not_written_by_aio,
);

const FILE_BYTES: usize = 1 << 30;
const WRITES: usize = 500;

/// A sparse file, direct where that can be.
fn sparse(len: usize) -> (tempfile::TempDir, std::path::PathBuf, Arc<FileStore>) {
    sparse_in(len, CacheMode::Direct)
}

fn sparse_in(len: usize, cache: CacheMode) -> (tempfile::TempDir, std::path::PathBuf, Arc<FileStore>) {
    let dir = folder();
    let path = dir.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(len as u64).unwrap();
    let store = FileStore::open(&path, OpenMode::ReadWrite, cache).unwrap();
    (dir, path, Arc::new(store))
}

fn space_bytes(path: &Path) -> usize {
    std::fs::metadata(path).unwrap().blocks() as usize * 512
}

/// Bytes of this length at that place: no two places have the same.
fn bytes_of(offset: usize, len: usize) -> Segment {
    let segment = Segment::zeroed(len);
    segment.copy_from_slice(0, &pattern(offset, len));
    segment
}

/// Writes `len` bytes at each of `places`, `depth` at a time.
fn write_all(
    engine: &Engine,
    store: &Arc<FileStore>,
    len: usize,
    depth: usize,
    places: impl Iterator<Item = usize> + Send + 'static,
) {
    let store = store.clone();
    engine.run_on(0, move || async move {
        let in_flight = Arc::new(AtomicUsize::new(0));
        for offset in places {
            while in_flight.load(Ordering::Relaxed) >= depth {
                yield_now().await;
            }
            in_flight.fetch_add(1, Ordering::Relaxed);
            let (store, in_flight) = (store.clone(), in_flight.clone());
            spawn(async move {
                store.write_at(at(offset), &bytes_of(offset, len).into(), Via::Direct).await.unwrap();
                in_flight.fetch_sub(1, Ordering::Relaxed);
            });
        }
        while in_flight.load(Ordering::Relaxed) > 0 {
            yield_now().await;
        }
        store.sync().await.unwrap();
    });
}

/// True where a file system allocates so little for a page that the tests can tell.
fn allocates_by_pages() -> bool {
    let dir = folder();
    let path = dir.path().join("page");
    std::fs::write(&path, [1; 4096]).unwrap();
    std::fs::File::open(&path).unwrap().sync_all().unwrap();
    let is_fine = space_bytes(&path) <= 4096;
    if !is_fine {
        println!("SKIP space of writes: this file system allocates more than a page for a page");
    }
    is_fine
}

/// Different places far from each other, in no order.
fn scattered(len: usize) -> impl Iterator<Item = usize> + Send {
    (0..WRITES).map(move |number| (number * 7919 % (FILE_BYTES / (64 * KIB))) * 64 * KIB + (64 * KIB - len))
}

fn assert_lean(path: &Path, data: usize) {
    let space = space_bytes(path);
    assert!(space >= data && space <= data + data / 10, "{space} bytes of space for {data} bytes of data");
}

fn aio_writes(engine: &Engine) -> u64 {
    engine.stats().iter().map(|worker| worker.aio_writes).sum()
}

/// Checks that `writes` writes into holes of the file went by AIO, on file systems of which it is known that
/// such writes have to wait.
fn assert_by_aio(engine: &Engine, path: &Path, store: &FileStore, writes: usize) {
    match engine.kind() {
        EngineKind::Threads => assert_eq!(aio_writes(engine), 0),
        _ if holes_need_aio(path, store) => assert_eq!(aio_writes(engine), writes as u64),
        _ => println!("SKIP use of AIO: neither ext4 nor XFS, or no direct I/O"),
    }
}

fn random_writes_take_no_more_space_than_their_data(engine: &Engine) {
    let mut writes = 0;
    for len in [4 * KIB, 64 * KIB] {
        let (_dir, path, store) = sparse(FILE_BYTES);
        if !allocates_by_pages() {
            return;
        }
        write_all(engine, &store, len, 32, scattered(len));
        assert_lean(&path, WRITES * len);
        writes += WRITES;
        assert_by_aio(engine, &path, &store, writes);
    }
}

fn sequential_writes_take_no_more_space_than_their_data(engine: &Engine) {
    for len in [4 * KIB, 64 * KIB] {
        let (_dir, path, store) = sparse(FILE_BYTES);
        if !allocates_by_pages() {
            return;
        }
        write_all(engine, &store, len, 32, (0..WRITES).map(move |number| MIB + number * len));
        drop(store);
        assert_lean(&path, WRITES * len);
    }
}

fn cached_writes_take_no_more_space_than_their_data(engine: &Engine) {
    for len in [4 * KIB, 64 * KIB] {
        let places: [Box<dyn Iterator<Item = usize> + Send>; 2] =
            [Box::new(scattered(len)), Box::new((0..WRITES).map(move |number| MIB + number * len))];
        for places in places {
            let (_dir, path, store) = sparse_in(FILE_BYTES, CacheMode::Page);
            if !allocates_by_pages() {
                return;
            }
            write_all(engine, &store, len, 32, places);
            drop(store);
            assert_lean(&path, WRITES * len);
        }
    }
}

/// More at once than one worker's context for AIO takes, in pieces, some of which overlap holes in part.
fn writes_into_holes_keep_their_data(engine: &Engine) {
    let (_dir, path, store) = sparse(16 * MIB);
    let (writer, done) = (store.clone(), Arc::new(AtomicUsize::new(0)));
    engine.run_on(0, move || async move {
        for offset in (0..16 * MIB).step_by(16 * KIB) {
            let (store, done) = (writer.clone(), done.clone());
            spawn(async move {
                let halves = [bytes_of(offset, 4 * KIB), bytes_of(offset + 4 * KIB, 8 * KIB)];
                store.write_at(at(offset), &halves.into_iter().collect(), Via::Direct).await.unwrap();
                let tail = bytes_of(offset + 8 * KIB, 8 * KIB);
                store.write_at(at(offset + 8 * KIB), &tail.into(), Via::Direct).await.unwrap();
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        while done.load(Ordering::Relaxed) < 1024 {
            yield_now().await;
        }
        writer.sync().await.unwrap();
    });
    assert!(std::fs::read(&path).unwrap() == pattern(0, 16 * MIB));
}

/// A write whose future is dropped keeps its buffer until the kernel is done with it.
fn dropped_writes_into_holes_keep_their_buffers(engine: &Engine) {
    const WRITES: usize = 12;
    let (_dir, path, store) = sparse(2 * WRITES * MIB);
    let (writer, watch) = (store.clone(), engine.clone());
    engine.run_on(0, move || async move {
        let mut writes: Vec<_> = (0..WRITES)
            .map(|number| {
                let buffer = pool().alloc(MIB);
                buffer.copy_from_slice(0, &pattern(2 * number * MIB, MIB));
                let writer = writer.clone();
                Box::pin(async move { writer.write_at(at(2 * number * MIB), &buffer.into(), Via::Direct).await })
            })
            .collect();
        let foreign = vec![0xee; MIB];
        for write in &mut writes {
            let _ = write.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        }
        // A worker polls a task some hundred times before it looks at the ring.
        for _ in 0..5000 {
            if aio_writes(&watch) == 0 {
                yield_now().await;
            }
        }
        drop(writes);
        // If a buffer were given back too early, one of these would spoil a write.
        let others: Vec<_> = (0..WRITES).map(|_| pool().alloc(MIB)).collect();
        others.iter().for_each(|other| other.copy_from_slice(0, &foreign));
    });
    engine.shutdown();
    drop(store);
    let found = std::fs::read(&path).unwrap();
    for offset in (0..found.len()).step_by(4 * KIB) {
        let page = &found[offset..offset + 4 * KIB];
        assert!(page == pattern(offset, 4 * KIB) || page == [0; 4 * KIB], "a foreign buffer at {offset:#x}");
    }
}

/// A device has no holes. When the ring refuses a write there, the device is busy, and AIO would make the worker wait.
fn a_block_device_is_not_written_by_aio(engine: &Engine) {
    let dir = folder();
    let path = dir.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(64 * MIB as u64).unwrap();
    let device = match LoopDevice::over(&path) {
        Ok(device) => device,
        Err(why) => return println!("SKIP block device: {why}"),
    };
    let store = FileStore::open(Path::new(&device.path), OpenMode::ReadWrite, CacheMode::Direct).unwrap();
    assert!(store.info().offset_align_bytes > 1, "no direct I/O on a block device");
    // More at once than a loop device has tags for, so that some would have to wait.
    write_all(engine, &Arc::new(store), 4 * KIB, 1024, (0..WRITES).map(|number| number * 64 * KIB));
    assert_eq!(aio_writes(engine), 0);
    let found = std::fs::read(&device.path).unwrap();
    for offset in (0..WRITES).map(|number| number * 64 * KIB) {
        assert!(found[offset..offset + 4 * KIB] == pattern(offset, 4 * KIB), "at {offset:#x}");
    }
}
