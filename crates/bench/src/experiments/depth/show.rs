//! The figures of `depth` as tables and plots.

use comfy_table::Table;

use super::{Asked, LONG_DEPTH, Layer, Part, Row, Store, Way};
use crate::experiments::plot::{Axis, Figure, Marks, Panel, Point, Scale, Series, styles};
use crate::experiments::sample::{Spread, median};
use crate::experiments::{Figures, Outcome, quick_mark, right, table};
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
    let intervals = intervals(outcome);
    text + &format!(
        "long requests: the disk's queue in the first intervals\n{intervals}\n{}",
        found(outcome).join("\n")
    )
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

/// The first intervals of the second part.
fn intervals(outcome: &Depth) -> Table {
    let mut table = table(["interval", "integrated", "by ticks"].map(str::to_owned));
    for row in at_the_disk(outcome).iter().take(10) {
        let sizes = [queue(row), row.queue_size_iostat].map(|size| format!("{size:.2}"));
        table.add_row([row.round.to_string()].into_iter().chain(sizes).map(right));
    }
    table
}

/// The plots and their names.
pub fn figures(outcome: &Depth) -> Figures {
    vec![("depth".to_owned(), growing(outcome)), ("depth-intervals".to_owned(), of_intervals(outcome))]
}

fn note(outcome: &Depth, what: &str) -> String {
    format!("{what} · {}", outcome.host.summary())
}

/// What a layer's line shows: the integrated queue, or, where there is none, that by ticks.
fn queue(row: &Row) -> f64 {
    row.queue_size_avg.unwrap_or(row.queue_size_iostat)
}

/// The end of the axis of shares: only a device that others use, too, is beyond it, and has an arrow there.
const MOST_SHARE: f64 = 1.2;

/// The queue of each layer as a share of the requests in flight: a panel for each disk and way.
fn growing(outcome: &Depth) -> Figure {
    let rows = of_part(outcome, Part::Growing);
    let panels = Store::ALL.into_iter().flat_map(|store| Way::ALL.map(|way| (store, way)));
    let panel = |(store, way): (Store, Way)| {
        let here: Vec<&Row> = rows.iter().filter(|row| row.store == store && row.way == way).copied().collect();
        let title = format!("{}, {}", way.name(), what_is_below(store, &outcome.parameters));
        Panel { title, marks: shares(&here, &outcome.parameters.queue_depths) }
    };
    let what = "reads of 4 KiB; client, front, disk and store integrate their queues, and of a host's device the kernel counts the time \
                of ended requests, those of other programs with them; medians, and what lies between the tenth and the ninth tenth; an arrow \
                stands over a value beyond the axis";
    Figure {
        title: "depth: the average queue size at each layer, as a share of the requests in flight".to_owned(),
        note: note(outcome, what),
        mark: quick_mark(outcome.parameters.quick),
        panels: panels.map(panel).collect(),
        columns: 2,
        keys: Vec::new(),
    }
}

fn shares(rows: &[&Row], depths: &[u32]) -> Marks {
    // An image has the same requests as its disk here: one line would hide the other.
    let is_drawn = |layer: &Layer| *layer != Layer::Image && rows.iter().any(|row| row.layer == *layer);
    let drawn: Vec<Layer> = Layer::ALL.into_iter().filter(is_drawn).collect();
    let series = drawn.iter().zip(styles(drawn.iter().map(|layer| layer.name()))).map(|(layer, style)| {
        let point = |depth: &u32| {
            let here = rows.iter().filter(|row| row.layer == *layer && row.queue_depth == *depth);
            let values: Vec<f64> = here.map(|row| queue(row) / f64::from(*depth)).collect();
            let Spread { p10, p50, p90 } = Spread::of(&values);
            (!values.is_empty()).then(|| Point::new(f64::from(*depth), p50).within(p10, p90))
        };
        Series { name: layer.name().to_owned(), style, points: depths.iter().filter_map(point).collect() }
    });
    let at: Vec<f64> = depths.iter().copied().map(f64::from).collect();
    Marks::Series {
        x: Axis::at("requests in flight at the client", Scale::Log, &at),
        y: Axis::linear("average queue ÷ requests in flight", MOST_SHARE),
        series: series.collect(),
        reference: None,
    }
}

