//! Messages of the handshake: greeting, client flags, options and their replies ("Newstyle negotiation").

use crate::{Cursor, MAX_STRING_BYTES};

/// The first magic of the greeting, `INIT_PASSWD` ("NBDMAGIC").
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// The second magic of the greeting, and the magic of options ("IHAVEOPT").
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The magic of option replies.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// `FLAG_FIXED_NEWSTYLE` and `FLAG_C_FIXED_NEWSTYLE`.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
/// `FLAG_NO_ZEROES` and `FLAG_C_NO_ZEROES`.
pub const FLAG_NO_ZEROES: u16 = 1 << 1;

/// Transmission flags ("Transmission flags").
pub mod transmission {
    /// `FLAG_HAS_FLAGS`
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// `FLAG_READ_ONLY`
    pub const READ_ONLY: u16 = 1 << 1;
    /// `FLAG_SEND_FLUSH`
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// `FLAG_SEND_FUA`
    pub const SEND_FUA: u16 = 1 << 3;
    /// `FLAG_SEND_TRIM`
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `FLAG_SEND_WRITE_ZEROES`
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// `FLAG_SEND_DF`
    pub const SEND_DF: u16 = 1 << 7;
    /// `FLAG_CAN_MULTI_CONN`
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `FLAG_SEND_CACHE`
    pub const SEND_CACHE: u16 = 1 << 10;
    /// `FLAG_SEND_FAST_ZERO`
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Option numbers ("Option types").
pub mod option {
    /// `OPT_EXPORT_NAME`
    pub const EXPORT_NAME: u32 = 1;
    /// `OPT_ABORT`
    pub const ABORT: u32 = 2;
    /// `OPT_LIST`
    pub const LIST: u32 = 3;
    /// `OPT_STARTTLS`
    pub const STARTTLS: u32 = 5;
    /// `OPT_INFO`
    pub const INFO: u32 = 6;
    /// `OPT_GO`
    pub const GO: u32 = 7;
    /// `OPT_STRUCTURED_REPLY`
    pub const STRUCTURED_REPLY: u32 = 8;
    /// `OPT_LIST_META_CONTEXT`
    pub const LIST_META_CONTEXT: u32 = 9;
    /// `OPT_SET_META_CONTEXT`
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Option reply types ("Option reply types").
pub mod rep {
    /// `REP_ACK`
    pub const ACK: u32 = 1;
    /// `REP_SERVER`
    pub const SERVER: u32 = 2;
    /// `REP_INFO`
    pub const INFO: u32 = 3;
    /// `REP_META_CONTEXT`
    pub const META_CONTEXT: u32 = 4;
    /// `REP_ERR_UNSUP`
    pub const ERR_UNSUP: u32 = (1 << 31) + 1;
    /// `REP_ERR_POLICY`
    pub const ERR_POLICY: u32 = (1 << 31) + 2;
    /// `REP_ERR_INVALID`
    pub const ERR_INVALID: u32 = (1 << 31) + 3;
    /// `REP_ERR_TLS_REQD`
    pub const ERR_TLS_REQD: u32 = (1 << 31) + 5;
    /// `REP_ERR_UNKNOWN`
    pub const ERR_UNKNOWN: u32 = (1 << 31) + 6;
    /// `REP_ERR_TOO_BIG`
    pub const ERR_TOO_BIG: u32 = (1 << 31) + 9;
}

/// Information types of `REP_INFO`.
pub mod info {
    /// `INFO_EXPORT`
    pub const EXPORT: u16 = 0;
    /// `INFO_NAME`
    pub const NAME: u16 = 1;
    /// `INFO_DESCRIPTION`
    pub const DESCRIPTION: u16 = 2;
    /// `INFO_BLOCK_SIZE`
    pub const BLOCK_SIZE: u16 = 3;
}

/// Length in bytes of an option's header.
pub const OPTION_HEADER_BYTES: usize = 16;

/// An option's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// Its number.
    pub option: u32,
    /// Bytes of data behind the header.
    pub len_bytes: u32,
}

impl OptionHeader {
    /// Parses a header. `None` when the magic is wrong: nobody knows where the next option begins.
    pub fn parse(bytes: &[u8; OPTION_HEADER_BYTES]) -> Option<Self> {
        let mut cursor = Cursor::new(bytes);
        (cursor.u64()? == OPTION_MAGIC).then_some(())?;
        Some(Self { option: cursor.u32()?, len_bytes: cursor.u32()? })
    }
}

/// Why an option's data cannot be used: `REP_ERR_INVALID`, with this text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalid(pub &'static str);

/// The data of `OPT_INFO` and `OPT_GO`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// The export asked for; empty is the default export.
    pub name: &'a str,
    /// The client wants the canonical name.
    pub wants_name: bool,
    /// The client wants the description.
    pub wants_description: bool,
    /// The client wants (and will obey) the block sizes.
    pub wants_block_size: bool,
}

