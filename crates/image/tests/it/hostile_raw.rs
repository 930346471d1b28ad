//! Raw disks whose guest, or whose host, means harm; and requests that no front should have let through.

use crate::support::*;
use spile_core::{Disk, ErrorKind, Extent, Segments};
use spile_image::formats::vhd::codec::footer::{DiskType, Footer};
use spile_image::{Format, OpenOptions};
use spile_node::Aligned;

const MIB: u64 = 1 << 20;
const A: &str = "/vm/a.vhd";

const RAW: &str = "/vm/disk.img";

fn qcow2_header() -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    // A backing file, 11 bytes at 112.
    header[8..20].copy_from_slice(b"\0\0\0\0\0\0\0\x70\0\0\0\x0b");
    header[112..123].copy_from_slice(b"/etc/shadow");
    header
}

#[test]
fn a_header_written_by_the_guest_does_not_change_a_raw_disk() {
    let world = World::new();
    let footer = Footer::new(DiskType::Dynamic, 1 << 40, [3; 16], 0).to_bytes().to_vec();
    for forged in [footer, qcow2_header()] {
        for path in [RAW, "/vm/disk.raw"] {
            world.raw(path, &vec![0; MIB as usize]);
            let disk = world.open(path);
            write(&disk, 0, &forged);
            write(&disk, MIB - 512, &forged);
            block_on(disk.close()).unwrap();
            let disk = world.open(path);
            assert_eq!(disk.info().size_bytes, MIB);
            assert_eq!((disk.layers()[0].format, disk.layers().len()), (Format::Raw, 1));
            assert_eq!(read(&disk, 0..512), forged);
        }
    }
    assert!(world.files.opened().iter().all(|path| path.starts_with("/vm")));
}

#[test]
fn a_file_without_a_known_extension_is_not_probed() {
    let (world, file) = dynamic_sample(A);
    let copy = world.raw("/vm/disk", &file.bytes(0, file.len() as usize));
    world.refused("/vm/disk", ErrorKind::InvalidInput, "format");
    let options = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
    assert_eq!(world.try_open("/vm/disk", &options).unwrap().info().size_bytes, copy.len());
}

#[test]
fn a_raw_size_that_is_not_a_multiple_of_512_is_served_to_its_last_byte() {
    for size in [1usize, 511, 513, 4097, 70_001] {
        let world = World::new();
        let mut model = pattern(size as u64, size);
        world.raw(RAW, &model);
        let disk = world.open(RAW);
        assert_eq!(disk.info().size_bytes, size as u64);
        assert_eq!(read(&disk, 0..size as u64), model);
        write(&disk, size as u64 - 1, &[9]);
        model[size - 1] = 9;
        block_on(disk.flush()).unwrap();
        assert_eq!(read(&disk, 0..size as u64), model);
        assert_eq!(world.files.file(RAW).len(), size as u64);
        let past = Extent::from_range(size as u64 - 1..size as u64 + 1);
        let error = block_on(disk.read(past, &Segments::zeroed(2))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfRange);
    }
}

#[test]
fn a_raw_file_that_grows_while_open_keeps_its_size() {
    let world = World::new();
    let file = world.raw(RAW, &pattern(1, MIB as usize));
    let disk = world.open(RAW);
    file.set_len(2 * MIB);
    assert_eq!(disk.info().size_bytes, MIB);
    let error = block_on(disk.read(Extent::from_range(MIB..MIB + 512), &Segments::zeroed(512)));
    assert_eq!(error.unwrap_err().kind(), ErrorKind::OutOfRange);
    assert_eq!(read(&disk, 0..MIB), pattern(1, MIB as usize));
}

#[test]
fn a_raw_file_that_shrinks_while_open_gives_errors_and_no_panic() {
    let world = World::new();
    let file = world.raw(RAW, &pattern(1, MIB as usize));
    let disk = world.open(RAW);
    file.set_len(MIB / 2);
    let lost = Extent::from_range(MIB - 4096..MIB);
    let error = block_on(disk.read(lost, &Segments::zeroed(4096))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfRange, "{error}");
    assert!(block_on(disk.extents(lost, 10)).is_err());
    assert_eq!(read(&disk, 0..4096), pattern(1, MIB as usize)[..4096]);
}

#[test]
fn offsets_beyond_the_end_or_of_64_bits_are_errors() {
    let (world, _) = dynamic_sample(A);
    world.raw(RAW, &[0; 4096]);
    for path in [A, RAW] {
        let disk = Aligned::new(world.open(path));
        let size = disk.info().size_bytes;
        for (start, len) in [(size, 512), (size - 512, 1024), (u64::MAX - 511, 511), (1 << 63, 512), (u64::MAX - 1, 1)]
        {
            let extent = Extent::new(start, len).unwrap();
            let buffer = Segments::zeroed(len as usize);
            let kinds = [
                block_on(disk.read(extent, &buffer)).unwrap_err().kind(),
                block_on(disk.write(extent, &buffer, false)).unwrap_err().kind(),
                block_on(disk.write_zeroes(extent, Default::default())).unwrap_err().kind(),
                block_on(disk.extents(extent, 4)).unwrap_err().kind(),
            ];
            assert_eq!(kinds, [ErrorKind::OutOfRange; 4], "{path} {start:#x}+{len}");
        }
    }
}

#[test]
fn requests_of_no_bytes_do_nothing() {
    let (world, file) = dynamic_sample(A);
    let len = file.len();
    let disk = world.open(A);
    let size = disk.info().size_bytes;
    for at in [0, 4 * MIB, size] {
        let extent = Extent::from_range(at..at);
        let none = Segments::new();
        block_on(disk.read(extent, &none)).unwrap();
        block_on(disk.write(extent, &none, false)).unwrap();
        block_on(disk.discard(extent)).unwrap();
        block_on(disk.write_zeroes(extent, Default::default())).unwrap();
        assert_eq!(block_on(disk.extents(extent, 4)).unwrap(), []);
    }
    assert_eq!((file.len(), entry(&file, 2)), (len, u32::MAX));
}
