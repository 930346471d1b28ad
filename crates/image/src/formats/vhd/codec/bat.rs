//! The block allocation table: for each block the sector where its bitmap starts; the data follows the bitmap.

use std::ops::Range;

use super::SECTOR_BYTES;

/// The entry of a block that has no place in the file.
pub const UNALLOCATED: u32 = 0xffff_ffff;

/// Bytes of one entry.
pub const ENTRY_BYTES: u64 = 4;

/// The most blocks an image may have here: bounds the memory of its map. 2040 GiB in blocks of 128 KiB or more.
pub const MAX_BLOCKS: u64 = 1 << 24;

/// How many blocks of `block_size_bytes` a disk of `size_bytes` has.
pub fn entries_for(size_bytes: u64, block_size_bytes: u32) -> u64 {
    size_bytes.div_ceil(u64::from(block_size_bytes.max(1)))
}

/// The length in bytes of a table of `entries`, padded to a sector.
pub fn bytes_len(entries: u32) -> u64 {
    (u64::from(entries) * ENTRY_BYTES).next_multiple_of(SECTOR_BYTES)
}

/// The length in bytes of a block's bitmap, one bit for each sector, padded to a sector.
pub fn bitmap_bytes(block_size_bytes: u32) -> u32 {
    // At most 2^32 / 4096 bytes, so the padding cannot overflow.
    block_size_bytes.div_ceil(8 * SECTOR_BYTES as u32).next_multiple_of(SECTOR_BYTES as u32)
}

/// The table's entries in `bytes`; a last part of less than four bytes is left out.
pub fn decode(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.chunks_exact(4).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]))
}

/// The bytes of `entries`, padded with unallocated entries to a sector.
pub fn encode(entries: &[u32]) -> Vec<u8> {
    let mut bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_be_bytes()).collect();
    bytes.resize(bytes.len().next_multiple_of(SECTOR_BYTES as usize), 0xff);
    bytes
}

/// What is wrong with an allocated entry by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryFault {
    /// The block lies over the footer's copy, the header, the BAT or another piece of metadata.
    #[error("the block lies over the file's own metadata")]
    OverMetadata,
    /// The block, or a part of it, lies behind the end of the file.
    #[error("the block ends behind the end of the file")]
    PastEnd,
}

/// What an entry is judged by.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// The size of a block's data.
    pub block_size_bytes: u32,
    /// Where blocks may end: the length of the file, less its last footer if that one is good.
    pub end_bytes: u64,
    /// Byte ranges that hold metadata.
    pub metadata: &'a [Range<u64>],
}

impl Rules<'_> {
    /// The bytes of bitmap and data of the block that `entry` points at; `None` when it is not allocated.
    pub fn block(&self, entry: u32) -> Option<Range<u64>> {
        let start = u64::from(entry) * SECTOR_BYTES;
        let len = u64::from(bitmap_bytes(self.block_size_bytes)) + u64::from(self.block_size_bytes);
        (entry != UNALLOCATED).then_some(start..start + len)
    }

    /// The fault of one entry, if it has any; overlaps of blocks are found by [`overlaps`].
    pub fn fault(&self, entry: u32) -> Option<EntryFault> {
        let block = self.block(entry)?;
        let over = |m: &Range<u64>| m.start < block.end && block.start < m.end;
        // The copy of the footer is always there, whatever the caller knows of.
        if block.start < SECTOR_BYTES || self.metadata.iter().any(over) {
            Some(EntryFault::OverMetadata)
        } else {
            (block.end > self.end_bytes).then_some(EntryFault::PastEnd)
        }
    }
}

