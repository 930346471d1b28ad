//! Images that keep their data in another file, written, made and resized in memory.

use crate::qcow2_image::{COPIED, Image};
use crate::qcow2_walk::Walk;
use crate::support::{DEVICE, FILE, World, block_on, pattern, read, write};
use spile_core::{Disk, ErrorKind, Extent, Segments, WriteZeroes};
use spile_image::create::{NewDataFile, NewImage, NewParent, Options};
use spile_image::layer::Layer as _;
use spile_image::{Format, OpenOptions};

const PATH: &str = "/d/a.qcow2";
const DATA: &str = "/d/a.data";
const CLUSTER: u64 = 65536;
const MIB: u64 = 1 << 20;
/// Where the header has its autoclear features, and the one that says "raw".
const AUTOCLEAR_AT: u64 = 88;
const RAW: u64 = 2;

fn apart(mut image: Image, is_raw: bool) -> Image {
    image.incompatible(4);
    image.put64(AUTOCLEAR_AT, if is_raw { RAW } else { 0 });
    image.extension(0x4441_5441, b"a.data");
    image
}

/// An image without data, and a file of `len` of somebody's bytes for them, or of zeroes when it is to be the disk as it is.
fn world_of(image: Image, is_raw: bool, len: usize) -> World {
    let world = World::new();
    world.files.add(PATH, FILE).patch(0, &apart(image, is_raw).finish());
    let bytes = if is_raw { vec![0; len] } else { vec![0xd7; len] };
    world.raw(DATA, &bytes).set_len(len as u64);
    world
}

fn word(world: &World, at: u64) -> u64 {
    u64::from_be_bytes(world.files.file(PATH).bytes(at, 8).try_into().unwrap())
}

fn write_fails(world: &World, at: u64) -> spile_core::Error {
    let disk = world.open(PATH);
    block_on(disk.write(Extent::from_range(at..at + 512), &Segments::zeroed(512), false)).unwrap_err()
}

#[test]
fn changes_survive_kills_and_closes() {
    let kinds = [(9, 32 << 10, false), (12, MIB / 2, false), (16, MIB + 1536, false), (16, MIB + 512, true)];
    for (bits, size, extended) in kinds {
        for (seed, is_raw) in [(0, false), (1, true)] {
            let mut image = Image::new(bits, size);
            if extended {
                image.incompatible(16);
            }
            let world = world_of(image, is_raw, if is_raw { size as usize } else { 300 << 10 });
            let mut walk = Walk::new(&world, PATH, seed);
            (0..60).for_each(|_| walk.step());
            let expected = walk.end();
            let (image, data) = (world.files.file(PATH), world.files.file(DATA));
            assert!(image.len() <= 5 << bits, "no data in the image");
            assert!(!is_raw || data.bytes(0, size as usize) == expected, "the raw data file is the disk");
            assert_eq!(word(&world, AUTOCLEAR_AT), if is_raw { RAW } else { 0 });
        }
    }
}

#[test]
fn a_child_copies_what_is_around_a_write() {
    for (seed, extended) in [(0, false), (1, true), (2, false), (3, true)] {
        let mut image = Image::new(16, MIB);
        image.backing("base.raw", Some("raw"));
        if extended {
            image.incompatible(16);
        }
        let world = world_of(image, false, MIB as usize);
        world.raw("/d/base.raw", &pattern(7, 700 << 10));
        let mut walk = Walk::new(&world, PATH, seed);
        (0..60).for_each(|_| walk.step());
        walk.end();
        assert_eq!(world.files.file("/d/base.raw").bytes(0, 700 << 10), pattern(7, 700 << 10));
    }
}

