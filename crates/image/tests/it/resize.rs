//! Disks that grow while they are in use, in memory: the rules, and what requests see meanwhile.

use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

use crate::support::*;
use spile_core::{Disk, ErrorKind, Extent, Result, Segments};
use spile_image::check::Severity;
use spile_image::formats::vhd::codec::footer::DiskType;
use spile_image::{Format, OpenOptions};
use spile_node::Aligned;

const MIB: u64 = 1 << 20;
const RAW: &str = "/vm/disk.img";

/// A raw disk of that kind of store, full of a pattern.
fn raw_on(kind: Kind, len: u64) -> (World, std::sync::Arc<MemFile>) {
    let world = World::new();
    let file = world.files.add(RAW, kind);
    file.patch(0, &pattern(1, len as usize));
    (world, file)
}

fn resize(disk: &impl Disk, size_bytes: u64) -> Result<()> {
    block_on(disk.resize(size_bytes))
}

fn refusal(disk: &impl Disk, size_bytes: u64) -> ErrorKind {
    let size = disk.info().size_bytes;
    let error = resize(disk, size_bytes).unwrap_err();
    assert_eq!(disk.info().size_bytes, size);
    assert!(error.path().is_some(), "no path: {error}");
    error.kind()
}

/// What a read past `end` gives.
fn read_past(disk: &impl Disk, end: u64) -> Result<()> {
    block_on(disk.read(Extent::from_range(end..end + 512), &Segments::zeroed(512)))
}

#[test]
fn a_raw_disk_grows_by_zeroes_and_keeps_its_size() {
    let (world, file) = raw_on(FILE, MIB);
    let disk = Aligned::new(world.open(RAW));
    let syncs = file.syncs.load(Relaxed);
    resize(&disk, 3 * MIB).unwrap();
    assert!(file.syncs.load(Relaxed) > syncs, "the new length is not durable");
    assert_eq!([disk.info().size_bytes, disk.inner().info().size_bytes, file.len()], [3 * MIB; 3]);
    assert_eq!(disk.inner().layers()[0].virtual_bytes, 3 * MIB);
    assert!(read(&disk, 0..MIB) == pattern(1, MIB as usize));
    assert!(read(&disk, MIB..3 * MIB).iter().all(|&byte| byte == 0));
    // Across the old end, and odd bytes up to the new one.
    write(&disk, MIB - 512, &pattern(2, 1024));
    write(&disk, 3 * MIB - 700, &pattern(3, 700));
    block_on(disk.write_zeroes(Extent::from_range(2 * MIB..2 * MIB + 100), Default::default())).unwrap();
    assert_eq!(read(&disk, MIB - 512..MIB + 512), pattern(2, 1024));
    assert_eq!(read(&disk, 3 * MIB - 700..3 * MIB), pattern(3, 700));
    let map = block_on(disk.extents(Extent::from_range(0..3 * MIB), 100)).unwrap();
    assert_eq!(map.last().unwrap().extent.end(), 3 * MIB);
    assert_eq!(read_past(&disk, 3 * MIB).unwrap_err().kind(), ErrorKind::OutOfRange);
    block_on(disk.close()).unwrap();
    drop(disk);
    assert_eq!(world.open(RAW).info().size_bytes, 3 * MIB);
}

#[test]
fn a_disk_does_not_shrink_and_ends_with_a_sector() {
    let (world, file) = raw_on(FILE, MIB);
    let disk = world.open(RAW);
    for size_bytes in [0, 512, MIB - 512, MIB - 1, MIB + 1, 2 * MIB + 511, u64::MAX] {
        assert_eq!(refusal(&disk, size_bytes), ErrorKind::InvalidInput, "{size_bytes}");
        assert_eq!(file.len(), MIB);
    }
    let error = resize(&disk, MIB / 2).unwrap_err();
    assert!(error.hint_text().is_some_and(|hint| hint.contains("spile resize --shrink")), "{error}");
    resize(&disk, MIB).unwrap();
    resize(&disk, MIB + 512).unwrap();
}

/// The store asserts that direct transfers are aligned and that no page is written both ways.
#[test]
fn the_way_to_the_bytes_stays_as_it_was_opened() {
    let (world, file) = raw_on(FILE_4K, MIB);
    let disk = Aligned::new(world.open(RAW));
    assert_eq!(refusal(&disk, MIB + 512), ErrorKind::InvalidInput);
    assert_eq!(file.len(), MIB);
    resize(&disk, MIB + 4096).unwrap();
    write(&disk, MIB + 512, &pattern(2, 512));
    assert!(disk.inner().layers()[0].direct);

    // The last bytes cannot be reached directly: all go through the page cache, whatever the size becomes.
    let (world, file) = raw_on(FILE_4K, MIB + 512);
    let disk = Aligned::new(world.open(RAW));
    write(&disk, MIB, &pattern(2, 512));
    for size_bytes in [MIB + 1024, 2 * MIB, 2 * MIB + 512] {
        resize(&disk, size_bytes).unwrap();
        write(&disk, size_bytes - 4096, &pattern(2, 4096));
        write(&disk, MIB, &pattern(3, 1024));
        assert!(read(&disk, MIB..MIB + 1024) == pattern(3, 1024));
        assert_eq!((disk.info().size_bytes, file.len()), (size_bytes, size_bytes));
        assert!(!disk.inner().layers()[0].direct);
    }
}

