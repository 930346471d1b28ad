//! Images made to harm whoever opens them. The rule: refused at open with an error of a stable kind that names what
//! is wrong; no panic; no more than a bounded amount read; no path followed that is not allowed.

use std::path::{Path, PathBuf};

use crate::support::*;
use spile_core::{Disk, ErrorKind, Extent};
use spile_image::formats::vhd::codec::batmap::BatmapHeader;
use spile_image::formats::vhd::codec::footer::{DiskType, Footer};
use spile_image::formats::vhd::codec::locator::{Locator, Platform, encode};
use spile_image::{Format, MAX_LAYERS, OpenOptions};

const MIB: u64 = 1 << 20;
const BLOCK: u32 = 2 << 20;
const A: &str = "/vm/a.vhd";
const P: &str = "/vm/p.vhd";

/// A child of a dynamic parent, both empty.
fn family() -> (World, std::sync::Arc<MemFile>) {
    let world = World::new();
    world.vhd(P, DiskType::Dynamic, 8 * MIB, BLOCK);
    let child = world.child(A, P, 8 * MIB, BLOCK);
    (world, child)
}

fn corrupt(world: &World, names: &str) {
    world.refused(A, ErrorKind::Corrupt, names);
}

// Footers.

#[test]
fn bad_footer_cookies_are_refused() {
    let (world, file) = dynamic_sample(A);
    file.patch(0, b"conectiX");
    file.patch(file.len() - 512, b"conectiX");
    corrupt(&world, "conectiX");
}

#[test]
fn bad_footer_checksums_are_refused() {
    let (world, file) = dynamic_sample(A);
    file.patch(40, &[0x77]);
    file.patch(file.len() - 512 + 40, &[0x77]);
    corrupt(&world, "checksum of the VHD footer");
}

#[test]
fn one_bad_footer_of_two_is_survived() {
    for at_start in [true, false] {
        let (world, file) = dynamic_sample(A);
        file.patch(if at_start { 0 } else { file.len() - 512 }, &[0; 512]);
        assert_eq!(read(&world.open(A), 0..4096), pattern(1, 4096), "at start: {at_start}");
    }
}

#[test]
fn a_missing_trailing_footer_is_back_after_a_close() {
    let (world, file) = dynamic_sample(A);
    let copy = file.bytes(0, 512);
    file.patch(file.len() - 512, &[0; 512]);
    let disk = world.open(A);
    write(&disk, 0, &pattern(3, 512));
    block_on(disk.close()).unwrap();
    assert_eq!(file.bytes(file.len() - 512, 512), copy);
}

#[test]
fn a_missing_copy_is_not_the_last_footer_to_go() {
    let (world, file) = dynamic_sample(A);
    file.patch(0, &[0; 512]);
    let disk = world.open(A);
    write(&disk, 4 * MIB, &pattern(3, 512));
    // The trailing footer has moved by now; at any moment one of the two must be whole.
    let good = |bytes: Vec<u8>| Footer::parse(&bytes).is_ok();
    assert!(good(file.bytes(0, 512)) && good(file.bytes(file.len() - 512, 512)));
}

#[test]
fn files_shorter_than_a_footer_are_refused() {
    for len in [0, 1, 510, 511] {
        let world = World::new();
        world.files.add(A, FILE).set_len(len);
        let error = world.refused(A, ErrorKind::Corrupt, "");
        let text = error.to_string();
        assert!(text.contains("512") || text.contains("footer"), "{text}");
    }
}

#[test]
fn a_file_without_any_footer_is_refused() {
    let world = World::new();
    world.files.add(A, FILE).set_len(MIB);
    let error = world.refused(A, ErrorKind::Corrupt, "footer");
    assert!(error.hint_text().unwrap().contains("neither"), "{error}");
}

#[test]
fn a_fixed_disk_larger_than_its_file_is_refused() {
    let world = World::new();
    let file = world.vhd(A, DiskType::Fixed, MIB, BLOCK);
    edit_footer(&file, |footer| footer.current_size_bytes = 2 * MIB);
    corrupt(&world, "does not fit");
}

