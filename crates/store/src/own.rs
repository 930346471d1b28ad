//! Small files that Spile keeps beside disks and backups: notes, changed blocks, manifests on their way.
//!
//! Their names are known, so whoever may write in the folder may have put something else there: a link, a pipe, a file of his own that
//! says what he likes. A file is taken for one of Spile's only when root or this user has made it and it has no other name. What is not is
//! passed over, and the log says whose it is.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{AtFlags, FileType, Mode, Stat};
use spile_core::{Error, ErrorKind, OpenMode, Result};

use crate::files::{AnyStore, OsFiles};
use crate::folder::{Folder, failed, is_trusted};

/// The longest note of text that Spile keeps: one is a few lines, or a path for each child.
pub const MOST_NOTE_BYTES: u64 = 4 << 20;

impl Folder {
    /// Opens the file `name` if it is one of Spile's own; `None` when nothing has the name. `also` is a user who may have it, too.
    ///
    /// # Errors
    /// `Denied`, without an errno ([`is_foreign`]), for what is not Spile's; the system's.
    pub fn open_own(&self, name: &OsStr, mode: OpenMode, also: Option<u32>) -> Result<Option<File>> {
        let looked = match self.stat(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            looked => looked.map_err(failed("open")).map_err(|error| error.at_path(&self.path_of(name)))?,
        };
        // What it is decides whether it may be opened at all.
        self.check_own(&looked, also).map_err(|error| error.at_path(&self.path_of(name)))?;
        match self.open_file(name, mode) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
            Ok(file) => {
                let checked = self.check_own_file(&file, also);
                checked.map(|()| Some(file)).map_err(|error| error.at_path(&self.path_of(name)))
            }
        }
    }

    /// What the file `name` of Spile's own holds, of at most `most_bytes`; `None` when there is none.
    ///
    /// # Errors
    /// As [`Folder::open_own`]; `InvalidInput` for one that is longer.
    pub fn read_own(&self, name: &OsStr, most_bytes: u64) -> Result<Option<Vec<u8>>> {
        let Some(file) = self.open_own(name, OpenMode::ReadOnly, None)? else { return Ok(None) };
        crate::folder::read_bounded(&file, most_bytes).map(Some).map_err(|error| error.at_path(&self.path_of(name)))
    }

    /// Refuses an open file that is none of Spile's own.
    ///
    /// # Errors
    /// As [`Folder::open_own`].
    pub fn check_own_file(&self, file: impl AsFd, also: Option<u32>) -> Result<()> {
        let stat = rustix::fs::fstat(file).map_err(|errno| failed("stat")(errno.into()))?;
        self.check_own(&stat, also)
    }

    fn check_own(&self, stat: &Stat, also: Option<u32>) -> Result<()> {
        let what = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile if stat.st_nlink > 1 => "it has another name, too".to_owned(),
            FileType::RegularFile if self.is_makers(stat.st_uid) || also == Some(stat.st_uid) => return Ok(()),
            FileType::RegularFile => format!("it belongs to the user {}", stat.st_uid),
            FileType::Symlink => format!("it is a symbolic link of the user {}", stat.st_uid),
            FileType::Fifo => format!("it is a pipe of the user {}", stat.st_uid),
            _ => format!("it is no file, and belongs to the user {}", stat.st_uid),
        };
        let error = Error::new(ErrorKind::Denied, format!("Spile has not made this: {what}"));
        Err(error.hint("look what it is, and remove it; nothing in it is used"))
    }

    /// True for root and this user, and for the user to whom files belong that this process makes here: a file server may say another one.
    fn is_makers(&self, user: u32) -> bool {
        is_trusted(user) || self.maker().is_ok_and(|maker| maker == user)
    }

    /// To whom a file belongs that this process makes here.
    fn maker(&self) -> io::Result<u32> {
        let mode = Mode::from_raw_mode(0o600);
        if let Ok(file) = self.create_unnamed(mode) {
            return Ok(rustix::fs::fstat(&file)?.st_uid);
        }
        let (file, name) = self.create_hidden(OsStr::new("probe"), mode).map_err(io::Error::other)?;
        let stat = rustix::fs::fstat(&file);
        rustix::fs::unlinkat(self, &name, AtFlags::empty())?;
        Ok(stat?.st_uid)
    }
}

/// True for the error of [`Folder::open_own`] about a file that is not Spile's.
pub fn is_foreign(error: &Error) -> bool {
    error.kind() == ErrorKind::Denied && error.os_errno().is_none()
}

/// `found`, or `None` and a line in the log when it is not Spile's.
///
/// # Errors
/// The others.
pub fn unless_foreign<T>(found: Result<Option<T>>) -> Result<Option<T>> {
    match found {
        Err(error) if is_foreign(&error) => {
            tell_once(&error);
            Ok(None)
        }
        found => found,
    }
}

/// So many files are told of.
const MOST_TOLD: usize = 256;

/// Says once in the life of this process that a file is passed over: many look at each.
fn tell_once(error: &Error) {
    static TOLD: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    let path = error.path().unwrap_or(Path::new("")).to_owned();
    if told.len() < MOST_TOLD && told.insert(path) {
        drop(told);
        tracing::warn!(%error, "a file is passed over");
    }
}