#[test]
fn a_file_that_ends_within_a_page_does_not_grow_under_direct_writes() {
    let (world, file) = raw_on(FILE, MIB + 512);
    let disk = world.open(RAW);
    assert!(disk.layers()[0].direct);
    assert_eq!(refusal(&disk, 2 * MIB), ErrorKind::Unsupported);
    assert_eq!(file.len(), MIB + 512);
    resize(&disk, MIB + 512).unwrap();
}

/// Grows a VHD with data at both ends, in use, to each of `sizes`; then kills its process.
fn vhd_grows(world: &World, path: &str, sizes: &[u64]) {
    let file = world.files.file(path);
    let disk = world.open(path);
    let mut before = disk.info().size_bytes;
    write(&disk, before - 4096, &pattern(before, 4096));
    for &size in sizes {
        resize(&disk, size).unwrap();
        assert_eq!(disk.info().size_bytes, size);
        assert_eq!(read(&disk, before - 4096..before), pattern(before, 4096), "{path}: {before} of {size}");
        assert!(read(&disk, before..size).iter().all(|&byte| byte == 0), "{path}: {before}..{size}");
        write(&disk, size - 4096, &pattern(size, 4096));
        write(&disk, before - 1024, &pattern(before, 4096)[3072..]);
        before = size;
    }
    drop(disk);
    file.forget_ways();
    let disk = world.open(path);
    assert_eq!(disk.info().size_bytes, before);
    for size in sizes {
        assert_eq!(read(&disk, size - 4096..*size), pattern(*size, 4096), "{path}: at {size}");
    }
    block_on(disk.close()).unwrap();
    drop(disk);
    file.forget_ways();
    let report = block_on(Format::Vhd.check(&world.files.store(path), &*world.env)).unwrap();
    let bad: Vec<_> = report.findings.iter().filter(|found| found.severity == Severity::Corruption).collect();
    assert!(bad.is_empty(), "{path}: {bad:?}");
}

#[test]
fn a_vhd_grows_while_it_is_in_use() {
    // The last sector of the table has room for 128 entries.
    let sizes = [8 * MIB + 4096, 9 * MIB, 12 * MIB, 20 * MIB, 64 * MIB];
    for kind in [FILE, DEVICE] {
        let world = World::new();
        let block = 64 << 10;
        world.vhd_on("/vm/fixed.vhd", kind, DiskType::Fixed, 8 * MIB, block);
        world.vhd_on("/vm/dynamic.vhd", kind, DiskType::Dynamic, 8 * MIB, block);
        world.vhd("/vm/parent.vhd", DiskType::Dynamic, 8 * MIB, block);
        world.child_on("/vm/child.vhd", kind, "/vm/parent.vhd", 8 * MIB, block);
        for path in ["/vm/fixed.vhd", "/vm/dynamic.vhd", "/vm/child.vhd"] {
            let most = if kind.is_device { 3 } else { 5 };
            vhd_grows(&world, path, &sizes[..most]);
        }
    }
}

#[test]
fn a_table_with_room_for_the_new_blocks_stays() {
    let world = World::new();
    let file = world.vhd("/vm/a.vhd", DiskType::Dynamic, 8 * MIB, 2 << 20);
    edit_header(&file, |header| header.max_entries = 100);
    (4..128).for_each(|block| set_entry(&file, block, 7));
    vhd_grows(&world, "/vm/a.vhd", &[10 * MIB, 200 * MIB]);
    assert_eq!(footer_of(&file).data_offset, Some(512));
    vhd_grows(&world, "/vm/a.vhd", &[202 * MIB]);
    assert_ne!(footer_of(&file).data_offset, Some(512));
}

#[test]
fn a_vhd_does_not_grow_to_any_size() {
    let world = World::new();
    world.vhd("/vm/fixed.vhd", DiskType::Fixed, 8 * MIB, 2 << 20);
    world.vhd("/vm/dynamic.vhd", DiskType::Dynamic, 8 * MIB, 2 << 20);
    for path in ["/vm/fixed.vhd", "/vm/dynamic.vhd"] {
        let disk = world.open(path);
        assert_eq!(refusal(&disk, 9 * MIB + 1), ErrorKind::InvalidInput);
        assert_eq!(refusal(&disk, 3 << 40), ErrorKind::InvalidInput);
    }
    let parent = world.vhd("/vm/parent.vhd", DiskType::Dynamic, 16 * MIB, 2 << 20);
    world.child("/vm/child.vhd", "/vm/parent.vhd", 8 * MIB, 2 << 20);
    let disk = world.open("/vm/child.vhd");
    assert_eq!(refusal(&disk, 16 * MIB), ErrorKind::Unsupported, "it would show what its parent has");
    drop(parent);
}

