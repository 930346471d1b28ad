//! `count_writes CASE WRITES`: writes 4 KiB at that many places, and checks nothing but that each write succeeds. `cargo xtask
//! count` runs it under callgrind to count the instructions and the allocations of one write. CASE is one of:
//!
//! - `free`, `locked`: a write through the node to a raw image that takes any alignment, or wants 512 bytes. With an alignment, each
//!   write holds its range, so that no other write of a part of a sector undoes it.
//! - `raw`, `vhd`, `child` and `first` or `again`: first writes, one place after the other, into an empty image (the child's
//!   parent is empty, too), or rewrites of places that were written before. What the image has to do beside requests is
//!   counted, too.
//!
//! The store is silent while the counted writes run.

mod silent;

use std::path::Path;

use silent::{Folder, SilentStore, now, work_beside};
use spile_core::{Disk, Extent, Segments};
use spile_engine::OsEnv;
use spile_image::create::{NewImage, NewParent};
use spile_image::{Format, Graph};
use spile_node::Node;

const DISK_BYTES: u64 = 1 << 30;
const WRITE_BYTES: u64 = 4096;
const PARENT: &str = "parent.raw";

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (folder, disk, is_again, writes) = match words[..] {
        ["free", writes] => (Folder::new(1), "raw", true, writes),
        ["locked", writes] => (Folder::new(512), "raw", true, writes),
        [disk, "first", writes] => (Folder::new(1), disk, false, writes),
        [disk, "again", writes] => (Folder::new(1), disk, true, writes),
        _ => panic!("usage: count_writes free|locked|(raw|vhd|child first|again) WRITES"),
    };
    let disk = empty_disk(&folder, disk);
    let node = Node::new(disk);
    let writes: u64 = writes.parse().unwrap();
    assert!(writes * WRITE_BYTES <= DISK_BYTES, "each place is written once");
    folder.fall_silent();
    if is_again {
        write_in_sequence(&node, 1 << 20, DISK_BYTES >> 20);
    }
    write_in_sequence(&node, WRITE_BYTES, writes);
}

fn write_in_sequence(disk: &impl Disk, len_bytes: u64, writes: u64) {
    let from = Segments::zeroed(len_bytes as usize);
    for number in 0..writes {
        now(disk.write(Extent::new(number * len_bytes, len_bytes).unwrap(), &from, false)).unwrap();
        work_beside();
    }
}

fn empty_disk(folder: &Folder, name: &str) -> Graph<SilentStore> {
    let create = |path: &str, format: Format, parent: Option<NewParent>| {
        let new = NewImage { parent, ..NewImage::new(DISK_BYTES) };
        now(format.create(&folder.file(Path::new(path)), &OsEnv, &new)).unwrap();
    };
    let (path, format) = if name == "raw" { ("/vm/disk.raw", Format::Raw) } else { ("/vm/disk.vhd", Format::Vhd) };
    let parent = (name == "child").then(|| NewParent {
        relative_path: PARENT.to_owned(),
        name: PARENT.to_owned(),
        format: Format::Raw,
        identity: None,
        changed_unix_s: None,
    });
    if parent.is_some() {
        create(&format!("/vm/{PARENT}"), Format::Raw, None);
    }
    create(path, format, parent);
    let disk = folder.open(path, format, false);
    disk.begin();
    work_beside();
    disk
}
