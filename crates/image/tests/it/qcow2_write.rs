//! Writing qcow2: what is stored, what is kept, and what is refused. The numbers are those of the cases in docs/qcow2.md.

use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;

use crate::qcow2_image::{COPIED, Image, deflate};
use crate::qcow2_walk::Walk;
use crate::support::{FILE, World, block_on, pattern, poll_once, read, write};
use spile_core::{Disk, ErrorKind, Extent, Segments, WriteZeroes};
use spile_image::Format;
use spile_image::check::Severity;
use spile_image::create::{NewDataFile, NewImage, NewParent, Options};

const PATH: &str = "/d/a.qcow2";
const CLUSTER: u64 = 65536;

fn world_of(image: Image) -> World {
    let world = World::new();
    world.files.add(PATH, FILE).patch(0, &image.finish());
    world
}

fn word(world: &World, at: u64) -> u64 {
    u64::from_be_bytes(world.files.file(PATH).bytes(at, 8).try_into().unwrap())
}

fn findings(world: &World) -> Vec<(Severity, String)> {
    let report = block_on(Format::Qcow2.check(&world.files.store(PATH), &*world.env)).unwrap();
    report.findings.into_iter().map(|found| (found.severity, found.message)).collect()
}

#[test]
fn changes_survive_kills_and_closes() {
    for (cluster_bits, size) in [(9, 32 << 10), (12, 1 << 20), (16, (3 << 20) + 1536)] {
        for seed in 0..3 {
            let world = world_of(Image::new(cluster_bits, size));
            let mut walk = Walk::new(&world, PATH, seed);
            (0..60).for_each(|_| walk.step());
            walk.end();
        }
    }
}

#[test]
fn a_child_copies_what_is_around_a_write() {
    for seed in 0..3 {
        let mut image = Image::new(16, 1 << 20);
        image.backing("base.raw", Some("raw"));
        let world = world_of(image);
        world.raw("/d/base.raw", &pattern(7, 700 << 10));
        let mut walk = Walk::new(&world, PATH, seed);
        (0..60).for_each(|_| walk.step());
        walk.end();
        assert_eq!(world.files.file("/d/base.raw").bytes(0, 700 << 10), pattern(7, 700 << 10));
    }
}

#[test]
fn case_12_13_and_45_what_is_not_known_is_kept_or_cleared() {
    let mut image = Image::usual();
    image.put64(80, 1 << 40 | 1);
    image.put64(88, 1 << 7 | 1);
    image.extension(0x7661_7465, &[1, 0, 0, 0, 0, 0, 0, 0]);
    let world = world_of(image);
    let file = world.files.file(PATH);
    let before = file.bytes(0, 65536);
    let disk = world.open(PATH);
    assert_eq!(file.bytes(0, 65536), before, "an image that is only opened is not changed");
    write(&disk, 0, &[1; 512]);
    block_on(disk.close()).unwrap();
    let mut expected = before;
    expected[88..96].fill(0);
    assert_eq!(file.bytes(0, 65536), expected);
}

#[test]
fn case_14_an_image_marked_corrupt_is_not_written() {
    for bits in [2, 3] {
        let mut image = Image::usual();
        image.incompatible(bits);
        world_of(image).refused(PATH, ErrorKind::Corrupt, "marked corrupt");
    }
}

#[test]
fn case_23_a_compressed_cluster_is_copied_out() {
    let mut image = Image::usual();
    let streams: Vec<_> = [3, 4].iter().map(|byte| deflate(&[*byte; CLUSTER as usize])).collect();
    let at = image.append(&streams.concat());
    image.set_l2(0, image.compressed_entry(at, streams[0].len() as u64));
    image.set_l2(1, image.compressed_entry(at + streams[0].len() as u64, streams[1].len() as u64));
    image.counts.push((at / CLUSTER, 2));
    let world = world_of(image);
    let disk = world.open(PATH);
    write(&disk, 1024, &[9; 512]);
    assert_eq!(read(&disk, 0..512), [3; 512]);
    assert_eq!(read(&disk, 1024..1536), [9; 512]);
    assert_eq!(read(&disk, CLUSTER..CLUSTER + 512), [4; 512]);
    write(&disk, CLUSTER, &[8; 512]);
    block_on(disk.close()).unwrap();
    assert_eq!(findings(&world), []);
    assert_eq!(read(&world.open(PATH), CLUSTER + 512..CLUSTER + 1024), [4; 512]);
}

