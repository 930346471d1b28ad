//! [`Aligned`]: a disk that takes any byte range, over one that wants alignment.
//!
//! Aligned requests pass through untouched. For the rest there is a bounce buffer, and for writes a
//! read-modify-write of the edges under an exclusive range lock, so that two writes to different bytes of one
//! sector never undo each other.
//!
//! A request of several steps enters the disk below once, for all of them ([`Enter`]): where graphs are exchanged, what it writes is not from
//! another graph than what it has read, and it counts as in flight from its first step to its last.
//!
//! What a guest asks for does not decide how much memory that takes: a request goes through one small buffer chunk by
//! chunk, and all disks of a worker share a fixed amount of memory for buffers, which their requests wait for (module `bounce`).

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spile_core::{
    Disk, DiskInfo, Epoch, Error, ErrorKind, Extent, ExtentStatus, Io, Op, Result, SECTOR_BYTES, Segment, Segments,
    WriteZeroes,
};

use spile_image::{RangeGuard, RangeLock};

use crate::bounce::{Allocate, Bounce};

/// The size of a bounce buffer in bytes, unless the alignment is larger.
const CHUNK_BYTES: usize = 1 << 20;

/// The size in bytes of the bounce buffer that a disk gets in any case, unless the alignment is larger.
const LEAST_BYTES: usize = 64 << 10;

/// How a request enters the disk `D`, for all its steps.
pub trait Enter<D: Disk> {
    /// Comes when the disk lets the request in. The request is in it until the result is dropped.
    fn enter(disk: &D) -> impl Future<Output = impl Steps>;
}

/// Executes the steps of a request that has entered a disk.
pub trait Steps {
    /// As [`Disk::execute`].
    ///
    /// # Errors
    /// As there.
    fn execute(&self, io: Io<'_>) -> impl Future<Output = Result<()>>;
}

/// A disk that stays what it is has nothing to enter.
pub struct Anytime;

impl<D: Disk> Enter<D> for Anytime {
    async fn enter(disk: &D) -> impl Steps {
        disk
    }
}

impl<D: Disk> Steps for &D {
    fn execute(&self, io: Io<'_>) -> impl Future<Output = Result<()>> {
        D::execute(self, io)
    }
}

/// A disk without alignment rules over one that has them, which requests enter as `E` says.
pub struct Aligned<D, E = Anytime> {
    inner: D,
    enters: PhantomData<fn(E)>,
    align: u64,
    memory_align: usize,
    /// The sizes of the largest buffer and of the one that the disk gets in any case: multiples of the alignment.
    chunk_bytes: usize,
    least_bytes: usize,
    allocate: Allocate,
    /// As many as the two edges of a write of zeroes have at most. Never written to.
    zeroes: Segments,
    writes: RangeLock,
    bounces: AtomicU64,
    bounced_bytes: AtomicU64,
}

impl<D: Disk> Aligned<D> {
    /// Wraps `inner`; bounce buffers come from the heap.
    pub fn new(inner: D) -> Self {
        Self::with_buffers(inner, from_heap)
    }
}

impl<D: Disk, E: Enter<D>> Aligned<D, E> {
    /// Wraps `inner`; `allocate` makes bounce buffers.
    pub fn with_buffers(inner: D, allocate: Allocate) -> Self {
        Self::with_chunks(inner, CHUNK_BYTES, LEAST_BYTES, allocate)
    }

    fn with_chunks(inner: D, chunk_bytes: usize, least_bytes: usize, allocate: Allocate) -> Self {
        let info = inner.info();
        let align = info.request_align_bytes as usize;
        let aligned = |bytes: usize| (bytes / align).max(1) * align;
        Self {
            inner,
            enters: PhantomData,
            align: align as u64,
            memory_align: info.memory_align_bytes as usize,
            chunk_bytes: aligned(chunk_bytes),
            least_bytes: aligned(least_bytes),
            allocate,
            zeroes: Segments::zeroed(2 * align),
            writes: RangeLock::default(),
            bounces: AtomicU64::new(0),
            bounced_bytes: AtomicU64::new(0),
        }
    }

