//! Messages on the socket `DIR/hypervisor`. Each has six numbers, and some carry file descriptors. The socket keeps the
//! borders between messages (SOCK_SEQPACKET). Each request gets one reply, whose first number is 0 or an errno.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, sendmsg, shutdown, socket_with,
};
use spile_core::{Error, ErrorKind, Result, ResultExt};

/// The time that the host may take for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most descriptors with one message.
const MAX_FDS: usize = 4;
const WORDS: usize = 6;
const BYTES: usize = WORDS * 8;

/// The numbers of a message.
pub(crate) type Words = [u64; WORDS];

/// The kinds of requests. Each says which numbers follow, and what is in the reply.
pub(crate) mod call {
    /// The sender becomes a domain. Numbers: the domain, and the address of its memory in its process. Descriptors: memory,
    /// grant table.
    pub const CREATE: u64 = 1;
    /// Asks about a domain. Number: the domain. Reply: its process, the address of its memory there. Descriptors: memory,
    /// grant table, and a page whose first number is 1 while the domain lives.
    pub const LOOK_UP: u64 = 2;
    /// Makes a port that a domain can bind to. Number: that domain. Reply: the port. Descriptors: the guest's eventfd, the
    /// back end's eventfd.
    pub const ALLOC_UNBOUND: u64 = 3;
    /// Binds to a port. Numbers: the domain, the port. Descriptors of the reply: the guest's eventfd, the back end's
    /// eventfd.
    pub const BIND: u64 = 4;
    /// Closes a port of the sender. Number: the port.
    pub const CLOSE: u64 = 5;
    /// Ends a domain. Number: the domain. Only domain 0 may ask for it.
    pub const DESTROY: u64 = 6;
}

/// A message that was received.
#[derive(Debug)]
pub(crate) struct Message {
    pub words: Words,
    pub fds: Vec<OwnedFd>,
}

/// Sends one message.
pub(crate) fn send(socket: impl AsFd, words: &Words, fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let mut bytes = [0; BYTES];
    for (number, word) in words.iter().enumerate() {
        bytes[8 * number..8 * number + 8].copy_from_slice(&word.to_ne_bytes());
    }
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    rustix::io::retry_on_intr(|| sendmsg(&socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Receives one message; `None` when the other side is gone.
pub(crate) fn receive(socket: impl AsFd) -> rustix::io::Result<Option<Message>> {
    let mut bytes = [0; BYTES];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::io::retry_on_intr(|| {
        recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)
    });
    let len = match got {
        Ok(got) => got.bytes,
        Err(Errno::CONNRESET) => 0,
        Err(e) => return Err(e),
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    if len == 0 {
        return Ok(None);
    }
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(bytes[..len].as_chunks::<8>().0) {
        *word = u64::from_ne_bytes(*bytes);
    }
    Ok(Some(Message { words, fds }))
}

/// The address of a socket.
///
/// # Errors
/// When the path is longer than the system allows (107 bytes).
pub(crate) fn address(path: &Path) -> Result<SocketAddrUnix> {
    let address = SocketAddrUnix::new(path).map_err(|e| Error::io("cannot name a socket", e.into()));
    address.map_err(|e| e.hint("a socket's path has at most 107 bytes")).at_path(path)
}

/// A connection to a host.
#[derive(Debug)]
pub(crate) struct Link {
    socket: Mutex<OwnedFd>,
    path: PathBuf,
}

impl Link {
    /// Connects to the host in `dir`.
    pub fn connect(dir: &Path) -> Result<Self> {
        let path = dir.join("hypervisor");
        let open = || {
            let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
            for which in [Timeout::Recv, Timeout::Send] {
                set_socket_timeout(&socket, which, Some(PATIENCE))?;
            }
            Ok(socket)
        };
        let socket = open().map_err(|e: Errno| Error::io("cannot make a socket", e.into()))?;
        let connected = connect(&socket, &address(&path)?);
        connected.map_err(|e| Error::io("cannot connect to the Xen host", e.into())).at_path(&path)?;
        Ok(Self { socket: Mutex::new(socket), path })
    }

    /// Ends the connection, and waits until the host has seen that.
    pub fn leave(&self) {
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        // A host that has gone, or does not answer, need not be waited for.
        if shutdown(&*socket, Shutdown::Write).is_ok() {
            let _ = receive(&*socket);
        }
    }

    /// Sends a request, and waits for the reply.
    ///
    /// # Errors
    /// `operation` with the errno of the reply, or `Io` and `TimedOut` when there is none.
    pub fn call(&self, operation: &str, words: &[u64], fds: &[BorrowedFd<'_>]) -> Result<Message> {
        let mut request = [0; WORDS];
        request[..words.len()].copy_from_slice(words);
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = send(&*socket, &request, fds).and_then(|()| receive(&*socket));
        let reply = match answer {
            Ok(Some(reply)) => reply,
            Ok(None) | Err(Errno::PIPE) => {
                return Err(Error::new(ErrorKind::Io, "the Xen host has gone")).at_path(&self.path);
            }
            Err(Errno::AGAIN) => {
                return Err(Error::new(ErrorKind::TimedOut, "the Xen host does not answer")).at_path(&self.path);
            }
            Err(e) => return Err(Error::io("the Xen host was lost", e.into())).at_path(&self.path),
        };
        match i32::try_from(reply.words[0]) {
            Ok(0) => Ok(reply),
            Ok(errno) => Err(Error::errno(operation, errno)),
            Err(_) => Err(Error::new(ErrorKind::Protocol, "the Xen host answered what it never should")),
        }
    }
}

/// The descriptors of a reply, exactly as many as expected.
pub(crate) fn fds<const N: usize>(message: Message) -> Result<[OwnedFd; N]> {
    let fds: Result<[OwnedFd; N], _> = message.fds.try_into();
    fds.map_err(|fds| {
        Error::new(ErrorKind::Protocol, format!("the Xen host sent {} descriptors instead of {N}", fds.len()))
    })
}
