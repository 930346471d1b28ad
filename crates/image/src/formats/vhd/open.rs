//! Opening: everything an image claims is checked here, before anything is believed.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

use async_lock::RwLock;
use spile_core::{Code, Env, Error, ErrorKind, Result, Segments, Store, StoreOffset, Via};

use super::alloc::{Alloc, FooterState};
use super::bat::Bat;
use super::beside::Beside;
use super::bits::{Bits, BitsCache};
use super::codec::MAX_SIZE_BYTES;
use super::codec::bat::{MAX_BLOCKS, UNALLOCATED, bitmap_bytes, bytes_len, entries_for};
use super::codec::batmap::{BatmapHeader, is_full};
use super::codec::footer::{DiskType, Footer};
use super::codec::header::Header;
use super::codec::locator::{Locator, Platform};
use super::flush::Flusher;
use super::footers::{Footers, Other, read_footers};
use super::journal::{Journal, Owner};
use super::lazy;
use super::reparent::{find_spare, pair_of};
use super::{Batmap, Head, Layout, SECTOR, Sparse, Table, Vhd};
use crate::formats::OpenLayer;
use crate::formats::raw::Raw;
use crate::grace::Grace;
use crate::loads::Loads;
use crate::range_lock::RangeLock;
use crate::room::RoomWatch;

/// BAT bytes read at a time.
const BAT_READ_BYTES: usize = 256 << 10;

/// Opens the VHD in `store`.
///
/// # Errors
/// `Corrupt` or `Unsupported`, saying which field is wrong; I/O errors.
pub(crate) async fn open<S: Store>(store: S, env: &Arc<dyn Env>, how: OpenLayer) -> Result<Vhd<S>> {
    let found = read_footers(&store).await?;
    let footer = found.footer.clone();
    check_size(&footer, store.len_bytes())?;
    if footer.disk_type == DiskType::Fixed {
        let size = footer.current_size_bytes;
        return Ok(Vhd::Fixed(footer, Raw::new(store, size)));
    }
    let header = read_header(&store, &footer).await?;
    let (mut layout, batmap) = lay_out(&store, &footer, &header).await?;
    let most = if how.read_only { 0 } else { entries_for(MAX_SIZE_BYTES, header.block_size_bytes).min(MAX_BLOCKS) };
    // A file that does not end in order may be cut short: all of its table is looked at.
    let is_lazy = how.lazy && how.read_only && !found.uses_copy && matches!(found.other, Other::Agrees);
    let bat = if is_lazy { Bat::lazy(layout.blocks()) } else { Bat::new(layout.blocks(), most as u32) };
    let mut sectors = if is_lazy { Vec::new() } else { load_bat(&store, &layout, &bat).await? };
    sectors.sort_unstable();
    check_blocks(store.len_bytes(), &layout, &sectors)?;
    if !how.read_only {
        make_footers_agree(&store, &found, &layout, &sectors).await?;
    }
    let spare = match how.read_only {
        true => None,
        false => find_spare(&store, &footer, &layout, &sectors).await?,
    };
    layout.metadata.extend(spare.iter().map(|place| pair_of(place.start)));
    let has_batmap = batmap.is_some();
    let (batmap, lazy_batmap) = if is_lazy { (None, batmap) } else { (batmap, None) };
    batmap.iter().for_each(|map| apply_batmap(&bat, map));
    if is_lazy {
        sectors = lazy::first_sectors(&store, &layout, &bat).await?;
    }
    let separate = sectors.iter().all(|&sector| layout.data_offset(sector).is_multiple_of(4096))
        && layout.block_bytes.is_multiple_of(4096)
        && layout.size_bytes.is_multiple_of(u64::from(store.info().offset_align_bytes));
    let owner = Owner { boot_id: env.boot_id(), image_uuid: footer.uuid };
    let generation = env.random_16()[..8].iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
    let next_free = next_free(&store, &layout, &sectors, found.trailing_bytes);
    // In a file of another program, something that only that program knows may lie behind the blocks.
    let keep_end = if layout.journal.is_some() { 0 } else { next_free };
    let footers = FooterState { copy_is_bad: found.copy_is_bad(), trailing_is_gone: found.uses_copy };
    let gaps = if how.read_only { Vec::new() } else { gaps(&layout, &sectors) };
    let head = Head { metadata_end: layout.metadata_end(), spare, footer, header, batmap: layout.batmap.clone() };
    let sparse = Sparse {
        alloc: Alloc::new(next_free, gaps, keep_end, store.len_bytes(), footers),
        room: RoomWatch::default(),
        bits: BitsCache::new(how.cache_bytes, layout.bitmap_bytes as usize),
        journal: Journal::new(layout.journal_on(&store), owner, generation),
        flusher: Flusher::new(has_batmap),
        via: if separate { Via::Direct } else { Via::Cached },
        grace: Grace::default(),
        blocks: RangeLock::default(),
        loads: Loads::default(),
        store,
        footer_problem: found.problem(),
        size_bytes: AtomicU64::new(layout.size_bytes),
        table: RwLock::new(Table { at: layout.bat_offset, next_at: None }),
        has_parent: AtomicBool::new(head.footer.disk_type == DiskType::Differencing),
        head: Mutex::new(Arc::new(head)),
        layout,
        read_only: AtomicBool::new(how.read_only),
        beside: Beside::new(env.clone()),
        bat,
        batmap: lazy_batmap,
    };
    sparse.replay().await?;
    Ok(Vhd::Sparse(Arc::new(sparse)))
}

