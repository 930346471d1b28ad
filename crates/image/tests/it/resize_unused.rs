//! Images that get another size while nobody uses them, in memory.

use std::ops::Range;

use crate::support::*;
use spile_core::{Disk, ErrorKind, Result, Segments};
use spile_image::Format;
use spile_image::check::Severity;
use spile_image::formats::vhd::codec::footer::{DiskType, Footer};
use spile_image::formats::vhd::codec::geometry::Geometry;
use spile_image::formats::vhd::codec::header::Header;

const MIB: u64 = 1 << 20;
const DISK: &str = "/vm/disk.vhd";
const BLOCK: u32 = 64 << 10;

fn resize(world: &World, path: &str, size_bytes: u64) -> Result<()> {
    world.files.file(path).forget_ways();
    let done = block_on(world.open(path).resize_unused(size_bytes));
    world.files.file(path).forget_ways();
    done
}

/// The footer and its copy agree, and nothing is wrong with the image. The place that its metadata had may be unused.
#[track_caller]
fn assert_sound(world: &World, path: &str) -> Footer {
    let report = block_on(Format::Vhd.check(&world.files.store(path), &*world.env)).unwrap();
    let bad: Vec<_> = report.findings.iter().filter(|finding| finding.severity == Severity::Corruption).collect();
    assert!(bad.is_empty(), "{bad:?}");
    let file = world.files.file(path);
    let footer = footer_of(&file);
    if footer.disk_type != DiskType::Fixed {
        assert_eq!(Footer::parse(&file.bytes(0, 512)).unwrap(), footer);
    }
    footer
}

fn is_zero(disk: &impl Disk, range: Range<u64>) -> bool {
    read(disk, range).iter().all(|&byte| byte == 0)
}

/// A disk of `old` bytes with data at both ends grows to each of `sizes`, and takes data in what it gained.
fn grows(world: &World, old: u64, sizes: &[u64]) {
    let disk = world.open(DISK);
    write(&disk, 0, &pattern(1, 4096));
    write(&disk, old - 4096, &pattern(2, 4096));
    block_on(disk.close()).unwrap();
    drop(disk);
    let mut before = old;
    for &size in sizes {
        resize(world, DISK, size).unwrap();
        assert_eq!(assert_sound(world, DISK).current_size_bytes, size);
        let disk = world.open(DISK);
        assert_eq!(disk.info().size_bytes, size);
        assert_eq!(read(&disk, 0..4096), pattern(1, 4096));
        assert_eq!(read(&disk, before - 4096..before), pattern(before / 512 % 2 + 2, 4096), "{before} of {size}");
        assert!(is_zero(&disk, before..size), "{before}..{size}");
        write(&disk, size - 4096, &pattern(size / 512 % 2 + 2, 4096));
        block_on(disk.close()).unwrap();
        before = size;
        assert_sound(world, DISK);
    }
}

#[test]
fn a_vhd_of_each_kind_grows() {
    for kind in [FILE, DEVICE] {
        for disk_type in [DiskType::Fixed, DiskType::Dynamic] {
            let world = World::new();
            world.vhd_on(DISK, kind, disk_type, 4 * MIB, BLOCK);
            grows(&world, 4 * MIB, &[4 * MIB, 4 * MIB + 1024, 5 * MIB, 7 * MIB]);
        }
        let world = World::new();
        world.vhd("/vm/parent.vhd", DiskType::Dynamic, 4 * MIB, BLOCK);
        let parent = world.open("/vm/parent.vhd");
        write(&parent, MIB, &pattern(7, 8192));
        block_on(parent.close()).unwrap();
        world.child_on(DISK, kind, "/vm/parent.vhd", 4 * MIB, BLOCK);
        grows(&world, 4 * MIB, &[6 * MIB, 7 * MIB]);
        assert_eq!(read(&world.open(DISK), MIB..MIB + 8192), pattern(7, 8192));
    }
}

#[test]
fn a_table_with_room_stays_where_it_is() {
    let world = World::new();
    let file = world.vhd(DISK, DiskType::Dynamic, 4 * MIB, BLOCK);
    let len = file.len();
    // As Windows makes it: room for more blocks than the size needs. The padding of the table is room enough.
    edit_header(&file, |header| header.max_entries = 128);
    resize(&world, DISK, 8 * MIB).unwrap();
    assert_eq!((footer_of(&file).data_offset, file.len()), (Some(512), len));
    resize(&world, DISK, 8 * MIB + 512).unwrap();
    let moved = footer_of(&file).data_offset.unwrap();
    let header = Header::parse(&file.bytes(moved, 1024)).unwrap();
    assert!(moved >= len && header.max_entries == 129 && header.bat_offset_bytes == moved + 1024);
    assert_sound(&world, DISK);
    assert!(
        world.open(DISK).layers()[0].facts.lines.iter().any(|(name, _)| *name == "journal"),
        "it has lost its journal"
    );
}

