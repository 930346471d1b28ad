//! [`Counters`]: what one writer counts.
//!
//! The requests in flight are integrated over time without sampling: at a time T the integral is Σ(ends) − Σ(begins) +
//! (begun − ended)·T. Each request adds its begin and its end to two sums, whose arithmetic wraps. A count and its sum
//! have to be read together, which a [`Version`] sees to.
//!
//! A third sum, of the begins of those that have ended, tells how old all that is in flight is together: what Little's law
//! needs at the edges of an interval ([`super::little`]).
//!
//! A request that never has to wait takes no time: it is one more in a count of its own, which needs neither the sums nor the
//! version.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::histogram::{BUCKETS, Histogram};
use super::version::Version;
use super::{Latency, Op, OpReading, OpSums, Reading, is_counting, now_ns};

/// How often a reader looks again until counts, times and all buckets belong together. A writer may change them more often than they can
/// be copied; then the counts and times belong together, and the buckets may have what has ended a moment later.
const LOOKS: usize = 8;

/// Adds to an atomic that has one writer at a time: no locked instruction.
#[inline]
pub fn add(to: &AtomicU64, count: u64) {
    to.store(to.load(Relaxed).wrapping_add(count), Relaxed);
}

#[derive(Debug, Default)]
struct OpCounters {
    begun: AtomicU64,
    ended: AtomicU64,
    /// Requests that began and ended at the same moment. They are not among the others.
    at_once: AtomicU64,
    errors: AtomicU64,
    bytes: AtomicU64,
    latency: Histogram,
}

/// Counts requests for one writer at a time: whoever writes next must have seen the last one's end. Anybody may read.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Counters {
    /// It changes when a request begins or ends.
    version: Version,
    begin_sum_ns: AtomicU64,
    end_sum_ns: AtomicU64,
    /// When those began that have ended. One that was abandoned counts as begun when it was abandoned.
    ended_begin_sum_ns: AtomicU64,
    /// Requests that were abandoned. They are among those that have ended, and have no latency.
    abandoned: [AtomicU64; Op::COUNT],
    ops: [OpCounters; Op::COUNT],
}

/// A request that begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun {
    /// What it does.
    pub op: Op,
    /// How many bytes it is for.
    pub len_bytes: u64,
    /// When it begins.
    pub begun_ns: u64,
}

/// A request that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// What it did.
    pub op: Op,
    /// It failed.
    pub failed: bool,
    /// When it began, as [`Counters::begin`] was told.
    pub begun_ns: u64,
}

/// Counts and sums of times that were read together.
struct Times {
    begun: [u64; Op::COUNT],
    ended: [u64; Op::COUNT],
    abandoned: [u64; Op::COUNT],
    latency_ns: [u64; Op::COUNT],
    begin_ns: u64,
    end_ns: u64,
    ended_begin_ns: u64,
}

impl Counters {
    /// A request for `len_bytes` bytes begins.
    #[inline]
    pub fn begin(&self, op: Op, len_bytes: u64, now_ns: u64) {
        if !is_counting() {
            return;
        }
        let counters = &self.ops[op as usize];
        self.version.change(|| {
            add(&counters.begun, 1);
            add(&self.begin_sum_ns, now_ns);
        });
        add(&counters.bytes, len_bytes);
    }

    /// A request ends, here or where another one of the same [`Meter`] began it.
    #[inline]
    pub fn end(&self, request: Ended, now_ns: u64) {
        if is_counting() {
            self.version.change(|| self.note_ends(request, 1, now_ns));
        }
    }

    /// A request for `len_bytes` bytes begins and ends at the same moment: it takes no time.
    #[inline]
    pub fn begin_and_end(&self, op: Op, len_bytes: u64, failed: bool) {
        let counters = &self.ops[op as usize];
        add(&counters.at_once, 1);
        add(&counters.bytes, len_bytes);
        if failed {
            add(&counters.errors, 1);
        }
    }

    /// Several requests begin, with the number of equal ones. This costs less than to begin them one by one.
    #[inline]
    pub fn begin_all(&self, requests: impl IntoIterator<Item = (Begun, u64)>) {
        if !is_counting() {
            return requests.into_iter().for_each(drop);
        }
        self.version.change(|| {
            for (request, count) in requests {
                let counters = &self.ops[request.op as usize];
                add(&counters.begun, count);
                add(&counters.bytes, count * request.len_bytes);
                add(&self.begin_sum_ns, count.wrapping_mul(request.begun_ns));
            }
        });
    }

