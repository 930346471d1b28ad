//! Processes: what this one may have, and another one of this host. That one is named so that a later process with the same
//! number is never taken for it.
//!
//! A pidfd is such a name, from Linux 5.3 on. Before that it is the process's folder in /proc, held open: once the process is
//! gone, nothing can be opened in that folder any more, whoever has the number by then.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, open, openat};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, kill_process, pidfd_open, pidfd_send_signal, setrlimit,
};
use spile_core::{Error, ErrorKind, Result};

/// Takes all the descriptors that the process is allowed: a guest of many queues needs a hundred, and twice that while it
/// is handed over. Where that cannot be, fewer guests are served.
pub fn raise_file_limit() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// Refuses to serve where /proc is not mounted: which boot of the host this is tells whether notes of a server that was killed still count, and
/// descriptors that others hand in are looked at there.
///
/// # Errors
/// `Unsupported`.
pub fn need_proc() -> Result<()> {
    const NEEDED: [&str; 2] = ["/proc/self/fd", "/proc/sys/kernel/random/boot_id"];
    match NEEDED.into_iter().find(|path| !Path::new(path).exists()) {
        None => Ok(()),
        Some(missing) => {
            Err(Error::new(ErrorKind::Unsupported, format!("{missing} is not there, and a server needs it"))
                .hint("mount /proc here: mount -t proc proc /proc"))
        }
    }
}

/// Another process.
pub struct Process {
    pid: Pid,
    name: Name,
}

enum Name {
    Pidfd(OwnedFd),
    /// The folder of the process in /proc.
    Folder(OwnedFd),
}

impl Process {
    /// The process that has this number now.
    ///
    /// # Errors
    /// When there is none; the system's.
    pub fn of(pid: Pid) -> Result<Self> {
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self { pid, name: Name::Pidfd(pidfd) }),
            // A filter may refuse the call as if it were forbidden.
            Err(Errno::NOSYS | Errno::PERM) => Self::by_folder(pid),
            Err(errno) => Err(not_found(errno)),
        }
    }

    fn by_folder(pid: Pid) -> Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = open(format!("/proc/{pid}"), flags, Mode::empty()).map_err(not_found)?;
        Ok(Self { pid, name: Name::Folder(folder) })
    }

    /// The process that connected to the other end of this Unix socket.
    ///
    /// # Errors
    /// When it has ended; the system's.
    pub fn peer_of(socket: BorrowedFd<'_>) -> Result<Self> {
        let pid = sockopt::socket_peercred(socket).map_err(not_found)?.pid;
        match spile_engine::peer_process(socket) {
            Ok(pidfd) => Ok(Self { pid, name: Name::Pidfd(pidfd) }),
            Err(_) => Self::of(pid),
        }
    }

    /// The process's number.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// What becomes readable when the process has ended; `None` where the system has no such thing, and [`Process::has_ended`]
    /// has to be asked from time to time.
    pub fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        match &self.name {
            Name::Pidfd(pidfd) => Some(pidfd.as_fd()),
            Name::Folder(_) => None,
        }
    }

    /// True when the process has ended, also while its parent has not asked how.
    pub fn has_ended(&self) -> bool {
        match &self.name {
            Name::Pidfd(pidfd) => {
                poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
            }
            Name::Folder(folder) => !state_in(folder).is_some_and(|state| !matches!(state, b'Z' | b'X')),
        }
    }

    /// Ends the process at once (SIGKILL).
    ///
    /// # Errors
    /// When it has ended already; the system's.
    pub fn kill(&self) -> Result<()> {
        let killed = match &self.name {
            Name::Pidfd(pidfd) => pidfd_send_signal(pidfd, Signal::KILL),
            Name::Folder(_) if self.has_ended() => Err(Errno::SRCH),
            Name::Folder(_) => kill_process(self.pid, Signal::KILL),
        };
        killed.map_err(|errno| Error::io("end a process", errno.into()))
    }
}

fn not_found(errno: Errno) -> Error {
    Error::io("find a process", errno.into())
}

/// The letter of the process's state, which stands behind its name in parentheses (see proc(5)); `None` when it is gone.
fn state_in(folder: &OwnedFd) -> Option<u8> {
    let file = openat(folder, "stat", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = [0; 512];
    let count = rustix::io::read(file, &mut text).ok()?;
    let end_of_name = text[..count].iter().rposition(|byte| *byte == b')')?;
    text.get(end_of_name + 2).copied()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn both(pid: Pid) -> [Process; 2] {
        [Process::of(pid).unwrap(), Process::by_folder(pid).unwrap()]
    }

    #[test]
    fn a_process_that_has_ended_is_known_before_and_after_its_parent_asks() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let processes = both(Pid::from_child(&child));
        assert!(processes.iter().all(|process| !process.has_ended()));
        processes[1].kill().unwrap();
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !processes.iter().all(Process::has_ended) {
            assert!(std::time::Instant::now() < end, "a zombie is not known to have ended");
        }
        child.wait().unwrap();
        assert!(processes.iter().all(Process::has_ended));
        assert!(processes.iter().all(|process| process.kill().is_err()));
    }

    #[test]
    fn the_peer_of_a_socket_is_found() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = Process::peer_of(ours.as_fd()).unwrap();
        assert_eq!(peer.pid().as_raw_pid() as u32, std::process::id());
        assert!(!peer.has_ended());
    }
}
