//! The client's side of the wire: what a server says, parsed; what a client says in the handshake, encoded.
//!
//! A server is a stranger as a client is: every length is checked before it is used.

use crate::handshake::{INIT_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC};
use crate::reply::{FLAG_DONE, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC};
use crate::{Cursor, MAX_STRING_BYTES};

/// Length in bytes of a server's greeting.
pub const GREETING_BYTES: usize = 18;
/// Length in bytes of the head of an option reply.
pub const OPTION_REPLY_BYTES: usize = 20;
/// The longest option reply that a client takes, in bytes: more than every reply to what this client asks.
pub const MAX_OPTION_REPLY_BYTES: u32 = 16 << 10;
/// Length in bytes of a simple reply's head, and of the part of a structured one's that tells which of the two it is.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// Length in bytes of the head of a chunk of a structured reply.
pub const CHUNK_BYTES: usize = 20;

/// The handshake flags of a server's greeting; `None` when it is no newstyle NBD server.
pub fn greeting(bytes: &[u8; GREETING_BYTES]) -> Option<u16> {
    let mut cursor = Cursor::new(bytes);
    let is_newstyle = cursor.u64()? == INIT_MAGIC && cursor.u64()? == OPTION_MAGIC;
    is_newstyle.then(|| cursor.u16())?
}

/// One option with its data.
pub fn put_option(out: &mut Vec<u8>, option: u32, data: &[u8]) {
    out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
}

/// A string with its length in front, as options have them.
pub fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u32).to_be_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// The data of `OPT_GO` that asks for these kinds of information.
pub fn go_data(export: &str, infos: &[u16]) -> Vec<u8> {
    let mut out = Vec::new();
    put_string(&mut out, export);
    out.extend_from_slice(&(infos.len() as u16).to_be_bytes());
    infos.iter().for_each(|info| out.extend_from_slice(&info.to_be_bytes()));
    out
}

/// The data of `OPT_SET_META_CONTEXT` with one query.
pub fn meta_data(export: &str, queries: &[&str]) -> Vec<u8> {
    let mut out = Vec::new();
    put_string(&mut out, export);
    out.extend_from_slice(&(queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| put_string(&mut out, query));
    out
}

/// The head of a reply to an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReply {
    /// The option that is answered.
    pub option: u32,
    /// `REP_*`
    pub kind: u32,
    /// Bytes of data behind the head.
    pub len_bytes: u32,
}

impl OptionReply {
    /// Parses a head; `None` when the magic is wrong or the data are longer than [`MAX_OPTION_REPLY_BYTES`].
    pub fn parse(bytes: &[u8; OPTION_REPLY_BYTES]) -> Option<Self> {
        let mut cursor = Cursor::new(bytes);
        (cursor.u64()? == OPTION_REPLY_MAGIC).then_some(())?;
        let reply = Self { option: cursor.u32()?, kind: cursor.u32()?, len_bytes: cursor.u32()? };
        (reply.len_bytes <= MAX_OPTION_REPLY_BYTES).then_some(reply)
    }

    /// True for the kinds that refuse the option.
    pub fn is_error(&self) -> bool {
        self.kind >> 31 == 1
    }
}

/// The data of an `INFO_EXPORT`: size in bytes and transmission flags.
pub fn info_export(data: &[u8]) -> Option<(u64, u16)> {
    let mut cursor = Cursor::new(data);
    let found = (cursor.u64()?, cursor.u16()?);
    cursor.is_empty().then_some(found)
}

/// The data of an `INFO_BLOCK_SIZE`: minimum, preferred size and largest payload, in bytes. `None` also when they contradict the
/// protocol: a minimum that is no power of two or over 64 KiB, a payload below the minimum.
pub fn info_block_size(data: &[u8]) -> Option<(u32, u32, u32)> {
    let mut cursor = Cursor::new(data);
    let (min, preferred, max) = (cursor.u32()?, cursor.u32()?, cursor.u32()?);
    let is_valid = min.is_power_of_two() && min <= 65536 && max >= min && cursor.is_empty();
    is_valid.then_some((min, preferred, max))
}

/// The data of a `REP_META_CONTEXT`: its number and name.
pub fn meta_context(data: &[u8]) -> Option<(u32, &str)> {
    let mut cursor = Cursor::new(data);
    let number = cursor.u32()?;
    let name = cursor.take(data.len().checked_sub(4)?)?;
    (name.len() <= MAX_STRING_BYTES).then(|| std::str::from_utf8(name).ok().map(|name| (number, name)))?
}

/// What begins a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyHead {
    /// A simple reply: 16 bytes, and a read's data behind it when `errno` is 0.
    Simple {
        /// 0 or what went wrong.
        errno: u32,
        /// Of the request.
        cookie: u64,
    },
    /// A chunk of a structured reply; four more bytes, its length, follow.
    Chunk {
        /// It is the last one of its reply.
        done: bool,
        /// `TYPE_*`
        kind: u16,
        /// Of the request.
        cookie: u64,
    },
}