#[test]
fn a_fixed_disks_guest_cannot_forge_its_type() {
    let world = World::new();
    let file = world.vhd(A, DiskType::Fixed, MIB, BLOCK);
    let forged = Footer::new(DiskType::Dynamic, MIB, [7; 16], 0).to_bytes();
    write(&world.open(A), 0, &forged);
    let disk = world.open(A);
    assert_eq!(read(&disk, 0..512), forged);
    assert_eq!(disk.layers()[0].facts.subformat, Some("fixed"));
    assert_eq!(file.len(), MIB + 512);
}

#[test]
fn sizes_over_2040_gib_are_refused() {
    for size in [0xff00_0001 * 512, 1 << 50, u64::MAX / 512 * 512] {
        let (world, file) = dynamic_sample(A);
        edit_footer(&file, |footer| footer.current_size_bytes = size);
        world.refused(A, ErrorKind::Unsupported, "2040 GiB");
    }
}

#[test]
fn a_size_of_zero_or_of_half_a_sector_is_refused() {
    for size in [0, 513, 8 * MIB + 1] {
        let (world, file) = dynamic_sample(A);
        edit_footer(&file, |footer| footer.current_size_bytes = size);
        corrupt(&world, "size");
    }
}

#[test]
fn an_interrupted_resize_is_refused() {
    let (world, file) = dynamic_sample(A);
    file.patch(0, b"v_poison");
    file.patch(file.len() - 512, b"v_poison");
    world.refused(A, ErrorKind::Unsupported, "v_poison");
}

// Headers.

#[test]
fn bad_header_cookies_and_checksums_are_refused() {
    let (world, file) = dynamic_sample(A);
    patch_header(&file, 0, b"cxsparsE");
    corrupt(&world, "cxsparsE");
    let (world, file) = dynamic_sample(A);
    file.patch(512 + 100, &[1]);
    corrupt(&world, "checksum of the VHD header");
}

#[test]
fn headers_past_the_end_or_nowhere_are_refused() {
    for offset in [1u64 << 40, 1 << 62, i64::MAX as u64 / 512 * 512] {
        let (world, file) = dynamic_sample(A);
        edit_footer(&file, |footer| footer.data_offset = Some(offset));
        let error = world.try_open(A, &OpenOptions::default()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("header"), "{error}");
    }
}

#[test]
fn bad_block_sizes_are_refused() {
    for size in [0u32, 0x80, 512, 3 << 20, (2 << 20) - 1, 512 << 20, 1 << 31, u32::MAX] {
        let (world, file) = dynamic_sample(A);
        patch_header(&file, 32, &size.to_be_bytes());
        corrupt(&world, "block size");
    }
}

#[test]
fn bad_bat_entry_counts_are_refused() {
    for (entries, names) in
        [(0u32, "BAT has 0"), (u32::MAX, "BAT has"), (3, "BAT has 3"), (2 * 1_044_480, "BAT goes past")]
    {
        let (world, file) = dynamic_sample(A);
        patch_header(&file, 28, &entries.to_be_bytes());
        corrupt(&world, names);
    }
}

#[test]
fn too_many_blocks_are_refused_before_memory_is_taken_for_them() {
    // 4 KiB blocks: a BAT of 2 GiB, in a file that is long enough.
    let (world, file) = dynamic_sample(A);
    let size = 0xff00_0000u64 * 512;
    let entries = (size / 4096) as u32;
    patch_header(&file, 28, &entries.to_be_bytes());
    patch_header(&file, 32, &4096u32.to_be_bytes());
    file.set_len(1 << 42);
    edit_first_footer(&file, |footer| footer.current_size_bytes = size);
    world.refused(A, ErrorKind::Unsupported, "blocks are more than");
}

fn edit_first_footer(file: &MemFile, change: impl Fn(&mut Footer)) {
    let mut footer = Footer::parse(&file.bytes(0, 512)).unwrap();
    change(&mut footer);
    file.patch(0, &footer.to_bytes());
}

#[test]
fn a_bat_past_the_end_or_over_the_header_is_refused() {
    for (offset, names) in [
        (0u64, "BAT"),
        (512, "BAT lies over"),
        (1024, "BAT lies over"),
        (1537, "BAT"),
        (1 << 40, "BAT goes past"),
        (i64::MAX as u64 / 512 * 512, "BAT"),
        (u64::MAX, "BAT"),
    ] {
        let (world, file) = dynamic_sample(A);
        patch_header(&file, 16, &offset.to_be_bytes());
        corrupt(&world, names);
    }
}

