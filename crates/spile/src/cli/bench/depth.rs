//! `spile bench depth`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use spile_core::Result;

use super::common::OutputArgs;
use crate::bench::depth;
use crate::cli::Exit;
use crate::units::{parse_duration, parse_size};

/// The average queue size at each layer, against the requests that the client keeps in flight
///
/// A client reads a disk with 1 to 64 requests of 4 KiB in flight, by NBD and as a guest on vhost-user. Client, front, disk, image
/// and store integrate their queues over time; of the host's device the kernel counts the time of ended requests only, which is what
/// iostat shows. Two disks are read: an NBD export whose requests take a stated time longer, and a raw file on the host's device
/// (O_DIRECT). A second part has long requests and short intervals. All of it takes about three minutes.
#[derive(Debug, Args)]
pub struct DepthArgs {
    #[command(flatten)]
    output: OutputArgs,
    /// Requests in flight (1, 2, 4 … 64; quick: 1, 8, 64)
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=128))]
    depths: Vec<u32>,
    /// Rounds, of one run for each disk, way and depth (3, quick: 1)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// How long a run takes (2s, quick: 300ms)
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    seconds: Option<Duration>,
    /// How much longer each request to the export takes
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "100us")]
    delay: Duration,
    /// Where the file on the host's device lies [default: the folder for temporary files]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// The length of that file (1G, quick: 64M)
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Read random places, instead of from start to end as in the article
    #[arg(long)]
    random: bool,
}

/// Runs `spile bench depth`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &DepthArgs) -> Result<Exit> {
    let mut parameters = depth::Parameters::new(args.output.quick);
    if !args.depths.is_empty() {
        parameters.depths.clone_from(&args.depths);
    }
    parameters.rounds = args.rounds.unwrap_or(parameters.rounds);
    parameters.runtime = args.seconds.unwrap_or(parameters.runtime);
    parameters.delay = args.delay;
    parameters.folder = args.folder.clone().unwrap_or(parameters.folder);
    parameters.file_bytes = args.size.unwrap_or(parameters.file_bytes);
    parameters.is_random = args.random;
    let outcome = args.output.measure("depth", |progress| depth::run(&parameters, progress))?;
    args.output.show(&outcome, &depth::text(&outcome), depth::figures)
}
