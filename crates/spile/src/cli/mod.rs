//! The command line: one definition for parsing, help, completions and man pages.

mod amend;
mod backup;
mod bench;
mod cbtlog;
mod check;
mod checkpoint;
mod coalesce;
mod compare;
mod complete;
mod control;
mod convert;
mod copy;
mod create;
mod data_file;
mod demo;
mod docs;
mod ending;
mod events;
mod fill;
mod gc;
mod groups;
mod help;
mod info;
mod internal_snapshot;
mod jobs;
mod limit;
mod load;
mod map;
mod measure;
mod move_disk;
mod onto;
mod options;
mod output;
mod pace;
mod pause;
mod progress;
mod rebase;
mod receive;
mod report;
mod revert;
mod say;
mod schema;
mod serve;
mod served;
mod shape;
mod slow;
mod snapshot;
mod snapshots;
mod space;
mod stat;
mod stream;
mod top;
mod trace;
mod tree;
mod trouble;
mod tune;
mod waiting;
mod xen_backend;
mod xen_lab;
mod xen_place;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, FromArgMatches, Parser, Subcommand};
use spile_core::{Error, ErrorKind, Locator, Result};
use spile_engine::{Config, Engine, EngineKind};
use spile_image::containers::format_at;
use spile_image::{Format, OpenOptions};
use spile_life::names;
use spile_node::{OnError, Policy};
use spile_store::{CacheMode, OsFiles};

use self::ending::Exit;
use self::progress::{Progress, progress_bar};
use self::say::{print_json, print_text, say, say_lines, try_say};
use crate::grow::GrowOptions;
use crate::log::{self, complain, printable};
use crate::tuned::ShapeChoice;
use crate::units::{parse_duration, parse_size};
use crate::{disks, signals};

/// Serve virtual disks to guests, and create, inspect, check, convert and measure them
#[derive(Debug, Parser)]
#[command(name = "spile", version, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Create(create::CreateArgs),
    Info(info::InfoArgs),
    Map(map::MapArgs),
    Check(check::CheckArgs),
    Convert(convert::ConvertArgs),
    Compare(compare::CompareArgs),
    Measure(measure::MeasureArgs),
    Serve(Box<serve::ServeArgs>),
    #[command(visible_alias = "list")]
    Ls(control::LsArgs),
    #[command(visible_alias = "status")]
    Show(control::ShowArgs),
    Stat(stat::StatArgs),
    Top(top::TopArgs),
    Slow(slow::SlowArgs),
    Events(events::EventsArgs),
    Trace(trace::TraceArgs),
    Attach(control::AttachArgs),
    Detach(control::DetachArgs),
    Resize(control::ResizeArgs),
    #[command(visible_alias = "commit")]
    Coalesce(coalesce::CoalesceArgs),
    #[command(visible_alias = "stream")]
    Flatten(coalesce::FlattenArgs),
    #[command(visible_aliases = ["mirror", "migrate"])]
    Move(move_disk::MoveArgs),
    Receive(Box<receive::ReceiveArgs>),
    Jobs(jobs::JobsArgs),
    Job(jobs::JobArgs),
    Backup(Box<backup::BackupArgs>),
    Verify(backup::VerifyArgs),
    Restore(backup::RestoreArgs),
    Snapshot(snapshot::SnapshotArgs),
    Clone(snapshot::CloneArgs),
    Revert(revert::RevertArgs),
    Rebase(rebase::RebaseArgs),
    Amend(Box<amend::AmendArgs>),
    #[command(visible_alias = "rm")]
    Delete(revert::DeleteArgs),
    InternalSnapshot(internal_snapshot::InternalSnapshotArgs),
    Checkpoint(checkpoint::CheckpointArgs),
    Changed(checkpoint::ChangedArgs),
    Tree(tree::TreeArgs),
    Gc(gc::GcArgs),
    OnError(trouble::OnErrorArgs),
    Shape(shape::ShapeArgs),
    Limit(limit::LimitArgs),
    Pause(pause::PauseArgs),
    Resume(trouble::ResumeArgs),
    AcceptLoss(trouble::AcceptLossArgs),
    XenLab(xen_lab::XenLabArgs),
    XenBackend(Box<xen_backend::XenBackendArgs>),
    #[command(hide = true)]
    XenDisk(Box<xen_backend::XenDiskArgs>),
    Load(Box<load::LoadArgs>),
    Bench(Box<bench::BenchArgs>),
    #[command(hide = true)]
    BenchGuest(bench::BenchGuestArgs),
    #[command(hide = true)]
    BenchTied(bench::BenchTiedArgs),
    Report(report::ReportArgs),
    Tune(tune::TuneArgs),
    Demo(demo::DemoArgs),
    Schema(schema::SchemaArgs),
    Completions(docs::CompletionsArgs),
    #[command(hide = true)]
    CompleteNames(complete::CompleteNamesArgs),
    Man(docs::ManArgs),
}

