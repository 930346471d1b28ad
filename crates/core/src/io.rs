//! [`Io`]: one request for a disk's data. [`Op`]: what it asks for.

use crate::{Extent, GuestOffset, Segments};

/// How zeroes are to be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteZeroes {
    /// The range's space may be freed.
    pub may_unmap: bool,
    /// Fail with `Unsupported`, at once and with nothing changed, unless it is faster than writing zeroes as data.
    pub only_if_fast: bool,
}

/// What a request asks of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Fill the segments with the bytes of the extent.
    Read,
    /// Write the segments to the extent. When the request ends, the data survives the death of this process.
    Write {
        /// The data survives a power cut as well (force unit access).
        fua: bool,
    },
    /// Make everything that was acknowledged before survive a power cut. After a failed sync every later flush
    /// fails too: what was lost then cannot be known.
    Flush,
    /// Free what can be freed of the extent; what was freed reads as zeroes, the rest is unchanged.
    Discard,
    /// Make the extent read as zeroes, with the promise of a write.
    WriteZeroes(WriteZeroes),
}

impl Op {
    /// True when the request may change what the disk holds.
    pub fn changes_data(self) -> bool {
        matches!(self, Self::Write { .. } | Self::Discard | Self::WriteZeroes(_))
    }
}

/// One request for a disk's data. It borrows its memory and is cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct Io<'a> {
    /// What is asked for.
    pub op: Op,
    /// Where. A flush concerns the whole disk; its extent is empty.
    pub extent: Extent,
    /// The memory that a read fills or a write takes its bytes from, as long as the extent. Empty for other requests.
    pub segments: &'a Segments,
}

/// The memory of requests that have none.
static NO_SEGMENTS: Segments = Segments::new();

impl<'a> Io<'a> {
    /// A read of `extent` into `into`, which has the same length.
    pub fn read(extent: Extent, into: &'a Segments) -> Self {
        Self { op: Op::Read, extent, segments: into }
    }

    /// A write of `from`, which has the same length, to `extent`; durable at its end with `fua`.
    pub fn write(extent: Extent, from: &'a Segments, fua: bool) -> Self {
        Self { op: Op::Write { fua }, extent, segments: from }
    }

    /// A flush of the whole disk.
    pub fn flush() -> Self {
        Self::without_memory(Op::Flush, Extent { offset: GuestOffset(0), len_bytes: 0 })
    }

    /// A discard of `extent`.
    pub fn discard(extent: Extent) -> Self {
        Self::without_memory(Op::Discard, extent)
    }

    /// A write of zeroes to `extent`.
    pub fn write_zeroes(extent: Extent, how: WriteZeroes) -> Self {
        Self::without_memory(Op::WriteZeroes(how), extent)
    }

    fn without_memory(op: Op, extent: Extent) -> Self {
        Self { op, extent, segments: &NO_SEGMENTS }
    }
}
