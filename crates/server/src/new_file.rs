//! A disk that is being made: a file without a name, which gets one when the disk is complete.

use std::fs::File;
use std::io::ErrorKind as IoKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, linkat, open, renameat_with};
use rustix::io::Errno;
use spile_core::{Error, ErrorKind, Result, ResultExt};
use spile_store::OsFiles;

/// False where /proc is not mounted: then a file without a name can be opened by no path, and gets none.
fn has_descriptor_paths() -> bool {
    Path::new("/proc/self/fd").exists()
}

/// The new disk. Until it is published it has no name, where the file system can do that, and ends with the process. Elsewhere it
/// has a temporary name in its folder, which is removed when this is dropped.
pub struct HalfMade {
    file: File,
    temporary: Option<PathBuf>,
}

impl HalfMade {
    /// An empty file that will be `dst`.
    ///
    /// # Errors
    /// The system's.
    pub fn begin(dst: &Path) -> Result<Self> {
        let folder = folder_of(dst);
        let mode = Mode::from_raw_mode(0o666);
        if !has_descriptor_paths() {
            return Self::begin_with_name(folder).at_path(dst);
        }
        match open(folder, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode) {
            Ok(fd) => Ok(Self { file: fd.into(), temporary: None }),
            // A kernel or file system that has no files without a name says one of these.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => Self::begin_with_name(folder).at_path(dst),
            Err(errno) => Err(Error::io("cannot make a file here", errno.into()).at_path(dst)),
        }
    }

    fn begin_with_name(folder: &Path) -> Result<Self> {
        let path = temporary_name(folder);
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(|e| Error::io("cannot make a file here", e))?;
        Ok(Self { file, temporary: Some(path) })
    }

    /// The file itself, for what needs no image.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// A path by which this process can open the file.
    pub fn path(&self) -> PathBuf {
        let by_descriptor = || PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        self.temporary.clone().unwrap_or_else(by_descriptor)
    }

    /// What has to be done when the process ends before the disk is complete.
    pub fn clean_up(&self) -> impl FnOnce() + Send + 'static {
        let temporary = self.temporary.clone();
        move || drop(temporary.map(std::fs::remove_file))
    }

    /// Gives the disk its name, which nothing may have by now, and makes that durable.
    ///
    /// # Errors
    /// `Exists`; the system's.
    pub fn publish(self, dst: &Path) -> Result<()> {
        self.name(dst)?;
        OsFiles::default().sync_name(dst)
    }

    /// As [`HalfMade::publish`], of a file whose name needs not be durable yet.
    ///
    /// # Errors
    /// As there.
    pub fn name(self, dst: &Path) -> Result<()> {
        let failed = |e: std::io::Error| match e.kind() {
            IoKind::AlreadyExists => exists(dst),
            _ => Error::io("cannot give the disk its name", e).at_path(dst),
        };
        let Some(temporary) = &self.temporary else {
            return linkat(CWD, self.path(), CWD, dst, AtFlags::SYMLINK_FOLLOW).map_err(|e| failed(e.into()));
        };
        match renameat_with(CWD, temporary, CWD, dst, RenameFlags::NOREPLACE) {
            // Not every file system can rename without replacing. A hard link does not replace either.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                std::fs::hard_link(temporary, dst).map_err(failed)?
            }
            renamed => renamed.map_err(|e| failed(e.into()))?,
        }
        Ok(())
    }

    /// As [`HalfMade::publish`], in the place of the file that has that name. The new one may be used by nobody who might not use the old one, by its mode; it
    /// gets its group where both have the same owner.
    ///
    /// # Errors
    /// The system's. The other file has its name then.
    pub fn replace(mut self, dst: &Path) -> Result<()> {
        let failed = |e: std::io::Error| Error::io("cannot give the disk its name", e).at_path(dst);
        if let (Ok(older), Ok(new)) = (std::fs::symlink_metadata(dst), self.file.metadata()) {
            if older.uid() == new.uid() && older.gid() != new.gid() {
                // A group that this process is not in is not given.
                let _ = fchown(&self.file, None, Some(older.gid()));
            }
            let mode = new.mode() & (older.mode() | 0o600) & 0o777;
            if older.is_file() && mode != new.mode() & 0o777 {
                self.file.set_permissions(std::fs::Permissions::from_mode(mode)).map_err(failed)?;
            }
        }
        if self.temporary.is_none() {
            let temporary = temporary_name(folder_of(dst));
            linkat(CWD, self.path(), CWD, &temporary, AtFlags::SYMLINK_FOLLOW).map_err(|e| failed(e.into()))?;
            self.temporary = Some(temporary);
        }
        if let Some(temporary) = &self.temporary {
            std::fs::rename(temporary, dst).map_err(failed)?;
        }
        self.temporary = None;
        OsFiles::default().sync_name(dst)
    }

    /// An error about the path of the half-made disk, changed to one about the name that the user knows.
    pub fn told_as(&self, dst: &Path, error: Error) -> Error {
        if error.path() != Some(&self.path()) {
            return error;
        }
        let mut told = Error::new(error.kind(), error.message()).at_path(dst);
        if let Some(offset) = error.offset_bytes() {
            told = told.at_offset(offset);
        }
        if let Some(source) = std::error::Error::source(&error) {
            told = told.caused_by(source.to_string());
        }
        match (error.kind(), error.hint_text()) {
            // Not for a file that is longer than any may be.
            (ErrorKind::NoSpace, None) if error.may_pass() => told.hint("free some space; the half-made disk is gone"),
            (_, Some(hint)) => told.hint(hint),
            _ => told,
        }
    }
}

impl Drop for HalfMade {
    fn drop(&mut self) {
        let _ = self.temporary.take().map(std::fs::remove_file);
    }
}

/// A name in `folder` that nothing else has.
fn temporary_name(folder: &Path) -> PathBuf {
    let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now_ns = since_1970.map_or(0, |time| time.as_nanos());
    folder.join(format!(".spile-{}-{now_ns:x}.part", std::process::id()))
}

/// The error for a name that is taken.
pub fn exists(path: &Path) -> Error {
    let device = std::fs::metadata(path).is_ok_and(|stat| stat.file_type().is_block_device());
    let what = if device { "this is a block device" } else { "there is something of this name already" };
    let hint = match device {
        true => "--onto overwrites all that is on it",
        false => "remove it or choose another name; --onto overwrites it",
    };
    Error::new(ErrorKind::Exists, what).at_path(path).hint(hint)
}

/// The folder that `path` lies in.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."))
}
