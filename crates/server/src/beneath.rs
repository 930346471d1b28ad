//! What lies beneath a block device: the file of a loop device, the devices that it is made of, the disk of a partition.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{major, makedev, minor};
use spile_store::FileId;

/// True when two files or devices may have bytes in common: one lies beneath the other, or both are made of one file.
pub fn may_share_bytes(a: FileId, b: FileId) -> bool {
    if a == b {
        return true;
    }
    let (under_a, under_b) = (and_beneath(a), and_beneath(b));
    let is_file = |id: &&FileId| matches!(id, FileId::File { .. });
    under_a.contains(&b) || under_b.contains(&a) || under_a.intersection(&under_b).any(|id| is_file(&id))
}

/// The file or device, and all that is known to lie beneath it.
fn and_beneath(id: FileId) -> HashSet<FileId> {
    let (mut found, mut next) = (HashSet::new(), vec![id]);
    while let Some(id) = next.pop() {
        if let (true, FileId::BlockDevice(number)) = (found.insert(id), id) {
            next.extend(right_beneath(number));
        }
    }
    found
}

/// What the kernel says of a device (`/sys/dev/block`).
fn right_beneath(number: u64) -> Vec<FileId> {
    let folder = PathBuf::from(format!("/sys/dev/block/{}:{}", major(number), minor(number)));
    let slaves = fs::read_dir(folder.join("slaves")).into_iter().flatten().flatten();
    let mut found: Vec<_> = slaves.filter_map(|slave| device_at(&slave.path())).collect();
    found.extend(backing_file(&folder));
    if folder.join("partition").exists() {
        found.extend(folder.canonicalize().ok().and_then(|folder| device_at(folder.parent()?)));
    }
    found
}

/// The device of a folder of /sys.
fn device_at(folder: &Path) -> Option<FileId> {
    let text = fs::read_to_string(folder.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(FileId::BlockDevice(makedev(major.parse().ok()?, minor.parse().ok()?)))
}

/// The file of a loop device; `None` for another device, and when the file is not found by its name any more.
fn backing_file(folder: &Path) -> Option<FileId> {
    let text = fs::read_to_string(folder.join("loop/backing_file")).ok()?;
    fs::metadata(text.trim_end_matches('\n')).ok().map(|stat| FileId::of(&stat))
}
