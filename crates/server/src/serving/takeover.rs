//! A planned restart: the running server gives its sockets, its guests' connections and its disks to a new process.
//!
//! The old server first finds out whether the new one will listen on everything it has; only then does it stop, answer what
//! is in flight, and close its disks, which frees their locks. It gives shares of all descriptors to the new one, which
//! opens the disks and says that it is ready. The old one's last `Done` then makes it the server: guests see a pause, and
//! nothing else. Before that the new one leaves the guests' queues alone, for the old one goes on where they were
//! when the new one fails or falls silent; after it the old one does nothing any more. A successor that hangs with the disks open is
//! ended. docs/control.md describes the messages and their layouts.
//!
//! | old server | new server |
//! |---|---|
//! | | `TakeOver`: the sockets' keys, the count of queues, the disks, the layout it knows |
//! | `Error` if that does not do; else stops, closes, `Begin`, `Socket`s, `Connection`s with `Fds`, `End` | |
//! | | opens, `Done` |
//! | `Done` | serves, tells the service manager, hangs up |
//! | ends | |

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use spile_core::{Code, Disk as _, Error, ErrorKind, Result, ResultExt};
use spile_engine::{TakesPromised, take_promised};
use spile_front_vhost::Handover;

use super::control::{Answer, LAYOUT, LAYOUT_OF_LEFT, Link, MAX_FDS, Request, failed_there, unexpected};
use super::disks::{self as open_disks, Open};
use super::fronts::{Listening, Role};
use super::identity::{self, Exported};
use super::limits::Kept;
use super::successor::Told;
use super::trouble::KeptPolicy;

/// What users have told a server while it ran. A build that does not tell one of them has none of it.
#[derive(Clone, Default)]
pub struct Orders {
    /// The shape of the requests to each export.
    pub shapes: Vec<(String, String)>,
    /// The limits of disks and groups.
    pub limits: Kept,
    /// The policies for trouble.
    pub policies: Vec<KeptPolicy>,
    /// The names of disks that were detached.
    pub detached: Vec<String>,
    /// Addresses on which it listens no more.
    pub closed: Vec<String>,
}

/// What a server has that its successor goes on with.
pub struct Inheritance {
    /// Sockets that listen, by their key.
    pub sockets: HashMap<String, OwnedFd>,
    /// Guests' connections, with their exports.
    pub connections: Vec<(String, Handover)>,
    /// The size of each export in bytes; empty when the old server is of a build that does not say it.
    sizes: Vec<(String, u64)>,
    /// What its users had told it.
    pub orders: Orders,
    /// The disks for which the old server was asked, as their paths named them then.
    asked: Vec<Exported>,
    link: Link,
    /// The old server's files are promised to this process.
    _takes: TakesPromised,
}

impl Inheritance {
    /// Tells the old server that everything is ready here, and waits for its answer that this process is the server now.
    ///
    /// # Errors
    /// When it is gone, or goes on itself.
    pub fn confirm(&mut self) -> Result<()> {
        // An old server that goes on itself has said so before it hung up.
        let _ = self.link.send(&Answer::Done, &[]);
        match recv_slow(&mut self.link) {
            Ok(Some((Answer::Done, _))) => Ok(()),
            Ok(Some((Answer::Error(what), _))) => Err(refused(&what)),
            Ok(other) => Err(unexpected(other.map(|(answer, _)| answer).as_ref()).hint(BROKEN_OFF)),
            Err(error) => Err(error.hint(BROKEN_OFF)),
        }
    }

    /// Refuses disks that are not those which the old server was asked for, because another file was put in the place of
    /// one before it was opened, or which have another size than they had there.
    ///
    /// # Errors
    /// `InvalidInput`.
    pub fn compare_disks(&self, disks: &[Open]) -> Result<()> {
        identity::compare(&self.asked, &open_disks::exported(disks))?;
        for (export, size_bytes) in &self.sizes {
            let open = disks.iter().find(|open| open.names.contains(export));
            if let Some(other) = open.map(|open| open.disk.info().size_bytes).filter(|other| other != size_bytes) {
                let what = format!("export {export:?} has {size_bytes} bytes, and {other} here");
                return Err(Error::new(ErrorKind::InvalidInput, what).hint("the running server goes on"));
            }
        }
        Ok(())
    }

