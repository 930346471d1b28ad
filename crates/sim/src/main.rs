//! `cargo run -p spile-sim --release -- --seeds N --start S`: runs any number of seeds; exit code 1 when one finds something.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use spile_sim::backup::{self, BackupSummary, run_backup};
use spile_sim::changes::{self, ChangesSummary, run_changes};
use spile_sim::explore::{Finding, Options};
use spile_sim::gc::{self, GcSummary, run_gc};
use spile_sim::image::{Image, Kind};
use spile_sim::live::{Broken, LiveSummary, run_live};
use spile_sim::merge::{self, MergeSummary, run_merge};
use spile_sim::motion::{MotionSummary, run_motion};
use spile_sim::plan::Plan;
use spile_sim::receive::{self, ReceiveSummary, run_receive};
use spile_sim::seeds::{Mode, report, run_seeds};

const USAGE: &str = "\
spile-sim: runs the image code against a simulated host and crashes it anywhere

  --seeds N        how many seeds to run (default 1000)
  --start S        the first of them (default 0)
  --kind KIND      raw, fixed, dynamic or chain (default: the seed decides)
  --exchange       snapshots of one or several disks are made under load; on one thread
  --merge          layers are merged and leaves flattened under load; on one thread
  --gc             images are deleted, cloned and collected, under load and not; on one thread
  --move           disks are moved under load; on one thread
  --receive        disks are moved to another host, by links that are cut; on one thread
  --changes        changed blocks are tracked under load, checkpoints made and removed; on one thread
  --backup         disks are backed up at one point in time under load; on one thread
  --every-step     one short life for each seed, crashed at every step, both ways
  --threads N      default: as many as there are processors
  --findings N     stop after so many (default 10)
  --trace          print the plan and the trace of what was found";

struct Arguments {
    seeds: u64,
    start: u64,
    kind: Option<Kind>,
    mode: Mode,
    threads: usize,
    findings: usize,
    trace: bool,
    exchange: bool,
    merge: bool,
    motion: bool,
    receive: bool,
    changes: bool,
    backup: bool,
    gc: bool,
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (kind, mode) = (None, Mode::Random);
    let (trace, exchange, merge) = (false, false, false);
    let (motion, receive, changes, backup) = (false, false, false, false);
    let mut arguments = Arguments {
        seeds: 1000,
        start: 0,
        kind,
        mode,
        threads,
        findings: 10,
        trace,
        exchange,
        merge,
        motion,
        receive,
        changes,
        backup,
        gc: false,
    };
    while let Some(word) = words.next() {
        let mut number = || -> Result<u64, String> {
            let value = words.next().ok_or(format!("{word} wants a number"))?;
            value.parse().map_err(|_| format!("{word} wants a number, not {value}"))
        };
        match word.as_str() {
            "--seeds" => arguments.seeds = number()?,
            "--start" => arguments.start = number()?,
            "--threads" => arguments.threads = number()?.max(1) as usize,
            "--findings" => arguments.findings = number()?.max(1) as usize,
            "--every-step" => arguments.mode = Mode::EveryStep,
            "--trace" => arguments.trace = true,
            "--exchange" => arguments.exchange = true,
            "--changes" => arguments.changes = true,
            "--backup" => arguments.backup = true,
            "--merge" => arguments.merge = true,
            "--gc" => arguments.gc = true,
            "--move" => arguments.motion = true,
            "--receive" => arguments.receive = true,
            "--kind" => {
                let name = words.next().unwrap_or_default();
                arguments.kind = Some(name.parse().map_err(|error| format!("{error}"))?);
            }
            _ => return Err(USAGE.to_owned()),
        }
    }
    Ok(arguments)
}

