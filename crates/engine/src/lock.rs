//! Locks between processes on an open file: open-file-description locks on single bytes, in QEMU's scheme.
//!
//! The scheme is QEMU's because QEMU and qemu-img may open the same disk image, and two writers destroy it. QEMU holds
//! a shared lock on byte 100 + p for each permission p that it uses, and on byte 200 + p for each permission that
//! others must not use. Then it checks whether anybody holds the opposite byte. We do the same:
//!
//! - a writer uses read (0), write (1) and resize (3), and does not let others write or resize;
//! - a reader uses read, and does not let others write or resize: any number of readers may share a parent;
//! - in addition, a writer locks byte 0 exclusively, and a reader locks it shared. Between processes of this program
//!   that lock alone decides, in one atomic step. It also keeps out programs that lock a whole file.
//!
//! So `qemu-img info`, `compare` and `convert` work on a file that is open here for reading, `qemu-img info -U` on
//! one that is open for writing, and a second writer is refused, whichever program came first.
//!
//! **A file can be promised.** A server that hands its disks over unlocks their files before its successor locks them. Between the two, whoever
//! comes would get them: a command that finds no server would change the disk, and neither of both could go on with it. So a server keeps a shared lock on byte
//! 300 meanwhile ([`promise`]), at which everybody but the two finds the file busy ([`take_promised`]).
//!
//! **Locks fail closed.** Where a lock cannot be asked for (a file system or kernel without such locks, no lock daemon), the
//! file is not opened, for nothing would keep a second writer out. An operator who takes that risk says `--no-lock`.
//!
//! **A lock can be lost** while the file is open: a file server whose lease has ended may give it to another host.
//! [`is_held`] asks whether ours is still there. It sees what the kernel of this host knows. Linux's NFS client does not
//! forget a lock that it has lost, so the answer there is "held"; it fails every read and write under such a lock with
//! EIO instead, until the file is closed (its parameter `recover_lost_locks` is off by default).

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use spile_core::{Code, Error, ErrorKind, OpenMode, Result};

use crate::sys::last_errno;

const USES: i64 = 100;
const REFUSES: i64 = 200;
const PROMISED: i64 = 300;
const READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// So many times this process is a server that is handing its disks over, or its successor.
static TAKES_PROMISED: AtomicUsize = AtomicUsize::new(0);

/// Keeps all processes from locking `file`, but for those that have what [`take_promised`] returns, until it is closed. It does not lock the file for
/// itself.
///
/// # Errors
/// `Unsupported` or `Denied` when there are no locks.
pub fn promise(file: &File) -> Result<()> {
    take(file.as_fd(), libc::F_RDLCK, PROMISED)
}

/// While it lives, this process locks files that are promised, too.
#[must_use]
#[derive(Debug)]
pub struct TakesPromised(());

/// Has this process lock files that are promised, too, for as long as what it returns lives.
pub fn take_promised() -> TakesPromised {
    TAKES_PROMISED.fetch_add(1, Ordering::Relaxed);
    TakesPromised(())
}

