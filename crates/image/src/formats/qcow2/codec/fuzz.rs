//! What the fuzz targets call: each takes arbitrary bytes, and panics only when a rule of the codec is broken.

use super::bitmap::{Bitmap, BitmapsExtension, Bits, flag};
use super::extension::{Extensions, feature_names_of};
use super::header::{Compression, Header};
use super::refcount;
use super::snapshot::{MAX_ENTRY_BYTES, Snapshot};
use super::stream::Decompressor;
use super::table::{Cluster, Rules, decode};

/// A header that is accepted is written and read back the same; one that also passes its checks keeps its L1 table and
/// its backing file's name within their limits. Extensions that are accepted are written and read back the same.
pub fn fuzz_header(bytes: &[u8]) {
    let Ok(header) = Header::parse(bytes) else { return };
    assert_eq!(Header::parse(&header.to_bytes()).as_ref(), Ok(&header));
    let area = &bytes[bytes.len().min(header.header_bytes as usize)..];
    let names = feature_names_of(area);
    assert!(names.len() * 48 <= area.len());
    if let Ok(found) = Extensions::parse(area, header.cluster_bits) {
        let again = Extensions::parse(&found.to_bytes(), header.cluster_bits);
        assert_eq!(again.as_ref(), Ok(&found));
    }
    if header.check(&names).is_ok() {
        assert!(header.needed_l1_entries() <= u64::from(header.l1_entries));
        assert!(header.l1_offset.checked_add(u64::from(header.l1_entries) * 8).is_some());
        assert!(header.backing.is_none_or(|place| place.range().end as u64 <= header.cluster_bytes()));
    }
}

/// An entry that is accepted says the same when it is written again, and never points past 2^57. The first byte chooses
/// the cluster size, the second the kind of image.
pub fn fuzz_table(bytes: &[u8]) {
    let [bits, kind, table @ ..] = bytes else { return };
    let (extended, data_file) = (kind & 1 != 0, kind & 2 != 0);
    let rules =
        Rules { cluster_bits: 9 + u32::from(bits % 13), version: 2 + u32::from(kind >> 2 & 1), extended, data_file };
    let entries: Vec<u64> = decode(table).collect();
    for pair in entries.windows(2) {
        if let Ok(Some(offset)) = rules.l2_table(pair[0]) {
            assert!(offset < 1 << 56 && offset >> rules.cluster_bits << rules.cluster_bits == offset);
        }
        let bitmap = if extended { pair[1] } else { 0 };
        let Ok(cluster) = rules.cluster(pair[0], bitmap) else { continue };
        if let Cluster::Compressed(found) = cluster {
            assert!(found.offset + found.len_bytes < 1 << 57 && found.len_bytes <= 2 << rules.cluster_bits);
        }
        let (entry, bitmap) = rules.encode(cluster);
        assert_eq!(rules.cluster(entry, bitmap), Ok(cluster));
    }
}

/// Each count of a block can be read; written again, it changes nothing. The first byte chooses the width.
pub fn fuzz_refcount(bytes: &[u8]) {
    let [order, block @ ..] = bytes else { return };
    let order = u32::from(order % 7);
    let mut again = block.to_vec();
    for index in 0..(block.len() as u64 * 8) >> order {
        let count = refcount::get(block, order, index);
        assert!(refcount::set(&mut again, order, index, count));
    }
    assert_eq!(again, block);
}

/// Snapshots that are accepted are written and read back the same, one after the other.
pub fn fuzz_snapshots(bytes: &[u8]) {
    let mut rest = bytes;
    while let Ok((snapshot, len)) = Snapshot::parse(rest) {
        assert!(len <= MAX_ENTRY_BYTES && (40..=len).contains(&snapshot.to_bytes().len()));
        assert_eq!(Snapshot::parse(&snapshot.to_bytes()).as_ref(), Ok(&(snapshot, len)));
        rest = rest.get(len..).unwrap_or_default();
    }
}

/// Bitmaps that are accepted are written and read back the same; one that passes its checks and is not in use has a table of the disk's
/// size. The bytes are read as a directory, as an extension and as a table.
pub fn fuzz_bitmaps(bytes: &[u8]) {
    let mut rest = bytes;
    while let Ok((bitmap, len)) = Bitmap::parse(rest) {
        assert_eq!(Bitmap::parse(&bitmap.to_bytes()).as_ref(), Ok(&(bitmap.clone(), len)));
        if bitmap.check(1 << 30, 16).is_ok() && bitmap.flags & flag::IN_USE == 0 {
            assert!(u64::from(bitmap.table_entries) << 19 <= (1 << 30) + (1 << 19));
        }
        rest = rest.get(len..).unwrap_or_default();
    }
    if let Ok(found) = BitmapsExtension::parse(bytes, 16) {
        assert_eq!(found.to_bytes(), bytes);
    }
    for entry in decode(bytes) {
        if let Ok(Bits::At(offset)) = Bits::parse(entry, 16) {
            assert_eq!(offset, entry);
        }
    }
}

/// A stream gives a whole cluster or an error, after a bounded number of steps. The first byte chooses compression and
/// cluster size, the rest is the stream.
pub fn fuzz_stream(bytes: &[u8]) {
    let [kind, input @ ..] = bytes else { return };
    let compression = if kind & 1 == 0 { Compression::Deflate } else { Compression::Zstd };
    let cluster_bytes = 512 << ((kind >> 1) % 9);
    let mut decompressor = Decompressor::new(compression, cluster_bytes);
    for _ in 0..input.len() + 8 {
        match decompressor.step(input) {
            Ok(true) => {
                assert_eq!(decompressor.into_cluster().len(), cluster_bytes);
                return;
            }
            Ok(false) => {}
            Err(_) => return,
        }
    }
    panic!("a stream of {} bytes goes on for ever", input.len());
}
