//! Snapshots inside qcow2 images: made, applied and deleted in memory, with every kind of image that the format has.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::qcow2_image::{COPIED, Image};
use crate::support::{DEVICE, FILE, Kind, World, block_on, pattern, read, write};
use spile_core::{Disk, Error, ErrorKind, Extent, Result};
use spile_image::check::Severity;
use spile_image::create::{NewImage, NewParent, Options};
use spile_image::formats::qcow2::codec::snapshot::Snapshot;
use spile_image::inner::{InnerChange, InnerSnapshot, InnerWatch, Which};
use spile_image::layer::Layer;
use spile_image::{Format, OpenOptions};

const PATH: &str = "/d/a.qcow2";
const BASE: &str = "/d/base.raw";
const CLUSTER: u64 = 65536;
const NOW: u64 = 1_800_000_000;

/// A kind of image.
#[derive(Clone, Copy, Debug)]
struct Form {
    kind: Kind,
    cluster_bits: u32,
    options: (Option<u32>, Option<u32>, bool),
    has_base: bool,
    size_bytes: u64,
}

const USUAL: Form =
    Form { kind: FILE, cluster_bits: 12, options: (None, None, false), has_base: false, size_bytes: (1 << 20) + 1536 };

/// All widths of refcounts that can count four references to a cluster, both versions, extended L2 entries, devices, children.
fn forms() -> Vec<Form> {
    let mut forms: Vec<_> =
        [4, 8, 16, 32, 64].map(|bits| Form { options: (None, Some(bits), false), ..USUAL }).to_vec();
    forms.push(Form { options: (Some(2), None, false), ..USUAL });
    forms.push(Form { cluster_bits: 9, ..USUAL });
    forms.push(Form { cluster_bits: 16, ..USUAL });
    forms.push(Form { cluster_bits: 16, options: (None, Some(4), true), ..USUAL });
    forms.push(Form { cluster_bits: 14, options: (None, None, true), has_base: true, ..USUAL });
    forms.push(Form { kind: DEVICE, ..USUAL });
    forms.push(Form { has_base: true, ..USUAL });
    forms
}

fn install(form: Form) -> World {
    let (world, file) = (World::new(), |world: &World| world.files.add(PATH, form.kind));
    if form.kind.is_device {
        file(&world).set_len(16 << 20);
    } else {
        file(&world);
    }
    let (version, refcount_bits, extended) = form.options;
    let mut new = NewImage::new(form.size_bytes);
    if form.has_base {
        world.raw(BASE, &pattern(9, form.size_bytes as usize));
        let (name, format) = ("base.raw".to_owned(), Format::Raw);
        new.parent =
            Some(NewParent { relative_path: name.clone(), name, format, identity: None, changed_unix_s: None });
    }
    new.unit_bytes = Some(1 << form.cluster_bits);
    new.options = Options { version, refcount_bits, extended_l2: Some(extended), ..Options::default() };
    block_on(Format::Qcow2.create(&world.files.store(PATH), &*world.env, &new)).unwrap();
    world.files.file(PATH).forget_ways();
    world
}

/// Puts the image that a test has built in its place.
fn installed(image: Image) -> World {
    let world = World::new();
    world.files.add(PATH, FILE).patch(0, &image.finish());
    world
}

/// Opens the disk, has `work` change it, and closes it.
fn with_disk(world: &World, work: impl FnOnce(&spile_image::Graph<crate::support::MemStore>)) {
    let disk = world.open(PATH);
    work(&disk);
    block_on(disk.close()).unwrap();
    drop(disk);
    world.files.file(PATH).forget_ways();
}

fn content(world: &World) -> Vec<u8> {
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let disk = world.try_open(PATH, &options).unwrap();
    read(&disk, 0..disk.size_bytes())
}

fn list(world: &World) -> Result<Vec<InnerSnapshot>> {
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let disk = world.try_open(PATH, &options)?;
    block_on(disk.handles()[0].image().inner_snapshots())
}

