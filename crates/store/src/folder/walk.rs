//! The way from a path to the folder that it names, which is held at its end.
//!
//! Most paths have no link in them, and `openat2` follows such a path in one call. Where it finds a link, or where the kernel has no
//! `openat2` (before Linux 5.6) or forbids it, the way is gone by hand: each component is opened from the folder before it, without following a link.
//! So at each step it is known what was found, and nobody can exchange it any more.
//!
//! A link is followed when it belongs to root or to this user: they may lead this program anywhere. The link of another user leads only to what belongs to
//! that user. So a tenant's link never opens a file to root that the tenant could not have opened.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use spile_core::{Error, ErrorKind, Result};

use super::{Folder, Place, file_name};

/// So many links may be on one way, as in the kernel.
const MOST_LINKS: usize = 40;

/// What a folder is held with: the right to look names up in it is enough.
const HOLD: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// What is opened to be looked at, a link too.
const LOOK: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The folder at `path`.
pub(super) fn folder(path: &Path) -> Result<Folder> {
    match straight(path) {
        Some(found) => found.map(|dir| (dir, clean(path))).and_then(|(dir, real)| Ok(held(dir, real?))),
        None => Walk::begin(path).and_then(Walk::into_folder),
    }
    .map_err(|errno| at(errno, path))
}

/// Where `path` leads when a link at its end is followed.
pub(super) fn place(path: &Path) -> Result<Place> {
    let name = file_name(path)?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let Some(Ok(dir)) = straight(parent)
        && !is_link(dir.as_fd(), name)
    {
        let real = clean(parent).map_err(|errno| at(errno, path))?;
        let folder = held(dir, real);
        return Ok(Place { folder, name: name.to_owned(), owner: None, is_elsewhere: false, is_kernels: false });
    }
    Walk::begin(path).and_then(Walk::into_place).map_err(|failed| at(failed, path))
}

fn held(dir: OwnedFd, real: PathBuf) -> Folder {
    Folder { dir: Arc::new(dir), path: real.into() }
}

fn is_link(dir: BorrowedFd<'_>, name: &OsStr) -> bool {
    let stat = rustix::fs::statat(dir, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW);
    stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink)
}

/// The folder at a path without links, by the kernel; `None` where the way has to be gone by hand.
fn straight(path: &Path) -> Option<Result<OwnedFd, Failed>> {
    let how = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match rustix::fs::openat2(CWD, path, HOLD, Mode::empty(), how) {
        Ok(dir) => Some(Ok(dir)),
        // It says so for a folder that is missing, whether there is a link before it or not.
        Err(errno @ (Errno::NOENT | Errno::ACCESS | Errno::NOTDIR)) => Some(Err(errno.into())),
        Err(_) => None,
    }
}

/// The path of a folder that was reached without following a link: `..` is what stands before it.
fn clean(path: &Path) -> Result<PathBuf, Failed> {
    let mut real = if path.is_absolute() { PathBuf::new() } else { working_folder()? };
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => drop(real.pop()),
            other => real.push(other),
        }
    }
    Ok(real)
}

fn working_folder() -> Result<PathBuf, Failed> {
    let name = rustix::process::getcwd(Vec::new())?;
    Ok(PathBuf::from(OsString::from_vec(name.into_bytes())))
}

/// Why a way did not come to its end.
enum Failed {
    Errno(Errno),
    /// A link of this user leads to what belongs to the other one.
    Owner(u32, u32),
}

impl From<Errno> for Failed {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

fn at(failed: Failed, path: &Path) -> Error {
    match failed {
        Failed::Errno(errno) => Error::io("cannot be found", errno.into()).at_path(path),
        Failed::Owner(link, file) => foreign_link(link, file).at_path(path),
    }
}

fn foreign_link(link: u32, file: u32) -> Error {
    let what = format!("a symbolic link of user {link} leads to what belongs to user {file}, and is not followed");
    Error::new(ErrorKind::Denied, what).hint("name the file itself, or have a link of root or of this user lead there")
}

/// Refuses what belongs to `found` when a link of the user `owner` has led there.
pub(super) fn check_owner(owner: Option<u32>, found: u32) -> Result<()> {
    match owner {
        Some(owner) if owner != found => Err(foreign_link(owner, found)),
        _ => Ok(()),
    }
}

/// True for root, this user, and the user to whom the root folder belongs: they may lead this program anywhere.
pub(crate) fn is_trusted(user: u32) -> bool {
    static ROOT: OnceLock<u32> = OnceLock::new();
    let root = || rustix::fs::stat("/").map_or(0, |stat| stat.st_uid);
    user == 0 || user == rustix::process::geteuid().as_raw() || user == *ROOT.get_or_init(root)
}

/// A way that is gone by hand.
struct Walk {
    /// The folder that was reached.
    at: OwnedFd,
    /// Its path.
    path: PathBuf,
    /// The components that are left, the next one last.
    left: Vec<OsString>,
    links: usize,
    /// The other user whose link was followed.
    owner: Option<u32>,
}

impl Walk {
    fn begin(path: &Path) -> Result<Self, Failed> {
        let (start, at) = match path.is_absolute() {
            true => (PathBuf::from("/"), rustix::fs::open("/", HOLD, Mode::empty())?),
            false => (working_folder()?, rustix::fs::open(".", HOLD, Mode::empty())?),
        };
        let mut walk = Self { at, path: start, left: Vec::new(), links: 0, owner: None };
        walk.push(path);
        Ok(walk)
    }

