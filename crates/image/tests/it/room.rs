//! Thin images on block devices that become longer while their disks are in use.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use crate::qcow2_image::{COPIED, Image};
use crate::support::*;
use spile_core::{Disk, ErrorKind, Extent, Result, Segments};
use spile_image::check::Severity;
use spile_image::formats::vhd::codec::footer::{DiskType, Footer};
use spile_image::layer::Layer as _;
use spile_image::{Format, Graph, Room};

const QCOW2: &str = "/dev/a.qcow2";
const VHD: &str = "/dev/a.vhd";
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const UNIT: u64 = 64 * KIB;

fn try_write(disk: &impl Disk, at: u64, bytes: &[u8]) -> Result<()> {
    let extent = Extent::from_range(at..at + bytes.len() as u64);
    block_on(disk.write(extent, &Segments::copied(bytes), false))
}

/// A device with an image of 4 MiB in units of 64 KiB, with room for a few of them, and junk wherever the image has nothing.
fn thin(world: &World, format: Format) -> Arc<MemFile> {
    match format {
        Format::Qcow2 => {
            let device = world.files.add(QCOW2, DEVICE);
            device.patch(0, &Image::new(16, 4 * MIB).finish());
            device.lengthen(4 * UNIT + 512);
            device
        }
        _ => {
            let device = world.vhd_on(VHD, DEVICE, DiskType::Dynamic, 4 * MIB, UNIT as u32);
            let footer = device.bytes(0, 512);
            let end = MIB + 2 * UNIT + 4 * (UNIT + 4 * KIB);
            device.set_len(MIB);
            device.lengthen(end - MIB);
            device.patch(end - 512, &footer);
            device
        }
    }
}

fn path(format: Format) -> &'static str {
    if format == Format::Qcow2 { QCOW2 } else { VHD }
}

/// What is wrong with the image, but for leaks.
fn contradictions(world: &World, format: Format) -> Vec<String> {
    let report = block_on(format.check(&world.files.store(path(format)), &*world.env)).unwrap();
    let wrong = report.findings.into_iter().filter(|found| found.severity == Severity::Corruption);
    wrong.map(|found| found.message).collect()
}

/// Writes one sector to each unit of the disk, with a longer device whenever there is no room. Returns how often that was.
fn fill(disk: &Graph<MemStore>, device: &MemFile, sectors: &[u64]) -> u64 {
    let mut growths = 0;
    for sector in sectors {
        let bytes = pattern(*sector, 512);
        while let Err(error) = try_write(disk, sector * 512, &bytes) {
            assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
            growths += 1;
            assert!(growths < 200, "the device grows, and the image does not take it up");
            device.lengthen(96 * KIB);
        }
    }
    growths
}

#[test]
fn a_device_that_becomes_longer_is_taken_up_by_whoever_finds_no_room() {
    for format in [Format::Qcow2, Format::Vhd] {
        for ends in ["closed", "killed"] {
            let world = World::new();
            let device = thin(&world, format);
            let disk = world.open(path(format));
            let sectors: Vec<u64> = (0..64).map(|unit| unit * 128 + unit).collect();
            assert!(fill(&disk, &device, &sectors) > 10, "{format}");
            let check = |disk: &Graph<MemStore>| {
                for sector in &sectors {
                    let unit = sector / 128 * UNIT;
                    let mut expected = vec![0; UNIT as usize];
                    let within = (sector * 512 - unit) as usize;
                    expected[within..within + 512].copy_from_slice(&pattern(*sector, 512));
                    assert!(read(disk, unit..unit + UNIT) == expected, "{format}: the unit at {unit:#x}");
                }
            };
            check(&disk);
            match ends {
                "closed" => block_on(disk.close()).unwrap(),
                _ => drop(disk),
            }
            assert_eq!(contradictions(&world, format), [""; 0], "{format}, {ends}");
            check(&world.open(path(format)));
        }
    }
}

#[test]
fn nobody_looks_at_a_devices_length_while_there_is_room() {
    for format in [Format::Qcow2, Format::Vhd] {
        let world = World::new();
        let device = thin(&world, format);
        device.lengthen(8 * MIB);
        if format == Format::Vhd {
            device.patch(device.len() - 512, &device.bytes(0, 512));
        }
        let disk = world.open(path(format));
        write(&disk, 0, &pattern(1, 4 << 20));
        assert_eq!(device.looks.load(Ordering::Relaxed), 0, "{format}");
    }
}

