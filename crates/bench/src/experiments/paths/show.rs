//! The figures of `paths` as tables and plots.

use comfy_table::{Cell, Table};

use super::{Asked, Row};
use crate::experiments::plot::{Axis, Bar, Figure, Line, Marks, Panel, colour};
use crate::experiments::trace::{PHASES, Phases};
use crate::experiments::{Direction, Figures, Outcome, right, table};
use spile_server::units::{format_size, format_us};

type Paths = Outcome<Asked, Row>;

/// Each once, in the order of their first rows.
fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    values.fold(Vec::new(), |mut seen, value| {
        if !seen.contains(&value) {
            seen.push(value);
        }
        seen
    })
}

fn sizes(rows: &[&Row]) -> Vec<u64> {
    let mut sizes = distinct(rows.iter().map(|row| row.request_bytes));
    sizes.sort_unstable();
    sizes
}

/// The rows of each direction.
fn by_direction(outcome: &Paths) -> Vec<(Direction, Vec<&Row>)> {
    let directions = distinct(outcome.rows.iter().map(|row| row.op));
    let rows = |direction: Direction| outcome.rows.iter().filter(|row| row.op == direction).collect();
    directions.into_iter().map(|direction| (direction, rows(direction))).collect()
}

/// The figures as tables.
pub fn text(outcome: &Paths) -> String {
    let mut text = String::new();
    for (direction, rows) in by_direction(outcome) {
        let name = direction.name();
        text +=
            &format!("{name}, depth 1: median latency\n{}\n\n", by_path(&rows, |row| format_us(row.latency_p50_us)));
        let rate = |row: &Row| format!("{:.0}", row.bytes_per_second / 1e6);
        text += &format!("{name}, depth 1: MB/s (10^6 bytes, by the mean latency)\n{}\n\n", by_path(&rows, rate));
        if rows.iter().any(|row| row.phases.is_some()) {
            text += &format!("{name}: where the time goes, mean µs\n{}\n\n", phases_table(&rows));
        }
    }
    text + "Of each row of requests the fastest and the slowest fifth are dropped."
}

/// A line for each path, a column for each size: there are more of these, but they are narrow.
fn by_path(rows: &[&Row], value: impl Fn(&Row) -> String) -> Table {
    let sizes = sizes(rows);
    let mut table = table(["".to_owned()].into_iter().chain(sizes.iter().map(|size| format_size(*size))));
    for path in distinct(rows.iter().map(|row| row.path)) {
        let of = |size: &u64| rows.iter().find(|row| row.path == path && row.request_bytes == *size);
        let cells = sizes.iter().map(|size| right(of(size).map(|row| value(row)).unwrap_or_default()));
        table.add_row([Cell::new(path)].into_iter().chain(cells));
    }
    table
}

/// Sizes that a table of phases has: few, far apart.
const FEW: [u64; 4] = [4 << 10, 64 << 10, 1 << 20, 4 << 20];

fn phases_table(rows: &[&Row]) -> Table {
    let header = ["request", "path"].into_iter().chain(PHASES).chain(["together"]).map(str::to_owned);
    let mut table = table(header);
    let all = sizes(rows);
    let few: Vec<u64> = all.iter().copied().filter(|size| FEW.contains(size)).collect();
    for size in if few.is_empty() { all } else { few } {
        for (row, phases) in with_phases(rows).filter(|(row, _)| row.request_bytes == size) {
            let values = phases.values_us();
            let sum = values.iter().sum();
            let cells = values.into_iter().chain([sum]).map(|us| right(format!("{us:.1}")));
            table.add_row([right(format_size(size)), Cell::new(row.path)].into_iter().chain(cells));
        }
    }
    table
}

fn with_phases<'a>(rows: &[&'a Row]) -> impl Iterator<Item = (&'a Row, Phases)> {
    rows.iter().filter_map(|row| Some((*row, row.phases?)))
}

/// The plots and their names.
pub fn figures(outcome: &Paths) -> Figures {
    let note = format!(
        "one guest, one disk ({}), one request at a time · Linux {}, {} × {} · {}",
        outcome.parameters.storage,
        outcome.host.kernel,
        outcome.host.cpus,
        outcome.host.cpu_model,
        outcome.host.date_utc
    );
    let mut figures = Vec::new();
    for (direction, rows) in by_direction(outcome) {
        let name = direction.name();
        let figure = |title: &str, panels, columns, legend| {
            let title = format!("paths: {name}, {title}");
            Figure { title, note: note.clone(), panels, columns, legend }
        };
        figures
            .push((format!("paths-{name}"), figure("latency and throughput", curves(&rows), 2, paths_legend(&rows))));
        if rows.iter().any(|row| row.phases.is_some()) {
            let legend: Vec<_> = PHASES.iter().enumerate().map(|(n, phase)| ((*phase).to_owned(), colour(n))).collect();
            let shares =
                figure("share of each phase in the mean latency (above the bars)", shares(&rows), 2, legend.clone());
            figures.push((format!("paths-{name}-phases"), shares));
            let times = figure("phases side by side", times(&rows), 2, legend);
            figures.push((format!("paths-{name}-phases-by-size"), times));
        }
    }
    figures
}

