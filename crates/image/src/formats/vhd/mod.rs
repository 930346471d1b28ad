//! VHD: fixed, dynamic and differencing images, read and write.
//!
//! # Order of writes
//!
//! What may be lost at which moment decides the order. "Cached" below means: written through the page cache, so it
//! survives the death of the process but not yet a power cut. "Sync" makes all that was written before durable.
//!
//! 1. **Space before use.** The file grows by whole steps: new length, a footer at its new end, sync. Only then may a
//!    block be placed there. Grown space reads as zeroes; on a device the bitmaps of the coming blocks are zeroed and
//!    synced instead. So a BAT entry, whenever it becomes durable, points at a block whose bitmap says "nothing here".
//!    The sync cannot be left out: a BAT entry that is durable before the length points past the end of the file. It makes
//!    the guest's dirty pages durable, too, so it is rare (a step is as long as all before it, and costs length only) and runs
//!    beside requests (`beside`). The footer needs no order of its own: until it is durable, the copy at the start is.
//! 2. **Block before BAT.** A new block's bitmap (all ones in a dynamic image on zeroed space, else zero) is written
//!    cached, then its BAT entry, cached. Neither needs a sync: until the data come, the block reads as before.
//! 3. **Data before bit.** Where a clear bit shows something else than the bytes under it (a parent, or stale bytes),
//!    the bit follows its data: data, then a record in the journal, cached, then the answer. The bitmap itself is
//!    written by the next flush only after a sync of the data.
//! 4. **Flush** = sync; bitmaps of recorded bits, cached; sync; journal half retired.
//! 5. **Release before reuse.** A released block loses its BAT entry (cached). After a sync that began later, and
//!    when no reader that knew the old address is left, its bytes and bitmap are punched; after one more sync it may
//!    be allocated again. The journal's records of the block are retired before that, too.
//! 6. **Close** = flush; footer behind the last block; sync; the file is cut there; batmap, its header; sync.
//!
//! 7. **Parents before child.** A chain that is opened for writing first makes its parents durable: they may have been
//!    leaves of a process that was killed, and from now on flushes go to the leaf only.
//!
//! Blocks and bits that are given up have their order of writes in `forget`, another parent in `reparent`, another size in
//! `resize`, `grow` and `shrink`, and a longer device in `room`.
//!
//! A batmap is trusted at open, and made void (and synced) before the first release of a block, as it would otherwise
//! call the block's successor full.

pub mod codec;

mod alloc;
mod bat;
mod beside;
mod bits;
mod check;
mod create;
mod facts;
mod flush;
mod footers;
mod forget;
mod grow;
mod journal;
mod layer;
mod lazy;
mod open;
mod parent;
mod reparent;
mod resize;
mod room;
mod shrink;
mod write;

pub use check::{check, repair};
pub use create::{CreateParams, VhdParent, create};
pub use layer::Vhd;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use spile_core::{Env, Error, ErrorKind, Extent, Result, ResultExt, Segments, Store, StoreOffset, Via};

use self::alloc::Alloc;
use self::bat::Bat;
use self::beside::Beside;
use self::bits::{Bits, BitsCache};
use self::codec::batmap::BatmapHeader;
use self::codec::footer::{DiskType, Footer};
use self::codec::header::Header;
use self::flush::Flusher;
use self::journal::Journal;
use self::write::BlockPart;
use super::{About, ImageFormat, OpenLayer};
use crate::check::{Lost, Report};
use crate::create::NewImage;
use crate::grace::Grace;
use crate::layer::{Found, MapPiece, ParentRef};
use crate::loads::Loads;
use crate::measure::Space;
use crate::range_lock::RangeLock;
use crate::room::RoomWatch;

/// The format.
pub struct VhdFormat;

impl ImageFormat for VhdFormat {
    const ABOUT: About = About {
        name: "vhd",
        aliases: &["vpc"],
        extensions: &["vhd", "avhd", "vpc"],
        subformats: &["dynamic", "fixed"],
        has_parents: true,
        has_options: false,
        size_unit_bytes: SECTOR,
        identity_mark: None,
    };
    type Layer<S: Store> = Vhd<S>;

    async fn open<S: Store>(store: S, env: &Arc<dyn Env>, how: OpenLayer) -> Result<Vhd<S>> {
        open::open(store, env, how).await
    }

