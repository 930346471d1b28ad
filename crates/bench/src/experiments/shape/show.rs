//! The figures of `shape` as tables and plots.

use comfy_table::{Cell, Table};
use spile_server::units::format_size;

use super::{Asked, Row, Side, Store};
use crate::experiments::plot::{Axis, Figure, Marks, Panel, Point, Series, styles};
use crate::experiments::sample::{Spread, median};
use crate::experiments::{Figures, Outcome, quick_mark, right, table};

type Shape = Outcome<Asked, Row>;

/// A guest's large reads are to have so many times the throughput of the bare store's, with one of the shapes.
const AIM: f64 = 1.5;

/// The throughput of one side with reads of one size, round by round.
fn rates(outcome: &Shape, store: Store, side: Side, size: u64) -> Vec<f64> {
    let rows = outcome.rows.iter();
    let rows = rows.filter(|row| row.store == store && row.side == side && row.request_bytes == size);
    rows.map(|row| row.bytes_per_s).collect()
}

/// The throughput of one side by that of the bare store in the same round.
fn ratio(outcome: &Shape, store: Store, side: Side, size: u64) -> Option<Spread> {
    Spread::of_ratios(&rates(outcome, store, side, size), &rates(outcome, store, Side::Bare, size))
}

fn stores(outcome: &Shape) -> Vec<Store> {
    let is_there = |store: &Store| outcome.rows.iter().any(|row| row.store == *store);
    [Store::Model, Store::Given].into_iter().filter(is_there).collect()
}

fn name(outcome: &Shape, store: Store) -> String {
    let Asked { model, store: given, .. } = &outcome.parameters;
    match (store, given) {
        (Store::Given, Some(path)) => path.display().to_string(),
        _ => format!(
            "a modelled SSD: {} channels, striped pages of {}, {} µs a page, {} pages of a request at a time",
            model.channels,
            format_size(model.page_bytes),
            model.page_us,
            model.pages_at_once
        ),
    }
}

/// The figures as tables.
pub fn text(outcome: &Shape) -> String {
    let each = stores(outcome).into_iter().map(|store| {
        format!(
            "random reads at depth 1 from {}: throughput, and that of a guest by that of the bare store (medians of {} rounds, and \
             from the tenth to the ninth tenth)\n{}\n{}",
            name(outcome, store),
            outcome.parameters.rounds,
            by_size(outcome, store),
            verdict(outcome, store)
        )
    });
    each.collect::<Vec<_>>().join("\n\n")
}

fn by_size(outcome: &Shape, store: Store) -> Table {
    let split = format!("split={}", format_size(outcome.parameters.part_bytes.into()));
    let mut table = table(["read", "bare MB/s", "guest, off", &split, "auto"].map(str::to_owned));
    for &size in &outcome.parameters.request_sizes_bytes {
        let bare = format!("{:.0}", median(rates(outcome, store, Side::Bare, size)) / 1e6);
        let ratios = [Side::Off, Side::Split, Side::Auto].map(|side| match ratio(outcome, store, side, size) {
            Some(Spread { p10, p50, p90 }) => format!("{p50:.2} ({p10:.2}–{p90:.2})"),
            None => String::new(),
        });
        let cells = [Cell::new(format_size(size)), right(bare)];
        table.add_row(cells.into_iter().chain(ratios.map(right)));
    }
    table
}

/// Whether splitting pays on this store, and whether a guest is faster than the bare store, in two sentences.
fn verdict(outcome: &Shape, store: Store) -> String {
    let sizes = &outcome.parameters.request_sizes_bytes;
    let best = |size: &u64| {
        let of = |side| Some(ratio(outcome, store, side, *size)?.p50);
        Some((of(Side::Split)?.max(of(Side::Auto)?), of(Side::Off)?))
    };
    let best: Vec<(f64, f64)> = sizes.iter().filter_map(best).collect();
    let gain = match median(best.iter().map(|(best, off)| best / off).collect()) {
        gain if gain >= 1.1 => {
            format!("Splitting pays here: a guest reads {gain:.1} times as fast with it as without.")
        }
        gain if gain > 0.9 => format!("Splitting changes little here: {gain:.2} times the throughput."),
        gain => format!("Splitting does not pay here: {gain:.2} times the throughput."),
    };
    let by_bare = median(best.iter().map(|(best, _)| *best).collect());
    let is_reached = if by_bare >= AIM { "reached" } else { "missed" };
    format!("{gain} That is {by_bare:.2} times the bare store (aim {AIM}): {is_reached}.")
}

