//! Images that a correct reader of qcow2 meets, by number. docs/qcow2.md lists the cases.

use std::sync::atomic::Ordering;

use crate::qcow2_image::{COMPRESSED, COPIED, Image, deflate};
use crate::support::{FILE, FILE_4K, MemStore, World, block_on, pattern, read};
use spile_core::{Disk, ErrorKind, Extent, ExtentKind, Segments};
use spile_image::{Format, Graph, LayerInfo, OpenOptions};

const PATH: &str = "/d/a.qcow2";
const CLUSTER: u64 = 65536;

fn read_only() -> OpenOptions {
    OpenOptions { read_only: true, ..OpenOptions::default() }
}

fn world_of(bytes: &[u8]) -> World {
    let world = World::new();
    world.raw(PATH, bytes);
    world
}

fn open(image: Image) -> Graph<MemStore> {
    world_of(&image.finish()).try_open(PATH, &read_only()).unwrap()
}

/// The usual image, changed, must be refused with such an error.
#[track_caller]
fn refused(kind: ErrorKind, names: &str, change: impl FnOnce(&mut Image)) {
    let mut image = Image::usual();
    change(&mut image);
    world_of(&image.finish()).refused_with(PATH, &read_only(), kind, names);
}

/// The usual image, changed, must open.
fn opened(change: impl FnOnce(&mut Image)) -> Graph<MemStore> {
    let mut image = Image::usual();
    change(&mut image);
    open(image)
}

fn read_error(disk: &impl Disk, at: u64) -> (ErrorKind, String) {
    let error = block_on(disk.read(Extent::new(at, 512).unwrap(), &Segments::zeroed(512))).unwrap_err();
    (error.kind(), error.to_string())
}

/// Guest cluster 1 gives an error that names `names`, and cluster 2, which holds sevens, lives on.
#[track_caller]
fn only_cluster_1_fails(names: &str, change: impl FnOnce(&mut Image)) {
    let disk = opened(|image| {
        image.data(2, 7);
        change(image);
    });
    let (kind, text) = read_error(&disk, CLUSTER + 512);
    assert_eq!(kind, ErrorKind::Corrupt, "{text}");
    assert!(text.contains(names) && text.contains(PATH), "{text}");
    assert_eq!(read(&disk, 2 * CLUSTER..2 * CLUSTER + 4096), [7; 4096]);
    assert_eq!(read(&disk, 3 * CLUSTER..3 * CLUSTER + 4096), [0; 4096]);
    let (_, again) = read_error(&disk, CLUSTER + 512);
    assert_eq!(again, text);
}

fn info(disk: &Graph<MemStore>) -> LayerInfo {
    disk.layers().swap_remove(0)
}

fn fact(disk: &Graph<MemStore>, name: &str) -> String {
    let facts = info(disk).facts;
    let found = facts.values.iter().find(|(other, _)| *other == name);
    format!("{:?}", found.expect("the fact exists").1)
}

#[test]
fn case_01_versions_that_are_not_2_or_3() {
    for version in [0, 1, 4, 0xffff_ffff] {
        refused(ErrorKind::Unsupported, &format!("version {version}"), |image| image.put32(4, version));
    }
}

#[test]
fn case_02_header_lengths() {
    for len in [0, 72, 96, 108, 113, 65544, 0xffff_fff8] {
        refused(ErrorKind::Corrupt, "header length", |image| {
            image.put32(100, len);
            image.extensions.clear();
        });
    }
}

#[test]
fn case_02_a_header_as_long_as_a_large_cluster_allows() {
    let mut image = Image::new(21, 16 << 20);
    image.data(1, 5);
    image.put32(100, 1 << 20);
    assert_eq!(read(&open(image), 2 << 20..(2 << 20) + 512), [5; 512]);
}

#[test]
fn case_03_cluster_sizes() {
    for bits in [0, 8, 22, 40, 64, 0xffff_ffff] {
        refused(ErrorKind::Corrupt, "cluster_bits", |image| image.put32(20, bits));
    }
}

#[test]
fn case_04_sizes_near_the_end_of_64_bits() {
    for size in [u64::MAX, 1 << 63, 1 << 62] {
        refused(ErrorKind::Corrupt, "L1 table", |image| image.put64(24, size));
    }
    refused(ErrorKind::Unsupported, "L1 table", |image| image.put32(36, 0x2000_0001));
}

