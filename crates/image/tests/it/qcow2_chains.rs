//! Chains with qcow2 in them: any mix of formats, and VHDs as children of qcow2 images.

use std::future::poll_fn;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;

use crate::qcow2_image::Image;
use crate::support::{FILE, FILE_4K, Kind, World, block_on, poll_once, read, write};
use spile_core::{Disk, Epoch, ErrorKind, Extent, Segments};
use spile_image::create::{NewImage, NewParent};
use spile_image::formats::vhd::codec::footer::DiskType;
use spile_image::{Format, LayerInfo, OpenOptions, describe};

const CLUSTER: u64 = 65536;

fn read_only() -> OpenOptions {
    OpenOptions { read_only: true, ..OpenOptions::default() }
}

fn info_of(world: &World, path: &str) -> LayerInfo {
    world.try_open(path, &read_only()).unwrap().layers().swap_remove(0)
}

/// A VHD at `path` that is a child of the image at `parent`, as `spile create --parent` makes it.
fn vhd_child(world: &World, path: &str, parent: &str) {
    vhd_child_on(world, FILE, path, parent);
}

fn vhd_child_on(world: &World, kind: Kind, path: &str, parent: &str) {
    child_on(world, Format::Vhd, kind, path, parent);
}

fn child_on(world: &World, format: Format, kind: Kind, path: &str, parent: &str) {
    let info = info_of(world, parent);
    let name = Path::new(parent).file_name().unwrap().to_str().unwrap().to_owned();
    let parent = NewParent {
        relative_path: name.clone(),
        name,
        format: info.format,
        identity: info.identity,
        changed_unix_s: info.facts.changed_unix_s,
    };
    world.files.add(path, kind);
    let new = NewImage { parent: Some(parent), ..NewImage::new(info.virtual_bytes) };
    block_on(format.create(&world.files.store(path), &*world.env, &new)).unwrap();
}

fn base() -> Image {
    let mut image = Image::usual();
    image.data(0, 3);
    image.compressed(1, &[4; CLUSTER as usize], 5);
    image.set_l2(2, 1);
    image
}

#[test]
fn a_vhd_is_the_writable_child_of_a_qcow2() {
    let world = World::new();
    let bytes = base().finish();
    world.raw("/d/base.qcow2", &bytes);
    vhd_child(&world, "/d/leaf.vhd", "/d/base.qcow2");
    let disk = world.open("/d/leaf.vhd");
    assert_eq!(disk.layers().iter().map(|layer| layer.format).collect::<Vec<_>>(), [Format::Vhd, Format::Qcow2]);
    write(&disk, CLUSTER + 512, &[9; 1024]);
    let content = read(&disk, 0..4 * CLUSTER);
    let expected = |at: u64| match at {
        66048..67072 => 9,
        0..CLUSTER => 3,
        CLUSTER..131_072 => 4,
        _ => 0,
    };
    assert!((0u64..).zip(&content).all(|(at, byte)| *byte == expected(at)));
    block_on(disk.close()).unwrap();
    assert_eq!(world.files.file("/d/base.qcow2").bytes(0, bytes.len()), bytes);
    assert_eq!(read(&world.open("/d/leaf.vhd"), 0..4 * CLUSTER), content);
}

/// Requests from before the leaf was made.
#[derive(Default)]
struct Older(AtomicBool);

impl Epoch for Older {
    fn has_ended(&self) -> bool {
        self.0.load(Relaxed)
    }

    fn ended(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(poll_fn(|_| if self.has_ended() { Poll::Ready(()) } else { Poll::Pending }))
    }
}

/// A write of less than a cluster copies the rest from the parent, which an older write may change until it has ended.
#[test]
fn a_new_leaf_copies_nothing_from_its_parent_before_older_requests_have_ended() {
    let world = World::new();
    let bytes = base().finish();
    world.raw("/d/base.qcow2", &bytes);
    child_on(&world, Format::Qcow2, FILE, "/d/leaf.qcow2", "/d/base.qcow2");
    let disk = world.open("/d/leaf.qcow2");
    let older = Arc::new(Older::default());
    let epoch: Arc<dyn Epoch> = older.clone();
    disk.follows(&[epoch]);
    let new = Segments::copied(&[9; 512]);
    let mut write = Box::pin(disk.write(Extent::from_range(512..1024), &new, false));
    (0..100).for_each(|_| assert!(poll_once(write.as_mut()).is_pending(), "it has not waited"));
    let is_data = |at: &usize| bytes[*at..*at + CLUSTER as usize].iter().all(|byte| *byte == 3);
    let at = (0..bytes.len()).step_by(CLUSTER as usize).find(is_data).expect("the data of the first cluster");
    world.files.file("/d/base.qcow2").patch(at as u64 + 4096, &[7; 512]);
    older.0.store(true, Relaxed);
    block_on(write).unwrap();
    let content = read(&disk, 0..8192);
    assert_eq!([content[0], content[512], content[1024], content[4096], content[4608]], [3, 9, 3, 7, 3]);
}

