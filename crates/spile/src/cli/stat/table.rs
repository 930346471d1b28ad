//! The tables of `spile stat`: of a disk's operations, and of its layers.

use std::fmt::Write as _;

use spile_server::serving::api::rates::{LayerRates, OperationRates};

use super::DiskStat;
use crate::log::printable;
use crate::units::format_us;

/// The widest name of a layer in a table. With it, no table is wider than 80 columns.
const NAME_WIDTH: usize = 22;
/// The longest bar of a queue.
const BAR_WIDTH: usize = 15;
/// The widest line of text.
const TEXT_WIDTH: usize = 80;

/// The operations of a disk as its guests and clients see them.
pub fn operations(stat: &DiskStat) -> String {
    let mut text = head(stat);
    let fronts: Vec<&LayerRates> = of_kind(stat, "front").collect();
    // A disk that nobody can reach yet has no front.
    let guests = if fronts.is_empty() { of_kind(stat, "disk").collect() } else { fronts };
    for layer in guests {
        let heads = ["per s", "MB/s", "failed", "mean", "50 %", "99 %", "99.9 %"];
        line(&mut text, &name_of(layer), &heads.map(str::to_owned));
        for op in &layer.operations {
            let rates = [op.requests_per_s, op.bytes_per_s / 1e6, op.errors_per_s].map(number);
            line(&mut text, &format!("  {}", op.operation), &[&rates[..], &latencies(op)].concat());
        }
        if layer.operations.is_empty() {
            text.push_str("  no requests\n");
        }
        // Writing to a string cannot fail.
        let queue = number(layer.queue_size());
        let _ = writeln!(text, "  average queue size {queue}, in flight now {}", layer.in_flight);
    }
    text.trim_end().to_owned()
}

fn latencies(op: &OperationRates) -> [String; 4] {
    [op.latency_mean_us, op.latency_p50_us, op.latency_p99_us, op.latency_p999_us].map(time)
}

/// The picture of queues: the average queue size and the latency at each layer, side by side, and what each layer did.
pub fn layers(stat: &DiskStat) -> String {
    let mut text = head(stat);
    let layers = &stat.rates.layers;
    let longest = layers.iter().map(|layer| layer.queue_size()).fold(0.0, f64::max);
    line(&mut text, "QUEUES AND LATENCIES", &["aqu-sz", "mean", "50 %", "99 %", "99.9 %"].map(str::to_owned));
    for layer in layers {
        let times = [layer.latency_mean_us, layer.latency_p50_us, layer.latency_p99_us, layer.latency_p999_us];
        let numbers = [&[number(layer.queue_size())][..], &times.map(time)].concat();
        line(&mut text, &name_of(layer), &numbers);
        let bar = bar(layer.queue_size(), longest);
        if !bar.is_empty() {
            // The bar goes on in the line of its numbers.
            text.pop();
            let _ = writeln!(text, "  {bar}");
        }
    }
    if let Some(why) = &stat.no_host_device {
        let _ = writeln!(text, "device: none: {}", printable(why));
    }
    let heads = ["r/s", "w/s", "flush/s", "rMB/s", "wMB/s", "failed", "in fl."];
    text.push('\n');
    line(&mut text, "REQUESTS", &heads.map(str::to_owned));
    for layer in layers {
        let rates = [layer.reads_per_s, layer.writes_per_s, layer.flushes_per_s].map(number);
        let bytes = [layer.read_bytes_per_s / 1e6, layer.write_bytes_per_s / 1e6, layer.errors_per_s].map(number);
        line(&mut text, &name_of(layer), &[&rates[..], &bytes, &[layer.in_flight.to_string()]].concat());
    }
    text.push_str(&counters(layers));
    let _ = write!(text, "\n{}", wrapped(&meaning(stat)));
    text
}

/// What else there is to say of each layer.
fn counters(layers: &[LayerRates]) -> String {
    let remarks = layers.iter().flat_map(remarks);
    let lines: String = remarks.map(|remark| format!("{}\n", wrapped(&remark))).collect();
    if lines.is_empty() { lines } else { format!("\n{lines}") }
}