    /// How often a request was copied through a bounce buffer, and how many bytes that were.
    pub fn bounced(&self) -> (u64, u64) {
        (self.bounces.load(Relaxed), self.bounced_bytes.load(Relaxed))
    }

    /// The disk below.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Before any rounding, which could overflow.
    fn check(&self, extent: Extent) -> Result<()> {
        match extent.end() > self.inner.size_bytes() {
            true => Err(Error::new(ErrorKind::OutOfRange, format!("{extent} is past the end of the disk"))),
            false => Ok(()),
        }
    }

    fn outer(&self, extent: Extent) -> Extent {
        let start = extent.start() / self.align * self.align;
        let end = extent.end().next_multiple_of(self.align).min(self.inner.size_bytes());
        Extent::from_range(start..end)
    }

    /// The largest aligned extent inside.
    fn inside(&self, extent: Extent) -> Extent {
        Extent::from_range(extent.start().next_multiple_of(self.align)..extent.end() / self.align * self.align)
    }

    fn fits(&self, extent: Extent, memory: &Segments) -> bool {
        extent.is_aligned(self.align) && memory.is_aligned(self.memory_align)
    }

    /// Waits for a buffer that holds each chunk of `outer`.
    ///
    /// The order is: range lock, buffer, then the disk below. Nobody takes a second buffer, nor a range while it has a
    /// buffer: whoever has one waits for nothing but the disk below, and gives it back. So whoever has a range gets its
    /// buffer, and gives back the range: no circle can close. In the other order, many writes that wait for one sector
    /// would keep all buffers idle. And whoever has entered the disk below waits for its steps alone: who waits until all have left
    /// it waits for no buffer.
    async fn bounce(&self, outer: Extent) -> Result<Bounce> {
        self.bounces.fetch_add(1, Relaxed);
        self.bounced_bytes.fetch_add(outer.len_bytes, Relaxed);
        let [most, least] = [self.chunk_bytes, self.least_bytes].map(|bytes| bytes.min(outer.len_bytes as usize));
        Bounce::take(self, most, least, self.allocate).await
    }

    async fn read_bounced(&self, extent: Extent, into: &Segments) -> Result<()> {
        let outer = self.outer(extent);
        let bounce = self.bounce(outer).await?;
        let entered = E::enter(&self.inner).await;
        for chunk in chunks(outer, bounce.bytes.len()) {
            let bytes = bounce.bytes.slice(0..chunk.len_bytes as usize);
            entered.execute(Io::read(chunk, &bytes)).await?;
            let common = Common::of(extent, chunk);
            into.slice(common.of_request).copy_from(&bytes.slice(common.of_chunk));
        }
        Ok(())
    }

    /// Writes all of `outer` through a bounce buffer; what lies outside of `extent` is read first. The caller holds
    /// `outer`: exclusively, unless it is the same as `extent`.
    async fn write_bounced(&self, outer: Extent, extent: Extent, from: &Segments, fua: bool) -> Result<()> {
        let bounce = self.bounce(outer).await?;
        let entered = E::enter(&self.inner).await;
        let is_one_chunk = outer.len_bytes <= bounce.bytes.len() as u64;
        for chunk in chunks(outer, bounce.bytes.len()) {
            self.write_chunk(&entered, chunk, &bounce, extent, from, fua && is_one_chunk).await?;
        }
        drop(bounce);
        // A write with `fua` promises itself only, not the chunks before it; a flush promises them all, for one sync.
        match fua && !is_one_chunk {
            true => entered.execute(Io::flush()).await,
            false => Ok(()),
        }
    }

