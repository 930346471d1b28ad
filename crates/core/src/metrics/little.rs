//! [`little`]: the check that what was counted of an interval fits together.
//!
//! Little's law: the average number of requests in flight L is the rate λ at which requests end, times the average time W that they
//! take. In an interval of the length T, λ·W·T is the sum of the latencies of what ended in it. That is exact only when nothing is in flight
//! at either end. Else the ages of what is in flight at the end belong to the interval, and the ages of what was in flight at its
//! begin do not: L·T = λ·W·T + ages at the end − ages at the begin.
//!
//! Both sides come from sums of their own: L·T from when requests began and ended, λ·W from the latencies that were noted one by
//! one, the ages from when those began that have not ended; where nothing is in flight at either end, there are none. Where they part, a count is wrong: a request was lost, ended twice, or was
//! given a wrong time.

use std::fmt;

use super::Reading;

/// The share by which both sides may part.
const TOLERANCE: f64 = 0.02;

/// How Little's law is broken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gap {
    /// Requests in flight, integrated over the interval, in request-nanoseconds: L·T.
    pub depth_integral_ns: u64,
    /// What the latencies and the ages make of it: λ·W·T, with the edges of the interval.
    pub latencies_ns: u64,
}

impl Gap {
    /// By how much of the larger side both part: 0 to 1.
    pub fn share(&self) -> f64 {
        let larger = self.depth_integral_ns.max(self.latencies_ns);
        if larger == 0 { 0.0 } else { self.depth_integral_ns.abs_diff(self.latencies_ns) as f64 / larger as f64 }
    }
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the average queue size and the latencies part by {:.1} % (Little's law): {:.3} s of requests in flight, {:.3} s of latencies",
            100.0 * self.share(),
            self.depth_integral_ns as f64 / 1e9,
            self.latencies_ns as f64 / 1e9,
        )
    }
}

/// Checks Little's law for `interval`, which [`Reading::since`] has made, or for all that was ever counted. Returns the gap when both sides
/// part by more than 2 %.
pub fn little(interval: &Reading) -> Option<Gap> {
    let total = interval.total();
    let has_edges = total.in_flight != 0 || total.begun != total.ended || total.latency.count() != total.ended;
    let edges_ns = if has_edges { interval.age_sum_ns } else { 0 };
    let latencies_ns = total.latency.sum_ns.wrapping_add(edges_ns);
    let gap = Gap { depth_integral_ns: interval.depth_integral_ns, latencies_ns };
    (gap.share() > TOLERANCE).then_some(gap)
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
            let Gap { depth_integral_ns, latencies_ns } = gap_of(&interval);
            prop_assert_eq!(depth_integral_ns, latencies_ns);
            let overlap = |(begin, len): &(u64, u64)| (begin + len).min(last).saturating_sub(*begin.max(&first));
            prop_assert_eq!(depth_integral_ns, requests.iter().map(overlap).sum::<u64>());
        }
    }

    /// Both sides, whether or not they part.
    fn gap_of(interval: &Reading) -> Gap {
        let ended_ns: u64 = interval.ops.iter().map(|op| op.latency.sum_ns).sum();
        assert_eq!(little(interval), None);
        Gap { depth_integral_ns: interval.depth_integral_ns, latencies_ns: ended_ns.wrapping_add(interval.age_sum_ns) }
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
        assert_eq!((gap.share(), gap.latencies_ns), (0.5, 50_000));
        assert!(gap.to_string().contains("part by 50.0 % (Little's law)"), "{gap}");
    }

    #[test]
    fn a_request_that_ends_twice_is_found() {
        let counters = Counters::default();
        (0..10).for_each(|_| counters.begin(Op::Write, 512, 0));
        let mut reading = counters.read(1000);
        // A reading whose latencies have one end more than its times.
        reading.ops[Op::Write as usize].latency.sum_ns += 1000;
        assert!((little(&reading).expect("it is 10 %").share() - 1.0 / 11.0).abs() < 1e-9);
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
