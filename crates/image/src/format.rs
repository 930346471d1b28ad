//! Which format a file is in. Never guessed from its content: a guest that owns a raw disk owns its first sector,
//! and could make the host read any file by writing a header there (CVE-2008-2004 and its kin).

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use spile_core::{Error, ErrorKind, Result};

/// An image format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// The bytes as they are.
    Raw,
    /// Virtual Hard Disk: fixed, dynamic or differencing.
    Vhd,
}

impl Format {
    /// The format a file's extension names: `.vhd`, `.vpc` or `.avhd` are VHD, `.raw` and `.img` are raw.
    pub fn from_extension(path: &Path) -> Option<Self> {
        let extension = path.extension()?.to_str()?.to_ascii_lowercase();
        match extension.as_str() {
            "vhd" | "avhd" | "vpc" => Some(Self::Vhd),
            "raw" | "img" => Some(Self::Raw),
            _ => None,
        }
    }

    /// `given`, else what the extension says, else an error that says what to type.
    ///
    /// # Errors
    /// `InvalidInput` when neither names a format.
    pub fn of(path: &Path, given: Option<Self>) -> Result<Self> {
        given.or_else(|| Self::from_extension(path)).ok_or_else(|| {
            Error::new(ErrorKind::InvalidInput, "cannot tell the format from the file's extension")
                .at_path(path)
                .hint("say --format raw or --format vhd; the content is never probed, as a guest could forge it")
        })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Raw => "raw",
            Self::Vhd => "vhd",
        })
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "raw" => Ok(Self::Raw),
            "vhd" | "vpc" => Ok(Self::Vhd),
            _ => Err(Error::new(ErrorKind::InvalidInput, format!("unknown format '{name}'")).hint("raw or vhd")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_name_formats_and_nothing_else_does() {
        assert_eq!(Format::of(Path::new("a.VHD"), None).unwrap(), Format::Vhd);
        assert_eq!(Format::of(Path::new("a.img"), None).unwrap(), Format::Raw);
        assert_eq!(Format::of(Path::new("a.img"), Some(Format::Vhd)).unwrap(), Format::Vhd);
        assert_eq!(Format::of(Path::new("disk"), None).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}
