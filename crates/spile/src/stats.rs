//! Statistics at the seams: [`Measured`] around a disk, [`MeasuredStore`] around a store. Each integrates the
//! operations in flight over time (∫n dt) and keeps a histogram of latencies, apart from each other.
//!
//! The integral needs no sampling: at time T it is Σ(ends) − Σ(starts) + (started − ended)·T, so each operation adds
//! its start and its end to counters of its thread's own shard, with relaxed atomics and nothing shared but when
//! read. The arithmetic wraps; the differences do not. Types are static: what is not wrapped pays nothing.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use spile_core::{
    Disk, DiskInfo, Extent, ExtentStatus, Files, OpenMode, Result, Segments, Store, StoreExtent, StoreInfo,
    StoreOffset, Via, WriteZeroes,
};

/// Threads beyond this many share shards.
const SHARDS: usize = 16;
/// Each power of two of a latency is cut into so many steps: within 3 %.
const STEPS: u64 = 32;
/// Latencies up to 2^40 ns (18 minutes) are told apart.
const BUCKETS: usize = (STEPS * 36) as usize;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Bytes come.
    Read,
    /// Bytes go.
    Write,
    /// A flush, or a store's sync.
    Sync,
    /// Discards, zeroes, holes, lengths.
    Other,
}

#[derive(Debug)]
struct Counts {
    ops: AtomicU64,
    bytes: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

#[derive(Debug)]
#[repr(align(128))]
struct Shard {
    started: AtomicU64,
    ended: AtomicU64,
    start_sum_ns: AtomicU64,
    end_sum_ns: AtomicU64,
    by_op: [Counts; 4],
}

/// Counts operations. Shared by all that is measured at one seam.
#[derive(Debug)]
pub struct Meter {
    epoch: Instant,
    shards: Box<[Shard]>,
}

/// A meter's figures at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// Since the meter was made.
    pub at_ns: u64,
    /// ∫n dt since then, in operation-nanoseconds.
    pub depth_integral_ns: u64,
    /// Operations in flight.
    pub in_flight: u64,
    /// By [`Op`].
    pub by_op: [OpReading; 4],
}

/// One operation's figures.
#[derive(Clone, Debug, PartialEq)]
pub struct OpReading {
    /// Ended, with success or not.
    pub ops: u64,
    /// Their bytes.
    pub bytes: u64,
    buckets: Vec<u64>,
}

impl Default for Meter {
    fn default() -> Self {
        Self::new()
    }
}

impl Meter {
    /// Counts from now.
    pub fn new() -> Self {
        let counts = || Counts {
            ops: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
        };
        let shard = || Shard {
            started: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            start_sum_ns: AtomicU64::new(0),
            end_sum_ns: AtomicU64::new(0),
            by_op: std::array::from_fn(|_| counts()),
        };
        Self { epoch: Instant::now(), shards: (0..SHARDS).map(|_| shard()).collect() }
    }

    fn now_ns(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    /// Counts an operation from now until the result is dropped.
    pub fn start(&self, op: Op, len_bytes: u64) -> InFlight<'_> {
        let start_ns = self.now_ns();
        let shard = &self.shards[shard_number()];
        shard.started.fetch_add(1, Relaxed);
        shard.start_sum_ns.fetch_add(start_ns, Relaxed);
        InFlight { meter: self, op, len_bytes, start_ns }
    }

    /// The figures now.
    pub fn read(&self) -> Reading {
        let at_ns = self.now_ns();
        let sum = |of: fn(&Shard) -> &AtomicU64| {
            self.shards.iter().fold(0u64, |sum, shard| sum.wrapping_add(of(shard).load(Relaxed)))
        };
        // Ends first: an operation that both starts and ends between two of these loads is then not
        // counted as ended without having started.
        let (ended, end_sum) = (sum(|s| &s.ended), sum(|s| &s.end_sum_ns));
        let (started, start_sum) = (sum(|s| &s.started), sum(|s| &s.start_sum_ns));
        let in_flight = started.wrapping_sub(ended);
        let depth_integral_ns = end_sum.wrapping_sub(start_sum).wrapping_add(in_flight.wrapping_mul(at_ns));
        let by_op = std::array::from_fn(|op| self.read_op(op));
        Reading { at_ns, depth_integral_ns, in_flight, by_op }
    }

    fn read_op(&self, op: usize) -> OpReading {
        let counts = || self.shards.iter().map(|shard| &shard.by_op[op]);
        OpReading {
            ops: counts().map(|c| c.ops.load(Relaxed)).sum(),
            bytes: counts().map(|c| c.bytes.load(Relaxed)).sum(),
            buckets: (0..BUCKETS).map(|at| counts().map(|c| c.buckets[at].load(Relaxed)).sum()).collect(),
        }
    }
}

