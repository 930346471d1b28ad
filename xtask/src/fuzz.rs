//! `cargo xtask fuzz`: the fuzz targets in `fuzz/`, each for some seconds or some executions.
//!
//! This is the long run, and needs cargo-fuzz and a nightly toolchain. The short one needs neither:
//! the crates' own tests run each codec over the corpus in `fuzz/corpus/` and over mutations of it.

use crate::{Result, shell};
use std::process::Command;

/// Largest input that is tried, in bytes; the corpora are far smaller.
const MAX_INPUT_BYTES: u64 = 1 << 16;

/// Runs each target for `--seconds N`, or with `--runs N` for so many executions, however long they take. `--only WORD`
/// takes the targets whose name holds the word. `--sanitizer none` makes several times as many executions a second;
/// without it the address sanitizer watches.
pub fn run(arguments: &[String]) -> Result<()> {
    let seconds: u64 = shell::option(arguments, "--seconds", 60)?;
    let bound = match shell::option(arguments, "--runs", 0)? {
        0 => format!("-max_total_time={seconds}"),
        runs => format!("-runs={runs}"),
    };
    let sanitizer: String = shell::option(arguments, "--sanitizer", "address".into())?;
    let only: String = shell::option(arguments, "--only", String::new())?;
    let targets = targets()?;
    let chosen: Vec<&String> = targets.iter().filter(|name| name.contains(&only)).collect();
    if chosen.is_empty() {
        return Err(format!("no fuzz target's name holds '{only}'"));
    }
    check_tools()?;
    let failed: Vec<&str> = chosen.into_iter().filter_map(|name| fuzz(name, &bound, &sanitizer).err()).collect();
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}

/// The names of all targets, sorted.
fn targets() -> Result<Vec<String>> {
    let folder = shell::root().join("fuzz/fuzz_targets");
    let entries = std::fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let stems = entries.flatten().filter_map(|entry| {
        let path = entry.path();
        path.extension().filter(|extension| *extension == "rs")?;
        Some(path.file_stem()?.to_string_lossy().into_owned())
    });
    let mut names: Vec<String> = stems.collect();
    names.sort();
    Ok(names)
}

fn check_tools() -> Result<()> {
    let mut version = nightly();
    version.args(["fuzz", "--version"]);
    shell::output(&mut version).map(drop).map_err(|problem| {
        format!("{problem}\nneeds: rustup toolchain install nightly; cargo install --locked cargo-fuzz")
    })
}

fn nightly() -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo"]).current_dir(shell::root());
    // The toolchain that built this task must not decide for the one that fuzzes.
    command.env_remove("CARGO").env_remove("RUSTC").env_remove("RUSTUP_TOOLCHAIN");
    command
}

/// One target; its name when it found something.
fn fuzz<'a>(name: &'a str, bound: &str, sanitizer: &str) -> std::result::Result<(), &'a str> {
    println!("{name}: {bound}");
    // What it finds goes to the first folder, which git does not see; the second one seeds it.
    let found = shell::target_dir().join("fuzz-corpus").join(name);
    if let Err(error) = std::fs::create_dir_all(&found) {
        eprintln!("{}: {error}", found.display());
        return Err(name);
    }
    let mut command = nightly();
    command.args(["fuzz", "run", "--sanitizer", sanitizer, name]).arg(&found);
    command.arg(format!("fuzz/corpus/{name}")).args(["--", bound]).arg(format!("-max_len={MAX_INPUT_BYTES}"));
    command.args(["-print_final_stats=1", "-verbosity=0"]);
    shell::run(&mut command).map_err(|problem| {
        eprintln!("{problem}");
        name
    })
}