fn change(world: &World, change: &InnerChange) -> Result<InnerSnapshot> {
    let disk = world.open(PATH);
    let done = block_on(disk.handles()[0].image().change_inner_unused(change, &()));
    if done.is_err() {
        // Whoever was refused closes the image.
        let _ = block_on(disk.close());
    }
    drop(disk);
    world.files.file(PATH).forget_ways();
    done
}

fn make(world: &World, name: &str) -> Result<InnerSnapshot> {
    change(world, &InnerChange::Create { name: name.to_owned(), now_unix_s: NOW })
}

fn which(text: &str) -> Which {
    Which { text: text.to_owned(), is_id: false }
}

fn apply(world: &World, text: &str) -> Result<InnerSnapshot> {
    change(world, &InnerChange::Apply(which(text)))
}

fn delete(world: &World, text: &str) -> Result<InnerSnapshot> {
    change(world, &InnerChange::Delete(which(text)))
}

/// Nothing is wrong with the image: no leak, no bit that is not as it should be.
#[track_caller]
fn is_sound(world: &World) {
    let report = block_on(Format::Qcow2.check(&world.files.store(PATH), &*world.env)).unwrap();
    assert!(report.findings.is_empty(), "{:#?}", report.findings);
}

#[track_caller]
fn is_not_corrupt(world: &World) {
    let report = block_on(Format::Qcow2.check(&world.files.store(PATH), &*world.env)).unwrap();
    let bad: Vec<_> = report.findings.iter().filter(|found| found.severity == Severity::Corruption).collect();
    assert!(bad.is_empty(), "{bad:#?}");
}

fn bytes(world: &World) -> Vec<u8> {
    let file = world.files.file(PATH);
    file.bytes(0, file.len() as usize)
}

/// Nothing of the image is changed by what is refused.
#[track_caller]
fn leaves(world: &World, kind: ErrorKind, refused: impl FnOnce(&World) -> Result<InnerSnapshot>) -> String {
    let before = bytes(world);
    let error = refused(world).unwrap_err();
    assert_eq!((error.kind(), error.path().is_some()), (kind, true), "{error}");
    assert!(bytes(world) == before, "the image was changed: {error}");
    error.to_string()
}

/// Data in many places: whole clusters, parts, zeroes, discards.
fn scribble(world: &World, seed: u64) {
    with_disk(world, |disk| {
        let size = disk.size_bytes();
        for step in 0..24 {
            let start = (seed * 7919 + step * 104_729) * 512 % (size - 20_480);
            match step % 6 {
                4 => drop(block_on(disk.discard(Extent::from_range(start..start + 20_480)))),
                5 => {
                    let how = spile_core::WriteZeroes { may_unmap: step % 4 == 1, only_if_fast: false };
                    block_on(disk.write_zeroes(Extent::from_range(start..start + 8192), how)).unwrap();
                }
                _ => write(disk, start, &pattern(seed + step, 512 * (1 + step as usize * 3 % 40))),
            }
        }
    });
}

#[test]
fn every_kind_of_image_keeps_goes_back_and_lets_go() {
    for form in forms() {
        let world = install(form);
        let told = |name: &str, id: &str| InnerSnapshot {
            id: id.into(),
            name: name.into(),
            taken_unix_s: NOW as u32,
            size_bytes: Some(form.size_bytes),
            state_bytes: 0,
        };
        let mut states = Vec::new();
        for (seed, name, id) in [(1, "a", "1"), (2, "b", "2")] {
            scribble(&world, seed);
            let before = content(&world);
            assert_eq!(make(&world, name).unwrap(), told(name, id), "{form:?}");
            is_sound(&world);
            assert!(content(&world) == before, "{form:?}: a new snapshot changes the disk");
            states.push(before);
        }
        scribble(&world, 3);
        is_sound(&world);
        for (number, name) in [(0, "a"), (1, "b"), (0, "1")] {
            apply(&world, name).unwrap();
            is_sound(&world);
            assert!(content(&world) == states[number], "{form:?}: {name} is not what it was");
            scribble(&world, 4);
            is_sound(&world);
        }
        let now = content(&world);
        delete(&world, "a").unwrap();
        is_sound(&world);
        assert_eq!(list(&world).unwrap(), [told("b", "2")]);
        apply(&world, "b").unwrap();
        assert!(content(&world) == states[1], "{form:?}: b has lost what it shared with a");
        delete(&world, "b").unwrap();
        is_sound(&world);
        assert!(content(&world) == states[1] && list(&world).unwrap().is_empty() && now != states[1]);
        scribble(&world, 5);
        is_sound(&world);
    }
}

