//! What is missing from a file that is shorter than its metadata say.
//!
//! Spile never leaves such a file, wherever it is killed: rule 1 makes the new length durable before a BAT entry may
//! point into it. So the file is most likely an unfinished copy, and its BAT entries are worth keeping: once the copy is
//! complete, they are right again.
//!
//! One other way leads here. tapdisk adds to the BAT before it has written the whole block; a tapdisk that was killed
//! leaves a last block that ends early, and no footer behind it. The block's bitmap tells the two apart: where no bit is
//! set for a missing sector, nothing was ever written there, and the block may be extended with zeroes.

use std::ops::Range;

use spile_core::{Result, Segments, Store, StoreOffset, Via};

use super::parts::SparseParts;
use crate::check::Mend;
use crate::formats::vhd::bits::Bits;
use crate::formats::vhd::codec::batmap::{BatmapHeader, is_full};
use crate::formats::vhd::codec::footer::Footer;
use crate::formats::vhd::codec::header::Header;
use crate::formats::vhd::codec::locator::Platform;
use crate::formats::vhd::footers::Footers;
use crate::formats::vhd::journal::Record;
use crate::formats::vhd::{Layout, SECTOR};

/// What is missing behind the end of a file.
pub(super) struct Cut {
    /// The least number of bytes that are missing.
    pub missing_bytes: u64,
    /// Allocated blocks that begin at or behind the end.
    gone_blocks: u64,
    /// Allocated blocks that begin before the end and end behind it.
    short_blocks: u64,
    /// True when the metadata name parts of the file that are behind the end.
    lacks_metadata: bool,
    /// True when there is a footer at the end of the file.
    has_trailing: bool,
    /// What a repair may do about it.
    pub mend: Mend,
}

impl Cut {
    /// What a person should know, in one sentence.
    pub(super) fn message(&self) -> String {
        let mut parts = Vec::new();
        if self.gone_blocks > 0 {
            parts.push(format!("{} allocated blocks lie past the end of the file", self.gone_blocks));
        }
        if self.short_blocks > 0 {
            parts.push(format!("{} allocated blocks go past the end of the file", self.short_blocks));
        }
        if self.lacks_metadata {
            parts.push("a part of the metadata lies past the end of the file".to_owned());
        }
        let parts = parts.join(", ");
        match (self.mend, self.has_trailing) {
            (Mend::Repair, _) => format!("{parts}: {} bytes, which were never written", self.missing_bytes),
            (_, true) => format!("{parts}, by {} bytes, although a footer ends the file", self.missing_bytes),
            (_, false) => {
                format!("the file is cut short, at least {} bytes are missing at its end: {parts}", self.missing_bytes)
            }
        }
    }
}

/// Compares the length of the file with its metadata. Returns `None` when nothing is missing, or the footer alone.
/// `records` are what the journal holds for this boot of the host.
pub(super) async fn find_cut<S: Store>(
    store: &S,
    footers: &Footers,
    sparse: &SparseParts,
    records: &[Record],
) -> Result<Option<Cut>> {
    let len = store.len_bytes();
    let blocks_end = sparse.bat.allocated().map(|(_, sector)| sparse.layout.block_end(sector)).max().unwrap_or(0);
    // With a footer at the end, such metadata are not cut off but wrong; those who need them say so.
    let metadata_end = match footers.has_trailing() {
        true => 0,
        false => metadata_end(store, &footers.footer, &sparse.header).await?,
    };
    let end = blocks_end.max(metadata_end);
    if end <= len {
        return Ok(None);
    }
    let lies_in = |range: &Range<u64>| range.start < len && len < range.end;
    let layout = &sparse.layout;
    let place =
        |sector: u32| layout.block_end(sector) - layout.block_bytes - layout.bitmap_bytes..layout.block_end(sector);
    let short: Vec<_> = sparse.bat.allocated().filter(|&(_, sector)| lies_in(&place(sector))).collect();
    let gone_blocks = sparse.bat.allocated().filter(|&(_, sector)| place(sector).start >= len).count() as u64;
    let lacks_metadata = metadata_end > len;
    let may_extend = !footers.has_trailing() && store.info().grows_zeroed;
    let mut loses_data = gone_blocks > 0;
    for &(block, sector) in &short {
        loses_data |= has_data_behind(store, sparse, records, block, sector).await?;
    }
    let mend = match (lacks_metadata || (!short.is_empty() && !may_extend), loses_data) {
        (true, _) => Mend::No,
        (false, true) => Mend::DiscardLost,
        (false, false) => Mend::Repair,
    };
    Ok(Some(Cut {
        missing_bytes: end + SECTOR - len,
        gone_blocks,
        short_blocks: short.len() as u64,
        lacks_metadata,
        has_trailing: footers.has_trailing(),
        mend,
    }))
}

/// True unless it is certain that nothing was written to the sectors of this block that are behind the end of the file.
async fn has_data_behind<S: Store>(
    store: &S,
    sparse: &SparseParts,
    records: &[Record],
    block: u32,
    sector: u32,
) -> Result<bool> {
    let layout = &sparse.layout;
    let data = layout.data_offset(sector);
    if data > store.len_bytes() || sparse.batmap.as_ref().is_some_and(|map| is_full(map, block)) {
        return Ok(true);
    }
    let missing = ((store.len_bytes() - data) / SECTOR) as u32..layout.sectors_per_block();
    let is_recorded =
        |record: &Record| (record.block, record.at_sector) == (block, sector) && record.sectors.end > missing.start;
    if records.iter().any(is_recorded) {
        return Ok(true);
    }
    let (is_set, sectors) = read_bits(store, layout, sector).await?.run(missing.clone());
    Ok(is_set || sectors < missing.end - missing.start)
}

/// The bitmap of the block at `sector`.
pub(super) async fn read_bits<S: Store>(store: &S, layout: &Layout, sector: u32) -> Result<Bits> {
    let bytes = Segments::zeroed(layout.bitmap_bytes as usize);
    store.read_at(StoreOffset(u64::from(sector) * SECTOR), &bytes, Via::Cached).await?;
    Ok(Bits::from_bytes(&bytes.to_vec(), layout.sectors_per_block()))
}

/// One past the last byte of the batmap and of the parent locators, as far as the file still says where they lie.
async fn metadata_end<S: Store>(store: &S, footer: &Footer, header: &Header) -> Result<u64> {
    let used = header.locators.iter().filter(|locator| !matches!(locator.platform, Platform::None));
    let locators = used.map(|locator| locator.offset_bytes.saturating_add(locator.len_bytes.into())).max();
    let batmap = match footer.may_have_batmap() {
        true => batmap_end(store, header.bat_end_bytes()).await?,
        false => 0,
    };
    Ok(locators.unwrap_or(0).max(batmap))
}

/// One past the last byte of the batmap whose header is at `offset`; where that is no header, `offset`.
async fn batmap_end<S: Store>(store: &S, offset: u64) -> Result<u64> {
    if offset + SECTOR > store.len_bytes() {
        return Ok(offset + SECTOR);
    }
    let bytes = Segments::zeroed(SECTOR as usize);
    store.read_at(StoreOffset(offset), &bytes, Via::Cached).await?;
    Ok(BatmapHeader::parse(&bytes.to_vec()).map_or(offset, |header| header.map_bytes().end))
}
