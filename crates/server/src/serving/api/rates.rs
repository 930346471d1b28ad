//! What a disk did between two moments, in numbers that people read: requests and bytes per second, queue sizes and latencies of
//! each layer.
//!
//! The caller asks a server twice for [`DiskStats`]. [`Interval::between`] takes the difference of each layer, and
//! [`Interval::rates`] turns it into [`DiskRates`]. `spile stat`, `spile top` and the experiments show the same numbers, because they
//! all come from here.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use spile_core::metrics::{Gap, Op, OpReading, Reading, little};
use spile_core::{Error, ErrorKind};
use utoipa::ToSchema;

use super::stats::{DiskStats, LayerKind, LayerStats, QueueStats};

/// What a disk did in an interval.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct DiskRates {
    /// Its name on its server.
    pub name: String,
    /// Where its bytes are: the path of the leaf, or the URI of an export.
    pub path: String,
    /// The server's control socket.
    pub server: String,
    /// The server's process.
    pub pid: u32,
    /// The layers that a request passes, the guest's side first.
    pub layers: Vec<LayerRates>,
}

/// What one layer did in an interval.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct LayerRates {
    /// Its name among all layers of the disk, such as `front nbd ""`, `disk` or `image /disks/a.vhd`.
    pub name: String,
    /// `front`, `disk`, `image` or `store`; `device` for a block device of the host.
    pub kind: String,
    /// How long the interval was, in seconds.
    pub interval_s: f64,
    /// Reads that ended per second, with success or not.
    pub reads_per_s: f64,
    /// Writes that ended per second, with success or not.
    pub writes_per_s: f64,
    /// Flushes that ended per second, with success or not; at a store these are syncs.
    pub flushes_per_s: f64,
    /// Requests of all kinds that ended per second, with success or not.
    pub requests_per_s: f64,
    /// Requests of all kinds that failed per second.
    pub errors_per_s: f64,
    /// Bytes per second that reads asked for.
    pub read_bytes_per_s: f64,
    /// Bytes per second that writes asked for.
    pub write_bytes_per_s: f64,
    /// The average number of requests in flight: those in flight at each instant, integrated over the interval, and divided by it. `null`
    /// for a device of the host, of which the kernel does not tell it.
    pub queue_size_avg: Option<f64>,
    /// The average number of requests in flight as iostat computes it: the latencies of all requests that ended in the interval,
    /// summed, and divided by the interval. A request that is longer than the interval counts as a whole where it ends.
    pub queue_size_iostat: f64,
    /// Requests in flight at the end of the interval.
    pub in_flight: u64,
    /// The average latency of all requests that ended, in microseconds. `null` when none ended, as are the quantiles.
    pub latency_mean_us: Option<f64>,
    /// The latency that half of the requests did not exceed, in microseconds. A device of the host has no quantiles.
    pub latency_p50_us: Option<f64>,
    /// The latency that 99 of 100 requests did not exceed, in microseconds.
    pub latency_p99_us: Option<f64>,
    /// The latency that 999 of 1000 requests did not exceed, in microseconds.
    pub latency_p999_us: Option<f64>,
    /// The longest latency in microseconds, to 3 %.
    pub latency_max_us: Option<f64>,
    /// Each kind of request by itself. Kinds that did not come in this interval, and are not in flight, are left out.
    pub operations: Vec<OperationRates>,
    /// Counters that only this kind of layer has, per second. Names end in `_total`.
    pub counters_per_s: BTreeMap<String, f64>,
    /// Numbers that only this kind of layer has and that rise and fall, as they are at the end of the interval.
    pub gauges: BTreeMap<String, u64>,
    /// The queues of a front that ever had a request: the rings of a guest, or each worker's share of an NBD export.
    pub queues: Vec<QueueRates>,
    /// By which share (0 to 1) the counts contradict each other: the queue size and the latencies (Little's law), the latencies and the
    /// requests, or ends and begins. Then a count is wrong. `null` when they agree to 2 %, and for a device.
    pub little_gap: Option<f64>,
}

