//! A chain is opened without reading the block tables of its parents, and what they say is checked when it is needed.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::support::*;
use spile_core::{Disk, ErrorKind, Extent, Segments};
use spile_image::OpenOptions;
use spile_image::formats::vhd::codec::footer::{DiskType, Footer};

const SIZE: u64 = 2040 << 30;
const BLOCK: u64 = 2 << 20;
const BLOCKS: u64 = SIZE / BLOCK;
const PARENT: &str = "/vm/parent.vhd";
const CHILD: &str = "/vm/child.vhd";
const KIB: u64 = 1 << 10;

/// Where the bitmap of a block of [`full`] lies, in bytes.
fn place(block: u64) -> u64 {
    (8 << 20) + block * (BLOCK + 4096) + 4096 - 512
}

/// A dynamic disk of 2040 GiB of which every block is there, in a file that is mostly a hole.
fn full(world: &World, path: &str) -> Arc<MemFile> {
    let file = world.vhd(path, DiskType::Dynamic, SIZE, BLOCK as u32);
    let table: Vec<u8> = (0..BLOCKS).flat_map(|block| ((place(block) / 512) as u32).to_be_bytes()).collect();
    file.patch(header_of(&file).bat_offset_bytes, &table);
    end_behind(&file, place(BLOCKS));
    file
}

/// Ends the file with its footer at `end`.
fn end_behind(file: &MemFile, end: u64) {
    let footer = Footer::parse(&file.bytes(0, 512)).unwrap();
    file.patch(file.len() - 512, &[0; 512]);
    file.set_len(end + 512);
    file.patch(end, &footer.to_bytes());
}

/// Fills a block's place with a byte, its bitmap with ones.
fn fill(file: &MemFile, block: u64, byte: u8) {
    file.patch(place(block), &[0xff; 512]);
    file.patch(place(block) + 512, &[byte; 4096]);
}

#[test]
fn a_long_full_chain_is_opened_without_its_tables() {
    let world = World::new();
    let files: Vec<_> = (0..4).map(|n| full(&world, &format!("/vm/{n}.vhd"))).collect();
    // Each is a child of the one before, as far as its header and footers say.
    for (n, file) in files.iter().enumerate().skip(1) {
        let parent = world.parent_ref(&format!("/vm/{}.vhd", n - 1), &format!("{}.vhd", n - 1));
        edit_header(file, |header| (header.parent_uuid, header.parent_name) = (parent.uuid, parent.name.clone()));
        edit_footer(file, |footer| footer.disk_type = DiskType::Differencing);
    }
    fill(&files[0], BLOCKS - 1, 7);
    fill(&files[2], 500_000, 8);
    world.child(CHILD, "/vm/3.vhd", SIZE, BLOCK as u32);
    let disk = world.open(CHILD);
    let read_bytes = || files.iter().map(|file| file.read_bytes.load(Relaxed)).sum::<u64>();
    let opened = read_bytes();
    assert_eq!(disk.layers().len(), 5);
    // The batmap is the largest part of that: a bit for each block.
    assert!(opened < 4 * (BLOCKS / 8 + 16 * KIB), "{opened} bytes of the parents were read to open the chain");
    for (block, byte) in [(BLOCKS - 1, 7), (500_000, 8), (3, 0)] {
        let before = read_bytes();
        assert_eq!(read(&disk, block * BLOCK..block * BLOCK + 4096), [byte; 4096]);
        // A page of each table, the bitmaps of a zone, and the data.
        let needed = read_bytes() - before;
        assert!(needed < 4 * (4 * KIB + 64 * KIB) + 4 * KIB, "{needed} bytes were read for one request");
    }
    // Whoever only looks at the chain gets to know all of it.
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let facts = &world.try_open(CHILD, &options).unwrap().layers()[1].facts;
    assert!(facts.lines.iter().any(|(name, _)| *name == "blocks"), "{:?}", facts.lines);
}