    async fn named_parent<S: Store>(store: &S) -> Result<Option<ParentRef>> {
        let footer = footers::any_footer(store).await?;
        if footer.disk_type != DiskType::Differencing {
            return Ok(None);
        }
        let header = open::read_header(store, &footer).await?;
        parent::parent_ref(store, &header).await.map(Some)
    }

    async fn create<S: Store>(store: &S, env: &dyn Env, new: &NewImage) -> Result<()> {
        create(store, env, &CreateParams::from_new(new)?).await
    }

    fn space(new: &NewImage) -> Result<Space> {
        CreateParams::from_new(new)?.space()
    }

    async fn check<S: Store>(store: &S, env: &dyn Env) -> Result<Report> {
        check(store, env).await
    }

    async fn repair<S: Store>(store: &S, env: &dyn Env, lost: Lost) -> Result<Report> {
        repair(store, env, lost).await
    }
}

const SECTOR: u64 = spile_core::SECTOR_BYTES;

/// Where the parts of a dynamic or differencing image lie. Offsets in bytes.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub size_bytes: u64,
    pub block_bytes: u64,
    pub bitmap_bytes: u64,
    pub bat_offset: u64,
    pub batmap: Option<Batmap>,
    /// The area for a journal, which only images of ours have. [`Layout::journal_on`] says whether it can be used.
    pub journal: Option<Range<u64>>,
    /// Footer copy, header, BAT, batmap, locators and journal, when the image was opened: no block may touch them.
    pub metadata: Vec<Range<u64>>,
}

impl Layout {
    /// The journal's area, where a journal can be trusted. A record is good for one boot of this host, and says that what
    /// had returned by then is still there. A store on another host may have lost it in the same boot of this host.
    pub(crate) fn journal_on<S: Store>(&self, store: &S) -> Option<Range<u64>> {
        self.journal.clone().filter(|_| store.info().is_local)
    }

    /// How many blocks the disk has.
    pub(crate) fn blocks(&self) -> u32 {
        self.size_bytes.div_ceil(self.block_bytes) as u32
    }

    /// Where the data of a block lie whose BAT entry is `sector`.
    pub(crate) fn data_offset(&self, sector: u32) -> u64 {
        u64::from(sector) * SECTOR + self.bitmap_bytes
    }

    /// One past the last byte of a block whose BAT entry is `sector`.
    pub(crate) fn block_end(&self, sector: u32) -> u64 {
        self.data_offset(sector) + self.block_bytes
    }

    /// One past the last byte of the metadata.
    pub(crate) fn metadata_end(&self) -> u64 {
        self.metadata.iter().map(|range| range.end).max().unwrap_or(0)
    }

    /// What alignment may leave unused behind the last block, in bytes.
    pub(crate) fn slack_bytes(&self) -> u64 {
        4096 + self.bitmap_bytes
    }

    pub(crate) fn sectors_per_block(&self) -> u32 {
        (self.block_bytes / SECTOR) as u32
    }

    /// The block that holds guest byte `at`, and the byte in it.
    pub(crate) fn split(&self, at: u64) -> (u32, u64) {
        ((at / self.block_bytes) as u32, at % self.block_bytes)
    }
}

/// Where the batmap lies.
#[derive(Clone, Debug)]
pub(crate) struct Batmap {
    pub header_offset: u64,
    pub header: BatmapHeader,
}

impl Batmap {
    fn ranges(&self) -> [Range<u64>; 2] {
        [self.header_offset..self.header_offset + BatmapHeader::LEN as u64, self.header.map_bytes()]
    }
}

/// Footer and header of an open image.
#[derive(Clone)]
pub(crate) struct Head {
    footer: Footer,
    header: Header,
    batmap: Option<Batmap>,
    /// One past the last byte of the metadata.
    metadata_end: u64,
    /// Where the next header may be written: the other place of the pair in which the header lies ([`reparent`]).
    spare: Option<Range<u64>>,
}

impl Head {
    fn journal_area(&self) -> Option<Range<u64>> {
        self.batmap.as_ref().and_then(|batmap| batmap.header.journal_area(batmap.header_offset))
    }
}

/// Where the block table lies. Whoever writes an entry holds this shared until the entry is published in memory, too.
pub(crate) struct Table {
    at: u64,
    /// Where it is to lie next, while it moves: entries are written there as well.
    next_at: Option<u64>,
}

