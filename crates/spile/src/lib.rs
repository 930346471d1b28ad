//! The program `spile`: the command line. Start at [`cli::run`].
//!
//! The commands are thin: what serves is in `spile-server`, what measures is in `spile-bench`.
#![forbid(unsafe_code)]

pub mod cli;

pub use spile_bench::{experiments as bench, load, stats};
pub use spile_server::{
    disks, family, grow, limits, listen, log, notify, panics, process, serving, signals, tuned, units, uri, xen,
};