    /// Several requests end at the same time, with the number of equal ones. This costs less than to end them one by one.
    #[inline]
    pub fn end_all(&self, requests: impl IntoIterator<Item = (Ended, u64)>, now_ns: u64) {
        if !is_counting() {
            return requests.into_iter().for_each(drop);
        }
        self.version.change(|| {
            for (request, count) in requests {
                self.note_ends(request, count, now_ns);
            }
        });
    }

    /// No request that is in flight will ever end: each counts as ended, without a latency. Only where all that begins
    /// here ends here as well.
    pub fn abandon(&self, now_ns: u64) {
        self.version.change(|| {
            for (op, abandoned) in self.ops.iter().zip(&self.abandoned) {
                let left = op.begun.load(Relaxed).wrapping_sub(op.ended.load(Relaxed));
                add(&op.ended, left);
                add(abandoned, left);
                add(&self.end_sum_ns, left.wrapping_mul(now_ns));
                add(&self.ended_begin_sum_ns, left.wrapping_mul(now_ns));
            }
        });
    }

    /// Notes the end of `count` equal requests; part of a change.
    #[inline]
    fn note_ends(&self, request: Ended, count: u64, now_ns: u64) {
        let counters = &self.ops[request.op as usize];
        add(&counters.ended, count);
        add(&self.end_sum_ns, count.wrapping_mul(now_ns));
        add(&self.ended_begin_sum_ns, count.wrapping_mul(request.begun_ns));
        if request.failed {
            add(&counters.errors, count);
        }
        counters.latency.note(now_ns.saturating_sub(request.begun_ns), count);
    }

    /// What all of these have counted together, up to now.
    pub fn read_all<'a>(counters: impl IntoIterator<Item = &'a Self>) -> Reading {
        let mut sum = Reading::default();
        counters.into_iter().for_each(|counters| sum += &counters.read(0));
        // The clock is read last: nothing that was counted lies after the moment of the reading.
        sum.advance_to(now_ns());
        sum
    }

    /// What all of these have counted together, and what each has counted: all up to the same moment, now.
    pub fn read_each<'a>(counters: impl IntoIterator<Item = &'a Self>) -> (Reading, Vec<Reading>) {
        let mut each: Vec<_> = counters.into_iter().map(|counters| counters.read(0)).collect();
        // The clock is read last, as above.
        let now_ns = now_ns();
        each.iter_mut().for_each(|reading| reading.advance_to(now_ns));
        let mut sum = Reading { at_ns: now_ns, ..Reading::default() };
        each.iter().for_each(|reading| sum += reading);
        (sum, each)
    }

    /// What was counted, with everything in flight counted up to `now_ns`, which is not before the last begin or end.
    pub fn read(&self, now_ns: u64) -> Reading {
        let (times, mut buckets) = self.snapshot();
        let ops: [OpReading; Op::COUNT] =
            std::array::from_fn(|op| self.ops[op].read(&times, std::mem::take(&mut buckets[op]), op));
        let in_flight = ops.iter().fold(0u64, |sum, op| sum.wrapping_add(op.in_flight.cast_unsigned()));
        let now_sum = in_flight.wrapping_mul(now_ns);
        let depth_integral_ns = times.end_ns.wrapping_sub(times.begin_ns).wrapping_add(now_sum);
        let age_sum_ns = times.ended_begin_ns.wrapping_sub(times.begin_ns).wrapping_add(now_sum);
        Reading { at_ns: now_ns, depth_integral_ns, age_sum_ns, ops }
    }

    /// What was counted of requests of this kind, without latencies by bucket.
    pub fn sums(&self, op: Op) -> OpSums {
        let counters = &self.ops[op as usize];
        let at_once = counters.at_once.load(Relaxed);
        OpSums {
            begun: counters.begun.load(Relaxed) + at_once,
            ended: counters.ended.load(Relaxed) + at_once,
            errors: counters.errors.load(Relaxed),
            bytes: counters.bytes.load(Relaxed),
            latency_sum_ns: counters.latency.sum_ns.load(Relaxed),
            latency_max_ns: counters.latency.max_ns.load(Relaxed),
        }
    }

    /// Counts and times with the latencies by bucket, by kind of request ([`LOOKS`]).
    fn snapshot(&self) -> (Times, [Vec<u64>; Op::COUNT]) {
        let buckets = || std::array::from_fn(|op| self.ops[op].latency.counts());
        let mut looks = (0..LOOKS).map(|_| self.version.try_read(|| (self.times(), buckets())));
        looks.find_map(|found| found).unwrap_or_else(|| (self.version.read(|| self.times()), buckets()))
    }

    fn times(&self) -> Times {
        Times {
            begun: std::array::from_fn(|op| self.ops[op].begun.load(Relaxed)),
            ended: std::array::from_fn(|op| self.ops[op].ended.load(Relaxed)),
            abandoned: std::array::from_fn(|op| self.abandoned[op].load(Relaxed)),
            latency_ns: std::array::from_fn(|op| self.ops[op].latency.sum_ns.load(Relaxed)),
            begin_ns: self.begin_sum_ns.load(Relaxed),
            end_ns: self.end_sum_ns.load(Relaxed),
            ended_begin_ns: self.ended_begin_sum_ns.load(Relaxed),
        }
    }
}

