//! `spile bench paths`.

use clap::Args;
use spile_core::Result;

use super::common::PathArgs;
use crate::bench::Direction;
use crate::bench::paths::{self, Kind};
use crate::cli::Exit;

/// One guest, one disk, one request at a time: latency by size, and where it goes
///
/// After Project Karcygwins (2013): rows of 100 requests or more, of which the fastest and the slowest fifth are
/// dropped. Paths are those through a ring, and host-direct (no guest: the disk in this process), vhost-user and nbd.
#[derive(Debug, Args)]
pub struct PathsArgs {
    #[command(flatten)]
    common: PathArgs,
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

/// Runs `spile bench paths`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &PathsArgs) -> Result<Exit> {
    let mut parameters = paths::Parameters::new(args.common.output.quick);
    args.common.put_into(&mut parameters.sizes, &mut parameters.storage, &mut parameters.span_bytes);
    parameters.kinds = args.common.only(paths::all_kinds(), parameters.kinds, Kind::name)?;
    parameters.rounds = args.rounds.unwrap_or(parameters.rounds);
    parameters.requests = args.requests;
    if args.write {
        parameters.directions.push(Direction::Write);
    }
    let outcome = args.common.output.measure("paths", |progress| paths::run(&parameters, progress))?;
    args.common.output.show(&outcome, &paths::text(&outcome), paths::figures)
}
