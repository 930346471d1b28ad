//! `spile coalesce`, `spile flatten`: jobs on a disk's images, by its server or, when it has none, by the command itself.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};

use clap::Args;
use nix::sys::signal::Signal;
use serde_json::json;
use spile_core::{Disk as _, Error, ErrorKind, Locator, Result};
use spile_image::{Format, OpenOptions};
use spile_life::jobs::{Note, Plan, State, Wishes};
use spile_life::merge::is_called;
use spile_life::motion::Move;
use spile_node::Node;
use spile_server::checkpoints::Checkpoints;
use spile_server::jobs::{self, Access};
use spile_server::serving::api::checkpoints::CheckpointList;
use spile_server::serving::api::client::{CHANGE_PATIENCE, LOOK_PATIENCE, ask, call, typed};
use spile_server::serving::api::types::{DiskDetail, Job, NewJob};
use spile_server::serving::jobs::{DiskJob, What, plan};
use spile_server::serving::offline::OwnJobs;
use spile_store::CacheMode;

use super::control::{Which, path_of};
use super::waiting::{Ended, LOOK_EVERY, WaitArgs, Waiting, Words, was_cancelled};
use super::{Exit, existing, on_engine, parse_format, print_json, printable, progress_bar, say};
use crate::disks;
use crate::log::complain;
use crate::signals::EndSignals;
use crate::units::{format_size, parse_size};

/// Merge a layer of a disk into its parent, and remove it
///
/// Guests go on meanwhile, and the work always comes to its end. Without --layer the disk's own image is merged: its parent takes its place and its
/// name, and the snapshot that the parent was is gone. The work is a job of the disk's server, or of this command when no server has the disk. The command
/// waits for its end; Ctrl-C stops it and leaves a valid chain, and the same command goes on. `spile jobs` shows how far it is, `spile job` pauses, slows
/// and cancels it.
#[derive(Debug, Args)]
pub struct CoalesceArgs {
    #[command(flatten)]
    on: JobArgs,
    /// The layer to merge: a snapshot of the disk by its name, or its path or file name [default: the disk's own image]
    #[arg(long, value_name = "NAME")]
    layer: Option<String>,
}

/// Copy into a disk what it lacks, so that it needs no parent any more
///
/// Guests go on meanwhile. The parents stay as they are: other disks may need them. The work is a job, as that of `spile coalesce`.
#[derive(Debug, Args)]
pub struct FlattenArgs {
    #[command(flatten)]
    on: JobArgs,
}

/// The disk of a job, and how it is done.
#[derive(Debug, Args)]
pub(super) struct JobArgs {
    #[command(flatten)]
    which: Which,
    /// Move no more than this in a second [default: as fast as guests leave room for]
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    rate: Option<u64>,
    #[command(flatten)]
    waiting: WaitArgs,
    /// The format of a disk that no server has, instead of what the extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Follow parents of a disk that no server has into this folder, too (may be given several times)
    #[arg(long, value_name = "DIR")]
    allow_parents: Vec<PathBuf>,
    /// Let images of a disk that no server has keep their data in other files, which they name themselves and which lie where parents may
    #[arg(long)]
    allow_data_file: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn parse_rate(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        0 => Err("a job that moves nothing does not end; `spile job ID pause` has it wait".to_owned()),
        rate => Ok(rate),
    }
}

/// Runs `spile coalesce`.
///
/// # Errors
/// When there is no such disk or layer, when the merge is refused, and when it fails.
pub fn coalesce(args: &CoalesceArgs) -> Result<Exit> {
    let layer = args.layer.as_deref().map(whole_name);
    run(&args.on, NewJob { kind: "coalesce".to_owned(), layer, ..NewJob::default() })
}

/// A layer's name as its server finds it, whose working folder is another one: a path is made whole. The file may be gone, when a merge was
/// broken off just before its end.
fn whole_name(name: &str) -> String {
    let whole = || std::fs::canonicalize(name).or_else(|_| std::path::absolute(name)).ok();
    match name.contains('/').then(whole).flatten() {
        Some(path) => path.to_string_lossy().into_owned(),
        None => name.to_owned(),
    }
}

/// Runs `spile flatten`.
///
/// # Errors
/// When there is no such disk, and when the job fails.
pub fn flatten(args: &FlattenArgs) -> Result<Exit> {
    run(&args.on, NewJob { kind: "flatten".to_owned(), ..NewJob::default() })
}

