//! `spile bench`: the experiments' command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use spile_core::{Error, ErrorKind, Result};
use utoipa::ToSchema;

use super::{Exit, complain, print_json, say};
use crate::bench::paths::{self, Kind};
use crate::bench::rings::RINGS;
use crate::bench::world::Storage;
use crate::bench::{Direction, Figures, Outcome, aggregate, crowd, exchange, guest, hung, process, save};
use crate::signals::EndSignals;
use crate::units::{parse_duration, parse_size};

/// What `--path` takes.
pub const PATHS: &str = "\
Paths through a ring; those with a * are measured unless others are named:
  grant-map-memcpy           * as tapdisk2: mapped, copied, unmapped; 44 KiB
  grant-map-memcpy-indirect    with indirect segments, as Linux has: 128 KiB
  grant-map                  * as blkback: mapped while the I/O runs; 128 KiB
  persistent                 * as qemu's qdisk: pages stay mapped; 128 KiB
  grant-copy-44k             * as tapdisk3: the hypervisor copies; 44 KiB
  grant-copy-44k-split         with a ring of its own for responses
  grant-copy                 * Spile's default: the hypervisor copies; 128 KiB
  grant-copy-split             with a ring of its own for responses
  grant-copy-1m                one ring, as many segments as Spile has: 1 MiB";

/// Measure what ways to a disk cost, side by side
///
/// Guests are those of a Xen made of ordinary processes, so this runs on any Linux host. The order of the paths and the
/// shape of their curves mean something there; Xen's absolute costs are others. The paths take turns, so that what else
/// the host does falls on all alike.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    experiment: Experiment,
}

#[derive(Debug, Subcommand)]
enum Experiment {
    Paths(PathsArgs),
    Aggregate(AggregateArgs),
    Exchange(ExchangeArgs),
    Crowd(CrowdArgs),
    Hung(HungArgs),
}

/// What all experiments have.
#[derive(Debug, Args)]
struct CommonArgs {
    /// Few points, short: seconds instead of minutes
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Put plots (SVG) and the JSON into DIR
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Only these sizes of requests, such as 4k,64k,1M
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', value_parser = parse_size)]
    sizes: Vec<u64>,
    /// What is behind the disks: null (nothing), mem (memory), or a folder for a file each
    #[arg(long, value_name = "null|mem|DIR")]
    store: Option<Storage>,
    /// The part of each disk that is used
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    span: Option<u64>,
    /// Only this path (may be given several times)
    #[arg(long = "path", value_name = "NAME")]
    paths: Vec<String>,
}

/// One guest, one disk, one request at a time: latency by size, and where it goes
///
/// After Project Karcygwins (2013): rows of 100 requests or more, of which the fastest and the slowest fifth are
/// dropped. Paths are those through a ring, and host-direct (no guest: the disk in this process), vhost-user and nbd.
#[derive(Debug, Args)]
struct PathsArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Measure writes too
    #[arg(long)]
    write: bool,
    /// Rows of each path and size
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Requests of a row; from 100 on, of small ones there are more
    #[arg(long, value_name = "N", default_value_t = paths::REQUESTS, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    requests: u32,
}

/// Many guests with many disks: what they move together, writing and then reading
///
/// After the article on tapdisk3 (2014): each guest writes, then reads, all its disks at once from start to end, one
/// request at a time on each. Unless other paths are named, those of tapdisk2 (grant-map-memcpy), of tapdisk3
/// (grant-copy-44k) and of Spile (grant-copy) are compared. A disk is a process with one worker thread. All of it takes
/// more than an hour.
#[derive(Debug, Args)]
struct AggregateArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Guests at most (10, quick: 2): 1, 2, 4 … are measured too
    #[arg(long, value_name = "G", value_parser = clap::value_parser!(u16).range(1..=1000))]
    guests: Option<u16>,
    /// Disks of each guest (9, quick: 2)
    #[arg(long, value_name = "D", value_parser = clap::value_parser!(u16).range(1..=64))]
    disks: Option<u16>,
    /// How long each point takes (10, quick: 0.5)
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    seconds: Option<Duration>,
}

/// A disk whose images are exchanged under load: what its guest feels
///
/// Writes are kept in flight on a raw disk on a device that is slow on purpose. In each round there are two runs, in changing
/// order: one without, and one in which a VHD is put on top of the raw image, as for a snapshot. The longest
/// request of the second should hardly be longer than that of the first. All of it takes less than two minutes.
#[derive(Debug, Args)]
struct ExchangeArgs {
    /// Three short rounds
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
    /// Rounds, of two runs each (100, quick: 3)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: Option<u32>,
    /// Writes in flight
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    depth: Option<u32>,
    /// How much longer each write takes (100ms, quick: 20ms)
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    delay: Option<Duration>,
    /// Where the images lie; in memory unless given
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
}

