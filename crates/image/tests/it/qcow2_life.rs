//! A qcow2 image that gives up what it has, gets another parent or none, and another size, in memory.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::qcow2_image::{COPIED, Image};
use crate::qcow2_walk::Walk;
use crate::support::{DEVICE, FILE, Kind, MemStore, World, block_on, pattern, read, write};
use spile_core::{Disk, ErrorKind, Extent, Io, Segments, WriteZeroes};
use spile_image::check::Severity;
use spile_image::create::{NewImage, NewParent};
use spile_image::layer::Layer;
use spile_image::{Broken, Format, Graph, Sinking};

const PATH: &str = "/d/a.qcow2";
const BASE: &str = "/d/base.raw";
const CLUSTER: u64 = 65536;
const MIB: u64 = 1 << 20;
/// An extension that nobody here knows: the hidden flag of XCP-ng.
const UNKNOWN: u32 = 0x7661_7465;

fn findings(world: &World) -> Vec<(Severity, String)> {
    let report = block_on(Format::Qcow2.check(&world.files.store(PATH), &*world.env)).unwrap();
    report.findings.into_iter().map(|found| (found.severity, found.message)).collect()
}

fn install(world: &World, kind: Kind, image: Image) {
    world.files.add(PATH, kind).patch(0, &image.finish());
}

/// A raw base with a pattern, and a child of 1 MiB whose first ten clusters hold the same.
fn pair(kind: Kind) -> World {
    let world = World::new();
    world.raw(BASE, &pattern(7, MIB as usize));
    let mut image = Image::usual();
    image.backing("base.raw", Some("raw"));
    install(&world, FILE, image);
    if kind.is_device {
        let bytes = world.files.file(PATH).bytes(0, 5 * CLUSTER as usize);
        let file = world.files.add(PATH, kind);
        file.set_len(4 * MIB);
        file.patch(0, &bytes);
    }
    let disk = world.open(PATH);
    write(&disk, 0, &pattern(7, MIB as usize)[..10 * CLUSTER as usize]);
    block_on(disk.close()).unwrap();
    world
}

fn forget(disk: &Graph<MemStore>, range: Range<u64>) -> spile_core::Result<()> {
    block_on(disk.handles()[0].image().forget(Extent::from_range(range)))
}

/// The runs that the leaf has.
fn own(disk: &Graph<MemStore>) -> Vec<Range<u64>> {
    let (mut at, mut runs): (u64, Vec<Range<u64>>) = (0, Vec::new());
    let size = disk.info().size_bytes;
    while at < size
        && let Some(run) = block_on(disk.next_own(Extent::from_range(at..size))).unwrap()
    {
        at = run.end();
        match runs.last_mut() {
            Some(last) if last.end == run.start() => last.end = run.end(),
            _ => runs.push(run.start()..run.end()),
        }
    }
    runs
}

/// True when the byte at `at` comes from the base.
fn is_below(world: &World, disk: &Graph<MemStore>, at: u64) -> bool {
    let base = world.files.file(BASE);
    let before = base.bytes(at, 512);
    base.patch(at, &[0xee; 512]);
    let seen = read(disk, at..at + 512);
    base.patch(at, &before);
    seen == [0xee; 512]
}

#[test]
fn a_cluster_that_is_given_up_reads_from_below_and_its_space_is_free() {
    for kind in [FILE, DEVICE] {
        let world = pair(kind);
        let file = world.files.file(PATH);
        let taken = file.allocated_bytes();
        let disk = world.open(PATH);
        let before = read(&disk, 0..MIB);
        (0..9).for_each(|cluster| forget(&disk, cluster * CLUSTER..(cluster + 1) * CLUSTER).unwrap());
        assert_eq!(own(&disk), vec![9 * CLUSTER..10 * CLUSTER]);
        assert!(is_below(&world, &disk, 5 * CLUSTER) && !is_below(&world, &disk, 9 * CLUSTER));
        assert!(read(&disk, 0..MIB) == before);
        (0..3).for_each(|_| block_on(disk.flush()).unwrap());
        assert!(kind.is_device || file.allocated_bytes() + 8 * CLUSTER < taken, "the space is not given back");
        block_on(disk.close()).unwrap();
        assert_eq!(findings(&world), []);
        assert!(read(&world.open(PATH), 0..MIB) == before);
    }
}