/// Nothing says what the entries behind the last block hold.
#[test]
fn unused_entries_of_the_table_do_not_become_blocks() {
    for junk in [Some(0), None, Some(1 << 20)] {
        let world = World::new();
        let file = world.vhd(DISK, DiskType::Dynamic, 4 * MIB, BLOCK);
        let disk = world.open(DISK);
        write(&disk, 0, &pattern(1, 4096));
        block_on(disk.close()).unwrap();
        drop(disk);
        edit_header(&file, |header| header.max_entries = 100);
        let sector = junk.unwrap_or_else(|| entry(&file, 0));
        (64..128).for_each(|block| set_entry(&file, block, sector));
        assert_sound(&world, DISK);
        grows(&world, 4 * MIB, &[4 * MIB + 1024, 5 * MIB, 100 * u64::from(BLOCK), 7 * MIB]);
    }
}

#[test]
fn a_new_size_that_the_image_does_not_fit_is_taken_back() {
    let world = World::new();
    let file = world.vhd(DISK, DiskType::Dynamic, 4 * MIB, BLOCK);
    // The table ends with the file, so its last entries lie under the footer.
    edit_header(&file, |header| header.max_entries = ((file.len() - header.bat_offset_bytes) / 4) as u32);
    let size = u64::from(header_of(&file).max_entries) * u64::from(BLOCK);
    assert_eq!(resize(&world, DISK, size).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(assert_sound(&world, DISK).current_size_bytes, 4 * MIB);
    assert!(is_zero(&world.open(DISK), 0..4 * MIB));
}

#[test]
fn a_child_does_not_grow_into_what_its_parent_holds() {
    let world = World::new();
    world.vhd("/vm/parent.vhd", DiskType::Dynamic, 6 * MIB, BLOCK);
    let parent = world.open("/vm/parent.vhd");
    write(&parent, 5 * MIB, &pattern(7, 8192));
    block_on(parent.close()).unwrap();
    let file = world.child(DISK, "/vm/parent.vhd", 4 * MIB, BLOCK);
    resize(&world, DISK, 4 * MIB).unwrap();
    let before = file.bytes(0, file.len() as usize);
    for size in [4 * MIB + 512, 8 * MIB] {
        let error = resize(&world, DISK, size).unwrap_err();
        assert_eq!((error.kind(), error.path().is_some()), (ErrorKind::Unsupported, true), "{error}");
        assert!(file.bytes(0, file.len() as usize) == before);
    }
}

#[test]
fn images_of_other_programs_stay_theirs() {
    let size = 4 * MIB;
    for (creator, new_size, geometry) in [
        (*b"qemu", 8 * MIB, Geometry::MAX),
        (*b"vpc ", Geometry::for_size(8 * MIB).size_bytes(), Geometry::for_size(8 * MIB)),
        (*b"win ", 8 * MIB, Geometry::for_size(8 * MIB)),
    ] {
        let world = World::new();
        let file = world.vhd(DISK, DiskType::Dynamic, size, BLOCK);
        edit_footer(&file, |footer| footer.creator = creator);
        let before = footer_of(&file);
        grows(&world, size, &[new_size]);
        let after = footer_of(&file);
        assert_eq!(after.geometry, geometry);
        assert_eq!((after.creator, after.uuid, after.timestamp), (creator, before.uuid, before.timestamp));
    }
}

#[test]
fn a_footer_of_511_bytes_becomes_a_whole_one() {
    for disk_type in [DiskType::Fixed, DiskType::Dynamic] {
        let world = World::new();
        let file = world.vhd(DISK, disk_type, 4 * MIB, BLOCK);
        file.set_len(file.len() - 1);
        resize(&world, DISK, 5 * MIB).unwrap();
        assert_eq!(assert_sound(&world, DISK).current_size_bytes, 5 * MIB);
        assert!(is_zero(&world.open(DISK), 0..5 * MIB));
    }
}

#[test]
fn what_the_last_writer_left_in_the_journal_is_kept() {
    let world = World::new();
    world.vhd("/vm/parent.vhd", DiskType::Dynamic, 4 * MIB, BLOCK);
    world.child(DISK, "/vm/parent.vhd", 4 * MIB, BLOCK);
    let killed = world.open(DISK);
    write(&killed, 512, &pattern(3, 512));
    drop(killed);
    resize(&world, DISK, 64 * MIB).unwrap();
    let disk = world.open(DISK);
    assert_eq!(read(&disk, 512..1024), pattern(3, 512));
    assert!(is_zero(&disk, 0..512) && is_zero(&disk, 1024..64 * MIB));
}

#[test]
fn sizes_that_cannot_be_are_refused_and_nothing_changes() {
    for disk_type in [DiskType::Fixed, DiskType::Dynamic] {
        let world = World::new();
        let file = world.vhd(DISK, disk_type, 4 * MIB, BLOCK);
        let content = || file.bytes(0, file.len() as usize);
        let before = content();
        for (size, kind) in [
            (4 * MIB + 1, ErrorKind::InvalidInput),
            ((2040 << 30) + 512, ErrorKind::InvalidInput),
            (u64::MAX, ErrorKind::InvalidInput),
            (4 * MIB - 511, ErrorKind::InvalidInput),
            (0, ErrorKind::InvalidInput),
        ] {
            let error = resize(&world, DISK, size).unwrap_err();
            assert_eq!((error.kind(), error.path().is_some()), (kind, true), "{size}: {error}");
            assert!(content() == before, "{size}");
        }
    }
    let world = World::new();
    let file = world.vhd_on(DISK, DEVICE, DiskType::Fixed, 4 * MIB, BLOCK);
    assert_eq!(resize(&world, DISK, file.len()).unwrap_err().kind(), ErrorKind::NoSpace);
    let file = world.vhd_on(DISK, DEVICE, DiskType::Dynamic, 4 * MIB, BLOCK);
    // The table of so many blocks is longer than the device.
    let many = file.len() / 4 * u64::from(BLOCK);
    assert_eq!(resize(&world, DISK, many).unwrap_err().kind(), ErrorKind::NoSpace);
    assert_eq!(world.open(DISK).info().size_bytes, 4 * MIB);
}

#[test]
fn a_vhd_of_each_kind_gets_shorter() {
    for (kind, is_foreign) in [(FILE, false), (FILE, true), (DEVICE, false)] {
        for disk_type in [DiskType::Fixed, DiskType::Dynamic] {
            let world = World::new();
            let file = world.vhd_on(DISK, kind, disk_type, 4 * MIB, BLOCK);
            if is_foreign {
                edit_footer(&file, |footer| footer.creator = *b"win ");
            }
            let disk = world.open(DISK);
            write(&disk, 0, &pattern(1, 4 * MIB as usize));
            block_on(disk.close()).unwrap();
            drop(disk);
            let (size, allocated) = (MIB + 512, file.allocated_bytes());
            resize(&world, DISK, size).unwrap();
            assert_eq!(assert_sound(&world, DISK).current_size_bytes, size);
            assert!(kind.is_device || file.allocated_bytes() + 2 * MIB < allocated, "the space is not given back");
            assert_eq!(read(&world.open(DISK), 0..size), pattern(1, 4 * MIB as usize)[..size as usize]);
            resize(&world, DISK, 4 * MIB).unwrap();
            assert_sound(&world, DISK);
            let disk = world.open(DISK);
            assert_eq!(read(&disk, 0..size), pattern(1, 4 * MIB as usize)[..size as usize]);
            assert!(is_zero(&disk, size..4 * MIB));
        }
    }
}

#[test]
fn a_child_gets_shorter_than_its_parent_and_does_not_show_it_again() {
    let world = World::new();
    world.vhd("/vm/parent.vhd", DiskType::Dynamic, 4 * MIB, BLOCK);
    let parent = world.open("/vm/parent.vhd");
    write(&parent, 0, &pattern(7, 4 * MIB as usize));
    block_on(parent.close()).unwrap();
    let file = world.child(DISK, "/vm/parent.vhd", 4 * MIB, BLOCK);
    let disk = world.open(DISK);
    write(&disk, 3 * MIB, &pattern(8, MIB as usize));
    assert_eq!(block_on(disk.first_nonzero(spile_core::Extent::from_range(MIB..4 * MIB))).unwrap(), Some(MIB));
    block_on(disk.close()).unwrap();
    drop(disk);
    resize(&world, DISK, 2 * MIB).unwrap();
    assert_sound(&world, DISK);
    assert!((32..64).all(|block| entry(&file, block) == u32::MAX), "blocks behind the end are left");
    assert_eq!(read(&world.open(DISK), 0..2 * MIB), pattern(7, 4 * MIB as usize)[..2 * MIB as usize]);
    assert_eq!(resize(&world, DISK, 4 * MIB).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn the_first_byte_that_is_not_zero_is_found() {
    let world = World::new();
    world.vhd(DISK, DiskType::Dynamic, 16 * MIB, BLOCK);
    let disk = world.open(DISK);
    let first = |range| block_on(disk.first_nonzero(spile_core::Extent::from_range(range))).unwrap();
    assert_eq!(first(0..16 * MIB), None);
    // Zeroes that were written are no data.
    write(&disk, MIB, &vec![0; 4 * MIB as usize]);
    assert_eq!(first(0..16 * MIB), None);
    write(&disk, 9 * MIB, &[&[0; 700][..], &[1; 324]].concat());
    assert_eq!((first(0..16 * MIB), first(9 * MIB + 1024..16 * MIB)), (Some(9 * MIB + 700), None));
}

#[test]
fn a_raw_image_is_cut_or_grows() {
    let world = World::new();
    let raw = "/vm/disk.raw";
    let file = world.raw(raw, &pattern(1, MIB as usize));
    assert_eq!(resize(&world, raw, MIB / 2 + 1).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(file.len(), MIB);
    resize(&world, raw, MIB / 2).unwrap();
    resize(&world, raw, MIB).unwrap();
    let disk = world.open(raw);
    assert_eq!(read(&disk, 0..MIB / 2), pattern(1, MIB as usize)[..MIB as usize / 2]);
    assert!(is_zero(&disk, MIB / 2..MIB));
    let into = Segments::zeroed(512);
    assert!(block_on(disk.read(spile_core::Extent::from_range(MIB..MIB + 512), &into)).is_err());
}
