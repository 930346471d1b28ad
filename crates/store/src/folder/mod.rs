//! [`Folder`]: a folder that is held open, and what is done with the names in it.
//!
//! A folder may belong to a tenant, or to another service. Then each name in it may become another file, or a symbolic link, between
//! two system calls. So nothing here uses a path twice:
//!
//! - A path is resolved once, by [`Folder::of`] or [`Folder::find`], and the folder that it leads to is held. From then on a file is a
//!   name in that folder.
//! - A symbolic link is followed only while a path is resolved, and only on the word of somebody who may give it: the links of root and
//!   of this user lead anywhere, those of other users only to files of theirs ([`walk`]).
//! - A file is opened without following a link and without waiting, and looked at before it is used.
//! - A file is made under a name that nothing has, and everything else is done by its descriptor.
//! - A name is changed or removed only while it names the file that the caller expects ([`names`]).
//!
//! No other module of the product uses a system call with a path, but for the exceptions that `cargo xtask tidy` lists.

mod names;
mod walk;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use spile_core::{Error, ErrorKind, OpenMode, Result};

use crate::FileId;

pub use names::copy_access;
pub(crate) use walk::is_trusted;

/// What a file is made with; the umask takes its part.
const NEW_FILE_MODE: Mode = Mode::from_raw_mode(0o666);
/// So many random names are tried.
const NAME_TRIES: usize = 16;

/// A folder that is held open: it stays the same folder when its path leads elsewhere. Clones are the same.
#[derive(Clone, Debug)]
pub struct Folder {
    dir: Arc<OwnedFd>,
    path: Arc<Path>,
}

/// Where a path leads.
#[derive(Clone, Debug)]
pub struct Place {
    /// The folder.
    pub folder: Folder,
    /// The name of the file in it. There need not be such a file.
    pub name: OsString,
    /// The user to whom the file must belong, as a link of that user leads to it.
    owner: Option<u32>,
    /// True when a link was followed: then the path that was resolved is not the file's own.
    is_elsewhere: bool,
    /// True for a link that the kernel makes, such as that of an open file in `/proc`.
    is_kernels: bool,
}

impl Folder {
    /// The folder in which the file at `path` lies or is to lie, and the file's name. Nothing is said about a file of that name: it
    /// may be a link.
    ///
    /// # Errors
    /// `Denied` when a link on the way is not to be followed; `InvalidInput` for a path that names no file; the system's.
    pub fn of(path: &Path) -> Result<(Folder, OsString)> {
        let name = file_name(path)?.to_owned();
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Ok((Self::open(parent)?, name))
    }

    /// The folder at `path`.
    ///
    /// # Errors
    /// As [`Folder::of`].
    pub fn open(path: &Path) -> Result<Folder> {
        walk::folder(path)
    }

    /// Where `path` leads, when a link in the place of the file is followed, too. It is for a path that was given by an operator,
    /// and is to be called once for it.
    ///
    /// # Errors
    /// As [`Folder::of`].
    pub fn find(path: &Path) -> Result<Place> {
        walk::place(path)
    }

    /// The path that led to the folder when it was opened, without links. The folder may have moved.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of the file `name` in this folder, for messages.
    pub fn path_of(&self, name: &OsStr) -> PathBuf {
        self.path.join(name)
    }

