//! Disks for Xen guests: [`disk`] serves one, [`backend`] keeps a process for each that the toolstack has made.

pub mod backend;
mod claim;
pub mod disk;
pub mod params;
mod place;
pub mod stats;

pub use place::{HostXen, OverXen, Place};
