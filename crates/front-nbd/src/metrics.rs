//! What a front counts, and how it is read.
//!
//! Contract: one [`Cell`] for each export and worker; only that worker writes it (plain loads and stores of
//! atomics, no lock, no read-modify-write), anybody may read it. A request's latency runs from the end of the
//! receive that completed it to the end of the send that carried its reply. The queue depth is integrated
//! over time by itself, at each arrival and departure, and not derived from the latencies: so Little's law
//! (requests per second × mean latency = mean depth) is a check and no tautology.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed, fence};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use hdrhistogram::Histogram;

use crate::wire::request::Command;

/// The kinds of request that are counted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Flushes.
    Flush,
    /// Trims (discards).
    Trim,
    /// Writes of zeroes.
    WriteZeroes,
    /// Cache hints.
    Cache,
    /// Block status queries.
    BlockStatus,
    /// Unknown commands.
    Unknown,
}

impl OpKind {
    /// All kinds, in the order of [`FrontMetrics::ops`].
    pub const ALL: [OpKind; 8] = [
        Self::Read,
        Self::Write,
        Self::Flush,
        Self::Trim,
        Self::WriteZeroes,
        Self::Cache,
        Self::BlockStatus,
        Self::Unknown,
    ];

    /// A short name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Trim => "trim",
            Self::WriteZeroes => "write-zeroes",
            Self::Cache => "cache",
            Self::BlockStatus => "block-status",
            Self::Unknown => "unknown",
        }
    }

    pub(crate) fn of(command: Command) -> Self {
        match command {
            Command::Read => Self::Read,
            Command::Write => Self::Write,
            Command::Flush => Self::Flush,
            Command::Trim => Self::Trim,
            Command::WriteZeroes => Self::WriteZeroes,
            Command::Cache => Self::Cache,
            Command::BlockStatus => Self::BlockStatus,
            Command::Disconnect | Command::Unknown(_) => Self::Unknown,
        }
    }
}

/// The figures of one kind of request.
#[derive(Clone, Debug)]
pub struct OpMetrics {
    /// Answered with success.
    pub completed: u64,
    /// Answered with an error.
    pub failed: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
    /// Latencies in nanoseconds of all that were answered, within 1 %.
    pub latency_ns: Histogram<u64>,
}

impl OpMetrics {
    fn new() -> Self {
        let latency_ns = Histogram::new(2).expect("two digits are allowed");
        Self { completed: 0, failed: 0, bytes: 0, latency_ns }
    }
}

/// The figures of one export, merged over workers and connections.
#[derive(Clone, Debug)]
pub struct FrontMetrics {
    /// By kind, in the order of [`OpKind::ALL`].
    pub ops: Vec<OpMetrics>,
    /// Connections in the transmission phase now.
    pub connections: usize,
    /// Requests in flight now: received and not yet answered.
    pub in_flight: u64,
    /// ∫ (requests in flight) dt since the server began, in request-nanoseconds.
    pub depth_integral_ns: u128,
    /// Sum of all latencies in nanoseconds, for checking against the integral.
    pub latency_sum_ns: u128,
    /// When this was read, in nanoseconds since the server began.
    pub at_ns: u64,
}

impl FrontMetrics {
    /// All zero: what to merge into.
    pub fn new() -> Self {
        let ops = OpKind::ALL.iter().map(|_| OpMetrics::new()).collect();
        Self { ops, connections: 0, in_flight: 0, depth_integral_ns: 0, latency_sum_ns: 0, at_ns: 0 }
    }

    /// The figures of `kind`.
    pub fn op(&self, kind: OpKind) -> &OpMetrics {
        &self.ops[kind as usize]
    }

    /// Adds another export's or server's figures. `at_ns` becomes the later of both.
    pub fn merge(&mut self, other: &FrontMetrics) {
        for (mine, theirs) in self.ops.iter_mut().zip(&other.ops) {
            mine.completed += theirs.completed;
            mine.failed += theirs.failed;
            mine.bytes += theirs.bytes;
            // Both have the same digits and resize by themselves: adding cannot fail.
            let _ = mine.latency_ns.add(&theirs.latency_ns);
        }
        self.connections += other.connections;
        self.in_flight += other.in_flight;
        self.depth_integral_ns += other.depth_integral_ns;
        self.latency_sum_ns += other.latency_sum_ns;
        self.at_ns = self.at_ns.max(other.at_ns);
    }

    /// The average queue size between an `earlier` reading and this one: ∫ n dt / Δt.
    pub fn average_depth_since(&self, earlier: &FrontMetrics) -> f64 {
        let elapsed_ns = self.at_ns.saturating_sub(earlier.at_ns);
        let integral = self.depth_integral_ns.saturating_sub(earlier.depth_integral_ns);
        if elapsed_ns == 0 { 0.0 } else { integral as f64 / elapsed_ns as f64 }
    }
}

