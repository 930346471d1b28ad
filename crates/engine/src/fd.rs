//! [`Fd`]: an open file or socket as the reactors know it.
//!
//! A reactor may keep a file open longer than its last user (by io_uring's table of registered files, or by epoll's
//! interest list). So an `Fd` has a list of the workers that know it, and tells them when it is dropped. The locks on a
//! file have to end at once, and not when the last worker has got that message, so dropping an `Fd` unlocks the file
//! first (see the module `closing` for the exception).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use smallvec::SmallVec;

use crate::closing::{self, FileFd};
use crate::file_pool::Lane;
use crate::shared::{Message, WorkerLink, relock};
use crate::sys;

/// The most writes in flight to one eventfd. There are more when it is full, or when much is answered before the ends of the writes are
/// looked at. The other side may have heard all of them by then, so what is more than that becomes one more write, once one of them has
/// ended.
pub(crate) const MAX_RINGS: u32 = 64;

/// The size of a ring's table of registered files: 8 bytes each, here and in the kernel. More files are used without being registered.
pub(crate) const TABLE_FILES: u32 = 16 << 10;

static NEXT_ID: AtomicU64 = AtomicU64::new(1);
static TABLE: Mutex<Table> = Mutex::new(Table { free: Vec::new(), next: 0 });

/// Which index each store file has in every ring's table: process-wide, so that no ring needs a look-up.
struct Table {
    free: Vec<u32>,
    next: u32,
}

impl Table {
    fn take(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| {
            let index = self.next;
            (index < TABLE_FILES).then(|| {
                self.next += 1;
                index
            })
        })
    }
}

