//! `cargo xtask sim`: the crash simulator over many seeds.

use crate::{Result, shell};
use std::process::Command;

/// Seeds in the short run that is part of the tests.
const SHORT_SEEDS: &str = "2000";

/// Seeds that are crashed at every step.
const EVERY_STEP_SEEDS: &str = "12";

/// Runs `--seeds N` seeds from `--start S`; more arguments go to the simulator as they are. Unless they choose what is run, some seeds are
/// crashed at every step first.
pub fn run(arguments: &[String]) -> Result<()> {
    let chosen = [
        "--every-step",
        "--exchange",
        "--merge",
        "--changes",
        "--backup",
        "--gc",
        "--move",
        "--receive",
        "--kind",
        "--start",
    ];
    if !chosen.iter().any(|name| shell::flag(arguments, name)) {
        shell::run(command().args(["--every-step", "--seeds", EVERY_STEP_SEEDS]))?;
    }
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
