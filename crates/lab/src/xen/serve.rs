//! The host's thread. It waits for all sockets at once, and never for a single one.

use std::collections::BTreeMap;
use std::io::{ErrorKind as IoKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with};
use spile_core::{Error, ErrorKind, Result, ResultExt};
use spile_xen::DomId;
use spile_xen::store::wire::{HEADER_BYTES, Header};

use super::domains::{Change, Domains};
use super::message::{Words, address, receive, send};
use super::store::{ConnId, Xenstored};

/// The largest number of connections. More are closed as soon as they come. A disk has three: two from its process, one
/// from its guest.
const MAX_CONNECTIONS: usize = 4096;
/// The largest number of connections to one guest's xenstored socket.
const MAX_GUEST_SESSIONS: usize = 128;
/// The wait after the system had no descriptor or no memory for a connection. Without it the thread would try again at
/// once, without end.
const BREATH: Duration = Duration::from_millis(10);
/// The number of bytes taken from one connection before the other connections have their turn.
const TURN_BYTES: usize = 16 << 10;

/// A connection to `DIR/hypervisor`.
struct Caller {
    socket: OwnedFd,
    /// The domain that the connection has made; domain 0 when it has made none.
    domain: Option<DomId>,
}

/// A connection to a xenstored socket.
struct Session {
    stream: UnixStream,
    id: ConnId,
    domain: DomId,
    input: Vec<u8>,
}

/// What a socket is ready for.
#[derive(Clone, Copy)]
enum Ready {
    Stop,
    Hypervisor,
    Listener(DomId),
    Caller(u64),
    Session(u64),
}

pub(super) struct Broker {
    dir: PathBuf,
    stop: Arc<OwnedFd>,
    hypervisor: OwnedFd,
    listeners: BTreeMap<DomId, UnixListener>,
    callers: BTreeMap<u64, Caller>,
    sessions: BTreeMap<u64, Session>,
    next: u64,
    domains: Domains,
    store: Xenstored,
}

impl Broker {
    pub fn new(dir: &Path, stop: Arc<OwnedFd>) -> Result<Self> {
        let hypervisor = listen_at(&dir.join("hypervisor"))?;
        let listener = listen_for(dir, DomId(0))?;
        Ok(Self {
            dir: dir.to_owned(),
            stop,
            hypervisor,
            listeners: BTreeMap::from([(DomId(0), listener)]),
            callers: BTreeMap::new(),
            sessions: BTreeMap::new(),
            next: 0,
            domains: Domains::default(),
            store: Xenstored::new(),
        })
    }

    pub fn run(mut self) {
        loop {
            for ready in self.wait() {
                match ready {
                    Ready::Stop => return self.clean_up(),
                    Ready::Hypervisor => self.accept_caller(),
                    Ready::Listener(domain) => self.accept_session(domain),
                    Ready::Caller(number) => self.serve_caller(number),
                    Ready::Session(number) => self.serve_session(number),
                }
            }
            self.send_all();
        }
    }