#[test]
fn case_10_narrow_refcounts_refuse_one_snapshot_too_many() {
    for (bits, most) in [(1, 0), (2, 2), (4, 14)] {
        let world = install(Form { options: (None, Some(bits), false), size_bytes: 256 << 10, ..USUAL });
        scribble(&world, 1);
        for number in 0..most {
            make(&world, &number.to_string().repeat(3)).unwrap();
        }
        let before = content(&world);
        let text = leaves(&world, ErrorKind::Unsupported, |world| make(world, "one more"));
        assert!(text.contains(&format!("refcounts of {bits} bits")), "{text}");
        assert!(content(&world) == before);
        if most > 0 {
            // Going back takes one more reference to what the snapshot and the disk share, for a time.
            leaves(&world, ErrorKind::Unsupported, |world| apply(world, "000"));
            delete(&world, "111").unwrap();
            apply(&world, "000").unwrap();
            make(&world, "again").unwrap();
        }
        is_sound(&world);
    }
    let world = install(Form { options: (None, Some(1), false), ..USUAL });
    make(&world, "of nothing").unwrap();
    apply(&world, "of nothing").unwrap();
    is_sound(&world);
}

#[test]
fn case_23_compressed_clusters_are_kept_by_the_clusters_that_they_lie_in() {
    let mut image = Image::usual();
    image.data(0, 5);
    image.compressed(1, &[6; CLUSTER as usize], CLUSTER as usize - 30);
    let (streams, zero) = image.two_streams_and_a_zero_cluster();
    image.counts.push((streams / CLUSTER, 2));
    image.set_l2(4, zero | 1 | COPIED);
    let world = installed(image);
    is_sound(&world);
    let first = content(&world);
    make(&world, "a").unwrap();
    is_sound(&world);
    with_disk(&world, |disk| (0..5).for_each(|cluster| write(disk, cluster * CLUSTER, &[9; 512])));
    is_sound(&world);
    apply(&world, "a").unwrap();
    is_sound(&world);
    assert!(content(&world) == first);
    delete(&world, "a").unwrap();
    is_sound(&world);
    assert!(content(&world) == first);
}

#[test]
fn space_that_only_a_snapshot_has_goes_with_it() {
    for has_base in [false, true] {
        let world = install(Form { has_base, cluster_bits: 16, ..USUAL });
        let file = world.files.file(PATH);
        with_disk(&world, |disk| write(disk, 0, &pattern(1, 1 << 20)));
        let taken = file.allocated_bytes();
        make(&world, "a").unwrap();
        with_disk(&world, |disk| write(disk, 0, &pattern(2, 1 << 20)));
        assert!(file.allocated_bytes() > taken + (15 << 16));
        delete(&world, "a").unwrap();
        assert!(file.allocated_bytes() < taken + (2 << 16), "space stays taken");
        make(&world, "b").unwrap();
        with_disk(&world, |disk| write(disk, 0, &pattern(3, 1 << 20)));
        apply(&world, "b").unwrap();
        assert!(file.allocated_bytes() < taken + (3 << 16), "what the disk held stays taken");
        assert!(content(&world)[..1 << 20] == pattern(2, 1 << 20));
        is_sound(&world);
    }
}

