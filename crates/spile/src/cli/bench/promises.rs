//! `spile bench promises`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use spile_core::Result;

use super::common::OutputArgs;
use crate::bench::promises::{self, Line};
use crate::cli::Exit;
use crate::units::{parse_duration, parse_size};

/// What is promised of the life of a disk, line by line, beside what is seen
///
/// Each line is measured by itself, with servers, commands and another host (`spile receive`) as processes of their own: a clone and its first
/// answer, a snapshot that is deleted, four merges at a time, a merge that is killed, a mirror, a hand-over, a link that is cut, the way back of a
/// disk, a backup whose target hangs, changes of limits and jobs, a snapshot of a disk of which nothing is in memory, and copies of a sparse
/// disk. The table says of each promise whether it was kept. All of it takes some minutes. Promises of snapshots, merges, limits
/// and checkpoints in general: `spile bench snapshot`, `merge`, `limit` and `checkpoint`.
#[derive(Debug, Args)]
pub struct PromisesArgs {
    #[command(flatten)]
    output: OutputArgs,
    /// Only this line (may be given several times)
    #[arg(long = "only", value_name = "LINE", value_parser = line_names())]
    only: Vec<Line>,
    /// Rounds (3, quick: 1)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// The size of most disks, in multiples of 16 MiB (128M, quick: 32M)
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// How long the link is cut (3s, quick: 500ms)
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    cut: Option<Duration>,
    /// Where the images lie, up to four times the size, and 512 MiB at least [default: the folder for temporary files]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Where those of the other host lie, such as a folder on a device of its own, up to twice the size [default: with the others]
    #[arg(long, value_name = "DIR")]
    there: Option<PathBuf>,
}

/// What --only takes.
fn line_names() -> impl TypedValueParser<Value = Line> {
    let of_name = |name: String| Line::ALL.into_iter().find(|line| line.name() == name);
    PossibleValuesParser::new(Line::ALL.map(Line::name)).try_map(move |name| of_name(name).ok_or("no such line"))
}

/// Runs `spile bench promises`.
///
/// # Errors
/// As the experiment.
pub fn run(args: &PromisesArgs) -> Result<Exit> {
    let mut parameters = promises::Parameters::new(args.output.quick);
    parameters.lines.retain(|line| args.only.is_empty() || args.only.contains(line));
    parameters.rounds = args.rounds.unwrap_or(parameters.rounds);
    parameters.disk_bytes = args.size.unwrap_or(parameters.disk_bytes);
    parameters.cut_s = args.cut.map_or(parameters.cut_s, |cut| cut.as_secs_f64());
    parameters.folder = args.folder.clone().unwrap_or(parameters.folder);
    parameters.there = args.there.clone();
    let outcome = args.output.measure("promises", |progress| promises::run(&parameters, progress))?;
    args.output.show(&outcome, &promises::text(&outcome), promises::figures)
}
