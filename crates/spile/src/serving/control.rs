//! The control socket of `spile serve`, and both sides of what is said on it.
//!
//! A Unix socket; each message is one line of JSON, so that a person with `socat` can talk to it too. Descriptors travel
//! beside the first byte of their line, and the line says how many. Only the user that runs the server, and root,
//! are heard. One connection is heard at a time, and none may keep us waiting for long.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg, sockopt,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use spile_core::{Error, ErrorKind, Result, ResultExt};
use spile_front_vhost::ConnectionState;

/// The most descriptors beside one line (the kernel takes 253).
pub const MAX_FDS: usize = 200;
/// The longest line in bytes: a connection with all the memory regions and queues there can be is shorter.
const MAX_LINE_BYTES: usize = 1 << 20;
/// How long the other side may take to speak.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is asked of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Make a disk longer.
    Resize {
        /// Its export; empty for the first disk.
        export: String,
        /// Its new size.
        size_bytes: u64,
    },
    /// Give everything to the process that asks.
    TakeOver {
        /// What it will listen on: the keys of sockets.
        sockets: Vec<String>,
    },
}

/// What is answered.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It is done.
    Done,
    /// It failed, and why.
    Error(String),
    /// A takeover: a socket that listens, as the line's descriptor.
    Socket(String),
    /// A takeover: a guest's connection to an export. Its descriptors come beside this line and the following ones.
    Connection {
        /// The export.
        export: String,
        /// What is known of it.
        state: Box<ConnectionState>,
        /// How many descriptors it has in all, its socket first.
        total_fds: usize,
    },
    /// A takeover: more of a connection's descriptors.
    Fds,
    /// A takeover: that was all.
    End,
}

#[derive(Serialize, Deserialize)]
struct Line<T> {
    fds: usize,
    message: T,
}

/// One side of a conversation.
pub struct Link {
    stream: UnixStream,
    bytes: Vec<u8>,
    fds: VecDeque<OwnedFd>,
}

impl Link {
    fn new(stream: UnixStream) -> Result<Self> {
        let patient = stream.set_read_timeout(Some(PATIENCE)).and_then(|()| stream.set_write_timeout(Some(PATIENCE)));
        patient.map_err(|source| Error::io("prepare a control connection", source))?;
        Ok(Self { stream, bytes: Vec::new(), fds: VecDeque::new() })
    }

    /// Connects to a server's control socket. `None` when nobody listens there.
    ///
    /// # Errors
    /// The system's.
    pub fn connect(path: &Path) -> Result<Option<Self>> {
        match UnixStream::connect(path) {
            Ok(stream) => Self::new(stream).map(Some),
            Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused) => {
                Ok(None)
            }
            Err(e) => Err(Error::io("cannot connect to the control socket", e)).at_path(path),
        }
    }

    /// Waits this long for the other side from now on.
    pub fn set_patience(&self, patience: Duration) {
        // Fails for a zero only.
        let _ = self.stream.set_read_timeout(Some(patience));
    }

    /// Sends a message with at most [`MAX_FDS`] descriptors.
    ///
    /// # Errors
    /// When the other side is gone or takes nothing.
    pub fn send<T: Serialize>(&self, message: &T, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut line = serde_json::to_vec(&Line { fds: fds.len(), message })
            .map_err(|e| Error::new(ErrorKind::InvalidInput, "encode a control message").caused_by(e))?;
        line.push(b'\n');
        let mut done = 0;
        while done < line.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if done == 0 && !fds.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(fds));
            }
            match sendmsg(&self.stream, &[IoSlice::new(&line[done..])], &mut control, SendFlags::NOSIGNAL) {
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::io("send on the control socket", errno.into())),
            }
        }
        Ok(())
    }

    /// The next message and its descriptors; `None` when the other side has hung up.
    ///
    /// # Errors
    /// `Protocol` when it is no such message, or longer than any; `TimedOut` when it does not come.
    pub fn recv<T: DeserializeOwned>(&mut self) -> Result<Option<(T, Vec<OwnedFd>)>> {
        let end = loop {
            if let Some(end) = self.bytes.iter().position(|byte| *byte == b'\n') {
                break end;
            }
            if self.bytes.len() > MAX_LINE_BYTES {
                return Err(Error::new(ErrorKind::Protocol, "a line on the control socket is too long"));
            }
            if self.recv_some()? == 0 {
                return Ok(None);
            }
        };
        let line: Vec<u8> = self.bytes.drain(..=end).collect();
        let line: Line<T> = serde_json::from_slice(&line).map_err(|e| {
            Error::new(ErrorKind::Protocol, "a line on the control socket is not understood").caused_by(e)
        })?;
        if line.fds > self.fds.len() {
            return Err(Error::new(ErrorKind::Protocol, "descriptors are missing on the control socket"));
        }
        Ok(Some((line.message, self.fds.drain(..line.fds).collect())))
    }

    fn recv_some(&mut self) -> Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut chunk = [0; 64 << 10];
        let result = recvmsg(&self.stream, &mut [IoSliceMut::new(&mut chunk)], &mut control, RecvFlags::CMSG_CLOEXEC);
        let count = match result {
            Ok(received) => received.bytes,
            Err(Errno::INTR) => return self.recv_some(),
            Err(Errno::AGAIN) => {
                return Err(Error::new(ErrorKind::TimedOut, "the other side of the control socket says nothing"));
            }
            Err(errno) => return Err(Error::io("receive on the control socket", errno.into())),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                self.fds.extend(rights);
            }
        }
        if self.fds.len() > 2 * MAX_FDS {
            return Err(Error::new(ErrorKind::Protocol, "too many descriptors on the control socket"));
        }
        self.bytes.extend_from_slice(&chunk[..count]);
        Ok(count)
    }

    /// Asks and waits for the answer.
    ///
    /// # Errors
    /// What the server answers, or the conversation's own.
    pub fn ask(&mut self, request: &Request) -> Result<()> {
        self.send(request, &[])?;
        match self.recv()? {
            Some((Answer::Done, _)) => Ok(()),
            Some((Answer::Error(what), _)) => Err(Error::new(ErrorKind::Io, what)),
            other => Err(unexpected(other.map(|(answer, _)| answer).as_ref())),
        }
    }

    /// True when the other side may give orders: it is run by our user or by root.
    fn is_ours(&self) -> bool {
        let own = rustix::process::geteuid();
        sockopt::socket_peercred(&self.stream).is_ok_and(|peer| peer.uid == own || peer.uid.is_root())
    }
}

