//! [`Config`]: the settings with which an engine is started.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use spile_core::{Error, ErrorKind};

/// How the workers do I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// The first of [`EngineKind::ALL`] that the kernel has and allows.
    #[default]
    Auto,
    /// io_uring (Linux 5.11 or later) or an error.
    Uring,
    /// Linux AIO (Linux 4.13 or later) for direct transfers, or an error; epoll for sockets, and a bounded pool of helper
    /// threads for what remains.
    Aio,
    /// epoll for sockets, a bounded pool of helper threads for files.
    Threads,
}

impl EngineKind {
    /// All engines, the best first.
    pub const ALL: [EngineKind; 3] = [Self::Uring, Self::Aio, Self::Threads];
}

impl FromStr for EngineKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "auto" => Ok(Self::Auto),
            "uring" => Ok(Self::Uring),
            "aio" => Ok(Self::Aio),
            "threads" => Ok(Self::Threads),
            _ => Err(Error::new(ErrorKind::InvalidInput, format!("there is no engine named {text:?}"))
                .hint("use auto, uring, aio or threads")),
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::Uring => "uring",
            Self::Aio => "aio",
            Self::Threads => "threads",
        })
    }
}

/// The settings of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The reactor.
    pub kind: EngineKind,
    /// The number of worker threads, at least 1.
    pub workers: usize,
    /// The arena of each worker's buffer pool, in bytes; memory is taken from the system as it is used.
    pub pool_bytes: usize,
    /// The longest that a worker spins before it sleeps, when something is watched ([`crate::watch`]); zero: never.
    pub poll: Duration,
}

impl Config {
    /// The default of [`Config::poll`].
    pub const POLL: Duration = Duration::from_micros(50);
}

impl Default for Config {
    /// The reactor is chosen automatically. There is one worker for each processor, but at most 4, each with a pool of
    /// 64 MiB. Workers spin for [`Config::POLL`] at most.
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self { kind: EngineKind::Auto, workers: cores.min(4), pool_bytes: 64 << 20, poll: Self::POLL }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways() {
        for kind in [EngineKind::Auto].into_iter().chain(EngineKind::ALL) {
            assert_eq!(kind.to_string().parse::<EngineKind>().unwrap(), kind);
        }
        let error = "libaio".parse::<EngineKind>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
}