    /// The names of the exports that the server before served.
    pub fn exports(&self) -> Vec<String> {
        match self.sizes.is_empty() {
            // A build of layout 0 does not say them, and gives only what was asked for.
            true => self.asked.iter().map(|exported| exported.name.clone()).collect(),
            false => self.sizes.iter().map(|(name, _)| name.clone()).collect(),
        }
    }

    /// The keys of its sockets that nobody has taken.
    pub fn keys(&self) -> impl Iterator<Item = &String> {
        self.sockets.keys()
    }

    /// These exports are not gone on with: the old server does not have them any more.
    pub fn forget(&mut self, exports: &[String]) {
        self.asked.retain(|exported| !exports.contains(&exported.name));
    }

    /// Takes the socket of this key.
    pub fn take_socket(&mut self, key: &str) -> Option<OwnedFd> {
        self.sockets.remove(key)
    }
}

const BROKEN_OFF: &str = "if it goes on, all is as before; if it was ended, start again: guests reconnect";

/// How long the old server may take to answer what is in flight, to flush its disks and to close them.
const PATIENCE: Duration = Duration::from_secs(120);
/// After so much of that the log says what is waited for.
const SILENCE: Duration = Duration::from_secs(5);

/// Asks the server at `control` for all it has. `None` when there is none.
///
/// # Errors
/// When it refuses, or breaks off.
pub fn ask(control: &Path, sockets: Vec<String>, queues: u16, disks: Vec<Exported>) -> Result<Option<Inheritance>> {
    let request = Request::TakeOver { sockets: sockets.clone(), queues, disks: Some(disks.clone()), layout: LAYOUT };
    let given = match ask_once(control, &request) {
        // A build of layout 0 knows no identities of disks. It compares the keys of its guests' sockets, which name their disks.
        Err(error) if error.kind() == ErrorKind::Busy && error.is(Code::RequestUnknown) => {
            ask_once(control, &Request::TakeOver { sockets, queues, disks: None, layout: 0 })
        }
        given => given,
    };
    Ok(given?.map(|given| Inheritance { asked: disks, ..given }))
}

/// What the server at `control` would go on with, if it is of a build that tells it.
///
/// # Errors
/// When it cannot be asked.
pub fn learn(control: &Path) -> Result<Option<Told>> {
    let Some(mut link) = Link::connect(control)? else { return Ok(None) };
    let _ = link.send(&Request::Tell, &[]);
    match link.recv()? {
        Some((Answer::Told(told), _)) => Ok(Some(told)),
        _ => Ok(None),
    }
}

fn ask_once(control: &Path, request: &Request) -> Result<Option<Inheritance>> {
    let Some(link) = Link::connect(control)? else { return Ok(None) };
    // A server that refuses to listen to us says so before it hangs up.
    let _ = link.send(request, &[]);
    receive(link).map(Some).at_path(control)
}

