//! The socket of one front end: it receives whole messages and sends whole replies, with their descriptors.
//!
//! Each socket has its own thread. A front end that sends half a message, or takes no reply, therefore holds up itself
//! only. The time for a message is bounded, also for a front end that sends it byte by byte.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use smallvec::SmallVec;
use spile_core::{Error, ErrorKind, Result};

use crate::wire::{HEADER_BYTES, Header, Invalid, MAX_FDS};

/// The longest wait for the rest of a message, or for room for a reply.
const PATIENCE: Duration = Duration::from_secs(5);

/// Descriptors that came with a message.
pub type Fds = SmallVec<[OwnedFd; 1]>;

/// A connected socket.
pub struct Channel {
    socket: OwnedFd,
}

/// One message as it was received.
pub struct Received {
    /// Its header.
    pub header: Header,
    /// Its payload.
    pub payload: Vec<u8>,
    /// The descriptors that came with it.
    pub fds: Fds,
}

/// What a wait has come to.
pub enum Wait {
    /// A message begins.
    Message,
    /// The server ends.
    Stop,
    /// Nothing has come.
    TimedOut,
}

impl Channel {
    /// Takes over a connected stream socket.
    ///
    /// # Errors
    /// When its time-outs cannot be set.
    pub fn new(socket: OwnedFd) -> Result<Self> {
        for which in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, which, Some(PATIENCE))
                .map_err(|errno| Error::io("prepare a vhost-user socket", errno.into()))?;
        }
        // A socket that another process has handed over may be set not to block.
        rustix::io::ioctl_fionbio(&socket, false)
            .map_err(|errno| Error::io("prepare a vhost-user socket", errno.into()))?;
        Ok(Self { socket })
    }

    /// The socket, to hand it over or to shut it down.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Waits until a message begins or `stop` is readable, for `patience` if it is given: a front end may be silent for years.
    ///
    /// # Errors
    /// When the system cannot wait.
    pub fn wait(&self, stop: BorrowedFd<'_>, patience: Option<Duration>) -> Result<Wait> {
        let patience = patience.map(|time| Timespec::try_from(time).expect("it is short"));
        loop {
            let mut fds = [PollFd::new(&self.socket, PollFlags::IN), PollFd::from_borrowed_fd(stop, PollFlags::IN)];
            match poll(&mut fds, patience.as_ref()) {
                Ok(_) if !fds[1].revents().is_empty() => return Ok(Wait::Stop),
                Ok(_) if !fds[0].revents().is_empty() => return Ok(Wait::Message),
                Ok(_) if patience.is_some() => return Ok(Wait::TimedOut),
                Ok(_) | Err(Errno::INTR) => (),
                Err(errno) => return Err(Error::io("wait for a vhost-user message", errno.into())),
            }
        }
    }

    /// Receives one message; `None` when the front end has hung up between two messages.
    ///
    /// # Errors
    /// `Protocol` when the message is cut off, too long or not of version 1; `TimedOut` when its rest does not come.
    pub fn recv(&self) -> Result<Option<Received>> {
        let (mut bytes, mut fds) = ([0; HEADER_BYTES], Fds::new());
        let deadline = Instant::now() + PATIENCE;
        let count = self.fill(&mut bytes, &mut fds, deadline)?;
        match count {
            0 => return Ok(None),
            HEADER_BYTES => (),
            _ => return Err(Error::new(ErrorKind::Protocol, "the front end hung up within a message")),
        }
        let header = Header::parse(&bytes).map_err(|Invalid(what)| Error::new(ErrorKind::Protocol, what))?;
        let mut payload = vec![0; header.size as usize];
        if self.fill(&mut payload, &mut fds, deadline)? < payload.len() {
            return Err(Error::new(ErrorKind::Protocol, "the front end hung up within a message"));
        }
        Ok(Some(Received { header, payload, fds }))
    }

    /// Receives until `into` is full or the stream ends. After the deadline it takes only what is there.
    fn fill(&self, into: &mut [u8], fds: &mut Fds, deadline: Instant) -> Result<usize> {
        let mut done = 0;
        while done < into.len() {
            if Instant::now() > deadline {
                return Err(failed("receive a vhost-user message", Errno::AGAIN));
            }
            match recv_some(&self.socket, &mut into[done..], fds)? {
                0 => break,
                count => done += count,
            }
        }
        Ok(done)
    }

    /// Sends a whole message, with at most one descriptor.
    ///
    /// # Errors
    /// When the front end is gone, or takes no reply for 5 seconds.
    pub fn send(&self, message: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<()> {
        let mut done = 0;
        while done < message.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds: SmallVec<[BorrowedFd<'_>; 1]> = fd.filter(|_| done == 0).into_iter().collect();
            if !fds.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&fds));
            }
            match sendmsg(&self.socket, &[IoSlice::new(&message[done..])], &mut control, SendFlags::NOSIGNAL) {
                Ok(count) => done += count,
                Err(Errno::INTR) => (),
                Err(errno) => return Err(failed("send a vhost-user message", errno)),
            }
        }
        Ok(())
    }
}