#[test]
fn what_is_given_up_stays_so_when_the_process_dies_and_keeps_its_place_until_that_is_durable() {
    let world = pair(FILE);
    let file = world.files.file(PATH);
    let disk = world.open(PATH);
    let entry = file.bytes(4 * CLUSTER, 8);
    let host = u64::from_be_bytes(entry.try_into().unwrap()) & !COPIED;
    let syncs = file.syncs.load(Relaxed);
    forget(&disk, 0..CLUSTER).unwrap();
    // Of the begin of writing: giving up waits for none.
    assert!(file.syncs.load(Relaxed) <= syncs + 1);
    let count = file.bytes(2 * CLUSTER + host / CLUSTER * 2, 2);
    assert_eq!((file.bytes(host, 512), count), (pattern(7, 512), vec![0, 1]), "a power cut may bring it back");
    drop(disk);
    let disk = world.open(PATH);
    assert!(is_below(&world, &disk, 0));
    assert_eq!(findings(&world).len(), 1, "the cluster is leaked: {:?}", findings(&world));
    assert!(findings(&world).iter().all(|(severity, _)| *severity == Severity::Leak));
}

#[test]
fn space_is_held_and_given_back_bit_by_bit() {
    struct NoTime;
    impl spile_core::Timer for NoTime {
        fn sleep(&self, _: std::time::Duration) -> std::pin::Pin<Box<dyn Future<Output = ()>>> {
            Box::pin(async {})
        }

        fn now_ns(&self) -> u64 {
            0
        }
    }
    let world = pair(FILE);
    let file = world.files.file(PATH);
    let disk = world.open(PATH);
    disk.hold_own_space(true);
    let taken = file.allocated_bytes();
    (0..9).for_each(|cluster| forget(&disk, cluster * CLUSTER..(cluster + 1) * CLUSTER).unwrap());
    (0..4).for_each(|_| block_on(disk.flush()).unwrap());
    assert_eq!(file.allocated_bytes(), taken, "a flush gives nothing back");
    let give = |bytes| block_on(disk.give_back_own(bytes, &NoTime)).unwrap().bytes;
    assert_eq!((give(1), give(2 * CLUSTER)), (CLUSTER, 2 * CLUSTER));
    assert_eq!(file.allocated_bytes(), taken - 3 * CLUSTER);
    // What is left is unused space, which flushes leave alone and new data take.
    disk.hold_own_space(false);
    (0..4).for_each(|_| block_on(disk.flush()).unwrap());
    assert_eq!((give(u64::MAX), file.allocated_bytes()), (0, taken - 3 * CLUSTER));
    block_on(disk.close()).unwrap();
    assert_eq!(findings(&world), []);
}

#[test]
fn what_was_held_stays_in_the_file_also_where_no_flush_has_settled_it() {
    for flushes_before in 0..3 {
        let world = pair(FILE);
        let (file, disk) = (world.files.file(PATH), world.open(PATH));
        disk.hold_own_space(true);
        (0..9).for_each(|cluster| forget(&disk, cluster * CLUSTER..(cluster + 1) * CLUSTER).unwrap());
        (0..flushes_before).for_each(|_| block_on(disk.flush()).unwrap());
        let taken = file.allocated_bytes();
        disk.hold_own_space(false);
        (0..4).for_each(|_| block_on(disk.flush()).unwrap());
        assert_eq!(file.allocated_bytes(), taken, "a flush after {flushes_before} gives something back");
        // What is given up from now on is freed as ever.
        forget(&disk, 9 * CLUSTER..10 * CLUSTER).unwrap();
        (0..4).for_each(|_| block_on(disk.flush()).unwrap());
        assert_eq!(file.allocated_bytes(), taken - CLUSTER);
        block_on(disk.close()).unwrap();
        assert_eq!(findings(&world), []);
    }
}

