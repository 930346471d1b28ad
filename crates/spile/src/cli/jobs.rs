//! `spile jobs`, `spile job`: the jobs of all servers of this host.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use spile_core::{Error, ErrorKind, Result};
use spile_server::serving::api::client::{CHANGE_PATIENCE, LOOK_PATIENCE, ask, call, typed};
use spile_server::serving::api::discovery;
use spile_server::serving::api::types::{Failure, Job, JobList, Motion};

use super::coalesce::parse_rate;
use super::control::fitting_table;
use super::{Exit, print_json, say};
use crate::log::{self, printable};
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
/// A job that is cancelled leaves done what it has done; the disk is valid at every moment.
///
/// `hand-over` is for a guest that moves to another host together with its disk. It waits until the copy is whole and flushed. It fails, and
/// changes nothing, when the copy is not in step or the guest still runs (a Xen guest: still asks for something). When it succeeds, guests do not use the disk here any more: their
/// requests wait until `spile resume`, for the case that the guest's move fails after that.
#[derive(Debug, Args)]
pub struct JobArgs {
    /// The job, as `spile jobs` names it
    id: String,
    /// What it is to do: wait, go on, finish a copy that stays in step (spile move --mirror-only), hand such a disk over to the host of the copy,
    /// where its guest goes on, end and leave done what is done, or keep a rate
    order: JobOrder,
    /// With `rate`: no more than SIZE is moved in a second; `none`: as fast as guests leave room for
    #[arg(value_name = "SIZE|none", value_parser = parse_limit, required_if_eq("order", "rate"))]
    rate: Option<u64>,
    /// Print the job as JSON
    #[arg(long)]
    json: bool,
}

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
    let moving = jobs.iter().filter(|job| matches!(job.state.as_str(), "running" | "paused"));
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
    let has_it = |(_, jobs): &(PathBuf, Vec<Job>)| jobs.iter().any(|job| job.id == args.id);
    let Some((socket, _)) = all()?.into_iter().find(has_it) else {
        let error = Error::new(ErrorKind::NotFound, format!("no server of this host has a job {:?}", args.id));
        return Err(error.hint("`spile jobs` lists them"));
    };
    let patience = if args.order == JobOrder::HandOver { CHANGE_PATIENCE } else { LOOK_PATIENCE };
    let job: Job = typed(call(&socket, "PATCH", &format!("/v1/jobs/{}", args.id), Some(&body), patience)?)?;
    if args.json {
        print_json(&job)?;
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
