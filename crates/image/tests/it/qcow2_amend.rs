//! Other versions of qcow2 images, and lazy refcounts on and off: what changes, what stays byte for byte, and what is refused.

use std::sync::atomic::Ordering;

use crate::qcow2_image::Image;
use crate::support::{FILE, World, block_on, pattern, read, write};
use spile_core::{Disk as _, Error, ErrorKind};
use spile_image::amend::{Amended, Amendment, Revision};
use spile_image::layer::Layer as _;
use spile_image::{Format, OpenOptions};

const PATH: &str = "/d/a.qcow2";
const BASE: &str = "/d/base.raw";
const CLUSTER: u64 = 65536;
const SIZE: u64 = 1 << 20;
/// An extension that nobody here knows.
const KIND: u32 = 0x7661_7465;
const KEPT: &[u8] = b"kept byte for byte";

/// A child of a raw parent with an extension and some data; the parent has data, too.
fn child(change: impl FnOnce(&mut Image)) -> World {
    let mut image = Image::usual();
    image.data(0, 1);
    image.two_streams_and_a_zero_cluster();
    image.set_l2(4, 0);
    image.counts.extend([(6, 2), (7, 0)]);
    image.backing("base.raw", Some("raw"));
    image.extension(KIND, KEPT);
    change(&mut image);
    world_of(image)
}

fn world_of(image: Image) -> World {
    let world = World::new();
    world.files.add(PATH, FILE).patch(0, &image.finish());
    world.raw(BASE, &pattern(7, SIZE as usize));
    world
}

/// The image in version 2: the header, then extensions and the name of the parent, as QEMU writes them.
fn make_version_2(world: &World) {
    assert_eq!(amended(world, version(2)).unwrap().after, Revision { version: 2, lazy_refcounts: false });
}

fn version(version: u32) -> Amendment {
    Amendment { version: Some(version), ..Amendment::default() }
}

fn lazy(is_on: bool) -> Amendment {
    Amendment { lazy_refcounts: Some(is_on), ..Amendment::default() }
}

fn amended(world: &World, asked: Amendment) -> Result<Amended, Error> {
    let disk = world.try_open(PATH, &OpenOptions::default())?;
    let done = block_on(disk.handles()[0].image().amend(&asked));
    world.files.file(PATH).forget_ways();
    done
}

fn content(world: &World) -> Vec<u8> {
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    read(&world.try_open(PATH, &options).unwrap(), 0..SIZE)
}

fn first_cluster(world: &World) -> Vec<u8> {
    world.files.file(PATH).bytes(0, CLUSTER as usize)
}

fn header32(world: &World, at: usize) -> u32 {
    u32::from_be_bytes(first_cluster(world)[at..at + 4].try_into().unwrap())
}

fn assert_sound(world: &World) {
    let report = block_on(Format::Qcow2.check(&world.files.store(PATH), &*world.env)).unwrap();
    assert!(report.findings.is_empty(), "{:#?}", report.findings);
}

fn has_extension(world: &World) -> bool {
    let extension = [&KIND.to_be_bytes()[..], &(KEPT.len() as u32).to_be_bytes(), KEPT].concat();
    first_cluster(world).windows(extension.len()).any(|bytes| bytes == extension)
}

fn refused(world: &World, asked: Amendment, kind: ErrorKind, names: &[&str]) {
    let before = first_cluster(world);
    let error = amended(world, asked).unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    for name in names {
        assert!(error.to_string().contains(name), "{name}: {error}");
    }
    assert!(error.path().is_some() && error.hint_text().is_some(), "{error}");
    assert!(first_cluster(world) == before, "{names:?}: the image was changed");
}

#[test]
fn an_image_gets_the_older_version_and_the_newer_one_again() {
    let world = child(|image| image.put64(80, 1));
    let (before, rest) = (content(&world), world.files.file(PATH).bytes(CLUSTER, 7 * CLUSTER as usize));
    for (to, header_bytes) in [(2, 0), (3, 112)] {
        let done = amended(&world, version(to)).unwrap();
        assert_eq!((done.before.version, done.after.version), (5 - to, to));
        assert_eq!(header32(&world, 4), to);
        assert!(to == 2 || header32(&world, 100) == header_bytes);
        assert!(content(&world) == before && has_extension(&world), "version {to}");
        assert!(world.files.file(PATH).bytes(CLUSTER, 7 * CLUSTER as usize) == rest, "only the first cluster changes");
        assert_sound(&world);
        let disk = world.open(PATH);
        assert_eq!(disk.layers()[1].path.to_str(), Some(BASE));
        drop(disk);
    }
    let disk = world.open(PATH);
    write(&disk, 3 * CLUSTER, &pattern(9, 4096));
    block_on(disk.close()).unwrap();
    assert_eq!(read(&world.open(PATH), 3 * CLUSTER..3 * CLUSTER + 4096), pattern(9, 4096));
}

