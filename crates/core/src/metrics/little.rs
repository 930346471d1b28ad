//! [`little`]: the check that what was counted of an interval fits together.
//!
//! Little's law: the average number of requests in flight L is the rate λ at which requests end, times the average time W that they
//! take. In an interval of the length T, λ·W·T is the sum of the latencies of what ended in it. That is exact only when nothing is in flight
//! at either end. Else the ages of what is in flight at the end belong to the interval, and the ages of what was in flight at its
//! begin do not: L·T = λ·W·T + ages at the end − ages at the begin.
//!
//! The check compares numbers that were counted apart from each other:
//!
//! - Of each kind of request no more have ended than began. A request that ends twice is found as soon as no other one of its kind is in
//!   flight.
//! - Of each kind there is one latency in the histogram for each request that has ended, but for those that were abandoned.
//! - L·T comes from the moments when requests began and ended, W from the buckets of the histogram, each latency to the width of its bucket.
//!
//! Where something is in flight at either end, the ages come from the moments that the latencies come from. Then the last comparison finds a
//! wrong latency, but not a request whose begin was told wrongly at its end; that one is found in an interval without such edges.
//!
//! A request that never ends cannot be told from one that takes very long: it stays in flight, and its age grows.

use std::fmt;

use super::{Op, Reading};

/// The share by which numbers may part.
const TOLERANCE: f64 = 0.02;

/// How the counts of an interval contradict each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gap {
    /// More requests of a kind have ended than began.
    Ended {
        /// The kind.
        op: Op,
        /// How many more, since counting began.
        surplus: u64,
        /// How many ended in the interval.
        ended: u64,
    },
    /// Requests of a kind were answered, and another number of latencies was noted.
    Latencies {
        /// The kind.
        op: Op,
        /// Requests that ended and were not abandoned.
        answered: u64,
        /// Latencies in the histogram.
        noted: u64,
    },
    /// The requests in flight and the latencies part, against Little's law.
    Depth {
        /// Requests in flight, integrated over the interval, without the ages at its edges, in request-nanoseconds: what the latencies
        /// should be together.
        depth_ns: u64,
        /// The latencies together, in nanoseconds: the value next to `depth_ns` that the buckets allow.
        latencies_ns: u64,
    },
}

impl Gap {
    /// By how much of the larger number both part: 0 to 1.
    pub fn share(&self) -> f64 {
        let (one, other) = match *self {
            Self::Ended { surplus, ended, .. } => (ended.max(surplus), ended.max(surplus) - surplus),
            Self::Latencies { answered, noted, .. } => (answered, noted),
            Self::Depth { depth_ns, latencies_ns } => (depth_ns, latencies_ns),
        };
        let larger = one.max(other);
        if larger == 0 { 0.0 } else { one.abs_diff(other) as f64 / larger as f64 }
    }
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended { op, surplus, .. } => write!(f, "{surplus} more {} requests ended than began", op.name()),
            Self::Latencies { op, answered, noted } => {
                write!(f, "{answered} {} requests were answered, but {noted} latencies were noted", op.name())
            }
            Self::Depth { depth_ns, latencies_ns } => write!(
                f,
                "the average queue size and the latencies part by {:.1} % (Little's law): {:.3} s of requests in flight, {:.3} s of latencies",
                100.0 * self.share(),
                *depth_ns as f64 / 1e9,
                *latencies_ns as f64 / 1e9,
            ),
        }
    }
}

/// Checks what was counted in `interval`, which [`Reading::since`] has made, or of all that was ever counted. Returns the first
/// contradiction: more ends than begins at all, else numbers that part by more than 2 %.
pub fn little(interval: &Reading) -> Option<Gap> {
    let of_kinds = || Op::ALL.into_iter().map(|op| (op, interval.op(op)));
    let ended_twice = of_kinds().find(|(_, reading)| reading.in_flight < 0).map(|(op, reading)| Gap::Ended {
        op,
        surplus: reading.in_flight.unsigned_abs(),
        ended: reading.ended,
    });
    let parts = |gap: &Gap| gap.share() > TOLERANCE;
    let mut noted = of_kinds().map(|(op, reading)| Gap::Latencies {
        op,
        answered: reading.ended.wrapping_sub(reading.abandoned),
        noted: reading.latency.count(),
    });
    ended_twice.or_else(|| noted.find(parts)).or_else(|| Some(depth(interval)).filter(parts))
}

