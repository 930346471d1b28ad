//! Writes into holes of a file take the space of their data, and no more.

#[path = "../../engine/tests/common/mod.rs"]
mod common;

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::*;
use spile_core::{OpenMode, Segment, Store, Via};
use spile_engine::{Engine, spawn, yield_now};
use spile_store::{CacheMode, FileStore};

both_engines!(
    random_writes_take_no_more_space_than_their_data,
    sequential_writes_take_no_more_space_than_their_data,
    writes_into_holes_keep_their_data,
);

const FILE_BYTES: usize = 1 << 30;
const WRITES: usize = 500;

/// A sparse file, direct where that can be.
fn sparse(len: usize) -> (tempfile::TempDir, std::path::PathBuf, Arc<FileStore>) {
    let dir = folder();
    let path = dir.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(len as u64).unwrap();
    let store = FileStore::open(&path, OpenMode::ReadWrite, CacheMode::Direct).unwrap();
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

/// Writes `len` bytes at each of `places`, 32 at a time.
fn write_all(
    engine: &Engine,
    store: &Arc<FileStore>,
    len: usize,
    places: impl Iterator<Item = usize> + Send + 'static,
) {
    let store = store.clone();
    engine.run_on(0, move || async move {
        let in_flight = Arc::new(AtomicUsize::new(0));
        for offset in places {
            while in_flight.load(Ordering::Relaxed) >= 32 {
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

fn random_writes_take_no_more_space_than_their_data(engine: &Engine) {
    for len in [4 * KIB, 64 * KIB] {
        let (_dir, path, store) = sparse(FILE_BYTES);
        if !allocates_by_pages() {
            return;
        }
        write_all(engine, &store, len, scattered(len));
        assert_lean(&path, WRITES * len);
    }
}

fn sequential_writes_take_no_more_space_than_their_data(engine: &Engine) {
    for len in [4 * KIB, 64 * KIB] {
        let (_dir, path, store) = sparse(FILE_BYTES);
        if !allocates_by_pages() {
            return;
        }
        write_all(engine, &store, len, (0..WRITES).map(move |number| MIB + number * len));
        drop(store);
        assert_lean(&path, WRITES * len);
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
