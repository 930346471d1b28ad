//! `cargo xtask check`: what a change to one crate needs before it is committed, in minutes.
//!
//! It looks at what has changed since `--base REV` (the branch's upstream, or else the last commit): the formatting,
//! the rules of `tidy`, Clippy and the unit tests for the crates that changed and those that import them, and a few
//! tests against other programs. `cargo xtask test` is all of that for every crate, and more.

use crate::peer::Build;
use crate::tidy::arrows::{self, Metadata};
use crate::{Result, shell, test};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

/// The crate of the program, which imports all others.
const PROGRAM: &str = "spile";

/// Words that select the tests against other programs: three that take seconds, over NBD and of VHD.
const SMOKE: [&str; 3] = ["test_nbdinfo", "test_qemu_client", "OursByQemu.test_fixed"];

/// Runs the checks of the crates that changed; an error when one fails.
pub fn run(arguments: &[String]) -> Result<()> {
    let base = shell::option(arguments, "--base", String::new())?;
    let changed = changed_files(&if base.is_empty() { upstream() } else { base })?;
    let metadata = arrows::metadata()?;
    let crates = concerned(&metadata, &changed);
    test::run_stages(stages(&crates, changed.iter().any(|path| path.starts_with("tests/peer"))))
}

/// The branch that this one follows; the last commit where it follows none.
fn upstream() -> String {
    let mut command = git(&["rev-parse", "--abbrev-ref", "@{upstream}"]);
    match command.output() {
        Ok(done) if done.status.success() => String::from_utf8_lossy(&done.stdout).trim().to_owned(),
        _ => "HEAD".to_owned(),
    }
}

/// Files that differ from `base`, or that git does not know yet, relative to the top folder.
fn changed_files(base: &str) -> Result<BTreeSet<PathBuf>> {
    let changed = shell::output(&mut git(&["diff", "--name-only", base, "--"]))?;
    let new = shell::output(&mut git(&["ls-files", "--others", "--exclude-standard"]))?;
    Ok(changed.lines().chain(new.lines()).map(PathBuf::from).collect())
}

/// The crates that hold one of the files, and all that import them. A file of the workspace itself concerns all crates.
fn concerned(metadata: &Metadata, changed: &BTreeSet<PathBuf>) -> BTreeSet<String> {
    let is_common = |path: &PathBuf| ["Cargo.toml", "Cargo.lock"].iter().any(|name| path.as_os_str() == *name);
    if changed.iter().any(is_common) {
        return metadata.names().map(str::to_owned).collect();
    }
    metadata.dependents(changed.iter().filter_map(|path| metadata.owner(path)))
}

fn stages(crates: &BTreeSet<String>, peers_changed: bool) -> Vec<test::Stage> {
    let mut stages = test::quick_checks();
    if !crates.is_empty() {
        let packages: Vec<&str> = crates.iter().flat_map(|name| ["--package", name.as_str()]).collect();
        stages.push(test::build(&packages));
        stages.extend(test::rust_tests(&packages));
    }
    if peers_changed && !crates.contains(PROGRAM) {
        stages.push(test::build(&["--package", PROGRAM]));
    }
    if peers_changed || crates.contains(PROGRAM) {
        stages.push(test::tally("smoke", Build::Tests.peers(&SMOKE.map(str::to_owned))));
    }
    stages
}

fn git(arguments: &[&str]) -> Command {
    let mut command = Command::new("git");
    command.args(arguments).current_dir(shell::root());
    command
}
