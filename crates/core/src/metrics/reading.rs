//! [`Reading`]: what counters say at one moment, as plain numbers.

use std::ops::{Add, AddAssign, Range};

use super::Op;
use super::histogram::{BUCKETS, bounds_of};

/// What was counted up to one moment, or between two.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    /// The moment, in nanoseconds of CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// ∫n dt of the requests in flight, in request-nanoseconds. It wraps: only differences count.
    pub depth_integral_ns: u64,
    /// How long all requests together that have no latency have been in flight: those in flight now, up to now, and those that
    /// were abandoned, up to then. In nanoseconds. It wraps: only differences count.
    pub age_sum_ns: u64,
    /// By the kind of request, in the order of [`Op::ALL`].
    pub ops: [OpReading; Op::COUNT],
}

/// What was counted of one kind of request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OpReading {
    /// Requests that have begun.
    pub begun: u64,
    /// Requests that have ended, with success or not.
    pub ended: u64,
    /// Of these, how many failed.
    pub errors: u64,
    /// Bytes that the requests asked for when they began.
    pub bytes: u64,
    /// Of those that have ended, how many a stop left unanswered. They have no latency.
    pub abandoned: u64,
    /// Requests in flight at the moment of the reading. Below zero in a reading of one thread's counters alone, when
    /// more requests ended on that thread than began there.
    pub in_flight: i64,
    /// How long the requests took.
    pub latency: Latency,
}

/// What was counted of one kind of request, without latencies by bucket: cheap enough to be read all the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpSums {
    /// Requests that have begun.
    pub begun: u64,
    /// Requests that have ended, with success or not.
    pub ended: u64,
    /// Of these, how many failed.
    pub errors: u64,
    /// Bytes that the requests asked for when they began.
    pub bytes: u64,
    /// All latencies together, in nanoseconds.
    pub latency_sum_ns: u64,
    /// The longest latency, in nanoseconds.
    pub latency_max_ns: u64,
}

impl AddAssign<&OpSums> for OpSums {
    fn add_assign(&mut self, other: &Self) {
        self.begun = self.begun.wrapping_add(other.begun);
        self.ended = self.ended.wrapping_add(other.ended);
        self.errors = self.errors.wrapping_add(other.errors);
        self.bytes = self.bytes.wrapping_add(other.bytes);
        self.latency_sum_ns = self.latency_sum_ns.wrapping_add(other.latency_sum_ns);
        self.latency_max_ns = self.latency_max_ns.max(other.latency_max_ns);
    }
}

/// A histogram of latencies.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Latency {
    /// All latencies together, in nanoseconds.
    pub sum_ns: u64,
    /// The longest, in nanoseconds; of an interval, to the width of its bucket.
    pub max_ns: u64,
    /// How many lie in each bucket ([`bounds_of`]); empty when there are none.
    pub counts: Vec<u64>,
}

impl Reading {
    /// What was counted of requests of this kind.
    pub fn op(&self, op: Op) -> &OpReading {
        &self.ops[op as usize]
    }

    /// All kinds of request together.
    pub fn total(&self) -> OpReading {
        self.ops.iter().fold(OpReading::default(), |mut sum, op| {
            sum += op;
            sum
        })
    }

    /// Requests in flight at the moment of the reading.
    pub fn in_flight(&self) -> u64 {
        self.ops.iter().map(|op| op.in_flight).sum::<i64>().max(0) as u64
    }

    /// What was counted from `earlier`, a reading of the same counters, up to this.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            at_ns: self.at_ns,
            depth_integral_ns: self.depth_integral_ns.wrapping_sub(earlier.depth_integral_ns),
            age_sum_ns: self.age_sum_ns.wrapping_sub(earlier.age_sum_ns),
            ops: std::array::from_fn(|op| self.ops[op].since(&earlier.ops[op])),
        }
    }

    /// Of an interval ([`Reading::since`]): the requests in flight, integrated over it, in nanoseconds.
    ///
    /// A request ends at the time of its worker's turn. A reading within that turn has counted it up to a later moment, so the integral may
    /// have fallen since then: that is an interval in which nothing was in flight.
    pub fn depth_ns(&self) -> u64 {
        self.depth_integral_ns.cast_signed().max(0).cast_unsigned()
    }

    /// The average number of requests in flight from `earlier` up to this: ∫n dt / T.
    pub fn average_depth_since(&self, earlier: &Self) -> f64 {
        let elapsed_ns = self.at_ns.saturating_sub(earlier.at_ns);
        if elapsed_ns == 0 { 0.0 } else { self.since(earlier).depth_ns() as f64 / elapsed_ns as f64 }
    }

    /// Makes this a reading of a later moment, up to which everything in flight stays in flight.
    pub(super) fn advance_to(&mut self, at_ns: u64) {
        let grown_ns = self.growth_until(at_ns);
        self.depth_integral_ns = self.depth_integral_ns.wrapping_add(grown_ns);
        self.age_sum_ns = self.age_sum_ns.wrapping_add(grown_ns);
        self.at_ns = at_ns;
    }

    /// What the depth's integral and the ages grow by until a later moment when nothing begins or ends.
    fn growth_until(&self, at_ns: u64) -> u64 {
        let in_flight: i64 = self.ops.iter().map(|op| op.in_flight).sum();
        (in_flight as u64).wrapping_mul(at_ns - self.at_ns)
    }
}

