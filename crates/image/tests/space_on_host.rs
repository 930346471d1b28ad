//! A VHD takes the space of its data and of the metadata that they need, and no more.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use spile_core::{Disk, Extent, Segments};
use spile_engine::{Config, Engine, OsEnv};
use spile_image::formats::vhd;
use spile_image::formats::vhd::codec::footer::DiskType;
use spile_image::{Graph, OpenOptions};
use spile_node::Aligned;
use spile_store::{CacheMode, OsFiles};

const MIB: u64 = 1 << 20;
const SIZE_BYTES: u64 = 8 << 30;
const WRITES: u64 = 500;

fn space_bytes(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

/// Writes `len` bytes at each place into a new VHD, and returns the space that it takes, open and closed.
fn space_after(len: u64, places: impl Fn(u64) -> u64 + Send + 'static) -> (u64, u64) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("disk.vhd");
    let engine = Engine::start(Config { workers: 1, pool_bytes: 16 << 20, ..Config::default() }).unwrap();
    let (file, probe) = (path.clone(), path.clone());
    let open = engine.run_on(0, move || async move {
        let store = OsFiles::new(CacheMode::Page).create(&file, 0).unwrap();
        let params = vhd::CreateParams::new(DiskType::Dynamic, SIZE_BYTES);
        vhd::create(&store, &OsEnv, &params).await.unwrap();
        drop(store);
        let files = OsFiles::new(CacheMode::Direct);
        let disk = Aligned::new(Graph::open(&files, Arc::new(OsEnv), &file, &OpenOptions::default()).await.unwrap());
        let data = Segments::copied(&vec![0x5a; len as usize]);
        for number in 0..WRITES {
            disk.write(Extent::new(places(number), len).unwrap(), &data, false).await.unwrap();
        }
        disk.flush().await.unwrap();
        let open = space_bytes(&probe);
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

#[test]
fn first_writes_take_no_more_space_than_their_data() {
    for len in [4096, 64 * 1024] {
        // Each write into a block of its own, then one after the other.
        assert_lean(space_after(len, |number| number * 7919 % 4096 * 2 * MIB + MIB), WRITES * len, WRITES);
        let blocks = (WRITES * len).div_ceil(2 * MIB);
        assert_lean(space_after(len, move |number| number * len), WRITES * len, blocks);
    }
}