/// The depth and the latencies of `interval`, whether or not they part.
fn depth(interval: &Reading) -> Gap {
    let total = interval.total();
    let has_edges = total.in_flight != 0 || total.begun != total.ended || total.abandoned != 0;
    let edges_ns = if has_edges { interval.age_sum_ns } else { 0 };
    let depth_ns = interval.depth_integral_ns.wrapping_sub(edges_ns);
    let (least_ns, most_ns) = total.latency.sum_bounds_ns();
    Gap::Depth { depth_ns, latencies_ns: depth_ns.clamp(least_ns, most_ns) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Counters, Ended, Op};
    use super::*;

    fn ended(begun_ns: u64) -> Ended {
        Ended { op: Op::Read, failed: false, begun_ns }
    }

    proptest! {
        /// Also where requests are in flight at both ends of the interval.
        #[test]
        fn it_holds_between_any_two_moments(
            requests in prop::collection::vec((0u64..1000, 1u64..1000), 1..40),
            edges in (0u64..1000, 1u64..1000),
        ) {
            let (first, last) = (edges.0, edges.0 + edges.1);
            let begins = requests.iter().map(|(begin, _)| (*begin, None));
            let mut events: Vec<_> = begins.chain(requests.iter().map(|(begin, len)| (begin + len, Some(*begin)))).collect();
            events.sort_unstable();
            let counters = Counters::default();
            let mut readings = Vec::new();
            for edge in [first, last] {
                let rest = events.iter().position(|(at, _)| *at > edge).unwrap_or(events.len());
                for (now_ns, begun) in events.drain(..rest) {
                    match begun {
                        None => counters.begin(Op::Read, 1, now_ns),
                        Some(begun_ns) => counters.end(ended(begun_ns), now_ns),
                    }
                }
                readings.push(counters.read(edge));
            }
            let interval = readings[1].since(&readings[0]);
            prop_assert_eq!(little(&interval), None);
            let overlap = |(begin, len): &(u64, u64)| (begin + len).min(last).saturating_sub(*begin.max(&first));
            prop_assert_eq!(interval.depth_integral_ns, requests.iter().map(overlap).sum::<u64>());
        }
    }

    #[test]
    fn a_latency_that_was_noted_wrongly_is_found() {
        let counters = Counters::default();
        (0..100).for_each(|_| counters.begin(Op::Read, 512, 1000));
        counters.end(ended(2000), 2000);
        (0..99).for_each(|_| counters.end(ended(1000), 2000));
        let before = counters.read(3000);
        assert_eq!(little(&before), None, "1 % is not told");
        (0..100).for_each(|_| counters.begin(Op::Read, 512, 3000));
        (0..100).for_each(|_| counters.end(ended(3500), 4000));
        let gap = little(&counters.read(5000).since(&before)).expect("half of it is missing");
        // 500 ns lie in the bucket that ends at 503 ns.
        assert_eq!(gap, Gap::Depth { depth_ns: 100_000, latencies_ns: 50_300 });
        assert!(gap.to_string().contains("part by 49.7 % (Little's law)"), "{gap}");
    }

    #[test]
    fn a_bucket_that_is_wrong_is_found_also_with_requests_in_flight() {
        let counters = Counters::default();
        (0..9).for_each(|_| counters.begin(Op::Read, 512, 1000));
        (0..8).for_each(|_| counters.end(ended(1000), 2000));
        let mut reading = counters.read(2500);
        assert_eq!(little(&reading), None);
        let counts = &mut reading.ops[Op::Read as usize].latency.counts;
        let bucket = counts.iter().position(|count| *count == 8).unwrap();
        counts.swap(bucket, bucket + 32);
        let gap = little(&reading).expect("latencies of twice the length");
        assert!(matches!(gap, Gap::Depth { depth_ns: 8000, .. }) && gap.share() > 0.45, "{gap}");
    }

    #[test]
    fn a_request_that_ends_twice_is_found() {
        let counters = Counters::default();
        let before = counters.read(0);
        (0..10).for_each(|_| counters.begin(Op::Read, 512, 0));
        (0..10).for_each(|_| counters.end(ended(0), 1000));
        assert_eq!(little(&counters.read(1000)), None);
        counters.end(ended(0), 1000);
        let gap = little(&counters.read(2000).since(&before)).expect("one has ended twice");
        assert_eq!(gap, Gap::Ended { op: Op::Read, surplus: 1, ended: 11 });
        assert_eq!((gap.share(), gap.to_string().as_str()), (1.0 / 11.0, "1 more read requests ended than began"));
        // Also in an interval in which nothing happens any more.
        let gap = little(&counters.read(4000).since(&counters.read(3000))).expect("it stays wrong");
        assert_eq!(gap.share(), 1.0);
    }

    #[test]
    fn a_request_that_is_lost_stays_in_flight() {
        let counters = Counters::default();
        (0..10).for_each(|_| counters.begin(Op::Read, 512, 0));
        (0..9).for_each(|_| counters.end(ended(0), 1000));
        let (before, after) = (counters.read(2000), counters.read(5000));
        let interval = after.since(&before);
        assert_eq!((after.in_flight(), interval.age_sum_ns, little(&interval)), (1, 3000, None));
        // It ended among the counters of another ring.
        let other = Counters::default();
        other.end(ended(0), 1000);
        assert!(matches!(little(&other.read(5000)), Some(Gap::Ended { surplus: 1, .. })));
    }

    #[test]
    fn a_latency_that_was_not_noted_is_found() {
        let counters = Counters::default();
        (0..10).for_each(|_| counters.begin(Op::Write, 512, 0));
        (0..10).for_each(|_| counters.end(Ended { op: Op::Write, ..ended(0) }, 0));
        let mut reading = counters.read(1000);
        assert_eq!(little(&reading), None);
        reading.ops[Op::Write as usize].latency.counts[0] -= 1;
        let gap = little(&reading).expect("it is a tenth");
        assert_eq!(gap.to_string(), "10 write requests were answered, but 9 latencies were noted");
    }

    #[test]
    fn what_a_stop_has_left_unanswered_breaks_nothing() {
        let counters = Counters::default();
        counters.begin(Op::Read, 512, 10);
        let before = counters.read(15);
        counters.begin(Op::Flush, 0, 20);
        counters.abandon(50);
        let interval = counters.read(90).since(&before);
        assert_eq!((interval.depth_integral_ns, interval.age_sum_ns, little(&interval)), (65, 65, None));
    }

    #[test]
    fn an_empty_interval_has_no_gap() {
        assert_eq!(little(&Reading::default()), None);
    }
}
