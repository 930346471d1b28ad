//! Disks that are moved, and how far their moves are.

use std::fs;
use std::path::Path;

const MIB: usize = 1 << 20;

/// A folder with `old/NAME.raw`, 48 MiB and full, and an empty folder `new`.
pub fn full(name: &str, new: &str) -> (tempfile::TempDir, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..48 * MIB).map(|at| 1 + (at / 4096 % 251) as u8).collect();
    ["old", new].into_iter().for_each(|folder| fs::create_dir(dir.path().join(folder)).unwrap());
    fs::write(dir.path().join(format!("old/{name}.raw")), &bytes).unwrap();
    (dir, bytes)
}

/// How many bytes of the disk the note of its move says to be durable in the half; 0 while it says nothing.
pub fn noted(dir: &Path, disk: &str) -> u64 {
    let note = fs::read_to_string(dir.join(format!("old/.{disk}.raw.spile-job"))).unwrap_or_default();
    let copied = note.lines().find_map(|line| line.strip_prefix("copied ")?.split(' ').next()?.parse().ok());
    copied.unwrap_or_default()
}