#[test]
fn an_image_tells_its_room_when_it_takes_some_and_when_it_finds_none() {
    for format in [Format::Qcow2, Format::Vhd] {
        let world = World::new();
        let device = thin(&world, format);
        let disk = world.open(path(format));
        let told: Arc<Mutex<Vec<Room>>> = Arc::default();
        let hears = told.clone();
        let leaf = disk.handles()[0].clone();
        assert!(leaf.image().watch_room(Arc::new(move |room| hears.lock().unwrap().push(room))));
        let last = || told.lock().unwrap().last().copied();
        assert_eq!(last(), None);
        let mut unit = 0;
        while try_write(&disk, unit * UNIT, &[1; 512]).is_ok() {
            let room = last().unwrap();
            assert!(!room.is_out && room.device_bytes == device.len() && room.free_bytes < device.len(), "{room:?}");
            unit += 1;
        }
        let out = last().unwrap();
        assert!(out.is_out && out.free_bytes < UNIT + 4 * KIB, "{format}: {out:?}");
        // With that length the whole disk can be written.
        device.lengthen(out.most_bytes - device.len());
        block_on(leaf.image().look_for_room()).unwrap();
        let room = last().unwrap();
        assert!(!room.is_out && room.device_bytes == out.most_bytes, "{format}: {room:?}");
        // A part of a cluster is no room.
        let gained = out.free_bytes + out.most_bytes - out.device_bytes;
        assert!((gained..gained + UNIT).contains(&room.free_bytes), "{format}: {room:?}");
        write(&disk, 0, &pattern(1, 4 << 20));
        assert_eq!(device.len(), out.most_bytes);
    }
}

#[test]
fn room_that_is_given_up_counts_as_free() {
    let world = World::new();
    let device = thin(&world, Format::Qcow2);
    device.lengthen(64 * UNIT);
    let disk = world.open(QCOW2);
    let told: Arc<Mutex<Option<Room>>> = Arc::default();
    let hears = told.clone();
    disk.handles()[0].image().watch_room(Arc::new(move |room| *hears.lock().unwrap() = Some(room)));
    write(&disk, 0, &pattern(1, 3 << 20));
    let free = || told.lock().unwrap().unwrap().free_bytes;
    let before = free();
    block_on(disk.discard(Extent::from_range(0..2 * MIB))).unwrap();
    (0..3).for_each(|_| block_on(disk.flush()).unwrap());
    block_on(disk.handles()[0].image().look_for_room()).unwrap();
    assert_eq!(free(), before + 2 * MIB);
    write(&disk, 0, &pattern(2, 2 << 20));
    assert!((before - UNIT..=before).contains(&free()), "{} bytes are free, {before} were", free());
}

/// Clusters of 512 bytes: 64 entries of the refcount table count 8 MiB of a device.
fn small_clusters(world: &World) -> Arc<MemFile> {
    let mut image = Image::new(9, 32 << 10);
    // The disk has 12 MiB: an L1 table of 384 entries, behind the rest.
    image.put64(24, 12 << 20);
    let l1 = image.append(&vec![0; 384 * 8]);
    image.put64(40, l1);
    image.put32(36, 384);
    image.put64(3 * 512, 0);
    image.counts.extend([(3, 0), (4, 0)]);
    let device = world.files.add(QCOW2, DEVICE);
    device.patch(0, &image.finish());
    device
}

/// Clusters are made ready before they are needed, so no write finds that there are none.
#[test]
fn an_image_tells_its_room_while_there_is_some() {
    let world = World::new();
    let device = small_clusters(&world);
    device.lengthen(8 * MIB - device.len());
    let disk = world.open(QCOW2);
    let told: Arc<Mutex<Vec<Room>>> = Arc::default();
    let hears = told.clone();
    disk.handles()[0].image().watch_room(Arc::new(move |room| hears.lock().unwrap().push(room)));
    let free = || told.lock().unwrap().last().unwrap().free_bytes;
    write(&disk, 0, &[1; 512]);
    let first = free();
    for unit in 1..4096 {
        write(&disk, unit * 512, &[1; 512]);
        // 64 clusters may be ready, and tables take some.
        assert!(free() <= first - (unit * 512).saturating_sub(128 * 512), "{} bytes of {first} after {unit}", free());
    }
    assert!(told.lock().unwrap().iter().all(|room| !room.is_out));
}

