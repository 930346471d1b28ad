//! One connection to a store: it sends requests and receives answers and events.
//!
//! It never reads more bytes than the next message has, so the descriptor is readable exactly when there is more. The
//! first part of a message is kept until the rest comes.

use std::collections::{HashSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use spile_core::{Error, ErrorKind, Result};

use super::wire::{self, HEADER_BYTES, Header, MAX_PAYLOAD_BYTES, MessageType};

/// A store that has not answered after this time is given up. Its daemon may pause for seconds while a newer one
/// replaces it.
const REPLY_LIMIT: Duration = Duration::from_secs(60);
/// The most different events that are kept until they are taken.
const MAX_EVENTS: usize = 4096;

/// An event: something changed at or below a watched path. Equal events that wait are merged into one. An event does
/// not tell the new state: read it from the store.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct WatchEvent {
    /// The path that changed.
    pub path: String,
    /// The token that was given with the watch.
    pub token: String,
}

pub(super) struct Connection {
    fd: OwnedFd,
    is_socket: bool,
    /// The part of the next message that has come.
    partial: Vec<u8>,
    events: VecDeque<WatchEvent>,
    last_req_id: u32,
    /// Why the connection has failed, if it has. Nothing is read after that, because it could be taken for something
    /// else.
    broken: Option<Error>,
    pub(super) reply_limit: Duration,
}

