//! `spile jobs`, `spile job`: the jobs of all servers of this host, and of commands that work on disks that no server has.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use spile_core::{Disk as _, Error, ErrorKind, Result};
use spile_image::{Format, OpenOptions};
use spile_life::jobs::State as JobState;
use spile_node::Node;
use spile_server::checkpoints::Checkpoints;
use spile_server::jobs::{self, Access};
use spile_server::serving::api::client::{CHANGE_PATIENCE, LOOK_PATIENCE, ask, call, typed};
use spile_server::serving::api::discovery;
use spile_server::serving::api::types::{Failure, Job, JobList, Motion};
use spile_server::serving::jobs::{DiskJob, What};
use spile_store::CacheMode;

use super::coalesce::parse_rate;
use super::control::fitting_table;
use super::revert::is_same_file;
use super::{Exit, existing, on_engine, parse_format, print_json, say, say_lines};
use crate::disks;
use crate::log::{self, complain, printable};
use crate::units::{format_age, format_rate, format_size};

/// List the jobs of this host: merges, flattens, moves and backups, how far they are, and those of servers that have ended
///
/// A command that works on a disk that no server has is listed while it is at work.
#[derive(Debug, Args)]
pub struct JobsArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Pause a job, have it go on or finish, cancel it, or change its rate
///
/// A job that is cancelled leaves done what it has done; the disk is valid at every moment. `cancel` waits until the job has ended. It also gives up
/// a job that was broken off and whose disk nobody serves now: name the disk. A half-made copy of it is removed then.
///
/// `hand-over` is for a guest that moves to another host together with its disk. It waits until the copy is whole and flushed. It fails, and
/// changes nothing, when the copy is not in step or the guest still runs (a Xen guest: still asks for something). When it succeeds, guests do not use the disk here any more: their
/// requests wait until `spile resume`, for the case that the guest's move fails after that.
#[derive(Debug, Args)]
pub struct JobArgs {
    /// The job, as `spile jobs` names it; or its disk, by name or path
    #[arg(value_name = "ID|DISK")]
    id: String,
    /// What it is to do: wait, go on, finish a copy that stays in step (spile move --mirror-only), hand such a disk over to the host of the copy,
    /// where its guest goes on, end and leave done what is done, or keep a rate
    order: JobOrder,
    /// With `rate`: no more than SIZE is moved in a second; `none`: as fast as guests leave room for
    #[arg(value_name = "SIZE|none", value_parser = parse_limit, required_if_eq("order", "rate"))]
    rate: Option<u64>,
    /// The format of a disk that no server has, instead of what the extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Follow parents of a disk that no server has into this folder, too (may be given several times)
    #[arg(long, value_name = "DIR")]
    allow_parents: Vec<PathBuf>,
    /// Let images of a disk that no server has keep their data in other files, which they name themselves and which lie where parents may
    #[arg(long)]
    allow_data_file: bool,
    /// Print the job as JSON
    #[arg(long)]
    json: bool,
}

/// How long is waited for a job that was cancelled to end.
const CANCEL_PATIENCE: Duration = Duration::from_secs(5);
/// How often is looked whether it has.
const CANCEL_LOOK_EVERY: Duration = Duration::from_millis(10);

/// What a job is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum JobOrder {
    Pause,
    Resume,
    Finish,
    HandOver,
    Cancel,
    Rate,
}

/// A rate; 0 for none.
fn parse_limit(text: &str) -> Result<u64, String> {
    if text == "none" { Ok(0) } else { parse_rate(text) }
}

/// Runs `spile jobs`.
///
/// # Errors
/// When the folder of control sockets cannot be read.
pub fn jobs(args: &JobsArgs) -> Result<Exit> {
    log::to_stderr();
    let jobs: Vec<Job> = discovery::jobs()?.into_iter().flat_map(|(_, jobs)| jobs).collect();
    if args.json {
        return print_json(&JobList { jobs }).map(|()| Exit::Ok);
    }
    let mut table = fitting_table();
    table.set_header(["JOB", "KIND", "DISK", "STATE", "DONE", "OF", "RATE", "LEFT"]);
    for job in &jobs {
        let left = job.eta_s.filter(|_| job.state == "running").map_or(String::new(), format_age);
        let row = [
            job.id.clone(),
            job.kind.clone(),
            job.disk.clone(),
            job.state.clone(),
            format_size(job.done_bytes),
            format_size(job.total_bytes),
            format_rate(job.bytes_per_s as f64),
            left,
        ];
        table.add_row(row.map(|text| printable(&text)));
    }
    say_lines(table);
    let moving = jobs.iter().filter(|job| job.is_under_way());
    moving.filter_map(lag).for_each(say);
    for (job, error) in jobs.iter().filter_map(|job| Some((job, job.error.clone()?))) {
        say(format_args!("{}: {}", job.id, Failure { error }.into_error()));
    }
    Ok(Exit::Ok)
}