/// What one queue of a front did in an interval.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct QueueRates {
    /// Its number, from 0: of the ring, or of the worker.
    pub number: u64,
    /// Requests of all kinds that ended per second, with success or not.
    pub requests_per_s: f64,
    /// Bytes per second that were asked for.
    pub bytes_per_s: f64,
    /// The average number of requests in flight, integrated.
    pub queue_size_avg: f64,
    /// Requests in flight at the end of the interval.
    pub in_flight: u64,
    /// The average latency of all requests that ended, in microseconds; `null` when none ended.
    pub latency_mean_us: Option<f64>,
    /// The latency that 99 of 100 requests did not exceed, in microseconds.
    pub latency_p99_us: Option<f64>,
    /// Counters of the queue, per second.
    pub counters_per_s: BTreeMap<String, f64>,
}

/// What one kind of request did in an interval.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct OperationRates {
    /// `read`, `write`, `flush`, `discard`, `write_zeroes`, `extents` or `other`.
    pub operation: String,
    /// Requests that ended per second, with success or not.
    pub requests_per_s: f64,
    /// Requests that began per second.
    pub begun_per_s: f64,
    /// Requests that failed per second.
    pub errors_per_s: f64,
    /// Bytes per second that were asked for.
    pub bytes_per_s: f64,
    /// The average number of requests in flight as iostat computes it.
    pub queue_size_iostat: f64,
    /// Requests in flight at the end of the interval.
    pub in_flight: u64,
    /// The average latency in microseconds. `null` when no request ended, as are the quantiles.
    pub latency_mean_us: Option<f64>,
    /// The latency that half of the requests did not exceed, in microseconds.
    pub latency_p50_us: Option<f64>,
    /// The latency that 99 of 100 requests did not exceed, in microseconds.
    pub latency_p99_us: Option<f64>,
    /// The latency that 999 of 1000 requests did not exceed, in microseconds.
    pub latency_p999_us: Option<f64>,
    /// The longest latency in microseconds, to 3 %.
    pub latency_max_us: Option<f64>,
}

/// Why two answers about a disk have no interval between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoInterval {
    /// Another process serves the disk now, and its counts began at zero.
    OtherProcess {
        /// The process that gave the earlier answer.
        earlier: u32,
        /// The process that gave the later one.
        later: u32,
    },
    /// The later answer is not later than the earlier one.
    NoTime,
}

impl fmt::Display for NoInterval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherProcess { earlier, later } => {
                write!(
                    f,
                    "process {later} serves the disk now, process {earlier} did before: their counts have nothing in common"
                )
            }
            Self::NoTime => f.write_str("no time has passed between the two answers about the disk"),
        }
    }
}

impl From<NoInterval> for Error {
    fn from(why: NoInterval) -> Self {
        Error::new(ErrorKind::Busy, why.to_string()).hint("ask again")
    }
}

/// The difference between two answers about one disk.
#[derive(Clone, Debug)]
pub struct Interval {
    /// The layers that were there at its end, the guest's side first.
    pub layers: Vec<LayerInterval>,
    name: String,
    path: String,
    server: String,
    pid: u32,
}

/// The difference between two answers about one layer.
#[derive(Clone, Debug)]
pub struct LayerInterval {
    /// Which layer it is.
    pub kind: LayerKind,
    /// Its name among all layers of the disk.
    pub name: String,
    /// How long the interval is, in nanoseconds.
    pub elapsed_ns: u64,
    /// What was counted in it. What is in flight is that at its end.
    pub reading: Reading,
    /// The rise of each counter whose name ends in `_total`; the last value of each other number.
    pub counters: BTreeMap<String, u64>,
    /// The queues of a front; none for several fronts together.
    queues: Vec<QueueInterval>,
}

/// The difference between two answers about one queue of a front.
#[derive(Clone, Debug)]
struct QueueInterval {
    number: u64,
    reading: Reading,
    counters: BTreeMap<String, u64>,
}

impl Interval {
    /// What lies between two answers about the same disk. A layer that came in between counts from zero on; one that has gone is
    /// left out.
    ///
    /// # Errors
    /// When another process gave the later answer, or no time has passed.
    pub fn between(earlier: &DiskStats, later: &DiskStats) -> Result<Self, NoInterval> {
        if earlier.pid != later.pid {
            return Err(NoInterval::OtherProcess { earlier: earlier.pid, later: later.pid });
        }
        let moment = |stats: &DiskStats| stats.layers.iter().map(|layer| layer.at_ns).max().unwrap_or(0);
        let begin_ns = moment(earlier);
        if moment(later) <= begin_ns {
            return Err(NoInterval::NoTime);
        }
        let layers = later.layers.iter().map(|layer| {
            let before = earlier.layers.iter().find(|before| before.name == layer.name && before.kind == layer.kind);
            LayerInterval::between(before, layer, begin_ns)
        });
        Ok(Self {
            layers: layers.collect(),
            name: later.name.clone(),
            path: later.path.clone(),
            server: later.server.clone(),
            pid: later.pid,
        })
    }