/// What else there is to say of a layer, in lines: what only this layer counts, its queues where it has several, and counts that contradict
/// each other.
pub fn remarks(layer: &LayerRates) -> Vec<String> {
    let (name, counts) = (name_of(layer), counts(layer));
    let counts = (!counts.is_empty()).then(|| format!("{name}: {}", printable(&counts.join(", "))));
    let queues = layer.queues.iter().filter(|_| layer.queues.len() > 1).map(|queue| {
        let (size, rate) = (number(queue.queue_size_avg), number(queue.requests_per_s));
        let (mean, p99) = (time(queue.latency_mean_us), time(queue.latency_p99_us));
        format!("{name}, queue {}: aqu-sz {size}, {rate} requests/s, mean {mean}, 99 % {p99}", queue.number)
    });
    let gap = layer.little_gap.map(|share| {
        format!("{name}: WARNING: its counts contradict each other by {:.1} %: one is wrong", share * 100.0)
    });
    counts.into_iter().chain(queues).chain(gap).collect()
}

/// What only this layer counts, where it is not zero: how much of it per second, or how much of it there is.
fn counts(layer: &LayerRates) -> Vec<String> {
    let per_s = layer.counters_per_s.iter().filter(|(_, rate)| **rate > 0.0);
    let per_s = per_s.map(|(name, rate)| format!("{} {}/s", name.trim_end_matches("_total"), number(*rate)));
    let now = layer.gauges.iter().filter(|(_, value)| **value > 0).map(|(name, value)| format!("{name} {value}"));
    per_s.chain(now).collect()
}

/// What the difference between two layers means, with the numbers of this disk where it has requests.
fn meaning(stat: &DiskStat) -> String {
    let rule = "A layer's queue is larger than that of the one below it by the requests that are between the two: their number per second, \
                times the time that each spends there.";
    // A disk may have fronts that nobody uses.
    let busy: Vec<_> = stat.rates.layers.iter().filter(|layer| layer.queue_size() > 0.0).collect();
    // The host's device may have requests of others, too.
    let is_below = |layer: &&&LayerRates| busy.first().is_some_and(|top| top.queue_size() > layer.queue_size());
    match (busy.first(), busy.iter().rev().find(is_below)) {
        (Some(top), Some(below)) => format!(
            "{rule} Of {} requests in flight at {}, {} are at {}.",
            number(top.queue_size()),
            name_of(top),
            number(below.queue_size()),
            name_of(below),
        ),
        _ => rule.to_owned(),
    }
}

fn head(stat: &DiskStat) -> String {
    let rates = &stat.rates;
    let interval_s = rates.layers.first().map_or(0.0, |layer| layer.interval_s);
    let (name, path) = (printable(&rates.name), printable(&rates.path));
    format!("{name}: {path}, served by process {}, in {interval_s:.2} s\n\n", rates.pid)
}

fn of_kind<'a>(stat: &'a DiskStat, kind: &'a str) -> impl Iterator<Item = &'a LayerRates> {
    stat.rates.layers.iter().filter(move |layer| layer.kind == kind)
}

/// A layer's name, without the folders of its file, and not longer than a column.
pub fn name_of(layer: &LayerRates) -> String {
    let name = printable(&layer.name);
    let short = match name.split_once(' ') {
        Some((kind, rest)) if rest.starts_with('/') => format!("{kind} {}", rest.rsplit('/').next().unwrap_or(rest)),
        _ => name,
    };
    match short.chars().count() > NAME_WIDTH {
        true => short.chars().take(NAME_WIDTH - 1).chain(['…']).collect(),
        false => short,
    }
}

fn line(text: &mut String, name: &str, cells: &[String]) {
    // Writing to a string cannot fail.
    let _ = write!(text, "{name:<NAME_WIDTH$}");
    cells.iter().for_each(|cell| {
        let _ = write!(text, " {cell:>7}");
    });
    text.push('\n');
}

