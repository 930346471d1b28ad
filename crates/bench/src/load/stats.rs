//! What a connection counts while it runs, and what of it others may see meanwhile.

use std::sync::atomic::{AtomicU64, Ordering};

use hdrhistogram::Histogram;

/// The longest latency told apart, in nanoseconds: longer ones count as this.
const LONGEST_NS: u64 = 120_000_000_000;

/// One direction's requests.
#[derive(Clone, Debug)]
pub struct Lane {
    /// Completed requests.
    pub ios: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Their latencies in nanoseconds, to three digits.
    pub latency_ns: Histogram<u64>,
}

impl Lane {
    fn new() -> Self {
        let latency_ns = Histogram::new_with_bounds(1, LONGEST_NS, 3).expect("constant bounds");
        Self { ios: 0, bytes: 0, latency_ns }
    }

    /// Counts one completed request.
    pub fn record(&mut self, latency_ns: u64, len_bytes: u32) {
        self.ios += 1;
        self.bytes += u64::from(len_bytes);
        self.latency_ns.saturating_record(latency_ns);
    }

    fn merge(&mut self, other: &Lane) {
        self.ios += other.ios;
        self.bytes += other.bytes;
        self.latency_ns.add(&other.latency_ns).expect("histograms of the same bounds");
    }
}

/// The figures of one connection, or of several together.
#[derive(Clone, Debug)]
pub struct Stats {
    /// Reads.
    pub read: Lane,
    /// Writes.
    pub write: Lane,
    /// Flushes.
    pub flush: Lane,
    /// ∫ n dt: the requests in flight, integrated over time, in request-nanoseconds.
    pub depth_integral_ns: u128,
    /// When the first request was issued and the last completed, in nanoseconds of the run.
    pub span_ns: Option<(u64, u64)>,
}

impl Default for Stats {
    fn default() -> Self {
        Self::new()
    }
}

impl Stats {
    /// Nothing counted.
    pub fn new() -> Self {
        let (read, write, flush) = (Lane::new(), Lane::new(), Lane::new());
        Self { read, write, flush, depth_integral_ns: 0, span_ns: None }
    }

    /// Notes that at `now_ns` the requests in flight changed from `before` to `after`.
    pub fn depth_is(&mut self, now_ns: u64, before: usize, after: usize) {
        if before == after {
            return;
        }
        let (_, last_ns) = self.span_ns.get_or_insert((now_ns, now_ns));
        self.depth_integral_ns += before as u128 * u128::from(now_ns - *last_ns);
        *last_ns = now_ns;
    }

    /// Adds another connection's.
    pub fn merge(&mut self, other: &Stats) {
        self.read.merge(&other.read);
        self.write.merge(&other.write);
        self.flush.merge(&other.flush);
        self.depth_integral_ns += other.depth_integral_ns;
        self.span_ns = match (self.span_ns, other.span_ns) {
            (Some((a, b)), Some((c, d))) => Some((a.min(c), b.max(d))),
            (one, other) => one.or(other),
        };
    }

    /// All three lanes.
    pub fn lanes(&self) -> [&Lane; 3] {
        [&self.read, &self.write, &self.flush]
    }
}

/// What the progress line reads while a connection runs; written once a round.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Counters {
    /// Completed reads.
    pub reads: AtomicU64,
    /// Completed writes.
    pub writes: AtomicU64,
    /// Bytes of both.
    pub bytes: AtomicU64,
}

impl Counters {
    /// Shows the present state.
    pub fn publish(&self, stats: &Stats) {
        self.reads.store(stats.read.ios, Ordering::Relaxed);
        self.writes.store(stats.write.ios, Ordering::Relaxed);
        self.bytes.store(stats.read.bytes + stats.write.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_depth_is_integrated_over_time() {
        let mut stats = Stats::new();
        stats.depth_is(100, 0, 2);
        stats.depth_is(150, 2, 1);
        stats.depth_is(200, 1, 0);
        stats.depth_is(900, 0, 4);
        stats.depth_is(1000, 4, 0);
        assert_eq!(stats.depth_integral_ns, 2 * 50 + 50 + 4 * 100);
        assert_eq!(stats.span_ns, Some((100, 1000)));
    }

    #[test]
    fn lanes_add_up() {
        let (mut a, mut b) = (Stats::new(), Stats::new());
        a.read.record(1000, 4096);
        b.read.record(3000, 4096);
        a.merge(&b);
        assert_eq!((a.read.ios, a.read.bytes, a.read.latency_ns.max()), (2, 8192, 3001));
    }
}
