//! Making an empty VHD.
//!
//! A dynamic or differencing image is laid out so:
//!
//! | what | where |
//! |---|---|
//! | copy of the footer | 0 |
//! | header | 512 |
//! | BAT | 1536, padded to a sector |
//! | batmap's header | behind the BAT, where libvhd expects it |
//! | journal | the next multiple of 4096, [`JOURNAL_BYTES`] long |
//! | batmap | behind the journal |
//! | parent locators | behind the batmap, a sector or more each |
//! | first block's bitmap | where its data, behind it, start at a multiple of 4096 |
//! | footer | at the end |
//!
//! # Where the journal is, and why there
//!
//! Other programs must accept the file and never write over the journal. A parent locator of its own could point at
//! it, but libvhd refuses a header with a platform code it does not know, and `vhd-util check` one with any locator
//! in a dynamic disk. The batmap's header, in contrast, says where its map is, and the map need not follow at once:
//! libvhd and tapdisk allocate only behind the map, so what lies between ([`BatmapHeader::journal_area`]) is ours. A
//! writer that knows nothing of batmaps puts its first block over the batmap's header, and then no journal is found.

use std::ops::Range;

use spile_core::{Code, Env, Error, ErrorKind, Result, SECTOR_BYTES, Segments, Store, StoreOffset, Via};

use super::codec::MAX_SIZE_BYTES;
use super::codec::bat::{self, MAX_BLOCKS};
use super::codec::batmap::BatmapHeader;
use super::codec::footer::{DiskType, Footer};
use super::codec::header::{DEFAULT_BLOCK_BYTES, Header, MAX_BLOCK_BYTES, MIN_BLOCK_BYTES};
use super::codec::locator::{Locator, MAX_PATH_BYTES, Platform, encode};
use super::codec::time;
use super::parent;
use crate::create::{NewImage, NewParent};
use crate::measure::{Space, Unit};

/// The length of the journal's area in bytes.
pub const JOURNAL_BYTES: u64 = 1 << 20;

/// Data and journal start at a multiple of this, in bytes.
const ALIGN: u64 = 4096;

/// How much of the BAT is written at a time, in bytes.
const BAT_WRITE_BYTES: u64 = 1 << 20;

/// The parent of a differencing image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhdParent {
    /// The way from the child's folder to the parent, with `/` between its parts.
    pub relative_path: String,
    /// Where the parent is by its absolute path, if children that are moved should still look there.
    pub absolute_path: Option<String>,
    /// The UUID of the parent's footer; zero for a raw parent.
    pub uuid: [u8; 16],
    /// When the parent was last changed, in seconds since 2000.
    pub timestamp: u32,
    /// The parent's file name.
    pub name: String,
}

/// What to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateParams {
    /// Fixed, dynamic or differencing.
    pub disk_type: DiskType,
    /// The size of the virtual disk: a positive multiple of 512, at most 2040 GiB.
    pub size_bytes: u64,
    /// The size of a block; blktap and libvhd read 2 MiB only. Ignored for fixed disks.
    pub block_size_bytes: u32,
    /// The parent, for differencing disks only.
    pub parent: Option<VhdParent>,
    /// The UUID; `None` = a new one.
    pub uuid: Option<[u8; 16]>,
}

impl CreateParams {
    /// An empty disk without a parent, in blocks of 2 MiB.
    pub fn new(disk_type: DiskType, size_bytes: u64) -> Self {
        Self { disk_type, size_bytes, block_size_bytes: DEFAULT_BLOCK_BYTES, parent: None, uuid: None }
    }

    /// A differencing disk on `parent`, in blocks of 2 MiB.
    pub fn child(size_bytes: u64, parent: VhdParent) -> Self {
        Self { parent: Some(parent), ..Self::new(DiskType::Differencing, size_bytes) }
    }
}