impl<'a> InfoRequest<'a> {
    /// Parses an option's data.
    ///
    /// # Errors
    /// When lengths contradict each other, or the name is no string of the protocol.
    pub fn parse(data: &'a [u8]) -> Result<Self, Invalid> {
        const SHORT: Invalid = Invalid("the option's lengths do not add up");
        let mut cursor = Cursor::new(data);
        let name = counted_string(&mut cursor)?;
        let count = cursor.u16().ok_or(SHORT)?;
        let mut request = Self { name, wants_name: false, wants_description: false, wants_block_size: false };
        for _ in 0..count {
            match cursor.u16().ok_or(SHORT)? {
                info::NAME => request.wants_name = true,
                info::DESCRIPTION => request.wants_description = true,
                info::BLOCK_SIZE => request.wants_block_size = true,
                _ => {}
            }
        }
        if cursor.is_empty() { Ok(request) } else { Err(SHORT) }
    }
}

/// A metadata context that begins so names the link of a client that writes, in 32 hexadecimal digits: all connections of one store of Spile's client say the
/// same, and those of no other one.
pub const LINK_CONTEXT: &str = "spile:link=";
/// This metadata context says that its client only reads.
pub const READER_CONTEXT: &str = "spile:reader";
/// Whoever asks for this metadata context is told by what the export is kept, where that outlives the server's process: the name of the context that is answered
/// is this one, `=`, and a text. Two servers that say the same have the same file, on a host that was not started anew in between: what one has answered, the other has.
/// It is a fact and has no block status.
pub const KEPT_CONTEXT: &str = "spile:kept";

/// The data of `OPT_LIST_META_CONTEXT` and `OPT_SET_META_CONTEXT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaRequest<'a> {
    /// The export asked about.
    pub export: &'a str,
    /// The queries, each with a namespace and a colon.
    pub queries: Vec<&'a str>,
}

impl<'a> MetaRequest<'a> {
    /// Parses an option's data.
    ///
    /// # Errors
    /// When lengths contradict each other, or a query is no string of the protocol or has no namespace.
    pub fn parse(data: &'a [u8]) -> Result<Self, Invalid> {
        const SHORT: Invalid = Invalid("the option's lengths do not add up");
        let mut cursor = Cursor::new(data);
        let export = counted_string(&mut cursor)?;
        let count = cursor.u32().ok_or(SHORT)?;
        let mut queries = Vec::new();
        for _ in 0..count {
            let query = counted_string(&mut cursor)?;
            if !query.contains(':') {
                return Err(Invalid("a metadata query needs a namespace and a colon"));
            }
            queries.push(query);
        }
        if cursor.is_empty() { Ok(Self { export, queries }) } else { Err(SHORT) }
    }
}

fn counted_string<'a>(cursor: &mut Cursor<'a>) -> Result<&'a str, Invalid> {
    let len = cursor.u32().ok_or(Invalid("a string's length is missing"))? as usize;
    if len > MAX_STRING_BYTES {
        return Err(Invalid("a string is longer than 4096 bytes"));
    }
    string(cursor.take(len).ok_or(Invalid("a string is longer than the option"))?)
}

