//! `cargo xtask peer`, `cargo xtask guest`, `cargo xtask xen`, `cargo xtask soak` and `cargo xtask iotests`: the tests in
//! `tests/peer/`, `tests/soak/` and `tests/iotests/`, against a build for release, or against that of the tests.

use crate::{Result, shell};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Which build of the program the tests run against.
#[derive(Clone, Copy)]
pub enum Build {
    /// As it is used.
    Release,
    /// As the workspace's own tests have it: with assertions, and there already when those are built.
    Tests,
}

impl Build {
    /// The folder with the programs.
    pub fn folder(self) -> PathBuf {
        shell::target_dir().join(match self {
            Build::Release => "release",
            Build::Tests => "debug",
        })
    }

    /// The program.
    pub fn spile(self) -> PathBuf {
        self.folder().join("spile")
    }

    /// The runner of the peer tests, without the guest and Xen.
    pub fn peers(self, arguments: &[String]) -> Command {
        let mut command = self.python("tests/peer/run.py");
        command.args(arguments);
        command
    }

    /// The runner of the tests in a folder of their own: `guest` or `xen`.
    pub fn folder_of_peers(self, folder: &str) -> Command {
        let mut command = self.python("tests/peer/run.py");
        command.args(["--folder", folder]);
        // All tests on Xen share one emulated host, whose start takes longer than many a test.
        command.args(if folder == "xen" { ["--together"].as_slice() } else { &["--jobs", "2"] });
        command
    }

    /// The runner of QEMU's own block tests. Their source tree is named by `QEMU_TREE` in the environment; without one
    /// that is a skip.
    pub fn iotests(self) -> Command {
        self.python("tests/iotests/run.py")
    }

    /// The slice of the long hours that is part of the tests: the same events each time.
    pub fn short_soak(self) -> Command {
        self.soak(&["--minutes", "1", "--seed", "1"].map(str::to_owned))
    }

    /// Half an hour of them, by a seed of its own each time.
    pub fn long_soak(self) -> Command {
        self.soak(&["--minutes", "30"].map(str::to_owned))
    }

    fn soak(self, arguments: &[String]) -> Command {
        let mut command = self.python("tests/soak/soak.py");
        command.args(arguments);
        command
    }

    /// The distribution's Python: the peers' bindings are installed for it, not for one beside it.
    fn python(self, script: &str) -> Command {
        let packaged = "/usr/bin/python3";
        let program = if Path::new(packaged).exists() { packaged } else { "python3" };
        let mut command = Command::new(program);
        command.arg(script).current_dir(shell::root());
        command.env("SPILE_BIN", self.spile());
        command.env("SPILE_HOSTILE_FRONT", self.folder().join("examples/hostile_front"));
        command.env("SPILE_TARGET", shell::target_dir());
        command
    }
}

/// Has a runner run those tests, too, that take too long for `cargo xtask test`.
pub fn long(mut command: Command) -> Command {
    command.env("SPILE_LONG", "1");
    command
}

/// Builds the program and runs the tests whose names hold one of the arguments.
pub fn run(arguments: &[String]) -> Result<()> {
    released(|build| build.peers(arguments))
}

/// Builds the program and boots the guests.
pub fn run_guest(arguments: &[String]) -> Result<()> {
    released(|build| with(build.folder_of_peers("guest"), arguments))
}

/// Builds the program and boots the nested Xen. Here tests run that take too long for `cargo xtask test`.
pub fn run_xen(arguments: &[String]) -> Result<()> {
    released(|build| with(long(build.folder_of_peers("xen")), arguments))
}

/// Builds the program and compares it with other backends on a nested Xen.
pub fn run_xen_comparison(arguments: &[String]) -> Result<()> {
    released(|build| with(build.python("tests/peer/xen/compare.py"), arguments))
}

/// Builds the program and runs it for long hours.
pub fn run_soak(arguments: &[String]) -> Result<()> {
    released(|build| build.soak(arguments))
}

/// Builds the program and runs QEMU's own block tests over it.
pub fn run_iotests(arguments: &[String]) -> Result<()> {
    released(|build| with(build.iotests(), arguments))
}

fn with(mut command: Command, arguments: &[String]) -> Command {
    command.args(arguments);
    command
}

fn released(command: impl FnOnce(Build) -> Command) -> Result<()> {
    shell::run(&mut release_build())?;
    shell::run(&mut command(Build::Release))
}

/// Builds what the tests against other programs run: the program, and the front end that the tests on the nested Xen set
/// on it.
pub fn release_build() -> Command {
    let mut command = shell::cargo();
    command.args(["build", "--release", "--package", "spile", "--bin", "spile"]);
    command.args(["--package", "spile-lab", "--example", "hostile_front"]);
    command
}
