//! Bitmaps inside qcow2 images: which are in use after a change, what is written back, what stays byte for byte, and what is refused.

#![allow(clippy::single_range_in_vec_init, reason = "some lists of ranges have one")]

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::task::Poll;

use crate::qcow2_image::Image;
use crate::support::{FILE, MemStore, World, block_on, poll_once, read, write};
use spile_core::{Disk as _, ErrorKind, Extent, Segments};
use spile_image::bitmaps::{BitmapState, BrokenBitmaps, ChangedSince, InnerBitmap, KeptBitmaps, LaterRanges};
use spile_image::layer::Layer as _;
use spile_image::{Format, Graph, OpenOptions};

const PATH: &str = "/d/a.qcow2";
const CLUSTER: u64 = 65536;
const BITMAPS: u32 = 0x2385_2875;
const SIZE: u64 = 1 << 20;
const IN_USE: u32 = 1;
const AUTO: u32 = 2;
const EXTRA_COMPATIBLE: u32 = 4;

/// A bitmap for an image of a test.
struct New {
    name: &'static str,
    flags: u32,
    granularity_bits: u8,
    /// The first bytes of its bits.
    bits: &'static [u8],
    extra: &'static [u8],
}

fn new(name: &'static str, flags: u32, bits: &'static [u8]) -> New {
    New { name, flags, granularity_bits: 16, bits, extra: &[] }
}

/// An image with data in its first cluster, and these bitmaps.
fn with(all: &[New], change: impl FnOnce(&mut Image)) -> World {
    let mut image = Image::usual();
    image.data(0, 1);
    let mut directory = Vec::new();
    for bitmap in all {
        let bits = image.append(bitmap.bits);
        let table = image.append(&(if bitmap.bits.is_empty() { 0 } else { bits }).to_be_bytes());
        if bitmap.bits.is_empty() {
            assert_eq!(bits, table, "nothing was appended for the bits");
        }
        directory.extend(table.to_be_bytes());
        directory.extend(1u32.to_be_bytes());
        directory.extend(bitmap.flags.to_be_bytes());
        directory.extend([1, bitmap.granularity_bits, 0, bitmap.name.len() as u8]);
        directory.extend((bitmap.extra.len() as u32).to_be_bytes());
        directory.extend(bitmap.extra);
        directory.extend(bitmap.name.as_bytes());
        directory.resize(directory.len().next_multiple_of(8), 0);
    }
    let at = image.append(&directory);
    let words = [(all.len() as u64) << 32, directory.len() as u64, at];
    image.extension(BITMAPS, &words.map(u64::to_be_bytes).concat());
    image.put64(88, 1);
    change(&mut image);
    let world = World::new();
    world.files.add(PATH, FILE).patch(0, &image.finish());
    world
}

/// What a test says has changed, of each bitmap.
#[derive(Default)]
struct Told(Mutex<Vec<(String, Range<u64>)>>);

impl ChangedSince for Told {
    fn changed<'a>(&'a self, name: &'a str, within: Range<u64>, _: u64) -> LaterRanges<'a> {
        let all = self.0.lock().unwrap().clone();
        let ranges = all
            .into_iter()
            .filter(move |(known, range)| known == name && range.start < within.end && within.start < range.end);
        Box::pin(std::future::ready(Ok(ranges.map(|(_, range)| Extent::from_range(range)).collect())))
    }
}

fn keep(disk: &Graph<MemStore>, names: &[&str], ranges: &[(&str, Range<u64>)]) -> Vec<String> {
    let told = Told(Mutex::new(ranges.iter().map(|(name, range)| ((*name).to_owned(), range.clone())).collect()));
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    let kept = KeptBitmaps { names, changed: Arc::new(told), is_behind: false, broken: BrokenBitmaps::Nothing };
    block_on(disk.handles()[0].image().keep_bitmaps(kept)).unwrap()
}

fn open(world: &World) -> Graph<MemStore> {
    world.try_open(PATH, &OpenOptions::default()).unwrap()
}

fn close(world: &World, disk: Graph<MemStore>) {
    block_on(disk.close()).unwrap();
    drop(disk);
    world.files.file(PATH).forget_ways();
}

