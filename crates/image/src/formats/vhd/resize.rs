//! Making an image longer while nobody uses it.
//!
//! # Order of writes
//!
//! After each step, and when the host or the process ends within one, the image opens with its old size or with the new one: a
//! footer is one sector, so it is there as a whole or not at all.
//!
//! A dynamic or differencing image:
//!
//! 1. The image is sealed: all of it is durable, and both footers agree.
//! 2. If the block table has no room for the new blocks, a new header, table and batmap are written behind all that is there, then
//!    a sync. No footer points at them yet. The file has no footer at its end meanwhile, so the copy at the start counts.
//!    If the table has room, the entries behind the last block become "unallocated", then a sync: until then they can hold anything.
//! 3. The footer at the end, with the new size and the place of the new header; sync. It counts now, because the image fits it.
//! 4. If the image does not fit the new footer after all, the old footer goes back to the end, and that is an error. Otherwise the
//!    footer's copy at the start, and the batmap; sync.
//!
//! Blocks and parent locators stay where they are, and so do the old header and table, which nothing refers to any more.
//!
//! Behind a new table with a batmap goes a new block: the last one of the disk, which is empty. A program that knows no batmap, as
//! QEMU, puts its blocks behind the table and all blocks. Without that block, the batmap would become a guest's data there.
//!
//! A fixed image:
//!
//! 1. Whatever lies between the old end of the disk and the footer is zeroed; sync.
//! 2. The new footer is written behind the new end of the disk, which makes the file longer; sync.
//! 3. The old footer, where the guest's bytes are now, is zeroed; sync.

use std::ops::{Range, RangeFrom};

use spile_core::{Code, Error, ErrorKind, Result, ResultExt, Segments, Store, StoreOffset, Via};

use super::check::write_batmap;
use super::codec::MAX_SIZE_BYTES;
use super::codec::bat::{ENTRY_BYTES, MAX_BLOCKS, UNALLOCATED, entries_for};
use super::codec::batmap::BatmapHeader;
use super::codec::footer::Footer;
use super::codec::geometry::Geometry;
use super::codec::header::Header;
use super::create::place_journal;
use super::footers::misfit;
use super::grow::grow_store;
use super::{Batmap, SECTOR, Sparse};
use crate::formats::raw::Raw;
use crate::layer::Layer as _;

/// Metadata start at a multiple of this, in bytes.
const ALIGN: u64 = 4096;

/// How much of a block table is written at a time, in entries.
const TABLE_ENTRIES: u32 = 256 << 10;

/// The metadata of an image once it has its new size.
struct Grown {
    footer: Footer,
    batmap: Option<Batmap>,
    /// Where the footer at the end goes.
    footer_at: u64,
}

/// Refuses a size that an image of `old_bytes` cannot get.
pub(super) fn check_size(old_bytes: u64, size_bytes: u64) -> Result<()> {
    if size_bytes > MAX_SIZE_BYTES {
        let what = format!("a VHD of {size_bytes} bytes is over the format's limit of 2040 GiB");
        let error = Error::new(ErrorKind::InvalidInput, what).coded(Code::FormatLimit);
        return Err(error.hint("at most 2040 GiB; convert the disk to raw for more"));
    }
    if !size_bytes.is_multiple_of(SECTOR) {
        let what = format!("a size of {size_bytes} bytes is no whole number of sectors");
        let next = size_bytes.next_multiple_of(SECTOR);
        return Err(Error::new(ErrorKind::InvalidInput, what).hint(format!("choose a multiple of 512, such as {next}")));
    }
    if size_bytes < old_bytes {
        let what = format!("the disk has {old_bytes} bytes and cannot shrink to {size_bytes} while it is in use");
        return Err(Error::new(ErrorKind::Unsupported, what)
            .hint("`spile resize --shrink` makes it shorter while nobody uses it"));
    }
    Ok(())
}