impl Drop for TakesPromised {
    fn drop(&mut self) {
        TAKES_PROMISED.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Locks a file that was just opened in `mode`, against other processes for which that mode leaves no room. The locks
/// end when the last duplicate of the descriptor is closed.
///
/// # Errors
/// `Busy` when another process has opened it in a mode that excludes this one; `Unsupported` or `Denied` when the file
/// system, the kernel or a lock daemon gives no locks.
pub(crate) fn acquire(fd: BorrowedFd<'_>, mode: OpenMode) -> Result<()> {
    acquire_as(fd, mode, TAKES_PROMISED.load(Ordering::Relaxed) > 0)
}

fn acquire_as(fd: BorrowedFd<'_>, mode: OpenMode, takes_promised: bool) -> Result<()> {
    let uses = uses_of(mode);
    take(fd, gate_of(mode), 0)?;
    take_shared(fd, uses)?;
    // First lock and then check, as QEMU does: when two processes come at once, at least one sees the other.
    let promised = (!takes_promised).then_some(PROMISED);
    for byte in uses.iter().map(|p| REFUSES + p).chain([USES + WRITE, USES + RESIZE]).chain(promised) {
        look(fd, byte)?;
    }
    Ok(())
}

/// Locks a second descriptor of a file that another descriptor of this process has locked in `mode`: by the same bytes,
/// but for byte 0, all of which are shared. Then the file stays locked until the last transfer through either descriptor
/// has ended, whatever becomes of the process: the kernel keeps a descriptor open for as long as a transfer uses it.
///
/// # Errors
/// As [`acquire`]; `Busy` when another process holds one of these bytes exclusively.
pub(crate) fn acquire_beside(fd: BorrowedFd<'_>, mode: OpenMode) -> Result<()> {
    take_shared(fd, uses_of(mode))
}

/// Has `new` locked in the mode `to`. `old` are descriptors of the same file that this process has locked in the mode `from`:
/// the one of [`acquire`] first, then those of [`acquire_beside`]. Another process that tries to lock the file meanwhile is refused. What is
/// left to `old` is the locks of a reader, or none when `new` writes. May wait a few milliseconds.
///
/// # Errors
/// As [`acquire`]; `InvalidInput` from writing to writing. Then `old` most likely has the locks that it had, but a writer may be left with those of
/// a reader, and a reader with none.
pub(crate) fn pass_on(old: &[BorrowedFd<'_>], from: OpenMode, new: BorrowedFd<'_>, to: OpenMode) -> Result<()> {
    match (from, to) {
        (OpenMode::ReadOnly, OpenMode::ReadOnly) => acquire(new, to),
        (OpenMode::ReadWrite, OpenMode::ReadOnly) => {
            lower(old)?;
            patiently(TRIES, || acquire(new, to))
        }
        (OpenMode::ReadOnly, OpenMode::ReadWrite) => raise(old, new),
        (OpenMode::ReadWrite, OpenMode::ReadWrite) => {
            Err(Error::new(ErrorKind::InvalidInput, "the file is open for writing already"))
        }
    }
}

/// Makes a writer's locks those of a reader. Byte 0 is converted in one step.
fn lower(old: &[BorrowedFd<'_>]) -> Result<()> {
    old.first().map_or(Ok(()), |first| take(*first, gate_of(OpenMode::ReadOnly), 0))?;
    for fd in old {
        for byte in [USES + WRITE, USES + RESIZE] {
            call(*fd, libc::F_OFD_SETLK, &mut request(libc::F_UNLCK, byte)).map_err(no_locks)?;
        }
    }
    Ok(())
}

/// Gives a reader's locks up for those of a writer. An exclusive lock needs a descriptor that writes, and no other description
/// may have byte 0 then. So `new` first takes the shared bytes, which refuse everybody who comes, and only then `old` lets go.
fn raise(old: &[BorrowedFd<'_>], new: BorrowedFd<'_>) -> Result<()> {
    take_shared(new, uses_of(OpenMode::ReadWrite))?;
    old.iter().for_each(|fd| release(*fd));
    let raised = patiently(TRIES, || acquire(new, OpenMode::ReadWrite));
    if raised.is_err() {
        // It may have got byte 0 and failed by another one, as when two readers want to write at once. It would be in the way of `old` itself.
        let _ = call(new, libc::F_OFD_SETLK, &mut request(libc::F_UNLCK, 0));
        // Whoever is in the way for a moment is refused by the shared bytes of `new`.
        let restored = patiently(RESTORE_TRIES, || {
            old.first().map_or(Ok(()), |first| take(*first, gate_of(OpenMode::ReadOnly), 0))?;
            old.iter().try_for_each(|fd| take_shared(*fd, uses_of(OpenMode::ReadOnly)))
        });
        release(new);
        restored?;
    }
    raised
}

/// Tries again while the file is busy, so many times: somebody who is about to be refused holds locks for a moment.
fn patiently(tries: u32, take: impl Fn() -> Result<()>) -> Result<()> {
    for _ in 0..tries {
        match take() {
            Err(error) if error.kind() == ErrorKind::Busy => std::thread::sleep(PAUSE),
            done => return done,
        }
    }
    take()
}

/// How often a busy lock is tried again, and the time between two tries.
const TRIES: u32 = 5;
/// How often it is tried where a failure leaves a file without its lock. A host of a file server may need long to be refused.
const RESTORE_TRIES: u32 = 1000;
const PAUSE: std::time::Duration = std::time::Duration::from_millis(1);

/// Ends the locks at once, however many duplicates of the descriptor there are, for example in a ring's table of files.
pub(crate) fn release(fd: BorrowedFd<'_>) {
    let mut whole = request(libc::F_UNLCK, 0);
    whole.l_len = 0;
    let _ = call(fd, libc::F_OFD_SETLK, &mut whole);
}

/// The kind of lock on byte 0.
fn gate_of(mode: OpenMode) -> i32 {
    match mode {
        OpenMode::ReadOnly => libc::F_RDLCK,
        OpenMode::ReadWrite => libc::F_WRLCK,
    }
}

/// The permissions that a process uses.
fn uses_of(mode: OpenMode) -> &'static [i64] {
    match mode {
        OpenMode::ReadOnly => &[READ],
        OpenMode::ReadWrite => &[READ, WRITE, RESIZE],
    }
}

fn take_shared(fd: BorrowedFd<'_>, uses: &[i64]) -> Result<()> {
    let mut bytes = uses.iter().map(|p| USES + p).chain([REFUSES + WRITE, REFUSES + RESIZE]);
    bytes.try_for_each(|byte| take(fd, libc::F_RDLCK, byte))
}

fn request(kind: i32, byte: i64) -> libc::flock {
    // SAFETY: a flock is plain numbers.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_start = byte;
    lock.l_len = 1;
    lock
}

fn call(fd: BorrowedFd<'_>, command: i32, lock: &mut libc::flock) -> Result<(), i32> {
    loop {
        // SAFETY: the structure is live.
        match unsafe { libc::fcntl(fd.as_raw_fd(), command, std::ptr::from_mut(lock)) } {
            0 => return Ok(()),
            _ if last_errno() == libc::EINTR => continue,
            _ => return Err(last_errno()),
        }
    }
}

fn take(fd: BorrowedFd<'_>, kind: i32, byte: i64) -> Result<()> {
    match call(fd, libc::F_OFD_SETLK, &mut request(kind, byte)) {
        Ok(()) => Ok(()),
        Err(libc::EAGAIN | libc::EACCES) => Err(busy()),
        Err(errno) => Err(no_locks(errno)),
    }
}

/// Fails with `Busy` when another process holds a lock on `byte`.
fn look(fd: BorrowedFd<'_>, byte: i64) -> Result<()> {
    let mut lock = request(libc::F_WRLCK, byte);
    match call(fd, libc::F_OFD_GETLK, &mut lock) {
        Ok(()) if lock.l_type != libc::F_UNLCK as i16 => Err(busy()),
        Ok(()) => Ok(()),
        Err(errno) => Err(no_locks(errno)),
    }
}

/// Whether the locks that [`acquire`] took through `locked` in `mode` are still there. `other` is another open description
/// of the same file. May wait for a file server.
///
/// # Errors
/// The errno with which the kernel refuses to tell.
pub(crate) fn is_held(locked: BorrowedFd<'_>, other: BorrowedFd<'_>, mode: OpenMode) -> Result<bool, i32> {
    // Locks of the description that asks are never in its own way. So what is in its way belongs to somebody who could not
    // have got it while ours was there.
    Ok(!is_excluded(locked, gate_of(mode))? && is_excluded(other, libc::F_WRLCK)?)
}

/// True when another open description has a lock on byte 0 that excludes one of this kind.
fn is_excluded(fd: BorrowedFd<'_>, kind: i32) -> Result<bool, i32> {
    let mut gate = request(kind, 0);
    call(fd, libc::F_OFD_GETLK, &mut gate)?;
    Ok(gate.l_type != libc::F_UNLCK as i16)
}

/// The error where a lock cannot be asked for.
fn no_locks(errno: i32) -> Error {
    let (kind, why) = match errno {
        libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY => {
            (ErrorKind::Unsupported, "its file system, or this kernel, has no locks of the kind F_OFD_SETLK")
        }
        libc::ENOLCK => (ErrorKind::Denied, "no lock daemon answers for its file system, or there are too many locks"),
        _ => (ErrorKind::Denied, "its file system does not answer a request for a lock"),
    };
    Error::new(kind, format!("the file cannot be locked against other users: {why}"))
        .caused_by(std::io::Error::from_raw_os_error(errno))
        .hint("mend the locking; or, if you make sure yourself that nobody else opens the disk, say --no-lock")
}

fn busy() -> Error {
    Error::new(ErrorKind::Busy, "the file is in use by another process")
        .coded(Code::InUse)
        .hint("end the program that has it open, or open it read-only in both")
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;

    use super::*;

    fn open(path: &Path) -> File {
        File::options().read(true).write(true).open(path).unwrap()
    }

    fn locked(path: &Path, mode: OpenMode) -> Option<File> {
        let file = open(path);
        acquire(file.as_fd(), mode).ok().map(|()| file)
    }

    /// Locks as QEMU does: shared locks on the permissions that it uses, and on those that others must not use.
    fn qemu(path: &Path, uses: &[i64]) -> File {
        let file = open(path);
        for byte in uses.iter().map(|p| USES + p).chain([REFUSES + WRITE, REFUSES + RESIZE]) {
            call(file.as_fd(), libc::F_OFD_SETLK, &mut request(libc::F_RDLCK, byte)).unwrap();
        }
        file
    }

    #[test]
    fn readers_share_and_writers_do_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let readers = [OpenMode::ReadOnly; 2].map(|mode| locked(file.path(), mode).unwrap());
        assert!(locked(file.path(), OpenMode::ReadWrite).is_none());
        drop(readers);
        let writer = locked(file.path(), OpenMode::ReadWrite).unwrap();
        assert!(locked(file.path(), OpenMode::ReadOnly).is_none());
        let duplicate = writer.try_clone().unwrap();
        release(writer.as_fd());
        assert!(locked(file.path(), OpenMode::ReadWrite).is_some());
        drop(duplicate);
    }

    #[test]
    fn a_file_stays_locked_while_a_transfer_through_its_second_descriptor_lasts() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let writer = locked(file.path(), OpenMode::ReadWrite).unwrap();
        let second = open(file.path());
        acquire_beside(second.as_fd(), OpenMode::ReadWrite).unwrap();
        // As a transfer in the kernel does, the duplicate keeps the descriptor open when the process is gone.
        let transfer = second.try_clone().unwrap();
        drop((writer, second));
        assert!(locked(file.path(), OpenMode::ReadWrite).is_none());
        assert!(locked(file.path(), OpenMode::ReadOnly).is_none());
        drop(transfer);
        assert!(locked(file.path(), OpenMode::ReadWrite).is_some());
    }

    #[test]
    fn a_promised_file_is_busy_for_all_but_those_that_may_take_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let promised = File::open(file.path()).unwrap();
        promise(&promised).unwrap();
        for mode in [OpenMode::ReadOnly, OpenMode::ReadWrite] {
            assert!(locked(file.path(), mode).is_none());
            assert!(acquire_as(open(file.path()).as_fd(), mode, true).is_ok());
        }
        drop(promised);
        assert!(locked(file.path(), OpenMode::ReadWrite).is_some());
    }

    #[test]
    fn a_file_that_cannot_be_locked_is_refused() {
        // A lock for reading cannot be taken through a descriptor that only writes: EBADF, as from a broken file system.
        let write_only = File::options().write(true).open(tempfile::NamedTempFile::new().unwrap().path()).unwrap();
        let error = acquire(write_only.as_fd(), OpenMode::ReadOnly).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(error.hint_text().unwrap().contains("--no-lock"));
    }

    #[test]
    fn each_errno_but_busy_is_no_lock() {
        let kinds = [libc::EINVAL, libc::EOPNOTSUPP, libc::ENOSYS, libc::ENOLCK, libc::EIO, libc::ESTALE]
            .map(|errno| (no_locks(errno).kind(), no_locks(errno).hint_text().is_some()));
        let [unsupported, denied] = [ErrorKind::Unsupported, ErrorKind::Denied].map(|kind| (kind, true));
        assert_eq!(kinds, [unsupported, unsupported, unsupported, denied, denied, denied]);
    }

    #[test]
    fn a_lost_lock_is_seen_through_another_descriptor() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for mode in [OpenMode::ReadOnly, OpenMode::ReadWrite] {
            let (locked, other) = (locked(file.path(), mode).unwrap(), open(file.path()));
            acquire_beside(other.as_fd(), mode).unwrap();
            let is_held = || is_held(locked.as_fd(), other.as_fd(), mode);
            assert_eq!(is_held(), Ok(true));
            release(locked.as_fd());
            assert_eq!(is_held(), Ok(false));
        }
    }

