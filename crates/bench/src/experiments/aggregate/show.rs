//! The figures of `aggregate` as a table and plots.

use comfy_table::Cell;

use super::{Asked, Row};
use crate::experiments::plot::{Axis, Figure, Line, Marks, Panel, colour};
use crate::experiments::{Direction, Figures, Outcome, right, table};
use spile_server::units::format_size;

type Aggregate = Outcome<Asked, Row>;

/// Against which the others are held.
const BASE: &str = "grant-map-memcpy";

fn paths(rows: &[Row]) -> Vec<&'static str> {
    rows.iter().fold(Vec::new(), |mut seen, row| {
        if !seen.contains(&row.path) {
            seen.push(row.path);
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

/// The plots and their names.
pub fn figures(outcome: &Aggregate) -> Figures {
    let directions = [Direction::Write, Direction::Read];
    let has_rows = |direction: &Direction| outcome.rows.iter().any(|row| row.op == *direction);
    directions.into_iter().filter(has_rows).map(|direction| figure(outcome, direction)).collect()
}

/// A panel for each path, all with the same scale; a line for each number of guests.
fn figure(outcome: &Aggregate, direction: Direction) -> (String, Figure) {
    let rows: Vec<&Row> = outcome.rows.iter().filter(|row| row.op == direction).collect();
    let mut sizes: Vec<u64> = rows.iter().map(|row| row.request_bytes).collect();
    let mut guests: Vec<u16> = rows.iter().map(|row| row.guests).collect();
    sort_once(&mut sizes);
    sort_once(&mut guests);
    let most = rows.iter().map(|row| row.bytes_per_second / 1e9).fold(0.0, f64::max);
    let panel = |path: &'static str| {
        let line = |(number, guests): (usize, &u16)| {
            let here = rows.iter().filter(|row| row.path == path && row.guests == *guests);
            let points = here.map(|row| (row.request_bytes as f64, row.bytes_per_second / 1e9)).collect();
            Line { colour: colour(number), is_dashed: false, points }
        };
        let lines = guests.iter().enumerate().map(line).collect();
        let y = Axis::linear("GB/s (10^9 bytes)", most);
        Panel { title: path.to_owned(), marks: Marks::Lines(Axis::sizes("request", &sizes), lines), y }
    };
    let panels: Vec<Panel> = paths(&outcome.rows).into_iter().map(panel).collect();
    let name = |guests: &u16| if *guests == 1 { "1 guest".to_owned() } else { format!("{guests} guests") };
    let legend = guests.iter().enumerate().map(|(number, guests)| (name(guests), colour(number))).collect();
    let disks = rows.first().map_or(0, |row| row.disks);
    let note = format!(
        "{disks} disks a guest ({}), one request at a time on each · Linux {}, {} × {} · {}",
        outcome.parameters.storage,
        outcome.host.kernel,
        outcome.host.cpus,
        outcome.host.cpu_model,
        outcome.host.date_utc
    );
    let title = format!("aggregate: sequential {} of all disks of all guests", direction.name());
    let columns = if panels.len() == 4 { 2 } else { panels.len().min(3) };
    (format!("aggregate-{}", direction.name()), Figure { title, note, panels, columns, legend })
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
        let row = |path, op, rate| Row { path, op, guests: 2, disks: 3, request_bytes: 4096, bytes_per_second: rate };
        let asked = Asked { storage: "null".into(), span_bytes: 1, runtime_seconds: 1.0, depth: 1 };
        let rows = [Direction::Write, Direction::Read].into_iter();
        let rows = rows.flat_map(|op| [row(BASE, op, 1e9), row("grant-copy", op, 2.5e9)]).collect();
        Outcome { experiment: "aggregate", host: HostFacts::now(), parameters: asked, rows }
    }

    #[test]
    fn the_table_has_the_ratio() {
        let text = text(&outcome());
        assert!(text.contains("2.50") && text.contains("1000") && text.contains("4 KiB"), "{text}");
    }

    #[test]
    fn each_direction_has_a_plot_with_a_panel_for_each_path() {
        let figures = figures(&outcome());
        let names: Vec<&str> = figures.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["aggregate-write", "aggregate-read"]);
        assert!(figures.iter().all(|(_, figure)| figure.panels.len() == 2));
    }

    #[test]
    fn rows_have_the_fields_that_others_read() {
        let json = serde_json::to_value(&outcome().rows[1]).unwrap();
        let expected = serde_json::json!({
            "way": "grant-copy", "operation": "write", "guests": 2, "disks": 3, "request_bytes": 4096, "bytes_per_s": 2.5e9
        });
        assert_eq!(json, expected);
    }
}