/// A dynamic or differencing VHD.
pub struct Sparse<S> {
    store: S,
    /// What counts now. Taken as a whole, and replaced as a whole when the image gets another parent.
    head: Mutex<Arc<Head>>,
    /// The image is a differencing one, as its footer says: kept apart for whoever must not take a lock for it.
    has_parent: AtomicBool,
    /// What was wrong with the other footer when the image was opened.
    footer_problem: Option<String>,
    /// The size of the disk: as the footers say, once that is durable.
    size_bytes: AtomicU64,
    table: async_lock::RwLock<Table>,
    /// As it was when the image was opened.
    layout: Layout,
    /// How data are reached: directly only when no 4 KiB page holds both data and metadata.
    via: Via,
    /// The image was opened for reading only, or has been sealed since.
    read_only: AtomicBool,
    bat: Bat,
    /// Of a lazy table: which blocks are full.
    batmap: Option<Vec<u8>>,
    bits: BitsCache,
    journal: Journal,
    alloc: Alloc,
    room: RoomWatch,
    flusher: Flusher,
    grace: Grace,
    /// What runs beside requests.
    beside: Beside,
    /// By block number: writers hold their block shared, a release holds it exclusively.
    blocks: RangeLock,
    /// Loads of bitmaps, by block and the sector at which it lies. A request for a bitmap that is being loaded waits
    /// for that load. So a bitmap that was read early cannot enter the cache after the one in use was changed, written
    /// and dropped.
    loads: Loads<(u32, u32), Arc<Bits>>,
}

impl<S: Store> Sparse<S> {
    fn is_read_only(&self) -> bool {
        self.read_only.load(Ordering::Acquire)
    }

