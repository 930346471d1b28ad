//! The bytes of VHD, apart from any I/O: each structure is a plain value with `parse` and `to_bytes`.
//!
//! Contract: parsing never panics and allocates no more than its input; every length and offset that comes out of
//! here fits the arithmetic that later code does with it. What a lone structure cannot know (the length of the
//! file, the other structures) is checked by who opens the image. Source: Microsoft, "Virtual Hard Disk Image
//! Format Specification" 1.0, 2006 (called "the specification" below); the batmap is blktap's addition.
//!
//! All integers are big-endian; all times are seconds since 2000-01-01 UTC.

pub mod bat;
pub mod batmap;
mod error;
pub mod footer;
pub mod fuzz;
pub mod geometry;
pub mod header;
pub mod locator;
pub mod time;

pub use error::CodecError;

use crate::formats::bytes::{array, be16, be32, be64, put};

/// The largest virtual disk in bytes: 2040 GiB, the limit of the specification and of every known writer. It leaves
/// room for bitmaps below the 2 TiB that 32-bit sector numbers reach.
pub const MAX_SIZE_BYTES: u64 = 0xff00_0000 * SECTOR_BYTES;

/// The unit of VHD, in bytes.
pub(crate) const SECTOR_BYTES: u64 = 512;

/// The checksum of a footer or header whose checksum field is the four bytes at `field_at`: the complement of the
/// sum of all other bytes.
fn checksum(bytes: &[u8], field_at: usize) -> u32 {
    let sum = |part: &[u8]| part.iter().fold(0u32, |sum, byte| sum.wrapping_add(u32::from(*byte)));
    !sum(&bytes[..field_at]).wrapping_add(sum(&bytes[field_at + 4..]))
}

/// Checks the checksum field at `field_at`.
fn verify_checksum(what: &'static str, bytes: &[u8], field_at: usize) -> Result<(), CodecError> {
    let (stored, computed) = (be32(bytes, field_at), checksum(bytes, field_at));
    if stored == computed { Ok(()) } else { Err(CodecError::Checksum { what, stored, computed }) }
}

/// Checks that the major part of a version is 1; a minor change is compatible by the specification.
fn verify_version(what: &'static str, version: u32) -> Result<(), CodecError> {
    if version >> 16 == 1 { Ok(()) } else { Err(CodecError::Version { what, version }) }
}