/// Writes the footer that counts over one that describes another disk, before any block can change: what the image fits
/// must not be decided anew from what this session leaves. On a device, where no block may lie where the footer goes, it is also written where there is
/// none: the device may be longer than it was, and blocks come behind its old end only when the footer is at the new one (`room`).
async fn make_footers_agree<S: Store>(store: &S, found: &Footers, layout: &Layout, sectors: &[u32]) -> Result<()> {
    let (len, is_device) = (store.len_bytes(), !store.info().grows_zeroed);
    let blocks_end = sectors.last().map_or(0, |&last| layout.block_end(last));
    if is_device && blocks_end > len - SECTOR {
        return Err(corrupt("a block lies at the end of the device, where the footer goes").at_offset(len - SECTOR));
    }
    let at = match found.uses_copy {
        true if is_device => len - SECTOR,
        true if found.differ() => len - found.trailing_bytes,
        false if found.differ() => 0,
        // A process that died may have written both and synced neither. What they say is told from here on, so a power cut must not take it back.
        _ => return store.sync().await,
    };
    store.write_at(StoreOffset(at), &Segments::copied(&found.footer.to_bytes()), Via::Cached).await?;
    store.sync().await
}

impl<S: Store> Sparse<S> {
    /// Takes over the records of an earlier process that did not flush them.
    async fn replay(&self) -> Result<()> {
        for (half, record) in self.journal.replay(&self.store).await? {
            let valid = record.sectors.end <= self.layout.sectors_per_block();
            if let Some(page) = self.bat.missing_page(record.block) {
                self.load_page(page).await?;
            }
            if !valid || record.block >= self.bat.entries() || self.bat.get(record.block) != Some(record.at_sector) {
                continue;
            }
            let bits: Arc<Bits> = self.bits_of(record.block, record.at_sector).await?;
            bits.set(record.sectors.clone());
            if bits.is_full() {
                self.bat.set_full(record.block, true);
            }
            self.journal.adopt(half, &record, bits);
        }
        Ok(())
    }
}

/// Refuses a virtual size that the format or, for a fixed disk, the file does not allow.
pub(super) fn check_size(footer: &Footer, file_bytes: u64) -> Result<()> {
    let size = footer.current_size_bytes;
    if size == 0 || !size.is_multiple_of(SECTOR) {
        return Err(corrupt(format!("the virtual size {size} is not a positive multiple of 512")));
    }
    if size > MAX_SIZE_BYTES {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("the virtual size {size} is over the format's limit of 2040 GiB"),
        )
        .coded(Code::FormatLimit));
    }
    if footer.disk_type == DiskType::Fixed && size > file_bytes.saturating_sub(511) {
        return Err(corrupt(format!(
            "the fixed disk of {size} bytes does not fit its file of {file_bytes} bytes, which is cut short"
        )));
    }
    Ok(())
}

pub(super) async fn read_header<S: Store>(store: &S, footer: &Footer) -> Result<Header> {
    let offset = footer.data_offset.ok_or_else(|| corrupt("a sparse disk's footer points at no header"))?;
    if offset > store.len_bytes().saturating_sub(Header::LEN as u64) {
        return Err(corrupt("the header lies past the end of the file, which is cut short").at_offset(offset));
    }
    let bytes = Segments::zeroed(Header::LEN);
    store.read_at(StoreOffset(offset), &bytes, Via::Cached).await?;
    Header::parse(&bytes.to_vec()).map_err(|e| Error::from(e).at_offset(offset))
}