/// An answer that does not belong there, or none.
pub fn unexpected(answer: Option<&Answer>) -> Error {
    match answer {
        Some(answer) => {
            Error::new(ErrorKind::Protocol, format!("an unexpected answer on the control socket: {answer:?}"))
        }
        None => Error::new(ErrorKind::Protocol, "the server has hung up on the control socket"),
    }
}

/// Hears the control socket on a thread of its own, and passes on what is asked, with the way to answer.
///
/// # Errors
/// When the thread cannot be started.
pub fn listen(fd: OwnedFd, sink: impl Fn(Link, Request) -> bool + Send + 'static) -> Result<()> {
    let listener = UnixListener::from(fd);
    let thread = std::thread::Builder::new().name("spile-control".to_owned());
    let body = move || {
        for stream in listener.incoming() {
            let Ok(mut link) = stream.map_err(|e| Error::io("accept", e)).and_then(Link::new) else { continue };
            if !link.is_ours() {
                let _ = link.send(&Answer::Error("only the server's own user and root are heard".to_owned()), &[]);
                continue;
            }
            match link.recv::<Request>() {
                Ok(Some((request, _))) => {
                    if !sink(link, request) {
                        return;
                    }
                }
                Ok(None) => {}
                Err(error) => drop(link.send(&Answer::Error(error.to_string()), &[])),
            }
        }
    };
    thread.spawn(body).map(drop).map_err(|e| Error::io("start a thread for the control socket", e))
}

/// Something for the server's main thread.
pub enum Event {
    /// A signal that ends it.
    Signal,
    /// Something was asked.
    Asked(Link, Request),
}

/// A sink of [`listen`] that passes everything on to `events`.
pub fn to(events: mpsc::Sender<Event>) -> impl Fn(Link, Request) -> bool {
    move |link, request| events.send(Event::Asked(link, request)).is_ok()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn pair() -> (Link, Link) {
        let (a, b) = UnixStream::pair().unwrap();
        (Link::new(a).unwrap(), Link::new(b).unwrap())
    }

    #[test]
    fn descriptors_stay_with_their_lines() {
        let (a, mut b) = pair();
        let files: Vec<_> = (0..3).map(|_| tempfile::tempfile().unwrap()).collect();
        files[2].set_len(77).unwrap();
        a.send(&Answer::Done, &[]).unwrap();
        a.send(&Answer::Fds, &[files[0].as_fd(), files[1].as_fd()]).unwrap();
        a.send(&Answer::Socket("x".to_owned()), &[files[2].as_fd()]).unwrap();
        drop(a);
        assert!(matches!(b.recv().unwrap(), Some((Answer::Done, fds)) if fds.is_empty()));
        assert!(matches!(b.recv().unwrap(), Some((Answer::Fds, fds)) if fds.len() == 2));
        let Some((Answer::Socket(_), fds)) = b.recv().unwrap() else { panic!("no socket") };
        assert_eq!(rustix::fs::fstat(&fds[0]).unwrap().st_size, 77);
        assert!(b.recv::<Answer>().unwrap().is_none());
    }

    #[test]
    fn what_is_not_understood_is_an_error_and_not_the_end() {
        let (a, mut b) = pair();
        for line in ["nonsense\n", "{\"fds\":1,\"message\":\"done\"}\n", "{\"fds\":0,\"message\":{\"resize\":{}}}\n"] {
            rustix::io::write(&a.stream, line.as_bytes()).unwrap();
            assert_eq!(b.recv::<Request>().unwrap_err().kind(), ErrorKind::Protocol, "{line}");
        }
        let request = Request::Resize { export: String::new(), size_bytes: 1 << 30 };
        a.send(&request, &[]).unwrap();
        assert_eq!(b.recv::<Request>().unwrap().unwrap().0, request);
    }
}
