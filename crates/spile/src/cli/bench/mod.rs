//! `spile bench`: the experiments' command line. Each experiment has a file.

mod aggregate;
mod all;
mod checkpoint;
pub(super) mod common;
mod crowd;
mod density;
mod depth;
mod exchange;
mod geometry;
mod hidden;
mod hung;
mod layers;
mod limit;
mod merge;
mod paths;
mod promises;
mod shape;
mod snapshot;
mod warmup;

use clap::{Args, Subcommand};
use spile_core::Result;

pub use all::Summary;
pub use hidden::{BenchGuestArgs, BenchTiedArgs, run_guest, run_tied};

use super::Exit;

/// What `--path` takes.
pub const PATHS: &str = "\
Paths through a ring; those with a * are measured unless others are named:
  grant-map-memcpy           * as tapdisk2: mapped, copied, unmapped; 44 KiB
  grant-map-memcpy-indirect    with indirect segments, as Linux has: 128 KiB
  grant-map                  * as blkback: mapped while the I/O runs; 128 KiB
  persistent                 * as qemu's qdisk: pages stay mapped; 128 KiB
  grant-copy-44k             * as tapdisk3: the hypervisor copies; 44 KiB
  grant-copy-44k-split         with a ring of its own for responses
  grant-copy                 * Spile's default: the hypervisor copies; 128 KiB
  grant-copy-split             with a ring of its own for responses
  grant-copy-1m                one ring, as many segments as Spile has: 1 MiB";

/// Measure what ways to a disk cost, side by side
///
/// Guests are those of a Xen made of ordinary processes, so this runs on any Linux host. The order of the paths and the
/// shape of their curves mean something there; Xen's absolute costs are others. The paths take turns, so that what else
/// the host does falls on all alike.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    experiment: Experiment,
}

#[derive(Debug, Subcommand)]
enum Experiment {
    All(all::AllArgs),
    Depth(depth::DepthArgs),
    Shape(shape::ShapeArgs),
    Density(density::DensityArgs),
    Layers(layers::LayersArgs),
    Geometry(geometry::GeometryArgs),
    Warmup(warmup::WarmupArgs),
    Paths(paths::PathsArgs),
    Aggregate(aggregate::AggregateArgs),
    Exchange(exchange::ExchangeArgs),
    Snapshot(snapshot::SnapshotArgs),
    Merge(merge::MergeArgs),
    Crowd(crowd::CrowdArgs),
    Hung(hung::HungArgs),
    Limit(limit::LimitArgs),
    Checkpoint(checkpoint::CheckpointArgs),
    Promises(promises::PromisesArgs),
}

/// Runs `spile bench`.
///
/// # Errors
/// As the experiments.
pub fn run(args: &BenchArgs) -> Result<Exit> {
    run_experiment(&args.experiment)
}

fn run_experiment(experiment: &Experiment) -> Result<Exit> {
    match experiment {
        Experiment::All(args) => all::run(args),
        Experiment::Depth(args) => depth::run(args),
        Experiment::Shape(args) => shape::run(args),
        Experiment::Density(args) => density::run(args),
        Experiment::Layers(args) => layers::run(args),
        Experiment::Geometry(args) => geometry::run(args),
        Experiment::Warmup(args) => warmup::run(args),
        Experiment::Paths(args) => paths::run(args),
        Experiment::Aggregate(args) => aggregate::run(args),
        Experiment::Exchange(args) => exchange::run(args),
        Experiment::Snapshot(args) => snapshot::run(args),
        Experiment::Merge(args) => merge::run(args),
        Experiment::Crowd(args) => crowd::run(args),
        Experiment::Hung(args) => hung::run(args),
        Experiment::Limit(args) => limit::run(args),
        Experiment::Checkpoint(args) => checkpoint::run(args),
        Experiment::Promises(args) => promises::run(args),
    }
}
