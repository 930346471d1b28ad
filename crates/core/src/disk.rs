//! [`Disk`]: what a front sees, whatever lies behind it.

use crate::{Extent, Result, Segments};

/// What a front must know of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskInfo {
    /// The size of the virtual disk in bytes.
    pub size_bytes: u64,
    /// Offsets and lengths of reads and writes must be multiples of this many bytes (a power of two); 1 = any.
    pub request_align_bytes: u32,
    /// Addresses of segments must be multiples of this many bytes (a power of two); 1 = any.
    pub memory_align_bytes: u32,
    /// The size in bytes of requests that suit the disk best (a power of two, at least 4096).
    pub preferred_bytes: u32,
    /// The unit in bytes in which discards free space.
    pub discard_align_bytes: u32,
    /// True when writes are refused.
    pub read_only: bool,
    /// True when a write of zeroes costs less than writing them (the disk can note a zero range).
    pub fast_zero: bool,
}

/// How zeroes are to be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteZeroes {
    /// The range's space may be freed.
    pub may_unmap: bool,
    /// Fail with `Unsupported`, at once and with nothing changed, unless it is faster than writing zeroes as data.
    pub only_if_fast: bool,
}

/// How a range of the disk is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExtentKind {
    /// Allocated bytes.
    Data,
    /// Allocated, but known to read as zeroes.
    Zero,
    /// Not allocated anywhere in the chain; reads as zeroes.
    Hole,
}

/// One run of a disk's map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentStatus {
    /// The run.
    pub extent: Extent,
    /// How it is kept.
    pub kind: ExtentKind,
    /// How many parents down its bytes lie: 0 is the leaf. Meaningless for a hole.
    pub depth: u16,
}

/// A virtual disk. All methods take the whole length or return an error; requests may overlap in time and
/// complete in any order. A future must be polled to its end: operations are never cancelled by dropping.
///
/// Callers keep extents within the size and on the alignment of [`Disk::info`]; a disk checks both and returns
/// `OutOfRange` or `InvalidInput`. A buffer's length equals the extent's.
pub trait Disk: Send + Sync + 'static {
    /// Size, alignment, abilities. Cheap.
    fn info(&self) -> DiskInfo;

    /// Fills `into` with the bytes of `extent`.
    fn read(&self, extent: Extent, into: &Segments) -> impl Future<Output = Result<()>>;

    /// Writes `from` at `extent`. When it returns, the data survives the death of this process; with `fua` it
    /// survives a power cut as well.
    fn write(&self, extent: Extent, from: &Segments, fua: bool) -> impl Future<Output = Result<()>>;

    /// Makes everything that was acknowledged before the call survive a power cut. After a failed sync every
    /// later flush fails too: what was lost then cannot be known.
    fn flush(&self) -> impl Future<Output = Result<()>>;

    /// Frees what it can of `extent`; what was freed reads as zeroes, the rest is unchanged.
    fn discard(&self, extent: Extent) -> impl Future<Output = Result<()>>;

    /// Makes `extent` read as zeroes, with the promise of a write.
    fn write_zeroes(&self, extent: Extent, how: WriteZeroes) -> impl Future<Output = Result<()>>;

    /// The map of `extent`: runs that cover it exactly from its start, in order, adjacent runs different; at most
    /// `max_runs` of them, so the answer may stop short of the end. Never empty for an extent that has bytes.
    fn extents(&self, extent: Extent, max_runs: usize) -> impl Future<Output = Result<Vec<ExtentStatus>>>;

    /// Makes the disk `size_bytes` long while it is in use; it only grows. New bytes read as zeroes, but on a block
    /// device as the device has them. Once it returns, the new size survives a power cut and [`Disk::info`] tells it;
    /// before, requests see either size. On an error the disk has the size it had.
    ///
    /// # Errors
    /// `InvalidInput` when it would become smaller, or the size is no whole number of sectors or not on the alignment
    /// that the disk was opened with; `ReadOnly`; `Unsupported` where the disk cannot grow while it is in use.
    fn resize(&self, size_bytes: u64) -> impl Future<Output = Result<()>>;

    /// Orderly end: flush, then leave the image as other programs expect it. No request may be in flight.
    fn close(&self) -> impl Future<Output = Result<()>>;
}

impl<D: Disk> Disk for std::sync::Arc<D> {
    fn info(&self) -> DiskInfo {
        (**self).info()
    }
    fn read(&self, extent: Extent, into: &Segments) -> impl Future<Output = Result<()>> {
        (**self).read(extent, into)
    }
    fn write(&self, extent: Extent, from: &Segments, fua: bool) -> impl Future<Output = Result<()>> {
        (**self).write(extent, from, fua)
    }
    fn flush(&self) -> impl Future<Output = Result<()>> {
        (**self).flush()
    }
    fn discard(&self, extent: Extent) -> impl Future<Output = Result<()>> {
        (**self).discard(extent)
    }
    fn write_zeroes(&self, extent: Extent, how: WriteZeroes) -> impl Future<Output = Result<()>> {
        (**self).write_zeroes(extent, how)
    }
    fn extents(&self, extent: Extent, max_runs: usize) -> impl Future<Output = Result<Vec<ExtentStatus>>> {
        (**self).extents(extent, max_runs)
    }
    fn resize(&self, size_bytes: u64) -> impl Future<Output = Result<()>> {
        (**self).resize(size_bytes)
    }
    fn close(&self) -> impl Future<Output = Result<()>> {
        (**self).close()
    }
}
