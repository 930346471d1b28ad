//! Checking an image for contradictions, and mending what can be mended without guessing.

use std::ops::Range;

use spile_core::{Env, Error, ErrorKind, Result, ResultExt, Segments, Store, StoreOffset, Via};

use super::bat::Bat;
use super::bits::Bits;
use super::codec::bat::UNALLOCATED;
use super::codec::batmap::{BatmapHeader, is_full};
use super::codec::footer::{DiskType, Footer};
use super::codec::geometry::Geometry;
use super::journal::{Journal, Owner};
use super::open::{Footers, lay_out, load_bat, read_footers, read_header};
use super::{Batmap, Layout, SECTOR};

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Worth knowing; nothing is wrong for a reader that keeps to the specification.
    Note,
    /// Space that nothing refers to.
    Leak,
    /// The image contradicts itself; data may be wrong or lost.
    Corruption,
}

/// One thing that was found.
#[derive(Clone, Debug)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What it is.
    pub message: String,
    /// Where in the file, in bytes.
    pub offset_bytes: Option<u64>,
    /// True when [`repair`] mends it.
    pub can_repair: bool,
}

/// The result of a check.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// What was found, in the order of the file's parts.
    pub findings: Vec<Finding>,
    /// Blocks the disk has.
    pub total_blocks: u64,
    /// Blocks that are allocated.
    pub allocated_blocks: u64,
    /// Bytes that nothing refers to.
    pub leaked_bytes: u64,
}

impl Report {
    /// The worst severity found.
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).max()
    }

    fn add(
        &mut self,
        severity: Severity,
        offset: impl Into<Option<u64>>,
        can_repair: bool,
        message: impl Into<String>,
    ) {
        let (message, offset_bytes) = (message.into(), offset.into());
        self.findings.push(Finding { severity, message, offset_bytes, can_repair });
    }
}

/// What a check reads.
struct Parts {
    footers: Footers,
    sparse: Option<SparseParts>,
}

struct SparseParts {
    layout: Layout,
    bat: Bat,
    batmap: Option<Vec<u8>>,
    /// The batmap is there but its checksum does not fit.
    batmap_void: bool,
}

/// Checks the VHD in `store`; its parents are not looked at.
///
/// # Errors
/// When the image is too damaged to be read at all: no footer, no header, a BAT that cannot be where it says.
pub async fn check<S: Store>(store: &S, env: &dyn Env) -> Result<Report> {
    let mut report = Report::default();
    let parts = read_parts(store).await.at_path(store.path())?;
    check_footers(&parts.footers, &mut report);
    if let Some(sparse) = &parts.sparse {
        report.total_blocks = u64::from(sparse.bat.entries());
        report.allocated_blocks = sparse.bat.allocated().count() as u64;
        check_blocks(store, &parts.footers, sparse, &mut report);
        check_batmap(store, sparse, &mut report).await?;
        check_leaks(store, &parts.footers, sparse, &mut report);
        check_journal(store, env, &parts.footers.footer, &sparse.layout, &mut report).await?;
    }
    Ok(report)
}

/// Mends what [`check`] says can be mended: footers, the batmap, BAT entries that point past the end of the file
/// (there is nothing there to lose), a last block that the file is too short for, space behind the last block. Touches nothing when there is corruption that
/// cannot be mended so: what to keep is then a person's choice. Returns what was found before.
///
/// # Errors
/// As [`check`]; `ReadOnly` when the store cannot be written; I/O errors.
pub async fn repair<S: Store>(store: &S, env: &dyn Env) -> Result<Report> {
    let report = check(store, env).await?;
    if store.info().read_only {
        return Err(
            Error::new(ErrorKind::ReadOnly, "cannot repair what is open for reading only").at_path(store.path())
        );
    }
    if report.findings.iter().any(|f| f.severity == Severity::Corruption && !f.can_repair) {
        return Ok(report);
    }
    let parts = read_parts(store).await?;
    if let Some(sparse) = &parts.sparse {
        drop_dangling(store, sparse).await?;
        extend_last(store, &parts.footers, sparse).await?;
        mend_batmap(store, sparse, &parts.footers.footer).await?;
        mend_tail(store, &parts.footers, sparse).await?;
        write(store, 0, &parts.footers.footer.to_bytes()).await?;
    }
    store.sync().await?;
    Ok(report)
}

async fn read_parts<S: Store>(store: &S) -> Result<Parts> {
    let footers = read_footers(store).await?;
    if footers.footer.disk_type == DiskType::Fixed {
        return Ok(Parts { footers, sparse: None });
    }
    let header = read_header(store, &footers.footer).await?;
    let (layout, batmap) = lay_out(store, &footers.footer, &header).await?;
    let bat = Bat::new(layout.size_bytes.div_ceil(layout.block_bytes) as u32);
    load_bat(store, &layout, &bat).await?;
    let batmap_void = layout.batmap.is_some() && batmap.is_none();
    Ok(Parts { footers, sparse: Some(SparseParts { layout, bat, batmap, batmap_void }) })
}

