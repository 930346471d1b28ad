//! The dynamic disk header: where the BAT is, how large blocks are, who the parent is.

use super::locator::Locator;
use super::{
    CodecError, MAX_SIZE_BYTES, SECTOR_BYTES, array, bat, be32, be64, checksum, put, verify_checksum, verify_version,
};

const COOKIE: &[u8; 8] = b"cxsparse";
const VERSION: u32 = 0x0001_0000;
const CHECKSUM_AT: usize = 36;
const NAME_AT: usize = 64;
/// Room for the parent's name: 256 units of UTF-16.
const NAME_LEN: usize = 512;
const LOCATORS_AT: usize = 576;

/// The smallest block size accepted, in bytes. Smaller ones would make the BAT larger than the metadata of any
/// sensible disk, and most readers misread them.
pub const MIN_BLOCK_BYTES: u32 = 4096;
/// The largest block size accepted, in bytes.
pub const MAX_BLOCK_BYTES: u32 = 256 << 20;
/// What every program writes unless told otherwise, and the only size that blktap reads, in bytes.
pub const DEFAULT_BLOCK_BYTES: u32 = 2 << 20;

/// A header's values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Where the BAT starts.
    pub bat_offset_bytes: u64,
    /// How many entries the BAT has room for; more than the disk needs is usual.
    pub max_entries: u32,
    /// The size of a block's data: a power of two.
    pub block_size_bytes: u32,
    /// The parent's identity; zero when there is none, or when it is a raw file (blktap).
    pub parent_uuid: [u8; 16],
    /// When the parent was last changed, in seconds since 2000. Not to be relied on: copying changes it.
    pub parent_timestamp: u32,
    /// The parent's file name, for people.
    pub parent_name: String,
    /// Where the parent may be found.
    pub locators: [Locator; 8],
}

impl Header {
    /// Length in bytes.
    pub const LEN: usize = 1024;

    /// Reads a header from its 1024 bytes.
    ///
    /// # Errors
    /// Length, cookie, checksum, version, block size, number of entries, BAT offset or the name's encoding.
    pub fn parse(bytes: &[u8]) -> Result<Self, CodecError> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().map_err(|_| CodecError::TooShort {
            what: "header",
            needed_bytes: Self::LEN,
            got_bytes: bytes.len(),
        })?;
        let found = array(bytes, 0);
        if &found != COOKIE {
            return Err(CodecError::Cookie { what: "header", expected: "cxsparse", found });
        }
        verify_checksum("header", bytes, CHECKSUM_AT)?;
        verify_version("header", be32(bytes, 24))?;
        let header = Self {
            bat_offset_bytes: be64(bytes, 16),
            max_entries: be32(bytes, 28),
            block_size_bytes: be32(bytes, 32),
            parent_uuid: array(bytes, 40),
            parent_timestamp: be32(bytes, 56),
            parent_name: decode_name(&bytes[NAME_AT..NAME_AT + NAME_LEN])?,
            locators: std::array::from_fn(|i| Locator::parse(&array(bytes, LOCATORS_AT + i * Locator::LEN))),
        };
        header.check_values()?;
        Ok(header)
    }

    fn check_values(&self) -> Result<(), CodecError> {
        let block = self.block_size_bytes;
        if !block.is_power_of_two() || !(MIN_BLOCK_BYTES..=MAX_BLOCK_BYTES).contains(&block) {
            return Err(CodecError::BlockSize(block));
        }
        // Some writers make room for growth up to 2 TiB, or up to 32-bit sector numbers: twice the limit is free.
        let most = bat::entries_for(2 * MAX_SIZE_BYTES, block);
        if self.max_entries == 0 || u64::from(self.max_entries) > most {
            let most = u32::try_from(most).unwrap_or(u32::MAX);
            return Err(CodecError::BatEntries { entries: self.max_entries, block_size_bytes: block, most });
        }
        let offset = self.bat_offset_bytes;
        let room = i64::MAX as u64 - bat::bytes_len(self.max_entries);
        if !offset.is_multiple_of(SECTOR_BYTES) || offset < SECTOR_BYTES || offset > room {
            return Err(CodecError::BatOffset(offset));
        }
        Ok(())
    }

    /// The 1024 bytes, checksum included. A name of more than 256 UTF-16 units is cut.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        put(&mut bytes, 0, COOKIE);
        put(&mut bytes, 8, &u64::MAX.to_be_bytes());
        put(&mut bytes, 16, &self.bat_offset_bytes.to_be_bytes());
        put(&mut bytes, 24, &VERSION.to_be_bytes());
        put(&mut bytes, 28, &self.max_entries.to_be_bytes());
        put(&mut bytes, 32, &self.block_size_bytes.to_be_bytes());
        put(&mut bytes, 40, &self.parent_uuid);
        put(&mut bytes, 56, &self.parent_timestamp.to_be_bytes());
        put(&mut bytes, NAME_AT, &encode_name(&self.parent_name));
        for (i, locator) in self.locators.iter().enumerate() {
            put(&mut bytes, LOCATORS_AT + i * Locator::LEN, &locator.to_bytes());
        }
        let sum = checksum(&bytes, CHECKSUM_AT);
        put(&mut bytes, CHECKSUM_AT, &sum.to_be_bytes());
        bytes
    }

    /// One past the BAT, padded to a sector: where blktap keeps the batmap's header.
    pub fn bat_end_bytes(&self) -> u64 {
        self.bat_offset_bytes + bat::bytes_len(self.max_entries)
    }
}

