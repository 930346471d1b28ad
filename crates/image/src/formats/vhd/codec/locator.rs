//! Parent locators: where a child says its parent is, once for each platform.
//!
//! What comes out of a locator is a path that a stranger chose. It is only decoded here; whether it may be followed
//! is decided by who opens files.

use super::{CodecError, array, be32, be64, put};

/// The longest path accepted, in encoded bytes.
pub const MAX_PATH_BYTES: u32 = 4096;

/// Below this, `space` counts sectors. The specification means sectors, but Windows and blktap write bytes.
const SPACE_IN_SECTORS_BELOW: u32 = 512;

const W2RU: [u8; 4] = *b"W2ru";
const W2KU: [u8; 4] = *b"W2ku";
const MACX: [u8; 4] = *b"MacX";
const FILE_URL: &str = "file://";

/// The platform of a locator, which says how its path is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Platform {
    /// An unused locator.
    None,
    /// A path relative to the child, Windows fashion, UTF-16LE.
    W2ru,
    /// An absolute path, Windows fashion, UTF-16LE. (blktap writes a relative one here too.)
    W2ku,
    /// A `file:` URL, UTF-8.
    MacX,
    /// Anything else; the deprecated ones among them.
    Other([u8; 4]),
}

impl Platform {
    fn from_code(code: [u8; 4]) -> Self {
        match code {
            [0, 0, 0, 0] => Self::None,
            W2RU => Self::W2ru,
            W2KU => Self::W2ku,
            MACX => Self::MacX,
            other => Self::Other(other),
        }
    }

    fn code(self) -> [u8; 4] {
        match self {
            Self::None => [0; 4],
            Self::W2ru => W2RU,
            Self::W2ku => W2KU,
            Self::MacX => MACX,
            Self::Other(code) => code,
        }
    }
}

/// One of a header's eight locators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Locator {
    /// How the path is written.
    pub platform: Platform,
    /// The room reserved for it, as stored: bytes, or sectors when below 512.
    pub space: u32,
    /// The length of the path as encoded.
    pub len_bytes: u32,
    /// Where the path is in the file.
    pub offset_bytes: u64,
}

impl Locator {
    /// Length of an entry in bytes.
    pub const LEN: usize = 24;

    /// An unused locator.
    pub const NONE: Self = Self { platform: Platform::None, space: 0, len_bytes: 0, offset_bytes: 0 };

    /// Reads an entry. Any bytes make one; its values are checked when it is used.
    pub fn parse(bytes: &[u8; Self::LEN]) -> Self {
        Self {
            platform: Platform::from_code(array(bytes, 0)),
            space: be32(bytes, 4),
            len_bytes: be32(bytes, 8),
            offset_bytes: be64(bytes, 16),
        }
    }

    /// The entry's bytes.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        put(&mut bytes, 0, &self.platform.code());
        put(&mut bytes, 4, &self.space.to_be_bytes());
        put(&mut bytes, 8, &self.len_bytes.to_be_bytes());
        put(&mut bytes, 16, &self.offset_bytes.to_be_bytes());
        bytes
    }

    /// The room reserved for the path, in bytes.
    pub fn space_bytes(&self) -> u64 {
        let unit = if self.space < SPACE_IN_SECTORS_BELOW { 512 } else { 1 };
        u64::from(self.space) * unit
    }

    /// The path that `data`, read at the locator's offset, holds: with `/` between its parts and no drive letter.
    /// `data` may be longer than the path.
    ///
    /// # Errors
    /// A platform without a path, a length over [`MAX_PATH_BYTES`] or over `data`, text that is not Unicode, empty
    /// or has a NUL inside.
    pub fn decode(&self, data: &[u8]) -> Result<String, CodecError> {
        if self.len_bytes > MAX_PATH_BYTES {
            return Err(CodecError::LocatorLength(self.len_bytes));
        }
        let len = self.len_bytes as usize;
        let data = data.get(..len).ok_or(CodecError::TooShort {
            what: "parent locator",
            needed_bytes: len,
            got_bytes: data.len(),
        })?;
        let path = match self.platform {
            Platform::W2ru | Platform::W2ku => from_windows(data)?,
            Platform::MacX => from_url(data)?,
            other => {
                return Err(CodecError::LocatorPlatform(u32::from_be_bytes(other.code())));
            }
        };
        match path {
            path if path.is_empty() => Err(CodecError::EmptyPath("parent locator")),
            path if path.contains('\0') => Err(CodecError::NulInPath("parent locator")),
            path => Ok(path),
        }
    }
}

