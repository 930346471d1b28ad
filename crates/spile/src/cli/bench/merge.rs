//! `spile bench merge`.

use std::path::PathBuf;

use clap::Args;
use spile_core::Result;

use super::common::OutputArgs;
use crate::bench::merge;
use crate::cli::Exit;
use crate::units::parse_size;

/// A disk whose chain is merged under load: what its guest feels, and what the merge needs
///
/// A disk has a chain of three images. In each round there are three runs for each kind of work, in changing order and each on a new
/// chain: a guest alone, the work beside a guest, and the work alone. The work is a merge of the image in the middle, a merge of the leaf, a
/// flatten, and a merge of the leaf while the guest only writes, at 0.9 of the rate that the disk can take. The time that 99 of 100 requests
/// stay below should be at most twice as long beside the work, each merge should end, and it should take 64 MiB of additional
/// space at most. All of it takes about four minutes.
#[derive(Debug, Args)]
pub struct MergeArgs {
    #[command(flatten)]
    output: OutputArgs,
    /// The size of the disk (512M, quick: 32M)
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Rounds (5, quick: 1)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Requests in flight
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=128))]
    depth: Option<u32>,
    /// Where the images lie, up to three times the disk's size [default: the folder for temporary files]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
}

/// Runs `spile bench merge`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &MergeArgs) -> Result<Exit> {
    let mut parameters = merge::Parameters::new(args.output.quick);
    parameters.disk_bytes = args.size.unwrap_or(parameters.disk_bytes);
    parameters.rounds = args.rounds.unwrap_or(parameters.rounds);
    parameters.depth = args.depth.unwrap_or(parameters.depth);
    parameters.folder = args.folder.clone().unwrap_or(parameters.folder);
    let outcome = args.output.measure("merge", |progress| merge::run(&parameters, progress))?;
    args.output.show(&outcome, &merge::text(&outcome), merge::figures)
}
