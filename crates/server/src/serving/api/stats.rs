//! What was counted of a disk up to one moment, exactly: the body of `GET /v1/disks/{name}/stats`.
//!
//! All counts only rise. Sums of times rise, too, but for a moment: what is in flight counts up to the moment of the reading, and may then be
//! noted as ended a little earlier, at the begin of its worker's turn. Whoever wants rates, averages or quantiles asks twice, turns both answers back
//! into readings ([`LayerStats::reading`]), and takes what lies between them ([`Reading::since`]). So callers with different
//! intervals do not disturb each other, and the server keeps nothing for them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use spile_core::metrics::{BUCKETS, Latency, Meter, Op, OpReading, Reading, bounds_of, bucket_of};
use spile_front::{FrontReading, QueueReading};
use utoipa::ToSchema;

use super::view::FrontName;
use crate::host_device::HostDevice;

/// What was counted of a disk up to one moment.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct DiskStats {
    /// Its name on its server.
    pub name: String,
    /// Where its bytes are: the path of the leaf, or the URI of an export.
    pub path: String,
    /// The server's control socket.
    pub server: String,
    /// The server's process. Counts of another process cannot be compared with these.
    pub pid: u32,
    /// The block device of the host on which the leaf lies, as the server sees it. Only where one disk is asked for.
    #[serde(default)]
    pub host_device: Option<HostDevice>,
    /// Why there is no `host_device`. Only where one disk is asked for.
    #[serde(default)]
    pub no_host_device: Option<String>,
    /// The layers that a request passes, the guest's side first.
    pub layers: Vec<LayerStats>,
}

/// What was counted of all disks of a server up to one moment: the body of `GET /v1/stats`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct AllStats {
    /// Each disk, in the order in which the server was given them.
    pub disks: Vec<DiskStats>,
}

/// Which layer it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum LayerKind {
    /// A way to the disk: from the moment when a request is taken to the moment when its answer is shown.
    Front,
    /// The disk: the same requests, without the time in the front.
    Disk,
    /// An image of the disk.
    Image,
    /// The store below an image: each operation that goes to it.
    Store,
}

impl LayerKind {
    /// The kind's name, as it is in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Front => "front",
            Self::Disk => "disk",
            Self::Image => "image",
            Self::Store => "store",
        }
    }
}

/// What one layer has counted.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct LayerStats {
    /// Which layer it is.
    pub kind: LayerKind,
    /// Its name among all layers of the disk, such as `front nbd ""`, `disk` or `image /disks/a.vhd`.
    pub name: String,
    /// Of a front: `nbd`, `vhost-user` or `xen`.
    #[serde(default)]
    pub protocol: Option<String>,
    /// Of a front that serves exports: the export's name.
    #[serde(default)]
    pub export: Option<String>,
    /// When the counters were made, in nanoseconds of the host's CLOCK_MONOTONIC. Only counts of the same moment can be compared: a
    /// disk that was detached and attached again has layers of the same names with other counters. 0 when it is not known.
    #[serde(default)]
    pub made_ns: u64,
    /// When the counters were read, in nanoseconds of the host's CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// Requests in flight, integrated over time, in nanoseconds. Its rise in a time, divided by that time, is the average queue
    /// size. It wraps around at 2^64.
    pub queue_time_ns: u64,
    /// How long all requests together that have no latency have been in flight, in nanoseconds: those in flight now, and those that a stop
    /// left unanswered. Little's law: the rise of `queue_time_ns` in a time is that of this one plus that of all `latency_sum_ns`. It
    /// wraps around at 2^64.
    pub age_sum_ns: u64,
    /// Connections that are open; 0 for a layer that has none.
    pub connections: u64,
    /// What was counted of each kind of request. Kinds that never came are left out.
    pub operations: Vec<OperationStats>,
    /// What only this kind of layer counts, by name. The names are those of the metrics, without `spile_`.
    pub counters: BTreeMap<String, u64>,
    /// The queues of a front: the rings of a guest, or each worker's share of an NBD export. Those that never had a request are left
    /// out; other layers have none.
    pub queues: Vec<QueueStats>,
}