/// Adds one to a list of items and their numbers; equal neighbours are one. Requests of one turn are often equal.
#[inline]
pub fn push_run<T: PartialEq>(runs: &mut Vec<(T, u64)>, item: T) {
    match runs.last_mut() {
        Some((last, count)) if *last == item => *count += 1,
        _ => runs.push((item, 1)),
    }
}

/// Equal neighbours as one, with their number, as of [`push_run`].
#[inline]
pub fn runs<T: Copy + PartialEq>(items: impl IntoIterator<Item = T>) -> impl Iterator<Item = (T, u64)> {
    let mut items = items.into_iter();
    let mut next = items.next();
    std::iter::from_fn(move || {
        let (first, mut count) = (next?, 1);
        loop {
            next = items.next();
            if next != Some(first) {
                return Some((first, count));
            }
            count += 1;
        }
    })
}

impl OpCounters {
    fn read(&self, times: &Times, mut counts: Vec<u64>, op: usize) -> OpReading {
        let at_once = self.at_once.load(Relaxed);
        if at_once > 0 {
            counts.resize(BUCKETS, 0);
            counts[0] += at_once;
        }
        OpReading {
            begun: times.begun[op].wrapping_add(at_once),
            ended: times.ended[op].wrapping_add(at_once),
            errors: self.errors.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            abandoned: times.abandoned[op],
            in_flight: times.begun[op].wrapping_sub(times.ended[op]).cast_signed(),
            latency: Latency { sum_ns: times.latency_ns[op], max_ns: self.latency.max_ns.load(Relaxed), counts },
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ended(begun_ns: u64) -> Ended {
        Ended { op: Op::Read, failed: false, begun_ns }
    }

    proptest! {
        /// Little's law: when all have ended, the integral of the depth is the sum of the latencies.
        #[test]
        fn depth_and_latency_agree(mut steps in prop::collection::vec((0u64..1000, 1u64..1000), 1..40)) {
            let counters = Counters::default();
            steps.sort_unstable();
            let begins = steps.iter().map(|(begin, _)| (*begin, None));
            let mut events: Vec<_> = begins.chain(steps.iter().map(|(begin, len)| (begin + len, Some(*begin)))).collect();
            events.sort_unstable();
            for (now_ns, ends) in events {
                match ends {
                    None => counters.begin(Op::Read, 1, now_ns),
                    Some(begun_ns) => counters.end(ended(begun_ns), now_ns),
                }
            }
            let reading = counters.read(5000);
            let reads = reading.op(Op::Read);
            prop_assert_eq!(reading.depth_integral_ns, reads.latency.sum_ns);
            prop_assert_eq!((reading.in_flight(), reads.ended), (0, steps.len() as u64));
        }
    }

    #[test]
    fn beginning_several_is_beginning_each() {
        let (together, each) = (Counters::default(), Counters::default());
        let requests = [(Op::Read, 512), (Op::Read, 512), (Op::Write, 512), (Op::Read, 4096)];
        let requests = requests.map(|(op, len_bytes)| Begun { op, len_bytes, begun_ns: len_bytes });
        together.begin_all(runs(requests));
        requests.into_iter().for_each(|request| each.begin(request.op, request.len_bytes, request.begun_ns));
        assert_eq!(together.read(9000), each.read(9000));
        assert_eq!(together.read(9000).op(Op::Read).begun, 3);
    }

    #[test]
    fn a_request_without_a_wait_is_one_that_takes_no_time() {
        let (at_once, each) = (Counters::default(), Counters::default());
        for failed in [false, true, false] {
            at_once.begin_and_end(Op::Write, 512, failed);
            each.begin(Op::Write, 512, 70);
            each.end(Ended { op: Op::Write, failed, begun_ns: 70 }, 70);
        }
        assert_eq!(at_once.read(90), each.read(90));
        assert_eq!((at_once.read(90).op(Op::Write).ended, at_once.read(90).op(Op::Write).errors), (3, 1));
    }

    #[test]
    fn ending_several_is_ending_each() {
        let (together, each) = (Counters::default(), Counters::default());
        let requests = [10, 20, 35].map(|begun_ns| Ended { failed: begun_ns == 20, ..ended(begun_ns) });
        for counters in [&together, &each] {
            requests.iter().for_each(|request| counters.begin(Op::Read, 8, request.begun_ns));
        }
        together.end_all(runs(requests), 50);
        requests.into_iter().for_each(|request| each.end(request, 50));
        assert_eq!(together.read(60), each.read(60));
        assert_eq!(together.read(60).depth_integral_ns, 40 + 30 + 15);
    }

    #[test]
    fn what_is_in_flight_counts_up_to_the_reading() {
        let counters = Counters::default();
        (0..3).for_each(|_| counters.begin(Op::Write, 512, 100));
        let reading = counters.read(150);
        assert_eq!((reading.in_flight(), reading.depth_integral_ns), (3, 150));
        assert_eq!(reading.average_depth_since(&counters.read(100)), 3.0);
    }

    #[test]
    fn nothing_is_in_flight_after_it_was_abandoned() {
        let counters = Counters::default();
        counters.begin(Op::Read, 512, 10);
        counters.begin(Op::Flush, 0, 10);
        counters.end(ended(10), 20);
        counters.abandon(50);
        let reading = counters.read(90);
        assert_eq!((reading.in_flight(), reading.depth_integral_ns), (0, 10 + 40));
        assert_eq!((reading.op(Op::Flush).ended, reading.op(Op::Flush).latency.count()), (1, 0));
    }

    #[test]
    fn each_and_all_are_read_at_one_moment() {
        let counters: [Counters; 3] = Default::default();
        let begun_ns = now_ns();
        counters.iter().zip(1..).for_each(|(one, count)| (0..count).for_each(|_| one.begin(Op::Write, 1, begun_ns)));
        let (sum, each) = Counters::read_each(&counters);
        assert!(each.iter().all(|reading| reading.at_ns == sum.at_ns), "{each:?}");
        assert_eq!(each.iter().map(Reading::in_flight).collect::<Vec<_>>(), [1, 2, 3]);
        let added = each.iter().fold(Reading::default(), |added, reading| added + reading.clone());
        assert_eq!(added, sum);
        assert_eq!(sum.depth_integral_ns, 6 * (sum.at_ns - begun_ns));
    }

    #[test]
    fn latencies_are_read_with_their_count() {
        let counters = Counters::default();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for now_ns in 1..1000 {
                    counters.begin(Op::Read, 1, now_ns);
                    counters.end(ended(now_ns), now_ns + 77);
                    // A writer without rest changes more often than all buckets can be copied.
                    std::thread::sleep(std::time::Duration::from_micros(20));
                }
            });
            let (mut looks, mut torn) = (0, 0);
            while !writer.is_finished() {
                let reads = counters.read(0).op(Op::Read).clone();
                looks += 1;
                torn += u64::from(reads.latency.count() != reads.ended);
            }
            assert!(torn * 20 <= looks, "{torn} of {looks}");
        });
    }

    #[test]
    fn a_count_is_never_read_without_its_time() {
        let counters = Counters::default();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for now_ns in 1 << 40..(1 << 40) + 200_000 {
                    counters.begin(Op::Read, 1, now_ns);
                    counters.end(ended(now_ns), now_ns);
                }
            });
            for _ in 0..2000 {
                // One request at most is in flight, for no time: a count without its time would add a whole 2^40.
                let integral = counters.read((1 << 40) + 200_000).depth_integral_ns;
                assert!(integral <= 200_000, "{integral}");
            }
        });
    }
}
