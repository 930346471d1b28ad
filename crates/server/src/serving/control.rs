//! Lines of JSON on the control socket: what a successor and the running server say to each other.
//!
//! Each message is one line; descriptors travel beside the first byte of their line, and the line says how many. All other
//! callers use HTTP on the same socket ([`super::api`]). The old request `resize` is still understood. docs/control.md
//! describes the messages of a takeover and their versions.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg, sockopt,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use spile_core::{Code, Error, ErrorKind, Result, ResultExt, coded_text, split_code};
use spile_front_vhost::ConnectionState;
use spile_image::Graph;
use spile_store::{HostStore, own_folder};

use tokio::sync::oneshot;

use super::api::Call;
use super::api::http::Pause;
use super::changes::Detached;
use super::growing::Growth;
use super::identity::Exported;
use super::life::SnapshotCall;
use super::limits::Kept;
use super::pausing::PauseCall;
use super::resizing::Resized;
use super::reverting::RevertCall;
use super::successor::Told;
use super::trouble::KeptPolicy;
use crate::process::Process;
use crate::socket_path::SocketPath;

/// The most descriptors beside one line (the kernel takes 253).
pub const MAX_FDS: usize = 200;
/// The longest line in bytes: a connection with all the memory regions and queues there can be is shorter.
const MAX_LINE_BYTES: usize = 1 << 20;
/// How long the other side may take to send a message.
const PATIENCE: Duration = Duration::from_secs(10);

/// The layout of a takeover's messages, as docs/control.md describes it. Layout 0 has no `Begin`.
pub const LAYOUT: u32 = 2;
/// The first layout in which a connection's state may have requests that were left undone.
pub const LAYOUT_OF_LEFT: u32 = 2;

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// The answer of a server of layout 0 to 2 to a request that it does not know begins so. Those servers send no codes.
const NOT_UNDERSTOOD: &str = "a line on the control socket is not understood";

impl Answer {
    /// The answer that a request failed with `error`.
    pub fn failed(error: &Error) -> Self {
        Self::Error(coded_text(error.code(), &error.to_string()))
    }
}

/// The error that [`Answer::Error`] stands for, as one of `kind`.
pub fn failed_there(kind: ErrorKind, said: &str) -> Error {
    let (code, words) = split_code(said);
    let of_older = said.starts_with(NOT_UNDERSTOOD).then_some(Code::RequestUnknown);
    code.or(of_older).into_iter().fold(Error::new(kind, words), Error::coded)
}

/// A request to a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Make a disk longer.
    Resize {
        /// The disk's export; empty for the first disk.
        export: String,
        /// Its new size in bytes.
        size_bytes: u64,
    },
    /// Give everything to the process that asks.
    TakeOver {
        /// The keys of the sockets that the successor will listen on.
        sockets: Vec<String>,
        /// The most queues that a guest may use there.
        queues: u16,
        /// The disks that the successor will serve. Builds of layout 0 neither send nor understand this.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        disks: Option<Vec<Exported>>,
        /// The newest layout that the successor understands, [`LAYOUT`]; 0 for builds that do not send it.
        #[serde(default, skip_serializing_if = "is_zero")]
        layout: u32,
    },
    /// Tell what a successor goes on with. Older builds do not understand this.
    Tell,
}

/// An answer of a server.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The request is done.
    Done,
    /// The request failed, and why: a [`coded_text`].
    Error(String),
    /// The first line of a takeover. It is left out for a successor that sends no layout.
    Begin {
        /// The layout of the lines that follow, not above the successor's.
        layout: u32,
        /// The size of each export in bytes.
        sizes: Vec<(String, u64)>,
        /// The shape of the requests to each export, as `spile serve` takes it. Older builds neither send nor read it.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        shapes: Vec<(String, String)>,
        /// The limits of disks and groups. Older builds neither send nor read them.
        #[serde(default, skip_serializing_if = "Kept::is_empty")]
        limits: Kept,
        /// The policies for trouble. Older builds neither send nor read them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        policies: Vec<KeptPolicy>,
        /// The names of disks that were detached since the server began. Older builds neither send nor read them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        detached: Vec<String>,
        /// The addresses on which it listens no more. Older builds neither send nor read them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        closed: Vec<String>,
    },
    /// What a successor goes on with.
    Told(Told),
    /// A takeover: the key of a listening socket, which is the line's descriptor.
    Socket(String),
    /// A takeover: a guest's connection to an export. Its descriptors come beside this line and the following ones.
    Connection {
        /// The export that the guest uses.
        export: String,
        /// The connection's state.
        state: Box<ConnectionState>,
        /// How many descriptors it has in all, its socket first.
        total_fds: usize,
    },
    /// A takeover: more of a connection's descriptors.
    Fds,
    /// The last line of a takeover.
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
    patience: Duration,
}

