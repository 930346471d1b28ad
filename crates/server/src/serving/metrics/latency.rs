//! Histograms of latencies, as Prometheus has them.
//!
//! Ours have 32 buckets of equal width to each power of two of nanoseconds ([`bounds_of`]).
//! - Classic buckets end at powers of two of nanoseconds, from 2^10 (1.024 µs) to 2^33 (8.59 s). So their counts are exact.
//! - Native buckets end at powers of 2^(1/8) seconds (schema 3), where none of ours ends. Each of our buckets counts where its middle lies,
//!   so a latency next to a bound may count in the neighbour: bounds are right to 1.6 %. Below 32 ns latencies are known exactly.
//!
//! Schema 5 would have as many native buckets as there are of ours, and 1.6 % would be most of a bucket's width. With schema 3 a bucket is 9 %
//! wide.

use spile_core::metrics::{BUCKETS, Latency, bounds_of};

use super::families::{Bucket, Histogram, Span};

/// The exponents of the bounds of classic buckets: powers of two, in nanoseconds.
const CLASSIC: std::ops::RangeInclusive<u32> = 10..=33;
/// 2^3 native buckets to each power of two.
const SCHEMA: i32 = 3;
/// Latencies of 0 ns, and nothing else, are in the bucket of zero.
const ZERO_THRESHOLD_S: f64 = 0.5e-9;
const NS_IN_S: f64 = 1e9;

/// Both kinds of histogram of these latencies, in seconds.
pub fn histogram(latency: &Latency) -> Histogram {
    let (spans, deltas) = native(latency);
    Histogram {
        count: Some(latency.count()),
        sum: Some(latency.sum_ns as f64 / NS_IN_S),
        buckets: CLASSIC.map(|exponent| bucket(latency, 1 << exponent)).collect(),
        schema: Some(SCHEMA),
        zero_threshold: Some(ZERO_THRESHOLD_S),
        zero_count: Some(latency.counts.first().copied().unwrap_or(0)),
        spans,
        deltas,
    }
}

/// The classic bucket of what is shorter than `end_ns`, where one of our buckets ends.
fn bucket(latency: &Latency, end_ns: u64) -> Bucket {
    Bucket { cumulative_count: Some(latency.count_within(end_ns - 1)), upper_bound: Some(end_ns as f64 / NS_IN_S) }
}

/// The native bucket of one of our buckets but the first: bucket `i` has what is above 2^((i-1)/8) s, up to 2^(i/8) s.
fn native_index(bucket: usize) -> i32 {
    let bounds = bounds_of(bucket);
    // The last nanosecond of the bucket is `end - 1`.
    let middle_ns = (bounds.start + bounds.end - 1) as f64 / 2.0;
    // Below 2^36 ns this is far from where it could be rounded to another whole number, but at 2^0.
    ((middle_ns / NS_IN_S).log2() * f64::from(1 << SCHEMA)).ceil() as i32
}

/// The native buckets that are not empty.
fn native(latency: &Latency) -> (Vec<Span>, Vec<i64>) {
    let (mut spans, mut deltas): (Vec<Span>, Vec<i64>) = (Vec::new(), Vec::new());
    let (mut last_index, mut last_count, mut count) = (None, 0i64, 0i64);
    let mut add = |index: i32, count: i64| {
        match (last_index, spans.last_mut()) {
            (Some(last), Some(Span { len: Some(len), .. })) if last + 1 == index => *len += 1,
            _ => spans.push(Span { offset: Some(index - last_index.map_or(0, |last| last + 1)), len: Some(1) }),
        }
        deltas.push(count - last_count);
        (last_index, last_count) = (Some(index), count);
    };
    let filled = (1..BUCKETS).zip(latency.counts.iter().skip(1)).filter(|(_, count)| **count > 0);
    let mut filled = filled.map(|(bucket, count)| (native_index(bucket), *count as i64)).peekable();
    while let Some((index, more)) = filled.next() {
        count += more;
        if filled.peek().is_none_or(|(next, _)| *next != index) {
            add(index, std::mem::take(&mut count));
        }
    }
    (spans, deltas)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use spile_core::metrics::{Counters, Ended, Op};

    use super::*;

    fn of(latencies_ns: &[u64]) -> Histogram {
        let counters = Counters::default();
        for latency_ns in latencies_ns {
            counters.begin(Op::Read, 1, 0);
            counters.end(Ended { op: Op::Read, failed: false, begun_ns: 0 }, *latency_ns);
        }
        histogram(&counters.read(u64::MAX >> 8).op(Op::Read).latency)
    }

    /// The native buckets: where each begins and ends in seconds, and its count.
    fn natives(histogram: &Histogram) -> Vec<(f64, f64, i64)> {
        let (mut index, mut count, mut deltas) = (0, 0, histogram.deltas.iter());
        let mut out = Vec::new();
        for span in &histogram.spans {
            index += span.offset.unwrap();
            for _ in 0..span.len.unwrap() {
                count += deltas.next().unwrap();
                out.push((f64::from(index - 1), f64::from(index), count));
                index += 1;
            }
        }
        assert_eq!(deltas.next(), None);
        out.into_iter().map(|(from, to, count)| ((from / 8.0).exp2(), (to / 8.0).exp2(), count)).collect()
    }

    proptest! {
        #[test]
        fn each_latency_is_in_a_bucket_of_its_own_size(latencies_ns in prop::collection::vec(0u64..1 << 36, 1..50)) {
            let histogram = of(&latencies_ns);
            for bucket in &histogram.buckets {
                let bound_ns = (bucket.upper_bound.unwrap() * 1e9).round() as u64;
                let within = latencies_ns.iter().filter(|latency_ns| **latency_ns < bound_ns).count();
                prop_assert_eq!(bucket.cumulative_count, Some(within as u64));
            }
            let natives = natives(&histogram);
            let zeroes = latencies_ns.iter().filter(|latency_ns| **latency_ns == 0).count();
            prop_assert_eq!(histogram.zero_count, Some(zeroes as u64));
            prop_assert_eq!(natives.iter().map(|(_, _, count)| *count).sum::<i64>(), (latencies_ns.len() - zeroes) as i64);
            prop_assert!(natives.iter().all(|(_, _, count)| *count > 0));
            for latency_ns in latencies_ns.iter().filter(|latency_ns| **latency_ns > 0) {
                let latency_s = *latency_ns as f64 / 1e9;
                let fits = |(from, to, _): &(f64, f64, i64)| latency_s > from / 1.016 && latency_s <= to * 1.016;
                prop_assert!(natives.iter().any(fits), "{} in {:?}", latency_s, natives);
            }
        }
    }

    #[test]
    fn what_is_short_is_known_exactly_and_nothing_is_lost_at_the_ends() {
        for latency_ns in 1..32u64 {
            let [(from, to, 1)] = natives(&of(&[latency_ns]))[..] else { panic!("{latency_ns}") };
            let latency_s = latency_ns as f64 / 1e9;
            assert!(from < latency_s && latency_s <= to, "{latency_ns}: {from} {to}");
        }
        let ends = of(&[0, u64::MAX >> 9]);
        assert_eq!((ends.count, ends.zero_count), (Some(2), Some(1)));
        assert_eq!(ends.buckets.iter().map(|bucket| bucket.cumulative_count.unwrap()).max(), Some(1));
        assert_eq!(natives(&ends).len(), 1);
        assert_eq!((of(&[]).count, of(&[]).spans), (Some(0), Vec::new()));
        assert_eq!(of(&[]).buckets.len(), 24);
    }
}