#[test]
fn a_name_that_does_not_fit_into_the_first_sector_goes_behind_it() {
    for len in [100, 300, 420, 600, 1023] {
        let name = format!("./{}base.raw", "./".repeat(len / 2 - 5));
        let world = child(|image| {
            image.extensions.clear();
            image.backing(&name, Some("raw"));
        });
        let before = content(&world);
        for to in [2, 3, 2] {
            amended(&world, version(to)).unwrap();
            assert!(content(&world) == before, "{len} bytes, version {to}");
        }
    }
}

#[test]
fn lazy_refcounts_are_one_bit() {
    let world = child(|image| {
        image.put64(80, 1 << 40);
        // Bitmaps stay true, and what is not known is cleared before a change.
        image.put64(88, 1 << 7 | 1);
    });
    let before = first_cluster(&world);
    let done = amended(&world, lazy(true)).unwrap();
    let revision = |lazy_refcounts| Revision { version: 3, lazy_refcounts };
    assert_eq!(done, Amended { before: revision(false), after: revision(true) });
    let mut expected = before.clone();
    expected[80..88].copy_from_slice(&(1u64 << 40 | 1).to_be_bytes());
    expected[88..96].copy_from_slice(&1u64.to_be_bytes());
    assert!(first_cluster(&world) == expected);
    amended(&world, lazy(false)).unwrap();
    expected[87] = 0;
    assert!(first_cluster(&world) == expected);
}

#[test]
fn what_is_so_already_changes_not_a_byte() {
    let world = child(|image| image.put64(88, 1 << 7));
    let file = world.files.file(PATH);
    let before = file.bytes(0, file.len() as usize);
    for asked in [version(3), lazy(false), Amendment::default()] {
        let done = amended(&world, asked).unwrap();
        assert_eq!(done.before, done.after);
        assert!(file.bytes(0, file.len() as usize) == before);
    }
}

#[test]
fn both_at_once_are_one_change_and_version_2_has_no_lazy_refcounts() {
    let world = child(|_| ());
    make_version_2(&world);
    refused(&world, lazy(true), ErrorKind::InvalidInput, &["no lazy refcounts"]);
    let both = Amendment { version: Some(3), lazy_refcounts: Some(true) };
    assert_eq!(amended(&world, both).unwrap().after, Revision { version: 3, lazy_refcounts: true });
    refused(&world, Amendment { version: Some(2), ..both }, ErrorKind::InvalidInput, &["no lazy refcounts"]);
    refused(&world, version(4), ErrorKind::InvalidInput, &["no version 4"]);
    make_version_2(&world);
}

#[test]
fn what_version_2_has_no_place_for_is_named() {
    let unsupported = |names: &[&str], change: fn(&mut Image)| {
        refused(&child(change), version(2), ErrorKind::Unsupported, names);
    };
    unsupported(&["zstd"], |image| {
        image.incompatible(8);
        image.put(104, &[1]);
    });
    unsupported(&["1 clusters that a flag calls zero"], |image| image.set_l2(9, 1));
    unsupported(&["features", "bit 40"], |image| image.put64(80, 1 << 40));
    unsupported(&["fields of its header"], |image| image.put(108, &[1]));
    unsupported(&["1 bitmaps"], |image| {
        // One bitmap of granularity 2^16, with an empty table: flags, type, granularity and the length of its name follow the table's.
        let table = image.append(&[0; 8]);
        let entry = [&table.to_be_bytes()[..], &[0, 0, 0, 1], &[0; 4], &[1, 16, 0, 1], &[0; 4], b"b", &[0; 7]].concat();
        let directory = image.append(&entry);
        let words = [1u64 << 32, entry.len() as u64, directory];
        image.extension(0x2385_2875, &words.map(u64::to_be_bytes).concat());
        image.put64(88, 1);
    });
    let mut narrow = Image::usual();
    narrow.put32(96, 3);
    let world = world_of(narrow);
    block_on(Format::Qcow2.repair(&world.files.store(PATH), &*world.env, spile_image::check::Lost::Keep)).unwrap();
    world.files.file(PATH).forget_ways();
    refused(&world, version(2), ErrorKind::Unsupported, &["refcounts of 8 bits"]);
    let mut extended = Image::usual();
    extended.incompatible(16);
    refused(&world_of(extended), version(2), ErrorKind::Unsupported, &["extended L2"]);
}

