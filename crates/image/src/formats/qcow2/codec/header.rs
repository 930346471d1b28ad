//! The header: the first bytes of the first cluster, in version 2 (72 bytes) and version 3 (104 bytes and more).

use std::ops::Range;

use super::extension::FeatureName;
use super::{
    CodecError, MAX_CLUSTER_BITS, MAX_L1_BYTES, MAX_NAME_BYTES, MAX_REFCOUNT_TABLE_BYTES, MIN_CLUSTER_BITS,
    MIN_EXTENDED_CLUSTER_BITS, array, be32, be64, check_offset, need, put,
};

const MAGIC: [u8; 4] = *b"QFI\xfb";
/// The length of a header of version 2.
const V2_BYTES: usize = 72;
/// The least length of a header of version 3.
const V3_BYTES: usize = 104;
/// Where the compression type is, if the header is long enough.
const COMPRESSION_AT: usize = 104;
/// The most snapshots of an image, as in QEMU.
pub const MAX_SNAPSHOTS: u32 = 65536;

/// Feature bits in the header.
pub mod feature {
    /// Incompatible: refcounts may be wrong.
    pub const DIRTY: u64 = 1 << 0;
    /// Incompatible: any structure may be wrong, and nothing may be written.
    pub const CORRUPT: u64 = 1 << 1;
    /// Incompatible: guest data are in another file.
    pub const DATA_FILE: u64 = 1 << 2;
    /// Incompatible: the compression is not deflate.
    pub const COMPRESSION: u64 = 1 << 3;
    /// Incompatible: L2 entries have 128 bits.
    pub const EXTENDED_L2: u64 = 1 << 4;
    /// All incompatible features that are known.
    pub const KNOWN_INCOMPATIBLE: u64 = 0x1f;
    /// Compatible: refcounts may be written late.
    pub const LAZY_REFCOUNTS: u64 = 1 << 0;
    /// Autoclear: the bitmaps are consistent.
    pub const BITMAPS: u64 = 1 << 0;
    /// Autoclear: the data file is the disk's content as it is.
    pub const RAW_DATA_FILE: u64 = 1 << 1;
    /// All autoclear features that are known.
    pub const KNOWN_AUTOCLEAR: u64 = 3;
}

/// How the guest's data are encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encryption {
    /// Not at all.
    None,
    /// AES in CBC mode: broken, and given up by QEMU.
    Aes,
    /// LUKS.
    Luks,
}

/// How compressed clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compression {
    /// Deflate without a zlib header (QEMU calls it "zlib").
    Deflate,
    /// Zstandard.
    Zstd,
}

/// Where the name of the backing file lies in the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NamePlace {
    /// In the first cluster, in bytes from the start of the file.
    pub offset: u64,
    /// In bytes.
    pub len_bytes: u32,
}

impl NamePlace {
    /// The bytes of the name.
    pub fn range(&self) -> Range<usize> {
        self.offset as usize..self.offset as usize + self.len_bytes as usize
    }
}

/// The header of an image. The offsets are not yet checked against each other: [`Header::check`] does that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// The backing file's name; `None` when its offset is zero: then there is no backing file.
    pub backing: Option<NamePlace>,
    /// What the header has in the place of the name's length where there is no backing file. It means nothing.
    pub stray_name_bytes: u32,
    /// The cluster size as a power of two, 9 to 21.
    pub cluster_bits: u32,
    /// The size of the virtual disk in bytes.
    pub size_bytes: u64,
    /// 0 none, 1 AES, 2 LUKS.
    pub crypt_method: u32,
    /// Entries of the active L1 table.
    pub l1_entries: u32,
    /// Where the active L1 table starts.
    pub l1_offset: u64,
    /// Where the refcount table starts.
    pub refcount_table_offset: u64,
    /// How many clusters the refcount table has.
    pub refcount_table_clusters: u32,
    /// How many internal snapshots there are.
    pub snapshots: u32,
    /// Where the snapshot table starts.
    pub snapshots_offset: u64,
    /// Features without which the image cannot be read ([`feature`]).
    pub incompatible: u64,
    /// Features that a program may ignore.
    pub compatible: u64,
    /// Features that a program clears before it writes, unless it knows them.
    pub autoclear: u64,
    /// The width of a refcount in bits, as a power of two, 0 to 6.
    pub refcount_order: u32,
    /// Length of the header in bytes; extensions start there.
    pub header_bytes: u32,
    /// The byte of the compression type; 0 when there is none.
    pub compression_type: u8,
    /// What the header has behind the compression type, kept for whoever writes the header again.
    pub more: Vec<u8>,
}

