//! Footers as other programs write them: sizes that geometry and current size put differently, footers of 511 bytes, and
//! two footers of which one is old, torn, or written by a guest.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::support::*;
use spile_core::{Disk, ErrorKind};
use spile_image::OpenOptions;
use spile_image::check::{Lost, Mend, Report, Severity};
use spile_image::facts::Value;
use spile_image::formats::vhd;
use spile_image::formats::vhd::codec::footer::{DiskType, Footer};
use spile_image::formats::vhd::codec::geometry::Geometry;

const MIB: u64 = 1 << 20;
const BLOCK: u32 = 2 << 20;
const A: &str = "/vm/a.vhd";

const READ_ONLY: fn() -> OpenOptions = || OpenOptions { read_only: true, ..OpenOptions::default() };

const CREATORS: [&[u8; 4]; 11] =
    [b"vpc ", b"qemu", b"qem2", b"win ", b"d2v ", b"tap\0", b"CTXS", b"wa\0\0", b"vbox", b"\0\0\0\0", &[0xff; 4]];

fn check(world: &World) -> Report {
    block_on(vhd::check(&world.files.store(A), &*world.env)).unwrap()
}

fn fact(world: &World, name: &str) -> Value {
    let disk = world.try_open(A, &READ_ONLY()).unwrap();
    let values = disk.layers()[0].facts.values.clone();
    values.into_iter().find(|(other, _)| *other == name).unwrap().1
}

fn footers(file: &MemFile) -> (Vec<u8>, Vec<u8>) {
    (file.bytes(0, 512), file.bytes(file.len() - 512, 512))
}

// Sizes.

#[test]
fn the_current_size_counts_for_every_creator_and_geometry() {
    let chs = |cylinders, heads, sectors| Geometry { cylinders, heads, sectors };
    let geometries =
        [chs(0, 0, 0), chs(1, 1, 1), chs(100, 4, 17), chs(60000, 16, 63), chs(65535, 16, 254), chs(65535, 255, 255)];
    for disk_type in [DiskType::Fixed, DiskType::Dynamic] {
        for creator in CREATORS {
            for geometry in geometries {
                let world = World::new();
                let file = world.vhd(A, disk_type, 8 * MIB, BLOCK);
                let disk = world.open(A);
                write(&disk, 8 * MIB - 512, &[7; 512]);
                block_on(disk.close()).unwrap();
                edit_footer(&file, |footer| (footer.creator, footer.geometry) = (*creator, geometry));
                let disk = world.open(A);
                assert_eq!(disk.info().size_bytes, 8 * MIB, "{} {geometry:?}", creator.escape_ascii());
                assert_eq!(read(&disk, 8 * MIB - 512..8 * MIB), [7; 512], "{}", creator.escape_ascii());
                drop(disk);
                assert_eq!(fact(&world, "geometry_size_bytes"), Value::Number(geometry.size_bytes()));
                assert!(check(&world).worst() <= Some(Severity::Note));
                let says = format!("addresses {} bytes", geometry.size_bytes());
                assert!(check(&world).findings.iter().any(|found| found.message.contains(&says)));
            }
        }
    }
}

#[test]
fn a_geometry_that_says_the_same_or_nothing_is_not_told() {
    for geometry in [Geometry::MAX, Geometry { cylinders: 8, heads: 16, sectors: 128 }] {
        let (world, file) = dynamic_sample(A);
        edit_footer(&file, |footer| footer.geometry = geometry);
        assert_eq!(fact(&world, "geometry_size_bytes"), Value::None);
        assert_eq!(check(&world).findings.len(), 0);
    }
}

#[test]
fn a_short_footer_gives_the_size_that_it_says() {
    for disk_type in [DiskType::Fixed, DiskType::Dynamic] {
        for size in [MIB, 4 * MIB + 512, 5 * MIB - 1024] {
            let world = World::new();
            let file = world.vhd(A, disk_type, size, BLOCK);
            let bytes = pattern(3, size as usize);
            let disk = world.open(A);
            write(&disk, 0, &bytes);
            block_on(disk.close()).unwrap();
            edit_footer(&file, |footer| {
                (footer.creator, footer.geometry) = (*b"vpc ", Geometry { cylinders: 5, heads: 4, sectors: 17 });
            });
            file.set_len(file.len() - 1);
            let disk = world.try_open(A, &READ_ONLY()).unwrap();
            assert_eq!(disk.info().size_bytes, size);
            assert!(read(&disk, 0..size) == bytes, "{disk_type:?} of {size} bytes");
            drop(disk);
            assert!(check(&world).worst() <= Some(Severity::Note));
            // One byte less is no footer any more.
            file.set_len(file.len() - 1);
            match disk_type {
                DiskType::Fixed => drop(world.refused(A, ErrorKind::Corrupt, "footer")),
                _ => assert_eq!(world.try_open(A, &READ_ONLY()).unwrap().info().size_bytes, size),
            }
        }
    }
}

