//! What the fuzz targets call: each takes arbitrary bytes, and panics only when a rule of the codec is broken.
//!
//! The checksum would keep a fuzzer from everything behind it, so each input is tried twice: as it is, and with a
//! checksum that fits.

use super::bat::{self, Rules};
use super::batmap::{self, BatmapHeader};
use super::footer::Footer;
use super::header::Header;
use super::locator::{Locator, MAX_PATH_BYTES, Platform, encode};
use super::{MAX_SIZE_BYTES, array, checksum, put};

/// A footer that is accepted is written and read back the same, and its sizes are within the limit.
pub fn fuzz_footer(bytes: &[u8]) {
    for bytes in [bytes.to_vec(), resummed(bytes, Footer::LEN, 64)] {
        let Ok(footer) = Footer::parse(&bytes) else { continue };
        assert!(footer.current_size_bytes <= MAX_SIZE_BYTES);
        assert_eq!(Footer::parse(&footer.to_bytes()).as_ref(), Ok(&footer));
    }
}

/// A header that is accepted is written and read back the same, and its BAT's end does not overflow.
pub fn fuzz_header(bytes: &[u8]) {
    for bytes in [bytes.to_vec(), resummed(bytes, Header::LEN, 36)] {
        let Ok(header) = Header::parse(&bytes) else { continue };
        assert!(header.bat_end_bytes() <= i64::MAX as u64);
        assert_eq!(Header::parse(&header.to_bytes()).as_ref(), Ok(&header));
    }
}

/// A table is decoded and encoded the same; a block without a fault lies within the file; a table whose blocks do
/// not overlap has no two entries alike. The first byte chooses the block size, the next two the file's length.
pub fn fuzz_bat(bytes: &[u8]) {
    let [size, end_high, end_low, table @ ..] = bytes else { return };
    let block_size_bytes = 1 << (12 + size % 17);
    let end_bytes = u64::from(u16::from_be_bytes([*end_high, *end_low])) << 24;
    let entries: Vec<u32> = bat::decode(table).collect();
    let encoded = bat::encode(&entries);
    assert_eq!(&encoded[..entries.len() * 4], &table[..entries.len() * 4]);
    let metadata = [0..1536, 1536..1536 + encoded.len() as u64];
    let rules = Rules { block_size_bytes, end_bytes, metadata: &metadata };
    for entry in entries.iter().filter(|e| **e != bat::UNALLOCATED && rules.fault(**e).is_none()) {
        let block = rules.block(*entry).expect("the entry is allocated");
        assert!(block.start >= metadata[1].end && block.end <= end_bytes);
    }
    if bat::overlaps(&entries, block_size_bytes).is_empty() {
        let mut placed: Vec<u32> = entries.into_iter().filter(|e| *e != bat::UNALLOCATED).collect();
        placed.sort_unstable();
        assert!(placed.windows(2).all(|pair| pair[0] < pair[1]));
    }
}

/// A path that is accepted has no NUL, is not empty and not longer than its bytes allow; written again it is read
/// as the same place. The first 24 bytes are the entry, the rest its data.
pub fn fuzz_locator(bytes: &[u8]) {
    let Some((entry, data)) = bytes.split_first_chunk::<{ Locator::LEN }>() else { return };
    let mut locator = Locator::parse(entry);
    let mut expected: [u8; Locator::LEN] = *entry;
    expected[12..16].fill(0);
    assert_eq!(locator.to_bytes(), expected);
    let stored = (locator.platform, locator.len_bytes);
    let whole = u32::try_from(data.len()).unwrap_or(u32::MAX);
    for (platform, len) in [stored, (Platform::W2ru, whole), (Platform::W2ku, whole), (Platform::MacX, whole)] {
        (locator.platform, locator.len_bytes) = (platform, len);
        if let Ok(path) = locator.decode(data) {
            check_path(platform, &path);
        }
    }
}

fn check_path(platform: Platform, path: &str) {
    assert!(!path.is_empty() && !path.contains('\0'));
    assert!(path.len() <= 2 * MAX_PATH_BYTES as usize);
    let data = encode(platform, path);
    if data.len() > MAX_PATH_BYTES as usize {
        return;
    }
    let again = Locator { platform, space: 8, len_bytes: data.len() as u32, offset_bytes: 0 };
    let read = again.decode(&data).expect("an encoded path can be decoded");
    // Backslashes are a URL's own business, but separators to Windows.
    let same = path.strip_prefix("./").unwrap_or(path);
    assert_eq!(read.strip_prefix("./").unwrap_or(&read), same);
}

/// A batmap header that is accepted is written and read back the same. The first 512 bytes are the header, the
/// rest its map.
pub fn fuzz_batmap(bytes: &[u8]) {
    let (head, map) = bytes.split_at(bytes.len().min(BatmapHeader::LEN));
    let Ok(header) = BatmapHeader::parse(head) else { return };
    assert_eq!(BatmapHeader::parse(&header.to_bytes()).as_ref(), Ok(&header));
    assert!(header.map_bytes().end <= i64::MAX as u64);
    let gap = header.gap_bytes(u64::from(header.marker) * 512);
    assert!(gap.start <= gap.end);
    if let Some(area) = header.journal_area(u64::from(header.marker) * 512) {
        assert!(gap.start <= area.start && area.start < area.end && area.end <= gap.end);
    }
    let full = (0..map.len() as u32 * 8).filter(|block| batmap::is_full(map, *block)).count();
    assert_eq!(full, map.iter().map(|b| b.count_ones() as usize).sum::<usize>());
    let _ = BatmapHeader::checksum_of(header.version, map);
}

/// `bytes` padded or cut to `len`, with a fitting checksum at `field_at`.
fn resummed(bytes: &[u8], len: usize, field_at: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.resize(len, 0);
    let sum = checksum(&bytes, field_at);
    put(&mut bytes, field_at, &sum.to_be_bytes());
    debug_assert_eq!(array::<4>(&bytes, field_at), sum.to_be_bytes());
    bytes
}
