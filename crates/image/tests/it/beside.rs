//! What runs beside requests: no request of a guest waits for a sync of maintenance, as long as writes do not come faster
//! than the file system syncs.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::support::*;
use futures_util::future::join_all;
use spile_core::{Disk, Extent, Segments};
use spile_image::Graph;
use spile_image::check::Severity;
use spile_image::formats::vhd;
use spile_image::formats::vhd::codec::footer::DiskType;

const MIB: u64 = 1 << 20;
const BLOCK: u32 = 2 << 20;
const A: &str = "/vm/a.vhd";
/// The blocks of the first step of space.
const STEP: u64 = 32;

/// A disk of 1 GiB that is put to use, in a world where work runs beside requests.
fn in_use(world: &World) -> (Arc<MemFile>, Graph<MemStore>) {
    world.env.runs_beside.store(true, Relaxed);
    let file = world.files.file(A);
    let disk = world.open(A);
    disk.begin();
    (file, disk)
}

/// True when a write of 4 KiB ends without a wait for anything.
fn writes_at_once(disk: &Graph<MemStore>, at: u64) -> bool {
    let data = Segments::copied(&pattern(at, 4096));
    let done = poll_once(pin!(disk.write(Extent::new(at, 4096).unwrap(), &data, false)));
    done.map(|done| done.unwrap()).is_ready()
}

/// A disk whose prepared blocks have all had their first write, while no sync was answered.
fn first_writes_without_a_sync(world: &World) -> (Arc<MemFile>, Graph<MemStore>) {
    let (file, disk) = in_use(world);
    assert_eq!(run_beside(), 0);
    let prepared = file.syncs.load(Relaxed);
    file.holds_syncs.store(true, Relaxed);
    for block in 0..STEP {
        assert!(writes_at_once(&disk, block * u64::from(BLOCK)), "block {block} waits");
    }
    assert_eq!(file.syncs.load(Relaxed), prepared);
    (file, disk)
}

/// What [`writes_at_once`] has written at the start of these blocks is there.
fn assert_written(disk: &Graph<MemStore>, blocks: impl Iterator<Item = u64>) {
    for at in blocks.map(|block| block * u64::from(BLOCK)) {
        assert_eq!(read(disk, at..at + 4096), pattern(at, 4096));
    }
}

#[test]
fn no_first_write_waits_for_a_sync() {
    let world = World::new();
    world.vhd(A, DiskType::Dynamic, 1 << 30, BLOCK);
    let (file, disk) = first_writes_without_a_sync(&world);
    // The next step has begun and waits for its sync, and all of the last one is taken: only now a write waits.
    assert_eq!(run_beside(), 1);
    assert!(!writes_at_once(&disk, STEP * u64::from(BLOCK)));
    file.holds_syncs.store(false, Relaxed);
    assert_eq!(run_beside(), 0);
    assert!(writes_at_once(&disk, (STEP + 1) * u64::from(BLOCK)));
    assert_written(&disk, (0..STEP).chain([STEP + 1]));
}

#[test]
fn no_first_write_into_a_child_waits_for_a_sync() {
    let world = World::new();
    world.raw("/vm/base.raw", &pattern(1, 64 << 20));
    world.child(A, "/vm/base.raw", 64 * MIB, BLOCK);
    let (file, disk) = first_writes_without_a_sync(&world);
    file.holds_syncs.store(false, Relaxed);
    while run_beside() > 0 {}
    assert_written(&disk, 0..STEP);
}

#[test]
fn records_of_writes_at_the_same_time_are_written_together_and_survive_the_process() {
    let world = World::new();
    world.raw("/vm/base.raw", &pattern(1, 4 << 20));
    world.child_on(A, SLOW_FILE, "/vm/base.raw", 4 * MIB, BLOCK);
    let file = world.files.file(A);
    let disk = world.open(A);
    write(&disk, MIB, &pattern(7, 512));
    let before = file.writes.load(Relaxed);
    let sectors = 0..32u64;
    let data: Vec<_> = sectors.clone().map(|sector| Segments::copied(&pattern(sector, 512))).collect();
    let places = sectors.clone().map(|sector| Extent::new(sector * 4096, 512).unwrap());
    let writes = places.zip(&data).map(|(at, data)| disk.write(at, data, false));
    assert!(block_on(join_all(writes)).into_iter().all(|done| done.is_ok()));
    // One write for each request's data, and few for the 32 records.
    let records = file.writes.load(Relaxed) - before - sectors.end;
    assert!((1..=4).contains(&records), "{records} writes for 32 records");
    // The process is killed: nothing is flushed or closed.
    std::mem::forget(disk);
    let disk = world.open(A);
    for sector in sectors {
        let at = sector * 4096;
        assert_eq!(read(&disk, at..at + 512), pattern(sector, 512), "sector at {at}");
        assert_eq!(read(&disk, at + 512..at + 1024), pattern(1, 4 << 20)[at as usize + 512..at as usize + 1024]);
    }
}

