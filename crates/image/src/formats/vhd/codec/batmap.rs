//! The batmap: blktap's map of blocks whose every sector is written, so that their bitmaps need not be read.
//!
//! Its header lies behind the BAT. It is a hint: written on an orderly close, stale after a crash, and ignored when
//! its checksum does not fit.

use std::ops::Range;

use super::{CodecError, SECTOR_BYTES, array, be32, be64, put};

const COOKIE: &[u8; 8] = b"tdbatmap";
/// The bytes of the map beyond which no BAT of accepted size goes, in sectors.
const MAX_SECTORS: u32 = 8192;

/// A journal starts and ends at multiples of this, in bytes.
const JOURNAL_ALIGN: u64 = 4096;
/// The lengths in bytes that a journal may have.
const JOURNAL_LENGTHS: std::ops::RangeInclusive<u64> = 16 << 10..=16 << 20;

/// A batmap header's values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatmapHeader {
    /// Where the map is.
    pub map_offset_bytes: u64,
    /// The length of the map.
    pub map_sectors: u32,
    /// Major in the upper, minor in the lower half: 1.1 or 1.2.
    pub version: u32,
    /// Of the map, not of this header.
    pub checksum: u32,
    /// A byte for a management program's use.
    pub marker: u8,
    /// Whether and with which key the disk's data is encrypted: a flag, a nonce of 32 bytes, and the SHA-256 of
    /// nonce and key.
    pub key_hash: [u8; 65],
}

impl BatmapHeader {
    /// Length in bytes.
    pub const LEN: usize = 512;

    /// The version whose checksum adds bytes as signed numbers.
    pub const VERSION_SIGNED: u32 = 0x0001_0001;

    /// The version to write.
    pub const VERSION: u32 = 0x0001_0002;

    /// The header of `map`, whole sectors, of a disk of that current size.
    pub fn new(map_offset_bytes: u64, map: &[u8], current_size_bytes: u64) -> Self {
        let mut header = Self::void(map_offset_bytes, map.len() as u64);
        header.checksum = Self::checksum_of(header.version, summed(map, current_size_bytes));
        header
    }

    /// The header of a map of `len_bytes`, whole sectors, that are zero: no block is full. The bytes must be zero
    /// in the file as well, for tapdisk opens no disk for writing whose map does not fit its checksum.
    pub fn void(map_offset_bytes: u64, len_bytes: u64) -> Self {
        let map_sectors = u32::try_from(len_bytes / SECTOR_BYTES).unwrap_or(u32::MAX);
        let (version, marker) = (Self::VERSION, 0);
        let checksum = Self::checksum_of(version, &[]);
        Self { map_offset_bytes, map_sectors, version, checksum, marker, key_hash: [0; 65] }
    }

    /// Reads a header from its 512 bytes.
    ///
    /// # Errors
    /// Length, cookie, version, offset or size.
    pub fn parse(bytes: &[u8]) -> Result<Self, CodecError> {
        if bytes.len() != Self::LEN {
            return Err(CodecError::TooShort {
                what: "batmap header",
                needed_bytes: Self::LEN,
                got_bytes: bytes.len(),
            });
        }
        let found = array(bytes, 0);
        if &found != COOKIE {
            return Err(CodecError::Cookie { what: "batmap header", expected: "tdbatmap", found });
        }
        let header = Self {
            map_offset_bytes: be64(bytes, 8),
            map_sectors: be32(bytes, 16),
            version: be32(bytes, 20),
            checksum: be32(bytes, 24),
            marker: bytes[28],
            key_hash: array(bytes, 29),
        };
        header.check_values()?;
        Ok(header)
    }

    fn check_values(&self) -> Result<(), CodecError> {
        if !(Self::VERSION_SIGNED..=Self::VERSION).contains(&self.version) {
            return Err(CodecError::Version { what: "batmap", version: self.version });
        }
        if self.map_sectors == 0 || self.map_sectors > MAX_SECTORS {
            return Err(CodecError::BatmapSectors(self.map_sectors));
        }
        let offset = self.map_offset_bytes;
        let room = i64::MAX as u64 - u64::from(MAX_SECTORS) * SECTOR_BYTES;
        if offset == 0 || !offset.is_multiple_of(SECTOR_BYTES) || offset > room {
            return Err(CodecError::BatmapOffset(offset));
        }
        Ok(())
    }

