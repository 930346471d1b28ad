//! Repairs of qcow2 images: what is mended, what is left alone, and that no data are lost by it. An image that is dirty is repaired when it is
//! opened for writing.

use std::future::Future;
use std::path::Path;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Waker};

use crate::qcow2_image::{COPIED, Image};
use crate::support::{DEVICE, FILE, Kind, World, block_on, pattern, read, write};
use spile_core::{Disk as _, ErrorKind, Extent, Files as _, Locator, OpenMode};
use spile_image::check::{Lost, Mend, Report, Severity};
use spile_image::{Format, OpenOptions};

const PATH: &str = "/d/a.qcow2";
const CLUSTER: u64 = 65536;
const L2: u64 = 4 * CLUSTER;
const SIZE: u64 = 1 << 20;

fn image(change: impl FnOnce(&mut Image)) -> Vec<u8> {
    let mut image = Image::usual();
    image.data(0, 1);
    image.data(1, 2);
    change(&mut image);
    image.finish()
}

fn world_of(kind: Kind, bytes: &[u8], len: u64) -> World {
    let world = World::new();
    let file = world.files.add(PATH, kind);
    file.set_len(len);
    file.patch(0, bytes);
    world
}

fn checked(world: &World) -> Report {
    block_on(Format::Qcow2.check(&world.files.store(PATH), &*world.env)).unwrap()
}

fn repaired(world: &World) -> Report {
    let report = block_on(Format::Qcow2.repair(&world.files.store(PATH), &*world.env, Lost::Keep)).unwrap();
    world.files.file(PATH).forget_ways();
    report
}

fn content(world: &World) -> Vec<u8> {
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    read(&world.try_open(PATH, &options).unwrap(), 0..SIZE)
}

/// Repairs the image: it is sound then, and shows what it showed before.
fn mends_on(kind: Kind, bytes: &[u8], len: u64) -> World {
    let world = world_of(kind, bytes, len);
    let (found, before) = (checked(&world), content(&world));
    assert!(found.worst() > Some(Severity::Note), "there is something to mend");
    assert_eq!(repaired(&world).findings.len(), found.findings.len());
    let left = checked(&world);
    assert!(left.findings.is_empty(), "{:#?}", left.findings);
    assert!(content(&world) == before, "the repair changed what the disk shows");
    world
}

fn mends(change: impl FnOnce(&mut Image)) -> World {
    let bytes = image(change);
    mends_on(FILE, &bytes, bytes.len() as u64)
}

/// A repair changes not a byte.
fn leaves(change: impl FnOnce(&mut Image)) {
    let bytes = image(change);
    let world = world_of(FILE, &bytes, bytes.len() as u64);
    let report = repaired(&world);
    assert_eq!(report.worst(), Some(Severity::Corruption));
    let file = world.files.file(PATH);
    assert_eq!(file.len(), bytes.len() as u64);
    assert!(file.bytes(0, bytes.len()) == bytes, "the repair changed the image");
}

fn header64(world: &World, at: u64) -> u64 {
    u64::from_be_bytes(world.files.file(PATH).bytes(at, 8).try_into().unwrap())
}

#[test]
fn copied_is_set_where_the_count_is_1() {
    let world = mends(|image| {
        image.set_l2(0, image.get64(image.l2_at(0)) & !COPIED);
        image.put64(image.l1_at(), 4 * CLUSTER);
    });
    assert_eq!((header64(&world, L2) & COPIED, header64(&world, 3 * CLUSTER) & COPIED), (COPIED, COPIED));
}

#[test]
fn case_25_two_entries_for_one_cluster_lose_copied_and_keep_their_data() {
    let world = mends(|image| image.set_l2(9, (5 * CLUSTER) | COPIED));
    assert_eq!((header64(&world, L2) & COPIED, header64(&world, L2 + 72) & COPIED), (0, 0));
    mends(|image| image.set_l2(0, 5 * CLUSTER));
}

