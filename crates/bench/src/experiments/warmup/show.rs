//! The figures of `warmup` as tables and plots.

use super::{Asked, Row, STABLE_SHARE, stable_from};
use crate::experiments::sample::median;
use crate::experiments::transfer::{Operation, Way};
use crate::experiments::{Figures, Outcome, right, table};
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
pub fn figures(_: &Warmup) -> Figures {
    Figures::new()
}