/// What the small file at `path` holds, of at most `most_bytes`, whoever has made it; `None` when there is none. A link at `path` is not
/// followed, and a pipe is not waited for.
///
/// # Errors
/// `InvalidInput` for what is no file, and for one that is longer; the system's.
pub fn read_small(path: &Path, most_bytes: u64) -> Result<Option<Vec<u8>>> {
    let (folder, name) = match Folder::of(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        found => found?,
    };
    folder.read(&name, most_bytes)
}

/// What the note at `path` says, if Spile has made it. One that is not Spile's is passed over, with a line in the log.
///
/// # Errors
/// As [`Folder::read_own`].
pub fn read_note(path: &Path, most_bytes: u64) -> Result<Option<Vec<u8>>> {
    let (folder, name) = match Folder::of(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        found => found?,
    };
    unless_foreign(folder.read_own(&name, most_bytes))
}

/// What the file at `path` holds, which an operator has named, of at most `most_bytes`. A link there leads where it may lead.
///
/// # Errors
/// `NotFound`; as [`read_small`].
pub fn read_named(path: &Path, most_bytes: u64) -> Result<Vec<u8>> {
    let place = Folder::find(path)?;
    let file = place.open(OpenMode::ReadOnly)?;
    crate::folder::read_bounded(&file, most_bytes).map_err(|error| error.at_path(path))
}

/// The same as text.
///
/// # Errors
/// As [`read_named`]; `InvalidInput` for what is no UTF-8.
pub fn read_named_text(path: &Path, most_bytes: u64) -> Result<String> {
    let bytes = read_named(path, most_bytes)?;
    String::from_utf8(bytes)
        .map_err(|error| Error::new(ErrorKind::InvalidInput, "this is no text").caused_by(error).at_path(path))
}

impl OsFiles {
    /// [`Files::open_own`](spile_core::Files::open_own), at once.
    pub(crate) fn open_own_at_once(
        &self,
        path: &Path,
        mode: OpenMode,
        beside: Option<&Path>,
        open: impl Fn(&Path, OpenMode) -> Result<AnyStore>,
    ) -> Result<Option<AnyStore>> {
        let (folder, name) = match Folder::of(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            found => found?,
        };
        let also = beside.and_then(|disk| std::os::unix::fs::MetadataExt::uid(&disk.symlink_metadata().ok()?).into());
        // It is looked at before it is opened and locked, and the file that was opened once more.
        if unless_foreign(folder.open_own(&name, OpenMode::ReadOnly, also))?.is_none() {
            return Ok(None);
        }
        let store = match open(path, mode) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let found = match &store {
            AnyStore::File(file) => file.stat().map_err(failed("stat")).and_then(|stat| folder.check_own(&stat, also)),
            _ => Ok(()),
        };
        unless_foreign(found.map(|()| Some(store)).map_err(|error| error.at_path(path)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> &OsStr {
        OsStr::new(text)
    }

    fn pipe(path: &Path) {
        rustix::fs::mknodat(rustix::fs::CWD, path, FileType::Fifo, Mode::from_raw_mode(0o644), 0).unwrap();
    }

    #[test]
    fn only_a_file_that_this_user_has_made_and_that_has_one_name_is_spiles_own() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, at) = (Folder::open(dir.path()).unwrap(), |name: &str| dir.path().join(name));
        std::fs::write(at("note"), "text").unwrap();
        std::os::unix::fs::symlink(at("note"), at("link")).unwrap();
        std::fs::write(at("two"), "text").unwrap();
        std::fs::hard_link(at("two"), at("names")).unwrap();
        pipe(&at("pipe"));
        assert_eq!(folder.read_own(name("note"), 4).unwrap().as_deref(), Some(&b"text"[..]));
        assert_eq!(folder.read_own(name("none"), 4).unwrap(), None);
        for (foreign, why) in [("link", "link"), ("two", "another name"), ("pipe", "pipe")] {
            let error = folder.read_own(name(foreign), 4).unwrap_err();
            assert!(is_foreign(&error) && error.to_string().contains(why), "{error}");
            assert_eq!(read_note(&at(foreign), 4).unwrap(), None);
        }
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(at("note"), Some(4242), None).unwrap();
            let error = folder.read_own(name("note"), 4).unwrap_err();
            assert!(is_foreign(&error) && error.to_string().contains("the user 4242"), "{error}");
            assert!(folder.open_own(name("note"), OpenMode::ReadOnly, Some(4242)).unwrap().is_some());
        }
    }

    #[test]
    fn a_file_that_is_longer_than_it_may_be_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("long");
        std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
        for error in [read_small(&path, 100).unwrap_err(), read_named(&path, 100).unwrap_err()] {
            let text = error.to_string();
            assert!(text.contains("1099511627776") && text.contains("100"), "{text}");
        }
        pipe(&dir.path().join("pipe"));
        assert!(read_named(&dir.path().join("pipe"), 100).unwrap_err().to_string().contains("pipe"));
    }
}
