//! The lock that a store holds on its file, and what happens when it is lost.
//!
//! A file server takes a lock away when it has not heard of this host for some time, and may give it to another one. Two
//! writers destroy an image, so this one stops. Nothing tells a program that it has lost a lock, and an idle disk must not
//! ask again and again. The first sign is a request that fails: then the store asks the kernel, on a thread of its
//! own, because the answer may take as long as the file server does. When the lock is gone, all further writes are refused
//! until the disk is opened anew. Reads go on.
//!
//! What this cannot see: a lock that was lost while no request failed, and one of which this host's kernel does not know that it is
//! lost (NFS, whose client fails the requests itself then; see the module `lock` of the engine).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use spile_core::{Error, ErrorKind, Result};
use spile_engine::RawFile;

/// Whether the lock of a store's file is still held.
pub(crate) struct HeldLock {
    state: Arc<State>,
}

struct State {
    /// The file that was locked; `None` when it was opened without a lock.
    file: Option<RawFile>,
    path: PathBuf,
    is_lost: AtomicBool,
    /// A thread asks the kernel at this moment.
    is_asking: AtomicBool,
}

impl HeldLock {
    /// The lock on `file`, if one was taken.
    pub(crate) fn new(file: Option<RawFile>, path: &Path) -> Self {
        let [is_lost, is_asking] = Default::default();
        Self { state: Arc::new(State { file, path: path.to_owned(), is_lost, is_asking }) }
    }

    /// Fails once the lock is known to be lost.
    pub(crate) fn check(&self) -> Result<()> {
        match self.state.is_lost.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(lost()),
        }
    }

    /// A request has failed with `errno`: asks whether the lock is still held, where that may be the reason.
    pub(crate) fn doubt(&self, errno: i32) {
        let state = &self.state;
        if state.file.is_none() || !may_mean_loss(errno) || state.is_lost.load(Ordering::Relaxed) {
            return;
        }
        if state.is_asking.swap(true, Ordering::AcqRel) {
            return;
        }
        let asking = state.clone();
        let begun = std::thread::Builder::new().name("spile-lock".into()).spawn(move || asking.ask());
        if begun.is_err() {
            state.is_asking.store(false, Ordering::Release);
        }
    }
}

impl State {
    fn ask(&self) {
        if self.file.as_ref().and_then(RawFile::is_still_locked) == Some(false) {
            self.is_lost.store(true, Ordering::Release);
            tracing::error!("{}: {}", self.path.display(), lost());
        }
        self.is_asking.store(false, Ordering::Release);
    }
}

/// True for what a file system answers that has lost its server or what it knew of the file. Not for "no space" and the
/// like, which come often.
fn may_mean_loss(errno: i32) -> bool {
    matches!(
        errno,
        libc::EIO
            | libc::ESTALE
            | libc::ENOLCK
            | libc::EACCES
            | libc::EPERM
            | libc::EBADF
            | libc::ENOTCONN
            | libc::EREMOTEIO
            | libc::ETIMEDOUT
            | libc::EHOSTDOWN
    )
}

fn lost() -> Error {
    Error::new(
        ErrorKind::Denied,
        "the lock on the file was lost, and another host may write to it: nothing more is written",
    )
    .hint("make sure that nobody else uses the disk, then end this program and start it again")
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::Duration;

    use spile_core::OpenMode;

    use super::*;

    fn locked(path: &Path) -> (RawFile, HeldLock) {
        let file = RawFile::new(std::fs::File::options().read(true).write(true).open(path).unwrap().into());
        file.lock(OpenMode::ReadWrite).unwrap();
        let lock = HeldLock::new(Some(file.clone()), path);
        (file, lock)
    }

    /// Waits until no thread asks any more.
    fn settled(lock: &HeldLock) -> bool {
        while lock.state.is_asking.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        lock.check().is_ok()
    }

    /// Takes the locks away behind the program's back, as a file server does: a file that is dropped gives up the locks of its
    /// open description, and this one shares it.
    fn lose(file: &RawFile) {
        drop(RawFile::new(file.as_fd().try_clone_to_owned().unwrap()));
    }

    #[test]
    fn only_a_lock_that_is_gone_stops_writes() {
        let temp = tempfile::NamedTempFile::new().unwrap();
        let (file, lock) = locked(temp.path());
        lock.doubt(libc::EIO);
        assert!(settled(&lock), "it is held");
        lose(&file);
        lock.doubt(libc::ENOSPC);
        assert!(settled(&lock), "nobody asked");
        lock.doubt(libc::EIO);
        assert!(!settled(&lock));
        assert_eq!(lock.check().unwrap_err().kind(), ErrorKind::Denied);
        // It does not come back.
        file.lock(OpenMode::ReadWrite).unwrap();
        lock.doubt(libc::EIO);
        assert!(!settled(&lock));
    }

    #[test]
    fn without_a_lock_none_is_lost() {
        let lock = HeldLock::new(None, Path::new("x"));
        lock.doubt(libc::EIO);
        assert!(settled(&lock));
    }
}