/// Runs the program on the process's arguments.
pub fn run() -> ExitCode {
    let format = ending::ErrorFormat::of_arguments(std::env::args_os());
    let words = options::join_values(std::env::args_os());
    let cli = match help::command().try_get_matches_from(words).and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => return format.usage(error),
    };
    if std::env::var_os("SPILE_ACCOUNTING").is_some_and(|word| word == "off") {
        spile_core::metrics::stop_counting();
    }
    if let Err(error) = signals::outlive_requests() {
        format.complain(&error);
        return ending::failure(&error);
    }
    let result = match &cli.command {
        Command::Create(args) => create::run(args),
        Command::Info(args) => info::run(args),
        Command::Map(args) => map::run(args),
        Command::Check(args) => check::run(args),
        Command::Convert(args) => convert::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Measure(args) => measure::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Ls(args) => control::ls(args),
        Command::Show(args) => control::show(args),
        Command::Stat(args) => stat::run(args),
        Command::Top(args) => top::run(args),
        Command::Slow(args) => slow::run(args),
        Command::Events(args) => events::run(args),
        Command::Trace(args) => trace::run(args),
        Command::Attach(args) => control::attach(args),
        Command::Detach(args) => control::detach(args),
        Command::Resize(args) => control::resize(args),
        Command::Coalesce(args) => coalesce::coalesce(args),
        Command::Flatten(args) => coalesce::flatten(args),
        Command::Move(args) => move_disk::run(args),
        Command::Receive(args) => receive::run(args),
        Command::Jobs(args) => jobs::jobs(args),
        Command::Job(args) => jobs::job(args),
        Command::Backup(args) => backup::run(args),
        Command::Verify(args) => backup::verify(args),
        Command::Restore(args) => backup::restore(args),
        Command::Snapshot(args) => snapshot::run(args),
        Command::Clone(args) => snapshot::clone(args),
        Command::Revert(args) => revert::run(args),
        Command::Rebase(args) => rebase::run(args),
        Command::Amend(args) => amend::run(args),
        Command::Delete(args) => revert::delete(args),
        Command::InternalSnapshot(args) => internal_snapshot::run(args),
        Command::Checkpoint(args) => checkpoint::checkpoint(args),
        Command::Changed(args) => checkpoint::changed(args),
        Command::Tree(args) => tree::run(args),
        Command::Gc(args) => gc::run(args),
        Command::OnError(args) => trouble::on_error(args),
        Command::Shape(args) => shape::run(args),
        Command::Limit(args) => limit::run(args),
        Command::Pause(args) => pause::run(args),
        Command::Resume(args) => trouble::resume(args),
        Command::AcceptLoss(args) => trouble::accept_loss(args),
        Command::XenLab(args) => xen_lab::run(args),
        Command::XenBackend(args) => xen_backend::run(args),
        Command::XenDisk(args) => xen_backend::run_disk(args),
        Command::Load(args) => load::run(args),
        Command::Bench(args) => bench::run(args),
        Command::BenchGuest(args) => bench::run_guest(args),
        Command::BenchTied(args) => bench::run_tied(args),
        Command::Report(args) => report::run(args),
        Command::Tune(args) => tune::run(args),
        Command::Demo(args) => demo::run(args),
        Command::Schema(args) => schema::run(args),
        Command::Completions(args) => docs::completions(args),
        Command::CompleteNames(args) => complete::run(args),
        Command::Man(args) => docs::man(args),
    };
    match result {
        Ok(exit) => exit.into(),
        Err(error) => {
            let error = with_folder(with_way_out(served::explained(error), &cli.command));
            format.complain(&error);
            // As in cmp and qemu-img, 1 says that the disks were compared and differ.
            if matches!(cli.command, Command::Compare(_)) { 2.into() } else { ending::failure(&error) }
        }
    }
}

/// The error that there is no space, with what that means for the disk.
fn with_way_out(error: Error, command: &Command) -> Error {
    let state = match command {
        _ if error.kind() != ErrorKind::NoSpace || error.hint_text().is_some() => return error,
        Command::Snapshot(_)
        | Command::Clone(_)
        | Command::Revert(_)
        | Command::Delete(_)
        | Command::InternalSnapshot(_)
        | Command::Checkpoint(_) => "the disk is as it was",
        Command::Coalesce(_) | Command::Flatten(_) => "the disk holds what it held",
        _ => return error,
    };
    error.hint(format!("{state}; free some space and say it again: `spile tree` shows what takes it"))
}

