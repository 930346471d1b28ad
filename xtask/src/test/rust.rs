//! The stages that build and test the workspace's own Rust code.
//!
//! Clippy is the compiler with more lints. So the tests are built by it, and no crate is compiled once more only to be
//! looked at. A finding does not stop the build: it fails the stage `clippy`, and the tests run all the same.

use super::Stage;
use super::counts::Reader;
use super::stages::cargo;
use crate::{bench, shell};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Runs the tests of these packages (`--package NAME` …, or `--workspace`): by nextest where it is, else by cargo; doc
/// tests always by cargo.
pub fn rust_tests(packages: &[&str]) -> Vec<Stage> {
    let doc = linted(&[&["test", "--doc"], packages].concat());
    vec![unit(packages), Stage { name: "doc", command: doc, reader: Reader::CargoTest }]
}

/// Builds the tests and the programs of these packages, and has Clippy look at the code meanwhile. Where Clippy's driver is
/// not found, cargo runs Clippy by itself.
pub fn build(packages: &[&str]) -> Stage {
    if clippy_driver().is_none() {
        let words = [&["clippy", "--all-targets"], packages, &["--", "-D", "warnings"]].concat();
        return Stage { name: "clippy", command: cargo(&words), reader: Reader::Whole };
    }
    let words = [&["test", "--no-run"], packages].concat();
    Stage { name: "clippy", command: linted(&words), reader: Reader::Silent }
}

fn unit(packages: &[&str]) -> Stage {
    if !shell::on_path("cargo-nextest") {
        let words =
            [&["test", "--lib", "--bins", "--tests"], packages, &["--no-fail-fast", "--", "--show-output"]].concat();
        return Stage { name: "unit", command: linted(&words), reader: Reader::CargoTest };
    }
    let mut command =
        linted(&[&["nextest", "run", "--success-output=immediate", "--status-level=pass"], packages].concat());
    // Many tests wait most of their time: for a limit, a hang, a kill.
    let at_a_time = bench::server::core_count() * 2;
    command.args(["--color=never", "--no-tests=pass"]).arg(format!("--test-threads={at_a_time}"));
    Stage { name: "unit", command, reader: Reader::Nextest }
}

/// Cargo with Clippy as the compiler of the workspace's crates, where that is possible. All lints only warn.
fn linted(arguments: &[&str]) -> Command {
    let mut command = cargo(arguments);
    if let Some(driver) = clippy_driver() {
        // Clippy splits its arguments at this word.
        command.env("RUSTC_WORKSPACE_WRAPPER", driver).env("CLIPPY_ARGS", "--cap-lints=warn__CLIPPY_HACKERY__");
    }
    command
}

/// The program with which `cargo clippy` compiles. It is looked for once.
fn clippy_driver() -> Option<&'static Path> {
    static DRIVER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let find = || {
        let sysroot = shell::output(Command::new("rustc").args(["--print", "sysroot"])).ok()?;
        let driver = PathBuf::from(sysroot.trim()).join("bin/clippy-driver");
        driver.is_file().then_some(driver)
    };
    DRIVER.get_or_init(find).as_deref()
}