#[test]
fn another_image_in_the_parents_place_is_noticed() {
    let world = World::new();
    world.raw("/d/base.qcow2", &base().finish());
    vhd_child(&world, "/d/leaf.vhd", "/d/base.qcow2");
    let changes: [fn(&mut Image); 3] = [
        |image| image.put64(24, (1 << 20) - 512),
        |image| {
            let at = image.append(&[0]);
            image.put64(image.l1_at(), at);
        },
        |image| image.backing("other.raw", Some("raw")),
    ];
    for change in changes {
        let mut other = base();
        change(&mut other);
        world.raw("/d/base.qcow2", &other.finish());
        world.raw("/d/other.raw", &[0; 512]);
        world.refused("/d/leaf.vhd", ErrorKind::Corrupt, "the child expects");
    }
    // What a program changes that only reads the guest's data through it, or takes the dirty mark away, does not matter.
    let mut same = base();
    same.incompatible(1);
    same.put64(88, 2);
    world.raw("/d/base.qcow2", &same.finish());
    assert_eq!(read(&world.open("/d/leaf.vhd"), 0..512), [3; 512]);
}

#[test]
fn a_qcow2_parent_is_never_opened_as_raw() {
    let world = World::new();
    world.raw("/d/base.qcow2", &base().finish());
    // The null UUID of the parent means raw to blktap; the name says qcow2.
    world.child("/d/leaf.vhd", "/d/base.qcow2", 1 << 20, 2 << 20);
    world.refused("/d/leaf.vhd", ErrorKind::Corrupt, "name says qcow2");
    // The identity says qcow2, whatever the file is called, and whatever is in it.
    world.raw("/d/base.img", &base().finish());
    let mut parent = world.parent_ref("/d/base.img", "base.img");
    parent.uuid = info_of(&world, "/d/base.qcow2").identity.unwrap().0;
    world.child_of("/d/other.vhd", FILE, parent, 1 << 20, 2 << 20);
    assert_eq!(read(&world.open("/d/other.vhd"), 0..512), [3; 512]);
    world.raw("/d/base.img", &[1; 1 << 20]);
    world.refused("/d/other.vhd", ErrorKind::Corrupt, "QFI");
}

#[test]
fn identities_differ_from_those_of_other_formats() {
    let world = World::new();
    world.raw("/d/base.qcow2", &base().finish());
    let vhd = world.vhd("/d/a.vhd", DiskType::Dynamic, 1 << 20, 2 << 20);
    let identity = info_of(&world, "/d/base.qcow2").identity.unwrap();
    assert_eq!((&identity.0[..4], identity.0[6] >> 4, identity.0[8] >> 6), (&b"QFI\xfb"[..], 8, 2));
    assert_eq!(Format::marked(identity), Some(Format::Qcow2));
    assert_eq!(Format::marked(spile_image::layer::Identity(crate::support::footer_of(&vhd).uuid)), None);
}

#[test]
fn any_mix_of_formats_is_a_chain() {
    let world = World::new();
    world.raw("/d/0.raw", &[1; 1 << 20]);
    let mut first = Image::usual();
    first.backing("0.raw", Some("raw"));
    first.data(1, 2);
    first.data(2, 2);
    world.raw("/d/1.qcow2", &first.finish());
    vhd_child(&world, "/d/2.vhd", "/d/1.qcow2");
    let disk = world.open("/d/2.vhd");
    write(&disk, 2 * CLUSTER, &[3; 512]);
    write(&disk, 3 * CLUSTER, &[3; 2 * CLUSTER as usize]);
    block_on(disk.close()).unwrap();
    let mut top = Image::usual();
    top.backing("2.vhd", Some("vpc"));
    top.data(4, 4);
    top.set_l2(5, 1);
    world.raw("/d/3.qcow2", &top.finish());
    let disk = world.try_open("/d/3.qcow2", &read_only()).unwrap();
    let formats: Vec<_> = disk.layers().iter().map(|layer| layer.format).collect();
    assert_eq!(formats, [Format::Qcow2, Format::Vhd, Format::Qcow2, Format::Raw]);
    let content = read(&disk, 0..1 << 20);
    let at = |cluster: u64, within: u64| content[(cluster * CLUSTER + within) as usize];
    let found = [at(0, 0), at(1, 0), at(2, 0), at(2, 512), at(3, 9), at(4, 9), at(5, 9), at(6, 0)];
    assert_eq!(found, [1, 2, 3, 2, 3, 4, 0, 1]);
}