/// The error that one of Spile's own files beside a disk may not be made or changed, with what the user can do about it.
fn with_folder(error: Error) -> Error {
    let is_refused = matches!(error.kind(), ErrorKind::Denied | ErrorKind::ReadOnly) && error.hint_text().is_none();
    let folder = error.path().filter(|path| is_refused && names::disk_of(path).is_some()).and_then(Path::parent);
    let Some(folder) = folder.map(|folder| folder.display().to_string()) else { return error };
    error.hint(format!(
        "Spile keeps a file of its own beside a disk while it changes it: the folder {folder} must be writable, for the disk's server where that does the work"
    ))
}

/// How an existing disk is opened.
#[derive(Debug, Args)]
struct OpenArgs {
    /// The format, instead of what the extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    #[command(flatten)]
    read: ReadArgs,
}

/// Which other files a disk that is only read may need.
#[derive(Clone, Debug, Args)]
struct ReadArgs {
    #[command(flatten)]
    parents: ParentArgs,
    /// Refuse a disk that has a parent: without this, an image's parent in its own folder is followed
    #[arg(long, conflicts_with = "allow_parents")]
    no_parents: bool,
}

/// Which other files an image may need, and how files are opened.
#[derive(Clone, Debug, Args)]
struct ParentArgs {
    /// Follow parents into this folder, too (may be given several times). Parents in the disk's own folder are
    /// followed without it, so keep no secrets beside an image from elsewhere
    #[arg(long, value_name = "DIR")]
    allow_parents: Vec<PathBuf>,
    /// The format of a parent whose child does not name it, as old qcow2 images do not; it is never guessed
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    backing_format: Option<Format>,
    /// Let a qcow2 image keep its data in another file, which it names itself and which lies where parents may
    #[arg(long)]
    allow_data_file: bool,
    /// Take no locks, where the file system has none. Make sure yourself that nobody else opens the disk: two writers
    /// destroy it
    #[arg(long)]
    no_lock: bool,
}

/// What a server does about trouble below its disks.
#[derive(Debug, Args)]
struct PolicyArgs {
    /// What to do with a request that fails because of trouble that may pass (no space, an I/O error, a time-out, a lost path):
    /// report it to the guest, or let it wait and try it again until it succeeds. `spile ls` shows which disk waits for what;
    /// `spile on-error` changes this for a disk that is served. A failed sync is always reported
    #[arg(long, value_name = "report|pause", value_parser = parse_on_error, default_value = "report")]
    on_error: OnError,
    /// The longest time that a request waits before it is reported after all [default: for ever]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pause_at_most: Option<Duration>,
}

impl PolicyArgs {
    fn policy(&self) -> Policy {
        Policy { on_error: self.on_error, pause_at_most: self.pause_at_most }
    }

    /// The same options for another process of this program.
    fn arguments(&self) -> Vec<OsString> {
        // No field can be forgotten here.
        let Self { on_error, pause_at_most } = self;
        let mut words = vec!["--on-error".into(), on_error.to_string().into()];
        let time = pause_at_most.map(|time| ["--pause-at-most".into(), format!("{}us", time.as_micros()).into()]);
        words.extend(time.into_iter().flatten());
        words
    }
}

/// How a server has devices made longer under thin disks.
#[derive(Debug, Args)]
struct GrowArgs {
    /// Run this program when a disk's thin image (qcow2, dynamic VHD) has little room left on its block device: an absolute path. Its
    /// arguments are the device's path, the device's length in bytes, and the length wanted in bytes; it sees PATH, LC_ALL=C and SPILE_DISK,
    /// the disk's name. Guests' writes that find no room wait for it, and see no error when the device is longer then. A disk that is no
    /// thin image on a block device is refused by `spile serve`, and served without it by `spile xen-backend`
    #[arg(long, value_name = "COMMAND")]
    grow: Option<PathBuf>,
    /// With less room than this, a longer device is wanted: so long that twice as much is free [default: 1G]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    grow_ahead: Option<u64>,
    /// The longest time that the program may take. After that it is ended, and writes that find no room fail, or wait on, as --on-error says
    /// [default: 60s]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    grow_timeout: Option<Duration>,
}

impl GrowArgs {
    fn options(&self) -> GrowOptions {
        let Self { grow, grow_ahead, grow_timeout } = self;
        GrowOptions { command: grow.clone(), ahead_bytes: *grow_ahead, timeout: *grow_timeout, leaves_others: false }
    }

    /// The same options for another process of this program.
    fn arguments(&self) -> Vec<OsString> {
        // No field can be forgotten here.
        let Self { grow, grow_ahead, grow_timeout } = self;
        let command = grow.as_ref().map(|command| ["--grow".into(), command.into()]);
        let ahead = grow_ahead.map(|bytes| ["--grow-ahead".into(), bytes.to_string().into()]);
        let time = grow_timeout.map(|time| ["--grow-timeout".into(), format!("{}us", time.as_micros()).into()]);
        [command, ahead, time].into_iter().flatten().flatten().collect()
    }
}

