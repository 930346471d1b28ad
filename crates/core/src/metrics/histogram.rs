//! The buckets of latencies: exact below 32 ns, then 32 to each power of two, so that a latency is known to 1.6 %.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::counters::add;

/// Each power of two is cut into so many buckets.
const STEPS: u64 = 32;
/// How many buckets there are. Latencies up to 2^36 ns (69 s) are told apart; the last bucket holds all longer ones.
pub const BUCKETS: usize = (STEPS * 32) as usize;

/// The bucket of a latency in nanoseconds.
#[inline]
pub fn bucket_of(latency_ns: u64) -> usize {
    // Below 32 ns there is nothing to shift.
    let shift = u64::from((latency_ns | STEPS).ilog2() - STEPS.ilog2());
    let at = shift * STEPS + (latency_ns >> shift);
    (at as usize).min(BUCKETS - 1)
}

/// The latencies of a bucket, in nanoseconds. The last bucket has no end but is given one as the others are.
pub fn bounds_of(bucket: usize) -> Range<u64> {
    let bucket = bucket as u64;
    if bucket < STEPS {
        return bucket..bucket + 1;
    }
    let shift = bucket / STEPS - 1;
    let start = (STEPS + bucket % STEPS) << shift;
    start..start + (1 << shift)
}

/// The latencies of one kind of request. It has one writer at a time.
#[derive(Debug, Default)]
pub(super) struct Histogram {
    pub(super) sum_ns: AtomicU64,
    pub(super) max_ns: AtomicU64,
    /// Made at the first latency: most counters see two or three kinds of request.
    buckets: OnceLock<Box<[AtomicU64; BUCKETS]>>,
}

impl Histogram {
    #[inline]
    pub(super) fn note(&self, latency_ns: u64, count: u64) {
        add(&self.sum_ns, latency_ns.wrapping_mul(count));
        if latency_ns > self.max_ns.load(Relaxed) {
            self.max_ns.store(latency_ns, Relaxed);
        }
        add(&self.buckets()[bucket_of(latency_ns)], count);
    }

    #[inline]
    fn buckets(&self) -> &[AtomicU64; BUCKETS] {
        self.buckets.get_or_init(|| Box::new([const { AtomicU64::new(0) }; BUCKETS]))
    }

    /// The counts by bucket; nothing when there never was a latency.
    pub(super) fn counts(&self) -> Vec<u64> {
        self.buckets.get().into_iter().flat_map(|buckets| buckets.iter()).map(|count| count.load(Relaxed)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_latency_lies_within_its_bucket(latency_ns in 0u64..1 << 36) {
            let bounds = bounds_of(bucket_of(latency_ns));
            prop_assert!(bounds.contains(&latency_ns), "{:?} for {}", bounds, latency_ns);
            let middle = (bounds.start + bounds.end) / 2;
            prop_assert!(middle.abs_diff(latency_ns) * 60 <= latency_ns, "{} for {}", middle, latency_ns);
        }

        #[test]
        fn buckets_rise_with_latency(latency_ns in 0u64..1 << 38) {
            prop_assert!(bucket_of(latency_ns) <= bucket_of(latency_ns + 1));
        }
    }

    #[test]
    fn the_last_bucket_takes_the_rest() {
        assert_eq!(bucket_of((1 << 36) - 1), BUCKETS - 1);
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert_eq!(bounds_of(BUCKETS - 1).end, 1 << 36);
    }
}
