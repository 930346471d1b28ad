//! The figures of `geometry` as a table and plots.

use comfy_table::Cell;

use super::{Asked, Row};
use crate::experiments::sample::median;
use crate::experiments::transfer::Way;
use crate::experiments::{Figures, Outcome, right, table};
use spile_server::units::format_size;

type Geometry = Outcome<Asked, Row>;

/// The ways that were measured.
fn ways(outcome: &Geometry) -> Vec<Way> {
    Way::ALL.into_iter().filter(|way| outcome.rows.iter().any(|row| row.way == *way)).collect()
}

/// The median speed of the rounds at each position in bytes a second.
fn speeds(outcome: &Geometry, way: Way) -> Vec<(u64, f64)> {
    let rows: Vec<&Row> = outcome.rows.iter().filter(|row| row.way == way).collect();
    let mut offsets: Vec<u64> = rows.iter().map(|row| row.offset_bytes).collect();
    offsets.sort_unstable();
    offsets.dedup();
    let at = |offset| median(rows.iter().filter(|row| row.offset_bytes == offset).map(|row| row.bytes_per_s).collect());
    offsets.into_iter().map(|offset| (offset, at(offset))).collect()
}

/// The figures as a table, and how far they lie apart.
pub fn text(outcome: &Geometry) -> String {
    let Asked { target, target_bytes, length_bytes, every_bytes, .. } = &outcome.parameters;
    let ways = ways(outcome);
    let columns: Vec<Vec<(u64, f64)>> = ways.iter().map(|way| speeds(outcome, *way)).collect();
    let mut table =
        table(["from".to_owned()].into_iter().chain(ways.iter().map(|way| format!("{} MiB/s", way.name()))));
    for (row, (offset, _)) in columns.first().into_iter().flatten().enumerate() {
        let cells = columns.iter().map(|column| column.get(row).map_or(0.0, |(_, speed)| speed / f64::from(1 << 20)));
        let cells = cells.map(|speed| right(format!("{speed:.1}")));
        table.add_row([Cell::new(format_size(*offset))].into_iter().chain(cells));
    }
    let spreads: Vec<String> = ways.iter().zip(&columns).map(|(way, column)| spread(*way, column)).collect();
    format!(
        "direct reads of {} every {} of {target} ({}), blocks of 1 MiB\n{table}\n{}",
        format_size(*length_bytes),
        format_size(*every_bytes),
        format_size(*target_bytes),
        spreads.join("\n")
    )
}

fn spread(way: Way, speeds: &[(u64, f64)]) -> String {
    let middle = median(speeds.iter().map(|(_, speed)| *speed).collect());
    let (low, high) =
        speeds.iter().fold((f64::MAX, 0.0f64), |(low, high), (_, speed)| (low.min(*speed), high.max(*speed)));
    let percent = |speed: f64| 100.0 * (speed / middle - 1.0);
    format!("{}: from {:+.0} % to {:+.0} % of the median over the addresses", way.name(), percent(low), percent(high))
}

/// The plots and their names.
pub fn figures(_: &Geometry) -> Figures {
    Figures::new()
}
