//! Giving up what a differencing image has: the part reads as what lies below from then on.
//!
//! # Order of writes
//!
//! Whoever gives up a part has made sure that the same bytes are below, durably. So the BAT entry or the bitmap may become durable
//! at any time: after a power cut the part reads from here or from below, and that is the same. But as soon as the call has
//! returned, somebody may write other bytes below. So from then on the part must not come back when the process dies:
//!
//! - **A whole block** is released (rule 5): its BAT entry is cleared, cached. Records of the journal that name it are void,
//!   because they say where the block lay.
//! - **A part of a block**: first flushes retire all records of the block, then the bitmap without the part's bits is
//!   written, cached. Nobody else writes to the block meanwhile, so no record and no flush can bring the bits back. The batmap is
//!   void before that, as it could call the block full. The bytes stay where they are until the block is released.
//!
//! A power cut may bring back what no flush of this image has covered. Whoever writes below the part must flush this image, too,
//! before that write can be called durable.

use spile_core::{Result, Segments, Store, StoreOffset, Via};

use super::bits::Bits;
use super::write::BlockPart;
use super::{SECTOR, Sparse};

impl<S: Store> Sparse<S> {
    /// Gives up `part`.
    pub(super) async fn forget_part(&self, part: &BlockPart) -> Result<()> {
        self.check_writable()?;
        if !self.is_differencing() {
            return Err(self.unsupported("the image has no parent that it could show instead of its own bytes"));
        }
        let is_whole = part.within == (0..self.visible_bytes(part.block));
        if !is_whole {
            // Most often no record is left when the block is locked then.
            self.retire_records(part.block).await?;
        }
        let _alone = self.blocks.exclusive(part.lock_range()).await;
        let Some(sector) = self.bat.get(part.block) else { return Ok(()) };
        match is_whole {
            true => self.release(part.block, sector).await,
            false => self.forget_bits(part, sector).await,
        }
    }

    /// How many bytes of a block lie within the disk.
    fn visible_bytes(&self, block: u32) -> u64 {
        let start = u64::from(block) * self.layout.block_bytes;
        self.layout.block_bytes.min(self.size_bytes() - start)
    }

    /// Flushes until the journal has no record of `block`.
    async fn retire_records(&self, block: u32) -> Result<()> {
        while self.journal.may_name(block) {
            self.check_writable()?;
            self.flush().await?;
        }
        Ok(())
    }

    /// Clears the bits of `part`, whose block the caller holds exclusively. A block without any bit is released.
    async fn forget_bits(&self, part: &BlockPart, sector: u32) -> Result<()> {
        self.retire_records(part.block).await?;
        // Also of a full block: a bitmap that somebody is loading must not come late, and say again that the block is full.
        let bits = self.bits_of(part.block, sector).await?;
        if self.bat.is_full(part.block) {
            bits.set(0..self.layout.sectors_per_block());
        }
        let len = self.layout.bitmap_bytes as usize;
        let left = Bits::from_bytes(&bits.to_bytes(len), self.layout.sectors_per_block());
        left.clear(part.sectors());
        if left.has_none(0..(self.visible_bytes(part.block) / SECTOR) as u32) {
            return self.release(part.block, sector).await;
        }
        self.void_batmap().await?;
        self.write_fewer_bits(sector, &left, &bits).await?;
        bits.clear(part.sectors());
        self.bat.set_full(part.block, false);
        Ok(())
    }

    /// Writes the bitmap of the block at `sector`, which has lost bits. A write that failed may have taken effect all the same, and
    /// what is written to such a sector later would be lost: so the old bitmap is written back. If that fails, too, the image takes
    /// no more writes.
    async fn write_fewer_bits(&self, sector: u32, left: &Bits, before: &Bits) -> Result<()> {
        let write = async |bits: &Bits| {
            let bytes = Segments::copied(&bits.to_bytes(self.layout.bitmap_bytes as usize));
            self.store.write_at(StoreOffset(u64::from(sector) * SECTOR), &bytes, Via::Cached).await
        };
        let Err(error) = write(left).await else { return Ok(()) };
        if write(before).await.is_err() {
            self.flusher.refuse_writes();
        }
        Err(error)
    }
}
