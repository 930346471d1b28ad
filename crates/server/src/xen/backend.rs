//! The back end of a host: a process for each disk that the toolstack makes, and another one when it dies.
//!
//! No guest's I/O passes through this process. The disks' processes go on when it ends, and the next such process finds them again by
//! their pid files.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, WaitOptions, waitpid};
use spile_core::{Error, ErrorKind, Result};
use spile_front_blkif::pause;
use spile_front_blkif::xenbus::State;
use spile_store::own_folder;
use spile_xen::store::{Tx, XenStore};

use crate::process::Process;
use crate::xen::claim::{Claim, file_stem};

/// How long a disk rests whose process has ended with an error, or could not be started, before the process is started again.
const REST: Duration = Duration::from_secs(2);
/// How long a disk rests whose process was killed soon after it was started.
const SHORT_REST: Duration = Duration::from_millis(50);
/// A rest grows with every ten troubles in a row, at most to so many times the first.
const MAX_GROWTH: u32 = 15;
/// When a process has lived this long, the troubles of its disk before are forgotten.
const STEADY: Duration = Duration::from_secs(60);
/// How often the processes are looked at where nothing tells that one has ended (before Linux 5.3).
const LOOK: Duration = Duration::from_millis(200);
/// This program, for when its file was replaced or removed.
const SELF: &str = "/proc/self/exe";

/// The back end of a host.
pub struct Backend {
    store: XenStore,
    /// Where the toolstack puts disks: `…/backend/TYPE`.
    folder: String,
    run_dir: PathBuf,
    /// The path that this program had when it began. Another version of it may be there by now.
    program: PathBuf,
    /// The arguments of a disk's process that come before the back end's path.
    arguments: Vec<OsString>,
    disks: BTreeMap<String, DiskProcess>,
    troubles: BTreeMap<String, Trouble>,
}

/// Troubles of a disk: its process has ended with an error, was killed, or could not be started.
struct Trouble {
    /// How many there were in a row.
    count: u32,
    /// The process is not started again before this time. `None` when that time has passed.
    until: Option<Instant>,
}

/// A disk's process.
struct DiskProcess {
    process: Process,
    started: Instant,
}

