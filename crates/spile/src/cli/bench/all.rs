//! `spile bench all`: all experiments, one after the other. What is finished is not repeated.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{Args, CommandFactory, Parser};
use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result};
use utoipa::ToSchema;

use super::Experiment;
use crate::bench::about::{About, EXPERIMENTS};
use crate::bench::findings::found_here;
use crate::bench::save;
use crate::cli::{Exit, complain, print_json, say};

/// The file that says what is finished, beside the results; it is JSON, and no result.
const STATE: &str = "all.state";

/// All experiments, one after the other, with a summary
///
/// The results (JSON and plots) go into --out. A run that was interrupted goes on where it was: an experiment that is
/// finished there, by the same version and with the same parameters, is not repeated. The summary has what each article found beside what was
/// found here. One that fails does not keep the others from running.
#[derive(Debug, Args)]
pub struct AllArgs {
    /// Few points, short: three minutes instead of an hour
    #[arg(long)]
    quick: bool,
    /// Print the summary as one JSON object
    #[arg(long)]
    json: bool,
    /// Where the results go, and where those of an earlier run are
    #[arg(long, value_name = "DIR", default_value = "spile-experiments")]
    out: PathBuf,
    /// Repeat what is finished
    #[arg(long)]
    again: bool,
    /// Only this experiment (may be given several times)
    #[arg(long = "only", value_name = "NAME")]
    only: Vec<String>,
    /// Where experiments on the host's device put their files [default: the folder for temporary files]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
}

/// Options of experiments whose own usual ones are not what the set needs: those of a long run, and those of a quick one.
const OPTIONS: &[(&str, &[&str], &[&str])] =
    &[("aggregate", &["--sizes", "4k,64k,1M", "--seconds", "2"], &[]), ("density", &["--guests"], &["--guests"])];

/// Experiments that put files on the host's device where --folder says it.
const ON_DEVICE: [&str; 4] = ["depth", "layers", "geometry", "warmup"];

/// The experiment's command line, as clap parses it.
#[derive(Debug, Parser)]
#[command(name = "bench")]
struct Words {
    #[command(subcommand)]
    experiment: Experiment,
}

/// What has become of the set.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Summary {
    /// The experiments, in their order.
    experiments: Vec<Entry>,
}

/// What has become of an experiment.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
struct Entry {
    /// Its name.
    experiment: String,
    /// The options that it was run with.
    arguments: Vec<String>,
    /// The version of the program.
    spile_version: String,
    /// What has become of it.
    state: State,
    /// True when an earlier run has finished it.
    kept: bool,
    /// How long it took, in seconds.
    seconds: f64,
    /// What it shows.
    sentence: String,
    /// The article that it repeats; empty when no article did this before.
    article: String,
    /// What the article found.
    found_there: String,
    /// What was found here.
    found_here: String,
    /// Why it failed.
    error: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum State {
    /// Its results are in the folder.
    Finished,
    /// It failed.
    Failed,
}

/// Runs `spile bench all`.
///
/// # Errors
/// `InvalidInput` when there is no such experiment; when the folder cannot be written; when an experiment has failed.
pub fn run(args: &AllArgs) -> Result<Exit> {
    let chosen = chosen(&args.only)?;
    let before = Summary::read(&args.out);
    let mut summary = Summary::default();
    for (number, about) in chosen.iter().enumerate() {
        let arguments = arguments(about.name, args);
        let kept = before.finished(about.name, &arguments, &args.out).filter(|_| !args.again);
        let entry = match kept {
            Some(entry) => Entry { kept: true, ..entry.clone() },
            None => {
                complain(format_args!("{} of {}: {}", number + 1, chosen.len(), about.name));
                Entry::of_run(about, arguments, &args.out)
            }
        };
        summary.experiments.push(entry);
        // After each: whatever ends this process, the next one knows what is finished.
        summary.with_others(&before).write(&args.out)?;
    }
    summary.show(args)?;
    summary.verdict()
}

/// The experiments to be run, in the order of the table.
fn chosen(only: &[String]) -> Result<Vec<&'static About>> {
    let words = Words::command();
    let all: Vec<&About> = EXPERIMENTS.iter().filter(|about| words.find_subcommand(about.name).is_some()).collect();
    if let Some(unknown) = only.iter().find(|name| !all.iter().any(|about| about.name == **name)) {
        let names: Vec<&str> = all.iter().map(|about| about.name).collect();
        let what = format!("there is no experiment `{unknown}`; use {}", names.join(", "));
        return Err(Error::new(ErrorKind::InvalidInput, what));
    }
    let is_chosen = |about: &&About| only.is_empty() || only.iter().any(|name| name == about.name);
    Ok(all.into_iter().filter(is_chosen).collect())
}