/// A write to half of a subcluster that the leaf lacks, in a cluster of which it has something: another write to the other half may copy this one
/// from below, so both go to the leaf. The parent could not take it here.
#[test]
fn what_is_written_beside_a_sinking_leafs_own_goes_to_the_leaf() {
    let world = World::new();
    world.raw(BASE, &pattern(7, MIB as usize));
    drop(world.files.add(PATH, FILE));
    let new = NewImage { parent: Some(named("base.raw", Format::Raw)), ..NewImage::new(MIB) };
    block_on(Format::Qcow2.create(&world.files.store(PATH), &*world.env, &new)).unwrap();
    let disk = world.open(PATH);
    write(&disk, 2048, &[1; 2048]);
    assert_eq!(own(&disk), vec![2048..4096]);
    let sunk = |broken| {
        let below = disk.with_layers(disk.handles()[1..].to_vec()).unwrap();
        disk.sinking(&Sinking::new(Arc::new(below), broken), Vec::new())
    };
    let bytes = Segments::copied(&[2; 512]);
    let first = Extent::from_range(0..512);
    let to_parent = block_on(sunk(Broken::PartsForUnits).execute(Io::write(first, &bytes, false)));
    assert_eq!(to_parent.unwrap_err().kind(), ErrorKind::ReadOnly);
    block_on(sunk(Broken::Nothing).execute(Io::write(first, &bytes, false))).unwrap();
    assert_eq!(own(&disk), vec![0..4096]);
    assert_eq!(read(&disk, 0..512), [2; 512]);
    // What the leaf has nothing of goes to the parent.
    let other = Extent::from_range(CLUSTER..CLUSTER + 512);
    assert_eq!(
        block_on(sunk(Broken::Nothing).execute(Io::write(other, &bytes, false))).unwrap_err().kind(),
        ErrorKind::ReadOnly
    );
}

#[test]
fn subclusters_are_given_up_one_by_one() {
    let world = World::new();
    world.raw(BASE, &pattern(7, MIB as usize));
    let store = world.files.add(PATH, FILE);
    drop(store);
    let parent = named("base.raw", Format::Raw);
    let new = NewImage { parent: Some(parent), ..NewImage::new(MIB) };
    block_on(Format::Qcow2.create(&world.files.store(PATH), &*world.env, &new)).unwrap();
    let disk = world.open(PATH);
    write(&disk, 0, &pattern(7, MIB as usize)[..CLUSTER as usize]);
    block_on(disk.write_zeroes(Extent::from_range(CLUSTER..CLUSTER + 4096), WriteZeroes::default())).unwrap();
    assert_eq!(own(&disk), vec![0..CLUSTER + 4096], "zeroes hide what lies below");
    assert_eq!(forget(&disk, 512..4096).unwrap_err().kind(), ErrorKind::Unsupported);
    forget(&disk, 2048..8192).unwrap();
    assert_eq!(own(&disk), [0..2048, 8192..CLUSTER + 4096]);
    assert!(is_below(&world, &disk, 2048) && is_below(&world, &disk, 8192 - 512) && !is_below(&world, &disk, 8192));
    forget(&disk, CLUSTER..CLUSTER + 4096).unwrap();
    assert!(is_below(&world, &disk, CLUSTER));
    forget(&disk, 0..2048).unwrap();
    forget(&disk, 8192..CLUSTER).unwrap();
    assert_eq!(own(&disk), []);
    block_on(disk.close()).unwrap();
    assert_eq!(findings(&world), [], "of nothing nothing is left");
}

#[test]
fn what_a_snapshot_shares_is_given_up_and_stays_the_snapshots() {
    let world = World::new();
    world.raw(BASE, &pattern(7, MIB as usize));
    let mut image = Image::usual();
    image.backing("base.raw", Some("raw"));
    let at = image.data(0, 5);
    // As a snapshot leaves it: both have the table and the cluster.
    image.set_l2(0, at);
    image.put64(image.l1_at(), 4 * CLUSTER);
    image.counts = vec![(4, 2), (at / CLUSTER, 2)];
    install(&world, FILE, image);
    let file = world.files.file(PATH);
    let table = file.bytes(4 * CLUSTER, CLUSTER as usize);
    let disk = world.open(PATH);
    forget(&disk, 0..CLUSTER).unwrap();
    assert!(is_below(&world, &disk, 0));
    block_on(disk.close()).unwrap();
    assert_eq!(file.bytes(4 * CLUSTER, CLUSTER as usize), table, "the snapshot's table was changed");
    assert_eq!(file.bytes(at, 512), [5; 512]);
    let count = |cluster: u64| file.bytes(2 * CLUSTER + cluster * 2, 2);
    assert_eq!((count(4), count(at / CLUSTER)), (vec![0, 1], vec![0, 1]));
}