impl Default for FrontMetrics {
    fn default() -> Self {
        Self::new()
    }
}

/// Each power of two of a latency is cut into so many steps.
const STEPS: u64 = 128;
/// Latencies up to 2^41 ns (36 minutes) are told apart; longer ones count as that.
const OCTAVES: u64 = 34;
const BUCKETS: usize = (STEPS * (OCTAVES + 1)) as usize;

/// The bucket of a latency: exact below [`STEPS`], then [`STEPS`] to each power of two.
fn bucket_of(latency_ns: u64) -> usize {
    if latency_ns < STEPS {
        return latency_ns as usize;
    }
    let shift = (latency_ns.ilog2() - STEPS.ilog2()) as u64;
    let index = (shift + 1) * STEPS + (latency_ns >> shift) - STEPS;
    (index as usize).min(BUCKETS - 1)
}

/// The middle of a bucket, in nanoseconds.
fn middle_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < STEPS {
        return bucket;
    }
    let shift = bucket / STEPS - 1;
    ((STEPS + bucket % STEPS) << shift) + ((1 << shift) >> 1)
}

/// Adds to an atomic that has one writer.
fn add(to: &AtomicU64, n: u64) {
    to.store(to.load(Relaxed).wrapping_add(n), Relaxed);
}

#[derive(Default)]
struct OpCell {
    completed: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
    /// Made at the first request of its kind: most exports see three kinds.
    latency: OnceLock<Box<[AtomicU64]>>,
}

/// One worker's figures of one export.
#[derive(Default)]
pub(crate) struct WorkerCell {
    ops: [OpCell; OpKind::ALL.len()],
    latency_sum_ns: AtomicU64,
    /// Odd while the three below change: a reader then looks again.
    version: AtomicU64,
    depth: AtomicU64,
    depth_since_ns: AtomicU64,
    depth_integral_ns: AtomicU64,
}

/// One finished request, for the record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finished {
    pub(crate) kind: OpKind,
    pub(crate) bytes: u64,
    pub(crate) failed: bool,
    pub(crate) started_ns: u64,
}

impl WorkerCell {
    /// `n` requests arrived at `now_ns`.
    pub(crate) fn arrive(&self, n: u64, now_ns: u64) {
        self.change_depth(now_ns, |depth| depth + n);
    }

    /// These requests were answered at `now_ns`.
    pub(crate) fn depart(&self, finished: &[Finished], now_ns: u64) {
        self.change_depth(now_ns, |depth| depth.saturating_sub(finished.len() as u64));
        for one in finished {
            let op = &self.ops[one.kind as usize];
            if one.failed {
                add(&op.failed, 1);
            } else {
                add(&op.completed, 1);
                add(&op.bytes, one.bytes);
            }
            let latency_ns = now_ns.saturating_sub(one.started_ns);
            add(&self.latency_sum_ns, latency_ns);
            let latency = op.latency.get_or_init(|| (0..BUCKETS).map(|_| AtomicU64::new(0)).collect());
            add(&latency[bucket_of(latency_ns)], 1);
        }
    }

