//! New qcow2 images: empty ones and ones that are filled, on files and devices, with every option.

use std::collections::BTreeMap;

use crate::support::{DEVICE, FILE, Kind, World, block_on, read};
use proptest::prelude::*;
use spile_core::{ErrorKind, Segments};
use spile_image::create::{Compression, NewImage, NewParent, Options};
use spile_image::formats::qcow2::codec::compress::compress;
use spile_image::formats::qcow2::fill::{Content, Filler};
use spile_image::{Format, OpenOptions};

const PATH: &str = "/d/a.qcow2";

fn new(size_bytes: u64, cluster_bits: u32, options: Options) -> NewImage {
    NewImage { unit_bytes: Some(1 << cluster_bits), options, ..NewImage::new(size_bytes) }
}

fn create(world: &World, new: &NewImage) -> spile_core::Result<()> {
    block_on(Format::Qcow2.create(&world.files.store(PATH), &*world.env, new))
}

#[track_caller]
fn is_sound(world: &World) {
    world.files.file(PATH).forget_ways();
    let report = block_on(Format::Qcow2.check(&world.files.store(PATH), &*world.env)).unwrap();
    assert!(report.findings.is_empty(), "{:#?}", report.findings);
}

fn content(world: &World, size_bytes: u64) -> Vec<u8> {
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    read(&world.try_open(PATH, &options).unwrap(), 0..size_bytes)
}

fn device(world: &World, len: u64) {
    let file = world.files.add(PATH, DEVICE);
    file.set_len(len);
    file.patch(0, &vec![0xaa; len as usize]);
}

#[test]
fn empty_images_are_sound_on_files_and_devices() {
    for bits in [9, 12, 14, 16, 21] {
        for places_for_all in [false, true] {
            for extended in [false, true].into_iter().filter(|extended| !extended || bits >= 14) {
                let options = Options { places_for_all, extended_l2: Some(extended), ..Options::default() };
                let new = new((3 << 20) + 512, bits, options);
                let (on_file, on_device) = (World::new(), World::new());
                on_file.files.add(PATH, FILE);
                device(&on_device, 32 << 20);
                for world in [on_file, on_device] {
                    create(&world, &new).unwrap();
                    is_sound(&world);
                    assert!(content(&world, new.size_bytes).iter().all(|byte| *byte == 0), "{bits} {places_for_all}");
                }
            }
        }
    }
}

#[test]
fn a_file_that_holds_something_and_a_small_device_are_refused() {
    let world = World::new();
    world.files.add(PATH, FILE).set_len(1);
    assert_eq!(create(&world, &NewImage::new(1 << 20)).unwrap_err().kind(), ErrorKind::Exists);
    let world = World::new();
    device(&world, 128 << 10);
    assert_eq!(create(&world, &NewImage::new(1 << 20)).unwrap_err().kind(), ErrorKind::NoSpace);
}

#[test]
fn the_largest_disks_can_be_made_and_one_sector_more_cannot() {
    for (bits, extended, most) in
        [(9, false, 1u64 << 37), (16, false, 1 << 51), (16, true, 1 << 50), (21, false, 1 << 61)]
    {
        let options = Options { extended_l2: Some(extended), ..Options::default() };
        let world = World::new();
        world.files.add(PATH, FILE);
        let error = create(&world, &new(most + 512, bits, options.clone())).unwrap_err();
        assert!(
            error.kind() == ErrorKind::InvalidInput && error.to_string().contains(&format!("{most} bytes")),
            "{error}"
        );
        assert_eq!(world.files.file(PATH).len(), 0);
        if bits > 9 {
            create(&world, &new(most, bits, options)).unwrap();
            is_sound(&world);
        }
    }
}

#[test]
fn the_header_is_written_last() {
    for fails_in in 1..100 {
        let world = World::new();
        let file = world.files.add(PATH, FILE);
        file.fails_in.store(fails_in, std::sync::atomic::Ordering::Relaxed);
        match create(&world, &NewImage::new(1 << 20)) {
            Ok(()) => {
                assert!(fails_in > 3);
                return;
            }
            Err(_) if file.len() >= 4 && file.bytes(0, 4) == *b"QFI\xfb" => is_sound(&world),
            Err(_) => {}
        }
    }
    panic!("it was not made");
}

fn child(relative_path: &str, bits: u32) -> spile_core::Result<World> {
    let (name, format) = ("p.vhd".to_owned(), Format::Vhd);
    let parent = NewParent { relative_path: relative_path.into(), name, format, identity: None, changed_unix_s: None };
    let world = World::new();
    world.files.add(PATH, FILE);
    create(&world, &NewImage { parent: Some(parent), ..new(1 << 20, bits, Options::default()) }).map(|()| world)
}

