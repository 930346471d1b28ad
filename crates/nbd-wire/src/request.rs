//! The request message of the transmission phase: 28 bytes, and the payload of a write behind it.

use crate::Cursor;

/// Length in bytes of a request's header.
pub const REQUEST_BYTES: usize = 28;
/// `REQUEST_MAGIC`.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;

/// `CMD_FLAG_FUA`: reply only when what was written is durable.
pub const FLAG_FUA: u16 = 1 << 0;
/// `CMD_FLAG_NO_HOLE`: zeroes that keep their space.
pub const FLAG_NO_HOLE: u16 = 1 << 1;
/// `CMD_FLAG_DF`: a read's data in one chunk.
pub const FLAG_DF: u16 = 1 << 2;
/// `CMD_FLAG_REQ_ONE`: one extent in a block status reply.
pub const FLAG_REQ_ONE: u16 = 1 << 3;
/// `CMD_FLAG_FAST_ZERO`: fail at once unless zeroing is faster than writing.
pub const FLAG_FAST_ZERO: u16 = 1 << 4;

/// What a request asks for ("Request types").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Command {
    /// `CMD_READ`
    Read,
    /// `CMD_WRITE`
    Write,
    /// `CMD_DISC`
    Disconnect,
    /// `CMD_FLUSH`
    Flush,
    /// `CMD_TRIM`
    Trim,
    /// `CMD_CACHE`
    Cache,
    /// `CMD_WRITE_ZEROES`
    WriteZeroes,
    /// `CMD_BLOCK_STATUS`
    BlockStatus,
    /// Any other number.
    Unknown(u16),
}

impl Command {
    /// The command of this number.
    pub fn from_wire(number: u16) -> Self {
        match number {
            0 => Self::Read,
            1 => Self::Write,
            2 => Self::Disconnect,
            3 => Self::Flush,
            4 => Self::Trim,
            5 => Self::Cache,
            6 => Self::WriteZeroes,
            7 => Self::BlockStatus,
            other => Self::Unknown(other),
        }
    }

    /// Its number on the wire.
    pub fn to_wire(self) -> u16 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Disconnect => 2,
            Self::Flush => 3,
            Self::Trim => 4,
            Self::Cache => 5,
            Self::WriteZeroes => 6,
            Self::BlockStatus => 7,
            Self::Unknown(number) => number,
        }
    }

    /// The flags the protocol documents for this command ("Command flags").
    pub fn valid_flags(self) -> u16 {
        FLAG_FUA
            | match self {
                Self::Read => FLAG_DF,
                Self::WriteZeroes => FLAG_NO_HOLE | FLAG_FAST_ZERO,
                Self::BlockStatus => FLAG_REQ_ONE,
                _ => 0,
            }
    }

    /// True when the command changes the export.
    pub fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Trim | Self::WriteZeroes)
    }
}

/// A request as it was received. Only its magic is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// `CMD_FLAG_*` bits.
    pub flags: u16,
    /// What the request asks for.
    pub command: Command,
    /// The client's name for the request, given back in the reply.
    pub cookie: u64,
    /// The offset of its first byte on the export.
    pub offset_bytes: u64,
    /// Its length in bytes.
    pub len_bytes: u32,
}

impl Request {
    /// Parses a header. `None` when the magic is wrong: nobody knows where the next request begins, and the connection
    /// has to end.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        let mut cursor = Cursor::new(bytes);
        if cursor.u32()? != REQUEST_MAGIC {
            return None;
        }
        Some(Self {
            flags: cursor.u16()?,
            command: Command::from_wire(cursor.u16()?),
            cookie: cursor.u64()?,
            offset_bytes: cursor.u64()?,
            len_bytes: cursor.u32()?,
        })
    }

    /// Encodes the header as a client sends it.
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[0..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_wire().to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset_bytes.to_be_bytes());
        bytes[24..28].copy_from_slice(&self.len_bytes.to_be_bytes());
        bytes
    }

    /// The bytes of payload that follow the header on the wire.
    pub fn payload_bytes(&self) -> u32 {
        if self.command == Command::Write { self.len_bytes } else { 0 }
    }
}

/// For a fuzz target: parses a stream of requests, and checks that encoding each gives the same bytes again.
pub fn fuzz_requests(data: &[u8]) {
    for chunk in data.chunks_exact(REQUEST_BYTES) {
        let bytes: &[u8; REQUEST_BYTES] = chunk.try_into().expect("chunks are exact");
        if let Some(request) = Request::parse(bytes) {
            assert_eq!(&request.encode(), bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_request_survives_the_wire(flags: u16, number: u16, cookie: u64, offset_bytes: u64, len_bytes: u32) {
            let command = Command::from_wire(number);
            let request = Request { flags, command, cookie, offset_bytes, len_bytes };
            prop_assert_eq!(Request::parse(&request.encode()), Some(request));
            prop_assert_eq!(command.to_wire(), number);
        }

        #[test]
        fn any_bytes_parse_or_are_refused(data in prop::collection::vec(any::<u8>(), 0..200)) {
            fuzz_requests(&data);
        }
    }

    #[test]
    fn a_wrong_magic_is_refused() {
        assert_eq!(Request::parse(&[0; REQUEST_BYTES]), None);
    }

    #[test]
    fn only_a_write_has_a_payload() {
        for number in 0..10 {
            let command = Command::from_wire(number);
            let request = Request { flags: 0, command, cookie: 0, offset_bytes: 0, len_bytes: 7 };
            assert_eq!(request.payload_bytes() == 7, number == 1);
        }
    }
}
