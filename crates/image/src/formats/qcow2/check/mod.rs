//! Checking an image for contradictions; `repair` mends those that need no person's decision.
//!
//! Every reference in the image is counted and compared with the refcounts: too high a count is a leak, too low a one
//! is corruption, for a writer would give the cluster away. A check also finds entries that cannot be followed or
//! point past the end, clusters with two kinds of users, and wrong COPIED bits.
//!
//! Memory is bounded, whatever the image claims: counters for 16 Mi clusters at a time, one L2 table, one refcount block,
//! and the first levels of the tables (8 MiB of the refcount table, 32 MiB of an L1 table, and as much again and more to
//! know which L2 tables it named already). An image with more clusters is walked through several times.
//!
//! Time is bounded by the length of the file: each L2 table is walked through once for each L1 table that names it. A server counts while it
//! serves other disks, so no step is long: other requests of the worker run in between ([`breathe`]).

mod lower;
mod repair;
mod room;
mod window;

use std::collections::HashSet;

use spile_core::{Error, ErrorKind, Result, Store, yield_now};

use self::window::{Findings, User, WINDOW_CLUSTERS, Window};
use super::codec::bitmap::{Bitmap, Bits};
use super::codec::header::{Header, feature};
use super::codec::snapshot::Snapshot;
use super::codec::table::{Cluster, Rules, decode};
use super::codec::{COPIED, refcount};
use super::data_file::stray_autoclear;
use super::lists::{List, all_snapshots, bitmaps};
use super::open::{Head, read, read_head, read_l1, rules};
use super::writing::AUTOCLEAR_AT;
use crate::check::{Mend, Report, Severity};

pub(super) use self::repair::repair;
pub(super) use self::room::refuse_full;

/// Where the header has the length of the backing file's name.
const NAME_LENGTH_AT: u64 = 16;
/// The most that is read of the directory of bitmaps.
const LIST_BYTES: u64 = 16 << 20;
/// What is read at once of a table that may be long.
const READ_BYTES: u64 = 256 << 10;
/// The most walks through an image: enough for a file of 256 TiB with clusters of 64 KiB.
const MAX_WALKS: u64 = 256;

/// So many entries or counts are looked at in one turn of the worker.
const STEPS_AT_ONCE: u64 = 4096;

/// Lets the worker's other requests run, now and then in a loop: `step` is the number of the turn in it.
async fn breathe(step: u64) {
    if step % STEPS_AT_ONCE == STEPS_AT_ONCE - 1 {
        yield_now().await;
    }
}

/// Checks the image in `store`; its backing file is not looked at.
///
/// # Errors
/// When the header cannot be read; `Unsupported` when the file has more clusters than [`MAX_WALKS`] walks count; I/O
/// errors.
pub(super) async fn check<S: Store>(store: &S) -> Result<Report> {
    count(store).await.map(|counted| counted.report)
}

/// What a check finds, and what it has counted besides.
pub(super) struct Counted {
    pub report: Report,
    /// Clusters that a flag calls zero, in the disk and its snapshots.
    pub zero_clusters: u64,
    /// Where the file has the first entry that claims space past the end of the file, which a reader does not need. Nobody can tell whether that space
    /// is counted.
    pub claims_past_end: Option<u64>,
    pub snapshots: Vec<Snapshot>,
}

/// As [`check`], for whoever wants to know more of what is in the image.
///
/// # Errors
/// As there.
pub(super) async fn count<S: Store>(store: &S) -> Result<Counted> {
    let mut findings = Findings::default();
    let walk = Walk::open(store, false, &mut findings).await?;
    note_features(walk.header(), &mut findings);
    walk.run(&mut findings).await?;
    let Findings { zero_clusters, claims_past_end, .. } = findings;
    Ok(Counted { report: findings.finish(), zero_clusters, claims_past_end, snapshots: walk.snapshots.entries })
}

/// Refuses a file that would need more than [`MAX_WALKS`] walks. A sparse file can be very long and take no space.
fn refuse_endless<S: Store>(store: &S, header: &Header) -> Result<()> {
    let clusters = store.len_bytes().div_ceil(header.cluster_bytes());
    let most = MAX_WALKS * WINDOW_CLUSTERS;
    if clusters <= most {
        return Ok(());
    }
    let what = format!("the file has {clusters} clusters; a check counts at most {most}");
    Err(Error::new(ErrorKind::Unsupported, what).at_path(store.path()))
}

