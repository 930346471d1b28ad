//! Disks that a running server has open: what it says of them, and the way on which their bytes can be read.
//!
//! A file that is served for writing is locked, and nobody else can read it soundly: part of it is in the server's memory.
//! So the commands ask the server. A file that is served for reading only is shared, and they read it themselves.

use std::path::Path;

use serde::de::DeserializeOwned;
use spile_core::{Code, Error, ErrorKind, Locator, Result};
use spile_image::{Format, Graph, OpenOptions};
use spile_server::serving::api::client::{CHANGE_PATIENCE, LOOK_PATIENCE, ask};
use spile_server::serving::api::discovery;
use spile_server::serving::api::images::{Info, MapPart, ServedBy};
use spile_server::serving::api::types::{Disk, Job};
use spile_store::{CacheMode, HostStore};

use super::control::path_of;
use super::tree::openers_of;
use crate::disks;
use crate::log::{complain, printable};
use crate::units::format_size;
use crate::uri::{Address, NbdUri, TlsQuery};

/// A disk of a running server.
pub struct Served(Disk);

impl Served {
    /// The disk that is meant by `at`, when `error` says that its own file is in use, and a server of this host has it as a disk of
    /// `format`.
    pub fn of(error: &Error, at: &Locator, format: Option<Format>) -> Option<Self> {
        let (ErrorKind::Busy, Locator::Path(path)) = (error.kind(), at) else { return None };
        if error.path()?.canonicalize().ok()? != path.canonicalize().ok()? {
            return None;
        }
        let disk = find(path)?;
        format.is_none_or(|format| format.to_string() == disk.format).then_some(Self(disk))
    }

    /// What its images say of themselves.
    ///
    /// # Errors
    /// The server's; `NotFound` from one that is too old for this question.
    pub fn info(&self) -> Result<Info> {
        let mut info: Info = self.ask("info")?;
        for layer in &mut info.layers {
            layer.used_bytes = disks::used_bytes(Path::new(&layer.path));
        }
        info.used_bytes = info.layers.first().and_then(|leaf| leaf.used_bytes);
        Ok(info)
    }

    /// Part of its map.
    ///
    /// # Errors
    /// As [`Served::info`]; the images'.
    pub fn map(&self, offset_bytes: u64) -> Result<MapPart> {
        self.ask(&format!("map?offset_bytes={offset_bytes}"))
    }

    fn ask<T: DeserializeOwned>(&self, what: &str) -> Result<T> {
        let path = format!("{}/{what}", path_of(&self.0.name));
        // A map may wait for the disk's store.
        let patience = if what == "info" { LOOK_PATIENCE } else { CHANGE_PATIENCE };
        ask(Path::new(&self.0.server), "GET", &path, patience)
    }
}

/// The line that tells where an answer comes from.
pub fn line(by: &ServedBy) -> String {
    let (name, server) = (printable(&by.disk), printable(&by.server));
    format!("served as \"{name}\" by {server} (process {}); as that server says", by.pid)
}

/// Opens a disk to read it. When a server of this host has it open for writing, it is read through the server's NBD socket, as its
/// guest sees it.
///
/// # Errors
/// As [`disks::open`].
pub async fn open(cache: CacheMode, at: &Locator, options: &OpenOptions) -> Result<Graph<HostStore>> {
    let busy = match disks::open(cache, at, options).await {
        Err(error) if error.kind() == ErrorKind::Busy => error,
        opened => return opened,
    };
    let Some(Served(disk)) = Served::of(&busy, at, options.format) else { return Err(busy) };
    let uri = match nbd_uri(&disk) {
        Some(uri) if uri.tls.is_none() => uri,
        _ => return Err(busy),
    };
    complain(format_args!("{} is in use: read through {uri}, which its guest may write to meanwhile", disk.path));
    let options = OpenOptions { format: Some(Format::Raw), ..options.clone() };
    disks::open(cache, &Locator::Nbd(uri.to_string()), &options).await
}

