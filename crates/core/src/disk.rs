//! [`Disk`]: what a front sees, whatever lies behind it.

use std::pin::Pin;
use std::sync::Arc;

use crate::{Extent, Io, Result, Segments, WriteZeroes};

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

impl DiskInfo {
    /// A disk of so many bytes that takes requests of any alignment and may be written, as disks in memory do.
    pub fn unaligned(size_bytes: u64) -> Self {
        Self {
            size_bytes,
            request_align_bytes: 1,
            memory_align_bytes: 1,
            preferred_bytes: 4096,
            discard_align_bytes: 4096,
            read_only: false,
            fast_zero: true,
        }
    }
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

/// The requests that were let in to a disk between two exchanges of what lies behind it.
pub trait Epoch: Send + Sync {
    /// True when all of them have ended.
    fn has_ended(&self) -> bool;

    /// Waits until all of them have ended.
    fn ended(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;
}

/// A virtual disk. All methods take the whole length or return an error; requests may overlap in time and
/// complete in any order. A future must be polled to its end: operations are never cancelled by dropping.
///
/// Data has one way in, [`Disk::execute`]; the methods [`Disk::read`] to [`Disk::write_zeroes`] only build the request
/// and are not to be overridden. So a disk that stands before another one has one method to write.
///
/// Callers keep extents within the size and on the alignment of [`Disk::info`]; a disk checks both and returns
/// `OutOfRange` or `InvalidInput`. The memory of a read or a write is as long as its extent.
pub trait Disk: Send + Sync + 'static {
    /// Size, alignment, abilities. Cheap.
    fn info(&self) -> DiskInfo;

    /// The size of [`Disk::info`] alone.
    fn size_bytes(&self) -> u64 {
        self.info().size_bytes
    }

    /// Does what `io` asks for. [`Op`](crate::Op) says what each operation promises when it ends.
    ///
    /// # Errors
    /// `OutOfRange` and `InvalidInput` as above; `ReadOnly`; `Unsupported` for zeroes that would not be fast; what the
    /// store reports.
    fn execute(&self, io: Io<'_>) -> impl Future<Output = Result<()>>;

    /// As [`Disk::execute`], for a client that may go away: `gone` ends when it has. A disk that holds requests back, or
    /// lets failed ones wait, asks before it goes on with one, and ends the request of a client that is gone with `Shutdown`. What is being
    /// tried is not cancelled. A disk that lets no request wait has nothing to ask.
    ///
    /// # Errors
    /// As there, and `Shutdown` when the client is gone.
    fn execute_for(&self, io: Io<'_>, gone: impl Future<Output = ()>) -> impl Future<Output = Result<()>> {
        drop(gone);
        self.execute(io)
    }

    /// With `true` no request is held back to keep a rate any more, as somebody waits until all that are in flight have ended. Each
    /// such call needs one with `false` to end it. A disk that holds no request back has nothing to do.
    fn hurry(&self, begins: bool) {
        let _ = begins;
    }

    /// True when a request may be held back, as for a limit. Then a read is to be executed even where the map of the disk answers it already, so that
    /// it waits and counts as others do.
    fn may_hold_back(&self) -> bool {
        false
    }

    /// Executes [`Io::read`].
    fn read(&self, extent: Extent, into: &Segments) -> impl Future<Output = Result<()>> {
        self.execute(Io::read(extent, into))
    }

    /// Executes [`Io::write`].
    fn write(&self, extent: Extent, from: &Segments, fua: bool) -> impl Future<Output = Result<()>> {
        self.execute(Io::write(extent, from, fua))
    }

    /// Executes [`Io::flush`].
    fn flush(&self) -> impl Future<Output = Result<()>> {
        self.execute(Io::flush())
    }

    /// Executes [`Io::discard`].
    fn discard(&self, extent: Extent) -> impl Future<Output = Result<()>> {
        self.execute(Io::discard(extent))
    }

    /// Executes [`Io::write_zeroes`].
    fn write_zeroes(&self, extent: Extent, how: WriteZeroes) -> impl Future<Output = Result<()>> {
        self.execute(Io::write_zeroes(extent, how))
    }

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

    /// This disk is about to take the place of another, whose requests of these epochs may still be in flight: they end there, and may change what this
    /// disk has in common with it. Whoever exchanges disks says so before the first request comes here, with no epochs if there was none before. A disk that
    /// stands before another one says it to that, or writes are lost; one that has nothing in common with any other has nothing to do.
    fn follows(&self, epochs: &[Arc<dyn Epoch>]);

    /// Orderly end: flush, then leave the image as other programs expect it. No request may be in flight.
    fn close(&self) -> impl Future<Output = Result<()>>;
}

impl<D: Disk> Disk for Arc<D> {
    fn info(&self) -> DiskInfo {
        (**self).info()
    }
    fn size_bytes(&self) -> u64 {
        (**self).size_bytes()
    }
    fn execute(&self, io: Io<'_>) -> impl Future<Output = Result<()>> {
        (**self).execute(io)
    }
    fn execute_for(&self, io: Io<'_>, gone: impl Future<Output = ()>) -> impl Future<Output = Result<()>> {
        (**self).execute_for(io, gone)
    }
    fn hurry(&self, begins: bool) {
        (**self).hurry(begins);
    }
    fn may_hold_back(&self) -> bool {
        (**self).may_hold_back()
    }
    fn extents(&self, extent: Extent, max_runs: usize) -> impl Future<Output = Result<Vec<ExtentStatus>>> {
        (**self).extents(extent, max_runs)
    }
    fn resize(&self, size_bytes: u64) -> impl Future<Output = Result<()>> {
        (**self).resize(size_bytes)
    }
    fn follows(&self, epochs: &[Arc<dyn Epoch>]) {
        (**self).follows(epochs);
    }
    fn close(&self) -> impl Future<Output = Result<()>> {
        (**self).close()
    }
}
