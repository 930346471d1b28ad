//! What `spile tune` has found, as a table and a plot.

use spile_server::units::format_size;

use super::recommend::rate;
use super::{Asked, Row};
use crate::experiments::plot::{Axis, Figure, Marks, Panel, Point, Series, styles};
use crate::experiments::sample::Spread;
use crate::experiments::{Figures, Outcome, quick_mark, right, table};

type Tune = Outcome<Asked, Row>;

/// Numbers of bytes in flight that have a line in the plot.
const DRAWN: [u64; 6] = [16 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20];

fn sizes(rows: &[Row], of: impl Fn(&Row) -> u64) -> Vec<u64> {
    let mut sizes: Vec<u64> = rows.iter().map(of).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// The throughput by the size of a request and the bytes in flight, and the recommendation.
pub fn text(outcome: &Tune) -> String {
    let rows = &outcome.rows;
    let totals = sizes(rows, |row| row.outstanding_bytes);
    let header = ["request".to_owned()].into_iter().chain(totals.iter().map(|total| format_size(*total)));
    let mut table = table(header);
    for block in sizes(rows, |row| row.block_bytes) {
        let rate =
            |total: &u64| rate(rows, *total, block).map_or_else(String::new, |rate| format!("{:.0}", rate / 1e6));
        table.add_row([format_size(block)].into_iter().chain(totals.iter().map(rate)).map(right));
    }
    let Asked { target, device, operation, .. } = &outcome.parameters;
    let device = device.as_ref().map_or_else(String::new, |device| format!(" on the device {device}"));
    let lines = [table.to_string()].into_iter().chain(left_out(outcome)).chain([advice(outcome)]);
    format!(
        "random {}s, {target}{device}: MB/s (10^6 bytes) by the size of a request and the bytes in flight\n{}",
        operation.name(),
        lines.collect::<Vec<_>>().join("\n")
    )
}

/// What was not measured because the device is slow.
fn left_out(outcome: &Tune) -> Option<String> {
    let Asked { pairs_too_slow, runtime_s, .. } = outcome.parameters;
    (pairs_too_slow > 0).then(|| {
        format!(
            "{pairs_too_slow} pairs of sizes were left out: their requests in flight would have taken longer than {runtime_s:.2} s. \
             --time gives them more."
        )
    })
}

/// What was found here, in a sentence.
pub fn found(outcome: &Tune) -> Vec<String> {
    vec![advice(outcome)]
}

fn advice(outcome: &Tune) -> String {
    let Asked { shape, gain, .. } = &outcome.parameters;
    match shape.as_str() {
        "off" if *gain == 0.0 => {
            "Too little was measured to know whether splitting pays here: shape=off. --time gives it more.".to_owned()
        }
        "off" => {
            format!(
                "Splitting does not pay here ({gain:.2} times the throughput of large requests at best): shape=off."
            )
        }
        shape => format!("Large requests are {gain:.1} times as fast in parts: shape={shape}."),
    }
}

/// The plot and its name.
pub fn figures(outcome: &Tune) -> Figures {
    let rows = &outcome.rows;
    let totals: Vec<u64> =
        sizes(rows, |row| row.outstanding_bytes).into_iter().filter(|total| DRAWN.contains(total)).collect();
    let names: Vec<String> = totals.iter().map(|total| format_size(*total)).collect();
    let series: Vec<Series> = totals
        .iter()
        .zip(styles(names.iter().map(String::as_str)))
        .map(|(total, style)| Series { name: format_size(*total), style, points: points(rows, *total) })
        .collect();
    let most =
        series.iter().flat_map(|series| &series.points).map(|point| point.spread.map_or(point.y, |(_, most)| most));
    let y = Axis::linear("MB/s (10^6 bytes)", most.fold(0.0, f64::max));
    let blocks = sizes(rows, |row| row.block_bytes);
    let Asked { target, operation, rounds, runtime_s, shape, quick, .. } = &outcome.parameters;
    let x = match blocks.is_empty() {
        true => Axis::names("request", &[]),
        false => Axis::sizes("request", &blocks),
    };
    let panel = Panel {
        title: "a line for each number of bytes in flight".into(),
        marks: Marks::Series { x, y, series, reference: None },
    };
    let figure = Figure {
        title: format!("tune: random {}s of {target}", operation.name()),
        note: format!(
            "medians of {rounds} round(s) of {runtime_s:.2} s, and what lies between the tenth and the ninth tenth; lines for {} of the {} \
             numbers of bytes in flight that were measured; recommended: {shape} · {}",
            totals.len(),
            sizes(rows, |row| row.outstanding_bytes).len(),
            outcome.host.summary()
        ),
        mark: quick_mark(*quick),
        panels: vec![panel],
        columns: 1,
        keys: Vec::new(),
    };
    vec![("tune".to_owned(), figure)]
}

fn points(rows: &[Row], total: u64) -> Vec<Point> {
    let of_total = || rows.iter().filter(move |row| row.outstanding_bytes == total);
    let blocks = sizes(&of_total().cloned().collect::<Vec<_>>(), |row| row.block_bytes);
    let point = |block: u64| {
        let rates = of_total().filter(|row| row.block_bytes == block).map(|row| row.bytes_per_s / 1e6);
        let Spread { p10, p50, p90 } = Spread::of(&rates.collect::<Vec<_>>());
        Point::new(block as f64, p50).within(p10, p90)
    };
    blocks.into_iter().map(point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::tune::tests::rows;
    use crate::experiments::{Direction, HostFacts};

    #[test]
    fn the_table_has_all_sizes_and_the_figure_is_well() {
        let parameters = Asked {
            target: "/dev/x".into(),
            device: Some("x-1".into()),
            operation: Direction::Read,
            rounds: 1,
            runtime_s: 0.25,
            pairs_too_slow: 6,
            shape: "split=64k".into(),
            gain: 2.25,
            quick: true,
        };
        let rows = rows(|block, depth| 1e5 * depth as f64 + block as f64 * 100.0);
        let outcome = Outcome { experiment: "tune".into(), host: HostFacts::now(), parameters, rows };
        let text = text(&outcome);
        assert!(
            text.contains("512 B") && text.contains("4 MiB") && text.ends_with("in parts: shape=split=64k."),
            "{text}"
        );
        assert!(text.contains("x on the device x-1") && text.contains("6 pairs of sizes were left out"), "{text}");
        let figure = &figures(&outcome)[0].1;
        assert_eq!(figure.faults(), Vec::<String>::new());
        assert!(figure.mark.is_some() && figure.to_svg().contains("lines for 6 of the 14 numbers of bytes in flight"));
    }
}
