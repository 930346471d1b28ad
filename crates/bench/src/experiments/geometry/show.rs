//! The figures of `geometry` as a table and plots.

use comfy_table::Cell;

use super::{Asked, Row};
use crate::experiments::filled::{sentences, warning};
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
    let Asked { target, target_bytes, length_bytes, every_bytes, no_device, .. } = &outcome.parameters;
    let ways = ways(outcome);
    let columns: Vec<Vec<(u64, f64)>> = ways.iter().map(|way| speeds(outcome, *way)).collect();
    let mut table =
        table(["from".to_owned()].into_iter().chain(ways.iter().map(|way| format!("{} MiB/s", way.name()))));
    for (offset, _) in columns.first().into_iter().flatten() {
        let cells = ways.iter().zip(&columns).map(|(way, column)| right(cell(outcome, *way, column, *offset)));
        table.add_row([Cell::new(format_size(*offset))].into_iter().chain(cells));
    }
    let spreads: Vec<String> = ways.iter().zip(&columns).map(|(way, column)| spread(*way, column)).collect();
    format!(
        "direct reads of {} every {} of {target} ({}), blocks of 1 MiB\n{table}\n{}{}{}",
        format_size(*length_bytes),
        format_size(*every_bytes),
        format_size(*target_bytes),
        stopped(outcome),
        warning(no_device.as_deref()),
        spreads.join("\n")
    )
}

/// The speed at a position in MiB/s, with a star where time has ended a reading.
fn cell(outcome: &Geometry, way: Way, column: &[(u64, f64)], offset_bytes: u64) -> String {
    let Some((_, speed)) = column.iter().find(|(offset, _)| *offset == offset_bytes) else { return String::new() };
    let mut here = outcome.rows.iter().filter(|row| row.way == way && row.offset_bytes == offset_bytes);
    let mark = if here.any(|row| row.cut) { "*" } else { "" };
    format!("{:.1}{mark}", speed / f64::from(1 << 20))
}

/// What the stars mean, and why readings are missing; each a line.
fn stopped(outcome: &Geometry) -> String {
    let asked = &outcome.parameters;
    let least = outcome.rows.iter().filter(|row| row.cut).map(|row| row.bytes).min();
    let cut = least
        .map(|bytes| format!("* stopped after {} s: only {} were read, or more\n", asked.limit_s, format_size(bytes)));
    let early = asked.ended_early.as_ref().map(|why| format!("readings are left out: {why}\n"));
    cut.unwrap_or_default() + &early.unwrap_or_default()
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
            "{}{}{} every {} of {}, blocks of 1 MiB, one request at a time · {}",
            warning(asked.no_device.as_deref()).replace('\n', " · "),
            if outcome.rows.iter().any(|row| row.cut) { "at most " } else { "" },
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

/// What was found, in a sentence for each way.
pub fn found(outcome: &Geometry) -> Vec<String> {
    let notes = sentences(&(warning(outcome.parameters.no_device.as_deref()) + &stopped(outcome)));
    let each = ways(outcome).into_iter().map(|way| {
        let column = speeds(outcome, way);
        let middle = median(column.iter().map(|(_, speed)| speed / f64::from(1 << 20)).collect());
        format!("{} ({middle:.0} MiB/s).", spread(way, &column))
    });
    notes.into_iter().chain(each).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::HostFacts;

    #[test]
    fn readings_that_time_has_ended_are_marked() {
        let asked = Asked {
            target: "a file".to_owned(),
            target_bytes: 4 << 30,
            length_bytes: 1 << 30,
            every_bytes: 2 << 30,
            request_bytes: 1 << 20,
            limit_s: 2.0,
            rounds: 1,
            ended_early: None,
            no_device: None,
            quick: false,
        };
        let row = |offset_bytes, bytes, cut| {
            let bytes_per_s = bytes as f64 / 2.0;
            Row { way: Way::Bare, offset_bytes, round: 0, bytes, seconds: 2.0, bytes_per_s, cut }
        };
        let rows = vec![row(0, 200 << 20, true), row(2 << 30, 1 << 30, false)];
        let outcome = Outcome { experiment: "geometry".to_owned(), host: HostFacts::now(), parameters: asked, rows };
        let text = text(&outcome);
        assert!(text.contains("100.0*") && text.contains("512.0 "), "{text}");
        assert!(text.contains("* stopped after 2 s: only 200 MiB were read"), "{text}");
        assert!(found(&outcome)[0].starts_with("stopped after 2 s"), "{:?}", found(&outcome));
    }
}