/// Many idle disks beside a busy one: what they cost it
///
/// Two servers run, each with two workers: one has a single disk, the other one has many, each with a guest whose queues are
/// idle. In each round a disk of either is read, in changing order. Both should be equally fast, and no thread of the
/// second server should run but the two workers. All of it takes about a minute.
#[derive(Debug, Args)]
struct CrowdArgs {
    /// Few disks, three short rounds
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
    /// Disks of the crowd (500, quick: 20)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=2000))]
    disks: Option<u32>,
    /// Queues of each disk
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=16))]
    queues: Option<u16>,
    /// Requests in flight on each queue of the busy disk
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=128))]
    depth: Option<u32>,
    /// Rounds, of two runs each (20, quick: 3)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
}

/// A disk on the worker of a store that hangs: how long its requests take
///
/// A server with one worker has a healthy disk and one whose store stops answering: an NBD export, then a file of a FUSE file
/// system (by nbdfuse; without it that part is left out). In each round the healthy disk is read twice, in changing order:
/// once alone, and once while 64 writes to the other disk hang. The time that 99 of 100 reads stay below
/// should hardly change. All of it takes less than three minutes.
#[derive(Debug, Args)]
struct HungArgs {
    /// Two short rounds
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
    /// Requests in flight on the healthy disk; may be given again (1 and 32, quick: 4)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=128))]
    depth: Vec<u32>,
    /// Rounds, of two runs each, for each store and depth (10, quick: 2)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// The server's engine, as for `spile serve`
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = ["auto", "uring", "aio", "threads"])]
    engine: String,
    /// Where the healthy disk lies, 256 MiB; in memory unless given
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
}

/// Runs `spile bench`.
///
/// # Errors
/// As the experiments.
pub fn run(args: &BenchArgs) -> Result<Exit> {
    match &args.experiment {
        Experiment::Paths(args) => run_paths(args),
        Experiment::Aggregate(args) => run_aggregate(args),
        Experiment::Exchange(args) => run_exchange(args),
        Experiment::Crowd(args) => run_crowd(args),
        Experiment::Hung(args) => run_hung(args),
    }
}

fn run_paths(args: &PathsArgs) -> Result<Exit> {
    let mut parameters = paths::Parameters::new(args.common.quick);
    args.common.put_into(&mut parameters.sizes, &mut parameters.storage, &mut parameters.span_bytes);
    parameters.kinds = args.common.only(paths::all_kinds(), parameters.kinds, Kind::name)?;
    parameters.rounds = args.rounds.unwrap_or(parameters.rounds);
    parameters.requests = args.requests;
    if args.write {
        parameters.directions.push(Direction::Write);
    }
    let outcome = with_progress(|progress| paths::run(&parameters, progress))?;
    args.common.show(&outcome, paths::text(&outcome), paths::figures)
}

fn run_aggregate(args: &AggregateArgs) -> Result<Exit> {
    let mut parameters = aggregate::Parameters::new(args.common.quick);
    args.common.put_into(&mut parameters.sizes, &mut parameters.storage, &mut parameters.span_bytes);
    parameters.paths = args.common.only(RINGS.to_vec(), parameters.paths, |ring| ring.name)?;
    parameters.guests = args.guests.unwrap_or(parameters.guests);
    parameters.disks = args.disks.unwrap_or(parameters.disks);
    parameters.runtime = args.seconds.unwrap_or(parameters.runtime);
    if parameters.duration() > Duration::from_secs(120) {
        complain(format_args!("this takes {} minutes", parameters.duration().as_secs() / 60));
    }
    let outcome = with_progress(|progress| aggregate::run(&parameters, progress))?;
    args.common.show(&outcome, aggregate::text(&outcome), aggregate::figures)
}

fn run_exchange(args: &ExchangeArgs) -> Result<Exit> {
    let mut parameters = exchange::Parameters::new(args.quick);
    parameters.rounds = args.rounds.unwrap_or(parameters.rounds);
    parameters.depth = args.depth.unwrap_or(parameters.depth);
    parameters.delay = args.delay.unwrap_or(parameters.delay);
    parameters.folder.clone_from(&args.folder);
    let outcome = with_progress(|progress| exchange::run(&parameters, progress))?;
    show(args.json, &outcome, exchange::text(&outcome))?;
    Ok(Exit::Ok)
}

fn run_crowd(args: &CrowdArgs) -> Result<Exit> {
    let mut parameters = crowd::Parameters::new(args.quick);
    parameters.disks = args.disks.unwrap_or(parameters.disks);
    parameters.queues = args.queues.unwrap_or(parameters.queues);
    parameters.depth = args.depth.unwrap_or(parameters.depth);
    parameters.rounds = args.rounds.unwrap_or(parameters.rounds);
    let outcome = with_progress(|progress| crowd::run(&parameters, progress))?;
    show(args.json, &outcome, crowd::text(&outcome))?;
    Ok(Exit::Ok)
}