    fn change_depth(&self, now_ns: u64, change: impl FnOnce(u64) -> u64) {
        let version = self.version.load(Relaxed);
        self.version.store(version.wrapping_add(1), Relaxed);
        fence(Ordering::Release);
        let (depth, since_ns) = (self.depth.load(Relaxed), self.depth_since_ns.load(Relaxed));
        let now_ns = now_ns.max(since_ns);
        add(&self.depth_integral_ns, depth * (now_ns - since_ns));
        self.depth.store(change(depth), Relaxed);
        self.depth_since_ns.store(now_ns, Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// Depth, and its integral up to `now_ns`.
    fn depth_at(&self, now_ns: u64) -> (u64, u128) {
        loop {
            let before = self.version.load(Ordering::Acquire);
            let depth = self.depth.load(Relaxed);
            let since_ns = self.depth_since_ns.load(Relaxed);
            let integral = self.depth_integral_ns.load(Relaxed);
            fence(Ordering::Acquire);
            if before & 1 == 0 && self.version.load(Relaxed) == before {
                let open = u128::from(depth) * u128::from(now_ns.saturating_sub(since_ns));
                return (depth, u128::from(integral) + open);
            }
            std::hint::spin_loop();
        }
    }

    fn read_into(&self, into: &mut FrontMetrics) {
        for (op, sum) in self.ops.iter().zip(&mut into.ops) {
            sum.completed += op.completed.load(Relaxed);
            sum.failed += op.failed.load(Relaxed);
            sum.bytes += op.bytes.load(Relaxed);
            for (bucket, count) in op.latency.get().into_iter().flatten().enumerate() {
                let count = count.load(Relaxed);
                if count > 0 {
                    // The histogram grows by itself: this cannot fail.
                    let _ = sum.latency_ns.record_n(middle_of(bucket), count);
                }
            }
        }
        let (depth, integral) = self.depth_at(into.at_ns);
        into.in_flight += depth;
        into.depth_integral_ns += integral;
        into.latency_sum_ns += u128::from(self.latency_sum_ns.load(Relaxed));
    }
}

/// One export's figures: a cell for each worker.
pub(crate) struct ExportMetrics {
    cells: Box<[WorkerCell]>,
    pub(crate) connections: AtomicUsize,
}

impl ExportMetrics {
    pub(crate) fn new(workers: usize) -> Self {
        let cells = (0..workers).map(|_| WorkerCell::default()).collect();
        Self { cells, connections: AtomicUsize::new(0) }
    }

    pub(crate) fn cell(&self, worker: usize) -> &WorkerCell {
        &self.cells[worker % self.cells.len()]
    }

    pub(crate) fn read(&self, clock: &Clock) -> FrontMetrics {
        let mut sum = FrontMetrics::new();
        sum.connections = self.connections.load(Relaxed);
        sum.at_ns = clock.now_ns();
        self.cells.iter().for_each(|cell| cell.read_into(&mut sum));
        sum
    }
}

/// Nanoseconds since the server began.
#[derive(Clone, Copy)]
pub(crate) struct Clock {
    began: Instant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self { began: Instant::now() }
    }

    pub(crate) fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(cell: &WorkerCell, at_ns: u64) -> FrontMetrics {
        let mut sum = FrontMetrics { at_ns, ..FrontMetrics::new() };
        cell.read_into(&mut sum);
        sum
    }

    proptest! {
        #[test]
        fn a_bucket_is_within_one_percent(latency_ns in 0u64..1 << 40) {
            let middle = middle_of(bucket_of(latency_ns));
            prop_assert!(middle.abs_diff(latency_ns) * 100 <= latency_ns, "{} for {}", middle, latency_ns);
        }

        #[test]
        fn buckets_rise_with_latency(latency_ns in 0u64..1 << 42) {
            prop_assert!(bucket_of(latency_ns) <= bucket_of(latency_ns + 1));
            prop_assert!(bucket_of(latency_ns) < BUCKETS);
        }

        /// Little's law: when all have left, the integral of the depth is the sum of the latencies.
        #[test]
        fn depth_and_latency_agree(mut steps in prop::collection::vec((0u64..1000, 1u64..1000), 1..40)) {
            let cell = WorkerCell::default();
            steps.sort_unstable();
            let mut events: Vec<(u64, Option<u64>)> = Vec::new();
            for (start, len) in &steps {
                events.push((*start, None));
                events.push((start + len, Some(*start)));
            }
            events.sort_unstable();
            for (now, ends) in events {
                match ends {
                    None => cell.arrive(1, now),
                    Some(started_ns) => cell.depart(
                        &[Finished { kind: OpKind::Read, bytes: 1, failed: false, started_ns }],
                        now,
                    ),
                }
            }
            let sum = read(&cell, 5000);
            prop_assert_eq!(sum.depth_integral_ns, sum.latency_sum_ns);
            prop_assert_eq!(sum.in_flight, 0);
            prop_assert_eq!(sum.op(OpKind::Read).latency_ns.len(), steps.len() as u64);
        }
    }

    #[test]
    fn what_is_still_in_flight_counts_up_to_the_reading() {
        let cell = WorkerCell::default();
        cell.arrive(3, 100);
        let sum = read(&cell, 150);
        assert_eq!((sum.in_flight, sum.depth_integral_ns), (3, 150));
        let earlier = read(&cell, 100);
        assert_eq!(sum.average_depth_since(&earlier), 3.0);
    }

    #[test]
    fn merging_adds() {
        let cell = WorkerCell::default();
        cell.arrive(1, 0);
        let one = Finished { kind: OpKind::Write, bytes: 4096, failed: false, started_ns: 0 };
        cell.depart(&[one], 1000);
        let mut sum = read(&cell, 1000);
        sum.merge(&read(&cell, 1000));
        let writes = sum.op(OpKind::Write);
        assert_eq!((writes.completed, writes.bytes, writes.latency_ns.len()), (2, 8192, 2));
        let p50_ns = writes.latency_ns.value_at_quantile(0.5);
        assert!(p50_ns.abs_diff(1000) <= 10, "{p50_ns}");
    }
}
