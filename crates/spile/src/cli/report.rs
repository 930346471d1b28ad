//! `spile report`: a page of what experiments have found, or of one running server.

use std::path::{Path, PathBuf};

use clap::Args;
use spile_bench::report::{self, Live};
use spile_core::{Error, ErrorKind, Result};
use spile_server::serving::api::discovery;

use super::output::write_report;
use super::{Exit, complain, say};

/// Make one HTML page of what experiments have found
///
/// The page has all figures of the results in DIR (`spile bench NAME --out DIR` writes them), each with its values behind it, the
/// machine, and what the article that an experiment repeats has found. It needs no network and no script, is smaller than 2 MB,
/// and follows the reader's light or dark setting. A file that is no result is named on the page and on stderr.
///
/// With --live the page shows one running server: what its disks move, how many requests wait at each layer, and how long they
/// take. This command serves it on 127.0.0.1 alone, prints its address, and asks the server when the page asks. The address
/// has a random token, without which nothing is answered: whoever knows the address sees what the control socket says. It
/// goes on until it is ended.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Folders with results, or files [default: the current folder]
    #[arg(value_name = "DIR")]
    places: Vec<PathBuf>,
    /// The page
    #[arg(short, long, value_name = "FILE.html", required_unless_present = "live")]
    output: Option<PathBuf>,
    /// A page of the server with this control socket, or with this name or disk
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["places", "output"])]
    live: Option<String>,
    /// The port of the page [default: any that is free]
    #[arg(long, value_name = "PORT", requires = "live", default_value_t = 0, hide_default_value = true)]
    port: u16,
}

/// Runs `spile report`.
///
/// # Errors
/// When there are no results, or the page cannot be written; with --live, when no server answers or the port is taken.
pub fn run(args: &ReportArgs) -> Result<Exit> {
    match (&args.live, &args.output) {
        (Some(server), _) => show_live(server, args.port),
        (None, Some(output)) => write(&args.places, output),
        (None, None) => Err(Error::new(ErrorKind::InvalidInput, "a page needs --output or --live")),
    }
}

fn write(places: &[PathBuf], output: &Path) -> Result<Exit> {
    let here = [PathBuf::from(".")];
    let report = report::make(if places.is_empty() { &here } else { places })?;
    write_report(output, "<!doctype html>", report.html.as_bytes())?;
    for file in &report.not_understood {
        complain(format_args!("{} is not understood: {}", file.path.display(), file.why));
    }
    say(format_args!("{}: {} results, {} figures", output.display(), report.results, report.figures));
    Ok(Exit::Ok)
}

fn show_live(server: &str, port: u16) -> Result<Exit> {
    let live = Live::new(&discovery::find_server(server)?, port)?;
    say(live.url());
    live.run()?;
    Ok(Exit::Ok)
}
