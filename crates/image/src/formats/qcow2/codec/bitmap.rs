//! Persistent bitmaps: the extension that says where their directory is, the directory's entries, and the tables of
//! clusters that hold the bits.

use super::{CodecError, OFFSET_MASK, be16, be32, be64, check_offset, is_cluster_aligned, need, put};

/// The length of the extension.
const EXTENSION_BYTES: usize = 24;
/// The fixed part of a directory entry.
const FIXED_BYTES: usize = 24;
/// The largest directory that is read, in bytes, as in QEMU.
const MAX_DIRECTORY_BYTES: u64 = 64 << 20;
/// The most bitmaps of an image, as in QEMU.
const MAX_BITMAPS: u32 = 65535;
/// The most entries of a bitmap's table, as in QEMU.
const MAX_TABLE_ENTRIES: u32 = 0x0800_0000;
/// The only kind of bitmap there is: the one that tracks changes.
const DIRTY_TRACKING: u8 = 1;

/// Where the directory of bitmaps is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapsExtension {
    /// How many bitmaps there are.
    pub count: u32,
    /// The length of the directory in bytes.
    pub directory_bytes: u64,
    /// Where the directory starts.
    pub directory_offset: u64,
}

impl BitmapsExtension {
    /// Reads the extension's data.
    ///
    /// # Errors
    /// `ExtensionField`, `TableOffset`.
    pub fn parse(data: &[u8], cluster_bits: u32) -> Result<Self, CodecError> {
        let wrong = |field, value| Err(CodecError::ExtensionField { what: "bitmaps", field, value });
        if data.len() != EXTENSION_BYTES {
            return wrong("length", data.len() as u64);
        }
        let (count, reserved, directory_bytes) = (be32(data, 0), be32(data, 4), be64(data, 8));
        let directory_offset = be64(data, 16);
        if !(1..=MAX_BITMAPS).contains(&count) {
            return wrong("count", u64::from(count));
        }
        if reserved != 0 {
            return wrong("reserved field", u64::from(reserved));
        }
        if !(FIXED_BYTES as u64..=MAX_DIRECTORY_BYTES).contains(&directory_bytes) {
            return wrong("directory length", directory_bytes);
        }
        check_offset("bitmap directory", directory_offset, cluster_bits)?;
        Ok(Self { count, directory_bytes, directory_offset })
    }

    /// The extension's data.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = vec![0; EXTENSION_BYTES];
        put(&mut out, 0, &self.count.to_be_bytes());
        put(&mut out, 8, &self.directory_bytes.to_be_bytes());
        put(&mut out, 16, &self.directory_offset.to_be_bytes());
        out
    }
}

/// Flags of a bitmap.
pub mod flag {
    /// The bitmap was not saved at the end: its bits are not to be trusted.
    pub const IN_USE: u32 = 1 << 0;
    /// Every write must be noted in it.
    pub const AUTO: u32 = 1 << 1;
    /// It may be used although its extra data are not known.
    pub const EXTRA_COMPATIBLE: u32 = 1 << 2;
    /// All flags that are known.
    pub const KNOWN: u32 = 7;
}

/// An entry of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// Where its table starts.
    pub table_offset: u64,
    /// Entries of its table.
    pub table_entries: u32,
    /// [`flag`]s.
    pub flags: u32,
    /// 1: tracks changes.
    pub kind: u8,
    /// Guest bytes of one bit, as a power of two.
    pub granularity_bits: u8,
    /// Data that only the bitmap's writer knows.
    pub extra: Vec<u8>,
    /// Its name.
    pub name: Vec<u8>,
}

impl Bitmap {
    /// Reads the entry at the start of `bytes`; returns how long it is with its padding. Its content is not yet checked:
    /// [`Bitmap::check`] does that.
    ///
    /// # Errors
    /// `TooShort`.
    pub fn parse(bytes: &[u8]) -> Result<(Self, usize), CodecError> {
        need("bitmap directory entry", bytes, FIXED_BYTES)?;
        let extra_end = FIXED_BYTES.saturating_add(be32(bytes, 20) as usize);
        let name_end = extra_end.saturating_add(usize::from(be16(bytes, 18)));
        need("bitmap directory entry", bytes, name_end)?;
        let bitmap = Self {
            table_offset: be64(bytes, 0),
            table_entries: be32(bytes, 8),
            flags: be32(bytes, 12),
            kind: bytes[16],
            granularity_bits: bytes[17],
            extra: bytes[FIXED_BYTES..extra_end].to_vec(),
            name: bytes[extra_end..name_end].to_vec(),
        };
        Ok((bitmap, name_end.next_multiple_of(8)))
    }