#[test]
fn a_short_footer_of_another_size_is_refused() {
    for (size, names) in [(MIB + 512, "does not fit"), (MIB + 1, "not a multiple"), (0, "size 0")] {
        let world = World::new();
        let file = world.vhd(A, DiskType::Fixed, MIB, BLOCK);
        edit_footer(&file, |footer| footer.current_size_bytes = size);
        file.set_len(file.len() - 1);
        world.refused(A, ErrorKind::Corrupt, names);
    }
}

// Two footers.

/// What one of the two footers of a sample is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// As it was written.
    Good,
    /// As good, with another time stamp.
    Older,
    /// Valid; the image fits it: another UUID, half the size.
    Fits,
    /// Valid; the image does not fit it, as its BAT has too few entries.
    Misfit,
    /// Valid; its header is not there.
    Astray,
    /// Half written.
    Torn,
    /// Zeroes.
    Gone,
}

const STATES: [State; 7] =
    [State::Good, State::Older, State::Fits, State::Misfit, State::Astray, State::Torn, State::Gone];

impl State {
    fn bytes(self, good: &Footer) -> [u8; 512] {
        let changed = |change: fn(&mut Footer)| {
            let mut footer = good.clone();
            change(&mut footer);
            footer.to_bytes()
        };
        match self {
            Self::Good => good.to_bytes(),
            Self::Older => changed(|footer| footer.timestamp -= 1),
            Self::Fits => changed(|footer| {
                (footer.current_size_bytes, footer.uuid) = (4 * MIB, [9; 16]);
                footer.geometry = Geometry::for_size(4 * MIB);
            }),
            Self::Misfit => changed(|footer| footer.current_size_bytes = 64 * MIB),
            Self::Astray => changed(|footer| footer.data_offset = Some(1 << 20)),
            Self::Torn => std::array::from_fn(|at| if at < 50 { good.to_bytes()[at] } else { 0x5a }),
            Self::Gone => [0; 512],
        }
    }

    fn is_valid(self) -> bool {
        !matches!(self, Self::Torn | Self::Gone)
    }

    fn fits(self) -> bool {
        matches!(self, Self::Good | Self::Older | Self::Fits)
    }

    fn size(self) -> u64 {
        if self == Self::Fits { 4 * MIB } else { 8 * MIB }
    }
}

/// Which one counts; `None` when the image is refused.
fn winner(end: State, copy: State) -> Option<State> {
    match (end, copy) {
        (end, copy) if end.is_valid() && (end == copy || !copy.is_valid()) => end.fits().then_some(end),
        (end, _) if end.fits() => Some(end),
        (_, copy) => copy.fits().then_some(copy),
    }
}

/// A dynamic disk of 8 MiB with the first block written, and its footers in these states.
fn sample(end: State, copy: State) -> (World, Arc<MemFile>) {
    let (world, file) = dynamic_sample(A);
    let good = footer_of(&file);
    file.patch(0, &copy.bytes(&good));
    file.patch(file.len() - 512, &end.bytes(&good));
    (world, file)
}

fn each_pair(run: impl Fn(State, State, Option<State>)) {
    for end in STATES {
        for copy in STATES {
            run(end, copy, winner(end, copy));
        }
    }
}

#[test]
fn the_footer_that_the_image_fits_counts() {
    each_pair(|end, copy, winner| {
        let (world, _) = sample(end, copy);
        match (winner, world.try_open(A, &READ_ONLY())) {
            (Some(winner), Ok(disk)) => {
                assert_eq!(disk.info().size_bytes, winner.size(), "end {end:?}, copy {copy:?}");
                assert_eq!(read(&disk, 0..4096), pattern(1, 4096));
                let agree = end == copy;
                drop(disk);
                assert_eq!(fact(&world, "footer_problem") == Value::None, agree, "end {end:?}, copy {copy:?}");
            }
            (None, Err(error)) => assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}"),
            (winner, result) => panic!("end {end:?}, copy {copy:?}: {winner:?} but {:?}", result.err()),
        }
    });
}