    /// All layers of one kind as one: the two fronts of a disk, or the stores of all images of a chain. `None` when there is none.
    pub fn all_of(&self, kind: LayerKind) -> Option<LayerInterval> {
        let mut layers = self.layers.iter().filter(|layer| layer.kind == kind).cloned();
        let first = layers.next()?;
        Some(layers.fold(first, |mut sum, layer| {
            sum.add(&layer);
            sum
        }))
    }

    /// The interval in numbers that people read.
    pub fn rates(&self) -> DiskRates {
        DiskRates {
            name: self.name.clone(),
            path: self.path.clone(),
            server: self.server.clone(),
            pid: self.pid,
            layers: self.layers.iter().map(LayerInterval::rates).collect(),
        }
    }
}

impl LayerInterval {
    /// `begin_ns` is where the interval begins for a layer that was not there `before`, or had other counters.
    fn between(before: Option<&LayerStats>, later: &LayerStats, begin_ns: u64) -> Self {
        let now = later.reading();
        let new = LayerStats::new(later.kind, String::new(), &Reading { at_ns: begin_ns, ..Reading::default() });
        let before = before.filter(|before| before.made_ns == later.made_ns).unwrap_or(&new);
        let queue = |queue: &QueueStats| {
            let of_before = before.queues.iter().find(|before| before.number == queue.number);
            QueueInterval::between(of_before.map(|queue| (queue, before.at_ns)), (queue, later.at_ns))
        };
        Self {
            kind: later.kind,
            name: later.name.clone(),
            elapsed_ns: later.at_ns.saturating_sub(before.at_ns),
            reading: now.since(&before.reading()),
            counters: rises(&before.counters, &later.counters),
            queues: later.queues.iter().map(queue).collect(),
        }
    }

    /// How the counts of this interval contradict each other, if they do.
    pub fn gap(&self) -> Option<Gap> {
        little(&self.reading)
    }

    fn add(&mut self, other: &Self) {
        self.elapsed_ns = self.elapsed_ns.max(other.elapsed_ns);
        self.reading += &other.reading;
        for (name, count) in &other.counters {
            *self.counters.entry(name.clone()).or_default() += count;
        }
        self.queues.clear();
    }

    /// The interval in numbers that people read.
    pub fn rates(&self) -> LayerRates {
        let (totals, gauges) = self.counters.iter().partition::<Vec<_>, _>(|(name, _)| name.ends_with("_total"));
        let per_s = |count: u64| per_s(count, self.elapsed_ns);
        LayerRates {
            counters_per_s: totals.into_iter().map(|(name, count)| (name.clone(), per_s(*count))).collect(),
            gauges: gauges.into_iter().map(|(name, value)| (name.clone(), *value)).collect(),
            queues: self.queues.iter().map(|queue| queue.rates(self.elapsed_ns)).collect(),
            ..LayerRates::new(&self.name, self.kind.name(), &self.reading, self.elapsed_ns)
        }
    }
}

impl LayerRates {
    /// The numbers that every layer has, of `reading`, an interval ([`Reading::since`]).
    pub fn new(name: &str, kind: &str, reading: &Reading, elapsed_ns: u64) -> Self {
        let all = OperationRates::new("", &reading.total(), elapsed_ns);
        let of = |op| OperationRates::new(Op::name(op), reading.op(op), elapsed_ns);
        let (reads, writes) = (of(Op::Read), of(Op::Write));
        let came = |op: &Op| reading.op(*op).begun + reading.op(*op).ended + reading.op(*op).in_flight.max(0) as u64;
        Self {
            name: name.to_owned(),
            kind: kind.to_owned(),
            interval_s: elapsed_ns as f64 / 1e9,
            reads_per_s: reads.requests_per_s,
            writes_per_s: writes.requests_per_s,
            flushes_per_s: of(Op::Flush).requests_per_s,
            requests_per_s: all.requests_per_s,
            errors_per_s: all.errors_per_s,
            read_bytes_per_s: reads.bytes_per_s,
            write_bytes_per_s: writes.bytes_per_s,
            // Request-nanoseconds a second are 10^9 times the requests.
            queue_size_avg: Some(per_s(reading.depth_ns(), elapsed_ns) / 1e9),
            queue_size_iostat: all.queue_size_iostat,
            in_flight: all.in_flight,
            latency_mean_us: all.latency_mean_us,
            latency_p50_us: all.latency_p50_us,
            latency_p99_us: all.latency_p99_us,
            latency_p999_us: all.latency_p999_us,
            latency_max_us: all.latency_max_us,
            operations: Op::ALL.into_iter().filter(|op| came(op) > 0).map(of).collect(),
            little_gap: little(reading).map(|gap| gap.share()),
            ..Self::default()
        }
    }

