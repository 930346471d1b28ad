//! `spile report`: a page of what experiments have found.

use std::path::PathBuf;

use clap::Args;
use spile_bench::report;
use spile_core::{Error, Result, ResultExt};

use super::{Exit, complain, say};

/// Make one HTML page of what experiments have found
///
/// The page has all figures of the results in DIR (`spile bench NAME --out DIR` writes them), each with its values behind it, the
/// machine, and what the article that an experiment repeats has found. It needs no network and no script, is smaller than 2 MB,
/// and follows the reader's light or dark setting. A file that is no result is named on the page and on stderr.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Folders with results, or files [default: the current folder]
    #[arg(value_name = "DIR")]
    places: Vec<PathBuf>,
    /// The page
    #[arg(short, long, value_name = "FILE.html")]
    output: PathBuf,
}

/// Runs `spile report`.
///
/// # Errors
/// When there are no results, or the page cannot be written.
pub fn run(args: &ReportArgs) -> Result<Exit> {
    let places = if args.places.is_empty() { vec![PathBuf::from(".")] } else { args.places.clone() };
    let report = report::make(&places)?;
    std::fs::write(&args.output, &report.html)
        .map_err(|e| Error::io("cannot write the page", e))
        .at_path(&args.output)?;
    for file in &report.not_understood {
        complain(format_args!("{} is not understood: {}", file.path.display(), file.why));
    }
    say(format_args!("{}: {} results, {} figures", args.output.display(), report.results, report.figures));
    Ok(Exit::Ok)
}
