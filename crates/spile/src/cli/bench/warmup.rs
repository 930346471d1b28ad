//! `spile bench warmup`.

use std::time::Duration;

use clap::Args;
use spile_core::Result;

use super::common::{DeviceArgs, OutputArgs};
use crate::bench::warmup;
use crate::cli::Exit;
use crate::units::{parse_duration, parse_size};

/// 1 MiB, 2 MiB … 16 GiB in blocks of 1 MiB: from which size on figures are stable
///
/// Each size is written through the page cache (with a sync at the end), written directly and read directly, one request at a time,
/// bare and, unless --way says it, by a guest on vhost-user. The file lies in --folder, and takes at most a quarter of the free space there.
/// Sizes for which the space or the time does not suffice are left out, and that is said.
#[derive(Debug, Args)]
pub struct WarmupArgs {
    #[command(flatten)]
    output: OutputArgs,
    /// The largest size (16G, quick: 64M)
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// How long all of it may take (300, quick: 8)
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    seconds: Option<Duration>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Runs `spile bench warmup`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &WarmupArgs) -> Result<Exit> {
    let usual = warmup::Parameters::new(args.output.quick);
    let limit = args.seconds.unwrap_or(usual.limit);
    let mut parameters = warmup::Parameters {
        most_bytes: args.size.unwrap_or(usual.most_bytes),
        limit: args.device.within().map_or(limit, |within| within.min(limit)),
        ..usual
    };
    args.device.put_into(&mut parameters.rounds, &mut parameters.ways, &mut parameters.folder);
    let outcome = args.output.measure("warmup", |progress| warmup::run(&parameters, progress))?;
    args.output.show(&outcome, &warmup::text(&outcome), warmup::figures)
}
