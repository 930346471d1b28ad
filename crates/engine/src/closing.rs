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
const LOCAL: [i64; 6] = [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0xf2f5_2010, 0x2fc1_2fc1];

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
        let unlocks_at_once = rustix::fs::fstatfs(&fd).is_ok_and(|found| LOCAL.contains(&found.f_type));
        Self { fd: Some(fd), lane, unlocks_at_once }
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
