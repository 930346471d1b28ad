//! `spile bench layers`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use spile_core::Result;

use super::common::{OutputArgs, with_progress};
use crate::bench::layers::{self, Kind};
use crate::bench::transfer::Way;
use crate::cli::Exit;
use crate::units::{parse_duration, parse_size};

/// A file, a partition and a logical volume, bare and through each front: speed by block size
///
/// 1 GiB is written through the page cache (with a sync at the end), written directly and read directly, in blocks of 512 bytes to
/// 1 MiB, one request at a time. The places lie beside each other in --folder: a file, a partition of a loop device and a
/// logical volume (device-mapper's linear mapping, which is what an LVM volume is). Loop devices need root, and volumes a kernel with
/// device-mapper; what cannot be had is left out with the reason. A transfer ends after a time, and what the whole would take is
/// extrapolated then. All of it takes about a quarter of an hour.
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
    /// Transfers of each side, size and operation (2, quick: 1)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Only these places
    #[arg(long = "place", value_enum)]
    places: Vec<PlaceName>,
    /// Only these ways
    #[arg(long = "way", value_enum)]
    ways: Vec<WayName>,
    /// Where the files lie [default: the folder for temporary files]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
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

/// A way, as --way takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WayName {
    Bare,
    Nbd,
    VhostUser,
    Xen,
}

impl From<WayName> for Way {
    fn from(name: WayName) -> Self {
        match name {
            WayName::Bare => Self::Bare,
            WayName::Nbd => Self::Nbd,
            WayName::VhostUser => Self::VhostUser,
            WayName::Xen => Self::Xen,
        }
    }
}

/// The values that were given, or the usual ones.
pub fn given_or<T: Clone, N: Copy + Into<T>>(given: &[N], usual: Vec<T>) -> Vec<T> {
    if given.is_empty() { usual } else { given.iter().map(|name| (*name).into()).collect() }
}

/// Runs `spile bench layers`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &LayersArgs) -> Result<Exit> {
    let usual = layers::Parameters::new(args.output.quick);
    let parameters = layers::Parameters {
        total_bytes: args.size.unwrap_or(usual.total_bytes),
        sizes: given_or(&args.sizes, usual.sizes),
        limit: args.seconds.unwrap_or(usual.limit),
        rounds: args.rounds.unwrap_or(usual.rounds),
        places: given_or(&args.places, usual.places),
        ways: given_or(&args.ways, usual.ways),
        folder: args.folder.clone().unwrap_or(usual.folder),
        is_quick: usual.is_quick,
    };
    let outcome = with_progress(|progress| layers::run(&parameters, progress))?;
    args.output.show(&outcome, &layers::text(&outcome), layers::figures)
}
