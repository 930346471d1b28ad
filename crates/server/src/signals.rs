//! SIGTERM and SIGINT. A thread waits for them, so there is no signal handler, no timer and no wake-up.

use std::thread;

use nix::sys::signal::{SigSet, Signal};
use spile_core::{Error, Result};

use crate::log::complain;

/// The signals that end a command, blocked in this thread and in all it starts.
pub struct EndSignals(SigSet);

impl EndSignals {
    /// Blocks these signals. To be called before other threads are started.
    ///
    /// # Errors
    /// The system's.
    pub fn block() -> Result<Self> {
        let mut set = SigSet::empty();
        set.add(Signal::SIGTERM);
        set.add(Signal::SIGINT);
        set.thread_block().map_err(|e| Error::io("block signals", e.into()))?;
        Ok(Self(set))
    }

    /// Sleeps until one of these signals comes.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(&self) -> Result<Signal> {
        self.0.wait().map_err(|e| Error::io("wait for a signal", e.into()))
    }

    /// From now on the next signal ends the process at once, with the customary exit code.
    pub fn exit_on_next(self) {
        thread::spawn(move || self.exit());
    }

    /// When a signal comes, another thread does `work` with it, and then waits for a second signal, which ends the process
    /// at once.
    pub fn on_first(self, work: impl FnOnce(Signal) + Send + 'static) {
        thread::spawn(move || {
            if let Ok(signal) = self.wait() {
                work(signal);
                self.exit();
            }
        });
    }

    /// When a signal comes, `clean_up` is done and the process ends.
    pub fn exit_after(self, clean_up: impl FnOnce() + Send + 'static) {
        self.on_first(|signal| {
            clean_up();
            complain(format_args!("ended by {signal}"));
            std::process::exit(exit_code(signal));
        });
    }

    fn exit(&self) {
        if let Ok(signal) = self.wait() {
            complain(format_args!("a second {signal}: ending at once"));
            std::process::exit(exit_code(signal));
        }
    }
}

/// The customary exit code of a program that a signal ended.
pub fn exit_code(signal: Signal) -> i32 {
    128 + signal as i32
}
