//! The figures of `aggregate` as a table and plots.

use comfy_table::Cell;

use super::{Asked, Row};
use crate::experiments::plot::{Axis, Figure, Marks, Panel, Point, Scale, Series, styles};
use crate::experiments::sample::Spread;
use crate::experiments::{Direction, Figures, Outcome, few, quick_mark, right, rings, table};
use spile_server::units::format_size;

type Aggregate = Outcome<Asked, Row>;

/// The path that the others are held against in the table: the oldest.
const BASE: &str = "grant-map-memcpy";

fn paths(rows: &[Row]) -> Vec<&str> {
    rows.iter().fold(Vec::new(), |mut seen, row| {
        if !seen.contains(&row.path.as_str()) {
            seen.push(&row.path);
        }
        seen
    })
}

/// The figures as a table: a line for each point, a column for each path, and how often the base each is.
pub fn text(outcome: &Aggregate) -> String {
    let paths = paths(&outcome.rows);
    let others: Vec<&str> = paths.iter().copied().filter(|path| *path != BASE && paths.contains(&BASE)).collect();
    let header = ["op", "guests", "request"].map(str::to_owned).into_iter();
    let rates = paths.iter().map(|path| format!("{path}\nMB/s"));
    let mut table = table(header.chain(rates).chain(others.iter().map(|path| format!("{path}\n÷ {BASE}"))));
    for of_point in outcome.rows.chunk_by(|a, b| (a.op, a.guests, a.request_bytes) == (b.op, b.guests, b.request_bytes))
    {
        let rate = |path: &str| of_point.iter().find(|row| row.path == path).map(|row| row.bytes_per_second);
        let first = &of_point[0];
        let name =
            [Cell::new(first.op.name()), right(first.guests.to_string()), right(format_size(first.request_bytes))];
        let rates =
            paths.iter().map(|path| right(rate(path).map_or(String::new(), |rate| format!("{:.0}", rate / 1e6))));
        let ratio = |path: &str| Some(rate(path)? / rate(BASE)?);
        let ratios = others.iter().map(|path| right(ratio(path).map_or(String::new(), |ratio| format!("{ratio:.2}"))));
        table.add_row(name.into_iter().chain(rates).chain(ratios));
    }
    let disks = outcome.rows.first().map_or(0, |row| row.disks);
    let Asked { storage, runtime_seconds, .. } = &outcome.parameters;
    format!(
        "{table}\n{disks} disks a guest ({storage}), all at once, one request at a time on each, {runtime_seconds} s a point; MB = 10^6 bytes."
    )
}

/// The most that each path moved, in a sentence for each direction.
pub fn found(outcome: &Aggregate) -> Vec<String> {
    let most = |direction: Direction, path: &str| {
        let rows = outcome.rows.iter().filter(|row| row.op == direction && row.path == path);
        rows.max_by(|a, b| a.bytes_per_second.total_cmp(&b.bytes_per_second))
    };
    let said = |row: &Row| {
        let (rate, size) = (row.bytes_per_second / 1e9, format_size(row.request_bytes));
        format!("{} {rate:.2} GB/s ({} guests, {size})", row.path, row.guests)
    };
    let of = |direction: Direction| {
        let best: Vec<&Row> = paths(&outcome.rows).into_iter().filter_map(|path| most(direction, path)).collect();
        let gain = best.iter().find(|row| row.path == BASE).zip(best.iter().find(|row| row.path == rings::BASE));
        let gain = gain.map_or(String::new(), |(old, new)| {
            format!(
                "; {} has {:+.0} % over {BASE}",
                rings::BASE,
                (new.bytes_per_second / old.bytes_per_second - 1.0) * 100.0
            )
        });
        let all: Vec<String> = best.into_iter().map(said).collect();
        format!("At most, {}: {}{gain}.", direction.name(), all.join(", "))
    };
    let has_rows = |direction: &Direction| outcome.rows.iter().any(|row| row.op == *direction);
    [Direction::Write, Direction::Read].into_iter().filter(has_rows).map(of).collect()
}