    /// The 512 bytes.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        put(&mut bytes, 0, COOKIE);
        put(&mut bytes, 8, &self.map_offset_bytes.to_be_bytes());
        put(&mut bytes, 16, &self.map_sectors.to_be_bytes());
        put(&mut bytes, 20, &self.version.to_be_bytes());
        put(&mut bytes, 24, &self.checksum.to_be_bytes());
        put(&mut bytes, 28, &[self.marker]);
        put(&mut bytes, 29, &self.key_hash);
        bytes
    }

    /// The checksum of `map`'s bytes as `version` computes it.
    pub fn checksum_of(version: u32, map: &[u8]) -> u32 {
        let add = |sum: u32, byte: &u8| {
            let signed = version == Self::VERSION_SIGNED;
            let value = if signed { i32::from(*byte as i8) as u32 } else { u32::from(*byte) };
            sum.wrapping_add(value)
        };
        !map.iter().fold(0, add)
    }

    /// True when the checksum is that of `map`, the whole map of a disk of that current size.
    pub fn matches(&self, map: &[u8], current_size_bytes: u64) -> bool {
        self.checksum == Self::checksum_of(self.version, summed(map, current_size_bytes))
    }

    /// The bytes of the map that the checksum covers, by the disk's current size: libvhd rounds a bit for each
    /// 2 MiB down to bytes and that up to a sector, which may be one sector less than the map has.
    pub fn summed_bytes(current_size_bytes: u64) -> u64 {
        (current_size_bytes >> 24).next_multiple_of(SECTOR_BYTES).max(SECTOR_BYTES)
    }

    /// The sectors that a map of `entries` bits needs.
    pub fn sectors_for(entries: u32) -> u32 {
        entries.div_ceil(8 * SECTOR_BYTES as u32).max(1)
    }

    /// Where the map lies.
    pub fn map_bytes(&self) -> Range<u64> {
        let len = u64::from(self.map_sectors) * SECTOR_BYTES;
        self.map_offset_bytes..self.map_offset_bytes + len
    }

    /// The bytes between this header, which lies at `header_offset_bytes`, and its map; empty when the map follows
    /// at once or lies before. No reader looks there, and libvhd allocates only behind the map: this program's
    /// journal lies here. (A writer that knows no batmap, such as QEMU, overwrites this header first, and so the
    /// only mention of the gap.)
    pub fn gap_bytes(&self, header_offset_bytes: u64) -> Range<u64> {
        let end = header_offset_bytes.saturating_add(Self::LEN as u64);
        end..self.map_offset_bytes.max(end)
    }

    /// The 4 KiB-aligned part of the gap that can hold this program's journal; `None` when there is none, or one of
    /// a length that this program does not make (16 KiB to 16 MiB).
    pub fn journal_area(&self, header_offset_bytes: u64) -> Option<Range<u64>> {
        let gap = self.gap_bytes(header_offset_bytes);
        let start = gap.start.checked_next_multiple_of(JOURNAL_ALIGN)?;
        let end = gap.end / JOURNAL_ALIGN * JOURNAL_ALIGN;
        JOURNAL_LENGTHS.contains(&end.saturating_sub(start)).then_some(start..end)
    }

    /// True when the disk's data is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.key_hash[0] != 0
    }
}

/// The part of `map` that the checksum covers.
fn summed(map: &[u8], current_size_bytes: u64) -> &[u8] {
    let len = usize::try_from(BatmapHeader::summed_bytes(current_size_bytes)).unwrap_or(usize::MAX);
    &map[..len.min(map.len())]
}

