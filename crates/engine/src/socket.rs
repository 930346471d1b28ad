//! Stream sockets and listeners on the worker that polls them.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use spile_core::{Error, ErrorKind, Result, Segment};

use crate::fd::Fd;
use crate::op::Op;
use crate::shared::relock;
use crate::{sys, worker};

/// A connected stream socket (Unix or TCP). One receive ([`Socket::recv`], [`Socket::recv_exact`]) and one
/// [`Socket::send`] may be in flight at a time.
pub struct Socket {
    fd: Arc<Fd>,
}

impl Socket {
    /// Takes over a connected socket.
    ///
    /// # Errors
    /// `InvalidInput` when it is no stream socket.
    pub fn from_fd(fd: OwnedFd) -> Result<Socket> {
        check_stream(&fd)?;
        Ok(Socket { fd: Fd::socket(fd) })
    }

    /// Takes over a socket on which a store answers. A wake-up for such an answer counts as one for a completion.
    ///
    /// # Errors
    /// As [`Socket::from_fd`].
    pub fn to_store(fd: OwnedFd) -> Result<Socket> {
        check_stream(&fd)?;
        Ok(Socket { fd: Fd::store_socket(fd) })
    }

    /// Receives at least one byte into `into` and returns how many; 0 when the peer has shut down. A future dropped
    /// before its end may have taken bytes with it: drop it only to end the connection.
    ///
    /// # Errors
    /// `InvalidInput` for an empty buffer; `Io` with the errno when the connection is broken.
    pub async fn recv(&self, into: &Segment) -> Result<usize> {
        if into.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, "receive into an empty buffer"));
        }
        Op::recv(&self.fd, into).run().await.map_err(recv_error)
    }

    /// Receives until `into` is full and returns how many bytes came: less than its length only when the stream has
    /// ended. It suits a payload whose length is known: the ring answers once for all of its pieces (since Linux 5.19).
    /// A future dropped before its end may have taken bytes with it, as with [`Socket::recv`].
    ///
    /// # Errors
    /// `Io` with the errno when the connection is broken; what had come is lost.
    pub async fn recv_exact(&self, into: &Segment) -> Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        Op::recv_exact(&self.fd, into).run().await.map_err(recv_error)
    }

    /// Sends all bytes of `parts`, in order; a dead peer is an error, never a signal.
    ///
    /// # Errors
    /// `Io` with the errno when the connection is broken; some bytes may have been sent.
    pub async fn send(&self, parts: &[Segment]) -> Result<()> {
        let total: usize = parts.iter().map(Segment::len).sum();
        // Not while others are ready: a sender that did not gather its answers would send each alone.
        let first = if worker::is_alone() { sys::try_send(self.fd.raw(), parts, 0) } else { Ok(0) };
        let done = match first {
            Ok(done) => done,
            Err(libc::EAGAIN) => 0,
            Err(errno) => return Err(send_error(errno)),
        };
        if done < total {
            Op::send(&self.fd, parts, done).run().await.map_err(send_error)?;
        }
        Ok(())
    }

    /// Ends one or both directions. A pending [`Socket::recv`] then returns. That the connection is gone already is no
    /// error.
    pub fn shutdown(&self, how: std::net::Shutdown) {
        let how = match how {
            std::net::Shutdown::Read => libc::SHUT_RD,
            std::net::Shutdown::Write => libc::SHUT_WR,
            std::net::Shutdown::Both => libc::SHUT_RDWR,
        };
        // SAFETY: takes plain numbers.
        unsafe { libc::shutdown(self.fd.raw(), how) };
    }

    /// The descriptor, to ask or set options.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn recv_error(errno: i32) -> Error {
    Error::errno("receive failed", errno)
}

fn send_error(errno: i32) -> Error {
    Error::errno("send failed", errno)
}

fn check_stream(fd: &OwnedFd) -> Result<()> {
    match option(fd.as_fd(), libc::SO_TYPE) {
        Ok(libc::SOCK_STREAM) => Ok(()),
        _ => Err(Error::new(ErrorKind::InvalidInput, "the descriptor is not a stream socket")),
    }
}

/// An option of a socket whose value is a number.
fn option(fd: BorrowedFd<'_>, name: libc::c_int) -> Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: both out parameters are live, and the length is that of the first.
    let result =
        unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, name, (&raw mut value).cast(), &raw mut len) };
    match result {
        0 => Ok(value),
        _ => Err(Error::io("read a socket option", std::io::Error::last_os_error())),
    }
}

/// The process that connected to the other end of a Unix socket, as a pidfd (`SO_PEERPIDFD` in unix(7)). It never means
/// a later process with the same number.
///
/// # Errors
/// Before Linux 6.5 always; else the system's.
pub fn peer_process(socket: BorrowedFd<'_>) -> Result<OwnedFd> {
    let pidfd = option(socket, libc::SO_PEERPIDFD)?;
    // SAFETY: the system has made this descriptor for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(pidfd) })
}

/// A listening socket.
pub struct Listener {
    fd: Arc<Fd>,
    closed: Mutex<Closed>,
}

#[derive(Default)]
struct Closed {
    closed: bool,
    waiting: Vec<Waker>,
}

impl Listener {
    /// Takes over a listening socket and makes it non-blocking, also for other processes that share it.
    ///
    /// # Errors
    /// `InvalidInput` when it is no stream socket.
    pub fn from_fd(fd: OwnedFd) -> Result<Listener> {
        check_stream(&fd)?;
        sys::set_nonblocking(&fd).map_err(|source| Error::io("prepare the listener", source))?;
        Ok(Listener { fd: Fd::socket(fd), closed: Mutex::default() })
    }

    /// Takes the next connection. A future dropped before its end closes the connection it may have taken.
    ///
    /// # Errors
    /// `Shutdown` after [`Listener::close`]; else the kernel's (`Exhausted` when descriptors are short).
    pub async fn accept(&self) -> Result<OwnedFd> {
        let mut accept = std::pin::pin!(Op::accept(&self.fd).run());
        std::future::poll_fn(|context| {
            {
                let mut closed = relock(&self.closed);
                if closed.closed {
                    let error = Error::new(ErrorKind::Shutdown, "the listener is closed");
                    return Poll::Ready(Err(error));
                }
                closed.waiting.retain(|waker| !waker.will_wake(context.waker()));
                closed.waiting.push(context.waker().clone());
            }
            accept.as_mut().poll(context).map(accepted)
        })
        .await
    }

    /// Ends all calls of [`Listener::accept`], pending and future ones. The socket itself is closed when the listener
    /// is dropped; another process that shares it, such as a service manager, goes on listening.
    pub fn close(&self) {
        let mut closed = relock(&self.closed);
        closed.closed = true;
        let waiting = std::mem::take(&mut closed.waiting);
        drop(closed);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// The descriptor, to ask for its address.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn accepted(outcome: Result<usize, i32>) -> Result<OwnedFd> {
    match outcome {
        // SAFETY: the accept has just made this descriptor for us alone.
        Ok(fd) => Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) }),
        Err(errno @ (libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)) => {
            let source = std::io::Error::from_raw_os_error(errno);
            let error = Error::new(ErrorKind::Exhausted, "accept failed").caused_by(source);
            Err(error.hint("raise the limit on open files (ulimit -n)"))
        }
        Err(errno) => Err(Error::errno("accept failed", errno)),
    }
}
