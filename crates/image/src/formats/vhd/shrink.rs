//! Making an image shorter while nobody uses it.
//!
//! # Order of writes
//!
//! After each step, and when the host or the process ends within one, the image opens with its old size or with the new one. Whoever
//! asks for this gives up what lies behind the new end.
//!
//! A dynamic or differencing image:
//!
//! 1. What the last block holds behind the new end is zeroed, so that it does not come back when the image grows again.
//! 2. The image is sealed: all of it is durable, and both footers agree.
//! 3. The footer at the end, with the new size; sync. Then its copy at the start; sync. The block table stays, with more entries
//!    than the disk has blocks; those behind the last one count no more.
//! 4. These entries become "unallocated", and the batmap follows; sync.
//! 5. The places of their blocks are emptied, the footer goes behind the last block; sync; the file is cut there.
//!
//! A fixed image in a file: the new footer is written behind the new end; sync; the file is cut behind it. If the host ends between the two,
//! the disk has its old size, with that footer as 512 bytes of its content. On a device, the footer at its end changes, and nothing else.

use spile_core::{Error, ErrorKind, Result, ResultExt, Segments, Store, StoreOffset, Via};

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::check::write_batmap;
use super::codec::footer::Footer;
use super::resize::resized;
use super::{Head, SECTOR, Sparse};
use crate::formats::raw::Raw;
use crate::layer::Layer as _;

/// Refuses a size that no image can have.
fn check_shorter(size_bytes: u64) -> Result<()> {
    if size_bytes > 0 && size_bytes.is_multiple_of(SECTOR) {
        return Ok(());
    }
    let what = format!("a size of {size_bytes} bytes is no whole number of sectors, or none at all");
    Err(Error::new(ErrorKind::InvalidInput, what).hint("choose a multiple of 512"))
}

impl<S: Store> Sparse<S> {
    /// Makes the image shorter, and seals it.
    pub(super) async fn shrink(self: &Arc<Self>, size_bytes: u64) -> Result<()> {
        self.check_writable()?;
        check_shorter(size_bytes).at_path(self.store.path())?;
        self.zero_rest_of_block(size_bytes).await?;
        self.seal().await?;
        let old = self.head();
        let head = Head { footer: resized(&old.footer, size_bytes), ..(*old).clone() };
        self.write_end(&head.footer).await?;
        self.store.sync().await?;
        self.set_head(head);
        self.size_bytes.store(size_bytes, Ordering::Release);
        self.mend_copy().await?;
        let gone = self.drop_blocks(size_bytes).await?;
        self.drop_places(&gone).await
    }

    /// Step 1.
    async fn zero_rest_of_block(self: &Arc<Self>, size_bytes: u64) -> Result<()> {
        let (block, within) = self.layout.split(size_bytes);
        if within == 0 || self.bat.get(block).is_none() {
            return Ok(());
        }
        let rest = self.part(size_bytes, self.block_extent(block).end());
        self.zero_part(&rest, true, false).await
    }

    /// Step 4. Returns where the blocks lay.
    async fn drop_blocks(&self, size_bytes: u64) -> Result<Vec<u32>> {
        let blocks = size_bytes.div_ceil(self.layout.block_bytes) as u32;
        let gone: Vec<_> = self.bat.allocated().filter(|&(block, _)| block >= blocks).collect();
        gone.iter().for_each(|&(block, _)| self.bat.clear(block));
        let head = self.head();
        self.write_table(&head.header, blocks.., None).await?;
        if let Some(batmap) = &head.batmap {
            write_batmap(&self.store, batmap, &self.batmap_bytes(&batmap.header), &head.footer).await?;
        }
        self.store.sync().await?;
        Ok(gone.into_iter().map(|(_, sector)| sector).collect())
    }

    /// Step 5.
    async fn drop_places(&self, gone: &[u32]) -> Result<()> {
        let end = self.alloc.end_for(self.used_end());
        for &sector in gone.iter().filter(|&&sector| self.layout.block_end(sector) <= end) {
            self.empty_place(sector).await?;
        }
        if self.store.info().grows_zeroed && end < self.footer_at() {
            self.cut_tail().await?;
        }
        self.store.sync().await
    }
}

/// Makes a fixed image shorter. It is dropped after this, and opened anew.
pub(super) async fn shrink_fixed<S: Store>(footer: &Footer, raw: &Raw<S>, size_bytes: u64) -> Result<()> {
    let store = raw.store();
    check_shorter(size_bytes).at_path(store.path())?;
    raw.seal().await?;
    let is_file = store.info().grows_zeroed;
    let footer_at = if is_file { size_bytes } else { store.len_bytes().next_multiple_of(SECTOR) - SECTOR };
    let bytes = Segments::copied(&resized(footer, size_bytes).to_bytes());
    store.write_at(StoreOffset(footer_at), &bytes, Via::Cached).await?;
    store.sync().await?;
    if is_file {
        store.set_len(size_bytes + SECTOR).await?;
        store.sync().await?;
    }
    Ok(())
}