fn parse_shape(text: &str) -> Result<ShapeChoice, String> {
    text.parse().map_err(|error: Error| error.to_string())
}

fn parse_on_error(text: &str) -> Result<OnError, String> {
    text.parse().map_err(|error: Error| error.to_string())
}

impl OpenArgs {
    fn read_only(&self) -> OpenOptions {
        self.read.read_only(self.format)
    }
}

impl ReadArgs {
    fn read_only(&self, format: Option<Format>) -> OpenOptions {
        OpenOptions { no_parents: self.no_parents, ..self.parents.read_only(format) }
    }
}

impl ParentArgs {
    /// The same options for another process of this program.
    fn arguments(&self) -> Vec<OsString> {
        // No field can be forgotten here.
        let Self { allow_parents, backing_format, allow_data_file, no_lock } = self;
        let mut words = Vec::new();
        let mut pair = |option: &str, value: OsString| words.extend([option.into(), value]);
        allow_parents.iter().for_each(|folder| pair("--allow-parents", folder.clone().into()));
        backing_format.iter().for_each(|format| pair("--backing-format", format.to_string().into()));
        words.extend(allow_data_file.then(|| "--allow-data-file".into()));
        words.extend(no_lock.then(|| "--no-lock".into()));
        words
    }

    fn read_only(&self, format: Option<Format>) -> OpenOptions {
        OpenOptions {
            format,
            read_only: true,
            allow_parents: self.allow_parents.clone(),
            parent_format: self.backing_format,
            allow_data_file: self.allow_data_file,
            no_lock: self.no_lock,
            ..OpenOptions::default()
        }
    }
}

fn parse_format(text: &str) -> Result<Format, String> {
    text.parse().map_err(|error: Error| error.to_string())
}

/// A kind that any format has. Whether the chosen format has it is checked once the format is known.
fn parse_subformat(text: &str) -> Result<String, String> {
    let kinds: Vec<_> = Format::ALL.iter().flat_map(|format| format.about().subformats).copied().collect();
    match kinds.contains(&text) {
        true => Ok(text.to_owned()),
        false => Err(format!("no format has the kind `{text}`; there are {}", kinds.join(", "))),
    }
}

fn parse_engine(text: &str) -> Result<EngineKind, String> {
    text.parse().map_err(|error: Error| error.to_string())
}

fn parse_cache(text: &str) -> Result<CacheMode, String> {
    match text {
        "direct" => Ok(CacheMode::Direct),
        "page" => Ok(CacheMode::Page),
        _ => Err(format!("there is no cache mode `{text}`; use direct or page")),
    }
}

/// Where a disk is that must be there.
fn existing(disk: &Path) -> Result<Locator> {
    let at = disks::locate(disk)?;
    disks::find(&at).map(|()| at)
}

/// The format of what is at `at`. A command with several disks has options of its own names for their formats, and an error says
/// the right one, and what the file is, as far as that shows.
fn format_of(at: &Locator, given: Option<Format>, option: &str) -> Result<Format> {
    if let Ok(format) = Format::at(at, given) {
        return Ok(format);
    }
    let asked = at.clone();
    let found = on_engine(move || async move { format_at(&OsFiles::new(CacheMode::Page), &asked, given).await });
    found.map_err(|error| match error.hint_text().map(|hint| hint.replace("--format", option)) {
        Some(hint) => error.hint(hint),
        None => error,
    })
}

/// Runs one piece of work on an engine with one worker. What the libraries warn of goes to stderr.
fn on_engine<T, Fut>(work: impl FnOnce() -> Fut + Send + 'static) -> Result<T>
where
    T: Send + 'static,
    Fut: Future<Output = Result<T>> + 'static,
{
    log::to_stderr();
    let engine = Engine::start(Config { workers: 1, ..Config::default() })?;
    // Some of this work is a long future, which a worker's stack does not hold several times.
    let result = engine.run_on(0, move || Box::pin(work()));
    engine.shutdown();
    result
}

/// Writes a path as text. Bytes that are not UTF-8 are replaced, because JSON has no other strings.
fn text_of<S: serde::Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hidden_file_that_may_not_be_made_leads_to_the_folder() {
        let denied = |path: &str| Error::new(ErrorKind::Denied, "create: Permission denied").at_path(Path::new(path));
        for file in [".d.vhd.spile-new", ".d.vhd.spile-changes", ".d.vhd.spile-job"] {
            let error = with_folder(denied(&format!("/vm/{file}")));
            assert!(error.hint_text().is_some_and(|hint| hint.contains("the folder /vm must be writable")), "{error}");
        }
        assert!(with_folder(denied("/vm/d.vhd")).hint_text().is_none());
        assert_eq!(with_folder(denied("/vm/.d.vhd.spile-new").hint("x")).hint_text(), Some("x"));
    }
}