#[test]
fn the_guests_offset_is_the_offset_in_the_data_file() {
    let world = world_of(Image::usual(), false, MIB as usize);
    let disk = world.open(PATH);
    for cluster in [0, 3] {
        write(&disk, cluster * CLUSTER + 1024, &[9; 512]);
        let mut expected = vec![0; CLUSTER as usize];
        expected[1024..1536].fill(9);
        assert!(read(&disk, cluster * CLUSTER..(cluster + 1) * CLUSTER) == expected, "nothing of what was there shows");
        assert!(world.files.file(DATA).bytes(cluster * CLUSTER, CLUSTER as usize) == expected);
        assert_eq!(word(&world, 4 * CLUSTER + cluster * 8), (cluster * CLUSTER) | COPIED);
    }
    assert_eq!(world.files.file(DATA).bytes(CLUSTER, 512), [0xd7; 512], "what nobody wrote stays");
}

#[test]
fn a_first_write_waits_until_the_data_file_is_durable_and_a_rewrite_does_not() {
    use std::sync::atomic::Ordering::Relaxed;
    let world = world_of(Image::usual(), false, MIB as usize);
    let disk = world.open(PATH);
    write(&disk, 8 * CLUSTER, &[1; 512]);
    let syncs = || world.files.file(DATA).syncs.load(Relaxed);
    let before = syncs();
    write(&disk, 0, &[1; 512]);
    assert_eq!(syncs(), before + 1);
    write(&disk, 4096, &[1; 512]);
    block_on(disk.discard(Extent::from_range(0..CLUSTER))).unwrap();
    write(&disk, 0, &[1; 512]);
    assert_eq!(syncs(), before + 1);
    block_on(disk.flush()).unwrap();
    assert_eq!(syncs(), before + 2);
}

#[test]
fn zeroes_and_discards_reach_the_data_file_and_give_its_space_back() {
    for is_raw in [false, true] {
        let world = world_of(Image::usual(), is_raw, MIB as usize);
        let disk = world.open(PATH);
        write(&disk, 0, &pattern(3, MIB as usize));
        block_on(disk.discard(Extent::from_range(0..4 * CLUSTER))).unwrap();
        let how = WriteZeroes { may_unmap: true, only_if_fast: false };
        block_on(disk.write_zeroes(Extent::from_range(4 * CLUSTER..6 * CLUSTER), how)).unwrap();
        let data = world.files.file(DATA);
        assert_eq!(data.allocated_bytes(), 10 * CLUSTER);
        assert_eq!(data.bytes(0, 6 * CLUSTER as usize), vec![0; 6 * CLUSTER as usize]);
        assert_eq!(read(&disk, 0..6 * CLUSTER), vec![0; 6 * CLUSTER as usize]);
    }
}

#[test]
fn an_entry_that_points_elsewhere_in_the_data_file_is_not_written() {
    for entry in [CLUSTER | COPIED, COPIED] {
        let mut image = Image::usual();
        image.set_l2(2, entry);
        let world = world_of(image, false, MIB as usize);
        assert_eq!(write_fails(&world, 2 * CLUSTER).kind(), ErrorKind::Corrupt);
        assert_eq!(world.files.file(DATA).bytes(0, MIB as usize), vec![0xd7; MIB as usize]);
        assert_eq!(word(&world, 72), 4 | 2, "it is marked corrupt");
    }
}

#[test]
fn an_entry_that_points_elsewhere_in_the_data_file_is_not_read() {
    for (extended, host) in [(false, CLUSTER), (false, 0), (true, CLUSTER), (true, 0)] {
        for bitmap in [u64::from(u32::MAX), 0xff] {
            let mut image = Image::usual();
            match extended {
                true => {
                    image.incompatible(16);
                    image.set_extended(2, host | COPIED, bitmap);
                }
                false => image.set_l2(2, host | COPIED),
            }
            let world = world_of(image, false, MIB as usize);
            let options = OpenOptions { allow_data_file: true, read_only: true, ..OpenOptions::default() };
            let disk = world.try_open(PATH, &options).unwrap();
            // Also when its table is in memory.
            for _ in 0..2 {
                let at = Extent::from_range(2 * CLUSTER..2 * CLUSTER + 512);
                let error = block_on(disk.read(at, &Segments::zeroed(512))).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Corrupt);
                assert!(error.to_string().contains("elsewhere in the data file"), "{error}");
            }
            assert_eq!(read(&disk, CLUSTER..2 * CLUSTER), vec![0; CLUSTER as usize]);
        }
    }
}

