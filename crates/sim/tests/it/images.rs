//! The images of `spile-image` under the simulator: many seeds, kept seeds, a crash at every step.
//!
//! `SPILE_SIM_SEEDS` sets how many seeds the first test runs (default 1,000); for more, use the program:
//! `cargo run -p spile-sim --release -- --seeds 100000`.

use spile_sim::explore::Options;
use spile_sim::image::Kind;
use spile_sim::seeds::{Mode, Totals, report, run_seed, run_seeds};

fn run(seeds: std::ops::Range<u64>, mode: Mode) -> Totals {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let totals = run_seeds(seeds, None, mode, &Options::default(), threads, 5);
    assert!(totals.findings.is_empty(), "\n{}", report(&totals.findings, None, mode));
    totals
}

#[test]
fn a_thousand_seeds_find_nothing() {
    let asked = std::env::var("SPILE_SIM_SEEDS").ok().and_then(|text| text.parse().ok());
    let seeds = asked.unwrap_or(1000);
    let totals = run(0..seeds, Mode::Random);
    assert!(totals.seeds == seeds && totals.crashes > seeds, "{totals:?}");
    println!("{} seeds, {} steps, {} crashes", totals.seeds, totals.steps, totals.crashes);
}

/// Two seeds of twelve; `cargo xtask sim` runs them all.
#[test]
fn a_crash_at_every_step_finds_nothing() {
    let totals = run(0..2, Mode::EveryStep);
    println!("{} crashes", totals.crashes);
}

#[test]
fn kept_seeds_find_nothing_any_more() {
    let mut findings = Vec::new();
    let lines = include_str!("../../seeds.txt").lines().filter(|line| !line.starts_with('#'));
    for line in lines {
        let mut words = line.split_whitespace();
        let mode = match words.next() {
            Some("random") => Mode::Random,
            Some("every-step") => Mode::EveryStep,
            other => panic!("{line}: unknown mode {other:?}"),
        };
        let kind: Option<Kind> = match words.next() {
            Some("any") => None,
            name => Some(name.unwrap_or_default().parse().unwrap()),
        };
        let seed: u64 = words.next().unwrap_or_default().parse().unwrap();
        if let Err(finding) = run_seed(seed, kind, mode, &Options::default()) {
            findings.push(report(&[(seed, finding)], kind, mode));
        }
    }
    assert!(findings.is_empty(), "\n{}", findings.concat());
}

#[test]
fn a_seed_does_the_same_every_time() {
    let outcome = |seed| {
        let ended = run_seed(seed, None, Mode::Random, &Options::default());
        ended.map_err(|finding| finding.message)
    };
    let differ: Vec<u64> = (0..150).filter(|seed| outcome(*seed) != outcome(*seed)).collect();
    assert!(differ.is_empty(), "these seeds did not repeat: {differ:?}");
}