    fn is_differencing(&self) -> bool {
        self.has_parent.load(Ordering::Acquire)
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    /// Footer and header as they are now.
    fn head(&self) -> Arc<Head> {
        self.head.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    fn set_head(&self, head: Head) {
        let is_differencing = head.footer.disk_type == DiskType::Differencing;
        *self.head.lock().unwrap_or_else(|e| e.into_inner()) = Arc::new(head);
        self.has_parent.store(is_differencing, Ordering::Release);
    }

    /// What is known of the run that starts at guest byte `at`, and how far that goes, at most `len_bytes`. Never
    /// beyond one block, except for a hole.
    pub(crate) fn find(&self, at: u64, len_bytes: u64) -> (Found, u64) {
        let (block, _) = self.layout.split(at);
        loop {
            let sector = self.bat.get(block);
            let found = match sector {
                Some(sector) => self.find_in(sector, at, len_bytes),
                None => self.find_nothing(block, at, len_bytes),
            };
            // The block may have been released and placed elsewhere in between; then these bits are not those of the
            // old place. (It cannot be back at the old place, which is not used again while a reader may know it.)
            if self.bat.get(block) == sector {
                return found;
            }
        }
    }

    /// [`Sparse::find`] in a block that is not allocated, or of which that is not known.
    fn find_nothing(&self, block: u32, at: u64, len_bytes: u64) -> (Found, u64) {
        match self.bat.missing_page(block) {
            None => (Found::Below, self.hole_len(block, at, len_bytes)),
            Some(page) => {
                let end = u64::from(self.bat.blocks_of(page).end) * self.layout.block_bytes;
                (Found::Miss(MapPiece(lazy::PAGE_PIECE + u64::from(page))), len_bytes.min(end - at))
            }
        }
    }

    /// The length of the unallocated run from `at`, which lies in `block`, in bytes.
    fn hole_len(&self, block: u32, at: u64, len_bytes: u64) -> u64 {
        let until = ((at + len_bytes).div_ceil(self.layout.block_bytes)) as u32;
        let next = self.bat.next_allocated(block.saturating_add(1), until);
        next.map_or(len_bytes, |next| u64::from(next) * self.layout.block_bytes - at)
    }

    /// [`Sparse::find`] in a block that lies at `sector`.
    fn find_in(&self, sector: u32, at: u64, len_bytes: u64) -> (Found, u64) {
        let (block, within) = self.layout.split(at);
        let in_block = len_bytes.min(self.layout.block_bytes - within);
        let data = Found::Data(StoreOffset(self.layout.data_offset(sector) + within));
        if self.bat.is_full(block) {
            return (data, in_block);
        }
        let Some(bits) = self.bits.get(block) else { return (Found::Miss(MapPiece(block.into())), in_block) };
        let first = (within / SECTOR) as u32;
        let last = (within + in_block).div_ceil(SECTOR) as u32;
        let (set, sectors) = bits.run(first..last);
        let run_end = u64::from(first + sectors) * SECTOR;
        let run = in_block.min(run_end - within);
        (if set { data } else { Found::Below }, run)
    }

    /// Where guest byte `at` lies that is known to be in this file, and how far its block goes on, at most `len_bytes`.
    pub(crate) fn locate(&self, at: u64, len_bytes: u64) -> (Found, u64) {
        let (block, within) = self.layout.split(at);
        let len = len_bytes.min(self.layout.block_bytes - within);
        match self.bat.get(block) {
            Some(sector) => (Found::Data(StoreOffset(self.layout.data_offset(sector) + within)), len),
            None => match (self.find_nothing(block, at, len), self.bat.get(block)) {
                ((found @ Found::Miss(_), len), _) => (found, len),
                // The page was read meanwhile.
                (_, Some(sector)) => (Found::Data(StoreOffset(self.layout.data_offset(sector) + within)), len),
                _ => (Found::Below, len),
            },
        }
    }

    /// The part of the first allocated block in `extent`.
    pub(crate) fn next_held(&self, extent: Extent) -> Option<Extent> {
        let until = extent.end().div_ceil(self.layout.block_bytes) as u32;
        let block = self.bat.next_allocated(self.layout.split(extent.start()).0, until)?;
        let start = extent.start().max(self.block_extent(block).start());
        let part = self.part(start, extent.end());
        Some(Extent::from_range(start..start + part.len_bytes()))
    }

    /// The part of `at..end` that lies in the block of `at`.
    pub(crate) fn part(&self, at: u64, end: u64) -> BlockPart {
        let (block, within) = self.layout.split(at);
        let len = (end - at).min(self.layout.block_bytes - within);
        BlockPart { block, within: within..within + len }
    }

    /// The guest bytes of a block.
    pub(crate) fn block_extent(&self, block: u32) -> Extent {
        let start = u64::from(block) * self.layout.block_bytes;
        Extent::from_range(start..start + self.layout.block_bytes)
    }

    /// Reads the bitmap of an allocated block into the cache.
    pub(crate) async fn load_bits(&self, block: u32) -> Result<()> {
        let _reader = self.grace.enter();
        match self.bat.get(block) {
            Some(sector) => self.bits_of(block, sector).await.map(drop),
            None => Ok(()),
        }
    }

    /// The bitmap of a block, read if need be. The caller keeps the block from being released.
    async fn bits_of(&self, block: u32, sector: u32) -> Result<Arc<Bits>> {
        if let Some(bits) = self.bits.get(block) {
            return Ok(bits);
        }
        self.loads.join((block, sector), self.read_bits(block, sector)).await
    }

    async fn read_bits(&self, block: u32, sector: u32) -> Result<Arc<Bits>> {
        // A load may have ended since the cache was looked at.
        if let Some(bits) = self.bits.get(block) {
            return Ok(bits);
        }
        let offset = u64::from(sector) * SECTOR;
        let bytes = Segments::zeroed(self.layout.bitmap_bytes as usize);
        self.store.read_at(StoreOffset(offset), &bytes, Via::Cached).await.at_offset(offset)?;
        let bits = Bits::from_bytes(&bytes.to_vec(), self.layout.sectors_per_block());
        // The block may have been released while its bitmap was read, and may lie elsewhere now.
        Ok(self.bits.insert_if(block, bits, |bits| {
            let is_current = self.bat.get(block) == Some(sector);
            if is_current && bits.is_full() {
                self.bat.set_full(block, true);
            }
            is_current
        }))
    }

    fn unsupported(&self, what: &str) -> Error {
        Error::new(ErrorKind::Unsupported, what).at_path(self.store.path())
    }

    fn check_writable(&self) -> Result<()> {
        // It stays so until the image is opened again.
        let why = |kind, message: &str| Err(Error::new(kind, message).at_path(self.store.path()).permanent());
        if self.is_read_only() {
            return why(ErrorKind::ReadOnly, "the image is open for reading only");
        }
        match self.flusher.is_broken() {
            true => why(
                ErrorKind::Io,
                "the image's map could not be written; it takes no more writes until it is opened again",
            ),
            false => Ok(()),
        }
    }
}