/// Checks a string of the protocol: UTF-8, at most 4096 bytes, no NUL ("Conventions").
///
/// # Errors
/// When it is not one.
pub fn string(bytes: &[u8]) -> Result<&str, Invalid> {
    if bytes.len() > MAX_STRING_BYTES {
        return Err(Invalid("a string is longer than 4096 bytes"));
    }
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        Ok(_) => Err(Invalid("a string contains NUL")),
        Err(_) => Err(Invalid("a string is not UTF-8")),
    }
}

/// What the server says first.
pub fn put_greeting(out: &mut Vec<u8>) {
    out.extend_from_slice(&INIT_MAGIC.to_be_bytes());
    out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    out.extend_from_slice(&(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
}

/// One reply to an option.
pub fn put_reply(out: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(len as u32).to_be_bytes());
    parts.iter().for_each(|part| out.extend_from_slice(part));
}

/// The answer to `OPT_EXPORT_NAME`.
pub fn put_export_name_reply(out: &mut Vec<u8>, size_bytes: u64, flags: u16, zeroes: bool) {
    out.extend_from_slice(&size_bytes.to_be_bytes());
    out.extend_from_slice(&flags.to_be_bytes());
    if zeroes {
        out.extend_from_slice(&[0; 124]);
    }
}

/// For a fuzz target: parses the data of every option that has a format.
pub fn fuzz_options(data: &[u8]) {
    if let Some(head) = data.first_chunk::<OPTION_HEADER_BYTES>() {
        let _ = OptionHeader::parse(head);
    }
    if let Ok(request) = InfoRequest::parse(data) {
        assert!(request.name.len() <= MAX_STRING_BYTES);
    }
    if let Ok(request) = MetaRequest::parse(data) {
        assert!(request.queries.iter().all(|query| query.len() <= MAX_STRING_BYTES));
    }
    let _ = string(data);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn counted(text: &str) -> Vec<u8> {
        [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_are_refused(data in prop::collection::vec(any::<u8>(), 0..100)) {
            fuzz_options(&data);
        }

        #[test]
        fn an_info_request_is_read_as_written(name in "[^\0]{0,40}", kinds in prop::collection::vec(0u16..6, 0..6)) {
            let mut data = counted(&name);
            data.extend_from_slice(&(kinds.len() as u16).to_be_bytes());
            kinds.iter().for_each(|kind| data.extend_from_slice(&kind.to_be_bytes()));
            let request = InfoRequest::parse(&data).unwrap();
            prop_assert_eq!(request.name, &name);
            prop_assert_eq!(request.wants_block_size, kinds.contains(&info::BLOCK_SIZE));
            prop_assert_eq!(request.wants_name, kinds.contains(&info::NAME));
            for cut in 0..data.len() {
                prop_assert!(InfoRequest::parse(&data[..cut]).is_err());
            }
        }

        #[test]
        fn a_meta_request_is_read_as_written(export in "[^\0]{0,20}", queries in prop::collection::vec("[a-z]{1,5}:[a-z]{0,9}", 0..5)) {
            let mut data = counted(&export);
            data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
            queries.iter().for_each(|query| data.extend_from_slice(&counted(query)));
            let request = MetaRequest::parse(&data).unwrap();
            prop_assert_eq!(request.export, &export);
            prop_assert_eq!(request.queries, queries);
            data.push(0);
            prop_assert!(MetaRequest::parse(&data).is_err());
        }
    }

    #[test]
    fn lengths_of_all_ones_are_refused() {
        let ones = [0xff; 64];
        assert!(InfoRequest::parse(&ones).is_err() && MetaRequest::parse(&ones).is_err());
        let mut many_queries = counted("");
        many_queries.extend_from_slice(&u32::MAX.to_be_bytes());
        assert!(MetaRequest::parse(&many_queries).is_err());
    }

    #[test]
    fn strings_have_no_nul_and_are_utf8() {
        assert!(string(b"a\0b").is_err() && string(&[0xff]).is_err());
        assert!(string(&[b'a'; 4096]).is_ok() && string(&[b'a'; 4097]).is_err());
    }
}