impl CreateParams {
    /// The parameters for `new`: a differencing disk where it has a parent, else a dynamic one unless it says `fixed`.
    pub(super) fn from_new(new: &NewImage) -> Result<Self> {
        let params = match (new.subformat.as_deref(), &new.parent) {
            (Some("fixed"), Some(_)) => {
                return Err(invalid("a fixed VHD has no parent; leave out --subformat"));
            }
            (Some("fixed"), None) => Self::new(DiskType::Fixed, new.size_bytes),
            (_, None) => Self::new(DiskType::Dynamic, new.size_bytes),
            (_, Some(parent)) => Self::child(new.size_bytes, VhdParent::from_new(parent)),
        };
        let block_size_bytes = new.unit_bytes.unwrap_or(params.block_size_bytes);
        Ok(Self { block_size_bytes, uuid: new.uuid.map(|uuid| uuid.0), ..params })
    }
}

impl VhdParent {
    pub(super) fn from_new(parent: &NewParent) -> Self {
        Self {
            relative_path: parent.relative_path.clone(),
            absolute_path: None,
            uuid: parent::uuid_for(parent.identity),
            timestamp: parent.changed_unix_s.map_or(0, time::from_unix_s),
            name: parent.name.clone(),
        }
    }
}

/// Writes an empty VHD into `store`, which is empty itself, or a device. Everything is durable when it returns.
///
/// # Errors
/// `InvalidInput` for a size, block size or parent that cannot be; `Exists` when the store has bytes; `NoSpace`
/// when a device is too small; I/O errors. A failed creation may leave a part of the image behind.
pub async fn create<S: Store>(store: &S, env: &dyn Env, params: &CreateParams) -> Result<()> {
    let made = match params.check().and_then(|()| check_store(store)) {
        Err(error) => Err(error),
        Ok(()) if params.disk_type == DiskType::Fixed => create_fixed(store, env, params).await,
        Ok(()) => create_sparse(store, env, params).await,
    };
    made.map_err(|error| error.at_path(store.path()))
}

impl CreateParams {
    fn check(&self) -> Result<()> {
        self.check_size()?;
        match (self.disk_type, &self.parent) {
            (DiskType::Fixed, None) => Ok(()),
            (DiskType::Dynamic, None) => self.check_blocks(),
            (DiskType::Differencing, Some(parent)) => {
                self.check_blocks()?;
                parent.check()
            }
            (DiskType::Differencing, None) => Err(invalid("a differencing disk needs a parent")),
            (_, Some(_)) => Err(invalid("only a differencing disk has a parent")),
        }
    }

    /// The space that the new image takes.
    pub(super) fn space(&self) -> Result<Space> {
        self.check()?;
        if self.disk_type == DiskType::Fixed {
            return Ok(Space::whole(self.size_bytes, SECTOR_BYTES));
        }
        let (plan, block) = (Plan::new(self), u64::from(self.block_size_bytes));
        let bitmap = u64::from(bat::bitmap_bytes(self.block_size_bytes));
        // Blocks are placed as the allocator does it: a free sector, the bitmap, and data that begin on a page.
        let stride_bytes = (SECTOR_BYTES + bitmap + block).next_multiple_of(ALIGN);
        let first = (plan.metadata_end + SECTOR_BYTES + bitmap).next_multiple_of(ALIGN);
        Ok(Space {
            empty_bytes: plan.end,
            written_bytes: plan.end - JOURNAL_BYTES,
            tail_bytes: SECTOR_BYTES,
            unit: Some(Unit { data_bytes: block, lead_bytes: first - plan.end, stride_bytes }),
            tables: None,
            virtual_bytes: self.size_bytes,
        })
    }

    fn check_size(&self) -> Result<()> {
        let size = self.size_bytes;
        if size > MAX_SIZE_BYTES {
            return Err(invalid(format!("a VHD of {size} bytes is over the format's limit of 2040 GiB"))
                .coded(Code::FormatLimit)
                .hint("at most 2040 GiB; use --format raw for more"));
        }
        if size == 0 || !size.is_multiple_of(SECTOR_BYTES) {
            return Err(invalid(format!("the size of {size} bytes is not a positive multiple of 512"))
                .hint(format!("the next larger size is {}", size.next_multiple_of(512).max(512))));
        }
        Ok(())
    }

