//! Development tasks: `cargo xtask COMMAND`.
//!
//! Each command is a module with one entry point that takes the arguments after its name and
//! answers with success or a message. None of them needs more than a checkout and a toolchain;
//! programs that may be missing are reported as counted skips.
#![forbid(unsafe_code)]

mod bench;
mod check;
mod count;
mod deny;
mod fuzz;
mod peer;
mod shell;
mod sim;
mod test;
mod tidy;

use std::process::ExitCode;

/// Why a task failed, in words for the person who ran it.
type Result<T> = std::result::Result<T, String>;

/// A command's entry point: the arguments after its name.
type Entry = fn(&[String]) -> Result<()>;

/// Every command: name, what it does, entry point. Docs are checked against the names.
const COMMANDS: &[(&str, &str, Entry)] = &[
    ("tidy", "check the design's rules: arrows, sizes, unsafe, dead files, docs", tidy::run),
    ("deny", "check licences and sources of the dependencies", deny::run),
    ("test", "run every check and print the sums", test::run),
    ("test-long", "run the long versions of some of them", test::run_long),
    ("check", "check the crates that changed, in minutes (--base REV)", check::run),
    ("sim", "run the crash simulator (--seeds N)", sim::run),
    ("fuzz", "run the fuzz targets (--seconds N, --only WORD)", fuzz::run),
    ("peer", "run the tests against other programs (a name selects)", peer::run),
    ("guest", "run the tests with a guest under QEMU (a name selects)", peer::run_guest),
    ("xen", "run the tests on a nested Xen (a name selects)", peer::run_xen),
    ("iotests", "run QEMU's own block tests over Spile (--qemu-tree DIR, a name selects)", peer::run_iotests),
    ("soak", "run servers and guests under kills, full disks, hung stores (--minutes N, --seed S)", peer::run_soak),
    ("bench", "compare speed over NBD with peers (--quick, --rounds N, --only WORD)", bench::run),
    ("bench-vhost", "the same over vhost-user-blk", bench::run_vhost),
    ("bench-peers", "a few lines of both, as one picture (--svg FILE)", bench::run_peers),
    ("bench-life", "compare copies and merges of disks with other programs (--quick, --rounds N)", bench::run_life),
    ("bench-xen", "compare backends on a nested Xen (--quick, --rounds N, --json)", peer::run_xen_comparison),
    ("count", "count the instructions of one request and compare (--update keeps the figures)", count::run),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((name, rest)) = arguments.split_first() else {
        usage();
        return ExitCode::from(2);
    };
    // No command begins its work because somebody asks what it does.
    if arguments.iter().any(|argument| ["--help", "-h", "help"].contains(&argument.as_str())) {
        usage();
        return ExitCode::SUCCESS;
    }
    let Some((_, _, entry)) = COMMANDS.iter().find(|command| command.0 == name) else {
        eprintln!("xtask: no command named '{name}'");
        usage();
        return ExitCode::from(2);
    };
    match entry(rest) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask {name}: {message}");
            ExitCode::FAILURE
        }
    }
}

fn usage() {
    eprintln!("usage: cargo xtask COMMAND [ARGUMENTS]\n");
    for (name, what, _) in COMMANDS {
        eprintln!("  {name:<12} {what}");
    }
}
