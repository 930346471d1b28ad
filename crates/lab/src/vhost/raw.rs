//! Messages as bytes. A test can send any bytes and sees all bytes that come back.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use spile_core::{Error, ErrorKind, Result, ResultExt};

use super::proto::{HEADER_BYTES, Header, Request, VERSION};

/// The time that a server may take for one message.
const PATIENCE: Duration = Duration::from_secs(600);
/// The largest payload of a reply, in bytes.
const MAX_PAYLOAD_BYTES: u32 = 64 << 10;
/// The largest number of descriptors taken with one reply.
const MAX_FDS: usize = 32;

/// A received message.
#[derive(Debug)]
pub struct Message {
    /// Its header.
    pub header: Header,
    /// Its payload.
    pub payload: Vec<u8>,
    /// The descriptors attached to it.
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// The payload as one number.
    ///
    /// # Errors
    /// `Protocol` when it is not eight bytes.
    pub fn u64(&self) -> Result<u64> {
        let bytes = self.payload.as_slice().try_into();
        bytes.map(u64::from_ne_bytes).map_err(|_| broken("a reply has not the eight bytes of a number"))
    }
}

/// A connection that sends any bytes and any descriptors.
#[derive(Debug)]
pub struct Socket {
    stream: UnixStream,
}

impl Socket {
    /// Connects to the server that listens at `path`.
    ///
    /// # Errors
    /// With the path.
    pub fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path).map_err(|e| Error::io("cannot connect", e)).at_path(path)?;
        Self::new(stream)
    }

    /// Takes a connected stream. A receive waits at most 10 s unless [`Socket::set_patience`] says otherwise.
    ///
    /// # Errors
    /// When the socket refuses a time limit.
    pub fn new(stream: UnixStream) -> Result<Self> {
        let socket = Self { stream };
        socket.set_patience(PATIENCE)?;
        Ok(socket)
    }

    /// Sets how long a send or a receive may wait. Must be above zero.
    ///
    /// # Errors
    /// When the socket refuses.
    pub fn set_patience(&self, patience: Duration) -> Result<()> {
        let both =
            |s: &UnixStream| s.set_read_timeout(Some(patience)).and_then(|()| s.set_write_timeout(Some(patience)));
        both(&self.stream).map_err(|e| Error::io("cannot limit the socket's waits", e))
    }

    /// Sends a well-formed request.
    ///
    /// # Errors
    /// `Io` when the connection is lost.
    pub fn send(&self, request: Request, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let header = Header { request: request as u32, flags: VERSION | flags, len_bytes: payload.len() as u32 };
        self.send_raw(header, payload, fds)
    }

    /// Sends any header with any payload, whether they fit together or not.
    ///
    /// # Errors
    /// `Io` when the connection is lost.
    pub fn send_raw(&self, header: Header, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.send_bytes(&[&header.to_bytes(), payload].concat(), fds)
    }

    /// Sends bytes, the descriptors with the first of them.
    ///
    /// # Errors
    /// `Io` when the connection is lost; `InvalidInput` for more descriptors than the system sends at once (253).
    pub fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut space = vec![MaybeUninit::uninit(); cmsg_space!(ScmRights(fds.len()))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let mut sent = 0;
        while sent < bytes.len() {
            let slices = [IoSlice::new(&bytes[sent..])];
            match sendmsg(&self.stream, &slices, &mut control, SendFlags::NOSIGNAL) {
                Ok(len) => sent += len,
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(Error::io("the server took no message", e.into())),
            }
            control.clear();
        }
        Ok(())
    }

    /// Waits for one message.
    ///
    /// # Errors
    /// `Io` when the connection ends, `TimedOut` when nothing comes, `Protocol` when it is too long.
    pub fn receive(&self) -> Result<Message> {
        let (mut head, mut fds) = ([0; HEADER_BYTES], Vec::new());
        self.receive_exact(&mut head, &mut fds)?;
        let header = Header::parse(&head);
        if header.len_bytes > MAX_PAYLOAD_BYTES {
            return Err(broken("a message is longer than 64 KiB"));
        }
        let mut payload = vec![0; header.len_bytes as usize];
        self.receive_exact(&mut payload, &mut fds)?;
        Ok(Message { header, payload, fds })
    }

    fn receive_exact(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match self.receive_some(&mut bytes[done..], fds) {
                Ok(0) => return Err(Error::new(ErrorKind::Io, "the server closed the connection")),
                Ok(len) => done += len,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    return Err(Error::new(ErrorKind::TimedOut, "the server did not answer a message in time"));
                }
                Err(e) => return Err(Error::io("the connection was lost", e.into())),
            }
        }
        Ok(())
    }

    fn receive_some(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> rustix::io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(&self.stream, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        debug_assert!(!got.flags.contains(ReturnFlags::CTRUNC), "more descriptors than anybody sends");
        Ok(got.bytes)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

pub(crate) fn broken(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Protocol, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Socket, Socket) {
        let (a, b) = UnixStream::pair().unwrap();
        (Socket::new(a).unwrap(), Socket::new(b).unwrap())
    }

    #[test]
    fn messages_carry_their_descriptors() {
        let (a, b) = pair();
        let file = tempfile::tempfile().unwrap();
        a.send(Request::SetMemTable, 0, &[1; 40], &[file.as_fd(), a.as_fd()]).unwrap();
        a.send(Request::GetFeatures, 8, &[], &[]).unwrap();
        let (first, second) = (b.receive().unwrap(), b.receive().unwrap());
        assert_eq!((first.header.request, first.payload.len(), first.fds.len()), (5, 40, 2));
        assert_eq!((second.header.request, second.header.flags, second.fds.len()), (1, 9, 0));
    }

    #[test]
    fn an_end_and_a_silence_are_told_apart() {
        let (a, b) = pair();
        b.set_patience(Duration::from_millis(10)).unwrap();
        assert_eq!(b.receive().unwrap_err().kind(), ErrorKind::TimedOut);
        drop(a);
        assert_eq!(b.receive().unwrap_err().kind(), ErrorKind::Io);
    }

    #[test]
    fn a_message_of_any_length_can_be_sent_but_not_received() {
        let (a, b) = pair();
        a.send_raw(Header { request: 1, flags: 1, len_bytes: u32::MAX }, &[1, 2, 3], &[]).unwrap();
        assert_eq!(b.receive().unwrap_err().kind(), ErrorKind::Protocol);
    }
}
