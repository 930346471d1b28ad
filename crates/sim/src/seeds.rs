//! Runs many seeds on several threads. Each seed is a run of its own, so the threads share only the number of the next seed.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::explore::{Finding, Options, Summary, explore, explore_every_step};
use crate::image::{Image, Kind};
use crate::plan::Plan;

/// How a seed is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Several lives, crashed at random.
    Random,
    /// One short life, crashed at every step.
    EveryStep,
}

/// The sums of a range of seeds.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// The number of seeds that were run.
    pub seeds: u64,
    /// The number of steps of all runs (0 for [`Mode::EveryStep`]).
    pub steps: u64,
    /// The number of crashes of all runs.
    pub crashes: u64,
    /// The findings, by seed.
    pub findings: Vec<(u64, Finding)>,
}

/// Runs one seed on the image that it draws.
///
/// # Errors
/// The error that was found.
pub fn run_seed(seed: u64, kind: Option<Kind>, mode: Mode, options: &Options) -> Result<Summary, Finding> {
    let image = Image::draw(seed, kind);
    let (size, block) = (image.leaf().size_bytes, u64::from(image.leaf().block_bytes));
    match mode {
        Mode::Random => explore(image, Plan::draw(seed, size, block), options),
        Mode::EveryStep => {
            let plan = Plan::short(seed, size, block);
            let steps = explore_every_step(&image, &plan, options)?;
            Ok(Summary { crashes: steps * 2, ..Summary::default() })
        }
    }
}

/// Runs a range of seeds on `threads` threads; stops early after `max_findings`.
pub fn run_seeds(
    seeds: Range<u64>,
    kind: Option<Kind>,
    mode: Mode,
    options: &Options,
    threads: usize,
    max_findings: usize,
) -> Totals {
    let next = AtomicU64::new(seeds.start);
    let enough = AtomicBool::new(false);
    let totals = Mutex::new(Totals::default());
    let worker = || {
        while !enough.load(Ordering::Relaxed) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return;
            }
            let ended = run_seed(seed, kind, mode, options);
            let mut totals = totals.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            totals.add(seed, ended);
            enough.store(totals.findings.len() >= max_findings, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(worker);
        }
    });
    let mut totals = totals.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    totals.findings.sort_by_key(|(seed, _)| *seed);
    totals
}

impl Totals {
    fn add(&mut self, seed: u64, ended: Result<Summary, Finding>) {
        self.seeds += 1;
        match ended {
            Ok(summary) => {
                self.steps += summary.steps;
                self.crashes += summary.crashes;
            }
            Err(finding) => self.findings.push((seed, finding)),
        }
    }
}

/// The command that repeats a seed.
pub fn repeat_command(seed: u64, kind: Option<Kind>, mode: Mode) -> String {
    let kind = kind.map(|kind| format!(" --kind {}", kind.name())).unwrap_or_default();
    let mode = if mode == Mode::EveryStep { " --every-step" } else { "" };
    format!("cargo run -p spile-sim --release -- --start {seed} --seeds 1{kind}{mode} --trace")
}

/// The findings as text: each with the command that repeats it.
pub fn report(findings: &[(u64, Finding)], kind: Option<Kind>, mode: Mode) -> String {
    let line = |(seed, finding): &(u64, Finding)| {
        format!("seed {seed}: {}\n  repeat: {}\n", finding.message, repeat_command(*seed, kind, mode))
    };
    findings.iter().map(line).collect()
}