/// What was found here, in sentences: one for each store.
pub fn found(outcome: &Shape) -> Vec<String> {
    stores(outcome).into_iter().map(|store| format!("{}: {}", name(outcome, store), verdict(outcome, store))).collect()
}

/// The plots and their names.
pub fn figures(outcome: &Shape) -> Figures {
    let panels = stores(outcome).into_iter().map(|store| panel(outcome, store)).collect();
    let Asked { rounds, runtime_s, quick, .. } = &outcome.parameters;
    let models: Vec<String> = stores(outcome).into_iter().map(|store| name(outcome, store)).collect();
    let note = format!(
        "random reads, one at a time; {}; medians of {rounds} round(s) of {runtime_s} s, and what lies between the tenth and the ninth tenth · {}",
        models.join("; "),
        outcome.host.summary()
    );
    let title = "shape: a guest's large reads, by those of the bare store".to_owned();
    let mark = quick_mark(*quick);
    vec![("shape".to_owned(), Figure { title, note, mark, panels, columns: 2, keys: Vec::new() })]
}

/// Sizes to the right, a series for each shape.
fn panel(outcome: &Shape, store: Store) -> Panel {
    let sizes = &outcome.parameters.request_sizes_bytes;
    let sides = [(Side::Off, "off"), (Side::Split, "split"), (Side::Auto, "auto")];
    let series = sides.iter().zip(styles(sides.map(|(_, name)| name))).map(|((side, name), style)| {
        let points = sizes.iter().filter_map(|size| {
            let Spread { p10, p50, p90 } = ratio(outcome, store, *side, *size)?;
            Some(Point::new(*size as f64, p50).within(p10, p90))
        });
        Series { name: (*name).to_owned(), style, points: points.collect() }
    });
    let series: Vec<Series> = series.collect();
    let ends = series.iter().flat_map(|series| &series.points).filter_map(|point| point.spread).map(|(_, most)| most);
    let y = Axis::ratios("throughput ÷ bare store", ends.collect::<Vec<_>>().into_iter());
    let title = match store {
        Store::Model => "a modelled SSD".to_owned(),
        Store::Given => name(outcome, store),
    };
    Panel { title, marks: Marks::Series { x: Axis::sizes("read", sizes), y, series, reference: Some(1.0) } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::HostFacts;
    use crate::ssd::Figures as Model;

    fn outcome() -> Shape {
        let sizes = vec![512 << 10, 1 << 20, 2 << 20];
        let sides = [(Side::Bare, 1e9), (Side::Off, 0.9e9), (Side::Split, 2.0e9), (Side::Auto, 1.8e9)];
        let rows = [Store::Model, Store::Given].into_iter().flat_map(|store| {
            let sizes = sizes.clone();
            (0..3).flat_map(move |round| {
                sizes.clone().into_iter().flat_map(move |request_bytes| {
                    sides.map(|(side, rate)| {
                        let rate = if store == Store::Given && side != Side::Bare { 0.9e9 } else { rate };
                        Row { store, side, request_bytes, round, bytes_per_s: rate * (1.0 + f64::from(round) / 100.0) }
                    })
                })
            })
        });
        let parameters = Asked {
            request_sizes_bytes: sizes.clone(),
            queue_depth: 1,
            part_bytes: 64 << 10,
            rounds: 3,
            runtime_s: 1.0,
            model: Model::default(),
            store: Some("/dev/x".into()),
            quick: false,
        };
        Outcome { experiment: "shape".into(), host: HostFacts::now(), parameters, rows: rows.collect() }
    }

    #[test]
    fn the_tables_have_ratios_and_a_verdict_for_each_store() {
        let text = text(&outcome());
        assert!(text.contains("2.00 (2.00–2.00)") && text.contains("16 channels"), "{text}");
        assert!(text.contains("Splitting pays here: a guest reads 2.2 times as fast"), "{text}");
        assert!(text.contains("That is 2.00 times the bare store (aim 1.5): reached."), "{text}");
        assert!(text.contains("That is 0.90 times the bare store (aim 1.5): missed."), "{text}");
        assert_eq!(found(&outcome()).len(), 2);
        assert!(text.contains("/dev/x") && text.contains("Splitting changes little here: 1.00"), "{text}");
    }

    #[test]
    fn the_figure_is_well() {
        let (name, figure) = &figures(&outcome())[0];
        assert_eq!((name.as_str(), figure.panels.len()), ("shape", 2));
        assert_eq!(figure.faults(), Vec::<String>::new());
    }
}
