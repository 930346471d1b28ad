//! `spile events`: what has happened to the disks that are served.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use clap::Args;
use spile_core::{ErrorKind, Result, format_size};
use spile_server::serving::api::client::{LOOK_PATIENCE, ask};
use spile_server::serving::api::discovery;
use spile_server::serving::events::{DiskEvent, EventList, What, now_us};

use super::Exit;
use super::control::find_named;
use super::say::{put_json, put_lines};
use crate::log::{complain, printable};
use crate::units::format_age;

/// How long a server waits for an event before it answers that there is none.
const WAIT: Duration = Duration::from_secs(60);

/// Show what has happened to disks that are served: trouble and its end, devices that are too short, failed syncs, jobs that have ended
///
/// A server keeps its last 1024 events. With --follow the command goes on with those that come, until the servers have ended that it began with: for a program
/// that makes a device longer when its thin disk wants that, or one that tells an operator. What a disk is in now, `spile show` says.
#[derive(Debug, Args)]
pub struct EventsArgs {
    /// The disk: its name, or the path of its image; or the control socket of a server, for all of its disks; all disks of this host's servers when left out
    disk: Option<String>,
    /// With a control socket: only the disk of this name there
    #[arg(long = "disk", value_name = "NAME", alias = "name", requires = "disk")]
    of_server: Option<String>,
    /// Go on with the events that come
    #[arg(long, short)]
    follow: bool,
    /// Print JSON: an object in a line of its own for each event
    #[arg(long)]
    json: bool,
}

/// Runs `spile events`.
///
/// # Errors
/// When there is no such disk, or a server does not answer.
pub fn run(args: &EventsArgs) -> Result<Exit> {
    let (sockets, disk): (Vec<PathBuf>, _) = match &args.disk {
        Some(socket) if discovery::is_socket(Path::new(socket)) && args.of_server.is_none() => {
            (vec![socket.into()], None)
        }
        Some(disk) => {
            let (socket, name) = find_named(disk, args.of_server.as_deref())?;
            (vec![socket], Some(name))
        }
        None => (discovery::servers()?.into_iter().map(|(socket, _)| socket).collect(), None),
    };
    // A failed sync is one of a file, and the disk's layers may be of that.
    let concerns = |event: &DiskEvent| event.disk.is_none() || disk.is_none() || event.disk == disk;
    let (sender, events) = mpsc::channel();
    std::thread::scope(|scope| {
        for socket in &sockets {
            let sender = sender.clone();
            scope.spawn(move || {
                if let Err(error) = hear(socket, args.follow, &sender) {
                    let _ = sender.send(Err(error));
                }
            });
        }
        drop(sender);
        let mut failed = None;
        let mut past = Vec::new();
        for event in events {
            match event {
                Ok(event) if args.follow && concerns(&event) => show(&event, args.json)?,
                Ok(event) if concerns(&event) => past.push(event),
                Ok(_) => {}
                Err(error) => failed = Some(error),
            }
        }
        past.sort_by_key(|event| event.number);
        past.iter().try_for_each(|event| show(event, args.json))?;
        failed.map_or(Ok(Exit::Ok), Err)
    })
}

/// Passes the events of the server at `socket` on: those that it keeps, and with `follow` those that come until it has ended.
fn hear(socket: &Path, follow: bool, sender: &mpsc::Sender<Result<DiskEvent>>) -> Result<()> {
    let mut list: EventList = ask(socket, "GET", "/v1/events", LOOK_PATIENCE)?;
    loop {
        if list.missed {
            complain(format_args!("{}: there were more events than the server keeps", socket.display()));
        }
        for event in list.events {
            if sender.send(Ok(event)).is_err() {
                return Ok(());
            }
        }
        if !follow || list.ended {
            return Ok(());
        }
        let path = format!("/v1/events?after={}&wait_ms={}", list.last, WAIT.as_millis());
        list = match ask(socket, "GET", &path, WAIT + LOOK_PATIENCE) {
            // It has ended, or ends just now.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Protocol) => return Ok(()),
            answer => answer?,
        };
    }
}

fn show(event: &DiskEvent, json: bool) -> Result<()> {
    if json {
        return tell(put_json(event)?);
    }
    let ago = format_age(now_us().saturating_sub(event.at_unix_us) / 1_000_000);
    let disk = event.disk.as_deref().unwrap_or("-");
    tell(put_lines(printable(&format!("{ago} ago  {disk}: {}", text(&event.what))))?)
}

/// Ends the process when nobody reads what it prints: others wait for what comes.
fn tell(is_read: bool) -> Result<()> {
    if !is_read {
        std::process::exit(0);
    }
    Ok(())
}

fn text(what: &What) -> String {
    match what {
        What::RoomWanted(wanted) => format!(
            "{} of room left on {}: it is to have {} bytes",
            format_size(wanted.free_bytes),
            wanted.device,
            wanted.wants_bytes
        ),
        What::RoomMade(made) => format!("its device has {} bytes now", made.device_bytes),
        What::RoomFailed(said) => format!("no room was made: {}", said.message),
        What::Waits(waits) => format!("waits: a {} has failed: {}", waits.operation, waits.message),
        What::GoesOn(on) => {
            let failed = if on.reported > 0 { format!(", {} have failed", on.reported) } else { String::new() };
            format!("goes on: {} request(s) have waited, {:.1} s in all{failed}", on.requests, on.time_s)
        }
        What::SyncFailed(said) | What::MemoryNotShared(said) => said.message.clone(),
        What::JobEnded(job) => {
            let why = job.message.as_ref().map_or(String::new(), |message| format!(": {message}"));
            format!("the job {}, a {}, is {}{why}", job.id, job.kind, job.state)
        }
    }
}
