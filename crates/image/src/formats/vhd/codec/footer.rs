//! The footer: what the disk is. A copy of it opens dynamic and differencing files.

use super::geometry::Geometry;
use super::{
    CodecError, MAX_SIZE_BYTES, SECTOR_BYTES, array, be16, be32, be64, checksum, put, time, verify_checksum,
    verify_version,
};

const COOKIE: &[u8; 8] = b"conectix";
/// What blktap writes over the cookie of both footers while it resizes a disk.
const POISON: &[u8; 8] = b"v_poison";
const VERSION: u32 = 0x0001_0000;
const NO_OFFSET: u64 = u64::MAX;
const CHECKSUM_AT: usize = 64;
/// The feature bit that is always set.
const FEATURE_RESERVED: u32 = 2;

/// What kind of file it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiskType {
    /// The disk's bytes, then the footer.
    Fixed,
    /// Blocks that are allocated when they are first written.
    Dynamic,
    /// As dynamic; what it does not hold is in a parent.
    Differencing,
}

impl DiskType {
    fn from_code(code: u32) -> Result<Self, CodecError> {
        match code {
            2 => Ok(Self::Fixed),
            3 => Ok(Self::Dynamic),
            4 => Ok(Self::Differencing),
            other => Err(CodecError::DiskType(other)),
        }
    }

    fn code(self) -> u32 {
        match self {
            Self::Fixed => 2,
            Self::Dynamic => 3,
            Self::Differencing => 4,
        }
    }
}

/// A footer's values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footer {
    /// Bit 0: temporary; bit 1: always set.
    pub features: u32,
    /// Where the dynamic header is, in bytes; `None` for fixed disks.
    pub data_offset: Option<u64>,
    /// When the disk was made, in seconds since 2000.
    pub timestamp: u32,
    /// The program that made it.
    pub creator: [u8; 4],
    /// That program's version, major in the upper half.
    pub creator_version: u32,
    /// `Wi2k`, `Mac `, or zero.
    pub creator_os: [u8; 4],
    /// The size when it was made.
    pub original_size_bytes: u64,
    /// The size of the disk now. What the geometry says instead is in [`Footer::other_size_bytes`].
    pub current_size_bytes: u64,
    /// CHS geometry.
    pub geometry: Geometry,
    /// Fixed, dynamic or differencing.
    pub disk_type: DiskType,
    /// The identity that children name.
    pub uuid: [u8; 16],
    /// A virtual machine's state was saved with the disk.
    pub saved_state: bool,
    /// blktap's mark for inner nodes of a chain that are no disk of their own any more.
    pub hidden: bool,
}

impl Footer {
    /// Length in bytes.
    pub const LEN: usize = 512;

    /// The creator that [`Footer::new`] writes, with [`Footer::CREATOR_VERSION`].
    ///
    /// This field chooses a dialect rather than naming a program, and blktap's is the one meant here: libvhd and
    /// XenServer believe a batmap only in files of `tap` 1.2 and up, and QEMU trusts the current size (not the
    /// rounded CHS product) of a few listed creators only, of which this is one.
    pub const CREATOR: [u8; 4] = *b"tap\0";

    /// Version 1.3: sector bitmaps most significant bit first, batmap of version 1.2. Readers refuse higher ones.
    pub const CREATOR_VERSION: u32 = 0x0001_0003;

    /// The one version of `tap` whose sector bitmaps have the least significant bit first: 0.1.
    const LITTLE_ENDIAN_VERSION: u32 = 1;

    /// A new disk's footer. `data_offset` is 512 (behind the copy) unless the disk is fixed.
    pub fn new(disk_type: DiskType, size_bytes: u64, uuid: [u8; 16], now_unix_s: u64) -> Self {
        Self {
            features: FEATURE_RESERVED,
            data_offset: (disk_type != DiskType::Fixed).then_some(Self::LEN as u64),
            timestamp: time::from_unix_s(now_unix_s),
            creator: Self::CREATOR,
            creator_version: Self::CREATOR_VERSION,
            creator_os: [0; 4],
            original_size_bytes: size_bytes,
            current_size_bytes: size_bytes,
            geometry: Geometry::for_size(size_bytes),
            disk_type,
            uuid,
            saved_state: false,
            hidden: false,
        }
    }

    /// Reads a footer from 512 bytes, or from the 511 of old versions of Virtual PC. Longer input is an error too:
    /// the caller must know where the footer is.
    ///
    /// # Errors
    /// Cookie, checksum, version, type, size or data offset; the error says which.
    pub fn parse(bytes: &[u8]) -> Result<Self, CodecError> {
        let bytes = &Self::padded(bytes)?;
        Self::check_frame(bytes)?;
        let footer = Self::fields(bytes)?;
        footer.check_values()?;
        Ok(footer)
    }

