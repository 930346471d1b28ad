//! What all tests of the engine share: each test is a function of a running engine, run on each engine.
#![allow(dead_code, reason = "each test program uses its part")]

pub mod loop_device;

use std::path::PathBuf;

use spile_core::{Segment, Segments, Store, StoreOffset};
use spile_engine::{Config, Engine, EngineKind};
use spile_store::{AnyStore, CacheMode, FileStore, OsFiles};
use tempfile::TempDir;

pub const KIB: usize = 1 << 10;
pub const MIB: usize = 1 << 20;

/// Makes a module for each engine with a test for each function.
#[macro_export]
macro_rules! each_engine {
    ($($name:ident),* $(,)?) => {
        mod uring {
            $(#[test] fn $name() { $crate::common::run("uring", super::$name); })*
        }
        mod aio {
            $(#[test] fn $name() { $crate::common::run("aio", super::$name); })*
        }
        mod threads {
            $(#[test] fn $name() { $crate::common::run("threads", super::$name); })*
        }
    };
}

/// Runs one test on an engine of two workers, and ends the engine.
pub fn run(kind: &str, test: fn(&Engine)) {
    let kind: EngineKind = kind.parse().unwrap();
    let config = Config { kind, workers: 2, pool_bytes: 16 * MIB, ..Config::default() };
    match Engine::start(config) {
        Ok(engine) => {
            assert_eq!(engine.kind(), kind);
            test(&engine);
            engine.shutdown();
        }
        Err(error) if kind != EngineKind::Threads => println!("SKIP {kind}: {error}"),
        Err(error) => panic!("{error}"),
    }
}

/// A folder on the disk that the sources are on, where direct I/O works more often than in /tmp.
pub fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A new file of `len` bytes with a pattern, opened for direct I/O.
pub fn patterned(len: usize) -> (TempDir, PathBuf, FileStore) {
    let dir = folder();
    let path = dir.path().join("disk");
    std::fs::write(&path, pattern(0, len)).unwrap();
    let mode = spile_core::OpenMode::ReadWrite;
    let store = FileStore::open(&path, mode, CacheMode::Direct).unwrap();
    (dir, path, store)
}

/// A new empty file.
pub fn created(len: u64, cache: CacheMode) -> (TempDir, AnyStore) {
    let dir = folder();
    let store = OsFiles::new(cache).create(&dir.path().join("disk"), len).unwrap();
    (dir, store)
}

/// The byte every position has: each 4 KiB differs from its neighbours.
pub fn pattern(start: usize, len: usize) -> Vec<u8> {
    (start..start + len).map(|at| (at / 4096 * 31 + at % 251) as u8).collect()
}

pub fn at(offset: usize) -> StoreOffset {
    StoreOffset(offset as u64)
}

/// Zeroed segments of these lengths.
pub fn segments(lens: &[usize]) -> Segments {
    lens.iter().map(|&len| Segment::zeroed(len)).collect()
}

/// True where it is known that a ring refuses direct writes into holes of the file at `path`, so that they go by AIO.
pub fn holes_need_aio(path: &std::path::Path, store: &FileStore) -> bool {
    const EXT4: i64 = 0xef53;
    const XFS: i64 = 0x5846_5342;
    let kind = rustix::fs::statfs(path).unwrap().f_type as i64;
    store.info().offset_align_bytes > 1 && [EXT4, XFS].contains(&kind)
}
