//! `spile bench geometry`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use spile_core::Result;

use super::common::{DeviceArgs, OutputArgs};
use crate::bench::geometry;
use crate::cli::Exit;
use crate::units::{parse_duration, parse_size};

/// Reads all over the addresses of a device or file: whether the speed depends on the place
///
/// 1 GiB is read every so many GiB, directly, in blocks of 1 MiB, one request at a time, bare and, unless --way says it, by a guest on
/// vhost-user. TARGET is only read. Without one, a file is made in --folder, of at most a quarter of the free space, and removed in the end.
#[derive(Debug, Args)]
pub struct GeometryArgs {
    #[command(flatten)]
    output: OutputArgs,
    /// The device or file that is read
    #[arg(conflicts_with = "folder")]
    target: Option<PathBuf>,
    /// The length of the file that is made without a TARGET (8G, quick: 128M)
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "target")]
    size: Option<u64>,
    /// How much is read at each position (1G, quick: 16M)
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    length: Option<u64>,
    /// The distance of the positions [default: such that there are 20 at most]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    every: Option<u64>,
    /// The time after which a reading ends (2s, quick: 200ms)
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    seconds: Option<Duration>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Runs `spile bench geometry`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &GeometryArgs) -> Result<Exit> {
    let usual = geometry::Parameters::new(args.output.quick);
    let mut parameters = geometry::Parameters {
        target: args.target.clone(),
        file_bytes: args.size.unwrap_or(usual.file_bytes),
        length_bytes: args.length.unwrap_or(usual.length_bytes),
        every_bytes: args.every,
        limit: args.seconds.unwrap_or(usual.limit),
        within: args.device.within(),
        ..usual
    };
    args.device.put_into(&mut parameters.rounds, &mut parameters.ways, &mut parameters.folder);
    let outcome = args.output.measure("geometry", |progress| geometry::run(&parameters, progress))?;
    args.output.show(&outcome, &geometry::text(&outcome), geometry::figures)
}
