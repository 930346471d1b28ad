//! The series of the server and of its disks.
//!
//! Their names and meanings come from the tables of those who count ([`METRICS`], [`FRONT_METRICS`]), with `spile_disk_` before them. Numbers
//! that a layer counts by name and that stand in no table are passed through.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use spile_core::Result;
use spile_core::metrics::{Kind, METRICS, Metric, Op, Reading, Value as Place};
use spile_front::FRONT_METRICS;

use super::Detail;
use super::families::{Families, Label, Value};
use super::latency::histogram;
use crate::serving::api::limits::DiskLimits;
use crate::serving::api::stats::{DiskStats, LayerKind, LayerStats, QueueStats};
use crate::serving::api::types::Disk;
use crate::serving::api::view::View;
use crate::serving::api::workers::Worker;

/// Operations that every front has from the beginning, so that a rate sees their first request.
const ALWAYS: [Op; 3] = [Op::Read, Op::Write, Op::Flush];
/// What [`Detail::Disk`] leaves out: it follows from other metrics, or says little.
const LEFT_OUT: [&str; 2] = ["requests_begun_total", "request_duration_max_seconds"];

/// What layers other than fronts count by name.
const COUNTERS: [(&str, &str); 7] = [
    ("splits_total", "Requests that went to the images in several parts."),
    ("merges_total", "Requests that went to the images as a part of another one."),
    (
        "bounces_total",
        "Requests that were copied to other memory, because theirs is not aligned as the store needs it.",
    ),
    ("bounced_bytes_total", "Bytes of these requests."),
    ("map_loads_total", "Times that a request waited for a piece of an image's map that was not in memory."),
    ("allocations_total", "Blocks or clusters that an image has taken for data."),
    ("syncs_total", "Syncs that went to the file. Each covers all flushes that came before it."),
];

/// What is told of a disk whose thin image lies on a block device, and of no other: each metric's name, its type and its meaning.
pub const ROOM_METRICS: [(&str, &str, &str); 5] = [
    ("spile_disk_device_bytes", "gauge", "The length of the device below a thin image, as far as the image uses it."),
    (
        "spile_disk_device_free_bytes",
        "gauge",
        "How much of the device the image does not use. It may find no room before this is 0 when that lies in small pieces.",
    ),
    ("spile_disk_device_wanted_bytes", "gauge", "The length that the device should have; 0 while it has enough."),
    ("spile_disk_device_growths_total", "counter", "Times that the command of --grow has made the device longer."),
    ("spile_disk_device_growth_failures_total", "counter", "Times that it has failed to."),
];

/// Adds the series of the server and of all disks.
///
/// # Errors
/// `Shutdown` while the server hands over.
pub fn collect(families: &mut Families, view: &View, detail: Detail, told: &Told) -> Result<()> {
    let disks = view.readings(detail)?;
    let version = [Label::new("version", env!("CARGO_PKG_VERSION"))];
    families.add("spile_build_info", "The program's version, as a label. Always 1.", &version, Value::Gauge(1.0));
    let engine = [Label::new("engine", &view.engine())];
    families.add(
        "spile_engine_info",
        "What does the I/O: uring, aio or threads. Always 1.",
        &engine,
        Value::Gauge(1.0),
    );
    view.workers("").workers.iter().for_each(|worker| of_worker(families, worker));
    let mut all = Vec::new();
    for (disk, stats) in &disks {
        state(families, disk);
        all.extend(layers(disk, stats, detail));
    }
    told.raise(detail, &mut all);
    all.iter().for_each(|layer| layer.add_to(families, detail));
    Ok(())
}

/// What was told of each layer's requests in flight, integrated over time, by the detail of the scrape: so that the sum never falls.
///
/// A scrape counts what is in flight up to its own moment. A request may then be noted as ended a little earlier, at the begin of its
/// worker's turn. Without this the sum would fall by so much when nothing else is in flight, and Prometheus would take it for a counter
/// that has begun at zero.
#[derive(Default)]
pub struct Told(Mutex<HashMap<Detail, Sums>>);

