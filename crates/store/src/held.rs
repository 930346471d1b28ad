//! The lock that a store holds on its file, and what happens when it is lost.
//!
//! A file server takes a lock away when it has not heard of this host for some time, and may give it to another one. Two
//! writers destroy an image, so this one stops. Nothing tells a program that it has lost a lock, and an idle disk must not
//! ask again and again. The first sign is a request that fails: then the store asks the kernel, on a thread of its
//! own, because the answer may take as long as the file server does. When the lock is gone, all further writes are refused
//! until the disk is opened anew. Reads go on.
//!
//! Where the kernel cannot tell, the lock counts as lost if the file system's answer says that it knows nothing of the file or of
//! its locks any more. After any other answer (there are too few descriptors, for example) writes are refused until the
//! kernel says that the lock is held. A refused write asks again, once a second at most.
//!
//! What this cannot see: a lock that was lost while no request failed, and one of which this host's kernel does not know that it is
//! lost (NFS, whose client fails the requests itself then; see the module `lock` of the engine).

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use spile_core::{Error, ErrorKind, OpenMode, PathCell, Result};
use spile_engine::{LockProbe, RawFile};

/// The values of [`State::known`].
const HELD: u8 = 0;
const UNKNOWN: u8 = 1;
const LOST: u8 = 2;
/// The file was reopened in another mode, or that failed halfway: this store only reads from then on, and nobody asks.
const PASSED_ON: u8 = 3;

/// The time from an answer that says nothing to the next question.
const PAUSE: Duration = Duration::from_secs(1);

/// Whether the lock of a store's file is still held.
pub(crate) struct HeldLock {
    state: Arc<State>,
    /// The file, and the mode in which it was locked; `None` when it was opened without a lock.
    file: Option<(RawFile, OpenMode)>,
    /// What has become of the lock, one step after the other.
    passing: Mutex<Passed>,
}

/// Whether the lock of a store has passed on to another opening of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Passed {
    /// It has not.
    No,
    /// The file was reopened for reading: this store has a reader's lock, too.
    Lowered,
    /// The file was reopened for writing: this store has no lock, until the newer one gives it back.
    Away,
}

/// What the threads that ask know, too. It does not keep the file open, so that the file's locks end with the store.
struct State {
    path: Arc<PathCell>,
    /// What was last heard of the lock.
    known: AtomicU8,
    /// A thread asks the kernel at this moment, or has asked it just now and got no answer.
    is_asking: AtomicBool,
}

impl HeldLock {
    /// The lock on `file`, if one was taken, in this mode.
    pub(crate) fn new(file: Option<(RawFile, OpenMode)>, path: Arc<PathCell>) -> Self {
        let (known, is_asking) = (AtomicU8::new(HELD), AtomicBool::new(false));
        Self { state: Arc::new(State { path, known, is_asking }), file, passing: Mutex::new(Passed::No) }
    }

    /// Has `pass` take over the lock for another opening of the file, in the mode `to`; it is told the mode in which the file is locked now,
    /// if it is. From then on this store takes no writes. When `pass` fails, a store that only reads has its lock as before, or is
    /// known to have lost it; one that was to be reopened for reading takes no writes any more, and can be reopened again.
    pub(crate) fn pass_on<T>(&self, to: OpenMode, pass: impl FnOnce(Option<OpenMode>) -> Result<T>) -> Result<T> {
        let mut passing = self.passing();
        let known = self.state.known.load(Ordering::Acquire);
        match *passing {
            Passed::Away => return Err(passed_away()),
            _ if known == PASSED_ON => {}
            Passed::No | Passed::Lowered => self.check()?,
        }
        let was = self.mode_in(*passing);
        let before = self.state.known.swap(PASSED_ON, Ordering::AcqRel);
        let passed = pass(was);
        match (&passed, to) {
            (Ok(_), OpenMode::ReadOnly) => *passing = Passed::Lowered,
            (Ok(_), OpenMode::ReadWrite) => *passing = Passed::Away,
            // Nobody knows how far it came: the lock may be a reader's now.
            (Err(_), OpenMode::ReadOnly) => {}
            (Err(_), OpenMode::ReadWrite) => self.state.known.store(self.still_held(was, before), Ordering::Release),
        }
        passed
    }

