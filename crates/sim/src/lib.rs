//! The simulator: it runs the real image code against a simulated host, crashes it anywhere, and checks every sector.
//!
//! [`World`] is the host (files, page cache, disk, clock), [`exec::Executor`] the scheduler, [`oracle`] the judge,
//! [`explore`] the driver. One seed decides everything, so a failure can be repeated: `cargo run -p spile-sim
//! --release -- --start SEED --seeds 1 --trace`. Development only: no product code depends on this crate.
#![forbid(unsafe_code)]

#[macro_use]
mod summary;

pub mod backup;
pub mod bitmaps;
pub mod changes;
mod checkpoints;
pub mod exec;
pub mod explore;
pub mod faults;
mod file;
pub mod gc;
pub mod image;
mod jobs;
pub mod live;
pub mod merge;
pub mod motion;
mod names;
mod op;
pub mod oracle;
pub mod pages;
pub mod past;
pub mod plan;
pub mod qcow2;
pub mod receive;
pub mod regions;
pub mod rng;
pub mod seeds;
pub mod stamp;
mod store;
pub mod subject;
pub mod toys;
mod turns;
mod workload;
mod world;

pub use store::{SimEnv, SimFiles, SimStore};
pub use world::{Hardware, World};