    /// The bytes of the entry with its padding.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = vec![0; FIXED_BYTES];
        put(&mut out, 0, &self.table_offset.to_be_bytes());
        put(&mut out, 8, &self.table_entries.to_be_bytes());
        put(&mut out, 12, &self.flags.to_be_bytes());
        (out[16], out[17]) = (self.kind, self.granularity_bits);
        put(&mut out, 18, &(self.name.len() as u16).to_be_bytes());
        put(&mut out, 20, &(self.extra.len() as u32).to_be_bytes());
        out.extend(&self.extra);
        out.extend(&self.name);
        out.resize(out.len().next_multiple_of(8), 0);
        out
    }

    /// Checks what the entry says, for a disk of `size_bytes`.
    ///
    /// # Errors
    /// `BitmapField`, `TableOffset`, `Name`.
    pub fn check(&self, size_bytes: u64, cluster_bits: u32) -> Result<(), CodecError> {
        let wrong = |field, value| Err(CodecError::BitmapField { field, value });
        if self.name.is_empty() {
            return Err(CodecError::Name("bitmap name"));
        }
        if self.flags & !flag::KNOWN != 0 {
            return wrong("flags", u64::from(self.flags));
        }
        if self.kind != DIRTY_TRACKING {
            return wrong("type", u64::from(self.kind));
        }
        if self.granularity_bits > 63 {
            return wrong("granularity", u64::from(self.granularity_bits));
        }
        // The table of one that is in use may be as long as the disk was once.
        let is_long = match self.flags & flag::IN_USE {
            0 => u64::from(self.table_entries) != self.needed_entries(size_bytes, cluster_bits),
            _ => self.table_entries > MAX_TABLE_ENTRIES,
        };
        if is_long {
            return wrong("table length", u64::from(self.table_entries));
        }
        match self.table_entries {
            0 => Ok(()),
            _ => check_offset("bitmap table", self.table_offset, cluster_bits),
        }
    }

    /// How many entries its table has when its bits are those of a disk of `size_bytes`.
    pub fn needed_entries(&self, size_bytes: u64, cluster_bits: u32) -> u64 {
        let bits = size_bytes.div_ceil(1 << self.granularity_bits);
        bits.div_ceil(8).div_ceil(1 << cluster_bits)
    }

    /// True when its bits may be believed, in an image whose bitmaps are consistent as a whole.
    pub fn is_usable(&self) -> bool {
        self.flags & flag::IN_USE == 0 && self.knows_extra()
    }

    /// True when it has no data that matter and are not known.
    pub fn knows_extra(&self) -> bool {
        self.extra.is_empty() || self.flags & flag::EXTRA_COMPATIBLE != 0
    }
}

/// What an entry of a bitmap's table says of one cluster of bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// All bits are 0.
    Clear,
    /// All bits are 1.
    Set,
    /// The bits are at that offset of the image.
    At(u64),
}

impl Bits {
    /// What `entry` says.
    ///
    /// # Errors
    /// `BitmapField` when reserved bits are set or the offset is not that of a cluster.
    pub fn parse(entry: u64, cluster_bits: u32) -> Result<Self, CodecError> {
        match entry {
            0 => Ok(Self::Clear),
            1 => Ok(Self::Set),
            _ if entry & !OFFSET_MASK == 0 && is_cluster_aligned(entry, cluster_bits) => Ok(Self::At(entry)),
            value => Err(CodecError::BitmapField { field: "table entry", value }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Bitmap {
        Bitmap {
            table_offset: 1 << 20,
            table_entries: 1,
            flags: flag::AUTO,
            kind: 1,
            granularity_bits: 16,
            extra: Vec::new(),
            name: b"changes".to_vec(),
        }
    }

    #[test]
    fn single_fields_that_are_wrong_are_named() {
        let field = |change: fn(&mut Bitmap)| {
            let mut bitmap = sample();
            change(&mut bitmap);
            bitmap.check(1 << 30, 16)
        };
        assert_eq!(field(|_| ()), Ok(()));
        let wrong = |field, value| Err(CodecError::BitmapField { field, value });
        assert_eq!(field(|b| b.flags = 8), wrong("flags", 8));
        assert_eq!(field(|b| b.granularity_bits = 200), wrong("granularity", 200));
        assert_eq!(field(|b| b.granularity_bits = 3), wrong("table length", 1));
        assert_eq!(field(|b| b.kind = 2), wrong("type", 2));
        assert_eq!(field(|b| b.name.clear()), Err(CodecError::Name("bitmap name")));
        assert!(field(|b| b.table_offset = 5).is_err());
    }

    #[test]
    fn bits_in_use_and_with_unknown_data_are_not_believed() {
        let usable = |change: fn(&mut Bitmap)| {
            let mut bitmap = sample();
            change(&mut bitmap);
            bitmap.is_usable()
        };
        assert!(usable(|_| ()));
        assert!(!usable(|b| b.flags = flag::IN_USE));
        assert!(!usable(|b| b.extra = vec![1]));
        assert!(usable(|b| (b.extra, b.flags) = (vec![1], flag::EXTRA_COMPATIBLE)));
    }

    #[test]
    fn table_entries() {
        assert_eq!((Bits::parse(0, 16), Bits::parse(1, 16)), (Ok(Bits::Clear), Ok(Bits::Set)));
        assert_eq!(Bits::parse(1 << 16, 16), Ok(Bits::At(1 << 16)));
        assert!(Bits::parse(1 << 16 | 1, 16).is_err() && Bits::parse(1 << 60, 16).is_err());
    }

    #[test]
    fn the_extension_is_bounded() {
        let good = BitmapsExtension { count: 1, directory_bytes: 32, directory_offset: 1 << 16 };
        assert_eq!(BitmapsExtension::parse(&good.to_bytes(), 16), Ok(good));
        let parse = |other: BitmapsExtension| BitmapsExtension::parse(&other.to_bytes(), 16);
        assert!(parse(BitmapsExtension { count: 0, ..good }).is_err());
        assert!(parse(BitmapsExtension { directory_bytes: 1 << 60, ..good }).is_err());
        assert!(parse(BitmapsExtension { directory_offset: 77, ..good }).is_err());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            numbers in any::<(u64, u32, u32, u8, u8)>(), extra in proptest::collection::vec(any::<u8>(), 0..20),
            name in proptest::collection::vec(any::<u8>(), 0..20)
        ) {
            let (table_offset, table_entries, flags, kind, granularity_bits) = numbers;
            let bitmap = Bitmap { table_offset, table_entries, flags, kind, granularity_bits, extra, name };
            let bytes = bitmap.to_bytes();
            let len = bytes.len();
            prop_assert_eq!(Bitmap::parse(&bytes), Ok((bitmap, len)));
        }
    }
}