/// Pairs of block numbers whose places in the file overlap, each later block with the one that starts at or before
/// it. Empty for a sound table. Takes the time of a sort and eight bytes an allocated block.
pub fn overlaps(entries: &[u32], block_size_bytes: u32) -> Vec<(u32, u32)> {
    let rules = Rules { block_size_bytes, end_bytes: u64::MAX, metadata: &[] };
    let mut placed: Vec<(u32, u32)> = entries
        .iter()
        .zip(0u32..)
        .filter(|(entry, _)| **entry != UNALLOCATED)
        .map(|(entry, block)| (*entry, block))
        .collect();
    placed.sort_unstable();
    placed
        .windows(2)
        .filter(|pair| rules.block(pair[0].0).is_some_and(|b| u64::from(pair[1].0) * SECTOR_BYTES < b.end))
        .map(|pair| (pair[0].1, pair[1].1))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCK: u32 = 2 << 20;
    /// Sectors of bitmap and data of one block.
    const STRIDE: u32 = 1 + 4096;

    #[test]
    fn lengths() {
        assert_eq!((bytes_len(0), bytes_len(1), bytes_len(128), bytes_len(129)), (0, 512, 512, 1024));
        assert_eq!(bytes_len(u32::MAX), 1 << 34);
        assert_eq!((bitmap_bytes(4096), bitmap_bytes(BLOCK), bitmap_bytes(4 << 20)), (512, 512, 1024));
        assert_eq!(bitmap_bytes(256 << 20), 64 << 10);
        assert_eq!(bitmap_bytes(u32::MAX), 1 << 20);
        assert_eq!((entries_for(0, BLOCK), entries_for(1, BLOCK), entries_for(4 << 20, BLOCK)), (0, 1, 2));
    }

    #[test]
    fn entries_are_big_endian_and_padding_is_unallocated() {
        let bytes = encode(&[3, UNALLOCATED]);
        assert_eq!((&bytes[..8], bytes.len()), (&[0, 0, 0, 3, 255, 255, 255, 255][..], 512));
        assert_eq!(decode(&bytes).filter(|e| *e != UNALLOCATED).collect::<Vec<_>>(), [3]);
        assert_eq!(decode(&[0, 0, 0, 1, 9]).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn faults_of_single_entries() {
        let metadata = [0..512, 512..1536, 1536..2048];
        let end_bytes = 4096 * 512 + u64::from(STRIDE) * 512;
        let rules = Rules { block_size_bytes: BLOCK, end_bytes, metadata: &metadata };
        assert_eq!(rules.fault(UNALLOCATED), None);
        assert_eq!(rules.fault(0), Some(EntryFault::OverMetadata));
        assert_eq!(rules.fault(3), Some(EntryFault::OverMetadata));
        assert_eq!(rules.fault(4), None);
        assert_eq!(rules.fault(4096), None);
        assert_eq!(rules.fault(4097), Some(EntryFault::PastEnd));
        assert_eq!(rules.fault(UNALLOCATED - 1), Some(EntryFault::PastEnd));
        assert_eq!(Rules { metadata: &[], ..rules }.fault(0), Some(EntryFault::OverMetadata));
    }

    #[test]
    fn overlapping_blocks_are_found() {
        assert_eq!(overlaps(&[4, 4 + STRIDE, UNALLOCATED], BLOCK), []);
        assert_eq!(overlaps(&[4 + STRIDE, 4, 4], BLOCK), [(1, 2)]);
        assert_eq!(overlaps(&[4 + STRIDE - 1, UNALLOCATED, 4], BLOCK), [(2, 0)]);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(entries in proptest::collection::vec(any::<u32>(), 0..600)) {
            let bytes = encode(&entries);
            prop_assert_eq!(bytes.len() as u64, bytes_len(entries.len() as u32));
            prop_assert_eq!(decode(&bytes).take(entries.len()).collect::<Vec<_>>(), entries);
        }

        /// The sort finds an overlap exactly when comparing every pair does.
        #[test]
        fn overlaps_agree_with_all_pairs(entries in proptest::collection::vec(0u32..5000, 0..12)) {
            let stride = 1 + (64 << 10) / 512;
            let naive = entries.iter().enumerate().any(|(i, a)| {
                entries[..i].iter().any(|b| a.abs_diff(*b) < stride)
            });
            prop_assert_eq!(!overlaps(&entries, 64 << 10).is_empty(), naive);
        }
    }
}
