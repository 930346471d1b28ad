//! `spile bench exchange`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use spile_core::Result;

use super::common::OutputArgs;
use crate::bench::exchange;
use crate::cli::Exit;
use crate::units::parse_duration;

/// A disk whose images are exchanged under load: what its guest feels
///
/// Writes are kept in flight on a raw disk on a device that is slow on purpose. In each round there are two runs, in changing
/// order: one without, and one in which a VHD is put on top of the raw image, as for a snapshot. The longest
/// request of the second run should take hardly more time than that of the first. All of it takes less than two minutes.
#[derive(Debug, Args)]
pub struct ExchangeArgs {
    #[command(flatten)]
    output: OutputArgs,
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

/// Runs `spile bench exchange`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &ExchangeArgs) -> Result<Exit> {
    let mut parameters = exchange::Parameters::new(args.output.quick);
    parameters.rounds = args.rounds.unwrap_or(parameters.rounds);
    parameters.depth = args.depth.unwrap_or(parameters.depth);
    parameters.delay = args.delay.unwrap_or(parameters.delay);
    parameters.folder.clone_from(&args.folder);
    let outcome = args.output.measure("exchange", |progress| exchange::run(&parameters, progress))?;
    args.output.show(&outcome, &exchange::text(&outcome), exchange::figures)
}
