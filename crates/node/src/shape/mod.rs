//! [`Shape`]: what a disk does with the sizes of its requests on their way to the graph.
//!
//! - A store with parallelism of its own, such as an SSD, may serve several small requests faster than one large one: `split`
//!   makes parts of large reads and writes, which are in flight together.
//! - A store on which each request has a cost of its own, such as a spinning disk or a network, may serve one large request faster:
//!   `merge` makes one of neighbours that come in the same turn of a worker. No request waits for a neighbour that has not come.
//! - `auto` splits, and learns from the disk's own requests into how many parts.
//!
//! The front sees nothing of it: each of its requests is answered when all of it has ended, and by its own result. Flushes, discards
//! and writes of zeroes keep their size.

mod learn;
mod merge;
mod split;

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use spile_core::metrics::turn_ns;
use spile_core::{DiskInfo, Error, ErrorKind, Io, Op, Result, parse_size};

pub use learn::Learned;
use learn::Learner;
use merge::Merger;

/// What is done with the sizes of a disk's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Shape {
    /// They stay as they are.
    #[default]
    Off,
    /// A read or write that is longer than so many bytes (a power of two) goes to the graph in parts, which begin at multiples of
    /// that size.
    Split(u32),
    /// Neighbours go to the graph as one request of so many bytes at most (a power of two).
    Merge(u32),
    /// Large requests are split as experience with this disk tells.
    Auto,
}

/// The least and the largest size of a shape, in bytes.
const SIZES: (u64, u64) = (4 << 10, 32 << 20);

impl FromStr for Shape {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text, "off, split=SIZE, merge=SIZE or auto")
    }
}

impl Shape {
    /// The shape that `text` says. `choices` is what may be said instead, for the hint where `text` is no shape.
    ///
    /// # Errors
    /// `InvalidInput`.
    pub fn parse(text: &str, choices: &str) -> Result<Self> {
        match text.split_once('=') {
            None if text == "off" => Ok(Self::Off),
            None if text == "auto" => Ok(Self::Auto),
            Some(("split", size)) => Ok(Self::Split(parse_bytes(size)?)),
            Some(("merge", size)) => Ok(Self::Merge(parse_bytes(size)?)),
            _ => {
                Err(Error::new(ErrorKind::InvalidInput, format!("`{text}` is not a shape"))
                    .hint(format!("use {choices}")))
            }
        }
    }
}

fn parse_bytes(text: &str) -> Result<u32> {
    let bytes = parse_size(text).map_err(|why| Error::new(ErrorKind::InvalidInput, why))?;
    match bytes.is_power_of_two() && (SIZES.0..=SIZES.1).contains(&bytes) {
        true => Ok(bytes as u32),
        false => Err(Error::new(ErrorKind::InvalidInput, format!("`{text}` is not the size of a shape"))
            .hint("use a power of two from 4k to 32M")),
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (word, bytes) = match self {
            Self::Off => return f.write_str("off"),
            Self::Auto => return f.write_str("auto"),
            Self::Split(bytes) => ("split", bytes),
            Self::Merge(bytes) => ("merge", bytes),
        };
        match bytes >> 20 {
            0 => write!(f, "{word}={}k", bytes >> 10),
            mebibytes => write!(f, "{word}={mebibytes}M"),
        }
    }
}

/// A clock in nanoseconds since some moment in the past.
type Clock = fn() -> u64;

/// How a disk's requests are shaped now, and what was counted of that since the disk was made.
pub struct Shaping {
    counts: Arc<Counts>,
    /// What the offsets, lengths and memory of requests to the graph must be multiples of, in bytes.
    align_bytes: u64,
    clock: Clock,
    now: Mutex<Now>,
}

/// The shape, and what `auto` has learned.
struct Now {
    shape: Shape,
    learner: Arc<Learner>,
}

#[derive(Default)]
pub(crate) struct Counts {
    splits: AtomicU64,
    merges: AtomicU64,
}