#[test]
fn the_refcount_table_grows_on_a_device() {
    let world = World::new();
    let device = small_clusters(&world);
    let table_clusters = || u32::from_be_bytes(device.bytes(56, 4).try_into().unwrap());
    // All that the table counts, and too little behind it for a larger one.
    device.lengthen(8 * MIB + 512 - device.len());
    let disk = world.open(QCOW2);
    let part = 128 * KIB;
    let mut done = 0;
    while try_write(&disk, done, &pattern(done, part as usize)).is_ok() {
        done += part;
    }
    assert!((6 * MIB..8 * MIB).contains(&done) && table_clusters() == 1, "{done} bytes were written");
    device.lengthen(8 * MIB);
    for at in (done..12 * MIB).step_by(part as usize) {
        write(&disk, at, &pattern(at, part as usize));
    }
    assert!(table_clusters() > 1);
    // A process that is killed leaves what another one goes on with.
    drop(disk);
    assert_eq!(contradictions(&world, Format::Qcow2), [""; 0]);
    let disk = world.open(QCOW2);
    assert!((0..12 * MIB).step_by(part as usize).all(|at| read(&disk, at..at + part) == pattern(at, part as usize)));
    write(&disk, 0, &pattern(9, 12 << 20));
    block_on(disk.close()).unwrap();
    assert_eq!(contradictions(&world, Format::Qcow2), [""; 0]);
}

/// A failure at any step of the move leaves an image without a contradiction, in which every write is that was acknowledged.
#[test]
fn a_refcount_table_that_cannot_be_moved_stays() {
    let world = World::new();
    let device = small_clusters(&world);
    device.lengthen(8 * MIB + 512 - device.len());
    let disk = world.open(QCOW2);
    let mut full = 0;
    while try_write(&disk, full, &pattern(full, 32 << 10)).is_ok() {
        full += 32 * KIB;
    }
    while try_write(&disk, full, &pattern(full, 512)).is_ok() {
        full += 512;
    }
    block_on(disk.close()).unwrap();
    let bytes = device.bytes(0, device.len() as usize);
    let mut is_moved = 0;
    for step in 1..40 {
        let world = World::new();
        let device = world.files.add(QCOW2, DEVICE);
        device.patch(0, &bytes);
        device.lengthen(MIB);
        let disk = world.open(QCOW2);
        device.fails_in.store(step, Ordering::Relaxed);
        let at = (full..full + 8 * 512).step_by(512);
        let acknowledged: Vec<u64> = at.filter(|at| try_write(&disk, *at, &pattern(*at, 512)).is_ok()).collect();
        device.fails_in.store(0, Ordering::Relaxed);
        drop(disk);
        is_moved += u64::from(device.bytes(56, 4) != [0, 0, 0, 1]);
        assert_eq!(contradictions(&world, Format::Qcow2), [""; 0], "step {step}");
        let disk = world.open(QCOW2);
        let is_there = |at: &u64| read(&disk, *at..at + 512) == pattern(*at, 512);
        assert!(acknowledged.iter().all(is_there), "step {step}");
        write(&disk, full, &pattern(1, 4096));
        assert!(device.bytes(56, 4) != [0, 0, 0, 1]);
    }
    assert!((1..39).contains(&is_moved), "the table was moved in {is_moved} of 39 cases");
}

/// An image of clusters of 512 bytes whose refcount table of 129 clusters is full: a larger one takes more clusters than one search finds. The second
/// L2 table of its disk lies at the offset `table`.
fn full_table(device: &MemFile, table: u64) {
    let (table_clusters, per_block) = (129u64, 64);
    let blocks = table_clusters * per_block;
    let l1 = 1 + table_clusters;
    device.patch(0, b"QFI\xfb");
    device.patch(48, &512u64.to_be_bytes());
    device.patch(40, &(l1 * 512).to_be_bytes());
    for (at, value) in [(4, 3u32), (20, 9), (28, 64 << 10), (36, 2), (56, table_clusters as u32), (96, 6), (100, 112)] {
        device.patch(at, &value.to_be_bytes());
    }
    device.patch(l1 * 512 + 8, &(table | COPIED).to_be_bytes());
    let first = l1 + 1;
    let entries: Vec<u8> = (first..first + blocks).flat_map(|block| (block * 512).to_be_bytes()).collect();
    device.patch(512, &entries);
    device.patch(first * 512, &1u64.to_be_bytes().repeat((blocks * per_block) as usize));
    device.set_len(blocks * per_block * 512 + MIB);
}

