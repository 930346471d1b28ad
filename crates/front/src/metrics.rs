//! What every front counts: its requests, in the shape that all layers have ([`spile_core::metrics`]), and what only
//! fronts have.

use std::ops::AddAssign;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spile_core::metrics::span::SpanLog;
use spile_core::metrics::{Counters, Kind, Reading, add, now_ns};

/// Counts for one ring of a guest, or for one worker's share of an export. It has one writer at a time. A ring's
/// counters go on when the ring is started again.
#[derive(Debug)]
pub struct FrontCounters {
    /// The moment, in nanoseconds of CLOCK_MONOTONIC.
    made_ns: u64,
    /// Requests, from the moment when they were taken to the moment when their answers are shown.
    pub requests: Counters,
    /// What is kept of single requests.
    pub spans: Arc<SpanLog>,
    ring_starts: AtomicU64,
    ring_stops: AtomicU64,
    notifications: AtomicU64,
    suppressed: AtomicU64,
    held_flushes: AtomicU64,
}

impl Default for FrontCounters {
    fn default() -> Self {
        Self {
            made_ns: now_ns(),
            requests: Counters::default(),
            spans: Arc::default(),
            ring_starts: AtomicU64::new(0),
            ring_stops: AtomicU64::new(0),
            notifications: AtomicU64::new(0),
            suppressed: AtomicU64::new(0),
            held_flushes: AtomicU64::new(0),
        }
    }
}

impl FrontCounters {
    /// The ring begins to be served.
    pub fn ring_started(&self) {
        add(&self.ring_starts, 1);
    }

    /// The ring is served no more. Requests that were not answered never will be here: they count as ended, or they
    /// would seem to be in flight for ever.
    pub fn ring_stopped(&self) {
        add(&self.ring_stops, 1);
        self.requests.abandon(now_ns());
    }

    /// The guest was notified of answers.
    pub fn notified(&self) {
        add(&self.notifications, 1);
    }

    /// Answers were shown to the guest without notifying it: it did not want that.
    pub fn not_notified(&self) {
        add(&self.suppressed, 1);
    }

    /// A flush has failed and stays unanswered.
    pub fn flush_held(&self) {
        add(&self.held_flushes, 1);
    }

    /// What all of these have counted together, and each of them if `breakdown` says so: all up to the same moment, now.
    pub fn read<'a>(counters: impl IntoIterator<Item = &'a Self> + Clone, breakdown: Breakdown) -> FrontReading {
        let requests = counters.clone().into_iter().map(|counters| &counters.requests);
        if breakdown == Breakdown::Sum {
            return Self::sums(counters, Counters::read_all(requests), Vec::new());
        }
        let (requests, each) = Counters::read_each(requests);
        let queue = |(number, (counters, requests)): (usize, (&Self, Reading))| QueueReading {
            number,
            requests,
            notifications: counters.notifications.load(Relaxed),
            suppressed: counters.suppressed.load(Relaxed),
        };
        let queues = counters.clone().into_iter().zip(each).enumerate().map(queue).collect();
        Self::sums(counters, requests, queues)
    }

    fn sums<'a>(
        counters: impl IntoIterator<Item = &'a Self> + Clone,
        requests: Reading,
        queues: Vec<QueueReading>,
    ) -> FrontReading {
        let sum =
            |of: fn(&Self) -> &AtomicU64| counters.clone().into_iter().map(|counters| of(counters).load(Relaxed)).sum();
        FrontReading {
            made_ns: counters.clone().into_iter().map(|counters| counters.made_ns).min(),
            requests,
            queues,
            connections: 0,
            ring_starts: sum(|counters| &counters.ring_starts),
            ring_stops: sum(|counters| &counters.ring_stops),
            notifications: sum(|counters| &counters.notifications),
            suppressed: sum(|counters| &counters.suppressed),
            held_flushes: sum(|counters| &counters.held_flushes),
        }
    }
}

/// Whether a reading tells of the queues of a front one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breakdown {
    /// Only of all together, which copies fewer numbers.
    Sum,
    /// Of all together, and of each one.
    Queues,
}

/// What one queue of a front has counted: a ring of a guest, or a worker's share of an export.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QueueReading {
    /// Its number, from 0.
    pub number: usize,
    /// Requests.
    pub requests: Reading,
    /// How often the guest was notified of answers.
    pub notifications: u64,
    /// How often answers were shown without notifying the guest.
    pub suppressed: u64,
}

/// What a front's counters say at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FrontReading {
    /// When the first of these counters was made, in nanoseconds of CLOCK_MONOTONIC; `None` when there are none. Counters that were
    /// made at another moment are other ones, with counts of their own.
    pub made_ns: Option<u64>,
    /// Requests.
    pub requests: Reading,
    /// What each queue has counted; nothing where only the sums were read.
    pub queues: Vec<QueueReading>,
    /// Connections that are open now.
    pub connections: u64,
    /// How often rings were started.
    pub ring_starts: u64,
    /// How often rings were stopped.
    pub ring_stops: u64,
    /// How often guests were notified of answers.
    pub notifications: u64,
    /// How often answers were shown without notifying the guest, which did not want that.
    pub suppressed: u64,
    /// Flushes that failed and stay unanswered.
    pub held_flushes: u64,
}

impl FrontReading {
    /// Rings that are served now.
    pub fn rings_at_work(&self) -> u64 {
        self.ring_starts.saturating_sub(self.ring_stops)
    }

