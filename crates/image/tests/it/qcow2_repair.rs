//! Repairs of qcow2 images: what is mended, what is left alone, and that no data are lost by it.

use std::path::Path;

use crate::qcow2_image::{COPIED, Image};
use crate::support::{DEVICE, FILE, Kind, World, block_on, read};
use spile_core::{ErrorKind, Files as _, Locator, OpenMode};
use spile_image::check::{Lost, Report, Severity};
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
fn unknown_autoclear_bits_fall_before_a_change_and_only_then() {
    let world = mends(|image| {
        image.put64(88, 1 << 40 | 2);
        image.counts.push((5, 3));
    });
    assert_eq!(header64(&world, 88), 2);
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
        file.fails_in.store(fails_in, std::sync::atomic::Ordering::Relaxed);
        let done = block_on(Format::Qcow2.repair(&world.files.store(PATH), &*world.env, Lost::Keep));
        file.fails_in.store(0, std::sync::atomic::Ordering::Relaxed);
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