/// The layout, and the batmap if the image has a good one.
pub(super) async fn lay_out<S: Store>(
    store: &S,
    footer: &Footer,
    header: &Header,
) -> Result<(Layout, Option<Vec<u8>>)> {
    let (size_bytes, block_bytes) = (footer.current_size_bytes, u64::from(header.block_size_bytes));
    let blocks = size_bytes.div_ceil(block_bytes);
    if blocks > MAX_BLOCKS {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("{blocks} blocks are more than the {MAX_BLOCKS} supported"),
        ));
    }
    if blocks > u64::from(header.max_entries) {
        return Err(corrupt(format!("the BAT has {} entries where the size needs {blocks}", header.max_entries)));
    }
    let file_bytes = store.len_bytes();
    let bat_end = header.bat_offset_bytes.checked_add(bytes_len(header.max_entries)).filter(|&end| end <= file_bytes);
    let Some(bat_end) = bat_end else {
        return Err(
            corrupt("the BAT goes past the end of the file, which is cut short").at_offset(header.bat_offset_bytes)
        );
    };
    let header_range = footer.data_offset.unwrap_or(0)..footer.data_offset.unwrap_or(0) + Header::LEN as u64;
    let bat_range = header.bat_offset_bytes..bat_end;
    if !header.bat_offset_bytes.is_multiple_of(SECTOR) || bat_range.start < SECTOR || overlap(&bat_range, &header_range)
    {
        return Err(corrupt("the BAT lies over the header or the footer").at_offset(bat_range.start));
    }
    let (batmap, map) = find_batmap(store, footer, bat_end, blocks).await?;
    let journal = batmap.as_ref().and_then(|batmap| batmap.header.journal_area(batmap.header_offset));
    let metadata = metadata_ranges(footer, header, &batmap, &journal, file_bytes);
    let layout = Layout {
        size_bytes,
        block_bytes,
        bitmap_bytes: u64::from(bitmap_bytes(header.block_size_bytes)),
        bat_offset: header.bat_offset_bytes,
        batmap,
        journal,
        metadata,
    };
    Ok((layout, map))
}

pub(super) fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Where the batmap lies, if the image has one that can be kept up to date; and its content, if that is valid.
async fn find_batmap<S: Store>(
    store: &S,
    footer: &Footer,
    header_offset: u64,
    blocks: u64,
) -> Result<(Option<Batmap>, Option<Vec<u8>>)> {
    let file_bytes = store.len_bytes();
    if !footer.may_have_batmap() || header_offset + SECTOR > file_bytes {
        return Ok((None, None));
    }
    let bytes = Segments::zeroed(SECTOR as usize);
    store.read_at(StoreOffset(header_offset), &bytes, Via::Cached).await?;
    let Ok(header) = BatmapHeader::parse(&bytes.to_vec()) else { return Ok((None, None)) };
    if header.is_encrypted() {
        return Err(Error::new(ErrorKind::Unsupported, "the image's data are encrypted").at_offset(header_offset));
    }
    let range = header.map_bytes();
    let large_enough = range.end - range.start >= blocks.div_ceil(8);
    if range.start < header_offset + SECTOR || range.end > file_bytes || !large_enough {
        return Ok((None, None));
    }
    let map = Segments::zeroed((range.end - range.start) as usize);
    store.read_at(StoreOffset(range.start), &map, Via::Cached).await?;
    let (batmap, map) = (Batmap { header_offset, header }, map.to_vec());
    let good = batmap.header.matches(&map, footer.current_size_bytes);
    Ok((Some(batmap), good.then_some(map)))
}

fn apply_batmap(bat: &Bat, map: &[u8]) {
    for (block, _) in bat.allocated() {
        if is_full(map, block) {
            bat.set_full(block, true);
        }
    }
}

/// The runs of the file that hold metadata; no block may touch them.
pub(super) fn metadata_ranges(
    footer: &Footer,
    header: &Header,
    batmap: &Option<Batmap>,
    journal: &Option<Range<u64>>,
    file_bytes: u64,
) -> Vec<Range<u64>> {
    let header_at = footer.data_offset.unwrap_or(SECTOR);
    let mut ranges = vec![0..SECTOR, header_at..header_at + Header::LEN as u64];
    ranges.push(header.bat_offset_bytes..header.bat_offset_bytes + bytes_len(header.max_entries));
    ranges.extend(batmap.iter().flat_map(Batmap::ranges));
    ranges.extend(journal.clone());
    ranges.extend(header.locators.iter().filter_map(|locator| locator_range(locator, file_bytes)));
    ranges
}