/// Images with a raw data file that hold, under their cluster 2, what no entry shows: without an entry, with a zero flag, and with a part of it shown.
fn hiding() -> Vec<Image> {
    let (none, mut zero, mut mixed) = (Image::usual(), Image::usual(), Image::usual());
    zero.set_l2(2, 1);
    mixed.incompatible(16);
    mixed.set_extended(2, (2 * CLUSTER) | COPIED, 0xf0 << 32 | 0xf);
    vec![none, zero, mixed]
}

#[test]
fn what_a_raw_data_file_has_hidden_is_zero_durably_before_it_is_shown() {
    use std::sync::atomic::Ordering::Relaxed;
    for image in hiding() {
        let world = world_of(image, true, MIB as usize);
        let data = world.files.file(DATA);
        data.patch(0, &vec![0xd7; MIB as usize]);
        let disk = world.open(PATH);
        let mut expected = read(&disk, 2 * CLUSTER..3 * CLUSTER);
        write(&disk, 8 * CLUSTER, &[1; 512]);
        let before = data.syncs.load(Relaxed);
        write(&disk, 2 * CLUSTER + 40960, &[9; 512]);
        expected[40960..41472].fill(9);
        assert!(data.syncs.load(Relaxed) > before, "an entry shows what is durable");
        assert!(read(&disk, 2 * CLUSTER..3 * CLUSTER) == expected);
        assert!(data.bytes(2 * CLUSTER, CLUSTER as usize) == expected);
    }
}

#[test]
fn zeroes_and_discards_reach_what_a_raw_data_file_has_hidden() {
    for (image, discards) in hiding().into_iter().chain(hiding()).zip([false, false, false, true, true, true]) {
        for len in [CLUSTER, CLUSTER / 2] {
            let world = world_of(image.clone(), true, MIB as usize);
            let data = world.files.file(DATA);
            data.patch(0, &vec![0xd7; MIB as usize]);
            let disk = world.open(PATH);
            let at = Extent::from_range(2 * CLUSTER..2 * CLUSTER + len);
            match discards {
                true => block_on(disk.discard(at)).unwrap(),
                false => {
                    let how = WriteZeroes { may_unmap: true, only_if_fast: false };
                    block_on(disk.write_zeroes(at, how)).unwrap();
                }
            }
            assert!(data.bytes(2 * CLUSTER, len as usize).iter().all(|byte| *byte == 0), "discards: {discards}");
            assert!(read(&disk, 2 * CLUSTER..2 * CLUSTER + len).iter().all(|byte| *byte == 0));
        }
    }
}

#[test]
fn what_lies_behind_the_end_of_the_disk_in_its_last_cluster_is_zero_once_it_is_shown() {
    let size = MIB - 1024;
    for (is_raw, has_parent, extended) in
        [(false, false, false), (false, true, false), (false, true, true), (true, false, false), (true, false, true)]
    {
        let mut image = Image::new(16, size);
        if extended {
            image.incompatible(16);
        }
        if has_parent {
            image.backing("base.raw", Some("raw"));
        }
        let world = world_of(image, is_raw, MIB as usize);
        world.raw("/d/base.raw", &pattern(7, size as usize));
        let data = world.files.file(DATA);
        data.patch(0, &vec![0xd7; MIB as usize]);
        let disk = world.open(PATH);
        write(&disk, MIB - CLUSTER + 1024, &[1; 512]);
        assert_eq!(data.bytes(size, 1024), vec![0; 1024], "raw {is_raw}, parent {has_parent}, extended {extended}");
    }
}

