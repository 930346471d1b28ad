//! Which stages there are, and which of them run beside each other.

use super::Stage;
use super::counts::Reader;
use super::rust::{build, rust_tests};
use crate::peer::{self, Build};
use crate::{count, shell};
use std::path::PathBuf;
use std::process::Command;

/// All stages, in groups that run one after the other. A group has lanes, which run beside each other: two processors
/// have more to do when what computes stands beside what waits.
pub fn all() -> Vec<Vec<Vec<Stage>>> {
    let mut checks = quick_checks();
    checks.push(tally("deny", own(&["deny"])));
    let built = vec![build(&WORKSPACE), whole("release", peer::release_build())];
    let served = vec![tally("served", own(&["count", "--only", count::SERVED]))];
    vec![
        vec![checks],
        vec![built],
        vec![rust_tests(&WORKSPACE)],
        vec![peers()],
        vec![machines(), programs()],
        vec![served],
    ]
}

const WORKSPACE: [&str; 1] = ["--workspace"];

/// The first thing that a user runs, and the tests against other programs.
fn peers() -> Vec<Stage> {
    let build = Build::Release;
    vec![
        whole("demo", demo()),
        tally("peer", build.peers(&[])),
        tally("iotests", build.iotests()),
        tally("soak", build.short_soak()),
        tally("guest", build.folder_of_peers("guest")),
    ]
}

/// Those with an emulated host.
fn machines() -> Vec<Stage> {
    vec![tally("xen", Build::Release.folder_of_peers("xen"))]
}

/// What is counted and measured. What a program that counts alone needs is the same whatever else the machine does. Of the
/// benchmarks nobody reads the figures here: they are to run to their end.
fn programs() -> Vec<Stage> {
    let mut stages = vec![tally("count", own(&["count", "--only", count::ALONE]))];
    stages.extend(["bench", "bench-vhost", "bench-life"].map(|name| whole(name, own(&[name, "--quick"]))));
    stages
}

/// The long versions: `cargo xtask test-long`.
pub fn long() -> Vec<Stage> {
    let release = Build::Release;
    vec![
        whole("release", peer::release_build()),
        tally("peer", peer::long(release.peers(&[]))),
        tally("guest", peer::long(release.folder_of_peers("guest"))),
        tally("xen", peer::long(release.folder_of_peers("xen"))),
        whole("sim", own(&["sim"])),
        whole("fuzz", own(&["fuzz"])),
        tally("soak", release.long_soak()),
    ]
}

/// What needs no test to run.
pub fn quick_checks() -> Vec<Stage> {
    let fmt = cargo(&["fmt", "--all", "--", "--check", "--color=never"]);
    vec![whole("fmt", fmt), whole("tidy", own(&["tidy"]))]
}

/// A stage of one of our own runners.
pub fn tally(name: &'static str, command: Command) -> Stage {
    Stage { name, command, reader: Reader::Tally }
}

fn whole(name: &'static str, command: Command) -> Stage {
    Stage { name, command, reader: Reader::Whole }
}

/// The first thing that a user runs, made short.
fn demo() -> Command {
    let mut command = Command::new(Build::Release.spile());
    command.args(["demo", "--seconds", "2", "--span", "128M"]).current_dir(shell::root());
    command
}

pub fn cargo(arguments: &[&str]) -> Command {
    let mut command = shell::cargo();
    command.args(arguments);
    command
}

/// A command of this program. A fresh process, so that its output can be kept.
fn own(arguments: &[&str]) -> Command {
    let program = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("xtask"));
    let mut command = Command::new(program);
    command.args(arguments).current_dir(shell::root());
    command
}
