//! `cargo xtask sim`: the crash simulator over many seeds.

use crate::{Result, shell};
use std::process::Command;

/// Seeds of each mode, where nobody says how many.
const SHORT_SEEDS: &str = "2000";

/// Seeds that are crashed at every step.
const EVERY_STEP_SEEDS: &str = "12";

/// What is run besides single images.
const MODES: [&str; 8] = ["--exchange", "--merge", "--changes", "--bitmaps", "--backup", "--gc", "--move", "--receive"];

/// Runs `--seeds N` seeds of each mode; more arguments go to the simulator as they are. Where they choose what is run, that alone is run. Else some
/// seeds are crashed at every step first.
pub fn run(arguments: &[String]) -> Result<()> {
    let chosen = ["--every-step", "--kind", "--start"];
    if chosen.iter().chain(&MODES).any(|name| shell::flag(arguments, name)) {
        return shell::run(&mut with(arguments));
    }
    shell::run(command().args(["--every-step", "--seeds", EVERY_STEP_SEEDS]))?;
    let mut found = shell::run(&mut with(arguments));
    for mode in MODES {
        println!("{mode}");
        // What one mode finds keeps no other one from its turn.
        found = shell::run(with(arguments).arg(mode)).and(found);
    }
    found
}

fn with(arguments: &[String]) -> Command {
    let mut command = command();
    if !shell::flag(arguments, "--seeds") {
        command.args(["--seeds", SHORT_SEEDS]);
    }
    command.args(arguments);
    command
}

fn command() -> Command {
    let mut command = shell::cargo();
    command.args(["run", "--quiet", "--release", "--package", "spile-sim", "--"]);
    command
}