fn receive(mut link: Link) -> Result<Inheritance> {
    let (mut sockets, mut connections, mut sizes) = (HashMap::new(), Vec::new(), Vec::new());
    let mut orders = Orders::default();
    loop {
        match recv_slow(&mut link)? {
            Some((Answer::Begin { layout, sizes: of_exports, shapes, limits, policies, detached, closed }, _))
                if layout <= LAYOUT =>
            {
                (sizes, orders) = (of_exports, Orders { shapes, limits, policies, detached, closed });
            }
            Some((Answer::Socket(key), fds)) => {
                let fd = fds.into_iter().next().ok_or_else(missing)?;
                sockets.insert(key, fd);
            }
            Some((Answer::Connection { export, state, total_fds }, fds)) => {
                let mut fds = recv_fds(&mut link, fds, total_fds)?.into_iter();
                let socket = fds.next().ok_or_else(missing)?;
                connections.push((export, Handover { socket, state: *state, fds: fds.collect() }));
            }
            Some((Answer::End, _)) => {
                return Ok(Inheritance {
                    sockets,
                    connections,
                    sizes,
                    orders,
                    asked: Vec::new(),
                    link,
                    _takes: take_promised(),
                });
            }
            Some((Answer::Error(what), _)) => return Err(refused(&what)),
            None => return Err(unexpected(None).hint(BROKEN_OFF)),
            Some((other, _)) => return Err(unexpected(Some(&other))),
        }
    }
}

/// The next message of a server that may have much to do before it sends it. The log says so when it takes long.
fn recv_slow(link: &mut Link) -> Result<Option<(Answer, Vec<OwnedFd>)>> {
    link.set_patience(SILENCE);
    match link.recv() {
        Err(error) if error.kind() == ErrorKind::TimedOut => {
            let process = link.peer_pid().map_or_else(String::new, |pid| format!(" (process {pid})"));
            tracing::warn!(
                "the running server{process} has not answered in the takeover for {} s: it is waited for, at most {} s",
                SILENCE.as_secs(),
                PATIENCE.as_secs()
            );
            link.set_patience(PATIENCE - SILENCE);
            link.recv()
        }
        message => message,
    }
}