#[test]
fn blocks_past_the_end_are_refused() {
    let (_, file) = dynamic_sample(A);
    let last_sector = (file.len() / 512) as u32;
    // The last one is the wrap: times 512 it is 2^41 less a little, which 32 bits would not hold.
    for sector in [last_sector, last_sector - 1, 0x0080_0000, 0x8000_0000, 0xffff_fffe] {
        let (world, file) = dynamic_sample(A);
        set_entry(&file, 2, sector);
        corrupt(&world, "past the end");
    }
}

#[test]
fn blocks_over_metadata_are_refused() {
    let (_, file) = dynamic_sample(A);
    let bat_end = header_of(&file).bat_end_bytes() / 512;
    let map = BatmapHeader::parse(&file.bytes(bat_end * 512, 512)).unwrap().map_bytes();
    // Footer copy, header, BAT, batmap's header, journal, batmap.
    for sector in [0u64, 1, 2, 3, bat_end, bat_end + 8, map.start / 512] {
        let (world, file) = dynamic_sample(A);
        set_entry(&file, 0, sector as u32);
        set_entry(&file, 1, u32::MAX);
        corrupt(&world, "over the image's metadata");
    }
}

/// One byte of the BAT moves a block by a few sectors, off the pages that it had to itself. The block is read and written where the BAT says, and
/// no page of the file is written both directly and through the page cache.
#[test]
fn a_block_that_shares_pages_with_its_neighbours_is_served_through_the_page_cache() {
    let (world, file) = dynamic_sample(A);
    assert!(world.open(A).layers()[0].direct);
    set_entry(&file, 0, entry(&file, 0) - 6);
    let disk = world.open(A);
    assert!(!disk.layers()[0].direct);
    // Its old bitmap is in what the BAT calls its data.
    let moved = [vec![0; 5 * 512], vec![0xff; 512], pattern(1, 1024)].concat();
    assert!(read(&disk, 0..4096) == moved);
    // The disk was written directly before the damage.
    file.forget_ways();
    for at in [0, 2 * MIB - 4096, 2 * MIB, 4 * MIB] {
        write(&disk, at, &pattern(at + 3, 4096));
    }
    block_on(disk.close()).unwrap();
    for at in [0, 2 * MIB - 4096, 2 * MIB, 4 * MIB] {
        assert!(read(&world.open(A), at..at + 4096) == pattern(at + 3, 4096), "{at}");
    }
}

#[test]
fn blocks_over_each_other_are_refused() {
    for distance in [0, 1, 4, 4095, 4096] {
        let (world, file) = dynamic_sample(A);
        set_entry(&file, 1, entry(&file, 0) + distance);
        corrupt(&world, "overlap");
    }
}

#[test]
fn a_truncated_tail_is_refused() {
    let (world, file) = dynamic_sample(A);
    let len = file.len();
    for cut in [513, 1024, 4096, 2 * MIB + 4096] {
        file.set_len(len - cut);
        corrupt(&world, "past the end");
    }
}

#[test]
fn a_sparse_file_of_petabytes_costs_little() {
    let (world, file) = dynamic_sample(A);
    let footer = footer_of(&file);
    file.set_len(8 << 50);
    file.patch((8 << 50) - 512, &footer.to_bytes());
    world.files.reset_reads();
    let disk = world.open(A);
    assert_eq!(read(&disk, 2 * MIB..2 * MIB + 4096), pattern(2, 4096));
    let (total, _) = world.files.reads();
    assert!(total < MIB * 4, "{total} bytes read");
    write(&disk, 4 * MIB, &pattern(5, 4096));
    block_on(disk.close()).unwrap();
    assert_eq!(read(&world.open(A), 4 * MIB..4 * MIB + 4096), pattern(5, 4096));
}

#[test]
fn an_empty_disk_of_the_largest_size_opens_with_little_memory_and_reading() {
    let world = World::new();
    world.vhd(A, DiskType::Dynamic, 0xff00_0000 * 512, BLOCK);
    world.files.reset_reads();
    let disk = world.open(A);
    assert!(read(&disk, (1 << 40)..(1 << 40) + 4096).iter().all(|&byte| byte == 0));
    let (total, largest) = world.files.reads();
    assert!(total < 8 << 20 && largest <= 2 << 20, "{total} {largest}");
}

