//! The simulator: it runs the real image code against a simulated host, crashes it anywhere, and checks every sector.
//!
//! [`World`] is the host (files, page cache, disk, clock), [`exec::Executor`] the scheduler, [`oracle`] the judge,
//! [`explore`] the driver. One seed decides everything, so a failure can be repeated: `cargo run -p spile-sim
//! --release -- --start SEED --seeds 1 --trace`. Development only: no product code depends on this crate.
#![forbid(unsafe_code)]
// The unit tests are of the simulated host alone. What runs images on it takes minutes to compile, and its tests are in `tests`.
#![cfg_attr(test, allow(dead_code))]

#[cfg(not(test))]
#[macro_use]
mod summary;

#[cfg(not(test))]
pub mod backup;
#[cfg(not(test))]
pub mod bitmaps;
#[cfg(not(test))]
pub mod changes;
#[cfg(not(test))]
mod checkpoints;
pub mod exec;
#[cfg(not(test))]
pub mod explore;
pub mod faults;
mod file;
#[cfg(not(test))]
pub mod gc;
#[cfg(not(test))]
pub mod image;
mod jobs;
#[cfg(not(test))]
pub mod live;
#[cfg(not(test))]
pub mod merge;
#[cfg(not(test))]
pub mod motion;
mod names;
mod op;
pub mod oracle;
pub mod pages;
#[cfg(not(test))]
pub mod past;
pub mod plan;
#[cfg(not(test))]
pub mod qcow2;
#[cfg(not(test))]
pub mod receive;
pub mod regions;
pub mod rng;
#[cfg(not(test))]
pub mod seeds;
pub mod stamp;
mod store;
pub mod subject;
#[cfg(not(test))]
pub mod toys;
mod turns;
mod workload;
mod world;

pub use store::{SimEnv, SimFiles, SimStore};
pub use world::{Hardware, World};
