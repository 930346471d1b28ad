//! `cargo xtask test`: every check there is, in stages, with one line of sums at the end.
//!
//! A stage is a program. Its output goes to `target/test-logs/STAGE.log`; when it fails, its end
//! is printed too. A failed stage does not stop the others, so one run names all that is wrong.
//! Each skip is printed with its reason, and so are the stages' times and their slowest tests. The last line is `N passed, N failed, N skipped`.

mod counts;
mod rust;
mod stages;

pub use rust::{build, rust_tests};
pub use stages::{quick_checks, tally};

use crate::{Result, shell};
use counts::{Counts, Reader};
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Lines of a failed stage's log that are printed.
const SHOWN_LINES: usize = 120;
/// The slowest tests of a stage that are printed, and from how many seconds on.
const SLOWEST: (usize, f64) = (10, 1.0);
/// What a whole run takes on a fresh machine, in GiB: where it builds, and in the folder of temporary files.
const ROOM_GIB: [u64; 2] = [6, 3];

/// One program to run, and how to read its sums from what it prints.
pub struct Stage {
    name: &'static str,
    command: Command,
    reader: Reader,
}

struct Outcome {
    name: &'static str,
    counts: Counts,
    seconds: f64,
    slowest: Vec<(f64, String)>,
}

/// Runs all stages; an error when any check failed.
pub fn run(arguments: &[String]) -> Result<()> {
    let only: String = shell::option(arguments, "--only", String::new())?;
    if only.is_empty() {
        tell_room();
    }
    let mut groups = stages::all();
    for lane in groups.iter_mut().flatten() {
        lane.retain(|stage| stage.name.contains(&only));
    }
    run_groups(groups)
}

/// Runs the long versions of what [`run`] runs shortly, one after the other; an error when any check failed.
pub fn run_long(_arguments: &[String]) -> Result<()> {
    run_stages(stages::long())
}

/// Runs stages one after the other; an error when any check failed.
pub fn run_stages(stages: Vec<Stage>) -> Result<()> {
    run_groups(vec![vec![stages]])
}

/// Runs groups of lanes one after the other. The lanes of a group run beside each other.
fn run_groups(groups: Vec<Vec<Vec<Stage>>>) -> Result<()> {
    let logs = shell::target_dir().join("test-logs");
    std::fs::create_dir_all(&logs).map_err(|error| format!("{}: {error}", logs.display()))?;
    let begun = Instant::now();
    let mut outcomes = Vec::new();
    for lanes in groups {
        outcomes.extend(run_beside(lanes, &logs)?);
    }
    print_sums(&outcomes, begun.elapsed().as_secs_f64())
}

/// Runs the stages of each lane one after the other, and the lanes beside each other.
fn run_beside(lanes: Vec<Vec<Stage>>, logs: &Path) -> Result<Vec<Outcome>> {
    let run = |lane: Vec<Stage>| lane.into_iter().map(|stage| run_stage(stage, logs)).collect::<Result<Vec<_>>>();
    let outcomes = std::thread::scope(|scope| {
        let running: Vec<_> = lanes.into_iter().map(|lane| scope.spawn(move || run(lane))).collect();
        running.into_iter().map(|lane| lane.join().expect("no stage panics")).collect::<Result<Vec<_>>>()
    })?;
    Ok(outcomes.into_iter().flatten().collect())
}

/// Says how much room there is, and when that may be too little: a file system that becomes full has all kinds of tests fail.
fn tell_room() {
    for (folder, takes_gib) in [shell::target_dir(), std::env::temp_dir()].iter().zip(ROOM_GIB) {
        let Some(free) = shell::free_bytes(folder) else { continue };
        let free_gib = free >> 30;
        let enough = if free_gib < takes_gib {
            "that may be too little: make room, or set CARGO_TARGET_DIR or TMPDIR"
        } else {
            "enough"
        };
        println!("{}: {free_gib} GiB are free, a whole run takes about {takes_gib}: {enough}", folder.display());
    }
}

fn run_stage(mut stage: Stage, logs: &Path) -> Result<Outcome> {
    println!("{:<11} running", stage.name);
    let path = logs.join(format!("{}.log", stage.name));
    let begun = Instant::now();
    let passed = run_logged(&mut stage.command, &path)?;
    let log = std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let log = String::from_utf8_lossy(&log);
    let counts = stage.reader.read(&log, passed);
    let seconds = begun.elapsed().as_secs_f64();
    println!("{:<11} {} ({seconds:.1} s)", stage.name, counts.line());
    for skip in &counts.reasons {
        println!("            skipped: {skip}");
    }
    // What a stage has to say though it passed.
    for note in log.lines().filter_map(|line| line.strip_prefix("NOTE ")) {
        println!("            note: {note}");
    }
    if counts.failed > 0 {
        print_end(&log, &path);
    }
    Ok(Outcome { name: stage.name, counts, seconds, slowest: counts::slowest(&log, SLOWEST.0) })
}

/// Runs with both outputs in one file; answers whether it ended well.
fn run_logged(command: &mut Command, path: &Path) -> Result<bool> {
    let problem = |error: std::io::Error| format!("{}: {error}", path.display());
    let log = File::create(path).map_err(problem)?;
    let errors = log.try_clone().map_err(problem)?;
    command.stdin(Stdio::null()).stdout(log).stderr(errors);
    match command.status() {
        Ok(status) => Ok(status.success()),
        Err(error) => {
            let text = format!("cannot run {command:?}: {error}\n");
            std::fs::write(path, text).map_err(problem)?;
            Ok(false)
        }
    }
}

fn print_end(log: &str, path: &Path) {
    let lines: Vec<&str> = log.lines().collect();
    let from = lines.len().saturating_sub(SHOWN_LINES);
    // At once, for another stage may be printing, too.
    println!("--- the end of {} ---\n{}\n--- end ---", path.display(), lines[from..].join("\n"));
}

fn print_sums(outcomes: &[Outcome], seconds: f64) -> Result<()> {
    let mut sum = Counts::default();
    println!("\n{:<11} {:>7} {:>7} {:>7} {:>9}", "stage", "passed", "failed", "skipped", "seconds");
    for Outcome { name, counts, seconds, .. } in outcomes {
        let Counts { passed, failed, skipped, .. } = counts;
        println!("{name:<11} {passed:>7} {failed:>7} {skipped:>7} {seconds:>9.1}");
        sum.add(counts);
    }
    println!("{:<11} {:>33.1}", "all", seconds);
    for Outcome { name, slowest, .. } in outcomes {
        for (seconds, test) in slowest.iter().filter(|(seconds, _)| *seconds >= SLOWEST.1) {
            println!("slow: {name}: {seconds:.1} s {test}");
        }
    }
    for reason in &sum.reasons {
        println!("skipped: {reason}");
    }
    for failure in &sum.failures {
        println!("failed: {failure}");
    }
    println!("{}", sum.line());
    if sum.failed == 0 { Ok(()) } else { Err(format!("{} failed", sum.failed)) }
}
