//! `spile bench aggregate`.

use std::time::Duration;

use clap::Args;
use spile_core::Result;

use super::common::PathArgs;
use crate::bench::aggregate;
use crate::bench::rings::RINGS;
use crate::cli::{Exit, complain};
use crate::units::parse_duration;

/// Many guests with many disks: what they move together, writing and then reading
///
/// After the article on tapdisk3 (2014): each guest writes, then reads, all its disks at once from start to end, one
/// request at a time on each. Unless other paths are named, those of tapdisk2 (grant-map-memcpy), of tapdisk3
/// (grant-copy-44k) and of Spile (grant-copy) are compared. A disk is a process with one worker thread. All of it takes
/// more than an hour.
#[derive(Debug, Args)]
pub struct AggregateArgs {
    #[command(flatten)]
    common: PathArgs,
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

/// Runs `spile bench aggregate`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &AggregateArgs) -> Result<Exit> {
    let mut parameters = aggregate::Parameters::new(args.common.output.quick);
    args.common.put_into(&mut parameters.sizes, &mut parameters.storage, &mut parameters.span_bytes);
    parameters.paths = args.common.only(RINGS.to_vec(), parameters.paths, |ring| ring.name)?;
    parameters.guests = args.guests.unwrap_or(parameters.guests);
    parameters.disks = args.disks.unwrap_or(parameters.disks);
    parameters.runtime = args.seconds.unwrap_or(parameters.runtime);
    if parameters.duration() > Duration::from_secs(120) {
        complain(format_args!("this takes {} minutes", parameters.duration().as_secs() / 60));
    }
    let outcome = args.common.output.measure("aggregate", |progress| aggregate::run(&parameters, progress))?;
    args.common.output.show(&outcome, &aggregate::text(&outcome), aggregate::figures)
}
