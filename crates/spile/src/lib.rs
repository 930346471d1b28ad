//! The program `spile`: the command line, and the pieces of it that tests use too.
//!
//! This is the only crate that joins fronts and images. Start at [`cli::run`].
#![forbid(unsafe_code)]

pub mod bench;
pub mod cli;
pub mod disks;
pub mod listen;
pub mod load;
mod log;
pub mod nbd_client;
pub mod notify;
pub mod serving;
pub mod signals;
pub mod stats;
pub mod units;
pub mod uri;
pub mod xen;
