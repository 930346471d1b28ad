//! Which processes of this host have a file open, by /proc; and a wait for those that are about to let go of it.
//!
//! The kernel keeps the files of a process that was killed open, and locked, until it has wound up the process's io_uring: some
//! milliseconds in which nobody has the file any more, and nobody else gets it. Processes of other users are seen by root only.

use std::path::Path;
use std::time::{Duration, Instant};

use spile_core::{Error, ErrorKind, Result};
use spile_engine::run_blocking;

use crate::FileId;

/// How long a file is waited for whose holder is gone or about to go.
pub const BUSY_PATIENCE: Duration = Duration::from_secs(5);
/// The time between two tries.
const BUSY_PAUSE: Duration = Duration::from_millis(20);
/// So often is tried again while this process has the file open itself: what it has just closed may take a moment.
const OWN_TRIES: u32 = 3;
/// After this time it is told that somebody waits.
const SILENT: Duration = Duration::from_secs(1);

/// The processes of this host that have files of `folder` open, as far as this user may see them.
pub fn in_folder(folder: &Path) -> Vec<(FileId, u32)> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|process| process.file_name().to_str()?.parse::<u32>().ok());
    let mut found: Vec<_> = pids.flat_map(|pid| files_of(pid, folder).map(move |file| (file, pid))).collect();
    found.sort_unstable_by_key(|(_, pid)| *pid);
    found.dedup();
    found
}

fn files_of(pid: u32, folder: &Path) -> impl Iterator<Item = FileId> {
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    links.filter_map(move |link| {
        // Only files of the folder are looked at: others may lie on a file server that does not answer.
        let is_here = std::fs::read_link(link.path()).is_ok_and(|path| path.starts_with(folder));
        is_here.then(|| std::fs::metadata(link.path()).ok()).flatten().map(|stat| FileId::of(&stat))
    })
}

/// The processes of this host that have the file at `path` open, as far as this user may see them.
pub fn of_file(path: &Path) -> Vec<u32> {
    let (Ok(real), Ok(stat)) = (path.canonicalize(), path.metadata()) else { return Vec::new() };
    let id = FileId::of(&stat);
    let found = in_folder(real.parent().unwrap_or(Path::new("/"))).into_iter();
    let mut pids: Vec<_> = found.filter(|(file, _)| *file == id).map(|(_, pid)| pid).collect();
    pids.dedup();
    pids
}

/// Who keeps a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    /// No process that goes on, as far as is seen.
    Gone,
    /// This process.
    Own,
    /// Another process, which goes on.
    Other,
}

fn holder(path: &Path) -> Holder {
    let alive: Vec<_> = of_file(path).into_iter().filter(|pid| !is_dying(*pid)).collect();
    match alive.iter().find(|pid| **pid != std::process::id()) {
        Some(_) => Holder::Other,
        None if alive.is_empty() => Holder::Gone,
        None => Holder::Own,
    }
}

/// True for a process that was told by SIGKILL to end, and for one that is not there.
fn is_dying(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/status")).map_or(true, |status| is_killed(&status))
}

/// True when SIGKILL waits for the process of this file /proc/PID/status (proc(5)).
fn is_killed(status: &str) -> bool {
    let masks = status.lines().filter_map(|line| line.strip_prefix("SigPnd:").or(line.strip_prefix("ShdPnd:")));
    let mut masks = masks.filter_map(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    masks.any(|mask| mask >> (libc::SIGKILL - 1) & 1 == 1)
}

/// Tries `open`, which opens the file at `path`, again for some time while the file is locked and its holder is gone or about to go.
///
/// # Errors
/// Those of `open`: `Busy` at once when a process that goes on has the file.
pub(crate) async fn once_free<T>(path: &Path, open: impl AsyncFn() -> Result<T>) -> Result<T> {
    let end = Instant::now() + BUSY_PATIENCE;
    let (mut own_tries, mut is_told) = (0, false);
    loop {
        let error = match open().await {
            Err(error) if is_locked(&error) && Instant::now() < end => error,
            done => return done,
        };
        let at = path.to_owned();
        match run_blocking(Path::new("/proc"), move || pause(&at)).await {
            Holder::Other => return Err(error),
            Holder::Own if own_tries == OWN_TRIES => return Err(error),
            Holder::Own => own_tries += 1,
            Holder::Gone => {}
        }
        if end.saturating_duration_since(Instant::now()) + SILENT < BUSY_PATIENCE
            && !std::mem::replace(&mut is_told, true)
        {
            tracing::warn!("{error}: nobody is seen who has it, waiting {} s for it", BUSY_PATIENCE.as_secs());
        }
    }
}

/// Looks who has the file, and waits a little where that may change.
fn pause(path: &Path) -> Holder {
    let holder = holder(path);
    if holder != Holder::Other {
        std::thread::sleep(BUSY_PAUSE);
    }
    holder
}

/// True for a file that another process has locked, and not for a device that the kernel itself keeps.
fn is_locked(error: &Error) -> bool {
    error.kind() == ErrorKind::Busy && error.os_errno().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_a_file_open_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap().join("a");
        std::fs::write(&path, "x").unwrap();
        assert_eq!((of_file(&path), holder(&path)), (Vec::new(), Holder::Gone));
        let _file = std::fs::File::open(&path).unwrap();
        assert_eq!((of_file(&path), holder(&path)), (vec![std::process::id()], Holder::Own));
    }

    #[test]
    fn a_process_is_dying_once_a_kill_waits_for_it() {
        let of = |own: u64, shared: u64| is_killed(&format!("Name:\tx\nSigPnd:\t{own:016x}\nShdPnd:\t{shared:016x}\n"));
        let (kill, end) = (1 << 8, 1 << 14);
        assert_eq!([of(0, 0), of(kill, 0), of(0, kill), of(end, end)], [false, true, true, false]);
        assert!(!is_dying(std::process::id()));
    }
}