impl Backend {
    /// The back end for disks of type `kind` of this domain. `arguments` are the arguments of a disk's process that come before
    /// the back end's path.
    ///
    /// # Errors
    /// What the store says; when the run folder cannot be made.
    pub fn new(mut store: XenStore, kind: &str, run_dir: &Path, arguments: Vec<OsString>) -> Result<Self> {
        let own = store.own_domid()?;
        let folder = format!("{}/backend/{kind}", store.domain_path(own)?);
        own_folder::make(run_dir)?;
        store.watch(&folder, "disks")?;
        let run_dir = run_dir.to_owned();
        let program = std::env::current_exe().map_err(|source| Error::io("find this program", source))?;
        Ok(Self { store, folder, run_dir, program, arguments, disks: BTreeMap::new(), troubles: BTreeMap::new() })
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
            self.forget_ended();
        }
    }

    /// Reads which disks there are, and starts a process for each disk that has none.
    fn look(&mut self) -> Result<()> {
        let mut wanted = BTreeSet::new();
        for domain in self.list(&self.folder.clone())? {
            for device in self.list(&format!("{}/{domain}", self.folder))? {
                wanted.insert(format!("{}/{domain}/{device}", self.folder));
            }
        }
        self.troubles.retain(|path, _| wanted.contains(path));
        for path in wanted {
            if self.disks.contains_key(&path) || self.is_resting(&path) {
                continue;
            }
            let is_wanted = match self.is_to_be_served(&path) {
                // A key that is no text concerns this disk only.
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    tracing::warn!("{path}: {error}");
                    rest(&mut self.troubles, &path, REST);
                    false
                }
                result => result?,
            };
            if is_wanted {
                match self.find_or_start(&path) {
                    Ok(process) => drop(self.disks.insert(path, process)),
                    Err(error) => {
                        tracing::warn!("{path}: {error}");
                        rest(&mut self.troubles, &path, REST);
                    }
                }
            }
        }
        Ok(())
    }

    fn is_resting(&mut self, path: &str) -> bool {
        let Some(trouble) = self.troubles.get_mut(path) else { return false };
        trouble.until = trouble.until.filter(|until| *until > Instant::now());
        trouble.until.is_some()
    }

    fn list(&mut self, path: &str) -> Result<Vec<String>> {
        match self.store.list(Tx::NONE, path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            result => result,
        }
    }

    /// True when the toolstack has written all keys of the disk, and the disk is neither at its end nor paused.
    fn is_to_be_served(&mut self, path: &str) -> Result<bool> {
        let mut get = |key: &str| self.store.read_optional(Tx::NONE, &format!("{path}/{key}"));
        let is_whole = get("params")?.is_some() && get("frontend")?.is_some();
        let state = get("state")?.and_then(|text| State::parse(&text));
        // A disk that is to go is served until it has gone, because its guest waits for that. A disk that its guest has closed is
        // served too, because the guest may open it again.
        let online = get("online")?;
        let has_gone = state == Some(State::Closed) && online.as_deref() == Some("0");
        let is_paused = pause::goes_on(&mut self.store, path)?;
        Ok(is_whole && online.is_some() && state.is_some() && !has_gone && !is_paused && file_stem(path).is_ok())
    }

    /// The process that serves a disk already, else a new one.
    fn find_or_start(&self, path: &str) -> Result<DiskProcess> {
        let pid_file = self.run_dir.join(file_stem(path)?).with_extension("pid");
        let found = Claim::holder(&pid_file).and_then(Pid::from_raw);
        let pid = match found {
            Some(pid) => pid,
            None => self.start(path)?,
        };
        Ok(DiskProcess { process: Process::of(pid)?, started: Instant::now() })
    }

    fn start(&self, path: &str) -> Result<Pid> {
        let child = match self.command(&self.program, path).spawn() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => self.command(Path::new(SELF), path).spawn(),
            child => child,
        };
        let child = child.map_err(|source| Error::io("start", source).at_path(&self.program))?;
        Ok(Pid::from_child(&child))
    }

    fn command(&self, program: &Path, path: &str) -> Command {
        let mut command = Command::new(program);
        // The process is in a group of its own, so that a key press that ends this process does not end the disks.
        command.args(&self.arguments).arg(path).stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        // To the service manager this process is the service, and a disk's process is not.
        command.env_remove("NOTIFY_SOCKET");
        command
    }

    /// Waits until xenstore has changed, a process has ended, a rest is over or `stop` is readable. True when it is `stop`.
    fn wait(&mut self, stop: &OwnedFd) -> Result<bool> {
        if self.store.next_event(Some(Duration::ZERO))?.is_some() {
            return Ok(false);
        }
        let rest = self.troubles.values().filter_map(|trouble| trouble.until).min();
        let rest = rest.map(|until| until.saturating_duration_since(Instant::now()));
        let is_silent = self.disks.values().any(|disk| disk.process.pidfd().is_none());
        let rest = if is_silent { Some(rest.map_or(LOOK, |rest| rest.min(LOOK))) } else { rest };
        let rest = rest.map(|rest| Timespec::try_from(rest).expect("a rest is short"));
        let mut fds =
            vec![PollFd::new(stop, PollFlags::IN), PollFd::from_borrowed_fd(self.store.as_fd(), PollFlags::IN)];
        let pidfds = self.disks.values().filter_map(|disk| disk.process.pidfd());
        fds.extend(pidfds.map(|pidfd| PollFd::from_borrowed_fd(pidfd, PollFlags::IN)));
        match poll(&mut fds, rest.as_ref()) {
            Ok(_) => Ok(!fds[0].revents().is_empty()),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(errno) => Err(Error::io("wait for xenstore", errno.into())),
        }
    }

    /// Forgets processes that have ended. For disks that are still wanted, `look` starts others.
    fn forget_ended(&mut self) {
        let troubles = &mut self.troubles;
        self.disks.retain(|path, disk| {
            let has_ended = disk.process.has_ended();
            if has_ended {
                // The process may be the child of a back end before this one. Then it is not known how it ended.
                let status = waitpid(Some(disk.process.pid()), WaitOptions::NOHANG).ok().flatten();
                let has_failed = status.is_some_and(|(_, status)| status.exit_status().is_some_and(|code| code != 0));
                let age = disk.started.elapsed();
                if age > STEADY {
                    troubles.remove(path);
                }
                match has_failed {
                    true => rest(troubles, path, REST),
                    false if age < REST => rest(troubles, path, SHORT_REST),
                    false => {}
                }
            }
            !has_ended
        });
    }
}

/// Counts one more trouble of a disk, and lets it rest for `least`, or longer after many troubles in a row.
fn rest(troubles: &mut BTreeMap<String, Trouble>, path: &str, least: Duration) {
    let trouble = troubles.entry(path.to_owned()).or_insert(Trouble { count: 0, until: None });
    trouble.until = Some(Instant::now() + least * (1 + trouble.count / 10).min(MAX_GROWTH));
    trouble.count += 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_grow_and_have_an_end() {
        let mut troubles = BTreeMap::new();
        let mut rest_after = |count: u32| {
            (0..count).for_each(|_| rest(&mut troubles, "disk", REST));
            troubles["disk"].until.unwrap().saturating_duration_since(Instant::now()).as_secs_f32().round() as u32
        };
        assert_eq!([rest_after(1), rest_after(9), rest_after(1), rest_after(1000)], [2, 2, 4, 30]);
    }
}
