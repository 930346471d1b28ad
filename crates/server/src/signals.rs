//! Signals: SIGTERM, SIGINT and SIGHUP (unless nohup keeps it away) end a command, and SIGTERM and SIGINT a server. A server hears SIGHUP, SIGUSR1 and SIGUSR2, too, and none of these ends it. A thread
//! waits for them, so there is no signal handler, no timer and no wake-up. That thread never waits for a reader of stderr.
//!
//! Three signals that end a process by default can come of a request or of what a peer does. None of them ends a program of ours: SIGXFSZ (a write at the
//! limit of a file's size, [`outlive_requests`]), SIGPIPE (a peer has hung up; Rust's programs ignore it), and SIGBUS (a peer has cut memory short that it
//! shares; the crate `spile-mem` handles it).

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use spile_core::{Error, Result};

use crate::log::complain;
use crate::panics;

/// The signals that end a command, blocked in this thread and in all it starts.
pub struct EndSignals(SigSet);

/// The signals of a server, blocked in this thread and in all it starts.
pub struct ServerSignals(SigSet);

const ENDS: [Signal; 2] = [Signal::SIGTERM, Signal::SIGINT];
const OTHERS: [Signal; 3] = [Signal::SIGHUP, Signal::SIGUSR1, Signal::SIGUSR2];

/// How long after a signal another one counts as the same.
const SAME: Duration = Duration::from_millis(300);

/// How many signals that only the log hears of may wait for it.
const MOST_UNTOLD: usize = 16;

/// Writes to the log what a server says to a signal that does not end it. This waits while nobody reads stderr.
fn log(signal: Signal, tell: &impl Fn()) {
    match signal {
        Signal::SIGUSR1 => tell(),
        Signal::SIGHUP => complain("SIGHUP: this server goes on; its log is stderr, so there is no file to open again"),
        other => complain(format_args!("{other}: nothing is done for it")),
    }
}

fn block(signals: impl IntoIterator<Item = Signal>) -> Result<SigSet> {
    let set: SigSet = signals.into_iter().collect();
    set.thread_block().map_err(|e| Error::io("block signals", e.into()))?;
    Ok(set)
}

/// Has no write end the process: at the limit of a file's size (RLIMIT_FSIZE: `ulimit -f`, LimitFSIZE= of systemd) it fails with EFBIG, and the signal
/// stays blocked. To be called before other threads are started. Programs that this one starts do not inherit it.
///
/// # Errors
/// The system's.
pub fn outlive_requests() -> Result<()> {
    block([Signal::SIGXFSZ]).map(drop)
}

/// True when the process ignores `signal`, by its file /proc/self/status.
fn ignores(status: &str, signal: Signal) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal as u32 - 1) & 1 == 1)
}

fn wait(set: &SigSet) -> Result<Signal> {
    set.wait().map_err(|e| Error::io("wait for a signal", e.into()))
}

impl ServerSignals {
    /// Blocks these signals. To be called before other threads are started.
    ///
    /// # Errors
    /// The system's.
    pub fn block() -> Result<Self> {
        block(ENDS.into_iter().chain(OTHERS)).map(Self)
    }

    /// From now on another thread calls `end` at the first signal that ends a server, and the second one ends the process at once. SIGUSR1
    /// has it call `tell`, which is to write to the log what was counted.
    pub fn hear(self, tell: impl Fn() + Send + 'static, end: impl FnOnce(Signal) + Send + 'static) {
        let (to_log, signals) = mpsc::sync_channel(MOST_UNTOLD);
        thread::spawn(move || signals.into_iter().for_each(|signal| log(signal, &tell)));
        thread::spawn(move || {
            let mut end = Some(end);
            while let Ok(signal) = wait(&self.0) {
                match ENDS.contains(&signal).then(|| end.take()) {
                    // One signal too many for a log that nobody reads is passed over.
                    None => drop(to_log.try_send(signal)),
                    Some(Some(end)) => end(signal),
                    Some(None) => exit_at_once(signal),
                }
            }
        });
    }
}

impl EndSignals {
    /// Blocks these signals. To be called before other threads are started.
    ///
    /// # Errors
    /// The system's.
    pub fn block() -> Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let hangup = (!ignores(&status, Signal::SIGHUP)).then_some(Signal::SIGHUP);
        block(ENDS.into_iter().chain(hangup)).map(Self)
    }

    /// Sleeps until one of these signals comes.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(&self) -> Result<Signal> {
        wait(&self.0)
    }

    /// From now on the next signal ends the process at once, with the customary exit code.
    pub fn exit_on_next(self) {
        thread::spawn(move || {
            if let Ok(signal) = self.wait() {
                exit_at_once(signal);
            }
        });
    }

    /// When a signal comes, another thread does `work` with it. From then on a second signal ends the process at once.
    pub fn on_first(self, work: impl FnOnce(Signal) + Send + 'static) {
        thread::spawn(move || {
            if let Ok(signal) = self.wait() {
                // What `work` waits for may never come.
                Self(self.0).exit_on_next();
                work(signal);
            }
        });
    }

    /// As [`EndSignals::on_first`], of work that a second signal must not cut off, such as the order to a server to stop. Signals that come until [`SAME`] after
    /// it count as the first one: `timeout` sends its signal twice, to the process and to its group.
    pub fn on_first_whole(self, work: impl FnOnce(Signal) + Send + 'static) {
        thread::spawn(move || {
            let Ok(signal) = self.wait() else { return };
            work(signal);
            let done = Instant::now();
            while let Ok(signal) = self.wait() {
                if done.elapsed() > SAME {
                    exit_at_once(signal);
                }
            }
        });
    }

    /// When a signal comes, `clean_up` is done and the process ends.
    pub fn exit_after(self, clean_up: impl FnOnce() + Send + 'static) {
        self.on_first(|signal| {
            clean_up();
            panics::say(&format!("spile: ended by {signal}\n"));
            std::process::exit(exit_code(signal));
        });
    }
}

fn exit_at_once(signal: Signal) -> ! {
    panics::say(&format!("spile: a second {signal}: ending at once\n"));
    std::process::exit(exit_code(signal))
}

/// The customary exit code of a program that a signal ended.
pub fn exit_code(signal: Signal) -> i32 {
    128 + signal as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nohup_keeps_away_is_known() {
        let status = |mask: &str| {
            format!("Name:\tspile\nSigBlk:\t0000000000000001\nSigIgn:\t{mask}\nSigCgt:\t0000000000000001\n")
        };
        assert!(ignores(&status("0000000000001001"), Signal::SIGHUP));
        assert!(!ignores(&status("0000000000001000"), Signal::SIGHUP));
        assert!(!ignores("", Signal::SIGHUP));
    }
}
