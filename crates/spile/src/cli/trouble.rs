//! Commands about trouble below a disk: `on-error`, `resume`, `accept-loss`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use serde_json::json;
use spile_core::{Error, ErrorKind, Locator, Result};
use spile_image::{Format, OpenOptions};
use spile_node::OnError;
use spile_server::serving::api::client::{CHANGE_PATIENCE, LOOK_PATIENCE, ask, call, typed};
use spile_server::serving::api::discovery;
use spile_server::serving::api::types::{Accepted, Disk, DiskDetail, Resumed};
use spile_server::serving::failed_syncs;
use spile_store::CacheMode;
use utoipa::ToSchema;

use super::control::{Which, path_of};
use super::{Exit, on_engine, parse_format, parse_on_error, print_json, say};
use crate::disks;
use crate::log::complain;
use crate::units::parse_duration;

/// Say what a running server does with requests that fail
///
/// It concerns trouble that may pass: no space, an I/O error, a time-out, a lost path. With `report` the guest gets the error; with
/// `pause` the request waits and is tried again until it succeeds, and the guest sees latency and no error. Requests that wait
/// already obey the new order, too. It holds until the server ends; a server that takes over keeps it, whatever
/// it is started with. `spile serve --on-error` says it from the start. Without a policy, the present one is printed.
#[derive(Debug, Args)]
pub struct OnErrorArgs {
    #[command(flatten)]
    which: Which,
    /// What to do from now on
    #[arg(value_name = "report|pause", value_parser = parse_on_error)]
    policy: Option<OnError>,
    /// The longest time that a request waits before it is reported after all; 0 for ever [default: as it is]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pause_at_most: Option<Duration>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What a server does with the requests of a disk that fail.
#[derive(Debug, Serialize, ToSchema)]
pub struct TroublePolicy {
    /// The disk's name.
    disk: String,
    /// `report`, or `pause`.
    on_error: String,
    /// The longest time that a request waits before it is reported after all, in seconds; `null` for ever.
    pause_at_most_s: Option<f64>,
}

/// Let the requests of a disk go on: after `spile pause`, or when they wait for trouble below it
///
/// With --pause this ends that pause. It fails when this very pause was over before, whatever has ended it: a copy that was made meanwhile may
/// be of several moments. Without --pause a disk that is paused is left so, and the command fails.
///
/// Requests wait, too, when they fail because of trouble below the disk and its policy is `pause`. They are tried again from time
/// to time anyway, at most 5 seconds after the last time; this tries all of them at once.
///
/// A disk whose thin image lies on a block device takes up what the device has gained since.
#[derive(Debug, Args)]
pub struct ResumeArgs {
    #[command(flatten)]
    which: Which,
    /// End this pause: its id is what `spile pause` says
    #[arg(long, value_name = "ID")]
    pause: Option<String>,
    /// Have guests use a disk that has come from another host although nobody has said here that its copy is whole
    #[arg(long, conflicts_with = "pause")]
    as_it_is: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What goes on.
#[derive(Debug, Serialize, ToSchema)]
pub struct GoesOn {
    /// The disk's name.
    disk: String,
    /// What has ended, or is tried again.
    #[serde(flatten)]
    resumed: Resumed,
}

/// Accept what a failed sync may have lost
///
/// After a sync has failed, nobody knows which of the data written before it are on the storage. So every flush of that disk fails,
/// whoever serves it, until the host is started anew. This ends it: flushes succeed again. Before, look at the storage below,
/// and have the guest check its file system or write again what matters.
///
/// The loss of DISK is accepted and no other. What a parent has lost concerns all of its children: it is named here, and accepted
/// by its own path.
#[derive(Debug, Args)]
pub struct AcceptLossArgs {
    #[command(flatten)]
    which: Which,
    /// The format of a disk that is not served, instead of what its extension says
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Look for parents of a disk that is not served in this folder, too (may be given several times)
    #[arg(long, value_name = "DIR")]
    allow_parents: Vec<PathBuf>,
    /// Let images of a disk that is not served keep their data in other files, which they name themselves and which lie where parents may
    #[arg(long)]
    allow_data_file: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What came of accepting the loss of a disk.
#[derive(Debug, Serialize, ToSchema)]
pub struct AcceptedLoss {
    /// The failed sync of the disk, in words; `null` when none was known.
    accepted: Option<String>,
    /// Paths of parents with failed syncs of their own, and what is said of each.
    #[serde(skip)]
    remaining: Vec<(String, String)>,
    /// Names of served disks that remember the failure themselves: each needs `spile accept-loss`, too.
    then: Vec<String>,
}

/// Runs `spile accept-loss`. The disk may also be the path or URI of one that nobody serves.
///
/// # Errors
/// When there is no such disk; `Io` when its flushes still fail because of a parent.
pub fn accept_loss(args: &AcceptLossArgs) -> Result<Exit> {
    let done = match args.which.find() {
        Ok((socket, name)) => accept_served(&socket, &name)?,
        Err(error) if error.kind() == ErrorKind::NotFound => accept_unserved(args, error)?,
        Err(error) => return Err(error),
    };
    if args.json && done.remaining.is_empty() {
        return print_json(&done).map(|()| Exit::Ok);
    }
    let AcceptedLoss { accepted, remaining, then } = done;
    if !args.json {
        say(accepted.map_or("no failed sync of this disk is known".to_owned(), |failed| format!("accepted: {failed}")));
    }
    if remaining.is_empty() {
        then.iter().for_each(|name| say(format_args!("the disk {name:?} needs `spile accept-loss {name}`, too")));
        return Ok(Exit::Ok);
    }
    let what: Vec<_> = remaining.iter().map(|(_, failed)| failed.as_str()).collect();
    let error = Error::new(ErrorKind::Io, format!("flushes still fail, because of a parent: {}", what.join("; ")));
    let paths = remaining.iter().map(|(path, _)| path).chain(&then);
    let commands: Vec<_> = paths.map(|path| format!("`spile accept-loss {path}`")).collect();
    Err(error.hint(format!("{}; other children of the parent are concerned as well", commands.join(", then "))))
}

fn accept_served(socket: &Path, name: &str) -> Result<AcceptedLoss> {
    let answer: Accepted = ask(socket, "POST", &format!("{}/accept-loss", path_of(name)), LOOK_PATIENCE)?;
    let remaining: Vec<_> = answer.remaining.into_iter().map(|failed| (failed.path, failed.message)).collect();
    let then = if remaining.is_empty() { Vec::new() } else { vec![name.to_owned()] };
    Ok(AcceptedLoss { accepted: answer.failed_sync.map(|failed| failed.message), remaining, then })
}

/// Accepts the loss of what no server has as a disk. `not_found` is said when there is no such file either.
fn accept_unserved(args: &AcceptLossArgs, not_found: Error) -> Result<AcceptedLoss> {
    let at = disks::locate(args.which.disk_path())?;
    if at.as_path().is_some_and(|path| !path.exists()) {
        return Err(not_found);
    }
    let then = served_children(&at, all_disks()?);
    let accepted = failed_syncs::accept_at(&at)?.map(|failed| failed.to_string());
    let remaining = if at.as_path().is_some() { marked_parents(args, &at) } else { Vec::new() };
    Ok(AcceptedLoss { accepted, remaining, then })
}

/// The disks of all servers. One that does not answer may have the disk open, and would go on failing its flushes.
fn all_disks() -> Result<Vec<Disk>> {
    discovery::all_disks().map_err(|error| {
        error.hint("this server may have the disk open; nothing is accepted before it answers or has ended")
    })
}

/// The names of `disks` whose flushes fail because of a parent, which lies at `at`.
fn served_children(at: &Locator, disks: Vec<Disk>) -> Vec<String> {
    let Some(path) = at.as_path().and_then(|path| path.canonicalize().ok()) else { return Vec::new() };
    let fails = |disk: &Disk| disk.failed_sync.as_ref().is_some_and(|failed| Path::new(&failed.path) == path);
    disks.into_iter().filter(fails).map(|disk| disk.name).collect()
}

/// The failed syncs of the parents of a disk. One that cannot be opened as an image is a disk without parents here.
fn marked_parents(args: &AcceptLossArgs, at: &Locator) -> Vec<(String, String)> {
    let options = OpenOptions {
        format: args.format,
        read_only: true,
        allow_parents: args.allow_parents.clone(),
        allow_data_file: args.allow_data_file,
        no_lock: true,
        ..OpenOptions::default()
    };
    let place = at.clone();
    let marked = on_engine(move || async move {
        let disk = disks::open(CacheMode::Page, &place, &options).await?;
        let leaf = disk.layers()[0].path.display().to_string();
        let marked = failed_syncs::marked(&disk).into_iter().filter(|failed| failed.path != leaf);
        Ok(marked.map(|failed| (failed.path.clone(), failed.to_string())).collect())
    });
    marked.unwrap_or_else(|error| {
        complain(format_args!("note: parents of this disk could not be looked at: {error}"));
        Vec::new()
    })
}

/// Runs `spile on-error`.
///
/// # Errors
/// When there is no such disk.
pub fn on_error(args: &OnErrorArgs) -> Result<Exit> {
    let (socket, name) = args.which.find()?;
    let mut body = serde_json::Map::new();
    body.extend(args.policy.map(|policy| ("on_error".to_owned(), policy.to_string().into())));
    body.extend(args.pause_at_most.map(|time| ("pause_at_most_s".to_owned(), time.as_secs_f64().into())));
    let is_question = body.is_empty();
    let DiskDetail { disk, .. } = match is_question {
        true => ask(&socket, "GET", &path_of(&name), LOOK_PATIENCE)?,
        false => typed(call(&socket, "PATCH", &path_of(&name), Some(&body.into()), LOOK_PATIENCE)?)?,
    };
    let Disk { name, on_error, pause_at_most_s, .. } = disk;
    match (args.json, is_question) {
        (true, _) => print_json(&TroublePolicy { disk: name, on_error, pause_at_most_s })?,
        (false, true) => say(policy_text(&on_error, pause_at_most_s)),
        (false, false) => {}
    }
    Ok(Exit::Ok)
}

/// What is done about trouble, in words.
pub(super) fn policy_text(on_error: &str, pause_at_most_s: Option<f64>) -> String {
    let at_most = pause_at_most_s.map_or(String::new(), |time_s| format!(", for at most {time_s} s"));
    format!("on error: {on_error}{at_most}")
}

/// Runs `spile resume`.
///
/// # Errors
/// When there is no such disk, the pause is over already, or the disk is paused and no pause is named.
pub fn resume(args: &ResumeArgs) -> Result<Exit> {
    let (socket, name) = args.which.find()?;
    let mut wanted = json!({ "pause": args.pause });
    if args.as_it_is {
        wanted["as_it_is"] = true.into();
    }
    let patience = if args.pause.is_some() { CHANGE_PATIENCE } else { LOOK_PATIENCE };
    let answer = call(&socket, "POST", &format!("{}/resume", path_of(&name)), Some(&wanted), patience)?;
    let resumed: Resumed = typed(answer)?;
    if args.json {
        return print_json(&GoesOn { disk: name, resumed }).map(|()| Exit::Ok);
    }
    let Resumed { requests, paused_s } = resumed;
    match paused_s {
        Some(paused_s) => say(format_args!("{name}: goes on, after a pause of {paused_s:.1} s")),
        None => say(format_args!("{name}: {requests} request(s) are tried again")),
    }
    Ok(Exit::Ok)
}
