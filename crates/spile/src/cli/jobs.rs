//! `spile jobs`, `spile job`: the jobs of all servers of this host.

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
use super::{Exit, existing, on_engine, parse_format, print_json, say};
use crate::disks;
use crate::log::{self, complain, printable};
use crate::units::format_size;

/// List the jobs of all servers of this host: merges, flattens and moves, how far they are, and those that have ended
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
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Follow parents of a disk that no server has into this folder, too (may be given several times)
    #[arg(long, value_name = "DIR")]
    allow_parents: Vec<PathBuf>,
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
    let jobs: Vec<Job> = all()?.into_iter().flat_map(|(_, jobs)| jobs).collect();
    if args.json {
        return print_json(&JobList { jobs }).map(|()| Exit::Ok);
    }
    let mut table = fitting_table();
    table.set_header(["JOB", "KIND", "DISK", "STATE", "DONE", "OF", "RATE", "LEFT"]);
    for job in &jobs {
        let left = job.eta_s.filter(|_| job.state == "running").map_or(String::new(), |left_s| format!("{left_s} s"));
        let row = [
            job.id.clone(),
            job.kind.clone(),
            job.disk.clone(),
            job.state.clone(),
            format_size(job.done_bytes),
            format_size(job.total_bytes),
            format!("{}/s", format_size(job.bytes_per_s)),
            left,
        ];
        table.add_row(row.map(|text| printable(&text)));
    }
    say(table);
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

/// Each server with its jobs. A server that is too old to have jobs has none.
fn all() -> Result<Vec<(PathBuf, Vec<Job>)>> {
    let servers = discovery::servers()?.into_iter();
    let jobs = servers.filter_map(|(socket, _)| {
        let list: JobList = ask(&socket, "GET", "/v1/jobs", LOOK_PATIENCE).ok()?;
        Some((socket, list.jobs))
    });
    Ok(jobs.collect())
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
                ..OpenOptions::default()
            };
            return give_up(path, options, args.json);
        }
        let error = Error::new(ErrorKind::NotFound, format!("no server of this host has a job {:?}", args.id));
        return Err(
            error.hint("`spile jobs` lists them; of a disk that nobody serves, `spile job DISK cancel` gives one up")
        );
    };
    let patience = if args.order == JobOrder::HandOver { CHANGE_PATIENCE } else { LOOK_PATIENCE };
    let mut job: Job = typed(call(&socket, "PATCH", &format!("/v1/jobs/{id}"), Some(&body), patience)?)?;
    if args.order == JobOrder::Cancel {
        job = cancelled(&socket, job)?;
    }
    if args.json {
        print_json(&job)?;
    }
    Ok(Exit::Ok)
}

/// The server and the name of the job that is meant by `id`: its name, or its disk. `None` when no server has it.
fn find(id: &str) -> Result<Option<(PathBuf, String)>> {
    let servers = all()?;
    let has_it = |(_, jobs): &&(PathBuf, Vec<Job>)| jobs.iter().any(|job| job.id == id);
    if let Some((socket, _)) = servers.iter().find(has_it) {
        return Ok(Some((socket.clone(), id.to_owned())));
    }
    let (socket, disk) = match discovery::find_disk(id) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        found => found?,
    };
    let jobs = servers.into_iter().filter(|(other, _)| *other == socket).flat_map(|(_, jobs)| jobs);
    let of_disk: Vec<_> = jobs.filter(|job| job.disk == disk && job.is_under_way()).collect();
    match &of_disk[..] {
        [job] => Ok(Some((socket, job.id.clone()))),
        [one, other, ..] => {
            let what = format!(
                "the disk {disk:?} has two jobs: {}, a {}, and {}, a {}",
                one.id, one.kind, other.id, other.kind
            );
            Err(Error::new(ErrorKind::InvalidInput, what).hint("say which"))
        }
        [] => {
            let error = Error::new(ErrorKind::NotFound, format!("the disk {disk:?} has no job that is under way"));
            Err(error.hint("`spile jobs` lists those that have ended, too"))
        }
    }
}

/// Waits until `job`, which was cancelled, has ended: then the disk may have another one. One whose storage does not answer is said to be at it
/// still.
fn cancelled(socket: &Path, mut job: Job) -> Result<Job> {
    let end = Instant::now() + CANCEL_PATIENCE;
    while job.is_under_way() && Instant::now() < end {
        std::thread::sleep(CANCEL_LOOK_EVERY);
        job = ask(socket, "GET", &format!("/v1/jobs/{}", job.id), LOOK_PATIENCE)?;
    }
    if job.is_under_way() {
        complain(format_args!("the job {} is told to end, and ends when its storage answers", job.id));
        "cancelling".clone_into(&mut job.state);
    }
    Ok(job)
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