/// `footer` with another size, which becomes the original size as well: libvhdi takes that for the size of the disk. QEMU and
/// Virtual PC take the geometry's size for that of their own images; a geometry that says "too large" has QEMU go by the size
/// instead.
pub(super) fn resized(footer: &Footer, size_bytes: u64) -> Footer {
    let by_size = Geometry::for_size(size_bytes);
    let goes_by_geometry = [*b"vpc ", *b"qemu"].contains(&footer.creator);
    let geometry = if goes_by_geometry && by_size.size_bytes() != size_bytes { Geometry::MAX } else { by_size };
    Footer { original_size_bytes: size_bytes, current_size_bytes: size_bytes, geometry, ..footer.clone() }
}

async fn write<S: Store>(store: &S, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
    store.write_at(StoreOffset(offset_bytes), &Segments::copied(bytes), Via::Cached).await
}

impl<S: Store> Sparse<S> {
    /// Seals the image and gives it a larger size. What is in memory stays as it was: the image is dropped after this, and
    /// opened anew.
    pub(super) async fn grow(&self, size_bytes: u64) -> Result<()> {
        self.check_growth(size_bytes).at_path(self.store.path())?;
        self.seal().await?;
        if size_bytes == self.size_bytes() {
            return Ok(());
        }
        let blocks = entries_for(size_bytes, self.head().header.block_size_bytes) as u32;
        let grown = match blocks <= self.head().header.max_entries {
            true => self.in_place(size_bytes).await?,
            false => self.move_metadata(size_bytes, blocks).await?,
        };
        write(&self.store, grown.footer_at, &grown.footer.to_bytes()).await?;
        self.store.sync().await?;
        self.take_back_misfit(&grown).await?;
        write(&self.store, 0, &grown.footer.to_bytes()).await?;
        if let Some(batmap) = &grown.batmap {
            let map = self.batmap_bytes(&batmap.header);
            write_batmap(&self.store, batmap, &map, &grown.footer).await?;
        }
        self.store.sync().await
    }

    pub(super) fn check_growth(&self, size_bytes: u64) -> Result<()> {
        check_size(self.size_bytes(), size_bytes)?;
        let blocks = entries_for(size_bytes, self.head().header.block_size_bytes);
        match blocks > MAX_BLOCKS {
            true => Err(Error::new(ErrorKind::Unsupported, format!("{blocks} blocks are too many"))
                .hint("copy the disk to a VHD with larger blocks: spile convert")),
            false => Ok(()),
        }
    }

    /// Where the footer at the end is, in a sealed image.
    pub(super) fn footer_at(&self) -> u64 {
        self.store.len_bytes().next_multiple_of(SECTOR) - SECTOR
    }

    /// The block table has room: header and table stay. Nothing says what its unused entries hold, so they are written.
    async fn in_place(&self, size_bytes: u64) -> Result<Grown> {
        self.write_table(&self.head().header, self.bat.entries().., None).await?;
        self.store.sync().await?;
        let footer = resized(&self.head().footer, size_bytes);
        Ok(Grown { footer, batmap: self.head().batmap.clone(), footer_at: self.footer_at() })
    }

    /// Fails when the image does not fit its new footer, which is at the end already. The old footer is there again then.
    async fn take_back_misfit(&self, grown: &Grown) -> Result<()> {
        let Some(why) = misfit(&self.store, &grown.footer, grown.footer_at).await? else { return Ok(()) };
        write(&self.store, grown.footer_at, &self.head().footer.to_bytes()).await?;
        self.store.sync().await?;
        let hint = "its size is as before; copy it to a larger disk: spile convert --size";
        let error = Error::new(ErrorKind::Corrupt, "the image does not fit a larger size").hint(hint);
        Err(error.at_path(self.store.path()).caused_by(why))
    }

    /// Writes a header and a block table of `blocks` entries, and what belongs to them, where nothing else is.
    async fn move_metadata(&self, size_bytes: u64, blocks: u32) -> Result<Grown> {
        let is_file = self.store.info().grows_zeroed;
        let free_from = if is_file { self.store.len_bytes() } else { self.used_end() };
        let header_at = free_from.next_multiple_of(ALIGN);
        let header = Header {
            bat_offset_bytes: header_at + Header::LEN as u64,
            max_entries: blocks,
            ..self.head().header.clone()
        };
        let batmap = self.head().batmap.as_ref().map(|_| self.place_batmap(&header));
        let last = batmap.as_ref().map(|batmap| self.place_behind(batmap)).transpose()?;
        let end = last.map_or(header.bat_end_bytes(), |sector| self.layout.block_end(sector));
        if !is_file {
            self.clear(header_at..end).await?;
        }
        write(&self.store, header_at, &header.to_bytes()).await?;
        self.write_table(&header, 0.., last).await?;
        if let Some(batmap) = &batmap {
            write(&self.store, batmap.header_offset, &batmap.header.to_bytes()).await?;
        }
        self.store.sync().await?;
        let footer = Footer { data_offset: Some(header_at), ..resized(&self.head().footer, size_bytes) };
        Ok(Grown { footer, batmap, footer_at: if is_file { end } else { self.footer_at() } })
    }