#[test]
fn a_child_names_its_parent_and_the_format() {
    let world = child("x:y/p.vhd", 16).unwrap();
    let head = world.files.file(PATH).bytes(0, 1024);
    let text = String::from_utf8_lossy(&head).into_owned();
    assert!(text.contains("./x:y/p.vhd") && text.contains("vpc") && text.contains("extended L2 entries"));
    assert_eq!(head[79] & 16, 16, "extended L2 entries are usual for a child");
    assert_eq!(
        child("p.vhd", 12).unwrap().files.file(PATH).bytes(79, 1)[0] & 16,
        0,
        "there are none with small clusters"
    );
    // The names of features leave room for the parent's.
    let long = "p".repeat(370);
    let text = child(&long, 9).unwrap().files.file(PATH).bytes(0, 512);
    assert!(!String::from_utf8_lossy(&text).contains("dirty bit") && String::from_utf8_lossy(&text).contains(&long));
    for (path, bits) in [("p".repeat(400), 9), ("p".repeat(1024), 16), (String::new(), 16)] {
        assert_eq!(child(&path, bits).err().unwrap().kind(), ErrorKind::InvalidInput);
    }
}

/// Fills an image with clusters and returns what the disk has to show.
fn fill(world: &World, new: &NewImage, clusters: &BTreeMap<u64, (u8, bool)>, compression: Compression) -> Vec<u8> {
    let cluster = u64::from(new.unit_bytes.unwrap()) as usize;
    let mut expected = vec![0; new.size_bytes.next_multiple_of(cluster as u64) as usize];
    block_on(async {
        let mut filler = Filler::begin(world.files.store(PATH), new).await.unwrap();
        for (number, (byte, compressed)) in clusters {
            let bytes = &mut expected[*number as usize * cluster..][..cluster];
            // A part is zero, so that subclusters are left out; with odd bytes, what is left compresses badly.
            for (at, place) in bytes.iter_mut().enumerate().skip(cluster / 4) {
                *place = if byte % 2 == 0 { *byte } else { ((at as u64 * 0x9e37_79b9) >> 7) as u8 };
            }
            let short = compressed.then(|| compress(compression, bytes)).flatten();
            let content = short.map_or_else(|| Content::Plain(Segments::copied(bytes)), Content::Compressed);
            filler.put(*number, content).await.unwrap();
        }
        filler.finish().await.unwrap();
    });
    expected.truncate(new.size_bytes as usize);
    expected
}

#[test]
fn filling_ends_with_an_image_or_with_none() {
    let new = new(1 << 20, 12, Options::default());
    let clusters: BTreeMap<u64, (u8, bool)> = (0..200).map(|n| (n, (n as u8, n % 3 == 0))).collect();
    for fails_in in 1..100 {
        let world = World::new();
        let file = world.files.add(PATH, FILE);
        file.fails_in.store(fails_in, std::sync::atomic::Ordering::Relaxed);
        let done: spile_core::Result<()> = block_on(async {
            let mut filler = Filler::begin(world.files.store(PATH), &new).await?;
            for number in clusters.keys() {
                filler.put(*number, Content::Plain(Segments::copied(&[7; 4096]))).await?;
            }
            filler.finish().await
        });
        if file.len() >= 4 && file.bytes(0, 4) == *b"QFI\xfb" {
            is_sound(&world);
        } else {
            assert!(done.is_err());
        }
        if done.is_ok() {
            assert!(fails_in > 3);
            return;
        }
    }
    panic!("it was not made");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever is filled in is sound, and reads as what was put there.
    #[test]
    fn what_is_filled_in_comes_back(
        bits in prop_oneof![Just(9u32), Just(10), Just(12), Just(14), Just(16)],
        order in 0u32..=6, zstd: bool, extended: bool, on_device: bool, rest in 0u64..4,
        mut clusters in proptest::collection::btree_map(0u64..300, (any::<u8>(), any::<bool>()), 0..200),
    ) {
        let compression = if zstd { Compression::Zstd } else { Compression::Deflate };
        let options = Options {
            refcount_bits: Some(1 << order),
            extended_l2: Some(extended && bits >= 14),
            compression: Some(compression),
            ..Options::default()
        };
        let new = new((300 << bits) - 512 * rest, bits, options);
        clusters.retain(|number, _| number << bits < new.size_bytes);
        let kind: Kind = if on_device { DEVICE } else { FILE };
        let world = World::new();
        match kind.is_device {
            true => device(&world, 64 << 20),
            false => drop(world.files.add(PATH, FILE)),
        }
        let expected = fill(&world, &new, &clusters, compression);
        is_sound(&world);
        prop_assert!(content(&world, new.size_bytes) == expected);
    }
}
