//! The configuration of a virtio-blk device (virtio 1.2, 5.2.4).

use super::proto::feature;

/// The configuration of a device. Fields that its features do not cover hold whatever the server put there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlkConfig {
    /// The size in sectors of 512 bytes.
    pub capacity_sectors: u64,
    /// The longest segment in bytes.
    pub size_max: u32,
    /// The most segments of a request.
    pub seg_max: u32,
    /// The logical block in bytes.
    pub block_bytes: u32,
    /// 1 when the write cache is on.
    pub writeback: u8,
    /// The number of queues.
    pub queues: u16,
    /// The most sectors of one discard segment.
    pub max_discard_sectors: u32,
    /// The most segments of a discard.
    pub max_discard_segments: u32,
    /// Discards are best aligned to this many sectors.
    pub discard_alignment_sectors: u32,
    /// The most sectors of one write-zeroes segment.
    pub max_write_zeroes_sectors: u32,
    /// The most segments of a write zeroes.
    pub max_write_zeroes_segments: u32,
    /// A write zeroes may free space.
    pub write_zeroes_may_unmap: u8,
}

impl BlkConfig {
    /// The bytes asked of a server: up to the write-zeroes fields, as QEMU does.
    pub const BYTES: usize = 60;
    /// The offset of the write cache's switch, in bytes.
    pub const WRITEBACK_AT: u32 = 32;

    /// From the bytes of the configuration, little-endian.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Self {
            capacity_sectors: u64::from(word(0)) | u64::from(word(4)) << 32,
            size_max: word(8),
            seg_max: word(12),
            block_bytes: word(20),
            writeback: bytes[32],
            queues: u16::from_le_bytes([bytes[34], bytes[35]]),
            max_discard_sectors: word(36),
            max_discard_segments: word(40),
            discard_alignment_sectors: word(44),
            max_write_zeroes_sectors: word(48),
            max_write_zeroes_segments: word(52),
            write_zeroes_may_unmap: bytes[56],
        }
    }

    /// The size of the disk in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.capacity_sectors.saturating_mul(512)
    }

    /// The longest segment of a request in bytes, under `features`.
    pub fn max_segment_bytes(&self, features: u64) -> u32 {
        match features & feature::BLK_SIZE_MAX != 0 && self.size_max > 0 {
            true => self.size_max,
            false => u32::MAX,
        }
    }

    /// The most segments of a request, under `features`: one when the device does not say.
    pub fn max_segments(&self, features: u64) -> u32 {
        match features & feature::BLK_SEG_MAX != 0 {
            true => self.seg_max.max(1),
            false => 1,
        }
    }

    /// The unit of offsets and lengths in bytes, under `features`.
    pub fn unit_bytes(&self, features: u64) -> u32 {
        match features & feature::BLK_BLK_SIZE != 0 && self.block_bytes > 0 {
            true => self.block_bytes,
            false => 512,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_specification_has_them() {
        let mut bytes = [0; BlkConfig::BYTES];
        for (at, byte) in [(0, 1), (4, 2), (8, 3), (12, 4), (20, 5), (32, 1), (34, 6), (36, 7), (40, 8)] {
            bytes[at] = byte;
        }
        for (at, byte) in [(44, 9), (48, 10), (52, 11), (56, 1)] {
            bytes[at] = byte;
        }
        let expected = BlkConfig {
            capacity_sectors: 1 | 2 << 32,
            size_max: 3,
            seg_max: 4,
            block_bytes: 5,
            writeback: 1,
            queues: 6,
            max_discard_sectors: 7,
            max_discard_segments: 8,
            discard_alignment_sectors: 9,
            max_write_zeroes_sectors: 10,
            max_write_zeroes_segments: 11,
            write_zeroes_may_unmap: 1,
        };
        assert_eq!(BlkConfig::parse(&bytes), expected);
    }

    #[test]
    fn what_the_features_do_not_cover_is_not_believed() {
        let config = BlkConfig { size_max: 4096, seg_max: 126, block_bytes: 4096, ..BlkConfig::default() };
        assert_eq!((config.max_segment_bytes(0), config.max_segments(0), config.unit_bytes(0)), (u32::MAX, 1, 512));
        let all = feature::BLK_SIZE_MAX | feature::BLK_SEG_MAX | feature::BLK_BLK_SIZE;
        let limits = (config.max_segment_bytes(all), config.max_segments(all), config.unit_bytes(all));
        assert_eq!(limits, (4096, 126, 4096));
    }
}