#[test]
fn a_disk_that_was_resized_goes_back_to_its_size() {
    for (bits, sizes) in [(9, [32 << 10, 5 << 20, 16 << 10]), (16, [1 << 20, 600 << 20, 512])] {
        let world = install(Form { cluster_bits: bits, size_bytes: sizes[0], ..USUAL });
        let mut states = Vec::new();
        for (number, size) in sizes.into_iter().enumerate() {
            block_on(world.open(PATH).resize_unused(size)).unwrap();
            world.files.file(PATH).forget_ways();
            with_disk(&world, |disk| {
                write(disk, 0, &pattern(number as u64, 512));
                write(disk, size - 512, &pattern(number as u64 + 1, 512));
            });
            make(&world, ["a", "b", "c"][number]).unwrap();
            let disk = world.open(PATH);
            states.push((size, read(&disk, 0..512), read(&disk, size - 512..size)));
        }
        for number in [0, 1, 2, 0, 2, 1] {
            let applied = apply(&world, ["a", "b", "c"][number]).unwrap();
            is_sound(&world);
            let disk = world.open(PATH);
            let size = disk.size_bytes();
            assert_eq!(applied.size_bytes, Some(size));
            assert_eq!((size, read(&disk, 0..512), read(&disk, size - 512..size)), states[number], "{bits} {number}");
        }
        ["a", "b", "c"].iter().for_each(|name| drop(delete(&world, name).unwrap()));
        is_sound(&world);
    }
}

/// The image of [`Image::usual`] with one snapshot, which has the L1 and L2 tables of the disk, and an entry that `change` may poke.
fn with_snapshot(change: impl FnOnce(&mut Snapshot, &mut Image)) -> World {
    let mut image = Image::usual();
    let data = image.data(0, 5);
    image.set_l2(0, data);
    let l1 = image.append(&(4 * CLUSTER).to_be_bytes());
    image.put64(image.l1_at(), 4 * CLUSTER);
    image.counts = vec![(4, 2), (data / CLUSTER, 2)];
    let mut snapshot = Snapshot {
        l1_offset: l1,
        l1_entries: 1,
        taken_s: 7,
        taken_ns: 8,
        guest_clock_ns: 9,
        short_state_bytes: 0,
        extra: [0u64.to_be_bytes(), (1u64 << 20).to_be_bytes()].concat(),
        id: b"1".to_vec(),
        name: b"a".to_vec(),
    };
    change(&mut snapshot, &mut image);
    let table = image.append(&snapshot.to_bytes());
    image.put32(60, 1);
    image.put64(64, table);
    installed(image)
}

fn entries(world: &World) -> Vec<Snapshot> {
    let file = world.files.file(PATH);
    let word = |at: u64| u64::from_be_bytes(file.bytes(at, 8).try_into().unwrap());
    let (count, mut at) = (word(60) >> 32, word(64));
    let mut found = Vec::new();
    for _ in 0..count {
        let (snapshot, len) = Snapshot::parse(&file.bytes(at, 2048)).unwrap();
        found.push(snapshot);
        at += len as u64;
    }
    found
}

