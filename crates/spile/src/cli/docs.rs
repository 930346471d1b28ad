//! `spile completions` and `spile man`. Both are made from the definition of the command line.

use std::path::PathBuf;

use clap::{Args, CommandFactory};
use clap_complete::Shell;
use spile_core::{Error, Result, ResultExt};

use super::{Cli, Exit, say};

/// Print shell completions on stdout
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Write man pages, one for each command
#[derive(Debug, Args)]
pub struct ManArgs {
    /// The folder for the pages; it is made if it is not there
    dir: PathBuf,
}

/// Runs `spile completions`.
///
/// # Errors
/// None.
pub fn completions(args: &CompletionsArgs) -> Result<Exit> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "spile", &mut script);
    say(String::from_utf8_lossy(&script).trim_end());
    Ok(Exit::Ok)
}

/// Runs `spile man`.
///
/// # Errors
/// When the folder cannot be written to.
pub fn man(args: &ManArgs) -> Result<Exit> {
    std::fs::create_dir_all(&args.dir)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), &args.dir))
        .map_err(|e| Error::io("cannot write the man pages", e))
        .at_path(&args.dir)?;
    Ok(Exit::Ok)
}
