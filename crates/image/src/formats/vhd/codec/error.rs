//! [`CodecError`]: which field of which structure is wrong, and its value.

use spile_core::{Error, ErrorKind};

use crate::formats::codec_error;

/// A structure that cannot be used. The text names the field and its value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// Fewer bytes than the structure has.
    #[error("the VHD {what} needs {needed_bytes} bytes, but there are {got_bytes}")]
    TooShort {
        /// The structure.
        what: &'static str,
        /// Its length.
        needed_bytes: usize,
        /// What was there.
        got_bytes: usize,
    },
    /// The structure does not start with its magic.
    #[error("the VHD {what} starts with \"{}\", not \"{expected}\"", found.escape_ascii())]
    Cookie {
        /// The structure.
        what: &'static str,
        /// What it should start with.
        expected: &'static str,
        /// What it starts with.
        found: [u8; 8],
    },
    /// A resize by `vhd-util` was cut off: its journal must be replayed or reverted by that tool first.
    #[error("the VHD footer is marked \"v_poison\": a resize by vhd-util was interrupted")]
    Poisoned,
    /// The bytes are damaged.
    #[error("the checksum of the VHD {what} is {stored:#010x}, but its bytes give {computed:#010x}")]
    Checksum {
        /// The structure.
        what: &'static str,
        /// The value in the file.
        stored: u32,
        /// The value of the bytes.
        computed: u32,
    },
    /// A major version other than 1.
    #[error("the VHD {what} has version {version:#010x}; only 1.x is known")]
    Version {
        /// The structure.
        what: &'static str,
        /// Major in the upper, minor in the lower half.
        version: u32,
    },
    /// Not fixed, dynamic or differencing.
    #[error("the VHD disk type is {0}; only 2 (fixed), 3 (dynamic) and 4 (differencing) are known")]
    DiskType(u32),
    /// Written by blktap before 1.1, whose bitmaps have another bit order.
    #[error("the VHD was made by blktap version {0:#010x}, whose sector bitmaps are little-endian")]
    OldBitmapOrder(u32),
    /// The size is not a whole number of sectors.
    #[error("the VHD's current size of {0} bytes is not a multiple of 512")]
    SizeNotSectors(u64),
    /// Larger than [`MAX_SIZE_BYTES`](super::MAX_SIZE_BYTES).
    #[error("the VHD's current size of {0} bytes is over the format's limit of 2040 GiB")]
    SizeTooLarge(u64),
    /// The footer of a dynamic disk says where no header can be.
    #[error("the VHD footer's data offset {0:#x} cannot be that of a header")]
    DataOffset(u64),
    /// Not a power of two, or out of bounds.
    #[error("the VHD block size {0:#x} is not a power of two from 4 KiB to 256 MiB")]
    BlockSize(u32),
    /// The BAT cannot be there.
    #[error("the VHD BAT offset {0:#x} is not a multiple of 512 behind the footer's copy")]
    BatOffset(u64),
    /// No entries, or more than any disk of that block size can have.
    #[error("the VHD BAT has {entries} entries of {block_size_bytes} bytes each; at most {most} are sensible")]
    BatEntries {
        /// The header's count.
        entries: u32,
        /// The header's block size.
        block_size_bytes: u32,
        /// What the size limit allows.
        most: u32,
    },
    /// Text that is not UTF-16 (or UTF-8 in an URL).
    #[error("the VHD {0} is not valid Unicode")]
    Text(&'static str),
    /// A NUL inside a path.
    #[error("the VHD {0} contains a NUL")]
    NulInPath(&'static str),
    /// An empty path.
    #[error("the VHD {0} is empty")]
    EmptyPath(&'static str),
    /// A path longer than [`MAX_PATH_BYTES`](super::locator::MAX_PATH_BYTES).
    #[error("a VHD parent locator is {0} bytes long; at most 4096 are accepted")]
    LocatorLength(u32),
    /// A MacX locator that is no `file:` URL.
    #[error("the VHD MacX parent locator is not a file:// URL")]
    NotFileUrl,
    /// A locator whose platform has no path to decode.
    #[error("the VHD parent locator's platform code {0:#010x} holds no path that can be read")]
    LocatorPlatform(u32),
    /// The batmap cannot be there.
    #[error("the VHD batmap's offset {0:#x} is not a positive multiple of 512")]
    BatmapOffset(u64),
    /// The batmap is empty or larger than any BAT needs.
    #[error("the VHD batmap's size is {0} sectors; 1 to 8192 are sensible")]
    BatmapSectors(u32),
}

impl CodecError {
    /// `Unsupported` for what may be valid elsewhere, else `Corrupt`.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Version { .. }
            | Self::DiskType(_)
            | Self::OldBitmapOrder(_)
            | Self::SizeTooLarge(_)
            | Self::Poisoned
            | Self::LocatorPlatform(_) => ErrorKind::Unsupported,
            _ => ErrorKind::Corrupt,
        }
    }
}

impl From<CodecError> for Error {
    fn from(error: CodecError) -> Self {
        let hint = match &error {
            CodecError::Poisoned => Some("finish or undo the resize with vhd-util first"),
            CodecError::SizeTooLarge(_) => Some("use a raw image for larger disks"),
            CodecError::OldBitmapOrder(_) => Some("convert the image with vhd-update first"),
            _ => None,
        };
        codec_error(error.kind(), &error, hint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_versions_and_types_are_unsupported_and_the_rest_is_corrupt() {
        let kind = |e: CodecError| Error::from(e).kind();
        assert_eq!(kind(CodecError::DiskType(5)), ErrorKind::Unsupported);
        assert_eq!(kind(CodecError::Version { what: "footer", version: 0x20000 }), ErrorKind::Unsupported);
        assert_eq!(kind(CodecError::BlockSize(0)), ErrorKind::Corrupt);
    }

    #[test]
    fn the_text_names_field_and_value() {
        let text = Error::from(CodecError::Poisoned).to_string();
        assert!(text.contains("v_poison") && text.contains("vhd-util first"), "{text}");
        let found = *b"\0conecti";
        let text = CodecError::Cookie { what: "footer", expected: "conectix", found }.to_string();
        assert_eq!(text, r#"the VHD footer starts with "\x00conecti", not "conectix""#);
    }
}