#[test]
fn case_05_l1_tables_too_small_unaligned_or_past_the_end() {
    refused(ErrorKind::Corrupt, "L1 table", |image| image.put32(36, 0));
    refused(ErrorKind::Corrupt, "L1 table", |image| image.put64(40, 3 * CLUSTER + 512));
    refused(ErrorKind::Corrupt, "past the end", |image| image.put64(40, 5 * CLUSTER));
    refused(ErrorKind::Corrupt, "past the end", |image| image.put32(36, 0x1_0000));
    refused(ErrorKind::Corrupt, "L1 table", |image| image.put64(40, 1 << 63));
}

#[test]
fn case_06_memory_follows_the_file() {
    // An L1 table of 32 MiB in a file of 320 KiB is refused before it is read; refused_with bounds what is read.
    let mut image = Image::usual();
    image.put32(36, 4 << 20);
    image.put64(24, 1 << 50);
    let world = world_of(&image.finish());
    world.refused_with(PATH, &read_only(), ErrorKind::Corrupt, "L1 table");
    // And a look at its first and last bytes, for the message.
    assert!(world.files.reads().0 <= CLUSTER + 1024);
}

#[test]
fn case_07_refcount_tables_do_not_matter_for_reading() {
    for change in [|i: &mut Image| i.put32(56, 0), |i: &mut Image| i.put64(48, 0), |i: &mut Image| i.put64(48, 77)] {
        let disk = opened(|image| {
            image.data(0, 3);
            change(image);
        });
        assert_eq!(read(&disk, 0..4096), [3; 4096]);
    }
}

#[test]
fn case_08_a_refcount_table_larger_than_needed() {
    let disk = opened(|image| {
        let place = image.append(&[0; 3 * CLUSTER as usize]);
        image.put64(48, place);
        image.put32(56, 3);
        image.data(1, 9);
    });
    assert_eq!(read(&disk, CLUSTER..CLUSTER + 512), [9; 512]);
}

#[test]
fn case_09_refcount_orders() {
    for order in [7, 64, 0xffff_ffff] {
        refused(ErrorKind::Corrupt, "refcount_order", |image| image.put32(96, order));
    }
}

#[test]
fn case_10_all_refcount_widths_are_read() {
    for order in 0..7 {
        let disk = opened(|image| {
            image.put32(96, order);
            image.data(0, 1);
        });
        assert_eq!(read(&disk, 0..512), [1; 512]);
        assert_eq!(fact(&disk, "refcount_bits"), format!("Number({})", 1 << order));
    }
}

#[test]
fn case_11_unknown_incompatible_features_are_named() {
    let mut name = vec![0, 9];
    name.extend(b"time travel");
    name.resize(48, 0);
    refused(ErrorKind::Unsupported, "time travel (bit 9), bit 60", |image| {
        image.extension(0x6803_f857, &name);
        image.incompatible(1 << 9 | 1 << 60);
        // Whatever else is wrong, the feature may be why.
        image.put32(36, 0);
    });
}

#[test]
fn case_12_and_13_unknown_compatible_and_autoclear_features_do_not_hinder_reading() {
    let mut image = Image::usual();
    image.put64(80, u64::MAX);
    image.put64(88, u64::MAX);
    image.data(0, 5);
    let bytes = image.finish();
    let world = world_of(&bytes);
    let disk = world.try_open(PATH, &read_only()).unwrap();
    assert_eq!((read(&disk, 0..512), fact(&disk, "lazy_refcounts")), (vec![5; 512], "Bool(true)".into()));
    assert_eq!(world.files.file(PATH).bytes(0, bytes.len()), bytes);
}

#[test]
fn case_14_and_15_corrupt_and_dirty_images_are_read() {
    let disk = opened(|image| {
        image.incompatible(3);
        image.data(0, 5);
        image.counts.push((5, 0));
    });
    assert_eq!(read(&disk, 0..512), [5; 512]);
    assert_eq!((fact(&disk, "dirty"), fact(&disk, "corrupt")), ("Bool(true)".into(), "Bool(true)".into()));
}

#[test]
fn case_17_compression_bit_and_field_contradict() {
    refused(ErrorKind::Corrupt, "compression", |image| image.incompatible(8));
    refused(ErrorKind::Corrupt, "compression", |image| image.put(104, &[1]));
    refused(ErrorKind::Unsupported, "compression type 2", |image| {
        image.incompatible(8);
        image.put(104, &[2]);
    });
}

