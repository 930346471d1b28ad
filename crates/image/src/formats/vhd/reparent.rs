//! Naming another parent, or none, while the image may be in use.
//!
//! The footers say where the header is, and the header names the parent. So a new header is written where nothing else is, and then
//! the footers point to it: a footer is one sector, so it is there as a whole or not at all.
//!
//! # Order of writes
//!
//! 1. Both footers are in their places. Nobody prepares space meanwhile, for that moves the footer at the end.
//! 2. The new header and its locators' texts, then a sync. No footer points at them yet.
//! 3. The footer at the end, then its copy, then a sync. Either may become durable without the other: they describe the same blocks,
//!    by two headers that are both whole.
//! 4. The old header's place is free now.
//!
//! A header moves to and fro between the two places of a pair, so a parent that changes again and again makes the file no longer.
//! The place that is not in use says so by a mark, which is found when the image is opened. Where there is no pair yet, it is made
//! behind all blocks.
//!
//! # Without a parent
//!
//! Some programs take no notice of the bitmaps of an image that has no parent. So first the bytes under clear bits are zeroed, each block while
//! nobody else writes to it. That may take long, and cannot be interrupted: so whoever flattens an image does most of it before, part by part
//! ([`Sparse::own_zeroes`]).

use std::ops::Range;
use std::sync::Arc;

use spile_core::{Result, Segments, Store, StoreOffset, Via};

use super::bits::Bits;
use super::codec::footer::{DiskType, Footer};
use super::codec::header::Header;
use super::codec::locator::Locator;
use super::create::{VhdParent, name_parent};
use super::open::{metadata_ranges, overlap};
use super::write::BlockPart;
use super::{Head, Layout, SECTOR, Sparse};
use crate::create::NewParent;

/// Room for a header and three locators of the longest path, in bytes. A place begins at a multiple of it.
const PLACE_BYTES: u64 = 16 << 10;

/// The start of a place that is free for the next header. The image's UUID follows.
const MARK: &[u8; 16] = b"spile header pl.";

/// The first sector of a free place.
fn mark(uuid: &[u8; 16]) -> [u8; SECTOR as usize] {
    let mut bytes = [0; SECTOR as usize];
    bytes[..16].copy_from_slice(MARK);
    bytes[16..32].copy_from_slice(uuid);
    bytes
}

/// The pair of places of which one begins at `start`.
pub(super) fn pair_of(start: u64) -> Range<u64> {
    let start = start & !PLACE_BYTES;
    start..start + 2 * PLACE_BYTES
}

/// The other place of the pair in which the header of this image lies, if it is in a pair of which blocks have taken nothing.
/// `sectors` are the places of all blocks, sorted.
pub(super) async fn find_spare<S: Store>(
    store: &S,
    footer: &Footer,
    layout: &Layout,
    sectors: &[u32],
) -> Result<Option<Range<u64>>> {
    let header_at = footer.data_offset.filter(|at| at.is_multiple_of(PLACE_BYTES) && *at >= PLACE_BYTES);
    let Some(start) = header_at.map(|at| at ^ PLACE_BYTES) else { return Ok(None) };
    let (place, pair) = (start..start + PLACE_BYTES, pair_of(start));
    let after = sectors.partition_point(|&sector| layout.block_end(sector) <= pair.start);
    let has_block = sectors.get(after).is_some_and(|&sector| u64::from(sector) * SECTOR < pair.end);
    let is_used = has_block || layout.metadata.iter().any(|range| overlap(range, &place));
    if is_used || place.end + SECTOR > store.len_bytes() {
        return Ok(None);
    }
    let bytes = Segments::zeroed(SECTOR as usize);
    store.read_at(StoreOffset(place.start), &bytes, Via::Cached).await?;
    Ok((bytes.to_vec() == mark(&footer.uuid)).then_some(place))
}

impl<S: Store> Sparse<S> {
    /// Has the image name `parent` as its parent, or none.
    pub(super) async fn set_parent(&self, parent: Option<&NewParent>) -> Result<()> {
        self.check_writable()?;
        match (self.is_differencing(), parent) {
            (false, None) => {
                // An earlier call may have failed at its last step.
                let _preparing = self.alloc.preparing().await;
                return self.restore_footers().await;
            }
            (false, Some(_)) => return Err(self.unsupported("an image without a parent does not get one")),
            (true, Some(parent)) => VhdParent::from_new(parent).check()?,
            (true, None) => self.zero_what_is_unset().await?,
        }
        let _preparing = self.alloc.preparing().await;
        self.check_writable()?;
        self.restore_footers().await?;
        let old = self.head();
        let (place, spare) = self.take_place(&old).await?;
        let (head, texts) = self.plan_head(&old, parent, place.start, spare);
        self.write_head(&head, &texts).await?;
        self.change_head(head).await
    }

    /// A place for the next header, and the place that is free when it is in use.
    async fn take_place(&self, old: &Head) -> Result<(Range<u64>, Range<u64>)> {
        if let (Some(spare), Some(header_at)) = (old.spare.clone(), old.footer.data_offset) {
            return Ok((spare, header_at..header_at + PLACE_BYTES));
        }
        let start = self.alloc.free_from(2 * PLACE_BYTES);
        let pair = start..start + 2 * PLACE_BYTES;
        self.take_room(&pair).await?;
        let middle = pair.start + PLACE_BYTES;
        Ok((pair.start..middle, middle..pair.end))
    }

