//! Images laid out by other programs: a BAT elsewhere, data on odd sectors, short footers, partial bitmaps, spare
//! BAT entries, no batmap. Built here byte by byte from the specification, not by our own `create`.

use std::sync::Arc;

use crate::support::*;
use proptest::prelude::*;
use spile_core::{Disk, Extent};
use spile_image::OpenOptions;
use spile_image::check::Severity;
use spile_image::formats::vhd::check;
use spile_image::formats::vhd::codec::footer::{DiskType, Footer};
use spile_image::formats::vhd::codec::header::Header;
use spile_image::formats::vhd::codec::locator::Locator;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const A: &str = "/vm/a.vhd";

/// How another program lays an image out.
#[derive(Clone, Debug)]
struct Foreign {
    size: u64,
    block_bytes: u32,
    creator: [u8; 4],
    bat_offset: u64,
    /// Room in the BAT beyond what the disk needs.
    spare_entries: u32,
    /// Bytes by which blocks start behind a multiple of 4096; their data start a bitmap later.
    shift: u64,
    footer_len: usize,
    /// Each allocated block with a bitmap byte that is repeated.
    blocks: Vec<(u32, u8)>,
    /// Something unknown between the last block and the footer.
    junk: usize,
}

fn naive() -> Foreign {
    Foreign {
        size: 4 * MIB,
        block_bytes: 512 << 10,
        creator: *b"win ",
        bat_offset: 1536,
        spare_entries: 0,
        shift: 0,
        footer_len: 512,
        blocks: vec![(5, 0xff), (0, 0xff), (2, 0xa5)],
        junk: 0,
    }
}

impl Foreign {
    /// Writes the image; returns the file and what a guest must read from it.
    fn build(&self, world: &World) -> (Arc<MemFile>, Vec<u8>) {
        let file = world.files.add(A, FILE);
        let entries = self.size.div_ceil(u64::from(self.block_bytes)) as u32;
        let header = Header {
            bat_offset_bytes: self.bat_offset,
            max_entries: entries + self.spare_entries,
            block_size_bytes: self.block_bytes,
            parent_uuid: [0; 16],
            parent_timestamp: 0,
            parent_name: String::new(),
            locators: std::array::from_fn(|_| Locator::NONE),
        };
        let mut footer = Footer::new(DiskType::Dynamic, self.size, [4; 16], 1_700_000_000);
        (footer.creator, footer.creator_version) = (self.creator, 0x0001_0000);
        let bat_len = (u64::from(header.max_entries) * 4).next_multiple_of(512);
        file.patch(self.bat_offset, &vec![0xff; bat_len as usize]);
        file.patch(512, &header.to_bytes());
        let mut model = vec![0; self.size as usize];
        let mut end = self.bat_offset + bat_len;
        for &(block, bits) in &self.blocks {
            end = self.add_block(&file, &mut model, block, bits, end);
        }
        file.patch(end, &vec![0x4a; self.junk]);
        file.patch(0, &footer.to_bytes());
        file.patch(end + self.junk as u64, &footer.to_bytes()[..self.footer_len]);
        (file, model)
    }

    fn add_block(&self, file: &MemFile, model: &mut [u8], block: u32, bits: u8, end: u64) -> u64 {
        let start = end.next_multiple_of(4096) + self.shift;
        let sectors = self.block_bytes as usize / 512;
        let bitmap_len = sectors.div_ceil(8).next_multiple_of(512);
        let mut bitmap = vec![bits; sectors.div_ceil(8)];
        bitmap.resize(bitmap_len, 0);
        let data = pattern(u64::from(block) + 100, self.block_bytes as usize);
        file.patch(start, &bitmap);
        file.patch(start + bitmap_len as u64, &data);
        file.patch(self.bat_offset + u64::from(block) * 4, &((start / 512) as u32).to_be_bytes());
        let at = block as usize * self.block_bytes as usize;
        for sector in (0..sectors).filter(|sector| bits & (0x80 >> (sector % 8)) != 0) {
            // A clear bit hides the bytes under it: tapdisk does not zero new blocks on LVM.
            let range = sector * 512..(sector + 1) * 512;
            model[at + range.start..at + range.end].copy_from_slice(&data[range]);
        }
        start + bitmap_len as u64 + u64::from(self.block_bytes)
    }
}

/// Reads, writes, discards, is killed, closed and opened again; always against the model.
fn exercise(world: &World, file: &MemFile, mut model: Vec<u8>) {
    let size = model.len() as u64;
    let same = |model: &[u8], when: &str| {
        let bytes = read(&world.open(A), 0..size);
        if let Some(at) = (0..bytes.len()).find(|&at| bytes[at] != model[at]) {
            panic!("{when}: byte {at:#x} is {:#x}, not {:#x}", bytes[at], model[at]);
        }
    };
    same(&model, "as found");
    let disk = world.open(A);
    for n in 0..24u64 {
        let len = 512 * (1 + n % 9);
        let at = n.wrapping_mul(0x9e37_79b9_7f4a) % (size - len) / 512 * 512;
        let bytes = pattern(n, len as usize);
        write(&disk, at, &bytes);
        model[at as usize..(at + len) as usize].copy_from_slice(&bytes);
    }
    drop(disk);
    same(&model, "killed");
    let disk = world.open(A);
    let half = size / 2 / 4096 * 4096;
    block_on(disk.write_zeroes(
        Extent::from_range(half..size),
        spile_core::WriteZeroes { may_unmap: true, only_if_fast: false },
    ))
    .unwrap();
    model[half as usize..].fill(0);
    write(&disk, size - 4096, &pattern(77, 4096));
    model[size as usize - 4096..].copy_from_slice(&pattern(77, 4096));
    block_on(disk.close()).unwrap();
    same(&model, "closed");
    // A file that did not grow keeps its short footer.
    let trailing = if file.len() % 512 == 511 { 511 } else { 512 };
    let footer = file.bytes(file.len() - trailing, trailing as usize);
    assert_eq!(footer, file.bytes(0, trailing as usize), "both footers");
    let report = block_on(check(&world.files.store(A), &*world.env)).unwrap();
    assert!(report.worst() < Some(Severity::Corruption), "{:?}", report.findings);
}

