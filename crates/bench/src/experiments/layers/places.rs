//! The places of `layers`: a file on a file system, a partition of a loop device, and a logical volume, which is device-mapper's
//! linear mapping of such a device, as LVM makes it.
//!
//! The loop devices lie on files beside the first one, past the page cache, so all places end on the same device. They are given up
//! as soon as this process has them open: the kernel takes them away when the last user has closed them, whatever has ended it. What ends
//! this process before that goes with the folder of the file.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result, ResultExt};
use utoipa::ToSchema;

use crate::experiments::filled::FilledFile;
use crate::experiments::folder::undisturbed;

/// Where the partition begins on its device, in sectors of 512 bytes: at 1 MiB, as fdisk would have it.
const FIRST_SECTOR: u64 = 2048;

/// What kind of place it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A file on a file system.
    File,
    /// A partition of a loop device.
    Partition,
    /// A logical volume on a loop device.
    Volume,
}

impl Kind {
    /// The file first.
    pub const ALL: [Self; 3] = [Self::File, Self::Partition, Self::Volume];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Partition => "partition",
            Self::Volume => "volume",
        }
    }
}

/// One place.
pub struct Place {
    /// What it is.
    pub kind: Kind,
    /// Its path.
    pub path: PathBuf,
    /// How fast it was filled, in bytes a second.
    pub filled_bytes_per_s: f64,
    /// Keeps a device until this is dropped.
    _device: Option<File>,
    _file: FilledFile,
}

impl Place {
    /// Makes a place of so many bytes, all written.
    ///
    /// # Errors
    /// `Denied` without root, where the place needs that; when the host lacks what it needs.
    pub fn new(kind: Kind, folder: &Path, len_bytes: u64) -> Result<Self> {
        if kind != Kind::File && !rustix::process::geteuid().is_root() {
            return Err(Error::new(ErrorKind::Denied, "loop devices need root"));
        }
        if kind == Kind::Volume && !Path::new("/sys/class/misc/device-mapper").exists() {
            return Err(Error::new(ErrorKind::Unsupported, "this kernel has no device-mapper, or has not loaded it"));
        }
        let around = if kind == Kind::File { 0 } else { 2 * FIRST_SECTOR * 512 };
        let file = FilledFile::new(folder, &format!("{}.raw", kind.name()), len_bytes + around)?;
        let (path, device) = match kind {
            Kind::File => (file.path().to_owned(), None),
            Kind::Partition => undisturbed(|| on_loop_device(file.path(), len_bytes / 512, partition))?,
            Kind::Volume => undisturbed(|| on_loop_device(file.path(), len_bytes / 512, volume))?,
        };
        Ok(Self { kind, path, filled_bytes_per_s: file.bytes_per_s(), _device: device, _file: file })
    }
}

/// Puts a loop device on `file`, past the page cache, and makes a part of so many sectors on it; its path, and what keeps it.
fn on_loop_device(
    file: &Path,
    sectors: u64,
    make: impl FnOnce(&str, u64) -> Result<(PathBuf, File)>,
) -> Result<(PathBuf, Option<File>)> {
    let file = file.display().to_string();
    // With --partscan the kernel takes the partitions away together with the device.
    let device = run(&["losetup", "--find", "--show", "--partscan", "--direct-io=on", &file])?;
    let made = make(&device, sectors);
    // It goes when its last user does; now, if nothing could be made.
    run(&["losetup", "--detach", &device])?;
    made.map(|(path, part)| (path, Some(part)))
}

fn partition(device: &str, sectors: u64) -> Result<(PathBuf, File)> {
    run(&["addpart", device, "1", &FIRST_SECTOR.to_string(), &sectors.to_string()])?;
    let path = PathBuf::from(format!("{device}p1"));
    open(&path).map(|file| (path, file))
}

fn volume(device: &str, sectors: u64) -> Result<(PathBuf, File)> {
    let name = format!("spile-bench-{}", std::process::id());
    run(&["dmsetup", "create", &name, "--table", &format!("0 {sectors} linear {device} {FIRST_SECTOR}")])?;
    let path = Path::new("/dev/mapper").join(&name);
    let opened = open(&path);
    // As with the loop device: it goes when its last user does. If that fails, it goes with the folder of the file.
    let _ = run(&["dmsetup", "remove", "--deferred", &name]);
    opened.map(|file| (path, file))
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|e| Error::io("open a device", e)).at_path(path)
}

/// Runs a program to its end; what it says on stdout.
fn run(command: &[&str]) -> Result<String> {
    let (name, arguments) = command.split_first().expect("a command has a name");
    let output = Command::new(name).args(arguments).output();
    let output = output.map_err(|e| Error::io(format!("cannot run {name}"), e))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Error::new(ErrorKind::Io, format!("{name} failed: {}", said.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_say_why_they_fail() {
        assert_eq!(run(&["echo", "a"]).unwrap(), "a");
        assert!(run(&["ls", "/nowhere/at/all"]).unwrap_err().to_string().contains("ls failed"));
        assert!(run(&["no-such-program-here"]).is_err());
    }

    #[test]
    fn a_file_is_a_place_for_everyone() {
        let folder = tempfile::tempdir().unwrap();
        let place = Place::new(Kind::File, folder.path(), 1 << 20).unwrap();
        assert_eq!(std::fs::metadata(&place.path).unwrap().len(), 1 << 20);
    }
}
