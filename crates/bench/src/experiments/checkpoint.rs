//! `checkpoint`: what does it cost a guest that changed blocks are tracked?
//!
//! A guest writes 4 KiB here and there on a disk in memory, as fast as it can: the storage limits nobody, so what the server does for a write is as
//! large a part of it as can be. In one of the two runs of each round the disk has a checkpoint, in the other one it has none. Which comes first
//! changes from round to round. All runs are of one server and one disk, whose blocks were all written before.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result};
use utoipa::ToSchema;

use super::filled::check_room;
use super::live::{Live, WRITES, beside, create};
use super::ratios::{self, Pair};
use super::sample::Spread;
use super::usage::Usage;
use super::world::Folder;
use super::{Figures, HostFacts, Outcome, right, table};

/// The disk's size, in bytes.
const DISK_BYTES: u64 = 256 << 20;
/// The checkpoint's name.
const NAME: &str = "c";
/// The least share of the writes without a checkpoint that is promised.
const PROMISE: f64 = 0.99;

/// What is measured.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Parameters {
    /// Requests in flight.
    #[serde(rename = "queue_depth")]
    pub depth: u32,
    /// Rounds of two runs each.
    pub rounds: u32,
    /// Seconds of a run.
    #[serde(rename = "runtime_s")]
    pub seconds: f64,
    /// Where the disk lies; in memory unless given.
    #[schema(value_type = Option<String>)]
    pub folder: Option<PathBuf>,
    /// True for a short run, whose figures show that it works.
    #[serde(default)]
    pub quick: bool,
}

impl Parameters {
    /// Thirty rounds, or two short ones.
    pub fn new(is_quick: bool) -> Self {
        let (rounds, seconds) = if is_quick { (2, 0.2) } else { (30, 1.0) };
        Self { depth: 32, rounds, seconds, folder: None, quick: is_quick }
    }
}

/// One round.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// Writes a second without a checkpoint.
    pub without_iops: f64,
    /// Writes a second with one.
    pub with_iops: f64,
    /// Processor time of the server for a write without a checkpoint, in microseconds.
    pub without_cpu_us: f64,
    /// The same with one.
    pub with_cpu_us: f64,
}

/// Runs the experiment; `progress` is told what comes next, and how far it is, from 0 to 1.
///
/// # Errors
/// `InvalidInput` when there is nothing to measure; else when the server does not start, or a request fails.
pub fn run(parameters: &Parameters, mut progress: impl FnMut(&str, f64)) -> Result<Outcome<Parameters, Row>> {
    if parameters.rounds == 0 || parameters.depth == 0 || parameters.seconds <= 0.0 {
        return Err(Error::new(ErrorKind::InvalidInput, "there is nothing to measure"));
    }
    let host = HostFacts::at_some(parameters.folder.as_deref());
    let sockets = Folder::new()?;
    let own = parameters.folder.as_deref().map(|parent| Folder::inside(parent, "checkpoint")).transpose()?;
    let folder = own.as_ref().unwrap_or(&sockets).path();
    check_room(folder, 2 * DISK_BYTES)?;
    let image = folder.join("disk.vhd");
    create(&image, DISK_BYTES)?;
    let live = Live::start(sockets.path(), &[image], None)?;
    live.fill(0, DISK_BYTES)?;
    let mut rows = Vec::new();
    for round in 0..parameters.rounds {
        progress(&format!("round {}", round + 1), f64::from(round) / f64::from(parameters.rounds));
        rows.push(one_round(&live, round, parameters)?);
    }
    live.end()?;
    Ok(Outcome { experiment: "checkpoint".to_owned(), host, parameters: parameters.clone(), rows })
}

fn one_round(live: &Live, round: u32, parameters: &Parameters) -> Result<Row> {
    let with_first = !round.is_multiple_of(2);
    let first = one_run(live, with_first, parameters)?;
    let second = one_run(live, !with_first, parameters)?;
    let (with, without) = if with_first { (first, second) } else { (second, first) };
    Ok(Row { without_iops: without.0, with_iops: with.0, without_cpu_us: without.1, with_cpu_us: with.1 })
}

/// Writes a second, and the server's processor time for each, in microseconds.
fn one_run(live: &Live, has_checkpoint: bool, parameters: &Parameters) -> Result<(f64, f64)> {
    if has_checkpoint {
        live.checkpoint(NAME)?;
        // The first write to each block is another matter: a disk has few of them, and many writes.
        live.fill(0, DISK_BYTES)?;
    }
    let pid = live.id();
    let (cpu, felt) = beside(vec![live.guest(0, WRITES, parameters.depth)], || {
        let before = Usage::of(pid)?.cpu;
        std::thread::sleep(Duration::from_secs_f64(parameters.seconds));
        Ok(Usage::of(pid)?.cpu - before)
    })?;
    if has_checkpoint {
        live.remove_checkpoint(NAME)?;
    }
    Ok((felt.iops, cpu.as_secs_f64() * 1e6 / (felt.iops * parameters.seconds)))
}

fn pairs(outcome: &Outcome<Parameters, Row>) -> [Pair; 2] {
    [
        Pair::new("writes a second", outcome.rows.iter(), |row: &Row| (row.with_iops, row.without_iops)),
        Pair::new("processor time for a write", outcome.rows.iter(), |row: &Row| (row.with_cpu_us, row.without_cpu_us)),
    ]
}

/// The plot and its name.
pub fn figures(outcome: &Outcome<Parameters, Row>) -> Figures {
    let title = "checkpoint: writes to a disk whose changes are tracked, by those to one without";
    ratios::figures("checkpoint", title, &outcome.host, outcome.parameters.quick, &pairs(outcome))
}

/// What was found, in a sentence.
pub fn found(outcome: &Outcome<Parameters, Row>) -> Vec<String> {
    let [iops, cpu] = pairs(outcome).map(|pair| pair.ratio());
    let (Some(iops), Some(cpu)) = (iops, cpu) else { return Vec::new() };
    vec![format!(
        "With a checkpoint a disk takes {:.3} of the writes a second (promised: {PROMISE}), and the server {:.3} of the processor time for each.",
        iops.p50, cpu.p50
    )]
}

/// The figures as a table.
pub fn text(outcome: &Outcome<Parameters, Row>) -> String {
    let mut table = table(["", "without", "with", "ratio", "a tenth of the rounds below", "above"].map(str::to_owned));
    let [iops, cpu] = pairs(outcome);
    let mut add = |name, pair: Pair, digits: usize, without: fn(&Row) -> f64, with: fn(&Row) -> f64| {
        let middle = |of| Spread::of(&outcome.rows.iter().map(of).collect::<Vec<_>>()).p50;
        let Some(ratio) = pair.ratio() else { return };
        table.add_row([
            comfy_table::Cell::new(name),
            right(format!("{:.digits$}", middle(without))),
            right(format!("{:.digits$}", middle(with))),
            right(format!("{:.3}", ratio.p50)),
            right(format!("{:.3}", ratio.p10)),
            right(format!("{:.3}", ratio.p90)),
        ]);
    };
    add("writes/s", iops, 0, |row| row.without_iops, |row| row.with_iops);
    add("CPU, us a write", cpu, 2, |row| row.without_cpu_us, |row| row.with_cpu_us);
    let Parameters { rounds, depth, seconds, .. } = &outcome.parameters;
    format!(
        "{rounds} rounds of two runs of {seconds} s; writes of 4 KiB here and there, {depth} in flight; medians of the rounds\n{table}\n{}",
        found(outcome).join("\n")
    )
}
