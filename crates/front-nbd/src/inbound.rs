//! [`Inbound`]: the buffer in which a connection's bytes arrive.

use spile_core::{Error, ErrorKind, Result, Segment};
use spile_nbd_tls::Transport;

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
        into.copy_part(0, &self.buffer, self.start..self.start + n);
        self.start += n;
        n
    }
}