/// Has the disk's server do the job `new`, or does it itself when the disk has none.
///
/// # Errors
/// When there is no such disk, when the job is refused, and when it fails.
pub(super) fn run(args: &JobArgs, new: NewJob) -> Result<Exit> {
    let new = NewJob { limit_bytes_per_s: args.rate, ..new };
    let (socket, disk) = match args.which.find() {
        Err(error) if error.kind() == ErrorKind::NotFound && args.which.may_be_file() => {
            return by_itself(args, new);
        }
        found => found?,
    };
    if goes_to_export(&new) {
        let path = format!("{}/checkpoints", path_of(&disk));
        let there: CheckpointList = ask(&socket, "GET", &path, LOOK_PATIENCE)?;
        tell_checkpoints(there.checkpoints.iter().map(|one| one.name.as_str()));
    }
    if leaves_parents(&new) {
        let detail: DiskDetail = ask(&socket, "GET", &path_of(&disk), LOOK_PATIENCE)?;
        let layers: Vec<_> = detail.layers.iter().map(|layer| Path::new(&layer.path)).collect();
        tell_left_behind(&layers);
    }
    let is_endless = new.mirror_only;
    let body = json!(NewJob { disk, ..new });
    let begin = || typed::<Job>(call(&socket, "POST", "/v1/jobs", Some(&body), CHANGE_PATIENCE)?);
    if !args.waiting.waits(is_endless) {
        return show(args, &begin()?);
    }
    let waiting = Waiting::begin()?;
    match waiting.until_over(&socket, vec![begin()?], &WORDS)? {
        Ended::Done(jobs) => jobs.iter().try_for_each(|job| show(args, job).map(drop)).map(|()| Exit::Ok),
        Ended::Stopped(signal) => Ok(Exit::Ended(signal)),
    }
}

/// How a merge, a flatten or a move by a server is told of.
const WORDS: Words = Words {
    doing: "moving",
    again: "if the server has ended, the next one that opens the disk goes on with the job",
    left: what_is_left,
};

/// What is left of a job of a server that was stopped.
fn what_is_left(job: &Job) -> String {
    match (job.kind.as_str(), &job.to) {
        ("move", Some(to)) if job.is_copy => format!("was stopped; the copy {to} is not whole, and of no use"),
        ("move", Some(to)) => {
            format!("was stopped; the disk is where it was, and its half-made copy {to} is of no use")
        }
        _ => "was stopped; the disk holds what it held, and the same command goes on".to_owned(),
    }
}

/// True for a move to an export of an NBD server.
fn goes_to_export(new: &NewJob) -> bool {
    new.to.as_deref().is_some_and(|to| matches!(to.parse(), Ok(Locator::Nbd(_)))) && !new.mirror_only
}

/// True for a move that leaves what is below the disk where it is.
fn leaves_parents(new: &NewJob) -> bool {
    new.kind == "move" && new.chain.is_none() && !new.mirror_only
}

/// Says before a move which images below the disk stay behind. `layers` are the paths of its layers, the leaf first.
fn tell_left_behind(layers: &[&Path]) {
    let Some((disk, parents)) = layers.split_first().filter(|(_, parents)| !parents.is_empty()) else { return };
    let names: Vec<_> = parents.iter().map(|path| printable(&path.display().to_string())).collect();
    complain(format_args!(
        "{}: the snapshots and other images below the disk stay behind: {}. What they show is copied into the new image, and the disk cannot go back \
         to them at its new place. `--chain keep` takes them along, to a VHD or qcow2 image here or by `spile receive` on another host",
        printable(&disk.display().to_string()),
        names.join(", ")
    ));
}

/// Says that these checkpoints do not go to an export.
fn tell_checkpoints<'a>(names: impl Iterator<Item = &'a str>) {
    let names: Vec<_> = names.map(printable).collect();
    if !names.is_empty() {
        let names = names.join(", ");
        complain(format_args!(
            "the checkpoints {names} go along to an export only where `spile receive` takes the disk in"
        ));
    }
}

fn show(args: &JobArgs, job: &Job) -> Result<Exit> {
    if args.json {
        return print_json(job).map(|()| Exit::Ok);
    }
    let (kind, disk, moved) = (&job.kind, &job.disk, format_size(job.done_bytes));
    match (job.state.as_str(), &job.to) {
        ("done", Some(to)) => super::move_disk::say_done(job, to),
        ("done", None) => say(format_args!("{disk}: {kind} is done, {moved} moved")),
        (state, _) => {
            say(format_args!("{disk}: {kind} is {state} as job {}; `spile jobs` shows how far it is", job.id))
        }
    }
    Ok(Exit::Ok)
}