impl Shaping {
    /// For a graph of this `info`: off.
    pub(crate) fn new(info: &DiskInfo) -> Self {
        let align_bytes = info.request_align_bytes.max(info.memory_align_bytes).into();
        let now = Mutex::new(Now { shape: Shape::Off, learner: Arc::default() });
        Self { counts: Arc::default(), align_bytes, clock: turn_ns, now }
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The shape that requests get.
    pub fn shape(&self) -> Shape {
        self.lock().shape
    }

    /// What `auto` has learned of this disk's requests so far; empty with another shape.
    pub fn learned(&self) -> Vec<Learned> {
        let (shape, learner) = (self.shape(), self.lock().learner.clone());
        if shape == Shape::Auto { learner.learned() } else { Vec::new() }
    }

    /// Requests that went to the graph in several parts.
    pub fn splits(&self) -> u64 {
        self.counts.splits.load(Ordering::Relaxed)
    }

    /// Requests that went to the graph as a part of another one.
    pub fn merges(&self) -> u64 {
        self.counts.merges.load(Ordering::Relaxed)
    }

    /// The next epoch has the shape `shape`. What was learned before is forgotten.
    pub(crate) fn set(&self, shape: Shape) {
        *self.lock() = Now { shape, learner: Arc::default() };
    }

    /// What shapes the requests of one epoch; `None` when they stay as they are.
    ///
    /// Each epoch has a merger of its own: requests that began under different graphs are never merged.
    pub(crate) fn shaper(&self) -> Option<Arc<Shaper>> {
        let now = self.lock();
        let how = match now.shape {
            Shape::Off => return None,
            Shape::Split(bytes) => How::Split(u64::from(bytes).max(self.align_bytes)),
            Shape::Merge(bytes) => How::Merge(Merger::new(bytes.into())),
            Shape::Auto => How::Learn(now.learner.clone(), self.clock),
        };
        Some(Arc::new(Shaper { how, align_bytes: self.align_bytes, counts: self.counts.clone() }))
    }
}

/// Shapes the requests of one epoch.
pub(crate) struct Shaper {
    how: How,
    align_bytes: u64,
    counts: Arc<Counts>,
}

enum How {
    Split(u64),
    Merge(Merger),
    Learn(Arc<Learner>, Clock),
}

impl Shaper {
    /// False when `io` goes on as it is. To be asked once for each request.
    #[inline]
    pub(crate) fn concerns(&self, io: &Io<'_>) -> bool {
        match (&self.how, io.op) {
            // Those that are never merged wait for their turn, too.
            (How::Merge(_), _) => true,
            (How::Split(bytes), Op::Read | Op::Write { .. }) => io.extent.len_bytes > *bytes,
            (How::Learn(learner, _), Op::Read | Op::Write { .. }) => learner.concerns(io),
            _ => false,
        }
    }

    /// Takes `io`, which it concerns, on in its new shape: `on` executes a request further down.
    pub(crate) async fn execute(&self, io: Io<'_>, on: impl AsyncFn(Io<'_>) -> Result<()>) -> Result<()> {
        match &self.how {
            How::Split(bytes) => self.split(*bytes, io, on).await,
            How::Merge(merger) => merger.execute(&self.counts.merges, io, on).await,
            How::Learn(learner, clock) => {
                let (part_bytes, trial) = learner.begin(&io, clock());
                let result = self.split(part_bytes, io, on).await;
                learner.end(trial, result.is_ok(), clock());
                result
            }
        }
    }

    async fn split(&self, part_bytes: u64, io: Io<'_>, on: impl AsyncFn(Io<'_>) -> Result<()>) -> Result<()> {
        if io.extent.len_bytes <= part_bytes || !io.extent.is_aligned(self.align_bytes) {
            return on(io).await;
        }
        self.counts.splits.fetch_add(1, Ordering::Relaxed);
        split::execute(part_bytes, io, on).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read_as_they_are_written() {
        for text in ["off", "auto", "split=4k", "split=128k", "merge=1M", "merge=32M"] {
            assert_eq!(text.parse::<Shape>().unwrap().to_string(), text);
        }
        assert_eq!("split=131072".parse::<Shape>().unwrap(), Shape::Split(128 << 10));
    }

    #[test]
    fn what_is_no_shape_is_refused() {
        for text in ["", "on", "split", "split=", "split=3k", "split=100k", "split=2k", "merge=64M", "auto=4k", "off="]
        {
            assert_eq!(text.parse::<Shape>().unwrap_err().kind(), ErrorKind::InvalidInput, "{text}");
        }
    }
}
