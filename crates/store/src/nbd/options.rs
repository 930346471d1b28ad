//! [`NbdOptions`]: what a caller may choose. [`NbdFacts`]: what a server says of an export.

use std::time::Duration;

use spile_nbd_wire::handshake::transmission;

/// How an [`NbdStore`](super::NbdStore) uses its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdOptions {
    /// Connections at most: one for each worker that uses the store. A server without `CAN_MULTI_CONN` gets one.
    pub connections: usize,
    /// A server that owes an answer and says nothing for so long is hung up on, and the writes that it owes fail.
    pub answer_limit: Duration,
    /// How long a lost server is tried again before the requests that wait fail. Zero: they fail at once,
    /// and a connection that was lost is not made again.
    pub reconnect_limit: Duration,
    /// Ask for structured replies. They tell holes, and without them there is no map; but a server may look for
    /// holes at each read then.
    pub structured: bool,
}

impl Default for NbdOptions {
    /// 16 connections; a minute for an answer; half a minute for a lost server; structured replies.
    fn default() -> Self {
        Self {
            connections: 16,
            answer_limit: Duration::from_secs(60),
            reconnect_limit: Duration::from_secs(30),
            structured: true,
        }
    }
}

/// What a server says of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdFacts {
    /// The size in bytes, rounded down to whole blocks.
    pub size_bytes: u64,
    /// Transmission flags, as the protocol numbers them.
    pub flags: u16,
    /// Requests are multiples of this many bytes.
    pub min_block_bytes: u32,
    /// The most bytes of a read or a write.
    pub max_payload_bytes: u32,
}

impl NbdFacts {
    /// True when the server has all of these transmission flags.
    pub fn has(&self, flags: u16) -> bool {
        self.flags & flags == flags
    }

    /// Writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.has(transmission::READ_ONLY)
    }

    /// The server knows `FLUSH`.
    pub fn can_flush(&self) -> bool {
        self.has(transmission::SEND_FLUSH)
    }

    /// The server knows `FUA`.
    pub fn can_fua(&self) -> bool {
        self.has(transmission::SEND_FUA)
    }
}