/// The L1 tables of the snapshots, offset and number of entries, each once. Each snapshot of a sound image has its own,
/// so all of them together fit into the file; those of an image where they do not are left out.
fn snapshot_l1s(header: &Header, snapshots: &[Snapshot], file_bytes: u64, findings: &mut Findings) -> Vec<(u64, u32)> {
    let with_l1 = snapshots.iter().filter(|snapshot| snapshot.l1_entries > 0);
    let mut tables: Vec<_> = with_l1.map(|snapshot| (snapshot.l1_offset, snapshot.l1_entries)).collect();
    let all = tables.len();
    tables.sort_unstable();
    tables.dedup_by_key(|(offset, _)| *offset);
    tables.retain(|(offset, _)| *offset != header.l1_offset);
    if tables.len() < all {
        let shared = all - tables.len();
        findings.corruption(None, Mend::No, format!("{shared} snapshots name an L1 table that is in use already"));
    }
    if tables.iter().map(|(_, entries)| u64::from(*entries) * 8).sum::<u64>() > file_bytes {
        let message = "the L1 tables of the snapshots are longer than the file; they are not looked at";
        findings.corruption(None, Mend::No, message);
        tables.clear();
    }
    tables
}

fn note_features(header: &Header, findings: &mut Findings) {
    if header.has(feature::DIRTY) {
        findings.add(Severity::Note, None, Mend::Repair, "the image is marked dirty: its refcounts may lag behind");
    }
    if header.has(feature::CORRUPT) {
        let message = "the image is marked corrupt: a program that wrote to it found a contradiction";
        findings.corruption(None, Mend::Repair, message);
    }
    for (offset, message) in oddities(header) {
        findings.add(Severity::Note, offset, Mend::Repair, message);
    }
}

/// What a header says that means nothing, and that other programs may stumble over: where, and what.
pub(super) fn oddities(header: &Header) -> Vec<(u64, String)> {
    let mut found = Vec::new();
    if header.stray_name_bytes > 0 {
        let len = header.stray_name_bytes;
        let what =
            format!("the header has a length for the name of a backing file ({len}), but no name: there is none");
        found.push((NAME_LENGTH_AT, what));
    }
    if stray_autoclear(header) != 0 {
        let what = "the header calls an external data file raw (autoclear bit 1), but there is none: QEMU refuses that";
        found.push((AUTOCLEAR_AT, what.to_owned()));
    }
    found
}

fn tell_list<T>(what: &str, list: &List<T>, findings: &mut Findings) {
    if let Some(fault) = &list.fault {
        let read = list.entries.len();
        findings.corruption(None, Mend::No, format!("of {} {what} only {read} can be read: {fault}", list.count));
    }
}

/// The entries of the refcount table; none when it cannot be where it says.
async fn read_refcount_table<S: Store>(store: &S, header: &Header, findings: &mut Findings) -> Result<Vec<u64>> {
    if let Err(error) = header.check_refcount_table() {
        findings.corruption(None, Mend::Repair, error.to_string());
        return Ok(Vec::new());
    }
    let len = u64::from(header.refcount_table_clusters) << header.cluster_bits;
    let rest = store.len_bytes().saturating_sub(header.refcount_table_offset);
    if rest < len {
        let message = "the refcount table goes past the end of the file";
        findings.corruption(header.refcount_table_offset, Mend::Repair, message);
    }
    let bytes = read(store, header.refcount_table_offset, len.min(rest)).await?;
    Ok(decode(&bytes).collect())
}

/// What a check walks through.
struct Walk<'a, S> {
    store: &'a S,
    head: Head,
    rules: Rules,
    snapshots: List<Snapshot>,
    /// L1 tables of the snapshots: offset and number of entries.
    snapshot_l1s: Vec<(u64, u32)>,
    bitmaps: List<Bitmap>,
    /// Entries of the refcount table.
    blocks: Vec<u64>,
    /// The refcounts of the image are not looked at.
    ignores_refcounts: bool,
}

/// One walk through the image, for one window.
struct Pass {
    window: Window,
    /// In the first walk, findings that belong to no window are told.
    is_first: bool,
    /// The L1 table that is walked through is the active one, in which COPIED bits count.
    is_active: bool,
}

impl Pass {
    fn new(window: Window) -> Self {
        Self { is_first: window.first == 0, window, is_active: false }
    }
}

