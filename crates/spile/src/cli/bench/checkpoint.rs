//! `spile bench checkpoint`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use spile_core::Result;

use super::common::OutputArgs;
use crate::bench::checkpoint;
use crate::cli::Exit;
use crate::units::parse_duration;

/// What it costs a guest that changed blocks are tracked
///
/// A guest writes 4 KiB here and there over vhost-user, as fast as it can. In one of the two runs of each round its disk has a checkpoint, in the other one it
/// has none. The table has the writes a second, and the server's processor time for each.
#[derive(Debug, Args)]
pub struct CheckpointArgs {
    #[command(flatten)]
    output: OutputArgs,
    /// Rounds (30, quick: 2)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// The time of a run (1s, quick: 200ms)
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    runtime: Option<Duration>,
    /// Where the disk lies, instead of in memory: then the storage has its part in each write, and the checkpoint a smaller one
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
}

/// Runs `spile bench checkpoint`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &CheckpointArgs) -> Result<Exit> {
    let mut parameters = checkpoint::Parameters::new(args.output.quick);
    parameters.rounds = args.rounds.unwrap_or(parameters.rounds);
    parameters.seconds = args.runtime.map_or(parameters.seconds, |time| time.as_secs_f64());
    parameters.folder = args.folder.clone();
    let outcome = args.output.measure("checkpoint", |progress| checkpoint::run(&parameters, progress))?;
    args.output.show(&outcome, &checkpoint::text(&outcome), checkpoint::figures)
}
