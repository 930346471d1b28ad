//! [`Fd`]: an open file or socket as the reactors know it.
//!
//! A reactor may hold on to a file beyond its last user (io_uring's table of registered files, epoll's interest
//! list), so an `Fd` keeps the list of the workers that know it and tells them when it goes. Locks on a file must
//! end at once and not when the last worker has heard: the drop unlocks first.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use smallvec::SmallVec;

use crate::lock;
use crate::shared::{Message, Shared, relock};

/// Entries of a ring's table of registered files. Files beyond it are used unregistered.
pub(crate) const TABLE_FILES: u32 = 512;

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

static FAILED_SYNC: OnceLock<Box<dyn Fn() + Send + Sync>> = OnceLock::new();

/// Has `hear` called each time that a sync of a file of this process's has failed, before anybody is told of it: the kernel
/// tells of it once, so whoever wants it known after the death of the process notes it then. The first caller is heeded,
/// for the life of the process.
pub fn on_failed_sync(hear: impl Fn() + Send + Sync + 'static) {
    let _ = FAILED_SYNC.set(Box::new(hear));
}

pub(crate) struct Fd {
    fd: OwnedFd,
    /// Never used twice in a process, unlike descriptor numbers.
    pub(crate) id: u64,
    /// Index in the rings' tables; only store files have one.
    pub(crate) table_index: Option<u32>,
    /// Opened with O_DIRECT.
    pub(crate) direct: bool,
    /// The descriptor that holds the locks, when this one does not: while a transfer through this one is in flight,
    /// also one that nobody waits for any more, the file must not look free.
    _locked: Option<Arc<Fd>>,
    /// An eventfd: rings that are on their way to it.
    pub(crate) rings: AtomicU32,
    /// The first error a sync of this file ended with, 0 if none. The kernel reports it once only.
    sync_errno: AtomicI32,
    known_to: Mutex<SmallVec<[Arc<Shared>; 1]>>,
}

impl Fd {
    pub(crate) fn socket(fd: OwnedFd) -> Arc<Self> {
        Self::new(fd, None, None)
    }

    pub(crate) fn file(fd: OwnedFd) -> Arc<Self> {
        Self::new(fd, relock(&TABLE).take(), None)
    }

    /// The second descriptor of a file, opened with O_DIRECT; `locked` is its first.
    pub(crate) fn direct(fd: OwnedFd, locked: &Arc<Fd>) -> Arc<Self> {
        Self::new(fd, relock(&TABLE).take(), Some(locked.clone()))
    }

    fn new(fd: OwnedFd, table_index: Option<u32>, locked: Option<Arc<Fd>>) -> Arc<Self> {
        Arc::new(Self {
            fd,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            table_index,
            direct: locked.is_some(),
            _locked: locked,
            rings: AtomicU32::new(0),
            sync_errno: AtomicI32::new(0),
            known_to: Mutex::default(),
        })
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Notes that a worker's reactor holds on to the file and must hear when it goes.
    pub(crate) fn known_to(&self, shared: &Arc<Shared>) {
        relock(&self.known_to).push(shared.clone());
    }

    /// Notes how a sync ended, whether or not anybody still waits for it.
    pub(crate) fn note_sync(&self, errno: i32) {
        let _ = self.sync_errno.compare_exchange(0, errno, Ordering::AcqRel, Ordering::Acquire);
        if let Some(hear) = FAILED_SYNC.get() {
            hear();
        }
    }

    /// The errno of the first sync that failed.
    pub(crate) fn sync_errno(&self) -> Option<i32> {
        Some(self.sync_errno.load(Ordering::Acquire)).filter(|errno| *errno != 0)
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
            shared.push(Message::Forget { id: self.id, table_index: self.table_index });
        }
        if let Some(index) = self.table_index {
            lock::release(self.fd.as_fd());
            relock(&TABLE).free.push(index);
        }
    }
}