/// An operation in flight; it ends when this is dropped.
#[derive(Debug)]
pub struct InFlight<'a> {
    meter: &'a Meter,
    op: Op,
    len_bytes: u64,
    start_ns: u64,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        let end_ns = self.meter.now_ns();
        let shard = &self.meter.shards[shard_number()];
        shard.ended.fetch_add(1, Relaxed);
        shard.end_sum_ns.fetch_add(end_ns, Relaxed);
        let counts = &shard.by_op[self.op as usize];
        counts.ops.fetch_add(1, Relaxed);
        counts.bytes.fetch_add(self.len_bytes, Relaxed);
        counts.buckets[bucket_of(end_ns - self.start_ns)].fetch_add(1, Relaxed);
    }
}

/// This thread's shard.
fn shard_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static MINE: Cell<Option<usize>> = const { Cell::new(None) });
    MINE.with(|mine| {
        mine.get().unwrap_or_else(|| {
            let number = NEXT.fetch_add(1, Relaxed) % SHARDS;
            mine.set(Some(number));
            number
        })
    })
}

fn bucket_of(latency_ns: u64) -> usize {
    if latency_ns < STEPS {
        return latency_ns as usize;
    }
    let shift = u64::from(latency_ns.ilog2() - STEPS.ilog2());
    let at = (shift + 1) * STEPS + (latency_ns >> shift) - STEPS;
    (at as usize).min(BUCKETS - 1)
}

/// The middle of a bucket in nanoseconds.
fn middle_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < STEPS {
        return bucket;
    }
    let shift = bucket / STEPS - 1;
    ((STEPS + bucket % STEPS) << shift) + ((1 << shift) >> 1)
}

impl Reading {
    /// The average operations in flight between `earlier` and this: ∫n dt / T.
    pub fn average_depth_since(&self, earlier: &Reading) -> f64 {
        let time_ns = self.at_ns.saturating_sub(earlier.at_ns).max(1);
        self.depth_integral_ns.wrapping_sub(earlier.depth_integral_ns) as f64 / time_ns as f64
    }

    /// The figures of one operation between `earlier` and this.
    pub fn op_since(&self, op: Op, earlier: &Reading) -> OpReading {
        let (now, then) = (&self.by_op[op as usize], &earlier.by_op[op as usize]);
        let buckets = now.buckets.iter().zip(&then.buckets).map(|(now, then)| now - then).collect();
        OpReading { ops: now.ops - then.ops, bytes: now.bytes - then.bytes, buckets }
    }
}

impl OpReading {
    /// Both together.
    pub fn merged(&self, other: &OpReading) -> OpReading {
        let buckets = self.buckets.iter().zip(&other.buckets).map(|(a, b)| a + b).collect();
        OpReading { ops: self.ops + other.ops, bytes: self.bytes + other.bytes, buckets }
    }

    /// The latency in microseconds that `quantile` of the operations kept within, to 3 %; 0 without any.
    pub fn latency_us(&self, quantile: f64) -> f64 {
        let total: u64 = self.buckets.iter().sum();
        let rank = ((total as f64 * quantile).ceil() as u64).max(1);
        let mut seen = 0;
        let bucket = self.buckets.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        bucket.map_or(0.0, |bucket| middle_of(bucket) as f64 / 1e3)
    }
}

/// A disk that is measured.
pub struct Measured<D> {
    inner: D,
    meter: Arc<Meter>,
}

impl<D: Disk> Measured<D> {
    /// Counts `inner`'s operations on `meter`.
    pub fn new(inner: D, meter: Arc<Meter>) -> Self {
        Self { inner, meter }
    }
}

impl<D: Disk> Disk for Measured<D> {
    fn info(&self) -> DiskInfo {
        self.inner.info()
    }

    async fn read(&self, extent: Extent, into: &Segments) -> Result<()> {
        let _counted = self.meter.start(Op::Read, extent.len_bytes);
        self.inner.read(extent, into).await
    }

    async fn write(&self, extent: Extent, from: &Segments, fua: bool) -> Result<()> {
        let _counted = self.meter.start(Op::Write, extent.len_bytes);
        self.inner.write(extent, from, fua).await
    }

    async fn flush(&self) -> Result<()> {
        let _counted = self.meter.start(Op::Sync, 0);
        self.inner.flush().await
    }

    async fn discard(&self, extent: Extent) -> Result<()> {
        let _counted = self.meter.start(Op::Other, extent.len_bytes);
        self.inner.discard(extent).await
    }

    async fn write_zeroes(&self, extent: Extent, how: WriteZeroes) -> Result<()> {
        let _counted = self.meter.start(Op::Other, extent.len_bytes);
        self.inner.write_zeroes(extent, how).await
    }