fn paths_legend(rows: &[&Row]) -> Vec<(String, &'static str)> {
    let paths = distinct(rows.iter().map(|row| row.path));
    paths.iter().enumerate().map(|(number, path)| ((*path).to_owned(), colour(number))).collect()
}

fn curves(rows: &[&Row]) -> Vec<Panel> {
    let x = Axis::sizes("request", &sizes(rows));
    let lines = |value: fn(&Row) -> f64| {
        let paths = distinct(rows.iter().map(|row| row.path)).into_iter().enumerate();
        let line = |(number, path): (usize, &str)| Line {
            colour: colour(number),
            is_dashed: path == "host-direct",
            points: rows
                .iter()
                .filter(|row| row.path == path)
                .map(|row| (row.request_bytes as f64, value(row)))
                .collect(),
        };
        Marks::Lines(x.clone(), paths.map(line).collect())
    };
    let us = |row: &Row| row.latency_p50_us;
    let rate = |row: &Row| row.bytes_per_second / 1e6;
    let panel = |title: &str, value: fn(&Row) -> f64, y| Panel { title: title.into(), marks: lines(value), y };
    vec![
        panel("median latency", us, Axis::log("µs", rows.iter().map(|row| us(row)))),
        panel("throughput", rate, Axis::log("MB/s (10^6 bytes)", rows.iter().map(|row| rate(row)))),
    ]
}

/// A panel for each path, a bar for each size, all of one height: what grows with the size and what does not.
fn shares(rows: &[&Row]) -> Vec<Panel> {
    let traced: Vec<(&Row, Phases)> = with_phases(rows).collect();
    let panel = |path: &str| {
        let bars = traced.iter().filter(|(row, _)| row.path == path).map(|(row, phases)| {
            let values = phases.values_us();
            let sum: f64 = values.iter().sum();
            let parts = values.iter().enumerate().map(|(n, us)| (100.0 * us / sum.max(1e-9), colour(n))).collect();
            Bar { label: format_size(row.request_bytes), note: format_us(sum), parts }
        });
        let y = Axis { ends: (0.0, 108.0), ..Axis::linear("% of the latency", 100.0) };
        Panel { title: path.to_owned(), marks: Marks::Bars("request".into(), bars.collect()), y }
    };
    distinct(traced.iter().map(|(row, _)| row.path)).into_iter().map(panel).collect()
}

/// A panel for each of a few sizes, a bar for each path: which is faster, and by what.
fn times(rows: &[&Row]) -> Vec<Panel> {
    let traced: Vec<(&Row, Phases)> = with_phases(rows).collect();
    let all = sizes(rows);
    let few: Vec<u64> = all.iter().copied().filter(|size| FEW.contains(size)).collect();
    let panel = |size: u64| {
        let here = traced.iter().filter(|(row, _)| row.request_bytes == size);
        let bars: Vec<Bar> = here
            .map(|(row, phases)| {
                let values = phases.values_us();
                let parts = values.iter().enumerate().map(|(n, us)| (*us, colour(n))).collect();
                Bar { label: short(row.path), note: format_us(values.iter().sum()), parts }
            })
            .collect();
        let sums = bars.iter().map(|bar| bar.parts.iter().map(|part| part.0).sum::<f64>());
        let y = Axis::linear("µs", 1.08 * sums.fold(0.0, f64::max));
        Panel { title: format_size(size), marks: Marks::Bars(String::new(), bars), y }
    };
    (if few.is_empty() { all } else { few }).into_iter().map(panel).collect()
}

/// What has room below a bar.
fn short(path: &str) -> String {
    path.trim_start_matches("grant-")
        .replace("-indirect", "+ind")
        .replace("memcpy", "cpy")
        .replace("persistent", "persist")
        .replace("-split", "+split")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_that_of_the_first_rows() {
        assert_eq!(distinct([3, 1, 3, 2, 1].into_iter()), [3, 1, 2]);
    }

    #[test]
    fn names_below_bars_are_short_and_differ() {
        let names = distinct(crate::experiments::rings::RINGS.iter().map(|ring| short(ring.name)));
        assert_eq!(names.len(), crate::experiments::rings::RINGS.len());
        assert!(names.iter().all(|name| name.len() <= 14), "{names:?}");
    }
}