#[test]
fn case_46_a_list_that_cannot_be_read_or_followed_is_refused_and_the_disk_is_readable() {
    let refused = |world: World, kind: ErrorKind| {
        assert_eq!(content(&world)[..512], [5; 512], "the disk is readable");
        for change in [
            InnerChange::Create { name: "b".into(), now_unix_s: 0 },
            InnerChange::Apply(which("a")),
            InnerChange::Delete(which("a")),
        ] {
            leaves(&world, kind, |world| self::change(world, &change));
        }
    };
    let field = |at: u64, value: u32| {
        let world = with_snapshot(|_, _| {});
        world.files.file(PATH).patch(at, &value.to_be_bytes());
        world
    };
    let corrupt = ErrorKind::Corrupt;
    // The count, and the place of the table.
    for world in [field(60, 1 << 31), field(60, 65537), field(64, 1), field(68, 99 << 16), field(68, 512)] {
        assert_eq!(list(&world).unwrap_err().kind(), corrupt);
        refused(world, corrupt);
    }
    // The entry: its L1 table, and its extra data.
    refused(with_snapshot(|snapshot, _| snapshot.l1_entries = 1 << 30), corrupt);
    refused(with_snapshot(|snapshot, _| snapshot.l1_offset += 512), corrupt);
    refused(with_snapshot(|snapshot, _| snapshot.l1_offset = 99 << 20), corrupt);
    refused(with_snapshot(|snapshot, _| snapshot.extra = vec![0; 1032]), corrupt);
    // What the snapshot's tables name.
    refused(with_snapshot(|snapshot, _| snapshot.l1_offset = 3 * CLUSTER), corrupt);
    refused(with_snapshot(|snapshot, image| image.put64(snapshot.l1_offset, CLUSTER)), corrupt);
    refused(with_snapshot(|snapshot, image| image.put64(snapshot.l1_offset, 99 << 20)), corrupt);
    refused(with_snapshot(|_, image| image.counts = vec![(4, 1)]), corrupt);
}

#[test]
fn case_46_names_that_are_no_text_are_told_escaped_and_kept() {
    let world = with_snapshot(|snapshot, _| (snapshot.name, snapshot.id) = (vec![0xff, b'\n'], b"9x".to_vec()));
    let told = &list(&world).unwrap()[0];
    assert_eq!((&told.name[..], &told.id[..]), ("\\xff\\n", "9x"));
    assert_eq!(make(&world, "b").unwrap().id, "1");
    let kept = entries(&world);
    assert_eq!((&kept[0].name[..], &kept[0].id[..], kept.len()), (&[0xff, b'\n'][..], &b"9x"[..], 2));
    delete(&world, "9x").unwrap();
    is_sound(&world);
}

#[test]
fn case_47_entries_without_a_disk_size_are_of_the_disk_of_now_and_say_so_when_they_are_written() {
    for extra in [Vec::new(), vec![0; 8], vec![0; 15]] {
        let world = with_snapshot(|snapshot, _| snapshot.extra = extra.clone());
        assert_eq!(list(&world).unwrap()[0].size_bytes, None);
        apply(&world, "a").unwrap();
        assert_eq!(content(&world).len(), 1 << 20);
        make(&world, "b").unwrap();
        let found = entries(&world);
        let words = [0, 1 << 20, u64::MAX].map(u64::to_be_bytes).concat();
        assert_eq!((&found[0].extra, &found[1].extra), (&words, &words));
        assert_eq!((found[0].taken_s, found[0].taken_ns, found[0].guest_clock_ns), (7, 8, 9));
        is_sound(&world);
    }
    // What is not known is kept.
    let long = [&[0; 8][..], &(1u64 << 20).to_be_bytes(), &[1; 16]].concat();
    let world = with_snapshot(|snapshot, _| snapshot.extra = long.clone());
    make(&world, "b").unwrap();
    assert_eq!(entries(&world)[0].extra, long);
}

#[test]
fn case_47_a_size_that_the_image_cannot_have_is_refused() {
    for size_bytes in [1u64 << 60, 0, 1000] {
        let world = with_snapshot(|snapshot, _| snapshot.extra[8..].copy_from_slice(&size_bytes.to_be_bytes()));
        leaves(&world, ErrorKind::Corrupt, |world| apply(world, "a"));
        delete(&world, "a").unwrap();
        is_sound(&world);
    }
}

/// Nobody can tell whether such space is counted: a count would be too high or too low afterwards.
#[test]
fn case_19_compressed_clusters_that_claim_space_past_the_end_are_refused() {
    let mut image = Image::usual();
    let at = image.compressed(1, &[6; CLUSTER as usize], 100);
    image.set_l2(1, image.compressed_entry(at, 100 << 10));
    let world = installed(image);
    is_sound(&world);
    leaves(&world, ErrorKind::Corrupt, |world| make(world, "a"));
}

