//! `cargo xtask sim`: the crash simulator over many seeds.

use crate::{Result, shell};
use std::process::Command;

/// Seeds in the short run that is part of the tests.
const SHORT_SEEDS: &str = "2000";

/// Runs `--seeds N` seeds from `--start S`; more arguments go to the simulator as they are.
pub fn run(arguments: &[String]) -> Result<()> {
    let mut command = command();
    if !shell::flag(arguments, "--seeds") {
        command.args(["--seeds", SHORT_SEEDS]);
    }
    shell::run(command.args(arguments))
}

/// The run that is part of the tests.
pub fn short_slice() -> Command {
    let mut command = command();
    command.args(["--seeds", SHORT_SEEDS]);
    command
}

fn command() -> Command {
    let mut command = shell::cargo();
    command.args(["run", "--quiet", "--release", "--package", "spile-sim", "--"]);
    command
}
