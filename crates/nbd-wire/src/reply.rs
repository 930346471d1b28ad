//! Replies of the transmission phase: the simple reply and the chunks of a structured reply.
//!
//! Encoders write headers into a small fixed buffer ([`Header`]). Data follows the header on the wire from its own
//! memory; it is never copied here.

use smallvec::SmallVec;

/// `SIMPLE_REPLY_MAGIC`.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// `STRUCTURED_REPLY_MAGIC`.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// `REPLY_FLAG_DONE`: the last chunk of its reply.
pub const FLAG_DONE: u16 = 1;
/// `REPLY_TYPE_NONE`.
pub const TYPE_NONE: u16 = 0;
/// `REPLY_TYPE_OFFSET_DATA`.
pub const TYPE_OFFSET_DATA: u16 = 1;
/// `REPLY_TYPE_OFFSET_HOLE`.
pub const TYPE_OFFSET_HOLE: u16 = 2;
/// `REPLY_TYPE_BLOCK_STATUS`.
pub const TYPE_BLOCK_STATUS: u16 = 5;
/// `REPLY_TYPE_ERROR`.
pub const TYPE_ERROR: u16 = (1 << 15) + 1;
/// `REPLY_TYPE_ERROR_OFFSET`.
pub const TYPE_ERROR_OFFSET: u16 = (1 << 15) + 2;

/// `STATE_HOLE` of `base:allocation`.
pub const STATE_HOLE: u32 = 1;
/// `STATE_ZERO` of `base:allocation`.
pub const STATE_ZERO: u32 = 2;

/// The longest error message sent, in bytes: far below the protocol's 4096, so that a batch of errors stays small.
pub const MAX_MESSAGE_BYTES: usize = 200;
/// No single header is longer than this, in bytes.
pub const MAX_HEADER_BYTES: usize = 20 + 6 + MAX_MESSAGE_BYTES + 8;

/// The bytes of one header.
pub type Header = SmallVec<[u8; 32]>;

/// A simple reply ("Simple reply message"): `errno` 0 is success; a read's data follows.
pub fn simple(cookie: u64, errno: u32) -> Header {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&errno.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    Header::from_slice(&bytes)
}

/// The 20 bytes that begin every chunk ("Structured reply chunk message").
fn chunk(cookie: u64, done: bool, kind: u16, payload_bytes: u32) -> Header {
    let mut bytes = [0; 20];
    bytes[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&(if done { FLAG_DONE } else { 0 }).to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..].copy_from_slice(&payload_bytes.to_be_bytes());
    Header::from_slice(&bytes)
}

/// A chunk without content that ends a reply in success.
pub fn none(cookie: u64) -> Header {
    chunk(cookie, true, TYPE_NONE, 0)
}

/// The head of a data chunk; `len_bytes` of data (not zero, at most 2^32 − 9) follow.
pub fn offset_data(cookie: u64, done: bool, offset_bytes: u64, len_bytes: u32) -> Header {
    let mut out = chunk(cookie, done, TYPE_OFFSET_DATA, len_bytes + 8);
    out.extend_from_slice(&offset_bytes.to_be_bytes());
    out
}

/// A hole chunk: `len_bytes` (not zero) of zeroes.
pub fn offset_hole(cookie: u64, done: bool, offset_bytes: u64, len_bytes: u32) -> Header {
    let mut out = chunk(cookie, done, TYPE_OFFSET_HOLE, 12);
    out.extend_from_slice(&offset_bytes.to_be_bytes());
    out.extend_from_slice(&len_bytes.to_be_bytes());
    out
}

/// The head of the block status chunk of one context; `descriptors` pairs of 32 bits (length, flags) follow.
pub fn block_status(cookie: u64, done: bool, context_id: u32, descriptors: u32) -> Header {
    let mut out = chunk(cookie, done, TYPE_BLOCK_STATUS, 4 + 8 * descriptors);
    out.extend_from_slice(&context_id.to_be_bytes());
    out
}

/// An error chunk that ends its reply, with a message for people (cut at [`MAX_MESSAGE_BYTES`]) and, where the
/// command allows one, the offset of the failure, which must lie within the request.
pub fn error(cookie: u64, errno: u32, message: &str, offset_bytes: Option<u64>) -> Header {
    let message = cut(message, MAX_MESSAGE_BYTES);
    let kind = if offset_bytes.is_some() { TYPE_ERROR_OFFSET } else { TYPE_ERROR };
    let tail = if offset_bytes.is_some() { 8 } else { 0 };
    let mut out = chunk(cookie, true, kind, (6 + message.len() + tail) as u32);
    out.extend_from_slice(&errno.to_be_bytes());
    out.extend_from_slice(&(message.len() as u16).to_be_bytes());
    out.extend_from_slice(message.as_bytes());
    if let Some(offset) = offset_bytes {
        out.extend_from_slice(&offset.to_be_bytes());
    }
    out
}

/// The longest beginning of `text` that is at most `max` bytes and ends between characters.
pub fn cut(text: &str, max: usize) -> &str {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn payload_len(header: &[u8]) -> usize {
        u32::from_be_bytes(header[16..20].try_into().unwrap()) as usize
    }

    proptest! {
        #[test]
        fn the_length_field_says_what_follows(cookie: u64, errno in 1u32.., message: String, offset: Option<u64>) {
            let header = error(cookie, errno, &message, offset);
            prop_assert_eq!(payload_len(&header), header.len() - 20);
            prop_assert!(header.len() <= MAX_HEADER_BYTES);
            let text = u16::from_be_bytes(header[24..26].try_into().unwrap()) as usize;
            prop_assert!(message.as_bytes().starts_with(&header[26..26 + text]));
            prop_assert!(std::str::from_utf8(&header[26..26 + text]).is_ok());
        }
    }

    #[test]
    fn headers_have_the_lengths_of_the_protocol() {
        assert_eq!(simple(1, 0).len(), 16);
        assert_eq!(none(1).len(), 20);
        assert_eq!((offset_data(1, true, 2, 3).len(), payload_len(&offset_data(1, true, 2, 3))), (28, 11));
        assert_eq!((offset_hole(1, true, 2, 3).len(), payload_len(&offset_hole(1, true, 2, 3))), (32, 12));
        assert_eq!((block_status(1, true, 1, 2).len(), payload_len(&block_status(1, true, 1, 2))), (24, 20));
    }

    #[test]
    fn common_headers_need_no_heap() {
        assert!(!simple(1, 0).spilled() && !offset_data(1, true, 2, 3).spilled());
        assert!(!offset_hole(1, true, 2, 3).spilled());
    }

    #[test]
    fn a_cut_falls_between_characters() {
        assert_eq!(cut("aé", 2), "a");
        assert_eq!(cut("aé", 3), "aé");
    }
}