impl Link {
    /// A conversation over `stream`, which is in blocking mode.
    ///
    /// # Errors
    /// The system's.
    pub fn new(stream: UnixStream) -> Result<Self> {
        let patient = stream.set_write_timeout(Some(PATIENCE));
        patient.map_err(|source| Error::io("prepare a control connection", source))?;
        Ok(Self { stream, bytes: Vec::new(), fds: VecDeque::new(), patience: PATIENCE })
    }

    /// Connects to a server's control socket. `None` when nobody listens there.
    ///
    /// # Errors
    /// `Denied` when another user than root and this one listens there; the system's.
    pub fn connect(path: &Path) -> Result<Option<Self>> {
        own_folder::refuse_foreign_socket(path)?;
        match SocketPath::of(path).and_then(|reached| UnixStream::connect(reached.path())) {
            Ok(stream) => {
                let peer =
                    sockopt::socket_peercred(&stream).map_err(|errno| Error::io("ask who listens", errno.into()))?;
                match peer.uid.as_raw() {
                    user if own_folder::is_trusted_user(user) => Self::new(stream).map(Some),
                    user => Err(own_folder::foreign_socket(user)).at_path(path),
                }
            }
            Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused) => {
                Ok(None)
            }
            Err(e) => Err(Error::io("cannot connect to the control socket", e)).at_path(path),
        }
    }

    /// Waits this long for each message from now on.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
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
        let deadline = Instant::now() + self.patience;
        let end = loop {
            if let Some(end) = self.bytes.iter().position(|byte| *byte == b'\n') {
                break end;
            }
            if self.bytes.len() > MAX_LINE_BYTES {
                return Err(Error::new(ErrorKind::Protocol, "a line on the control socket is too long"));
            }
            if self.recv_some(deadline)? == 0 {
                return Ok(None);
            }
        };
        let line: Vec<u8> = self.bytes.drain(..=end).collect();
        let line: Line<T> = serde_json::from_slice(&line)
            .map_err(|e| Error::new(ErrorKind::Protocol, NOT_UNDERSTOOD).coded(Code::RequestUnknown).caused_by(e))?;
        if line.fds > self.fds.len() {
            return Err(Error::new(ErrorKind::Protocol, "descriptors are missing on the control socket"));
        }
        Ok(Some((line.message, self.fds.drain(..line.fds).collect())))
    }

    fn recv_some(&mut self, deadline: Instant) -> Result<usize> {
        let silent = || Error::new(ErrorKind::TimedOut, "the other side of the control socket says nothing");
        // The deadline is for the whole message, so a caller that sends byte by byte gets no more time. A time-out of zero is refused
        // by the system: then no time is left.
        let left = deadline.saturating_duration_since(Instant::now());
        self.stream.set_read_timeout(Some(left)).map_err(|_| silent())?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut chunk = [0; 64 << 10];
        let result = recvmsg(&self.stream, &mut [IoSliceMut::new(&mut chunk)], &mut control, RecvFlags::CMSG_CLOEXEC);
        let count = match result {
            Ok(received) => received.bytes,
            Err(Errno::INTR) => return self.recv_some(deadline),
            Err(Errno::AGAIN) => return Err(silent()),
            // The other side has hung up with something of ours unread.
            Err(Errno::CONNRESET) => return Ok(0),
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

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// What the server answers, or the conversation's own.
    pub fn ask(&mut self, request: &Request) -> Result<()> {
        // A server that refuses to listen says so before it hangs up, so the answer is read even when the request cannot be sent.
        let _ = self.send(request, &[]);
        match self.recv()? {
            Some((Answer::Done, _)) => Ok(()),
            Some((Answer::Error(what), _)) => Err(failed_there(ErrorKind::Io, &what)),
            other => Err(unexpected(other.map(|(answer, _)| answer).as_ref())),
        }
    }

    /// The number of the process at the other end, as it was when it connected; `None` where the system does not know it.
    pub fn peer_pid(&self) -> Option<i32> {
        sockopt::socket_peercred(&self.stream).ok().map(|peer| peer.pid.as_raw_pid())
    }

    /// The process at the other end.
    ///
    /// # Errors
    /// When it has ended; the system's.
    pub fn peer(&self) -> Result<Process> {
        Process::peer_of(self.stream.as_fd())
    }
}

/// The error for an answer that does not belong there, or for no answer.
pub fn unexpected(answer: Option<&Answer>) -> Error {
    match answer {
        Some(answer) => {
            Error::new(ErrorKind::Protocol, format!("an unexpected answer on the control socket: {answer:?}"))
        }
        None => Error::new(ErrorKind::Protocol, "the server has hung up on the control socket"),
    }
}

/// An event for the server's main thread.
pub enum Event {
    /// A signal asks the server to end.
    Signal,
    /// A front has ended by itself.
    Ended,
    /// A line came on the control socket.
    Line(LineRequest),
    /// A call of the control API came.
    Called(Call),
    /// A call of the control API came for a snapshot.
    Snapshot(SnapshotCall),
    /// A call of the control API came for a pause.
    Pause(PauseCall),
    /// A call of the control API came to have a disk go back.
    Revert(RevertCall),
    /// Somebody asks who uses the disk of this name.
    InUse(String, oneshot::Sender<Option<String>>),
    /// A disk has got its new size, or not.
    Resized(Resized),
    /// A thread has opened the disk of this name, which is to be served, or not.
    Attached(String),
    /// A disk that is served no more has been closed, or not.
    Detached(Box<Detached>),
    /// The disk that grows so wants a longer device.
    WantsRoom(Arc<Growth>),
    /// The command that makes the device of this disk longer has ended so.
    RoomMade(Arc<Growth>, Result<()>),
    /// The disk of this name has another graph now. An event may wait while the server is handed over: it does not keep the graph, whose files the successor is to
    /// have.
    Exchanged(String, Weak<Graph<HostStore>>),
}

/// A request that came as a line, and the way to answer it.
pub struct LineRequest {
    /// The request.
    pub request: Request,
    /// The way to answer it.
    pub link: Link,
    /// A message here lets other callers in again. When it is dropped, nobody is ever let in again.
    go_on: mpsc::Sender<()>,
}

impl LineRequest {
    /// Answers that the request is done, or why not; then others are let in again.
    pub fn answer(self, done: &Result<()>) {
        self.answer_with(&done.as_ref().map_or_else(Answer::failed, |()| Answer::Done));
    }

    /// Answers so; then others are let in again.
    pub fn answer_with(self, answer: &Answer) {
        // A caller that has gone does not need the answer.
        let _ = self.link.send(answer, &[]);
        let _ = self.go_on.send(());
    }
}

/// Reads one request from `stream` and passes it on. `close_door` keeps all other callers out until it is answered.
pub fn answer_line(stream: UnixStream, events: &mpsc::Sender<Event>, close_door: impl Fn(Pause) -> bool) {
    let Ok(mut link) = Link::new(stream) else { return };
    let request = match link.recv::<Request>() {
        Ok(Some((request, _))) => request,
        Ok(None) => return,
        Err(error) => return drop(link.send(&Answer::failed(&error), &[])),
    };
    let ((closed, is_closed), (open, open_again)) = (mpsc::channel(), oneshot::channel());
    if !close_door(Pause { closed, open_again }) || is_closed.recv().is_err() {
        return;
    }
    let (go_on, answered) = mpsc::channel();
    let is_passed_on = events.send(Event::Line(LineRequest { request, link, go_on })).is_ok();
    if is_passed_on && answered.recv().is_ok() {
        let _ = open.send(());
    }
}

/// Answers that nobody listens to this caller, and hangs up.
pub fn refuse_line(stream: UnixStream, error: &Error) {
    if let Ok(link) = Link::new(stream) {
        let _ = link.send(&Answer::failed(error), &[]);
    }
}

#[cfg(test)]
mod tests {
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