    fn wait(&mut self) -> Vec<Ready> {
        let mut names = vec![Ready::Stop];
        let mut fds = vec![PollFd::new(&*self.stop, PollFlags::IN)];
        for (number, caller) in &self.callers {
            names.push(Ready::Caller(*number));
            fds.push(PollFd::new(&caller.socket, PollFlags::IN));
        }
        for (number, session) in &self.sessions {
            names.push(Ready::Session(*number));
            let outbox = self.store.outbox(session.id);
            let mut flags = if outbox.is_busy() { PollFlags::empty() } else { PollFlags::IN };
            flags.set(PollFlags::OUT, outbox.front().is_some());
            fds.push(PollFd::new(&session.stream, flags));
        }
        // After those who may have gone and left room.
        names.push(Ready::Hypervisor);
        fds.push(PollFd::new(&self.hypervisor, PollFlags::IN));
        for (domain, listener) in &self.listeners {
            names.push(Ready::Listener(*domain));
            fds.push(PollFd::new(listener, PollFlags::IN));
        }
        match poll(&mut fds, None) {
            Ok(_) => {}
            Err(Errno::NOMEM) => thread::sleep(BREATH),
            Err(_) => return Vec::new(),
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        fds.iter().zip(names).filter(|(fd, _)| is_ready(fd)).map(|(_, name)| name).collect()
    }

    fn clean_up(&self) {
        let _ = std::fs::remove_file(self.dir.join("hypervisor"));
        self.listeners.keys().for_each(|domain| self.remove_socket(*domain));
    }

    fn remove_socket(&self, domain: DomId) {
        let _ = std::fs::remove_file(store_path(&self.dir, domain));
    }

    fn number(&mut self) -> Option<u64> {
        self.next += 1;
        (self.callers.len() + self.sessions.len() < MAX_CONNECTIONS).then_some(self.next)
    }

    fn accept_caller(&mut self) {
        match accept_with(&self.hypervisor, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => {
                if let Some(number) = self.number() {
                    self.callers.insert(number, Caller { socket, domain: None });
                }
            }
            Err(Errno::AGAIN) => {}
            Err(_) => thread::sleep(BREATH),
        }
    }

    fn accept_session(&mut self, domain: DomId) {
        // A domain that has ended in this very turn has no listener any more.
        let Some(listener) = self.listeners.get(&domain) else { return };
        let accepted = listener.accept().and_then(|(stream, _)| stream.set_nonblocking(true).map(|()| stream));
        let stream = match accepted {
            Ok(stream) => stream,
            Err(e) if e.kind() == IoKind::WouldBlock => return,
            Err(_) => return thread::sleep(BREATH),
        };
        let others = self.sessions.values().filter(|session| session.domain == domain).count();
        let has_room = domain == DomId(0) || others < MAX_GUEST_SESSIONS;
        if let Some(number) = self.number().filter(|_| has_room) {
            let id = self.store.connect(domain);
            self.sessions.insert(number, Session { stream, id, domain, input: Vec::new() });
        }
    }

    fn serve_caller(&mut self, number: u64) {
        let Some(mut caller) = self.callers.remove(&number) else { return };
        match self.answer(&mut caller) {
            Ok(true) => {
                self.callers.insert(number, caller);
            }
            // Gone, or as good as that: with it goes what it was.
            Ok(false) | Err(_) => {
                if let Some(domain) = caller.domain
                    && self.domains.remove(domain)
                {
                    self.domain_ended(domain);
                }
            }
        }
    }

    /// Takes one message and sends its reply. False when the connection has ended.
    fn answer(&mut self, caller: &mut Caller) -> rustix::io::Result<bool> {
        let mut message = match receive(&caller.socket) {
            Ok(Some(message)) => message,
            Ok(None) => return Ok(false),
            Err(Errno::AGAIN) => return Ok(true),
            Err(e) => return Err(e),
        };
        let Some(change) = self.domains.change(caller.socket.as_fd(), caller.domain, &mut message) else {
            match self.domains.answer(caller.domain, &message.words) {
                Ok(reply) => send(&caller.socket, &reply.words, &reply.fds)?,
                Err(errno) => send(&caller.socket, &failure(errno), &[])?,
            }
            return Ok(true);
        };
        let change = change.and_then(|change| self.apply(change, caller));
        send(&caller.socket, &change.map_or_else(failure, |()| Words::default()), &[])?;
        Ok(true)
    }

    fn apply(&mut self, change: Change, caller: &mut Caller) -> Result<(), Errno> {
        match change {
            Change::Created(id) => {
                let Ok(listener) = listen_for(&self.dir, id) else {
                    self.domains.remove(id);
                    return Err(Errno::ADDRINUSE);
                };
                self.listeners.insert(id, listener);
                caller.domain = Some(id);
                self.store.introduce(id);
            }
            Change::Destroyed(id) => {
                // Its process loses the connection, and with it the right to be a domain.
                self.callers.retain(|_, caller| caller.domain != Some(id));
                self.domain_ended(id);
            }
        }
        Ok(())
    }

    fn domain_ended(&mut self, domain: DomId) {
        self.listeners.remove(&domain);
        self.remove_socket(domain);
        let store = &mut self.store;
        self.sessions.retain(|_, session| {
            let is_other = session.domain != domain;
            if !is_other {
                store.disconnect(session.id);
            }
            is_other
        });
        self.store.release(domain);
    }

    fn serve_session(&mut self, number: u64) {
        let Some(mut session) = self.sessions.remove(&number) else { return };
        if self.take_requests(&mut session) {
            self.sessions.insert(number, session);
        } else {
            self.store.disconnect(session.id);
        }
    }

    /// Takes the bytes that have come, and runs all whole requests. False when the connection has ended.
    fn take_requests(&mut self, session: &mut Session) -> bool {
        let mut bytes = [0; TURN_BYTES];
        if !self.store.outbox(session.id).is_busy() {
            match session.stream.read(&mut bytes) {
                Ok(0) => return false,
                Ok(len) => session.input.extend_from_slice(&bytes[..len]),
                Err(e) if matches!(e.kind(), IoKind::WouldBlock | IoKind::Interrupted) => {}
                Err(_) => return false,
            }
        }
        let mut done = 0;
        while let Some((head, rest)) = session.input[done..].split_first_chunk::<HEADER_BYTES>() {
            // Who sends more than a message may have is cut off, as by any xenstored.
            let Ok(header) = Header::decode(head) else { return false };
            let Some(payload) = rest.get(..header.len as usize) else { break };
            self.store.handle(session.id, header, payload);
            done += HEADER_BYTES + payload.len();
        }
        session.input.drain(..done);
        true
    }

    /// Sends what can be sent without waiting.
    fn send_all(&mut self) {
        let mut ended = Vec::new();
        for (number, session) in &mut self.sessions {
            let outbox = self.store.outbox(session.id);
            let mut is_open = !outbox.is_overrun();
            while is_open && let Some(bytes) = outbox.front() {
                match session.stream.write(bytes) {
                    Ok(len) => outbox.advance(len),
                    Err(e) if e.kind() == IoKind::Interrupted => {}
                    Err(e) if e.kind() == IoKind::WouldBlock => break,
                    Err(_) => is_open = false,
                }
            }
            if !is_open {
                ended.push(*number);
            }
        }
        for number in ended {
            if let Some(session) = self.sessions.remove(&number) {
                self.store.disconnect(session.id);
            }
        }
    }
}

fn failure(errno: Errno) -> Words {
    [errno.raw_os_error() as u64, 0, 0, 0, 0, 0]
}

fn store_path(dir: &Path, domain: DomId) -> PathBuf {
    if domain == DomId(0) { dir.join("xenstored") } else { dir.join(format!("xenstored-{domain}")) }
}

fn listen_for(dir: &Path, domain: DomId) -> Result<UnixListener> {
    let path = store_path(dir, domain);
    // Nobody but the one host of this folder has such sockets.
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).map_err(|e| Error::io("cannot listen", e)).at_path(&path)?;
    listener.set_nonblocking(true).map_err(|e| Error::io("cannot prepare a socket", e)).at_path(&path)?;
    Ok(listener)
}

/// Listens at `path`, unless somebody does so already.
fn listen_at(path: &Path) -> Result<OwnedFd> {
    let address = address(path)?;
    let open = |flags| socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags | SocketFlags::CLOEXEC, None);
    let failed = |e: Errno| Error::io("cannot listen", e.into()).at_path(path);
    let probe = open(SocketFlags::empty()).map_err(failed)?;
    match connect(&probe, &address) {
        Ok(()) => {
            let error = Error::new(ErrorKind::Busy, "a Xen host is here already");
            return Err(error.at_path(path).hint("end it, or choose another folder"));
        }
        Err(Errno::CONNREFUSED) => {
            std::fs::remove_file(path).map_err(|e| Error::io("cannot replace", e)).at_path(path)?
        }
        Err(_) => {}
    }
    let socket = open(SocketFlags::NONBLOCK).map_err(failed)?;
    bind(&socket, &address).and_then(|()| listen(&socket, 64)).map_err(failed)?;
    Ok(socket)
}
