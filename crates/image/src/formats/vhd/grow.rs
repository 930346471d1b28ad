//! Making an image longer while it is in use.
//!
//! # Order of writes
//!
//! After each step, and when the host or the process ends within one, the image opens with its old size or with the new one, with all
//! that was acknowledged. The new size is told when it is durable; until then no request goes behind the old end.
//!
//! A dynamic or differencing image:
//!
//! 1. Both footers are in their places. Nobody prepares space meanwhile, for that moves the footer at the end.
//! 2. If the block table has room, its entries behind the last block become "unallocated"; sync. Then step 5.
//! 3. Else room for a new header, table, journal and batmap is made behind all blocks. From now on **every change of an entry goes to
//!    both tables, and every record to both journals**, so that either may count at any moment. What was there before follows: the
//!    table from memory, in parts, while no entry changes; the records by flushes that retire them.
//! 4. The new header and an empty batmap; sync. No footer points there yet.
//! 5. The footer at the end, with the new size and the place of the header; then its copy at the start; sync.
//! 6. The old table and journal are no longer written, and the size is told.
//!
//! When one of the footers could not be written, nobody knows which one counts. Then both tables and journals are written on, until
//! the image is opened again, and the image does not grow before that.
//!
//! What lies where, and the block behind the batmap, are as in `resize`.
//!
//! A fixed image: as in `resize`; the size is told behind the last step.

use std::sync::atomic::Ordering;

use spile_core::{Error, ErrorKind, Result, ResultExt, SECTOR_BYTES, Segments, Store, StoreOffset, Via};

use super::codec::bat::entries_for;
use super::codec::footer::Footer;
use super::codec::header::Header;
use super::open::metadata_ranges;
use super::resize::{check_size, resized};
use super::{Head, SECTOR, Sparse};
use crate::formats::raw::Raw;
use crate::layer::Layer as _;

/// Metadata start at a multiple of this, in bytes.
const ALIGN: u64 = 4096;

impl<S: Store> Sparse<S> {
    /// Makes the image `size_bytes` long.
    pub(super) async fn grow_in_use(&self, size_bytes: u64) -> Result<()> {
        self.check_writable()?;
        let _preparing = self.alloc.preparing().await;
        self.check_writable()?;
        self.check_growth(size_bytes).and_then(|()| self.check_reach(size_bytes)).at_path(self.store.path())?;
        if size_bytes == self.size_bytes() {
            return Ok(());
        }
        if self.table.read().await.next_at.is_some() {
            let error = Error::new(ErrorKind::Unsupported, "the image could not grow before, and was in use since");
            return Err(error.at_path(self.store.path()).hint("open it anew, then make it longer"));
        }
        self.restore_footers().await?;
        let blocks = entries_for(size_bytes, self.head().header.block_size_bytes) as u32;
        match blocks <= self.head().header.max_entries {
            true => self.grow_in_place(size_bytes).await?,
            false => self.grow_with_table(size_bytes, blocks).await?,
        }
        self.bat.grow(blocks);
        self.size_bytes.store(size_bytes, Ordering::Release);
        Ok(())
    }

    /// Refuses a size whose last bytes could not be reached in the way that was chosen when the image was opened.
    fn check_reach(&self, size_bytes: u64) -> Result<()> {
        let align = u64::from(self.store.info().offset_align_bytes);
        if self.via == Via::Cached || size_bytes.is_multiple_of(align) {
            return Ok(());
        }
        let what = format!("the last bytes of a size of {size_bytes} could not be reached by direct I/O");
        Err(Error::new(ErrorKind::InvalidInput, what).hint(format!("choose a multiple of {align}")))
    }

    /// The table has room.
    async fn grow_in_place(&self, size_bytes: u64) -> Result<()> {
        let old = self.head();
        if old.header.bat_end_bytes() > self.footer_at() {
            let error = Error::new(ErrorKind::Corrupt, "the block table goes over the footer at the end");
            return Err(error.at_path(self.store.path()).hint("copy the disk to a larger one: spile convert --size"));
        }
        self.write_table(&old.header, self.bat.entries().., None).await?;
        self.store.sync().await?;
        let head = Head { footer: resized(&old.footer, size_bytes), ..(*old).clone() };
        self.write_end(&head.footer).await?;
        self.set_head(head);
        self.restore_footers().await
    }

