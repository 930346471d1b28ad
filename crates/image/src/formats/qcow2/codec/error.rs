//! [`CodecError`]: which field of which structure is wrong, and its value.

use spile_core::{Error, ErrorKind};

use super::{MAX_L1_BYTES, MAX_NAME_BYTES};
use crate::formats::codec_error;

/// A structure that cannot be used. The text names the field and its value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// Fewer bytes than the structure has.
    #[error("the qcow2 {what} needs {needed_bytes} bytes, but there are {got_bytes}")]
    TooShort {
        /// The structure.
        what: &'static str,
        /// Its length.
        needed_bytes: usize,
        /// The length of what was there.
        got_bytes: usize,
    },
    /// The file does not start with the magic of qcow2.
    #[error("the file starts with \"{}\", not with qcow2's \"QFI\\xfb\"", .0.escape_ascii())]
    Magic([u8; 4]),
    /// A version other than 2 and 3.
    #[error("the image has version {0} of the qcow format; only 2 and 3 are known")]
    Version(u32),
    /// The header's own length is impossible.
    #[error("the qcow2 header length {0} is not a multiple of 8 from 104 to the cluster size")]
    HeaderLength(u32),
    /// A cluster size outside the limits.
    #[error("the qcow2 cluster_bits {0} is not from 9 to 21 (from 14 with extended L2 entries)")]
    ClusterBits(u32),
    /// A width of refcounts that does not exist.
    #[error("the qcow2 refcount_order {0} is over 6")]
    RefcountOrder(u32),
    /// An unknown way of encryption.
    #[error("the qcow2 crypt_method {0} is not known")]
    CryptMethod(u32),
    /// A feature that changes the format in a way that this build does not know.
    #[error("the image needs features that are not known here: {0}")]
    UnknownFeatures(String),
    /// The bit that announces another compression than deflate contradicts the field that names it.
    #[error("the qcow2 compression type {kind} contradicts the compression bit, which is {bit}")]
    CompressionBit {
        /// The value of the field; 0 when there is none.
        kind: u8,
        /// The value of incompatible feature bit 3.
        bit: bool,
    },
    /// A compression that does not exist.
    #[error("the qcow2 compression type {0} is not known; 0 (deflate) and 1 (zstd) are")]
    CompressionType(u8),
    /// The L1 table is larger than the limit.
    #[error("the qcow2 L1 table has {0} entries; at most {most} are accepted", most = MAX_L1_BYTES / 8)]
    L1TooLarge(u32),
    /// The L1 table does not cover the disk.
    #[error("the qcow2 L1 table has {entries} entries, but a disk of {size_bytes} bytes needs {needed}")]
    L1TooSmall {
        /// The header's count.
        entries: u32,
        /// The virtual size.
        size_bytes: u64,
        /// The count that covers it.
        needed: u64,
    },
    /// An offset that is not that of a cluster, or none at all.
    #[error("the qcow2 {what} offset {offset:#x} is not a positive multiple of the cluster size below 2^56")]
    TableOffset {
        /// The table.
        what: &'static str,
        /// Its offset.
        offset: u64,
    },
    /// The refcount table is empty or over the limit.
    #[error("the qcow2 refcount table of {0} clusters is empty or larger than 8 MiB")]
    RefcountTableClusters(u32),
    /// More snapshots than are accepted.
    #[error("the image claims {0} snapshots; at most 65536 are accepted")]
    SnapshotCount(u32),
    /// A backing file's name that is nowhere, or an offset without a name.
    #[error(
        "the qcow2 backing file name of {len_bytes} bytes at {offset:#x} does not lie behind the header in the first cluster"
    )]
    BackingName {
        /// Where the name starts.
        offset: u64,
        /// Its length.
        len_bytes: u32,
    },
    /// A name that is too long, empty, or has a NUL.
    #[error("the qcow2 {0} is empty, has a NUL or is longer than {MAX_NAME_BYTES} bytes")]
    Name(&'static str),
    /// A header extension that goes past the space for extensions.
    #[error("the qcow2 header extension {kind:#010x} of {len_bytes} bytes goes past the end of its space")]
    ExtensionLength {
        /// Its type.
        kind: u32,
        /// Its length.
        len_bytes: u32,
    },
    /// A header extension that may appear once appears twice.
    #[error("the qcow2 header extension {0:#010x} appears twice")]
    ExtensionTwice(u32),
    /// A header extension whose content is wrong.
    #[error("the qcow2 {what} extension has a wrong {field}: {value:#x}")]
    ExtensionField {
        /// The extension.
        what: &'static str,
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// A snapshot entry with more extra data than is accepted.
    #[error("a qcow2 snapshot entry has {0} bytes of extra data; at most 1024 are accepted")]
    SnapshotExtra(u32),
    /// A bitmap whose directory entry is wrong.
    #[error("a qcow2 bitmap has a wrong {field}: {value:#x}")]
    BitmapField {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

impl CodecError {
    /// `Unsupported` for what may be valid elsewhere, else `Corrupt`.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Version(_)
            | Self::CryptMethod(_)
            | Self::UnknownFeatures(_)
            | Self::CompressionType(_)
            | Self::L1TooLarge(_) => ErrorKind::Unsupported,
            _ => ErrorKind::Corrupt,
        }
    }
}

impl From<CodecError> for Error {
    fn from(error: CodecError) -> Self {
        let hint = match &error {
            CodecError::Magic(_) => Some("is the file in another format? say --format raw or --format vhd"),
            CodecError::Version(1) => Some("version 1 is the older format qcow: convert it with qemu-img first"),
            CodecError::UnknownFeatures(_) => Some("read it with the program that made it"),
            _ => None,
        };
        codec_error(error.kind(), &error, hint)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_versions_and_features_are_unsupported_and_the_rest_is_corrupt() {
        let kind = |error: CodecError| Error::from(error).kind();
        assert_eq!(kind(CodecError::Version(4)), ErrorKind::Unsupported);
        assert_eq!(kind(CodecError::UnknownFeatures("bit 9".into())), ErrorKind::Unsupported);
        assert_eq!(kind(CodecError::ClusterBits(64)), ErrorKind::Corrupt);
    }

    #[test]
    fn the_text_names_field_value_and_way_out() {
        let text = Error::from(CodecError::Version(1)).to_string();
        assert!(text.contains("version 1") && text.contains("qemu-img"), "{text}");
        let text = CodecError::Magic(*b"cone").to_string();
        assert_eq!(text, r#"the file starts with "cone", not with qcow2's "QFI\xfb""#);
    }
}
