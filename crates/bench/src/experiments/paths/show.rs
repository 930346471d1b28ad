//! The figures of `paths` as tables and plots.

use comfy_table::{Cell, Table};

use super::{Asked, Row};
use crate::experiments::plot::{Axis, Bar, Figure, Marks, Panel, Point, Series, Style, part, styles};
use crate::experiments::rings::{BASE, find};
use crate::experiments::sample::Spread;
use crate::experiments::trace::{PHASES, Phases};
use crate::experiments::{Direction, Figures, Outcome, quick_mark, right, table};
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
    for path in distinct(rows.iter().map(|row| row.path.as_str())) {
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
    for size in few_sizes(rows) {
        for (row, phases) in with_phases(rows).filter(|(row, _)| row.request_bytes == size) {
            let values = phases.values_us();
            let sum = values.iter().sum();
            let cells = values.into_iter().chain([sum]).map(|us| right(format!("{us:.1}")));
            table.add_row([right(format_size(size)), Cell::new(&row.path)].into_iter().chain(cells));
        }
    }
    table
}

fn with_phases<'a>(rows: &[&'a Row]) -> impl Iterator<Item = (&'a Row, Phases)> {
    rows.iter().filter_map(|row| Some((*row, row.phases?)))
}

/// What the smallest and the largest request cost on each path, in a sentence for each direction and size.
pub fn found(outcome: &Paths) -> Vec<String> {
    let of_size = |direction: Direction, rows: &[&Row], size: u64| {
        let each = rows.iter().filter(|row| row.request_bytes == size);
        let each: Vec<String> = each.map(|row| format!("{} {}", row.path, format_us(row.latency_p50_us))).collect();
        format!("A {} of {} takes: {}.", direction.name(), format_size(size), each.join(", "))
    };
    let of = |(direction, rows): (Direction, Vec<&Row>)| {
        let sizes = sizes(&rows);
        let ends = distinct(sizes.first().into_iter().chain(sizes.last()).copied());
        ends.into_iter().map(|size| of_size(direction, &rows, size)).collect::<Vec<_>>()
    };
    by_direction(outcome).into_iter().flat_map(of).collect()
}

/// The plots and their names.
pub fn figures(outcome: &Paths) -> Figures {
    let directions = by_direction(outcome);
    let mut figures = vec![("paths-ratio".to_owned(), ratios(outcome, &directions))];
    figures.retain(|(_, figure)| !figure.panels.is_empty());
    for (direction, rows) in &directions {
        let name = direction.name();
        let title = format!("paths: {name}, latency and throughput of one request at a time");
        figures.push((format!("paths-{name}"), figure(outcome, title, curves(outcome, rows))));
        if rows.iter().any(|row| row.phases.is_some()) {
            let keys: Vec<_> = PHASES.iter().enumerate().map(|(n, phase)| ((*phase).to_owned(), part(n))).collect();
            let title = format!("paths: {name}, where the time of a request goes, by its size");
            let shares = Figure { keys: keys.clone(), ..figure(outcome, title, shares(rows)) };
            figures.push((format!("paths-{name}-phases"), shares));
            let title = format!("paths: {name}, where the time of a request goes, path beside path");
            let times = Figure { keys, ..figure(outcome, title, times(rows)) };
            figures.push((format!("paths-{name}-phases-by-size"), times));
        }
    }
    figures
}

fn figure(outcome: &Paths, title: String, panels: Vec<Panel>) -> Figure {
    let note = format!(
        "one guest, one disk ({}), one request at a time; medians, and what lies between the tenth and the ninth tenth · {}",
        outcome.parameters.storage,
        outcome.host.summary()
    );
    Figure { title, note, mark: quick_mark(outcome.parameters.is_quick), panels, columns: 2, keys: Vec::new() }
}

/// A group of paths that are looked at together, under that name.
fn group(path: &str) -> &'static str {
    match find(path) {
        Some(ring) if ring.access == "copy" => "paths that copy grants",
        Some(_) => "paths that map grants",
        None => "paths without a Xen ring",
    }
}

/// The groups, each with its paths and [`BASE`]: all in one panel would hide each other.
fn groups(rows: &[Row]) -> Vec<(&'static str, Vec<&str>)> {
    let paths = distinct(rows.iter().map(|row| row.path.as_str()));
    let names = distinct(paths.iter().map(|path| group(path)));
    let of = |name: &'static str| paths.iter().copied().filter(move |path| *path == BASE || group(path) == name);
    names.into_iter().map(|name| (name, of(name).collect())).collect()
}

