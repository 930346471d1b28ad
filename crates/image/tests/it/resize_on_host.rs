//! Disks that grow while they are in use, on real files and devices under the engine.

#[path = "../../../engine/tests/common/loop_device.rs"]
mod loop_device;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use futures_util::future::join_all;
use loop_device::LoopDevice;
use spile_core::{Disk, ErrorKind, Extent, Result, Segments};
use spile_engine::{Config, Engine, EngineKind, OsEnv};
use spile_image::{Format, Graph, OpenOptions};
use spile_node::Aligned;
use spile_store::{AnyStore, CacheMode, MemStore, NullStore, OsFiles};

const MIB: u64 = 1 << 20;
type HostDisk = Aligned<Graph<AnyStore>>;

/// A folder on the disk that the sources are on, where direct I/O works more often than in /tmp.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn pattern(len: u64) -> Vec<u8> {
    (0..len).map(|at| (at / 4096 * 31 + at % 251) as u8 | 1).collect()
}

/// Runs a test on an engine of two workers, of each kind.
fn on_each_engine(test: impl Fn(&Engine)) {
    for kind in EngineKind::ALL {
        match Engine::start(Config { kind, workers: 2, pool_bytes: 16 << 20, ..Config::default() }) {
            Ok(engine) => {
                test(&engine);
                engine.shutdown();
            }
            Err(error) if kind != EngineKind::Threads => println!("SKIP {kind}: {error}"),
            Err(error) => panic!("{error}"),
        }
    }
}

fn open(engine: &Engine, path: &Path, cache: CacheMode) -> Arc<HostDisk> {
    let path = path.to_owned();
    engine.run_on(0, move || async move {
        let options = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
        let chain = Graph::open(&OsFiles::new(cache), Arc::new(OsEnv), &path, &options).await.unwrap();
        Arc::new(Aligned::new(chain))
    })
}

fn resize(engine: &Engine, disk: &Arc<HostDisk>, size_bytes: u64) -> Result<()> {
    let disk = disk.clone();
    engine.run_on(0, move || async move { disk.resize(size_bytes).await })
}

fn read(engine: &Engine, disk: &Arc<HostDisk>, start: u64, end: u64) -> Vec<u8> {
    let disk = disk.clone();
    engine.run_on(1, move || async move {
        let into = Segments::zeroed((end - start) as usize);
        into.fill(0xa5);
        disk.read(Extent::from_range(start..end), &into).await.unwrap();
        into.to_vec()
    })
}

fn write(engine: &Engine, disk: &Arc<HostDisk>, start: u64, bytes: &[u8]) -> Result<()> {
    let (disk, bytes) = (disk.clone(), bytes.to_vec());
    engine.run_on(1, move || async move {
        let from = Segments::copied(&bytes);
        disk.write(Extent::from_range(start..start + bytes.len() as u64), &from, false).await
    })
}

fn patterned(dir: &tempfile::TempDir, len: u64) -> PathBuf {
    let path = dir.path().join("disk");
    std::fs::write(&path, pattern(len)).unwrap();
    path
}

#[test]
fn a_file_grows_and_keeps_its_data_and_its_size() {
    on_each_engine(|engine| {
        for cache in [CacheMode::Direct, CacheMode::Page] {
            let dir = folder();
            let path = patterned(&dir, MIB);
            let disk = open(engine, &path, cache);
            resize(engine, &disk, 4 * MIB).unwrap();
            assert_eq!((disk.info().size_bytes, std::fs::metadata(&path).unwrap().len()), (4 * MIB, 4 * MIB));
            assert!(read(engine, &disk, 0, MIB) == pattern(MIB));
            assert!(read(engine, &disk, MIB, 4 * MIB).iter().all(|&byte| byte == 0));
            write(engine, &disk, 4 * MIB - 4096, &pattern(4096)).unwrap();
            write(engine, &disk, MIB - 100, &[9; 200]).unwrap();
            assert_eq!(resize(engine, &disk, MIB).unwrap_err().kind(), ErrorKind::InvalidInput);
            drop(disk);
            let disk = open(engine, &path, cache);
            assert_eq!(disk.info().size_bytes, 4 * MIB);
            assert!(read(engine, &disk, 4 * MIB - 4096, 4 * MIB) == pattern(4096));
            assert_eq!(read(engine, &disk, MIB - 101, MIB + 101)[1..201], [9; 200]);
            drop(disk);
        }
    });
}

/// One page for each writer of a round.
const WRITERS: u64 = 8;

/// Writes pages all over the disk as it is at the time, until told to end; what each page holds then.
async fn keep_busy(disk: &HostDisk, is_over: &AtomicBool) -> BTreeMap<u64, u8> {
    let (mut model, mut size_bytes) = (BTreeMap::new(), 0);
    for round in 0.. {
        let now_bytes = disk.info().size_bytes;
        assert!(now_bytes >= size_bytes && now_bytes.is_multiple_of(MIB), "{now_bytes} after {size_bytes}");
        size_bytes = now_bytes;
        // Some pages right before the end, and some anywhere.
        let pages = size_bytes / 4096;
        let page = |n: u64| if n.is_multiple_of(2) { pages - 1 - n } else { (round * 97 + n * 1009) % (pages / 2) };
        let stamp = |n: u64| (round * WRITERS + n) as u8 | 1;
        let writes = (0..WRITERS).map(async |n| {
            let from = Segments::zeroed(4096);
            from.fill(stamp(n));
            disk.write(at(page(n)), &from, false).await.unwrap();
            let into = Segments::zeroed(4096);
            disk.read(at(page(n)), &into).await.unwrap();
        });
        join_all(writes).await;
        for n in 0..WRITERS {
            // Of two writes to one page, either may be the last.
            let again = (0..WRITERS).filter(|other| page(*other) == page(n)).count();
            let _ = if again == 1 { model.insert(page(n), stamp(n)) } else { model.remove(&page(n)) };
        }
        if is_over.load(Relaxed) {
            break;
        }
    }
    model
}

