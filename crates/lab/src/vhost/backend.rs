//! The channel on which the server sends requests to the front end.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spile_core::{Error, Result};

use super::proto::{BACKEND_CONFIG_CHANGE, FLAG_NEED_REPLY, FLAG_REPLY, Header, VERSION};
use super::raw::Socket;

/// A request of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendRequest {
    /// The configuration has changed and should be read again.
    ConfigChange,
    /// A request that a block device has no use for.
    Other(u32),
}

/// The front end's end of the channel.
#[derive(Debug)]
pub struct BackendChannel {
    socket: Socket,
}

impl BackendChannel {
    /// A new channel, and the end of it that is for the server.
    ///
    /// # Errors
    /// When the system has no socket left.
    pub fn new() -> Result<(Self, UnixStream)> {
        let (ours, theirs) = UnixStream::pair().map_err(|e| Error::io("cannot make a channel", e))?;
        Ok((Self { socket: Socket::new(ours)? }, theirs))
    }

    /// Waits at most `timeout` for a request, and acknowledges it if the server wants that. `None` when none came.
    ///
    /// # Errors
    /// `Io` when the server has closed its end.
    pub fn next(&self, timeout: Duration) -> Result<Option<BackendRequest>> {
        if !is_readable(&self.socket, timeout)? {
            return Ok(None);
        }
        let message = self.socket.receive()?;
        let header = message.header;
        let (request, code) = match header.request {
            BACKEND_CONFIG_CHANGE => (BackendRequest::ConfigChange, 0u64),
            other => (BackendRequest::Other(other), 1),
        };
        if header.flags & FLAG_NEED_REPLY != 0 {
            let reply = Header { request: header.request, flags: VERSION | FLAG_REPLY, len_bytes: 8 };
            self.socket.send_raw(reply, &code.to_ne_bytes(), &[])?;
        }
        Ok(Some(request))
    }
}

impl AsFd for BackendChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Waits at most `timeout` until there is something to read, or the other end is closed.
pub(crate) fn is_readable(fd: impl AsFd, timeout: Duration) -> Result<bool> {
    let timeout = Timespec::try_from(timeout).ok();
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    match poll(&mut fds, timeout.as_ref()) {
        Ok(count) => Ok(count > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(e) => Err(Error::io("poll", e.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_acknowledged_when_wanted() {
        let (channel, theirs) = BackendChannel::new().unwrap();
        let server = Socket::new(theirs).unwrap();
        assert_eq!(channel.next(Duration::ZERO).unwrap(), None);
        let send = |request, flags| {
            let header = Header { request, flags: VERSION | flags, len_bytes: 0 };
            server.send_raw(header, &[], &[]).unwrap();
            channel.next(Duration::from_secs(10)).unwrap()
        };
        assert_eq!(send(2, 0), Some(BackendRequest::ConfigChange));
        assert_eq!(send(2, FLAG_NEED_REPLY), Some(BackendRequest::ConfigChange));
        assert_eq!(server.receive().unwrap().u64().unwrap(), 0);
        assert_eq!(send(9, FLAG_NEED_REPLY), Some(BackendRequest::Other(9)));
        assert_ne!(server.receive().unwrap().u64().unwrap(), 0);
        drop(server);
        assert!(channel.next(Duration::from_secs(10)).is_err());
    }
}
