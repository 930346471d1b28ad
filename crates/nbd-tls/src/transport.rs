//! [`Transport`]: a connection's socket, plain or with TLS.

use std::cell::OnceCell;
use std::net::Shutdown;
use std::rc::Rc;

use spile_core::{Error, ErrorKind, Result, Segment};
use spile_engine::Socket;

use crate::session::Tls;

/// A socket, and TLS over it once that has begun. One receive and one send may be in flight at a time.
pub struct Transport {
    socket: Rc<Socket>,
    tls: OnceCell<Tls>,
}

impl Transport {
    /// The socket without TLS.
    pub fn plain(socket: Socket) -> Self {
        Self { socket: Rc::new(socket), tls: OnceCell::new() }
    }

    /// The socket itself, to shut it down or to shake hands for TLS.
    pub fn socket(&self) -> &Rc<Socket> {
        &self.socket
    }

    /// From now on all bytes go through TLS.
    ///
    /// # Errors
    /// `Protocol` when they do already.
    pub fn start_tls(&self, tls: Tls) -> Result<()> {
        let twice = |_| Error::new(ErrorKind::Protocol, "TLS was started twice");
        self.tls.set(tls).map_err(twice)
    }

    /// Receives into the start of `into`; 0 at the end of the stream.
    ///
    /// # Errors
    /// When the connection is broken, or the peer breaks TLS.
    pub async fn recv(&self, into: &Segment) -> Result<usize> {
        match self.tls.get() {
            None => self.socket.recv(into).await,
            Some(tls) => tls.recv(&self.socket, into).await,
        }
    }

    /// As [`Transport::recv`], but waits until `into` is full where that costs less than several receives.
    ///
    /// # Errors
    /// As [`Transport::recv`].
    pub async fn recv_payload(&self, into: &Segment) -> Result<usize> {
        match self.tls.get() {
            None => self.socket.recv_exact(into).await,
            Some(tls) => tls.recv(&self.socket, into).await,
        }
    }

    /// Receives until `into` is full; false when the stream has ended before.
    ///
    /// # Errors
    /// As [`Transport::recv`].
    pub async fn recv_exact(&self, into: &Segment) -> Result<bool> {
        let mut done = 0;
        while done < into.len() {
            match self.recv_payload(&into.slice(done..into.len())).await? {
                0 => return Ok(false),
                more => done += more,
            }
        }
        Ok(true)
    }

    /// Sends all of `parts`.
    ///
    /// # Errors
    /// When the connection is broken.
    pub async fn send(&self, parts: &[Segment]) -> Result<()> {
        match self.tls.get() {
            None => self.socket.send(parts).await,
            Some(tls) => tls.send(&self.socket, parts).await,
        }
    }

    /// Closes the connection; with TLS the peer is told first. All that is to be sent must have been sent.
    pub async fn close(&self) {
        if let Some(tls) = self.tls.get() {
            tls.close(&self.socket).await;
        }
        self.socket.shutdown(Shutdown::Both);
    }
}
