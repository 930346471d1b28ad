//! `count_stages CASE WRITES`: writes 4 KiB at that many places of a raw image through a node, as `count_writes` of the crate `image` does it, with what
//! is put between front and image. `cargo xtask count` runs it under callgrind. CASE is one of:
//!
//! - `none`: nothing.
//! - `checkpoint`: changed blocks are tracked since a checkpoint, and those that are written have changed before.
//! - `checkpoint-new`: the same, and one write of sixteen is the first one to its block.
//! - `limit`: the disk has a limit that nobody has to wait for.
//!
//! The image's store is silent. The file of changed blocks is one of this host: its bits are memory that the process shares with it.

#[path = "../../image/examples/silent/mod.rs"]
mod silent;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use silent::{Folder, SilentStore, now, work_beside};
use spile_core::{Disk, Extent, Segments};
use spile_engine::{Config, Engine, EngineKind, OsEnv};
use spile_image::create::NewImage;
use spile_image::{Format, Graph};
use spile_life::changes::header::Grain;
use spile_life::changes::{Broken, Changes, Found, Surroundings};
use spile_node::{DiskLimits, Limits, Node};
use spile_store::{CacheMode, OsFiles};

const DISK_BYTES: u64 = 1 << 30;
const WRITE_BYTES: u64 = 4096;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [case, writes] = &words[..] else { panic!("usage: count_stages none|checkpoint|checkpoint-new|limit WRITES") };
    let (case, writes) = (case.clone(), writes.parse::<u64>().expect("a number of writes"));
    assert!(writes * WRITE_BYTES <= DISK_BYTES, "each place is written once");
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk.raw");
    // No valgrind knows all of io_uring.
    let threads = Config { kind: EngineKind::Threads, workers: 1, pool_bytes: 2 << 20, poll: Duration::ZERO };
    let engine = Engine::start(threads).unwrap();
    engine.run_on(0, move || async move { count(&case, &disk, writes).await });
}

async fn count(case: &str, beside: &Path, writes: u64) {
    let folder = Folder::new(1);
    let node = Node::new(empty_disk(&folder)).with_limits(DiskLimits::new(Arc::new(OsEnv)));
    folder.fall_silent();
    let mut changes = None;
    match case {
        "none" => {}
        "checkpoint" | "checkpoint-new" => {
            let around = Surroundings {
                files: OsFiles::new(CacheMode::Page),
                env: Arc::new(OsEnv),
                timer: Arc::new(OsEnv),
                alarm: |path, error| panic!("{}: {error}", path.display()),
                broken: Broken::Nothing,
            };
            let grain = Grain::default();
            let made = Changes::create(around, beside, DISK_BYTES, grain, Found::default()).await.unwrap();
            made.checkpoint(&node, "monday").await.unwrap();
            // The first write to an area waits for storage; it is none of those that are counted. They lie in one area: what comes before them
            // costs the same in each run, but for how often threads are switched.
            let area_bytes = u64::from(grain.area_bytes);
            assert!(writes * WRITE_BYTES <= area_bytes, "the writes lie in one area");
            let step_bytes = if case == "checkpoint" { grain.block_bytes } else { grain.area_bytes };
            for offset in (0..area_bytes).step_by(step_bytes as usize) {
                let extent = Extent::new(offset, WRITE_BYTES).unwrap();
                node.write(extent, &Segments::zeroed(WRITE_BYTES as usize), false).await.unwrap();
            }
            changes = Some(made);
        }
        "limit" => node.set_limits(Limits { iops: Some(1 << 40), ..Limits::default() }).await.unwrap(),
        other => panic!("there is no case {other}"),
    }
    let from = Segments::zeroed(WRITE_BYTES as usize);
    for number in 0..writes {
        now(node.write(Extent::new(number * WRITE_BYTES, WRITE_BYTES).unwrap(), &from, false)).unwrap();
        work_beside();
    }
    assert!(changes.is_none_or(|changes| changes.loss().is_none()), "changes are not tracked any more");
}

fn empty_disk(folder: &Folder) -> Graph<SilentStore> {
    let new = NewImage::new(DISK_BYTES);
    now(Format::Raw.create(&folder.file(Path::new("/vm/disk.raw")), &OsEnv, &new)).unwrap();
    let disk = folder.open("/vm/disk.raw", Format::Raw, false);
    disk.begin();
    work_beside();
    disk
}
