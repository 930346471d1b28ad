//! `spile bench limit`.

use clap::Args;
use spile_core::Result;

use super::common::OutputArgs;
use crate::bench::limit;
use crate::cli::Exit;

/// What limits promise, and whether they hold it
///
/// One server has four disks without a medium, over vhost-user and NBD. In each round: what passes a limit on requests, and
/// one on bytes, while small, middle and large requests come by both fronts at once; what two guests that take all they
/// can get have of their group's limit; how long a change of a limit takes; and whether a disk without limits feels that
/// requests of others wait. The table has each promise beside what was measured.
#[derive(Debug, Args)]
pub struct LimitArgs {
    #[command(flatten)]
    output: OutputArgs,
    /// Rounds (5, quick: 1); one takes some ten seconds
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
}

/// Runs `spile bench limit`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &LimitArgs) -> Result<Exit> {
    let mut parameters = limit::Parameters::new(args.output.quick);
    parameters.rounds = args.rounds.unwrap_or(parameters.rounds);
    let outcome = args.output.measure("limit", |progress| limit::run(&parameters, progress))?;
    args.output.show(&outcome, &limit::text(&outcome), limit::figures)
}