/// By the labels of a layer: when its counters were made, and the sum that was told, in nanoseconds.
type Sums = HashMap<Vec<Label>, (u64, u64)>;

impl Told {
    /// Raises sums that have fallen to what was told before. Layers that are not there any more are forgotten.
    fn raise(&self, detail: Detail, layers: &mut [Layer]) {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = told.remove(&detail).unwrap_or_default();
        for layer in layers.iter_mut() {
            let sum_ns = &mut layer.reading.depth_integral_ns;
            if let Some((made_ns, told_ns)) = before.get(&layer.labels)
                && *made_ns == layer.made_ns
                && told_ns.wrapping_sub(*sum_ns).cast_signed() > 0
            {
                *sum_ns = *told_ns;
            }
        }
        let now = layers.iter().map(|layer| (layer.labels.clone(), (layer.made_ns, layer.reading.depth_integral_ns)));
        told.insert(detail, now.collect());
    }
}

/// What a worker has done.
fn of_worker(families: &mut Families, worker: &Worker) {
    let number = Label::new("worker", &worker.number.to_string());
    let mut add = |name: &str, help: &str, labels: &[Label], value: f64| {
        let labels = [std::slice::from_ref(&number), labels].concat();
        families.add(&format!("spile_worker_{name}"), help, &labels, Value::Counter(value));
    };
    let wakeups = [
        ("kick", worker.wakeups_kick),
        ("completion", worker.wakeups_completion),
        ("control", worker.wakeups_control),
        ("timer", worker.wakeups_timer),
    ];
    for (cause, count) in wakeups {
        let help = "Sleeps that have ended, by what ended them: kick, completion, control or timer.";
        add("wakeups_total", help, &[Label::new("cause", cause)], count as f64);
    }
    add("polls_total", "Times that a task was polled.", &[], worker.polls as f64);
    let help = "Operations that were given to the kernel or to a helper thread.";
    add("submissions_total", help, &[], worker.submissions as f64);
    add("completions_total", "Of the submissions, those that have ended.", &[], worker.completions as f64);
    let help = "System calls that gave operations to the kernel, asked for completions, or slept.";
    add("system_calls_total", help, &[], worker.system_calls as f64);
    let help = "Processor time of the worker's thread, without helper threads.";
    add("cpu_seconds_total", help, &[], worker.cpu_us as f64 / 1e6);
}

/// What is true of a disk now.
fn state(families: &mut Families, disk: &Disk) {
    let labels = [Label::new("disk", &disk.name)];
    let mut add = |name: &str, help: &str, labels: &[Label], value: f64| {
        families.add(&format!("spile_disk_{name}"), help, labels, Value::Gauge(value));
    };
    let [path, format] = [&disk.path, &disk.format];
    let read_only = if disk.read_only { "true" } else { "false" };
    let about = [Label::new("path", path), Label::new("format", format), Label::new("read_only", read_only)];
    add("info", "What the disk is, as labels. Always 1.", &[&labels[..], &about].concat(), 1.0);
    add("size_bytes", "The size that guests see.", &labels, disk.virtual_size_bytes as f64);
    let (requests, time_s) = disk.waiting.as_ref().map_or((0, 0.0), |waiting| (waiting.requests, waiting.time_s));
    add("requests_waiting", "Requests that wait for trouble below the disk to pass.", &labels, requests as f64);
    add("waiting_seconds", "How long the first of these requests has waited; 0 when none waits.", &labels, time_s);
    let has_failed = if disk.failed_sync.is_some() { 1.0 } else { 0.0 };
    add("sync_failed", "1 after a failed sync, until its loss is accepted: every flush fails.", &labels, has_failed);
    let waited = [
        (
            "requests_waited_total",
            "Requests that had to wait for trouble below the disk to pass.",
            disk.waited_requests as f64,
        ),
        ("wait_seconds_total", "How long these have waited for it, all together.", disk.waited_s),
    ];
    for (name, help, value) in waited {
        families.add(&format!("spile_disk_{name}"), help, &labels, Value::Counter(value));
    }
    room(families, disk, &labels);
    limits(families, disk, &labels);
}