    /// Writes what `extent` and `chunk` have in common; the rest of `chunk`'s ends stays as it is.
    async fn write_chunk(
        &self,
        entered: &impl Steps,
        chunk: Extent,
        bounce: &Bounce,
        extent: Extent,
        from: &Segments,
        fua: bool,
    ) -> Result<()> {
        let bytes = bounce.bytes.slice(0..chunk.len_bytes as usize);
        self.read_edges(entered, chunk, extent, &bytes).await?;
        let common = Common::of(extent, chunk);
        bytes.slice(common.of_chunk).copy_from(&from.slice(common.of_request));
        entered.execute(Io::write(chunk, &bytes, fua)).await
    }

    /// Reads those sectors of `chunk` into `bytes` of which `extent` covers a part only: its ends, if anything.
    async fn read_edges(&self, entered: &impl Steps, chunk: Extent, extent: Extent, bytes: &Segments) -> Result<()> {
        let last = Extent::from_range((chunk.end() - 1) / self.align * self.align..chunk.end());
        if chunk.end() > extent.end() {
            let at = (last.start() - chunk.start()) as usize;
            entered.execute(Io::read(last, &bytes.slice(at..bytes.len()))).await?;
        }
        // It has been read already when it is the last one, too.
        let has_first = chunk.end() > extent.end() && last == chunk;
        if chunk.start() < extent.start() && !has_first {
            let unit = self.align.min(chunk.len_bytes);
            let first = Extent::from_range(chunk.start()..chunk.start() + unit);
            entered.execute(Io::read(first, &bytes.slice(0..unit as usize))).await?;
        }
        Ok(())
    }

    /// Writes an extent off the alignment, with all that its edges read held exclusively.
    async fn write_unaligned(&self, extent: Extent, from: &Segments, fua: bool) -> Result<()> {
        // Found once: it could reach further once the disk has grown.
        let outer = self.outer(extent);
        let _held = self.writes.exclusive(outer.range()).await;
        self.write_bounced(outer, extent, from, fua).await
    }

