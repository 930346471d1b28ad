//! Entries of the L1 table and of L2 tables: where the clusters of the guest lie.
//!
//! An entry that breaks a rule is an [`EntryFault`], for that entry only: the rest of the disk is served on. QEMU ignores
//! reserved bits when it reads; here they are a fault, because an entry that this code misunderstands must not become
//! wrong data.

use super::{COPIED, OFFSET_MASK, be64, is_cluster_aligned};

/// The bit of an L2 entry that says "compressed".
const COMPRESSED: u64 = 1 << 62;
/// The bit of an L2 entry that says "reads as zeroes".
const ZERO: u64 = 1;
/// The highest offset of a compressed cluster plus one: bits 56 and up are 0.
const MAX_COMPRESSED_OFFSET: u64 = 1 << 56;
const SECTOR_BYTES: u64 = 512;

/// Subclusters in a cluster with an extended L2 entry.
pub const SUBCLUSTERS: u32 = 32;

/// Why an entry cannot be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum EntryFault {
    /// A bit is set that the specification reserves.
    #[error("reserved bits are set")]
    Reserved,
    /// The offset is not that of a cluster.
    #[error("its offset is not a multiple of the cluster size")]
    Unaligned,
    /// The entry points at the header: offset 0 with the bit "refcount is 1", in an image without a data file.
    #[error("it points at the header")]
    Header,
    /// The zero flag where there is none: version 2, or extended L2 entries.
    #[error("its zero flag does not exist in this kind of image")]
    ZeroFlag,
    /// A compressed cluster in an image with a data file.
    #[error("compressed clusters are not allowed with a data file")]
    CompressedInDataFile,
    /// A compressed cluster's offset has bits over 55.
    #[error("its compressed data lie beyond 2^56")]
    CompressedOffset,
    /// A compressed cluster with a bitmap of subclusters.
    #[error("it is compressed and has a bitmap of subclusters")]
    CompressedBitmap,
    /// A subcluster that is both allocated and zero.
    #[error("a subcluster is both allocated and zero")]
    SubclusterTwice,
    /// A subcluster is allocated, but the cluster is not.
    #[error("a subcluster is allocated in a cluster without a place")]
    SubclusterNowhere,
}

/// Where the compressed data of a cluster lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Compressed {
    /// In the image, in bytes; any alignment.
    pub offset: u64,
    /// How long they are at most, up to the end of their last sector; at most two clusters.
    pub len_bytes: u64,
}

/// What an L2 entry says of a guest cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cluster {
    /// Nothing: the backing file has it, or it reads as zeroes.
    Unallocated,
    /// It reads as zeroes; a host cluster may be kept for it.
    Zero(Option<u64>),
    /// Its data are at that offset of the image or of the data file.
    Data(u64),
    /// Its data are compressed.
    Compressed(Compressed),
    /// Its subclusters differ (extended L2 entries only).
    Mixed {
        /// Where the cluster lies, if any subcluster is allocated or a place is kept.
        host: Option<u64>,
        /// Bit n: subcluster n is allocated.
        allocated: u32,
        /// Bit n: subcluster n reads as zeroes.
        zero: u32,
    },
}

/// What the meaning of an entry depends on.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// The cluster size as a power of two, 9 to 21.
    pub cluster_bits: u32,
    /// Version 2 has no zero flag.
    pub version: u32,
    /// L2 entries have 128 bits.
    pub extended: bool,
    /// Guest data are in another file.
    pub data_file: bool,
}

impl Rules {
    /// The bits of an L2 entry that hold the offset of compressed data (`x` in the specification).
    fn compressed_offset_bits(&self) -> u32 {
        62 - (self.cluster_bits - 8)
    }

    /// Where the L2 table of an L1 entry lies; `None` when there is none.
    ///
    /// # Errors
    /// `Reserved`, `Unaligned`, `Header`.
    pub fn l2_table(&self, entry: u64) -> Result<Option<u64>, EntryFault> {
        let offset = entry & OFFSET_MASK;
        match offset {
            _ if entry & !OFFSET_MASK & !COPIED != 0 => Err(EntryFault::Reserved),
            0 if entry & COPIED != 0 => Err(EntryFault::Header),
            0 => Ok(None),
            _ if !is_cluster_aligned(offset, self.cluster_bits) => Err(EntryFault::Unaligned),
            _ => Ok(Some(offset)),
        }
    }