#[test]
fn a_naive_layout_is_served_through_the_page_cache() {
    let world = World::new();
    let (file, model) = naive().build(&world);
    assert!(!world.open(A).layers()[0].direct, "data on odd sectors cannot be reached directly");
    exercise(&world, &file, model);
}

#[test]
fn data_on_4096_are_reached_directly() {
    let world = World::new();
    let (file, model) = Foreign { shift: 3584, ..naive() }.build(&world);
    assert!(world.open(A).layers()[0].direct);
    exercise(&world, &file, model);
}

#[test]
fn a_bat_elsewhere_is_found() {
    let world = World::new();
    let (file, model) = Foreign { bat_offset: 8192, spare_entries: 500, ..naive() }.build(&world);
    exercise(&world, &file, model);
}

#[test]
fn a_footer_of_511_bytes_is_read() {
    let world = World::new();
    let (file, model) = Foreign { footer_len: 511, ..naive() }.build(&world);
    assert_eq!(file.len() % 512, 511);
    // Even when it is the only one.
    let copy = file.bytes(0, 512);
    file.patch(0, &[0; 512]);
    assert!(read(&world.open(A), 0..4 * MIB) == model);
    file.patch(0, &copy);
    exercise(&world, &file, model);
}

#[test]
fn what_lies_behind_the_blocks_of_a_stranger_is_kept() {
    let world = World::new();
    let (file, model) = Foreign { junk: 5 * 512, ..naive() }.build(&world);
    let at = file.len() - 512 - 5 * 512;
    exercise(&world, &file, model);
    assert_eq!(file.bytes(at, 5 * 512), vec![0x4a; 5 * 512]);
}

#[test]
fn an_image_without_a_trailing_footer_gets_one_when_it_is_closed() {
    // tapdisk's first new block overwrites it, and a crash leaves only the copy.
    let world = World::new();
    let (file, model) = naive().build(&world);
    file.set_len(file.len() - 512);
    exercise(&world, &file, model);
}

#[test]
fn only_the_bitmaps_of_tapdisk_0_1_are_refused() {
    let world = World::new();
    let (file, model) = Foreign { creator: *b"tap\0", ..naive() }.build(&world);
    // Version 1.0 has them the other way round, as all others.
    exercise(&world, &file, model);
    edit_footer(&file, |footer| footer.creator_version = 1);
    world.refused(A, spile_core::ErrorKind::Unsupported, "little-endian");
}

#[test]
fn reading_only_changes_nothing() {
    let world = World::new();
    let (file, model) = Foreign { footer_len: 511, junk: 512, ..naive() }.build(&world);
    let before = file.bytes(0, file.len() as usize);
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let disk = world.try_open(A, &options).unwrap();
    assert!(read(&disk, 0..4 * MIB) == model);
    let extent = Extent::from_range(0..4096);
    let kinds = [
        block_on(disk.write(extent, &spile_core::Segments::zeroed(4096), false)).unwrap_err().kind(),
        block_on(disk.discard(extent)).unwrap_err().kind(),
        block_on(disk.write_zeroes(extent, Default::default())).unwrap_err().kind(),
    ];
    assert_eq!(kinds, [spile_core::ErrorKind::ReadOnly; 3]);
    block_on(disk.flush()).unwrap();
    block_on(disk.close()).unwrap();
    assert!(file.bytes(0, file.len() as usize) == before);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_layout_is_served(
        block_log in 12u32..=20,
        size_sectors in 100u64..6000,
        bat_at in 3u64..40,
        spare_entries in 0u32..300,
        shift in 0u64..8,
        short_footer: bool,
        junk in 0usize..3,
        blocks in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![Just(0xffu8), Just(0), any::<u8>()]), 0..12),
    ) {
        let (size, block_bytes) = (size_sectors * 512, 1u32 << block_log);
        let entries = size.div_ceil(u64::from(block_bytes)) as usize;
        let mut seen = std::collections::BTreeSet::new();
        let blocks = blocks.iter().map(|(index, bits)| (index.index(entries) as u32, *bits)).filter(|(block, _)| seen.insert(*block));
        let blocks: Vec<_> = blocks.collect();
        // The model of a last block that goes past the disk's end is cut.
        let whole = entries as u64 * u64::from(block_bytes);
        let layout = Foreign {
            size: whole, block_bytes, creator: *b"win ", bat_offset: bat_at * 512, spare_entries, shift: shift * 512,
            footer_len: if short_footer { 511 } else { 512 }, blocks, junk: junk * 512,
        };
        let world = World::new();
        let (file, mut model) = layout.build(&world);
        if !short_footer {
            edit_footer(&file, |footer| footer.current_size_bytes = size);
            model.truncate(size as usize);
        }
        prop_assume!(model.len() as u64 > 16 * KIB);
        exercise(&world, &file, model);
    }
}