/// What one queue of a front has counted. The layer's own numbers are the sums of those of its queues.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct QueueStats {
    /// Its number, from 0: of the ring, or of the worker.
    pub number: u64,
    /// Requests in flight, integrated over time, as that of the layer.
    pub queue_time_ns: u64,
    /// As that of the layer.
    pub age_sum_ns: u64,
    /// What was counted of each kind of request. Kinds that never came are left out.
    pub operations: Vec<OperationStats>,
    /// `notifications_total` and `notifications_suppressed_total`.
    pub counters: BTreeMap<String, u64>,
}

/// What was counted of one kind of request.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct OperationStats {
    /// `read`, `write`, `flush`, `discard`, `write_zeroes`, `extents` or `other`.
    pub operation: String,
    /// Requests that have begun.
    pub begun: u64,
    /// Requests that have ended, with success or not.
    pub requests: u64,
    /// Of these, how many failed.
    pub errors: u64,
    /// Of these, how many a stop left unanswered. They have no latency.
    #[serde(default)]
    pub abandoned: u64,
    /// Bytes that were asked for.
    pub bytes: u64,
    /// Requests in flight now.
    pub in_flight: u64,
    /// All latencies together, in nanoseconds.
    pub latency_sum_ns: u64,
    /// The longest latency, in nanoseconds.
    pub latency_max_ns: u64,
    /// The buckets of the histogram of latencies that are not empty: where each begins, in nanoseconds, and how many latencies it has. Below 32
    /// ns each nanosecond is a bucket; from there on each power of two has 32 buckets of equal width. The last one begins at
    /// 67 645 734 912 ns, and has all that is longer.
    pub latency_buckets: Vec<[u64; 2]>,
}

impl LayerStats {
    /// What a front has counted.
    pub fn of_front(name: &FrontName, front: &FrontReading) -> Self {
        let counters = spile_front::FRONT_METRICS.iter().map(|metric| (metric.name.to_owned(), (metric.value)(front)));
        let counters = counters.filter(|(name, _)| name != "connections").collect();
        let queues = front.queues.iter().filter(|queue| queue.requests.total().begun > 0).map(QueueStats::new);
        Self {
            protocol: Some(name.protocol.to_owned()),
            export: name.export.clone(),
            made_ns: front.made_ns.unwrap_or(0),
            connections: front.connections,
            counters,
            queues: queues.collect(),
            ..Self::new(LayerKind::Front, name.to_string(), &front.requests)
        }
    }

    /// What a layer has counted that is no front.
    pub fn of_meter(kind: LayerKind, name: String, meter: &Meter) -> Self {
        Self { made_ns: meter.made_ns(), ..Self::new(kind, name, &meter.read()) }
    }

    /// The same with numbers that only this kind of layer has.
    pub fn with_counters<const N: usize>(self, counters: [(&str, u64); N]) -> Self {
        let counters = counters.into_iter().map(|(name, count)| (name.to_owned(), count));
        Self { counters: self.counters.into_iter().chain(counters).collect(), ..self }
    }

    /// What a layer has counted, without what only some layers have. It is not known when its counters were made.
    pub fn new(kind: LayerKind, name: String, reading: &Reading) -> Self {
        Self {
            kind,
            name,
            protocol: None,
            export: None,
            made_ns: 0,
            at_ns: reading.at_ns,
            queue_time_ns: reading.depth_integral_ns,
            age_sum_ns: reading.age_sum_ns,
            connections: 0,
            operations: OperationStats::all(reading),
            counters: BTreeMap::new(),
            queues: Vec::new(),
        }
    }

    /// The reading that this was made of. Kinds of request that are not known are left out.
    pub fn reading(&self) -> Reading {
        let (at_ns, depth_integral_ns, age_sum_ns) = (self.at_ns, self.queue_time_ns, self.age_sum_ns);
        OperationStats::add_to(&self.operations, Reading { at_ns, depth_integral_ns, age_sum_ns, ..Reading::default() })
    }
}

