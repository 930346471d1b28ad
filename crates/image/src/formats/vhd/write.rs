//! Writes, zeroes and discards, one block at a time.

use std::ops::Range;
use std::sync::Arc;

use spile_core::{Result, Store, StoreOffset};

use super::alloc::Placed;
use super::bits::Bits;
use super::codec::bat::UNALLOCATED;
use super::journal::Record;
use super::{SECTOR, Sparse, Table};
use crate::layer::Reserved;
use crate::range_lock::RangeGuard;

/// A part of one block: `within` is in bytes from the block's start, on sector boundaries.
#[derive(Clone, Debug)]
pub(crate) struct BlockPart {
    pub block: u32,
    pub within: Range<u64>,
}

impl BlockPart {
    pub(super) fn sectors(&self) -> Range<u32> {
        (self.within.start / SECTOR) as u32..(self.within.end / SECTOR) as u32
    }

    pub(crate) fn len_bytes(&self) -> u64 {
        self.within.end - self.within.start
    }

    pub(super) fn lock_range(&self) -> Range<u64> {
        u64::from(self.block)..u64::from(self.block) + 1
    }
}

/// A part of a block, allocated and locked for one write.
pub struct SparseReserved<'a, S: Store> {
    sparse: &'a Arc<Sparse<S>>,
    part: BlockPart,
    placed: Placed,
    /// The block's bitmap, unless all of it is known to be set.
    bits: Option<Arc<Bits>>,
    held: RangeGuard<'a>,
}

impl<S: Store> Reserved for SparseReserved<'_, S> {
    fn offset(&self) -> StoreOffset {
        StoreOffset(self.sparse.layout.data_offset(self.placed.sector) + self.part.within.start)
    }

    async fn commit(self) -> Result<()> {
        let Self { sparse, part, placed, bits, held } = self;
        if let Some(bits) = bits {
            sparse.set_bits(&part, placed.sector, bits).await?;
        }
        drop(held);
        if placed.is_new && sparse.is_running_low() {
            sparse.prepare_beside();
        }
        Ok(())
    }
}

