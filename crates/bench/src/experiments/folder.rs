//! The folders of a measurement. All that an experiment makes on the host lies in one of them: files, sockets, mounts, and the files below loop
//! devices. It goes with its folder: when that is dropped, when a signal ends the process, and, after a kill -9, when the next run finds
//! the folder.
//!
//! A folder is locked (flock) as long as its process lives. One that has our mark and is not locked is what a killed run has left. But
//! on some network file systems another host does not see the lock. So the mark tells the boot of the host, and what another boot or
//! host has left is named, and stays.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use spile_core::{Error, Result, ResultExt};
use spile_server::host_device::{MOUNTS, Mount};
use spile_server::log::complain;

/// What the names of all folders begin with; the process id follows.
const PREFIX: &str = "spile-bench-";
/// The file that tells our folders from others of such a name.
const MARK: &str = ".made-by-spile-bench";
/// How often a folder is tried to be removed into which something is still written, and the time between.
const TRIES: u32 = 50;
const BETWEEN_TRIES: Duration = Duration::from_millis(10);

/// The folders of this process.
static OWN: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn own() -> MutexGuard<'static, Vec<PathBuf>> {
    OWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A new folder of this process, removed with all that is in it when this is dropped.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    _lock: File,
}

/// Where the folder in memory of this process is, or would be.
pub(super) fn memory_path() -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| dir.is_dir());
    let parent = runtime.unwrap_or_else(|| "/dev/shm".into());
    parent.canonicalize().unwrap_or(parent).join(format!("{PREFIX}{}", std::process::id()))
}

/// Does `work` while no signal ends this process: for work of which nothing must be left half done.
pub(super) fn undisturbed<T>(work: impl FnOnce() -> T) -> T {
    let _own = own();
    work()
}

/// Removes all folders of this process, for one who ends without dropping them. From then on nobody can make a folder, or finish
/// [`undisturbed`] work: the process is to end at once.
pub fn remove_folders() {
    let own = own();
    own.iter().rev().for_each(|path| remove(path));
    std::mem::forget(own);
}

impl Folder {
    /// A folder in memory: in $XDG_RUNTIME_DIR, else in /dev/shm. A process has one at most.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new() -> Result<Self> {
        Self::make(memory_path())
    }

    /// A folder in `parent`; `what` tells it from others of this process. What a killed run has left there is removed.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn inside(parent: &Path, what: &str) -> Result<Self> {
        let parent = parent.canonicalize().map_err(|e| Error::io("find the folder", e)).at_path(parent)?;
        Self::make(parent.join(format!("{PREFIX}{}-{what}", std::process::id())))
    }

    fn make(path: PathBuf) -> Result<Self> {
        remove_remains(path.parent().unwrap_or(Path::new("/")));
        let mut own = own();
        let made = Self::make_locked(&path).map_err(|e| Error::io("make the folder", e)).at_path(&path)?;
        own.push(path.clone());
        Ok(Self { path, _lock: made })
    }

    /// Makes the folder and locks it. Another run that looks for remains may take it away in between.
    fn make_locked(path: &Path) -> std::io::Result<File> {
        loop {
            std::fs::DirBuilder::new().mode(0o700).create(path)?;
            let lock = open(path)?;
            // A file system without such locks has no remains found; nothing else depends on them.
            let _ = flock(&lock, FlockOperation::LockExclusive);
            if std::fs::metadata(path).is_ok_and(|now| lock.metadata().is_ok_and(|own| now.ino() == own.ino())) {
                File::create_new(path.join(MARK))?.write_all(boot_id().as_bytes())?;
                return Ok(lock);
            }
        }
    }

    /// Where it is: an absolute path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let mut own = own();
        own.retain(|path| *path != self.path);
        remove(&self.path);
    }
}

/// The number of this boot of this host.
fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

fn open(path: &Path) -> std::io::Result<File> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(path, flags, Mode::empty())?))
}

/// Removes a folder and what depends on it: mounts in it, and devices on its files.
fn remove(folder: &Path) {
    let mounts = std::fs::read_to_string(MOUNTS).unwrap_or_default();
    let in_folder = Mount::all(&mounts).filter(|mount| mount.point.starts_with(folder));
    in_folder.for_each(|mount| unmount(&mount.point));
    loop_devices_on(folder).iter().for_each(|device| give_up(device));
    for _ in 0..TRIES {
        match std::fs::remove_dir_all(folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => std::thread::sleep(BETWEEN_TRIES),
            _ => return,
        }
    }
}

