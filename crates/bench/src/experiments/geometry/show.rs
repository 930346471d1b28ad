//! The figures of `geometry` as a table and plots.

use comfy_table::Cell;

use super::{Asked, Row};
use crate::experiments::plot::{Axis, Figure, Marks, Panel, Point, Series, styles};
use crate::experiments::sample::{Spread, median};
use crate::experiments::transfer::Way;
use crate::experiments::{Figures, Outcome, quick_mark, right, table};
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
pub fn figures(outcome: &Geometry) -> Figures {
    const GIB: f64 = (1u64 << 30) as f64;
    let asked = &outcome.parameters;
    let ways = ways(outcome);
    let most = outcome.rows.iter().map(|row| row.bytes_per_s / f64::from(1 << 20)).fold(0.0, f64::max);
    let series = ways.iter().zip(styles(ways.iter().map(|way| way.name()))).map(|(way, style)| {
        let points = speeds(outcome, *way).into_iter().map(|(offset, _)| {
            let rows = outcome.rows.iter().filter(|row| row.way == *way && row.offset_bytes == offset);
            let values: Vec<f64> = rows.map(|row| row.bytes_per_s / f64::from(1 << 20)).collect();
            let Spread { p10, p50, p90 } = Spread::of(&values);
            Point::new(offset as f64 / GIB, p50).within(p10, p90)
        });
        Series { name: way.name().to_owned(), style, points: points.collect() }
    });
    let x = Axis::between("address in GiB", 0.0, asked.target_bytes as f64 / GIB);
    let marks = Marks::Series { x, y: Axis::linear("MiB/s", most), series: series.collect(), reference: None };
    let figure = Figure {
        title: "geometry: direct reads by address".to_owned(),
        note: format!(
            "{} every {} of {}, blocks of 1 MiB, one request at a time · {}",
            format_size(asked.length_bytes),
            format_size(asked.every_bytes),
            asked.target,
            outcome.host.summary()
        ),
        mark: quick_mark(asked.quick),
        panels: vec![Panel { title: String::new(), marks }],
        columns: 1,
        keys: Vec::new(),
    };
    vec![("geometry".to_owned(), figure)]
}

/// What was found, in one line.
pub fn finding(outcome: &Geometry) -> String {
    let each = ways(outcome).into_iter().map(|way| {
        let column = speeds(outcome, way);
        let middle = median(column.iter().map(|(_, speed)| speed / f64::from(1 << 20)).collect());
        format!("{} ({middle:.0} MiB/s)", spread(way, &column))
    });
    each.collect::<Vec<_>>().join("; ")
}
