//! The wire of NBD: pure parsing and encoding for server and client, no I/O, no state.
//!
//! Contract: a parser takes hostile bytes, checks every length before it uses it, and returns a value or a reason. It
//! never panics and never allocates more bytes than its input has. Constants have the names of the protocol document
//! (github.com/NetworkBlockDevice/nbd, doc/proto.md) without their `NBD_` prefix.

#![forbid(unsafe_code)]

pub mod client;
pub mod handshake;
pub mod reply;
pub mod request;
pub mod uri;

/// The longest string of the protocol, in bytes ("Conventions").
pub const MAX_STRING_BYTES: usize = 4096;

/// A cursor over hostile bytes: each step checks how many bytes are left.
pub(crate) struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.rest.split_first_chunk::<N>()?;
        self.rest = rest;
        Some(*head)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}