    /// Has `take` take the lock back from the newer opening of the file, which ends while this store is in use: it is to lock the
    /// file for reading. Does nothing when the lock was not passed on.
    pub(crate) fn take_back(&self, take: impl FnOnce() -> Result<()>) {
        let mut passing = self.passing();
        let (Passed::Away, Some((_, mode))) = (*passing, &self.file) else { return };
        let (passed, known) = match mode {
            OpenMode::ReadOnly => (Passed::No, HELD),
            OpenMode::ReadWrite => (Passed::Lowered, PASSED_ON),
        };
        *passing = passed;
        let known = take().map_or_else(|error| self.state.note_lost(&error), |()| known);
        self.state.known.store(known, Ordering::Release);
    }

    /// True when another opening of the file has the lock.
    pub(crate) fn is_away(&self) -> bool {
        *self.passing() == Passed::Away
    }

    fn passing(&self) -> MutexGuard<'_, Passed> {
        self.passing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mode in which the file is locked, if it is.
    fn mode_in(&self, passed: Passed) -> Option<OpenMode> {
        self.file.as_ref().map(|(_, mode)| if passed == Passed::Lowered { OpenMode::ReadOnly } else { *mode })
    }

    /// What is known of the lock of this store, which was to be passed on: `before` if it is still there. It is one of the mode `was`.
    fn still_held(&self, was: Option<OpenMode>, before: u8) -> u8 {
        let (Some((file, _)), Some(was)) = (&self.file, was) else { return before };
        match file.lock_probe(was).and_then(|probe| probe.is_held()) {
            Ok(true) => before,
            _ => self.state.note_lost(&lost()),
        }
    }

    /// Fails once the lock is known to be lost, and while nobody knows.
    pub(crate) fn check(&self) -> Result<()> {
        match self.state.known.load(Ordering::Relaxed) {
            HELD => Ok(()),
            LOST => Err(lost()),
            PASSED_ON => Err(passed_on()),
            _ => {
                self.ask();
                Err(unknown())
            }
        }
    }

    /// A request has failed with `errno`: asks whether the lock is still held, where that may be the reason.
    pub(crate) fn doubt(&self, errno: i32) {
        if may_mean_loss(errno) {
            self.ask();
        }
    }

    /// Has a thread ask the kernel, unless one does so.
    fn ask(&self) {
        let (state, Some((file, mode))) = (&self.state, &self.file) else { return };
        let is_over = matches!(state.known.load(Ordering::Relaxed), LOST | PASSED_ON);
        if is_over || state.is_asking.swap(true, Ordering::AcqRel) {
            return;
        }
        let (asking, probe) = (state.clone(), file.lock_probe(*mode));
        let asks = move || asking.hear(probe.and_then(|probe: LockProbe| probe.is_held()));
        if std::thread::Builder::new().name("spile-lock".into()).spawn(asks).is_err() {
            state.known.store(UNKNOWN, Ordering::Release);
            state.is_asking.store(false, Ordering::Release);
        }
    }
}

impl State {
    /// Says that the lock is lost, and why.
    fn note_lost(&self, error: &Error) -> u8 {
        tracing::error!("{}: {error}", self.path.get().display());
        LOST
    }

    /// Takes note of the kernel's answer.
    fn hear(&self, answer: Result<bool, i32>) {
        let known = judge(answer);
        let note = |before| (before != PASSED_ON).then_some(known);
        let before = self.known.fetch_update(Ordering::AcqRel, Ordering::Acquire, note).unwrap_or(known);
        if known != before && known != HELD {
            let error = if known == LOST { lost() } else { unknown() };
            tracing::error!("{}: {error}", self.path.get().display());
        }
        if known == UNKNOWN {
            std::thread::sleep(PAUSE);
        }
        self.is_asking.store(false, Ordering::Release);
    }
}