/// A line for a disk that is moved: how far its copy is behind.
fn lag(job: &Job) -> Option<String> {
    let Motion { phase, lag_bytes, lag_ms, held_back, failing_for_s, trouble, .. } = job.motion.as_ref()?;
    let to = job.to.as_deref().map(printable).unwrap_or_default();
    let failing = failing_for_s.map(|time| format!("; the new place has failed for {time} s")).unwrap_or_default();
    let held = if *held_back { "; guests' writes are held back" } else { "" };
    let trouble = trouble.as_ref().map(|trouble| format!("; {trouble}")).unwrap_or_default();
    let lag = lag_ms.map(|time| format!(", lacks {}, {time} ms behind", format_size(*lag_bytes))).unwrap_or_default();
    Some(format!("{}: to {to}: {phase}{lag}{held}{failing}{trouble}", job.id))
}

/// Runs `spile job`.
///
/// # Errors
/// `NotFound`; the server's.
pub fn job(args: &JobArgs) -> Result<Exit> {
    let body = order(args)?;
    let Some((socket, id)) = find(&args.id)? else {
        let path = Path::new(&args.id);
        if args.order == JobOrder::Cancel && path.exists() {
            let options = OpenOptions {
                format: args.format,
                allow_parents: args.allow_parents.clone(),
                allow_data_file: args.allow_data_file,
                ..OpenOptions::default()
            };
            return give_up(path, options, args.json);
        }
        let what = format!("neither a server nor a command of this host has a job {:?}", args.id);
        let error = Error::new(ErrorKind::NotFound, what);
        return Err(
            error.hint("`spile jobs` lists them; of a disk that nobody serves, `spile job DISK cancel` gives one up")
        );
    };
    let patience = if args.order == JobOrder::HandOver { CHANGE_PATIENCE } else { LOOK_PATIENCE };
    let told = call(&socket, "PATCH", &format!("/v1/jobs/{id}"), Some(&body), patience).and_then(typed);
    let mut job: Job = told.map_err(|error| match discovery::is_of_command(&socket) && is_gone(&error) {
        true => Error::new(ErrorKind::NotFound, format!("the job {id} has ended just now, with its command")),
        false => error,
    })?;
    if args.order == JobOrder::Cancel {
        job = cancelled(&socket, job)?;
    }
    if args.json {
        print_json(&job)?;
    }
    Ok(Exit::Ok)
}

/// The socket and the name of the job that is meant by `id`: its name, or its disk. `None` when neither a server nor a command has it.
fn find(id: &str) -> Result<Option<(PathBuf, String)>> {
    let all = discovery::jobs()?;
    let has_it = |(_, jobs): &&(PathBuf, Vec<Job>)| jobs.iter().any(|job| job.id == id);
    if let Some((socket, _)) = all.iter().find(has_it) {
        return Ok(Some((socket.clone(), id.to_owned())));
    }
    let served = match discovery::find_disk(id) {
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        found => Some(found?),
    };
    let is_of_served =
        |socket: &Path, job: &Job| served.as_ref().is_some_and(|(server, disk)| server == socket && *disk == job.disk);
    let is_meant = |socket: &Path, job: &Job| match discovery::is_of_command(socket) {
        true => job.disk == id || is_same_file(Path::new(&job.path), Path::new(id)),
        false => is_of_served(socket, job),
    };
    let each = all.iter().flat_map(|(socket, jobs)| jobs.iter().map(move |job| (socket, job)));
    let meant: Vec<_> = each.filter(|(socket, job)| job.is_under_way() && is_meant(socket, job)).collect();
    match (&meant[..], served) {
        ([(socket, job)], _) => Ok(Some(((*socket).clone(), job.id.clone()))),
        ([(_, one), (_, other), ..], _) => {
            let what = format!("{id:?} has two jobs: {}, a {}, and {}, a {}", one.id, one.kind, other.id, other.kind);
            Err(Error::new(ErrorKind::InvalidInput, what).hint("say which"))
        }
        ([], Some((_, disk))) => {
            let error = Error::new(ErrorKind::NotFound, format!("the disk {disk:?} has no job that is under way"));
            Err(error.hint("`spile jobs` lists those that have ended, too"))
        }
        ([], None) => Ok(None),
    }
}