/// The plots and their names: the throughput of either direction, and its ratio to [`rings::BASE`], where that is among the
/// paths.
pub fn figures(outcome: &Aggregate) -> Figures {
    let directions = [Direction::Write, Direction::Read];
    let has_rows = |direction: &Direction| outcome.rows.iter().any(|row| row.op == *direction);
    let directions: Vec<Direction> = directions.into_iter().filter(has_rows).collect();
    let throughput = directions.iter().map(|direction| throughput(outcome, *direction));
    let ratio = outcome.rows.iter().any(|row| row.ratio_to_grant_copy.is_some() && row.path != rings::BASE);
    throughput.chain(ratio.then(|| ratios(outcome, &directions))).collect()
}

/// A panel for each of a few sizes. A size has the same axes for writes and for reads, which are in another figure.
fn throughput(outcome: &Aggregate, direction: Direction) -> (String, Figure) {
    let panel = |size: u64| {
        let of_size = outcome.rows.iter().filter(|row| row.request_bytes == size);
        let most = of_size.map(|row| row.bytes_per_s().p90.max(row.bytes_per_second) / 1e9).fold(0.0, f64::max);
        let y = Axis::linear("GB/s (10^9 bytes)", most);
        panel(outcome, direction, size, (y, 1e-9, None), |row| Some(row.bytes_per_s()))
    };
    let panels = few_sizes(&outcome.rows).into_iter().map(panel).collect();
    let title = format!("aggregate: sequential {} of all disks of all guests, together", direction.name());
    (format!("aggregate-{}", direction.name()), figure(outcome, title, panels))
}

/// A row of panels for each size: writes and reads beside each other, with one axis for all.
fn ratios(outcome: &Aggregate, directions: &[Direction]) -> (String, Figure) {
    let ends = outcome.rows.iter().filter_map(|row| row.ratio_to_grant_copy_p90);
    let y = Axis::ratios("throughput ÷ grant-copy", ends);
    let of_size = |size: u64| directions.iter().map(move |direction| (size, *direction));
    let places = few_sizes(&outcome.rows).into_iter().flat_map(of_size);
    let panel = |(size, direction)| panel(outcome, direction, size, (y.clone(), 1.0, Some(1.0)), Row::ratio);
    let panels = places.map(panel).collect();
    let title = "aggregate: throughput of each path ÷ grant-copy at the same time".to_owned();
    ("aggregate-ratio".to_owned(), figure(outcome, title, panels))
}

fn figure(outcome: &Aggregate, title: String, panels: Vec<Panel>) -> Figure {
    let disks = outcome.rows.first().map_or(0, |row| row.disks);
    let Asked { storage, runtime_seconds, is_quick, .. } = &outcome.parameters;
    let note = format!(
        "{disks} disks a guest ({storage}), one request at a time on each, {runtime_seconds} s a point; medians, and what lies \
         between the tenth and the ninth tenth · {}",
        outcome.host.summary()
    );
    Figure { title, note, mark: quick_mark(*is_quick), panels, columns: 2, keys: Vec::new() }
}

/// Guests to the right, a series for each path. `y` is its axis, a factor for its values, and the value with a line.
fn panel(
    outcome: &Aggregate,
    direction: Direction,
    size: u64,
    (y, factor, reference): (Axis, f64, Option<f64>),
    value: impl Fn(&Row) -> Option<Spread>,
) -> Panel {
    let rows: Vec<&Row> = outcome.rows.iter().filter(|row| row.op == direction && row.request_bytes == size).collect();
    let mut guests: Vec<u16> = rows.iter().map(|row| row.guests).collect();
    sort_once(&mut guests);
    let names = paths(&outcome.rows);
    let series = names.iter().zip(styles(names.iter().copied())).map(|(name, style)| {
        let points = rows.iter().filter(|row| row.path == *name).filter_map(|row| {
            let Spread { p10, p50, p90 } = value(row)?;
            Some(Point::new(row.guests.into(), p50 * factor).within(p10 * factor, p90 * factor))
        });
        Series { name: (*name).to_owned(), style, points: points.collect() }
    });
    let guests: Vec<f64> = guests.into_iter().map(f64::from).collect();
    let x = Axis::at("guests", Scale::Log, &guests);
    let title = format!("{}, requests of {}", direction.name(), format_size(size));
    Panel { title, marks: Marks::Series { x, y, series: series.collect(), reference } }
}

/// Sizes that have panels: at most four of those that were measured, evenly apart.
fn few_sizes(rows: &[Row]) -> Vec<u64> {
    let mut sizes: Vec<u64> = rows.iter().map(|row| row.request_bytes).collect();
    sort_once(&mut sizes);
    few(&sizes)
}