/// True when `block`'s bit is set in `map`, most significant bit first; false past its end.
pub fn is_full(map: &[u8], block: u32) -> bool {
    map.get(block as usize / 8).is_some_and(|byte| byte & (0x80 >> (block % 8)) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> BatmapHeader {
        BatmapHeader::void(4096, 1024)
    }

    fn changed(at: usize, value: &[u8]) -> Result<BatmapHeader, CodecError> {
        let mut bytes = sample().to_bytes();
        put(&mut bytes, at, value);
        BatmapHeader::parse(&bytes)
    }

    #[test]
    fn every_field_is_where_blktap_has_it() {
        let mut header = sample();
        (header.checksum, header.marker) = (0x0102_0304, 7);
        header.key_hash = [9; 65];
        let bytes = header.to_bytes();
        let head = b"tdbatmap\0\0\0\0\0\0\x10\0\0\0\0\x02\0\x01\0\x02\x01\x02\x03\x04\x07";
        assert_eq!(&bytes[..29], head);
        assert_eq!(&bytes[29..94], &[9; 65]);
        assert!(bytes[94..].iter().all(|b| *b == 0) && header.is_encrypted());
    }

    #[test]
    fn each_bad_field_is_named() {
        assert!(matches!(changed(0, b"TD"), Err(CodecError::Cookie { what: "batmap header", .. })));
        for version in [0u32, 0x0001_0000, 0x0001_0003, 0x0002_0000] {
            let error = changed(20, &version.to_be_bytes()).unwrap_err();
            assert!(matches!(error, CodecError::Version { version: v, .. } if v == version));
        }
        for offset in [0u64, 4097, u64::MAX, i64::MAX as u64 - 511] {
            assert_eq!(changed(8, &offset.to_be_bytes()), Err(CodecError::BatmapOffset(offset)));
        }
        for sectors in [0u32, 8193, u32::MAX] {
            assert_eq!(changed(16, &sectors.to_be_bytes()), Err(CodecError::BatmapSectors(sectors)));
        }
        assert!(matches!(BatmapHeader::parse(&[0; 511]), Err(CodecError::TooShort { .. })));
    }

    #[test]
    fn version_1_1_sums_signed_bytes() {
        let map = [0x80, 0x01, 0xff];
        assert_eq!(BatmapHeader::checksum_of(BatmapHeader::VERSION, &map), !0x180);
        let signed = BatmapHeader::checksum_of(BatmapHeader::VERSION_SIGNED, &map);
        assert_eq!(signed, !((-128i32 + 1 - 1) as u32));
        let header = BatmapHeader { checksum: !0x180, ..sample() };
        assert!(header.matches(&map, 1 << 20) && !header.matches(&map[..2], 1 << 20));
    }

    #[test]
    fn an_empty_maps_checksum_does_not_depend_on_its_length() {
        assert_eq!(sample().checksum, BatmapHeader::checksum_of(BatmapHeader::VERSION, &[0; 1024]));
    }

    #[test]
    fn lengths_follow_libvhd() {
        let sums = [1 << 20, 8 << 30, (8 << 30) + (2 << 20), (8 << 30) + (16 << 20)];
        assert_eq!(sums.map(BatmapHeader::summed_bytes), [512, 512, 512, 1024]);
        assert_eq!([0, 1, 4096, 4097].map(BatmapHeader::sectors_for), [1, 1, 1, 2]);
    }

    #[test]
    fn bits_behind_what_libvhd_sums_do_not_count() {
        let size = (8 << 30) + (2 << 20);
        let mut map = [0; 1024];
        map[512] = 0x80;
        assert_eq!(BatmapHeader::new(4096, &map, size), sample());
        map[511] = 1;
        assert_eq!(BatmapHeader::new(4096, &map, size).checksum, !1);
    }

    #[test]
    fn the_gap_is_between_header_and_map() {
        assert_eq!(sample().gap_bytes(2048), 2560..4096);
        assert!(sample().gap_bytes(3584).is_empty());
        assert!(sample().gap_bytes(8192).is_empty());
        assert_eq!(sample().map_bytes(), 4096..5120);
    }

    #[test]
    fn a_journal_is_the_aligned_part_of_a_gap_of_sensible_length() {
        let area = |map_offset, at| BatmapHeader::void(map_offset, 512).journal_area(at);
        assert_eq!(area((1 << 20) + 4096, 2048), Some(4096..(1 << 20) + 4096));
        assert_eq!(area((1 << 20) + 4608, 3584), Some(4096..(1 << 20) + 4096));
        assert_eq!(area((1 << 20) + 4096, 3585), Some(8192..(1 << 20) + 4096));
        assert_eq!(area(4096 + (16 << 10), 2048), Some(4096..4096 + (16 << 10)));
        assert_eq!(area(4096 + (12 << 10), 2048), None, "too short");
        assert_eq!(area((16 << 20) + 8192, 2048), None, "too long");
        assert_eq!(area(4096, 3584), None, "no gap");
        assert_eq!(area(1 << 20, u64::MAX), None, "past all offsets");
    }

    #[test]
    fn bits_count_from_the_most_significant() {
        assert!(is_full(&[0x80], 0) && is_full(&[0, 1], 15));
        assert!(!is_full(&[0x80], 7) && !is_full(&[0xff], 8));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            sectors in 1u64..1 << 50, map_sectors in 1u32..=8192, signed: bool,
            checksum: u32, marker: u8, key in proptest::collection::vec(any::<u8>(), 65),
        ) {
            let header = BatmapHeader {
                map_offset_bytes: sectors * 512,
                map_sectors,
                version: if signed { BatmapHeader::VERSION_SIGNED } else { BatmapHeader::VERSION },
                checksum,
                marker,
                key_hash: key.try_into().unwrap(),
            };
            prop_assert_eq!(BatmapHeader::parse(&header.to_bytes()), Ok(header));
        }

        #[test]
        fn a_flipped_bit_changes_the_maps_checksum(
            mut map in proptest::collection::vec(any::<u8>(), 1..600), at: usize, bit in 0u32..8,
        ) {
            for version in [BatmapHeader::VERSION, BatmapHeader::VERSION_SIGNED] {
                let before = BatmapHeader::checksum_of(version, &map);
                let at = at % map.len();
                map[at] ^= 1 << bit;
                prop_assert_ne!(BatmapHeader::checksum_of(version, &map), before);
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(noise in proptest::collection::vec(any::<u8>(), 512)) {
            let _ = BatmapHeader::parse(&noise);
            let mut bytes = noise;
            put(&mut bytes, 0, COOKIE);
            put(&mut bytes, 20, &BatmapHeader::VERSION.to_be_bytes());
            if let Ok(header) = BatmapHeader::parse(&bytes) {
                let _ = (header.map_bytes(), header.journal_area(u64::MAX));
            }
        }
    }
}