fn check_footers(footers: &Footers, report: &mut Report) {
    let footer = &footers.footer;
    if let Some(error) = &footers.trailing_error {
        let message = format!("no footer at the end ({}): the image was not closed", error.message());
        report.add(Severity::Note, error.offset_bytes(), true, message);
    }
    if let Some(error) = footers.copy_error.as_ref().filter(|_| footer.disk_type != DiskType::Fixed) {
        let message = format!("the footer's copy at the start is bad: {}", error.message());
        report.add(Severity::Corruption, 0, true, message);
    }
    if footer.geometry.size_bytes() > Geometry::for_size(footer.current_size_bytes).size_bytes() {
        report.add(Severity::Note, None, false, "the geometry is larger than the size allows; some tools refuse this");
    }
    if footer.uuid == [0; 16] {
        report.add(Severity::Note, None, false, "the UUID is null: no child can name this image as its parent");
    }
}

fn start(sector: u32) -> u64 {
    u64::from(sector) * SECTOR
}

/// Blocks by their place in the file.
fn by_place(sparse: &SparseParts) -> Vec<(u32, u32)> {
    let mut blocks: Vec<_> = sparse.bat.allocated().map(|(block, sector)| (sector, block)).collect();
    blocks.sort_unstable();
    blocks
}

fn check_blocks<S: Store>(store: &S, footers: &Footers, sparse: &SparseParts, report: &mut Report) {
    let layout = &sparse.layout;
    let blocks = by_place(sparse);
    for pair in blocks.windows(2).filter(|pair| layout.block_end(pair[0].0) > start(pair[1].0)) {
        let message = format!("block {} overlaps block {}", pair[1].1, pair[0].1);
        report.add(Severity::Corruption, start(pair[1].0), false, message);
    }
    for &(sector, block) in &blocks {
        let range = start(sector)..layout.block_end(sector);
        if range.end > store.len_bytes() {
            let can_repair = range.start >= store.len_bytes() || may_extend(store, footers);
            report.add(
                Severity::Corruption,
                range.start,
                can_repair,
                format!("block {block} goes past the end of the file"),
            );
        }
        if layout.metadata.iter().any(|other| other.start < range.end && range.start < other.end) {
            report.add(
                Severity::Corruption,
                range.start,
                false,
                format!("block {block} lies over the image's metadata"),
            );
        }
    }
}

/// A process that died as it grew the file leaves the last block short and no footer: the rest is zeroes, never written.
/// Where there is a footer at the end, it lies in the block, and which of them is right nobody knows.
fn may_extend<S: Store>(store: &S, footers: &Footers) -> bool {
    !footers.has_trailing && store.info().grows_zeroed
}

/// Gives a short last block its full length.
async fn extend_last<S: Store>(store: &S, footers: &Footers, sparse: &SparseParts) -> Result<()> {
    let end = by_place(sparse).last().map_or(0, |&(sector, _)| sparse.layout.block_end(sector));
    if end > store.len_bytes() && may_extend(store, footers) {
        store.set_len(end).await?;
    }
    Ok(())
}

/// A block that the batmap calls full must be: its bitmap is not looked at by those who use the batmap.
async fn check_batmap<S: Store>(store: &S, sparse: &SparseParts, report: &mut Report) -> Result<()> {
    if sparse.batmap_void {
        report.add(
            Severity::Note,
            None,
            true,
            "the batmap is void: the image was not closed, or not by a program that keeps it",
        );
    }
    let Some(map) = &sparse.batmap else { return Ok(()) };
    for (block, sector) in sparse.bat.allocated().filter(|(block, _)| is_full(map, *block)) {
        if sparse.layout.block_end(sector) <= store.len_bytes() && !bitmap_is_full(store, sparse, sector).await? {
            let message = format!("the batmap calls block {block} full, its bitmap does not");
            report.add(Severity::Corruption, start(sector), true, message);
        }
    }
    Ok(())
}

async fn bitmap_is_full<S: Store>(store: &S, sparse: &SparseParts, sector: u32) -> Result<bool> {
    let bytes = Segments::zeroed(sparse.layout.bitmap_bytes as usize);
    store.read_at(StoreOffset(start(sector)), &bytes, Via::Cached).await?;
    Ok(Bits::from_bytes(&bytes.to_vec(), sparse.layout.sectors_per_block()).is_full())
}

