//! The slowest requests of a disk: the body of `GET /v1/disks/{name}/slow`.

use serde::{Deserialize, Serialize};
use spile_core::metrics::now_ns;
use spile_core::metrics::span::{PHASES, Record, SpanLog};
use utoipa::ToSchema;

use crate::serving::events::now_us;

/// The most requests in each of the two lists.
const MAX_REQUESTS: usize = 16;
/// Requests in flight are listed from this age on, in nanoseconds.
const IN_FLIGHT_FROM_NS: u64 = 10_000_000;

/// The slowest requests of a disk, and where their time went.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct SlowRequests {
    /// The disk's name.
    pub disk: String,
    /// The server's control socket.
    pub server: String,
    /// The server's process.
    pub pid: u32,
    /// Requests that have been in flight for over 10 ms, the oldest first: at most 16.
    pub in_flight: Vec<SlowRequest>,
    /// The slowest of the requests that were answered in about the last two minutes, the slowest first: at most 16. Where nothing was
    /// answered for long they may be older.
    pub answered: Vec<SlowRequest>,
}

/// A request that took long.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct SlowRequest {
    /// The way by which it came, such as `front nbd ""`.
    pub front: String,
    /// The number of the front's queue, ring or worker.
    pub queue: u32,
    /// `read`, `write`, `flush`, `discard`, `write_zeroes`, `extents` or `other`.
    pub operation: String,
    /// Where it begins on the disk, in bytes.
    pub offset_bytes: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// It was answered with an error.
    pub failed: bool,
    /// When it was taken from the ring or the socket, in microseconds since 1970-01-01 UTC.
    pub taken_unix_us: u64,
    /// How long it took until its answer was shown; how long it has taken so far when it is in flight. In microseconds.
    pub latency_us: f64,
    /// How many operations on stores it needed for its data.
    pub store_operations: u64,
    /// Where the time went, in order. They add up to the latency. The last phase of a request in flight is the one in which it is.
    pub phases: Vec<PhaseTime>,
}

/// The time of one phase of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PhaseTime {
    /// `load`, `queue`, `map`, `store`, `commit`, `unload` or `answer`.
    pub name: String,
    /// How long it took, in microseconds.
    pub time_us: f64,
}

/// Adds the requests of a front's queues to two lists: those in flight, and those that were answered.
#[derive(Default)]
pub struct Gathered {
    in_flight: Vec<SlowRequest>,
    answered: Vec<SlowRequest>,
}

impl Gathered {
    /// Adds those of one queue.
    pub fn add(&mut self, front: &str, queue: u32, log: &SpanLog) {
        let now = Now::read();
        let in_flight = log.in_flight().into_iter().filter(|record| now.ns >= record.taken_ns + IN_FLIGHT_FROM_NS);
        self.in_flight.extend(in_flight.map(|record| in_flight_for(front, queue, &record, now)));
        self.answered.extend(log.slowest().iter().map(|record| answered(front, queue, record, now)));
    }

    /// Both lists, cut to their lengths.
    pub fn lists(mut self) -> [Vec<SlowRequest>; 2] {
        for list in [&mut self.in_flight, &mut self.answered] {
            list.sort_by(|one, other| other.latency_us.total_cmp(&one.latency_us));
            list.truncate(MAX_REQUESTS);
        }
        [self.in_flight, self.answered]
    }
}

/// This moment by both clocks.
#[derive(Clone, Copy)]
struct Now {
    ns: u64,
    unix_us: u64,
}

impl Now {
    fn read() -> Self {
        let unix_us = now_us();
        Self { ns: now_ns(), unix_us }
    }
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

fn answered(front: &str, queue: u32, record: &Record, now: Now) -> SlowRequest {
    let until_shown = PHASES.len() - 1;
    request(front, queue, record, now, record.latency_ns(), phases(&record.phases_ns[..until_shown]))
}

/// A request in flight: its last phase goes on.
fn in_flight_for(front: &str, queue: u32, record: &Record, now: Now) -> SlowRequest {
    let latency_ns = now.ns - record.taken_ns;
    let now_in = record.phase.min(PHASES.len() - 2);
    let mut phases_ns = record.phases_ns;
    phases_ns[now_in] += latency_ns.saturating_sub(record.latency_ns());
    // One that has waited for trouble to pass is in an earlier phase again.
    let last = phases_ns.iter().rposition(|time_ns| *time_ns > 0).map_or(now_in, |last| last.max(now_in));
    request(front, queue, record, now, latency_ns, phases(&phases_ns[..=last]))
}

fn phases(phases_ns: &[u64]) -> Vec<PhaseTime> {
    let named = PHASES.iter().zip(phases_ns);
    named.map(|(phase, time_ns)| PhaseTime { name: phase.name.to_owned(), time_us: us(*time_ns) }).collect()
}

fn request(front: &str, queue: u32, record: &Record, now: Now, latency_ns: u64, phases: Vec<PhaseTime>) -> SlowRequest {
    SlowRequest {
        front: front.to_owned(),
        queue,
        operation: record.what.op.name().to_owned(),
        offset_bytes: record.what.offset_bytes,
        len_bytes: record.what.len_bytes,
        failed: record.failed && record.phase == PHASES.len() - 1,
        taken_unix_us: now.unix_us.saturating_sub(now.ns.saturating_sub(record.taken_ns) / 1000),
        latency_us: us(latency_ns),
        store_operations: record.store_operations,
        phases,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use spile_core::metrics::Op;
    use spile_core::metrics::span::{Moment, Spans, What, stamp, with};

    use super::*;

    #[test]
    fn what_hangs_shows_where() {
        let log = Arc::<SpanLog>::default();
        let mut spans = Spans::new(log.clone());
        let what = What { op: Op::Write, offset_bytes: 4096, len_bytes: 512 };
        let taken_ns = now_ns() - 2 * IN_FLIGHT_FROM_NS;
        let hangs = spans.begin(spans.taken(taken_ns), what).unwrap();
        let reached = [Moment::Loaded, Moment::DiskBegan, Moment::Submitted];
        with(Some(hangs), || reached.into_iter().for_each(stamp));
        let young = spans.begin(spans.taken(now_ns()), what).unwrap();
        let ended = spans.begin(spans.taken(taken_ns), what).unwrap();
        spans.answered(ended, true);
        spans.shown(taken_ns + 5000);
        spans.end();
        let mut gathered = Gathered::default();
        gathered.add("front nbd \"\"", 3, &log);
        let [in_flight, answered] = gathered.lists();
        assert_eq!((in_flight.len(), answered.len()), (1, 1));
        let names: Vec<_> = in_flight[0].phases.iter().map(|phase| phase.name.as_str()).collect();
        assert_eq!(names, ["load", "queue", "limit", "map", "store"]);
        for request in [&in_flight[0], &answered[0]] {
            let sum_us: f64 = request.phases.iter().map(|phase| phase.time_us).sum();
            assert!((sum_us - request.latency_us).abs() < 0.01, "{request:?}");
            assert_eq!((request.queue, request.operation.as_str(), request.offset_bytes), (3, "write", 4096));
        }
        assert_eq!((answered[0].latency_us, answered[0].failed, in_flight[0].failed), (5.0, true, false));
        assert!(in_flight[0].taken_unix_us.abs_diff(answered[0].taken_unix_us) < 1000);
        [hangs, young].into_iter().for_each(|span| spans.leave(span));
    }
}
