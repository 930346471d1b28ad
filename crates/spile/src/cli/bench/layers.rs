//! `spile bench layers`.

use std::time::Duration;

use clap::{Args, ValueEnum};
use spile_core::Result;

use super::common::{DeviceArgs, OutputArgs, given_or};
use crate::bench::layers::{self, Kind};
use crate::cli::Exit;
use crate::units::{parse_duration, parse_size};

/// A file, a partition and a logical volume, bare and through each front: speed by block size
///
/// 1 GiB is written through the page cache (with a sync at the end), written directly and read directly, in blocks of 512 bytes to
/// 1 MiB, one request at a time. The places lie beside each other in --folder: a file, a partition of a loop device and a
/// logical volume (device-mapper's linear mapping, which is what an LVM volume is). Loop devices need root, and volumes a kernel with
/// device-mapper; what cannot be had is left out with the reason. A transfer ends after a time, and what the whole would take is
/// extrapolated then. All of it takes at most
/// twenty minutes.
#[derive(Debug, Args)]
pub struct LayersArgs {
    #[command(flatten)]
    output: OutputArgs,
    /// Bytes of each transfer (1G, quick: 32M)
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Sizes of blocks (512 to 1M, quick: 4k,64k,1M)
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', value_parser = parse_size)]
    sizes: Vec<u64>,
    /// The time after which a transfer ends (1s, quick: 100ms)
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    seconds: Option<Duration>,
    /// Only these places
    #[arg(long = "place", value_enum)]
    places: Vec<PlaceName>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// A place, as --place takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlaceName {
    File,
    Partition,
    Volume,
}

impl From<PlaceName> for Kind {
    fn from(name: PlaceName) -> Self {
        match name {
            PlaceName::File => Self::File,
            PlaceName::Partition => Self::Partition,
            PlaceName::Volume => Self::Volume,
        }
    }
}

/// Runs `spile bench layers`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &LayersArgs) -> Result<Exit> {
    let usual = layers::Parameters::new(args.output.quick);
    let mut parameters = layers::Parameters {
        total_bytes: args.size.unwrap_or(usual.total_bytes),
        sizes: given_or(&args.sizes, usual.sizes),
        limit: args.seconds.unwrap_or(usual.limit),
        within: args.device.within(),
        places: given_or(&args.places, usual.places),
        ..usual
    };
    args.device.put_into(&mut parameters.rounds, &mut parameters.ways, &mut parameters.folder);
    let outcome = args.output.measure("layers", |progress| layers::run(&parameters, progress))?;
    args.output.show(&outcome, &layers::text(&outcome), layers::figures)
}
