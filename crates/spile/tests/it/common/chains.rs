//! Disks with parents, of tests that move them together.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::host::serve;
use super::nbd::Client;
use super::{json, ok};

pub const MIB: usize = 1 << 20;

/// A folder with `old/base.raw` of 64 MiB, sparse, `old/mid.vhd`, a child of it with some data, and two children of that: `old/LEAF`, and `old/other.vhd`; and
/// an empty folder called `new`. The megabytes with data in the base have the values from `first` on. What the disks read.
pub fn family(new: &str, leaf: &str, first: u8) -> (tempfile::TempDir, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    ["old", new].into_iter().for_each(|folder| fs::create_dir(path.join(folder)).unwrap());
    let mut bytes = vec![0; 64 * MIB];
    fs::File::create(path.join("old/base.raw")).unwrap().set_len(64 << 20).unwrap();
    let mut write = |disk: &str, at: usize, value: u8| {
        let served = serve(path, &[&format!("old/{disk}")]);
        Client::connect(&served.uri()).unwrap().write(at as u64, &vec![value; MIB], false).unwrap();
        bytes[at..at + MIB].fill(value);
        assert!(served.terminate().success());
    };
    (0..8).for_each(|part| write("base.raw", part * 8 * MIB, first + part as u8));
    ok(path, &["create", "old/mid.vhd", "--parent", "old/base.raw"]);
    write("mid.vhd", 8 * MIB + MIB / 2, 30);
    write("mid.vhd", 21 * MIB, 31);
    for disk in [leaf, "other.vhd"] {
        ok(path, &["create", &format!("old/{disk}"), "--parent", "old/mid.vhd"]);
    }
    (dir, bytes)
}

/// Which file it is, and what it takes.
pub fn file(dir: &Path, path: &str) -> (u64, u64) {
    let stat = fs::metadata(dir.join(path)).unwrap();
    (stat.ino(), stat.blocks() * 512)
}

/// The file names of the layers of `disk`, all of which are in its folder.
pub fn chain(dir: &Path, disk: &str) -> Vec<String> {
    let folder = format!("/{}/", disk.split_once('/').expect("it is in a folder").0);
    let info = json(dir, &["info", disk, "--chain"]);
    let layers = info["layers"].as_array().unwrap().iter().map(|layer| layer["path"].as_str().unwrap());
    layers.map(|path| path.split_once(&folder).expect("it is in the folder").1.to_owned()).collect()
}