#[test]
fn case_34_refcount_blocks_that_cannot_be_are_made_anew() {
    for entry in [99 * CLUSTER, 2 * CLUSTER, CLUSTER, 77, 5 * CLUSTER, L2, 3 * CLUSTER] {
        mends(|image| image.put64(CLUSTER + 8, entry));
        // The image has its block at cluster 2.
        if entry != 2 * CLUSTER {
            mends(|image| image.put64(CLUSTER, entry));
        }
    }
    mends(|image| image.put64(CLUSTER, 0));
    mends(|image| image.put32(56, 0));
    mends(|image| image.put64(48, 99 * CLUSTER));
    mends(|image| image.put64(48, 6 * CLUSTER));
}

#[test]
fn case_35_clusters_in_use_are_counted_again() {
    mends(|image| image.counts.extend([(6, 0), (4, 0), (0, 0)]));
    mends(|image| image.counts.extend([(6, 7), (5, 0)]));
}

#[test]
fn case_36_leaked_clusters_are_freed() {
    let world = mends(|image| {
        image.append(&[1; 3 * CLUSTER as usize]);
    });
    assert_eq!(checked(&world).leaked_bytes, 0);
}

#[test]
fn every_kind_of_reference_keeps_its_count() {
    let bytes = image(|image| {
        image.two_streams_and_a_zero_cluster();
    });
    let world = mends_on(FILE, &bytes, bytes.len() as u64);
    let table = header64(&world, 48);
    let block = header64(&world, table);
    let count = |cluster: u64| world.files.file(PATH).bytes(block + cluster * 2, 2)[1];
    assert_eq!([0, 1, 2, 3, 4, 5, 6, 7, 8].map(count), [1, 0, 0, 1, 1, 1, 1, 2, 1]);
}

#[test]
fn flags_fall_when_nothing_is_wrong_any_more() {
    let world = world_of(FILE, &image(|image| image.incompatible(1)), 7 * CLUSTER);
    let table = header64(&world, 48);
    repaired(&world);
    assert!(checked(&world).findings.is_empty());
    assert_eq!(header64(&world, 48), table, "sound refcounts are not made anew");
    mends(|image| image.incompatible(2));
    mends(|image| {
        image.incompatible(3);
        image.counts.push((5, 3));
    });
    leaves(|image| {
        image.incompatible(2);
        image.set_l2(3, 3 * CLUSTER);
    });
}

#[test]
fn what_means_nothing_in_a_header_is_a_note_and_is_cleared() {
    for (at, odd) in [(88, 2), (16, 23 << 32)] {
        let world = world_of(FILE, &image(|image| image.put64(at, image.get64(at) | odd)), 7 * CLUSTER);
        let found = checked(&world).findings;
        assert_eq!((found.len(), found[0].severity, found[0].mend), (1, Severity::Note, Mend::Repair), "{found:?}");
        let (table, before) = (header64(&world, 48), header64(&world, at));
        repaired(&world);
        assert!(checked(&world).findings.is_empty());
        assert_eq!((header64(&world, 48), header64(&world, at)), (table, before & !odd));
    }
}

#[test]
fn counts_that_are_only_too_high_are_lowered_where_they_are() {
    // Two clusters that nothing refers to, at the end, as a process that was killed leaves them.
    let world = mends(|image| {
        image.append(&[9]);
        image.append(&[9]);
    });
    assert_eq!(header64(&world, 48), CLUSTER, "new refcounts need space");
    assert_eq!(world.files.file(PATH).len(), 7 * CLUSTER, "the unused end is given back");
}

#[test]
fn unknown_autoclear_bits_fall_before_a_change_and_only_then() {
    let world = mends(|image| {
        image.put64(88, 1 << 40 | 1);
        image.counts.push((5, 3));
    });
    assert_eq!(header64(&world, 88), 1);
    let world = world_of(FILE, &image(|image| image.put64(88, 1 << 40)), 7 * CLUSTER);
    repaired(&world);
    assert_eq!(header64(&world, 88), 1 << 40);
}