#[test]
fn a_snapshot_without_tables_is_one_of_an_empty_disk_wherever_they_would_lie() {
    let world = with_snapshot(|snapshot, image| {
        (snapshot.l1_offset, snapshot.l1_entries) = (1 << 60 | 5, 0);
        image.counts.clear();
        image.put64(image.l1_at(), (4 * CLUSTER) | COPIED);
        image.set_l2(0, (5 * CLUSTER) | COPIED);
    });
    is_not_corrupt(&world);
    apply(&world, "a").unwrap();
    assert!(content(&world).iter().all(|byte| *byte == 0));
    delete(&world, "a").unwrap();
    is_not_corrupt(&world);
}

#[test]
fn a_long_table_is_read_and_written_as_a_whole() {
    let mut image = Image::usual();
    image.data(0, 5);
    let one = |number: u64| Snapshot {
        l1_offset: 0,
        l1_entries: 0,
        taken_s: 7,
        taken_ns: 0,
        guest_clock_ns: 0,
        short_state_bytes: 0,
        extra: [0, 1 << 20, u64::MAX].map(u64::to_be_bytes).concat(),
        id: number.to_string().into_bytes(),
        name: format!("{number:0255}").into_bytes(),
    };
    let table: Vec<u8> = (1..=1000).flat_map(|number| one(number).to_bytes()).collect();
    let at = image.append(&table);
    image.put32(60, 1000);
    image.put64(64, at);
    let world = installed(image);
    is_sound(&world);
    assert_eq!(list(&world).unwrap().len(), 1000);
    assert_eq!(make(&world, "a").unwrap().id, "1001");
    delete(&world, "500").unwrap();
    is_sound(&world);
    let left = list(&world).unwrap();
    assert_eq!((left.len(), &left[999].name[..], &left[499].id[..]), (1000, "a", "501"));
}

/// An image with a snapshot of a machine that ran: its state lies behind the end of the disk, in an L2 table of its own.
fn with_state() -> World {
    let mut image = Image::new(9, 32 << 10);
    let data = image.data(0, 5);
    image.set_l2(0, data);
    let state = image.append(&[7; 512]);
    let state_table = image.append(&(state | COPIED).to_be_bytes());
    let l1 = image.append(&[(4u64 * 512).to_be_bytes(), (state_table | COPIED).to_be_bytes()].concat());
    image.put64(image.l1_at(), 4 * 512);
    image.counts = vec![(4, 2), (data / 512, 2)];
    let extra = [512u64.to_be_bytes(), (32u64 << 10).to_be_bytes(), u64::MAX.to_be_bytes()].concat();
    let snapshot = Snapshot {
        l1_offset: l1,
        l1_entries: 2,
        taken_s: 7,
        taken_ns: 0,
        guest_clock_ns: 0,
        short_state_bytes: 512,
        extra,
        id: b"1".to_vec(),
        name: b"a".to_vec(),
    };
    let table = image.append(&snapshot.to_bytes());
    image.put32(60, 1);
    image.put64(64, table);
    installed(image)
}

#[test]
fn the_state_of_a_machine_stays_its_snapshots_alone() {
    let world = with_state();
    is_sound(&world);
    assert_eq!(list(&world).unwrap()[0].state_bytes, 512);
    with_disk(&world, |disk| write(disk, 0, &[9; 512]));
    assert_eq!(apply(&world, "a").unwrap().state_bytes, 512);
    is_sound(&world);
    assert_eq!((content(&world).len(), &content(&world)[..512]), (32 << 10, &[5; 512][..]));
    assert_eq!(world.files.file(PATH).bytes(36, 4), [0, 0, 0, 1], "the disk has the tables that it needs");
    let taken = entries(&world);
    delete(&world, "a").unwrap();
    is_sound(&world);
    assert_eq!(taken[0].short_state_bytes, 512);
}