// Batmaps: never a reason to refuse an image, never believed when they are wrong.

fn with_batmap(change: impl Fn(&mut Vec<u8>)) {
    let (world, file) = dynamic_sample(A);
    let at = header_of(&file).bat_end_bytes();
    let mut bytes = file.bytes(at, 512);
    change(&mut bytes);
    file.patch(at, &bytes);
    let disk = world.open(A);
    assert_eq!(read(&disk, 0..8192), [pattern(1, 4096), vec![0; 4096]].concat());
    write(&disk, 6 * MIB, &pattern(9, 4096));
    block_on(disk.discard(Extent::from_range(0..2 * MIB))).unwrap();
    block_on(disk.close()).unwrap();
    let disk = world.open(A);
    assert_eq!(read(&disk, 6 * MIB..6 * MIB + 4096), pattern(9, 4096));
    assert!(read(&disk, 0..4096).iter().all(|&byte| byte == 0));
}

#[test]
fn a_batmap_with_a_bad_cookie_is_ignored() {
    with_batmap(|bytes| bytes[0] = b'T');
}

#[test]
fn a_batmap_of_a_bad_size_is_ignored() {
    for sectors in [0u32, 8193, u32::MAX] {
        with_batmap(|bytes| bytes[16..20].copy_from_slice(&sectors.to_be_bytes()));
    }
}

#[test]
fn a_batmap_over_blocks_is_refused() {
    let (world, file) = dynamic_sample(A);
    let at = header_of(&file).bat_end_bytes();
    file.patch(at + 16, &8000u32.to_be_bytes());
    corrupt(&world, "over the image's metadata");
}

#[test]
fn a_batmap_at_a_bad_offset_is_ignored() {
    for offset in [0u64, 512, 1536, 513, 1 << 40, i64::MAX as u64, u64::MAX] {
        with_batmap(|bytes| bytes[8..16].copy_from_slice(&offset.to_be_bytes()));
    }
}

#[test]
fn a_batmap_with_a_bad_checksum_is_ignored() {
    let (world, file) = family();
    let at = header_of(&file).bat_end_bytes();
    let parent = world.files.file(P);
    // The map calls every block full, but its checksum does not fit: the parent's data must be seen.
    let disk = world.open(P);
    write(&disk, 0, &pattern(4, 4096));
    block_on(disk.close()).unwrap();
    let disk = world.open(A);
    write(&disk, 4096, &pattern(5, 4096));
    block_on(disk.close()).unwrap();
    let map = BatmapHeader::parse(&file.bytes(at, 512)).unwrap().map_bytes();
    file.patch(map.start, &[0xff; 512]);
    assert_eq!(read(&world.open(A), 0..8192), [pattern(4, 4096), pattern(5, 4096)].concat());
    assert!(parent.len() > 0);
}

// Parents.

/// A child whose only locator is this one, with no parent name.
fn with_locator(platform: Platform, text: &[u8]) -> World {
    let (world, file) = family();
    let offset = header_of(&file).locators[0].offset_bytes;
    file.patch(offset, text);
    edit_header(&file, |header| {
        header.locators = [Locator::NONE; 8];
        header.parent_name = String::new();
        header.locators[3] = Locator { platform, space: 512, len_bytes: text.len() as u32, offset_bytes: offset };
    });
    for path in ["/etc/shadow", "/dev/sda", "/vm/sub/x.vhd", "/vmx/p.vhd"] {
        world.files.add(path, FILE).set_len(8 * MIB);
    }
    world
}

fn only_the_leaf_was_opened(world: &World) {
    assert_eq!(world.files.opened(), [PathBuf::from(A)]);
}

#[test]
fn a_locator_of_length_2_to_the_32_is_refused() {
    let (world, file) = family();
    edit_header(&file, |header| header.locators[0].len_bytes = u32::MAX);
    corrupt(&world, "locator is longer");
    only_the_leaf_was_opened(&world);
}

#[test]
fn a_locator_past_the_end_is_refused() {
    for offset in [1u64 << 40, u64::MAX, u64::MAX - 10] {
        let (world, file) = family();
        edit_header(&file, |header| header.locators[1].offset_bytes = offset);
        corrupt(&world, "locator goes past the end");
    }
}

