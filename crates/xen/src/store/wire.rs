//! The bytes of xenstore's protocol: a header of 16 bytes, then up to 4096 bytes, mostly texts that each end in NUL.
//!
//! Numbers are in the machine's own byte order, as both sides are on one machine. Nothing here panics, whatever the
//! bytes are.

use std::fmt;

use spile_core::{Error, ErrorKind, Result};

use crate::DomId;

/// The bytes of a header.
pub const HEADER_BYTES: usize = 16;
/// The most bytes after a header (XENSTORE_PAYLOAD_MAX). A store closes the connection of a client that sends more.
pub const MAX_PAYLOAD_BYTES: usize = 4096;
/// The most bytes of a path from the root (XENSTORE_ABS_PATH_MAX).
pub const MAX_PATH_BYTES: usize = 3072;

/// The type of a message (enum xsd_sockmsg_type).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum MessageType {
    /// A command to the store itself, for debugging.
    Control = 0,
    /// List the names of a node's children.
    Directory = 1,
    /// Read a node's value.
    Read = 2,
    /// Read a node's permissions.
    GetPerms = 3,
    /// Watch a node and everything below it.
    Watch = 4,
    /// End a watch.
    Unwatch = 5,
    /// Begin a transaction.
    TransactionStart = 6,
    /// End a transaction: `T` carries it out, `F` gives it up.
    TransactionEnd = 7,
    /// Introduce a new domain to the store.
    Introduce = 8,
    /// Tell the store that a domain is gone.
    Release = 9,
    /// Read the path below which a domain's nodes lie.
    GetDomainPath = 10,
    /// Set a node's value, and make missing nodes above it.
    Write = 11,
    /// Make a node without a value, if there is none.
    Mkdir = 12,
    /// Remove a node and all below it.
    Rm = 13,
    /// Set a node's permissions.
    SetPerms = 14,
    /// From the store, without a request: a watched node has changed.
    WatchEvent = 15,
    /// From the store: the request failed, with this error.
    Error = 16,
    /// Ask whether a domain was introduced to the store.
    IsDomainIntroduced = 17,
    /// Have the store report a domain's end again.
    Resume = 18,
    /// Let a domain act for another domain.
    SetTarget = 19,
    /// A type that is not used any more.
    Restrict = 20,
    /// End all watches and transactions of the connection.
    ResetWatches = 21,
    /// List a part of the names of a node's children, when they do not fit into one message.
    DirectoryPart = 22,
}

impl MessageType {
    const ALL: [Self; 23] = [
        Self::Control,
        Self::Directory,
        Self::Read,
        Self::GetPerms,
        Self::Watch,
        Self::Unwatch,
        Self::TransactionStart,
        Self::TransactionEnd,
        Self::Introduce,
        Self::Release,
        Self::GetDomainPath,
        Self::Write,
        Self::Mkdir,
        Self::Rm,
        Self::SetPerms,
        Self::WatchEvent,
        Self::Error,
        Self::IsDomainIntroduced,
        Self::Resume,
        Self::SetTarget,
        Self::Restrict,
        Self::ResetWatches,
        Self::DirectoryPart,
    ];

    /// The type with that number, if there is one.
    pub fn from_raw(raw: u32) -> Option<Self> {
        Self::ALL.get(raw as usize).copied()
    }

    /// Its number on the wire.
    pub fn raw(self) -> u32 {
        self as u32
    }
}

/// The header of a message (struct xsd_sockmsg).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The number of a [`MessageType`], or a number that is not known.
    pub kind: u32,
    /// The number of the request. The client chooses it, and the answer has the same.
    pub req_id: u32,
    /// The transaction, or 0.
    pub tx_id: u32,
    /// The number of bytes that follow.
    pub len: u32,
}

impl Header {
    /// Decodes a header.
    ///
    /// # Errors
    /// `Protocol` when more than [`MAX_PAYLOAD_BYTES`] would follow: the connection cannot be used after that.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self> {
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let header = Self { kind: word(0), req_id: word(4), tx_id: word(8), len: word(12) };
        if header.len as usize > MAX_PAYLOAD_BYTES {
            let message = format!("a message of {} bytes, where {MAX_PAYLOAD_BYTES} are the most", header.len);
            return Err(Error::new(ErrorKind::Protocol, message));
        }
        Ok(header)
    }

    /// Encodes the header.
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        for (place, word) in bytes.chunks_exact_mut(4).zip([self.kind, self.req_id, self.tx_id, self.len]) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// The type of the message, if it is known.
    pub fn message_type(self) -> Option<MessageType> {
        MessageType::from_raw(self.kind)
    }
}

