//! A disk takes the space of its data and of the metadata that they need, and no more, until its file system is full.

#[path = "../../../spile/tests/it/common/mount.rs"]
#[allow(dead_code, reason = "each test program uses its part")]
mod mount;

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use mount::Mount;
use spile_core::{Disk, ErrorKind, Extent, Files, Locator, OpenMode, Result, Segments};
use spile_engine::{Config, Engine, OsEnv};
use spile_image::formats::vhd;
use spile_image::formats::vhd::codec::footer::DiskType;
use spile_image::{Graph, OpenOptions};
use spile_node::Aligned;
use spile_store::{AnyStore, CacheMode, OsFiles};

const MIB: u64 = 1 << 20;
const SIZE_BYTES: u64 = 8 << 30;
const WRITES: u64 = 500;

fn space_bytes(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

/// A new disk of the format that the path's extension names.
async fn create(file: &Path, cache: CacheMode) -> Aligned<Graph<AnyStore>> {
    let is_raw = file.extension().is_some_and(|extension| extension == "raw");
    let store = OsFiles::new(CacheMode::Page).create(file, if is_raw { SIZE_BYTES } else { 0 }).unwrap();
    let files = OsFiles::new(cache);
    if is_raw {
        drop(store);
        let store = files.open(&Locator::Path(file.to_owned()), OpenMode::ReadWrite).await.unwrap();
        return Aligned::new(Graph::from_raw_store(store, false));
    }
    vhd::create(&store, &OsEnv, &vhd::CreateParams::new(DiskType::Dynamic, SIZE_BYTES)).await.unwrap();
    drop(store);
    Aligned::new(Graph::open(&files, Arc::new(OsEnv), file, &OpenOptions::default()).await.unwrap())
}

/// Writes `len` bytes at each place into a new VHD, and returns the space that it takes, open and closed.
fn space_after(cache: CacheMode, len: u64, places: impl Fn(u64) -> u64 + Send + 'static) -> (u64, u64) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("disk.vhd");
    let engine = Engine::start(Config { workers: 1, pool_bytes: 16 << 20, ..Config::default() }).unwrap();
    let file = path.clone();
    let open = engine.run_on(0, move || async move {
        let disk = create(&file, cache).await;
        let data = Segments::copied(&vec![0x5a; len as usize]);
        for number in 0..WRITES {
            disk.write(Extent::new(places(number), len).unwrap(), &data, false).await.unwrap();
        }
        disk.flush().await.unwrap();
        let open = space_bytes(&file);
        disk.close().await.unwrap();
        open
    });
    engine.shutdown();
    (open, space_bytes(&path))
}

/// A block's bitmap is a page of the host's, the table of blocks 16 KiB, and the rest is heads, footers and the file
/// system's own map.
fn assert_lean(spaces: (u64, u64), data: u64, blocks: u64) {
    let most = data + data / 10 + blocks * 4096 + 64 * 1024;
    for space in [spaces.0, spaces.1] {
        assert!(space >= data && space <= most, "{space} bytes of space; {data} of data, at most {most} with metadata");
    }
}

fn first_writes_are_lean(cache: CacheMode) {
    for len in [4096, 64 * 1024] {
        // Each write into a block of its own, then one after the other.
        assert_lean(space_after(cache, len, |number| number * 7919 % 4096 * 2 * MIB + MIB), WRITES * len, WRITES);
        let blocks = (WRITES * len).div_ceil(2 * MIB);
        assert_lean(space_after(cache, len, move |number| number * len), WRITES * len, blocks);
    }
}

#[test]
fn first_writes_take_no_more_space_than_their_data() {
    first_writes_are_lean(CacheMode::Direct);
}

#[test]
fn cached_first_writes_take_no_more_space_than_their_data() {
    first_writes_are_lean(CacheMode::Page);
}

/// Makes first writes of 64 KiB, each followed by a flush, until one fails. Returns how many did not.
async fn fill(disk: &Aligned<Graph<AnyStore>>) -> u64 {
    let write = async |number: u64| -> Result<()> {
        let data = Segments::copied(&vec![number as u8; LEN as usize]);
        disk.write(place(number), &data, false).await?;
        disk.flush().await
    };
    for number in 0.. {
        if let Err(error) = write(number).await {
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            return number;
        }
    }
    unreachable!("there is no end of space")
}

const LEN: u64 = 64 * 1024;

/// Sixteen writes to each block of a VHD, none beside another.
fn place(number: u64) -> Extent {
    Extent::new(number * 2 * LEN, LEN).unwrap()
}

/// On a file system that runs low, data get nearly all the space that is left.
fn uses_all_space(name: &'static str, cache: CacheMode) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(mounted) = Mount::new(dir.path(), 64 * MIB, name) else { return };
    let path = mounted.path.join(name);
    let free_bytes = {
        let found = rustix::fs::statvfs(&mounted.path).unwrap();
        found.f_bfree * found.f_frsize
    };
    let engine = Engine::start(Config { workers: 1, pool_bytes: 16 << 20, ..Config::default() }).unwrap();
    let file = path.clone();
    let written = engine.run_on(0, move || async move {
        let disk = create(&file, cache).await;
        let written = fill(&disk).await;
        for number in 0..written {
            let found = Segments::zeroed(LEN as usize);
            disk.read(place(number), &found).await.unwrap();
            assert!(found.to_vec() == vec![number as u8; LEN as usize], "write {number} is lost");
        }
        // It may say that it could not write what no data need.
        let _ = disk.close().await;
        written
    });
    engine.shutdown();
    let (data, space) = (written * LEN, space_bytes(&path));
    println!("{name}: {data} bytes of data in {free_bytes}, and {space} bytes of space");
    assert!(data >= free_bytes / 100 * 90, "full after {data} of {free_bytes} bytes");
    assert!(space <= data + data / 10 + MIB, "{space} bytes of space for {data} of data");
}

#[test]
fn a_raw_disk_uses_all_space() {
    uses_all_space("direct.raw", CacheMode::Direct);
    uses_all_space("cached.raw", CacheMode::Page);
}

#[test]
fn a_vhd_uses_all_space() {
    uses_all_space("direct.vhd", CacheMode::Direct);
    uses_all_space("cached.vhd", CacheMode::Page);
}