#[test]
fn names_are_new_and_found_by_id_or_name() {
    let world = install(USUAL);
    make(&world, "a").unwrap();
    make(&world, "1x").unwrap();
    // The next one has this id.
    make(&world, "4").unwrap();
    make(&world, "b").unwrap();
    leaves(&world, ErrorKind::Exists, |world| make(world, "a"));
    leaves(&world, ErrorKind::Exists, |world| make(world, "2"));
    leaves(&world, ErrorKind::InvalidInput, |world| make(world, ""));
    leaves(&world, ErrorKind::NotFound, |world| delete(world, "c"));
    leaves(&world, ErrorKind::InvalidInput, |world| apply(world, "4"));
    let id = InnerChange::Delete(Which { text: "4".into(), is_id: true });
    assert_eq!(change(&world, &id).unwrap().name, "b");
    assert_eq!(delete(&world, "4").unwrap().id, "3");
    assert_eq!(make(&world, "c").unwrap().id, "3");
    is_sound(&world);
}

#[test]
fn other_formats_and_images_that_are_only_read_are_refused() {
    let world = World::new();
    world.raw("/d/a.raw", &[0; 4096]);
    let disk = world.open("/d/a.raw");
    let leaf = disk.handles()[0].image();
    assert_eq!(block_on(leaf.inner_snapshots()).unwrap_err().kind(), ErrorKind::Unsupported);
    let make = InnerChange::Create { name: "a".into(), now_unix_s: 0 };
    assert_eq!(block_on(leaf.change_inner_unused(&make, &())).unwrap_err().kind(), ErrorKind::Unsupported);
    let world = install(USUAL);
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let disk = world.try_open(PATH, &options).unwrap();
    let refused = block_on(disk.handles()[0].image().change_inner_unused(&make, &())).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnly);
}

#[test]
fn a_device_without_room_is_refused_before_anything_changes() {
    let world = install(Form { kind: DEVICE, ..USUAL });
    let file = world.files.file(PATH);
    with_disk(&world, |disk| write(disk, 0, &pattern(1, 1 << 20)));
    let before = content(&world);
    // The device ends where the image does.
    let used = bytes(&world).iter().rposition(|byte| *byte != 0).unwrap() as u64;
    file.set_len(used.next_multiple_of(1 << 12));
    let error = make(&world, "a").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
    is_sound(&world);
    assert!(content(&world) == before && list(&world).unwrap().is_empty());
}

/// Counts how often it is told that a snapshot is applied, and refuses it or not.
struct Hears {
    told: AtomicU64,
    refuses: bool,
}

impl InnerWatch for Hears {
    fn before_apply(&self) -> Pin<Box<dyn Future<Output = Result<()>> + '_>> {
        self.told.fetch_add(1, Relaxed);
        let refused = || Error::new(ErrorKind::Io, "refused");
        Box::pin(std::future::ready(if self.refuses { Err(refused()) } else { Ok(()) }))
    }
}

#[test]
fn who_watches_hears_of_a_snapshot_only_when_nothing_but_the_storage_can_refuse_it() {
    for (has_room, refuses) in [(false, false), (true, true), (true, false)] {
        let world = install(Form { kind: DEVICE, ..USUAL });
        with_disk(&world, |disk| write(disk, 0, &pattern(1, 1 << 20)));
        let old = content(&world);
        make(&world, "a").unwrap();
        with_disk(&world, |disk| write(disk, 0, &[7; 512]));
        let now = content(&world);
        if !has_room {
            let used = bytes(&world).iter().rposition(|byte| *byte != 0).unwrap() as u64;
            world.files.file(PATH).set_len(used.next_multiple_of(1 << 12));
        }
        let hears = Hears { told: AtomicU64::new(0), refuses };
        let disk = world.open(PATH);
        let done = block_on(disk.handles()[0].image().change_inner_unused(&InnerChange::Apply(which("a")), &hears));
        drop(block_on(disk.close()));
        drop(disk);
        world.files.file(PATH).forget_ways();
        assert_eq!(done.is_ok(), has_room && !refuses);
        assert_eq!(hears.told.load(Relaxed), u64::from(has_room), "{done:?}");
        assert!(content(&world) == if done.is_ok() { old } else { now });
        is_not_corrupt(&world);
    }
}

