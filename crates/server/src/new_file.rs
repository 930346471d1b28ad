//! A disk that is being made: a file without a name, which gets one when the disk is complete.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode};
use rustix::io::Errno;
use spile_core::{Error, ErrorKind, Result, ResultExt};
use spile_store::{FileId, Folder, OsFiles};

/// What a new disk is made with; the umask takes its part.
const MODE: Mode = Mode::from_raw_mode(0o666);

/// False where /proc is not mounted: then a file without a name can be opened by no path, and gets none.
fn has_descriptor_paths() -> bool {
    Path::new("/proc/self/fd").exists()
}

/// The new disk. Until it is published it has no name, where the file system can do that, and ends with the process. Elsewhere it
/// has a temporary name in its folder, which is removed when this is dropped. The folder is held from the beginning.
pub struct HalfMade {
    file: File,
    folder: Folder,
    /// The name that the disk gets.
    name: OsString,
    temporary: Option<OsString>,
}

impl HalfMade {
    /// An empty file that will be `dst`.
    ///
    /// # Errors
    /// The system's.
    pub fn begin(dst: &Path) -> Result<Self> {
        let failed = |source| Error::io("cannot make a file here", source).at_path(dst);
        let unreached = |e: Error| Error::new(e.kind(), "its folder cannot be opened").caused_by(e).at_path(dst);
        let (folder, name) = Folder::of(dst).map_err(unreached)?;
        let unnamed = if has_descriptor_paths() { folder.create_unnamed(MODE) } else { Err(Errno::OPNOTSUPP.into()) };
        match unnamed {
            Ok(file) => Ok(Self { file, folder, name, temporary: None }),
            // A kernel or file system that has no files without a name says one of these.
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
                    let temporary = temporary_name();
                    let file = folder.create_with(&temporary, MODE)?;
                    Ok(Self { file, folder, name, temporary: Some(temporary) })
                }
                _ => Err(failed(error)),
            },
        }
    }

    /// The file itself, for what needs no image.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// A path by which this process can open the file.
    pub fn path(&self) -> PathBuf {
        match &self.temporary {
            Some(name) => self.folder.path_of(name),
            None => PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd())),
        }
    }

    /// What has to be done when the process ends before the disk is complete.
    pub fn clean_up(&self) -> impl FnOnce() + Send + 'static {
        let (folder, temporary) = (self.folder.clone(), self.temporary.clone());
        move || drop(temporary.map(|name| folder.unlink(&name)))
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
    pub fn name(mut self, dst: &Path) -> Result<()> {
        let (folder, name) = (&self.folder, &self.name);
        self.check_folder(dst)?;
        let named = match &self.temporary {
            None => folder.link(&self.file, name),
            Some(temporary) => folder.rename((temporary, self.id()?), folder, (name, None)),
        };
        named.map_err(|error| if error.kind() == ErrorKind::Exists { exists(dst) } else { unnamed(dst, error) })?;
        self.temporary = None;
        Ok(())
    }

    /// As [`HalfMade::publish`], in the place of the file `older`, if that still has the name. The new one may be used by nobody who might not use the old one, by its
    /// mode; it gets its group where both have the same owner.
    ///
    /// # Errors
    /// `Busy` when another file has the name by now; the system's. The other file has its name then.
    pub fn replace(mut self, dst: &Path, older: Option<FileId>) -> Result<()> {
        self.check_folder(dst)?;
        let over = self.over(dst)?;
        if over.is_some() && over != older {
            return Err(spile_core::exchanged(dst));
        }
        self.take_access(dst)?;
        let id = self.id()?;
        if self.temporary.is_none() {
            let temporary = temporary_name();
            self.folder.link(&self.file, &temporary).map_err(|error| unnamed(dst, error))?;
            self.temporary = Some(temporary);
        }
        if let Some(temporary) = &self.temporary {
            let done = self.folder.rename((temporary, id), &self.folder, (&self.name, over));
            done.map_err(|error| unnamed(dst, error))?;
        }
        self.temporary = None;
        OsFiles::default().sync_name(dst)
    }

    /// The file that has the name now.
    fn over(&self, dst: &Path) -> Result<Option<FileId>> {
        self.folder.id(&self.name).map_err(|source| Error::io("cannot be found", source)).at_path(dst)
    }

    /// Nobody who might not use the file that is to be replaced may use this one. A link in its place says nothing of that.
    fn take_access(&self, dst: &Path) -> Result<()> {
        let failed = |e: std::io::Error| Error::io("cannot give the disk its name", e).at_path(dst);
        let Ok(older) = self.folder.stat(&self.name) else { return Ok(()) };
        let new = self.file.metadata().map_err(failed)?;
        if older.st_uid == new.uid() && older.st_gid != new.gid() {
            // A group that this process is not in is not given.
            let _ = fchown(&self.file, None, Some(older.st_gid));
        }
        let is_file = FileType::from_raw_mode(older.st_mode) == FileType::RegularFile;
        let mode = new.mode() & (older.st_mode | 0o600) & 0o777;
        match is_file && mode != new.mode() & 0o777 {
            true => self.file.set_permissions(std::fs::Permissions::from_mode(mode)).map_err(failed),
            false => Ok(()),
        }
    }

    fn id(&self) -> Result<FileId> {
        let stat = self.file.metadata().map_err(|source| Error::io("stat", source)).at_path(&self.path())?;
        Ok(FileId::of(&stat))
    }

    /// Refuses to give the name in a folder that was moved, or replaced, since the file was begun.
    fn check_folder(&self, dst: &Path) -> Result<()> {
        let is_there = self.folder.is_at_its_path();
        match is_there.map_err(|source| Error::io("cannot be found", source)).at_path(self.folder.path())? {
            true => Ok(()),
            false => {
                let what = "the folder is not at its path any more: the new file gets no name";
                Err(Error::new(ErrorKind::NotFound, what).at_path(dst).hint("begin again"))
            }
        }
    }

    /// An error about the path of the half-made disk, changed to one about the name that the user knows.
    pub fn told_as(&self, dst: &Path, error: Error) -> Error {
        // A file without a name is opened by its descriptor, whose path is told as the kernel resolves it.
        let resolved = format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd());
        if error.path().is_none_or(|path| path != self.path() && path != Path::new(&resolved)) {
            return error;
        }
        let told = Error::new(error.kind(), error.message()).at_path(dst);
        let mut told = error.code().into_iter().fold(told, Error::coded);
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
        if let Some(temporary) = self.temporary.take() {
            let _ = self.id().map(|id| self.folder.remove(&temporary, id));
        }
    }
}

fn unnamed(dst: &Path, error: Error) -> Error {
    let what = format!("cannot give the disk its name: {}", error.message());
    let told = Error::new(error.kind(), what).at_path(dst).caused_by(error.to_string());
    error.hint_text().map_or_else(|| told.duplicate(), |hint| told.duplicate().hint(hint))
}

/// A name that nothing else has.
fn temporary_name() -> OsString {
    let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now_ns = since_1970.map_or(0, |time| time.as_nanos());
    format!(".spile-{}-{now_ns:x}.part", std::process::id()).into()
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