    #[test]
    fn the_lock_of_another_host_is_not_taken_for_ours() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for mode in [OpenMode::ReadOnly, OpenMode::ReadWrite] {
            let (ours, other) = (locked(file.path(), mode).unwrap(), open(file.path()));
            release(ours.as_fd());
            let _theirs = locked(file.path(), OpenMode::ReadWrite).unwrap();
            assert_eq!(is_held(ours.as_fd(), other.as_fd(), mode), Ok(false));
        }
    }

    #[test]
    fn a_kernel_that_cannot_tell_says_why() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let ours = locked(file.path(), OpenMode::ReadWrite).unwrap();
        let no_file = File::options().read(true).custom_flags(libc::O_PATH).open(file.path()).unwrap();
        assert_eq!(is_held(ours.as_fd(), no_file.as_fd(), OpenMode::ReadWrite), Err(libc::EBADF));
    }

    #[test]
    fn a_writers_lock_becomes_a_readers_and_back() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let is_locked = |mode| locked(file.path(), mode).is_none();
        let (first, beside) = (locked(file.path(), OpenMode::ReadWrite).unwrap(), open(file.path()));
        acquire_beside(beside.as_fd(), OpenMode::ReadWrite).unwrap();
        let old = [first.as_fd(), beside.as_fd()];
        let reader = open(file.path());
        pass_on(&old, OpenMode::ReadWrite, reader.as_fd(), OpenMode::ReadOnly).unwrap();
        drop(reader);
        assert!(is_locked(OpenMode::ReadWrite) && !is_locked(OpenMode::ReadOnly), "the old one has a reader's lock");
        let (writer, other) = (open(file.path()), locked(file.path(), OpenMode::ReadOnly).unwrap());
        let raised = pass_on(&old, OpenMode::ReadOnly, writer.as_fd(), OpenMode::ReadWrite);
        assert_eq!(raised.unwrap_err().kind(), ErrorKind::Busy, "another reader is there");
        drop((other, writer));
        assert!(is_locked(OpenMode::ReadWrite) && !is_locked(OpenMode::ReadOnly), "all is as it was");
        let writer = open(file.path());
        pass_on(&old, OpenMode::ReadOnly, writer.as_fd(), OpenMode::ReadWrite).unwrap();
        assert!(is_locked(OpenMode::ReadOnly));
        drop(writer);
        assert!(!is_locked(OpenMode::ReadWrite), "the old one has no lock any more");
    }

    /// Each gives up its reader's lock and sees the other one's first locks of a writer.
    #[test]
    fn of_two_readers_that_want_to_write_at_once_each_has_its_lock_afterwards() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let reader = locked(file.path(), OpenMode::ReadOnly).unwrap();
        let (other, writer) = (open(file.path()), open(file.path()));
        take_shared(other.as_fd(), uses_of(OpenMode::ReadWrite)).unwrap();
        let raised = pass_on(&[reader.as_fd()], OpenMode::ReadOnly, writer.as_fd(), OpenMode::ReadWrite);
        assert_eq!(raised.unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(is_held(reader.as_fd(), open(file.path()).as_fd(), OpenMode::ReadOnly), Ok(true));
        drop((other, writer));
        let readers = [reader, locked(file.path(), OpenMode::ReadOnly).unwrap()];
        std::thread::scope(|scope| {
            for reader in &readers {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let writer = open(file.path());
                        let raised =
                            pass_on(&[reader.as_fd()], OpenMode::ReadOnly, writer.as_fd(), OpenMode::ReadWrite);
                        assert_eq!(raised.unwrap_err().kind(), ErrorKind::Busy, "the other one reads all the time");
                    }
                });
            }
        });
        let other = open(file.path());
        assert!(readers.iter().all(|reader| is_held(reader.as_fd(), other.as_fd(), OpenMode::ReadOnly) == Ok(true)));
    }

    #[test]
    fn nobody_gets_a_lock_while_it_is_converted() {
        use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut holder = locked(file.path(), OpenMode::ReadWrite).unwrap();
        let (is_over, is_writer) = (AtomicBool::new(false), AtomicBool::new(true));
        // A second writer is always wrong, and a reader while the holder is known to write.
        let intrude =
            |mode| locked(file.path(), mode).is_some_and(|_held| mode == OpenMode::ReadWrite || is_writer.load(SeqCst));
        std::thread::scope(|scope| {
            let intruder = scope.spawn(|| {
                let mut wrong = 0;
                while !is_over.load(SeqCst) {
                    wrong += [OpenMode::ReadWrite, OpenMode::ReadOnly]
                        .map(|mode| u32::from(intrude(mode)))
                        .iter()
                        .sum::<u32>();
                }
                wrong
            });
            for _ in 0..300 {
                let next = open(file.path());
                is_writer.store(false, SeqCst);
                pass_on(&[holder.as_fd()], OpenMode::ReadWrite, next.as_fd(), OpenMode::ReadOnly).unwrap();
                holder = next;
                // The intruder may be in the way of a writer for a moment; then all stays as it is.
                holder = (0..1000)
                    .find_map(|_| {
                        let next = open(file.path());
                        let raised = pass_on(&[holder.as_fd()], OpenMode::ReadOnly, next.as_fd(), OpenMode::ReadWrite);
                        raised.is_ok().then_some(next)
                    })
                    .expect("it can be made a writer's lock");
                is_writer.store(true, SeqCst);
            }
            is_over.store(true, SeqCst);
            assert_eq!(intruder.join().unwrap(), 0);
        });
    }

    #[test]
    fn qemus_locks_are_respected() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let reader = qemu(file.path(), &[READ]);
        assert!(locked(file.path(), OpenMode::ReadOnly).is_some());
        assert!(locked(file.path(), OpenMode::ReadWrite).is_none());
        drop(reader);
        let _writer = qemu(file.path(), &[READ, WRITE, RESIZE]);
        assert!(locked(file.path(), OpenMode::ReadOnly).is_none());
        assert!(locked(file.path(), OpenMode::ReadWrite).is_none());
    }

    #[test]
    fn qemu_sees_our_locks() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let other = open(file.path());
        let held = |byte| look(other.as_fd(), byte).is_err();
        let reader = locked(file.path(), OpenMode::ReadOnly).unwrap();
        // A reader is in the way of a writer, and of no reader.
        assert!(held(REFUSES + WRITE) && !held(USES + WRITE) && !held(REFUSES + READ));
        drop(reader);
        let _writer = locked(file.path(), OpenMode::ReadWrite).unwrap();
        assert!(held(USES + WRITE) && held(REFUSES + WRITE) && !held(REFUSES + READ));
    }
}
