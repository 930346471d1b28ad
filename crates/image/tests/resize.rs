//! Disks that grow while they are in use, in memory: the rules, and what requests see meanwhile.

mod support;

use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

use spile_core::{Disk, ErrorKind, Extent, Result, Segments};
use spile_image::OpenOptions;
use spile_image::formats::vhd::codec::footer::DiskType;
use spile_node::Aligned;
use support::*;

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
    assert!(error.hint_text().is_some_and(|hint| hint.contains("only growing")), "{error}");
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

#[test]
fn a_vhd_does_not_grow_while_in_use() {
    let world = World::new();
    world.vhd("/vm/fixed.vhd", DiskType::Fixed, 8 * MIB, 2 << 20);
    world.vhd("/vm/dynamic.vhd", DiskType::Dynamic, 8 * MIB, 2 << 20);
    world.child("/vm/child.vhd", "/vm/dynamic.vhd", 8 * MIB, 2 << 20);
    for path in ["/vm/fixed.vhd", "/vm/dynamic.vhd", "/vm/child.vhd"] {
        let len = world.files.file(path).len();
        let disk = world.open(path);
        assert_eq!(refusal(&disk, 16 * MIB), ErrorKind::Unsupported, "{path}");
        let error = resize(&disk, 16 * MIB).unwrap_err();
        assert!(error.hint_text().is_some_and(|hint| hint.contains("longer")), "{error}");
        assert_eq!(world.files.file(path).len(), len);
    }
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