impl<S: Store> Sparse<S> {
    /// Makes place for the bytes of `part`: its block is allocated if need be, and cannot be released before the
    /// reservation is gone.
    pub(crate) async fn reserve_part(self: &Arc<Self>, part: BlockPart) -> Result<SparseReserved<'_, S>> {
        self.check_writable()?;
        let held = self.blocks.shared(part.lock_range()).await;
        let placed = self.place(part.block).await?;
        let bits = match self.bat.is_full(part.block) {
            true => None,
            false => Some(self.bits_of(part.block, placed.sector).await?),
        };
        Ok(SparseReserved { sparse: self, part, placed, bits, held })
    }

    /// Rule 3: notes that the sectors of `part`, whose data are written, are in this file. When it returns, that
    /// survives the death of the process.
    pub(super) async fn set_bits(self: &Arc<Self>, part: &BlockPart, sector: u32, bits: Arc<Bits>) -> Result<()> {
        let sectors = part.sectors();
        if self.journal.is_settled(part.block, &bits, sectors.clone()) {
            return Ok(());
        }
        if !self.journal.has_area() {
            self.journal.set_unrecorded(part.block, sector, bits.clone(), sectors);
            self.flush().await?;
            self.mark_if_full(part.block, &bits);
            return Ok(());
        }
        let record = Record { block: part.block, at_sector: sector, sectors };
        let slot = loop {
            match self.journal.reserve(&record) {
                Some(slot) => break slot,
                None => self.flush().await?,
            }
        };
        slot.record(&self.store, bits.clone()).await?;
        self.mark_if_full(part.block, &bits);
        if self.journal.is_filling() {
            self.retire_beside();
        }
        Ok(())
    }

    /// Marks the block full when all of its bitmap is set. Writers do not look at the bitmap from then on, so all of
    /// it must be settled.
    fn mark_if_full(&self, block: u32, bits: &Bits) {
        if self.journal.is_settled(block, bits, 0..self.layout.sectors_per_block()) {
            self.bat.set_full(block, true);
        }
    }

    /// Makes `part` read as zeroes. `below_is_zero`: what lies under the whole block reads as zeroes.
    pub(crate) async fn zero_part(
        self: &Arc<Self>,
        part: &BlockPart,
        may_unmap: bool,
        below_is_zero: bool,
    ) -> Result<()> {
        self.check_writable()?;
        if may_unmap && below_is_zero {
            return self.unmap_part(part).await;
        }
        let _held = self.blocks.shared(part.lock_range()).await;
        let sector = self.place(part.block).await?.sector;
        let bits = match self.bat.is_full(part.block) {
            true => None,
            false => Some(self.bits_of(part.block, sector).await?),
        };
        self.zero_data(part, sector, may_unmap).await?;
        match bits {
            Some(bits) => self.set_bits(part, sector, bits).await,
            None => Ok(()),
        }
    }

    /// Frees what it can of `part`. Sectors that are not in this file stay as they are below.
    pub(crate) async fn discard_part(&self, part: &BlockPart, below_is_zero: bool) -> Result<()> {
        self.check_writable()?;
        if below_is_zero {
            return self.unmap_part(part).await;
        }
        let _held = self.blocks.shared(part.lock_range()).await;
        match self.bat.get(part.block) {
            Some(sector) => self.zero_data(part, sector, true).await,
            None => Ok(()),
        }
    }

    /// Unmaps `part` of a block below which everything is zero: it reads as zeroes afterwards, and a block with
    /// nothing left is released.
    async fn unmap_part(&self, part: &BlockPart) -> Result<()> {
        let whole = part.len_bytes() == self.layout.block_bytes;
        if whole && self.release_if(part, false).await? {
            return Ok(());
        }
        {
            let _held = self.blocks.shared(part.lock_range()).await;
            let Some(sector) = self.bat.get(part.block) else { return Ok(()) };
            self.zero_data(part, sector, true).await?;
        }
        self.release_if(part, true).await.map(drop)
    }

    /// Zeroes data in place. Clear bits stay clear: what is under them is not looked at.
    pub(super) async fn zero_data(&self, part: &BlockPart, sector: u32, may_unmap: bool) -> Result<()> {
        let offset = StoreOffset(self.layout.data_offset(sector) + part.within.start);
        match may_unmap && self.store.info().punches {
            true => self.store.punch_hole(offset, part.len_bytes()).await,
            false => self.store.zero_range(offset, part.len_bytes()).await,
        }
    }

    /// Releases the block, unless somebody is writing to it now or (with `only_if_hole`) it still has data. True
    /// when it is not allocated afterwards.
    async fn release_if(&self, part: &BlockPart, only_if_hole: bool) -> Result<bool> {
        let Some(_alone) = self.blocks.try_exclusive(part.lock_range()) else { return Ok(false) };
        let Some(sector) = self.bat.get(part.block) else { return Ok(true) };
        if only_if_hole && !self.is_hole(sector).await? {
            return Ok(false);
        }
        self.release(part.block, sector).await.map(|()| true)
    }

    /// Takes its place from a block that the caller holds exclusively.
    pub(super) async fn release(&self, block: u32, sector: u32) -> Result<()> {
        self.void_batmap().await?;
        let table = self.table.read().await;
        self.clear_bat_entry(&table, block, sector).await?;
        self.bits.remove_with(block, || self.bat.clear(block));
        self.journal.forget(block);
        self.alloc.lock().released.fresh.push(sector);
        Ok(())
    }

    /// Clears the BAT entry of a block. A write that failed may have taken effect all the same, and what is written to
    /// the block later would be lost: so the entry is written back. If that fails, too, the image takes no more
    /// writes.
    async fn clear_bat_entry(&self, table: &Table, block: u32, sector: u32) -> Result<()> {
        let Err(error) = self.write_bat_entry(table, block, UNALLOCATED).await else { return Ok(()) };
        if self.write_bat_entry(table, block, sector).await.is_err() {
            self.flusher.refuse_writes();
        }
        Err(error)
    }

    async fn is_hole(&self, sector: u32) -> Result<bool> {
        if !self.store.info().punches {
            return Ok(false);
        }
        let found = self.store.extent_at(StoreOffset(self.layout.data_offset(sector))).await?;
        Ok(found.is_hole && found.len_bytes >= self.layout.block_bytes)
    }
}
