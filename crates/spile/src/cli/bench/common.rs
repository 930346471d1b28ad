//! What the commands of experiments share: options, the progress bar, and how results are shown and kept.

use std::path::PathBuf;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use spile_core::{Error, ErrorKind, Result};
use utoipa::ToSchema;

use crate::bench::about::about;
use crate::bench::world::{Storage, remove_folder};
use crate::bench::{Figures, Outcome, save};
use crate::cli::{Exit, print_json, say};
use crate::signals::EndSignals;
use crate::units::parse_size;

/// The width of what is told of an experiment below its tables.
const COLUMNS: usize = 100;

/// What all experiments have.
#[derive(Debug, Args)]
pub struct OutputArgs {
    /// Few points, short: seconds instead of minutes
    #[arg(long)]
    pub quick: bool,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
    /// Put the JSON, and plots (SVG) where there are some, into DIR
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Print nothing
    #[arg(long, hide = true)]
    silent: bool,
}

/// What the experiments on ways to a guest's memory have.
#[derive(Debug, Args)]
pub struct PathArgs {
    #[command(flatten)]
    pub output: OutputArgs,
    /// Only these sizes of requests, such as 4k,64k,1M
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', value_parser = parse_size)]
    sizes: Vec<u64>,
    /// What is behind the disks: null (nothing), mem (memory), or a folder for a file each
    #[arg(long, value_name = "null|mem|DIR")]
    store: Option<Storage>,
    /// The part of each disk that is used
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    span: Option<u64>,
    /// Only this path (may be given several times)
    #[arg(long = "path", value_name = "NAME")]
    paths: Vec<String>,
}

impl PathArgs {
    /// Puts the options that were given into an experiment's parameters.
    pub fn put_into(&self, sizes: &mut Vec<u64>, storage: &mut Storage, span_bytes: &mut u64) {
        if !self.sizes.is_empty() {
            sizes.clone_from(&self.sizes);
            sizes.sort_unstable();
            sizes.dedup();
        }
        if let Some(store) = &self.store {
            storage.clone_from(store);
        }
        *span_bytes = self.span.unwrap_or(*span_bytes);
    }

    /// The paths of `all` that --path names, in the order of `all`; `default` when there is no --path.
    ///
    /// # Errors
    /// `InvalidInput` when --path names another one.
    pub fn only<T>(&self, all: Vec<T>, default: Vec<T>, name: impl Fn(T) -> &'static str) -> Result<Vec<T>>
    where
        T: Copy,
    {
        if let Some(unknown) = self.paths.iter().find(|wanted| !all.iter().any(|one| name(*one) == *wanted)) {
            let names: Vec<&str> = all.iter().map(|one| name(*one)).collect();
            let message = format!("there is no path `{unknown}` here; use {}", names.join(", "));
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        if self.paths.is_empty() {
            return Ok(default);
        }
        Ok(all.into_iter().filter(|one| self.paths.iter().any(|wanted| wanted == name(*one))).collect())
    }
}

impl OutputArgs {
    /// Prints what an experiment found, and puts the files into the folder of --out, if it was given.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn show<P, R>(
        &self,
        outcome: &Outcome<P, R>,
        text: &str,
        figures: impl FnOnce(&Outcome<P, R>) -> Figures,
    ) -> Result<Exit>
    where
        P: Serialize + ToSchema,
        R: Serialize + ToSchema,
    {
        match about(&outcome.experiment) {
            _ if self.silent => {}
            _ if self.json => print_json(outcome)?,
            Some(about) => say(format_args!("{text}\n\n{}", about.to_text(COLUMNS))),
            None => say(text),
        }
        let Some(dir) = &self.out else { return Ok(Exit::Ok) };
        let json = serde_json::to_string_pretty(outcome);
        let json = json.map_err(|e| Error::new(ErrorKind::InvalidInput, "cannot write JSON").caused_by(e))?;
        let mut saved = vec![save(dir, &format!("{}.json", outcome.experiment), &json)?];
        for (name, figure) in figures(outcome) {
            saved.push(save(dir, &format!("{name}.svg"), &figure.to_svg())?);
        }
        if !self.json && !self.silent {
            saved.iter().for_each(|path| say(path.display()));
        }
        Ok(Exit::Ok)
    }
}

/// The figures of an experiment that has none.
pub fn no_figures<O>(_: &O) -> Figures {
    Figures::new()
}

/// Runs an experiment with a bar on stderr, hidden where that is no terminal. A signal ends it: its processes end with this
/// one.
///
/// # Errors
/// As `run`.
pub fn with_progress<T>(run: impl FnOnce(&mut dyn FnMut(&str, f64)) -> Result<T>) -> Result<T> {
    const STEPS: f64 = 1000.0;
    EndSignals::block()?.exit_after(remove_folder);
    let style = ProgressStyle::with_template("{wide_bar} {percent} % {msg}");
    let bar = ProgressBar::new(STEPS as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let outcome = run(&mut |what, share| {
        bar.set_message(what.to_owned());
        bar.set_position((share * STEPS) as u64);
    });
    bar.finish_and_clear();
    outcome
}