    /// 512 bytes of the 511 or 512 given.
    fn padded(bytes: &[u8]) -> Result<[u8; Self::LEN], CodecError> {
        if bytes.len() != Self::LEN && bytes.len() != Self::LEN - 1 {
            return Err(CodecError::TooShort { what: "footer", needed_bytes: Self::LEN, got_bytes: bytes.len() });
        }
        let mut out = [0; Self::LEN];
        put(&mut out, 0, bytes);
        Ok(out)
    }

    fn check_frame(bytes: &[u8; Self::LEN]) -> Result<(), CodecError> {
        let found: [u8; 8] = array(bytes, 0);
        if &found == POISON {
            return Err(CodecError::Poisoned);
        }
        if &found != COOKIE {
            return Err(CodecError::Cookie { what: "footer", expected: "conectix", found });
        }
        verify_checksum("footer", bytes, CHECKSUM_AT)?;
        verify_version("footer", be32(bytes, 12))
    }

    fn fields(bytes: &[u8; Self::LEN]) -> Result<Self, CodecError> {
        let disk_type = DiskType::from_code(be32(bytes, 60))?;
        let offset = be64(bytes, 16);
        Ok(Self {
            features: be32(bytes, 8),
            data_offset: (disk_type != DiskType::Fixed).then_some(offset),
            timestamp: be32(bytes, 24),
            creator: array(bytes, 28),
            creator_version: be32(bytes, 32),
            creator_os: array(bytes, 36),
            original_size_bytes: be64(bytes, 40),
            current_size_bytes: be64(bytes, 48),
            geometry: Geometry { cylinders: be16(bytes, 56), heads: bytes[58], sectors: bytes[59] },
            disk_type,
            uuid: array(bytes, 68),
            saved_state: bytes[84] != 0,
            hidden: bytes[85] != 0,
        })
    }

    fn check_values(&self) -> Result<(), CodecError> {
        if let Some(offset) = self.data_offset {
            let fits = (Self::LEN as u64..=i64::MAX as u64 - 4096).contains(&offset);
            if !fits || !offset.is_multiple_of(SECTOR_BYTES) {
                return Err(CodecError::DataOffset(offset));
            }
            if self.is_tap() && self.creator_version == Self::LITTLE_ENDIAN_VERSION {
                return Err(CodecError::OldBitmapOrder(self.creator_version));
            }
        }
        match self.current_size_bytes {
            size if size > MAX_SIZE_BYTES => Err(CodecError::SizeTooLarge(size)),
            size if !size.is_multiple_of(SECTOR_BYTES) => Err(CodecError::SizeNotSectors(size)),
            _ => Ok(()),
        }
    }