#[test]
fn case_19_counts_of_sectors_that_are_wrong() {
    let content = pattern(5, CLUSTER as usize / 2).repeat(2);
    // Too many, and past the end of the file: the stream needs no more than it has.
    let disk = opened(|image| {
        let at = image.compressed(1, &content, 100);
        image.set_l2(1, image.compressed_entry(at, 100 << 10));
    });
    assert_eq!(read(&disk, CLUSTER..2 * CLUSTER), content);
    only_cluster_1_fails("end before", |image| {
        let at = image.compressed(1, &content, 0);
        image.set_l2(1, image.compressed_entry(at, 512));
    });
    only_cluster_1_fails("past the end", |image| image.set_l2(1, image.compressed_entry(99 * CLUSTER, 512)));
}

/// Deflate without compression, in blocks of 32 KiB: ten bytes more than a cluster.
fn stored(content: &[u8]) -> Vec<u8> {
    let blocks = content.chunks(32768).zip([0, 1]).map(|(part, last)| {
        let len = part.len() as u16;
        [&[last][..], &len.to_le_bytes(), &(!len).to_le_bytes(), part].concat()
    });
    blocks.collect::<Vec<_>>().concat()
}

#[test]
fn case_20_a_stream_over_three_clusters() {
    let content = pattern(3, CLUSTER as usize);
    let with_skip = |image: &mut Image, skip: u64| {
        let at = image.append(&[&vec![0; skip as usize][..], &stored(&content)].concat()) + skip;
        // The entry claims as many sectors as it can.
        image.set_l2(1, COMPRESSED | 255 << 54 | at);
    };
    let disk = opened(|image| with_skip(image, CLUSTER - 10));
    assert_eq!(read(&disk, CLUSTER..2 * CLUSTER), content);
    only_cluster_1_fails("end before", |image| with_skip(image, CLUSTER - 9));
}

#[test]
fn case_21_streams_stop_at_one_cluster() {
    let disk = opened(|image| {
        image.compressed(1, &[8; 10 * CLUSTER as usize], 0);
    });
    assert_eq!(read(&disk, CLUSTER..2 * CLUSTER), [8; CLUSTER as usize]);
    // A zstd frame that asks for a window of 128 MiB is read; one whose window is larger than any is damaged.
    for (window, names) in [(0x88, None), (0xff, Some("damaged"))] {
        let zstd = |image: &mut Image| {
            image.incompatible(8);
            image.put(104, &[1]);
            let block = [1 | 1 << 1, 0, 8, 6];
            let frame = [&[0x28, 0xb5, 0x2f, 0xfd, 0, window][..], &block].concat();
            let at = image.append(&frame);
            image.set_l2(1, image.compressed_entry(at, frame.len() as u64));
        };
        match names {
            None => assert_eq!(read(&opened(zstd), CLUSTER..2 * CLUSTER), [6; CLUSTER as usize]),
            Some(names) => only_cluster_1_fails(names, zstd),
        }
    }
}

#[test]
fn case_22_compressed_clusters_at_odd_addresses() {
    let content = pattern(9, CLUSTER as usize);
    for skip in [1, 3, 511, 777] {
        let disk = opened(|image| {
            image.compressed(1, &content, skip);
        });
        assert_eq!(read(&disk, CLUSTER..2 * CLUSTER), content, "{skip}");
        assert_eq!(read(&disk, CLUSTER + 513..CLUSTER + 4000), content[513..4000]);
    }
}

#[test]
fn case_23_two_streams_in_one_cluster() {
    let (one, two) = (vec![1; CLUSTER as usize], vec![2; CLUSTER as usize]);
    let disk = opened(|image| {
        let (first, second) = (deflate(&one), deflate(&two));
        let at = image.append(&[&first[..], &second].concat());
        image.set_l2(1, image.compressed_entry(at, first.len() as u64));
        image.set_l2(2, image.compressed_entry(at + first.len() as u64, second.len() as u64));
    });
    assert_eq!(read(&disk, CLUSTER..3 * CLUSTER), [one, two].concat());
}

#[test]
fn case_24_and_26_entries_that_point_at_metadata_are_read() {
    let disk = opened(|image| {
        image.set_l2(1, CLUSTER);
        image.set_l2(2, 4 * CLUSTER);
        image.set_l2(3, 3 * CLUSTER);
    });
    assert_eq!(read(&disk, CLUSTER..CLUSTER + 8), (2 * CLUSTER).to_be_bytes());
    assert_eq!(read(&disk, 3 * CLUSTER..3 * CLUSTER + 8), ((4 * CLUSTER) | COPIED).to_be_bytes());
    // An L2 table that is the L1 table: its entry points at the next cluster as data.
    let disk = opened(|image| image.put64(image.l1_at(), (3 * CLUSTER) | COPIED));
    assert_eq!(read(&disk, 0..8), ((3 * CLUSTER) | COPIED).to_be_bytes());
}

