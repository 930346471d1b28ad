//! Mending refcounts, COPIED bits and flags.
//!
//! Counts that are only too high are lowered where they are (`lower`). For all else, all references are counted, and new refcounts are made of that where nothing else is: behind the end of a file, or behind
//! all that is in use on a device. When they are durable, the header is pointed at them. Until then, the image is what it was,
//! and the old refcounts, right or wrong, are looked at by nobody: so it does not matter how damaged they are. COPIED bits
//! follow the same counts. The flags "dirty" and "corrupt" fall last.
//!
//! Nothing is changed when an entry cannot be followed, or two users claim one cluster: a person has to choose then. Nothing that
//! an entry refers to is ever written to, but for COPIED bits in L1 and L2 tables.

use spile_core::{Error, ErrorKind, Result, Store, yield_now};

use super::super::codec::header::feature;
use super::super::codec::table::{decode, encode};
use super::super::codec::{COPIED, refcount};
use super::super::create::write;
use super::super::data_file::{sound_autoclear, stray_autoclear};
use super::super::entries::places;
use super::super::layout::Refcounts;
use super::super::open::{read, read_l1};
use super::super::writing::{AUTOCLEAR_AT, INCOMPATIBLE_AT};
use super::lower::lower;
use super::window::{Findings, Window};
use super::{NAME_LENGTH_AT, Walk, breathe, check};
use crate::check::{Finding, Mend, Report, Severity};

/// Where the header says where the refcount table is, and how long.
const TABLE_AT: u64 = 48;

/// What a repair has come to.
pub(in crate::formats::qcow2) struct Outcome {
    /// What was found before.
    pub found: Report,
    /// Why nothing was mended: a person has to decide about this.
    pub hindrance: Option<Finding>,
}

/// Mends the image in `store`, where no person has to decide.
///
/// # Errors
/// As [`check`]; `ReadOnly`; `NoSpace` when a device has no room for new refcounts; I/O errors. The image is then what it was,
/// or has sound refcounts already.
pub(in crate::formats::qcow2) async fn repair<S: Store>(store: &S) -> Result<Outcome> {
    let found = check(store).await?;
    if store.info().read_only {
        let error = Error::new(ErrorKind::ReadOnly, "cannot repair what is open for reading only");
        return Err(error.at_path(store.path()));
    }
    if let Some(hindrance) = found.findings.iter().find(|f| f.is_corruption() && f.mend == Mend::No).cloned() {
        return Ok(Outcome { found, hindrance: Some(hindrance) });
    }
    // What a check tells one by one is bounded; this looks at all of it again.
    let mut findings = Findings::default();
    let walk = Walk::open(store, true, &mut findings).await?;
    let used_end = survey(&walk, &mut findings).await?;
    if let Some(hindrance) = findings.finish().findings.into_iter().find(Finding::is_corruption) {
        return Ok(Outcome { found, hindrance: Some(hindrance) });
    }
    let is_wrong = |f: &Finding| f.severity == Severity::Leak || f.is_corruption();
    let flagged = walk.header().has(feature::CORRUPT);
    let changes = found.findings.iter().filter(|f| is_wrong(f)).count() > usize::from(flagged);
    clear_autoclear(&walk, changes).await?;
    match found.corruption() {
        _ if !changes => {}
        None => lower(store, used_end).await?,
        Some(_) => rebuild(&walk, used_end).await?,
    }
    clear_name_length(&walk).await?;
    clear_flags(&walk).await?;
    Ok(Outcome { found, hindrance: None })
}

/// Counts all references, and finds what cannot be mended. Returns one past the last cluster that is in use.
async fn survey<S: Store>(walk: &Walk<'_, S>, findings: &mut Findings) -> Result<u64> {
    let most = most_references(walk.header().refcount_order);
    let mut end = old_refcounts_end(walk);
    for mut pass in walk.passes() {
        walk.count(&mut pass, findings).await?;
        for part in pass.window.parts() {
            if let Some(cluster) = pass.window.first_over(&part, most) {
                let bits = 1 << walk.header().refcount_order;
                let message = format!("refcounts of {bits} bits cannot count the references to a cluster");
                findings.corruption(cluster << walk.cluster_bits(), Mend::No, message);
            }
            end = end.max(pass.window.used_end(&part));
            yield_now().await;
        }
    }
    Ok(end)
}

/// The most references that a refcount can count. A window counts no further than 65534.
fn most_references(order: u32) -> u16 {
    if order < 4 { (1 << (1 << order)) - 1 } else { u16::MAX - 1 }
}

/// One past the last cluster of the refcounts that the header names now.
fn old_refcounts_end<S: Store>(walk: &Walk<'_, S>) -> u64 {
    let (header, bits) = (walk.header(), walk.cluster_bits());
    let table = (header.refcount_table_offset >> bits).saturating_add(u64::from(header.refcount_table_clusters));
    let file = walk.store.len_bytes().div_ceil(walk.cluster_bytes());
    let blocks = walk.blocks.iter().map(|entry| (entry >> bits) + 1);
    blocks.chain([table]).filter(|end| *end <= file).max().unwrap_or(0)
}

