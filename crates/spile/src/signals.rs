//! SIGTERM and SIGINT, taken by waiting for them: no handler, no timer, no wake-up.

use nix::sys::signal::{SigSet, Signal};
use spile_core::{Error, Result};

/// The signals that end a server, blocked in this thread and in all it starts.
pub struct EndSignals(SigSet);

impl EndSignals {
    /// Blocks them. To be called before other threads are started.
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

    /// Sleeps until one comes.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(&self) -> Result<Signal> {
        self.0.wait().map_err(|e| Error::io("wait for a signal", e.into()))
    }

    /// From now on the next one ends the process at once, with its customary exit code.
    pub fn exit_on_next(self) {
        std::thread::spawn(move || {
            if let Ok(signal) = self.wait() {
                eprintln!("spile: a second {signal}: ending at once");
                std::process::exit(128 + signal as i32);
            }
        });
    }
}
