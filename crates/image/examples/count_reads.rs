//! `count_reads KIND READS`: reads 4 KiB at that many places of a disk, and checks nothing but that each
//! read succeeds. `cargo xtask count` runs it under callgrind to count the instructions of the image code.
//!
//! The kind is a format, or `chain`: thirty VHDs, the lowest of which is full, and each child has 4 KiB here and there. The whole disk
//! is written, and its maps are in memory. The store is silent while the counted reads run.

#[path = "../tests/it/qcow2_image/mod.rs"]
mod qcow2_image;
mod silent;

use std::path::Path;

use qcow2_image::Image;
use silent::{Folder, SilentStore, now, work_beside};
use spile_core::{Disk, Extent, Segments, Store, StoreOffset, Via};
use spile_engine::OsEnv;
use spile_image::create::{NewImage, NewParent};
use spile_image::{Format, Graph};

const DISK_BYTES: u64 = 16 << 20;
const READ_BYTES: u64 = 4096;
const CLUSTER_BITS: u32 = 16;
const PATH: &str = "/disk";
/// Images of a chain, and in how many places each child was written.
const CHAIN: usize = 30;
const CHILD_WRITES: u64 = 64;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [kind, reads] = &words[..] else { panic!("usage: count_reads FORMAT|chain READS") };
    let reads = reads.parse().unwrap();
    let folder = Folder::new(1);
    let disk = match kind.as_str() {
        "chain" => chain(&folder),
        "qcow2" => written_qcow2(&folder),
        format => written(&folder, format.parse().unwrap()),
    };
    read_at_random(&disk, DISK_BYTES / READ_BYTES);
    folder.fall_silent();
    read_at_random(&disk, reads);
}

fn read_at_random(disk: &impl Disk, reads: u64) {
    let into = Segments::zeroed(READ_BYTES as usize);
    for number in 0..reads {
        // An odd factor: every place is read before one is read again.
        let place = number * 2_654_435_761 % (DISK_BYTES / READ_BYTES);
        let extent = Extent::new(place * READ_BYTES, READ_BYTES).unwrap();
        now(disk.read(extent, &into)).unwrap();
    }
}

/// A disk of a format that can be written, full of data.
fn written(folder: &Folder, format: Format) -> Graph<SilentStore> {
    let new = NewImage::new(DISK_BYTES);
    now(format.create(&folder.file(Path::new(PATH)), &OsEnv, &new)).unwrap();
    let disk = folder.open(PATH, format, false);
    let ones = Segments::zeroed(1 << 20);
    ones.fill(1);
    for offset in (0..DISK_BYTES).step_by(1 << 20) {
        now(disk.write(Extent::new(offset, 1 << 20).unwrap(), &ones, false)).unwrap();
        work_beside();
    }
    disk
}

/// A chain of VHDs: a full one, and children that have 4 KiB here and there in every block.
fn chain(folder: &Folder) -> Graph<SilentStore> {
    let mut disk = written(folder, Format::Vhd);
    let some = Segments::zeroed(READ_BYTES as usize);
    for level in 1..CHAIN as u64 {
        now(disk.close()).unwrap();
        let path = child(folder, &disk, level);
        disk = folder.open(&path, Format::Vhd, false);
        for number in 0..CHILD_WRITES {
            let place = (level << 32 | number) * 2_654_435_761 % (DISK_BYTES / READ_BYTES);
            now(disk.write(Extent::new(place * READ_BYTES, READ_BYTES).unwrap(), &some, false)).unwrap();
            work_beside();
        }
    }
    disk
}

/// A new child of `disk`; its path.
fn child(folder: &Folder, disk: &Graph<SilentStore>, level: u64) -> String {
    let info = disk.layers().swap_remove(0);
    let name = info.path.file_name().unwrap().to_str().unwrap().to_owned();
    let parent = NewParent {
        relative_path: name.clone(),
        name,
        format: info.format,
        identity: info.identity,
        changed_unix_s: info.facts.changed_unix_s,
    };
    let path = format!("{PATH}-{level}");
    let new = NewImage { parent: Some(parent), ..NewImage::new(DISK_BYTES) };
    now(Format::Vhd.create(&folder.file(Path::new(&path)), &OsEnv, &new)).unwrap();
    path
}

/// The qcow2 image of a disk full of data.
fn written_qcow2(folder: &Folder) -> Graph<SilentStore> {
    let mut image = Image::new(CLUSTER_BITS, DISK_BYTES);
    for cluster in 0..DISK_BYTES >> CLUSTER_BITS {
        image.data(cluster, 1);
    }
    let bytes = image.finish();
    let from = Segments::zeroed(bytes.len());
    from.copy_from_slice(0, &bytes);
    now(folder.file(Path::new(PATH)).write_at(StoreOffset(0), &from, Via::Cached)).unwrap();
    folder.open(PATH, Format::Qcow2, true)
}
