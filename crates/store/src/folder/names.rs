//! Changes of names: of files that are open, and of nothing else.
//!
//! Between a look at a name and its change, the name may be given to another file. So a change is made in such a way that what it has
//! met can be looked at afterwards, and put back: two names are exchanged (`renameat2`), and the one that is to go is removed only when it names what was
//! expected. Where a file system cannot exchange names, all that can be done is to look before.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

use rustix::fs::{AtFlags, CWD, RenameFlags};
use rustix::io::Errno;
use spile_core::{Error, ErrorKind, Result};

use super::{Folder, NAME_TRIES, failed, hidden_name, id_of, single};
use crate::FileId;

impl Folder {
    /// Gives the file `id`, which is at `from`, the name `to` in the folder `there`, in the place of the file `over`, which has that name
    /// now; `None`: nothing has it. When it fails, the names are as they were, unless somebody else changes them at the same time; what such a one has put
    /// there is not replaced.
    ///
    /// # Errors
    /// `NotFound` or `Busy` when a name is not that of the file that is expected; `Exists` when there is something at `to` and nothing should be; the system's.
    pub fn rename(
        &self,
        (from, id): (&OsStr, FileId),
        there: &Folder,
        (to, over): (&OsStr, Option<FileId>),
    ) -> Result<()> {
        self.expect(from, Some(id))?;
        there.expect(to, over)?;
        match over {
            Some(over) if over == id => self.remove(from, id),
            Some(over) => self.exchange((from, id), there, (to, over)),
            None => self.rename_to_free((from, id), there, to),
        }
    }

    /// Refuses to go on when `name` does not name the file `expected`, or names something when nothing is expected.
    ///
    /// # Errors
    /// `NotFound` when nothing has the name; `Busy` when another file has it; `Exists` when something has it and nothing should; the system's.
    pub fn expect(&self, name: &OsStr, expected: Option<FileId>) -> Result<()> {
        let found = self.id(name).map_err(failed("cannot be found")).map_err(|error| self.at(error, name))?;
        if found == expected {
            return Ok(());
        }
        Err(self.other(name, expected.is_some(), found.is_some()))
    }

    /// The error of a name that is not that of the file that is expected.
    fn other(&self, name: &OsStr, is_expected: bool, is_there: bool) -> Error {
        let path = self.path_of(name);
        match (is_expected, is_there) {
            (true, true) => spile_core::exchanged(&path),
            (true, false) => spile_core::lost(&path),
            (false, _) => spile_core::taken(&path),
        }
    }

    fn exchange(&self, (from, id): (&OsStr, FileId), there: &Folder, (to, over): (&OsStr, FileId)) -> Result<()> {
        let swap = || rustix::fs::renameat_with(&*self.dir, from, &*there.dir, to, RenameFlags::EXCHANGE);
        match swap() {
            Ok(()) => {}
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => return self.replace(from, there, to),
            Err(errno) => return Err(self.at(failed("rename")(errno.into()), from)),
        }
        let (came, gone) = (there.id(to), self.id(from));
        let is_right = matches!((&came, &gone), (Ok(Some(came)), Ok(Some(gone))) if (*came, *gone) == (id, over));
        if is_right {
            // The names are right: what is left is told, and fails nothing.
            if let Err(error) = self.remove(from, over) {
                tracing::warn!("{error}: what was replaced keeps this name");
            }
            return Ok(());
        }
        let _ = swap();
        match came {
            Ok(Some(came)) if came == id => Err(there.other(to, true, true)),
            _ => Err(self.other(from, true, true)),
        }
    }

    /// A file system that cannot exchange names replaces the one by the other.
    fn replace(&self, from: &OsStr, there: &Folder, to: &OsStr) -> Result<()> {
        let done = rustix::fs::renameat(&*self.dir, from, &*there.dir, to);
        done.map_err(io::Error::from).map_err(failed("rename")).map_err(|error| self.at(error, from))
    }

