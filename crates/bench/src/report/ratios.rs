//! Figures of experiments that compare two sides: the ratio of one to the other, with its spread over the rounds.

use crate::experiments::plot::{Axis, Bar, Figure, Marks, Panel, QUICK, style};
use crate::experiments::sample::Spread;
use crate::experiments::{Figures, Outcome, crowd, exchange, hung};

/// Fewer rounds make a quick run.
const FEW_ROUNDS: usize = 4;

/// What is compared: its name, and both sides by round.
struct Pair {
    name: String,
    these: Vec<f64>,
    others: Vec<f64>,
}

impl Pair {
    fn new<'a, R: 'a>(name: &str, rows: impl Iterator<Item = &'a R>, sides: impl Fn(&R) -> (f64, f64)) -> Self {
        let (these, others) = rows.map(sides).unzip();
        Self { name: name.to_owned(), these, others }
    }
}

fn figure(outcome: (&str, &str, &str), pairs: &[Pair]) -> Figures {
    let (name, title, note) = outcome;
    let rounds = pairs.iter().map(|pair| pair.these.len()).max().unwrap_or(0);
    let ratio = |pair: &Pair| Some((pair.name.clone(), Spread::of_ratios(&pair.these, &pair.others)?));
    let ratios: Vec<(String, Spread)> = pairs.iter().filter_map(ratio).collect();
    let x = Axis::ratios(
        "ratio; median of the rounds, and from the tenth to the ninth tenth",
        ratios.iter().map(|(_, r)| r.p90),
    );
    let bar = |(name, ratio): (String, Spread)| Bar {
        name,
        note: format!("{:.2}", ratio.p50),
        parts: vec![(ratio.p50, style("with"))],
        spread: Some((ratio.p10, ratio.p90)),
    };
    if ratios.is_empty() {
        return Figures::new();
    }
    let marks = Marks::Bars { x, bars: ratios.into_iter().map(bar).collect(), reference: Some(1.0) };
    let figure = Figure {
        title: title.to_owned(),
        note: format!("{rounds} rounds, sides in changing order · {note}"),
        mark: (rounds < FEW_ROUNDS).then(|| QUICK.to_owned()),
        panels: vec![Panel { title: String::new(), marks }],
        columns: 1,
        keys: Vec::new(),
    };
    vec![(format!("{name}-ratio"), figure)]
}

/// The longest request with an exchange, by the longest one without.
pub fn exchange(outcome: &Outcome<exchange::Asked, exchange::Row>) -> Figures {
    let sides = |row: &exchange::Row| (row.longest_with_us, row.longest_without_us);
    let pair = Pair::new("longest request", outcome.rows.iter(), sides);
    figure(("exchange", "exchange: a run with an exchange, by one without", &outcome.host.summary()), &[pair])
}

/// The busy disk in the crowd, by the one that is alone.
pub fn crowd(outcome: &Outcome<crowd::Parameters, crowd::Row>) -> Figures {
    let rows = || outcome.rows.iter();
    let pairs = [
        Pair::new("requests per second", rows(), |row: &crowd::Row| (row.crowd_iops, row.alone_iops)),
        Pair::new("processor time of a request", rows(), |row: &crowd::Row| (row.crowd_cpu_us, row.alone_cpu_us)),
    ];
    figure(("crowd", "crowd: a disk among many idle ones, by one alone", &outcome.host.summary()), &pairs)
}

/// The healthy disk beside a hung one, by itself alone.
pub fn hung(outcome: &Outcome<hung::Parameters, hung::Row>) -> Figures {
    let mut cases: Vec<(hung::Store, u32)> = Vec::new();
    for row in &outcome.rows {
        if !cases.contains(&(row.store, row.depth)) {
            cases.push((row.store, row.depth));
        }
    }
    let pairs = cases.into_iter().flat_map(|(store, depth)| {
        let rows = || outcome.rows.iter().filter(move |row| (row.store, row.depth) == (store, depth));
        let name = |what: &str| format!("{what}, depth {depth}, {}", store.name());
        [
            Pair::new(&name("p99"), rows(), |row: &hung::Row| (row.beside_p99_us, row.alone_p99_us)),
            Pair::new(&name("IOPS"), rows(), |row: &hung::Row| (row.beside_iops, row.alone_iops)),
        ]
    });
    let pairs: Vec<Pair> = pairs.collect();
    figure(("hung", "hung: a disk beside one whose store hangs, by itself alone", &outcome.host.summary()), &pairs)
}
