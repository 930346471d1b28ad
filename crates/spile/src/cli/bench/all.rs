//! `spile bench all`: all experiments, one after the other. What is finished is not repeated.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, Parser};
use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result};
use spile_store::own::read_named_text;
use utoipa::ToSchema;

use super::Experiment;
use super::common::{MOST_RESULT_BYTES, check_writable, result_file};
use crate::bench::about::{About, about};
use crate::bench::findings::found_here;
use crate::bench::save;
use crate::cli::{Exit, complain, print_json, say, say_lines};
use crate::units::parse_duration;

/// The file that says what is finished, beside the results; it is JSON, and no result.
const STATE: &str = "all.state";

/// All experiments, one after the other, with a summary
///
/// The results (JSON and plots) go into --out. A run that was interrupted goes on where it was: an experiment that is
/// finished there, by the same version and with the same options, is not repeated. A result of another version or of other options is not
/// replaced, unless --again is given. All of it ends within an hour (--within), also on a slow disk: an experiment for which the time no longer
/// suffices is left out, and the next run makes it. The summary has what each article found beside what was found here. One that
/// fails does not keep the others from running.
#[derive(Debug, Args)]
pub struct AllArgs {
    /// Few points, short: five minutes instead of an hour
    #[arg(long)]
    quick: bool,
    /// Print the summary as one JSON object
    #[arg(long)]
    json: bool,
    /// Where the results go, and where those of an earlier run are
    #[arg(long, value_name = "DIR", default_value = "spile-experiments")]
    out: PathBuf,
    /// Repeat what is finished, and replace what is there
    #[arg(long)]
    again: bool,
    /// Only this experiment (may be given several times)
    #[arg(long = "only", value_name = "NAME")]
    only: Vec<String>,
    /// Where experiments on the host's device put their files [default: the folder for temporary files]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// The time within which all of it ends (1h, quick: 5m)
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    within: Option<Duration>,
}

/// How the set runs an experiment.
#[derive(Debug)]
struct Member {
    name: &'static str,
    /// Its options in a long run and in a quick one, where its own usual ones are not what the set needs.
    options: [&'static [&'static str]; 2],
    /// How long it takes at most in a long run and in a quick one, in seconds. That of one on the device holds for a disk of 100 MB/s.
    seconds: [u64; 2],
    /// Where it measures.
    on: On,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum On {
    /// In memory and on models: the time does not depend on the host's device.
    Memory,
    /// In files below --folder.
    Folder,
    /// There, with so many bytes that the time depends on the device: --within ends it.
    Device,
}

/// The options of an experiment that needs none.
const USUAL: [&[&str]; 2] = [&[], &[]];

/// The set, in its order.
const SET: &[Member] = &[
    Member { name: "depth", options: USUAL, seconds: [220, 12], on: On::Folder },
    Member { name: "shape", options: USUAL, seconds: [150, 12], on: On::Memory },
    Member { name: "layers", options: USUAL, seconds: [940, 33], on: On::Device },
    Member { name: "geometry", options: USUAL, seconds: [180, 10], on: On::Device },
    Member { name: "warmup", options: USUAL, seconds: [330, 12], on: On::Device },
    Member { name: "density", options: [&["--guests"], &["--guests"]], seconds: [420, 16], on: On::Memory },
    Member { name: "paths", options: USUAL, seconds: [60, 16], on: On::Memory },
    Member {
        name: "aggregate",
        options: [&["--sizes", "4k,64k,1M", "--seconds", "2"], &[]],
        seconds: [300, 16],
        on: On::Memory,
    },
    Member { name: "exchange", options: USUAL, seconds: [240, 16], on: On::Memory },
    Member { name: "snapshot", options: [&["--rounds", "4"], &[]], seconds: [180, 24], on: On::Memory },
    Member { name: "merge", options: [&["--rounds", "2"], &[]], seconds: [150, 24], on: On::Folder },
    Member { name: "crowd", options: USUAL, seconds: [120, 12], on: On::Memory },
    Member { name: "hung", options: [&["--rounds", "5"], &[]], seconds: [110, 19], on: On::Memory },
    Member { name: "limit", options: [&["--rounds", "3"], &[]], seconds: [40, 10], on: On::Memory },
    Member { name: "checkpoint", options: [&["--rounds", "10"], &[]], seconds: [40, 6], on: On::Memory },
    Member { name: "promises", options: [&["--rounds", "1"], &[]], seconds: [120, 60], on: On::Folder },
];