fn at(page: u64) -> Extent {
    Extent::from_range(page * 4096..(page + 1) * 4096)
}

/// Each request sees the old or the new size, and no write is lost.
#[test]
fn requests_go_on_while_it_grows() {
    on_each_engine(|engine| {
        let dir = folder();
        let path = patterned(&dir, MIB);
        let disk = open(engine, &path, CacheMode::Direct);
        let is_over = Arc::new(AtomicBool::new(false));
        let model = std::thread::scope(|scope| {
            let (disk_there, is_over_there) = (disk.clone(), is_over.clone());
            let busy = scope
                .spawn(move || engine.run_on(1, move || async move { keep_busy(&disk_there, &is_over_there).await }));
            let grown = (2..=30).try_for_each(|mib| resize(engine, &disk, mib * MIB));
            is_over.store(true, Relaxed);
            grown.unwrap();
            busy.join().unwrap()
        });
        assert_eq!(disk.info().size_bytes, 30 * MIB);
        drop(disk);
        let content = std::fs::read(&path).unwrap();
        let first = pattern(MIB);
        for (page, bytes) in content.chunks(4096).enumerate() {
            let old = if page < 256 { &first[page * 4096..][..4096] } else { &[0; 4096] };
            match model.get(&(page as u64)) {
                Some(stamp) => assert!(bytes.iter().all(|byte| byte == stamp), "page {page} lost its write"),
                None => assert!(bytes == old || bytes.iter().all(|byte| *byte == bytes[0]), "page {page} is torn"),
            }
        }
    });
}

#[test]
fn memory_and_null_disks_grow() {
    on_each_engine(|engine| {
        for store in [AnyStore::Mem(MemStore::new(MIB)), AnyStore::Null(NullStore::new(MIB))] {
            let disk = Arc::new(Aligned::new(Graph::from_raw_store(store, false)));
            write(engine, &disk, MIB - 512, &[7; 512]).unwrap();
            resize(engine, &disk, 2 * MIB).unwrap();
            assert_eq!(disk.info().size_bytes, 2 * MIB);
            assert_eq!(read(engine, &disk, MIB, 2 * MIB), vec![0; MIB as usize]);
            write(engine, &disk, 2 * MIB - 512, &[8; 512]).unwrap();
            assert!(write(engine, &disk, 2 * MIB - 511, &[8; 512]).is_err());
            for size_bytes in [MIB, 2 * MIB + 1, 3 * MIB - 1] {
                assert_eq!(resize(engine, &disk, size_bytes).unwrap_err().kind(), ErrorKind::InvalidInput);
            }
            assert_eq!(disk.info().size_bytes, 2 * MIB);
        }
    });
}

#[test]
fn a_device_grows_first_and_the_disk_after_it() {
    on_each_engine(|engine| {
        let dir = folder();
        let path = patterned(&dir, MIB);
        let device = match LoopDevice::over(&path) {
            Ok(device) => device,
            Err(why) => return println!("SKIP a block device: {why}"),
        };
        let disk = open(engine, device.path.as_ref(), CacheMode::Direct);
        let error = resize(engine, &disk, 4 * MIB).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.hint_text().is_some_and(|hint| hint.contains("make the device longer")), "{error}");
        // What lies behind a device that grows is not always zeroes.
        let mut file = std::fs::File::options().append(true).open(&path).unwrap();
        file.write_all(&pattern(4 * MIB)[MIB as usize..]).unwrap();
        device.take_up_len();
        assert_eq!(disk.info().size_bytes, MIB);
        assert_eq!(write(engine, &disk, MIB, &[1; 512]).unwrap_err().kind(), ErrorKind::OutOfRange);
        for size_bytes in [3 * MIB, 4 * MIB] {
            resize(engine, &disk, size_bytes).unwrap();
            assert_eq!(disk.info().size_bytes, size_bytes);
            assert!(read(engine, &disk, 0, size_bytes) == pattern(size_bytes));
            let past = Extent::from_range(size_bytes..size_bytes + 512);
            let disk = disk.clone();
            let past = engine.run_on(0, move || async move { disk.read(past, &Segments::zeroed(512)).await });
            assert_eq!(past.unwrap_err().kind(), ErrorKind::OutOfRange);
        }
        write(engine, &disk, 4 * MIB - 4096, &[5; 4096]).unwrap();
        assert_eq!(resize(engine, &disk, 4 * MIB + 512).unwrap_err().kind(), ErrorKind::Unsupported);
        drop(disk);
        assert_eq!(open(engine, device.path.as_ref(), CacheMode::Direct).info().size_bytes, 4 * MIB);
    });
}