/// The disk's queue in short intervals, integrated and as an averaging tool has it.
fn of_intervals(outcome: &Depth) -> Figure {
    let asked = &outcome.parameters;
    let rows = at_the_disk(outcome);
    let line = |name: &str, style, value: fn(&Row) -> f64| Series {
        name: name.to_owned(),
        style,
        points: rows.iter().map(|row| Point::new(f64::from(row.round), value(row))).collect(),
    };
    let names = ["integrated", "by ticks"];
    let looks = styles(names);
    let series = vec![line(names[0], looks[0], queue), line(names[1], looks[1], |row| row.queue_size_iostat)];
    let most = rows.iter().map(|row| row.queue_size_iostat.max(queue(row))).fold(0.0, f64::max);
    let last = rows.iter().map(|row| row.round).max().unwrap_or(1);
    let x = Axis::between(&format!("intervals of {:.0} ms", asked.interval_ms), 0.0, f64::from(last));
    let marks = Marks::Series { x, y: Axis::linear("average queue size at the disk", most), series, reference: None };
    let what = format!("{LONG_DEPTH} reads in flight, of {:.0} ms each", asked.long_request_ms);
    Figure {
        title: "depth: requests that are longer than the interval, integrated and by ticks of ended requests"
            .to_owned(),
        note: note(outcome, &what),
        mark: quick_mark(asked.quick),
        panels: vec![Panel { title: String::new(), marks }],
        columns: 1,
        keys: Vec::new(),
    }
}

/// What was found, in sentences: one of each part.
pub fn found(outcome: &Depth) -> Vec<String> {
    [of_growing(outcome), of_long(outcome)].into_iter().flatten().collect()
}

/// The queue at each layer with the fewest requests in flight, as the article has it.
fn of_growing(outcome: &Depth) -> Option<String> {
    let (store, way) = (Store::Delay, Way::VhostUser);
    let depth = outcome.parameters.queue_depths.first().copied().unwrap_or(1);
    let rows = of_part(outcome, Part::Growing).into_iter();
    let rows: Vec<&Row> = rows.filter(|row| row.store == store && row.way == way && row.queue_depth == depth).collect();
    let shown = Layer::ALL.into_iter().filter_map(|layer| {
        Some(format!("{:.2} at the {}", middle(&rows, layer, |row| Some(queue(row)))?, layer.name()))
    });
    let iops = middle(&rows, Layer::Client, |row| Some(row.requests_per_s))?;
    Some(format!(
        "Depth {depth}, {} a second by {} from {}: an average queue of {}.",
        format_count(iops),
        way.name(),
        what_is_below(store, &outcome.parameters),
        shown.collect::<Vec<_>>().join(", ")
    ))
}

/// What requests that are longer than the interval look like.
fn of_long(outcome: &Depth) -> Option<String> {
    let rows = at_the_disk(outcome);
    let ends = |value: fn(&Row) -> f64| {
        let low = rows.iter().map(|row| value(row)).reduce(f64::min)?;
        Some(format!("{low:.1} to {:.1}", rows.iter().map(|row| value(row)).fold(0.0, f64::max)))
    };
    let Asked { long_request_ms, interval_ms, .. } = &outcome.parameters;
    Some(format!(
        "Requests of {long_request_ms:.0} ms, {LONG_DEPTH} in flight, looked at every {interval_ms:.0} ms: the disk's integrated queue is \
         {}; made from the ticks of ended requests it is {}.",
        ends(queue)?,
        ends(|row| row.queue_size_iostat)?
    ))
}

/// The rows of the second part at the disk.
fn at_the_disk(outcome: &Depth) -> Vec<&Row> {
    of_part(outcome, Part::Intervals).into_iter().filter(|row| row.layer == Layer::Disk).collect()
}
