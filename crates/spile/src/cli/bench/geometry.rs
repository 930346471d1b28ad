//! `spile bench geometry`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use spile_core::Result;

use super::common::{OutputArgs, with_progress};
use super::layers::{WayName, given_or};
use crate::bench::geometry;
use crate::cli::Exit;
use crate::units::{parse_duration, parse_size};

/// Reads all over the addresses of a device or file: whether the speed depends on the place
///
/// 1 GiB is read every so many GiB, directly, in blocks of 1 MiB, one request at a time, bare and by a guest on vhost-user. TARGET is
/// only read. Without one, a file is made in --folder, and removed in the end.
#[derive(Debug, Args)]
pub struct GeometryArgs {
    #[command(flatten)]
    output: OutputArgs,
    /// The device or file that is read
    target: Option<PathBuf>,
    /// The length of the file that is made without a TARGET (8G, quick: 128M)
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "target")]
    size: Option<u64>,
    /// Where that file lies [default: the folder for temporary files]
    #[arg(long, value_name = "DIR", conflicts_with = "target")]
    folder: Option<PathBuf>,
    /// How much is read at each position (1G, quick: 16M)
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    length: Option<u64>,
    /// The distance of the positions [default: such that there are 20 at most]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    every: Option<u64>,
    /// The time after which a reading ends (2s, quick: 200ms)
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    seconds: Option<Duration>,
    /// Readings of each position and way (2, quick: 1)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Only these ways [default: bare and vhost-user]
    #[arg(long = "way", value_enum)]
    ways: Vec<WayName>,
}

/// Runs `spile bench geometry`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &GeometryArgs) -> Result<Exit> {
    let usual = geometry::Parameters::new(args.output.quick);
    let parameters = geometry::Parameters {
        target: args.target.clone(),
        file_bytes: args.size.unwrap_or(usual.file_bytes),
        folder: args.folder.clone().unwrap_or(usual.folder),
        length_bytes: args.length.unwrap_or(usual.length_bytes),
        every_bytes: args.every,
        limit: args.seconds.unwrap_or(usual.limit),
        rounds: args.rounds.unwrap_or(usual.rounds),
        ways: given_or(&args.ways, usual.ways),
        is_quick: usual.is_quick,
    };
    let outcome = with_progress(|progress| geometry::run(&parameters, progress))?;
    args.output.show(&outcome, &geometry::text(&outcome), geometry::figures)
}