    fn rename_to_free(&self, (from, id): (&OsStr, FileId), there: &Folder, to: &OsStr) -> Result<()> {
        match rename_new(self, from, there, to) {
            Ok(()) => {}
            Err(Errno::EXIST) => return Err(there.other(to, false, true)),
            Err(errno) => return Err(self.at(failed("rename")(errno.into()), from)),
        }
        match there.id(to) {
            Ok(Some(came)) if came == id => Ok(()),
            _ => {
                let _ = rename_new(there, to, self, from);
                Err(self.other(from, true, true))
            }
        }
    }

    /// Gives the open file the new name `name`, which nothing may have.
    ///
    /// # Errors
    /// `Exists`; `NotFound` when the file has lost all its names; `Unsupported` where there are no hard links; the system's.
    pub fn link(&self, file: impl AsFd, name: &OsStr) -> Result<()> {
        let done = single(name).and_then(|name| self.link_by_descriptor(file.as_fd(), name));
        done.map_err(cannot_link).map_err(|error| self.at(error, name))
    }

    /// The same for a file that is known to be at `from`, where there is no other way than by that name.
    ///
    /// # Errors
    /// As [`Folder::link`]; `Busy` when another file has taken its name.
    pub fn link_from(&self, file: impl AsFd, from: (&Folder, &OsStr), name: &OsStr) -> Result<()> {
        let id = id_of(&rustix::fs::fstat(&file).map_err(|errno| cannot_link(errno.into()))?);
        from.0.expect(from.1, Some(id))?;
        match self.link(&file, name) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            done => return done,
        }
        // There is no /proc, or the file has lost the name that was seen.
        let done = rustix::fs::linkat(&*from.0.dir, from.1, &*self.dir, name, AtFlags::empty());
        done.map_err(|errno| cannot_link(errno.into())).map_err(|error| self.at(error, name))?;
        if self.id(name).is_ok_and(|found| found == Some(id)) {
            return Ok(());
        }
        let _ = rustix::fs::unlinkat(&*self.dir, name, AtFlags::empty());
        Err(from.0.other(from.1, true, true))
    }

    /// Gives what has the name `from` the name `name`, too, which nothing may have. A link is not followed.
    ///
    /// # Errors
    /// As [`Folder::link`].
    pub fn link_name(&self, from: (&Folder, &OsStr), name: &OsStr) -> Result<()> {
        let done = rustix::fs::linkat(&*from.0.dir, from.1, &*self.dir, name, AtFlags::empty());
        done.map_err(|errno| cannot_link(errno.into())).map_err(|error| self.at(error, name))
    }

    fn link_by_descriptor(&self, file: std::os::fd::BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
        // Root may name the descriptor itself; others go by /proc.
        match rustix::fs::linkat(file, "", &*self.dir, name, AtFlags::EMPTY_PATH) {
            Err(Errno::NOENT | Errno::PERM | Errno::INVAL) => {}
            done => return Ok(done?),
        }
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        Ok(rustix::fs::linkat(CWD, path, &*self.dir, name, AtFlags::SYMLINK_FOLLOW)?)
    }

    /// Removes the name `name` of the file `id`.
    ///
    /// # Errors
    /// `NotFound` or `Busy` when it is not that file's; the system's.
    pub fn remove(&self, name: &OsStr, id: FileId) -> Result<()> {
        self.expect(name, Some(id))?;
        let foreign = self.is_foreign().unwrap_or(true);
        match foreign.then(|| self.set_aside(name)).flatten() {
            Some(aside) if self.id(&aside).is_ok_and(|found| found == Some(id)) => self.unlink(&aside),
            Some(aside) => {
                let _ = rename_new(self, &aside, self, name);
                Err(self.other(name, true, true))
            }
            None => self.unlink(name),
        }
    }

    /// Gives what has this name another one that nobody can foretell: it can be looked at there, and nobody exchanges it. `None` where that cannot be.
    fn set_aside(&self, name: &OsStr) -> Option<std::ffi::OsString> {
        (0..NAME_TRIES).find_map(|_| {
            let aside = hidden_name(name);
            let done = rustix::fs::renameat_with(&*self.dir, name, &*self.dir, &aside, RenameFlags::NOREPLACE);
            done.is_ok().then_some(aside)
        })
    }

    /// Removes a name, whatever it names: it is for names that are this program's own.
    ///
    /// # Errors
    /// The system's.
    pub fn unlink(&self, name: &OsStr) -> Result<()> {
        let done = single(name).and_then(|name| Ok(rustix::fs::unlinkat(&*self.dir, name, AtFlags::empty())?));
        done.map_err(failed("remove")).map_err(|error| self.at(error, name))
    }

    /// Gives what has the name `from` the name `to`, in the place of what has that: a plain rename, for notes, whose names are this program's own.
    ///
    /// # Errors
    /// The system's.
    pub fn rename_over(&self, from: &OsStr, there: &Folder, to: &OsStr) -> Result<()> {
        for name in [from, to] {
            single(name).map_err(failed("rename")).map_err(|error| self.at(error, name))?;
        }
        self.replace(from, there, to)
    }

    /// Gives the file `from` the name `to`, which nothing may have.
    ///
    /// # Errors
    /// `Exists`; the system's.
    pub fn rename_new(&self, from: &OsStr, there: &Folder, to: &OsStr) -> Result<()> {
        match rename_new(self, from, there, to) {
            Err(Errno::EXIST) => Err(there.other(to, false, true)),
            done => done.map_err(io::Error::from).map_err(failed("rename")).map_err(|error| self.at(error, from)),
        }
    }
}