/// UTF-16LE with backslashes; NULs at the end are a terminator.
fn from_windows(data: &[u8]) -> Result<String, CodecError> {
    if !data.len().is_multiple_of(2) {
        return Err(CodecError::Text("parent locator"));
    }
    let units = data.chunks_exact(2).map(|u| u16::from_le_bytes([u[0], u[1]]));
    let text: String =
        char::decode_utf16(units).collect::<Result<_, _>>().map_err(|_| CodecError::Text("parent locator"))?;
    let path = text.trim_end_matches('\0').replace('\\', "/");
    let has_drive =
        path.as_bytes().first().is_some_and(u8::is_ascii_alphabetic) && path.as_bytes().get(1) == Some(&b':');
    Ok(if has_drive { path[2..].to_owned() } else { path })
}

/// `file:///absolute`, `file://localhost/absolute`, or blktap's relative `file://./name`.
fn from_url(data: &[u8]) -> Result<String, CodecError> {
    let text = std::str::from_utf8(data).map_err(|_| CodecError::Text("parent locator"))?;
    let path = text.trim_end_matches('\0').strip_prefix(FILE_URL).ok_or(CodecError::NotFileUrl)?;
    let path = match path.strip_prefix("localhost") {
        Some(rest) if rest.starts_with('/') => rest,
        _ => path,
    };
    String::from_utf8(percent_decoded(path.as_bytes())).map_err(|_| CodecError::Text("parent locator"))
}

/// `%41` becomes `A`. A percent sign that starts no escape stays: blktap does not escape.
fn percent_decoded(bytes: &[u8]) -> Vec<u8> {
    let digit = |at: usize| bytes.get(at).and_then(|b| char::from(*b).to_digit(16));
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        match (byte, digit(at + 1), digit(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                out.push((high << 4 | low) as u8);
                at += 3;
            }
            _ => {
                out.push(*byte);
                at += 1;
            }
        }
    }
    out
}