/// A number with about three digits that matter.
pub fn number(value: f64) -> String {
    match value {
        v if v >= 99_999.5 => format!("{:.0}k", v / 1e3),
        v if v >= 99.95 => format!("{v:.0}"),
        v if v >= 9.995 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

fn time(us: Option<f64>) -> String {
    us.map_or_else(|| "-".to_owned(), format_us)
}

/// The text in lines that fit a terminal.
fn wrapped(text: &str) -> String {
    let (mut lines, mut width) = (String::new(), 0);
    for word in text.split(' ') {
        let long = word.chars().count();
        let gap = match width {
            0 => "",
            width if width + 1 + long > TEXT_WIDTH => {
                lines.push('\n');
                ""
            }
            _ => " ",
        };
        width = if gap.is_empty() { long } else { width + 1 + long };
        lines.push_str(gap);
        lines.push_str(word);
    }
    lines
}

fn bar(queue: f64, longest: f64) -> String {
    let width = if longest > 0.0 { (queue / longest * BAR_WIDTH as f64).round() as usize } else { 0 };
    "#".repeat(width)
}

#[cfg(test)]
mod tests {
    use spile_server::serving::api::rates::{DiskRates, QueueRates};

    use super::*;

    fn layer(name: &str, kind: &str, queue: f64) -> LayerRates {
        let (name, kind) = (name.to_owned(), kind.to_owned());
        LayerRates {
            name,
            kind,
            interval_s: 1.0,
            reads_per_s: 5189.0,
            queue_size_avg: Some(queue),
            ..LayerRates::default()
        }
    }

    fn stat(layers: Vec<LayerRates>, no_host_device: Option<&str>) -> DiskStat {
        let [name, path, server] = ["a", "/disks/a.raw", "/run/a.control"].map(str::to_owned);
        let rates = DiskRates { name, path, server, pid: 7, layers };
        DiskStat { rates, host_device: None, no_host_device: no_host_device.map(str::to_owned) }
    }

    #[test]
    fn layers_stand_side_by_side_and_the_difference_is_told() {
        let mut front = layer("front nbd \"\"", "front", 0.71);
        front.latency_mean_us = Some(137.0);
        front.counters_per_s = [("notifications_total".to_owned(), 5189.0), ("kicks_total".to_owned(), 0.0)].into();
        let text = layers(&stat(vec![front, layer("disk", "disk", 0.65), layer("device dm-3", "device", 0.61)], None));
        let expected = "\
a: /disks/a.raw, served by process 7, in 1.00 s

QUEUES AND LATENCIES    aqu-sz    mean    50 %    99 %  99.9 %
front nbd \"\"              0.71  137 µs       -       -       -  ###############
disk                      0.65       -       -       -       -  ##############
device dm-3               0.61       -       -       -       -  #############

REQUESTS                   r/s     w/s flush/s   rMB/s   wMB/s  failed  in fl.
front nbd \"\"              5189    0.00    0.00    0.00    0.00    0.00       0
disk                      5189    0.00    0.00    0.00    0.00    0.00       0
device dm-3               5189    0.00    0.00    0.00    0.00    0.00       0

front nbd \"\": notifications 5189/s

A layer's queue is larger than that of the one below it by the requests that are
between the two: their number per second, times the time that each spends there.
Of 0.71 requests in flight at front nbd \"\", 0.61 are at device dm-3.";
        assert_eq!(text, expected, "\n{text}");
    }

    #[test]
    fn several_queues_are_told_apart_and_counts_that_contradict_each_other_are_a_warning() {
        let mut front = layer("front xen", "front", 1.5);
        front.queues = vec![QueueRates { requests_per_s: 12.0, ..QueueRates::default() }];
        assert!(!layers(&stat(vec![front.clone()], None)).contains("queue 0"), "one queue is the whole front");
        front.queues.push(QueueRates {
            number: 1,
            queue_size_avg: 1.5,
            latency_mean_us: Some(7.0),
            ..QueueRates::default()
        });
        front.little_gap = Some(0.25);
        let text = layers(&stat(vec![front], None));
        assert!(text.contains("\nfront xen, queue 1: aqu-sz 1.50, 0.00 requests/s, mean 7.00 µs, 99 % -\n"), "{text}");
        assert!(text.contains("WARNING: its counts contradict each other by 25.0 %"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    #[test]
    fn what_is_missing_has_a_reason_and_what_is_hostile_does_no_harm() {
        let hostile = layer("image /disks/\u{1b}[2J/very-long-name-of-a-leaf-that-fills-lines.vhd", "image", 0.0);
        let text = layers(&stat(vec![layer("disk", "disk", 0.0), hostile], Some("it lies on tmpfs")));
        assert!(text.contains("device: none: it lies on tmpfs"), "{text}");
        assert!(!text.contains('\u{1b}') && text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let text = operations(&stat(vec![layer("disk", "disk", 0.0)], None));
        assert!(text.contains("disk") && text.contains("no requests"), "{text}");
    }
}
