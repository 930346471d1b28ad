//! What the kernel says of a process: its threads, its memory and its processor time. To ask wakes nothing in that process.

use std::time::Duration;

use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use spile_core::{Error, ErrorKind, Result};

/// What a process uses now, and has used since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Its threads.
    pub threads: u64,
    /// Its memory in the host's RAM, in bytes. What it shares with other processes counts as a whole.
    pub resident_bytes: u64,
    /// The same, in which what is shared counts as a share.
    pub proportional_bytes: u64,
    /// The processor time of all its threads.
    pub cpu: Duration,
    /// How often its threads that live now were put on a processor.
    pub runs: u64,
}

impl Usage {
    /// What the process uses now.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn of(pid: u32) -> Result<Self> {
        let gone = || Error::new(ErrorKind::NotFound, format!("there is no process {pid}"));
        let memory = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).map_err(|_| gone())?;
        let clock = clock_getcpuclockid(Pid::from_raw(pid.cast_signed())).map_err(|_| gone())?;
        let threads = runs(pid);
        Ok(Self {
            threads: threads.len() as u64,
            resident_bytes: kib(&memory, "Rss:").ok_or_else(gone)? << 10,
            proportional_bytes: kib(&memory, "Pss:").ok_or_else(gone)? << 10,
            cpu: clock_gettime(clock).map(Duration::from).map_err(|_| gone())?,
            runs: threads.iter().filter_map(|(_, count)| count.parse::<u64>().ok()).sum(),
        })
    }
}

impl std::ops::AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.threads += other.threads;
        self.resident_bytes += other.resident_bytes;
        self.proportional_bytes += other.proportional_bytes;
        self.cpu += other.cpu;
        self.runs += other.runs;
    }
}

/// Each thread of a process, and how often it was put on a processor (`/proc/PID/task/TID/schedstat`, third field).
pub fn runs(pid: u32) -> Vec<(String, String)> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let of_task = |task: std::fs::DirEntry| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        Some((task.file_name().to_string_lossy().into_owned(), text.split_whitespace().nth(2)?.to_owned()))
    };
    tasks.filter_map(of_task).collect()
}

/// The value of a line such as `Rss:   1234 kB`.
fn kib(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_uses_something() {
        let usage = Usage::of(std::process::id()).unwrap();
        assert!(usage.threads >= 1 && usage.runs >= 1 && usage.cpu > Duration::ZERO, "{usage:?}");
        assert!(usage.resident_bytes >= usage.proportional_bytes && usage.proportional_bytes > 0, "{usage:?}");
        assert!(Usage::of(u32::MAX >> 1).is_err());
    }

    #[test]
    fn sizes_are_in_kib() {
        assert_eq!(kib("Rss:    12 kB\nPss:     7 kB\n", "Pss:"), Some(7));
        assert_eq!(kib("Rss: x", "Rss:"), None);
    }
}