fn sort_once<T: Ord>(values: &mut Vec<T>) {
    values.sort_unstable();
    values.dedup();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::HostFacts;

    fn outcome() -> Aggregate {
        let row = |path: &str, op, request_bytes, guests, rate: f64| Row {
            path: path.to_owned(),
            op,
            guests,
            disks: 3,
            request_bytes,
            bytes_per_second: rate,
            bytes_per_second_p10: 0.9 * rate,
            bytes_per_second_p90: 1.2 * rate,
            ratio_to_grant_copy: Some(rate / 2.5e9),
            ratio_to_grant_copy_p10: Some(0.9 * rate / 2.5e9),
            ratio_to_grant_copy_p90: Some(1.2 * rate / 2.5e9),
        };
        let asked = Asked { storage: "null".into(), span_bytes: 1, runtime_seconds: 1.0, depth: 1, is_quick: true };
        let points = [Direction::Write, Direction::Read].into_iter().flat_map(|op| [(op, 1), (op, 2), (op, 4)]);
        let points = points.flat_map(|(op, guests)| [(op, guests, 4096), (op, guests, 65_536)]);
        let rows = points.flat_map(|(op, guests, size)| {
            [row(BASE, op, size, guests, 1e9), row(rings::BASE, op, size, guests, 2.5e9)]
        });
        Outcome { experiment: "aggregate".into(), host: HostFacts::now(), parameters: asked, rows: rows.collect() }
    }

    #[test]
    fn the_table_has_the_ratio() {
        let text = text(&outcome());
        assert!(text.contains("2.50") && text.contains("1000") && text.contains("4 KiB"), "{text}");
    }

    #[test]
    fn what_was_found_is_said_in_sentences() {
        let found = found(&outcome());
        assert_eq!(found.len(), 2);
        let write = "At most, write: grant-map-memcpy 1.00 GB/s (4 guests, 64 KiB), grant-copy 2.50 GB/s (4 guests, 64 KiB); \
                     grant-copy has +150 % over grant-map-memcpy.";
        assert_eq!(found[0], write);
    }

    #[test]
    fn a_panel_shows_one_size_and_one_direction() {
        let figures = figures(&outcome());
        let names: Vec<&str> = figures.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["aggregate-write", "aggregate-read", "aggregate-ratio"]);
        let panels: Vec<usize> = figures.iter().map(|(_, figure)| figure.panels.len()).collect();
        assert_eq!(panels, [2, 2, 4]);
        for (name, figure) in &figures {
            assert_eq!(figure.faults(), Vec::<String>::new(), "{name}");
            assert!(figure.mark.is_some() && figure.to_svg().contains("grant-map-memcpy"));
        }
    }

    #[test]
    fn writes_and_reads_have_the_same_axes() {
        let figures = figures(&outcome());
        let ends = |figure: &Figure, panel: usize| match &figure.panels[panel].marks {
            Marks::Series { y, .. } => y.ends,
            _ => panic!("lines"),
        };
        assert_eq!(ends(&figures[0].1, 0), ends(&figures[1].1, 0));
        assert!((0..4).all(|panel| ends(&figures[2].1, panel) == (0.0, 1.25)));
    }

    #[test]
    fn rows_have_the_fields_that_others_read() {
        let json = serde_json::to_value(&outcome().rows[1]).unwrap();
        let expected = serde_json::json!({
            "way": "grant-copy", "operation": "write", "guests": 1, "disks": 3, "request_bytes": 4096, "bytes_per_s": 2.5e9,
            "bytes_per_s_p10": 2.25e9, "bytes_per_s_p90": 3e9,
            "ratio_to_grant_copy": 1.0, "ratio_to_grant_copy_p10": 0.9, "ratio_to_grant_copy_p90": 1.2
        });
        assert_eq!(json, expected);
    }

    #[test]
    fn figures_are_drawn_from_a_file_as_from_a_run() {
        let outcome = outcome();
        let read: Aggregate = serde_json::from_value(serde_json::to_value(&outcome).unwrap()).unwrap();
        let svgs = |of: &Aggregate| figures(of).iter().map(|(_, figure)| figure.to_svg()).collect::<Vec<_>>();
        assert_eq!(svgs(&read), svgs(&outcome));
    }
}