/// Encodes a whole message, the header first.
///
/// # Errors
/// `InvalidInput` when the payload is longer than [`MAX_PAYLOAD_BYTES`].
pub fn message(kind: MessageType, req_id: u32, tx_id: u32, payload: &[u8]) -> Result<Vec<u8>> {
    if payload.len() > MAX_PAYLOAD_BYTES {
        let message = format!("{} bytes do not fit into a message of the store's", payload.len());
        return Err(Error::new(ErrorKind::InvalidInput, message));
    }
    let header = Header { kind: kind.raw(), req_id, tx_id, len: payload.len() as u32 };
    let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
    bytes.extend_from_slice(&header.encode());
    bytes.extend_from_slice(payload);
    Ok(bytes)
}

/// Encodes texts, with a NUL after each.
pub fn join<'a>(texts: impl IntoIterator<Item = &'a str>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for text in texts {
        bytes.extend_from_slice(text.as_bytes());
        bytes.push(0);
    }
    bytes
}

/// The texts in `payload`, without the NUL that ends each. The last NUL may be missing, because some stores leave it
/// out.
pub fn split(payload: &[u8]) -> impl Iterator<Item = &[u8]> {
    let whole = payload.strip_suffix(&[0]).unwrap_or(payload);
    let count = if payload.is_empty() { 0 } else { usize::MAX };
    whole.split(|byte| *byte == 0).take(count)
}

/// The first text of `payload`, and all bytes after its NUL: for example a path and the value that is to be written
/// there.
pub fn split_first(payload: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = payload.iter().position(|byte| *byte == 0)?;
    Some((&payload[..end], &payload[end + 1..]))
}

/// `bytes` as text.
///
/// # Errors
/// `Protocol` when they are not UTF-8.
pub fn text(bytes: &[u8]) -> Result<&str> {
    std::str::from_utf8(bytes).map_err(|e| Error::new(ErrorKind::Protocol, "bytes that are not text").caused_by(e))
}

/// The access that a domain has to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Nothing: `n`.
    None,
    /// Read: `r`.
    Read,
    /// Write: `w`.
    Write,
    /// Read and write: `b`.
    Both,
}

impl Access {
    const LETTERS: [(char, Self); 4] = [('n', Self::None), ('r', Self::Read), ('w', Self::Write), ('b', Self::Both)];

    /// True when the node may be read.
    pub fn can_read(self) -> bool {
        matches!(self, Self::Read | Self::Both)
    }

    /// True when the node may be written.
    pub fn can_write(self) -> bool {
        matches!(self, Self::Write | Self::Both)
    }
}

/// One entry of a node's permissions. The domain of the first entry owns the node, and that entry's access is the
/// access of all domains that have no entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Permission {
    /// The domain.
    pub domain: DomId,
    /// Its access.
    pub access: Access,
}

impl Permission {
    /// Decodes an entry: a letter and a decimal number.
    ///
    /// # Errors
    /// `Protocol` when it is something else.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let parsed = || {
            let (letter, number) = bytes.split_first()?;
            let (_, access) = Access::LETTERS.into_iter().find(|(known, _)| *known == char::from(*letter))?;
            Some(Self { domain: DomId(decimal(number)?.try_into().ok()?), access })
        };
        parsed().ok_or_else(|| {
            let shown = bytes.escape_ascii();
            Error::new(ErrorKind::Protocol, format!("`{shown}` is no permission: n, r, w or b and a domain's number"))
        })
    }
}

impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = Access::LETTERS.into_iter().find(|(_, access)| *access == self.access).map_or('n', |(l, _)| l);
        write!(f, "{letter}{}", self.domain)
    }
}

/// The number in `digits`: decimal digits only, as a store writes domains, transactions and offsets.
pub fn decimal(digits: &[u8]) -> Option<u32> {
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    is_number.then(|| std::str::from_utf8(digits).ok()?.parse().ok()).flatten()
}

/// The words by which a store names errors, with their errnos (struct xsd_errors), and the few other words that stores
/// are known to send.
const ERRNO_WORDS: [(&str, i32); 18] = [
    ("EINVAL", libc::EINVAL),
    ("EACCES", libc::EACCES),
    ("EEXIST", libc::EEXIST),
    ("EISDIR", libc::EISDIR),
    ("ENOENT", libc::ENOENT),
    ("ENOMEM", libc::ENOMEM),
    ("ENOSPC", libc::ENOSPC),
    ("EIO", libc::EIO),
    ("ENOTEMPTY", libc::ENOTEMPTY),
    ("ENOSYS", libc::ENOSYS),
    ("EROFS", libc::EROFS),
    ("EBUSY", libc::EBUSY),
    ("EAGAIN", libc::EAGAIN),
    ("EISCONN", libc::EISCONN),
    ("E2BIG", libc::E2BIG),
    ("EPERM", libc::EPERM),
    ("EDOM", libc::EDOM),
    ("EQUOTA", libc::EDQUOT),
];

/// The errno that `word` names, if it is known.
pub fn errno_of(word: &str) -> Option<i32> {
    ERRNO_WORDS.into_iter().find(|(known, _)| *known == word).map(|(_, errno)| errno)
}

