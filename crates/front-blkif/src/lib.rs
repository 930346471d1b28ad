//! The blkif front: serves a disk to a Xen guest, straight from the rings in the guest's memory.
//!
//! - [`device`], `control`, `rings`, [`xenbus`], [`pause`], [`gate`]: one disk of one guest, as xenstore describes it.
//! - [`queue`], [`ring`], [`request`], [`pages`], [`execute`]: one ring at work.
//! - [`journal`], [`keeping`]: what the next process needs when this one is killed.
//! - [`metrics`], [`trace`]: what is counted, and where the time goes.
#![forbid(unsafe_code)]

pub mod journal;
pub mod ring;
pub mod trace;

pub mod execute;
pub mod pages;
pub mod request;

pub mod metrics;
pub mod queue;

mod config;
mod control;
pub mod device;
pub mod gate;
pub mod keeping;
pub mod pause;
mod rings;
pub mod xenbus;