impl Header {
    /// Reads the header at the start of `bytes`, which are the first bytes of the file: 104 or more, up to a cluster.
    ///
    /// # Errors
    /// `TooShort`, `Magic`, `Version`, `ClusterBits`, `HeaderLength`, `RefcountOrder`.
    pub fn parse(bytes: &[u8]) -> Result<Self, CodecError> {
        let cluster_bits = Self::cluster_bits_of(bytes)?;
        match be32(bytes, 4) {
            2 => Ok(Self::base(bytes, 2, cluster_bits)),
            version => Self::base(bytes, version, cluster_bits).with_features(bytes),
        }
    }

    /// The cluster size of the image that begins with `bytes`, as a power of two. 72 bytes are enough, where
    /// [`Header::parse`] needs the whole header, which may be as long as a cluster.
    ///
    /// # Errors
    /// `TooShort`, `Magic`, `Version`, `ClusterBits`.
    pub fn cluster_bits_of(bytes: &[u8]) -> Result<u32, CodecError> {
        need("header", bytes, V2_BYTES)?;
        if bytes[..4] != MAGIC {
            return Err(CodecError::Magic(array(bytes, 0)));
        }
        let (version, cluster_bits) = (be32(bytes, 4), be32(bytes, 20));
        match version {
            2 | 3 if (MIN_CLUSTER_BITS..=MAX_CLUSTER_BITS).contains(&cluster_bits) => Ok(cluster_bits),
            2 | 3 => Err(CodecError::ClusterBits(cluster_bits)),
            _ => Err(CodecError::Version(version)),
        }
    }

    /// The fields of both versions, and what version 2 has in place of the others.
    fn base(bytes: &[u8], version: u32, cluster_bits: u32) -> Self {
        let place = NamePlace { offset: be64(bytes, 8), len_bytes: be32(bytes, 16) };
        Self {
            version,
            backing: (place.offset != 0).then_some(place),
            stray_name_bytes: if place.offset == 0 { place.len_bytes } else { 0 },
            cluster_bits,
            size_bytes: be64(bytes, 24),
            crypt_method: be32(bytes, 32),
            l1_entries: be32(bytes, 36),
            l1_offset: be64(bytes, 40),
            refcount_table_offset: be64(bytes, 48),
            refcount_table_clusters: be32(bytes, 56),
            snapshots: be32(bytes, 60),
            snapshots_offset: be64(bytes, 64),
            incompatible: 0,
            compatible: 0,
            autoclear: 0,
            refcount_order: 4,
            header_bytes: V2_BYTES as u32,
            compression_type: 0,
            more: Vec::new(),
        }
    }

    /// Adds the fields of version 3.
    fn with_features(mut self, bytes: &[u8]) -> Result<Self, CodecError> {
        need("header", bytes, V3_BYTES)?;
        self.incompatible = be64(bytes, 72);
        self.compatible = be64(bytes, 80);
        self.autoclear = be64(bytes, 88);
        self.refcount_order = be32(bytes, 96);
        self.header_bytes = be32(bytes, 100);
        let len = self.header_bytes as usize;
        if len < V3_BYTES || len > self.cluster_bytes() as usize || !len.is_multiple_of(8) {
            return Err(CodecError::HeaderLength(self.header_bytes));
        }
        if self.refcount_order > 6 {
            return Err(CodecError::RefcountOrder(self.refcount_order));
        }
        need("header", bytes, len)?;
        if len > COMPRESSION_AT {
            self.compression_type = bytes[COMPRESSION_AT];
            self.more = bytes[COMPRESSION_AT + 1..len].to_vec();
        }
        Ok(self)
    }

