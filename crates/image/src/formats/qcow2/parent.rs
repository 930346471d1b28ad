//! What an image says of the files that it needs: its backing file and its data file.
//!
//! Names in an image are input from whoever wrote the image. Only paths are followed, and the code that opens layers
//! checks them against its policy; QEMU's other ways to name a file (`json:…`, `nbd://…`) are refused, because they can
//! make a host open anything (CVE-2024-4467). The backing file's format is the one that the image names; it is never
//! guessed from content (CVE-2008-2004).

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use spile_core::{Error, ErrorKind, Result};

use super::codec::header::{Header, feature};
use super::codec::printable;
use super::open::Head;
use crate::formats::Format;
use crate::layer::{Identity, ParentRef};

/// The first bytes of the identity of every qcow2 image: the magic of the format.
pub(super) const IDENTITY_MARK: [u8; 4] = *b"QFI\xfb";

/// The backing file, if the image has one.
///
/// # Errors
/// `Unsupported` for a name that is no path, or a format that is not known here.
pub(super) fn parent(head: &Head) -> Result<Option<ParentRef>> {
    let Some(name) = &head.backing else { return Ok(None) };
    let path = path_of("backing file", name)?;
    let format = match &head.extensions.backing_format {
        Some(format) => Some(format_of(format)?),
        None => None,
    };
    Ok(Some(ParentRef { names: vec![path], format, identity: None }))
}

fn format_of(name: &[u8]) -> Result<Format> {
    let known = std::str::from_utf8(name).ok().and_then(Format::named);
    known.ok_or_else(|| {
        let what = format!("the backing file is of format \"{}\", which is not known here", printable(name));
        Error::new(ErrorKind::Unsupported, what)
            .hint("convert the backing file with qemu-img and rebase the image onto it")
    })
}

/// The name of the data file, where the guest's data lie in one.
///
/// # Errors
/// `Corrupt` when the image needs a data file and does not name it; `Unsupported` for a name that is no path.
pub(super) fn data_file(head: &Head) -> Result<Option<PathBuf>> {
    match (&head.extensions.data_file, head.header.has(feature::DATA_FILE)) {
        (_, false) => Ok(None),
        (Some(name), true) => path_of("data file", name).map(Some),
        (None, true) => Err(Error::new(ErrorKind::Corrupt, "the image needs a data file, but names none")),
    }
}

/// The path in `name`. As QEMU reads names, what stands before a colon is a protocol, unless a slash comes first.
fn path_of(what: &str, name: &[u8]) -> Result<PathBuf> {
    if name.contains(&0) {
        // Nor is it a name for any other program: an image that is being made may not have its name yet.
        let what = format!("the name of the {what}, \"{}\", has a zero byte", printable(name));
        return Err(Error::new(ErrorKind::Corrupt, what));
    }
    let before_slash = name.split(|byte| *byte == b'/').next().unwrap_or_default();
    if before_slash.contains(&b':') {
        let text = printable(name);
        return Err(Error::new(ErrorKind::Unsupported, format!("the {what} \"{text}\" is not named by a path"))
            .hint("only files are opened that an image names by their path"));
    }
    Ok(PathBuf::from(OsStr::from_bytes(name)))
}

/// What tells an image from others for a child that names it as its parent. qcow2 keeps no such thing, so it is made of
/// what lasts while the image is not written to: its geometry, its features, its backing file, and where its L2 tables
/// lie. It starts with the magic of qcow2 and has the version number 8 of a UUID, so it is no other format's UUID.
pub(super) fn identity(head: &Head, l1: impl Iterator<Item = u64>) -> Identity {
    let Header { version, size_bytes, cluster_bits, incompatible, compression_type, .. } = head.header;
    let lasting = incompatible & !(feature::DIRTY | feature::CORRUPT);
    let mut hash = Hash::new();
    for word in [version.into(), size_bytes, cluster_bits.into(), lasting, compression_type.into()] {
        hash.add(word);
    }
    for name in [&head.backing, &head.extensions.backing_format, &head.extensions.data_file] {
        hash.add_bytes(name.as_deref().unwrap_or_default());
    }
    for entry in l1 {
        hash.add(entry & super::codec::OFFSET_MASK);
    }
    hash.into_identity()
}

/// A multiplicative hash of 64-bit words: tells images apart that were not made to look alike.
struct Hash(u128);

impl Hash {
    fn new() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }

    /// Two different words lead from one state to two different states.
    fn add(&mut self, word: u64) {
        self.0 = (self.0 ^ u128::from(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        self.0 ^= self.0 >> 64;
    }

    fn add_bytes(&mut self, bytes: &[u8]) {
        self.add(bytes.len() as u64);
        for chunk in bytes.chunks(8) {
            self.add(chunk.iter().fold(0, |word, byte| word << 8 | u64::from(*byte)));
        }
    }

    fn into_identity(self) -> Identity {
        let mut uuid = self.0.to_be_bytes();
        uuid[..4].copy_from_slice(&IDENTITY_MARK);
        uuid[6] = uuid[6] & 0x0f | 0x80;
        uuid[8] = uuid[8] & 0x3f | 0x80;
        Identity(uuid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_are_names() {
        for name in ["json:{\"driver\":\"file\"}", "nbd://host/x", "file:/etc/shadow", "a:b", ":"] {
            assert_eq!(path_of("file", name.as_bytes()).unwrap_err().kind(), ErrorKind::Unsupported, "{name}");
        }
        for name in ["base.raw", "../base.raw", "/images/a:b", "./a:b", "b\u{fc}ro"] {
            assert_eq!(path_of("file", name.as_bytes()).unwrap(), PathBuf::from(name));
        }
    }

    #[test]
    fn formats_are_named_as_qemu_names_them() {
        assert_eq!(format_of(b"vpc").unwrap(), Format::Vhd);
        assert_eq!(format_of(b"raw").unwrap(), Format::Raw);
        assert_eq!(format_of(b"qcow2").unwrap(), Format::Qcow2);
        let error = format_of(b"vm\x1bdk").unwrap_err();
        assert!(error.to_string().contains("vm\\x1bdk"), "{error}");
    }
}