/// The room of a thin image on a block device.
fn room(families: &mut Families, disk: &Disk, labels: &[Label]) {
    let Some(room) = &disk.room else { return };
    let gauge = |bytes: u64| Value::Gauge(bytes as f64);
    let counter = |count: u64| Some(Value::Counter(count as f64));
    let values = [
        room.device_bytes.map(gauge),
        room.free_bytes.map(gauge),
        Some(gauge(room.wants_bytes.unwrap_or(0))),
        counter(room.grown_total),
        counter(room.failed_total),
    ];
    for ((name, _, help), value) in ROOM_METRICS.into_iter().zip(values) {
        value.into_iter().for_each(|value| families.add(name, help, labels, value));
    }
}

/// What limits a disk, and what that has delayed. A limit that there is not has no series.
fn limits(families: &mut Families, disk: &Disk, labels: &[Label]) {
    let mut add = |name: &str, help: &str, labels: &[Label], value: Value| {
        families.add(&format!("spile_disk_{name}"), help, labels, value);
    };
    let DiskLimits { own, group, job, delayed_requests, delayed_s, waiting_requests } = &disk.limits;
    let count = Value::Counter(*delayed_requests as f64);
    add("requests_delayed_total", "Requests that had to wait for a limit.", labels, count);
    add("delay_seconds_total", "How long these have waited for it, all together.", labels, Value::Counter(*delayed_s));
    let waiting = Value::Gauge(*waiting_requests as f64);
    add("requests_held_back", "Requests that wait for a limit now.", labels, waiting);
    let sources = [("disk", Some(own)), ("group", group.as_ref().map(|group| &group.limits)), ("job", job.as_ref())];
    for (source, limits) in sources.into_iter().filter_map(|(source, limits)| Some((source, limits?))) {
        let rates = [
            ("all", limits.iops, limits.bps),
            ("read", limits.read_iops, limits.read_bps),
            ("write", limits.write_iops, limits.write_bps),
        ];
        for (operation, iops, bps) in rates {
            let about = [Label::new("source", source), Label::new("operation", operation)];
            let labels = [labels, &about].concat();
            let gauge = |rate: u64| Value::Gauge(rate as f64);
            let (requests, bytes) = ("Requests that may pass in a second.", "Bytes that may pass in a second.");
            iops.into_iter().for_each(|rate| add("limit_requests_per_second", requests, &labels, gauge(rate)));
            bps.into_iter().for_each(|rate| add("limit_bytes_per_second", bytes, &labels, gauge(rate)));
        }
    }
}

/// Which of its numbers a layer tells.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// All of them.
    Whole,
    /// Those of one queue of a front.
    Queue,
    /// Those that the queues of the front do not tell.
    Rest,
}

/// What layers with the same labels have counted together.
struct Layer {
    kind: LayerKind,
    part: Part,
    labels: Vec<Label>,
    /// When the first of its counters was made.
    made_ns: u64,
    reading: Reading,
    connections: u64,
    counters: BTreeMap<String, u64>,
}

/// The layers of a disk, as finely as `detail` wants them. A front that was exchanged for another one of the same name adds up with it.
fn layers(disk: &Disk, stats: &DiskStats, detail: Detail) -> Vec<Layer> {
    let mut layers: Vec<Layer> = Vec::new();
    for stats in &stats.layers {
        let labels = labels(&disk.name, stats, detail);
        if detail != Detail::Queue || stats.queues.is_empty() {
            count(&mut layers, labels, Part::Whole, stats);
            continue;
        }
        for queue in &stats.queues {
            let labels = [&labels[..], &[Label::new("queue", &queue.number.to_string())]].concat();
            count(&mut layers, labels, Part::Queue, &of_queue(stats, queue));
        }
        let mut rest = stats.clone();
        rest.counters.retain(|name, _| stats.queues.iter().all(|queue| !queue.counters.contains_key(name)));
        count(&mut layers, labels, Part::Rest, &rest);
    }
    layers
}