fn reading(world: &World) -> Graph<MemStore> {
    world.try_open(PATH, &OpenOptions { read_only: true, ..OpenOptions::default() }).unwrap()
}

/// The bitmaps of the image by their names, if they are consistent.
fn states(world: &World) -> Option<Vec<(String, BitmapState)>> {
    let all = block_on(reading(world).handles()[0].image().bitmaps()).unwrap()?;
    Some(all.into_iter().map(|InnerBitmap { name, state, .. }| (name, state)).collect())
}

fn state(world: &World, name: &str) -> BitmapState {
    states(world).unwrap().into_iter().find(|(known, _)| known == name).unwrap().1
}

/// What is set in a bitmap.
fn set(world: &World, name: &str) -> Vec<Range<u64>> {
    let disk = reading(world);
    let (mut at, mut all) = (0, Vec::new());
    while at < disk.size_bytes() {
        let part = block_on(disk.handles()[0].image().bitmap_part(name, at..disk.size_bytes())).unwrap();
        all.extend(part.ranges.iter().map(|range| range.start()..range.end()));
        at = part.end;
    }
    all
}

fn assert_sound(world: &World) {
    let report = block_on(Format::Qcow2.check(&world.files.store(PATH), &*world.env)).unwrap();
    assert!(report.findings.is_empty(), "{:#?}", report.findings);
}

fn autoclear(world: &World) -> u64 {
    u64::from_be_bytes(world.files.file(PATH).bytes(88, 8).try_into().unwrap())
}

#[test]
fn a_bitmap_that_nobody_keeps_up_is_in_use_from_the_first_change_on() {
    let world = with(&[new("b", AUTO, &[1]), new("off", 0, &[2])], |image| image.put64(88, 1 | 1 << 50));
    let disk = open(&world);
    assert_eq!(state(&world, "b"), BitmapState::Good, "opening changes nothing");
    write(&disk, 0, &[5; 512]);
    assert_eq!((state(&world, "b"), autoclear(&world)), (BitmapState::InUse, 1), "before the end, too");
    close(&world, disk);
    assert_eq!((state(&world, "b"), state(&world, "off")), (BitmapState::InUse, BitmapState::Good));
    assert_eq!(set(&world, "off"), [CLUSTER..2 * CLUSTER]);
    assert_sound(&world);
}

#[test]
fn what_has_changed_is_written_back() {
    let world = with(&[new("b", AUTO, &[1]), new("off", 0, &[2]), new("other", AUTO, &[4])], |_| ());
    for turn in 1..4 {
        let disk = open(&world);
        assert_eq!(keep(&disk, &["b"], &[("b", 0..1), ("b", turn * CLUSTER - 1..turn * CLUSTER + 1)]), ["b"]);
        write(&disk, 0, &[5; 512]);
        assert_eq!(state(&world, "b"), BitmapState::KeptUp);
        close(&world, disk);
        assert_eq!(state(&world, "b"), BitmapState::Good);
        let found = match turn {
            1 | 2 => vec![0..(turn + 1) * CLUSTER],
            _ => vec![0..CLUSTER, (turn - 1) * CLUSTER..(turn + 1) * CLUSTER],
        };
        assert_eq!(set(&world, "b"), found);
        assert_eq!((state(&world, "off"), state(&world, "other")), (BitmapState::Good, BitmapState::KeptUp));
        assert_sound(&world);
    }
}

#[test]
fn nothing_is_written_where_nothing_has_changed() {
    let world = with(&[new("b", AUTO, &[1])], |_| ());
    let before = world.files.file(PATH).bytes(0, world.files.file(PATH).len() as usize);
    let disk = open(&world);
    assert_eq!(keep(&disk, &["b"], &[("b", 0..SIZE)]), ["b"]);
    assert_eq!(read(&disk, 0..512), [1; 512]);
    close(&world, disk);
    assert!(
        world.files.file(PATH).bytes(0, before.len()) == before && world.files.file(PATH).len() == before.len() as u64
    );
}