/// The time within which the set ends, in seconds: a long run, and a quick one.
const WITHIN_SECONDS: [u64; 2] = [3600, 300];

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
    /// How long this run of the set took, in seconds.
    #[serde(default)]
    seconds: f64,
    /// Within which time it was to end, in seconds.
    #[serde(default)]
    within_s: f64,
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
    /// Why it failed or was left out.
    error: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum State {
    /// Its results are in the folder.
    Finished,
    /// It failed.
    Failed,
    /// It has begun, and something has ended it, or it runs.
    Begun,
    /// The time did not suffice for it.
    LeftOut,
}

/// Runs `spile bench all`.
///
/// # Errors
/// `InvalidInput` when there is no such experiment; `Exists` when a result would be replaced that is not of such a run; when the folder
/// cannot be written; when an experiment has failed or was left out.
pub fn run(args: &AllArgs) -> Result<Exit> {
    let chosen = chosen(&args.only)?;
    let before = Summary::read(&args.out);
    if !args.again {
        chosen.iter().try_for_each(|member| before.check_replaceable(member, args))?;
    }
    check_writable(&args.out)?;
    let within = args.within.unwrap_or(Duration::from_secs(WITHIN_SECONDS[usize::from(args.quick)]));
    let begun = Instant::now();
    let mut summary = Summary { within_s: within.as_secs_f64(), ..Summary::default() };
    for (number, member) in chosen.iter().enumerate() {
        let entry = Entry::new(member, args);
        let kept = before.finished(&entry, &args.out).filter(|_| !args.again);
        let entry = match (kept, time_for(&chosen[number..], args.quick, within.saturating_sub(begun.elapsed()))) {
            (Some(entry), _) => Entry { kept: true, ..entry.clone() },
            (None, None) => entry.left_out(within),
            (None, Some(time)) => {
                complain(format_args!("{} of {}: {}", number + 1, chosen.len(), member.name));
                // Before it begins: a result that another run has written is not taken for that of this one.
                summary.and(&entry).with_others(&before).write(&args.out)?;
                entry.run(member, time, &args.out)
            }
        };
        summary.experiments.push(entry);
        summary.seconds = begun.elapsed().as_secs_f64();
        // After each: whatever ends this process, the next one knows what is finished.
        summary.with_others(&before).write(&args.out)?;
    }
    summary.show(args)?;
    summary.verdict()
}

/// How long the first of these experiments may take such that there is time for the others, too; none when what is left does not suffice
/// for it.
fn time_for(members: &[&Member], is_quick: bool, left: Duration) -> Option<Duration> {
    let needs = |member: &&Member| Duration::from_secs(member.seconds[usize::from(is_quick)]);
    let (first, others) = members.split_first()?;
    let of_others: Duration = others.iter().map(needs).sum();
    let least = needs(first);
    (left >= least).then(|| left.saturating_sub(of_others).max(least))
}

/// The experiments to be run, in the order of the table.
fn chosen(only: &[String]) -> Result<Vec<&'static Member>> {
    if let Some(unknown) = only.iter().find(|name| !SET.iter().any(|member| member.name == **name)) {
        let names: Vec<&str> = SET.iter().map(|member| member.name).collect();
        let what = format!("there is no experiment `{unknown}`; use {}", names.join(", "));
        return Err(Error::new(ErrorKind::InvalidInput, what));
    }
    Ok(SET.iter().filter(|member| only.is_empty() || only.iter().any(|name| name == member.name)).collect())
}

impl Member {
    /// The options with which it runs.
    fn arguments(&self, args: &AllArgs) -> Vec<String> {
        let own = self.options[usize::from(args.quick)];
        let mut words: Vec<String> = own.iter().map(|word| (*word).to_owned()).collect();
        if args.quick {
            words.push("--quick".to_owned());
        }
        if let Some(folder) = args.folder.as_ref().filter(|_| self.on != On::Memory) {
            words.extend(["--folder".to_owned(), folder.display().to_string()]);
        }
        words
    }
}