#[test]
fn without_a_parent_nothing_is_given_up() {
    let world = World::new();
    install(&world, FILE, Image::usual());
    let disk = world.open(PATH);
    write(&disk, 0, &[1; 512]);
    assert_eq!(forget(&disk, 0..CLUSTER).unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(read(&disk, 0..512), [1; 512]);
}

fn named(path: &str, format: Format) -> NewParent {
    let name = path.rsplit('/').next().unwrap_or_default().to_owned();
    NewParent { relative_path: path.to_owned(), name, format, identity: None, changed_unix_s: None }
}

/// What the image names as its parent.
fn parent_of(world: &World) -> Option<(String, Option<Format>)> {
    let named = block_on(Format::Qcow2.named_parent(&world.files.store(PATH))).unwrap()?;
    Some((named.names[0].display().to_string(), named.format))
}

/// Parents with names of many lengths, one after the other.
const PARENTS: [(&str, Format); 7] = [
    ("p.qcow2", Format::Qcow2),
    ("a-much-longer-name-of-a-parent-than-before.vhd", Format::Vhd),
    ("../x/p.raw", Format::Raw),
    (
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.qcow2",
        Format::Qcow2,
    ),
    ("b.qcow2", Format::Qcow2),
    (
        "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb.vhd",
        Format::Vhd,
    ),
    ("./with:colon.raw", Format::Raw),
];

#[test]
fn an_image_names_one_parent_after_the_other_and_then_none() {
    for (has_names, has_unknown) in [(false, true), (true, false), (true, true)] {
        let world = World::new();
        world.raw(BASE, &[0; 512]);
        let mut image = Image::usual();
        image.backing("base.raw", Some("raw"));
        if has_names {
            image.extension(0x6803_f857, &[7; 8 * 48]);
        }
        if has_unknown {
            image.extension(UNKNOWN, &[1, 2, 3, 4, 5]);
        }
        install(&world, FILE, image);
        let disk = world.open(PATH);
        write(&disk, 3 * CLUSTER, &[9; 512]);
        let leaf = disk.handles()[0].image();
        for (path, format) in PARENTS {
            let parent = named(path, format);
            leaf.check_name(&parent).unwrap();
            block_on(leaf.set_parent(Some(&parent))).unwrap();
            assert_eq!(parent_of(&world), Some((path.to_owned(), Some(format))));
            assert_eq!(block_on(leaf.parent()).unwrap().unwrap().format, Some(format));
            let found = world.files.file(PATH).bytes(0, CLUSTER as usize);
            let kept = found.windows(16).any(|bytes| bytes == b"\x76\x61\x74\x65\0\0\0\x05\x01\x02\x03\x04\x05\0\0\0");
            assert_eq!(kept, has_unknown, "unknown extensions stay");
        }
        block_on(leaf.set_parent(None)).unwrap();
        block_on(leaf.set_parent(None)).unwrap();
        assert_eq!(parent_of(&world), None);
        let error = block_on(leaf.set_parent(Some(&named("p.raw", Format::Raw)))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        block_on(disk.close()).unwrap();
        assert_eq!(findings(&world), []);
        let disk = world.open(PATH);
        assert_eq!((read(&disk, 3 * CLUSTER..3 * CLUSTER + 512), disk.handles().len()), (vec![9; 512], 1));
    }
}

#[test]
fn each_write_of_a_new_parent_leaves_the_old_one_or_the_new_one() {
    for (path, format) in PARENTS {
        let world = World::new();
        world.raw(BASE, &[0; 512]);
        let mut image = Image::usual();
        image.backing("base.raw", Some("raw"));
        image.extension(0x6803_f857, &[7; 8 * 48]);
        install(&world, FILE, image);
        let file = world.files.file(PATH);
        let disk = world.open(PATH);
        write(&disk, 0, &[1; 512]);
        let leaf = disk.handles()[0].image();
        let old = Some(("base.raw".to_owned(), Some(Format::Raw)));
        // The first sector is not written: whatever came before does no harm.
        file.fails_at_start.store(true, Relaxed);
        assert!(block_on(leaf.set_parent(Some(&named(path, format)))).is_err());
        assert_eq!(parent_of(&world), old);
        file.fails_at_start.store(false, Relaxed);
        let before = file.bytes(0, CLUSTER as usize);
        block_on(leaf.set_parent(Some(&named(path, format)))).unwrap();
        assert_eq!(parent_of(&world), Some((path.to_owned(), Some(format))));
        // All that the call wrote after the name is one sector.
        let after = file.bytes(0, CLUSTER as usize);
        assert_eq!(before[512..], after[512..], "what lies behind the first sector was there already");
    }
}

#[test]
fn a_name_that_finds_no_room_is_refused_and_changes_nothing() {
    let world = World::new();
    world.raw(BASE, &[0; 512]);
    let mut image = Image::new(9, 32 << 10);
    image.backing("base.raw", Some("raw"));
    install(&world, FILE, image);
    let disk = world.open(PATH);
    let leaf = disk.handles()[0].image();
    let long = named(&"x".repeat(400), Format::Raw);
    assert_eq!(leaf.check_name(&long).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(block_on(leaf.set_parent(Some(&long))).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(parent_of(&world), Some(("base.raw".to_owned(), Some(Format::Raw))));
    for len in [300, 1, 200] {
        let name = "y".repeat(len);
        block_on(leaf.set_parent(Some(&named(&name, Format::Qcow2)))).unwrap();
        assert_eq!(parent_of(&world), Some((name, Some(Format::Qcow2))));
    }
}

#[test]
fn an_image_that_does_not_say_the_format_of_its_parent_says_it_from_then_on() {
    let world = World::new();
    world.raw(BASE, &[0; 512]);
    for has_names in [false, true] {
        let mut image = Image::usual();
        image.backing("base.raw", None);
        if has_names {
            image.extension(0x6803_f857, &[7; 8 * 48]);
        }
        install(&world, FILE, image);
        let options =
            spile_image::OpenOptions { parent_format: Some(Format::Raw), ..spile_image::OpenOptions::default() };
        let disk =
            block_on(Graph::open(&world.files, world.env.clone(), std::path::Path::new(PATH), &options)).unwrap();
        block_on(disk.handles()[0].image().set_parent(Some(&named("p.qcow2", Format::Qcow2)))).unwrap();
        assert_eq!(parent_of(&world), Some(("p.qcow2".to_owned(), Some(Format::Qcow2))));
    }
}

#[test]
fn a_disk_grows_in_its_table_and_with_a_new_one() {
    // One L2 table covers 32 KiB with clusters of 512 bytes, and one cluster of the L1 table 2 MiB.
    for (bits, old, new) in [(9, 32 << 10, 1 << 20), (9, 32 << 10, 5 << 20), (16, MIB, 3 * MIB), (16, MIB, 600 * MIB)] {
        let world = World::new();
        install(&world, FILE, Image::new(bits, old));
        let disk = world.open(PATH);
        write(&disk, 512, &pattern(3, 4096));
        block_on(disk.resize(new)).unwrap();
        assert_eq!(disk.size_bytes(), new);
        assert_eq!(read(&disk, 512..4608), pattern(3, 4096));
        assert_eq!(read(&disk, new - 512..new), [0; 512]);
        write(&disk, new - 1024, &pattern(4, 1024));
        write(&disk, old - 512, &pattern(5, 1024));
        assert_eq!(read(&disk, new - 1024..new), pattern(4, 1024));
        // A killed process leaves all of it.
        drop(disk);
        let disk = world.open(PATH);
        assert_eq!(disk.size_bytes(), new);
        assert_eq!(
            (read(&disk, new - 1024..new), read(&disk, old - 512..old + 512)),
            (pattern(4, 1024), pattern(5, 1024))
        );
        (0..3).for_each(|_| block_on(disk.flush()).unwrap());
        block_on(disk.close()).unwrap();
        let bad: Vec<_> =
            findings(&world).into_iter().filter(|(severity, _)| *severity == Severity::Corruption).collect();
        assert_eq!(bad, [], "{bits} {new}");
        if new <= 5 * MIB {
            let mut walk = Walk::new(&world, PATH, new);
            // The process that was killed above has leaked clusters.
            walk.kill();
            (0..30).for_each(|_| walk.step());
            walk.end();
        }
    }
}

#[test]
fn a_resize_that_fails_anywhere_leaves_the_old_size_or_the_new_one() {
    for new in [1 << 20, 5 << 20] {
        for step in 1..40 {
            let world = World::new();
            install(&world, FILE, Image::new(9, 32 << 10));
            let disk = world.open(PATH);
            write(&disk, 512, &pattern(3, 4096));
            block_on(disk.flush()).unwrap();
            world.files.file(PATH).fails_in.store(step, Relaxed);
            let done = block_on(disk.resize(new));
            world.files.file(PATH).fails_in.store(0, Relaxed);
            drop(disk);
            let disk = world.open(PATH);
            let is_new = disk.size_bytes() == new;
            assert!(is_new || (disk.size_bytes() == 32 << 10 && done.is_err()), "step {step}");
            assert_eq!(read(&disk, 512..4608), pattern(3, 4096));
            let end = disk.size_bytes();
            write(&disk, end - 512, &[6; 512]);
            block_on(disk.resize(6 << 20)).unwrap();
            assert_eq!(read(&disk, end - 512..end + 512), [[6; 512], [0; 512]].concat());
            block_on(disk.close()).unwrap();
            let bad = findings(&world).into_iter().find(|(severity, _)| *severity == Severity::Corruption);
            assert_eq!(bad, None, "step {step}");
        }
    }
}

fn resize_unused(world: &World, size_bytes: u64) {
    block_on(world.open(PATH).resize_unused(size_bytes)).unwrap();
    assert_eq!(findings(world), [], "at {size_bytes}");
}

#[test]
fn what_lies_behind_the_end_of_a_shorter_disk_is_gone_when_it_grows_again() {
    for (bits, old) in [(9, 32 << 10), (12, 1 << 20), (16, 1 << 20)] {
        for new in [old / 2 + 512, old / 4, 512, old - 512] {
            let world = World::new();
            install(&world, FILE, Image::new(bits, old));
            let disk = world.open(PATH);
            let all = pattern(3, old as usize);
            write(&disk, 0, &all);
            block_on(disk.close()).unwrap();
            drop(disk);
            let taken = world.files.file(PATH).allocated_bytes();
            resize_unused(&world, new);
            let gone = old.saturating_sub(new.next_multiple_of(1 << bits));
            assert!(gone < 64 << 10 || world.files.file(PATH).allocated_bytes() < taken, "space stays taken");
            assert!(read(&world.open(PATH), 0..new) == all[..new as usize]);
            resize_unused(&world, old);
            let found = read(&world.open(PATH), 0..old);
            assert!(found[..new as usize] == all[..new as usize]);
            assert!(found[new as usize..].iter().all(|byte| *byte == 0), "old bytes come back");
        }
    }
}

#[test]
fn a_disk_becomes_shorter_by_whole_tables() {
    let world = World::new();
    install(&world, FILE, Image::new(9, 32 << 10));
    resize_unused(&world, 1 << 20);
    let disk = world.open(PATH);
    write(&disk, 0, &pattern(3, 1 << 20));
    block_on(disk.close()).unwrap();
    drop(disk);
    resize_unused(&world, 40 << 10);
    resize_unused(&world, 1 << 20);
    let found = read(&world.open(PATH), 0..1 << 20);
    assert!(found[..40 << 10] == pattern(3, 1 << 20)[..40 << 10]);
    assert!(found[40 << 10..].iter().all(|byte| *byte == 0));
}

#[test]
fn entries_that_an_earlier_shrink_has_left_behind_the_end_do_not_come_to_light() {
    let mut image = Image::usual();
    image.data(0, 1);
    image.data(9, 2);
    image.put64(24, 8 * CLUSTER);
    let world = World::new();
    install(&world, FILE, image);
    let disk = world.open(PATH);
    block_on(disk.resize(12 * CLUSTER)).unwrap();
    assert_eq!(read(&disk, 9 * CLUSTER..9 * CLUSTER + 512), [0; 512]);
    block_on(disk.close()).unwrap();
    assert_eq!(findings(&world), []);
}

#[test]
fn a_last_cluster_that_is_compressed_or_shared_is_copied_out_to_be_cut() {
    for is_shared in [false, true] {
        let mut image = Image::usual();
        match is_shared {
            true => {
                let at = image.data(1, 5);
                image.set_l2(1, at);
                image.set_l2(2, at);
                image.counts.push((at / CLUSTER, 2));
            }
            false => drop(image.compressed(1, &[5; CLUSTER as usize], 0)),
        }
        let world = World::new();
        install(&world, FILE, image);
        let end = CLUSTER + 1024;
        block_on(world.open(PATH).resize_unused(end)).unwrap();
        resize_unused(&world, 2 * CLUSTER);
        assert_eq!(read(&world.open(PATH), end - 512..end + 512), [[5; 512], [0; 512]].concat());
    }
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let world = World::new();
    let mut image = Image::usual();
    image.put32(4, 3);
    install(&world, FILE, image);
    let disk = world.open(PATH);
    let kind = |size: u64| block_on(disk.resize(size)).unwrap_err().kind();
    assert_eq!((kind(MIB + 1), kind(1 << 60)), (ErrorKind::InvalidInput, ErrorKind::InvalidInput));
    assert_eq!(kind(MIB - 512), ErrorKind::Unsupported);
    block_on(disk.resize(MIB)).unwrap();
    assert_eq!(disk.size_bytes(), MIB);
}