#[test]
fn case_25_two_entries_for_one_host_cluster() {
    let disk = opened(|image| {
        let at = image.data(1, 4);
        image.set_l2(5, at | COPIED);
    });
    assert_eq!(read(&disk, CLUSTER..CLUSTER + 512), read(&disk, 5 * CLUSTER..5 * CLUSTER + 512));
}

#[test]
fn case_27_data_past_the_end_of_the_file() {
    // The last cluster of the file may be cut short: the rest reads as zeroes.
    let mut image = Image::usual();
    let at = image.data(1, 6);
    let mut bytes = image.finish();
    bytes.truncate(at as usize + 1000);
    let disk = world_of(&bytes).try_open(PATH, &read_only()).unwrap();
    let content = read(&disk, CLUSTER..2 * CLUSTER);
    assert!(content[..1000].iter().all(|byte| *byte == 6) && content[1000..].iter().all(|byte| *byte == 0));
    assert_eq!(read(&disk, CLUSTER + 999..CLUSTER + 1001), [6, 0]);
    assert_eq!(read(&disk, CLUSTER + 4096..CLUSTER + 8192), [0; 4096]);
    // A whole cluster, or a table, past the end is none.
    only_cluster_1_fails("past the end", |image| image.set_l2(1, (99 * CLUSTER) | COPIED));
    let disk = opened(|image| image.put64(image.l1_at(), (99 * CLUSTER) | COPIED));
    let (kind, text) = read_error(&disk, 0);
    assert!(kind == ErrorKind::Corrupt && text.contains("L2 table"), "{text}");
}

#[test]
fn case_28_unaligned_offsets() {
    only_cluster_1_fails("multiple of the cluster", |image| image.set_l2(1, 5 * CLUSTER + 512));
    let disk = opened(|image| image.put64(image.l1_at(), 4 * CLUSTER + 512));
    assert_eq!(read_error(&disk, 0).0, ErrorKind::Corrupt);
}

#[test]
fn case_29_reserved_bits() {
    for bit in [1, 8, 56, 61] {
        only_cluster_1_fails("reserved", |image| {
            let at = image.data(1, 1);
            image.set_l2(1, at | 1 << bit);
        });
    }
    let disk = opened(|image| image.put64(image.l1_at(), (4 * CLUSTER) | (1 << 57)));
    assert!(read_error(&disk, 0).1.contains("reserved"));
}

#[test]
fn case_30_offsets_of_compressed_data_with_large_clusters() {
    let content = pattern(4, 2 << 20);
    let mut image = Image::new(21, 16 << 20);
    image.compressed(1, &content, 700);
    let disk = open(image);
    assert_eq!(read(&disk, 2 << 20..4 << 20), content);
    // All bits of the offset and of the count set: beyond the file, not wrapped round.
    let mut image = Image::new(21, 16 << 20);
    for entry in [u64::MAX >> 1, u64::MAX] {
        image.set_l2(1, entry);
        let disk = world_of(&image.clone().finish()).try_open(PATH, &read_only()).unwrap();
        for _ in 0..2 {
            assert!(read_error(&disk, 2 << 20).1.contains("past the end"));
        }
    }
}

#[test]
fn case_31_the_zero_flag_in_version_2() {
    only_cluster_1_fails("zero flag", |image| {
        image.put32(4, 2);
        image.put(72, &[0; 40]);
        image.set_l2(1, 1);
    });
}

/// 64 KiB clusters with subclusters of 2 KiB.
fn extended(size_bytes: u64, change: impl FnOnce(&mut Image)) -> Graph<MemStore> {
    let mut image = Image::new(16, size_bytes);
    image.incompatible(16);
    change(&mut image);
    open(image)
}