#[test]
fn what_a_raw_disk_has_gained_is_shown_from_the_start() {
    use std::sync::atomic::Ordering::Relaxed;
    // The second one gets a longer table of tables; the third one has a cluster that ends behind the old end.
    for (bits, from, extended) in [(16, MIB, false), (9, 32 << 10, false), (16, MIB + 512, false), (16, MIB, true)] {
        let mut image = Image::new(bits, from);
        if extended {
            image.incompatible(16);
        }
        let world = world_of(image, true, from as usize);
        let disk = world.open(PATH);
        write(&disk, 0, &[1; 512]);
        write(&disk, from - 512, &[1; 512]);
        block_on(disk.resize(4 * MIB)).unwrap();
        let data = world.files.file(DATA);
        let before = data.syncs.load(Relaxed);
        write(&disk, 3 * MIB, &[2; 512]);
        assert_eq!(data.syncs.load(Relaxed), before, "it has its place");
        block_on(disk.close()).unwrap();
        // As a program does that knows of the raw file alone.
        let rest = 4 * MIB - from;
        data.patch(from, &pattern(3, rest as usize));
        let disk = world.open(PATH);
        assert!(read(&disk, from..4 * MIB) == pattern(3, rest as usize), "{bits} {from}");
        block_on(disk.close()).unwrap();
        let report = block_on(Format::Qcow2.check(&world.files.store(PATH), &*world.env)).unwrap();
        assert!(report.findings.is_empty(), "{:#?}", report.findings);
    }
}

#[test]
fn what_contradicts_a_data_file_is_not_written() {
    let mut image = Image::usual();
    image.put32(60, 1);
    image.put64(64, 4 * CLUSTER);
    let world = world_of(image, false, MIB as usize);
    let allowed = OpenOptions { allow_data_file: true, ..OpenOptions::default() };
    world.refused_with(PATH, &allowed, ErrorKind::Unsupported, "internal snapshots");
    let mut image = Image::usual();
    image.backing("base.raw", Some("raw"));
    let world = world_of(image, true, MIB as usize);
    world.raw("/d/base.raw", &[1; 512]);
    world.refused_with(PATH, &allowed, ErrorKind::Unsupported, "has no parent");
}

#[test]
fn no_file_of_a_chain_is_a_data_file_besides() {
    let allowed = |read_only| OpenOptions { allow_data_file: true, read_only, ..OpenOptions::default() };
    for read_only in [false, true] {
        let mut image = Image::usual();
        image.backing("a.data", Some("raw"));
        let world = world_of(image, false, MIB as usize);
        world.refused_with(PATH, &allowed(read_only), ErrorKind::Corrupt, "used twice");
        let mut image = Image::usual();
        image.incompatible(4);
        image.extension(0x4441_5441, b"a.qcow2");
        let world = World::new();
        world.files.add(PATH, FILE).patch(0, &image.finish());
        world.refused_with(PATH, &allowed(read_only), ErrorKind::Corrupt, "used twice");
        let mut image = Image::usual();
        image.backing("b.qcow2", Some("qcow2"));
        let world = world_of(image, false, MIB as usize);
        world.files.add("/d/b.qcow2", FILE).patch(0, &apart(Image::usual(), false).finish());
        world.refused_with(PATH, &allowed(read_only), ErrorKind::Corrupt, "used twice");
    }
}

#[test]
fn a_data_file_is_missed_by_its_name() {
    let world = World::new();
    world.files.add(PATH, FILE).patch(0, &apart(Image::usual(), false).finish());
    let allowed = OpenOptions { allow_data_file: true, ..OpenOptions::default() };
    let error = world.refused_with(PATH, &allowed, ErrorKind::NotFound, "holds the image's data");
    assert!(error.to_string().contains("/d/a.data"), "{error}");
}

#[test]
fn features_that_are_not_kept_up_fall_and_raw_stays() {
    let mut image = apart(Image::usual(), true);
    image.put64(AUTOCLEAR_AT, 1 << 9 | RAW | 1);
    let world = World::new();
    world.files.add(PATH, FILE).patch(0, &image.finish());
    world.raw(DATA, &[]).set_len(MIB);
    let disk = world.open(PATH);
    write(&disk, 0, &[1; 512]);
    block_on(disk.close()).unwrap();
    assert_eq!(word(&world, AUTOCLEAR_AT), RAW);
}

