//! Checking an image for contradictions, and mending what can be mended without guessing.

mod cut;
mod parts;

use std::ops::Range;

use spile_core::{Env, Error, ErrorKind, Result, ResultExt, Segments, Store, StoreOffset, Via};

use self::cut::{find_cut, read_bits};
use self::parts::{SparseParts, read_parts};
use super::codec::bat::UNALLOCATED;
use super::codec::batmap::{BatmapHeader, is_full};
use super::codec::footer::{DiskType, Footer};
use super::codec::geometry::Geometry;
use super::footers::{Footers, Other};
use super::journal::{Journal, Owner, Record};
use super::{Batmap, Layout, SECTOR};
use crate::check::{Lost, Mend, Report, Severity};

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
        let records = journal_records(store, env, &parts.footers.footer, &sparse.layout).await?;
        check_end(store, &parts.footers, sparse, &records, &mut report).await?;
        check_blocks(sparse, &mut report);
        check_batmap(store, sparse, &mut report).await?;
        check_leaks(store, &parts.footers, sparse, &mut report).await?;
        check_journal(&records, &sparse.layout, &mut report);
    }
    Ok(report)
}

/// Mends what [`check`] says can be mended: footers, the batmap, a last block that ends early where nothing was ever
/// written, space behind the last block; with [`Lost::Discard`] also blocks whose data are missing. Changes nothing
/// when there is other corruption: then a person has to choose what to keep. Returns what was found before.
///
/// # Errors
/// As [`check`]; `ReadOnly` when the store cannot be written; I/O errors.
pub async fn repair<S: Store>(store: &S, env: &dyn Env, lost: Lost) -> Result<Report> {
    let report = check(store, env).await?;
    if store.info().read_only {
        return Err(
            Error::new(ErrorKind::ReadOnly, "cannot repair what is open for reading only").at_path(store.path())
        );
    }
    let is_left_alone = |mend| mend == Mend::No || (mend == Mend::DiscardLost && lost == Lost::Keep);
    if report.findings.iter().any(|f| f.severity == Severity::Corruption && is_left_alone(f.mend)) {
        return Ok(report);
    }
    let parts = read_parts(store).await?;
    if let Some(sparse) = &parts.sparse {
        if lost == Lost::Discard {
            drop_dangling(store, sparse).await?;
        }
        extend_last(store, sparse).await?;
        mend_batmap(store, sparse, &parts.footers.footer).await?;
        mend_tail(store, &parts.footers, sparse).await?;
        write(store, 0, &parts.footers.footer.to_bytes()).await?;
    }
    store.sync().await?;
    Ok(report)
}

fn check_footers(footers: &Footers, report: &mut Report) {
    let footer = &footers.footer;
    match (&footers.other, footers.problem()) {
        (Other::Bad(error), _) if footers.uses_copy => {
            let message = format!(
                "no footer at the end ({}): the image was not closed, or the file is cut short there",
                error.message()
            );
            report.add(Severity::Note, error.offset_bytes(), Mend::Repair, message);
        }
        (Other::Differs { matters: false, .. }, Some(problem)) => {
            report.add(Severity::Note, 0, Mend::Repair, problem);
        }
        (_, Some(problem)) => report.add(Severity::Corruption, 0, Mend::Repair, problem),
        (_, None) => {}
    }
    if footers.trailing_bytes == SECTOR - 1 {
        let message = "the footer has 511 bytes, as Virtual PC before 2004 wrote it, or the file lacks its last byte";
        let mend = if footer.disk_type == DiskType::Fixed { Mend::No } else { Mend::Repair };
        report.add(Severity::Note, None, mend, message);
    }
    check_geometry(footer, report);
    if footer.uuid == [0; 16] {
        report.add(Severity::Note, None, Mend::No, "the UUID is null: no child can name this image as its parent");
    }
}