/// Runs seeds one after the other, and counts those that find something.
fn each_seed<T>(
    seeds: std::ops::Range<u64>,
    arguments: &Arguments,
    run: impl Fn(u64) -> Result<T, Finding>,
    mut add: impl FnMut(T),
) -> ExitCode {
    let mut findings = 0;
    for seed in seeds {
        match run(seed) {
            Ok(summary) => add(summary),
            Err(finding) => {
                finding.trace.iter().for_each(|line| println!("{line}"));
                println!("seed {seed}: {}", finding.message);
                findings += 1;
            }
        }
        if findings >= arguments.findings {
            break;
        }
    }
    println!("{findings} findings");
    if findings == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run_exchanges(seeds: std::ops::Range<u64>, arguments: &Arguments) -> ExitCode {
    let mut all = LiveSummary::default();
    let code = each_seed(seeds, arguments, |seed| run_live(seed, Broken::Nothing, arguments.trace), |one| all += one);
    let LiveSummary { exchanges, failed, sealed, grown, went_back, .. } = all;
    println!(
        "{exchanges} snapshots of disks, {failed} failed, {sealed} sealed, {grown} disks grew, {went_back} went back"
    );
    code
}

fn run_merges(seeds: std::ops::Range<u64>, arguments: &Arguments) -> ExitCode {
    let mut all = MergeSummary::default();
    let run = |seed| run_merge(seed, merge::Broken::Nothing, arguments.trace);
    let code = each_seed(seeds, arguments, run, |one| all += one);
    let MergeSummary { merged, leaves, flattened, resumed, ended_early, refused, .. } = all;
    println!("{merged} layers merged, {leaves} leaves merged, {flattened} leaves flattened");
    println!("{resumed} jobs went on after a crash, {ended_early} ended early, {refused} were refused");
    code
}

fn run_collections(seeds: std::ops::Range<u64>, arguments: &Arguments) -> ExitCode {
    let mut all = GcSummary::default();
    let run = |seed| run_gc(seed, gc::Broken::Nothing, arguments.trace);
    let code = each_seed(seeds, arguments, run, |one| all += one);
    let GcSummary { marked, removed, cloned, snapshots, merged, busy, resumed, .. } = all;
    println!("{marked} images marked, {removed} removed, {cloned} clones and {snapshots} snapshots made");
    println!("{merged} marked images merged away, {busy} of them under load; {resumed} merges went on after a crash");
    code
}

fn run_moves(seeds: std::ops::Range<u64>, arguments: &Arguments) -> ExitCode {
    let mut all = MotionSummary::default();
    let run = |seed| run_motion(seed, merge::Broken::Nothing, arguments.trace);
    let code = each_seed(seeds, arguments, run, |one| all += one);
    let MotionSummary { moved, busy, found, taken_back, resumed, ended_early, .. } = all;
    println!("{moved} disks moved, {busy} of them under load; {found} found at their new place after a crash");
    println!("{taken_back} hand-overs taken back, {resumed} jobs went on after a crash, {ended_early} ended early");
    code
}

fn run_receivers(seeds: std::ops::Range<u64>, arguments: &Arguments) -> ExitCode {
    let mut all = ReceiveSummary::default();
    let run = |seed| run_receive(seed, receive::Broken::Nothing, arguments.trace);
    let code = each_seed(seeds, arguments, run, |one| all += one);
    let ReceiveSummary { moved, busy, troubled, found, resumed, copied, ended_early, left, .. } = all;
    println!("{moved} disks moved, {busy} of them under load, {troubled} through trouble; {copied} copied");
    println!(
        "{found} opened there, {resumed} jobs went on after a crash, {ended_early} ended early, {left} left a half"
    );
    println!("{} links cut, {} crashes here, {} there", all.cuts, all.crashes, all.crashes_there);
    code
}

fn run_tracking(seeds: std::ops::Range<u64>, arguments: &Arguments) -> ExitCode {
    let mut all = ChangesSummary::default();
    let run = |seed| match arguments.mode {
        Mode::EveryStep => changes::run_every_step(seed, changes::Broken::Nothing),
        Mode::Random => run_changes(seed, changes::Broken::Nothing, arguments.trace),
    };
    let code = each_seed(seeds, arguments, run, |one| all += one);
    let ChangesSummary { crashes, made, removed, asked, exact, .. } = all;
    println!(
        "{crashes} crashes, {made} checkpoints made, {removed} removed, {asked} answers checked, {exact} of them exact"
    );
    code
}

fn run_backups(seeds: std::ops::Range<u64>, arguments: &Arguments) -> ExitCode {
    let mut all = BackupSummary::default();
    let kept = backup::Broken::Copy(backup::BrokenCopy::Nothing);
    let code = each_seed(seeds, arguments, |seed| run_backup(seed, kept, arguments.trace), |one| all += one);
    println!("{} disks copied, {} requests, {} of them beside a copy", all.copied, all.requests, all.beside);
    println!("{} increments, {} crashes", all.increments, all.crashes);
    code
}

fn run(arguments: &Arguments) -> ExitCode {
    let options = Options { trace: arguments.trace, ..Options::default() };
    let seeds = arguments.start..arguments.start.saturating_add(arguments.seeds);
    if arguments.exchange {
        return run_exchanges(seeds, arguments);
    }
    if arguments.changes {
        return run_tracking(seeds, arguments);
    }
    if arguments.backup {
        return run_backups(seeds, arguments);
    }
    if arguments.merge {
        return run_merges(seeds, arguments);
    }
    if arguments.gc {
        return run_collections(seeds, arguments);
    }
    if arguments.motion {
        return run_moves(seeds, arguments);
    }
    if arguments.receive {
        return run_receivers(seeds, arguments);
    }
    let Arguments { kind, mode, .. } = *arguments;
    let totals = run_seeds(seeds, kind, mode, &options, arguments.threads, arguments.findings);
    for (seed, finding) in totals.findings.iter().filter(|_| arguments.trace) {
        let image = Image::draw(*seed, kind);
        println!("{image:#?}");
        let leaf = image.leaf();
        println!("{:#?}", Plan::draw(*seed, leaf.size_bytes, leaf.block_bytes.into()));
        finding.trace.iter().for_each(|line| println!("{line}"));
    }
    print!("{}", report(&totals.findings, kind, mode));
    println!(
        "{} seeds, {} steps, {} crashes, {} findings",
        totals.seeds,
        totals.steps,
        totals.crashes,
        totals.findings.len()
    );
    if totals.findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn main() -> ExitCode {
    match parse(std::env::args().skip(1)) {
        Ok(arguments) => run(&arguments),
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(2)
        }
    }
}