/// Readings of different counters add up. If one is older, what was in flight then counts as in flight until the newer.
impl AddAssign<&Reading> for Reading {
    fn add_assign(&mut self, other: &Self) {
        let at_ns = self.at_ns.max(other.at_ns);
        self.advance_to(at_ns);
        let grown_ns = other.growth_until(at_ns);
        self.depth_integral_ns = self.depth_integral_ns.wrapping_add(other.depth_integral_ns).wrapping_add(grown_ns);
        self.age_sum_ns = self.age_sum_ns.wrapping_add(other.age_sum_ns).wrapping_add(grown_ns);
        self.ops.iter_mut().zip(&other.ops).for_each(|(sum, op)| *sum += op);
    }
}

impl Add for Reading {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self += &other;
        self
    }
}

impl OpReading {
    fn since(&self, earlier: &Self) -> Self {
        Self {
            begun: self.begun.wrapping_sub(earlier.begun),
            ended: self.ended.wrapping_sub(earlier.ended),
            errors: self.errors.wrapping_sub(earlier.errors),
            bytes: self.bytes.wrapping_sub(earlier.bytes),
            abandoned: self.abandoned.wrapping_sub(earlier.abandoned),
            in_flight: self.in_flight,
            latency: self.latency.since(&earlier.latency),
        }
    }
}

impl AddAssign<&OpReading> for OpReading {
    fn add_assign(&mut self, other: &Self) {
        self.begun = self.begun.wrapping_add(other.begun);
        self.ended = self.ended.wrapping_add(other.ended);
        self.errors = self.errors.wrapping_add(other.errors);
        self.bytes = self.bytes.wrapping_add(other.bytes);
        self.abandoned = self.abandoned.wrapping_add(other.abandoned);
        self.in_flight += other.in_flight;
        self.latency += &other.latency;
    }
}

impl Latency {
    /// How many latencies there are.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The latency in nanoseconds that a share of `quantile` (0 to 1) of the requests kept within, to 1.6 %; 0 when
    /// there are none.
    pub fn quantile_ns(&self, quantile: f64) -> u64 {
        let rank = ((self.count() as f64 * quantile).ceil() as u64).max(1);
        let mut seen = 0;
        let bucket = self.counts.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        bucket.map_or(0, |bucket| {
            let bounds = bounds_of(bucket);
            (bounds.start + (bounds.end - bounds.start) / 2).min(self.max_ns)
        })
    }

    /// What all latencies are together at least and at most, in nanoseconds, by the buckets in which they lie.
    pub(super) fn sum_bounds_ns(&self) -> (u64, u64) {
        let mut bounds = (0u64, 0u64);
        for (bucket, count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let Range { start, end } = bounds_of(bucket);
            // The last bucket has no end.
            let most_ns = if bucket == BUCKETS - 1 { u64::MAX } else { end - 1 };
            bounds.0 = bounds.0.saturating_add(count.saturating_mul(start));
            bounds.1 = bounds.1.saturating_add(count.saturating_mul(most_ns));
        }
        bounds
    }

    /// The mean in nanoseconds; 0 when there are none.
    pub fn mean_ns(&self) -> u64 {
        self.sum_ns.checked_div(self.count()).unwrap_or(0)
    }

    /// How many latencies are surely at most `bound_ns`: those in buckets that end there or before.
    pub fn count_within(&self, bound_ns: u64) -> u64 {
        let within = self.counts.iter().enumerate().take_while(|(bucket, _)| bounds_of(*bucket).end <= bound_ns + 1);
        within.map(|(_, count)| count).sum()
    }