fn run_hung(args: &HungArgs) -> Result<Exit> {
    let mut parameters = hung::Parameters::new(args.quick);
    if !args.depth.is_empty() {
        parameters.depths.clone_from(&args.depth);
    }
    parameters.rounds = args.rounds.unwrap_or(parameters.rounds);
    parameters.engine.clone_from(&args.engine);
    parameters.folder.clone_from(&args.folder);
    let (outcome, left_out) = with_progress(|progress| hung::run(&parameters, progress))?;
    show(args.json, &outcome, hung::text(&outcome))?;
    left_out.iter().for_each(|reason| complain(format_args!("left out: {reason}")));
    Ok(Exit::Ok)
}

/// Runs an experiment with a bar on stderr, hidden where that is no terminal. A signal ends it: its processes end with this
/// one.
fn with_progress<T>(run: impl FnOnce(&mut dyn FnMut(&str, f64)) -> Result<T>) -> Result<T> {
    const STEPS: f64 = 1000.0;
    EndSignals::block()?.exit_after(crate::bench::world::remove_folder);
    let style = ProgressStyle::with_template("{wide_bar} {percent} % {msg}");
    let bar = ProgressBar::new(STEPS as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let outcome = run(&mut |what, share| {
        bar.set_message(what.to_owned());
        bar.set_position((share * STEPS) as u64);
    });
    bar.finish_and_clear();
    outcome
}

impl CommonArgs {
    fn put_into(&self, sizes: &mut Vec<u64>, storage: &mut Storage, span_bytes: &mut u64) {
        if !self.sizes.is_empty() {
            sizes.clone_from(&self.sizes);
            sizes.sort_unstable();
            sizes.dedup();
        }
        if let Some(store) = &self.store {
            storage.clone_from(store);
        }
        *span_bytes = self.span.unwrap_or(*span_bytes);
    }

    /// Those of `all` that --path names, in their order; `default` when there is no --path.
    fn only<T>(&self, all: Vec<T>, default: Vec<T>, name: impl Fn(T) -> &'static str) -> Result<Vec<T>>
    where
        T: Copy,
    {
        if let Some(unknown) = self.paths.iter().find(|wanted| !all.iter().any(|one| name(*one) == *wanted)) {
            let names: Vec<&str> = all.iter().map(|one| name(*one)).collect();
            let message = format!("there is no path `{unknown}` here; use {}", names.join(", "));
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        if self.paths.is_empty() {
            return Ok(default);
        }
        Ok(all.into_iter().filter(|one| self.paths.iter().any(|wanted| wanted == name(*one))).collect())
    }

    fn show<P, R>(
        &self,
        outcome: &Outcome<P, R>,
        text: String,
        figures: impl FnOnce(&Outcome<P, R>) -> Figures,
    ) -> Result<Exit>
    where
        P: Serialize + ToSchema,
        R: Serialize + ToSchema,
    {
        show(self.json, outcome, text)?;
        let Some(dir) = &self.out else { return Ok(Exit::Ok) };
        let json = serde_json::to_string_pretty(outcome);
        let json = json.map_err(|e| Error::new(ErrorKind::InvalidInput, "cannot write JSON").caused_by(e))?;
        let mut saved = vec![save(dir, &format!("{}.json", outcome.experiment), &json)?];
        for (name, figure) in figures(outcome) {
            saved.push(save(dir, &format!("{name}.svg"), &figure.to_svg())?);
        }
        if !self.json {
            saved.iter().for_each(|path| say(path.display()));
        }
        Ok(Exit::Ok)
    }
}

/// Prints what an experiment found.
fn show(json: bool, outcome: &(impl Serialize + ToSchema), text: String) -> Result<()> {
    match json {
        true => print_json(outcome)?,
        false => say(text),
    }
    Ok(())
}

/// Be a guest of an experiment; `spile bench` starts this
#[derive(Debug, Args)]
pub struct BenchGuestArgs {}

/// Runs `spile bench-guest`.
///
/// # Errors
/// As [`guest::run`].
pub fn run_guest(_: &BenchGuestArgs) -> Result<Exit> {
    guest::run().map(|()| Exit::Ok)
}

/// Become `spile ARGS…` or another program, ended with the process that starts this; `spile bench` starts this
#[derive(Debug, Args)]
pub struct BenchTiedArgs {
    /// Become another program
    #[arg(long, value_name = "PROGRAM")]
    program: Option<PathBuf>,
    /// The arguments
    #[arg(last = true, required = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

/// Runs `spile bench-tied`.
///
/// # Errors
/// As [`process::become_tied`].
pub fn run_tied(args: &BenchTiedArgs) -> Result<Exit> {
    process::become_tied(args.program.as_deref(), &args.args).map(|()| Exit::Ok)
}