#[test]
fn case_24_and_35_data_in_a_table_or_in_a_free_cluster_are_not_written() {
    for (offset, count) in [(3 * CLUSTER, 1), (5 * CLUSTER, 0)] {
        let mut image = Image::usual();
        image.append(&[1; 512]);
        image.set_l2(0, offset | COPIED);
        image.counts.push((offset / CLUSTER, count));
        let world = world_of(image);
        let disk = world.open(PATH);
        let l1 = word(&world, 3 * CLUSTER);
        let extent = Extent::from_range(0..512);
        let error = block_on(disk.write(extent, &spile_core::Segments::zeroed(512), false)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert_eq!((word(&world, 72), word(&world, 3 * CLUSTER)), (2, l1), "it is marked corrupt, and not written");
        assert!(
            block_on(disk.write(Extent::from_range(CLUSTER..CLUSTER + 512), &spile_core::Segments::zeroed(512), false))
                .is_err()
        );
        assert_eq!(read(&disk, CLUSTER..CLUSTER + 512), [0; 512]);
    }
}

#[test]
fn case_25_a_cluster_with_two_users_is_copied_whatever_the_bit_says() {
    let mut image = Image::usual();
    let at = image.data(0, 5);
    image.set_l2(1, at | COPIED);
    image.counts.push((at / CLUSTER, 2));
    let world = world_of(image);
    let disk = world.open(PATH);
    write(&disk, 0, &[6; 512]);
    assert_eq!(read(&disk, 0..512), [6; 512]);
    assert_eq!(read(&disk, CLUSTER..CLUSTER + 512), [5; 512]);
    block_on(disk.close()).unwrap();
    assert_eq!(findings(&world), []);
}

#[test]
fn case_51_zeroes_and_discards_hide_the_parent() {
    let mut image = Image::usual();
    image.backing("base.raw", Some("raw"));
    let world = world_of(image);
    world.raw("/d/base.raw", &[7; 1 << 20]);
    let disk = world.open(PATH);
    let zeroes = WriteZeroes { may_unmap: true, only_if_fast: false };
    block_on(disk.write_zeroes(Extent::from_range(512..2 * CLUSTER), zeroes)).unwrap();
    write(&disk, 3 * CLUSTER, &[1; CLUSTER as usize]);
    block_on(disk.discard(Extent::from_range(3 * CLUSTER..4 * CLUSTER))).unwrap();
    for range in [512..2 * CLUSTER, 3 * CLUSTER..4 * CLUSTER] {
        assert!(read(&disk, range).iter().all(|byte| *byte == 0));
    }
    assert_eq!(read(&disk, 0..512), [7; 512]);
    assert_eq!(read(&disk, 2 * CLUSTER..2 * CLUSTER + 512), [7; 512]);
    block_on(disk.close()).unwrap();
    assert_eq!(findings(&world), []);
}

/// An L2 table that a snapshot shares: the table is copied, and so is the cluster.
#[test]
fn a_snapshot_keeps_what_it_has() {
    let mut image = Image::usual();
    let at = image.data(0, 5);
    image.set_l2(0, at);
    let l1 = image.append(&(4 * CLUSTER).to_be_bytes());
    let mut entry = l1.to_be_bytes().to_vec();
    entry.extend(1u32.to_be_bytes());
    entry.extend([0, 1, 0, 1]);
    entry.extend([0; 20]);
    entry.extend(16u32.to_be_bytes());
    entry.extend(0u64.to_be_bytes());
    entry.extend((1u64 << 20).to_be_bytes());
    entry.extend(b"1s");
    let table = image.append(&entry);
    image.put32(60, 1);
    image.put64(64, table);
    image.put64(3 * CLUSTER, 4 * CLUSTER);
    image.counts.extend([(4, 2), (at / CLUSTER, 2)]);
    let world = world_of(image);
    assert_eq!(findings(&world), []);
    let disk = world.open(PATH);
    write(&disk, 512, &[6; 512]);
    write(&disk, 5 * CLUSTER, &[6; 512]);
    block_on(disk.close()).unwrap();
    assert_eq!(findings(&world), []);
    let file = world.files.file(PATH);
    assert_eq!((file.bytes(at, 65536), word(&world, 4 * CLUSTER)), (vec![5; 65536], at));
    assert_eq!(read(&world.open(PATH), 0..1536), [vec![5; 512], vec![6; 512], vec![5; 512]].concat());
}

/// Clusters of 512 bytes: 64 entries of the refcount table count 8 MiB of file.
#[test]
fn the_refcount_table_grows() {
    let cluster = 512;
    let mut image = Image::new(9, 32 << 10);
    // The disk has 12 MiB: an L1 table of 384 entries, behind the rest.
    image.put64(24, 12 << 20);
    let l1 = image.append(&vec![0; 384 * 8]);
    image.put64(40, l1);
    image.put32(36, 384);
    image.put64(3 * cluster, 0);
    image.counts.extend([(3, 0), (4, 0)]);
    let world = world_of(image);
    let disk = world.open(PATH);
    let bytes = pattern(3, 1 << 20);
    for at in (0..12 << 20).step_by(1 << 20) {
        write(&disk, at, &bytes);
    }
    block_on(disk.close()).unwrap();
    assert!(u32::from_be_bytes(world.files.file(PATH).bytes(56, 4).try_into().unwrap()) > 1);
    assert_eq!(findings(&world), []);
    let disk = world.open(PATH);
    assert!((0..12 << 20).step_by(1 << 20).all(|at| read(&disk, at..at + (1 << 20)) == bytes));
}

/// Without this, a disk that is written and discarded in turns would grow for ever.
#[test]
fn what_is_discarded_is_used_again() {
    let world = world_of(Image::new(16, 8 << 20));
    let disk = world.open(PATH);
    for round in 0..40 {
        write(&disk, 0, &pattern(round, 8 << 20));
        block_on(disk.flush()).unwrap();
        block_on(disk.discard(Extent::from_range(0..8 << 20))).unwrap();
        block_on(disk.flush()).unwrap();
    }
    let len = world.files.file(PATH).len();
    assert!(len < 64 << 20, "{len} bytes of file for 8 MiB");
    block_on(disk.close()).unwrap();
    assert_eq!(findings(&world), []);
}

/// Whoever began to read before a cluster was given up reads what it held: nothing is punched or written there meanwhile.
#[test]
fn case_50_a_cluster_is_not_emptied_and_not_used_again_under_a_reader() {
    let world = world_of(Image::usual());
    let (file, disk) = (world.files.file(PATH), world.open(PATH));
    let data = pattern(1, CLUSTER as usize);
    write(&disk, 0, &data);
    let table = word(&world, word(&world, 40)) & !COPIED;
    let data_at = word(&world, table) & !COPIED;
    file.held_read.store(data_at, Relaxed);
    let into = Segments::zeroed(CLUSTER as usize);
    let mut reader = pin!(disk.read(Extent::from_range(0..CLUSTER), &into));
    assert!(poll_once(reader.as_mut()).is_pending());
    block_on(disk.discard(Extent::from_range(0..CLUSTER))).unwrap();
    for cluster in 1..6 {
        block_on(disk.flush()).unwrap();
        write(&disk, cluster * CLUSTER, &pattern(2, CLUSTER as usize));
    }
    assert!(file.bytes(data_at, CLUSTER as usize) == data, "changed under a reader");
    file.lets_read_go.store(true, Relaxed);
    block_on(reader).unwrap();
    assert!(into.to_vec() == data);
    (0..3).for_each(|_| block_on(disk.flush()).unwrap());
    assert!(file.bytes(data_at, CLUSTER as usize) != data, "never given back");
}

/// Whoever has looked up where a subcluster lies may read there later than others. What those do not see yet must not be there, whatever zeroes
/// came in between.
#[test]
fn case_51_what_is_shown_at_a_place_is_not_hidden_and_written_again() {
    let (some, whole) = (0..2048, 0..CLUSTER);
    let keeps = WriteZeroes::default();
    let frees = WriteZeroes { may_unmap: true, ..keeps };
    for (has_data_file, zeroed, how) in [
        (false, &some, Some(keeps)),
        (false, &some, Some(frees)),
        (false, &whole, Some(keeps)),
        (true, &some, Some(keeps)),
        (true, &some, Some(frees)),
        (true, &whole, Some(keeps)),
        (true, &whole, Some(frees)),
        (true, &whole, None),
    ] {
        let (world, asked) = (World::new(), Extent::from_range(zeroed.clone()));
        world.files.add(PATH, FILE);
        let data_file = has_data_file.then(|| NewDataFile { path: "a.data".to_owned(), is_raw: false });
        let options = Options { data_file, extended_l2: Some(true), ..Options::default() };
        world.files.add("/d/a.data", FILE);
        world.raw("/d/base.raw", &pattern(7, 1 << 20));
        let (relative_path, name) = ("base.raw".to_owned(), "base.raw".to_owned());
        let parent = NewParent { relative_path, name, format: Format::Raw, identity: None, changed_unix_s: None };
        let new = NewImage { options, parent: Some(parent), ..NewImage::new(1 << 20) };
        block_on(Format::Qcow2.create(&world.files.store(PATH), &*world.env, &new)).unwrap();
        let disk = world.open(PATH);
        write(&disk, 0, &pattern(1, 2048));
        let table = word(&world, word(&world, 40)) & !COPIED;
        let host = word(&world, table) & !COPIED;
        assert_eq!(word(&world, table + 8), 1, "not one subcluster");
        match how {
            Some(how) => block_on(disk.write_zeroes(asked, how)).unwrap(),
            None => block_on(disk.discard(asked)).unwrap(),
        }
        assert!(read(&disk, 0..2048) == [0; 2048]);
        let (image, data) = (world.files.file(PATH), world.files.file(if has_data_file { "/d/a.data" } else { PATH }));
        image.holds_syncs.store(true, Relaxed);
        data.holds_syncs.store(true, Relaxed);
        let new = Segments::copied(&pattern(2, 2048));
        let mut writing = pin!(disk.write(Extent::from_range(0..2048), &new, false));
        let _ = poll_once(writing.as_mut());
        let late = read(&disk, 0..2048);
        assert!(
            data.bytes(host, 2048) == late,
            "a slow reader has more: data file {has_data_file}, {zeroed:?}, {how:?}"
        );
        image.holds_syncs.store(false, Relaxed);
        data.holds_syncs.store(false, Relaxed);
        if late == [0; 2048] {
            block_on(writing).unwrap();
        }
        block_on(disk.close()).unwrap();
        assert_eq!(findings(&world), []);
    }
}