    /// The table needs another place, and with it the header, the journal and the batmap.
    async fn grow_with_table(&self, size_bytes: u64, blocks: u32) -> Result<()> {
        let (head, last) = self.plan_growth(size_bytes, blocks)?;
        let header_at = head.footer.data_offset.unwrap_or(0);
        let end = last.map_or(head.header.bat_end_bytes(), |sector| self.layout.block_end(sector));
        self.take_room(&(header_at..end)).await?;
        if let Err(error) = self.write_next(&head, header_at, last).await {
            self.table.write().await.next_at = None;
            self.journal.write_also_to(0);
            return Err(error);
        }
        self.write_end(&head.footer).await?;
        let table_at = head.header.bat_offset_bytes;
        self.set_head(head);
        if let Err(error) = self.restore_footers().await {
            // The block behind the batmap is in the new table only, and that table may count from now on.
            self.alloc.keep_until(end);
            return Err(error);
        }
        let mut table = self.table.write().await;
        (table.at, table.next_at) = (table_at, None);
        self.journal.moved();
        self.flusher.note_void_batmap();
        if let Some(sector) = last {
            self.bat.set(blocks - 1, sector);
        }
        Ok(())
    }

    /// The head with another size and room for so many blocks, and the place of the block behind its batmap.
    fn plan_growth(&self, size_bytes: u64, blocks: u32) -> Result<(Head, Option<u32>)> {
        let old = self.head();
        let header_at = self.alloc.free_from(ALIGN);
        let bat_offset_bytes = header_at + Header::LEN as u64;
        let header = Header { bat_offset_bytes, max_entries: blocks, ..old.header.clone() };
        let batmap = old.batmap.as_ref().map(|_| self.place_batmap(&header));
        let last = batmap.as_ref().map(|batmap| self.place_behind(batmap)).transpose()?;
        let footer = Footer { data_offset: Some(header_at), ..resized(&old.footer, size_bytes) };
        let mut head = Head { footer, header, batmap, spare: None, metadata_end: 0 };
        let metadata = metadata_ranges(&head.footer, &head.header, &head.batmap, &head.journal_area(), u64::MAX);
        head.metadata_end = metadata.iter().map(|range| range.end).max().unwrap_or(0);
        Ok((head, last))
    }

    /// Steps 3 and 4.
    async fn write_next(&self, head: &Head, header_at: u64, last: Option<u32>) -> Result<()> {
        self.table.write().await.next_at = Some(head.header.bat_offset_bytes);
        self.journal.write_also_to(head.journal_area().map_or(0, |area| area.start));
        self.write_table(&head.header, 0.., last).await?;
        while self.journal.has_left_behind() {
            self.check_writable()?;
            self.flush().await?;
        }
        if let Some(batmap) = &head.batmap {
            self.write_cached(batmap.header_offset, &batmap.header.to_bytes()).await?;
        }
        self.write_cached(header_at, &head.header.to_bytes()).await?;
        self.store.sync().await
    }
}

/// Makes a fixed image `size_bytes` long while it is in use.
pub(super) async fn grow_fixed_in_use<S: Store>(footer: &Footer, raw: &Raw<S>, size_bytes: u64) -> Result<()> {
    let store = raw.store();
    raw.grow(size_bytes, async |old_bytes| {
        check_size(old_bytes, size_bytes).at_path(store.path())?;
        if size_bytes == old_bytes {
            return Ok(());
        }
        grow_store(footer, store, old_bytes, size_bytes).await
    })
    .await
}

/// Moves the footer of a fixed image to the new end of its data.
pub(super) async fn grow_store<S: Store>(footer: &Footer, store: &S, old_bytes: u64, size_bytes: u64) -> Result<()> {
    let (len, is_file) = (store.len_bytes(), store.info().grows_zeroed);
    let old_footer_at = len.next_multiple_of(SECTOR) - SECTOR;
    if !is_file && size_bytes > old_footer_at {
        let what = format!("a disk of {size_bytes} bytes and its footer do not fit a device of {len}");
        let error = Error::new(ErrorKind::NoSpace, what).at_path(store.path());
        return Err(error.hint("copy the disk to a longer device: spile convert --onto"));
    }
    let spare_end = old_footer_at.min(size_bytes);
    if spare_end > old_bytes {
        store.zero_range(StoreOffset(old_bytes), spare_end - old_bytes).await?;
        store.sync().await?;
    }
    let footer_at = old_footer_at.max(size_bytes);
    let bytes = Segments::copied(&resized(footer, size_bytes).to_bytes());
    store.write_at(StoreOffset(footer_at), &bytes, Via::Cached).await?;
    store.sync().await?;
    if footer_at > old_footer_at {
        // The guest's data begin here: the page must not stay in the page cache as a part of a cached write.
        store.zero_range(StoreOffset(old_footer_at), SECTOR_BYTES).await?;
        store.sync().await?;
    }
    Ok(())
}