impl<'a, S: Store> Walk<'a, S> {
    /// Reads what is walked through, and tells what cannot be. With `ignores_refcounts`, refcounts are neither compared nor
    /// counted as users of clusters.
    async fn open(store: &'a S, ignores_refcounts: bool, findings: &mut Findings) -> Result<Self> {
        let head = read_head(store).await?;
        refuse_endless(store, &head.header)?;
        findings.report.total_blocks = head.header.size_bytes.div_ceil(head.header.cluster_bytes());
        let snapshots = all_snapshots(store, &head).await;
        let bitmaps = bitmaps(store, &head, LIST_BYTES).await;
        tell_list("snapshots", &snapshots, findings);
        tell_list("bitmaps", &bitmaps, findings);
        let mut unheard = Findings::default();
        let hears = if ignores_refcounts { &mut unheard } else { &mut *findings };
        let blocks = read_refcount_table(store, &head.header, hears).await?;
        let snapshot_l1s = snapshot_l1s(&head.header, &snapshots.entries, store.len_bytes(), findings);
        let rules = rules(&head.header);
        Ok(Self { store, rules, head, snapshots, snapshot_l1s, bitmaps, blocks, ignores_refcounts })
    }
}

impl<S: Store> Walk<'_, S> {
    fn header(&self) -> &Header {
        &self.head.header
    }

    fn cluster_bits(&self) -> u32 {
        self.rules.cluster_bits
    }

    fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits()
    }

    async fn run(&self, findings: &mut Findings) -> Result<()> {
        for mut pass in self.passes() {
            self.read_counts(&mut pass, findings).await?;
            self.count(&mut pass, findings).await?;
            for part in pass.window.parts() {
                pass.window.compare(part, findings);
                yield_now().await;
            }
        }
        Ok(())
    }

    /// A pass for each window of the file.
    fn passes(&self) -> impl Iterator<Item = Pass> + use<S> {
        let (bits, clusters) = (self.cluster_bits(), self.store.len_bytes().div_ceil(self.cluster_bytes()));
        (0..clusters.div_ceil(WINDOW_CLUSTERS)).map(move |number| {
            let first = number * WINDOW_CLUSTERS;
            Pass::new(Window::new(first, WINDOW_CLUSTERS.min(clusters - first), bits))
        })
    }

    /// Counts all references to the clusters of the window, but for those of refcounts to their own blocks.
    async fn count(&self, pass: &mut Pass, findings: &mut Findings) -> Result<()> {
        self.refer_to_tables(pass, findings);
        self.refer_to_bitmaps(pass, findings).await?;
        self.walk_all(pass, findings).await
    }

    /// Reads the refcounts of the window, and counts the blocks that hold refcounts.
    async fn read_counts(&self, pass: &mut Pass, findings: &mut Findings) -> Result<()> {
        let (bits, order) = (self.cluster_bits(), self.header().refcount_order);
        let per_block = refcount::counts_per_block(bits, order);
        for (number, entry) in (0u64..).zip(&self.blocks) {
            let offset = match refcount::block(*entry, bits) {
                Ok(None) => continue,
                Ok(Some(offset)) if self.is_inside(offset) => offset,
                Ok(Some(offset)) => {
                    pass.tell_mendable(findings, offset, || "a refcount block lies past the end of the file".into());
                    continue;
                }
                Err(error) => {
                    pass.tell_mendable(findings, *entry, || error.to_string());
                    continue;
                }
            };
            pass.window.refer(offset, self.cluster_bytes(), User::Refcounts, findings);
            let first = number * per_block;
            if first < pass.window.end() && pass.window.first < first + per_block {
                let rest = self.cluster_bytes().min(self.store.len_bytes() - offset);
                let block = read(self.store, offset, rest).await?;
                // A block of a small image is mostly of clusters that lie past its end.
                let (start, end) = (pass.window.first.saturating_sub(first), pass.window.end() - first);
                for index in start..end.min((rest * 8) >> order) {
                    breathe(index).await;
                    pass.window.store(first + index, refcount::get(&block, order, index));
                }
            }
        }
        Ok(())
    }

    fn is_inside(&self, offset: u64) -> bool {
        offset < self.store.len_bytes()
    }

    /// Counts the references to what the header points at.
    fn refer_to_tables(&self, pass: &mut Pass, findings: &mut Findings) {
        let header = self.header();
        if !self.ignores_refcounts && header.check_refcount_table().is_ok() {
            let len = u64::from(header.refcount_table_clusters) << header.cluster_bits;
            pass.window.refer(header.refcount_table_offset, len, User::Refcounts, findings);
        }
        let mut refer = |offset, len| pass.window.refer(offset, len, User::Metadata, findings);
        refer(0, 1);
        if header.l1_entries > 0 {
            refer(header.l1_offset, u64::from(header.l1_entries) * 8);
        }
        let lengths = self.snapshots.entries.iter().map(|snapshot| snapshot.to_bytes().len() as u64);
        match lengths.sum() {
            0 => {}
            len => refer(header.snapshots_offset, len),
        }
        for (offset, entries) in &self.snapshot_l1s {
            refer(*offset, u64::from(*entries) * 8);
        }
        if let Some(place) = self.head.extensions.luks {
            refer(place.offset, place.len_bytes);
        }
        if let Some(place) = self.head.extensions.bitmaps {
            refer(place.directory_offset, place.directory_bytes);
        }
    }

    async fn refer_to_bitmaps(&self, pass: &mut Pass, findings: &mut Findings) -> Result<()> {
        for bitmap in &self.bitmaps.entries {
            let (offset, len) = (bitmap.table_offset, u64::from(bitmap.table_entries) * 8);
            if offset.saturating_add(len) > self.store.len_bytes() {
                pass.tell(findings, offset, || "the table of a bitmap goes past the end of the file".into());
                continue;
            }
            pass.window.refer(offset, len, User::Metadata, findings);
            let mut at = 0;
            while at < len {
                let bytes = read(self.store, offset + at, READ_BYTES.min(len - at)).await?;
                for entry in decode(&bytes) {
                    match Bits::parse(entry, self.cluster_bits()) {
                        Ok(Bits::At(place)) if self.is_inside(place) => {
                            pass.window.refer(place, self.cluster_bytes(), User::Metadata, findings);
                        }
                        Ok(Bits::At(place)) => {
                            pass.tell(findings, place, || "bits of a bitmap lie past the end of the file".into());
                        }
                        Ok(_) => {}
                        Err(error) => pass.tell(findings, offset + at, || error.to_string()),
                    }
                }
                at += bytes.len() as u64;
            }
        }
        Ok(())
    }

    /// Walks through the active L1 table and through those of the snapshots.
    async fn walk_all(&self, pass: &mut Pass, findings: &mut Findings) -> Result<()> {
        let header = self.header();
        pass.is_active = true;
        self.walk_l1(header.l1_offset, header.l1_entries, pass, findings).await?;
        pass.is_active = false;
        for (offset, entries) in &self.snapshot_l1s {
            self.walk_l1(*offset, *entries, pass, findings).await?;
        }
        Ok(())
    }

    async fn walk_l1(&self, offset: u64, entries: u32, pass: &mut Pass, findings: &mut Findings) -> Result<()> {
        let entries = u64::from(entries);
        let l1 = match read_l1(self.store, offset, entries, entries).await {
            Ok(l1) => l1,
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                pass.tell(findings, offset, || error.message().to_owned());
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let mut walked = HashSet::new();
        let covered = 1u64 << self.header().l2_coverage_bits();
        for (number, entry) in (0u64..).zip(l1) {
            breathe(number).await;
            let place = offset + number * 8;
            match self.rules.l2_table(entry) {
                Ok(None) => {}
                Ok(Some(table)) if !self.is_inside(table) => {
                    pass.tell(findings, place, || {
                        format!("the L1 entry {entry:#018x} points past the end of the file")
                    });
                }
                Ok(Some(table)) => {
                    pass.window.refer(table, self.cluster_bytes(), User::L2, findings);
                    self.check_copied("L1", entry, table, place, pass, findings);
                    if walked.insert(table) {
                        self.walk_l2(table, number.saturating_mul(covered), pass, findings).await?;
                    } else {
                        pass.tell(findings, place, || "an L1 entry names an L2 table that another one names".into());
                    }
                }
                Err(fault) => pass.tell(findings, place, || format!("the L1 entry {entry:#018x} is wrong: {fault}")),
            }
        }
        Ok(())
    }

    /// Walks through the L2 table at `table`, whose first cluster is the guest's at `guest`.
    async fn walk_l2(&self, table: u64, guest: u64, pass: &mut Pass, findings: &mut Findings) -> Result<()> {
        let rest = self.cluster_bytes().min(self.store.len_bytes() - table);
        if rest < self.cluster_bytes() {
            pass.tell(findings, table, || "an L2 table is cut short by the end of the file".into());
        }
        let words: Vec<u64> = decode(&read(self.store, table, rest).await?).collect();
        let per_entry = if self.rules.extended { 2 } else { 1 };
        for (number, words) in (0u64..).zip(words.chunks_exact(per_entry)) {
            breathe(number).await;
            let place = table + number * 8 * per_entry as u64;
            let guest = guest.saturating_add(number << self.cluster_bits());
            let bitmap = words.get(1).copied().unwrap_or(0);
            match self.rules.cluster(words[0], bitmap) {
                Ok(cluster) => self.refer_to_cluster(words[0], cluster, place, guest, pass, findings),
                Err(fault) => {
                    pass.tell(findings, place, || format!("the L2 entry {:#018x} is wrong: {fault}", words[0]));
                }
            }
        }
        Ok(())
    }

    fn refer_to_cluster(
        &self,
        entry: u64,
        cluster: Cluster,
        place: u64,
        guest: u64,
        pass: &mut Pass,
        findings: &mut Findings,
    ) {
        if matches!(cluster, Cluster::Zero(_)) && pass.is_first {
            findings.zero_clusters += 1;
        }
        let host = match cluster {
            Cluster::Unallocated => return,
            Cluster::Compressed(found) => {
                if entry & COPIED != 0 {
                    pass.tell(findings, place, || {
                        format!("the L2 entry {entry:#018x} is compressed and has COPIED set")
                    });
                }
                // Counts are of whole sectors, as an entry says them.
                let start = found.offset & !511;
                pass.count_guest_cluster(findings);
                let end = found.offset + found.len_bytes;
                if self.is_inside(start) && end > self.store.len_bytes().next_multiple_of(self.cluster_bytes()) {
                    findings.claims_past_end.get_or_insert(place);
                }
                return self.refer_to_data(entry, start, end - start, place, pass, findings);
            }
            Cluster::Zero(None) | Cluster::Mixed { host: None, .. } => return,
            Cluster::Data(host) | Cluster::Zero(Some(host)) | Cluster::Mixed { host: Some(host), .. } => host,
        };
        pass.count_guest_cluster(findings);
        if self.rules.data_file {
            if host != guest {
                let what =
                    format!("the L2 entry {entry:#018x} points elsewhere in the data file than the guest's offset");
                pass.tell(findings, place, || what);
            }
            return;
        }
        self.refer_to_data(entry, host, self.cluster_bytes(), place, pass, findings);
        self.check_copied("L2", entry, host, place, pass, findings);
    }

    fn refer_to_data(&self, entry: u64, offset: u64, len: u64, place: u64, pass: &mut Pass, findings: &mut Findings) {
        if !self.is_inside(offset) {
            pass.tell(findings, place, || format!("the L2 entry {entry:#018x} points past the end of the file"));
            return;
        }
        pass.window.refer(offset, len, User::Data, findings);
    }

    /// COPIED says that the refcount is exactly 1: a writer believes it and writes in place. Where it is clear without need, a writer copies
    /// and does no harm: that is how a power cut leaves an image whose snapshots were being changed.
    fn check_copied(&self, table: &str, entry: u64, offset: u64, place: u64, pass: &mut Pass, findings: &mut Findings) {
        let Some(count) = pass.window.stored(offset).filter(|_| pass.is_active && !self.ignores_refcounts) else {
            return;
        };
        let is_set = entry & COPIED != 0;
        if is_set != (count == 1) {
            let (says, severity) = if is_set { ("set", Severity::Corruption) } else { ("clear", Severity::Leak) };
            let message = format!("the {table} entry {entry:#018x} has COPIED {says}, but the refcount is {count}");
            findings.add(severity, place, Mend::Repair, message);
        }
    }
}

impl Pass {
    /// Adds a finding that every walk would make; only the first walk adds it.
    fn tell(&self, findings: &mut Findings, offset: u64, message: impl FnOnce() -> String) {
        if self.is_first {
            findings.corruption(offset, Mend::No, message());
        }
    }

    /// As [`Pass::tell`], of what a repair mends.
    fn tell_mendable(&self, findings: &mut Findings, offset: u64, message: impl FnOnce() -> String) {
        if self.is_first {
            findings.corruption(offset, Mend::Repair, message());
        }
    }

    fn count_guest_cluster(&self, findings: &mut Findings) {
        if self.is_first && self.is_active {
            findings.report.allocated_blocks += 1;
        }
    }
}
