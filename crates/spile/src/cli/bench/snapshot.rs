//! `spile bench snapshot`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use spile_core::Result;

use super::common::OutputArgs;
use crate::bench::snapshot;
use crate::cli::Exit;
use crate::units::parse_duration;

/// Disks of which snapshots are taken under load: what their guests feel
///
/// Guests keep mixed requests of 4 KiB in flight on the disks of a server. In each round there are two runs, in changing order: one
/// without, and one in which a snapshot of all disks at one point in time is taken again and again. There are cases with one disk and with
/// sixteen, with a chain of 1 and of 30, and with a request of 100 ms always in flight. The longest request should take 1 ms longer at most, and
/// with several disks 3 ms. All of it takes about six minutes.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    #[command(flatten)]
    output: OutputArgs,
    /// Disks that get a snapshot at one point in time; may be given again (1 and 16, quick: 1 and 4)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=32))]
    disks: Vec<u32>,
    /// Images of a disk's chain; may be given again (1 and 30, quick: 1 and 5)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=60))]
    chain: Vec<u32>,
    /// Rounds, of two runs each, for each case (10, quick: 1)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Requests in flight, on all disks together
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=128))]
    depth: Option<u32>,
    /// The time from one snapshot to the next (400ms, quick: 100ms)
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    interval: Option<Duration>,
    /// Where the images lie, about 300 MiB; in memory unless given
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
}

/// Runs `spile bench snapshot`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &SnapshotArgs) -> Result<Exit> {
    let mut parameters = snapshot::Parameters::new(args.output.quick);
    if !args.disks.is_empty() {
        parameters.disks.clone_from(&args.disks);
    }
    if !args.chain.is_empty() {
        parameters.chains.clone_from(&args.chain);
    }
    parameters.rounds = args.rounds.unwrap_or(parameters.rounds);
    parameters.depth = args.depth.unwrap_or(parameters.depth);
    parameters.interval_s = args.interval.map_or(parameters.interval_s, |interval| interval.as_secs_f64());
    parameters.folder.clone_from(&args.folder);
    let outcome = args.output.measure("snapshot", |progress| snapshot::run(&parameters, progress))?;
    args.output.show(&outcome, &snapshot::text(&outcome), snapshot::figures)
}