    /// What is at `name`, which may be a link.
    ///
    /// # Errors
    /// The system's.
    pub fn stat(&self, name: &OsStr) -> io::Result<Stat> {
        Ok(rustix::fs::statat(&*self.dir, single(name)?, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Which file is at `name`; `None` when there is nothing. A link is a file of its own.
    ///
    /// # Errors
    /// The system's.
    pub fn id(&self, name: &OsStr) -> io::Result<Option<FileId>> {
        match self.stat(name) {
            Ok(stat) => Ok(Some(id_of(&stat))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens the file or block device `name`. A link is not followed; anything else is refused before it is opened, for to open a pipe may wait for ever,
    /// and to open a watchdog starts it.
    ///
    /// # Errors
    /// `InvalidInput` for what is neither a file nor a block device; the system's.
    pub fn open_file(&self, name: &OsStr, mode: OpenMode) -> Result<File> {
        self.open_flags(name, mode, OFlags::empty()).map_err(|error| self.at(error, name))
    }

    pub(crate) fn open_flags(&self, name: &OsStr, mode: OpenMode, flags: OFlags) -> Result<File> {
        let looked = self.stat(name).map_err(failed("open"))?;
        check_type(FileType::from_raw_mode(looked.st_mode))?;
        let access = if mode == OpenMode::ReadWrite { OFlags::RDWR } else { OFlags::RDONLY };
        let careful = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(&*self.dir, name, access | careful | flags, Mode::empty());
        let file = opened.map_err(io::Error::from).map_err(failed("open"))?;
        let stat = rustix::fs::fstat(&file).map_err(io::Error::from).map_err(failed("stat"))?;
        check_type(FileType::from_raw_mode(stat.st_mode))?;
        wait_again(&file).map_err(failed("open"))?;
        Ok(file.into())
    }

    /// What the file `name` holds, of at most `most_bytes`; `None` when there is no file.
    ///
    /// # Errors
    /// `InvalidInput` for what is no file, and for one that is longer; the system's.
    pub fn read(&self, name: &OsStr, most_bytes: u64) -> Result<Option<Vec<u8>>> {
        match self.open_file(name, OpenMode::ReadOnly) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
            Ok(file) => read_bounded(&file, most_bytes).map(Some).map_err(|error| self.at(error, name)),
        }
    }

    /// Makes the file `name`, which must not be there, and opens it for reading and writing.
    ///
    /// # Errors
    /// `Exists` when something has the name, a link among them; the system's.
    pub fn create(&self, name: &OsStr) -> Result<File> {
        self.create_with(name, NEW_FILE_MODE)
    }

    /// As [`Folder::create`], with a mode, of which the umask takes its part.
    ///
    /// # Errors
    /// As [`Folder::create`].
    pub fn create_with(&self, name: &OsStr, mode: Mode) -> Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = single(name).and_then(|name| Ok(rustix::fs::openat(&*self.dir, name, flags, mode)?));
        made.map(File::from).map_err(failed("create")).map_err(|error| self.at(error, name))
    }

    /// Makes a file that has a hidden name which nobody can foretell, with `stem` in it. It is for what is to take another name when it is whole.
    ///
    /// # Errors
    /// The system's.
    pub fn create_hidden(&self, stem: &OsStr, mode: Mode) -> Result<(File, OsString)> {
        let mut last = None;
        for _ in 0..NAME_TRIES {
            let name = hidden_name(stem);
            match self.create_with(&name, mode) {
                Err(error) if error.kind() == ErrorKind::Exists => last = Some(error),
                made => return made.map(|file| (file, name)),
            }
        }
        Err(last.unwrap_or_else(|| Error::new(ErrorKind::Exists, "no free name was found").at_path(&self.path)))
    }

    /// Makes a file that has no name, if the file system can.
    ///
    /// # Errors
    /// The system's; `Unsupported` where there are no such files.
    pub fn create_unnamed(&self, mode: Mode) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&*self.dir, ".", flags, mode)?.into())
    }

    /// The names in the folder, but for `.` and `..`.
    ///
    /// # Errors
    /// The system's.
    pub fn list(&self) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::new(self.readable()?)? {
            let name = entry?.file_name().to_owned();
            if !matches!(name.to_bytes(), b"." | b"..") {
                names.push(OsStr::from_bytes(name.to_bytes()).to_owned());
            }
        }
        Ok(names)
    }

    /// Makes durable which names are in the folder.
    ///
    /// # Errors
    /// The system's; `Unsupported` where this user may not read the folder.
    pub fn sync(&self) -> io::Result<()> {
        match self.readable() {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(io::ErrorKind::Unsupported.into()),
            opened => File::from(opened?).sync_all(),
        }
    }

    /// Whether the folder is at its path still.
    ///
    /// # Errors
    /// The system's.
    pub fn is_at_its_path(&self) -> io::Result<bool> {
        let ours = rustix::fs::fstat(&*self.dir)?;
        match rustix::fs::stat(&*self.path) {
            Ok(there) => Ok((there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)),
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// True when somebody else than root and this user may change the names in the folder.
    ///
    /// # Errors
    /// The system's.
    pub fn is_foreign(&self) -> io::Result<bool> {
        let stat = rustix::fs::fstat(&*self.dir)?;
        Ok(!walk::is_trusted(stat.st_uid) || stat.st_mode & 0o022 != 0)
    }

    /// The owner of the folder.
    ///
    /// # Errors
    /// The system's.
    pub fn owner(&self) -> io::Result<u32> {
        Ok(rustix::fs::fstat(&*self.dir)?.st_uid)
    }

    /// The folder, opened for reading: it is held without.
    fn readable(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&*self.dir, ".", flags, Mode::empty())?)
    }

    fn at(&self, error: Error, name: &OsStr) -> Error {
        error.at_path(&self.path_of(name))
    }
}

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

impl Place {
    /// The file's own path, without links.
    pub fn path(&self) -> PathBuf {
        self.folder.path_of(&self.name)
    }

    /// Which file is there now; `None` when there is none.
    ///
    /// # Errors
    /// The system's.
    pub fn id(&self) -> io::Result<Option<FileId>> {
        match self.is_kernels {
            true => Ok(std::fs::metadata(self.path()).ok().map(|stat| FileId::of(&stat))),
            false => self.folder.id(&self.name),
        }
    }

    /// The file's own path, when there is something.
    ///
    /// # Errors
    /// As [`Place::open`].
    pub fn existing_path(&self) -> Result<PathBuf> {
        let path = self.path();
        if self.is_kernels {
            // A file that has no name has no other path than this one.
            return Ok(path.canonicalize().unwrap_or(path));
        }
        let stat = self.folder.stat(&self.name).map_err(failed("cannot be found")).map_err(|e| e.at_path(&path))?;
        walk::check_owner(self.owner, stat.st_uid).map_err(|error| error.at_path(&path))?;
        Ok(path)
    }