    fn check_blocks(&self) -> Result<()> {
        let block = self.block_size_bytes;
        if !block.is_power_of_two() || !(MIN_BLOCK_BYTES..=MAX_BLOCK_BYTES).contains(&block) {
            return Err(invalid(format!("the block size of {block} bytes cannot be"))
                .hint("a power of two from 4 KiB to 256 MiB; 2 MiB for other programs to read it"));
        }
        let blocks = bat::entries_for(self.size_bytes, block);
        if blocks > MAX_BLOCKS {
            return Err(invalid(format!("{blocks} blocks of {block} bytes are too many")).hint("choose larger blocks"));
        }
        Ok(())
    }

    fn footer(&self, env: &dyn Env) -> Footer {
        let uuid = self.uuid.unwrap_or_else(|| new_uuid(env));
        Footer::new(self.disk_type, self.size_bytes, uuid, env.now_unix_s())
    }
}

/// A UUID of version 4, variant 1 of RFC 9562: random. So it is never the null UUID either.
fn new_uuid(env: &dyn Env) -> [u8; 16] {
    let mut uuid = env.random_16();
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

impl VhdParent {
    pub(super) fn check(&self) -> Result<()> {
        let absolute = self.absolute_path.as_deref();
        if self.relative_path.starts_with('/') || absolute.is_some_and(|p| !p.starts_with('/')) {
            return Err(invalid("the parent's relative or absolute path is not one"));
        }
        for path in absolute.into_iter().chain([self.relative_path.as_str()]) {
            check_path(path)?;
        }
        Ok(())
    }

    /// Each locator's platform and text.
    fn locators(&self) -> [(Platform, Vec<u8>); 3] {
        let absolute = self.absolute_path.as_ref().unwrap_or(&self.relative_path);
        [(Platform::W2ru, &self.relative_path), (Platform::W2ku, absolute), (Platform::MacX, &self.relative_path)]
            .map(|(platform, path)| (platform, encode(platform, path)))
    }
}

/// Refuses a path that a locator cannot express: one with a backslash, which Windows does not allow in names, or a
/// NUL.
fn check_path(path: &str) -> Result<()> {
    if path.is_empty() || path.contains(['\\', '\0']) {
        return Err(invalid(format!("a VHD cannot name the parent {path:?}"))
            .hint("the path must not be empty nor contain a backslash"));
    }
    let longest = [Platform::W2ku, Platform::MacX].map(|p| encode(p, path).len());
    if longest.into_iter().any(|len| len > MAX_PATH_BYTES as usize) {
        return Err(invalid("the parent's path is too long for a VHD").hint("at most 2048 characters of UTF-16"));
    }
    Ok(())
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, message)
}

fn check_store<S: Store>(store: &S) -> Result<()> {
    if store.info().grows_zeroed && store.len_bytes() != 0 {
        return Err(Error::new(ErrorKind::Exists, "the file to create a VHD in is not empty"));
    }
    Ok(())
}

/// Makes the first `end_bytes` of the store zero, and room for a footer behind them. Returns where the footer
/// goes: there, or on a device at its end.
async fn clear<S: Store>(store: &S, end_bytes: u64) -> Result<u64> {
    let needed = end_bytes + SECTOR_BYTES;
    if store.info().grows_zeroed {
        store.set_len(needed).await?;
        return Ok(end_bytes);
    }
    let len = store.len_bytes();
    if len < needed {
        let message = format!("the device has {len} bytes; the empty VHD needs {needed}");
        return Err(Error::new(ErrorKind::NoSpace, message));
    }
    store.zero_range(StoreOffset(0), end_bytes).await?;
    Ok(len / SECTOR_BYTES * SECTOR_BYTES - SECTOR_BYTES)
}

async fn write<S: Store>(store: &S, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
    store.write_at(StoreOffset(offset_bytes), &Segments::copied(bytes), Via::Cached).await
}

