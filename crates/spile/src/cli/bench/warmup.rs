//! `spile bench warmup`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use spile_core::Result;

use super::common::{OutputArgs, with_progress};
use super::layers::{WayName, given_or};
use crate::bench::warmup;
use crate::cli::Exit;
use crate::units::{parse_duration, parse_size};

/// 1 MiB, 2 MiB … 16 GiB in blocks of 1 MiB: from which size on figures are stable
///
/// Each size is written through the page cache (with a sync at the end), written directly and read directly, one request at a time,
/// bare and by a guest on vhost-user. The file lies in --folder. Sizes for which there is no space are left out, and when the time
/// is over no larger one is begun; both are said.
#[derive(Debug, Args)]
pub struct WarmupArgs {
    #[command(flatten)]
    output: OutputArgs,
    /// The largest size (16G, quick: 64M)
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// The time after which no size is begun (240, quick: 8)
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    seconds: Option<Duration>,
    /// Transfers of each size, way and operation (2, quick: 1)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Only these ways [default: bare and vhost-user]
    #[arg(long = "way", value_enum)]
    ways: Vec<WayName>,
    /// Where the file lies [default: the folder for temporary files]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
}

/// Runs `spile bench warmup`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &WarmupArgs) -> Result<Exit> {
    let usual = warmup::Parameters::new(args.output.quick);
    let parameters = warmup::Parameters {
        most_bytes: args.size.unwrap_or(usual.most_bytes),
        limit: args.seconds.unwrap_or(usual.limit),
        rounds: args.rounds.unwrap_or(usual.rounds),
        ways: given_or(&args.ways, usual.ways),
        folder: args.folder.clone().unwrap_or(usual.folder),
        is_quick: usual.is_quick,
    };
    let outcome = with_progress(|progress| warmup::run(&parameters, progress))?;
    args.output.show(&outcome, &warmup::text(&outcome), warmup::figures)
}
