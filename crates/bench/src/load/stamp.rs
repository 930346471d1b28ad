//! What a verified load writes: every 512-byte sector says who wrote it, for where, and which version it is.
//!
//! Layout, little-endian: run 8 bytes, offset 8, version 8, filler 484 (different in every version, so that a
//! sector torn in its middle cannot pass), CRC-32C of all before it 4.

use std::fmt;

/// The unit of verification in bytes.
pub const SECTOR: usize = 512;
const CRC_AT: usize = SECTOR - 4;

/// Which versions of a sector are right to read. When they are several, a write was in flight at some time of the read, and
/// then a mixture of them is right too: nobody promises that a read beside a write sees whole sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The last acknowledged version when the read was issued; 0 = never written by this run.
    pub acked: u32,
    /// The last issued version when the reply came.
    pub issued: u32,
}

/// What was found instead of an expected sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// A whole sector, of a version that was overwritten before or never written.
    Version(u32),
    /// A whole sector that belongs at another offset.
    Offset {
        /// Where it was written for, in bytes.
        offset_bytes: u64,
        /// Its version.
        version: u32,
    },
    /// A sector of this run whose checksum is wrong.
    Torn {
        /// The offset it claims, in bytes.
        offset_bytes: u64,
        /// The version it claims.
        version: u32,
    },
    /// Nothing but zeroes.
    Zeroes,
    /// Bytes that this run did not write.
    Foreign {
        /// The first eight of them.
        head: [u8; 8],
    },
}

/// One wrong sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Where it was read, in bytes from the start of the disk.
    pub offset_bytes: u64,
    /// What would have been right.
    pub expected: Expected,
    /// What was there.
    pub found: Found,
}

impl Mismatch {
    /// A word for the kind of fault: `lost`, `future`, `misplaced`, `torn`, `zeroes` or `foreign`.
    pub fn kind(&self) -> &'static str {
        match self.found {
            Found::Version(version) if version < self.expected.acked => "lost",
            Found::Version(_) => "future",
            Found::Offset { .. } => "misplaced",
            Found::Torn { .. } => "torn",
            Found::Zeroes => "zeroes",
            Found::Foreign { .. } => "foreign",
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Expected { acked, issued } = self.expected;
        write!(f, "offset {:#x}: expected ", self.offset_bytes)?;
        match acked == issued {
            true => write!(f, "version {acked}")?,
            false => write!(f, "version {acked} to {issued}")?,
        }
        match self.found {
            Found::Version(v) if v < acked => write!(f, ", got version {v} (a lost or stale write)"),
            Found::Version(v) => write!(f, ", got version {v}, which was never written"),
            Found::Offset { offset_bytes, version } => {
                write!(f, ", got version {version} of offset {offset_bytes:#x} (misplaced)")
            }
            Found::Torn { offset_bytes, version } => {
                write!(f, ", got a torn sector that says version {version} of offset {offset_bytes:#x}")
            }
            Found::Zeroes => write!(f, ", got zeroes"),
            Found::Foreign { head } => write!(f, ", got foreign bytes that begin {head:02x?}"),
        }
    }
}

/// Fills `block` (whole sectors) with the stamps of `version` at `offset_bytes`.
pub fn write(block: &mut [u8], run: u64, offset_bytes: u64, version: u32) {
    let sectors = block.as_chunks_mut::<SECTOR>().0;
    for (sector, offset) in sectors.iter_mut().zip((offset_bytes..).step_by(SECTOR)) {
        write_sector(sector, run, offset, version);
    }
}