    /// The integrated queue size; where there is none, iostat's.
    pub fn queue_size(&self) -> f64 {
        self.queue_size_avg.unwrap_or(self.queue_size_iostat)
    }
}

impl QueueInterval {
    /// Each side is a queue and the moment of its layer's answer. A queue that was not there before counts from zero on.
    fn between(before: Option<(&QueueStats, u64)>, (later, at_ns): (&QueueStats, u64)) -> Self {
        let (reading, counters) =
            before.map(|(queue, at_ns)| (queue.reading(at_ns), queue.counters.clone())).unwrap_or_default();
        let counters = rises(&counters, &later.counters);
        Self { number: later.number, reading: later.reading(at_ns).since(&reading), counters }
    }

    fn rates(&self, elapsed_ns: u64) -> QueueRates {
        let all = OperationRates::new("", &self.reading.total(), elapsed_ns);
        let counters = self.counters.iter().map(|(name, count)| (name.clone(), per_s(*count, elapsed_ns)));
        QueueRates {
            number: self.number,
            requests_per_s: all.requests_per_s,
            bytes_per_s: all.bytes_per_s,
            queue_size_avg: per_s(self.reading.depth_ns(), elapsed_ns) / 1e9,
            in_flight: all.in_flight,
            latency_mean_us: all.latency_mean_us,
            latency_p99_us: all.latency_p99_us,
            counters_per_s: counters.collect(),
        }
    }
}

impl OperationRates {
    fn new(operation: &str, reading: &OpReading, elapsed_ns: u64) -> Self {
        let latency = &reading.latency;
        let us = |ns: u64| (latency.count() > 0).then_some(ns as f64 / 1e3);
        Self {
            operation: operation.to_owned(),
            requests_per_s: per_s(reading.ended, elapsed_ns),
            begun_per_s: per_s(reading.begun, elapsed_ns),
            errors_per_s: per_s(reading.errors, elapsed_ns),
            bytes_per_s: per_s(reading.bytes, elapsed_ns),
            queue_size_iostat: per_s(latency.sum_ns, elapsed_ns) / 1e9,
            in_flight: reading.in_flight.max(0) as u64,
            latency_mean_us: us(latency.mean_ns()),
            latency_p50_us: us(latency.quantile_ns(0.5)),
            latency_p99_us: us(latency.quantile_ns(0.99)),
            latency_p999_us: us(latency.quantile_ns(0.999)),
            latency_max_us: us(latency.max_ns),
        }
    }
}

/// The rise of each counter whose name ends in `_total`, and the last value of each other number.
fn rises(before: &BTreeMap<String, u64>, later: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let rise = |(name, count): (&String, &u64)| {
        let before = if name.ends_with("_total") { before.get(name).copied().unwrap_or(0) } else { 0 };
        (name.clone(), count.wrapping_sub(before))
    };
    later.iter().map(rise).collect()
}

/// A count of an interval, per second.
pub fn per_s(count: u64, elapsed_ns: u64) -> f64 {
    if elapsed_ns == 0 { 0.0 } else { count as f64 * 1e9 / elapsed_ns as f64 }
}

#[cfg(test)]
mod tests {
    use spile_core::metrics::{Counters, Ended};

    use super::*;

    const S: u64 = 1_000_000_000;

    fn stats(pid: u32, layers: Vec<LayerStats>) -> DiskStats {
        DiskStats {
            name: "a".to_owned(),
            path: "/a.raw".to_owned(),
            server: "/c".to_owned(),
            pid,
            layers,
            ..DiskStats::default()
        }
    }

    fn layer(kind: LayerKind, name: &str, counters: &Counters, at_ns: u64) -> LayerStats {
        LayerStats::new(kind, name.to_owned(), &counters.read(at_ns))
    }