/// Looks for a geometry that is not the one of the size. It changes nothing here, but for programs that go by it.
fn check_geometry(footer: &Footer, report: &mut Report) {
    let (found, usual) = (footer.geometry.size_bytes(), Geometry::for_size(footer.current_size_bytes).size_bytes());
    if footer.geometry.is_max() || found == usual || found == footer.current_size_bytes {
        return;
    }
    let message = match found < usual {
        true => format!("the geometry addresses {found} bytes only: programs that go by it cut off the rest"),
        false => format!(
            "the geometry addresses {found} bytes, more than the size allows: some tools refuse this, others read more"
        ),
    };
    report.add(Severity::Note, None, Mend::No, message);
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

/// Looks for blocks and metadata that go past the end of the file.
async fn check_end<S: Store>(
    store: &S,
    footers: &Footers,
    sparse: &SparseParts,
    records: &[Record],
    report: &mut Report,
) -> Result<()> {
    let Some(cut) = find_cut(store, footers, sparse, records).await? else { return Ok(()) };
    report.missing_bytes = cut.missing_bytes;
    report.add(Severity::Corruption, store.len_bytes(), cut.mend, cut.message());
    Ok(())
}

fn check_blocks(sparse: &SparseParts, report: &mut Report) {
    let layout = &sparse.layout;
    let blocks = by_place(sparse);
    for pair in blocks.windows(2).filter(|pair| layout.block_end(pair[0].0) > start(pair[1].0)) {
        let message = format!("block {} overlaps block {}", pair[1].1, pair[0].1);
        report.add(Severity::Corruption, start(pair[1].0), Mend::No, message);
    }
    for &(sector, block) in &blocks {
        let range = start(sector)..layout.block_end(sector);
        if layout.metadata.iter().any(|other| other.start < range.end && range.start < other.end) {
            let message = format!("block {block} lies over the image's metadata");
            report.add(Severity::Corruption, range.start, Mend::No, message);
        }
    }
}

/// Gives a last block that ends early its full length, in zeroes. [`check`] has found that this is right.
async fn extend_last<S: Store>(store: &S, sparse: &SparseParts) -> Result<()> {
    let end = by_place(sparse).last().map_or(0, |&(sector, _)| sparse.layout.block_end(sector));
    if end > store.len_bytes() {
        store.set_len(end).await?;
    }
    Ok(())
}

/// Checks that each block that the batmap calls full is full: programs that use the batmap do not read its bitmap.
async fn check_batmap<S: Store>(store: &S, sparse: &SparseParts, report: &mut Report) -> Result<()> {
    if sparse.batmap_void {
        report.add(
            Severity::Note,
            None,
            Mend::Repair,
            "the batmap is void: the image was not closed, or not by a program that keeps it",
        );
    }
    let Some(map) = &sparse.batmap else { return Ok(()) };
    for (block, sector) in sparse.bat.allocated().filter(|(block, _)| is_full(map, *block)) {
        if sparse.layout.block_end(sector) <= store.len_bytes() && !bitmap_is_full(store, sparse, sector).await? {
            let message = format!("the batmap calls block {block} full, its bitmap does not");
            report.add(Severity::Corruption, start(sector), Mend::Repair, message);
        }
    }
    Ok(())
}

async fn bitmap_is_full<S: Store>(store: &S, sparse: &SparseParts, sector: u32) -> Result<bool> {
    Ok(read_bits(store, &sparse.layout, sector).await?.is_full())
}

async fn check_leaks<S: Store>(store: &S, footers: &Footers, sparse: &SparseParts, report: &mut Report) -> Result<()> {
    let layout = &sparse.layout;
    let mut used: Vec<Range<u64>> = layout.metadata.clone();
    used.extend(sparse.bat.allocated().map(|(_, sector)| start(sector)..layout.block_end(sector)));
    used.sort_unstable_by_key(|range| range.start);
    let mut end = 0;
    for range in used {
        // Less than a block between blocks is alignment.
        if range.start >= end + layout.block_bytes {
            check_gap(store, layout, end..range.start, report).await?;
        }
        end = end.max(range.end);
    }
    let file_end = store.len_bytes() - footers.trailing_bytes;
    if store.info().grows_zeroed && file_end > end + layout.slack_bytes() {
        let mend = if layout.journal.is_some() { Mend::Repair } else { Mend::No };
        leak(report, end..file_end, mend, "unused space behind the last block");
    }
    Ok(())
}

/// Tells of room between blocks. Where it takes no space of the host that would be enough for a block, nothing is lost: it is length, as of space that was prepared before the
/// image's header got a place behind it.
async fn check_gap<S: Store>(store: &S, layout: &Layout, gap: Range<u64>, report: &mut Report) -> Result<()> {
    if layout.journal.is_none() {
        leak(report, gap, Mend::No, "unused space between blocks");
    } else if taken_bytes(store, &gap).await? < layout.block_bytes {
        let len_bytes = gap.end - gap.start;
        let message = format!("room for the next blocks between others, which takes no space: {len_bytes} bytes");
        report.add(Severity::Note, gap.start, Mend::No, message);
    } else {
        leak(report, gap, Mend::No, "unused space between blocks; the next writer uses it");
    }
    Ok(())
}

/// How many bytes of `range` have space of the host behind them.
async fn taken_bytes<S: Store>(store: &S, range: &Range<u64>) -> Result<u64> {
    let (mut at, mut taken_bytes) = (range.start, 0);
    while at < range.end {
        let run = store.extent_at(StoreOffset(at)).await?;
        let end = range.end.min(at + run.len_bytes.max(1));
        taken_bytes += if run.is_hole { 0 } else { end - at };
        at = end;
    }
    Ok(taken_bytes)
}

fn leak(report: &mut Report, range: Range<u64>, mend: Mend, what: &str) {
    report.leaked_bytes += range.end - range.start;
    report.add(Severity::Leak, range.start, mend, format!("{what}: {} bytes", range.end - range.start));
}

/// What the journal holds for this boot of the host.
async fn journal_records<S: Store>(store: &S, env: &dyn Env, footer: &Footer, layout: &Layout) -> Result<Vec<Record>> {
    let owner = Owner { boot_id: env.boot_id(), image_uuid: footer.uuid };
    let records = Journal::new(layout.journal_on(store), owner, 0).replay(store).await?;
    Ok(records.into_iter().map(|(_, record)| record).collect())
}

fn check_journal(records: &[Record], layout: &Layout, report: &mut Report) {
    if !records.is_empty() {
        let message = format!(
            "the journal holds {} records that no flush has retired: the image is in use, or its last user was killed; opening it for writing takes them over",
            records.len()
        );
        report.add(Severity::Note, layout.journal.as_ref().map(|area| area.start), Mend::No, message);
    }
}

async fn write<S: Store>(store: &S, offset: u64, bytes: &[u8]) -> Result<()> {
    store.write_at(StoreOffset(offset), &Segments::copied(bytes), Via::Cached).await
}

/// Clears the BAT entries of blocks that lie past the end of the file.
async fn drop_dangling<S: Store>(store: &S, sparse: &SparseParts) -> Result<()> {
    for (sector, block) in by_place(sparse) {
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
    let footer = &footers.footer;
    let blocks = sparse.bat.allocated().map(|(_, sector)| sparse.layout.block_end(sector)).max().unwrap_or(0);
    let end = blocks.max(sparse.layout.metadata_end());
    if !store.info().grows_zeroed {
        return write(store, store.len_bytes() - SECTOR, &footer.to_bytes()).await;
    }
    if sparse.layout.journal.is_none() {
        // Another program made this file, and may keep something behind the blocks.
        return write(store, store.len_bytes() - footers.trailing_bytes, &footer.to_bytes()).await;
    }
    match write(store, end, &footer.to_bytes()).await {
        Ok(()) => {
            store.sync().await?;
            store.set_len(end + SECTOR).await
        }
        // The cut gives the footer the room of the old one. In between the file ends with zeroes, and the copy counts.
        Err(error) if error.kind() == ErrorKind::NoSpace => {
            write(store, 0, &footer.to_bytes()).await?;
            store.sync().await?;
            store.set_len(end + SECTOR).await?;
            store.sync().await?;
            write(store, end, &footer.to_bytes()).await
        }
        Err(error) => Err(error),
    }
}