#[test]
fn a_table_behind_all_that_is_counted_is_not_overwritten() {
    let counted = 129 * 64 * 64;
    for (cluster, is_in_the_way) in [(counted + 260, true), (counted + 500, false)] {
        let world = World::new();
        let device = world.files.add(QCOW2, DEVICE);
        full_table(&device, cluster * 512);
        device.patch(cluster * 512, &[0; 512]);
        let disk = world.open(QCOW2);
        let written = try_write(&disk, 0, &[1; 512]).map_err(|error| error.kind());
        assert_eq!(written, if is_in_the_way { Err(ErrorKind::Corrupt) } else { Ok(()) });
        assert_eq!(device.bytes(56, 4) == 129u32.to_be_bytes(), is_in_the_way);
        assert_eq!(device.bytes(cluster * 512, 512), [0; 512]);
    }
}

/// Another image's footer, as a volume that was deleted leaves it.
fn strange_footer(disk_type: DiskType, size_bytes: u64) -> Vec<u8> {
    let world = World::new();
    let file = world.vhd(VHD, disk_type, size_bytes, UNIT as u32);
    edit_footer(&file, |footer| footer.uuid = [7; 16]);
    file.bytes(file.len() - 512, 512)
}

#[test]
fn a_vhds_footer_moves_to_the_new_end_before_a_block_comes_behind_the_old_one() {
    for step in 1..8 {
        let world = World::new();
        let device = thin(&world, Format::Vhd);
        let footer = device.bytes(0, 512);
        let disk = world.open(VHD);
        let mut unit = 0;
        while try_write(&disk, unit * UNIT, &[1; 512]).is_ok() {
            unit += 1;
        }
        let old_end = device.len();
        device.lengthen(4 * UNIT);
        device.patch(device.len() - 512, &strange_footer(DiskType::Dynamic, 4 * MIB));
        device.fails_in.store(step, Ordering::Relaxed);
        let is_placed = try_write(&disk, unit * UNIT, &[2; 512]).is_ok();
        device.fails_in.store(0, Ordering::Relaxed);
        drop(disk);
        let placed = (0..64).map(|block| u64::from(entry_at(&device, block)) * 512 + UNIT + 512);
        let is_behind = placed.filter(|end| *end < 4 << 30).any(|end| end > old_end - 512);
        assert!(!is_behind || device.bytes(device.len() - 512, 512) == footer, "step {step}");
        assert!(is_placed || step < 7, "step {step}");
        // Whatever came of it, the image is itself, and goes on.
        let disk = world.open(VHD);
        assert_eq!(read(&disk, 0..512), [1; 512], "step {step}");
        if is_placed {
            assert_eq!(read(&disk, unit * UNIT..unit * UNIT + 512), [2; 512], "step {step}");
        }
        write(&disk, unit * UNIT, &[3; 512]);
        block_on(disk.close()).unwrap();
        assert_eq!(device.bytes(device.len() - 512, 512), device.bytes(0, 512));
        assert_eq!(contradictions(&world, Format::Vhd), [""; 0], "step {step}");
    }
}

/// The entry of a block, whatever the end of the device holds.
fn entry_at(device: &MemFile, block: u64) -> u32 {
    let at = header_of(device).bat_offset_bytes + block * 4;
    u32::from_be_bytes(device.bytes(at, 4).try_into().unwrap())
}

#[test]
fn what_was_left_at_the_end_of_a_longer_device_is_not_taken_for_its_footer() {
    let longer = |left: &[u8]| {
        let world = World::new();
        let device = thin(&world, Format::Vhd);
        let disk = world.open(VHD);
        write(&disk, 0, &[1; 512]);
        block_on(disk.close()).unwrap();
        device.lengthen(4 * UNIT);
        device.patch(device.len() - 512, left);
        (world, device)
    };
    for left in [vec![9; 512], strange_footer(DiskType::Dynamic, 4 * MIB), strange_footer(DiskType::Dynamic, 2 * MIB)] {
        let (world, device) = longer(&left);
        let uuid = Footer::parse(&device.bytes(0, 512)).unwrap().uuid;
        let disk = world.open(VHD);
        assert_eq!((disk.size_bytes(), read(&disk, 0..512)), (4 * MIB, vec![1; 512]));
        block_on(disk.close()).unwrap();
        assert_eq!(footer_of(&device).uuid, uuid);
    }
    let (world, device) = longer(&strange_footer(DiskType::Fixed, 64 * KIB));
    world.refused(VHD, ErrorKind::Corrupt, "made longer");
    device.patch(device.len() - 512, &[0; 512]);
    assert_eq!(read(&world.open(VHD), 0..512), [1; 512]);
}