#[test]
fn a_check_tells_of_two_footers_and_a_repair_makes_them_agree() {
    each_pair(|end, copy, winner| {
        let (world, file) = sample(end, copy);
        let Some(winner) = winner else { return };
        let found = check(&world);
        let footer_findings: Vec<_> = found.findings.iter().filter(|found| found.message.contains("footer")).collect();
        assert_eq!(footer_findings.is_empty(), end == copy, "end {end:?}, copy {copy:?}: {:?}", found.findings);
        assert!(footer_findings.iter().all(|found| found.mend == Mend::Repair));
        let other = if winner == end { copy } else { end };
        if other.is_valid() && other != winner {
            let is_other_disk = !matches!((winner, other), (State::Good, State::Older) | (State::Older, State::Good));
            let expected = if is_other_disk { Severity::Corruption } else { Severity::Note };
            assert_eq!(found.worst(), Some(expected), "end {end:?}, copy {copy:?}");
        }
        block_on(vhd::repair(&world.files.store(A), &*world.env, Lost::Keep)).unwrap();
        let (first, last) = footers(&file);
        assert!(first == last, "end {end:?}, copy {copy:?}");
        assert_eq!(check(&world).findings.len(), 0);
        let disk = world.open(A);
        assert_eq!((disk.info().size_bytes, read(&disk, 0..4096)), (winner.size(), pattern(1, 4096)));
    });
}

#[test]
fn a_writer_makes_the_footers_agree_before_it_is_killed_or_closed() {
    each_pair(|end, copy, winner| {
        let Some(winner) = winner else { return };
        for closed in [false, true] {
            let (world, file) = sample(end, copy);
            let disk = world.open(A);
            write(&disk, 2 * MIB, &pattern(2, 4096));
            if closed {
                block_on(disk.close()).unwrap();
                let (first, last) = footers(&file);
                assert!(first == last, "end {end:?}, copy {copy:?}");
            } else {
                drop(disk);
            }
            let disk = world.open(A);
            assert_eq!(disk.info().size_bytes, winner.size(), "end {end:?}, copy {copy:?}");
            assert_eq!(read(&disk, 0..4096), pattern(1, 4096));
            assert_eq!(read(&disk, 2 * MIB..2 * MIB + 4096), pattern(2, 4096));
        }
    });
}

#[test]
fn a_reader_changes_neither() {
    each_pair(|end, copy, winner| {
        let (world, file) = sample(end, copy);
        let before = file.bytes(0, file.len() as usize);
        if winner.is_some() {
            block_on(world.try_open(A, &READ_ONLY()).unwrap().close()).unwrap();
        }
        assert!(file.bytes(0, file.len() as usize) == before);
    });
}

// Footers that a guest has written.

/// A dynamic disk whose writer was killed when the file ended with its last block, with `forged` in that block's last
/// sector.
fn killed_with(forged: impl Fn(&Footer) -> Footer) -> (World, Arc<MemFile>) {
    let (world, file) = dynamic_sample(A);
    let disk = world.open(A);
    write(&disk, 6 * MIB, &pattern(6, BLOCK as usize));
    write(&disk, 8 * MIB - 512, &forged(&footer_of(&file)).to_bytes());
    drop(disk);
    let end = u64::from(entry(&file, 3)) * 512 + 512 + u64::from(BLOCK);
    file.set_len(end);
    (world, file)
}

#[test]
fn a_guest_cannot_forge_the_footer_of_a_file_that_ends_with_its_data() {
    for forged in [
        (|good| Footer { uuid: [5; 16], ..good.clone() }) as fn(&Footer) -> Footer,
        |good| Footer { current_size_bytes: 2 * MIB, ..good.clone() },
        |good| Footer { disk_type: DiskType::Differencing, ..good.clone() },
    ] {
        let (world, file) = killed_with(forged);
        let good = file.bytes(0, 512);
        let disk = world.open(A);
        assert_eq!((disk.info().size_bytes, disk.layers()[0].facts.subformat), (8 * MIB, Some("dynamic")));
        let last = read(&disk, 8 * MIB - 512..8 * MIB);
        // The guest takes its block away, and the writer is killed again: still nothing is decided by what it wrote.
        let block = spile_core::Extent::from_range(6 * MIB..8 * MIB);
        block_on(disk.discard(block)).unwrap();
        drop(disk);
        assert_eq!(last, forged(&footer_of_bytes(&good)).to_bytes());
        let disk = world.open(A);
        assert_eq!((disk.info().size_bytes, disk.layers()[0].facts.subformat), (8 * MIB, Some("dynamic")));
        block_on(disk.close()).unwrap();
        let (first, end) = footers(&file);
        assert!(first == good && end == good);
    }
}