    /// The 512 bytes, checksum included.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        put(&mut bytes, 0, COOKIE);
        put(&mut bytes, 8, &self.features.to_be_bytes());
        put(&mut bytes, 12, &VERSION.to_be_bytes());
        put(&mut bytes, 16, &self.data_offset.unwrap_or(NO_OFFSET).to_be_bytes());
        put(&mut bytes, 24, &self.timestamp.to_be_bytes());
        put(&mut bytes, 28, &self.creator);
        put(&mut bytes, 32, &self.creator_version.to_be_bytes());
        put(&mut bytes, 36, &self.creator_os);
        put(&mut bytes, 40, &self.original_size_bytes.to_be_bytes());
        put(&mut bytes, 48, &self.current_size_bytes.to_be_bytes());
        put(&mut bytes, 56, &self.geometry.cylinders.to_be_bytes());
        put(&mut bytes, 58, &[self.geometry.heads, self.geometry.sectors]);
        put(&mut bytes, 60, &self.disk_type.code().to_be_bytes());
        put(&mut bytes, 68, &self.uuid);
        put(&mut bytes, 84, &[u8::from(self.saved_state), u8::from(self.hidden)]);
        let sum = checksum(&bytes, CHECKSUM_AT);
        put(&mut bytes, CHECKSUM_AT, &sum.to_be_bytes());
        bytes
    }

    /// The size in bytes that programs take for the disk's which go by the geometry; `None` where the geometry says
    /// nothing ("too large"), or the same as the current size.
    ///
    /// Virtual PC goes by the geometry, and so does QEMU for each creator but a few that it knows. The current size is
    /// what the specification calls the size of the disk, and each program writes it. So it counts here for every
    /// creator, and no byte that another program has written is out of reach.
    pub fn other_size_bytes(&self) -> Option<u64> {
        let by_geometry = self.geometry.size_bytes();
        (!self.geometry.is_max() && by_geometry != self.current_size_bytes).then_some(by_geometry)
    }

    /// True when blktap or this program made it, so that a batmap may follow the BAT.
    pub fn is_tap(&self) -> bool {
        self.creator.starts_with(b"tap")
    }

    /// True when a batmap header must be looked for behind the BAT: in every file of blktap's after 0.1, as libvhd does.
    /// From 1.2 on it is there.
    pub fn may_have_batmap(&self) -> bool {
        self.disk_type != DiskType::Fixed && self.is_tap() && self.creator_version > Self::LITTLE_ENDIAN_VERSION
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Any footer that `parse` accepts.
    pub(crate) fn any_footer() -> impl Strategy<Value = Footer> {
        let kinds = prop_oneof![
            Just((DiskType::Fixed, None)),
            (1u64..1 << 40).prop_map(|s| (DiskType::Dynamic, Some(s * 512))),
            (1u64..1 << 40).prop_map(|s| (DiskType::Differencing, Some(s * 512))),
        ];
        let words = (any::<u32>(), any::<u32>(), any::<u64>(), 0u64..=0xff00_0000);
        let creators = prop_oneof![Just(*b"tap\0"), Just(*b"vpc "), Just(*b"win ")];
        let marks = (creators, any::<[u8; 4]>(), any::<[u8; 16]>(), any::<(bool, bool)>());
        (kinds, words, marks, any::<u16>()).prop_map(|(kind, words, marks, cylinders)| Footer {
            features: words.0,
            data_offset: kind.1,
            timestamp: words.1,
            creator: marks.0,
            creator_version: 0x0001_0003,
            creator_os: marks.1,
            original_size_bytes: words.2,
            current_size_bytes: words.3 * 512,
            geometry: Geometry { cylinders, heads: 16, sectors: 63 },
            disk_type: kind.0,
            uuid: marks.2,
            saved_state: marks.3.0,
            hidden: marks.3.1,
        })
    }

    /// Sets the checksum again after a change, so that a test gets past it.
    fn resummed(mut bytes: [u8; 512]) -> [u8; 512] {
        let sum = checksum(&bytes, CHECKSUM_AT);
        put(&mut bytes, CHECKSUM_AT, &sum.to_be_bytes());
        bytes
    }

    fn changed(at: usize, value: &[u8]) -> Result<Footer, CodecError> {
        let mut bytes = Footer::new(DiskType::Dynamic, 1 << 30, [7; 16], 1_700_000_000).to_bytes();
        put(&mut bytes, at, value);
        Footer::parse(&resummed(bytes))
    }

    #[test]
    fn a_new_footer_has_every_field_where_the_specification_says() {
        let bytes = Footer::new(DiskType::Dynamic, 1 << 30, [7; 16], 946_684_800 + 5).to_bytes();
        let head = b"conectix\0\0\0\x02\0\x01\0\0\0\0\0\0\0\0\x02\0\0\0\0\x05tap\0\0\x01\0\x03\0\0\0\0";
        assert_eq!(&bytes[..40], head);
        let sizes = b"\0\0\0\0\x40\0\0\0\0\0\0\0\x40\0\0\0\x08\x20\x10\x3f\0\0\0\x03";
        assert_eq!(&bytes[40..64], sizes);
        // By hand: the cookie 861, "tap" 325, both sizes 128, geometry 119, UUID 112, and 17 of single bytes.
        assert_eq!(be32(&bytes, 64), !1562u32);
        assert_eq!(&bytes[68..84], &[7; 16]);
        assert!(bytes[84..].iter().all(|b| *b == 0));
    }

    #[test]
    fn the_footer_of_a_fixed_disk_has_no_offset() {
        let footer = Footer::new(DiskType::Fixed, 4096, [1; 16], 0);
        assert_eq!(&footer.to_bytes()[16..24], &[0xff; 8]);
        assert_eq!(Footer::parse(&footer.to_bytes()), Ok(footer));
    }

    #[test]
    fn virtual_pcs_short_footer_is_read_and_other_lengths_are_not() {
        let footer = Footer::new(DiskType::Dynamic, 1 << 20, [1; 16], 0);
        assert_eq!(Footer::parse(&footer.to_bytes()[..511]), Ok(footer));
        for len in [0, 8, 510, 513] {
            let error = Footer::parse(&vec![b'c'; len]).unwrap_err();
            assert!(matches!(error, CodecError::TooShort { got_bytes, .. } if got_bytes == len));
        }
    }

    #[test]
    fn each_bad_field_is_named() {
        assert!(matches!(changed(0, b"conectiX"), Err(CodecError::Cookie { what: "footer", .. })));
        assert_eq!(changed(0, b"v_poison"), Err(CodecError::Poisoned));
        assert!(matches!(changed(12, &[0, 2]), Err(CodecError::Version { version: 0x2_0000, .. })));
        assert_eq!(changed(60, &[0, 0, 0, 5]), Err(CodecError::DiskType(5)));
        assert_eq!(changed(16, &[0; 8]), Err(CodecError::DataOffset(0)));
        assert_eq!(changed(16, &[0xff; 8]), Err(CodecError::DataOffset(u64::MAX)));
        assert_eq!(changed(23, &[1]), Err(CodecError::DataOffset(513)));
        assert_eq!(changed(55, &[1]), Err(CodecError::SizeNotSectors((1 << 30) + 1)));
        assert_eq!(changed(48, &[0xff]), Err(CodecError::SizeTooLarge((0xff << 56) + (1 << 30))));
        assert_eq!(changed(32, &[0, 0, 0, 1]), Err(CodecError::OldBitmapOrder(1)));
        assert!(changed(14, &[0, 9]).is_ok(), "a minor version is compatible");
    }

    #[test]
    fn the_limit_itself_is_accepted() {
        let at = Footer::new(DiskType::Dynamic, MAX_SIZE_BYTES, [1; 16], 0);
        assert!(Footer::parse(&at.to_bytes()).is_ok());
        let over = Footer::new(DiskType::Dynamic, MAX_SIZE_BYTES + 512, [1; 16], 0);
        assert_eq!(Footer::parse(&over.to_bytes()), Err(CodecError::SizeTooLarge(MAX_SIZE_BYTES + 512)));
    }

    #[test]
    fn another_size_is_what_the_geometry_says() {
        let mut footer = Footer::new(DiskType::Dynamic, 1 << 30, [1; 16], 0);
        assert_eq!(footer.other_size_bytes(), Some(2080 * 16 * 63 * 512));
        footer.geometry.cylinders = 2081;
        assert_eq!(footer.other_size_bytes(), Some(2081 * 16 * 63 * 512));
        footer.current_size_bytes = 2081 * 16 * 63 * 512;
        assert_eq!(footer.other_size_bytes(), None);
        footer.geometry = Geometry::MAX;
        assert_eq!(footer.other_size_bytes(), None);
    }

    #[test]
    fn only_version_0_1_of_tap_has_little_endian_bitmaps() {
        let sparse = Footer::new(DiskType::Dynamic, 1 << 20, [1; 16], 0);
        for version in [0, 2, 0xffff, 0x0001_0000, 0x0001_0001, 0x0001_0003, 0x0001_0004, u32::MAX] {
            let footer = Footer { creator_version: version, ..sparse.clone() };
            assert_eq!(Footer::parse(&footer.to_bytes()), Ok(footer), "{version:#x}");
        }
        let old = Footer { creator_version: 1, ..sparse };
        assert_eq!(Footer::parse(&old.to_bytes()), Err(CodecError::OldBitmapOrder(1)));
        for creator in [*b"TAP\0", *b"qemu", *b"vs\0\0"] {
            assert!(Footer::parse(&Footer { creator, ..old.clone() }.to_bytes()).is_ok());
        }
        let fixed = Footer { disk_type: DiskType::Fixed, data_offset: None, ..old };
        assert!(Footer::parse(&fixed.to_bytes()).is_ok(), "a fixed disk has no bitmaps");
    }

    #[test]
    fn only_blktaps_dialect_has_a_batmap() {
        let mut footer = Footer::new(DiskType::Dynamic, 1 << 20, [1; 16], 0);
        assert!(footer.may_have_batmap());
        footer.creator = *b"qem2";
        assert!(!footer.may_have_batmap());
        (footer.creator, footer.creator_version) = (Footer::CREATOR, 0x0001_0000);
        assert!(footer.may_have_batmap(), "libvhd looks for one there, too");
        assert!(!Footer::new(DiskType::Fixed, 1 << 20, [1; 16], 0).may_have_batmap());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(footer in any_footer()) {
            prop_assert_eq!(Footer::parse(&footer.to_bytes()), Ok(footer));
        }

        #[test]
        fn any_flipped_bit_is_refused(footer in any_footer(), bit in 0usize..512 * 8) {
            let mut bytes = footer.to_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Footer::parse(&bytes).is_err());
        }

        #[test]
        fn arbitrary_fields_never_panic(noise in proptest::collection::vec(any::<u8>(), 512)) {
            let mut bytes: [u8; 512] = noise.try_into().unwrap();
            let _ = Footer::parse(&bytes);
            put(&mut bytes, 0, COOKIE);
            put(&mut bytes, 12, &VERSION.to_be_bytes());
            put(&mut bytes, 60, &3u32.to_be_bytes());
            if let Ok(footer) = Footer::parse(&resummed(bytes)) {
                prop_assert!(footer.current_size_bytes <= MAX_SIZE_BYTES);
            }
        }
    }
}