/// Waits until `job`, which was cancelled, has ended: then the disk may have another one. One whose storage does not answer is said to be at it
/// still. A command forgets its job when it has closed the disk.
fn cancelled(socket: &Path, mut job: Job) -> Result<Job> {
    let end = Instant::now() + CANCEL_PATIENCE;
    let is_of_command = discovery::is_of_command(socket);
    while (job.is_under_way() || is_of_command) && Instant::now() < end {
        std::thread::sleep(CANCEL_LOOK_EVERY);
        job = match ask(socket, "GET", &format!("/v1/jobs/{}", job.id), LOOK_PATIENCE) {
            Err(error) if is_of_command && is_gone(&error) && !job.is_under_way() => break,
            Err(error) if is_of_command && is_gone(&error) => {
                let what = format!("the command with process {} has ended before it said how its job did", job.pid);
                return Err(Error::new(ErrorKind::Shutdown, what).at_path(Path::new(&job.path)).caused_by(error));
            }
            answer => answer?,
        };
    }
    if job.is_under_way() {
        complain(format_args!("the job {} is told to end, and ends when its storage answers", job.id));
        "cancelling".clone_into(&mut job.state);
    }
    Ok(job)
}

/// Nobody has the job any more, or whoever has it ends now.
fn is_gone(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Protocol)
}

/// Gives up the job that was left of the disk at `path`, which nobody serves: what its server does when a job is cancelled.
fn give_up(path: &Path, options: OpenOptions, is_json: bool) -> Result<Exit> {
    let at = existing(path)?;
    let (label, stem) = (disks::label(&at), disks::stem(&at));
    let (job, done, is_left) = on_engine(move || async move {
        let graph = disks::open_keeping(CacheMode::Direct, &at, &options).await?;
        let checkpoints = Checkpoints::none(Access::default());
        Box::pin(checkpoints.open(&graph)).await?;
        let left = jobs::left(&graph).await?;
        let node = Node::new(graph);
        let ended = match left {
            Some(note) => {
                let job = DiskJob::new(What::Images(note.plan.clone()), note.wishes);
                job.job().cancel();
                Some((Box::pin(jobs::run(&node, &checkpoints, Access::default(), job.job(), &note.plan)).await, job))
            }
            None => None,
        };
        let graph = node.graph().await;
        let is_left = jobs::left(&graph).await?.is_some();
        node.close().await?;
        Box::pin(checkpoints.close(&graph)).await;
        let Some((done, job)) = ended else {
            let error =
                Error::new(ErrorKind::NotFound, "no job was left of this disk").at_path(graph.handles()[0].path());
            return Err(error.hint("nothing has changed"));
        };
        Ok((job, done, is_left))
    })?;
    match (job.job().state(), done) {
        (JobState::Done | JobState::Cancelled, _) => {}
        // Nobody knows what has become of the copy.
        (_, Err(error)) if is_left || error.kind() == ErrorKind::TimedOut => return Err(error),
        (_, Err(error)) => {
            complain(format_args!(
                "{label}: what the job had begun elsewhere could not be looked at or removed: {error}"
            ));
        }
        (_, Ok(())) => {}
    }
    let shown = job.show(&stem, &label, "");
    if is_json {
        return print_json(&shown).map(|()| Exit::Ok);
    }
    match shown.state.as_str() {
        "done" => say(format_args!("{label}: the {} had come to its end already", shown.kind)),
        _ => say(format_args!("{label}: the {} is given up; the disk holds what it held", shown.kind)),
    }
    Ok(Exit::Ok)
}

/// The body of the call that tells the job.
fn order(args: &JobArgs) -> Result<Value> {
    Ok(match (args.order, args.rate) {
        (JobOrder::Rate, rate) => json!({ "limit_bytes_per_s": rate }),
        (order, Some(_)) => {
            let what = format!("a size makes no sense with {order:?}").to_lowercase();
            return Err(Error::new(ErrorKind::InvalidInput, what));
        }
        (JobOrder::Pause, None) => json!({ "state": "paused" }),
        (JobOrder::Resume, None) => json!({ "state": "running" }),
        (JobOrder::Finish, None) => json!({ "state": "finished" }),
        (JobOrder::HandOver, None) => json!({ "state": "handed_over" }),
        (JobOrder::Cancel, None) => json!({ "state": "cancelled" }),
    })
}
