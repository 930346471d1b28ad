//! [`FileFd`]: a descriptor that no worker closes itself. To close a file may wait: for the server of the file, for a device that
//! gets what is still in memory, for a frozen file system that has to free the space of a file without a name.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::file_pool::{FilePool, Lane};
use crate::lanes::LaneKey;
use crate::shared::relock;
use crate::{lock, worker};

/// The files that helper threads are about to unlock, once for each descriptor.
static CLOSING: Mutex<Vec<LaneKey>> = Mutex::new(Vec::new());
static CLOSED: Condvar = Condvar::new();
/// The longest that somebody who opens a file waits for its unlocking.
const UNLOCK_WAIT: Duration = Duration::from_secs(10);

/// The file systems of which it is known that this kernel alone keeps their locks (linux/magic.h): ext2 to ext4, XFS, Btrfs, tmpfs
/// (also the one with the block devices), F2FS, ZFS.
pub const LOCAL_FILE_SYSTEMS: [i64; 6] = [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0xf2f5_2010, 0x2fc1_2fc1];

/// A descriptor. When a worker drops it, a helper thread closes it; any other thread closes it at once.
pub(crate) struct FileFd {
    /// `None` only while it is dropped.
    fd: Option<OwnedFd>,
    /// The lane of a file; sockets and the like have none, for to close them takes no time.
    pub(crate) lane: Option<Arc<Lane>>,
    /// True when this kernel alone keeps the locks of the file.
    unlocks_at_once: bool,
}

impl FileFd {
    pub(crate) fn socket(fd: OwnedFd) -> Self {
        Self { fd: Some(fd), lane: None, unlocks_at_once: true }
    }

    /// Takes over the descriptor of a file or block device. May wait for its file system.
    pub(crate) fn file(fd: OwnedFd) -> Self {
        // A server that is gone cannot tell what the file is.
        let key = rustix::fs::fstat(&fd).map_or(LaneKey::UNKNOWN, |stat| LaneKey::of_file(&stat));
        let lane = Some(FilePool::shared().lane(&key));
        let unlocks_at_once = rustix::fs::fstatfs(&fd).is_ok_and(|found| LOCAL_FILE_SYSTEMS.contains(&found.f_type));
        Self { fd: Some(fd), lane, unlocks_at_once }
    }
}

#[cfg(test)]
impl FileFd {
    /// A file whose locks a server keeps.
    pub(crate) fn on_server(fd: OwnedFd) -> Self {
        let mut this = Self::file(fd);
        this.unlocks_at_once = false;
        this
    }
}

impl AsFd for FileFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("it is there until it is dropped").as_fd()
    }
}

impl Drop for FileFd {
    fn drop(&mut self) {
        let fd = self.fd.take();
        match self.lane.take() {
            Some(lane) if worker::is_here() => lane.call(move || drop(fd)),
            _ => drop(fd),
        }
    }
}

/// Ends the locks of a file: at once, unless this thread is a worker and a server keeps the locks, which may not answer. Then a
/// helper thread does it.
pub(crate) fn unlock(fd: &Arc<FileFd>) {
    let Some(lane) = &fd.lane else { return };
    if fd.unlocks_at_once || !worker::is_here() {
        return lock::release(fd.as_fd());
    }
    relock(&CLOSING).push(lane.key().clone());
    let fd = fd.clone();
    lane.call(move || {
        lock::release(fd.as_fd());
        let mut closing = relock(&CLOSING);
        let ours = |key: &LaneKey| fd.lane.as_ref().is_some_and(|lane| lane.key() == key);
        if let Some(index) = closing.iter().position(ours) {
            closing.swap_remove(index);
        }
        CLOSED.notify_all();
    });
}

/// Which file a descriptor belongs to, for [`wait_for_unlocks`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileKey(pub(crate) LaneKey);

/// Waits until the helper threads have unlocked those of `files` that were closed, for ten seconds at most: a server that is gone
/// does not answer. False when some are locked still. Not to be called on a worker.
pub fn wait_for_unlocks(files: &[FileKey]) -> bool {
    wait_for(files, UNLOCK_WAIT)
}

fn wait_for(files: &[FileKey], limit: Duration) -> bool {
    let is_locked = |closing: &mut Vec<LaneKey>| closing.iter().any(|key| files.iter().any(|file| file.0 == *key));
    let waits = CLOSED.wait_timeout_while(relock(&CLOSING), limit, is_locked);
    !waits.unwrap_or_else(PoisonError::into_inner).1.timed_out()
}

/// True when a helper thread is about to unlock this file for somebody who has closed it.
pub(crate) fn is_being_unlocked(fd: &FileFd) -> bool {
    fd.lane.as_ref().is_some_and(|lane| relock(&CLOSING).contains(lane.key()))
}

/// Waits until the helper threads have unlocked this file for all who have closed it, for [`UNLOCK_WAIT`] at most: the caller may
/// keep the last place of a helper thread that would unlock it. False when there was nothing to wait for, and on a worker,
/// which must not wait.
pub(crate) fn wait_for_unlock(fd: &FileFd) -> bool {
    let Some(lane) = fd.lane.as_ref().filter(|_| !worker::is_here()) else { return false };
    let closing = relock(&CLOSING);
    if !closing.contains(lane.key()) {
        return false;
    }
    let waits = CLOSED.wait_timeout_while(closing, UNLOCK_WAIT, |closing| closing.contains(lane.key()));
    drop(waits.unwrap_or_else(PoisonError::into_inner));
    true
}

#[cfg(test)]
mod tests {
    use spile_core::OpenMode;

    use super::*;
    use crate::{Config, Engine, EngineKind, RawFile};

    fn open(path: &std::path::Path) -> RawFile {
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        RawFile::on_server(file.into())
    }

    /// A file is closed on a worker and opened again at once, by this process.
    #[test]
    fn who_has_just_closed_a_file_can_lock_it_again() {
        let engine = Engine::start(Config { kind: EngineKind::Threads, workers: 1, ..Config::default() }).unwrap();
        let name = tempfile::NamedTempFile::new().unwrap();
        let key = open(name.path()).key().unwrap();
        for _ in 0..2000 {
            let file = open(name.path());
            file.lock(OpenMode::ReadWrite).unwrap();
            engine.run_on(0, move || async move { drop(file) });
        }
        assert!(wait_for_unlocks(&[key]));
        engine.shutdown();
    }

    #[test]
    fn the_end_of_a_files_locks_is_waited_for_and_not_for_ever() {
        let engine = Engine::start(Config { kind: EngineKind::Threads, workers: 1, ..Config::default() }).unwrap();
        let name = tempfile::NamedTempFile::new().unwrap();
        let file = open(name.path());
        file.lock(OpenMode::ReadWrite).unwrap();
        let keys = [file.key().unwrap()];
        // The server does not answer, and has all threads that a file may have for this.
        let (release, held) = std::sync::mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let key = LaneKey::of_file(&rustix::fs::fstat(name.as_file()).unwrap());
        let lane = FilePool::shared().lane(&key);
        for _ in 0..100 {
            let held = held.clone();
            lane.call(move || _ = relock(&held).recv());
        }
        engine.run_on(0, move || async move { drop(file) });
        assert!(!wait_for(&keys, Duration::from_millis(50)));
        let healthy = open(tempfile::NamedTempFile::new().unwrap().path()).key().unwrap();
        assert!(wait_for(&[healthy], Duration::ZERO), "another file is waited for");
        drop(release);
        assert!(wait_for_unlocks(&keys));
        open(name.path()).lock(OpenMode::ReadWrite).unwrap();
        engine.shutdown();
    }
}