    /// The head with another parent, and the texts of its locators with their offsets.
    fn plan_head(
        &self,
        old: &Head,
        parent: Option<&NewParent>,
        header_at: u64,
        spare: Range<u64>,
    ) -> (Head, Vec<(u64, Vec<u8>)>) {
        let mut footer = Footer { data_offset: Some(header_at), ..old.footer.clone() };
        let mut header = Header {
            parent_uuid: [0; 16],
            parent_timestamp: 0,
            parent_name: String::new(),
            locators: [Locator::NONE; 8],
            ..old.header.clone()
        };
        let mut end = header_at + Header::LEN as u64;
        let texts = match parent {
            Some(parent) => name_parent(&mut header, &VhdParent::from_new(parent), &mut end),
            None => {
                footer.disk_type = DiskType::Dynamic;
                Vec::new()
            }
        };
        let metadata = metadata_ranges(&footer, &header, &old.batmap, &old.journal_area(), end);
        let used = metadata.iter().map(|range| range.end).max().unwrap_or(0);
        let metadata_end = used.max(spare.end).max(header_at + PLACE_BYTES);
        let head = Head { footer, header, metadata_end, spare: Some(spare), batmap: old.batmap.clone() };
        (head, texts)
    }

    /// Step 2.
    async fn write_head(&self, head: &Head, texts: &[(u64, Vec<u8>)]) -> Result<()> {
        let header_at = head.footer.data_offset.unwrap_or(0);
        for (offset, text) in texts {
            self.write_cached(*offset, text).await?;
        }
        self.write_cached(header_at, &head.header.to_bytes()).await?;
        self.store.sync().await
    }

    /// Steps 3 and 4. After a failure the image is what the footers in memory say, and they are written again before the next
    /// change; which of them are in the file, nobody knows.
    async fn change_head(&self, head: Head) -> Result<()> {
        let (uuid, spare) = (head.footer.uuid, head.spare.clone());
        self.write_end(&head.footer).await?;
        self.set_head(head);
        self.restore_footers().await?;
        if let Some(spare) = spare {
            // Without its mark the place is lost once the image is closed, and nothing else.
            drop(self.write_cached(spare.start, &mark(&uuid)).await);
        }
        Ok(())
    }

    /// Writes the footer at the end. Its copy at the start is bad from then on.
    pub(super) async fn write_end(&self, footer: &Footer) -> Result<()> {
        self.alloc.set_trailing_is_gone(true);
        self.write_cached(self.footer_at(), &footer.to_bytes()).await?;
        self.alloc.set_trailing_is_gone(false);
        self.alloc.set_copy_is_bad();
        Ok(())
    }

    pub(super) async fn write_cached(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        self.store.write_at(StoreOffset(offset_bytes), &Segments::copied(bytes), Via::Cached).await
    }

    /// Zeroes the bytes under clear bits, in every block that has some.
    async fn zero_what_is_unset(&self) -> Result<()> {
        // Bits that were given up are clear durably before their bytes go.
        self.flush().await?;
        let blocks: Vec<u32> = self.bat.allocated().map(|(block, _)| block).collect();
        for block in blocks {
            if !self.bat.is_full(block) {
                self.zero_unset_of(block).await?;
            }
        }
        Ok(())
    }

    async fn zero_unset_of(&self, block: u32) -> Result<()> {
        let _alone = self.blocks.exclusive(u64::from(block)..u64::from(block) + 1).await;
        let Some(sector) = self.bat.get(block) else { return Ok(()) };
        let bits = self.bits_of(block, sector).await?;
        self.zero_unset(&BlockPart { block, within: 0..self.layout.block_bytes }, sector, &bits).await
    }

    /// Zeroes the bytes of `part` under clear bits.
    async fn zero_unset(&self, part: &BlockPart, sector: u32, bits: &Bits) -> Result<()> {
        let Range { start: mut at, end } = part.sectors();
        while at < end {
            let (is_set, run) = bits.run(at..end);
            if !is_set {
                let start = u64::from(at) * SECTOR;
                let unset = BlockPart { block: part.block, within: start..start + u64::from(run) * SECTOR };
                self.zero_data(&unset, sector, true).await?;
            }
            at += run;
        }
        Ok(())
    }

    /// Zeroes the bytes of `part` under clear bits and sets these bits, where its block is allocated. Nobody else writes to the part.
    pub(super) async fn own_zeroes(self: &Arc<Self>, part: &BlockPart) -> Result<()> {
        self.check_writable()?;
        let _held = self.blocks.shared(part.lock_range()).await;
        let Some(sector) = self.bat.get(part.block).filter(|_| !self.bat.is_full(part.block)) else { return Ok(()) };
        let bits = self.bits_of(part.block, sector).await?;
        self.zero_unset(part, sector, &bits).await?;
        self.set_bits(part, sector, bits).await
    }
}