fn check_leaks<S: Store>(store: &S, footers: &Footers, sparse: &SparseParts, report: &mut Report) {
    let layout = &sparse.layout;
    let mut used: Vec<Range<u64>> = layout.metadata.clone();
    used.extend(sparse.bat.allocated().map(|(_, sector)| start(sector)..layout.block_end(sector)));
    used.sort_unstable_by_key(|range| range.start);
    let mut end = 0;
    for range in used {
        // Less than a block between blocks is alignment.
        if range.start >= end + layout.block_bytes {
            leak(report, end..range.start, false, "unused space between blocks; the next writer uses it");
        }
        end = end.max(range.end);
    }
    let file_end = file_end(store, footers.has_trailing);
    if store.info().grows_zeroed && file_end > end + layout.slack_bytes() {
        leak(report, end..file_end, layout.journal.is_some(), "unused space behind the last block");
    }
}

/// Where the trailing footer is, or would be appended.
fn file_end<S: Store>(store: &S, has_trailing: bool) -> u64 {
    store.len_bytes() - if has_trailing { SECTOR } else { 0 }
}

fn leak(report: &mut Report, range: Range<u64>, can_repair: bool, what: &str) {
    report.leaked_bytes += range.end - range.start;
    report.add(Severity::Leak, range.start, can_repair, format!("{what}: {} bytes", range.end - range.start));
}

async fn check_journal<S: Store>(
    store: &S,
    env: &dyn Env,
    footer: &Footer,
    layout: &Layout,
    report: &mut Report,
) -> Result<()> {
    let owner = Owner { boot_id: env.boot_id(), image_uuid: footer.uuid };
    let records = Journal::new(layout.journal.clone(), owner, 0).replay(store).await?;
    if !records.is_empty() {
        let message = format!(
            "the journal holds {} records that no flush has retired: the image is in use, or its last user was killed; opening it for writing takes them over",
            records.len()
        );
        report.add(Severity::Note, layout.journal.as_ref().map(|area| area.start), false, message);
    }
    Ok(())
}

async fn write<S: Store>(store: &S, offset: u64, bytes: &[u8]) -> Result<()> {
    store.write_at(StoreOffset(offset), &Segments::copied(bytes), Via::Cached).await
}

async fn drop_dangling<S: Store>(store: &S, sparse: &SparseParts) -> Result<()> {
    for (block, sector) in by_place(sparse).into_iter().map(|(sector, block)| (block, sector)) {
        if start(sector) >= store.len_bytes() {
            let entry = sparse.layout.bat_offset + u64::from(block) * 4;
            write(store, entry, &UNALLOCATED.to_be_bytes()).await?;
            sparse.bat.clear(block);
        }
    }
    Ok(())
}

/// Rebuilds the batmap from the bitmaps.
async fn mend_batmap<S: Store>(store: &S, sparse: &SparseParts, footer: &Footer) -> Result<()> {
    let Some(batmap) = &sparse.layout.batmap else { return Ok(()) };
    let range = batmap.header.map_bytes();
    let mut map = vec![0u8; (range.end - range.start) as usize];
    for (block, sector) in sparse.bat.allocated() {
        if sparse.layout.block_end(sector) <= store.len_bytes() && bitmap_is_full(store, sparse, sector).await? {
            map[block as usize / 8] |= 0x80 >> (block % 8);
        }
    }
    write_batmap(store, batmap, &map, footer).await
}

/// Writes the map, and when that is durable the header that makes it valid: the checksum is a plain sum over a part of
/// the map, and may well fit an older map too.
pub(super) async fn write_batmap<S: Store>(store: &S, batmap: &Batmap, map: &[u8], footer: &Footer) -> Result<()> {
    let start = batmap.header.map_bytes().start;
    let header = BatmapHeader::new(start, map, footer.current_size_bytes);
    write(store, start, map).await?;
    store.sync().await?;
    write(store, batmap.header_offset, &header.to_bytes()).await
}

/// Cuts the file behind the last block and puts the footer there.
async fn mend_tail<S: Store>(store: &S, footers: &Footers, sparse: &SparseParts) -> Result<()> {
    let (footer, has_trailing) = (&footers.footer, footers.has_trailing);
    let blocks = sparse.bat.allocated().map(|(_, sector)| sparse.layout.block_end(sector)).max().unwrap_or(0);
    let end = blocks.max(sparse.layout.metadata_end);
    if !store.info().grows_zeroed {
        return write(store, store.len_bytes() - SECTOR, &footer.to_bytes()).await;
    }
    if sparse.layout.journal.is_none() {
        // Not a file of ours: something we know nothing of may lie behind the blocks.
        return write(store, file_end(store, has_trailing), &footer.to_bytes()).await;
    }
    write(store, end, &footer.to_bytes()).await?;
    store.sync().await?;
    store.set_len(end + SECTOR).await
}