fn footer_of_bytes(bytes: &[u8]) -> Footer {
    Footer::parse(bytes).unwrap()
}

#[test]
fn a_file_that_is_two_disks_at_once_is_refused() {
    // Either a guest's data end with the footer of a fixed disk, or the guest of a fixed disk has written a header.
    let (world, file) = killed_with(|good| {
        let size = 4 * MIB;
        Footer { disk_type: DiskType::Fixed, data_offset: None, current_size_bytes: size, ..good.clone() }
    });
    let before = file.bytes(0, file.len() as usize);
    let error = world.refused(A, ErrorKind::Corrupt, "ends as a fixed VHD");
    assert!(error.hint_text().unwrap().contains("--format raw"));
    assert!(file.bytes(0, file.len() as usize) == before);
}

/// A closed image of 8 MiB whose last sector is the last one of its only block; and the footer of a fixed disk that goes
/// into such an image.
fn with_a_block_at_the_end() -> (World, Arc<MemFile>, [u8; 512]) {
    let world = World::new();
    let file = world.vhd(A, DiskType::Dynamic, 8 * MIB, BLOCK);
    let disk = world.open(A);
    write(&disk, 6 * MIB, &pattern(6, 2 << 20));
    block_on(disk.close()).unwrap();
    let fixed = Footer { disk_type: DiskType::Fixed, data_offset: None, current_size_bytes: MIB, ..footer_of(&file) };
    (world, file, fixed.to_bytes())
}

#[test]
fn a_file_that_fails_to_grow_never_ends_with_a_guests_bytes() {
    for killed in [true, false] {
        let (world, file, forged) = with_a_block_at_the_end();
        let disk = world.open(A);
        write(&disk, 8 * MIB - 512, &forged);
        file.is_full.store(true, Relaxed);
        let whole = spile_core::Extent::new(0, 512).unwrap();
        let data = spile_core::Segments::copied(&[1; 512]);
        assert_eq!(block_on(disk.write(whole, &data, false)).unwrap_err().kind(), ErrorKind::NoSpace);
        match killed {
            true => drop(disk),
            false => block_on(disk.close()).unwrap(),
        }
        let (first, end) = footers(&file);
        assert!(first == end, "killed: {killed}");
        let disk = world.open(A);
        assert_eq!(read(&disk, 8 * MIB - 512..8 * MIB), forged);
    }
}

#[test]
fn a_close_fails_when_there_is_no_room_for_the_only_footer_at_the_end() {
    let (world, file, forged) = with_a_block_at_the_end();
    file.set_len(file.len() - 512);
    let disk = world.open(A);
    write(&disk, 8 * MIB - 512, &forged);
    file.is_full.store(true, Relaxed);
    assert_eq!(block_on(disk.close()).unwrap_err().kind(), ErrorKind::NoSpace);
    file.is_full.store(false, Relaxed);
    block_on(disk.close()).unwrap();
    assert_eq!(read(&world.open(A), 8 * MIB - 512..8 * MIB), forged);
}

#[test]
fn a_guest_of_a_fixed_disk_may_keep_a_vhd_in_it() {
    let (inner, inner_file) = dynamic_sample(A);
    drop(inner);
    let bytes = inner_file.bytes(0, inner_file.len() as usize);
    let world = World::new();
    world.vhd(A, DiskType::Fixed, 16 * MIB, BLOCK);
    write(&world.open(A), 0, &bytes);
    let disk = world.open(A);
    assert_eq!((disk.info().size_bytes, disk.layers()[0].facts.subformat), (16 * MIB, Some("fixed")));
}

#[test]
fn no_block_may_lie_where_the_footer_of_a_device_goes() {
    let (source, file) = dynamic_sample(A);
    drop(source);
    let bytes = file.bytes(0, file.len() as usize - 512);
    let world = World::new();
    let device = world.files.add(A, DEVICE);
    device.patch(0, &bytes);
    assert_eq!(device.len(), bytes.len() as u64);
    world.refused(A, ErrorKind::Corrupt, "end of the device");
    let disk = world.try_open(A, &READ_ONLY()).unwrap();
    assert_eq!(read(&disk, 0..4096), pattern(1, 4096));
}