#[test]
fn one_that_was_left_in_use_is_written_by_who_knows_it_without_another_change() {
    let world = with(&[new("b", AUTO | IN_USE, &[0]), new("u", AUTO | IN_USE, &[0])], |_| ());
    let disk = open(&world);
    assert_eq!(keep(&disk, &["b"], &[("b", 3 * CLUSTER..4 * CLUSTER)]), ["b"]);
    close(&world, disk);
    assert_eq!((state(&world, "b"), state(&world, "u")), (BitmapState::Good, BitmapState::KeptUp));
    assert_eq!(set(&world, "b"), [3 * CLUSTER..4 * CLUSTER]);
    assert_sound(&world);
}

#[test]
fn all_and_nothing_take_no_cluster_and_granularities_round_outwards() {
    for (granularity_bits, range, found) in [
        (16, 0..SIZE, 0..SIZE),
        (9, 513..514, 512..1024),
        (20, 5..6, 0..SIZE),
        (31, 5..6, 0..SIZE),
        (12, SIZE - 1..SIZE, SIZE - 4096..SIZE),
    ] {
        let world = with(&[New { granularity_bits, ..new("b", AUTO, &[1]) }], |_| ());
        let disk = open(&world);
        keep(&disk, &["b"], &[("b", range)]);
        write(&disk, 0, &[5; 512]);
        close(&world, disk);
        assert_eq!(set(&world, "b"), [found], "{granularity_bits}");
        assert_sound(&world);
    }
    let world = with(&[new("b", AUTO, &[1])], |_| ());
    let disk = open(&world);
    keep(&disk, &["b"], &[]);
    write(&disk, 0, &[5; 512]);
    close(&world, disk);
    assert_eq!((set(&world, "b"), state(&world, "b")), (Vec::new(), BitmapState::Good));
}

#[test]
fn extra_data_stay_and_unknown_ones_are_not_kept() {
    let extra = b"data of another program";
    let known = New { extra, ..new("b", AUTO | EXTRA_COMPATIBLE, &[1]) };
    let world = with(&[known, New { extra, ..new("x", AUTO, &[1]) }], |_| ());
    assert_eq!((state(&world, "b"), state(&world, "x")), (BitmapState::Good, BitmapState::Unknown));
    let disk = open(&world);
    keep(&disk, &["b"], &[("b", 0..1)]);
    write(&disk, 0, &[5; 512]);
    close(&world, disk);
    assert_eq!((state(&world, "b"), state(&world, "x")), (BitmapState::Good, BitmapState::Unknown));
    let len = world.files.file(PATH).len() as usize;
    let all = world.files.file(PATH).bytes(0, len);
    assert!(all.windows(extra.len()).filter(|bytes| bytes == extra).count() >= 2);
    assert_sound(&world);
}

