//! The feature bits and the configuration space by which a virtio block device describes itself.
//!
//! Virtual I/O Device Version 1.2, sections 5.2.3 (feature bits) and 5.2.4 (struct virtio_blk_config).

use spile_core::{DiskInfo, SECTOR_BYTES};

/// Feature bits.
pub mod feature {
    /// The configuration tells the size of the largest segment (SIZE_MAX).
    pub const SIZE_MAX: u64 = 1 << 1;
    /// The configuration tells the largest number of segments (SEG_MAX).
    pub const SEG_MAX: u64 = 1 << 2;
    /// The disk is read-only.
    pub const RO: u64 = 1 << 5;
    /// The configuration tells the size of a block (BLK_SIZE).
    pub const BLK_SIZE: u64 = 1 << 6;
    /// The disk takes flushes (FLUSH).
    pub const FLUSH: u64 = 1 << 9;
    /// The configuration tells the size of a physical block and the optimal sizes (TOPOLOGY).
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The driver may switch the write cache (CONFIG_WCE).
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// The disk has several queues (MQ).
    pub const MQ: u64 = 1 << 12;
    /// The disk takes discards (DISCARD).
    pub const DISCARD: u64 = 1 << 13;
    /// The disk takes writes of zeroes (WRITE_ZEROES).
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Pages that the device writes are logged (VHOST_F_LOG_ALL).
    pub const LOG_ALL: u64 = 1 << 26;
    /// Rings may have indirect descriptors (INDIRECT_DESC).
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Rings have event indices (EVENT_IDX).
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The front end knows protocol features (VHOST_USER_F_PROTOCOL_FEATURES).
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// The device follows virtio 1.0 or later (VERSION_1).
    pub const VERSION_1: u64 = 1 << 32;
}

/// The most ranges in one discard.
pub const MAX_DISCARD_SEGMENTS: u32 = 16;
/// The most sectors in one range of a discard: 2 GiB.
pub const MAX_DISCARD_SECTORS: u32 = 4 << 20;
/// The most ranges in one write of zeroes, and the most sectors in one range. They are few where zeroes have to be
/// written as data: such a request must not take minutes, because stopping the disk waits for it.
pub fn max_zeroes(info: &DiskInfo) -> (u32, u32) {
    if info.fast_zero { (MAX_DISCARD_SEGMENTS, MAX_DISCARD_SECTORS) } else { (1, 64 << 11) }
}

/// The most data segments in one request: as many as fit a queue of 128 (QEMU's default) beside header and status.
const SEG_MAX: u32 = 126;
/// The most bytes in one segment: then no request is larger than a front may pass on
/// ([`spile_core::MAX_REQUEST_BYTES`]).
const SIZE_MAX: u32 = 256 << 10;
const PHYSICAL_BYTES: u64 = 4096;

/// The offset of the one byte that the driver may write: the switch of the write cache.
pub const WRITEBACK_AT: u32 = 32;
/// The bytes of the configuration space. What follows them reads as zeroes.
pub const CONFIG_BYTES: usize = 60;

/// The features that a disk offers.
pub fn features(read_only: bool) -> u64 {
    use feature::*;
    let reads = SIZE_MAX | SEG_MAX | BLK_SIZE | TOPOLOGY | MQ | INDIRECT_DESC | EVENT_IDX | VERSION_1 | FLUSH;
    let vhost = LOG_ALL | PROTOCOL_FEATURES;
    let writes = if read_only { RO } else { CONFIG_WCE | DISCARD | WRITE_ZEROES };
    reads | vhost | writes
}

/// The configuration space of a disk.
pub fn space(info: &DiskInfo, queues: u16, is_writeback: bool) -> [u8; CONFIG_BYTES] {
    let mut space = [0; CONFIG_BYTES];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    let sectors = |bytes: u64| (bytes / SECTOR_BYTES) as u32;
    put(0, &(info.size_bytes / SECTOR_BYTES).to_le_bytes());
    put(8, &SIZE_MAX.to_le_bytes());
    put(12, &SEG_MAX.to_le_bytes());
    put(20, &(SECTOR_BYTES as u32).to_le_bytes());
    // Topology: log2 of the blocks in a physical block; no offset; the smallest and the best request, in blocks.
    put(24, &[(PHYSICAL_BYTES / SECTOR_BYTES).ilog2() as u8, 0]);
    put(26, &((PHYSICAL_BYTES / SECTOR_BYTES) as u16).to_le_bytes());
    put(28, &sectors(u64::from(info.preferred_bytes)).to_le_bytes());
    put(WRITEBACK_AT as usize, &[u8::from(is_writeback)]);
    put(34, &queues.to_le_bytes());
    put(36, &MAX_DISCARD_SECTORS.to_le_bytes());
    put(40, &MAX_DISCARD_SEGMENTS.to_le_bytes());
    put(44, &sectors(u64::from(info.discard_align_bytes)).max(1).to_le_bytes());
    let (max_zeroes_segments, max_zeroes_sectors) = max_zeroes(info);
    put(48, &max_zeroes_sectors.to_le_bytes());
    put(52, &max_zeroes_segments.to_le_bytes());
    put(56, &[1]);
    space
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_space_is_as_the_specification_lays_it_out() {
        let info = DiskInfo {
            size_bytes: 3 << 40,
            request_align_bytes: 1,
            memory_align_bytes: 1,
            preferred_bytes: 2 << 20,
            discard_align_bytes: 4096,
            read_only: false,
            fast_zero: true,
        };
        let space = space(&info, 5, true);
        let u32_at = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().unwrap());
        assert_eq!(u64::from_le_bytes(space[..8].try_into().unwrap()), 3 << 31);
        assert_eq!((u32_at(12), u32_at(20), u32_at(28), u32_at(44)), (126, 512, 4096, 8));
        assert_eq!((space[24], space[32], space[34], space[56]), (3, 1, 5, 1));
        assert_eq!(space[16..20], [0; 4], "no geometry");
        assert_eq!((u32_at(48), u32_at(52)), (4 << 20, 16));
        let slow = super::space(&DiskInfo { fast_zero: false, ..info }, 5, true);
        let u32_at = |at: usize| u32::from_le_bytes(slow[at..at + 4].try_into().unwrap());
        assert_eq!((u32_at(36), u32_at(48), u32_at(52)), (4 << 20, 1 << 17, 1));
    }

    #[test]
    fn a_read_only_disk_offers_no_way_to_write() {
        assert_eq!(features(true) & (feature::DISCARD | feature::WRITE_ZEROES | feature::CONFIG_WCE), 0);
        assert_ne!(features(true) & feature::RO, 0);
        assert_eq!(features(false) & feature::RO, 0);
    }
}