/// Does the job on a disk that no server has. The images are locked meanwhile.
fn by_itself(args: &JobArgs, new: NewJob) -> Result<Exit> {
    if new.mirror_only {
        let what = "nobody serves the disk, so there is nothing that a copy of it could be kept in step with";
        let error = Error::new(ErrorKind::Unsupported, what).at_path(args.which.disk_path());
        return Err(error.hint("serve the disk first (spile serve); or copy it as it is: spile convert"));
    }
    args.waiting.refuse_background()?;
    let signals = EndSignals::block()?;
    let at = existing(args.which.disk_path())?;
    let options = OpenOptions {
        format: args.format,
        allow_parents: args.allow_parents.clone(),
        allow_data_file: args.allow_data_file,
        ..OpenOptions::default()
    };
    let (kind, rate) = (new.kind.clone(), args.rate);
    let (own, (disk, path)) = (Arc::new(OwnJobs::open(&kind)), (disks::stem(&at), whole_label(&at)?));
    let (sender, begun) = std::sync::mpsc::channel::<Arc<DiskJob>>();
    let watch = std::thread::spawn(move || {
        if let Ok(job) = begun.recv() {
            watch(&job, signals, &begun);
        }
    });
    let (shown, name) = (own.clone(), (disk.clone(), path.clone()));
    let done = on_engine(move || async move {
        let graph = disks::open_keeping(CacheMode::Direct, &at, &options).await?;
        let checkpoints = Checkpoints::none(Access::default());
        // In boxes: together the futures would need much of the stack.
        Box::pin(checkpoints.open(&graph)).await?;
        if goes_to_export(&new) {
            tell_checkpoints(checkpoints.names().iter().map(String::as_str));
        }
        if leaves_parents(&new) {
            tell_left_behind(&graph.handles().iter().map(|layer| layer.path()).collect::<Vec<_>>());
        }
        let plan = match jobs::left(&graph).await? {
            Some(Note { plan: left, .. }) if is_meant(&left, graph.handles()[0].path(), &new) => left,
            left => go_on_with(left, plan(&graph, &new)?),
        };
        let wishes = Wishes { limit_bytes_per_s: rate, ..Wishes::default() };
        let (job, node) = (DiskJob::new(What::Images(plan.clone()), wishes), Node::new(graph));
        shown.add(&job, &name.0, &name.1);
        // Only the thread that shows how far the job is could be gone.
        let _ = sender.send(job.clone());
        let done = Box::pin(jobs::run(&node, &checkpoints, Access::default(), job.job(), &plan)).await;
        drop(sender);
        let graph = node.graph().await;
        let closed = node.close().await;
        if closed.is_ok() {
            Box::pin(checkpoints.close(&graph)).await;
        }
        let was_told = matches!(job.job().state(), State::Stopped | State::Cancelled);
        let shown = job.show(&name.0, &label(&at), "");
        match done {
            Err(_) if was_told => closed.map(|()| shown),
            done => done.and(closed).map(|()| shown),
        }
    });
    let _ = watch.join();
    own.leave(&path);
    let job = done?;
    if job.state == State::Stopped.name() {
        complain(format_args!("{}: the {kind} was stopped; the same command goes on with it", job.path));
        return Ok(Exit::Ended(Signal::SIGINT));
    }
    if job.state == State::Cancelled.name() {
        return Err(was_cancelled(&job.kind, &job.state).at_path(Path::new(&job.path)));
    }
    show(args, &job)
}

fn label(at: &Locator) -> String {
    disks::label(at)
}

/// As [`label`], with a whole path: what is told of it is of use in every folder.
pub(super) fn whole_label(at: &Locator) -> Result<String> {
    match at {
        Locator::Path(path) => {
            let whole = std::path::absolute(path).map_err(|e| Error::io("cannot be found", e).at_path(path))?;
            Ok(whole.display().to_string())
        }
        other => Ok(label(other)),
    }
}

/// The job `left` when it is the move that is `asked` for now: it goes on with what it has copied.
fn go_on_with(left: Option<Note>, asked: Plan) -> Plan {
    match (left.map(|note| note.plan), asked) {
        (Some(Plan::Move(left)), Plan::Move(asked)) if left == (Move { id: left.id, ..asked.clone() }) => {
            Plan::Move(left)
        }
        (_, asked) => asked,
    }
}

/// True when `left`, which was begun before with the disk at `disk`, is what is asked for now.
fn is_meant(left: &Plan, disk: &Path, new: &NewJob) -> bool {
    let is_layer = |merged: &Path| match &new.layer {
        Some(name) => is_called(disk, merged, name),
        None => merged.file_name() == disk.file_name(),
    };
    new.kind == left.kind()
        && match left {
            Plan::Coalesce(merged) => is_layer(&merged.path),
            Plan::Flatten => true,
            // What is asked for now may be another place ([`go_on_with`]).
            Plan::Move(_) => false,
        }
}

/// Shows how far `job` is until it is over: then the other end of `ending` goes. A signal has it stop at its next piece.
fn watch(job: &Arc<DiskJob>, signals: EndSignals, ending: &Receiver<Arc<DiskJob>>) {
    let stopped = job.clone();
    signals.on_first_whole(move |_| stopped.job().stop());
    let bar = progress_bar(0, "moving");
    while matches!(ending.recv_timeout(LOOK_EVERY), Err(RecvTimeoutError::Timeout)) {
        let report = job.job().report();
        bar.set_length(report.total_bytes);
        bar.set_position(report.done_bytes);
    }
    bar.finish_and_clear();
}