#[test]
fn an_older_footer_of_the_image_itself_at_the_end_of_a_longer_device_is_not_taken_for_its_footer() {
    let world = World::new();
    let device = thin(&world, Format::Vhd);
    let disk = world.open(VHD);
    write(&disk, 3 * MIB, &[1; 512]);
    block_on(disk.close()).unwrap();
    let footer = footer_of(&device);
    device.lengthen(4 * UNIT);
    let stale = Footer { current_size_bytes: 3 * MIB + UNIT, ..footer.clone() };
    device.patch(device.len() - 512, &stale.to_bytes());
    let disk = world.open(VHD);
    assert_eq!((disk.size_bytes(), read(&disk, 3 * MIB..3 * MIB + 512)), (4 * MIB, vec![1; 512]));
    assert_eq!(footer_of(&device), footer);
}

#[test]
fn the_parent_is_the_one_that_the_image_names_whatever_a_longer_device_ends_with() {
    let world = World::new();
    world.vhd("/dev/base.vhd", DiskType::Dynamic, 4 * MIB, UNIT as u32);
    let device = world.child_on(VHD, DEVICE, "/dev/base.vhd", 4 * MIB, UNIT as u32);
    device.lengthen(4 * UNIT);
    for left in [DiskType::Dynamic, DiskType::Fixed].map(|disk_type| strange_footer(disk_type, 64 * KIB)) {
        device.patch(device.len() - 512, &left);
        let named = block_on(Format::Vhd.named_parent(&world.files.store(VHD)));
        assert!(!matches!(named, Ok(None)), "the image is said to have no parent");
    }
}

/// Whoever made the device longer may have done that while nobody had the disk open.
#[test]
fn a_vhds_footer_is_at_the_end_of_a_device_that_was_longer_at_open_before_blocks_are() {
    let world = World::new();
    let device = thin(&world, Format::Vhd);
    let (footer, old_end) = (device.bytes(0, 512), device.len());
    device.lengthen(8 * UNIT);
    device.patch(device.len() - 512, &[9; 512]);
    let disk = world.open(VHD);
    (0..8).for_each(|unit| write(&disk, unit * UNIT, &[1; 512]));
    assert!((0..8).any(|block| u64::from(entry_at(&device, block)) * 512 >= old_end));
    assert_eq!(device.bytes(device.len() - 512, 512), footer);
}

#[test]
fn what_was_released_is_used_again_though_the_length_of_the_device_cannot_be_read() {
    for format in [Format::Qcow2, Format::Vhd] {
        let world = World::new();
        let device = thin(&world, format);
        let disk = world.open(path(format));
        let mut unit = 0;
        while try_write(&disk, unit * UNIT, &[1; 512]).is_ok() {
            unit += 1;
        }
        block_on(disk.discard(Extent::from_range(0..UNIT))).unwrap();
        // It is given up then, and no flush has made it free or ready by itself.
        disk.handles()[0].image().hold_space(format == Format::Qcow2);
        let flushes = if format == Format::Qcow2 { 3 } else { 1 };
        (0..flushes).for_each(|_| block_on(disk.flush()).unwrap());
        device.fails_looks.store(true, Ordering::Relaxed);
        write(&disk, unit * UNIT, &[2; 512]);
        assert_eq!(try_write(&disk, (unit + 1) * UNIT, &[2; 512]).unwrap_err().kind(), ErrorKind::Io, "{format}");
    }
}

/// The copy at the start is all that is left when somebody makes the device longer: at any time, and without a word.
#[test]
fn a_vhds_copy_of_the_footer_is_whole_before_blocks_are_prepared() {
    let world = World::new();
    let device = thin(&world, Format::Vhd);
    device.patch(0, &[0; 512]);
    let disk = world.open(VHD);
    write(&disk, 0, &[1; 512]);
    device.lengthen(4 * UNIT);
    drop(disk);
    assert_eq!(read(&world.open(VHD), 0..512), [1; 512]);
}