#[test]
fn the_data_file_follows_the_size() {
    for is_raw in [false, true] {
        let size = MIB - 1024;
        let world = world_of(Image::new(16, size), is_raw, 2 * MIB as usize);
        let data = world.files.file(DATA);
        data.patch(size, &vec![0xd7; (2 * MIB - size) as usize]);
        let disk = world.open(PATH);
        write(&disk, 0, &pattern(5, size as usize));
        block_on(disk.resize(4 * MIB)).unwrap();
        assert_eq!(data.len(), 4 * MIB);
        assert_eq!(read(&disk, size..4 * MIB), vec![0; (4 * MIB - size) as usize]);
        assert!(!is_raw || data.bytes(size, (4 * MIB - size) as usize).iter().all(|byte| *byte == 0));
        write(&disk, 3 * MIB + 512, &[6; 512]);
        block_on(disk.close()).unwrap();
        block_on(world.open(PATH).handles()[0].image().resize_unused(MIB / 2)).unwrap();
        assert_eq!(data.len(), MIB / 2);
        let disk = world.open(PATH);
        assert!(read(&disk, 0..MIB / 2) == pattern(5, size as usize)[..MIB as usize / 2]);
        block_on(disk.resize(4 * MIB)).unwrap();
        assert_eq!(read(&disk, MIB / 2..4 * MIB), vec![0; (7 * MIB / 2) as usize]);
        block_on(disk.close()).unwrap();
        let report = block_on(Format::Qcow2.check(&world.files.store(PATH), &*world.env)).unwrap();
        assert!(report.findings.is_empty(), "{:#?}", report.findings);
    }
}

#[test]
fn a_device_that_is_shorter_than_the_disk_holds_no_data() {
    let world = World::new();
    world.files.add(PATH, FILE).patch(0, &apart(Image::usual(), false).finish());
    world.files.add(DATA, DEVICE).set_len(MIB / 2);
    assert_eq!(write_fails(&world, 0).kind(), ErrorKind::NoSpace);
}

fn new(is_raw: bool, extended: bool) -> NewImage {
    let data_file = Some(NewDataFile { path: "a.data".into(), is_raw });
    let options = Options { data_file, extended_l2: Some(extended), ..Options::default() };
    NewImage { options, ..NewImage::new(MIB + 512) }
}

fn create(world: &World, new: &NewImage) -> spile_core::Result<()> {
    block_on(Format::Qcow2.create(&world.files.store(PATH), &*world.env, new))
}

#[test]
fn a_new_image_with_a_data_file_is_sound_and_keeps_what_is_written() {
    for (is_raw, extended) in [(false, false), (false, true), (true, false), (true, true)] {
        let world = World::new();
        world.files.add(PATH, FILE);
        let data = world.raw(DATA, &[]);
        data.set_len(MIB + 512);
        create(&world, &new(is_raw, extended)).unwrap();
        let report = block_on(Format::Qcow2.check(&world.files.store(PATH), &*world.env)).unwrap();
        assert!(report.findings.is_empty(), "{:#?}", report.findings);
        assert_eq!(word(&world, AUTOCLEAR_AT), if is_raw { RAW } else { 0 });
        world.files.file(PATH).forget_ways();
        let syncs = || data.syncs.load(std::sync::atomic::Ordering::Relaxed);
        let disk = world.open(PATH);
        write(&disk, MIB, &[7; 512]);
        let begun = syncs();
        write(&disk, 512, &[8; 512]);
        assert_eq!(syncs() > begun, !is_raw, "a raw one has all its places from the start");
        block_on(disk.close()).unwrap();
        assert_eq!((data.bytes(MIB, 512), data.bytes(512, 512)), (vec![7; 512], vec![8; 512]));
    }
}

#[test]
fn what_a_data_file_cannot_be_combined_with_is_refused() {
    let world = World::new();
    world.files.add(PATH, FILE);
    let parent = NewParent {
        relative_path: "base.raw".into(),
        name: "base.raw".into(),
        format: Format::Raw,
        identity: None,
        changed_unix_s: None,
    };
    let child = NewImage { parent: Some(parent), ..new(true, false) };
    let mut old = new(false, false);
    old.options.version = Some(2);
    for new in [child, old] {
        assert_eq!(create(&world, &new).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}