async fn create_fixed<S: Store>(store: &S, env: &dyn Env, params: &CreateParams) -> Result<()> {
    let footer_at = clear(store, params.size_bytes).await?;
    write(store, footer_at, &params.footer(env).to_bytes()).await?;
    store.sync().await
}

/// Where the parts of a new image go, in bytes.
struct Plan {
    header: Header,
    batmap_header: BatmapHeader,
    batmap_header_at: u64,
    /// Locators' texts and where they go.
    texts: Vec<(u64, Vec<u8>)>,
    /// One past the last byte of the metadata.
    metadata_end: u64,
    /// The end of an empty image, but for its footer: a place for a block's bitmap.
    end: u64,
}

impl Plan {
    fn new(params: &CreateParams) -> Self {
        // At most MAX_BLOCKS, which was checked.
        let entries = bat::entries_for(params.size_bytes, params.block_size_bytes) as u32;
        let mut header = Header {
            bat_offset_bytes: (Footer::LEN + Header::LEN) as u64,
            max_entries: entries,
            block_size_bytes: params.block_size_bytes,
            parent_uuid: [0; 16],
            parent_timestamp: 0,
            parent_name: String::new(),
            locators: [Locator::NONE; 8],
        };
        let batmap_header_at = header.bat_end_bytes();
        let journal = place_journal(batmap_header_at);
        let map_len = u64::from(BatmapHeader::sectors_for(entries)) * SECTOR_BYTES;
        let batmap_header = BatmapHeader::void(journal.end, map_len);
        let mut end = batmap_header.map_bytes().end;
        let texts = match &params.parent {
            Some(parent) => name_parent(&mut header, parent, &mut end),
            None => Vec::new(),
        };
        let bitmap = u64::from(bat::bitmap_bytes(params.block_size_bytes));
        let metadata_end = end;
        let end = (end + bitmap).next_multiple_of(ALIGN) - bitmap;
        Self { header, batmap_header, batmap_header_at, texts, metadata_end, end }
    }
}

/// Where the journal of a new image goes.
pub(super) fn place_journal(batmap_header_at: u64) -> Range<u64> {
    let start = (batmap_header_at + BatmapHeader::LEN as u64).next_multiple_of(ALIGN);
    start..start + JOURNAL_BYTES
}

/// Fills in the parent; its locators' texts go to `end`, which moves behind them.
pub(super) fn name_parent(header: &mut Header, parent: &VhdParent, end: &mut u64) -> Vec<(u64, Vec<u8>)> {
    header.parent_uuid = parent.uuid;
    header.parent_timestamp = parent.timestamp;
    header.parent_name = parent.name.clone();
    let mut texts = Vec::new();
    for (slot, (platform, text)) in header.locators.iter_mut().zip(parent.locators()) {
        let space = (text.len() as u64).next_multiple_of(SECTOR_BYTES);
        // Lengths are bounded by MAX_PATH_BYTES. The space is in bytes, as Windows and blktap write it.
        *slot = Locator { platform, space: space as u32, len_bytes: text.len() as u32, offset_bytes: *end };
        texts.push((*end, text));
        *end += space;
    }
    texts
}

async fn create_sparse<S: Store>(store: &S, env: &dyn Env, params: &CreateParams) -> Result<()> {
    let plan = Plan::new(params);
    let footer = params.footer(env).to_bytes();
    let footer_at = clear(store, plan.end).await?;
    write_bat(store, &plan.header).await?;
    write(store, plan.batmap_header_at, &plan.batmap_header.to_bytes()).await?;
    for (offset, text) in &plan.texts {
        write(store, *offset, text).await?;
    }
    write(store, Footer::LEN as u64, &plan.header.to_bytes()).await?;
    write(store, 0, &footer).await?;
    write(store, footer_at, &footer).await?;
    store.sync().await
}