/// The error, with what is known of the server that has the disk open.
pub fn explained(error: Error) -> Error {
    let served = match (error.kind(), error.path()) {
        (ErrorKind::Busy, Some(path)) => find(path),
        _ => None,
    };
    let Some(disk) = served else { return with_users(with_work(error)) };
    let way = match nbd_uri(&disk) {
        Some(uri) if uri.tls.is_some() => {
            format!(
                "its NBD sockets ask for TLS: name it by '{uri}' to read what its guest sees, with the folder of the certificates"
            )
        }
        Some(uri) => format!("name it by {uri} to read what its guest sees"),
        None => format!(
            "to read what its guest sees, give it an NBD socket: curl --unix-socket {} --json \
             '{{\"protocol\": \"nbd\", \"address\": \"unix:/run/spile.nbd\"}}' http://spile/v1/exports, and say this again; --no-lock \
             reads the file all the same, but what is changed meanwhile may be torn",
            disk.server
        ),
    };
    error.hint(format!("it is served as {:?} by {} (process {}); {way}", disk.name, disk.server, disk.pid))
}

/// The error that a file is in use, with what a command does with it.
fn with_work(error: Error) -> Error {
    let job = error.path().filter(|_| error.kind() == ErrorKind::Busy).and_then(job_on);
    let Some(Job { id, kind, path, layer_path, to, state, done_bytes, total_bytes, pid, .. }) = job else {
        return error;
    };
    let to = to.as_deref().map(printable).unwrap_or_default();
    let doing = match (kind.as_str(), layer_path) {
        ("coalesce", Some(layer)) => format!("merges {} into its parent", printable(&layer)),
        ("move", _) => format!("moves {} to {to}", printable(&path)),
        ("backup", _) => format!("copies {} to {to}", printable(&path)),
        (kind, _) => format!("does a {kind} of {}", printable(&path)),
    };
    let (done, total) = (format_size(done_bytes), format_size(total_bytes));
    error.hint(format!(
        "the command with process {pid} {doing}, as job {id}, which is {state} with {done} of {total} done: \
         wait for it, or `spile job {id} cancel`"
    ))
}

/// The job of a command that has the file at `path` in hand: that of its disk, or else one of a process that has the file open.
fn job_on(path: &Path) -> Option<Job> {
    let whole = path.canonicalize().ok()?;
    let mut jobs = discovery::jobs_of_commands().ok()?.into_iter().map(|(_, job)| job).collect::<Vec<_>>();
    let is_at = |at: &str| Path::new(at).canonicalize().is_ok_and(|at| at == whole);
    let users: Vec<_> = openers_of(path).into_iter().map(|user| user.pid).collect();
    let found = jobs.iter().position(|job| is_at(&job.path) || job.layer_path.as_deref().is_some_and(is_at));
    let found = found.or_else(|| jobs.iter().position(|job| users.contains(&job.pid)));
    found.map(|number| jobs.swap_remove(number))
}

/// The error that a file is in use, with the processes that have it open, as far as this user may see them.
fn with_users(error: Error) -> Error {
    let users = error.path().filter(|_| error.is(Code::InUse)).map(openers_of).unwrap_or_default();
    if users.is_empty() {
        return error;
    }
    let users: Vec<_> = users.iter().map(|user| format!("{} ({})", printable(&user.program), user.pid)).collect();
    let users = format!("it is open in {}", users.join(", "));
    let hint = error.hint_text().map_or_else(|| users.clone(), |hint| format!("{users}; {hint}"));
    error.hint(hint)
}

/// The disk of a server of this host whose image is the file at `path`.
fn find(path: &Path) -> Option<Disk> {
    let whole = path.canonicalize().ok()?;
    let disks = discovery::servers().ok()?.into_iter().flat_map(|(_, disks)| disks);
    disks.into_iter().find(|disk| Path::new(&disk.path).canonicalize().is_ok_and(|path| path == whole))
}

/// Where NBD clients reach the disk: if possible without TLS, and by a Unix socket. The URI of an export that asks for TLS has `DIR`
/// where the user has to say a folder.
fn nbd_uri(disk: &Disk) -> Option<NbdUri> {
    let nbd = disk.exports.iter().filter(|export| export.protocol == "nbd");
    let uris = nbd.filter_map(|export| {
        let uri = NbdUri::new(export.address.parse::<Address>().ok()?, &export.name);
        Some(NbdUri { tls: (export.tls == "required").then(certificates_in_dir), ..uri })
    });
    uris.min_by_key(|uri| (uri.tls.is_some(), !matches!(uri.address, Address::Unix(_))))
}

fn certificates_in_dir() -> TlsQuery {
    TlsQuery { certificates: Some("DIR".into()), ..TlsQuery::default() }
}
