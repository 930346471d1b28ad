//! `spile bench crowd`.

use clap::Args;
use spile_core::Result;

use super::common::OutputArgs;
use crate::bench::crowd;
use crate::cli::Exit;

/// Many idle disks beside a busy one: what they cost it
///
/// Two servers run, each with two workers: one has a single disk, the other one has many, each with a guest whose queues are
/// idle. In each round a disk of either is read, in changing order. Both should be equally fast, and no thread of the
/// second server should run but the two workers. All of it takes about a minute.
#[derive(Debug, Args)]
pub struct CrowdArgs {
    #[command(flatten)]
    output: OutputArgs,
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

/// Runs `spile bench crowd`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &CrowdArgs) -> Result<Exit> {
    let mut parameters = crowd::Parameters::new(args.output.quick);
    parameters.disks = args.disks.unwrap_or(parameters.disks);
    parameters.queues = args.queues.unwrap_or(parameters.queues);
    parameters.depth = args.depth.unwrap_or(parameters.depth);
    parameters.rounds = args.rounds.unwrap_or(parameters.rounds);
    let outcome = args.output.measure("crowd", |progress| crowd::run(&parameters, progress))?;
    args.output.show(&outcome, &crowd::text(&outcome), crowd::figures)
}