/// The bytes of a locator for `path`, which has `/` between its parts. A relative path starts with `.\` (Windows
/// wants that) or `./`. URLs are escaped no more than they must be to be read back, for blktap reads no escapes.
/// Empty for platforms without a path.
pub fn encode(platform: Platform, path: &str) -> Vec<u8> {
    let dot = if path.starts_with('/') { "" } else { "./" };
    let rooted = format!("{dot}{}", path.strip_prefix("./").unwrap_or(path));
    match platform {
        Platform::W2ru | Platform::W2ku => {
            rooted.replace('/', "\\").encode_utf16().flat_map(u16::to_le_bytes).collect()
        }
        Platform::MacX => format!("{FILE_URL}{}", rooted.replace('%', "%25")).into_bytes(),
        Platform::None | Platform::Other(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn locator(platform: Platform, len: usize) -> Locator {
        Locator { platform, space: 1, len_bytes: len as u32, offset_bytes: 4096 }
    }

    fn decode(platform: Platform, data: &[u8]) -> Result<String, CodecError> {
        locator(platform, data.len()).decode(data)
    }

    fn utf16(text: &str) -> Vec<u8> {
        text.encode_utf16().flat_map(u16::to_le_bytes).collect()
    }

    #[test]
    fn space_is_in_sectors_below_512_and_in_bytes_from_there() {
        let space = |space| Locator { space, ..Locator::NONE }.space_bytes();
        assert_eq!((space(0), space(1), space(511)), (0, 512, 511 * 512));
        assert_eq!((space(512), space(u32::MAX)), (512, u64::from(u32::MAX)));
    }

    #[test]
    fn relative_paths_are_written_as_blktap_writes_them() {
        assert_eq!(encode(Platform::W2ru, "p.vhd"), utf16(".\\p.vhd"));
        assert_eq!(encode(Platform::W2ku, "../b/p.vhd"), utf16(".\\..\\b\\p.vhd"));
        assert_eq!(encode(Platform::MacX, "./p.vhd"), b"file://./p.vhd");
        assert_eq!(encode(Platform::MacX, "/a/50%.vhd"), b"file:///a/50%25.vhd");
        assert_eq!(encode(Platform::None, "p.vhd"), b"");
    }

    #[test]
    fn windows_paths() {
        let read = |text: &str| decode(Platform::W2ku, &utf16(text));
        assert_eq!(read("C:\\vm\\p.vhd"), Ok("/vm/p.vhd".into()));
        assert_eq!(read("d:\\p.vhd"), Ok("/p.vhd".into()));
        assert_eq!(read(".\\p.vhd\0"), Ok("./p.vhd".into()));
        assert_eq!(read("..\\..\\etc\\shadow"), Ok("../../etc/shadow".into()));
        assert_eq!(read("caf\u{e9}\u{1f4be}.vhd"), Ok("caf\u{e9}\u{1f4be}.vhd".into()));
    }

    #[test]
    fn urls() {
        let read = |text: &str| decode(Platform::MacX, text.as_bytes());
        assert_eq!(read("file://./p.vhd"), Ok("./p.vhd".into()));
        assert_eq!(read("file:///a%20b/%C3%A9.vhd"), Ok("/a b/\u{e9}.vhd".into()));
        assert_eq!(read("file://localhost/p.vhd"), Ok("/p.vhd".into()));
        assert_eq!(read("file://./50%.vhd"), Ok("./50%.vhd".into()));
        assert_eq!(read("http://host/p.vhd"), Err(CodecError::NotFileUrl));
        assert_eq!(read("file://./%ff"), Err(CodecError::Text("parent locator")));
        assert_eq!(read("file://./a%00b"), Err(CodecError::NulInPath("parent locator")));
    }

    #[test]
    fn bad_text_is_refused() {
        let bad = CodecError::Text("parent locator");
        assert_eq!(decode(Platform::W2ru, &[0x00, 0xd8, b'x', 0]), Err(bad.clone()));
        assert_eq!(decode(Platform::W2ru, b"odd"), Err(bad.clone()));
        assert_eq!(decode(Platform::MacX, b"file://\xff"), Err(bad));
        let nul = CodecError::NulInPath("parent locator");
        assert_eq!(decode(Platform::W2ru, &utf16("a\0b")), Err(nul));
        for empty in ["", "\0\0", "C:"] {
            let error = decode(Platform::W2ru, &utf16(empty));
            assert_eq!(error, Err(CodecError::EmptyPath("parent locator")), "{empty:?}");
        }
    }

    #[test]
    fn lengths_are_bounded_before_anything_is_read() {
        let huge = locator(Platform::W2ru, u32::MAX as usize);
        assert_eq!(huge.decode(&[]), Err(CodecError::LocatorLength(u32::MAX)));
        let short = locator(Platform::W2ru, 10).decode(&[0; 9]);
        assert!(matches!(short, Err(CodecError::TooShort { needed_bytes: 10, .. })));
    }

    #[test]
    fn platforms_without_a_path_are_named() {
        let error = decode(Platform::Other(*b"Mac "), b"blob");
        assert_eq!(error, Err(CodecError::LocatorPlatform(0x4d61_6320)));
        assert_eq!(decode(Platform::None, b""), Err(CodecError::LocatorPlatform(0)));
    }

    proptest! {
        #[test]
        fn entries_survive(mut bytes in any::<[u8; 24]>()) {
            bytes[12..16].fill(0);
            prop_assert_eq!(Locator::parse(&bytes).to_bytes(), bytes);
        }

        #[test]
        fn a_path_is_read_as_it_was_written(path in "/?[^\0\\\\/:]{1,40}(/[^\0\\\\/]{1,40}){0,3}") {
            for platform in [Platform::W2ru, Platform::W2ku, Platform::MacX] {
                let expected = match path.strip_prefix("./") {
                    _ if path.starts_with('/') => path.clone(),
                    Some(rest) => format!("./{rest}"),
                    None => format!("./{path}"),
                };
                let read = decode(platform, &encode(platform, &path));
                prop_assert_eq!(read, Ok(expected), "{:?}", platform);
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(
            entry in any::<[u8; 24]>(),
            data in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            let mut locator = Locator::parse(&entry);
            let _ = locator.space_bytes();
            for platform in [Platform::W2ru, Platform::W2ku, Platform::MacX, locator.platform] {
                locator.platform = platform;
                let _ = locator.decode(&data);
                let _ = decode(platform, &data);
            }
        }
    }
}