    async fn extents(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        self.inner.extents(extent, max_runs).await
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        let _counted = self.meter.start(Op::Other, 0);
        self.inner.resize(size_bytes).await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

/// A store that is measured.
pub struct MeasuredStore<S> {
    inner: S,
    meter: Arc<Meter>,
}

impl<S: Store> MeasuredStore<S> {
    /// Counts `inner`'s operations on `meter`.
    pub fn new(inner: S, meter: Arc<Meter>) -> Self {
        Self { inner, meter }
    }
}

impl<S: Store> Store for MeasuredStore<S> {
    fn info(&self) -> StoreInfo {
        self.inner.info()
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn path(&self) -> &Path {
        self.inner.path()
    }

    async fn read_at(&self, offset: StoreOffset, into: &Segments, via: Via) -> Result<()> {
        let _counted = self.meter.start(Op::Read, into.len() as u64);
        self.inner.read_at(offset, into, via).await
    }

    async fn write_at(&self, offset: StoreOffset, from: &Segments, via: Via) -> Result<()> {
        let _counted = self.meter.start(Op::Write, from.len() as u64);
        self.inner.write_at(offset, from, via).await
    }

    async fn sync(&self) -> Result<()> {
        let _counted = self.meter.start(Op::Sync, 0);
        self.inner.sync().await
    }

    async fn zero_range(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        let _counted = self.meter.start(Op::Other, len_bytes);
        self.inner.zero_range(offset, len_bytes).await
    }

    async fn punch_hole(&self, offset: StoreOffset, len_bytes: u64) -> Result<()> {
        let _counted = self.meter.start(Op::Other, len_bytes);
        self.inner.punch_hole(offset, len_bytes).await
    }

    async fn set_len(&self, len_bytes: u64) -> Result<()> {
        let _counted = self.meter.start(Op::Other, 0);
        self.inner.set_len(len_bytes).await
    }

    async fn extent_at(&self, offset: StoreOffset) -> Result<StoreExtent> {
        self.inner.extent_at(offset).await
    }
}

/// Files whose stores are measured, all on one meter.
pub struct MeasuredFiles<F> {
    inner: F,
    meter: Arc<Meter>,
}

impl<F: Files> MeasuredFiles<F> {
    /// Counts the operations of the stores that `inner` opens on `meter`.
    pub fn new(inner: F, meter: Arc<Meter>) -> Self {
        Self { inner, meter }
    }
}

impl<F: Files> Files for MeasuredFiles<F> {
    type Store = MeasuredStore<F::Store>;

    async fn open(&self, path: &Path, mode: OpenMode) -> Result<Self::Store> {
        Ok(MeasuredStore::new(self.inner.open(path, mode).await?, self.meter.clone()))
    }

    fn canonical(&self, path: &Path) -> Result<PathBuf> {
        self.inner.canonical(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_integral_is_the_sum_of_the_times_in_flight() {
        let meter = Meter::new();
        let long = meter.start(Op::Read, 4096);
        let short = meter.start(Op::Write, 512);
        let before = meter.read();
        std::thread::sleep(std::time::Duration::from_millis(2));
        drop(short);
        let middle = meter.read();
        assert_eq!((middle.in_flight, middle.by_op[1].ops, middle.by_op[1].bytes), (1, 1, 512));
        drop(long);
        let after = meter.read();
        let depth = middle.average_depth_since(&before);
        assert!((1.0..=2.0).contains(&depth), "{depth}");
        // Nothing is in flight any more: the integral stands still.
        assert_eq!(meter.read().depth_integral_ns, after.depth_integral_ns);
        assert!(after.depth_integral_ns >= middle.depth_integral_ns);
    }

    #[test]
    fn operations_may_end_on_another_thread() {
        let meter = Meter::new();
        let counted = meter.start(Op::Sync, 0);
        std::thread::scope(|scope| scope.spawn(|| drop(counted)).join().unwrap());
        let reading = meter.read();
        assert_eq!((reading.in_flight, reading.by_op[2].ops), (0, 1));
        assert!(reading.depth_integral_ns <= reading.at_ns);
    }

    #[test]
    fn buckets_are_within_three_percent() {
        for ns in [0, 1, 31, 32, 33, 1_000, 123_456, 9_999_999_999] {
            let middle = middle_of(bucket_of(ns));
            assert!(middle.abs_diff(ns) * 33 <= ns + 33, "{ns} {middle}");
        }
        assert!(bucket_of(u64::MAX) < BUCKETS);
    }

    #[test]
    fn quantiles_come_from_the_buckets() {
        let mut buckets = vec![0; BUCKETS];
        buckets[bucket_of(1_000)] = 99;
        buckets[bucket_of(1_000_000)] = 1;
        let op = OpReading { ops: 100, bytes: 0, buckets };
        assert!((0.97..1.03).contains(&op.latency_us(0.5)), "{}", op.latency_us(0.5));
        assert!((970.0..1030.0).contains(&op.latency_us(0.999)));
    }
}