/// What is behind the end of a parent reads as zeroes, and not as what the layers below it have there.
#[test]
fn a_parent_may_end_within_a_sector() {
    let end = 2 * CLUSTER + 1000;
    for has_last_cluster in [false, true] {
        let world = World::new();
        world.raw("/d/0.raw", &[1; 1 << 20]);
        let mut middle = Image::new(16, end);
        middle.backing("0.raw", Some("raw"));
        if has_last_cluster {
            middle.data(2, 1);
        }
        world.raw("/d/1.qcow2", &middle.finish());
        let mut top = Image::usual();
        top.backing("1.qcow2", Some("qcow2"));
        world.raw("/d/2.qcow2", &top.finish());
        let disk = world.try_open("/d/2.qcow2", &read_only()).unwrap();
        let content = read(&disk, 0..1 << 20);
        let wrong = (0u64..).zip(&content).find(|(at, byte)| **byte != u8::from(*at < end));
        assert_eq!(wrong, None, "with its last cluster: {has_last_cluster}");
    }
}

#[test]
fn case_39_and_42_a_description_opens_nothing_else() {
    for (name, format, data) in [
        ("json:{\"file.filename\":\"/etc/shadow\"}", Some("raw"), None),
        ("/etc/shadow", Some("raw"), None),
        ("base.qcow2", None, None),
        ("base.qcow2", Some("vmdk"), Some("data.raw")),
    ] {
        let mut image = Image::usual();
        image.backing(name, format);
        if let Some(data) = data {
            image.incompatible(4);
            image.extension(0x4441_5441, data.as_bytes());
        }
        let world = World::new();
        world.raw("/d/a.qcow2", &image.finish());
        for path in ["/etc/shadow", "/d/base.qcow2", "/d/data.raw"] {
            world.raw(path, &[1; 512]);
        }
        let found = block_on(describe(&world.files, world.env.clone(), Path::new("/d/a.qcow2"), None)).unwrap();
        assert_eq!(world.files.opened(), [Path::new("/d/a.qcow2")]);
        assert_eq!(found.request_align_bytes.is_none(), data.is_some());
        let facts = format!("{:?} {:?}", found.layer.facts.values, found.layer.facts.lines);
        let shown = name.split(':').next().unwrap();
        assert!(facts.contains(shown) && facts.contains(format.unwrap_or("not named")), "{facts}");
    }
}

fn extents(disk: &impl Disk, range: std::ops::Range<u64>) -> Result<Vec<(u64, u64)>, ErrorKind> {
    let runs = block_on(disk.extents(Extent::from_range(range), 100)).map_err(|error| error.kind())?;
    Ok(runs.iter().map(|run| (run.extent.start(), run.extent.end())).collect())
}

#[test]
fn a_map_is_told_up_to_a_damaged_entry_and_from_behind_it() {
    let mut image = Image::usual();
    for index in 0..4 {
        image.data(index, 1);
    }
    image.set_l2(2, 512);
    let size = 1 << 20;
    let world = World::new();
    world.raw("/d/a.qcow2", &image.finish());
    vhd_child(&world, "/d/child.vhd", "/d/a.qcow2");
    for path in ["/d/a.qcow2", "/d/child.vhd"] {
        let disk = world.try_open(path, &read_only()).unwrap();
        assert_eq!(extents(&disk, 0..size), Ok(vec![(0, 2 * CLUSTER)]), "{path}");
        assert_eq!(extents(&disk, 2 * CLUSTER..size), Err(ErrorKind::Corrupt), "{path}");
        let behind = vec![(3 * CLUSTER, 4 * CLUSTER), (4 * CLUSTER, size)];
        assert_eq!(extents(&disk, 3 * CLUSTER..size), Ok(behind), "{path}");
    }
}

/// A caller that asks for whole units must not get an answer that ends inside one: it would ask for that unit for
/// ever.
#[test]
fn a_map_is_told_in_whole_units() {
    let mut image = Image::new(9, 32 << 10);
    for index in 0..11 {
        image.data(index, 1);
    }
    image.set_l2(9, 256);
    let world = World::new();
    world.raw("/d/a.qcow2", &image.finish());
    vhd_child_on(&world, FILE_4K, "/d/child.vhd", "/d/a.qcow2");
    let disk = world.try_open("/d/child.vhd", &read_only()).unwrap();
    assert_eq!(disk.info().request_align_bytes, 4096);
    assert_eq!(extents(&disk, 0..32 << 10), Ok(vec![(0, 4096)]));
    assert_eq!(extents(&disk, 4096..32 << 10), Err(ErrorKind::Corrupt));
    assert_eq!(extents(&disk, 5120..5632), Ok(vec![(5120, 5632)]));
}