/// For each group a row of panels: reads and writes beside each other, with one axis.
fn ratios(outcome: &Paths, directions: &[(Direction, Vec<&Row>)]) -> Figure {
    let groups = groups(&outcome.rows);
    let panels = groups.iter().filter(|(_, paths)| paths.iter().any(|path| *path != BASE)).flat_map(|(name, paths)| {
        let of_group = outcome.rows.iter().filter(|row| paths.contains(&row.path.as_str()));
        let ends: Vec<f64> = of_group.filter_map(|row| row.ratio_to_grant_copy_p90).collect();
        let y = Axis::ratios("latency ÷ grant-copy", ends.iter().copied());
        let panel = move |(direction, rows): &(Direction, Vec<&Row>)| {
            let title = format!("{}, {name}", direction.name());
            lines(title, rows, paths, (y.clone(), Some(1.0)), Row::ratio)
        };
        let panels = directions.iter().map(panel);
        if ends.is_empty() { Vec::new() } else { panels.collect() }
    });
    let panels = panels.collect();
    let title = "paths: latency of each path ÷ grant-copy in the same round".to_owned();
    Figure { columns: directions.len(), ..figure(outcome, title, panels) }
}

/// The latency and the throughput of each group.
fn curves(outcome: &Paths, rows: &[&Row]) -> Vec<Panel> {
    let all = outcome.rows.iter();
    let us = Axis::log("median latency in µs", all.clone().flat_map(|row| [row.latency_p10_us, row.latency_p90_us]));
    let rates = Axis::log("MB/s (10^6 bytes), by the mean latency", all.map(|row| row.bytes_per_second / 1e6));
    let panels = groups(&outcome.rows).into_iter().flat_map(|(name, paths)| {
        let rate = |row: &Row| Some(Spread::of(&[row.bytes_per_second / 1e6]));
        [
            lines(name.to_owned(), rows, &paths, (us.clone(), None), |row| Some(row.latency_us())),
            lines(name.to_owned(), rows, &paths, (rates.clone(), None), rate),
        ]
    });
    panels.collect()
}

/// A panel with the request's size to the right and a line for each of `paths`.
fn lines(
    title: String,
    rows: &[&Row],
    paths: &[&str],
    (y, reference): (Axis, Option<f64>),
    value: impl Fn(&Row) -> Option<Spread>,
) -> Panel {
    let line = |(path, style): (&&str, Style)| {
        let points = rows.iter().filter(|row| row.path == *path).filter_map(|row| {
            let Spread { p10, p50, p90 } = value(row)?;
            Some(Point::new(row.request_bytes as f64, p50).within(p10, p90))
        });
        Series { name: (*path).to_owned(), style, points: points.collect() }
    };
    let series = paths.iter().zip(styles(paths.iter().copied())).map(line).collect();
    Panel { title, marks: Marks::Series { x: Axis::sizes("request", &sizes(rows)), y, series, reference } }
}

/// A panel for each path, a bar for each size, all of one length: what grows with the size and what does not.
fn shares(rows: &[&Row]) -> Vec<Panel> {
    let traced: Vec<(&Row, Phases)> = with_phases(rows).collect();
    let panel = |path: &str| {
        let bars = traced.iter().filter(|(row, _)| row.path == path).map(|(row, phases)| {
            let values = phases.values_us();
            let sum: f64 = values.iter().sum();
            let parts = values.iter().enumerate().map(|(n, us)| (100.0 * us / sum.max(1e-9), part(n))).collect();
            Bar { name: format_size(row.request_bytes), note: format_us(sum), parts, spread: None }
        });
        let x = Axis::linear("% of the mean latency", 100.0);
        Panel { title: path.to_owned(), marks: Marks::Bars { x, bars: bars.collect(), reference: None } }
    };
    distinct(traced.iter().map(|(row, _)| row.path.as_str())).into_iter().map(panel).collect()
}

/// A panel for each of a few sizes, a bar for each path: which is faster, and by what.
fn times(rows: &[&Row]) -> Vec<Panel> {
    let traced: Vec<(&Row, Phases)> = with_phases(rows).collect();
    let panel = |size: u64| {
        let here = traced.iter().filter(|(row, _)| row.request_bytes == size);
        let bars: Vec<Bar> = here
            .map(|(row, phases)| {
                let values = phases.values_us();
                let parts = values.iter().enumerate().map(|(n, us)| (*us, part(n))).collect();
                Bar { name: row.path.clone(), note: format_us(values.iter().sum()), parts, spread: None }
            })
            .collect();
        let sums = bars.iter().map(|bar| bar.parts.iter().map(|part| part.0).sum::<f64>());
        let x = Axis::linear("mean µs", sums.fold(0.0, f64::max));
        let title = format!("requests of {}", format_size(size));
        Panel { title, marks: Marks::Bars { x, bars, reference: None } }
    };
    few_sizes(rows).into_iter().map(panel).collect()
}

