//! `spile bench hung`.

use std::path::PathBuf;

use clap::Args;
use spile_core::Result;

use super::common::OutputArgs;
use crate::bench::hung;
use crate::cli::{Exit, complain};

/// A disk on the worker of a store that hangs: how long its requests take
///
/// A server with one worker has a healthy disk and one whose store stops answering: an NBD export, then a file of a FUSE file
/// system (by nbdfuse; without it that part is left out). In each round the healthy disk is read twice, in changing order:
/// once alone, and once while 64 writes to the other disk hang. The time that 99 of 100 reads stay below
/// should hardly change. In a last case the healthy disk is written, alone and while it is backed up to an NBD export that
/// stops answering. All of it takes less than five minutes.
#[derive(Debug, Args)]
pub struct HungArgs {
    #[command(flatten)]
    output: OutputArgs,
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

/// Runs `spile bench hung`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &HungArgs) -> Result<Exit> {
    let mut parameters = hung::Parameters::new(args.output.quick);
    if !args.depth.is_empty() {
        parameters.depths.clone_from(&args.depth);
    }
    parameters.rounds = args.rounds.unwrap_or(parameters.rounds);
    parameters.engine.clone_from(&args.engine);
    parameters.folder.clone_from(&args.folder);
    let (outcome, left_out) = args.output.measure("hung", |progress| hung::run(&parameters, progress))?;
    let exit = args.output.show(&outcome, &hung::text(&outcome), hung::figures)?;
    left_out.iter().for_each(|reason| complain(format_args!("left out: {reason}")));
    Ok(exit)
}