    /// The bytes of the header, `header_bytes` long.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = vec![0; self.header_bytes as usize];
        let place = self.backing.unwrap_or(NamePlace { offset: 0, len_bytes: self.stray_name_bytes });
        put(&mut out, 0, &MAGIC);
        put(&mut out, 4, &self.version.to_be_bytes());
        put(&mut out, 8, &place.offset.to_be_bytes());
        put(&mut out, 16, &place.len_bytes.to_be_bytes());
        put(&mut out, 20, &self.cluster_bits.to_be_bytes());
        put(&mut out, 24, &self.size_bytes.to_be_bytes());
        put(&mut out, 32, &self.crypt_method.to_be_bytes());
        put(&mut out, 36, &self.l1_entries.to_be_bytes());
        put(&mut out, 40, &self.l1_offset.to_be_bytes());
        put(&mut out, 48, &self.refcount_table_offset.to_be_bytes());
        put(&mut out, 56, &self.refcount_table_clusters.to_be_bytes());
        put(&mut out, 60, &self.snapshots.to_be_bytes());
        put(&mut out, 64, &self.snapshots_offset.to_be_bytes());
        if self.version >= 3 {
            put(&mut out, 72, &self.incompatible.to_be_bytes());
            put(&mut out, 80, &self.compatible.to_be_bytes());
            put(&mut out, 88, &self.autoclear.to_be_bytes());
            put(&mut out, 96, &self.refcount_order.to_be_bytes());
            put(&mut out, 100, &self.header_bytes.to_be_bytes());
        }
        if out.len() > COMPRESSION_AT {
            out[COMPRESSION_AT] = self.compression_type;
            put(&mut out, COMPRESSION_AT + 1, &self.more);
        }
        out
    }

    /// Checks what the header's fields say of each other. `names` is the image's own table of feature names, for the
    /// message when it needs a feature that is not known here.
    ///
    /// The refcount table and the snapshots are not part of it: an image can be read without them
    /// ([`Header::check_refcount_table`], [`Header::check_snapshots`]).
    ///
    /// # Errors
    /// Which field is wrong; `UnknownFeatures` before anything else.
    pub fn check(&self, names: &[FeatureName]) -> Result<(), CodecError> {
        self.check_features(names)?;
        self.encryption()?;
        self.check_compression()?;
        if self.has(feature::EXTENDED_L2) && self.cluster_bits < MIN_EXTENDED_CLUSTER_BITS {
            return Err(CodecError::ClusterBits(self.cluster_bits));
        }
        self.check_l1()?;
        self.check_backing()
    }

    fn check_features(&self, names: &[FeatureName]) -> Result<(), CodecError> {
        let unknown = self.incompatible & !feature::KNOWN_INCOMPATIBLE;
        if unknown == 0 {
            return Ok(());
        }
        let of_bit = |bit: u32| match names.iter().find(|name| name.kind == 0 && u32::from(name.bit) == bit) {
            Some(name) => format!("{} (bit {bit})", name.text()),
            None => format!("bit {bit}"),
        };
        let list: Vec<String> = (0..64).filter(|bit| unknown >> bit & 1 == 1).map(of_bit).collect();
        Err(CodecError::UnknownFeatures(list.join(", ")))
    }

    fn check_compression(&self) -> Result<(), CodecError> {
        let (kind, bit) = (self.compression_type, self.has(feature::COMPRESSION));
        match kind {
            _ if (kind != 0) != bit => Err(CodecError::CompressionBit { kind, bit }),
            0 | 1 => Ok(()),
            _ => Err(CodecError::CompressionType(kind)),
        }
    }

    fn check_l1(&self) -> Result<(), CodecError> {
        if u64::from(self.l1_entries) * 8 > MAX_L1_BYTES {
            return Err(CodecError::L1TooLarge(self.l1_entries));
        }
        let (entries, size_bytes, needed) = (self.l1_entries, self.size_bytes, self.needed_l1_entries());
        if u64::from(entries) < needed {
            return Err(CodecError::L1TooSmall { entries, size_bytes, needed });
        }
        match entries {
            0 => Ok(()),
            _ => check_offset("L1 table", self.l1_offset, self.cluster_bits),
        }
    }

    /// An offset without a length is refused: the image says that it has a backing file, and would read zeroes in its place.
    fn check_backing(&self) -> Result<(), CodecError> {
        let Some(NamePlace { offset, len_bytes }) = self.backing else { return Ok(()) };
        let end = offset.checked_add(u64::from(len_bytes));
        let is_inside = offset >= u64::from(self.header_bytes) && end.is_some_and(|end| end <= self.cluster_bytes());
        match len_bytes as usize {
            1..=MAX_NAME_BYTES if is_inside => Ok(()),
            _ => Err(CodecError::BackingName { offset, len_bytes }),
        }
    }

    /// Checks where the refcount table lies.
    ///
    /// # Errors
    /// `TableOffset`, `RefcountTableClusters`.
    pub fn check_refcount_table(&self) -> Result<(), CodecError> {
        let clusters = self.refcount_table_clusters;
        match clusters {
            0 => Err(CodecError::RefcountTableClusters(0)),
            _ if u64::from(clusters) << self.cluster_bits > MAX_REFCOUNT_TABLE_BYTES => {
                Err(CodecError::RefcountTableClusters(clusters))
            }
            _ => check_offset("refcount table", self.refcount_table_offset, self.cluster_bits),
        }
    }

    /// Checks where the snapshot table lies.
    ///
    /// # Errors
    /// `SnapshotCount`, `TableOffset`.
    pub fn check_snapshots(&self) -> Result<(), CodecError> {
        match self.snapshots {
            0 => Ok(()),
            1..=MAX_SNAPSHOTS => check_offset("snapshot table", self.snapshots_offset, self.cluster_bits),
            count => Err(CodecError::SnapshotCount(count)),
        }
    }

    /// True when the image has the incompatible feature `bit`.
    pub fn has(&self, bit: u64) -> bool {
        self.incompatible & bit != 0
    }

    /// The cluster size in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// The length of an L2 entry in bytes, as a power of two.
    pub fn l2_entry_bits(&self) -> u32 {
        if self.has(feature::EXTENDED_L2) { 4 } else { 3 }
    }

    /// The guest bytes that one L2 table covers, as a power of two.
    pub fn l2_coverage_bits(&self) -> u32 {
        2 * self.cluster_bits - self.l2_entry_bits()
    }

    /// The L1 entries that the virtual size needs.
    pub fn needed_l1_entries(&self) -> u64 {
        self.size_bytes.div_ceil(1 << self.l2_coverage_bits())
    }

    /// How the data are encrypted.
    ///
    /// # Errors
    /// `CryptMethod` when that is not known.
    pub fn encryption(&self) -> Result<Encryption, CodecError> {
        match self.crypt_method {
            0 => Ok(Encryption::None),
            1 => Ok(Encryption::Aes),
            2 => Ok(Encryption::Luks),
            other => Err(CodecError::CryptMethod(other)),
        }
    }

    /// How compressed clusters are compressed.
    pub fn compression(&self) -> Compression {
        if self.has(feature::COMPRESSION) { Compression::Zstd } else { Compression::Deflate }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A sound header of version 3: 64 KiB clusters, 1 GiB.
    fn sample() -> Header {
        Header {
            version: 3,
            backing: None,
            stray_name_bytes: 0,
            cluster_bits: 16,
            size_bytes: 1 << 30,
            crypt_method: 0,
            l1_entries: 2,
            l1_offset: 3 << 16,
            refcount_table_offset: 1 << 16,
            refcount_table_clusters: 1,
            snapshots: 0,
            snapshots_offset: 0,
            incompatible: 0,
            compatible: 0,
            autoclear: 0,
            refcount_order: 4,
            header_bytes: 112,
            compression_type: 0,
            more: vec![0; 7],
        }
    }

    #[track_caller]
    fn refused(change: impl FnOnce(&mut Header), expected: CodecError) {
        let mut header = sample();
        change(&mut header);
        let parsed = Header::parse(&header.to_bytes());
        assert_eq!(parsed.and_then(|header| header.check(&[])), Err(expected));
    }

    #[test]
    fn a_sound_header_is_accepted_and_written_the_same() {
        let header = sample();
        let parsed = Header::parse(&header.to_bytes()).unwrap();
        assert_eq!(parsed, header);
        assert_eq!(
            (parsed.check(&[]), parsed.check_refcount_table(), parsed.check_snapshots()),
            (Ok(()), Ok(()), Ok(()))
        );
        assert_eq!((parsed.cluster_bytes(), parsed.l2_coverage_bits(), parsed.needed_l1_entries()), (65536, 29, 2));
    }

    #[test]
    fn version_2_has_no_features_and_counts_of_16_bits() {
        let header = Header { version: 2, header_bytes: 72, more: Vec::new(), ..sample() };
        let mut bytes = header.to_bytes();
        bytes.extend([0xff; 40]);
        let parsed = Header::parse(&bytes).unwrap();
        assert_eq!(parsed, header);
        assert_eq!((parsed.incompatible, parsed.refcount_order, parsed.compression()), (0, 4, Compression::Deflate));
    }

    #[test]
    fn single_fields_that_are_wrong_are_named() {
        refused(|h| h.version = 4, CodecError::Version(4));
        refused(|h| h.cluster_bits = 22, CodecError::ClusterBits(22));
        refused(|h| h.refcount_order = 7, CodecError::RefcountOrder(7));
        refused(|h| h.crypt_method = 3, CodecError::CryptMethod(3));
        refused(|h| h.l1_offset = 512, CodecError::TableOffset { what: "L1 table", offset: 512 });
        refused(|h| h.l1_offset = 1 << 57, CodecError::TableOffset { what: "L1 table", offset: 1 << 57 });
        refused(|h| h.l1_entries = (4 << 20) + 1, CodecError::L1TooLarge((4 << 20) + 1));
        let needed = 1 << 35;
        refused(|h| h.size_bytes = u64::MAX, CodecError::L1TooSmall { entries: 2, size_bytes: u64::MAX, needed });
    }

    #[test]
    fn the_length_of_a_name_means_nothing_where_there_is_no_name() {
        let header = Header { stray_name_bytes: 23, ..sample() };
        let parsed = Header::parse(&header.to_bytes()).unwrap();
        assert_eq!((parsed.backing, parsed.stray_name_bytes, parsed.check(&[])), (None, 23, Ok(())));
        let place = NamePlace { offset: 200, len_bytes: 0 };
        refused(|h| h.backing = Some(place), CodecError::BackingName { offset: 200, len_bytes: 0 });
    }

    #[test]
    fn tables_that_reading_does_without_are_checked_apart() {
        let header = Header { refcount_table_clusters: 0, snapshots: 65537, ..sample() };
        assert_eq!(header.check(&[]), Ok(()));
        assert_eq!(header.check_refcount_table(), Err(CodecError::RefcountTableClusters(0)));
        assert_eq!(header.check_snapshots(), Err(CodecError::SnapshotCount(65537)));
        let header = Header { refcount_table_clusters: 129, ..sample() };
        assert_eq!(header.check_refcount_table(), Err(CodecError::RefcountTableClusters(129)));
    }

    proptest! {
        /// Whatever the fields are, a header that is accepted is written and read the same.
        #[test]
        fn what_is_written_is_read(
            version in 2u32..4, cluster_bits in 9u32..22, fields in any::<[u64; 5]>(), counts in any::<[u32; 5]>(),
            order in 0u32..7, more in proptest::collection::vec(any::<u8>(), 0..3)
        ) {
            let mut header = Header { version, cluster_bits, size_bytes: fields[0], ..sample() };
            (header.l1_offset, header.snapshots_offset) = (fields[1], fields[2]);
            (header.refcount_table_offset, header.crypt_method) = (fields[3], counts[0]);
            (header.l1_entries, header.refcount_table_clusters, header.snapshots) = (counts[1], counts[2], counts[3]);
            match fields[4] {
                0 => header.stray_name_bytes = counts[4],
                offset => header.backing = Some(NamePlace { offset, len_bytes: counts[4] }),
            }
            match version {
                2 => (header.header_bytes, header.more) = (72, Vec::new()),
                _ => {
                    header.refcount_order = order;
                    header.incompatible = fields[4];
                    header.header_bytes = 112 + 8 * more.len() as u32;
                    header.more.extend(more.iter().flat_map(|byte| [*byte; 8]));
                }
            }
            let bytes = header.to_bytes();
            prop_assert_eq!(bytes.len(), header.header_bytes as usize);
            prop_assert_eq!(Header::parse(&bytes), Ok(header));
        }
    }
}
