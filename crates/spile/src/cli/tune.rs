//! `spile tune`: which sizes of requests suit a device or file.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use spile_core::Result;
use spile_server::tuned::Saved;

use super::Exit;
use super::bench::common::OutputArgs;
use crate::bench::Outcome;
use crate::bench::tune::{self, Asked, Parameters, Row};
use crate::log::complain;
use crate::units::{parse_duration, parse_size};

/// Find out which sizes of requests suit a device or file, and recommend a shape
///
/// For each number of bytes in flight from 512 B to 4 MiB, these bytes are one request, two, four and so on, down to requests of 512 B (or what
/// O_DIRECT takes). Where several smaller requests are faster than one large one, splitting pays, and a shape is recommended. It is kept
/// for the device, in /var/lib/spile/tune or $SPILE_STATE_DIR/tune: a server obeys it only where it is told `shape=tuned` (or --shape
/// tuned). A disk's other files on the same device share what was found. For a device that tells no identity nothing is kept.
///
/// TARGET is only read, unless --write is given. Where TARGET is a folder, a file is made in it and removed again. It should be idle meanwhile.
/// A file in which more than a hundredth was never written is refused.
#[derive(Debug, Args)]
pub struct TuneArgs {
    /// The device, the file, or a folder for a file
    #[arg(value_name = "TARGET")]
    target: PathBuf,
    /// Write instead of reading. TARGET must be a folder, unless --may-destroy is given
    #[arg(long)]
    write: bool,
    /// What is on TARGET may be destroyed
    #[arg(long, requires = "write")]
    may_destroy: bool,
    /// How long all of it takes (60s, quick: 6s); up to twice as long on a slow device
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    time: Option<Duration>,
    /// How often each pair of sizes is measured (3, quick: 1)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// The length of the file that is made in a folder. It is at most a quarter of the free space
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "1G")]
    size: u64,
    /// Only show what was found, and keep nothing for servers
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    output: OutputArgs,
}

/// Runs `spile tune`.
///
/// # Errors
/// As [`tune::run`].
pub fn run(args: &TuneArgs) -> Result<Exit> {
    let (seconds, rounds) = if args.output.quick { (6, 1) } else { (60, 3) };
    let parameters = Parameters {
        target: args.target.clone(),
        writes: args.write,
        may_destroy: args.may_destroy,
        time: args.time.unwrap_or(Duration::from_secs(seconds)),
        rounds: args.rounds.unwrap_or(rounds),
        file_bytes: args.size,
        is_quick: args.output.quick,
    };
    let outcome = args.output.measure("tune", |progress| tune::run(&parameters, progress))?;
    let exit = args.output.show(&outcome, &tune::text(&outcome), tune::figures)?;
    if !args.dry_run {
        keep(&outcome);
    }
    Ok(exit)
}

/// Keeps what was found for servers, and says what becomes of it.
fn keep(outcome: &Outcome<Asked, Row>) {
    match tune::tuned(outcome).and_then(|tuned| tuned.save()) {
        Ok(Saved::Kept(path)) => {
            complain(format_args!("kept in {}; servers obey it with shape=tuned", path.display()));
        }
        Ok(Saved::Stays(path, kept)) => complain(format_args!(
            "note: it is not kept for servers: {} has {} of {} rounds of {}s, which tell more; remove it to replace it",
            path.display(),
            kept.shape,
            kept.rounds,
            kept.operation
        )),
        Err(error) => complain(format_args!("note: it is not kept for servers: {error}")),
    }
}
