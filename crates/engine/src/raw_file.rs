//! [`RawFile`]: an open file or block device whose operations run on the reactor of the worker that polls them.
//!
//! There are no checks and no messages here, only operations and errnos. The crate `spile-store` makes stores of them.

use std::future::Future;
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use spile_core::{ErrorKind, OpenMode, Result, Segments};

use crate::closing::FileKey;
use crate::fd::Fd;
use crate::op::Op;
use crate::{closing, lock, shared, sys};

/// An open file. Clones are the same file. An operation in flight owns clones of its buffers and of the file until the
/// kernel has answered, also when its future is dropped. Operations panic outside a worker.
#[derive(Clone)]
pub struct RawFile {
    fd: Arc<Fd>,
}

impl RawFile {
    /// Takes over a descriptor whose transfers go through the page cache.
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd: Fd::file(fd) }
    }

    /// A file whose locks a server keeps.
    #[cfg(test)]
    pub(crate) fn on_server(fd: OwnedFd) -> Self {
        Self { fd: Fd::on_server(fd) }
    }

    /// Takes over a second descriptor of the file, opened with O_DIRECT; `first` is the first one. Where that was locked,
    /// `locked` is the mode: then the file stays locked while an operation through either is in flight, also when the
    /// process is killed.
    ///
    /// # Errors
    /// `Busy` when another process has locked the file, though it could not while the first descriptor is locked.
    pub fn direct(fd: OwnedFd, first: &RawFile, locked: Option<OpenMode>) -> Result<Self> {
        locked.map_or(Ok(()), |mode| lock::acquire_beside(fd.as_fd(), mode))?;
        Ok(Self { fd: Fd::direct(fd, &first.fd) })
    }

    /// The means to ask whether the locks that [`RawFile::lock`] took in `mode` are still there. It does not keep the file
    /// locked.
    ///
    /// # Errors
    /// The errno with which the system refuses one more descriptor.
    pub fn lock_probe(&self, mode: OpenMode) -> Result<LockProbe, i32> {
        let locked = rustix::io::fcntl_dupfd_cloexec(&self.fd, 0).map_err(rustix::io::Errno::raw_os_error)?;
        Ok(LockProbe { locked, mode })
    }

    /// Which file it is, for [`wait_for_unlocks`](crate::wait_for_unlocks); `None` for a socket.
    pub fn key(&self) -> Option<FileKey> {
        self.fd.lane().map(|lane| FileKey(lane.key().clone()))
    }

    /// True for a descriptor opened with O_DIRECT.
    pub fn is_direct(&self) -> bool {
        self.fd.direct
    }

    /// Locks the file for use in `mode`, against processes for which that leaves no room (by the locks that QEMU uses,
    /// see the module `lock`). The locks end when the last clone is dropped and the last operation has ended, also when
    /// the process is killed.
    ///
    /// # Errors
    /// `Busy` when another process has opened it in a mode that excludes this one; `Unsupported` or `Denied` when the file
    /// cannot be locked.
    pub fn lock(&self, mode: OpenMode) -> Result<()> {
        // This process itself may be about to unlock it. That may be over between the two looks.
        let was_ours = closing::is_being_unlocked(self.fd.share());
        match lock::acquire(self.fd.as_fd(), mode) {
            Err(error)
                if error.kind() == ErrorKind::Busy && (closing::wait_for_unlock(self.fd.share()) || was_ours) =>
            {
                lock::acquire(self.fd.as_fd(), mode)?;
            }
            done => done?,
        }
        if mode == OpenMode::ReadWrite {
            shared::hold_everywhere(&self.fd);
        }
        Ok(())
    }

    /// Locks this file for use in `mode`. `old` are other descriptors of the same file that are locked in the mode `was`, the one of
    /// [`RawFile::lock`] first: a reader's locks are left to them, or none when this file is to be written. Nobody can lock the
    /// file in between. May wait for a file server.
    ///
    /// # Errors
    /// As [`RawFile::lock`]. Then `old` may have fewer locks than before: a writer those of a reader, a reader none.
    pub fn take_lock_over(&self, mode: OpenMode, old: &[&RawFile], was: OpenMode) -> Result<()> {
        let old: Vec<_> = old.iter().map(|file| file.as_fd()).collect();
        lock::pass_on(&old, was, self.as_fd(), mode)?;
        if mode == OpenMode::ReadWrite {
            shared::hold_everywhere(&self.fd);
        }
        Ok(())
    }

    /// Locks this second descriptor of a file that another descriptor of this process has locked in `mode`, as [`RawFile::direct`] does.
    ///
    /// # Errors
    /// As there.
    pub fn lock_beside(&self, mode: OpenMode) -> Result<()> {
        lock::acquire_beside(self.fd.as_fd(), mode)
    }

    /// Fills `into` from `offset_bytes`; returns how many bytes were read, fewer only at the end of the file.
    pub fn read(&self, offset_bytes: u64, into: &Segments) -> impl Future<Output = Result<usize, i32>> + use<> {
        Op::read(&self.fd, offset_bytes, into).run()
    }

    /// Reads what is in the page cache, without waiting for the device; returns how many bytes that were.
    ///
    /// # Errors
    /// EAGAIN when nothing is there; EOPNOTSUPP where the file system cannot tell.
    pub fn read_at_once(&self, offset_bytes: u64, into: &Segments) -> Result<usize, i32> {
        sys::read_nowait(self.fd.raw(), offset_bytes, into.as_slice())
    }

    /// Writes all of `from` at `offset_bytes`; returns its length.
    pub fn write(&self, offset_bytes: u64, from: &Segments) -> impl Future<Output = Result<usize, i32>> + use<> {
        Op::write(&self.fd, offset_bytes, from).run()
    }

    /// Makes the file's data durable (fdatasync). Returns the length of the file then, as [`RawFile::len_bytes`] does. A failure is kept ([`RawFile::failed_sync`]), whether or not anybody
    /// waits for the result.
    pub fn sync(&self) -> impl Future<Output = Result<usize, i32>> + use<> {
        Op::sync(&self.fd).run()
    }

    /// Finds the file's length, as far as this host knows it; `usize::MAX` where it cannot be told. That of a device is 0.
    pub fn len_bytes(&self) -> impl Future<Output = Result<usize, i32>> + use<> {
        Op::len(&self.fd).run()
    }

    /// The errno of the first sync that failed, if one has. The kernel reports a failure once only.
    pub fn failed_sync(&self) -> Option<i32> {
        self.fd.sync_errno()
    }

    /// Notes a failed sync, as if [`RawFile::sync`] had failed.
    pub fn note_failed_sync(&self, errno: i32) {
        self.fd.note_sync(errno);
    }

    /// From now on [`RawFile::failed_sync`] is `errno`, because a sync has failed in an earlier process; or nothing, because somebody
    /// accepts what was lost.
    pub fn set_failed_sync(&self, errno: Option<i32>) {
        self.fd.set_sync_errno(errno.unwrap_or(0));
    }

    /// Calls fallocate(2) with these `FALLOC_FL_` flags.
    pub fn fallocate(
        &self,
        flags: i32,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> impl Future<Output = Result<usize, i32>> + use<> {
        Op::fallocate(&self.fd, flags, offset_bytes, len_bytes).run()
    }

    /// Has the kernel begin to write back what the page cache has of a range, if it can. Blocks while the medium has too much to do: not
    /// for a worker.
    pub fn begin_write_back(&self, range: Range<u64>) {
        // A sync does it later where this fails.
        let _ = sys::sync_file_range(self.fd.raw(), &range, libc::SYNC_FILE_RANGE_WRITE);
    }

    /// Waits until what the page cache has of a range is written back, and has the kernel forget it. Blocks: not for a worker.
    ///
    /// # Errors
    /// The errno with which the write back has failed. It counts as a failed sync, for the kernel tells of it only once.
    pub fn leave_page_cache(&self, range: Range<u64>) -> Result<(), i32> {
        match sys::sync_file_range(self.fd.raw(), &range, sys::WHOLE_WRITE_BACK) {
            // Not every file system and device can do this.
            Err(libc::EINVAL | libc::ESPIPE | libc::ENOSYS) => return Ok(()),
            Err(errno) => {
                self.note_failed_sync(errno);
                return Err(errno);
            }
            Ok(_) => {}
        }
        let len_bytes = NonZero::new(range.end - range.start);
        let _ = rustix::fs::fadvise(&self.fd, range.start, len_bytes, rustix::fs::Advice::DontNeed);
        Ok(())
    }

    /// Sets the file's length (ftruncate(2)).
    pub fn truncate(&self, len_bytes: u64) -> impl Future<Output = Result<usize, i32>> + use<> {
        Op::truncate(&self.fd, len_bytes).run()
    }
}