#[test]
fn internal_snapshots_keep_the_version_where_that_says_less_of_them() {
    // A snapshot of nothing, with as much extra data as is asked for.
    let with_snapshot = |extra_bytes: u32| {
        child(|image| {
            let l1 = image.append(&[0; 8]);
            let mut entry = vec![0; 40 + extra_bytes as usize + 2];
            entry[..8].copy_from_slice(&l1.to_be_bytes());
            entry[11] = 1;
            (entry[13], entry[15]) = (1, 1);
            entry[36..40].copy_from_slice(&extra_bytes.to_be_bytes());
            entry[40 + extra_bytes as usize..].copy_from_slice(b"1a");
            let at = image.append(&entry);
            image.put32(60, 1);
            image.put64(64, at);
        })
    };
    let world = with_snapshot(16);
    refused(&world, version(2), ErrorKind::Unsupported, &["1 internal snapshots"]);
    for (extra_bytes, is_enough) in [(0, false), (8, false), (16, true), (24, true)] {
        let world = with_snapshot(extra_bytes);
        // As another program has made it: its header is short, and what followed it is moved there.
        let file = world.files.file(PATH);
        let rest = file.bytes(112, 300);
        file.patch(72, &rest);
        let name = u64::from_be_bytes(file.bytes(8, 8).try_into().unwrap());
        file.patch(8, &(name - 40).to_be_bytes());
        file.patch(4, &2u32.to_be_bytes());
        match is_enough {
            true => assert_eq!(amended(&world, version(3)).unwrap().after.version, 3),
            false => refused(&world, version(3), ErrorKind::Unsupported, &["how large their disk was"]),
        }
    }
}

#[test]
fn damage_does_not_become_data_by_another_version() {
    let world = child(|_| ());
    make_version_2(&world);
    // A zero flag, which version 2 does not have.
    world.files.file(PATH).patch(4 * CLUSTER + 9 * 8, &1u64.to_be_bytes());
    refused(&world, version(3), ErrorKind::Corrupt, &["damaged keeps its version"]);
    amended(&world, lazy(false)).unwrap();
}

#[test]
fn extensions_that_would_move_behind_the_first_sector_keep_the_version() {
    let large = |image: &mut Image| image.extension(KIND, &[5; 600]);
    refused(&child(large), version(2), ErrorKind::Unsupported, &["do not fit into its first sector"]);
}

#[test]
fn a_crash_anywhere_leaves_the_old_version_or_the_new_one() {
    let name = format!("./{}base.raw", "./".repeat(230));
    let mut versions = Vec::new();
    for fails_in in 1..20 {
        let world = child(|image| {
            image.extensions.clear();
            image.backing(&name, Some("raw"));
        });
        let before = content(&world);
        let disk = world.open(PATH);
        let file = world.files.file(PATH);
        file.fails_in.store(fails_in, Ordering::Relaxed);
        let done = block_on(disk.handles()[0].image().amend(&version(2)));
        file.fails_in.store(0, Ordering::Relaxed);
        drop(disk);
        file.forget_ways();
        assert!(content(&world) == before, "step {fails_in}");
        assert!(done.is_err() || header32(&world, 4) == 2);
        versions.push(header32(&world, 4));
        assert_sound(&world);
        make_version_2(&world);
        assert!(content(&world) == before, "step {fails_in}");
        if done.is_ok() {
            assert!(versions.contains(&3) && versions.len() > 4, "{versions:?}");
            return;
        }
    }
    panic!("the change did not end");
}

#[test]
fn other_formats_have_nothing_to_amend() {
    let world = child(|_| ());
    let error = block_on(world.open(BASE).handles()[0].image().amend(&version(3))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}
