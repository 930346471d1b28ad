//! The figures of `depth` as tables and plots.

use comfy_table::Table;

use super::{Asked, LONG_DEPTH, Layer, Part, Row, Store, Way};
use crate::experiments::sample::median;
use crate::experiments::{Figures, Outcome, right, table};
use spile_server::units::{format_count, format_us};

type Depth = Outcome<Asked, Row>;

/// The median of the rounds at one layer; `None` when it was not counted.
fn middle(rows: &[&Row], layer: Layer, value: impl Fn(&Row) -> Option<f64>) -> Option<f64> {
    let values: Vec<f64> = rows.iter().filter(|row| row.layer == layer).filter_map(|row| value(row)).collect();
    (!values.is_empty()).then(|| median(values))
}

/// The layers that have a figure, in their order.
fn layers(rows: &[&Row], value: impl Fn(&Row) -> Option<f64>) -> Vec<Layer> {
    Layer::ALL.into_iter().filter(|layer| middle(rows, *layer, &value).is_some()).collect()
}

fn average(row: &Row) -> Option<f64> {
    row.queue_size_avg
}

fn ticks(row: &Row) -> Option<f64> {
    Some(row.queue_size_iostat)
}

/// The figures as tables.
pub fn text(outcome: &Depth) -> String {
    let asked = &outcome.parameters;
    let order = if asked.random { "random" } else { "sequential" };
    let mut text = String::new();
    for store in Store::ALL {
        for way in Way::ALL {
            let rows: Vec<&Row> = of_part(outcome, Part::Growing)
                .into_iter()
                .filter(|row| row.store == store && row.way == way)
                .collect();
            let what = what_is_below(store, asked);
            text += &format!(
                "{order} reads of 4 KiB by {} from {what}: average queue size at each layer\n{}\n\n",
                way.name(),
                by_depth(&rows, &asked.queue_depths)
            );
        }
    }
    text + &intervals(outcome)
}

fn of_part(outcome: &Depth, part: Part) -> Vec<&Row> {
    outcome.rows.iter().filter(|row| row.part == part).collect()
}

fn what_is_below(store: Store, asked: &Asked) -> String {
    match (store, &asked.host_device) {
        (Store::Delay, _) => format!("an export whose requests take {} longer", format_us(asked.delay_us)),
        (Store::Device, Some(device)) => format!("a raw file on {device}, O_DIRECT"),
        (Store::Device, None) => "a raw file on no device that the kernel counts".to_owned(),
    }
}

/// A line for each depth: requests a second and their time at the client, the queue of each layer, and in the last column what an averaging tool
/// shows of the device.
fn by_depth(rows: &[&Row], depths: &[u32]) -> Table {
    let shown = layers(rows, average);
    let has_device = !layers(rows, ticks).iter().all(|layer| *layer != Layer::HostDevice);
    let names = shown.iter().map(|layer| layer.name());
    let last = has_device.then_some("device by ticks");
    let header = ["depth", "IOPS", "latency"].into_iter().chain(names).chain(last);
    let mut table = table(header.map(str::to_owned));
    for depth in depths {
        let rows: Vec<&Row> = rows.iter().filter(|row| row.queue_depth == *depth).copied().collect();
        let at_client = |value: fn(&Row) -> f64| middle(&rows, Layer::Client, |row| Some(value(row))).unwrap_or(0.0);
        let number = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.2}"));
        let queues = shown.iter().map(|layer| number(middle(&rows, *layer, average)));
        let device = has_device.then(|| number(middle(&rows, Layer::HostDevice, ticks)));
        let first = [
            depth.to_string(),
            format_count(at_client(|row| row.requests_per_s)),
            format_us(at_client(|row| row.latency_mean_us)),
        ];
        table.add_row(first.into_iter().chain(queues).chain(device).map(right));
    }
    table
}

/// What the second part shows, in a table of its first intervals and a sentence.
fn intervals(outcome: &Depth) -> String {
    let asked = &outcome.parameters;
    let rows: Vec<&Row> =
        of_part(outcome, Part::Intervals).into_iter().filter(|row| row.layer == Layer::Disk).collect();
    let mut table = table(["interval", "integrated", "by ticks"].map(str::to_owned));
    for row in rows.iter().take(10) {
        let average = row.queue_size_avg.unwrap_or(0.0);
        table.add_row(
            [row.round.to_string(), format!("{average:.2}"), format!("{:.2}", row.queue_size_iostat)].map(right),
        );
    }
    let ends = |values: Vec<f64>| {
        let (low, high) =
            values.into_iter().fold((f64::MAX, 0.0f64), |(low, high), value| (low.min(value), high.max(value)));
        format!("{low:.1} to {high:.1}")
    };
    format!(
        "requests of {:.0} ms, {LONG_DEPTH} in flight, looked at every {:.0} ms: the disk's queue in the first intervals\n{table}\n\
         the integrated queue is {}; made from the ticks of ended requests it is {}",
        asked.long_request_ms,
        asked.interval_ms,
        ends(rows.iter().filter_map(|row| row.queue_size_avg).collect()),
        ends(rows.iter().map(|row| row.queue_size_iostat).collect()),
    )
}

/// The plots and their names.
pub fn figures(_: &Depth) -> Figures {
    Figures::new()
}