/// Makes new refcounts and COPIED bits by what refers to the clusters. `used_end` is one past the last one in use.
async fn rebuild<S: Store>(walk: &Walk<'_, S>, used_end: u64) -> Result<()> {
    let (bits, order) = (walk.cluster_bits(), walk.header().refcount_order);
    let file = walk.store.len_bytes().div_ceil(walk.cluster_bytes());
    let grows = walk.store.info().grows_zeroed;
    let start = if grows { file } else { used_end };
    let new = Refcounts::for_clusters(bits, order, start);
    let end = start + new.clusters();
    if !new.fits(bits) || (!grows && end > walk.store.len_bytes() >> bits) {
        let what = format!("there is no room for new refcounts of {} clusters", new.clusters());
        return Err(Error::new(ErrorKind::NoSpace, what)
            .at_path(walk.store.path())
            .hint("nothing was changed; spile convert copies the disk into a new image"));
    }
    let mut nothing = Findings::default();
    let per_block = refcount::counts_per_block(bits, order);
    let mut block = 0;
    for mut pass in walk.passes() {
        walk.count(&mut pass, &mut nothing).await?;
        while block < new.blocks && block * per_block < pass.window.end() {
            write_block(walk, &pass.window, block, start..end, start + block).await?;
            block += 1;
        }
        mend_copied(walk, &pass.window).await?;
    }
    let none = Window::new(file, 0, bits);
    for block in block..new.blocks {
        write_block(walk, &none, block, start..end, start + block).await?;
    }
    let table = (start..start + new.blocks).flat_map(|at| (at << bits).to_be_bytes());
    let mut table: Vec<u8> = table.collect();
    table.resize((new.table_clusters << bits) as usize, 0);
    let table_at = (start + new.blocks) << bits;
    write(walk.store, table_at, &table).await?;
    walk.store.sync().await?;
    let mut place = table_at.to_be_bytes().to_vec();
    // Within 8 MiB, as was checked.
    place.extend((new.table_clusters as u32).to_be_bytes());
    write(walk.store, TABLE_AT, &place).await?;
    walk.store.sync().await
}

/// Writes the refcount block number `block` to the cluster `at`: the counts of the window, and 1 for the clusters `new`.
async fn write_block<S: Store>(
    walk: &Walk<'_, S>,
    window: &Window,
    block: u64,
    new: std::ops::Range<u64>,
    at: u64,
) -> Result<()> {
    let (bits, order) = (walk.cluster_bits(), walk.header().refcount_order);
    let per_block = refcount::counts_per_block(bits, order);
    let mut bytes = vec![0; 1 << bits];
    for index in 0..per_block {
        breathe(index).await;
        let cluster = block * per_block + index;
        let count = if new.contains(&cluster) { 1 } else { u64::from(window.found(cluster << bits).unwrap_or(0)) };
        // It fits: the survey has looked at all counts.
        refcount::set(&mut bytes, order, index, count);
    }
    // Behind the end of a file all is zero. So a long file with little in it takes little space.
    if walk.store.info().grows_zeroed && bytes.iter().all(|byte| *byte == 0) {
        return Ok(());
    }
    write(walk.store, at << bits, &bytes).await
}

/// Sets and clears COPIED in the active tables, for what lies in the window.
pub(super) async fn mend_copied<S: Store>(walk: &Walk<'_, S>, window: &Window) -> Result<()> {
    let header = walk.header();
    let entries = u64::from(header.l1_entries);
    for (number, entry) in (0u64..).zip(read_l1(walk.store, header.l1_offset, entries, entries).await?) {
        breathe(number).await;
        let Ok(Some(table)) = walk.rules.l2_table(entry) else { continue };
        if let Some(mended) = mended(entry, table, window) {
            write(walk.store, header.l1_offset + number * 8, &mended.to_be_bytes()).await?;
        }
        mend_table(walk, table, window).await?;
    }
    Ok(())
}

async fn mend_table<S: Store>(walk: &Walk<'_, S>, table: u64, window: &Window) -> Result<()> {
    if walk.rules.data_file {
        return Ok(());
    }
    let len = walk.cluster_bytes().min(walk.store.len_bytes() - table);
    let mut words: Vec<u64> = decode(&read(walk.store, table, len).await?).collect();
    let places: Vec<_> = places(&walk.rules, &words).collect();
    let mut is_changed = false;
    for (number, (at, host)) in (0..).zip(places) {
        breathe(number).await;
        if let Some(mended) = mended(words[at], host, window) {
            words[at] = mended;
            is_changed = true;
        }
    }
    if !is_changed {
        return Ok(());
    }
    write(walk.store, table, &encode(&words)).await
}

/// The entry with COPIED as it should be, if that differs.
fn mended(entry: u64, host: u64, window: &Window) -> Option<u64> {
    let is_one = window.found(host)? == 1;
    let right = if is_one { entry | COPIED } else { entry & !COPIED };
    (right != entry).then_some(right)
}

/// Clears the autoclear bit of a raw data file that there is not; and those that are not known here before the image changes: what they say may not be
/// true any more.
async fn clear_autoclear<S: Store>(walk: &Walk<'_, S>, changes: bool) -> Result<()> {
    let header = walk.header();
    let left = if changes { sound_autoclear(header) } else { header.autoclear & !stray_autoclear(header) };
    if header.version < 3 || left == header.autoclear {
        return Ok(());
    }
    write(walk.store, AUTOCLEAR_AT, &left.to_be_bytes()).await?;
    walk.store.sync().await
}

/// Clears the length of a name that there is not.
async fn clear_name_length<S: Store>(walk: &Walk<'_, S>) -> Result<()> {
    if walk.header().stray_name_bytes == 0 {
        return Ok(());
    }
    write(walk.store, NAME_LENGTH_AT, &[0; 4]).await?;
    walk.store.sync().await
}

/// Clears "dirty" and "corrupt".
async fn clear_flags<S: Store>(walk: &Walk<'_, S>) -> Result<()> {
    let left = walk.header().incompatible & !(feature::DIRTY | feature::CORRUPT);
    if left == walk.header().incompatible {
        return Ok(());
    }
    walk.store.sync().await?;
    write(walk.store, INCOMPATIBLE_AT, &left.to_be_bytes()).await?;
    walk.store.sync().await
}
