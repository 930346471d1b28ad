//! What measures: load generators with verification, experiments with their tables and plots, wrappers that count.
//!
//! - [`load`]: a load over NBD, vhost-user or the stand-in for Xen.
//! - [`experiments`]: `spile bench`. [`report`]: `spile report`, a page of their results. [`stats`]: disks and stores that are
//!   measured. [`slow`]: a device that takes its time, and [`ssd`]: one with channels.
//!
//! Nothing that serves guests imports this crate.
#![forbid(unsafe_code)]

pub mod experiments;
pub mod load;
pub mod report;
pub mod slow;
pub mod ssd;
pub mod stats;