#[test]
fn what_a_person_has_to_decide_is_left_alone() {
    leaves(|image| image.set_l2(3, 3 * CLUSTER));
    leaves(|image| image.set_l2(3, L2 | COPIED));
    leaves(|image| image.set_l2(3, (99 * CLUSTER) | COPIED));
    leaves(|image| image.set_l2(3, 5 * CLUSTER + 512));
    leaves(|image| image.put64(3 * CLUSTER, (99 * CLUSTER) | COPIED));
    leaves(|image| {
        image.put32(60, 1);
        image.put64(64, 99 * CLUSTER);
        image.counts.push((5, 3));
    });
}

#[test]
fn a_count_that_does_not_fit_its_width_is_left_alone() {
    let mut image = Image::usual();
    image.data(0, 1);
    image.set_l2(1, 5 * CLUSTER);
    image.put32(96, 0);
    let bytes = image.finish();
    let world = world_of(FILE, &bytes, bytes.len() as u64);
    repaired(&world);
    assert!(world.files.file(PATH).bytes(0, bytes.len()) == bytes);
}

#[test]
fn on_a_device_the_new_refcounts_lie_behind_what_is_in_use() {
    let bytes = image(|image| image.counts.push((6, 0)));
    let world = mends_on(DEVICE, &bytes, 64 * CLUSTER);
    assert_eq!(header64(&world, 48), 8 * CLUSTER);
    let world = world_of(DEVICE, &bytes, 8 * CLUSTER);
    let error = block_on(Format::Qcow2.repair(&world.files.store(PATH), &*world.env, Lost::Keep)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(
        world.files.file(PATH).bytes(0, bytes.len() - 2 * CLUSTER as usize)[..4 * CLUSTER as usize]
            == bytes[..4 * CLUSTER as usize]
    );
}

#[test]
fn a_power_cut_anywhere_leaves_an_image_that_can_be_mended_and_shows_the_same() {
    let bytes = image(|image| {
        image.set_l2(9, (5 * CLUSTER) | COPIED);
        image.counts.extend([(6, 0), (4, 5)]);
        image.incompatible(1);
    });
    for fails_in in 1..40 {
        let world = world_of(FILE, &bytes, bytes.len() as u64);
        let before = content(&world);
        let file = world.files.file(PATH);
        file.fails_in.store(fails_in, Ordering::Relaxed);
        let done = block_on(Format::Qcow2.repair(&world.files.store(PATH), &*world.env, Lost::Keep));
        file.fails_in.store(0, Ordering::Relaxed);
        file.forget_ways();
        assert!(content(&world) == before, "step {fails_in}");
        repaired(&world);
        assert!(checked(&world).findings.is_empty() && content(&world) == before, "step {fails_in}");
        if done.is_ok() {
            assert!(fails_in > 5, "the steps were tried");
            return;
        }
    }
    panic!("the repair did not end");
}

#[test]
fn a_store_that_is_read_only_is_not_repaired() {
    let world = world_of(FILE, &image(|_| ()), 7 * CLUSTER);
    let store = block_on(world.files.open(&Locator::from(Path::new(PATH)), OpenMode::ReadOnly)).unwrap();
    let error = block_on(Format::Qcow2.repair(&store, &*world.env, Lost::Keep)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnly);
}

// Opening for writing.

/// What counts in an image whose last writer was killed: these counts are too low, too high, and those of a table.
fn make_dirty(image: &mut Image) {
    image.two_streams_and_a_zero_cluster();
    image.counts.extend([(5, 0), (6, 3), (4, 0), (7, 1)]);
    image.incompatible(1);
}

fn is_dirty(world: &World) -> bool {
    header64(world, 72) & 1 == 1
}

/// Every other cluster gets new data, so that any cluster that is thought free is used.
fn fill(world: &World) {
    let disk = world.open(PATH);
    for cluster in (0..SIZE / CLUSTER).filter(|cluster| cluster % 2 == 1) {
        write(&disk, cluster * CLUSTER + 512, &pattern(cluster, 1024));
    }
    block_on(disk.close()).unwrap();
}

/// What the disk shows after [`fill`] that showed `before`.
fn filled(mut before: Vec<u8>) -> Vec<u8> {
    for cluster in (0..SIZE / CLUSTER).filter(|cluster| cluster % 2 == 1) {
        let at = (cluster * CLUSTER + 512) as usize;
        before[at..at + 1024].copy_from_slice(&pattern(cluster, 1024));
    }
    before
}

#[test]
fn case_15_a_dirty_image_with_counts_wrong_in_both_directions_is_written() {
    for (kind, len) in [(FILE, 9), (DEVICE, 64)] {
        let world = world_of(kind, &image(make_dirty), len * CLUSTER);
        let (found, before) = (checked(&world), content(&world));
        let is_found = |severity| found.findings.iter().any(|found| found.severity == severity);
        assert!(is_found(Severity::Leak) && is_found(Severity::Corruption), "{:#?}", found.findings);
        drop(world.open(PATH));
        assert!(checked(&world).findings.is_empty() && content(&world) == before);
        world.files.file(PATH).forget_ways();
        fill(&world);
        assert!(content(&world) == filled(before));
        assert!(checked(&world).findings.is_empty());
    }
}

#[test]
fn case_15_new_refcounts_are_bounded_by_the_file_and_not_by_the_disk() {
    let bytes = image(|image| {
        make_dirty(image);
        // As much as one cluster of L1 entries can name: 4 TiB.
        image.put64(24, 4 << 40);
        image.put32(36, 8192);
    });
    let world = world_of(FILE, &bytes, 9 * CLUSTER);
    drop(world.open(PATH));
    assert!(!is_dirty(&world));
    assert_eq!(world.files.file(PATH).len(), 11 * CLUSTER, "a refcount block and a table");
}

#[test]
fn case_16_the_repair_alone_clears_the_mark_and_nothing_sets_it_again() {
    let bytes = image(|image| {
        make_dirty(image);
        image.put64(80, 1);
    });
    let world = world_of(FILE, &bytes, 9 * CLUSTER);
    let disk = world.open(PATH);
    assert!(!is_dirty(&world), "before the first change");
    world.files.file(PATH).forget_ways();
    for cluster in 0..8 {
        write(&disk, cluster * CLUSTER, &pattern(cluster, 4096));
        assert!(!is_dirty(&world) && checked(&world).worst() <= Some(Severity::Leak), "a kill after write {cluster}");
    }
    block_on(disk.discard(Extent::from_range(0..CLUSTER))).unwrap();
    block_on(disk.flush()).unwrap();
    assert!(!is_dirty(&world));
    block_on(disk.close()).unwrap();
    assert_eq!((is_dirty(&world), header64(&world, 80)), (false, 1), "refcounts may lag, for others");
    assert!(checked(&world).findings.is_empty());
}

#[test]
fn a_dirty_image_that_is_to_keep_its_refcounts_is_refused() {
    let bytes = image(make_dirty);
    let world = world_of(FILE, &bytes, 9 * CLUSTER);
    let options = OpenOptions { keeps_dirty: true, ..OpenOptions::default() };
    let error = world.refused_with(PATH, &options, ErrorKind::Unsupported, "is marked dirty");
    assert!(
        spile_image::formats::qcow2::is_dirty(&error) && error.hint_text().unwrap().contains("--repair"),
        "{error}"
    );
    assert!(world.files.file(PATH).bytes(0, bytes.len()) == bytes);
}

/// A block of refcounts that are all zero is a hole.
#[test]
fn new_refcounts_of_a_long_file_with_little_in_it_take_little_space() {
    let bytes = image(make_dirty);
    let world = world_of(FILE, &bytes, 1 << 40);
    drop(world.open(PATH));
    assert!(world.files.file(PATH).allocated_bytes() < 4 << 20, "{}", world.files.file(PATH).allocated_bytes());
    assert!(checked(&world).findings.is_empty());
}

#[test]
fn a_dirty_image_that_is_only_read_is_not_changed_by_a_byte() {
    let bytes = image(make_dirty);
    let world = world_of(FILE, &bytes, 9 * CLUSTER);
    let file = world.files.file(PATH);
    let same = || file.len() == 9 * CLUSTER && file.bytes(0, bytes.len()) == bytes;
    content(&world);
    block_on(spile_image::describe(&world.files, world.env.clone(), Path::new(PATH), None)).unwrap();
    assert!(same(), "by a reader");
    let mut child = Image::usual();
    child.backing("a.qcow2", Some("qcow2"));
    world.files.add("/d/child.qcow2", FILE).patch(0, &child.finish());
    let disk = world.open("/d/child.qcow2");
    write(&disk, 512, &[7; 512]);
    block_on(disk.close()).unwrap();
    assert!(same(), "by a child that is written");
}

#[test]
fn a_dirty_image_that_contradicts_itself_is_refused_and_can_be_read() {
    for (change, names) in [
        ((|image| image.set_l2(3, 3 * CLUSTER)) as fn(&mut Image), "guest data overlaps"),
        (|image| image.set_l2(3, (99 * CLUSTER) | COPIED), "past the end of the file"),
        (|image| image.put32(96, 0), "cannot count the references"),
    ] {
        let bytes = image(|image| {
            make_dirty(image);
            change(image);
        });
        let world = world_of(FILE, &bytes, 9 * CLUSTER);
        let error = world.refused(PATH, ErrorKind::Corrupt, "its refcounts cannot be made anew");
        assert!(error.hint_text().unwrap().contains("spile check"), "{error}");
        assert!(error.to_string().contains(names), "{error}");
        assert!(world.files.file(PATH).bytes(0, bytes.len()) == bytes, "{names}");
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        assert_eq!(read(&world.try_open(PATH, &options).unwrap(), 0..512), [1; 512]);
    }
}

#[test]
fn a_dirty_image_on_a_full_device_is_refused_and_stays_as_it_is() {
    let bytes = image(make_dirty);
    let world = world_of(DEVICE, &bytes, 10 * CLUSTER);
    world.refused(PATH, ErrorKind::NoSpace, "no room for new refcounts");
    assert!(world.files.file(PATH).bytes(0, bytes.len()) == bytes);
}

#[test]
fn a_dirty_image_survives_two_crashes_in_a_row_while_it_is_opened() {
    let bytes = image(make_dirty);
    let crash = |world: &World, fails_in: u64| {
        let file = world.files.file(PATH);
        file.fails_in.store(fails_in, Ordering::Relaxed);
        let is_open = world.try_open(PATH, &OpenOptions::default()).is_ok();
        file.fails_in.store(0, Ordering::Relaxed);
        file.forget_ways();
        is_open
    };
    let mut steps = 0;
    for first in 1..40 {
        for second in 1..40 {
            let world = world_of(FILE, &bytes, 9 * CLUSTER);
            let before = content(&world);
            let was_open = crash(&world, first);
            assert!(content(&world) == before && (was_open || is_dirty(&world) || first > 7), "step {first}");
            let is_last = crash(&world, second);
            assert!(content(&world) == before, "steps {first} and {second}");
            fill(&world);
            assert!(content(&world) == filled(before) && checked(&world).findings.is_empty());
            steps += 1;
            if is_last {
                break;
            }
        }
    }
    assert!(steps > 60, "{steps}");
}

/// A server counts while it serves other disks.
#[test]
fn other_requests_run_while_a_large_image_is_counted() {
    // Its only L2 table has 256 Ki entries.
    let mut image = Image::new(21, 1 << 30);
    image.incompatible(1);
    let bytes = image.finish();
    let world = world_of(FILE, &bytes, bytes.len() as u64);
    let (path, options) = (Path::new(PATH), OpenOptions::default());
    let mut opening = pin!(spile_image::Graph::open(&world.files, world.env.clone(), path, &options));
    let mut turns = 0;
    while opening.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
        turns += 1;
    }
    assert!(turns >= 2 * (256 << 10) / 4096, "{turns} turns");
}