/// Writes a BAT without any allocated block.
async fn write_bat<S: Store>(store: &S, header: &Header) -> Result<()> {
    let end = header.bat_end_bytes();
    let ones = Segments::zeroed(BAT_WRITE_BYTES.min(end - header.bat_offset_bytes) as usize);
    ones.fill(0xff);
    let mut at = header.bat_offset_bytes;
    while at < end {
        let len = BAT_WRITE_BYTES.min(end - at);
        store.write_at(StoreOffset(at), &ones.slice(0..len as usize), Via::Cached).await?;
        at += len;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Mutex;
    use std::task::{Context, Poll, Waker};

    use proptest::prelude::*;
    use spile_core::{StoreExtent, StoreInfo};

    use super::*;

    /// Bytes in memory: a file that grows, or a device full of old bytes.
    struct Memory {
        bytes: Mutex<Vec<u8>>,
        is_file: bool,
        synced: Mutex<bool>,
    }

    impl Memory {
        fn file() -> Self {
            Self { bytes: Mutex::default(), is_file: true, synced: Mutex::default() }
        }

        fn device(len: usize) -> Self {
            Self { bytes: Mutex::new(vec![0xaa; len]), is_file: false, synced: Mutex::default() }
        }

        /// What was made, if it was synced last.
        fn image(self) -> Vec<u8> {
            assert!(self.synced.into_inner().unwrap(), "nothing is written behind the sync");
            self.bytes.into_inner().unwrap()
        }
    }

    impl Store for Memory {
        fn info(&self) -> StoreInfo {
            StoreInfo {
                offset_align_bytes: 512,
                memory_align_bytes: 1,
                grows_zeroed: self.is_file,
                punches: false,
                read_only: false,
                is_local: true,
            }
        }
        fn len_bytes(&self) -> u64 {
            self.bytes.lock().unwrap().len() as u64
        }
        fn path(&self) -> &Path {
            Path::new("/new.vhd")
        }
        async fn read_at(&self, _: StoreOffset, _: &Segments, _: Via) -> Result<()> {
            unreachable!("creating reads nothing")
        }
        async fn write_at(&self, at: StoreOffset, from: &Segments, via: Via) -> Result<()> {
            assert_eq!(via, Via::Cached);
            let (mut bytes, at) = (self.bytes.lock().unwrap(), at.0 as usize);
            *self.synced.lock().unwrap() = false;
            bytes[at..at + from.len()].copy_from_slice(&from.to_vec());
            Ok(())
        }
        async fn sync(&self) -> Result<()> {
            *self.synced.lock().unwrap() = true;
            Ok(())
        }
        async fn zero_range(&self, at: StoreOffset, len_bytes: u64) -> Result<()> {
            self.bytes.lock().unwrap()[at.0 as usize..(at.0 + len_bytes) as usize].fill(0);
            Ok(())
        }
        async fn punch_hole(&self, _: StoreOffset, _: u64) -> Result<()> {
            unreachable!("creating punches nothing")
        }
        async fn set_len(&self, len_bytes: u64) -> Result<()> {
            assert!(self.is_file);
            self.bytes.lock().unwrap().resize(len_bytes as usize, 0);
            Ok(())
        }
        async fn extent_at(&self, _: StoreOffset) -> Result<StoreExtent> {
            unreachable!("creating asks for no map")
        }
    }

    struct World;

    impl Env for World {
        fn now_unix_s(&self) -> u64 {
            946_684_800 + 77
        }
        fn random_16(&self) -> [u8; 16] {
            [0; 16]
        }
        fn boot_id(&self) -> [u8; 16] {
            [0; 16]
        }
    }

    fn make(store: &Memory, params: &CreateParams) -> Result<()> {
        let future = std::pin::pin!(create(store, &World, params));
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => result,
            Poll::Pending => panic!("the store answers at once"),
        }
    }

    fn made(params: &CreateParams) -> Vec<u8> {
        let store = Memory::file();
        make(&store, params).unwrap();
        store.image()
    }

    fn refusal(params: &CreateParams) -> ErrorKind {
        let store = Memory::file();
        let error = make(&store, params).unwrap_err();
        assert_eq!(store.len_bytes(), 0, "nothing was written");
        assert_eq!(error.path(), Some(Path::new("/new.vhd")));
        error.kind()
    }

    fn parent(path: &str) -> VhdParent {
        VhdParent {
            relative_path: path.into(),
            absolute_path: None,
            uuid: [5; 16],
            timestamp: 99,
            name: "p.vhd".into(),
        }
    }

    fn footers(image: &[u8]) -> (Footer, Footer) {
        let trailing = Footer::parse(&image[image.len() - 512..]).unwrap();
        (Footer::parse(&image[..512]).unwrap(), trailing)
    }

    #[test]
    fn a_fixed_disk_is_zeroes_and_a_footer() {
        let image = made(&CreateParams::new(DiskType::Fixed, 4096));
        assert_eq!(image.len(), 4096 + 512);
        assert!(image[..4096].iter().all(|b| *b == 0));
        let footer = Footer::parse(&image[4096..]).unwrap();
        assert_eq!((footer.disk_type, footer.current_size_bytes), (DiskType::Fixed, 4096));
        assert_eq!((footer.timestamp, footer.uuid[6], footer.uuid[8]), (77, 0x40, 0x80));
    }

    #[test]
    fn a_dynamic_disk_names_no_parent() {
        let image = made(&CreateParams::new(DiskType::Dynamic, 1 << 30));
        let (copy, trailing) = footers(&image);
        assert_eq!((copy.data_offset, &copy), (Some(512), &trailing));
        let header = Header::parse(&image[512..1536]).unwrap();
        assert_eq!((header.max_entries, header.block_size_bytes), (512, 2 << 20));
        assert!(header.locators.iter().all(|l| *l == Locator::NONE));
        assert_eq!((header.parent_uuid, header.parent_name.as_str()), ([0; 16], ""));
    }

    #[test]
    fn a_differencing_disk_names_its_parent_three_times() {
        let mut params = CreateParams::child(1 << 30, parent("../base/p 1%.vhd"));
        let paths = |params: &CreateParams| {
            let image = made(params);
            let header = Header::parse(&image[512..1536]).unwrap();
            assert_eq!((header.parent_uuid, header.parent_timestamp), ([5; 16], 99));
            assert_eq!(header.parent_name, "p.vhd");
            header.locators.clone().map(|l| l.decode(&image[l.offset_bytes as usize..]).ok())
        };
        let relative = Some("./../base/p 1%.vhd".to_owned());
        let expected = [&relative, &relative, &relative, &None, &None, &None, &None, &None];
        assert_eq!(paths(&params).each_ref(), expected);
        params.parent.as_mut().unwrap().absolute_path = Some("/base/p 1%.vhd".into());
        assert_eq!(paths(&params)[..2], [relative, Some("/base/p 1%.vhd".into())]);
    }

    #[test]
    fn a_device_keeps_its_length_and_loses_its_old_bytes() {
        let store = Memory::device(4 << 20);
        make(&store, &CreateParams::new(DiskType::Dynamic, 1 << 20)).unwrap();
        let image = store.image();
        let (copy, trailing) = footers(&image);
        assert_eq!((image.len(), copy), (4 << 20, trailing));
        let batmap = BatmapHeader::parse(&image[2048..2560]).unwrap();
        let unused = image[2560..batmap.map_bytes().end as usize].iter();
        assert!(unused.copied().all(|b| b == 0), "journal and batmap are empty");
    }

    #[test]
    fn a_device_that_is_too_small_and_a_file_that_is_not_empty_are_refused() {
        let small = make(&Memory::device(1 << 20), &CreateParams::new(DiskType::Dynamic, 1 << 20));
        assert_eq!(small.unwrap_err().kind(), ErrorKind::NoSpace);
        let used = Memory::file();
        used.bytes.lock().unwrap().push(0);
        let error = make(&used, &CreateParams::new(DiskType::Fixed, 512)).unwrap_err();
        assert_eq!((error.kind(), used.len_bytes()), (ErrorKind::Exists, 1));
    }

    #[test]
    fn sizes_that_cannot_be_are_refused_and_the_limits_are_not() {
        for size in [0, 1, 513, MAX_SIZE_BYTES + 512, u64::MAX] {
            let params = CreateParams::new(DiskType::Dynamic, size);
            assert_eq!(refusal(&params), ErrorKind::InvalidInput, "{size}");
        }
        for size in [512, MAX_SIZE_BYTES] {
            let (copy, _) = footers(&made(&CreateParams::new(DiskType::Dynamic, size)));
            assert_eq!(copy.current_size_bytes, size);
        }
    }

    #[test]
    fn block_sizes_that_cannot_be_are_refused() {
        let sizes = [(1 << 20, 0), (1 << 20, 2048), (1 << 20, 3 << 20), (1 << 20, 512 << 20)];
        for (size, block_size_bytes) in sizes.into_iter().chain([(MAX_SIZE_BYTES, 4096)]) {
            let base = CreateParams::new(DiskType::Dynamic, size);
            let params = CreateParams { block_size_bytes, ..base };
            assert_eq!(refusal(&params), ErrorKind::InvalidInput, "{block_size_bytes}");
        }
    }

    #[test]
    fn parents_that_cannot_be_named_are_refused() {
        let long = "p".repeat(3000);
        for path in ["", "a\\b.vhd", "a\0b", "/absolute.vhd", long.as_str()] {
            let params = CreateParams::child(1 << 20, parent(path));
            assert_eq!(refusal(&params), ErrorKind::InvalidInput, "{path:?}");
        }
        let orphan = CreateParams::new(DiskType::Differencing, 1 << 20);
        assert_eq!(refusal(&orphan), ErrorKind::InvalidInput);
        for disk_type in [DiskType::Fixed, DiskType::Dynamic] {
            let base = CreateParams::child(1 << 20, parent("p.vhd"));
            let params = CreateParams { disk_type, ..base };
            assert_eq!(refusal(&params), ErrorKind::InvalidInput);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Every part lies behind the one before it, aligned as it should be, and the file ends with the footer.
        #[test]
        fn the_parts_are_in_order_and_aligned(
            sectors in 1u64..1 << 22, block_shift in 12u32..=28, path in "[a-z/]{1,300}x", diff: bool,
        ) {
            let path = path.trim_start_matches('/');
            let base = match diff {
                true => CreateParams::child(sectors * 512, parent(path)),
                false => CreateParams::new(DiskType::Dynamic, sectors * 512),
            };
            let image = made(&CreateParams { block_size_bytes: 1 << block_shift, ..base });
            let header = Header::parse(&image[512..1536]).unwrap();
            let (bat, at) = (1536..header.bat_end_bytes(), header.bat_end_bytes());
            prop_assert!(image[1536..at as usize].iter().all(|b| *b == 0xff));
            let batmap = BatmapHeader::parse(&image[at as usize..][..512]).unwrap();
            let map = batmap.map_bytes();
            prop_assert!(batmap.matches(&image[map.start as usize..map.end as usize], sectors * 512));
            let journal = batmap.journal_area(at).unwrap();
            prop_assert_eq!(journal.end - journal.start, JOURNAL_BYTES);
            let texts = header.locators.iter().filter(|l| l.platform != Platform::None);
            let texts = texts.map(|l| l.offset_bytes..l.offset_bytes + l.space_bytes());
            let parts: Vec<_> = [bat, at..at + 512, journal, map].into_iter().chain(texts).collect();
            prop_assert!(parts.windows(2).all(|p| p[0].end <= p[1].start));
            let end = image.len() as u64 - 512;
            prop_assert!(parts[parts.len() - 1].end <= end);
            let data = end + u64::from(bat::bitmap_bytes(1 << block_shift));
            prop_assert_eq!(data % 4096, 0);
            prop_assert_eq!(u64::from(header.max_entries), bat::entries_for(sectors * 512, 1 << block_shift));
        }
    }
}
