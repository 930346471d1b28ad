//! Zeroes and holes at any place of block devices with sectors of 512 and of 4096 bytes, with every engine, both ways to the bytes, and while somebody has
//! claimed the device.

#[path = "../../engine/tests/common/loop_device.rs"]
mod loop_device;

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;

use loop_device::LoopDevice;
use spile_core::{OpenMode, Result, Segments, Store, StoreOffset, Via};
use spile_engine::{Config, Engine, EngineKind};
use spile_store::{CacheMode, FileStore};

const UNIT: u64 = 256 << 10;
const LEN: u64 = 4 * UNIT;

/// Ranges with their ends on sectors, within sectors, and within one sector.
const RANGES: [(u64, u64); 7] = [
    (0, 8192),
    (UNIT + 512, UNIT + 512 + 12_288),
    (UNIT + 100_000, UNIT + 100_007),
    (UNIT + 200_001, 2 * UNIT + 3),
    (2 * UNIT + 65_536, 2 * UNIT + 65_536 + 4095),
    (3 * UNIT - 1, 3 * UNIT + 1),
    (LEN - 513, LEN),
];

/// Makes the ranges zero, each over bytes that the page cache has just got, and looks at all of the device.
async fn check(store: &FileStore, punches: bool) -> Result<()> {
    let ones = Segments::zeroed(LEN as usize);
    ones.fill(7);
    store.write_at(StoreOffset(0), &ones, Via::Cached).await?;
    let mut expected = vec![7; LEN as usize];
    for (start, end) in RANGES {
        match punches && store.info().punches {
            true => store.punch_hole(StoreOffset(start), end - start).await?,
            false => store.zero_range(StoreOffset(start), end - start).await?,
        }
        expected[start as usize..end as usize].fill(0);
        let read = Segments::zeroed(LEN as usize);
        store.read_at(StoreOffset(0), &read, Via::Cached).await?;
        assert!(read.to_vec() == expected, "{start}..{end}, punches: {punches}");
    }
    store.sync().await
}

fn on_device(path: &str, cache: CacheMode) {
    for kind in EngineKind::ALL {
        let engine = match Engine::start(Config { kind, workers: 1, pool_bytes: 1 << 21, ..Config::default() }) {
            Ok(engine) => engine,
            Err(error) => {
                println!("SKIP {kind}: {error}");
                continue;
            }
        };
        let store = FileStore::open(path.as_ref(), OpenMode::ReadWrite, cache).unwrap();
        engine.run_on(0, move || async move {
            for punches in [true, false] {
                check(&store, punches).await.unwrap();
            }
        });
        engine.shutdown();
    }
}

#[test]
fn any_range_of_a_device_becomes_zero() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = dir.path().join("file");
    File::create(&file).unwrap().set_len(LEN).unwrap();
    for sector_bytes in [512, 4096] {
        let device = match LoopDevice::with_sectors(&file, sector_bytes) {
            Ok(device) => device,
            Err(why) => return println!("SKIP any_range_of_a_device_becomes_zero: {why}"),
        };
        for cache in [CacheMode::Page, CacheMode::Direct] {
            on_device(&device.path, cache);
            // As a mount, a volume above it, or `convert --onto` has it.
            let _claim = File::options().read(true).write(true).custom_flags(libc::O_EXCL).open(&device.path).unwrap();
            on_device(&device.path, cache);
        }
    }
}