fn refused(what: &str) -> Error {
    let said = failed_there(ErrorKind::Busy, what);
    Error::new(ErrorKind::Busy, "the running server hands nothing over").caused_by(said)
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

/// Refuses a successor with these sockets and queues: it would leave clients alone, or guests could not use what they have. Metrics are
/// nobody's disk: a successor may do without their address.
///
/// # Errors
/// `InvalidInput`.
pub fn compare(listening: &[Listening], queues: u16, its_sockets: &[String], its_queues: u16) -> Result<()> {
    let refuse = |what| Err(Error::new(ErrorKind::InvalidInput, what).hint("serve with the same options as before"));
    let needed = listening.iter().filter(|socket| socket.role != Role::Metrics);
    let ours = needed.map(|socket| socket.key.as_str());
    let unknown: Vec<_> = ours.filter(|key| !its_sockets.iter().any(|other| other == key)).collect();
    if !unknown.is_empty() {
        return refuse(format!("the successor does not listen on {}", unknown.join(", ")));
    }
    if its_queues < queues {
        return refuse(format!("the successor has --queues {its_queues} and this server {queues}"));
    }
    Ok(())
}

/// Refuses a successor that would serve other disks than `ours` under the same names. An older build does not say which
/// disks it serves: for guests the keys of their sockets tell, for NBD clients nothing does.
///
/// # Errors
/// `InvalidInput` with the disk that is served and the one that was asked for.
pub fn compare_disks(ours: &[Exported], listening: &[Listening], theirs: Option<&[Exported]>) -> Result<()> {
    match theirs {
        Some(theirs) => identity::compare(ours, theirs),
        None if listening.iter().all(|socket| socket.role != Role::Nbd) => Ok(()),
        None => Err(Error::new(ErrorKind::InvalidInput, "the successor does not say which disks it would serve")
            .hint("it is an older build: end this server, then start that one")),
    }
}

/// Gives shares of everything to the successor.
///
/// # Errors
/// When it is gone or takes nothing; `Unsupported` when it is an older build and would never do a guest's requests that wait.
pub fn give(
    link: &Link,
    layout: u32,
    sizes: Vec<(String, u64)>,
    orders: Orders,
    listening: &[Listening],
    connections: &[(String, Handover)],
) -> Result<()> {
    if layout < LAYOUT_OF_LEFT && connections.iter().any(|(_, handover)| handover.state.has_left()) {
        let what =
            "requests of a guest wait for trouble to pass, and the successor is an older build that would lose them";
        return Err(Error::new(ErrorKind::Unsupported, what).hint("try again when nothing waits (`spile ls`)"));
    }
    if layout > 0 {
        let (layout, Orders { shapes, limits, policies, detached, closed }) = (layout.min(LAYOUT), orders);
        link.send(&Answer::Begin { layout, sizes, shapes, limits, policies, detached, closed }, &[])?;
    }
    for socket in listening {
        link.send(&Answer::Socket(socket.key.clone()), &[socket.fd.as_fd()])?;
    }
    for (export, handover) in connections {
        give_connection(link, export, handover)?;
    }
    link.send(&Answer::End, &[])
}

/// Waits until the successor is ready, and tells it that it is the server now.
///
/// # Errors
/// `TimedOut` when it says nothing; else when it is gone.
pub fn make_it_the_server(link: &mut Link) -> Result<()> {
    match link.recv()? {
        Some((Answer::Done, _)) => link.send(&Answer::Done, &[]),
        None => Err(Error::new(ErrorKind::Shutdown, "the successor has ended before it served")),
        Some((other, _)) => Err(unexpected(Some(&other))),
    }
}

/// Waits until the successor has told the service manager that it is the server now: a manager that saw us end before
/// would take that for the service's end. The log says who serves now, or does not.
pub fn wait_until_it_serves(link: &mut Link) {
    let process = link.peer_pid().map_or_else(String::new, |pid| format!(" (process {pid})"));
    match link.recv::<Answer>() {
        Ok(None) => tracing::warn!("the successor{process} serves, and this server ends"),
        _ => tracing::error!(
            "the successor{process} has everything and does not say that it serves: this server ends; if that process hangs, \
             end it and start another"
        ),
    }
}

fn give_connection(link: &Link, export: &str, handover: &Handover) -> Result<()> {
    let socket = std::iter::once(handover.socket.as_fd());
    let fds: Vec<BorrowedFd<'_>> = socket.chain(handover.fds.iter().map(OwnedFd::as_fd)).collect();
    let first = &fds[..fds.len().min(MAX_FDS)];
    let state = Box::new(handover.state.clone());
    link.send(&Answer::Connection { export: export.to_owned(), state, total_fds: fds.len() }, first)?;
    fds[first.len()..].chunks(MAX_FDS).try_for_each(|chunk| link.send(&Answer::Fds, chunk))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use spile_engine::{Config, Engine};
    use spile_store::CacheMode;

    use super::*;
    use crate::serving::disks::Opening;

    #[test]
    fn a_successor_whose_path_named_another_file_when_it_was_opened_does_not_go_on() {
        let dir = tempfile::tempdir().unwrap();
        let [path, other] = ["a.raw", "b.raw"].map(|name| dir.path().join(name));
        [&path, &other].into_iter().for_each(|path| std::fs::write(path, [0; 4096]).unwrap());
        let spec = path.display().to_string().parse().unwrap();
        let opening = Opening::new(None, CacheMode::Page, Vec::new()).with_disks(vec![spec]);
        let link = Link::new(UnixStream::pair().unwrap().0).unwrap();
        let (sockets, connections, sizes) = (HashMap::new(), Vec::new(), Vec::new());
        let inheritance = Inheritance {
            sockets,
            connections,
            sizes,
            orders: Orders::default(),
            asked: opening.exported(),
            link,
            _takes: take_promised(),
        };
        let engine = Engine::start(Config { workers: 1, ..Config::default() }).unwrap();
        let open = || {
            let mut disks = Vec::new();
            opening.open(&engine, &mut disks, &[]).unwrap();
            let compared = inheritance.compare_disks(&disks);
            open_disks::close(&engine, disks, Ok(())).unwrap();
            compared
        };
        assert!(open().is_ok());
        std::fs::rename(&other, &path).unwrap();
        assert_eq!(open().unwrap_err().kind(), ErrorKind::InvalidInput);
        engine.shutdown();
    }
}
