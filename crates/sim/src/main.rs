//! `cargo run -p spile-sim --release -- --seeds N --start S`: runs any number of seeds; exit code 1 when one finds something.

#![forbid(unsafe_code)]

use std::fmt::Display;
use std::ops::{AddAssign, Range};
use std::process::ExitCode;

use spile_sim::backup::{self, run_backup};
use spile_sim::bitmaps::{self, run_bitmaps};
use spile_sim::changes::{self, run_changes};
use spile_sim::explore::{Finding, Options};
use spile_sim::gc::{self, run_gc};
use spile_sim::image::{Image, Kind};
use spile_sim::live::{self, run_live};
use spile_sim::merge::{self, run_merge};
use spile_sim::motion::{self, run_motion};
use spile_sim::plan::Plan;
use spile_sim::receive::{self, run_receive};
use spile_sim::seeds::{Mode, report, run_seeds};

const USAGE: &str = "\
spile-sim: runs the image code against a simulated host and crashes it anywhere

  --seeds N        how many seeds to run (default 1000)
  --start S        the first of them (default 0)
  --kind KIND      raw, fixed, dynamic, chain, qcow2, qcow2-chain, qcow2-data, qcow2-raw or qcow2-data-chain
                   (default: the seed decides)
  --exchange       snapshots of one or several disks are made under load; on one thread
  --merge          layers are merged and leaves flattened under load; on one thread
  --gc             images are deleted, cloned and collected, under load and not; on one thread
  --move           disks are moved under load; on one thread
  --receive        disks are moved to another host, by links that are cut, and back; on one thread
  --changes        changed blocks are tracked under load, checkpoints made and removed; on one thread
  --bitmaps        bitmaps inside qcow2 images are kept up under load; on one thread
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
    what: What,
}

/// What is run.
#[derive(Clone, Copy)]
enum What {
    Images,
    Exchange,
    Merge,
    Gc,
    Move,
    Receive,
    Changes,
    Bitmaps,
    Backup,
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (kind, mode, trace, what) = (None, Mode::Random, false, What::Images);
    let mut arguments = Arguments { seeds: 1000, start: 0, kind, mode, threads, findings: 10, trace, what };
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
            "--exchange" => arguments.what = What::Exchange,
            "--changes" => arguments.what = What::Changes,
            "--bitmaps" => arguments.what = What::Bitmaps,
            "--backup" => arguments.what = What::Backup,
            "--merge" => arguments.what = What::Merge,
            "--gc" => arguments.what = What::Gc,
            "--move" => arguments.what = What::Move,
            "--receive" => arguments.what = What::Receive,
            "--kind" => {
                let name = words.next().unwrap_or_default();
                arguments.kind = Some(name.parse().map_err(|error| format!("{error}"))?);
            }
            _ => return Err(USAGE.to_owned()),
        }
    }
    Ok(arguments)
}

/// Runs seeds one after the other, and says what they have found and done.
fn each_seed<T: Default + AddAssign + Display>(
    seeds: Range<u64>,
    arguments: &Arguments,
    run: impl Fn(u64) -> Result<T, Finding>,
) -> ExitCode {
    let (mut findings, mut all) = (0, T::default());
    for seed in seeds {
        match run(seed) {
            Ok(summary) => all += summary,
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
    println!("{all}");
    exit_code(findings == 0)
}

fn exit_code(is_right: bool) -> ExitCode {
    if is_right { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(arguments: &Arguments) -> ExitCode {
    let (seeds, trace) = (arguments.start..arguments.start.saturating_add(arguments.seeds), arguments.trace);
    let is_every_step = arguments.mode == Mode::EveryStep;
    match arguments.what {
        What::Images => run_images(seeds, arguments),
        What::Exchange => each_seed(seeds, arguments, |seed| run_live(seed, live::Broken::Nothing, trace)),
        What::Merge => each_seed(seeds, arguments, |seed| run_merge(seed, merge::Broken::Nothing, trace)),
        What::Gc => each_seed(seeds, arguments, |seed| run_gc(seed, gc::Broken::Nothing, trace)),
        What::Move => each_seed(seeds, arguments, |seed| run_motion(seed, motion::Broken::Nothing, trace)),
        What::Receive => each_seed(seeds, arguments, |seed| run_receive(seed, receive::Broken::Nothing, trace)),
        What::Changes if is_every_step => {
            each_seed(seeds, arguments, |seed| changes::run_every_step(seed, changes::Broken::Nothing))
        }
        What::Changes => each_seed(seeds, arguments, |seed| run_changes(seed, changes::Broken::Nothing, trace)),
        What::Bitmaps if is_every_step => {
            each_seed(seeds, arguments, |seed| bitmaps::run_every_step(seed, bitmaps::Broken::Nothing))
        }
        What::Bitmaps => each_seed(seeds, arguments, |seed| run_bitmaps(seed, bitmaps::Broken::Nothing, trace)),
        What::Backup => {
            let kept = backup::Broken::Copy(backup::BrokenCopy::Nothing);
            each_seed(seeds, arguments, |seed| run_backup(seed, kept, trace))
        }
    }
}

/// Runs single images and chains, on several threads.
fn run_images(seeds: Range<u64>, arguments: &Arguments) -> ExitCode {
    let options = Options { trace: arguments.trace, ..Options::default() };
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
    exit_code(totals.findings.is_empty())
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