#[test]
fn bitmaps_that_share_space_with_something_are_not_kept() {
    // Cluster 5 is the guest's, 6 the bits, 7 the table, 8 the directory.
    let shares = |place: u64, entry: u64| with(&[new("b", AUTO, &[1])], move |image| image.put64(place, entry));
    for (place, entry) in [(7 * CLUSTER, 4 * CLUSTER), (7 * CLUSTER, 8 * CLUSTER), (7 * CLUSTER, 7 * CLUSTER)] {
        let world = shares(place, entry);
        assert!(keep(&open(&world), &["b"], &[]).is_empty(), "{place:#x} {entry:#x}");
    }
    let twice = with(&[new("b", AUTO, &[1])], |image| image.counts.push((6, 2)));
    assert!(keep(&open(&twice), &["b"], &[]).is_empty());
    let past_end = shares(7 * CLUSTER, 99 * CLUSTER);
    assert!(keep(&open(&past_end), &["b"], &[]).is_empty());
    let read = block_on(reading(&past_end).handles()[0].image().bitmap_part("b", 0..SIZE));
    assert_eq!(read.unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn a_directory_that_is_not_sound_is_not_called_consistent_after_a_change() {
    let changes: [fn(&mut Image); 3] = [
        // Unknown flags, a name that is there twice, a table that is too long.
        |image| image.put32(10 * CLUSTER + 12, 64),
        |image| image.put(10 * CLUSTER + 32 + 24, b"b"),
        |image| image.put32(10 * CLUSTER + 8, 9),
    ];
    for change in changes {
        let world = with(&[new("b", AUTO, &[1]), new("c", AUTO, &[1])], change);
        assert_eq!(states(&world), None);
        let disk = open(&world);
        assert!(keep(&disk, &["b"], &[]).is_empty());
        write(&disk, 0, &[5; 512]);
        close(&world, disk);
        assert_eq!(autoclear(&world), 0);
    }
}

#[test]
fn a_bitmap_is_removed_and_the_last_one_takes_the_directory_along() {
    for behind in [false, true] {
        let world = with(&[new("b", AUTO, &[1]), new("c", AUTO, &[2])], |image| {
            if behind {
                image.extension(0x7661_7465, b"kept");
            }
        });
        let disk = open(&world);
        keep(&disk, &["b", "c"], &[("b", 0..1), ("c", CLUSTER..2 * CLUSTER)]);
        let image = disk.handles()[0].image();
        block_on(image.remove_bitmap("b")).unwrap();
        block_on(image.remove_bitmap("b")).unwrap();
        close(&world, disk);
        assert_eq!(states(&world), Some(vec![("c".to_owned(), BitmapState::Good)]));
        assert_eq!(set(&world, "c"), [CLUSTER..2 * CLUSTER]);
        assert_sound(&world);
        let disk = open(&world);
        keep(&disk, &["c"], &[]);
        block_on(disk.handles()[0].image().remove_bitmap("c")).unwrap();
        close(&world, disk);
        assert_eq!((states(&world), autoclear(&world)), (Some(Vec::new()), 0));
        assert_eq!(world.files.file(PATH).bytes(0, 4096).windows(4).any(|bytes| bytes == b"kept"), behind);
        assert_sound(&world);
    }
}

#[test]
fn the_bitmap_gets_the_new_size_and_a_disabled_one_whose_table_does_not_fit_is_in_use() {
    // A cluster of bits of 512 bytes each is for 256 MiB.
    let fine = |name, flags| New { granularity_bits: 9, ..new(name, flags, &[1]) };
    let world = with(&[fine("b", AUTO), fine("off", 0), new("wide", 0, &[1])], |_| ());
    let disk = open(&world);
    keep(&disk, &["b"], &[("b", 0..1), ("b", SIZE..400 << 20)]);
    block_on(disk.resize(400 << 20)).unwrap();
    close(&world, disk);
    assert_eq!((state(&world, "b"), state(&world, "off")), (BitmapState::Good, BitmapState::KeptUp));
    assert_eq!((state(&world, "wide"), set(&world, "b")), (BitmapState::Good, vec![0..512, SIZE..400 << 20]));
    assert_sound(&world);
    let disk = open(&world);
    keep(&disk, &["b"], &[("b", 0..1)]);
    block_on(disk.resize_unused(SIZE)).unwrap();
    world.files.file(PATH).forget_ways();
    assert_eq!((state(&world, "b"), set(&world, "b")), (BitmapState::Good, vec![0..512]));
    assert_sound(&world);
}

#[test]
fn what_cannot_be_told_is_not_saved() {
    let world = with(&[new("b", AUTO, &[1])], |_| ());
    let disk = open(&world);
    struct Nobody;
    impl ChangedSince for Nobody {
        fn changed<'a>(&'a self, _: &'a str, _: Range<u64>, _: u64) -> LaterRanges<'a> {
            Box::pin(std::future::ready(Err(spile_core::Error::new(ErrorKind::NotFound, "nobody knows"))))
        }
    }
    let (names, changed) = (vec!["b".into()], Arc::new(Nobody));
    let kept = KeptBitmaps { names, changed, is_behind: false, broken: BrokenBitmaps::Nothing };
    assert_eq!(block_on(disk.handles()[0].image().keep_bitmaps(kept)).unwrap(), ["b"]);
    write(&disk, 0, &[5; 512]);
    close(&world, disk);
    assert_eq!(state(&world, "b"), BitmapState::KeptUp);
    assert_sound(&world);
}

#[test]
fn who_only_reads_asks_for_the_directory_once() {
    let world = with(&[new("b", AUTO, &[1]), new("off", 0, &[2])], |_| ());
    let disk = reading(&world);
    let ask = |name: &str| {
        world.files.reset_reads();
        let part = block_on(disk.handles()[0].image().bitmap_part(name, 0..SIZE)).unwrap();
        assert_eq!(part.end, SIZE, "{name}");
        world.files.reads().0
    };
    let first = ask("b");
    // The table of the bitmap and its bits, and not the first cluster.
    assert!(ask("off") < first && ask("b") < first && ask("b") <= CLUSTER + 8);
    let missing = block_on(disk.handles()[0].image().bitmap_part("c", 0..SIZE)).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
}

#[test]
fn bitmaps_that_are_behind_are_in_use_before_any_change() {
    for names in [&["b"][..], &[]] {
        let world = with(&[new("b", AUTO, &[1]), new("off", 0, &[1])], |_| ());
        let disk = open(&world);
        let told = Told(Mutex::new(vec![("b".to_owned(), 0..SIZE)]));
        let (names, changed): (Vec<_>, _) = (names.iter().map(|name| (*name).to_owned()).collect(), Arc::new(told));
        let kept = KeptBitmaps { names: names.clone(), changed, is_behind: true, broken: BrokenBitmaps::Nothing };
        let syncs = world.files.file(PATH).syncs.load(Relaxed);
        assert_eq!(block_on(disk.handles()[0].image().keep_bitmaps(kept)).unwrap(), names);
        assert!(world.files.file(PATH).syncs.load(Relaxed) > syncs, "a power cut takes it back");
        let in_use = if names.is_empty() { BitmapState::InUse } else { BitmapState::KeptUp };
        assert_eq!((state(&world, "b"), state(&world, "off")), (in_use, BitmapState::Good));
        close(&world, disk);
        match names.is_empty() {
            true => assert_eq!(state(&world, "b"), BitmapState::InUse),
            false => assert_eq!((state(&world, "b"), set(&world, "b")), (BitmapState::Good, vec![0..SIZE])),
        }
        assert_sound(&world);
    }
}

#[test]
fn an_image_that_somebody_else_writes_to_does_not_say_any_more_that_its_bitmaps_are_kept_up() {
    let world = with(&[new("b", AUTO, &[1])], |_| ());
    let disk = open(&world);
    keep(&disk, &["b"], &[("b", 0..1)]);
    write(&disk, 0, &[5; 512]);
    drop(disk);
    world.files.file(PATH).forget_ways();
    assert_eq!(state(&world, "b"), BitmapState::KeptUp, "after a kill");
    let disk = open(&world);
    write(&disk, 0, &[6; 512]);
    assert_eq!((state(&world, "b"), autoclear(&world)), (BitmapState::InUse, 1));
    close(&world, disk);
    assert_eq!(state(&world, "b"), BitmapState::InUse);
}

#[test]
fn the_mark_is_written_again_after_a_sync_that_failed() {
    let world = with(&[new("b", AUTO, &[1])], |_| ());
    let (file, disk) = (world.files.file(PATH), open(&world));
    // The marks are written, and the sync fails: the page cache has them, and storage may not.
    file.fails_in.store(2, Relaxed);
    let data = Segments::copied(&[5; 512]);
    let write = || block_on(disk.write(Extent::from_range(0..512), &data, false));
    assert!(write().is_err());
    assert_eq!(state(&world, "b"), BitmapState::InUse);
    let before = file.writes.load(Relaxed);
    write().unwrap();
    // The mark and the data.
    assert_eq!(file.writes.load(Relaxed) - before, 2);
}

#[test]
fn a_bitmap_of_so_many_bits_that_qemu_opens_no_image_with_it_stays_in_use() {
    // A cluster of bits of 512 bytes each is for 256 MiB.
    let world = with(&[New { granularity_bits: 9, ..new("b", AUTO, &[1]) }], |_| ());
    let disk = open(&world);
    keep(&disk, &["b"], &[]);
    block_on(disk.resize((2 << 40) + (256 << 20))).unwrap();
    close(&world, disk);
    assert_eq!(state(&world, "b"), BitmapState::KeptUp);
    assert_sound(&world);
}

#[test]
fn bitmaps_of_which_one_shares_its_space_are_marked_by_nobody_and_not_called_consistent() {
    // Cluster 5 is the guest's, 6 to 9 bits and tables, 10 the directory.
    for (place, entry) in [(9 * CLUSTER, 6 * CLUSTER), (9 * CLUSTER, 4 * CLUSTER)] {
        let world = with(&[new("b", AUTO, &[1]), new("off", 0, &[2])], |image| image.put64(place, entry));
        let disk = open(&world);
        assert!(keep(&disk, &["b"], &[]).is_empty());
        write(&disk, 0, &[5; 512]);
        assert_eq!(autoclear(&world), 0);
        assert_eq!(world.files.file(PATH).bytes(10 * CLUSTER + 12, 4), AUTO.to_be_bytes());
    }
}

#[test]
fn no_more_is_read_of_a_bitmap_than_is_asked_for() {
    let world = with(&[New { granularity_bits: 9, ..new("b", AUTO, &[1]) }], |_| ());
    let disk = open(&world);
    keep(&disk, &["b"], &[("b", 0..1)]);
    block_on(disk.resize(1 << 40)).unwrap();
    close(&world, disk);
    let disk = reading(&world);
    let part = |within| block_on(disk.handles()[0].image().bitmap_part("b", within)).unwrap();
    assert_eq!((part(0..512).end, part(1 << 30..(1 << 30) + 1).end), (256 << 20, (1 << 30) + (256 << 20)));
    assert_eq!(part(0..1 << 40).end, 1 << 40);
}

#[test]
fn a_bitmap_in_use_that_cannot_be_kept_is_not_told_as_one_that_can() {
    for (granularity_bits, extra) in [(50, &[][..]), (16, b"unknown")] {
        let world = with(&[New { granularity_bits, extra, ..new("b", AUTO | IN_USE, &[1]) }], |_| ());
        assert_eq!(state(&world, "b"), BitmapState::Unknown, "{granularity_bits}");
        let disk = open(&world);
        keep(&disk, &["b"], &[]);
        close(&world, disk);
    }
}

#[test]
fn a_bitmap_is_removed_while_the_image_gets_another_parent() {
    for names in [&["b", "c"][..], &["b"]] {
        let all: Vec<New> = names.iter().map(|name| new(name, AUTO, &[1])).collect();
        let world = with(&all, |image| {
            image.backing("p.raw", Some("raw"));
            image.extensions.reverse();
        });
        world.raw("/d/p.raw", &[0; 512]);
        let (file, disk) = (world.files.file(PATH), open(&world));
        let leaf = disk.handles()[0].image();
        keep(&disk, names, &[]);
        write(&disk, 0, &[5; 512]);
        file.holds_syncs.store(true, Relaxed);
        let mut removed = Box::pin(leaf.remove_bitmap("b"));
        assert!(poll_once(removed.as_mut()).is_pending());
        // The extension of the bitmaps is at another place behind that.
        let mut named = Box::pin(leaf.set_parent(None));
        assert!(poll_once(named.as_mut()).is_pending());
        file.holds_syncs.store(false, Relaxed);
        let (mut is_removed, mut is_named) = (false, false);
        while !is_removed || !is_named {
            if !is_named && let Poll::Ready(done) = poll_once(named.as_mut()) {
                done.unwrap();
                is_named = true;
            } else if !is_removed && let Poll::Ready(done) = poll_once(removed.as_mut()) {
                done.unwrap();
                is_removed = true;
            }
        }
        drop((removed, named));
        close(&world, disk);
        assert_eq!(states(&world).map(|all| all.len()), Some(names.len() - 1));
        assert_eq!(file.bytes(8, 8), [0; 8], "it has no parent");
        assert_sound(&world);
    }
}

#[test]
fn what_is_kept_up_by_nobody_any_more_stays_in_use() {
    let world = with(&[new("b", AUTO, &[1])], |_| ());
    let disk = open(&world);
    keep(&disk, &["b"], &[("b", 0..1)]);
    write(&disk, 0, &[5; 512]);
    assert!(keep(&disk, &[], &[]).is_empty());
    write(&disk, CLUSTER, &[5; 512]);
    close(&world, disk);
    assert_eq!(state(&world, "b"), BitmapState::KeptUp);
    assert_sound(&world);
}
