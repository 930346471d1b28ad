//! [`Transport`]: a connection's socket, plain or with TLS. [`Inbound`]: the buffer in which its bytes arrive.

use std::cell::OnceCell;
use std::net::Shutdown;
use std::rc::Rc;

use spile_core::{Error, ErrorKind, Result, Segment};
use spile_engine::Socket;

use crate::tls::Tls;

/// A socket, and TLS over it once that has begun. One receive and one send may be in flight at a time.
pub(crate) struct Transport {
    pub(crate) socket: Rc<Socket>,
    tls: OnceCell<Tls>,
}

impl Transport {
    pub(crate) fn plain(socket: Socket) -> Self {
        Self { socket: Rc::new(socket), tls: OnceCell::new() }
    }

    /// From now on all bytes go through TLS.
    pub(crate) fn start_tls(&self, tls: Tls) -> Result<()> {
        let twice = |_| Error::new(ErrorKind::Protocol, "TLS was started twice");
        self.tls.set(tls).map_err(twice)
    }

    /// Receives into the start of `into`; 0 at the end of the stream.
    pub(crate) async fn recv(&self, into: &Segment) -> Result<usize> {
        match self.tls.get() {
            None => self.socket.recv(into).await,
            Some(tls) => tls.recv(&self.socket, into).await,
        }
    }

    /// As [`Transport::recv`], but waits until `into` is full where that costs less than several receives.
    pub(crate) async fn recv_payload(&self, into: &Segment) -> Result<usize> {
        match self.tls.get() {
            None => self.socket.recv_exact(into).await,
            Some(tls) => tls.recv(&self.socket, into).await,
        }
    }

    /// Sends all of `parts`.
    pub(crate) async fn send(&self, parts: &[Segment]) -> Result<()> {
        match self.tls.get() {
            None => self.socket.send(parts).await,
            Some(tls) => tls.send(&self.socket, parts).await,
        }
    }

    /// Closes the connection; with TLS the peer is told first. All replies must have been sent.
    pub(crate) async fn close(&self) {
        if let Some(tls) = self.tls.get() {
            tls.close(&self.socket).await;
        }
        self.socket.shutdown(Shutdown::Both);
    }
}

/// Bytes that have arrived and are not yet used. One receive may bring many requests.
pub(crate) struct Inbound {
    buffer: Segment,
    start: usize,
    end: usize,
}

/// Enough that a whole batch of small writes arrives in one receive, in bytes.
pub(crate) const INBOUND_BYTES: usize = 256 << 10;

impl Inbound {
    pub(crate) fn new() -> Self {
        Self { buffer: spile_engine::pool().alloc(INBOUND_BYTES), start: 0, end: 0 }
    }

    /// The number of bytes that have arrived and were not used.
    pub(crate) fn len(&self) -> usize {
        self.end - self.start
    }

    /// Receives more bytes; false at the end of the stream.
    pub(crate) async fn fill(&mut self, transport: &Transport) -> Result<bool> {
        self.compact();
        let room = self.buffer.slice(self.end..self.buffer.len());
        if room.is_empty() {
            return Err(Error::new(ErrorKind::Protocol, "a message is longer than the buffer"));
        }
        let n = transport.recv(&room).await?;
        self.end += n;
        Ok(n > 0)
    }

    /// Moves the unused bytes to the front of the buffer. They are part of a header at most, never a payload.
    fn compact(&mut self) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 {
            let len = self.len();
            let from = self.buffer.slice(self.start..self.end);
            self.buffer.slice(0..len).copy_from(&from);
            (self.start, self.end) = (0, len);
        }
    }

    /// Takes the next `N` bytes, if all of them have arrived.
    pub(crate) fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        (self.len() >= N).then(|| {
            let mut bytes = [0; N];
            self.buffer.copy_to_slice(self.start, &mut bytes);
            self.start += N;
            bytes
        })
    }

    /// A copy of the next bytes, `max` at most, which stay unused.
    pub(crate) fn peek(&self, max: usize) -> Vec<u8> {
        self.buffer.slice(self.start..self.start + self.len().min(max)).to_vec()
    }

    /// Drops the next `n` bytes.
    pub(crate) fn consume(&mut self, n: usize) {
        self.start += n.min(self.len());
    }

    /// Takes bytes into `into`, as many as have arrived and fit. Returns how many.
    pub(crate) fn move_to(&mut self, into: &Segment) -> usize {
        let n = self.len().min(into.len());
        into.slice(0..n).copy_from(&self.buffer.slice(self.start..self.start + n));
        self.start += n;
        n
    }
}
