//! Figures of experiments that compare two sides: the ratio of one to the other, with its spread over the rounds.

use super::plot::{Axis, Bar, Figure, Marks, Panel, style};
use super::sample::Spread;
use super::{Figures, HostFacts, quick_mark};

/// What is compared: its name, and both sides by round.
pub struct Pair {
    name: String,
    these: Vec<f64>,
    others: Vec<f64>,
}

impl Pair {
    /// Takes both sides of each row: `sides` returns the one that is held against the other first.
    pub fn new<'a, R: 'a>(name: &str, rows: impl Iterator<Item = &'a R>, sides: impl Fn(&R) -> (f64, f64)) -> Self {
        let (these, others) = rows.map(sides).unzip();
        Self { name: name.to_owned(), these, others }
    }

    /// The ratio over the rounds; `None` when there are none.
    pub fn ratio(&self) -> Option<Spread> {
        Spread::of_ratios(&self.these, &self.others)
    }
}

/// One figure, `NAME-ratio`, with a bar for each pair; none when nothing was measured.
pub fn figures(name: &str, title: &str, host: &HostFacts, is_quick: bool, pairs: &[Pair]) -> Figures {
    let rounds = pairs.iter().map(|pair| pair.these.len()).max().unwrap_or(0);
    let ratios = pairs.iter().filter_map(|pair| Some((pair.name.clone(), pair.ratio()?)));
    let ratios: Vec<(String, Spread)> = ratios.collect();
    if ratios.is_empty() {
        return Figures::new();
    }
    let label = "ratio; median of the rounds, and from the tenth to the ninth tenth";
    let x = Axis::ratios(label, ratios.iter().map(|(_, ratio)| ratio.p90));
    let bars = ratios.into_iter().map(bar).collect();
    let figure = Figure {
        title: title.to_owned(),
        note: format!("{rounds} rounds, sides in changing order · {}", host.summary()),
        mark: quick_mark(is_quick),
        panels: vec![Panel { title: String::new(), marks: Marks::Bars { x, bars, reference: Some(1.0) } }],
        columns: 1,
        keys: Vec::new(),
    };
    vec![(format!("{name}-ratio"), figure)]
}

fn bar((name, ratio): (String, Spread)) -> Bar {
    let parts = vec![(ratio.p50, style("with"))];
    Bar { name, note: format!("{:.2}", ratio.p50), parts, spread: Some((ratio.p10, ratio.p90)) }
}