#[test]
fn tables_find_room_in_a_file_whose_free_clusters_lie_scattered() {
    for (kind, is_refused) in [(FILE, false), (DEVICE, true)] {
        let world = install(Form { kind, cluster_bits: 9, size_bytes: 512 << 10, ..USUAL });
        with_disk(&world, |disk| write(disk, 0, &pattern(1, 512 << 10)));
        if kind.is_device {
            let used = bytes(&world).iter().rposition(|byte| *byte != 0).unwrap() as u64;
            world.files.file(PATH).set_len(used.next_multiple_of(512));
        }
        with_disk(&world, |disk| {
            (0..512 << 10)
                .step_by(1024)
                .for_each(|at| block_on(disk.discard(Extent::from_range(at..at + 512))).unwrap());
        });
        let before = content(&world);
        match make(&world, "a") {
            Ok(_) => assert!(!is_refused),
            Err(error) => assert!(is_refused && error.kind() == ErrorKind::NoSpace, "{error}"),
        }
        is_sound(&world);
        assert!(content(&world) == before);
    }
}

#[test]
fn an_error_at_any_step_leaves_the_disk_as_it_was_or_as_it_is_to_be() {
    let changes = [
        InnerChange::Create { name: "b".into(), now_unix_s: 0 },
        InnerChange::Apply(which("a")),
        InnerChange::Delete(which("a")),
    ];
    for to_do in changes {
        let mut failed = 0;
        for step in 1..400 {
            let world = install(Form { size_bytes: 64 << 10, ..USUAL });
            scribble(&world, 1);
            let kept = content(&world);
            make(&world, "a").unwrap();
            scribble(&world, 2);
            let before = content(&world);
            world.files.file(PATH).fails_in.store(step, Relaxed);
            drop(change(&world, &to_do));
            if world.files.file(PATH).fails_in.swap(0, Relaxed) > 0 {
                break;
            }
            is_not_corrupt(&world);
            let after = content(&world);
            let is_applied = matches!(to_do, InnerChange::Apply(_));
            assert!(after == before || (is_applied && after == kept), "{to_do:?}, step {step}");
            failed += 1;
            // Begun anew, it ends as it should, unless it was done after all.
            match change(&world, &to_do) {
                Ok(_) => {}
                Err(error) => assert!(matches!(error.kind(), ErrorKind::Exists | ErrorKind::NotFound), "{error}"),
            }
            is_not_corrupt(&world);
            if !matches!(to_do, InnerChange::Delete(_)) {
                apply(&world, "a").unwrap();
                assert!(content(&world) == kept, "{to_do:?}, step {step}: the snapshot has changed");
            }
        }
        assert!(failed > 10, "{to_do:?}: {failed} steps failed");
    }
}

#[test]
fn a_snapshot_made_by_a_process_that_was_killed_shares_nothing_that_is_written() {
    let world = install(USUAL);
    scribble(&world, 1);
    make(&world, "a").unwrap();
    let kept = content(&world);
    // Several lives that end without a close.
    for seed in 0..3 {
        let disk = world.open(PATH);
        (0..20).for_each(|step| write(&disk, step * 50_176, &pattern(seed + step, 9216)));
        drop(disk);
        world.files.file(PATH).forget_ways();
    }
    is_not_corrupt(&world);
    apply(&world, "a").unwrap();
    is_not_corrupt(&world);
    assert!(content(&world) == kept);
}
