//! Serves a disk to a Xen guest: straight from the guest's blkif ring.
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
pub mod keeping;
pub mod pause;
mod rings;
pub mod xenbus;