/// Counts a layer with others that have the same labels.
fn count(layers: &mut Vec<Layer>, labels: Vec<Label>, part: Part, stats: &LayerStats) {
    if let Some(layer) = layers.iter_mut().find(|layer| layer.labels == labels) {
        return layer.count(stats);
    }
    let (reading, counters) = (Reading::default(), BTreeMap::new());
    let made_ns = stats.made_ns;
    let mut layer = Layer { kind: stats.kind, part, labels, made_ns, reading, connections: 0, counters };
    layer.count(stats);
    layers.push(layer);
}

/// A queue of a front as if it were a layer.
fn of_queue(front: &LayerStats, queue: &QueueStats) -> LayerStats {
    LayerStats {
        queue_time_ns: queue.queue_time_ns,
        age_sum_ns: queue.age_sum_ns,
        connections: 0,
        operations: queue.operations.clone(),
        counters: queue.counters.clone(),
        queues: Vec::new(),
        ..front.clone()
    }
}

fn labels(disk: &str, stats: &LayerStats, detail: Detail) -> Vec<Label> {
    let (kind, key) = match stats.kind {
        LayerKind::Front => ("front", "export"),
        LayerKind::Disk => ("disk", ""),
        LayerKind::Image => ("image", "path"),
        LayerKind::Store => ("store", "path"),
    };
    let mut labels = vec![Label::new("disk", disk), Label::new("layer", kind)];
    let rest = stats.name.strip_prefix(kind).unwrap_or(&stats.name).trim_start();
    if detail == Detail::Disk || rest.is_empty() {
        return labels;
    }
    if let Some(protocol) = &stats.protocol {
        labels.push(Label::new("protocol", protocol));
    }
    let value = if stats.kind == LayerKind::Front { stats.export.as_deref().unwrap_or("") } else { rest };
    labels.push(Label::new(key, value));
    labels
}

impl Layer {
    fn count(&mut self, stats: &LayerStats) {
        self.made_ns = self.made_ns.min(stats.made_ns);
        self.reading += &stats.reading();
        self.connections += stats.connections;
        stats.counters.iter().for_each(|(name, count)| *self.counters.entry(name.clone()).or_default() += count);
    }

    fn add_to(&self, families: &mut Families, detail: Detail) {
        let is_told = |metric: &&Metric| detail != Detail::Disk || !LEFT_OUT.contains(&metric.name);
        for metric in METRICS.iter().filter(is_told).filter(|_| self.part != Part::Rest) {
            self.add(families, metric, detail);
        }
        if self.kind == LayerKind::Front && self.part != Part::Queue {
            let (name, help) = about("connections");
            families.add(&name, &help, &self.labels, Value::Gauge(self.connections as f64));
        }
        for (counter, count) in &self.counters {
            let ((name, help), count) = (about(counter), *count as f64);
            let value = if name.ends_with("_total") { Value::Counter(count) } else { Value::Gauge(count) };
            families.add(&name, &help, &self.labels, value);
        }
    }

    fn add(&self, families: &mut Families, metric: &Metric, detail: Detail) {
        let name = format!("spile_disk_{}", metric.name);
        let number = |value| if metric.kind == Kind::Counter { Value::Counter(value) } else { Value::Gauge(value) };
        let (whole, of) = match metric.value {
            Place::Whole(of) => return families.add(&name, metric.help, &self.labels, number(of(&self.reading))),
            Place::PerOp(of) => (None, Some(of)),
            Place::Latency(of) => (Some(of), None),
        };
        for op in self.ops().filter(|op| whole.is_none() || detail != Detail::Disk || ALWAYS.contains(op)) {
            let reading = self.reading.op(op);
            let labels = [&self.labels[..], &[Label::new("operation", op.name())]].concat();
            let number = of.map(|of| number(of(reading)));
            let histogram = whole.map(|of| Value::Histogram(histogram(of(reading))));
            number.or(histogram).into_iter().for_each(|value| families.add(&name, metric.help, &labels, value));
        }
    }