    /// What an L2 entry says. `bitmap` is the second half of an extended entry, and 0 for a standard one.
    ///
    /// # Errors
    /// The rule that it breaks.
    pub fn cluster(&self, entry: u64, bitmap: u64) -> Result<Cluster, EntryFault> {
        if entry & COMPRESSED != 0 {
            return self.compressed(entry, bitmap).map(Cluster::Compressed);
        }
        let (offset, is_zero) = (entry & OFFSET_MASK, entry & ZERO != 0);
        if entry & !OFFSET_MASK & !COPIED & !ZERO != 0 {
            return Err(EntryFault::Reserved);
        }
        if is_zero && (self.version < 3 || self.extended) {
            return Err(EntryFault::ZeroFlag);
        }
        if !is_cluster_aligned(offset, self.cluster_bits) {
            return Err(EntryFault::Unaligned);
        }
        // With a data file, the guest's first cluster lies at offset 0; the bit tells it from "nowhere".
        let at_start = offset == 0 && entry & COPIED != 0;
        let host = match offset {
            0 if !at_start => None,
            0 if !self.data_file && !is_zero => return Err(EntryFault::Header),
            0 if !self.data_file => None,
            _ => Some(offset),
        };
        match (self.extended, host) {
            (true, host) => mixed(host, bitmap),
            (false, host) if is_zero => Ok(Cluster::Zero(host)),
            (false, Some(offset)) => Ok(Cluster::Data(offset)),
            (false, None) => Ok(Cluster::Unallocated),
        }
    }

    fn compressed(&self, entry: u64, bitmap: u64) -> Result<Compressed, EntryFault> {
        let bits = self.compressed_offset_bits();
        let offset = entry & ((1 << bits) - 1);
        let more_sectors = (entry & (COMPRESSED - 1)) >> bits;
        match offset {
            _ if self.data_file => Err(EntryFault::CompressedInDataFile),
            _ if bitmap != 0 => Err(EntryFault::CompressedBitmap),
            MAX_COMPRESSED_OFFSET.. => Err(EntryFault::CompressedOffset),
            _ => Ok(Compressed { offset, len_bytes: (more_sectors + 1) * SECTOR_BYTES - offset % SECTOR_BYTES }),
        }
    }

    /// The entry that says `cluster`, and the second half of an extended one. The bit "refcount is 1" is clear, but
    /// where the meaning depends on it.
    pub fn encode(&self, cluster: Cluster) -> (u64, u64) {
        let place = |host: Option<u64>| match host {
            Some(0) => COPIED,
            other => other.unwrap_or(0),
        };
        match cluster {
            Cluster::Unallocated => (0, 0),
            Cluster::Zero(host) if self.extended => (place(host), u64::from(u32::MAX) << 32),
            Cluster::Zero(host) => (place(host) | ZERO, 0),
            Cluster::Data(host) => (place(Some(host)), if self.extended { u64::from(u32::MAX) } else { 0 }),
            Cluster::Mixed { host, allocated, zero } => (place(host), u64::from(zero) << 32 | u64::from(allocated)),
            Cluster::Compressed(Compressed { offset, len_bytes }) => {
                let more_sectors = (offset % SECTOR_BYTES + len_bytes).div_ceil(SECTOR_BYTES) - 1;
                (COMPRESSED | more_sectors << self.compressed_offset_bits() | offset, 0)
            }
        }
    }
}

/// What a bitmap of subclusters says of a cluster at `host`.
fn mixed(host: Option<u64>, bitmap: u64) -> Result<Cluster, EntryFault> {
    let (allocated, zero) = (bitmap as u32, (bitmap >> 32) as u32);
    match (allocated, zero, host) {
        _ if allocated & zero != 0 => Err(EntryFault::SubclusterTwice),
        (1.., _, None) => Err(EntryFault::SubclusterNowhere),
        (u32::MAX, _, Some(host)) => Ok(Cluster::Data(host)),
        (_, u32::MAX, host) => Ok(Cluster::Zero(host)),
        (0, 0, None) => Ok(Cluster::Unallocated),
        (allocated, zero, host) => Ok(Cluster::Mixed { host, allocated, zero }),
    }
}

/// The entries in the bytes of a table.
pub fn decode(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|entry| be64(entry, 0))
}

