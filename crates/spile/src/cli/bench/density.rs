//! `spile bench density`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use spile_core::Result;
use spile_image::Format;

use super::common::OutputArgs;
use crate::bench::density;
use crate::cli::Exit;
use crate::units::{parse_duration, parse_size};

/// Hundreds of idle disks: what wakes their server, and what they cost
///
/// One server has all disks, with an idle guest on each if --guests is given. Rows of 30 seconds have what has woken its workers, by
/// cause, its processor time, its memory and its threads, as in the tables of Project Pulsar. The first row has the attachment.
/// Beside it a few disks have a process each. The server is asked between rows only, and what that costs is in no row.
#[derive(Debug, Args)]
pub struct DensityArgs {
    #[command(flatten)]
    output: OutputArgs,
    /// Disks of the shared process (500, quick: 20)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=5000))]
    disks: Option<u32>,
    /// How long all is idle (300, quick: 3)
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    seconds: Option<Duration>,
    /// The length of a row (30s, quick: 1s)
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    row: Option<Duration>,
    /// Disks that have a process each, beside the others (10, quick: 3)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1000))]
    each: Option<u32>,
    /// Connect a guest to each disk, by vhost-user
    #[arg(long)]
    guests: bool,
    /// Queues of each guest
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=16))]
    queues: u16,
    /// The disks' images; null: none, reads bring zeroes
    #[arg(long, value_enum, default_value = "vhd")]
    format: Image,
    /// The size of each disk
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "20G")]
    size: u64,
    /// Where the images lie; in memory unless given
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
}

/// What a disk is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Image {
    Null,
    Raw,
    Vhd,
}

impl Image {
    fn format(self) -> Option<Format> {
        match self {
            Self::Null => None,
            Self::Raw => Some(Format::Raw),
            Self::Vhd => Some(Format::Vhd),
        }
    }
}

/// Runs `spile bench density`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &DensityArgs) -> Result<Exit> {
    let usual = density::Parameters::new(args.output.quick);
    let parameters = density::Parameters {
        disks: args.disks.unwrap_or(usual.disks),
        each: args.each.unwrap_or(usual.each),
        has_guests: args.guests,
        queues: args.queues,
        idle: args.seconds.unwrap_or(usual.idle),
        row: args.row.unwrap_or(usual.row),
        format: args.format.format(),
        disk_bytes: args.size,
        folder: args.folder.clone(),
        ..usual
    };
    let outcome = args.output.measure("density", |progress| density::run(&parameters, progress))?;
    args.output.show(&outcome, &density::text(&outcome), density::figures)
}