impl QueueStats {
    /// The reading that this was made of, at the moment `at_ns` of its layer. Kinds of request that are not known are left out.
    pub fn reading(&self, at_ns: u64) -> Reading {
        let (depth_integral_ns, age_sum_ns) = (self.queue_time_ns, self.age_sum_ns);
        OperationStats::add_to(&self.operations, Reading { at_ns, depth_integral_ns, age_sum_ns, ..Reading::default() })
    }

    fn new(queue: &QueueReading) -> Self {
        let counters = [
            ("notifications_total".to_owned(), queue.notifications),
            ("notifications_suppressed_total".to_owned(), queue.suppressed),
        ];
        Self {
            number: queue.number as u64,
            queue_time_ns: queue.requests.depth_integral_ns,
            age_sum_ns: queue.requests.age_sum_ns,
            operations: OperationStats::all(&queue.requests),
            counters: counters.into(),
        }
    }
}

impl OperationStats {
    /// `reading` with what these say of each kind of request.
    fn add_to(all: &[Self], mut reading: Reading) -> Reading {
        for stats in all {
            if let Some(op) = Op::ALL.into_iter().find(|op| op.name() == stats.operation) {
                reading.ops[op as usize] = stats.reading();
            }
        }
        reading
    }

    /// All kinds of request that ever came.
    fn all(reading: &Reading) -> Vec<Self> {
        let ops = Op::ALL.into_iter().map(|op| (op, reading.op(op))).filter(|(_, op)| op.begun > 0);
        ops.map(|(op, reading)| Self::new(op, reading)).collect()
    }

    fn new(op: Op, reading: &OpReading) -> Self {
        let buckets = reading.latency.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        Self {
            operation: op.name().to_owned(),
            begun: reading.begun,
            requests: reading.ended,
            errors: reading.errors,
            abandoned: reading.abandoned,
            bytes: reading.bytes,
            in_flight: reading.in_flight.max(0) as u64,
            latency_sum_ns: reading.latency.sum_ns,
            latency_max_ns: reading.latency.max_ns,
            latency_buckets: buckets.map(|(bucket, count)| [bounds_of(bucket).start, *count]).collect(),
        }
    }

    fn reading(&self) -> OpReading {
        let mut counts = vec![0; if self.latency_buckets.is_empty() { 0 } else { BUCKETS }];
        self.latency_buckets.iter().for_each(|[start_ns, count]| counts[bucket_of(*start_ns)] += count);
        OpReading {
            begun: self.begun,
            ended: self.requests,
            errors: self.errors,
            abandoned: self.abandoned,
            bytes: self.bytes,
            // `in_flight` never tells that more have ended than began, and these counts do.
            in_flight: self.begun.wrapping_sub(self.requests).cast_signed(),
            latency: Latency { sum_ns: self.latency_sum_ns, max_ns: self.latency_max_ns, counts },
        }
    }
}

#[cfg(test)]
mod tests {
    use spile_core::metrics::{Counters, Ended};

    use super::*;

    #[test]
    fn a_reading_comes_back_as_it_went() {
        let counters = Counters::default();
        for (op, latency_ns) in [(Op::Read, 7), (Op::Read, 90_000), (Op::Flush, u64::MAX >> 8), (Op::WriteZeroes, 0)] {
            counters.begin(op, 512, 5);
            counters.end(Ended { op, failed: op == Op::Flush, begun_ns: 5 }, 5 + latency_ns);
        }
        counters.begin(Op::Write, 4096, 100);
        let reading = counters.read(1 << 60);
        let stats = LayerStats::new(LayerKind::Disk, "disk".to_owned(), &reading);
        let text = serde_json::to_string(&stats).unwrap();
        let back: LayerStats = serde_json::from_str(&text).unwrap();
        assert_eq!(back.reading(), reading);
        assert_eq!(back.operations.len(), 4, "{text}");
        assert!(text.contains("[67645734912,1]"), "{text}");
    }
}