/// A growth that fails leaves the old size, and an image that is right whichever footer counts.
#[test]
fn a_vhd_that_could_not_grow_goes_on() {
    let world = World::new();
    let file = world.vhd("/vm/a.vhd", DiskType::Dynamic, 8 * MIB, 64 << 10);
    let disk = world.open("/vm/a.vhd");
    write(&disk, 0, &pattern(1, 4096));
    file.fails.store(true, Relaxed);
    assert_eq!(refusal(&disk, 64 * MIB), ErrorKind::Io);
    file.fails.store(false, Relaxed);
    write(&disk, MIB, &pattern(2, 4096));
    resize(&disk, 64 * MIB).unwrap();
    write(&disk, 63 * MIB, &pattern(3, 4096));
    drop(disk);
    let disk = world.open("/vm/a.vhd");
    let seen = [0, MIB, 63 * MIB].map(|at| read(&disk, at..at + 4096));
    assert_eq!(seen, [1, 2, 3].map(|seed| pattern(seed, 4096)));
}

/// One life in which the step `failing` of a growth fails. True when the growth had no such step.
fn a_step_of_growing_fails(failing: u64) -> bool {
    let world = World::new();
    let file = world.vhd("/vm/a.vhd", DiskType::Dynamic, 8 * MIB, 64 << 10);
    let disk = world.open("/vm/a.vhd");
    write(&disk, 0, &pattern(1, 4096));
    file.fails_in.store(failing, Relaxed);
    let has_grown = resize(&disk, 64 * MIB).is_ok();
    let was_last = file.fails_in.swap(0, Relaxed) > 0;
    write(&disk, MIB, &pattern(2, 4096));
    block_on(disk.close()).unwrap();
    drop(disk);
    file.forget_ways();
    let disk = world.open("/vm/a.vhd");
    assert!(disk.info().size_bytes == 64 * MIB || !has_grown, "step {failing}");
    let seen = [0, MIB].map(|at| read(&disk, at..at + 4096));
    assert_eq!(seen, [1, 2].map(|seed| pattern(seed, 4096)), "step {failing}");
    let report = block_on(Format::Vhd.check(&world.files.store("/vm/a.vhd"), &*world.env)).unwrap();
    let bad: Vec<_> = report.findings.iter().filter(|found| found.severity == Severity::Corruption).collect();
    assert!(bad.is_empty(), "step {failing}: {bad:?}");
    was_last
}

/// The disk is whole once it is closed, whichever step of a growth failed.
#[test]
fn a_vhd_that_could_not_grow_closes_whole() {
    let steps = (1..100).find(|&failing| a_step_of_growing_fails(failing)).unwrap() - 1;
    assert!(steps > 8, "{steps} steps");
}

#[test]
fn a_disk_open_for_reading_does_not_grow() {
    let (world, file) = raw_on(FILE, MIB);
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    assert_eq!(refusal(&world.try_open(RAW, &options).unwrap(), 2 * MIB), ErrorKind::ReadOnly);
    assert_eq!(file.len(), MIB);
}

#[test]
fn the_new_size_is_told_only_once_it_is_durable() {
    let (world, file) = raw_on(FILE, MIB);
    let disk = Aligned::new(world.open(RAW));
    file.holds_syncs.store(true, Relaxed);
    let mut growing = pin!(disk.resize(2 * MIB));
    assert!(poll_once(growing.as_mut()).is_pending());
    assert_eq!((disk.info().size_bytes, disk.inner().info().size_bytes), (MIB, MIB));
    assert_eq!(read_past(&disk, MIB).unwrap_err().kind(), ErrorKind::OutOfRange);
    file.holds_syncs.store(false, Relaxed);
    assert!(matches!(poll_once(growing.as_mut()), Poll::Ready(Ok(()))));
    assert_eq!(disk.info().size_bytes, 2 * MIB);
    read_past(&disk, MIB).unwrap();
}

#[test]
fn a_failure_leaves_the_size_as_it_was() {
    let (world, file) = raw_on(FILE, MIB);
    let disk = world.open(RAW);
    file.fails.store(true, Relaxed);
    assert_eq!(refusal(&disk, 2 * MIB), ErrorKind::Io);
    file.fails.store(false, Relaxed);
    resize(&disk, 2 * MIB).unwrap();
    assert_eq!(disk.info().size_bytes, 2 * MIB);
}

#[test]
fn of_two_at_once_the_smaller_cuts_nothing_off() {
    for (first, second) in [(2 * MIB, 3 * MIB), (3 * MIB, 2 * MIB)] {
        let (world, file) = raw_on(FILE, MIB);
        let disk = world.open(RAW);
        file.holds_syncs.store(true, Relaxed);
        let (mut a, mut b) = (pin!(disk.resize(first)), pin!(disk.resize(second)));
        assert!(poll_once(a.as_mut()).is_pending() && poll_once(b.as_mut()).is_pending());
        file.holds_syncs.store(false, Relaxed);
        block_on(a).unwrap();
        assert_eq!(block_on(b).is_ok(), second > first);
        assert_eq!((disk.info().size_bytes, file.len()), (3 * MIB, 3 * MIB));
    }
}