impl Entry {
    /// That of an experiment which begins now.
    fn new(member: &Member, args: &AllArgs) -> Self {
        let About { sentence, article, found, .. } = about(member.name).expect("every experiment has a text");
        Self {
            experiment: member.name.to_owned(),
            arguments: member.arguments(args),
            spile_version: env!("CARGO_PKG_VERSION").to_owned(),
            state: State::Begun,
            kept: false,
            seconds: 0.0,
            sentence: (*sentence).to_owned(),
            article: (*article).to_owned(),
            found_there: (*found).to_owned(),
            found_here: String::new(),
            error: None,
        }
    }

    fn left_out(self, within: Duration) -> Self {
        let why = format!("the {} s of the set do not suffice for it", within.as_secs());
        Self { state: State::LeftOut, error: Some(why), ..self }
    }

    /// Runs the experiment for at most `time`, as far as that depends on the device.
    fn run(self, member: &Member, time: Duration, out: &Path) -> Self {
        let begun = Instant::now();
        let result = run_one(member, &self.arguments, time, out);
        let seconds = begun.elapsed().as_secs_f64();
        match result {
            Ok(()) => {
                let json = read_named_text(&result_file(out, member.name), MOST_RESULT_BYTES).unwrap_or_default();
                let found_here = found_here(member.name, &json).unwrap_or_default();
                Self { state: State::Finished, seconds, found_here, ..self }
            }
            Err(error) => Self { state: State::Failed, seconds, error: Some(error.to_string()), ..self },
        }
    }

    /// True for one of the same experiment, version and options.
    fn is_like(&self, other: &Self) -> bool {
        let of = |entry: &Self| (entry.experiment.clone(), entry.arguments.clone(), entry.spile_version.clone());
        of(self) == of(other)
    }

    fn to_text(&self) -> String {
        let head = match (self.state, self.kept) {
            (State::Failed, _) => "failed".to_owned(),
            (State::LeftOut, _) => "left out".to_owned(),
            (State::Begun, _) => "not finished".to_owned(),
            (State::Finished, true) => "finished earlier".to_owned(),
            (State::Finished, false) => format!("{:.0} s", self.seconds),
        };
        let mut text = format!("{} ({head}): {}\n", self.experiment, self.sentence);
        let lines = [
            ("found there", self.found_there.as_str()),
            ("found here", self.found_here.as_str()),
            ("why", self.error.as_deref().unwrap_or_default()),
        ];
        for (name, line) in lines.iter().filter(|(_, line)| !line.is_empty()) {
            text += &format!("  {name}: {line}\n");
        }
        text
    }
}

/// Runs one experiment in this process, with nothing on stdout.
fn run_one(member: &Member, arguments: &[String], time: Duration, out: &Path) -> Result<()> {
    let mut words: Vec<String> = ["bench", member.name].map(str::to_owned).into();
    words.extend(arguments.iter().cloned());
    words.extend(["--in-set".to_owned(), "--out".to_owned(), out.display().to_string()]);
    if member.on == On::Device {
        words.extend(["--within".to_owned(), time.as_secs().to_string()]);
    }
    let words = Words::try_parse_from(words);
    let words = words.map_err(|e| Error::new(ErrorKind::InvalidInput, e.to_string()))?;
    super::run_experiment(&words.experiment).map(drop)
}

