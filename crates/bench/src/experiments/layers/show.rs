//! The figures of `layers` as tables and plots.

use comfy_table::{Cell, Table};

use super::{AIM_RATIO, Asked, Kind, Row};
use crate::experiments::filled::{sentences, warning};
use crate::experiments::plot::{Axis, Figure, Marks, Panel, Point, Series, styles};
use crate::experiments::sample::{Spread, median};
use crate::experiments::transfer::{Operation, Way};
use crate::experiments::{Figures, Outcome, quick_mark, right, table};
use spile_server::units::format_size;

type Layers = Outcome<Asked, Row>;

/// Smaller blocks are not what the aim is about: there the time of the calls counts.
const AIM_FROM_BYTES: u64 = 4096;

/// The rows of one place and way.
fn of(outcome: &Layers, place: Kind, way: Way) -> Vec<&Row> {
    outcome.rows.iter().filter(|row| row.place == place && row.way == way).collect()
}

/// The rows of one operation and block size.
fn at<'a>(rows: &[&'a Row], operation: Operation, request_bytes: u64) -> Vec<&'a Row> {
    let here = rows.iter().filter(|row| row.operation == operation && row.request_bytes == request_bytes);
    here.copied().collect()
}

/// The median speed of the rounds in bytes a second; `None` when nothing was measured.
fn speed(rows: &[&Row]) -> Option<f64> {
    (!rows.is_empty()).then(|| median(rows.iter().map(|row| row.bytes_per_s).collect()))
}

/// The figures as tables, and whether the aim is reached.
pub fn text(outcome: &Layers) -> String {
    let asked = &outcome.parameters;
    let mut text = String::new();
    for place in Kind::ALL {
        for way in Way::ALL {
            let rows = of(outcome, place, way);
            if !rows.is_empty() {
                text += &format!("{}, {}: {} in blocks\n", place.name(), way.name(), format_size(asked.total_bytes));
                text += &format!("{}\n\n", closer_table(&rows, asked));
            }
        }
    }
    if outcome.rows.iter().any(|row| row.cut) {
        text += &format!(
            "* stopped after {} s, a buffered write after what the device takes in that time: the time of the whole is extrapolated. \
             The time of a buffered write has its sync.\n",
            asked.limit_s
        );
    }
    text += &warning(asked.no_device.as_deref());
    asked.left_out.iter().for_each(|reason| text += &format!("left out: {reason}\n"));
    text + &aim(outcome)
}

/// A table as the article has it: time and speed of the three operations for each block size.
fn closer_table(rows: &[&Row], asked: &Asked) -> Table {
    let header = ["block".to_owned(), "count".to_owned()];
    let of_operations = Operation::ALL.iter().flat_map(|op| [format!("{} s", op.name()), "MiB/s".to_owned()]);
    let mut table = table(header.into_iter().chain(of_operations));
    for size in &asked.request_bytes {
        let mut cells = vec![right(format_size(*size)), right((asked.total_bytes / size).to_string())];
        for operation in Operation::ALL {
            let here = at(rows, operation, *size);
            let Some(speed) = speed(&here) else {
                cells.extend([Cell::new(""), Cell::new("")]);
                continue;
            };
            let mark = if here.iter().any(|row| row.cut) { "*" } else { "" };
            let whole_s = asked.total_bytes as f64 / speed;
            cells.extend([right(format!("{whole_s:.2}{mark}")), right(format!("{:.1}", speed / f64::from(1 << 20)))]);
        }
        table.add_row(cells);
    }
    table
}

/// The ratio of a file to a partition on one way: of direct transfers, block size by block size and round by round.
fn ratios(outcome: &Layers, way: Way) -> Vec<f64> {
    let (files, partitions) = (of(outcome, Kind::File, way), of(outcome, Kind::Partition, way));
    let direct = files.iter().filter(|row| {
        row.operation != Operation::WriteBuffered && row.request_bytes >= AIM_FROM_BYTES && row.bytes_per_s > 0.0
    });
    let ratio = |file: &&&Row| {
        let same = at(&partitions, file.operation, file.request_bytes);
        let partition = same.into_iter().find(|row| row.round == file.round)?;
        (partition.bytes_per_s > 0.0).then(|| file.bytes_per_s / partition.bytes_per_s)
    };
    direct.filter_map(|file| ratio(&file)).collect()
}

/// The speed of the file by that of the partition with blocks of one size, round by round.
fn ratio(outcome: &Layers, way: Way, operation: Operation, size: u64) -> Option<Spread> {
    let speeds = |place: Kind| -> Vec<f64> {
        at(&of(outcome, place, way), operation, size).iter().map(|row| row.bytes_per_s).collect()
    };
    Spread::of_ratios(&speeds(Kind::File), &speeds(Kind::Partition))
}

/// The block size and operation where the file is slowest beside the partition, of those that the aim is about.
fn worst(outcome: &Layers, way: Way) -> Option<(f64, String)> {
    let sizes = outcome.parameters.request_bytes.iter().filter(|size| **size >= AIM_FROM_BYTES);
    let direct = Operation::ALL.into_iter().filter(|operation| *operation != Operation::WriteBuffered);
    let points = sizes.flat_map(|size| direct.clone().map(move |operation| (*size, operation)));
    let ratios = points.filter_map(|(size, operation)| {
        let what = format!("{} of {}", operation.name(), format_size(size));
        Some((ratio(outcome, way, operation, size)?.p50, what))
    });
    ratios.min_by(|a, b| a.0.total_cmp(&b.0))
}