    /// One request of 4096 bytes from `from_ns` to `to_ns`.
    fn request(counters: &Counters, op: Op, failed: bool, from_ns: u64, to_ns: u64) {
        counters.begin(op, 4096, from_ns);
        counters.end(Ended { op, failed, begun_ns: from_ns }, to_ns);
    }

    #[test]
    fn an_interval_is_told_by_the_second() {
        let counters = Counters::default();
        request(&counters, Op::Read, false, 0, S);
        let earlier = stats(7, vec![layer(LayerKind::Disk, "disk", &counters, S)]);
        request(&counters, Op::Read, false, S, S + S / 2);
        request(&counters, Op::Write, true, S + S / 2, 3 * S);
        counters.begin(Op::Write, 512, 2 * S);
        let later = stats(7, vec![layer(LayerKind::Disk, "disk", &counters, 3 * S)]);
        let rates = Interval::between(&earlier, &later).unwrap().rates();
        let LayerRates { operations, .. } = &rates.layers[0];
        let disk = &rates.layers[0];
        assert_eq!((disk.kind.as_str(), disk.interval_s, disk.in_flight), ("disk", 2.0, 1));
        assert_eq!((disk.reads_per_s, disk.writes_per_s, disk.flushes_per_s, disk.errors_per_s), (0.5, 0.5, 0.0, 0.5));
        assert_eq!((disk.read_bytes_per_s, disk.write_bytes_per_s), (2048.0, 2304.0));
        // In flight were 0.5 s of a read, 1.5 s of a write and 1 s of another one, which has not ended.
        assert_eq!((disk.queue_size_avg, disk.queue_size_iostat), (Some(1.5), 1.0));
        assert_eq!(disk.latency_mean_us, Some(1e6));
        assert_eq!(operations.iter().map(|op| op.operation.as_str()).collect::<Vec<_>>(), ["read", "write"]);
        assert_eq!((operations[1].begun_per_s, operations[1].requests_per_s, operations[1].in_flight), (1.0, 0.5, 1));
        assert!((480_000.0..510_000.0).contains(&operations[0].latency_p99_us.unwrap()), "{operations:?}");
    }

    #[test]
    fn nothing_lies_between_answers_of_two_processes_or_of_one_moment() {
        let counters = Counters::default();
        let at = |pid, at_ns| stats(pid, vec![layer(LayerKind::Disk, "disk", &counters, at_ns)]);
        let replaced = Interval::between(&at(7, S), &at(8, 2 * S)).unwrap_err();
        assert_eq!(replaced, NoInterval::OtherProcess { earlier: 7, later: 8 });
        assert!(Error::from(replaced).to_string().contains("process 8 serves the disk now"));
        assert_eq!(Interval::between(&at(7, S), &at(7, S)).unwrap_err(), NoInterval::NoTime);
    }

    #[test]
    fn layers_come_and_go_and_begin_anew() {
        let [disk, gone, anew, came] = std::array::from_fn(|_| Counters::default());
        request(&gone, Op::Read, false, 0, 10);
        // No count of it falls when it begins anew, but the sum of its latencies does.
        request(&anew, Op::Read, false, 0, S);
        let earlier = stats(
            7,
            vec![
                layer(LayerKind::Disk, "disk", &disk, S),
                layer(LayerKind::Image, "image gone", &gone, S),
                LayerStats { made_ns: 1, ..layer(LayerKind::Image, "image anew", &anew, S) },
            ],
        );
        let anew = Counters::default();
        request(&anew, Op::Read, false, 2 * S, 2 * S + S / 2);
        came.begin(Op::Write, 1, 2 * S);
        let later = stats(
            7,
            vec![
                layer(LayerKind::Disk, "disk", &disk, 3 * S),
                LayerStats { made_ns: 2, ..layer(LayerKind::Image, "image anew", &anew, 3 * S) },
                layer(LayerKind::Image, "image came", &came, 3 * S),
            ],
        );
        let interval = Interval::between(&earlier, &later).unwrap();
        let rates = interval.rates();
        let found = rates.layers.iter().map(|layer| (layer.name.as_str(), layer.requests_per_s, layer.queue_size()));
        assert_eq!(
            found.collect::<Vec<_>>(),
            [("disk", 0.0, 0.0), ("image anew", 0.5, 0.25), ("image came", 0.0, 0.5)]
        );
        let images = interval.all_of(LayerKind::Image).unwrap().rates();
        assert_eq!((images.requests_per_s, images.queue_size(), images.in_flight), (0.5, 0.75, 1));
        assert!(interval.all_of(LayerKind::Store).is_none());
    }