/// The socket on which we send requests to the front end. It is separate from the socket of the front end's messages,
/// whose handling may wait for the disk.
#[derive(Default)]
pub struct Notices {
    socket: Mutex<Option<OwnedFd>>,
    /// True when the front end has agreed to receive our requests.
    is_agreed: AtomicBool,
}

impl Notices {
    fn socket(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.socket.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Takes over the socket that the front end has chosen.
    pub fn set_socket(&self, socket: Option<OwnedFd>) {
        *self.socket() = socket;
    }

    /// Sets whether the front end has agreed to receive our requests.
    pub fn agree(&self, is_agreed: bool) {
        self.is_agreed.store(is_agreed, Ordering::Relaxed);
    }

    /// A copy of the socket, to hand it over.
    ///
    /// # Errors
    /// `Exhausted` when descriptors are short.
    pub fn duplicate(&self) -> io::Result<Option<OwnedFd>> {
        self.socket().as_ref().map(OwnedFd::try_clone).transpose()
    }

    /// Sends a message if the front end has agreed to receive it. Does not wait for room: a front end that lets its
    /// socket fill up misses messages.
    ///
    /// # Errors
    /// When the message could not be sent, or only in part.
    pub fn send(&self, message: &[u8]) -> Result<()> {
        let socket = self.socket();
        let Some(socket) = socket.as_ref().filter(|_| self.is_agreed.load(Ordering::Relaxed)) else { return Ok(()) };
        match rustix::net::send(socket, message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(count) if count == message.len() => Ok(()),
            Ok(_) => Err(Error::new(ErrorKind::Io, "only a part of a vhost-user message was sent")),
            Err(errno) => Err(Error::io("send a vhost-user message", errno.into())),
        }
    }
}

/// Receives once. More descriptors than any message has are an error, and so are those for which this process has no room; the kernel has
/// closed them.
fn recv_some(socket: &OwnedFd, into: &mut [u8], fds: &mut Fds) -> Result<usize> {
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let result = recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, RecvFlags::CMSG_CLOEXEC);
        match result {
            Ok(received) => {
                for message in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(rights) = message {
                        fds.extend(rights);
                    }
                }
                let are_missing = received.flags.contains(ReturnFlags::CTRUNC);
                return check_descriptors(fds.len(), are_missing).map(|()| received.bytes);
            }
            Err(Errno::INTR) => (),
            Err(Errno::CONNRESET) => return Ok(0),
            Err(errno) => return Err(failed("receive a vhost-user message", errno)),
        }
    }
}

/// Checks how many descriptors came with a message; the kernel may have kept some back.
fn check_descriptors(count: usize, are_missing: bool) -> Result<()> {
    match (count, are_missing) {
        // There was room in the message for more.
        (..MAX_FDS, true) => {
            Err(Error::new(ErrorKind::Exhausted, "this process can take no more descriptors of its front end")
                .hint("raise the limit on open files (ulimit -n)"))
        }
        (..=MAX_FDS, false) => Ok(()),
        _ => Err(Error::new(ErrorKind::Protocol, "more descriptors came than a message has")),
    }
}

fn failed(what: &str, errno: Errno) -> Error {
    match errno {
        Errno::AGAIN => Error::new(ErrorKind::TimedOut, format!("{what}: the front end is stuck within a message")),
        errno => Error::io(what, io::Error::from(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_front_end_is_not_blamed_for_a_server_without_descriptors() {
        let kind = |count, are_missing| check_descriptors(count, are_missing).err().map(|error| error.kind());
        let found =
            [(0, false), (MAX_FDS, false), (0, true), (MAX_FDS - 1, true), (MAX_FDS, true), (MAX_FDS + 1, false)]
                .map(|(count, are_missing)| kind(count, are_missing));
        let [exhausted, protocol] = [ErrorKind::Exhausted, ErrorKind::Protocol].map(Some);
        assert_eq!(found, [None, None, exhausted, exhausted, protocol, protocol]);
    }
}