#[test]
fn a_file_grows_in_few_steps() {
    let world = World::new();
    let blocks = 8192;
    world.vhd(A, DiskType::Dynamic, blocks * 4096, 4096);
    let (file, disk) = in_use(&world);
    run_beside();
    let begun = file.syncs.load(Relaxed);
    for block in 0..blocks {
        assert!(writes_at_once(&disk, block * 4096), "block {block} waits");
        run_beside();
    }
    let steps = file.syncs.load(Relaxed) - begun;
    assert!(steps <= 4, "{steps} syncs for {blocks} blocks");
    block_on(disk.close()).unwrap();
}

#[test]
fn no_write_waits_while_the_journal_is_retired() {
    let world = World::new();
    world.raw("/vm/base.raw", &pattern(1, 64 << 20));
    world.child(A, "/vm/base.raw", 64 * MIB, BLOCK);
    let (file, disk) = in_use(&world);
    run_beside();
    // Every block is there, so that only records are written from here on.
    for block in 0..32 {
        write(&disk, block * u64::from(BLOCK), &pattern(block, 512));
        run_beside();
    }
    block_on(disk.flush()).unwrap();
    run_beside();
    file.holds_syncs.store(true, Relaxed);
    let data = Segments::copied(&pattern(7, 512));
    // More than a half of the journal holds.
    for sector in 0..20_000u64 {
        let at = sector * 1024 % (64 * MIB) + 512 * (sector * 1024 / (64 * MIB));
        let done = poll_once(pin!(disk.write(Extent::new(at, 512).unwrap(), &data, false)));
        assert!(done.is_ready(), "write {sector} waits");
        run_beside();
    }
    file.holds_syncs.store(false, Relaxed);
    while run_beside() > 0 {}
    block_on(disk.close()).unwrap();
}

#[test]
fn places_in_gaps_are_prepared_beside_requests_and_a_few_at_a_time() {
    let world = World::new();
    let blocks = 1024;
    world.vhd(A, DiskType::Dynamic, blocks * 4096, 4096);
    let disk = world.open(A);
    for block in 0..blocks {
        write(&disk, block * 4096, &pattern(block, 4096));
    }
    // All but the last block leave a gap.
    block_on(disk.discard(Extent::from_range(0..(blocks - 1) * 4096))).unwrap();
    block_on(disk.close()).unwrap();
    let (file, disk) = in_use(&world);
    assert_eq!(run_beside(), 0);
    let used = 512;
    for block in 0..used {
        assert!(writes_at_once(&disk, block * 4096), "block {block} waits");
        run_beside();
    }
    // While nothing is prepared beside them, no more writes find a place than one or two steps have.
    file.holds_syncs.store(true, Relaxed);
    let at_once = (used..blocks - 1).take_while(|block| writes_at_once(&disk, block * 4096)).count();
    assert!(at_once <= 256, "{at_once} places were ready");
    file.holds_syncs.store(false, Relaxed);
    while run_beside() > 0 {}
    block_on(disk.close()).unwrap();
}

#[test]
fn a_close_waits_until_nothing_beside_requests_has_the_file() {
    let world = World::new();
    world.vhd(A, DiskType::Dynamic, 1 << 30, BLOCK);
    let (_file, disk) = in_use(&world);
    let mut closing = pin!(disk.close());
    assert!(poll_once(closing.as_mut()).is_pending());
    assert_eq!(run_beside(), 0);
    assert!(poll_once(closing.as_mut()).is_ready());
}

#[test]
fn a_close_waits_for_what_runs_beside_requests() {
    let world = World::new();
    world.vhd(A, DiskType::Dynamic, 1 << 30, BLOCK);
    let (file, disk) = in_use(&world);
    let before = file.len();
    file.holds_syncs.store(true, Relaxed);
    assert_eq!(run_beside(), 1);
    let mut closing = pin!(disk.close());
    assert!(poll_once(closing.as_mut()).is_pending());
    file.holds_syncs.store(false, Relaxed);
    while poll_once(closing.as_mut()).is_pending() {
        run_beside();
    }
    assert_eq!(run_beside(), 0);
    // Nothing was written: the file is no longer than before, and nothing begins any more.
    let closed = file.len();
    assert!(closed <= before);
    disk.begin();
    assert_eq!((run_beside(), file.len()), (0, closed));
    let report = block_on(vhd::check(&world.files.store(A), &*world.env)).unwrap();
    assert!(report.worst() < Some(Severity::Leak), "{:?}", report.findings);
}
