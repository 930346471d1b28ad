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
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spile_core::{
    Disk, DiskInfo, Error, ErrorKind, Extent, ExtentStatus, Io, Op, Result, SECTOR_BYTES, Segment, Segments,
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

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::Pin;
    use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
    use std::sync::{Arc, Mutex};
    use std::task::{Context, Poll, Wake, Waker};

    use super::*;
    use proptest::prelude::*;

    const ALIGN: u64 = 512;
    const CHUNK: usize = 4 * ALIGN as usize;
    /// What a buffer counts as, in bytes.
    const PAGE: u64 = 4096;

    /// Refuses what is not aligned, takes a few polls for each request, and counts the memory that requests have with it.
    struct Slow {
        /// What a reader sees, and what is left after a power cut.
        bytes: Mutex<(Vec<u8>, Vec<u8>)>,
        /// Nothing ends while this is set.
        holds: AtomicBool,
        random: AtomicU64,
        requests: AtomicUsize,
        memory_bytes: AtomicUsize,
        peak_bytes: AtomicUsize,
    }

    impl Slow {
        fn new(bytes: Vec<u8>) -> Self {
            Self {
                bytes: Mutex::new((bytes.clone(), bytes)),
                holds: AtomicBool::new(false),
                random: AtomicU64::new(1),
                requests: AtomicUsize::new(0),
                memory_bytes: AtomicUsize::new(0),
                peak_bytes: AtomicUsize::new(0),
            }
        }

        fn bytes(&self) -> Vec<u8> {
            self.bytes.lock().unwrap().0.clone()
        }

        fn durable(&self) -> Vec<u8> {
            self.bytes.lock().unwrap().1.clone()
        }

        fn range(&self, extent: Extent, memory: &Segments) -> Range<usize> {
            let size = self.info().size_bytes;
            let is_aligned = |at: u64| at.is_multiple_of(ALIGN) || at == size;
            assert!(is_aligned(extent.start()) && is_aligned(extent.end()) && extent.end() <= size, "{extent}");
            assert!(memory.iter().all(|segment| (segment.as_ptr() as usize).is_multiple_of(4)), "{memory:?}");
            assert_eq!(memory.len() as u64, extent.len_bytes);
            extent.start() as usize..extent.end() as usize
        }

        async fn take_time(&self, memory: &Segments) {
            self.requests.fetch_add(1, Relaxed);
            let memory_bytes = self.memory_bytes.fetch_add(memory.len(), Relaxed) + memory.len();
            self.peak_bytes.fetch_max(memory_bytes, Relaxed);
            let mut polls = self.random.fetch_add(0x9e37_79b9, Relaxed) % 5;
            poll_fn(|_| match polls {
                _ if self.holds.load(Relaxed) => Poll::Pending,
                0 => Poll::Ready(()),
                _ => {
                    polls -= 1;
                    Poll::Pending
                }
            })
            .await;
            self.memory_bytes.fetch_sub(memory.len(), Relaxed);
            self.requests.fetch_sub(1, Relaxed);
        }

        /// Takes the bytes at the beginning and hands them out at the end.
        async fn read_late(&self, extent: Extent, into: &Segments) {
            let bytes = self.bytes()[self.range(extent, into)].to_vec();
            self.take_time(into).await;
            into.copy_from_slice(0, &bytes);
        }

        /// Takes the bytes at the end. With `fua` these bytes become durable, and no others.
        async fn write_late(&self, extent: Extent, from: &Segments, fua: bool) {
            self.take_time(from).await;
            let range = self.range(extent, from);
            let mut bytes = self.bytes.lock().unwrap();
            bytes.0[range.clone()].copy_from_slice(&from.to_vec());
            if fua {
                bytes.1[range].copy_from_slice(&from.to_vec());
            }
        }

        fn make_durable(&self) {
            let mut bytes = self.bytes.lock().unwrap();
            bytes.1 = bytes.0.clone();
        }
    }

    impl Disk for Slow {
        fn info(&self) -> DiskInfo {
            DiskInfo {
                size_bytes: self.bytes.lock().unwrap().0.len() as u64,
                request_align_bytes: ALIGN as u32,
                memory_align_bytes: 4,
                preferred_bytes: 4096,
                discard_align_bytes: 4096,
                read_only: false,
                fast_zero: false,
            }
        }

        async fn execute(&self, io: Io<'_>) -> Result<()> {
            match io.op {
                Op::Read => self.read_late(io.extent, io.segments).await,
                Op::Write { fua } => self.write_late(io.extent, io.segments, fua).await,
                Op::Flush => self.make_durable(),
                Op::Discard => {}
                Op::WriteZeroes(_) => {
                    let zeroes = Segments::zeroed(io.extent.len_bytes as usize);
                    self.write_late(io.extent, &zeroes, false).await;
                }
            }
            Ok(())
        }

        async fn extents(&self, _: Extent, _: usize) -> Result<Vec<ExtentStatus>> {
            Ok(Vec::new())
        }

        async fn resize(&self, _: u64) -> Result<()> {
            Ok(())
        }

        async fn close(&self) -> Result<()> {
            Ok(())
        }
    }

    type Request<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

    /// Polls each once, from place `first` on, and drops those that have ended.
    fn poll_all(requests: &mut Vec<Request<'_>>, first: usize) {
        let mut context = Context::from_waker(Waker::noop());
        let middle = first % requests.len().max(1);
        requests.rotate_left(middle);
        requests.retain_mut(|request| request.as_mut().poll(&mut context).is_pending());
    }

    fn run(mut requests: Vec<Request<'_>>) {
        for round in 0..100_000 {
            if requests.is_empty() {
                return;
            }
            poll_all(&mut requests, round * 7);
        }
        panic!("{} requests never end", requests.len());
    }

    fn pattern(seed: u64, len: usize) -> Vec<u8> {
        (0..len as u64).map(|at| ((at ^ seed << 7).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
    }

    fn at(start: usize, len: usize) -> Extent {
        Extent::from_range(start as u64..(start + len) as u64)
    }

    /// `len` bytes of memory that begin `skip` bytes after an aligned address, cut into pieces of the lengths in `cuts`.
    fn scattered(len: usize, skip: usize, cuts: &[usize]) -> Segments {
        let whole = Segment::zeroed(skip + len);
        let mut list = Segments::new();
        let mut start = skip;
        for cut in cuts {
            let end = (start + cut).min(skip + len);
            list.push(whole.slice(start..end));
            start = end;
        }
        list.push(whole.slice(start..skip + len));
        list
    }

    #[derive(Clone, Copy, Debug)]
    enum Kind {
        Read,
        Write,
        WriteFua,
        Zero,
    }

    #[derive(Clone, Debug)]
    struct Case {
        kind: Kind,
        start: usize,
        len: usize,
        skip: usize,
        cuts: Vec<usize>,
    }

    impl Case {
        fn memory(&self) -> Segments {
            scattered(self.len, self.skip, &self.cuts)
        }

        fn range(&self) -> Range<usize> {
            self.start..self.start + self.len
        }

        fn extent(&self) -> Extent {
            at(self.start, self.len)
        }
    }

    /// Its last sector is a part of one.
    const SIZE: usize = 24 * ALIGN as usize + 100;

    fn op() -> impl Strategy<Value = Case> {
        let kind = prop_oneof![Just(Kind::Read), Just(Kind::Write), Just(Kind::WriteFua), Just(Kind::Zero)];
        let place = (0..=SIZE, 0..=SIZE, prop_oneof![Just(1), Just(4), Just(ALIGN as usize)]);
        let place = place.prop_map(|(a, b, unit)| {
            let (start, end) = (a.min(b) / unit * unit, a.max(b) / unit * unit);
            (start, end - start)
        });
        let cuts = prop::collection::vec(0..2 * CHUNK, 0..6);
        (kind, place, 0..6_usize, cuts).prop_map(|(kind, (start, len), skip, cuts)| Case {
            kind,
            start,
            len,
            skip,
            cuts,
        })
    }

    fn check_alone(disk: &Aligned<Slow>, model: &mut [u8], seed: u64, op: &Case) {
        let memory = op.memory();
        match op.kind {
            Kind::Read => {
                run(vec![Box::pin(async { disk.read(op.extent(), &memory).await.unwrap() })]);
                assert!(memory.to_vec() == model[op.range()], "{op:?}");
            }
            Kind::Write | Kind::WriteFua => {
                let fua = matches!(op.kind, Kind::WriteFua);
                memory.copy_from_slice(0, &pattern(seed, op.len));
                run(vec![Box::pin(async { disk.write(op.extent(), &memory, fua).await.unwrap() })]);
                model[op.range()].copy_from_slice(&pattern(seed, op.len));
                assert!(!fua || disk.inner.durable()[op.range()] == model[op.range()], "not durable: {op:?}");
            }
            Kind::Zero => {
                let how = WriteZeroes::default();
                run(vec![Box::pin(async { disk.write_zeroes(op.extent(), how).await.unwrap() })]);
                model[op.range()].fill(0);
            }
        }
        assert!(disk.inner.bytes() == model, "{op:?}");
    }

    /// One of many at once: does as `op` says, with `byte` as the data.
    async fn one_of_many(disk: &Aligned<Slow>, op: &Case, byte: u8) {
        let memory = op.memory();
        match op.kind {
            Kind::Read => disk.read(op.extent(), &memory).await.unwrap(),
            Kind::Zero => disk.write_zeroes(op.extent(), WriteZeroes::default()).await.unwrap(),
            Kind::Write | Kind::WriteFua => {
                memory.fill(byte);
                disk.write(op.extent(), &memory, matches!(op.kind, Kind::WriteFua)).await.unwrap();
            }
        }
    }

    /// What may be at byte `at` after all of `ops` ran at once: what one of them wrote there, or else what was there.
    fn allowed(ops: &[Case], at: usize, before: u8) -> Vec<u8> {
        let writes = ops.iter().enumerate().filter(|(_, op)| op.range().contains(&at));
        let bytes: Vec<u8> = writes
            .filter_map(|(number, op)| match op.kind {
                Kind::Read => None,
                Kind::Zero => Some(0),
                Kind::Write | Kind::WriteFua => Some(number as u8 + 1),
            })
            .collect();
        if bytes.is_empty() { vec![before] } else { bytes }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

        #[test]
        fn any_bytes_from_any_memory(ops in prop::collection::vec(op(), 1..12), chunk in 1..6_usize) {
            let mut model = pattern(99, SIZE);
            let disk = Aligned::with_chunks(Slow::new(model.clone()), chunk * ALIGN as usize, ALIGN as usize, from_heap);
            for (seed, op) in ops.iter().enumerate() {
                check_alone(&disk, &mut model, seed as u64, op);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

        /// With more requests than buffers, on sectors that they share.
        #[test]
        fn requests_at_once_undo_nothing(ops in prop::collection::vec(op(), 2..80), chunk in 1..6_usize) {
            let before = pattern(99, SIZE);
            let disk = Aligned::with_chunks(Slow::new(before.clone()), chunk * ALIGN as usize, ALIGN as usize, from_heap);
            run(ops.iter().enumerate().map(|(n, op)| Box::pin(one_of_many(&disk, op, n as u8 + 1)) as _).collect());
            for (at, byte) in disk.inner.bytes().into_iter().enumerate() {
                prop_assert!(allowed(&ops, at, before[at]).contains(&byte), "{byte} at {at}");
            }
        }
    }

    /// Many large requests from odd addresses: reads, aligned writes, and writes that share their edges' sectors.
    fn flood(disk: &Aligned<Slow>) -> Vec<Request<'_>> {
        let len = 8 * CHUNK;
        let request = |number: usize| async move {
            let memory = scattered(len, 1, &[]);
            let start = number / 4 * (len + 1);
            match number % 4 {
                0 | 1 => disk.read(at(start, len), &memory).await.unwrap(),
                2 => disk.write(at(start, len), &memory, number % 8 == 2).await.unwrap(),
                _ => disk.write(at(number / 4 * len, len), &memory, false).await.unwrap(),
            }
        };
        (0..200).map(|number| Box::pin(request(number)) as _).collect()
    }

    /// A disk of `len` zeroes with small buffers.
    fn small(len: usize) -> Aligned<Slow> {
        Aligned::with_chunks(Slow::new(vec![0; len]), CHUNK, ALIGN as usize, from_heap)
    }

    /// A flood takes half of the memory at most, and each buffer counts as a page.
    #[test]
    fn a_flood_of_unaligned_requests_takes_a_bounded_amount_of_memory() {
        const BUFFERS: usize = 32;
        let _others = Bounce::leave_only(2 * BUFFERS as u64 * PAGE);
        let disk = small(51 * (8 * CHUNK + 1));
        let mut requests = flood(&disk);
        disk.inner.holds.store(true, Relaxed);
        for round in 0..4 {
            poll_all(&mut requests, round);
        }
        assert_eq!((disk.inner.requests.load(Relaxed), Bounce::free_bytes()), (BUFFERS, BUFFERS as i64 * PAGE as i64));
        disk.inner.holds.store(false, Relaxed);
        run(requests);
        assert_eq!(Bounce::free_bytes(), 2 * BUFFERS as i64 * PAGE as i64);
        let peak_bytes = disk.inner.peak_bytes.load(Relaxed);
        assert!((16 * CHUNK..=BUFFERS * CHUNK).contains(&peak_bytes), "{peak_bytes} bytes");
    }

    /// Requests that a disk which hangs never answers leave memory for the disks beside it, however many such disks there are.
    #[test]
    fn disks_that_hang_leave_buffers_for_a_healthy_one() {
        let _others = Bounce::leave_only(64 * PAGE);
        let dead: Vec<_> = (0..20).map(|_| small(51 * (8 * CHUNK + 1))).collect();
        let mut hanging: Vec<_> = dead.iter().map(flood).collect();
        dead.iter().for_each(|disk| disk.inner.holds.store(true, Relaxed));
        for _ in 0..2 {
            hanging.iter_mut().for_each(|requests| poll_all(requests, 0));
        }
        assert!(Bounce::free_bytes() <= 0, "{} bytes are left: the test is too weak", Bounce::free_bytes());
        assert!(dead.iter().all(|disk| disk.inner.requests.load(Relaxed) > 0));
        let healthy = small(51 * (8 * CHUNK + 1));
        run(flood(&healthy));
        dead.iter().for_each(|disk| disk.inner.holds.store(false, Relaxed));
        hanging.into_iter().for_each(run);
        assert_eq!(Bounce::free_bytes(), 64 * PAGE as i64);
    }

    /// No memory is an error of the request, and the disk goes on.
    #[test]
    fn a_request_fails_when_there_is_no_memory_for_its_buffer() {
        static HAS_MEMORY: AtomicBool = AtomicBool::new(false);
        let allocate: Allocate = |len| HAS_MEMORY.load(Relaxed).then(|| Segments::zeroed(len));
        let before = Bounce::free_bytes();
        let disk: Aligned<Slow> = Aligned::with_buffers(Slow::new(vec![0; CHUNK]), allocate);
        let memory = Segments::zeroed(1000);
        for fails in [true, false] {
            HAS_MEMORY.store(!fails, Relaxed);
            let check = |done: Result<()>| match done {
                Ok(()) => assert!(!fails),
                Err(error) => assert!(fails && error.kind() == ErrorKind::Exhausted, "{error}"),
            };
            run(vec![Box::pin(async { check(disk.read(at(1, 1000), &memory).await) })]);
            run(vec![Box::pin(async { check(disk.write(at(1, 1000), &memory, true).await) })]);
            run(vec![Box::pin(async { check(disk.write_zeroes(at(1, 1000), WriteZeroes::default()).await) })]);
        }
        assert_eq!(Bounce::free_bytes(), before);
    }

    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Relaxed);
        }
    }

    /// Buffers that are given back at the same moment are all taken again, by requests that are polled only when woken.
    #[test]
    fn no_buffer_stays_idle_while_requests_wait() {
        const BUFFERS: usize = 32;
        let _others = Bounce::leave_only(2 * BUFFERS as u64 * PAGE);
        let disk = small(CHUNK);
        let read = async || disk.read(at(1, 1000), &Segments::zeroed(1000)).await.unwrap();
        let requests = |count| -> Vec<Request<'_>> { (0..count).map(|_| Box::pin(read()) as _).collect() };
        let (mut first, mut waiting) = (requests(BUFFERS), requests(2 * BUFFERS));
        let woken: Vec<_> = waiting.iter().map(|_| Arc::new(Woken(AtomicBool::new(true)))).collect();
        let mut poll_woken = || {
            for (request, woken) in waiting.iter_mut().zip(&woken) {
                if woken.0.swap(false, Relaxed) {
                    let waker = Waker::from(woken.clone());
                    assert!(request.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
                }
            }
        };
        disk.inner.holds.store(true, Relaxed);
        poll_all(&mut first, 0);
        poll_woken();
        disk.inner.holds.store(false, Relaxed);
        run(first);
        disk.inner.holds.store(true, Relaxed);
        (0..=BUFFERS).for_each(|_| poll_woken());
        assert_eq!(disk.inner.requests.load(Relaxed), BUFFERS);
        disk.inner.holds.store(false, Relaxed);
        run(waiting);
    }

    #[test]
    fn aligned_requests_need_no_buffer() {
        let disk: Aligned<Slow> =
            Aligned::with_chunks(Slow::new(vec![7; 2 * CHUNK]), CHUNK, CHUNK, |_| panic!("a buffer"));
        let memory = Segments::zeroed(2 * CHUNK);
        run(vec![Box::pin(async { disk.read(at(0, 2 * CHUNK), &memory).await.unwrap() })]);
        assert!(memory.to_vec() == vec![7; 2 * CHUNK]);
        memory.fill(8);
        run(vec![Box::pin(async { disk.write(at(0, 2 * CHUNK), &memory, false).await.unwrap() })]);
        assert!(disk.inner.bytes() == vec![8; 2 * CHUNK]);
        assert_eq!(disk.inner.peak_bytes.load(Relaxed), 2 * CHUNK);
    }
}