#[test]
fn a_locator_that_is_not_unicode_is_refused() {
    let world = with_locator(Platform::W2ru, &[0x00, 0xd8, b'x', 0]);
    corrupt(&world, "not valid Unicode");
    let world = with_locator(Platform::MacX, b"file://./\xff\xfe");
    corrupt(&world, "not valid Unicode");
    let world = with_locator(Platform::W2ku, b"odd");
    corrupt(&world, "not valid Unicode");
}

#[test]
fn a_locator_that_leaves_the_folder_is_denied() {
    for path in ["../../etc/shadow", "/etc/shadow", "../vmx/p.vhd", "./../etc/../etc/shadow"] {
        for platform in [Platform::W2ru, Platform::W2ku, Platform::MacX] {
            let world = with_locator(platform, &encode(platform, path));
            let error = world.refused(A, ErrorKind::Denied, "outside the folders");
            assert!(error.hint_text().unwrap().contains("--allow-parents"));
            only_the_leaf_was_opened(&world);
        }
    }
}

#[test]
fn a_locator_to_a_device_is_denied() {
    let world = with_locator(Platform::W2ku, &encode(Platform::W2ku, "/dev/sda"));
    world.refused(A, ErrorKind::Denied, "/dev/sda");
    only_the_leaf_was_opened(&world);
}

#[test]
fn a_locator_that_is_an_url_is_refused() {
    for url in ["http://host/p.vhd", "nbd://host/p.vhd", "json:{}", "ftp:p.vhd"] {
        let world = with_locator(Platform::MacX, url.as_bytes());
        corrupt(&world, "not a file:// URL");
        only_the_leaf_was_opened(&world);
    }
    // As a Windows path it is just an odd name, and there is no such file.
    let world = with_locator(Platform::W2ru, &encode(Platform::W2ru, "nbd://host/p.vhd"));
    world.refused(A, ErrorKind::NotFound, "nbd");
}

#[test]
fn a_parent_name_that_leaves_the_folder_is_not_followed() {
    for name in ["../../etc/shadow", "/etc/shadow", "..\\..\\etc\\shadow", "..", "."] {
        let (world, file) = family();
        world.files.add("/etc/shadow", FILE).set_len(4096);
        edit_header(&file, |header| {
            header.locators = [Locator::NONE; 8];
            header.parent_name = name.to_owned();
        });
        assert!(world.try_open(A, &OpenOptions::default()).is_err(), "{name}");
        assert!(!world.files.opened().contains(&PathBuf::from("/etc/shadow")), "{name}");
    }
}

#[test]
fn allowed_folders_are_followed_and_no_others() {
    let world = World::new();
    world.vhd("/golden/p.vhd", DiskType::Dynamic, 8 * MIB, BLOCK);
    let parent = world.parent_ref("/golden/p.vhd", "../golden/p.vhd");
    world.child_of(A, FILE, parent, 8 * MIB, BLOCK);
    world.refused(A, ErrorKind::Denied, "/golden/p.vhd");
    let allow = |folder: &str| OpenOptions { allow_parents: vec![folder.into()], ..OpenOptions::default() };
    world.refused_with(A, &allow("/vm"), ErrorKind::Denied, "/golden/p.vhd");
    assert_eq!(world.try_open(A, &allow("/golden")).unwrap().layers().len(), 2);
}

#[test]
fn a_missing_parent_is_named() {
    let world = World::new();
    world.vhd("/vm/gone.vhd", DiskType::Dynamic, 8 * MIB, BLOCK);
    let mut parent = world.parent_ref("/vm/gone.vhd", "other.vhd");
    parent.name = "other.vhd".into();
    world.child_of(A, FILE, parent, 8 * MIB, BLOCK);
    world.refused(A, ErrorKind::NotFound, "other.vhd");
}

#[test]
fn a_parent_that_is_the_image_itself_is_refused() {
    let (world, file) = family();
    let own = world.parent_ref(A, "a.vhd");
    let child = world.child_of(A, FILE, own, 8 * MIB, BLOCK);
    edit_footer(&child, |footer| footer.uuid = footer_of(&file).uuid);
    corrupt(&world, "loops back to /vm/a.vhd");
}

