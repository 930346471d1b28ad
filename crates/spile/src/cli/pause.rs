//! `spile pause`: a disk's guests wait, so that its files can be copied.

use std::path::Path;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use serde_json::json;
use spile_core::{Error, ErrorKind, Result};
use spile_server::serving::api::client::{CHANGE_PATIENCE, call, typed};
use spile_server::serving::api::types::Paused;
use utoipa::ToSchema;

use super::control::{Which, path_of};
use super::{Exit, print_json, say};
use crate::units::parse_duration;

/// Have the guests of a disk wait, so that its files can be copied
///
/// When the command returns, no request is in flight below the disk, all is flushed, and its files do not change any more: a
/// copy of them, by any tool, is the disk. Requests that come meanwhile wait, without an error, until `spile resume`. Guests have
/// time-outs of their own (30 seconds or so), so copy what is fast to copy, such as a snapshot by the storage below.
///
/// End the pause by its id when the copy is made, and look at the exit code: `spile resume DISK --pause ID` fails when this very pause was over
/// before, for then the copy is worth nothing. A pause ends by itself after --at-most, and when somebody waits for the end of all requests: a
/// guest's device that is stopped, or the server's end. While a disk is paused it gets no snapshot, no job and no new size, and no other server
/// can take over. A snapshot (`spile snapshot`) needs no pause.
#[derive(Debug, Args)]
pub struct PauseArgs {
    #[command(flatten)]
    which: Which,
    /// End the pause by itself after this time, up to an hour
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "60s")]
    at_most: Duration,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// A disk that is paused.
#[derive(Debug, Serialize, ToSchema)]
pub struct PausedDisk {
    /// The disk's name.
    disk: String,
    /// Its pause.
    #[serde(flatten)]
    pause: Paused,
}

/// Runs `spile pause`.
///
/// # Errors
/// When there is no such disk, something else is being done to it, or requests in flight do not end in time.
pub fn run(args: &PauseArgs) -> Result<Exit> {
    let (socket, name) = args.which.find().map_err(|error| match error.kind() {
        ErrorKind::NotFound if Path::new(args.which.disk_path()).is_file() => {
            let error = Error::new(ErrorKind::Unsupported, "no server has this disk, so there is nothing to pause");
            error.at_path(Path::new(args.which.disk_path())).hint("copy it as it is")
        }
        _ => error,
    })?;
    let wanted = json!({ "at_most_s": args.at_most.as_secs_f64() });
    let path = format!("{}/pause", path_of(&name));
    let paused: Paused = typed(call(&socket, "POST", &path, Some(&wanted), CHANGE_PATIENCE)?)?;
    if args.json {
        return print_json(&PausedDisk { disk: name, pause: paused }).map(|()| Exit::Ok);
    }
    let left_s = (paused.at_most_s - paused.time_s).max(0.0);
    let end = format!("spile resume {name} --pause {}", paused.id);
    say(format_args!("{name}: its files do not change, for {left_s:.0} s at most; `{end}` ends that"));
    Ok(Exit::Ok)
}
