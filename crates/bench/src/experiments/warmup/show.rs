//! The figures of `warmup` as tables and plots.

use super::{Asked, Row, STABLE_SHARE, stable_from};
use crate::experiments::plot::{Axis, Figure, Marks, Panel, Point, Series, styles};
use crate::experiments::sample::{Spread, median};
use crate::experiments::transfer::{Operation, Way};
use crate::experiments::{Figures, Outcome, quick_mark, right, table};
use spile_server::units::format_size;

type Warmup = Outcome<Asked, Row>;

/// The median speed of the rounds for each size in bytes a second, the smallest size first.
fn speeds(outcome: &Warmup, way: Way, operation: Operation) -> Vec<(u64, f64)> {
    let rows: Vec<&Row> = outcome.rows.iter().filter(|row| row.way == way && row.operation == operation).collect();
    let mut sizes: Vec<u64> = rows.iter().map(|row| row.bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let of = |size: u64| median(rows.iter().filter(|row| row.bytes == size).map(|row| row.bytes_per_s).collect());
    sizes.into_iter().map(|size| (size, of(size))).collect()
}

/// The figures as tables, and from where on they are stable.
pub fn text(outcome: &Warmup) -> String {
    let mut text = String::new();
    for way in Way::ALL {
        let columns = Operation::ALL.map(|operation| speeds(outcome, way, operation));
        if columns[0].is_empty() {
            continue;
        }
        let names = Operation::ALL.iter().flat_map(|op| [format!("{} s", op.name()), "MiB/s".to_owned()]);
        let mut table = table(["size".to_owned()].into_iter().chain(names));
        for (row, (size, _)) in columns[0].iter().enumerate() {
            let cells = columns.iter().flat_map(|column| {
                let speed = column.get(row).map_or(0.0, |(_, speed)| *speed);
                [format!("{:.3}", *size as f64 / speed), format!("{:.1}", speed / f64::from(1 << 20))]
            });
            table.add_row([format_size(*size)].into_iter().chain(cells).map(right));
        }
        text += &format!("{}, blocks of 1 MiB\n{table}\n", way.name());
        for (operation, column) in Operation::ALL.iter().zip(&columns) {
            let name = operation.name();
            text += &match stable_from(column) {
                Some(size) => {
                    format!("{name}: from {} on within {:.0} % of one speed\n", format_size(size), STABLE_SHARE * 100.0)
                }
                None => format!("{name}: not stable at any size\n"),
            };
        }
        text.push('\n');
    }
    if let Some(reason) = &outcome.parameters.ended_early {
        text += &format!("larger sizes are left out: {reason}\n");
    }
    text.trim_end().to_owned()
}

/// The plots and their names.
pub fn figures(outcome: &Warmup) -> Figures {
    let asked = &outcome.parameters;
    let mut sizes: Vec<u64> = outcome.rows.iter().map(|row| row.bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    if sizes.is_empty() {
        return Figures::new();
    }
    let most = outcome.rows.iter().map(|row| row.bytes_per_s / f64::from(1 << 20)).fold(0.0, f64::max);
    let panel = |operation: Operation| {
        let series = Way::ALL.into_iter().zip(styles(Way::ALL.map(Way::name))).map(|(way, style)| {
            let point = |size: &u64| {
                let rows = outcome.rows.iter();
                let here = rows.filter(|row| row.way == way && row.operation == operation && row.bytes == *size);
                let values: Vec<f64> = here.map(|row| row.bytes_per_s / f64::from(1 << 20)).collect();
                let Spread { p10, p50, p90 } = Spread::of(&values);
                (!values.is_empty()).then(|| Point::new(*size as f64, p50).within(p10, p90))
            };
            Series { name: way.name().to_owned(), style, points: sizes.iter().filter_map(point).collect() }
        });
        let series = series.filter(|series| !series.points.is_empty()).collect();
        let (x, y) = (Axis::sizes("bytes moved", &sizes), Axis::linear("MiB/s", most));
        Panel { title: operation.name().to_owned(), marks: Marks::Series { x, y, series, reference: None } }
    };
    let figure = Figure {
        title: "warmup: speed by how much is moved".to_owned(),
        note: format!("blocks of 1 MiB, one request at a time · {}", outcome.host.summary()),
        mark: quick_mark(asked.quick),
        panels: Operation::ALL.map(panel).into(),
        columns: 2,
        keys: Vec::new(),
    };
    vec![("warmup".to_owned(), figure)]
}

/// What was found, in one line.
pub fn finding(outcome: &Warmup) -> String {
    let each = Operation::ALL.map(|operation| {
        let column = speeds(outcome, Way::Bare, operation);
        let last = column.last().map_or(0.0, |(_, speed)| speed / f64::from(1 << 20));
        match stable_from(&column) {
            Some(size) => format!("{} within 5 % from {} on, {last:.0} MiB/s", operation.name(), format_size(size)),
            None => format!("{} not stable, {last:.0} MiB/s at the largest size", operation.name()),
        }
    });
    format!("bare: {}", each.join("; "))
}