    fn since(&self, earlier: &Self) -> Self {
        let before = earlier.counts.iter().chain(std::iter::repeat(&0));
        let counts: Vec<_> = self.counts.iter().zip(before).map(|(now, before)| now.wrapping_sub(*before)).collect();
        let longest = counts.iter().rposition(|count| *count > 0);
        Self {
            sum_ns: self.sum_ns.wrapping_sub(earlier.sum_ns),
            max_ns: longest.map_or(0, |bucket| match bucket {
                // The last bucket has no end.
                _ if bucket == BUCKETS - 1 => self.max_ns,
                _ => (bounds_of(bucket).end - 1).min(self.max_ns),
            }),
            counts,
        }
    }
}

impl AddAssign<&Latency> for Latency {
    fn add_assign(&mut self, other: &Self) {
        self.sum_ns = self.sum_ns.wrapping_add(other.sum_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
        if self.counts.is_empty() {
            self.counts.clone_from(&other.counts);
        } else {
            self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum += count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Counters, Ended};
    use super::*;

    /// Requests that took so long, one after the other from time 0 on.
    fn reads(latencies_ns: &[u64]) -> (Counters, u64) {
        let (counters, mut now_ns) = (Counters::default(), 0);
        for latency_ns in latencies_ns {
            counters.begin(Op::Read, 4096, now_ns);
            counters.end(Ended { op: Op::Read, failed: false, begun_ns: now_ns }, now_ns + latency_ns);
            now_ns += latency_ns;
        }
        (counters, now_ns)
    }

    #[test]
    fn quantiles_come_from_the_buckets() {
        let (counters, now_ns) = reads(&[[1000; 99].as_slice(), &[1_000_000]].concat());
        let latency = counters.read(now_ns).op(Op::Read).latency.clone();
        assert!((990..1010).contains(&latency.quantile_ns(0.5)), "{}", latency.quantile_ns(0.5));
        assert!((984_000..1_016_000).contains(&latency.quantile_ns(0.999)));
        assert_eq!(latency.quantile_ns(1.0), latency.quantile_ns(0.999));
        assert_eq!((latency.max_ns, latency.mean_ns()), (1_000_000, (99_000 + 1_000_000) / 100));
        assert_eq!(
            (latency.count_within(2000), latency.count_within(500), latency.count_within(u64::MAX - 1)),
            (99, 0, 100)
        );
        assert_eq!(Latency::default().quantile_ns(0.5), 0);
    }

    #[test]
    fn an_interval_has_what_came_between() {
        let (counters, now_ns) = reads(&[1_000_000]);
        let earlier = counters.read(now_ns);
        counters.begin(Op::Read, 512, now_ns);
        counters.end(Ended { op: Op::Read, failed: true, begun_ns: now_ns }, now_ns + 1000);
        counters.begin(Op::Write, 1, now_ns + 1000);
        let between = counters.read(now_ns + 1000).since(&earlier);
        let reads = between.op(Op::Read);
        assert_eq!((reads.ended, reads.bytes, reads.errors, reads.latency.sum_ns), (1, 512, 1, 1000));
        assert!((1000..1016).contains(&reads.latency.max_ns), "{}", reads.latency.max_ns);
        assert_eq!((between.in_flight(), between.depth_integral_ns), (1, 1000));
    }

    #[test]
    fn a_request_that_ended_before_the_last_reading_leaves_an_empty_queue() {
        let counters = Counters::default();
        counters.begin(Op::Read, 512, 1000);
        let earlier = counters.read(5000);
        counters.end(Ended { op: Op::Read, failed: false, begun_ns: 1000 }, 4000);
        let later = counters.read(9000);
        assert_eq!((later.since(&earlier).depth_ns(), later.average_depth_since(&earlier)), (0, 0.0));
    }

    #[test]
    fn readings_add_up_whatever_their_age() {
        let (one, now_ns) = reads(&[1000]);
        let two = Counters::default();
        two.begin(Op::Write, 4096, 0);
        let sum = one.read(now_ns) + two.read(400);
        assert_eq!((sum.at_ns, sum.depth_integral_ns, sum.in_flight()), (1000, 2000, 1));
        let total = sum.total();
        assert_eq!((total.begun, total.ended, total.bytes, total.latency.count()), (2, 1, 8192, 1));
        assert_eq!(Reading::default() + sum.clone(), sum);
    }
}