/// Asks whether a file is still locked. It has a descriptor of its own, so the locks end when the [`RawFile`] is dropped,
/// however long an answer takes.
pub struct LockProbe {
    locked: OwnedFd,
    mode: OpenMode,
}

impl LockProbe {
    /// Whether the locks are still there. Opens the file once more to ask. May wait for a file server: not for a worker.
    ///
    /// # Errors
    /// The errno with which the kernel refuses to tell.
    pub fn is_held(&self) -> Result<bool, i32> {
        let name = format!("/proc/self/fd/{}", self.locked.as_raw_fd());
        let other = std::fs::File::open(name).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        lock::is_held(self.locked.as_fd(), other.as_fd(), self.mode)
    }
}

/// A run of a file: data, or a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawExtent {
    /// The end of the run; at least the length of the file when the run is the last one.
    pub end_bytes: u64,
    /// True for a hole.
    pub is_hole: bool,
}

impl RawFile {
    /// Finds the run that `offset_bytes`, which is in the file, belongs to (lseek(2)).
    pub async fn extent(&self, offset_bytes: u64) -> Result<RawExtent, i32> {
        let found = Op::extent(&self.fd, offset_bytes).run().await?;
        Ok(RawExtent { end_bytes: found as u64 >> 1, is_hole: found & 1 == 1 })
    }
}

impl AsFd for RawFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
