//! [`Locator`]: where a store is, as an operator writes it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::{Error, ErrorKind};

/// Where a store is. What stands in an image (the name of a parent) is never parsed as one: it is always a path.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Locator {
    /// A file or block device of this host.
    Path(PathBuf),
    /// `null:SIZE`: so many bytes that read as zeroes; writes are dropped.
    Null(u64),
    /// `mem:SIZE`: so many bytes of memory, gone when the program ends.
    Mem(u64),
    /// An export of an NBD server, by its URI: `nbd://`, `nbds://`, `nbd+unix://` or `nbds+unix://`.
    Nbd(String),
}

/// The schemes of NBD.
const NBD_SCHEMES: [&str; 4] = ["nbd", "nbds", "nbd+unix", "nbds+unix"];

impl Locator {
    /// The path of a file or device; `None` for everything else.
    pub fn as_path(&self) -> Option<&Path> {
        match self {
            Self::Path(path) => Some(path),
            _ => None,
        }
    }

    fn parse_uri(scheme: &str, text: &str) -> Result<Self, Error> {
        if NBD_SCHEMES.contains(&scheme) {
            return Ok(Self::Nbd(text.to_owned()));
        }
        let what = format!("there is no store of the scheme `{scheme}`");
        Err(Error::new(ErrorKind::InvalidInput, what).hint(format!(
            "use {}; for a file of this name write ./{text}",
            NBD_SCHEMES.map(|s| format!("{s}://")).join(", ")
        )))
    }
}

impl FromStr for Locator {
    type Err = Error;

    /// # Errors
    /// `InvalidInput` for an empty text, an unknown scheme, and a size that is none.
    fn from_str(text: &str) -> Result<Self, Error> {
        let size = |size: &str| match parse_size(size) {
            Ok(bytes) if bytes.is_multiple_of(512) && bytes > 0 => Ok(bytes),
            Ok(_) => Err(invalid(format!("the size of `{text}` must be a positive multiple of 512 bytes"))),
            Err(message) => Err(invalid(message)),
        };
        match (text.split_once("://"), text.split_once(':')) {
            _ if text.is_empty() => Err(invalid("the DISK is empty".to_owned())),
            (Some((scheme, _)), _) if is_scheme(scheme) => Self::parse_uri(scheme, text),
            (_, Some(("null", rest))) => size(rest).map(Self::Null),
            (_, Some(("mem", rest))) => size(rest).map(Self::Mem),
            _ => Ok(Self::Path(text.into())),
        }
    }
}

/// RFC 3986, section 3.1. A path has a slash before any `://`, or another character that no scheme has.
fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidInput, message)
}

impl fmt::Display for Locator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Null(bytes) => write!(f, "null:{bytes}"),
            Self::Mem(bytes) => write!(f, "mem:{bytes}"),
            Self::Nbd(uri) => f.write_str(uri),
        }
    }
}

impl From<&Locator> for Locator {
    fn from(at: &Locator) -> Self {
        at.clone()
    }
}

impl From<PathBuf> for Locator {
    fn from(path: PathBuf) -> Self {
        Self::Path(path)
    }
}

impl From<&PathBuf> for Locator {
    fn from(path: &PathBuf) -> Self {
        Self::Path(path.clone())
    }
}

impl From<&Path> for Locator {
    fn from(path: &Path) -> Self {
        Self::Path(path.to_owned())
    }
}

/// The largest size that a file can have, in bytes.
const MOST_BYTES: u64 = i64::MAX as u64;

/// Reads a size in bytes: digits, perhaps a fraction, and a suffix of powers of 1024 (`k`, `M`, `G`, `T`, `P`, `E`, each also
/// with `iB`), in capitals or not, perhaps behind a space.
///
/// # Errors
/// A message fit for a command line when the text is not such a size, or is larger than any file can be.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let bad = || format!("`{text}` is not a size; write 512, 4k, 20G or 1.5TiB");
    let too_large = || format!("`{text}` is too large: a disk has less than 8 EiB");
    let shift = size_shift(suffix.trim_start()).ok_or_else(|| decimal_unit(text, suffix).unwrap_or_else(bad))?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || !whole.bytes().all(|digit| digit.is_ascii_digit()) {
        return Err(bad());
    }
    let part = parse_fraction(fraction, shift).ok_or_else(bad)?;
    // Only too many digits can be wrong now.
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let bytes = whole.checked_shl(shift).filter(|bytes| bytes >> shift == whole);
    bytes.and_then(|bytes| bytes.checked_add(part)).filter(|bytes| *bytes <= MOST_BYTES).ok_or_else(too_large)
}

fn size_shift(suffix: &str) -> Option<u32> {
    let suffix = suffix.to_ascii_lowercase();
    if matches!(suffix.as_str(), "" | "b") {
        return Some(0);
    }
    let letter = suffix.strip_suffix("ib").unwrap_or(&suffix);
    let at = ["k", "m", "g", "t", "p", "e"].iter().position(|known| *known == letter)?;
    Some(10 * (at as u32 + 1))
}

/// What to say of a unit such as GB: to some it is 1000 MB, to others 1024.
fn decimal_unit(text: &str, suffix: &str) -> Option<String> {
    let letter = suffix.trim_start().strip_suffix(['B', 'b'])?;
    size_shift(letter).filter(|shift| *shift > 0)?;
    let (number, binary) = (text.strip_suffix(suffix)?.trim_end(), letter.to_ascii_uppercase());
    Some(format!("`{text}` means two things; write {number}{binary} or {number}{binary}iB for units of 1024"))
}

fn parse_fraction(digits: &str, shift: u32) -> Option<u64> {
    let scale = 10u128.checked_pow(u32::try_from(digits.len()).ok().filter(|n| *n <= 18)?)?;
    let bytes = digits.parse::<u64>().ok()? as u128 * (1u128 << shift);
    bytes.is_multiple_of(scale).then_some((bytes / scale) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Option<Locator> {
        text.parse().ok()
    }

    #[test]
    fn every_kind_is_told_by_its_beginning() {
        assert_eq!(parsed("null:1T"), Some(Locator::Null(1 << 40)));
        assert_eq!(parsed("mem:512"), Some(Locator::Mem(512)));
        assert_eq!(parsed("nbd+unix:///a?socket=/s"), Some(Locator::Nbd("nbd+unix:///a?socket=/s".into())));
        for path in ["/a/b.vhd", "./null:1T", "a:b", "./nbd://x", "/x://y", "C:\\x"] {
            assert_eq!(parsed(path), Some(Locator::Path(path.into())), "{path}");
        }
    }

    #[test]
    fn what_is_nothing_is_refused_with_what_to_do() {
        for text in ["", "null:", "mem:100", "null:x", "null:0"] {
            assert_eq!(parsed(text), None, "{text}");
        }
        let error = "http://x/y".parse::<Locator>().unwrap_err();
        assert!(error.to_string().contains("./http://x/y"), "{error}");
    }

    #[test]
    fn locators_read_back() {
        for text in ["/a", "null:512", "mem:1024", "nbd://h/x"] {
            assert_eq!(parsed(text).unwrap().to_string(), text);
        }
    }
}