impl Summary {
    /// That of an earlier run; empty when there was none.
    fn read(out: &Path) -> Self {
        let text = read_named_text(&out.join(STATE), MOST_RESULT_BYTES).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// Refuses to replace a result that is not of a run like this one.
    fn check_replaceable(&self, member: &Member, args: &AllArgs) -> Result<()> {
        let path = result_file(&args.out, member.name);
        let is_like = |entry: &Entry| entry.is_like(&Entry::new(member, args));
        if !path.exists() || self.experiments.iter().any(is_like) {
            return Ok(());
        }
        let what = match self.experiments.iter().find(|entry| entry.experiment == member.name) {
            Some(Entry { arguments, spile_version, .. }) => {
                format!("it is the result of `{}` by version {spile_version}, which would be lost", arguments.join(" "))
            }
            None => "it is the result of another command, which would be lost".to_owned(),
        };
        let error = Error::new(ErrorKind::Exists, what).at_path(&path);
        Err(error.hint("use another --out, or --again to replace it"))
    }

    /// The entry of an experiment that has finished like `entry`, and whose result is still there.
    fn finished(&self, entry: &Entry, out: &Path) -> Option<&Entry> {
        let mut entries = self.experiments.iter();
        let is_finished = |old: &&Entry| old.state == State::Finished && old.is_like(entry);
        entries.find(is_finished).filter(|_| result_file(out, &entry.experiment).exists())
    }

    /// This, and one more entry.
    fn and(&self, entry: &Entry) -> Self {
        let mut more = self.clone();
        more.experiments.push(entry.clone());
        more
    }

    /// This, and what `before` says of experiments that are not in this.
    fn with_others(&self, before: &Self) -> Self {
        let is_new = |entry: &&Entry| !self.experiments.iter().any(|own| own.experiment == entry.experiment);
        let others = before.experiments.iter().filter(is_new);
        Self { experiments: self.experiments.iter().chain(others).cloned().collect(), ..*self }
    }

    /// Keeps it.
    fn write(&self, out: &Path) -> Result<()> {
        let json = serde_json::to_string_pretty(self);
        let json = json.map_err(|e| Error::new(ErrorKind::InvalidInput, "cannot write JSON").caused_by(e))?;
        save(out, STATE, &json).map(drop)
    }

    fn show(&self, args: &AllArgs) -> Result<()> {
        if args.json {
            return print_json(self);
        }
        self.experiments.iter().for_each(|entry| say_lines(entry.to_text()));
        let earlier: f64 = self.experiments.iter().filter(|entry| entry.kept).map(|entry| entry.seconds).sum();
        let earlier = if earlier > 0.0 { format!(", and {earlier:.0} s earlier") } else { String::new() };
        say(format_args!("the results are in {}; they took {:.0} s{earlier}", args.out.display(), self.seconds));
        Ok(())
    }

    fn verdict(&self) -> Result<Exit> {
        let in_state = |state: State| {
            let entries = self.experiments.iter().filter(|entry| entry.state == state);
            entries.map(|entry| entry.experiment.as_str()).collect::<Vec<_>>().join(", ")
        };
        let (failed, left_out) = (in_state(State::Failed), in_state(State::LeftOut));
        let error = match () {
            _ if !failed.is_empty() => Error::new(ErrorKind::Io, format!("these experiments failed: {failed}")),
            _ if !left_out.is_empty() => Error::new(
                ErrorKind::TimedOut,
                format!("these experiments were left out, as the time was over: {left_out}"),
            ),
            _ => return Ok(Exit::Ok),
        };
        Err(error.hint("run it again: what is finished is not repeated"))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_set_has_every_experiment_once() {
        let words = Words::command();
        let mut commands: Vec<&str> =
            words.get_subcommands().map(clap::Command::get_name).filter(|name| *name != "all").collect();
        let mut members: Vec<&str> = SET.iter().map(|member| member.name).collect();
        commands.sort_unstable();
        members.sort_unstable();
        assert_eq!(commands, members);
        assert!(SET.iter().all(|member| about(member.name).is_some()));
    }

    #[test]
    fn the_set_has_the_time_that_its_experiments_need() {
        for (number, within) in WITHIN_SECONDS.into_iter().enumerate() {
            assert!(SET.iter().map(|member| member.seconds[number]).sum::<u64>() <= within);
        }
    }

    #[test]
    fn an_experiment_leaves_the_others_their_time() {
        let members: Vec<&Member> = SET.iter().collect();
        let seconds = |left| time_for(&members[2..], false, Duration::from_secs(left)).map(|time| time.as_secs());
        let others: u64 = SET[3..].iter().map(|member| member.seconds[0]).sum();
        assert_eq!(seconds(others + 2000), Some(2000), "what is left over is for layers");
        assert_eq!(seconds(SET[2].seconds[0] + 1), Some(SET[2].seconds[0]));
        assert_eq!(seconds(SET[2].seconds[0] - 1), None);
    }
}