fn write_sector(sector: &mut [u8; SECTOR], run: u64, offset_bytes: u64, version: u32) {
    let base = (run ^ offset_bytes.rotate_left(17) ^ u64::from(version) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut word = base;
    for out in sector.as_chunks_mut::<8>().0 {
        word = word.wrapping_add(0xd1b5_4a32_d192_ed03);
        *out = word.to_le_bytes();
    }
    sector[0..8].copy_from_slice(&run.to_le_bytes());
    sector[8..16].copy_from_slice(&offset_bytes.to_le_bytes());
    sector[16..24].copy_from_slice(&u64::from(version).to_le_bytes());
    let crc = crc32c::crc32c(&sector[..CRC_AT]);
    sector[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
}

/// Checks every sector of `block`, read at `offset_bytes`; hands each wrong one to `report`.
pub fn check(block: &[u8], run: u64, offset_bytes: u64, expected: Expected, mut report: impl FnMut(Mismatch)) {
    let sectors = block.as_chunks::<SECTOR>().0;
    for (sector, offset) in sectors.iter().zip((offset_bytes..).step_by(SECTOR)) {
        if let Some(found) = check_sector(sector, run, offset, expected) {
            report(Mismatch { offset_bytes: offset, expected, found });
        }
    }
}

fn check_sector(sector: &[u8; SECTOR], run: u64, offset_bytes: u64, expected: Expected) -> Option<Found> {
    let word = |at: usize| {
        let (head, _) = sector[at..].as_chunks::<8>();
        u64::from_le_bytes(head[0])
    };
    if word(0) != run {
        return (expected.acked > 0).then(|| foreign(sector));
    }
    let (at, version) = (word(8), word(16) as u32);
    let right = at == offset_bytes && (expected.acked..=expected.issued).contains(&version);
    let crc = u32::from_le_bytes([sector[508], sector[509], sector[510], sector[511]]);
    if crc32c::crc32c(&sector[..CRC_AT]) != crc {
        let beside_a_write = right && expected.acked < expected.issued;
        return (!beside_a_write).then_some(Found::Torn { offset_bytes: at, version });
    }
    if at != offset_bytes {
        return Some(Found::Offset { offset_bytes: at, version });
    }
    (!right).then_some(Found::Version(version))
}

fn foreign(sector: &[u8; SECTOR]) -> Found {
    match sector.iter().all(|byte| *byte == 0) {
        true => Found::Zeroes,
        false => Found::Foreign { head: sector.as_chunks::<8>().0[0] },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: u64 = 0x1234_5678_9abc_def0;

    fn block(offset_bytes: u64, version: u32) -> Vec<u8> {
        let mut block = vec![0; 4096];
        write(&mut block, RUN, offset_bytes, version);
        block
    }

    fn faults(block: &[u8], offset_bytes: u64, acked: u32, issued: u32) -> Vec<&'static str> {
        let mut kinds = Vec::new();
        let expected = Expected { acked, issued };
        check(block, RUN, offset_bytes, expected, |m| kinds.push(m.kind()));
        kinds
    }

    #[test]
    fn what_was_written_passes() {
        assert!(faults(&block(8192, 7), 8192, 7, 7).is_empty());
        assert!(faults(&block(8192, 7), 8192, 6, 8).is_empty());
    }

    #[test]
    fn each_fault_is_told_apart() {
        assert_eq!(faults(&block(0, 7), 0, 8, 8), ["lost"; 8]);
        assert_eq!(faults(&block(0, 9), 0, 8, 8), ["future"; 8]);
        assert_eq!(faults(&block(512, 8), 0, 8, 8), ["misplaced"; 8]);
        assert_eq!(faults(&[0; 4096], 0, 8, 8), ["zeroes"; 8]);
        assert_eq!(faults(&[7; 4096], 0, 8, 8), ["foreign"; 8]);
    }

    #[test]
    fn one_torn_sector_is_found() {
        let (mut old, new) = (block(0, 1), block(0, 2));
        old[..1024 + 100].copy_from_slice(&new[..1024 + 100]);
        assert_eq!(faults(&old, 0, 1, 1), ["future", "future", "torn"]);
        assert_eq!(faults(&old, 0, 2, 2), ["torn", "lost", "lost", "lost", "lost", "lost"]);
    }

    #[test]
    fn beside_a_write_a_mixture_is_right_but_not_one_of_other_versions() {
        let (mut old, new) = (block(0, 1), block(0, 2));
        old[100..200].copy_from_slice(&new[100..200]);
        assert!(faults(&old, 0, 1, 2).is_empty());
        assert_eq!(faults(&old[..SECTOR], 0, 2, 3), ["torn"]);
        assert_eq!(faults(&old[..SECTOR], 512, 1, 2), ["torn"]);
    }

    #[test]
    fn before_the_first_write_only_misplaced_sectors_are_wrong() {
        assert!(faults(&[7; 4096], 0, 0, 0).is_empty());
        assert_eq!(faults(&block(4096, 1), 0, 0, 0), ["misplaced"; 8]);
    }

    #[test]
    fn every_flipped_byte_is_found() {
        for at in 8..SECTOR {
            let mut sector = block(0, 3);
            sector[at] ^= 1;
            assert_eq!(faults(&sector[..SECTOR], 0, 3, 3).len(), 1, "byte {at}");
        }
    }
}