#[test]
fn a_cycle_of_parents_is_refused() {
    let world = World::new();
    world.vhd("/vm/z.vhd", DiskType::Dynamic, 8 * MIB, BLOCK);
    let uuid = [5; 16];
    let names = ["a.vhd", "b.vhd", "c.vhd"];
    for (at, name) in names.iter().enumerate() {
        let parent = world.parent_ref("/vm/z.vhd", names[(at + 1) % 3]);
        let parent = spile_image::formats::vhd::VhdParent { uuid, name: names[(at + 1) % 3].into(), ..parent };
        let file = world.child_of(&format!("/vm/{name}"), FILE, parent, 8 * MIB, BLOCK);
        edit_footer(&file, |footer| footer.uuid = uuid);
    }
    corrupt(&world, "loops back to /vm/a.vhd");
    assert_eq!(world.files.opened().len(), 3);
}

#[test]
fn a_chain_of_a_thousand_is_refused_and_one_at_the_limit_is_not() {
    let world = World::new();
    world.vhd("/vm/0.vhd", DiskType::Dynamic, MIB, 1 << 16);
    for n in 1..1000 {
        world.child(&format!("/vm/{n}.vhd"), &format!("/vm/{}.vhd", n - 1), MIB, 1 << 16);
    }
    world.refused("/vm/999.vhd", ErrorKind::Unsupported, "longer than 255");
    assert!(world.files.opened().len() <= MAX_LAYERS + 1);
    let disk = world.open(&format!("/vm/{}.vhd", MAX_LAYERS - 1));
    assert_eq!(disk.layers().len(), MAX_LAYERS);
    assert!(read(&disk, 0..MIB).iter().all(|&byte| byte == 0));
}

#[test]
fn a_parent_with_another_uuid_is_refused() {
    let (world, _) = family();
    edit_footer(&world.files.file(P), |footer| footer.uuid = [9; 16]);
    corrupt(&world, "the child expects");
}

#[test]
fn a_parents_time_stamp_is_not_checked() {
    let (world, _) = family();
    edit_footer(&world.files.file(P), |footer| footer.timestamp = 12345);
    assert_eq!(world.open(A).layers().len(), 2);
}

#[test]
fn smaller_and_larger_parents_are_fine() {
    for parent_size in [2 * MIB, 3 * MIB + 512, 30 * MIB] {
        let world = World::new();
        world.vhd(P, DiskType::Dynamic, parent_size, BLOCK);
        let len = parent_size.min(8 * MIB);
        let data = pattern(parent_size, len as usize);
        let parent = world.open(P);
        write(&parent, 0, &data);
        block_on(parent.close()).unwrap();
        world.child(A, P, 8 * MIB, BLOCK);
        let bytes = read(&world.open(A), 0..8 * MIB);
        assert!(bytes[..len as usize] == data, "{parent_size}");
        assert!(bytes[len as usize..].iter().all(|&byte| byte == 0), "{parent_size}");
    }
}

#[test]
fn a_corrupt_parent_is_refused_by_its_own_name() {
    let (world, _) = family();
    let parent = world.files.file(P);
    patch_header(&parent, 32, &0u32.to_be_bytes());
    let error = world.refused(A, ErrorKind::Corrupt, "block size");
    assert_eq!(error.path(), Some(Path::new(P)));
}

#[test]
fn a_stale_locator_does_not_hide_the_right_parent() {
    // The relative locator leads to a file that is no VHD; the parent's name leads to the parent.
    let (world, file) = family();
    world.files.add("/vm/stale.vhd", FILE).set_len(4096);
    let text = encode(Platform::W2ru, "stale.vhd");
    let offset = header_of(&file).locators[0].offset_bytes;
    file.patch(offset, &text);
    edit_header(&file, |header| {
        header.locators = [Locator::NONE; 8];
        header.locators[0] =
            Locator { platform: Platform::W2ru, space: 512, len_bytes: text.len() as u32, offset_bytes: offset };
    });
    assert_eq!(world.open(A).layers()[1].path, Path::new(P));
}

#[test]
fn parents_are_opened_for_reading_only() {
    let (world, _) = family();
    let disk = world.open(A);
    write(&disk, 0, &pattern(1, 4096));
    block_on(disk.close()).unwrap();
    let parent = world.files.file(P);
    assert_eq!(footer_of(&parent).disk_type, DiskType::Dynamic);
    assert_eq!(entry(&parent, 0), u32::MAX);
}

