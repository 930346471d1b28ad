//! The figures of `warmup` as tables and plots.

use super::{Asked, Row, STABLE_SHARE, stable_from};
use crate::experiments::filled::{sentences, warning};
use crate::experiments::plot::{Axis, Figure, Marks, Panel, Point, Series, styles};
use crate::experiments::sample::{Spread, median};
use crate::experiments::transfer::{Operation, Way};
use crate::experiments::{Figures, Outcome, quick_mark, right, table};
use spile_server::units::format_size;

type Warmup = Outcome<Asked, Row>;

/// The sizes of some rows, the smallest one first.
fn sizes<'a>(rows: impl Iterator<Item = &'a Row>) -> Vec<u64> {
    let mut sizes: Vec<u64> = rows.map(|row| row.size_bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// The speeds of the rounds in bytes a second. A transfer that time has ended is none of its size.
fn of(outcome: &Warmup, way: Way, operation: Operation, size_bytes: u64) -> Vec<f64> {
    let rows = outcome.rows.iter().filter(|row| row.way == way && row.operation == operation);
    rows.filter(|row| row.size_bytes == size_bytes && row.bytes == size_bytes).map(|row| row.bytes_per_s).collect()
}

/// The median speed of the rounds for each size in bytes a second, the smallest size first.
fn speeds(outcome: &Warmup, way: Way, operation: Operation) -> Vec<(u64, f64)> {
    let each = sizes(outcome.rows.iter()).into_iter().map(|size| (size, of(outcome, way, operation, size)));
    each.filter(|(_, speeds)| !speeds.is_empty()).map(|(size, speeds)| (size, median(speeds))).collect()
}

/// Time and speed of a size, as the table has them; empty when nothing was measured.
fn cells(column: &[(u64, f64)], size_bytes: u64) -> [String; 2] {
    let found = column.iter().find(|(size, _)| *size == size_bytes);
    found.map_or_else(Default::default, |(size, speed)| {
        [format!("{:.3}", *size as f64 / speed), format!("{:.1}", speed / f64::from(1 << 20))]
    })
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
        for size in sizes(outcome.rows.iter().filter(|row| row.way == way)) {
            let cells = columns.iter().flat_map(|column| cells(column, size));
            table.add_row([format_size(size)].into_iter().chain(cells).map(right));
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
    text += &warning(outcome.parameters.no_device.as_deref());
    if let Some(reason) = &outcome.parameters.ended_early {
        text += &format!("larger sizes are left out: {reason}\n");
    }
    text.trim_end().to_owned()
}

/// The plots and their names.
pub fn figures(outcome: &Warmup) -> Figures {
    let asked = &outcome.parameters;
    let sizes = sizes(outcome.rows.iter());
    if sizes.is_empty() {
        return Figures::new();
    }
    let most = outcome.rows.iter().map(|row| row.bytes_per_s / f64::from(1 << 20)).fold(0.0, f64::max);
    let panel = |operation: Operation| {
        let series = Way::ALL.into_iter().zip(styles(Way::ALL.map(Way::name))).map(|(way, style)| {
            let point = |size: &u64| {
                let values = of(outcome, way, operation, *size).into_iter().map(|speed| speed / f64::from(1 << 20));
                let values: Vec<f64> = values.collect();
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
        note: format!(
            "{}blocks of 1 MiB, one request at a time · {}",
            warning(asked.no_device.as_deref()).replace('\n', " · "),
            outcome.host.summary()
        ),
        mark: quick_mark(asked.quick),
        panels: Operation::ALL.map(panel).into(),
        columns: 2,
        keys: Vec::new(),
    };
    vec![("warmup".to_owned(), figure)]
}

/// What was found, in a sentence.
pub fn found(outcome: &Warmup) -> Vec<String> {
    let each = Operation::ALL.map(|operation| {
        let column = speeds(outcome, Way::Bare, operation);
        let last = column.last().map_or(0.0, |(_, speed)| speed / f64::from(1 << 20));
        match stable_from(&column) {
            Some(size) => format!("{} within 5 % from {} on, {last:.0} MiB/s", operation.name(), format_size(size)),
            None => format!("{} not stable, {last:.0} MiB/s at the largest size", operation.name()),
        }
    });
    let warning = sentences(&warning(outcome.parameters.no_device.as_deref()));
    let bare = format!("Bare: {}.", each.join("; "));
    warning.into_iter().chain([bare]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::HostFacts;

    #[test]
    fn a_transfer_that_time_has_ended_moves_no_other_ones() {
        let row = |operation, size_mib: u64, moved_mib: u64, mib_per_s: f64| Row {
            way: Way::Bare,
            operation,
            size_bytes: size_mib << 20,
            bytes: moved_mib << 20,
            round: 0,
            seconds: moved_mib as f64 / mib_per_s,
            bytes_per_s: mib_per_s * f64::from(1 << 20),
        };
        let whole = |operation, size_mib| row(operation, size_mib, size_mib, size_mib as f64);
        use Operation::{ReadDirect, WriteBuffered, WriteDirect};
        let mut rows: Vec<Row> = [1, 2, 4].map(|size| whole(WriteBuffered, size)).into();
        rows.extend([row(WriteDirect, 2, 1, 77.0), whole(WriteDirect, 4)]);
        rows.extend([1, 2, 4].map(|size| whole(ReadDirect, size)));
        let asked = Asked {
            request_bytes: 1 << 20,
            most_bytes: 4 << 20,
            rounds: 1,
            folder: String::new(),
            no_device: None,
            quick: false,
            ended_early: None,
        };
        let outcome = Outcome { experiment: "warmup".to_owned(), host: HostFacts::now(), parameters: asked, rows };
        assert_eq!(speeds(&outcome, Way::Bare, WriteDirect), [(4 << 20, f64::from(4 << 20))]);
        let text = text(&outcome);
        let line = |size: &str| text.lines().find(|line| line.trim_start().starts_with(size)).unwrap().to_owned();
        let words = |size: &str| line(size).split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words("4 MiB")[2..], ["1.000", "4.0", "1.000", "4.0", "1.000", "4.0"], "{text}");
        assert_eq!(words("2 MiB")[2..], ["1.000", "2.0", "1.000", "2.0"], "{text}");
    }
}