/// The bytes of a table with these entries.
pub fn encode(entries: &[u64]) -> Vec<u8> {
    entries.iter().flat_map(|entry| entry.to_be_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STANDARD: Rules = Rules { cluster_bits: 16, version: 3, extended: false, data_file: false };
    const EXTENDED: Rules = Rules { extended: true, ..STANDARD };
    const WITH_DATA_FILE: Rules = Rules { data_file: true, ..STANDARD };
    const PLACE: u64 = 5 << 16;

    #[test]
    fn standard_entries() {
        assert_eq!(STANDARD.cluster(0, 0), Ok(Cluster::Unallocated));
        assert_eq!(STANDARD.cluster(PLACE | COPIED, 0), Ok(Cluster::Data(PLACE)));
        assert_eq!(STANDARD.cluster(1, 0), Ok(Cluster::Zero(None)));
        assert_eq!(STANDARD.cluster(PLACE | 1, 0), Ok(Cluster::Zero(Some(PLACE))));
        assert_eq!(STANDARD.cluster(COPIED, 0), Err(EntryFault::Header));
        assert_eq!(WITH_DATA_FILE.cluster(COPIED, 0), Ok(Cluster::Data(0)));
        assert_eq!(STANDARD.cluster(PLACE | 1 << 9, 0), Err(EntryFault::Unaligned));
        for bit in (1..9).chain(56..62) {
            assert_eq!(STANDARD.cluster(PLACE | 1 << bit, 0), Err(EntryFault::Reserved), "bit {bit}");
        }
    }

    #[test]
    fn l1_entries() {
        assert_eq!(STANDARD.l2_table(0), Ok(None));
        assert_eq!(STANDARD.l2_table(PLACE | COPIED), Ok(Some(PLACE)));
        assert_eq!(STANDARD.l2_table(COPIED), Err(EntryFault::Header));
        assert_eq!(STANDARD.l2_table(PLACE + 512), Err(EntryFault::Unaligned));
        for bit in (0..9).chain(56..63) {
            assert_eq!(STANDARD.l2_table(PLACE | 1 << bit), Err(EntryFault::Reserved), "bit {bit}");
        }
    }

    #[test]
    fn the_zero_flag_needs_version_3_and_standard_entries() {
        let version_2 = Rules { version: 2, ..STANDARD };
        assert_eq!(version_2.cluster(PLACE | 1, 0), Err(EntryFault::ZeroFlag));
        assert_eq!(EXTENDED.cluster(PLACE | 1, 0), Err(EntryFault::ZeroFlag));
    }

    #[test]
    fn compressed_entries_count_further_sectors() {
        let entry = COMPRESSED | 2 << 54 | 0x5_0001;
        let expected = Compressed { offset: 0x5_0001, len_bytes: 3 * 512 - 1 };
        assert_eq!(STANDARD.cluster(entry, 0), Ok(Cluster::Compressed(expected)));
        assert_eq!(WITH_DATA_FILE.cluster(entry, 0), Err(EntryFault::CompressedInDataFile));
        assert_eq!(EXTENDED.cluster(entry, 1), Err(EntryFault::CompressedBitmap));
        let small = Rules { cluster_bits: 9, ..STANDARD };
        assert_eq!(small.cluster(COMPRESSED | 1 << 56, 0), Err(EntryFault::CompressedOffset));
        let largest = Rules { cluster_bits: 21, ..STANDARD };
        let Ok(Cluster::Compressed(found)) = largest.cluster(COMPRESSED | (COMPRESSED - 1), 0) else { panic!() };
        assert_eq!((found.offset, found.len_bytes), ((1 << 49) - 1, 8191 * 512 + 1));
    }

    #[test]
    fn subclusters() {
        let mixed = Cluster::Mixed { host: Some(PLACE), allocated: 1, zero: 2 };
        assert_eq!(EXTENDED.cluster(PLACE, 0x2_0000_0001), Ok(mixed));
        assert_eq!(EXTENDED.cluster(PLACE, 0xffff_ffff), Ok(Cluster::Data(PLACE)));
        assert_eq!(EXTENDED.cluster(0, 0xffff_ffff_0000_0000), Ok(Cluster::Zero(None)));
        assert_eq!(EXTENDED.cluster(0, 0), Ok(Cluster::Unallocated));
        assert_eq!(EXTENDED.cluster(PLACE, 0), Ok(Cluster::Mixed { host: Some(PLACE), allocated: 0, zero: 0 }));
        assert_eq!(EXTENDED.cluster(PLACE, 0x1_0000_0001), Err(EntryFault::SubclusterTwice));
        assert_eq!(EXTENDED.cluster(0, 1), Err(EntryFault::SubclusterNowhere));
    }

    proptest! {
        /// What an entry says, written as an entry again, says the same; and never more than two clusters are to be read.
        #[test]
        fn what_an_entry_says_can_be_written(
            entry in any::<u64>(), bitmap in any::<u64>(), cluster_bits in 9u32..22, version in 2u32..4,
            extended in any::<bool>(), data_file in any::<bool>()
        ) {
            let rules = Rules { cluster_bits, version, extended, data_file };
            for entry in [entry, entry & OFFSET_MASK, entry | COMPRESSED, entry & !(0x1fe | 0x3f << 56)] {
                let aligned = if entry & COMPRESSED == 0 { entry & !((1 << cluster_bits) - 2) } else { entry };
                let bitmap = if extended { bitmap & !(bitmap << 32) } else { 0 };
                let Ok(cluster) = rules.cluster(aligned, bitmap) else { continue };
                if let Cluster::Compressed(found) = cluster {
                    prop_assert!(found.len_bytes >= 1 && found.len_bytes <= 2 << cluster_bits);
                }
                let (again, bitmap) = rules.encode(cluster);
                prop_assert_eq!(rules.cluster(again, bitmap), Ok(cluster));
            }
        }
    }
}