    /// Requests that were answered, with success or not: unlike those that have ended, none that a stop left
    /// unanswered.
    pub fn answered(&self) -> u64 {
        self.requests.ops.iter().map(|op| op.latency.count()).sum()
    }

    /// Requests that were answered with an error.
    pub fn errors(&self) -> u64 {
        self.requests.ops.iter().map(|op| op.errors).sum()
    }
}

/// Readings of different rings, exports, fronts or processes add up, and so do those of queues of the same number.
impl AddAssign<&FrontReading> for FrontReading {
    fn add_assign(&mut self, other: &Self) {
        self.made_ns = [self.made_ns, other.made_ns].into_iter().flatten().min();
        self.requests += &other.requests;
        self.connections += other.connections;
        self.ring_starts += other.ring_starts;
        self.ring_stops += other.ring_stops;
        self.notifications += other.notifications;
        self.suppressed += other.suppressed;
        for queue in &other.queues {
            match self.queues.iter_mut().find(|own| own.number == queue.number) {
                Some(own) => *own += queue,
                None => self.queues.push(queue.clone()),
            }
        }
        self.held_flushes += other.held_flushes;
    }
}

impl AddAssign<&QueueReading> for QueueReading {
    fn add_assign(&mut self, other: &Self) {
        self.requests += &other.requests;
        self.notifications += other.notifications;
        self.suppressed += other.suppressed;
    }
}

/// A number that only fronts have.
#[derive(Clone, Copy, Debug)]
pub struct FrontMetric {
    /// Its name, as those in [`spile_core::metrics::METRICS`]. Its unit is a plain count.
    pub name: &'static str,
    /// How it behaves over time.
    pub kind: Kind,
    /// What it means.
    pub help: &'static str,
    /// Where it is found.
    pub value: fn(&FrontReading) -> u64,
}

/// The numbers of a [`FrontReading`] beside those of its requests.
pub const FRONT_METRICS: [FrontMetric; 6] = [
    FrontMetric {
        name: "connections",
        kind: Kind::Gauge,
        help: "Connections that are open.",
        value: |reading| reading.connections,
    },
    FrontMetric {
        name: "rings",
        kind: Kind::Gauge,
        help: "Rings of guests that are served.",
        value: FrontReading::rings_at_work,
    },
    FrontMetric {
        name: "ring_starts_total",
        kind: Kind::Counter,
        help: "Times that a ring of a guest was started.",
        value: |reading| reading.ring_starts,
    },
    FrontMetric {
        name: "notifications_total",
        kind: Kind::Counter,
        help: "Times that a guest was notified of answers.",
        value: |reading| reading.notifications,
    },
    FrontMetric {
        name: "notifications_suppressed_total",
        kind: Kind::Counter,
        help: "Times that answers were shown without notifying the guest, which did not want that.",
        value: |reading| reading.suppressed,
    },
    FrontMetric {
        name: "held_flushes_total",
        kind: Kind::Counter,
        help: "Flushes that failed and stay unanswered, because the guest would take the answer for something else.",
        value: |reading| reading.held_flushes,
    },
];

#[cfg(test)]
mod tests {
    use spile_core::metrics::{Ended, Op};

    use super::*;

    #[test]
    fn nothing_is_in_flight_in_a_ring_that_has_stopped() {
        let ring = FrontCounters::default();
        ring.ring_started();
        let begun_ns = now_ns();
        [Op::Read, Op::Write, Op::Flush].into_iter().for_each(|op| ring.requests.begin(op, 512, begun_ns));
        ring.requests.end(Ended { op: Op::Read, failed: true, begun_ns }, now_ns());
        assert_eq!(FrontCounters::read([&ring], Breakdown::Sum).requests.in_flight(), 2);
        ring.ring_stopped();
        let reading = FrontCounters::read([&ring], Breakdown::Sum);
        assert_eq!((reading.rings_at_work(), reading.requests.in_flight()), (0, 0));
        assert_eq!((reading.requests.total().ended, reading.answered(), reading.errors()), (3, 1, 1));
    }

    #[test]
    fn names_are_told_apart_and_find_their_numbers() {
        let ring = FrontCounters::default();
        ring.ring_started();
        (0..3).for_each(|_| ring.notified());
        (0..5).for_each(|_| ring.not_notified());
        (0..4).for_each(|_| ring.flush_held());
        let mut reading = FrontCounters::read([&ring, &FrontCounters::default()], Breakdown::Queues);
        reading.connections = 2;
        let of_queues: Vec<_> = reading.queues.iter().map(|q| (q.number, q.notifications, q.suppressed)).collect();
        assert_eq!(of_queues, [(0, 3, 5), (1, 0, 0)]);
        let twice = {
            let mut sum = reading.clone();
            sum += &reading;
            sum
        };
        assert_eq!(FRONT_METRICS.map(|metric| (metric.value)(&reading)), [2, 1, 1, 3, 5, 4]);
        assert_eq!(twice.queues[0].suppressed, 10);
        assert_eq!(FRONT_METRICS.map(|metric| (metric.value)(&twice)), [4, 2, 2, 6, 10, 8]);
        assert!(FRONT_METRICS.iter().all(|metric| metric.name.ends_with("_total") == (metric.kind == Kind::Counter)));
    }
}
