//! `spile top`: all disks of all servers of this host, again and again.
//!
//! - [`app`]: what the program shows now. [`model`]: the servers and disks as they were told, which of them are shown and in which order. [`history`]: what a disk did before.
//! - [`collect`]: asks the servers. [`screen`]: the terminal, and how it becomes what it was. [`keys`]: what keys do.
//! - [`draw`]: the list of disks. [`panels`]: one disk's layers, its heat map, the help. [`text`]: numbers and widths.
//! - [`batch`]: the same without a terminal, in plain columns, as iostat or xsiostat, or as JSON. [`program`]: the loop of the program.

mod app;
mod batch;
mod collect;
mod draw;
mod history;
mod keys;
mod model;
mod panels;
mod program;
mod screen;
#[cfg(test)]
mod tests;
mod text;

use clap::{Args, ValueEnum};
use spile_core::{Error, ErrorKind, Result};
use spile_server::serving::api::discovery;

pub use batch::TopInterval;

use super::Exit;
use super::pace::Pace;
use crate::log;

/// Watch all disks that are served on this host
///
/// It asks every server on its control socket: requests and bytes per second, latencies, and average queue sizes at the front and at
/// the store. In the terminal, `?` shows the keys.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Print columns instead of a picture: plain ones, or those of iostat -xm or of xsiostat
    #[arg(long, value_name = "FORM", value_enum, num_args = 0..=1, default_missing_value = "plain")]
    batch: Option<Form>,
    #[command(flatten)]
    pace: Pace,
    /// Print JSON: an object in a line for each interval
    #[arg(long, conflicts_with = "batch")]
    json: bool,
}

/// The form of `--batch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// Spile's own columns
    Plain,
    /// The columns of `iostat -xm`
    Iostat,
    /// The columns of `xsiostat`
    Xsiostat,
}

/// Runs `spile top`.
///
/// # Errors
/// When there is no folder of control sockets, or no terminal and no --batch.
pub fn run(args: &TopArgs) -> Result<Exit> {
    let folder = discovery::folder()?;
    match (args.json, args.batch) {
        (true, _) => batch::run(&folder, &args.pace, &mut batch::json),
        (false, Some(Form::Plain)) => batch::run(&folder, &args.pace, &mut batch::plain),
        (false, Some(Form::Iostat)) => batch::run(&folder, &args.pace, &mut batch::iostat),
        (false, Some(Form::Xsiostat)) => batch::run(&folder, &args.pace, &mut batch::xsiostat()),
        (false, None) if !screen::is_terminal() => {
            Err(Error::new(ErrorKind::InvalidInput, "this is no terminal to draw on")
                .hint("use --batch or --json where the output is not looked at"))
        }
        (false, None) => {
            log::to_stderr();
            program::run(&folder, &args.pace)
        }
    }
}