/// What an answer says about the lock.
fn judge(answer: Result<bool, i32>) -> u8 {
    match answer {
        Ok(true) => HELD,
        Ok(false) | Err(libc::ESTALE | libc::ENOLCK | libc::EBADF | libc::EACCES) => LOST,
        Err(_) => UNKNOWN,
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

fn passed_on() -> Error {
    Error::new(ErrorKind::ReadOnly, "the file was opened anew, and is not written this way any more")
}

fn passed_away() -> Error {
    Error::new(ErrorKind::Busy, "the file was opened anew for writing, and its lock is there")
}

fn unknown() -> Error {
    Error::new(
        ErrorKind::Denied,
        "nobody can tell whether the file is still locked, and another host may write to it: nothing is written until that is known",
    )
    .hint("look at the file system of the disk, and at the limits of this process on open files and threads")
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::path::Path;
    use std::time::Duration;

    use spile_core::OpenMode;

    use super::*;

    fn cell(path: &Path) -> Arc<PathCell> {
        Arc::new(PathCell::new(path.to_owned()))
    }

    fn locked(path: &Path) -> (RawFile, HeldLock) {
        let file = RawFile::new(std::fs::File::options().read(true).write(true).open(path).unwrap().into());
        file.lock(OpenMode::ReadWrite).unwrap();
        let lock = HeldLock::new(Some((file.clone(), OpenMode::ReadWrite)), cell(path));
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
    fn another_hosts_lock_is_not_ours() {
        let temp = tempfile::NamedTempFile::new().unwrap();
        let (file, lock) = locked(temp.path());
        lose(&file);
        let _theirs = locked(temp.path());
        lock.doubt(libc::EIO);
        assert!(!settled(&lock));
    }

    #[test]
    fn nothing_is_written_until_an_answer_says_that_the_lock_is_held() {
        let temp = tempfile::NamedTempFile::new().unwrap();
        let (_file, lock) = locked(temp.path());
        lock.state.hear(Err(libc::EMFILE));
        // The refused write asks again, and is told that the lock is held.
        assert_eq!(lock.check().unwrap_err().kind(), ErrorKind::Denied);
        assert!(settled(&lock));
        let gone = [libc::ESTALE, libc::ENOLCK, libc::EBADF, libc::EACCES];
        assert_eq!(gone.map(|errno| judge(Err(errno))), [LOST; 4]);
    }

    #[test]
    fn a_question_does_not_keep_the_file_locked() {
        let temp = tempfile::NamedTempFile::new().unwrap();
        let (file, lock) = locked(temp.path());
        let _probe = file.lock_probe(OpenMode::ReadWrite).unwrap();
        // A thread that has not got its answer has a share of this, too.
        let _asking = lock.state.clone();
        drop((file, lock));
        locked(temp.path());
    }

    #[test]
    fn a_lock_that_is_lost_while_it_is_passed_on_is_known_to_be_lost() {
        let temp = tempfile::NamedTempFile::new().unwrap();
        let file = RawFile::new(std::fs::File::open(temp.path()).unwrap().into());
        file.lock(OpenMode::ReadOnly).unwrap();
        let lock = HeldLock::new(Some((file.clone(), OpenMode::ReadOnly)), cell(temp.path()));
        let fail = |_| Err::<(), _>(unknown());
        lock.pass_on(OpenMode::ReadWrite, fail).unwrap_err();
        lock.check().unwrap();
        lose(&file);
        lock.pass_on(OpenMode::ReadWrite, fail).unwrap_err();
        assert!(lock.check().unwrap_err().message().contains("was lost"));
        assert!(lock.pass_on(OpenMode::ReadWrite, |_| Ok(())).unwrap_err().message().contains("was lost"));
    }

    #[test]
    fn a_writer_that_could_not_be_made_a_reader_can_be_made_one_later() {
        let temp = tempfile::NamedTempFile::new().unwrap();
        let (_file, lock) = locked(temp.path());
        lock.pass_on(OpenMode::ReadOnly, |_| Err::<(), _>(unknown())).unwrap_err();
        assert_eq!(lock.check().unwrap_err().kind(), ErrorKind::ReadOnly);
        assert_eq!(lock.pass_on(OpenMode::ReadOnly, Ok).unwrap(), Some(OpenMode::ReadWrite));
    }

    #[test]
    fn without_a_lock_none_is_lost() {
        let lock = HeldLock::new(None, cell(Path::new("x")));
        lock.doubt(libc::EIO);
        assert!(settled(&lock));
    }
}