/// The word for `errno`; EINVAL for one that the protocol has no word for.
pub fn errno_word(errno: i32) -> &'static str {
    ERRNO_WORDS.into_iter().find(|(_, known)| *known == errno).map_or("EINVAL", |(word, _)| word)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_header_is_four_words() {
        let bytes = message(MessageType::Write, 7, 9, b"a\0b").unwrap();
        let words: Vec<u32> = bytes[..16].chunks(4).map(|w| u32::from_ne_bytes(w.try_into().unwrap())).collect();
        assert_eq!((words.as_slice(), &bytes[16..]), ([11, 7, 9, 3].as_slice(), b"a\0b".as_slice()));
    }

    #[test]
    fn numbers_and_types_are_those_of_the_header_file() {
        for (raw, kind) in [(2, MessageType::Read), (16, MessageType::Error), (22, MessageType::DirectoryPart)] {
            assert_eq!(MessageType::from_raw(raw), Some(kind));
        }
        assert!(MessageType::ALL.iter().enumerate().all(|(i, kind)| kind.raw() as usize == i));
        assert_eq!(MessageType::from_raw(23), None);
        assert_eq!(MessageType::from_raw(0xffff), None);
    }

    #[test]
    fn too_long_messages_are_neither_made_nor_taken() {
        let header = Header { kind: 2, req_id: 1, tx_id: 0, len: MAX_PAYLOAD_BYTES as u32 + 1 };
        assert_eq!(Header::decode(&header.encode()).unwrap_err().kind(), ErrorKind::Protocol);
        assert!(message(MessageType::Write, 1, 0, &[b'x'; MAX_PAYLOAD_BYTES]).is_ok());
        let error = message(MessageType::Write, 1, 0, &[b'x'; MAX_PAYLOAD_BYTES + 1]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn texts_split_with_and_without_the_last_nul() {
        let split = |bytes| split(bytes).map(<[u8]>::to_vec).collect::<Vec<_>>();
        assert_eq!(split(b""), [b""; 0]);
        assert_eq!(split(b"\0"), [b""]);
        assert_eq!(split(b"a\0"), [b"a"]);
        assert_eq!(split(b"a"), [b"a"]);
        assert_eq!(split(b"a\0\0"), [b"a".as_slice(), b""]);
        assert_eq!(split_first(b"/x\0a\0b"), Some((b"/x".as_slice(), b"a\0b".as_slice())));
        assert_eq!(split_first(b"/x"), None);
    }

    #[test]
    fn permissions_are_a_letter_and_a_domain() {
        let both = Permission { domain: DomId(7), access: Access::Both };
        assert_eq!(Permission::parse(b"b7").unwrap(), both);
        assert_eq!(both.to_string(), "b7");
        for bad in [b"".as_slice(), b"b", b"7", b"x7", b"b-1", b"b+1", b"b65536", b"b7 ", b"\xff7"] {
            assert!(Permission::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn errnos_and_words_are_pairs() {
        for (word, errno) in ERRNO_WORDS {
            assert_eq!((errno_of(word), errno_word(errno)), (Some(errno), word));
        }
        assert_eq!((errno_of("ENONSENSE"), errno_word(12345)), (None, "EINVAL"));
    }

    proptest! {
        #[test]
        fn a_header_comes_back(kind: u32, req_id: u32, tx_id: u32, len in 0..=MAX_PAYLOAD_BYTES as u32) {
            let header = Header { kind, req_id, tx_id, len };
            prop_assert_eq!(Header::decode(&header.encode()).unwrap(), header);
        }

        #[test]
        fn any_bytes_are_a_header_or_an_error(bytes: [u8; HEADER_BYTES]) {
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert_eq!(header.encode(), bytes);
                prop_assert!(header.len as usize <= MAX_PAYLOAD_BYTES);
            }
        }

        #[test]
        fn joined_texts_split_again(texts in prop::collection::vec("[^\0]{0,8}", 0..6)) {
            let bytes = join(texts.iter().map(String::as_str));
            let again: Vec<&str> = split(&bytes).map(|t| text(t).unwrap()).collect();
            prop_assert_eq!(again, texts);
        }

        #[test]
        fn any_bytes_split_into_what_they_are(bytes in prop::collection::vec(0..3u8, 0..40)) {
            let mut joined = split(&bytes).collect::<Vec<_>>().join(&0);
            if bytes.last() == Some(&0) {
                joined.push(0);
            }
            prop_assert_eq!(joined, bytes);
        }

        #[test]
        fn any_permission_comes_back(domain: u16, letter in 0..4usize) {
            let permission = Permission { domain: DomId(domain), access: Access::LETTERS[letter].1 };
            prop_assert_eq!(Permission::parse(permission.to_string().as_bytes()).unwrap(), permission);
        }

        #[test]
        fn no_bytes_make_the_parsers_panic(bytes: Vec<u8>) {
            let _ = (Permission::parse(&bytes), text(&bytes), decimal(&bytes), split_first(&bytes));
        }
    }
}