/// Where a parent locator's text lies, if it lies in the file.
pub(super) fn locator_range(locator: &Locator, file_bytes: u64) -> Option<Range<u64>> {
    if matches!(locator.platform, Platform::None) || locator.len_bytes == 0 {
        return None;
    }
    let end = locator.offset_bytes.checked_add(u64::from(locator.len_bytes))?;
    (end <= file_bytes).then_some(locator.offset_bytes..end)
}

/// Fills `bat`; returns the sectors of all allocated blocks.
pub(super) async fn load_bat<S: Store>(store: &S, layout: &Layout, bat: &Bat) -> Result<Vec<u32>> {
    let mut sectors = Vec::new();
    let total = bat.entries() as usize * 4;
    let buffer = Segments::zeroed(BAT_READ_BYTES.min(total.next_multiple_of(4)));
    let mut bytes = vec![0u8; buffer.len()];
    for start in (0..total).step_by(BAT_READ_BYTES) {
        let len = BAT_READ_BYTES.min(total - start);
        let offset = layout.bat_offset + start as u64;
        store.read_at(StoreOffset(offset), &buffer.slice(0..len), Via::Cached).await?;
        buffer.copy_to_slice(0, &mut bytes[..len]);
        load_bat_part(bat, (start / 4) as u32, &bytes[..len], &mut sectors);
    }
    Ok(sectors)
}

fn load_bat_part(bat: &Bat, first: u32, bytes: &[u8], sectors: &mut Vec<u32>) {
    for (chunk_at, chunk) in bytes.chunks(4096).enumerate() {
        if chunk.iter().fold(u8::MAX, |all, byte| all & byte) == u8::MAX {
            continue;
        }
        for (at, entry) in chunk.chunks_exact(4).enumerate() {
            let sector = u32::from_be_bytes([entry[0], entry[1], entry[2], entry[3]]);
            if sector != UNALLOCATED {
                bat.set(first + (chunk_at * 1024 + at) as u32, sector);
                sectors.push(sector);
            }
        }
    }
}

/// Refuses blocks that overlap each other or metadata, or go past the end of the file, at `file_bytes`. `sectors` is sorted.
pub(super) fn check_blocks(file_bytes: u64, layout: &Layout, sectors: &[u32]) -> Result<()> {
    let span = layout.bitmap_bytes + layout.block_bytes;
    let start = |sector: u32| u64::from(sector) * SECTOR;
    if let Some(pair) = sectors.windows(2).find(|pair| start(pair[1]) - start(pair[0]) < span) {
        return Err(corrupt("two blocks overlap").at_offset(start(pair[1])));
    }
    if let Some(&last) = sectors.last().filter(|&&last| start(last) + span > file_bytes) {
        let message = "a block goes past the end of the file, which is cut short";
        let hint = "complete the copy if it is one that was not finished; `spile check` says how much is missing";
        return Err(corrupt(message).at_offset(start(last)).hint(hint));
    }
    for range in &layout.metadata {
        let at = sectors.partition_point(|&sector| start(sector) + span <= range.start);
        if let Some(&sector) = sectors.get(at).filter(|&&sector| start(sector) < range.end) {
            return Err(corrupt("a block lies over the image's metadata").at_offset(start(sector)));
        }
    }
    Ok(())
}

/// Where new blocks may go: behind the last block in a file that Spile made, behind everything but the footer in
/// another program's file.
fn next_free<S: Store>(store: &S, layout: &Layout, sectors: &[u32], trailing_bytes: u64) -> u64 {
    let used_end = sectors.last().map_or(0, |&last| layout.block_end(last)).max(layout.metadata_end());
    if layout.journal.is_some() || !store.info().grows_zeroed {
        return used_end;
    }
    used_end.max(store.len_bytes() - trailing_bytes)
}

/// Runs between blocks, or between metadata and the first block, that could hold a block. None in files of other
/// programs, which may keep something there.
fn gaps(layout: &Layout, sectors: &[u32]) -> Vec<Range<u64>> {
    if layout.journal.is_none() {
        return Vec::new();
    }
    let span = layout.bitmap_bytes + layout.block_bytes;
    // Metadata need not be in front: a tool that renames a parent writes the new locator behind the blocks.
    let blocks = sectors.iter().map(|&sector| u64::from(sector) * SECTOR..layout.block_end(sector));
    let mut used: Vec<_> = blocks.chain(layout.metadata.iter().cloned()).collect();
    used.sort_unstable_by_key(|range| range.start);
    let (mut gaps, mut end) = (Vec::new(), 0);
    for range in used {
        if range.start >= end + span {
            gaps.push(end..range.start);
        }
        end = end.max(range.end);
    }
    gaps
}

pub(super) fn corrupt(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, message)
}