// Any bytes at all.

mod noise {
    use super::*;
    use proptest::prelude::*;

    /// Where a stray write hurts most: footers, header, BAT, batmap's header, journal's header, locators.
    fn places(file: &MemFile) -> Vec<(u64, u64)> {
        let bat_end = header_of(file).bat_end_bytes();
        let locators = header_of(file).locators[0].offset_bytes.max(1536);
        vec![
            (0, 512),
            (512, 1024),
            (1536, 512),
            (bat_end, 512),
            (bat_end.next_multiple_of(4096), 512),
            (locators, 512),
            (file.len() - 512, 512),
        ]
    }

    /// Makes the checksums of what was damaged good again, so that the damage gets past them.
    fn mend_sums(file: &MemFile) {
        for (at, len, field) in [(0, 512, 64), (512, 1024, 36), (file.len() - 512, 512, 64)] {
            let mut bytes = file.bytes(at, len);
            resum(&mut bytes, field);
            file.patch(at, &bytes);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn damage_is_an_error_or_harmless(
            is_child: bool,
            damage in prop::collection::vec((0usize..7, any::<prop::sample::Index>(), prop_oneof![
                any::<[u8; 1]>().prop_map(Vec::from), any::<[u8; 4]>().prop_map(Vec::from),
                Just(vec![0xff; 8]), Just(vec![0; 8]), Just(vec![0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe, 0]),
            ]), 1..5),
        ) {
            let (world, file) = if is_child { family() } else { dynamic_sample(A) };
            let places = places(&file);
            for (place, index, bytes) in damage {
                let (at, len) = places[place];
                file.patch(at + index.index(len as usize - bytes.len()) as u64, &bytes);
            }
            mend_sums(&file);
            // Written directly so far. Damage may put data and metadata into one page: then all goes through the page cache.
            file.forget_ways();
            world.files.reset_reads();
            if let Ok(disk) = world.try_open(A, &OpenOptions::default()) {
                let size = disk.info().size_bytes.min(8 * MIB) / 4096 * 4096;
                let into = spile_core::Segments::zeroed(size as usize);
                let _ = block_on(disk.read(Extent::from_range(0..size), &into));
                let _ = block_on(disk.extents(Extent::from_range(0..size), 100));
                if size > 0 {
                    let _ = block_on(disk.write(Extent::from_range(0..4096), &spile_core::Segments::zeroed(4096), true));
                    let _ = block_on(disk.discard(Extent::from_range(0..size)));
                }
                let _ = block_on(disk.close());
            }
            let (_, largest) = world.files.reads();
            prop_assert!(largest <= 16 << 20, "{} bytes at once", largest);
            prop_assert!(world.files.opened().iter().all(|path| path.starts_with("/vm")));
        }
    }
}

// Disks that no one can read.

#[test]
fn an_encrypted_disk_is_refused() {
    let (world, file) = dynamic_sample(A);
    let at = header_of(&file).bat_end_bytes();
    let mut header = BatmapHeader::parse(&file.bytes(at, 512)).unwrap();
    header.key_hash[0] = 1;
    file.patch(at, &header.to_bytes());
    world.refused(A, ErrorKind::Unsupported, "encrypted");
}

#[test]
fn a_leaf_on_a_device_makes_no_other_device_a_parent() {
    let world = World::new();
    world.raw("/dev/sda", &pattern(1, 8 << 20));
    world.child("/dev/dm-3", "/dev/sda", 8 * MIB, 2 << 20);
    let options = OpenOptions { format: Some(Format::Vhd), ..OpenOptions::default() };
    world.refused_with("/dev/dm-3", &options, ErrorKind::Denied, "/dev/sda");
    let allowed = OpenOptions { allow_parents: vec!["/dev".into()], ..options };
    assert_eq!(read(&world.try_open("/dev/dm-3", &allowed).unwrap(), 0..512), pattern(1, 512));
}

#[test]
fn a_locator_cannot_write_to_the_terminal() {
    let world = with_locator(Platform::W2ku, &encode(Platform::W2ku, ".\\\u{1b}[2Jgone.vhd"));
    let error = world.refused(A, ErrorKind::NotFound, "gone.vhd");
    assert!(!error.to_string().contains('\u{1b}'));
}
