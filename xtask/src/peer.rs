//! `cargo xtask peer`, `cargo xtask guest`, `cargo xtask xen`, `cargo xtask soak` and `cargo xtask iotests`: the tests in
//! `tests/peer/`, `tests/soak/` and `tests/iotests/`, against a release build.

use crate::{Result, shell};
use std::path::Path;
use std::process::Command;

/// Builds the program and runs the tests whose names hold one of the arguments.
pub fn run(arguments: &[String]) -> Result<()> {
    build()?;
    shell::run(&mut command(arguments))
}

/// Builds the program and boots the guests.
pub fn run_guest(arguments: &[String]) -> Result<()> {
    build()?;
    shell::run(folder_command("guest").args(arguments))
}

/// Builds the program and boots the nested Xen. Here tests run that take too long for `cargo xtask test`.
pub fn run_xen(arguments: &[String]) -> Result<()> {
    build()?;
    shell::run(&mut hostile_front())?;
    shell::run(folder_command("xen").args(arguments).env("SPILE_LONG", "1"))
}

/// Builds the program and compares it with other backends on a nested Xen.
pub fn run_xen_comparison(arguments: &[String]) -> Result<()> {
    build()?;
    shell::run(python("tests/peer/xen/compare.py").args(arguments))
}

/// Builds the program and runs it for long hours.
pub fn run_soak(arguments: &[String]) -> Result<()> {
    build()?;
    shell::run(&mut soak(arguments))
}

/// Builds the program and runs QEMU's own block tests over it.
pub fn run_iotests(arguments: &[String]) -> Result<()> {
    build()?;
    shell::run(iotests().args(arguments))
}

/// The runner of QEMU's own block tests. Their source tree is named by `QEMU_TREE` in the environment; without one that is a skip.
pub fn iotests() -> Command {
    python("tests/iotests/run.py")
}

/// The slice of the long hours that is part of the tests: the same events each time.
pub fn short_soak() -> Command {
    soak(&["--minutes", "1", "--seed", "1"].map(str::to_owned))
}

fn soak(arguments: &[String]) -> Command {
    let mut command = python("tests/soak/soak.py");
    command.args(arguments);
    command
}

fn build() -> Result<()> {
    shell::run(shell::cargo().args(["build", "--release", "--package", "spile"]))
}

/// Builds the front end that the tests on the nested Xen set on the program.
pub fn hostile_front() -> Command {
    let mut command = shell::cargo();
    command.args(["build", "--release", "--package", "spile-lab", "--example", "hostile_front"]);
    command
}

/// The runner of the peer tests, without the guest.
pub fn command(arguments: &[String]) -> Command {
    let mut command = python("tests/peer/run.py");
    command.args(arguments);
    command
}

/// The runner of the tests in a folder of their own: `guest` or `xen`.
pub fn folder_command(folder: &str) -> Command {
    let mut command = python("tests/peer/run.py");
    // One at a time: two machines in software emulation wait for each other on two processors.
    let jobs = if folder == "xen" { "1" } else { "2" };
    command.args(["--folder", folder, "--jobs", jobs]);
    command
}

/// The distribution's Python: the peers' bindings are installed for it, not for one beside it.
fn python(script: &str) -> Command {
    let packaged = "/usr/bin/python3";
    let program = if Path::new(packaged).exists() { packaged } else { "python3" };
    let mut command = Command::new(program);
    command.arg(script).current_dir(shell::root());
    command.env("SPILE_BIN", shell::target_dir().join("release/spile"));
    command.env("SPILE_HOSTILE_FRONT", shell::target_dir().join("release/examples/hostile_front"));
    command.env("SPILE_TARGET", shell::target_dir());
    command
}
