//! Files that experiments read and write: every block is written before, because a hole would cost less to read.

use std::cell::Cell;
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use spile_core::{Error, ErrorKind, Result, ResultExt};
use spile_server::host_device::HostDevice;
use spile_server::units::format_size;

use super::folder::Folder;

/// What is written at a time, in bytes.
const PIECE_BYTES: usize = 1 << 20;
/// An experiment takes at most this part of the free space: it is not alone on the host.
const PART_OF_FREE: u64 = 4;

/// A file with data in every block, on the device and not only in the page cache. It is removed when this is dropped.
pub struct FilledFile {
    path: PathBuf,
    file: std::fs::File,
    /// Bytes that were filled, and the time that this took.
    filled: Cell<(u64, Duration)>,
    _folder: Folder,
}

/// How many bytes an experiment may take in `folder`: a quarter of what is free there.
///
/// # Errors
/// The system's, with the path.
pub fn room_bytes(folder: &Path) -> Result<u64> {
    let about = rustix::fs::statvfs(folder).map_err(|e| Error::io("look for free space", e.into())).at_path(folder)?;
    Ok(about.f_bavail * about.f_frsize / PART_OF_FREE)
}

/// Looks whether there is room for so many bytes in `folder`.
///
/// # Errors
/// `NoSpace` when they are more than [`room_bytes`].
pub fn check_room(folder: &Path, wanted_bytes: u64) -> Result<()> {
    fits(folder, wanted_bytes, room_bytes(folder)?)
}

/// Looks whether so many bytes are no more than `room_bytes`, which [`room_bytes()`] has said of the folder.
///
/// # Errors
/// `NoSpace` when they are more.
pub fn fits(folder: &Path, wanted_bytes: u64, room_bytes: u64) -> Result<()> {
    if wanted_bytes <= room_bytes {
        return Ok(());
    }
    let (wanted, free) = (format_size(wanted_bytes), format_size(room_bytes.saturating_mul(PART_OF_FREE)));
    let what = format!("{wanted} are needed, and {free} are free, of which an experiment takes a quarter at most");
    Err(Error::new(ErrorKind::NoSpace, what).at_path(folder).hint("use a smaller size, or another folder"))
}

/// Why figures of this file or device, or of files in this folder, are those of no block device; none when they are.
pub fn no_device(path: &Path) -> Option<String> {
    let path = path.canonicalize().ok()?;
    HostDevice::below(&path.display().to_string()).err().map(|why| why.to_string())
}

/// The line on that, for tables, notes and findings; empty when the figures are those of a device.
pub fn warning(no_device: Option<&str>) -> String {
    no_device.map(|why| format!("these are not the figures of a disk: {why}\n")).unwrap_or_default()
}

/// The lines of a text as sentences of what was found, without the stars that a table has.
pub fn sentences(lines: &str) -> Vec<String> {
    lines.lines().map(|line| format!("{}.", line.trim_start_matches("* "))).collect()
}

impl FilledFile {
    /// Makes a file in `folder` with `len_bytes` of data.
    ///
    /// # Errors
    /// `NoSpace` as [`check_room`]; the system's, with the path.
    pub fn new(folder: &Path, name: &str, len_bytes: u64) -> Result<Self> {
        let made = Self::sparse(folder, name, len_bytes)?;
        made.fill_to(len_bytes)?;
        Ok(made)
    }

    /// Makes such a file without data yet.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn sparse(folder: &Path, name: &str, len_bytes: u64) -> Result<Self> {
        check_room(folder, len_bytes)?;
        let folder = Folder::inside(folder, name)?;
        let path = folder.path().join(name);
        let made = std::fs::File::create_new(&path).and_then(|file| file.set_len(len_bytes).map(|()| file));
        let file = made.map_err(|e| Error::io("make a file", e)).at_path(&path)?;
        Ok(Self { path, file, filled: Cell::default(), _folder: folder })
    }

    /// Writes data up to `end_bytes`, from where the last call has ended.
    ///
    /// # Errors
    /// The system's, with the path.
    pub fn fill_to(&self, end_bytes: u64) -> Result<()> {
        let begun = Instant::now();
        let bytes = self.fill(end_bytes).map_err(|e| Error::io("fill a file", e)).at_path(&self.path)?;
        let (before, time) = self.filled.get();
        self.filled.set((before + bytes, time + begun.elapsed()));
        Ok(())
    }

    /// How many bytes were written.
    fn fill(&self, end_bytes: u64) -> std::io::Result<u64> {
        let mut file = &self.file;
        let start = file.stream_position()?;
        let mut at = start;
        // Some file systems recognise pieces of zeroes, and some pieces that repeat.
        let mut piece: Vec<u8> = (0..PIECE_BYTES).map(|at| (at.wrapping_mul(0x9e37_79b1) >> 13) as u8).collect();
        while at < end_bytes {
            let now = (end_bytes - at).min(PIECE_BYTES as u64);
            piece[..8].copy_from_slice(&(at + 1).to_le_bytes());
            file.write_all(&piece[..now as usize])?;
            at += now;
        }
        file.sync_all()?;
        Ok(at - start)
    }

    /// How fast the device took what was filled, its sync included, in bytes a second.
    pub fn bytes_per_s(&self) -> f64 {
        let (bytes, time) = self.filled.get();
        bytes as f64 / time.as_secs_f64().max(1e-6)
    }

    /// Where it is: an absolute path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn every_block_has_data_and_the_file_goes_in_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let file = FilledFile::new(folder.path(), "x", (2 << 20) + 100).unwrap();
        let about = std::fs::metadata(file.path()).unwrap();
        assert_eq!(about.len(), (2 << 20) + 100);
        assert!(about.blocks() * 512 >= 2 << 20);
        assert!(file.bytes_per_s() > 0.0);
        assert!(FilledFile::new(folder.path(), "x", 1).is_err());
        drop(file);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_quarter_of_the_free_space_is_for_experiments() {
        let folder = tempfile::tempdir().unwrap();
        let free_bytes = room_bytes(folder.path()).unwrap() * 4;
        let Err(error) = FilledFile::new(folder.path(), "x", free_bytes / 2) else { panic!("half of it is too much") };
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_lies_on_no_device_is_told() {
        let why = no_device(Path::new("/proc/version"));
        assert!(warning(why.as_deref()).contains("not the figures of a disk"), "{why:?}");
        assert_eq!(warning(None), "");
    }
}
