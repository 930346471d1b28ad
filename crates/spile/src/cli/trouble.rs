//! Commands about trouble below a disk: `on-error`, `resume`, `accept-loss`.

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use spile_core::{Error, ErrorKind, Result};
use spile_node::OnError;
use spile_server::serving::api::client::{LOOK_PATIENCE, call};
use spile_server::serving::api::types::{Accepted, Resumed};
use spile_server::serving::failed_syncs;

use super::control::{Which, path_of};
use super::{Exit, parse_on_error, say};
use crate::units::parse_duration;

/// Say what a running server does with requests that fail
///
/// It concerns trouble that may pass: no space, an I/O error, a time-out, a lost path. With `report` the guest gets the error; with
/// `pause` the request waits and is tried again until it succeeds, and the guest sees latency and no error. Requests that wait
/// already obey the new order, too. It holds until the server ends; `spile serve --on-error` says it from the start.
#[derive(Debug, Args)]
pub struct OnErrorArgs {
    #[command(flatten)]
    which: Which,
    /// What to do
    #[arg(value_name = "report|pause", value_parser = parse_on_error)]
    policy: OnError,
    /// The longest time that a request waits before it is reported after all; 0 for ever [default: as it is]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pause_at_most: Option<Duration>,
}

/// Try all requests of a disk again that wait
///
/// Requests wait when they fail because of trouble below the disk and its policy is `pause`. They are tried again from time
/// to time anyway, at most 5 seconds after the last time; this tries all of them at once.
#[derive(Debug, Args)]
pub struct ResumeArgs {
    #[command(flatten)]
    which: Which,
}

/// Accept what a failed sync may have lost
///
/// After a sync has failed, nobody knows which of the data written before it are on the storage. So every flush of that disk fails,
/// whoever serves it, until the host is started anew. This ends it: flushes succeed again. Before, look at the storage below,
/// and have the guest check its file system or write again what matters.
#[derive(Debug, Args)]
pub struct AcceptLossArgs {
    #[command(flatten)]
    which: Which,
}

/// Runs `spile accept-loss`. The disk may also be the path of one that nobody serves.
///
/// # Errors
/// When there is no such disk.
pub fn accept_loss(args: &AcceptLossArgs) -> Result<Exit> {
    let failed_sync = match args.which.find() {
        Ok((socket, name)) => {
            let answer = call(&socket, "POST", &format!("{}/accept-loss", path_of(&name)), None, LOOK_PATIENCE)?;
            let answer: Accepted = serde_json::from_value(answer)
                .map_err(|e| Error::new(ErrorKind::Protocol, "the server's answer is not understood").caused_by(e))?;
            answer.failed_sync.map(|failed| failed.error)
        }
        Err(error) if error.kind() == ErrorKind::NotFound && args.which.disk_path().exists() => {
            failed_syncs::accept_at(args.which.disk_path())?.map(|failed| failed.to_string())
        }
        Err(error) => return Err(error),
    };
    match failed_sync {
        Some(failed) => say(format_args!("accepted: {failed}")),
        None => say("no failed sync of this disk is known"),
    }
    Ok(Exit::Ok)
}

/// Runs `spile on-error`.
///
/// # Errors
/// When there is no such disk.
pub fn on_error(args: &OnErrorArgs) -> Result<Exit> {
    let (socket, name) = args.which.find()?;
    let mut body = json!({ "on_error": args.policy.to_string() });
    if let Some(time) = args.pause_at_most {
        body["pause_at_most_s"] = time.as_secs_f64().into();
    }
    call(&socket, "PATCH", &path_of(&name), Some(&body), LOOK_PATIENCE).map(|_: Value| Exit::Ok)
}

/// Runs `spile resume`.
///
/// # Errors
/// When there is no such disk.
pub fn resume(args: &ResumeArgs) -> Result<Exit> {
    let (socket, name) = args.which.find()?;
    let answer = call(&socket, "POST", &format!("{}/resume", path_of(&name)), None, LOOK_PATIENCE)?;
    let Resumed { requests } = serde_json::from_value(answer)
        .map_err(|e| Error::new(ErrorKind::Protocol, "the server's answer is not understood").caused_by(e))?;
    say(format_args!("{name}: {requests} request(s) are tried again"));
    Ok(Exit::Ok)
}
