//! A planned restart: the running server gives its sockets, its guests' connections and its disks to a new process.
//!
//! The old server first finds out whether the new one will listen on everything it has; only then does it stop, answer what
//! is in flight, and close its disks, which frees their locks. The new one opens them and goes on with the same sockets
//! and connections: guests see a pause, and nothing else. Until the new server says that it serves, the old one keeps
//! a share of every descriptor; when the new one fails or falls silent, the old one opens its disks again and goes on.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use spile_core::{Error, ErrorKind, Result};
use spile_front_vhost::Handover;

use super::control::{Answer, Link, MAX_FDS, Request, unexpected};
use super::fronts::Listening;

/// What a server has that its successor goes on with.
pub struct Estate {
    /// Sockets that listen, by their key.
    pub sockets: HashMap<String, OwnedFd>,
    /// Guests' connections, with their exports.
    pub connections: Vec<(String, Handover)>,
    link: Link,
}

impl Estate {
    /// Tells the old server that all is well, and it ends.
    ///
    /// # Errors
    /// When it is gone already.
    pub fn confirm(&self) -> Result<()> {
        self.link.send(&Answer::Done, &[])
    }

    /// Takes the socket of this key.
    pub fn take_socket(&mut self, key: &str) -> Option<OwnedFd> {
        self.sockets.remove(key)
    }
}

/// How long the old server may take to flush its disks.
const PATIENCE: Duration = Duration::from_secs(120);

/// Asks the server at `control` for all it has. `None` when there is none.
///
/// # Errors
/// When it refuses, or breaks off.
pub fn ask(control: &Path, sockets: Vec<String>) -> Result<Option<Estate>> {
    let Some(mut link) = Link::connect(control)? else { return Ok(None) };
    link.set_patience(PATIENCE);
    link.send(&Request::TakeOver { sockets }, &[])?;
    let (mut sockets, mut connections) = (HashMap::new(), Vec::new());
    loop {
        match link.recv()? {
            Some((Answer::Socket(key), fds)) => {
                let fd = fds.into_iter().next().ok_or_else(missing)?;
                sockets.insert(key, fd);
            }
            Some((Answer::Connection { export, state, total_fds }, fds)) => {
                let mut fds = recv_fds(&mut link, fds, total_fds)?.into_iter();
                let socket = fds.next().ok_or_else(missing)?;
                connections.push((export, Handover { socket, state: *state, fds: fds.collect() }));
            }
            Some((Answer::End, _)) => return Ok(Some(Estate { sockets, connections, link })),
            Some((Answer::Error(what), _)) => {
                return Err(Error::new(ErrorKind::Busy, format!("the running server gives nothing over: {what}")));
            }
            other => return Err(unexpected(other.map(|(answer, _)| answer).as_ref())),
        }
    }
}

fn missing() -> Error {
    Error::new(ErrorKind::Protocol, "a descriptor is missing in a takeover")
}

fn recv_fds(link: &mut Link, mut fds: Vec<OwnedFd>, total: usize) -> Result<Vec<OwnedFd>> {
    while fds.len() < total {
        match link.recv()? {
            Some((Answer::Fds, more)) if !more.is_empty() => fds.extend(more),
            other => return Err(unexpected(other.map(|(answer, _)| answer).as_ref())),
        }
    }
    Ok(fds)
}

/// The sockets of ours that the successor does not know of: it would leave their clients alone.
pub fn unknown<'a>(listening: &'a [Listening], its: &[String]) -> Vec<&'a str> {
    let ours = listening.iter().map(|socket| socket.key.as_str());
    ours.filter(|key| !its.iter().any(|other| other == key)).collect()
}

/// Gives shares of everything to the successor. True when it says that it serves.
pub fn give(link: &mut Link, listening: &[Listening], connections: &[(String, Handover)]) -> bool {
    let given = || -> Result<()> {
        for socket in listening {
            link.send(&Answer::Socket(socket.key.clone()), &[socket.fd.as_fd()])?;
        }
        for (export, handover) in connections {
            give_connection(link, export, handover)?;
        }
        link.send(&Answer::End, &[])
    };
    given().is_ok() && matches!(link.recv(), Ok(Some((Answer::Done, _))))
}

fn give_connection(link: &Link, export: &str, handover: &Handover) -> Result<()> {
    let socket = std::iter::once(handover.socket.as_fd());
    let fds: Vec<BorrowedFd<'_>> = socket.chain(handover.fds.iter().map(OwnedFd::as_fd)).collect();
    let first = &fds[..fds.len().min(MAX_FDS)];
    let state = Box::new(handover.state.clone());
    link.send(&Answer::Connection { export: export.to_owned(), state, total_fds: fds.len() }, first)?;
    fds[first.len()..].chunks(MAX_FDS).try_for_each(|chunk| link.send(&Answer::Fds, chunk))
}
