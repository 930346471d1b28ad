//! Which process serves which disk of a Xen guest.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use spile_core::{Error, ErrorKind, Result};
use spile_front_blkif::xenbus::guest_of;

/// The name of a disk's files in the run folder, without an extension.
///
/// # Errors
/// `InvalidInput` when the path is no back end's.
pub fn file_stem(backend_path: &str) -> Result<String> {
    let (domain, device) = guest_of(backend_path)?;
    Ok(format!("{domain}-{device}"))
}

/// The right to serve a disk: its pid file, locked for as long as this lives.
pub struct Claim {
    path: PathBuf,
    /// Unlocked when it is closed.
    _file: File,
}

impl Claim {
    /// Takes the right to serve the disk whose pid file is at `path`.
    ///
    /// # Errors
    /// `Busy` when another process has it; the system's.
    pub fn take(path: &Path) -> Result<Self> {
        let problem = |source| Error::io("write", source).at_path(path);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        loop {
            let mut file = options.open(path).map_err(problem)?;
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                return Err(Error::new(ErrorKind::Busy, "another process serves this disk").at_path(path));
            }
            // The process that had it may have removed the file in between. Then other processes find another file.
            let (ours, found) = (file.metadata().map_err(problem)?, fs::metadata(path));
            if !found.is_ok_and(|found| (found.dev(), found.ino()) == (ours.dev(), ours.ino())) {
                continue;
            }
            file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(problem)?;
            return Ok(Self { path: path.to_owned(), _file: file });
        }
    }

    /// The process that serves the disk whose pid file is at `path`, if any does.
    pub fn holder(path: &Path) -> Option<i32> {
        let file = File::open(path).ok()?;
        flock(&file, FlockOperation::NonBlockingLockShared).is_err().then_some(())?;
        fs::read_to_string(path).ok()?.trim().parse().ok()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // The file is still locked, so it is still ours.
        let _ = fs::remove_file(&self.path);
    }
}