    /// True when a link was followed on the way.
    pub fn is_elsewhere(&self) -> bool {
        self.is_elsewhere
    }

    /// Opens the file or block device, as [`Folder::open_file`] does.
    ///
    /// # Errors
    /// As there; `Denied` when another user's link has led to a file that is not that user's.
    pub fn open(&self, mode: OpenMode) -> Result<File> {
        self.open_flags(mode, OFlags::empty()).map_err(|error| self.folder.at(error, &self.name))
    }

    pub(crate) fn open_flags(&self, mode: OpenMode, flags: OFlags) -> Result<File> {
        if self.is_kernels {
            return open_kernels(&self.path(), mode, flags);
        }
        let file = self.folder.open_flags(&self.name, mode, flags)?;
        let stat = file.metadata().map_err(failed("stat"))?;
        walk::check_owner(self.owner, stat.uid())?;
        Ok(file)
    }
}

/// Opens a file by a link that the kernel has made: it leads to an open file, and nobody else can have put it there.
pub(crate) fn open_kernels(path: &Path, mode: OpenMode, flags: OFlags) -> Result<File> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let looked = std::fs::metadata(path).map_err(failed("open"))?;
    check_type(type_of(&looked))?;
    let mut options = File::options();
    options.read(true).write(mode == OpenMode::ReadWrite).custom_flags(flags.bits() as i32);
    options.open(path).map_err(failed("open"))
}

fn type_of(stat: &std::fs::Metadata) -> FileType {
    match stat.file_type() {
        kind if kind.is_block_device() => FileType::BlockDevice,
        kind if kind.is_file() => FileType::RegularFile,
        _ => FileType::Unknown,
    }
}

/// Refuses what cannot hold an image, and says what it is.
fn check_type(found: FileType) -> Result<()> {
    let what = match found {
        FileType::RegularFile | FileType::BlockDevice => return Ok(()),
        FileType::Symlink => "this is a symbolic link, which is not followed here",
        FileType::Fifo => "this is a pipe, and neither a file nor a block device",
        FileType::Socket => "this is a socket, and neither a file nor a block device",
        FileType::Directory => "this is a folder, and neither a file nor a block device",
        FileType::CharacterDevice => "this is a character device, and neither a file nor a block device",
        FileType::Unknown => "this is neither a file nor a block device",
    };
    Err(Error::new(ErrorKind::InvalidInput, what))
}

/// Reads and writes wait again: the file was opened so that the open did not.
fn wait_again(file: &OwnedFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(rustix::fs::fcntl_setfl(file, flags - OFlags::NONBLOCK)?)
}

/// What an open file holds, of at most `most_bytes`.
pub(crate) fn read_bounded(file: &File, most_bytes: u64) -> Result<Vec<u8>> {
    let too_long = |bytes: u64| {
        let what = format!("the file has {bytes} bytes, and may have {most_bytes} at most");
        Error::new(ErrorKind::InvalidInput, what)
    };
    let stat = file.metadata().map_err(failed("stat"))?;
    if !stat.is_file() {
        return Err(Error::new(ErrorKind::InvalidInput, "this is no file"));
    }
    if stat.len() > most_bytes {
        return Err(too_long(stat.len()));
    }
    let mut bytes = Vec::new();
    file.take(most_bytes + 1).read_to_end(&mut bytes).map_err(failed("read"))?;
    if bytes.len() as u64 > most_bytes {
        return Err(too_long(bytes.len() as u64));
    }
    Ok(bytes)
}

/// The identity of the file that `stat` describes.
pub(crate) fn id_of(stat: &Stat) -> FileId {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => FileId::BlockDevice(stat.st_rdev),
        _ => FileId::File { device: stat.st_dev, inode: stat.st_ino },
    }
}

/// A name that nobody can foretell.
fn hidden_name(stem: &OsStr) -> OsString {
    use std::hash::{BuildHasher as _, Hasher as _, RandomState};
    // The keys of a new RandomState come from the kernel's random numbers.
    let random = RandomState::new().build_hasher().finish();
    let end = format!(".spile-{random:016x}");
    // 255 bytes are the most that a name may have.
    let room = 254 - end.len();
    let mut name = OsString::from(".");
    name.push(OsStr::from_bytes(&stem.as_bytes()[..stem.len().min(room)]));
    name.push(end);
    name
}

/// The last component of a path.
fn file_name(path: &Path) -> Result<&OsStr> {
    path.file_name().ok_or_else(|| Error::new(ErrorKind::InvalidInput, "the path names no file").at_path(path))
}

/// Refuses what is more than one name.
fn single(name: &OsStr) -> io::Result<&OsStr> {
    let is_one = !name.is_empty() && !name.as_bytes().contains(&b'/') && name != "." && name != "..";
    is_one.then_some(name).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))
}

pub(crate) fn failed(what: &'static str) -> impl Fn(io::Error) -> Error {
    move |source| Error::io(what, source)
}

#[cfg(test)]
mod tests;