    /// The operations that the layer has seen, or is sure to see.
    fn ops(&self) -> impl Iterator<Item = Op> {
        let is_front = self.kind == LayerKind::Front && self.part == Part::Whole;
        Op::ALL.into_iter().filter(move |op| self.reading.op(*op).begun > 0 || is_front && ALWAYS.contains(op))
    }
}

/// The name and the meaning of a number that a layer counts by name.
fn about(counter: &str) -> (String, String) {
    let of_fronts = FRONT_METRICS.iter().map(|metric| (metric.name, metric.help));
    let known = of_fronts.chain(COUNTERS).find(|(name, _)| *name == counter);
    let help = known.map_or_else(|| format!("The layer's count {counter}."), |(_, help)| help.to_owned());
    (format!("spile_disk_{counter}"), help)
}

#[cfg(test)]
mod tests {
    use spile_core::metrics::{Counters, Ended};

    use super::*;
    use crate::serving::api::view::FrontName;

    fn scrape(told: &Told, stats: LayerStats) -> f64 {
        let labels = labels("a", &stats, Detail::Disk);
        let mut layers = Vec::new();
        count(&mut layers, labels, Part::Whole, &stats);
        told.raise(Detail::Disk, &mut layers);
        let mut families = Families::default();
        layers[0].add_to(&mut families, Detail::Disk);
        let families = families.into_vec();
        let depth = families.iter().find(|family| family.name() == "spile_disk_request_depth_seconds_total").unwrap();
        depth.series[0].counter.unwrap().value.unwrap()
    }

    #[test]
    fn the_depth_never_falls_while_the_counters_are_the_same() {
        const MS: u64 = 1_000_000;
        let (told, counters) = (Told::default(), Counters::default());
        let at = |counters: &Counters, made_ns, at_ns| LayerStats {
            made_ns,
            ..LayerStats::new(LayerKind::Front, "front xen".to_owned(), &counters.read(at_ns))
        };
        counters.begin(Op::Read, 512, 100 * MS);
        assert_eq!(scrape(&told, at(&counters, 1, 108 * MS)), 0.008);
        // It ends with a turn that has begun before that scrape.
        counters.end(Ended { op: Op::Read, failed: false, begun_ns: 100 * MS }, 105 * MS);
        assert_eq!(counters.read(200 * MS).depth_integral_ns, 5 * MS);
        assert_eq!([200, 300].map(|at_ms| scrape(&told, at(&counters, 1, at_ms * MS))), [0.008; 2]);
        counters.begin(Op::Read, 512, 300 * MS);
        assert_eq!(scrape(&told, at(&counters, 1, 310 * MS)), 0.015);
        // The disk was detached and attached again.
        assert_eq!(scrape(&told, at(&Counters::default(), 2, 320 * MS)), 0.0);
    }

    #[test]
    fn an_export_has_its_own_name_as_a_label() {
        let name = FrontName { protocol: "nbd", export: Some("\"e\\".to_owned()) };
        let front = spile_front::FrontReading::default();
        let found = labels("d", &LayerStats::of_front(&name, &front), Detail::Layer);
        assert_eq!(found[2..], [Label::new("protocol", "nbd"), Label::new("export", "\"e\\")]);
        let xen = FrontName { protocol: "xen", export: None };
        let found = labels("d", &LayerStats::of_front(&xen, &front), Detail::Layer);
        assert_eq!(found[2..], [Label::new("protocol", "xen"), Label::new("export", "")]);
    }
}
