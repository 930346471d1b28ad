//! How much metadata an image needs and where the parts of a new one go: the one place that counts refcount blocks, the
//! refcount table, L1 and L2 tables.
//!
//! | what | where |
//! |---|---|
//! | header, extensions, name of the backing file | the first cluster |
//! | refcount table | behind it |
//! | first refcount block | behind that |
//! | L1 table | behind that |
//! | other refcount blocks | behind that |
//! | with places for all data: each L2 table, and its clusters behind it | behind that |
//!
//! That is how QEMU lays out an image whose refcount table has one cluster (and, with places for all data, one block).
//! Clusters in use are those from the first one up to the end, with a count of 1 each.

use super::codec::header::{Header, feature};
use super::codec::{MAX_L1_BYTES, MAX_REFCOUNT_TABLE_BYTES, refcount};

/// The refcounts of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refcounts {
    /// Blocks of one cluster each.
    pub blocks: u64,
    /// The length of the table that names them, in clusters.
    pub table_clusters: u64,
}

impl Refcounts {
    /// What it takes to count `clusters` clusters, and the refcounts' own.
    pub(super) fn for_clusters(cluster_bits: u32, order: u32, clusters: u64) -> Self {
        let (per_block, per_table_cluster) = (refcount::counts_per_block(cluster_bits, order), 1 << (cluster_bits - 3));
        let mut found = Self { blocks: 0, table_clusters: 0 };
        loop {
            let blocks = (clusters + found.clusters()).div_ceil(per_block);
            let next = Self { blocks, table_clusters: blocks.div_ceil(per_table_cluster) };
            if next == found {
                return found;
            }
            found = next;
        }
    }

    /// All its clusters.
    pub(super) fn clusters(self) -> u64 {
        self.blocks + self.table_clusters
    }

    /// True when the table is within the limit of programs that read it.
    pub(super) fn fits(self, cluster_bits: u32) -> bool {
        self.table_clusters << cluster_bits <= MAX_REFCOUNT_TABLE_BYTES
    }
}

/// The largest disk that the L1 table of such an image can hold, in bytes.
pub(super) fn max_size_bytes(header: &Header) -> u64 {
    MAX_L1_BYTES / 8 * (1 << header.l2_coverage_bits())
}

/// The clusters of the disk.
pub(super) fn data_clusters(header: &Header) -> u64 {
    header.size_bytes.div_ceil(header.cluster_bytes())
}

/// Those that lie in the image, and not in a data file.
pub(super) fn clusters_inside(header: &Header) -> u64 {
    if header.has(feature::DATA_FILE) { 0 } else { data_clusters(header) }
}

/// The length of an L1 table of `entries` entries, in clusters.
pub(super) fn l1_clusters(header: &Header, entries: u64) -> u64 {
    (entries * 8).div_ceil(header.cluster_bytes())
}

/// Where the parts of a new image are, in clusters of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub refcounts: Refcounts,
    pub table: u64,
    pub l1: u64,
    pub l1_clusters: u64,
    /// The first L2 table, where all data have places; else the end.
    pub l2: u64,
    /// Clusters in use.
    pub end: u64,
}

impl Layout {
    /// The layout of an image of the size and kind of `header`.
    pub(super) fn new(header: &Header, places_for_all: bool) -> Self {
        let entries = header.needed_l1_entries();
        let l1_clusters = l1_clusters(header, entries);
        let placed = if places_for_all { entries + clusters_inside(header) } else { 0 };
        let fixed = 1 + l1_clusters + placed;
        let refcounts = Refcounts::for_clusters(header.cluster_bits, header.refcount_order, fixed);
        let l1 = 1 + refcounts.table_clusters + 1;
        let end = fixed + refcounts.clusters();
        Self { refcounts, table: 1, l1, l1_clusters, l2: end - placed, end }
    }

    /// The refcount block number `block`.
    pub(super) fn block(&self, block: u64) -> u64 {
        match block {
            0 => self.l1 - 1,
            _ => self.l1 + self.l1_clusters + block - 1,
        }
    }
}

/// The length that a file may need for a disk of the size and kind of `header`, less its data: all tables as they are once
/// all of the disk was written. That is how QEMU measures.
pub(super) fn full_metadata_bytes(header: &Header) -> u64 {
    let cluster = header.cluster_bytes();
    let l2 = header.needed_l1_entries();
    let fixed = 1 + l2 + l1_clusters(header, l2);
    let all = fixed + clusters_inside(header);
    let refcounts = Refcounts::for_clusters(header.cluster_bits, header.refcount_order, all);
    (fixed + refcounts.clusters()) * cluster
}

/// Bytes of the last cluster that a file has to hold: up to the end of the disk, in whole subclusters.
pub(super) fn last_cluster_bytes(header: &Header) -> u64 {
    let unit = if header.has(feature::EXTENDED_L2) { header.cluster_bytes() / 32 } else { header.cluster_bytes() };
    match header.size_bytes % header.cluster_bytes() {
        0 => header.cluster_bytes(),
        rest => rest.next_multiple_of(unit),
    }
}

/// The bytes of refcount block number `block` when the first `used` clusters of the file have a count of 1, and no others
/// have one.
pub(super) fn block_of_ones(header: &Header, block: u64, used: u64) -> Vec<u8> {
    let per_block = refcount::counts_per_block(header.cluster_bits, header.refcount_order);
    let mut bytes = vec![0; header.cluster_bytes() as usize];
    let ones = used.saturating_sub(block * per_block).min(per_block);
    (0..ones).for_each(|index| {
        refcount::set(&mut bytes, header.refcount_order, index, 1);
    });
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn refcounts_count_themselves() {
        let of = |bits, order, clusters| Refcounts::for_clusters(bits, order, clusters);
        assert_eq!(of(16, 4, 3), Refcounts { blocks: 1, table_clusters: 1 });
        assert_eq!(of(16, 4, 32766), Refcounts { blocks: 1, table_clusters: 1 });
        assert_eq!(of(16, 4, 32767), Refcounts { blocks: 2, table_clusters: 1 });
        assert_eq!(of(9, 6, 64 * 64), Refcounts { blocks: 66, table_clusters: 2 });
    }

    proptest! {
        /// The blocks count every cluster, the table names every block, and there is none too many.
        #[test]
        fn refcounts_suffice(bits in 9u32..=21, order in 0u32..=6, clusters in 1u64..1 << 40) {
            let found = Refcounts::for_clusters(bits, order, clusters);
            let per_block = refcount::counts_per_block(bits, order);
            prop_assert!(found.blocks * per_block >= clusters + found.clusters());
            prop_assert!((found.blocks - 1) * per_block < clusters + found.clusters());
            prop_assert_eq!(found.table_clusters, found.blocks.div_ceil(1 << (bits - 3)));
        }
    }
}
