//! `spile bench shape`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use spile_core::Result;

use super::common::OutputArgs;
use crate::bench::shape;
use crate::cli::Exit;
use crate::units::{parse_duration, parse_size};

/// A guest's large reads, whole and split, against bare reads of the same store
///
/// One read is in flight at a time, of 512 KiB to 4 MiB. The host reads the bare store; a guest on vhost-user reads a disk on it, whose
/// requests stay as they are, are split into parts of one size, or are split as `auto` has learned. The store is a modelled SSD with stated
/// figures: channels, striped pages, a service time for each page. With --store a device or raw file of this host is read as well,
/// around the page cache, and the last line says whether splitting pays there. It takes about two minutes, twice that with --store.
#[derive(Debug, Args)]
pub struct ShapeArgs {
    #[command(flatten)]
    output: OutputArgs,
    /// Only these sizes of reads (512k,1M,2M,4M, quick: 1M)
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', value_parser = parse_size)]
    sizes: Vec<u64>,
    /// The size of the parts, a power of two
    #[arg(long, value_name = "SIZE", value_parser = parse_part, default_value = "64k")]
    part: u32,
    /// Rounds, of one run for each side and size (5, quick: 1)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// How long a run takes (1s, quick: 200ms)
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    seconds: Option<Duration>,
    /// A device or raw file of this host to read, too. Nothing is written to it
    #[arg(long, value_name = "DEVICE-OR-FILE")]
    store: Option<PathBuf>,
    /// The channels of the modelled SSD
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024), default_value = "16")]
    channels: u32,
    /// How long a channel of it takes for a page of 16 KiB
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "200us")]
    page_time: Duration,
}

fn parse_part(text: &str) -> Result<u32, String> {
    match parse_size(text)? {
        bytes if bytes.is_power_of_two() && (4096..=16 << 20).contains(&bytes) => Ok(bytes as u32),
        _ => Err("use a power of two from 4k to 16M".to_owned()),
    }
}

/// Runs `spile bench shape`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &ShapeArgs) -> Result<Exit> {
    let mut parameters = shape::Parameters::new(args.output.quick);
    if !args.sizes.is_empty() {
        parameters.sizes.clone_from(&args.sizes);
        parameters.sizes.sort_unstable();
        parameters.sizes.dedup();
    }
    parameters.part_bytes = args.part;
    parameters.rounds = args.rounds.unwrap_or(parameters.rounds);
    parameters.runtime = args.seconds.unwrap_or(parameters.runtime);
    parameters.store.clone_from(&args.store);
    parameters.model.channels = args.channels;
    parameters.model.page_us = args.page_time.as_secs_f64() * 1e6;
    let outcome = args.output.measure("shape", |progress| shape::run(&parameters, progress))?;
    args.output.show(&outcome, &shape::text(&outcome), shape::figures)
}