#[test]
fn an_entry_that_cannot_be_is_an_error_for_whoever_reads_there() {
    for bad in [0, u32::MAX - 1, 3] {
        let world = World::new();
        let file = full(&world, PARENT);
        fill(&file, 5, 7);
        fill(&file, 9000, 8);
        set_entry(&file, 5000, bad);
        world.child(CHILD, PARENT, SIZE, BLOCK as u32);
        let disk = world.open(CHILD);
        assert_eq!(read(&disk, 5 * BLOCK..5 * BLOCK + 4096), [7; 4096]);
        assert_eq!(read(&disk, 9000 * BLOCK..9000 * BLOCK + 4096), [8; 4096]);
        let extent = Extent::from_range(5000 * BLOCK..5000 * BLOCK + 4096);
        for _ in 0..2 {
            let error = block_on(disk.read(extent, &Segments::zeroed(4096))).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{bad}: {error}");
            assert_eq!(error.path(), Some(std::path::Path::new(PARENT)));
        }
        // What the child has itself is read all the same.
        write(&disk, 5000 * BLOCK, &[3; 4096]);
        assert_eq!(read(&disk, 5000 * BLOCK..5000 * BLOCK + 4096), [3; 4096]);
        // As a leaf, and where it is only looked at, it is refused as a whole.
        drop(disk);
        file.forget_ways();
        world.refused(PARENT, ErrorKind::Corrupt, "");
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        world.refused_with(CHILD, &options, ErrorKind::Corrupt, "");
    }
}

/// An unfinished copy does not end with a footer: all of its table is looked at, and it is refused.
#[test]
fn a_parent_that_is_cut_short_is_refused_at_once() {
    let world = World::new();
    let file = full(&world, PARENT);
    world.child(CHILD, PARENT, SIZE, BLOCK as u32);
    file.set_len(place(BLOCKS / 2));
    world.refused(CHILD, ErrorKind::Corrupt, "cut short");
}

/// Overlapping blocks of a parent show the same bytes twice, and nothing else.
#[test]
fn blocks_of_a_parent_that_overlap_are_only_read() {
    let world = World::new();
    let file = full(&world, PARENT);
    fill(&file, 5, 7);
    set_entry(&file, 9000, (place(5) / 512) as u32);
    world.child(CHILD, PARENT, SIZE, BLOCK as u32);
    let disk = world.open(CHILD);
    for block in [5, 9000] {
        assert_eq!(read(&disk, block * BLOCK..block * BLOCK + 4096), [7; 4096]);
    }
    write(&disk, 5 * BLOCK, &[1; 4096]);
    assert_eq!(read(&disk, 9000 * BLOCK..9000 * BLOCK + 4096), [7; 4096]);
    drop(disk);
    file.forget_ways();
    world.refused(PARENT, ErrorKind::Corrupt, "overlap");
}

/// How often the first read of a block has to be polled below so many children that have a sector of it each. In these files each operation
/// is pending once.
fn polls_of_a_first_read(children: usize) -> usize {
    const SMALL: u32 = 64 << 10;
    let (world, size) = (World::new(), u64::from(SMALL) * 4);
    let path = |number: usize| format!("/vm/{number}.vhd");
    world.vhd_on(&path(0), SLOW_FILE, DiskType::Dynamic, size, SMALL);
    for number in 0..=children {
        if number > 0 {
            world.child_on(&path(number), SLOW_FILE, &path(number - 1), size, SMALL);
        }
        let disk = world.open(&path(number));
        write(&disk, number as u64 * 512, &[number as u8; 512]);
        block_on(disk.close()).unwrap();
    }
    let disk = world.open(&path(children));
    let into = Segments::zeroed(512);
    let mut first = std::pin::pin!(disk.read(Extent::from_range(0..512), &into));
    let polls = (1..).find(|_| poll_once(first.as_mut()).is_ready()).unwrap();
    assert_eq!(read(&disk, 512..1024), [1; 512]);
    polls
}

#[test]
fn the_first_read_of_a_block_waits_no_longer_in_a_long_chain() {
    assert_eq!(polls_of_a_first_read(20), polls_of_a_first_read(3));
}