/// The options of an experiment.
fn arguments(name: &str, args: &AllArgs) -> Vec<String> {
    let own = OPTIONS.iter().find(|(other, ..)| *other == name);
    let own = own.map_or(&[][..], |(_, long, quick)| if args.quick { quick } else { long });
    let mut words: Vec<String> = own.iter().map(|word| (*word).to_owned()).collect();
    if args.quick {
        words.push("--quick".to_owned());
    }
    if let Some(folder) = args.folder.as_ref().filter(|_| ON_DEVICE.contains(&name)) {
        words.extend(["--folder".to_owned(), folder.display().to_string()]);
    }
    words
}

fn result_file(out: &Path, name: &str) -> PathBuf {
    out.join(format!("{name}.json"))
}

impl Entry {
    /// Runs an experiment.
    fn of_run(about: &About, arguments: Vec<String>, out: &Path) -> Self {
        let begun = Instant::now();
        let result = run_one(about.name, &arguments, out);
        let json = std::fs::read_to_string(result_file(out, about.name)).unwrap_or_default();
        let is_finished = result.is_ok();
        let found_here = if is_finished { found_here(about.name, &json).unwrap_or_default() } else { String::new() };
        Self {
            experiment: about.name.to_owned(),
            arguments,
            spile_version: env!("CARGO_PKG_VERSION").to_owned(),
            state: if is_finished { State::Finished } else { State::Failed },
            kept: false,
            seconds: begun.elapsed().as_secs_f64(),
            sentence: about.sentence.to_owned(),
            article: about.article.to_owned(),
            found_there: about.found.to_owned(),
            found_here,
            error: result.err().map(|error| error.to_string()),
        }
    }

    fn to_text(&self) -> String {
        let head = match (self.state, self.kept) {
            (State::Failed, _) => "failed".to_owned(),
            (State::Finished, true) => "finished earlier".to_owned(),
            (State::Finished, false) => format!("{:.0} s", self.seconds),
        };
        let mut text = format!("{} ({head}): {}\n", self.experiment, self.sentence);
        let lines = [
            ("found there", self.found_there.as_str()),
            ("found here", self.found_here.as_str()),
            ("error", self.error.as_deref().unwrap_or_default()),
        ];
        for (name, line) in lines.iter().filter(|(_, line)| !line.is_empty()) {
            text += &format!("  {name}: {line}\n");
        }
        text
    }
}

/// Runs one experiment in this process, with nothing on stdout.
fn run_one(name: &str, arguments: &[String], out: &Path) -> Result<()> {
    let own = ["bench", name].into_iter().map(str::to_owned);
    let common = ["--silent".to_owned(), "--out".to_owned(), out.display().to_string()];
    let words = Words::try_parse_from(own.chain(arguments.iter().cloned()).chain(common));
    let words = words.map_err(|e| Error::new(ErrorKind::InvalidInput, e.to_string()))?;
    super::run_experiment(&words.experiment).map(drop)
}

impl Summary {
    /// That of an earlier run; empty when there was none.
    fn read(out: &Path) -> Self {
        let text = std::fs::read_to_string(out.join(STATE)).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// The entry of an experiment that this version has finished with the same options, and whose results are still there.
    fn finished(&self, name: &str, arguments: &[String], out: &Path) -> Option<&Entry> {
        self.experiments.iter().find(|entry| {
            entry.experiment == name
                && entry.arguments == arguments
                && entry.spile_version == env!("CARGO_PKG_VERSION")
                && entry.state == State::Finished
                && result_file(out, name).exists()
        })
    }

    /// This, and what `before` says of experiments that are not in this.
    fn with_others(&self, before: &Self) -> Self {
        let is_new = |entry: &&Entry| !self.experiments.iter().any(|own| own.experiment == entry.experiment);
        let others = before.experiments.iter().filter(is_new);
        Self { experiments: self.experiments.iter().chain(others).cloned().collect() }
    }

    /// Keeps it: the old one is there until the new one is whole.
    fn write(&self, out: &Path) -> Result<()> {
        let json = serde_json::to_string_pretty(self);
        let json = json.map_err(|e| Error::new(ErrorKind::InvalidInput, "cannot write JSON").caused_by(e))?;
        let new = save(out, "all.state.new", &json)?;
        std::fs::rename(&new, out.join(STATE)).map_err(|e| Error::io("rename", e).at_path(&new))
    }

    fn show(&self, args: &AllArgs) -> Result<()> {
        if args.json {
            return print_json(self);
        }
        self.experiments.iter().for_each(|entry| say(entry.to_text()));
        say(format_args!("the results are in {}", args.out.display()));
        Ok(())
    }

    fn verdict(&self) -> Result<Exit> {
        let failed = self.experiments.iter().filter(|entry| entry.state == State::Failed);
        let failed: Vec<&str> = failed.map(|entry| entry.experiment.as_str()).collect();
        match failed.is_empty() {
            true => Ok(Exit::Ok),
            false => Err(Error::new(ErrorKind::Io, format!("these experiments failed: {}", failed.join(", ")))
                .hint("run it again: what is finished is not repeated")),
        }
    }
}