/// Those of [`FEW`] that were measured; all when none of them was.
fn few_sizes(rows: &[&Row]) -> Vec<u64> {
    let all = sizes(rows);
    let few: Vec<u64> = all.iter().copied().filter(|size| FEW.contains(size)).collect();
    if few.is_empty() { all } else { few }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::HostFacts;
    use crate::experiments::paths::all_kinds;

    fn outcome(sizes: &[u64]) -> Paths {
        let row = |path: &str, op, request_bytes: u64, us: f64| Row {
            path: path.to_owned(),
            op,
            request_bytes,
            requests: 100,
            requests_kept: 60,
            latency_p50_us: us,
            latency_p10_us: 0.9 * us,
            latency_p90_us: 1.2 * us,
            ratio_to_grant_copy: Some(us / 10.0),
            ratio_to_grant_copy_p10: Some(0.09 * us),
            ratio_to_grant_copy_p90: Some(0.12 * us),
            latency_mean_us: us,
            bytes_per_second: request_bytes as f64 * 1e6 / us,
            phases: find(path).map(|_| Phases { kick_us: us, ..Phases::default() }),
        };
        let asked = Asked { storage: "mem".into(), span_bytes: 1, rounds: 2, depth: 1, is_quick: true };
        let places =
            [Direction::Read, Direction::Write].into_iter().flat_map(|op| sizes.iter().map(move |size| (op, *size)));
        let rows = places.flat_map(|(op, size)| {
            let each = all_kinds().into_iter().enumerate();
            each.map(move |(number, kind)| row(kind.name(), op, size, 8.0 + number as f64 + size as f64 / 1e3))
        });
        Outcome { experiment: "paths".into(), host: HostFacts::now(), parameters: asked, rows: rows.collect() }
    }

    #[test]
    fn what_was_found_is_said_of_the_smallest_and_the_largest_request() {
        let found = found(&outcome(&[4096, 65_536, 1 << 20]));
        assert_eq!(found.len(), 4);
        assert!(found[0].starts_with("A read of 4 KiB takes: host-direct 12.1 µs, "), "{}", found[0]);
        assert!(found[3].starts_with("A write of 1 MiB takes: host-direct "), "{}", found[3]);
    }

    #[test]
    fn the_order_is_that_of_the_first_rows() {
        assert_eq!(distinct([3, 1, 3, 2, 1].into_iter()), [3, 1, 2]);
    }

    #[test]
    fn texts_of_all_figures_have_their_own_room() {
        for sizes in [&[4096][..], &[4096, 65_536], &crate::experiments::all_sizes()] {
            for (name, figure) in figures(&outcome(sizes)) {
                assert_eq!(figure.faults(), Vec::<String>::new(), "{name}");
                assert_eq!(figure.mark.as_deref(), Some("quick: few rounds"));
            }
        }
    }

    #[test]
    fn figures_have_the_names_of_the_command_line() {
        let names = figures(&outcome(&[4096, 65_536, 1 << 20]));
        let files: Vec<&str> = names.iter().map(|(name, _)| name.as_str()).collect();
        let expected = ["paths-ratio", "paths-read", "paths-read-phases", "paths-read-phases-by-size", "paths-write"];
        assert_eq!(files[..5], expected);
        let by_size = names.iter().find(|(name, _)| name == "paths-read-phases-by-size").unwrap().1.to_svg();
        assert!(crate::experiments::rings::RINGS.iter().all(|ring| by_size.contains(&format!(">{}<", ring.name))));
    }

    #[test]
    fn a_panel_has_few_lines_and_reads_and_writes_share_an_axis() {
        let figures = figures(&outcome(&[4096, 65_536, 1 << 20]));
        let panels = figures[0].1.panels.iter().map(|panel| match &panel.marks {
            Marks::Series { y, series, .. } => (y.ends, series.len()),
            _ => panic!("lines"),
        });
        let panels: Vec<_> = panels.collect();
        assert_eq!(panels.len(), 6);
        assert!(panels.chunks(2).all(|pair| pair[0].0 == pair[1].0) && panels.iter().all(|panel| panel.1 <= 5));
    }

    #[test]
    fn figures_are_drawn_from_a_file_as_from_a_run() {
        let outcome = outcome(&[4096, 65_536]);
        let read: Paths = serde_json::from_value(serde_json::to_value(&outcome).unwrap()).unwrap();
        let svgs = |of: &Paths| figures(of).iter().map(|(_, figure)| figure.to_svg()).collect::<Vec<_>>();
        assert_eq!(svgs(&read), svgs(&outcome));
    }
}