/// The name up to the first NUL, of UTF-16BE.
fn decode_name(bytes: &[u8]) -> Result<String, CodecError> {
    let units = bytes.chunks_exact(2).map(|u| u16::from_be_bytes([u[0], u[1]]));
    char::decode_utf16(units.take_while(|unit| *unit != 0))
        .collect::<Result<_, _>>()
        .map_err(|_| CodecError::Text("parent name"))
}

/// UTF-16BE, cut at a character where there is no more room.
fn encode_name(name: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(NAME_LEN);
    let mut units = [0; 2];
    for c in name.chars().take_while(|c| *c != '\0') {
        let units = c.encode_utf16(&mut units);
        if out.len() + units.len() * 2 > NAME_LEN {
            break;
        }
        out.extend(units.iter().flat_map(|unit| unit.to_be_bytes()));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::locator::Platform;
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Header {
        Header {
            bat_offset_bytes: 1536,
            max_entries: 512,
            block_size_bytes: DEFAULT_BLOCK_BYTES,
            parent_uuid: [0; 16],
            parent_timestamp: 0,
            parent_name: String::new(),
            locators: [Locator::NONE; 8],
        }
    }

    fn changed(at: usize, value: &[u8]) -> Result<Header, CodecError> {
        let mut bytes = sample().to_bytes();
        put(&mut bytes, at, value);
        let sum = checksum(&bytes, CHECKSUM_AT);
        put(&mut bytes, CHECKSUM_AT, &sum.to_be_bytes());
        Header::parse(&bytes)
    }

    fn any_header() -> impl Strategy<Value = Header> {
        let parent = (any::<[u8; 16]>(), any::<u32>(), "[^\0]{0,100}");
        let locator = any::<[u8; 24]>().prop_map(|mut bytes| {
            bytes[12..16].fill(0);
            Locator::parse(&bytes)
        });
        let locators = proptest::array::uniform8(locator);
        (1u64..1 << 50, 1u32..1 << 20, 12u32..=21, parent, locators).prop_map(|v| Header {
            bat_offset_bytes: v.0 * 512,
            max_entries: v.1,
            block_size_bytes: 1 << v.2,
            parent_uuid: v.3.0,
            parent_timestamp: v.3.1,
            parent_name: v.3.2,
            locators: v.4,
        })
    }

    #[test]
    fn every_field_is_where_the_specification_says() {
        let mut header = sample();
        header.parent_uuid = [9; 16];
        header.parent_timestamp = 0x0102_0304;
        header.parent_name = "p.vhd".into();
        header.locators[7] = Locator { platform: Platform::W2ru, space: 512, len_bytes: 14, offset_bytes: 0x1234 };
        let bytes = header.to_bytes();
        assert_eq!(&bytes[..8], b"cxsparse");
        assert_eq!(&bytes[8..24], b"\xff\xff\xff\xff\xff\xff\xff\xff\0\0\0\0\0\0\x06\0");
        assert_eq!(&bytes[24..36], b"\0\x01\0\0\0\0\x02\0\0\x20\0\0");
        assert_eq!(&bytes[40..60], b"\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x01\x02\x03\x04");
        assert_eq!(&bytes[64..76], b"\0p\0.\0v\0h\0d\0\0");
        assert_eq!(&bytes[744..768], b"W2ru\0\0\x02\0\0\0\0\x0e\0\0\0\0\0\0\0\0\0\0\x12\x34");
        assert!(bytes[768..].iter().all(|b| *b == 0));
    }

    #[test]
    fn each_bad_field_is_named() {
        assert!(matches!(changed(0, b"cxsparsE"), Err(CodecError::Cookie { what: "header", .. })));
        assert!(matches!(changed(24, &[0, 2]), Err(CodecError::Version { what: "header", .. })));
        for block in [0u32, 0x80, 512, 2048, 3 << 20, 512 << 20, u32::MAX] {
            assert_eq!(changed(32, &block.to_be_bytes()), Err(CodecError::BlockSize(block)));
        }
        for entries in [0u32, 2 * 1_044_480 + 1, u32::MAX] {
            let error = changed(28, &entries.to_be_bytes()).unwrap_err();
            assert!(matches!(error, CodecError::BatEntries { entries: e, .. } if e == entries));
        }
        for offset in [0u64, 1537, u64::MAX, 511, i64::MAX as u64 - 511] {
            assert_eq!(changed(16, &offset.to_be_bytes()), Err(CodecError::BatOffset(offset)));
        }
        assert_eq!(changed(64, &[0xd8, 0, 0, b'x']), Err(CodecError::Text("parent name")));
    }

    #[test]
    fn other_lengths_are_refused() {
        for len in [0, 1023, 1025] {
            assert!(matches!(Header::parse(&vec![0; len]), Err(CodecError::TooShort { .. })));
        }
    }

    #[test]
    fn a_long_name_is_cut_at_a_character() {
        let mut header = sample();
        header.parent_name = format!("{}\u{1f4be}", "x".repeat(255));
        let read = Header::parse(&header.to_bytes()).unwrap();
        assert_eq!(read.parent_name, "x".repeat(255));
        header.parent_name = "y".repeat(300);
        let read = Header::parse(&header.to_bytes()).unwrap();
        assert_eq!(read.parent_name, "y".repeat(256), "without a NUL");
    }

    #[test]
    fn room_for_growth_to_two_tebibytes_is_accepted() {
        assert!(changed(28, &(1u32 << 20).to_be_bytes()).is_ok());
    }

    #[test]
    fn the_bat_ends_on_a_sector() {
        let mut header = sample();
        header.max_entries = 129;
        assert_eq!(header.bat_end_bytes(), 1536 + 1024);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(header in any_header()) {
            prop_assert_eq!(Header::parse(&header.to_bytes()), Ok(header));
        }

        #[test]
        fn any_flipped_bit_is_refused(header in any_header(), bit in 0usize..1024 * 8) {
            let mut bytes = header.to_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Header::parse(&bytes).is_err());
        }

        #[test]
        fn arbitrary_fields_never_panic(noise in proptest::collection::vec(any::<u8>(), 1024)) {
            let _ = Header::parse(&noise);
            let mut bytes: [u8; 1024] = noise.try_into().unwrap();
            put(&mut bytes, 0, COOKIE);
            put(&mut bytes, 24, &VERSION.to_be_bytes());
            let sum = checksum(&bytes, CHECKSUM_AT);
            put(&mut bytes, CHECKSUM_AT, &sum.to_be_bytes());
            let _ = Header::parse(&bytes);
        }
    }
}