    /// Where the batmap of an image with this header goes. It has room for a journal in front if the image has one.
    pub(super) fn place_batmap(&self, header: &Header) -> Batmap {
        let header_offset = header.bat_end_bytes();
        let map_at = match self.head().journal_area() {
            // Records keep their slots where the journal moves.
            Some(area) => place_journal(header_offset).start + (area.end - area.start),
            None => header_offset + SECTOR,
        };
        let map_bytes = u64::from(BatmapHeader::sectors_for(header.max_entries)) * SECTOR;
        Batmap { header_offset, header: BatmapHeader::void(map_at, map_bytes) }
    }

    /// The sector of a block behind the batmap. Its data begin on a page, as the allocator has it.
    pub(super) fn place_behind(&self, batmap: &Batmap) -> Result<u32> {
        let bitmap_bytes = self.layout.bitmap_bytes;
        let data_at = (batmap.header.map_bytes().end + bitmap_bytes).next_multiple_of(ALIGN);
        let sector = u32::try_from((data_at - bitmap_bytes) / SECTOR).ok().filter(|&sector| sector != UNALLOCATED);
        sector.ok_or_else(|| {
            Error::new(ErrorKind::NoSpace, "the file is too long for another block").at_path(self.store.path())
        })
    }

    /// Makes a part of a device zero, if it is there.
    async fn clear(&self, range: Range<u64>) -> Result<()> {
        let limit = self.footer_at();
        if range.end > limit {
            let what = format!("the block table needs room up to {} on a device that ends at {limit}", range.end);
            let error = Error::new(ErrorKind::NoSpace, what).at_path(self.store.path());
            return Err(error.hint("make the device longer first (lvextend)"));
        }
        self.store.zero_range(StoreOffset(range.start), range.end - range.start).await
    }

    /// Writes the table's entries from the block `from` on. Those behind the blocks that the image has now are unallocated, but
    /// for the last one, which lies at the sector `last` if that is given. No entry changes while a part of the table is written.
    pub(super) async fn write_table(&self, header: &Header, from: RangeFrom<u32>, last: Option<u32>) -> Result<()> {
        let place = |block| match block {
            _ if last.is_some() && block + 1 == header.max_entries => last,
            _ if block < self.bat.entries() => self.bat.get(block),
            _ => None,
        };
        // The table is padded to whole sectors, as other programs expect it.
        let entries = ((header.bat_end_bytes() - header.bat_offset_bytes) / ENTRY_BYTES) as u32;
        for first in (from.start..entries).step_by(TABLE_ENTRIES as usize) {
            let part = first..entries.min(first + TABLE_ENTRIES);
            let _alone = self.table.write().await;
            let bytes: Vec<u8> = part.flat_map(|block| place(block).unwrap_or(UNALLOCATED).to_be_bytes()).collect();
            write(&self.store, header.bat_offset_bytes + u64::from(first) * ENTRY_BYTES, &bytes).await?;
        }
        Ok(())
    }
}

/// Gives a fixed image a larger size. The image is dropped after this, and opened anew.
pub(super) async fn grow_fixed<S: Store>(footer: &Footer, raw: &Raw<S>, size_bytes: u64) -> Result<()> {
    let (store, old_bytes) = (raw.store(), raw.size_bytes());
    check_size(old_bytes, size_bytes).at_path(store.path())?;
    raw.seal().await?;
    match size_bytes == old_bytes {
        true => Ok(()),
        false => grow_store(footer, store, old_bytes, size_bytes).await,
    }
}
