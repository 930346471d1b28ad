//! The block table of a parent, read page by page when a page is needed.
//!
//! A table of 2 TiB takes 4 MiB, and a chain has many. Opened for reading only, as a parent, an image reads none of its table, so a
//! long chain opens at once. A page of 1,024 entries is read when a request needs it, and stays.
//!
//! **What a hostile image can do** with a table that is not checked as a whole: each entry is checked when its page is read. A block that goes
//! past the end of the file or lies over metadata is an error for whoever reads there. Blocks that overlap each other are not noticed; they show
//! the same bytes of the same file at two places of the disk, which whoever made the image could have written twice. Nobody writes to
//! such an image: for writing it is opened anew, and checked as a whole. So it is where a file does not end with the footer that it begins
//! with, as one that was cut short.

use spile_core::{Result, ResultExt, Segments, Store, StoreOffset, Via};

use super::codec::bat::{UNALLOCATED, decode};
use super::codec::batmap::is_full;
use super::open::check_blocks;
use super::{Bat, Layout, Sparse};

/// Pieces of the map with this number and above are pages of the table; those below are bitmaps of blocks.
pub(super) const PAGE_PIECE: u64 = 1 << 40;

/// The entries of a page.
async fn read_page<S: Store>(store: &S, layout: &Layout, bat: &Bat, page: u32) -> Result<Vec<u32>> {
    let blocks = bat.blocks_of(page);
    let bytes = Segments::zeroed(blocks.len() * 4);
    let offset = layout.bat_offset + u64::from(blocks.start) * 4;
    store.read_at(StoreOffset(offset), &bytes, Via::Cached).await.at_offset(offset)?;
    Ok(decode(&bytes.to_vec()).collect())
}

/// The places of blocks in the first page, which tell how the image is laid out.
pub(super) async fn first_sectors<S: Store>(store: &S, layout: &Layout, bat: &Bat) -> Result<Vec<u32>> {
    let mut sectors = read_page(store, layout, bat, 0).await?;
    sectors.retain(|&sector| sector != UNALLOCATED);
    Ok(sectors)
}

impl<S: Store> Sparse<S> {
    /// Reads a page of the table, and checks what it says.
    pub(super) async fn load_page(&self, page: u32) -> Result<()> {
        let sectors = read_page(&self.store, &self.layout, &self.bat, page).await?;
        let mut sorted: Vec<u32> = sectors.iter().copied().filter(|&sector| sector != UNALLOCATED).collect();
        sorted.sort_unstable();
        check_blocks(self.store.len_bytes(), &self.layout, &sorted).at_path(self.store.path())?;
        self.bat.fill(page, &sectors, |block| self.batmap.as_ref().is_some_and(|map| is_full(map, block)));
        Ok(())
    }
}