/// Hears of a failed sync: of which file, and its errno.
type Hear = Box<dyn Fn(BorrowedFd<'_>, i32) + Send + Sync>;

static FAILED_SYNC: OnceLock<Hear> = OnceLock::new();

/// Has `hear` called whenever a sync of a file of this process has failed, before anybody else learns of it. The kernel
/// reports a failed sync once only; `hear` can note it for the processes that come after this one. Only the first call
/// of this function counts, for the life of the process.
pub fn on_failed_sync(hear: impl Fn(BorrowedFd<'_>, i32) + Send + Sync + 'static) {
    let _ = FAILED_SYNC.set(Box::new(hear));
}

fn is_regular(fd: &FileFd) -> bool {
    rustix::fs::fstat(fd).is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file())
}

pub(crate) struct Fd {
    raw: RawFd,
    /// The descriptor. A worker whose reactor keeps the file open has a share of it until the reactor has let go, so that the
    /// last one to close the file is a helper thread.
    fd: Arc<FileFd>,
    /// The identity of this file. Unlike a descriptor's number it is never used twice in a process.
    pub(crate) id: u64,
    /// The index in the tables of registered files. Only files of stores have one.
    pub(crate) table_index: Option<u32>,
    /// The number of the file system or device ([`Lane::store`]); 0 for sockets, for which it does not matter.
    pub(crate) store: usize,
    /// True when it was opened with O_DIRECT.
    pub(crate) direct: bool,
    /// True for a regular file opened with O_DIRECT: a write may need space. A device has no holes.
    pub(crate) may_need_space: bool,
    /// The kernel has no transfer of this file that does not wait.
    waits: AtomicBool,
    /// The descriptor that holds the file's locks, when it is not this one. It is kept open as long as a transfer
    /// through this one is in flight, so that the file stays locked until the last transfer has ended.
    _locked: Option<Arc<Fd>>,
    /// An eventfd that nobody empties, because this kernel cannot do that without a wait. So only a new ring counts, and not that it is
    /// readable.
    pub(crate) stays_rung: bool,
    /// A socket to a store: what it brings are completions, and not requests.
    pub(crate) is_store: bool,
    /// Of an eventfd: the number of writes to it that are in flight.
    rings: AtomicU32,
    /// Of an eventfd: a write was left out because of those in flight. The next one that ends is followed by one more.
    lacks_ring: AtomicBool,
    /// The errno of the first sync of this file that failed; 0 when none has. The kernel reports a failure once only.
    sync_errno: AtomicI32,
    known_to: Mutex<SmallVec<[Arc<WorkerLink>; 1]>>,
}

impl Fd {
    pub(crate) fn socket(fd: OwnedFd) -> Arc<Self> {
        Self::new(FileFd::socket(fd), None, None)
    }

    /// A socket on which a store answers.
    pub(crate) fn store_socket(fd: OwnedFd) -> Arc<Self> {
        let mut this = Self::socket(fd);
        Arc::get_mut(&mut this).expect("it is new").is_store = true;
        this
    }

    /// An eventfd that another process shares.
    pub(crate) fn shared_eventfd(fd: OwnedFd) -> Arc<Self> {
        let mut this = Self::socket(fd);
        Arc::get_mut(&mut this).expect("it is new").stays_rung = !sys::drains_eventfds();
        this
    }

    pub(crate) fn file(fd: OwnedFd) -> Arc<Self> {
        Self::new(FileFd::file(fd), relock(&TABLE).take(), None)
    }

    /// A file whose locks a server keeps.
    #[cfg(test)]
    pub(crate) fn on_server(fd: OwnedFd) -> Arc<Self> {
        Self::new(FileFd::on_server(fd), relock(&TABLE).take(), None)
    }

    /// The second descriptor of a file, opened with O_DIRECT; `locked` is the first one, which holds the locks.
    pub(crate) fn direct(fd: OwnedFd, locked: &Arc<Fd>) -> Arc<Self> {
        Self::new(FileFd::file(fd), relock(&TABLE).take(), Some(locked.clone()))
    }

    fn new(fd: FileFd, table_index: Option<u32>, locked: Option<Arc<Fd>>) -> Arc<Self> {
        let may_need_space = locked.is_some() && is_regular(&fd);
        Arc::new(Self {
            raw: fd.as_fd().as_raw_fd(),
            store: fd.lane.as_ref().map_or(0, |lane| lane.store()),
            fd: Arc::new(fd),
            may_need_space,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            table_index,
            direct: locked.is_some(),
            waits: AtomicBool::new(false),
            _locked: locked,
            stays_rung: false,
            is_store: false,
            rings: AtomicU32::new(0),
            lacks_ring: AtomicBool::new(false),
            sync_errno: AtomicI32::new(0),
            known_to: Mutex::default(),
        })
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.raw
    }

    /// The descriptor, to keep it open.
    pub(crate) fn share(&self) -> &Arc<FileFd> {
        &self.fd
    }

    /// The file's lane of the helper threads; `None` for sockets.
    pub(crate) fn lane(&self) -> Option<&Arc<Lane>> {
        self.fd.lane.as_ref()
    }

    /// Notes that a worker's reactor knows the file and has to be told when it is dropped.
    pub(crate) fn known_to(&self, shared: &Arc<WorkerLink>) {
        relock(&self.known_to).push(shared.clone());
    }

    /// Notes that the kernel has refused RWF_NOWAIT for this file.
    pub(crate) fn note_waits(&self) {
        self.waits.store(true, Ordering::Relaxed);
    }

    /// True when each transfer of this file has to go to a helper thread, because any may have to wait.
    pub(crate) fn always_waits(&self) -> bool {
        self.waits.load(Ordering::Relaxed)
    }

    /// True for a block device opened with O_DIRECT.
    pub(crate) fn is_device(&self) -> bool {
        self.direct && !self.may_need_space
    }

    /// Notes how a sync ended, whether or not anybody still waits for it.
    pub(crate) fn note_sync(&self, errno: i32) {
        let _ = self.sync_errno.compare_exchange(0, errno, Ordering::AcqRel, Ordering::Acquire);
        if let Some(hear) = FAILED_SYNC.get() {
            hear(self.as_fd(), errno);
        }
    }

    /// From now on a sync of this file counts as failed, or none does (0), without anybody hearing of it.
    pub(crate) fn set_sync_errno(&self, errno: i32) {
        self.sync_errno.store(errno, Ordering::Release);
    }

    /// The errno of the first sync that failed, if one has.
    pub(crate) fn sync_errno(&self) -> Option<i32> {
        Some(self.sync_errno.load(Ordering::Acquire)).filter(|errno| *errno != 0)
    }

    /// Counts a write to this eventfd that is to begin now. False when it is left out: [`Fd::end_ring`] asks for it later.
    pub(crate) fn begin_ring(&self) -> bool {
        if self.rings.fetch_add(1, Ordering::SeqCst) < MAX_RINGS {
            return true;
        }
        self.rings.fetch_sub(1, Ordering::SeqCst);
        self.lacks_ring.store(true, Ordering::SeqCst);
        // Another worker may have seen the last of them end before that was noted.
        self.rings.load(Ordering::SeqCst) == 0 && self.begin_left_out_ring()
    }

    /// Counts the end of a write to this eventfd. True when one was left out, and is to begin now; only after a write that was done.
    pub(crate) fn end_ring(&self, is_done: bool) -> bool {
        self.rings.fetch_sub(1, Ordering::SeqCst);
        is_done && self.begin_left_out_ring()
    }

    fn begin_left_out_ring(&self) -> bool {
        let begins = self.lacks_ring.load(Ordering::SeqCst) && self.lacks_ring.swap(false, Ordering::SeqCst);
        if begins {
            self.rings.fetch_add(1, Ordering::SeqCst);
        }
        begins
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        for shared in relock(&self.known_to).drain(..) {
            shared.unwatch(self.fd.as_fd());
            // A socket is closed at once; its peer has to learn of that.
            let kept = self.lane().map(|_| self.fd.clone());
            shared.push(Message::Forget { id: self.id, table_index: self.table_index, kept });
        }
        closing::unlock(&self.fd);
        if let Some(index) = self.table_index {
            relock(&TABLE).free.push(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_need_space() {
        let direct = |file: std::fs::File| {
            let cached = Fd::file(file.try_clone().unwrap().into());
            Fd::direct(file.into(), &cached).may_need_space
        };
        assert!(direct(tempfile::tempfile().unwrap()));
        assert!(!direct(std::fs::File::open("/dev/zero").unwrap()));
    }
}