impl ReplyHead {
    /// Parses the first bytes of a reply; `None` when the magic is wrong.
    pub fn parse(bytes: &[u8; SIMPLE_REPLY_BYTES]) -> Option<Self> {
        let mut cursor = Cursor::new(bytes);
        match cursor.u32()? {
            SIMPLE_REPLY_MAGIC => Some(Self::Simple { errno: cursor.u32()?, cookie: cursor.u64()? }),
            STRUCTURED_REPLY_MAGIC => {
                let flags = cursor.u16()?;
                Some(Self::Chunk { done: flags & FLAG_DONE != 0, kind: cursor.u16()?, cookie: cursor.u64()? })
            }
            _ => None,
        }
    }
}

/// The data of an error chunk: number and message.
pub fn chunk_error(data: &[u8]) -> Option<(u32, String)> {
    let mut cursor = Cursor::new(data);
    let errno = cursor.u32()?;
    let len = usize::from(cursor.u16()?);
    Some((errno, String::from_utf8_lossy(cursor.take(len)?).into_owned()))
}

/// The data of a block status chunk: the context's number, and its runs as (length in bytes, flags).
pub fn chunk_block_status(data: &[u8]) -> Option<(u32, Vec<(u32, u32)>)> {
    let mut cursor = Cursor::new(data);
    let context = cursor.u32()?;
    let mut runs = Vec::with_capacity(data.len() / 8);
    while !cursor.is_empty() {
        runs.push((cursor.u32()?, cursor.u32()?));
    }
    Some((context, runs))
}

/// For a fuzz target: parses everything that a server says.
pub fn fuzz_client(data: &[u8]) {
    if let Some(bytes) = data.first_chunk() {
        let _ = greeting(bytes);
    }
    if let Some(bytes) = data.first_chunk() {
        let _ = OptionReply::parse(bytes);
    }
    if let Some(bytes) = data.first_chunk() {
        let _ = ReplyHead::parse(bytes);
    }
    let _ = (info_export(data), info_block_size(data), meta_context(data), chunk_error(data));
    if let Some((_, runs)) = chunk_block_status(data) {
        assert!(runs.len() * 8 < data.len());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::handshake::{InfoRequest, MetaRequest, put_greeting, put_reply, rep};
    use crate::reply;

    proptest! {
        #[test]
        fn any_bytes_parse_or_are_refused(data in prop::collection::vec(any::<u8>(), 0..100)) {
            fuzz_client(&data);
        }

        #[test]
        fn the_server_reads_what_the_client_asks(name in "[^\0]{0,40}") {
            let data = go_data(&name, &[3]);
            let info = InfoRequest::parse(&data).unwrap();
            prop_assert!(info.name == name && info.wants_block_size);
            let data = meta_data(&name, &["base:allocation"]);
            prop_assert_eq!(MetaRequest::parse(&data).unwrap().queries, ["base:allocation"]);
        }

        #[test]
        fn the_client_reads_what_the_server_answers(cookie: u64, errno in 1u32.., message in "[a-z]{0,50}") {
            let head = reply::error(cookie, errno, &message, Some(7));
            let parsed = ReplyHead::parse(head[..16].try_into().unwrap());
            prop_assert_eq!(parsed, Some(ReplyHead::Chunk { done: true, kind: reply::TYPE_ERROR_OFFSET, cookie }));
            prop_assert_eq!(chunk_error(&head[20..]), Some((errno, message)));
            let head = reply::simple(cookie, errno);
            prop_assert_eq!(ReplyHead::parse(head[..].try_into().unwrap()), Some(ReplyHead::Simple { errno, cookie }));
        }
    }

    #[test]
    fn the_handshakes_of_both_sides_fit() {
        let mut out = Vec::new();
        put_greeting(&mut out);
        assert_eq!(greeting(out[..].try_into().unwrap()), Some(3));
        out.clear();
        put_reply(&mut out, 7, rep::ERR_UNKNOWN, &[b"no"]);
        let parsed = OptionReply::parse(out[..20].try_into().unwrap()).unwrap();
        assert!(parsed.is_error() && parsed.option == 7 && parsed.len_bytes == 2);
        out.clear();
        put_reply(&mut out, 7, rep::ACK, &[]);
        out[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(OptionReply::parse(out[..20].try_into().unwrap()), None);
    }

    #[test]
    fn block_sizes_that_contradict_the_protocol_are_refused() {
        let bytes = |sizes: [u32; 3]| sizes.map(u32::to_be_bytes).concat();
        assert_eq!(info_block_size(&bytes([512, 4096, 1 << 25])), Some((512, 4096, 1 << 25)));
        for sizes in [[0, 4096, 4096], [3, 4096, 4096], [1 << 17, 1 << 17, 1 << 25], [4096, 4096, 512]] {
            assert_eq!(info_block_size(&bytes(sizes)), None, "{sizes:?}");
        }
    }
}
