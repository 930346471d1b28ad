//! What is counted of requests, in one shape for every front and every layer below it.
//!
//! - [`Counters`] counts for one writer at a time, such as one ring or one connection's worker: plain loads and stores,
//!   no locked instruction. [`Meter`] is a set of them, one for each thread, for what several threads use.
//! - A [`Reading`] is what counters say at one moment. Readings of several rings, workers, disks or processes add up;
//!   two readings of the same counters give what happened between them. Readings hold plain numbers.
//! - [`METRICS`] names each number, with its unit and its meaning, for whoever exports or prints them.
//!
//! Times are nanoseconds of CLOCK_MONOTONIC. Callers pass them, so that one look at the clock serves many requests:
//! [`turn_ns`] is the time at which the worker's turn began, [`now_ns`] the time now.
//!
//! A request that never waits costs about 20 instructions here, another one about 100, and no allocation but for the first of its
//! kind.

mod clock;
mod counters;
mod histogram;
mod little;
mod meter;
mod reading;
pub mod span;
mod switch;
mod table;
mod version;

pub use clock::{begin_turn, now_ns, turn_ns};
pub use counters::{Begun, Counters, Ended, add, push_run, runs};
pub use histogram::{BUCKETS, bounds_of, bucket_of};
pub use little::{Gap, little};
pub use meter::{InFlight, Meter};
pub use reading::{Latency, OpReading, OpSums, Reading};
pub use switch::{is_counting, stop_counting};
pub use table::{Kind, METRICS, Metric, Unit, Value};

/// What a request does. Counters keep each kind apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Reads bytes.
    Read,
    /// Writes bytes; a barrier of blkif counts as a write.
    Write,
    /// A flush of a disk, or a sync of a store.
    Flush,
    /// Frees space.
    Discard,
    /// Writes zeroes.
    WriteZeroes,
    /// Asks which ranges are allocated (NBD's block status).
    Extents,
    /// Everything else: a change of length, an identification, a hint, a request that is not known.
    Other,
}

impl Op {
    /// The number of kinds.
    pub const COUNT: usize = Self::ALL.len();

    /// All kinds, in the order of [`Reading::ops`].
    pub const ALL: [Op; 7] =
        [Self::Read, Self::Write, Self::Flush, Self::Discard, Self::WriteZeroes, Self::Extents, Self::Other];

    /// The kind's name in tables and in exported metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write_zeroes",
            Self::Extents => "extents",
            Self::Other => "other",
        }
    }
}

impl From<crate::Op> for Op {
    fn from(op: crate::Op) -> Self {
        match op {
            crate::Op::Read => Self::Read,
            crate::Op::Write { .. } => Self::Write,
            crate::Op::Flush => Self::Flush,
            crate::Op::Discard => Self::Discard,
            crate::Op::WriteZeroes(_) => Self::WriteZeroes,
        }
    }
}