    #[test]
    fn sums_may_wrap_around() {
        let counters = Counters::default();
        request(&counters, Op::Read, false, 0, S);
        let mut earlier = layer(LayerKind::Store, "store", &counters, S);
        let mut later = earlier.clone();
        later.at_ns = 2 * S;
        earlier.queue_time_ns = u64::MAX - S + 1;
        later.queue_time_ns = S;
        earlier.operations[0].latency_sum_ns = u64::MAX - S + 1;
        later.operations[0].latency_sum_ns = S;
        later.operations[0].requests = 3;
        later.operations[0].latency_buckets[0][1] += 2;
        let rates = Interval::between(&stats(7, vec![earlier]), &stats(7, vec![later])).unwrap().rates();
        assert_eq!((rates.layers[0].queue_size_avg, rates.layers[0].latency_mean_us), (Some(2.0), Some(1e6)));
    }

    #[test]
    fn each_queue_has_its_share_and_one_that_comes_begins_at_zero() {
        let [one, two] = std::array::from_fn(|_| Counters::default());
        let front = |counters: &[&Counters], at_ns| {
            let both = counters.iter().map(|counters| counters.read(at_ns)).reduce(std::ops::Add::add).unwrap();
            let mut layer = LayerStats::new(LayerKind::Front, "front xen".to_owned(), &both);
            layer.queues =
                counters.iter().enumerate().map(|(number, counters)| queue(number, counters, at_ns)).collect();
            stats(7, vec![layer])
        };
        request(&one, Op::Read, false, 0, S / 2);
        let earlier = front(&[&one], S);
        request(&one, Op::Read, false, S, S + S / 2);
        two.begin(Op::Write, 512, S);
        let rates = Interval::between(&earlier, &front(&[&one, &two], 2 * S)).unwrap().rates();
        let found =
            rates.layers[0].queues.iter().map(|queue| (queue.number, queue.requests_per_s, queue.queue_size_avg));
        assert_eq!(found.collect::<Vec<_>>(), [(0, 1.0, 0.5), (1, 0.0, 1.0)]);
        assert_eq!((rates.layers[0].queue_size_avg, rates.layers[0].little_gap), (Some(1.5), None));
        assert_eq!(rates.layers[0].queues[1].counters_per_s, [("notifications_total".to_owned(), 3.0)].into());
    }

    fn queue(number: usize, counters: &Counters, at_ns: u64) -> QueueStats {
        let LayerStats { queue_time_ns, age_sum_ns, operations, .. } = layer(LayerKind::Front, "", counters, at_ns);
        let counters = [("notifications_total".to_owned(), 3)].into();
        QueueStats { number: number as u64, queue_time_ns, age_sum_ns, operations, counters }
    }

    #[test]
    fn counts_that_contradict_each_other_are_told() {
        let counters = Counters::default();
        let earlier = layer(LayerKind::Disk, "disk", &counters, S);
        counters.begin(Op::Read, 512, S);
        counters.end(Ended { op: Op::Read, failed: false, begun_ns: S + S / 4 }, S + S / 2);
        let later = layer(LayerKind::Disk, "disk", &counters, 2 * S);
        let rates = Interval::between(&stats(7, vec![earlier]), &stats(7, vec![later])).unwrap().rates();
        let gap = rates.layers[0].little_gap.expect("the latency is half of the time in flight");
        assert!((0.48..0.52).contains(&gap), "{gap}");
    }

    #[test]
    fn counters_of_any_name_are_passed_on() {
        let counters = Counters::default();
        let mut earlier = layer(LayerKind::Front, "front xen", &counters, S);
        earlier.counters = [("kicks_total".to_owned(), 40), ("rings".to_owned(), 9)].into();
        let mut later = layer(LayerKind::Front, "front xen", &counters, 3 * S);
        later.counters = [("kicks_total".to_owned(), 60), ("rings".to_owned(), 4), ("new_total".to_owned(), 2)].into();
        let rates = Interval::between(&stats(7, vec![earlier]), &stats(7, vec![later])).unwrap().rates();
        assert_eq!(
            rates.layers[0].counters_per_s,
            [("kicks_total".to_owned(), 10.0), ("new_total".to_owned(), 1.0)].into()
        );
        assert_eq!(rates.layers[0].gauges, [("rings".to_owned(), 4)].into());
    }
}
