//! Commands that experiments start themselves: no help lists them.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use spile_core::Result;

use crate::bench::{guest, process};
use crate::cli::Exit;

/// Be a guest of an experiment; `spile bench` starts this
#[derive(Debug, Args)]
pub struct BenchGuestArgs {}

/// Runs `spile bench-guest`.
///
/// # Errors
/// As [`guest::run`].
pub fn run_guest(_: &BenchGuestArgs) -> Result<Exit> {
    guest::run().map(|()| Exit::Ok)
}

/// Become `spile ARGS…` or another program, ended with the process that starts this; `spile bench` starts this
#[derive(Debug, Args)]
pub struct BenchTiedArgs {
    /// Become another program
    #[arg(long, value_name = "PROGRAM")]
    program: Option<PathBuf>,
    /// The arguments
    #[arg(last = true, required = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

/// Runs `spile bench-tied`.
///
/// # Errors
/// As [`process::become_tied`].
pub fn run_tied(args: &BenchTiedArgs) -> Result<Exit> {
    process::become_tied(args.program.as_deref(), &args.args).map(|()| Exit::Ok)
}
