//! The back end of a host: a process for each disk that the toolstack makes, and another one when it dies.
//!
//! There is nothing here that a guest's I/O passes through. The disks' processes go on when this one ends, and the next
//! one finds them again by their pid files.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, WaitOptions, pidfd_open, waitpid};
use spile_core::{Error, ErrorKind, Result};
use spile_front_blkif::pause;
use spile_front_blkif::xenbus::State;
use spile_xen::store::{Tx, XenStore};

use crate::cli::complain;
use crate::xen::disk::{Claim, file_stem};

/// Before a disk's process is started again that has ended with an error, or could not be started.
const REST: Duration = Duration::from_secs(2);
/// The same of one that was killed, soon after it was started.
const SHORT_REST: Duration = Duration::from_millis(50);

/// What the back end of a host needs.
pub struct Backend {
    store: XenStore,
    /// Where the toolstack puts disks: `…/backend/TYPE`.
    folder: String,
    run_dir: PathBuf,
    /// Of a disk's process, before its back end's path.
    arguments: Vec<OsString>,
    disks: BTreeMap<String, Process>,
    /// Disks that are not to be started before this.
    resting: BTreeMap<String, Instant>,
}

/// A disk's process.
struct Process {
    pid: Pid,
    /// Readable once it has ended.
    pidfd: OwnedFd,
    started: Instant,
}

impl Backend {
    /// The back end for disks of type `kind` of our own domain. `arguments` are those of a disk's process, before
    /// its back end's path.
    ///
    /// # Errors
    /// What the store says; when the run folder cannot be made.
    pub fn new(mut store: XenStore, kind: &str, run_dir: &Path, arguments: Vec<OsString>) -> Result<Self> {
        let own = store.own_domid()?;
        let folder = format!("{}/backend/{kind}", store.domain_path(own)?);
        std::fs::create_dir_all(run_dir).map_err(|source| Error::io("make the folder", source).at_path(run_dir))?;
        store.watch(&folder, "disks")?;
        let run_dir = run_dir.to_owned();
        Ok(Self { store, folder, run_dir, arguments, disks: BTreeMap::new(), resting: BTreeMap::new() })
    }

    /// Serves until `stop` is readable. The disks' processes go on.
    ///
    /// # Errors
    /// When xenstore is gone.
    pub fn run(&mut self, stop: &OwnedFd) -> Result<()> {
        loop {
            self.look()?;
            if self.wait(stop)? {
                return Ok(());
            }
            while self.store.next_event(Some(Duration::ZERO))?.is_some() {}
            self.bury();
        }
    }

    /// Starts a process for each disk that has none.
    fn look(&mut self) -> Result<()> {
        let mut wanted = BTreeSet::new();
        for domain in self.list(&self.folder.clone())? {
            for device in self.list(&format!("{}/{domain}", self.folder))? {
                wanted.insert(format!("{}/{domain}/{device}", self.folder));
            }
        }
        self.resting.retain(|path, until| wanted.contains(path) && *until > Instant::now());
        for path in wanted {
            let is_resting = self.resting.get(&path).is_some_and(|until| *until > Instant::now());
            if is_resting || self.disks.contains_key(&path) {
                continue;
            }
            let is_wanted = match self.is_to_be_served(&path) {
                // What is no text is this disk's trouble only.
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    complain(format_args!("{path}: {error}"));
                    self.resting.insert(path.clone(), Instant::now() + REST);
                    false
                }
                result => result?,
            };
            if is_wanted {
                self.resting.remove(&path);
                match self.find_or_start(&path) {
                    Ok(process) => drop(self.disks.insert(path, process)),
                    Err(error) => {
                        complain(format_args!("{path}: {error}"));
                        self.resting.insert(path, Instant::now() + REST);
                    }
                }
            }
        }
        Ok(())
    }

    fn list(&mut self, path: &str) -> Result<Vec<String>> {
        match self.store.list(Tx::NONE, path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            result => result,
        }
    }

    /// True when the toolstack has written all of it, and it is neither at its end nor paused.
    fn is_to_be_served(&mut self, path: &str) -> Result<bool> {
        let mut get = |key: &str| self.store.read_optional(Tx::NONE, &format!("{path}/{key}"));
        let is_whole = get("params")?.is_some() && get("frontend")?.is_some();
        let state = get("state")?.and_then(|text| State::parse(&text));
        // Also one that is to go, as long as it has not gone: its guest waits for that. And one whose guest has closed it and
        // may open it again.
        let online = get("online")?;
        let has_gone = state == Some(State::Closed) && online.as_deref() == Some("0");
        let is_paused = pause::goes_on(&mut self.store, path)?;
        Ok(is_whole && online.is_some() && state.is_some() && !has_gone && !is_paused && file_stem(path).is_ok())
    }

    /// The process that serves a disk already, else a new one.
    fn find_or_start(&self, path: &str) -> Result<Process> {
        let pid_file = self.run_dir.join(file_stem(path)?).with_extension("pid");
        let found = Claim::holder(&pid_file).and_then(Pid::from_raw);
        let pid = match found {
            Some(pid) => pid,
            None => self.start(path)?,
        };
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| Error::io("watch a process", errno.into()))?;
        Ok(Process { pid, pidfd, started: Instant::now() })
    }

    fn start(&self, path: &str) -> Result<Pid> {
        let program = std::env::current_exe().map_err(|source| Error::io("find this program", source))?;
        let mut command = Command::new(&program);
        // In a group of its own, so that a key press that ends us does not end the disks.
        command.args(&self.arguments).arg(path).stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        let child = command.spawn().map_err(|source| Error::io("start", source).at_path(&program))?;
        Ok(Pid::from_child(&child))
    }

    /// Waits for news of xenstore's or of a process; true when it is `stop`.
    fn wait(&mut self, stop: &OwnedFd) -> Result<bool> {
        if self.store.next_event(Some(Duration::ZERO))?.is_some() {
            return Ok(false);
        }
        let rest = self.resting.values().min().map(|until| until.saturating_duration_since(Instant::now()));
        let rest = rest.map(|rest| Timespec::try_from(rest).expect("a rest is short"));
        let mut fds =
            vec![PollFd::new(stop, PollFlags::IN), PollFd::from_borrowed_fd(self.store.as_fd(), PollFlags::IN)];
        fds.extend(self.disks.values().map(|process| PollFd::from_borrowed_fd(process.pidfd.as_fd(), PollFlags::IN)));
        match poll(&mut fds, rest.as_ref()) {
            Ok(_) => Ok(!fds[0].revents().is_empty()),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(errno) => Err(Error::io("wait for xenstore", errno.into())),
        }
    }

    /// Forgets processes that have ended. Those that served a disk which is still wanted are started again.
    fn bury(&mut self) {
        let resting = &mut self.resting;
        self.disks.retain(|path, process| {
            let mut fds = [PollFd::new(&process.pidfd, PollFlags::IN)];
            let has_ended = poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0);
            if has_ended {
                // It may be another's child, and then there is nothing to bury, nor is it known how it ended.
                let status = waitpid(Some(process.pid), WaitOptions::NOHANG).ok().flatten();
                let has_failed = status.is_some_and(|(_, status)| status.exit_status().is_some_and(|code| code != 0));
                let rest = match has_failed {
                    true => Some(REST),
                    false => (process.started.elapsed() < REST).then_some(SHORT_REST),
                };
                resting.extend(rest.map(|rest| (path.clone(), Instant::now() + rest)));
            }
            !has_ended
        });
    }
}
