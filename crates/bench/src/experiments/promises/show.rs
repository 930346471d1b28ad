//! The table of the promises, the figure and the sentences.

use comfy_table::Cell;

use super::super::ratios::{self, Pair};
use super::super::{Figures, Outcome, right, table};
use super::{Line, Parameters, Row};

/// The figure is held against its promise: a bar above 1 has missed it, or, of one that is a least, below. Differences may be less than
/// nothing, and have no bar then.
fn pair(row: &Row) -> Option<Pair> {
    let promised = row.promised?;
    let name = format!("{}: {}", row.line.name(), row.figure.about().what);
    let seen = row.rounds.iter().all(|value| *value >= 0.0);
    seen.then(|| Pair::new(&name, row.rounds.iter(), |value: &f64| (*value, promised)))
}

/// The plot and its name.
pub fn figures(outcome: &Outcome<Parameters, Row>) -> Figures {
    let pairs: Vec<Pair> = outcome.rows.iter().filter_map(pair).collect();
    let title = "promises: what was seen, by what is promised";
    ratios::figures("promises", title, &outcome.host, outcome.parameters.quick, &pairs)
}

/// What was found, in a sentence for each figure with a promise.
pub fn found(outcome: &Outcome<Parameters, Row>) -> Vec<String> {
    let sentence = |row: &Row| {
        let (promised, kept) = (promise(row)?, verdict(row)?);
        let (line, what, unit) = (row.line.name(), row.figure.about().what, &row.unit);
        Some(format!("{line}, {what}: {} {unit} (promised: {promised} {unit}), {kept}.", digits(row.median)))
    };
    outcome.rows.iter().filter_map(sentence).collect()
}

/// The promises as a table: each beside what was seen.
pub fn text(outcome: &Outcome<Parameters, Row>) -> String {
    let heads = ["promise", "what", "unit", "promised", "median", "worst", ""];
    let mut table = table(heads.map(str::to_owned));
    for line in Line::ALL {
        for (number, row) in outcome.rows.iter().filter(|row| row.line == line).enumerate() {
            let name = if number == 0 { line.name() } else { "" };
            table.add_row([
                Cell::new(name),
                Cell::new(row.figure.about().what),
                Cell::new(&row.unit),
                right(promise(row).unwrap_or_default()),
                right(digits(row.median)),
                right(digits(row.worst)),
                Cell::new(verdict(row).unwrap_or_default()),
            ]);
        }
    }
    let Parameters { rounds, disk_bytes, cloned_bytes, cut_s, depth, there, .. } = &outcome.parameters;
    let there = there.as_ref().map(|folder| format!("; the other host's images lie in {}", folder.display()));
    let missed = outcome.rows.iter().filter(|row| row.kept == Some(false)).count();
    let promised = outcome.rows.iter().filter(|row| row.kept.is_some()).count();
    format!(
        "{rounds} rounds; disks of {} MiB, guests with {depth} requests of 4 KiB in flight, 70 reads and 30 writes of a hundred; the link is cut \
         for {cut_s} s; clones are of {} TiB, qcow2{}\n{table}\n{} of {promised} promises are \
         kept. Those on a guest's runs are judged by the median, the others by every round.",
        disk_bytes >> 20,
        cloned_bytes >> 40,
        there.unwrap_or_default(),
        promised - missed
    )
}

fn verdict(row: &Row) -> Option<&'static str> {
    row.kept.map(|kept| if kept { "kept" } else { "missed" })
}

fn promise(row: &Row) -> Option<String> {
    let sign = if row.figure.about().is_least { "≥" } else { "≤" };
    row.promised.map(|promised| format!("{sign} {promised}"))
}

/// Three digits or so.
fn digits(value: f64) -> String {
    match value.abs() {
        ..10.0 => format!("{value:.2}"),
        ..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_three_digits() {
        assert_eq!([0.123, -3.456, 12.34, 1234.5].map(digits), ["0.12", "-3.46", "12.3", "1234"]);
    }
}
