//! Servers of a folder's disks as commands find them, and what lies in the folder.

use std::fs;
use std::path::Path;

use super::{Served, ok, spile};

const MIB: usize = 1 << 20;

/// Serves `args` with a control socket in the folder of such sockets, where commands look for it.
pub fn serve(dir: &Path, args: &[&str]) -> Served {
    try_serve(dir, args).unwrap_or_else(|err| panic!("serve {args:?}: {err}"))
}

/// The same; what it said on stderr when it ended before it was ready.
pub fn try_serve(dir: &Path, args: &[&str]) -> Result<Served, String> {
    let mut command = spile();
    command.arg("serve").args(args).args(["--nbd", "unix:n"]).current_dir(dir);
    Served::spawn(&mut command, dir.join("n"))
}

/// Makes a raw disk of 16 MiB whose first half is full of `byte`.
pub fn raw(dir: &Path, name: &str, byte: u8) -> Vec<u8> {
    let mut bytes = vec![byte; 8 * MIB];
    bytes.resize(16 * MIB, 0);
    fs::write(dir.join(name), &bytes).unwrap();
    bytes
}

/// The names of all files in `dir`, but for sockets.
pub fn names(dir: &Path) -> Vec<String> {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let files = files.filter(|file| file.file_type().unwrap().is_file());
    let mut names: Vec<_> = files.map(|file| file.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// What the disk shows.
pub fn bytes_of(dir: &Path, disk: &str) -> Vec<u8> {
    bytes_by(dir, disk, &[])
}

/// The same, read with more options.
pub fn bytes_by(dir: &Path, disk: &str, options: &[&str]) -> Vec<u8> {
    ok(dir, &[&["convert", disk, "bytes.raw", "--to", "raw"], options].concat());
    let bytes = fs::read(dir.join("bytes.raw")).unwrap();
    fs::remove_file(dir.join("bytes.raw")).unwrap();
    bytes
}