/// Takes a file system away, also one that does not answer.
pub(super) fn unmount(at: &Path) {
    let _ = Command::new("umount").arg("-l").arg(at).output();
}

/// The folders in /sys/block of the loop devices whose files lie in `folder`.
fn loop_devices_on(folder: &Path) -> Vec<PathBuf> {
    let Ok(devices) = std::fs::read_dir("/sys/block") else { return Vec::new() };
    let lies_there = |device: &PathBuf| {
        let file = std::fs::read_to_string(device.join("loop/backing_file"));
        file.is_ok_and(|file| Path::new(file.trim_end_matches('\n')).starts_with(folder))
    };
    devices.flatten().map(|entry| entry.path()).filter(lies_there).collect()
}

/// Has the kernel take away a loop device and the volumes on it, when their last users have closed them.
fn give_up(device: &Path) {
    let holders = std::fs::read_dir(device.join("holders"));
    for holder in holders.into_iter().flatten().flatten() {
        if let Ok(name) = std::fs::read_to_string(holder.path().join("dm/name")) {
            let _ = Command::new("dmsetup").args(["remove", "--deferred", name.trim()]).output();
        }
    }
    if let Some(name) = device.file_name() {
        let _ = Command::new("losetup").arg("--detach").arg(Path::new("/dev").join(name)).output();
    }
}

/// Removes what killed runs of this user have left in `parent`, and says so.
fn remove_remains(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    let has_our_name = |path: &PathBuf| path.file_name().is_some_and(|name| is_ours(&name.to_string_lossy()));
    for path in entries.flatten().map(|entry| entry.path()).filter(has_our_name) {
        let Ok(lock) = open(&path) else { continue };
        let is_own = lock.metadata().is_ok_and(|about| about.uid() == rustix::process::geteuid().as_raw());
        if !is_own || flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            continue;
        }
        let mark = path.join(MARK);
        match std::fs::read_to_string(&mark) {
            Ok(boot) if boot == boot_id() => {
                remove(&path);
                tell_removed(&path);
            }
            // A run that was killed while it wrote the mark has left nothing else.
            Ok(boot) if boot.is_empty() => {
                let _ = std::fs::remove_file(&mark);
                if std::fs::remove_dir(&path).is_ok() {
                    tell_removed(&path);
                }
            }
            Ok(_) => complain(format_args!(
                "note: a run of another boot or host has left {}; remove it when that run is over",
                path.display()
            )),
            // A run that was killed before the mark has left it empty. Whatever is not empty belongs to someone else.
            Err(_) => drop(std::fs::remove_dir(&path)),
        }
    }
}

fn tell_removed(path: &Path) {
    complain(format_args!("removed what a killed run had left: {}", path.display()));
}

/// True for the prefix with a process id behind it, and no more or a dash and more.
fn is_ours(name: &str) -> bool {
    let number = name.strip_prefix(PREFIX).map(|rest| rest.split('-').next().unwrap_or_default());
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_goes_with_what_is_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::inside(dir.path(), "a").unwrap();
        std::fs::write(folder.path().join("x"), "x").unwrap();
        assert!(folder.path().is_absolute() && Folder::inside(dir.path(), "a").is_err());
        let other = Folder::inside(dir.path(), "b").unwrap();
        drop(folder);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "the other one stays");
        drop(other);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn remains_are_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let (here, elsewhere) = (boot_id(), "another boot".to_owned());
        for (name, file, text) in [
            ("1-left", MARK, &here),
            ("1-unwritten", MARK, &String::new()),
            ("2-elsewhere", MARK, &elsewhere),
            ("2026-11", "results.json", &here),
            ("notes", MARK, &here),
        ] {
            std::fs::create_dir(at(&format!("{PREFIX}{name}"))).unwrap();
            std::fs::write(at(&format!("{PREFIX}{name}/{file}")), text).unwrap();
        }
        std::fs::create_dir(at("spile-bench-3")).unwrap();
        std::fs::write(at("spile-bench-4"), "a file").unwrap();
        let alive = Folder::inside(dir.path(), "alive").unwrap();
        drop(Folder::inside(dir.path(), "next").unwrap());
        let mut names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.sort();
        let names_kept = ["spile-bench-2-elsewhere", "spile-bench-2026-11", "spile-bench-4", "spile-bench-notes"];
        let mut kept: Vec<_> = names_kept.map(at).into_iter().chain([alive.path().to_owned()]).collect();
        kept.sort();
        let kept: Vec<_> = kept.into_iter().map(|path| path.canonicalize().unwrap()).collect();
        assert_eq!(names, kept);
    }
}