    /// Puts the components of `path` before those that are left.
    fn push(&mut self, path: &Path) {
        let parts = path.components().filter(|part| !matches!(part, Component::RootDir | Component::CurDir));
        let before = self.left.len();
        self.left.extend(parts.map(|part| part.as_os_str().to_owned()));
        self.left[before..].reverse();
    }

    fn into_folder(mut self) -> Result<Folder, Failed> {
        while let Some(part) = self.left.pop() {
            self.step(&part)?;
        }
        self.end().map(|(folder, _)| folder)
    }

    fn into_place(mut self) -> Result<Place, Failed> {
        while let Some(part) = self.left.pop() {
            if !self.left.is_empty() {
                self.step(&part)?;
                continue;
            }
            if part == ".." {
                return Err(Errno::ISDIR.into());
            }
            let is_kernels = match rustix::fs::openat(&self.at, &part, LOOK, Mode::empty()) {
                Ok(found) if type_of(&found)? == FileType::Symlink => match is_proc(&self.at) {
                    false => {
                        self.follow(found)?;
                        continue;
                    }
                    // It leads to whatever a process has open.
                    true => match self.owner {
                        Some(owner) => return Err(Failed::Owner(owner, rustix::fs::fstat(&self.at)?.st_uid)),
                        None => true,
                    },
                },
                Ok(_) | Err(Errno::NOENT) => false,
                Err(errno) => return Err(errno.into()),
            };
            let (owner, is_elsewhere) = (self.owner, self.links > 0);
            let (folder, _) = self.reached();
            return Ok(Place { folder, name: part, owner, is_elsewhere, is_kernels });
        }
        Err(Errno::ISDIR.into())
    }

    /// Goes into the folder `part`, wherever a link in its place leads.
    fn step(&mut self, part: &OsStr) -> Result<(), Failed> {
        if part == ".." {
            self.at = rustix::fs::openat(&self.at, "..", HOLD | OFlags::NOFOLLOW, Mode::empty())?;
            self.path.pop();
            return Ok(());
        }
        let found = rustix::fs::openat(&self.at, part, LOOK, Mode::empty())?;
        match type_of(&found)? {
            FileType::Directory => {
                self.at = found;
                self.path.push(part);
                Ok(())
            }
            FileType::Symlink if is_proc(&self.at) => self.step_by_kernel(part),
            FileType::Symlink => self.follow(found),
            _ => Err(Errno::NOTDIR.into()),
        }
    }

    /// A link in `/proc` is the kernel's own, and leads to an open folder.
    fn step_by_kernel(&mut self, part: &OsStr) -> Result<(), Failed> {
        let text = rustix::fs::readlinkat(&self.at, part, Vec::new())?;
        self.at = rustix::fs::openat(&self.at, part, HOLD, Mode::empty())?;
        let path = self.path.join(OsString::from_vec(text.into_bytes()));
        self.path = path;
        Ok(())
    }

    /// Goes on where the link `found` leads.
    fn follow(&mut self, found: OwnedFd) -> Result<(), Failed> {
        self.links += 1;
        if self.links > MOST_LINKS {
            return Err(Errno::LOOP.into());
        }
        let user = rustix::fs::fstat(&found)?.st_uid;
        if !is_trusted(user) {
            match self.owner {
                Some(owner) if owner != user => return Err(Failed::Owner(owner, user)),
                _ => self.owner = Some(user),
            }
        }
        let text = rustix::fs::readlinkat(&found, "", Vec::new())?;
        let target = PathBuf::from(OsString::from_vec(text.into_bytes()));
        if target.is_absolute() {
            self.at = rustix::fs::open("/", HOLD, Mode::empty())?;
            self.path = PathBuf::from("/");
        }
        self.push(&target);
        Ok(())
    }

    /// The folder at the end of the way.
    fn end(self) -> Result<(Folder, Option<u32>), Failed> {
        if let Some(owner) = self.owner {
            let user = rustix::fs::fstat(&self.at)?.st_uid;
            if user != owner {
                return Err(Failed::Owner(owner, user));
            }
        }
        Ok(self.reached())
    }

    fn reached(self) -> (Folder, Option<u32>) {
        (held(self.at, self.path), self.owner)
    }
}

fn type_of(file: &OwnedFd) -> Result<FileType, Failed> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode))
}

/// True for a folder of the kernel's table of processes.
fn is_proc(folder: &OwnedFd) -> bool {
    rustix::fs::fstatfs(folder).is_ok_and(|system| system.f_type == rustix::fs::PROC_SUPER_MAGIC)
}