impl Connection {
    pub(super) fn new(fd: OwnedFd, is_socket: bool) -> Self {
        let partial = Vec::with_capacity(HEADER_BYTES + MAX_PAYLOAD_BYTES);
        let events = VecDeque::new();
        Self { fd, is_socket, partial, events, last_req_id: 0, broken: None, reply_limit: REPLY_LIMIT }
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Sends a request, waits for its answer, and returns the payload. Events that come meanwhile are kept. `what`
    /// names the request in errors.
    pub(super) fn exchange(&mut self, kind: MessageType, tx_id: u32, what: &str, payload: &[u8]) -> Result<Vec<u8>> {
        self.check_usable()?;
        self.last_req_id = self.last_req_id.wrapping_add(1).max(1);
        let req_id = self.last_req_id;
        let message = wire::message(kind, req_id, tx_id, payload).map_err(|e| within(what, &e))?;
        self.send(&message, what)?;
        let reply = self.wait_for_reply(kind, req_id).map_err(|e| within(what, &e));
        let (reply, payload) = self.note_broken(reply)?;
        match reply.message_type() {
            Some(MessageType::Error) => Err(refusal(what, &payload)),
            _ => Ok(payload),
        }
    }

    /// The next event; `None` when none has come within `timeout`.
    pub(super) fn next_event(&mut self, timeout: Option<Duration>) -> Result<Option<WatchEvent>> {
        if let Some(event) = self.events.pop_front() {
            return Ok(Some(event));
        }
        self.check_usable()?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let taken = self.receive(deadline).and_then(|message| match message {
            Some((header, _)) if header.message_type() != Some(MessageType::WatchEvent) => {
                Err(protocol(format!("a message of type {} that nothing had asked for", header.kind)))
            }
            Some((_, payload)) => self.keep_event(&payload),
            None => Ok(()),
        });
        self.note_broken(taken.map_err(|e| within("wait for events of xenstore", &e)))?;
        Ok(self.events.pop_front())
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    fn check_usable(&self) -> Result<()> {
        self.broken.as_ref().map_or(Ok(()), |error| Err(error.duplicate()))
    }

    fn note_broken<T>(&mut self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error| self.broken = Some(error.duplicate()))
    }

    /// Sends a message. The device takes it as a whole or refuses it with an errno; a socket that fails once has failed
    /// for ever.
    fn send(&mut self, message: &[u8], what: &str) -> Result<()> {
        let mut rest = message;
        while !rest.is_empty() {
            let sent = match self.is_socket {
                true => rustix::net::send(&self.fd, rest, SendFlags::NOSIGNAL),
                false => rustix::io::write(&self.fd, rest),
            };
            match sent {
                Ok(sent) => rest = &rest[sent.min(rest.len())..],
                Err(Errno::INTR) => {}
                Err(errno) => {
                    let failed = Err(Error::errno(format!("{what}: send to xenstore"), errno.raw_os_error()));
                    let is_refused = !self.is_socket && rest.len() == message.len();
                    return if is_refused { failed } else { self.note_broken(failed) };
                }
            }
        }
        Ok(())
    }

    fn wait_for_reply(&mut self, kind: MessageType, req_id: u32) -> Result<(Header, Vec<u8>)> {
        let deadline = Instant::now() + self.reply_limit;
        while let Some((header, payload)) = self.receive(Some(deadline))? {
            if header.message_type() == Some(MessageType::WatchEvent) {
                self.keep_event(&payload)?;
                if Instant::now() >= deadline {
                    break;
                }
                continue;
            }
            // Linux's device answers these two requests itself, without the number of the request.
            let is_unnumbered = matches!(kind, MessageType::Watch | MessageType::Unwatch) && header.req_id == 0;
            if header.req_id != req_id && !is_unnumbered {
                return Err(protocol(format!("an answer to request {}, where {req_id} was asked", header.req_id)));
            }
            if ![kind.raw(), MessageType::Error.raw()].contains(&header.kind) {
                return Err(protocol(format!("an answer of type {} to one of {}", header.kind, kind.raw())));
            }
            return Ok((header, payload));
        }
        let message = format!("no answer within {} s", self.reply_limit.as_secs_f32());
        Err(Error::new(ErrorKind::TimedOut, message))
    }

    fn keep_event(&mut self, payload: &[u8]) -> Result<()> {
        // Some stores and kernels put more texts after these two.
        let mut texts = wire::split(payload);
        let (Some(path), Some(token)) = (texts.next(), texts.next()) else {
            return Err(protocol("an event without path and token".into()));
        };
        let event = WatchEvent { path: wire::text(path)?.to_owned(), token: wire::text(token)?.to_owned() };
        if self.events.contains(&event) {
            return Ok(());
        }
        if self.events.len() == MAX_EVENTS {
            // A guest that may write below a watched node may write any number of names. One event for each watch is
            // enough, because its receiver reads the store anyway.
            let mut tokens = HashSet::new();
            self.events.retain(|event| tokens.insert(event.token.clone()));
        }
        if self.events.len() == MAX_EVENTS {
            return Err(Error::new(ErrorKind::Exhausted, format!("over {MAX_EVENTS} different events wait")));
        }
        self.events.push_back(event);
        Ok(())
    }

    /// The next message; `None` when it has not come completely by `deadline`.
    fn receive(&mut self, deadline: Option<Instant>) -> Result<Option<(Header, Vec<u8>)>> {
        loop {
            let mut wanted = HEADER_BYTES;
            if let Some(bytes) = self.partial.first_chunk() {
                let header = Header::decode(bytes)?;
                wanted += header.len as usize;
                if self.partial.len() == wanted {
                    let payload = self.partial[HEADER_BYTES..].to_vec();
                    self.partial.clear();
                    return Ok(Some((header, payload)));
                }
            }
            if !self.wait_readable(deadline)? {
                return Ok(None);
            }
            self.read_some(wanted - self.partial.len())?;
        }
    }

    fn read_some(&mut self, most: usize) -> Result<()> {
        let mut bytes = [0; HEADER_BYTES + MAX_PAYLOAD_BYTES];
        match rustix::io::read(&self.fd, &mut bytes[..most]) {
            Ok(0) => Err(Error::new(ErrorKind::Io, "the store has closed the connection")),
            Ok(count) => {
                self.partial.extend_from_slice(&bytes[..count]);
                Ok(())
            }
            Err(Errno::INTR | Errno::AGAIN) => Ok(()),
            Err(errno) => Err(Error::errno("receive", errno.raw_os_error())),
        }
    }

    /// Waits until the descriptor is readable. False when the deadline comes first. Looks at least once.
    fn wait_readable(&self, deadline: Option<Instant>) -> Result<bool> {
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            match poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], left.as_ref()) {
                Ok(count) => return Ok(count > 0),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::errno("poll", errno.raw_os_error())),
            }
        }
    }
}

fn protocol(message: String) -> Error {
    Error::new(ErrorKind::Protocol, message)
}

/// Adds the name `what` of the operation to an error.
pub(super) fn within(what: &str, error: &Error) -> Error {
    match error.os_errno() {
        Some(errno) => Error::errno(format!("{what}: {}", error.message()), errno),
        None => Error::new(error.kind(), format!("{what}: {error}")),
    }
}

/// The error that an answer of the store names.
fn refusal(what: &str, payload: &[u8]) -> Error {
    let word = wire::split(payload).next().unwrap_or_default();
    match std::str::from_utf8(word).ok().and_then(wire::errno_of) {
        Some(errno) => Error::errno(format!("{what}: {}", wire::errno_word(errno)), errno),
        None => {
            let shown = word[..word.len().min(40)].escape_ascii();
            Error::new(ErrorKind::Io, format!("{what}: the store's error is `{shown}`, which is not known here"))
        }
    }
}
