//! `spile completions` and `spile man`. Both are made from the definition of the command line.

use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use spile_core::{Error, Result, ResultExt};

use super::help::{self, Ending};
use super::{Exit, complete, say_lines};

/// Print shell completions on stdout
///
/// Those of bash, zsh and fish also offer the names of disks, snapshots, checkpoints and jobs that there are when they are asked.
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
    clap_complete::generate(args.shell, &mut help::command(), "spile", &mut script);
    let names = complete::names_in(args.shell);
    say_lines(format!("{}{names}", String::from_utf8_lossy(&script).trim_end()));
    Ok(Exit::Ok)
}

/// Runs `spile man`.
///
/// # Errors
/// When the folder cannot be written to.
pub fn man(args: &ManArgs) -> Result<Exit> {
    let mut command = help::command().disable_help_subcommand(true);
    command.build();
    std::fs::create_dir_all(&args.dir)
        .and_then(|()| write_pages(&command, "", &args.dir))
        .map_err(|e| Error::io("cannot write the man pages", e))
        .at_path(&args.dir)?;
    Ok(Exit::Ok)
}

/// The pages of the command `words` and of those below it.
fn write_pages(command: &Command, words: &str, dir: &Path) -> io::Result<()> {
    let shown = command.get_subcommands().filter(|inner| !inner.is_hide_set());
    for inner in shown {
        write_pages(inner, format!("{words} {}", inner.get_name()).trim(), dir)?;
    }
    let page = Man::new(command.clone());
    std::fs::write(dir.join(page.get_filename()), render(command, &page, words)?)
}

fn render(command: &Command, page: &Man, words: &str) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    page.render_title(&mut text)?;
    page.render_name_section(&mut text)?;
    page.render_synopsis_section(&mut text)?;
    page.render_description_section(&mut text)?;
    page.render_options_section(&mut text)?;
    if command.has_subcommands() {
        page.render_subcommands_section(&mut text)?;
    }
    help::ending(words).map_or(Ok(()), |ending| ending_sections(ending).to_writer(&mut text))?;
    Ok(text)
}

/// Exit codes, examples and notes, in sections of the usual names.
fn ending_sections(ending: &Ending) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["EXIT STATUS"]);
    for (code, meaning) in ending.codes() {
        roff.control("TP", []).text([bold(code)]).text([roman(meaning)]);
    }
    roff.control("SH", ["EXAMPLES"]);
    for (line, what) in ending.examples {
        roff.control("TP", []).text([bold(*line)]).text([roman(*what)]);
    }
    if !ending.notes.is_empty() {
        roff.control("SH", ["NOTES"]);
    }
    for note in ending.notes {
        roff.control("PP", []).control("nf", []);
        for line in note.lines() {
            roff.text([roman(line)]);
        }
        roff.control("fi", []);
    }
    roff
}
