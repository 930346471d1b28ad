//! What the commands of experiments share: options, the progress bar, and how results are shown and kept.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use spile_core::{Error, ErrorKind, Result};
use spile_store::own::read_named_text;
use utoipa::ToSchema;

use crate::bench::about::about;
use crate::bench::folder::remove_folders;
use crate::bench::transfer::Way;
use crate::bench::world::Storage;
use crate::bench::{Figures, Outcome, save};
use crate::cli::{Exit, print_json, say, say_lines};
use crate::signals::EndSignals;
use crate::units::parse_size;

/// No result of an experiment is longer.
pub(super) const MOST_RESULT_BYTES: u64 = 64 << 20;

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
    /// Print nothing, and replace what is there: for `bench all`, which prints and looks itself
    #[arg(long, hide = true)]
    in_set: bool,
}

/// What the experiments have that move blocks on the host's device.
#[derive(Debug, Args)]
pub struct DeviceArgs {
    /// How often each transfer is made (2, quick: 1)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Only this way (may be given several times)
    #[arg(long = "way", value_enum)]
    ways: Vec<WayName>,
    /// Where files are made [default: the folder for temporary files]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// The time in seconds after which nothing is begun: for `bench all`
    #[arg(long, hide = true)]
    within: Option<u64>,
}

/// A way, as --way takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum WayName {
    Bare,
    Nbd,
    VhostUser,
    Xen,
}

impl From<WayName> for Way {
    fn from(name: WayName) -> Self {
        match name {
            WayName::Bare => Self::Bare,
            WayName::Nbd => Self::Nbd,
            WayName::VhostUser => Self::VhostUser,
            WayName::Xen => Self::Xen,
        }
    }
}

/// The values that were given, or the usual ones.
pub fn given_or<T: Clone, N: Copy + Into<T>>(given: &[N], usual: Vec<T>) -> Vec<T> {
    if given.is_empty() { usual } else { given.iter().map(|name| (*name).into()).collect() }
}

impl DeviceArgs {
    /// Puts the options that were given into an experiment's parameters.
    pub fn put_into(&self, rounds: &mut u32, ways: &mut Vec<Way>, folder: &mut PathBuf) {
        *rounds = self.rounds.unwrap_or(*rounds);
        *ways = given_or(&self.ways, std::mem::take(ways));
        if let Some(given) = &self.folder {
            folder.clone_from(given);
        }
    }

    /// The time after which nothing is begun, if there is one.
    pub fn within(&self) -> Option<Duration> {
        self.within.map(Duration::from_secs)
    }
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
    /// Runs an experiment as [`with_progress`] does it, when its results can be kept then.
    ///
    /// # Errors
    /// When the folder of --out cannot be written, or has a result that must not be replaced; as `run`.
    pub fn measure<T>(&self, name: &str, run: impl FnOnce(&mut dyn FnMut(&str, f64)) -> Result<T>) -> Result<T> {
        if let Some(dir) = &self.out {
            check_writable(dir)?;
            if !self.in_set {
                self.check_replaceable(&result_file(dir, name), name)?;
            }
        }
        with_progress(run)
    }

    /// Refuses to replace what is no result of this experiment, and the result of a long run by that of a quick one.
    fn check_replaceable(&self, path: &Path, name: &str) -> Result<()> {
        let text = match read_named_text(path, MOST_RESULT_BYTES) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            text => text.unwrap_or_default(),
        };
        let old: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let what = match () {
            _ if old["experiment"] != name => format!("it is there, and is no result of `{name}`"),
            _ if path.with_file_name("all.state").exists() => {
                "it is of a set that `spile bench all` has made".to_owned()
            }
            // A result that does not say whether it is quick counts as that of a long run.
            _ if self.quick && old["parameters"]["quick"] != true => {
                "it is the result of a long run, and this one is quick".to_owned()
            }
            _ => return Ok(()),
        };
        Err(Error::new(ErrorKind::Exists, what).at_path(path).hint("use another --out, or move the file away"))
    }

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
            _ if self.in_set => {}
            _ if self.json => print_json(outcome)?,
            Some(about) => say_lines(format_args!("{text}\n\n{}", about.to_text(COLUMNS))),
            None => say_lines(text),
        }
        let Some(dir) = &self.out else { return Ok(Exit::Ok) };
        let json = serde_json::to_string_pretty(outcome);
        let json = json.map_err(|e| Error::new(ErrorKind::InvalidInput, "cannot write JSON").caused_by(e))?;
        let mut saved = vec![save(dir, &format!("{}.json", outcome.experiment), &json)?];
        for (name, figure) in figures(outcome) {
            saved.push(save(dir, &format!("{name}.svg"), &figure.to_svg())?);
        }
        if !self.json && !self.in_set {
            saved.iter().for_each(|path| say(path.display()));
        }
        Ok(Exit::Ok)
    }
}

/// The file of an experiment's result.
pub fn result_file(out: &Path, name: &str) -> PathBuf {
    out.join(format!("{name}.json"))
}

/// Makes the folder of --out, and a file in it for a moment: nobody is to measure for an hour for nothing.
///
/// # Errors
/// With the path that cannot be made.
pub fn check_writable(dir: &Path) -> Result<()> {
    let probe = save(dir, &format!("spile-probe-{}", std::process::id()), "")?;
    std::fs::remove_file(&probe).map_err(|e| Error::io("remove", e).at_path(&probe))
}

/// Runs an experiment with a bar on stderr, hidden where that is no terminal. A signal ends it: its processes end with this
/// one.
///
/// # Errors
/// As `run`.
pub fn with_progress<T>(run: impl FnOnce(&mut dyn FnMut(&str, f64)) -> Result<T>) -> Result<T> {
    const STEPS: f64 = 1000.0;
    EndSignals::block()?.exit_after(remove_folders);
    let style = ProgressStyle::with_template("{wide_bar} {percent} % {msg}");
    let bar = ProgressBar::new(STEPS as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let outcome = run(&mut |what, share| {
        bar.set_message(what.to_owned());
        bar.set_position((share * STEPS) as u64);
    });
    bar.finish_and_clear();
    outcome
}