/// Renames to a name that nothing has; where the file system cannot see to that itself, by a second name, or after a look.
fn rename_new(from: &Folder, name: &OsStr, to: &Folder, new: &OsStr) -> Result<(), Errno> {
    match rustix::fs::renameat_with(&*from.dir, name, &*to.dir, new, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {}
        done => return done,
    }
    match rustix::fs::linkat(&*from.dir, name, &*to.dir, new, AtFlags::empty()) {
        Ok(()) => return rustix::fs::unlinkat(&*from.dir, name, AtFlags::empty()),
        Err(Errno::PERM | Errno::NOTSUP | Errno::NOSYS) => {}
        Err(errno) => return Err(errno),
    }
    match rustix::fs::statat(&*to.dir, new, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => Err(Errno::EXIST),
        Err(Errno::NOENT) => rustix::fs::renameat(&*from.dir, name, &*to.dir, new),
        Err(errno) => Err(errno),
    }
}

fn cannot_link(source: io::Error) -> Error {
    let what = "cannot give the file this second name";
    match source.raw_os_error() {
        Some(libc::EEXIST) => Error::new(ErrorKind::Exists, "there is a file of this name already")
            .hint("choose another name, or remove that file"),
        Some(libc::EPERM | libc::EOPNOTSUPP | libc::ENOSYS | libc::EXDEV) => Error::new(ErrorKind::Unsupported, what)
            .caused_by(source)
            .hint("its file system must have hard links, and allow this user to make them"),
        _ => Error::io(what, source),
    }
}

/// Gives `to` the owner, group and mode of `from`, both open, as far as this user may; nobody gets more rights than `from` gives.
///
/// # Errors
/// The system's, but for the right to change an owner.
pub fn copy_access(from: impl AsFd, to: impl AsFd) -> io::Result<()> {
    use rustix::fs::{Gid, Mode, Uid};
    let (old, to) = (rustix::fs::fstat(from)?, to.as_fd());
    let (user, group) = (Uid::from_raw(old.st_uid), Gid::from_raw(old.st_gid));
    let allowed = |done: Result<(), Errno>| match done {
        Err(Errno::PERM) => Ok(false),
        done => done.map(|()| true),
    };
    if !allowed(rustix::fs::fchown(to, Some(user), Some(group)))? {
        allowed(rustix::fs::fchown(to, None, Some(group)))?;
    }
    let new = rustix::fs::fstat(to)?;
    let mut mode = old.st_mode & 0o777;
    if new.st_gid != old.st_gid {
        // Another group may do what everybody may.
        mode = mode & !0o070 | (mode & 0o007) << 3 & mode;
    }
    Ok(rustix::fs::fchmod(to, Mode::from_raw_mode(mode))?)
}