#[test]
fn case_32_extended_l2_entries() {
    let size = (1 << 20) - 3 * 512;
    let disk = extended(size, |image| {
        let at = image.append(&[9; CLUSTER as usize]);
        // Subcluster 0 allocated, 1 zero, 2 neither, 3 to 31 allocated.
        image.set_extended(1, at | COPIED, 0xffff_fff9 | 2 << 32);
        image.set_extended(2, at, 1 << 32 | 1);
        image.set_extended(3, 0, 1);
        image.set_extended(4, image.compressed_entry(at, 512), 1);
        image.set_extended(15, at, 0xffff_ffff);
    });
    let content = read(&disk, CLUSTER..2 * CLUSTER);
    let expected = |at: usize| if (2048..6144).contains(&at) { 0 } else { 9 };
    assert!(content.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
    for (cluster, names) in [(2, "both"), (3, "without a place"), (4, "bitmap")] {
        let (kind, text) = read_error(&disk, cluster * CLUSTER);
        assert!(kind == ErrorKind::Corrupt && text.contains(names), "{text}");
    }
    assert_eq!(read(&disk, size - 512..size), [9; 512]);
}

#[test]
fn case_33_extended_entries_are_16_bytes() {
    let disk = extended(1 << 20, |image| {
        for index in 0..16 {
            let at = image.append(&[index as u8 + 1; CLUSTER as usize]);
            image.set_extended(index, at | COPIED, 0xffff_ffff);
        }
    });
    for index in 0..16 {
        assert_eq!(read(&disk, index * CLUSTER..index * CLUSTER + 1), [index as u8 + 1]);
    }
    refused(ErrorKind::Corrupt, "cluster_bits", |image| {
        *image = Image::new(13, 1 << 20);
        image.incompatible(16);
    });
}

#[test]
fn case_37_lengths_of_extensions() {
    for len in [0xffff_ffff, 0x7fff_ffff, 65500] {
        refused(ErrorKind::Corrupt, "extension", |image| {
            image.put32(112, 7);
            image.put32(116, len);
        });
    }
}

#[test]
fn case_38_places_of_the_backing_name() {
    for (offset, len) in [(200, 0), (200, 1024), (65530, 10), (50, 4), (1 << 40, 4), (u64::MAX, 4)] {
        refused(ErrorKind::Corrupt, "backing file name", |image| {
            image.put64(8, offset);
            image.put32(16, len);
        });
    }
    // Without an offset there is no name, and the length means nothing.
    let mut image = Image::usual();
    image.put32(16, 5);
    assert_eq!(world_of(&image.finish()).try_open(PATH, &read_only()).unwrap().layers().len(), 1);
}

#[test]
fn case_39_names_are_paths_inside_the_allowed_folders() {
    for name in ["json:{\"file.filename\":\"/etc/shadow\"}", "nbd://host/disk", "file:/etc/shadow"] {
        refused(ErrorKind::Unsupported, "not named by a path", |image| image.backing(name, Some("raw")));
    }
    refused(ErrorKind::Corrupt, "has a zero byte", |image| image.backing("\0\0\0\0", Some("raw")));
    let mut image = Image::usual();
    image.backing("/etc/shadow", Some("raw"));
    let world = world_of(&image.finish());
    world.raw("/etc/shadow", &[1; 512]);
    world.refused_with(PATH, &read_only(), ErrorKind::Denied, "/etc/shadow");
    assert!(!world.files.opened().iter().any(|path| path.starts_with("/etc")));
}

#[test]
fn case_40_and_41_a_backing_format_is_never_guessed() {
    let mut hidden = Image::usual();
    hidden.data(0, 0xee);
    let hidden = hidden.finish();
    let mut image = Image::usual();
    image.backing("base.img", None);
    let bytes = image.finish();
    let world = world_of(&bytes);
    world.raw("/d/base.img", &hidden);
    let error = world.refused_with(PATH, &read_only(), ErrorKind::Unsupported, "never guessed");
    assert!(error.to_string().contains("--backing-format"), "{error}");
    // The user says raw: what the guest of the raw disk wrote there is data, even if it looks like an image.
    let options = OpenOptions { parent_format: Some(Format::Raw), ..read_only() };
    let disk = world.try_open(PATH, &options).unwrap();
    assert_eq!(read(&disk, 0..4096), hidden[..4096]);
    let options = OpenOptions { parent_format: Some(Format::Qcow2), ..read_only() };
    assert_eq!(read(&world.try_open(PATH, &options).unwrap(), 0..512), [0xee; 512]);
}

#[test]
fn case_41_a_named_format_that_is_not_known() {
    refused(ErrorKind::Unsupported, "vmdk", |image| image.backing("base.vmdk", Some("vmdk")));
}

fn with_data_file(name: Option<&str>) -> World {
    let mut image = Image::usual();
    image.incompatible(4);
    image.set_l2(0, COPIED);
    image.set_l2(1, CLUSTER | COPIED);
    image.set_l2(3, (3 * CLUSTER) | COPIED);
    if let Some(name) = name {
        image.extension(0x4441_5441, name.as_bytes());
    }
    world_of(&image.finish())
}

#[test]
fn case_42_data_files_only_when_allowed() {
    let world = with_data_file(Some("data.raw"));
    let content = pattern(1, 2 * CLUSTER as usize + 100);
    world.raw("/d/data.raw", &content);
    let error = world.refused_with(PATH, &read_only(), ErrorKind::Denied, "data.raw");
    assert!(error.to_string().contains("--allow-data-file"), "{error}");
    assert_eq!(world.files.opened().len(), 1);
    let allowed = OpenOptions { allow_data_file: true, ..read_only() };
    let disk = world.try_open(PATH, &allowed).unwrap();
    assert_eq!(read(&disk, 0..2 * CLUSTER), content[..2 * CLUSTER as usize]);
    assert_eq!(read(&disk, 2 * CLUSTER..3 * CLUSTER), [0; CLUSTER as usize]);
    assert_eq!(read_error(&disk, 3 * CLUSTER).0, ErrorKind::Corrupt);
    let other = with_data_file(Some("/dev/sda"));
    other.raw("/dev/sda", &content);
    other.refused_with(PATH, &allowed, ErrorKind::Denied, "/dev/sda");
    with_data_file(None).refused_with(PATH, &allowed, ErrorKind::Corrupt, "names none");
}

#[test]
fn data_access_follows_the_alignment_of_the_data_file() {
    let mut image = Image::usual();
    image.put64(24, (1 << 20) - 512);
    image.incompatible(4);
    image.set_l2(0, COPIED);
    image.extension(0x4441_5441, b"data.raw");
    let bytes = image.finish();
    let allowed = OpenOptions { allow_data_file: true, ..read_only() };
    for (caps, direct) in [(FILE, true), (FILE_4K, false)] {
        let world = world_of(&bytes);
        world.files.add("/d/data.raw", caps).patch(0, &[3; CLUSTER as usize]);
        let disk = world.try_open(PATH, &allowed).unwrap();
        assert_eq!(info(&disk).direct, direct);
        assert_eq!(read(&disk, 0..512), [3; 512]);
    }
}

#[test]
fn case_43_chains_that_bite_their_tails_and_parents_of_other_sizes() {
    let mut image = Image::usual();
    image.backing("a.qcow2", Some("qcow2"));
    world_of(&image.finish()).refused_with(PATH, &read_only(), ErrorKind::Corrupt, "loops");
    for (len, expected) in [(3 * CLUSTER / 2, [5, 0]), (9 << 20, [5, 5])] {
        let mut image = Image::usual();
        image.backing("base.raw", Some("raw"));
        image.data(0, 1);
        let world = world_of(&image.finish());
        world.raw("/d/base.raw", &vec![5; len as usize]);
        let disk = world.try_open(PATH, &read_only()).unwrap();
        assert_eq!(disk.info().size_bytes, 1 << 20);
        assert_eq!(read(&disk, 0..512), [1; 512]);
        assert_eq!(read(&disk, 3 * CLUSTER / 2 - 1..3 * CLUSTER / 2 + 1), expected);
        assert_eq!(read(&disk, (1 << 20) - 512..1 << 20), [expected[1]; 512]);
    }
}

#[test]
fn case_44_relative_names_are_relative_to_the_child() {
    let mut image = Image::usual();
    image.backing("bases/../bases/base.raw", Some("raw"));
    let world = world_of(&image.finish());
    world.raw("/d/bases/base.raw", &[3; 1 << 20]);
    assert_eq!(read(&world.try_open(PATH, &read_only()).unwrap(), 0..512), [3; 512]);
}

#[test]
fn case_45_unknown_extensions_do_not_hinder() {
    let disk = opened(|image| {
        image.extension(0x7661_7465, b"hidden");
        image.extension(0x7661_7465, b"hidden");
        image.data(0, 2);
    });
    assert_eq!(read(&disk, 0..512), [2; 512]);
}

fn snapshot(l1_offset: u64, l1_entries: u32, extra: u32, name: &[u8]) -> Vec<u8> {
    let mut entry = l1_offset.to_be_bytes().to_vec();
    entry.extend(l1_entries.to_be_bytes());
    entry.extend([0, 1]);
    entry.extend((name.len() as u16).to_be_bytes());
    entry.extend([0; 20]);
    entry.extend(extra.to_be_bytes());
    entry.extend(vec![0; extra.min(2048) as usize]);
    entry.extend(b"1");
    entry.extend(name);
    entry.resize(entry.len().next_multiple_of(8), 0);
    entry
}

#[test]
fn case_46_and_47_damaged_snapshots_are_told_and_the_disk_is_read() {
    let with = |table: Vec<u8>, count: u32| {
        opened(|image| {
            let at = image.append(&table);
            image.put32(60, count);
            image.put64(64, at);
            image.data(0, 5);
        })
    };
    let told = |disk: &Graph<MemStore>| fact(disk, "snapshots_fault");
    let good = snapshot(3 * CLUSTER, 1, 16, b"good");
    for (table, count, names) in [
        (good.clone(), 1 << 31, "snapshots"),
        (snapshot(3 * CLUSTER + 5, 1, 16, b"x"), 1, "L1 table"),
        (snapshot(3 * CLUSTER, u32::MAX, 16, b"x"), 1, "L1 table"),
        (snapshot(3 * CLUSTER, 1, 4096, b"x"), 1, "extra data"),
    ] {
        let disk = with(table, count);
        assert_eq!(read(&disk, 0..512), [5; 512]);
        assert!(told(&disk).contains(names), "{}", told(&disk));
    }
    let disk = opened(|image| {
        image.put32(60, 1);
        image.put64(64, 99 * CLUSTER);
    });
    assert!(told(&disk).contains("past the end"));
    // Names that are no text, and extra data that are too short for version 3, are shown.
    let disk = with([good, snapshot(3 * CLUSTER, 1, 0, b"\xff\x1b[2J")].concat(), 2);
    let (snapshots, fault) = (fact(&disk, "snapshots"), told(&disk));
    assert!(snapshots.contains("good") && !snapshots.contains('\x1b'), "{snapshots}");
    assert_eq!(fault, "None");
}

fn bitmap(flags: u32, granularity: u8, table_entries: u32) -> Vec<u8> {
    let mut entry = (6 * CLUSTER).to_be_bytes().to_vec();
    entry.extend(table_entries.to_be_bytes());
    entry.extend(flags.to_be_bytes());
    entry.extend([1, granularity, 0, 3, 0, 0, 0, 0]);
    entry.extend(b"map\0\0\0\0\0");
    entry
}

#[test]
fn case_48_bitmaps_are_never_shown_as_usable_when_they_are_not() {
    let with = |entry: Vec<u8>, autoclear: u64| {
        opened(|image| {
            let at = image.append(&entry);
            let extension = [&[0, 0, 0, 1, 0, 0, 0, 0][..], &32u64.to_be_bytes(), &at.to_be_bytes()].concat();
            image.extension(0x2385_2875, &extension);
            image.put64(88, autoclear);
            image.data(0, 5);
        })
    };
    let usable = |disk: &Graph<MemStore>| fact(disk, "bitmaps").contains("(\"usable\", Bool(true))");
    assert!(usable(&with(bitmap(2, 16, 1), 1)));
    for (entry, autoclear) in [(bitmap(2, 16, 1), 0), (bitmap(1, 16, 1), 1)] {
        let disk = with(entry, autoclear);
        assert!(!usable(&disk) && fact(&disk, "bitmaps").contains("map"));
    }
    for entry in [bitmap(8, 16, 1), bitmap(2, 3, 2), bitmap(2, 200, 1), bitmap(2, 16, 9999)] {
        let disk = with(entry, 1);
        assert!(!usable(&disk) && fact(&disk, "bitmaps_fault") != "None");
        assert_eq!(read(&disk, 0..512), [5; 512]);
    }
}

#[test]
fn encrypted_images_are_refused() {
    refused(ErrorKind::Unsupported, "AES", |image| image.put32(32, 1));
    refused(ErrorKind::Unsupported, "LUKS", |image| image.put32(32, 2));
    refused(ErrorKind::Unsupported, "crypt_method 9", |image| image.put32(32, 9));
}

#[test]
fn zero_clusters_hide_the_parent() {
    let mut image = Image::usual();
    image.backing("base.raw", Some("raw"));
    image.set_l2(1, 1);
    let at = image.data(2, 9);
    image.set_l2(2, at | COPIED | 1);
    let world = world_of(&image.finish());
    world.raw("/d/base.raw", &[4; 1 << 20]);
    let disk = world.try_open(PATH, &read_only()).unwrap();
    assert_eq!(read(&disk, CLUSTER - 1..CLUSTER + 1), [4, 0]);
    assert_eq!(read(&disk, 3 * CLUSTER - 1..3 * CLUSTER + 1), [0, 4]);
}

#[test]
fn a_damaged_cluster_of_a_parent_hurts_nobody_else() {
    // Three layers, so that the parents are merged into zones of 2 MiB.
    let mut base = Image::usual();
    base.data(0, 3);
    base.set_l2(1, 5 * CLUSTER + 512);
    let mut middle = Image::usual();
    middle.backing("base.qcow2", Some("qcow2"));
    let mut image = Image::usual();
    image.backing("middle.qcow2", Some("qcow2"));
    image.data(2, 8);
    let world = world_of(&image.finish());
    world.raw("/d/middle.qcow2", &middle.finish());
    world.raw("/d/base.qcow2", &base.finish());
    let disk = world.try_open(PATH, &read_only()).unwrap();
    assert_eq!(read(&disk, 0..512), [3; 512]);
    assert_eq!(read(&disk, 2 * CLUSTER..2 * CLUSTER + 512), [8; 512]);
    assert_eq!(read(&disk, 3 * CLUSTER..3 * CLUSTER + 512), [0; 512]);
    let (kind, text) = read_error(&disk, CLUSTER);
    assert!(kind == ErrorKind::Corrupt && text.contains("base.qcow2"), "{text}");
}

#[test]
fn sequential_small_reads_decompress_a_cluster_once() {
    let content = pattern(2, CLUSTER as usize);
    let mut image = Image::usual();
    image.compressed(1, &content, 0);
    let world = world_of(&image.finish());
    let disk = world.try_open(PATH, &read_only()).unwrap();
    world.files.reset_reads();
    for at in (0..CLUSTER).step_by(4096) {
        assert_eq!(read(&disk, CLUSTER + at..CLUSTER + at + 4096), content[at as usize..at as usize + 4096]);
    }
    let stream = deflate(&content).len() as u64;
    assert!(world.files.reads().0 < 4096 + stream + 512, "{} bytes read", world.files.reads().0);
}

#[test]
fn requests_that_miss_the_same_slice_share_one_read() {
    let mut image = Image::usual();
    for index in 0..16 {
        image.data(index, index as u8 + 1);
    }
    let world = world_of(&image.finish());
    let disk = world.try_open(PATH, &read_only()).unwrap();
    let file = world.files.file(PATH);
    let l2 = 4 * CLUSTER;
    file.held_read.store(l2, Ordering::Relaxed);
    let buffers: Vec<_> = (0..16).map(|_| Segments::zeroed(512)).collect();
    world.files.reset_reads();
    let reads =
        buffers.iter().zip(0u64..).map(|(into, index)| disk.read(Extent::new(index * CLUSTER, 512).unwrap(), into));
    let mut all = Box::pin(futures_util::future::join_all(reads));
    assert!(crate::support::poll_once(all.as_mut()).is_pending());
    file.lets_read_go.store(true, Ordering::Relaxed);
    assert!(block_on(all).into_iter().all(|result| result.is_ok()));
    assert!(buffers.iter().zip(1u8..).all(|(into, byte)| into.to_vec() == [byte; 512]));
    assert_eq!(world.files.reads().0, 4096 + 16 * 512);
}

#[test]
fn opening_a_disk_of_16_tib_reads_its_l1_table_and_no_more() {
    let l1_entries: u64 = 16 << 40 >> 29;
    let mut image = Image::usual();
    image.put64(24, 16 << 40);
    image.put32(36, l1_entries as u32);
    let mut l1 = vec![0; l1_entries as usize * 8];
    let last = image.append(&[&[0; 65528][..], &((6 * CLUSTER) | COPIED).to_be_bytes()].concat());
    image.append(&[7; CLUSTER as usize]);
    l1[(l1_entries as usize - 1) * 8..].copy_from_slice(&(last | COPIED).to_be_bytes());
    let place = image.append(&l1);
    image.put64(40, place);
    let world = world_of(&image.finish());
    let disk = world.try_open(PATH, &read_only()).unwrap();
    assert!(world.files.reads().0 <= CLUSTER + l1_entries * 8, "{} bytes read", world.files.reads().0);
    assert_eq!(read(&disk, (16 << 40) - 512..16 << 40), [7; 512]);
    let runs = block_on(disk.extents(Extent::new(0, 16 << 40).unwrap(), 9)).unwrap();
    let kinds: Vec<_> = runs.iter().map(|run| (run.kind, run.extent.len_bytes)).collect();
    assert_eq!(kinds, [(ExtentKind::Hole, (16 << 40) - CLUSTER), (ExtentKind::Data, CLUSTER)]);
}

#[test]
fn direct_reads_keep_to_the_alignment_of_the_store() {
    let mut image = Image::usual();
    image.data(1, 6);
    let bytes = image.finish();
    let world = World::new();
    world.files.add(PATH, FILE_4K).patch(0, &bytes[..bytes.len() - 5000]);
    let disk = world.try_open(PATH, &read_only()).unwrap();
    assert_eq!(disk.info().request_align_bytes, 4096);
    let content = read(&disk, CLUSTER..2 * CLUSTER);
    let end = CLUSTER as usize - 5000;
    assert!(content[..end].iter().all(|byte| *byte == 6) && content[end..].iter().all(|byte| *byte == 0));
}