    /// What a request holds while the disk below executes it as it is. `None` when that cannot be, or not at once.
    #[inline]
    pub(crate) fn try_pass(&self, io: &Io<'_>) -> Option<Held<'_>> {
        let is_inside = io.extent.end() <= self.inner.size_bytes();
        let passes_all = self.align == 1 && self.memory_align == 1;
        match io.op {
            Op::Flush => Some(Held(None)),
            Op::Read | Op::Write { .. } if is_inside && passes_all => Some(Held(None)),
            Op::Read if is_inside && self.fits(io.extent, io.segments) => Some(Held(None)),
            Op::Write { .. } if is_inside && self.fits(io.extent, io.segments) => {
                self.writes.try_shared(io.extent.range()).map(|range| Held(Some(range)))
            }
            _ => None,
        }
    }

    async fn write_extent(&self, extent: Extent, from: &Segments, fua: bool) -> Result<()> {
        if extent.is_aligned(self.align) {
            let _held = self.writes.shared(extent.range()).await;
            return match from.is_aligned(self.memory_align) {
                true => self.inner.write(extent, from, fua).await,
                false => self.write_bounced(extent, extent, from, fua).await,
            };
        }
        self.write_unaligned(extent, from, fua).await
    }

    async fn discard_extent(&self, extent: Extent) -> Result<()> {
        let inside = self.inside(extent);
        if inside.is_empty() {
            return Ok(());
        }
        let _held = self.writes.shared(inside.range()).await;
        self.inner.discard(inside).await
    }

    async fn zero_extent(&self, extent: Extent, how: WriteZeroes) -> Result<()> {
        let inside = self.inside(extent);
        match () {
            () if extent.is_empty() => Ok(()),
            () if inside == extent => {
                let _held = self.writes.shared(inside.range()).await;
                self.inner.write_zeroes(inside, how).await
            }
            () if inside.is_empty() => {
                let zeroes = self.zeroes.slice(0..extent.len_bytes as usize);
                self.write_unaligned(extent, &zeroes, false).await
            }
            () => self.zero_unaligned(extent, inside, how).await,
        }
    }

    /// Zeroes an extent off the alignment, with `inside` in it.
    async fn zero_unaligned(&self, extent: Extent, inside: Extent, how: WriteZeroes) -> Result<()> {
        // Found once: it could reach further once the disk has grown.
        let outer = self.outer(extent);
        let _held = self.writes.exclusive(outer.range()).await;
        let bounce = self.bounce(Extent::from_range(0..self.align)).await?;
        let entered = E::enter(&self.inner).await;
        entered.execute(Io::write_zeroes(inside, how)).await?;
        let head = (outer.start()..inside.start(), extent.start()..inside.start());
        let tail = (inside.end()..outer.end(), inside.end()..extent.end());
        for (chunk, part) in [head, tail].into_iter().filter(|(_, part)| !part.is_empty()) {
            let (chunk, part) = (Extent::from_range(chunk), Extent::from_range(part));
            let zeroes = self.zeroes.slice(0..part.len_bytes as usize);
            self.write_chunk(&entered, chunk, &bounce, part, &zeroes, false).await?;
        }
        Ok(())
    }
}

/// What a request that passes holds: its range, if it is a write that others must not read, change and write back.
pub(crate) struct Held<'a>(#[expect(dead_code, reason = "held for its drop")] Option<RangeGuard<'a>>);

/// Makes a bounce buffer from the heap.
pub(crate) fn from_heap(len: usize) -> Option<Segments> {
    Segment::try_zeroed(len).map(Segments::from)
}

/// The parts of `outer` that go through a bounce buffer of `chunk_bytes` one after the other. They meet on the alignment, so that only
/// the ends of `outer` can be sectors of which the request wants a part.
fn chunks(outer: Extent, chunk_bytes: usize) -> impl Iterator<Item = Extent> {
    let starts = outer.range().step_by(chunk_bytes);
    starts.map(move |start| Extent::from_range(start..(start + chunk_bytes as u64).min(outer.end())))
}

/// The bytes that a request and a chunk of it have in common.
struct Common {
    of_request: Range<usize>,
    of_chunk: Range<usize>,
}

impl Common {
    fn of(request: Extent, chunk: Extent) -> Self {
        let common = request.start().max(chunk.start())..request.end().min(chunk.end());
        let from = |start: u64| (common.start - start) as usize..(common.end - start) as usize;
        Self { of_request: from(request.start()), of_chunk: from(chunk.start()) }
    }
}

impl<D: Disk, E: Enter<D> + 'static> Disk for Aligned<D, E> {
    fn info(&self) -> DiskInfo {
        DiskInfo { request_align_bytes: 1, memory_align_bytes: 1, ..self.inner.info() }
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        if let Some(_held) = self.try_pass(&io) {
            return self.inner.execute(io).await;
        }
        self.check(io.extent)?;
        match io.op {
            Op::Read => self.read_bounced(io.extent, io.segments).await,
            Op::Write { fua } => self.write_extent(io.extent, io.segments, fua).await,
            Op::Flush => self.inner.execute(io).await,
            Op::Discard => self.discard_extent(io.extent).await,
            Op::WriteZeroes(how) => self.zero_extent(io.extent, how).await,
        }
    }

    async fn extents(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        self.check(extent)?;
        // Runs of sectors that end before the extent begins are dropped, so as many more are asked for.
        let spare = (self.align / SECTOR_BYTES) as usize;
        let mut runs = self.inner.extents(self.outer(extent), max_runs + spare).await?;
        for run in &mut runs {
            let range = run.extent.range();
            run.extent = Extent::from_range(range.start.max(extent.start())..range.end.min(extent.end()));
        }
        runs.retain(|run| !run.extent.is_empty());
        runs.truncate(max_runs);
        Ok(runs)
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.inner.resize(size_bytes).await
    }

    fn follows(&self, epochs: &[Arc<dyn Epoch>]) {
        self.inner.follows(epochs);
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

#[cfg(test)]
mod tests;