/// The sentence on the aim.
fn aim(outcome: &Layers) -> String {
    let ways = Way::ALL.into_iter().map(|way| (way, ratios(outcome, way))).filter(|(_, ratios)| !ratios.is_empty());
    let medians: Vec<(Way, f64)> = ways.map(|(way, ratios)| (way, median(ratios))).collect();
    if medians.is_empty() {
        return "There is no partition to set the file beside.".to_owned();
    }
    let shown = medians.iter().map(|(way, ratio)| {
        let worst = worst(outcome, *way).map(|(worst, what)| format!(" (worst {worst:.2}, {what})"));
        format!("{} {ratio:.2}{}", way.name(), worst.unwrap_or_default())
    });
    let shown: Vec<String> = shown.collect();
    let served: Vec<f64> = medians.iter().filter(|(way, _)| *way != Way::Bare).map(|(_, ratio)| *ratio).collect();
    let verdict = match () {
        _ if served.is_empty() => "not measured",
        _ if served.iter().all(|ratio| *ratio >= AIM_RATIO) => "reached",
        _ => "not reached",
    };
    format!(
        "Speed of the file ÷ speed of the partition, direct, blocks from 4 KiB on, medians: {} (aim through Spile: {AIM_RATIO}): {verdict}.",
        shown.join(", ")
    )
}

/// The plots and their names: the speed of each operation, and the ratio of the file to the partition.
pub fn figures(outcome: &Layers) -> Figures {
    let mut figures: Figures = Operation::ALL
        .into_iter()
        .map(|operation| (format!("layers-{}", operation.name().replace(' ', "-")), speeds(outcome, operation)))
        .collect();
    if Way::ALL.into_iter().any(|way| !ratios(outcome, way).is_empty()) {
        figures.push(("layers-ratio".to_owned(), file_by_partition(outcome)));
    }
    figures
}

fn figure(outcome: &Layers, title: String, panels: Vec<Panel>) -> Figure {
    let asked = &outcome.parameters;
    let note = format!(
        "{}{} in blocks, one request at a time, at most {} s · {}",
        warning(asked.no_device.as_deref()).replace('\n', " · "),
        format_size(asked.total_bytes),
        asked.limit_s,
        outcome.host.summary()
    );
    Figure { title, note, mark: quick_mark(asked.quick), panels, columns: 2, keys: Vec::new() }
}

/// The median and spread of the speeds of the rounds in MiB/s, by block size.
fn points(rows: &[&Row], operation: Operation, asked: &Asked) -> Vec<Point> {
    let point = |size: &u64| {
        let values: Vec<f64> =
            at(rows, operation, *size).iter().map(|row| row.bytes_per_s / f64::from(1 << 20)).collect();
        let Spread { p10, p50, p90 } = Spread::of(&values);
        (!values.is_empty()).then(|| Point::new(*size as f64, p50).within(p10, p90))
    };
    asked.request_bytes.iter().filter_map(point).collect()
}

/// A panel for each way, a line for each place.
fn speeds(outcome: &Layers, operation: Operation) -> Figure {
    let asked = &outcome.parameters;
    let all = outcome.rows.iter().filter(|row| row.operation == operation && row.bytes_per_s > 0.0);
    let y = Axis::log("MiB/s", all.map(|row| row.bytes_per_s / f64::from(1 << 20)));
    let has_rows = |way: &Way| outcome.rows.iter().any(|row| row.way == *way);
    let panel = |way: Way| {
        let places = Kind::ALL.map(Kind::name);
        let series = Kind::ALL.into_iter().zip(styles(places)).map(|(place, style)| Series {
            name: place.name().to_owned(),
            style,
            points: points(&of(outcome, place, way), operation, asked),
        });
        let series = series.filter(|series| !series.points.is_empty()).collect();
        let x = Axis::sizes("block", &asked.request_bytes);
        Panel { title: way.name().to_owned(), marks: Marks::Series { x, y: y.clone(), series, reference: None } }
    };
    let panels = Way::ALL.into_iter().filter(has_rows).map(panel).collect();
    figure(outcome, format!("layers: {} on each kind of place", operation.name()), panels)
}

/// A panel for each operation, a line for each way: the speed of the file by that of the partition.
fn file_by_partition(outcome: &Layers) -> Figure {
    let asked = &outcome.parameters;
    let line = |operation: Operation, way: Way| {
        let point = |size: &u64| {
            let Spread { p10, p50, p90 } = ratio(outcome, way, operation, *size)?;
            Some(Point::new(*size as f64, p50).within(p10, p90))
        };
        asked.request_bytes.iter().filter_map(point).collect::<Vec<_>>()
    };
    let all = Operation::ALL.iter().flat_map(|operation| Way::ALL.map(|way| line(*operation, way)));
    let ends: Vec<f64> = all.flatten().filter_map(|point| point.spread).map(|(_, most)| most).collect();
    let y = Axis::ratios("speed of the file ÷ partition", ends.into_iter());
    let panel = |operation: Operation| {
        let series = Way::ALL.into_iter().zip(styles(Way::ALL.map(Way::name))).map(|(way, style)| Series {
            name: way.name().to_owned(),
            style,
            points: line(operation, way),
        });
        let series = series.filter(|series| !series.points.is_empty()).collect();
        let x = Axis::sizes("block", &asked.request_bytes);
        Panel {
            title: operation.name().to_owned(),
            marks: Marks::Series { x, y: y.clone(), series, reference: Some(1.0) },
        }
    };
    let panels = Operation::ALL.map(panel).into();
    figure(outcome, "layers: the speed of a file ÷ a partition, on the same way".to_owned(), panels)
}

/// What was found, in sentences.
pub fn found(outcome: &Layers) -> Vec<String> {
    let warning = sentences(&warning(outcome.parameters.no_device.as_deref()));
    warning.into_iter().chain([aim(outcome)]).collect()
}
