//! The bytes of qcow2, apart from any I/O: each structure is a plain value that is parsed from bytes and written back.
//!
//! Contract: parsing never panics, and allocates no more than its input is long; every shift, length and offset that
//! comes out of here fits the arithmetic that later code does with it. What a lone structure cannot know (the length of
//! the file, the other structures) is checked by the code that opens the image. Source: QEMU, "Qcow2 Image File Format"
//! (docs/interop/qcow2), called "the specification" below.
//!
//! All integers are big-endian. Text in an image (file names, names of snapshots) is bytes that the image's writer
//! chose: it is kept as bytes, and made fit for a terminal by [`printable`] before a person sees it.

pub mod bitmap;
pub mod compress;
mod error;
pub mod extension;
pub mod fuzz;
pub mod header;
pub mod refcount;
pub mod snapshot;
pub mod stream;
pub mod table;

pub use error::CodecError;

use crate::formats::bytes::{array, be16, be32, be64, put};

/// The smallest cluster that the specification allows, as a power of two: 512 bytes.
pub const MIN_CLUSTER_BITS: u32 = 9;
/// The largest cluster that is opened, as a power of two: 2 MiB. QEMU opens none larger.
pub const MAX_CLUSTER_BITS: u32 = 21;
/// The smallest cluster with extended L2 entries, as a power of two: 16 KiB.
pub const MIN_EXTENDED_CLUSTER_BITS: u32 = 14;
/// The largest L1 table that is opened, in bytes, as in QEMU.
pub const MAX_L1_BYTES: u64 = 32 << 20;
/// The largest refcount table that is read, in bytes, as in QEMU.
pub const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
/// The longest name of a backing file or a data file, in bytes.
pub const MAX_NAME_BYTES: usize = 1023;

/// The bits of an L1 or L2 entry that hold an offset: 9 to 55.
pub const OFFSET_MASK: u64 = (1 << 56) - (1 << 9);
/// The bit of an L1 or L2 entry that says that the refcount of what it points at is exactly 1.
pub const COPIED: u64 = 1 << 63;

/// Checks that `bytes` holds a structure of `needed_bytes`.
fn need(what: &'static str, bytes: &[u8], needed_bytes: usize) -> Result<(), CodecError> {
    match bytes.len() >= needed_bytes {
        true => Ok(()),
        false => Err(CodecError::TooShort { what, needed_bytes, got_bytes: bytes.len() }),
    }
}

/// True when `offset` is a multiple of the cluster.
fn is_cluster_aligned(offset: u64, cluster_bits: u32) -> bool {
    offset & ((1 << cluster_bits) - 1) == 0
}

/// Checks that a table's offset is that of a cluster other than the first, below 2^56.
fn check_offset(what: &'static str, offset: u64, cluster_bits: u32) -> Result<(), CodecError> {
    let is_possible = offset != 0 && offset & !OFFSET_MASK & !COPIED == 0 && offset & COPIED == 0;
    match is_possible && is_cluster_aligned(offset, cluster_bits) {
        true => Ok(()),
        false => Err(CodecError::TableOffset { what, offset }),
    }
}

/// Text from an image, with control characters and broken UTF-8 escaped, so that it can go to a terminal or a log.
pub fn printable(text: &[u8]) -> String {
    match std::str::from_utf8(text) {
        Ok(text) if !text.chars().any(char::is_control) => text.to_owned(),
        _ => text.escape_ascii().to_string(),
    }
}
