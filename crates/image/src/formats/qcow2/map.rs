//! Where guest bytes lie: L1 in memory, L2 in slices through a bounded cache.
//!
//! For an entry that breaks a rule, [`Map::find`] answers as if its slice were missing, and [`Map::load`] then fails
//! and says what is wrong. So a damaged entry is an error where it is read, and nowhere else.

use std::sync::atomic::{AtomicU64, Ordering};

use spile_core::{Error, ErrorKind, Result, ResultExt, Segments, Store, StoreOffset, Via};

use super::codec::header::Header;
use super::codec::table::{Cluster, Compressed, EntryFault, Rules, SUBCLUSTERS, decode};
use super::codec::{COPIED, OFFSET_MASK};
use super::l1::L1;
use super::slices::{Entries, Slices};
use crate::formats::OpenLayer;
use crate::layer::{EncodedUnit, Found, MapPiece};
use crate::range_lock::{RangeGuard, RangeLock};

/// The most of an L2 table that is read at once, as a power of two: 4 KiB.
const MAX_SLICE_BITS: u32 = 12;

/// The map of an image.
pub(crate) struct Map {
    rules: Rules,
    /// Bytes of an L2 entry, as a power of two.
    entry_bits: u32,
    /// Bytes of a slice, as a power of two.
    slice_bits: u32,
    /// Guest bytes that a slice covers, as a power of two.
    coverage_bits: u32,
    /// Bits that an entry of plain data has clear, beside COPIED.
    not_plain: u64,
    /// Of an image that is open for writing, without COPIED until the table's refcount was seen to be 1.
    l1: L1,
    slices: Slices,
    /// Locks by slice. One is held while its slice is read, so that requests that miss the same slice share a read.
    /// Held shared while an entry of the slice changes.
    loads: RangeLock,
    /// The length of the image, in bytes.
    file_bytes: AtomicU64,
    /// The length of what holds the guest's data, the image or its data file, in bytes.
    data_bytes: AtomicU64,
    /// The image is open for writing: COPIED is taken from an entry that is read, and is put back into the one in memory when the
    /// refcount was seen to be 1.
    is_writable: bool,
}

/// What a run of clusters is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Data(u64),
    Zero,
    Below,
    Encoded(u64),
    /// The entry cannot be followed.
    Fault,
}

/// An image that is written has room for so many slices in memory at least: its disk may grow while it is in use.
const GROWING_SLICES: u64 = 256;

impl Map {
    /// The map of the image with this header. `l1` has the entries of its L1 table that the virtual size needs.
    pub(crate) fn new(header: &Header, rules: Rules, l1: Vec<u64>, file_bytes: u64, how: OpenLayer) -> Self {
        let slice_bits = MAX_SLICE_BITS.min(header.cluster_bits);
        // No more slices can be needed than L2 tables lie in the file, nor than the disk has. An image that is written grows, and its disk may.
        let is_writable = !how.read_only;
        let of_disk = (l1.len() as u64) << (header.cluster_bits - slice_bits);
        let most = if is_writable { (4 * of_disk).max(GROWING_SLICES) } else { of_disk.min(file_bytes >> slice_bits) };
        let slices = Slices::new(how.cache_bytes, 1 << slice_bits, most);
        let entry_bits = header.l2_entry_bits();
        Self {
            coverage_bits: header.cluster_bits + slice_bits - entry_bits,
            not_plain: !OFFSET_MASK | (header.cluster_bytes() - 1),
            rules,
            entry_bits,
            slice_bits,
            l1: L1::new(l1.into_iter().map(|entry| if is_writable { unproved(entry) } else { entry }), is_writable),
            slices,
            loads: RangeLock::default(),
            file_bytes: AtomicU64::new(file_bytes),
            // Of a data file nothing can be read before it is there.
            data_bytes: AtomicU64::new(if rules.data_file { 0 } else { file_bytes }),
            is_writable,
        }
    }

    /// Tells how long the data file is, where the guest's data lie in one.
    pub(crate) fn set_data_bytes(&self, data_bytes: u64) {
        self.data_bytes.store(data_bytes, Ordering::Release);
    }

    /// Tells how long the image is now.
    pub(super) fn set_file_bytes(&self, file_bytes: u64) {
        self.file_bytes.store(file_bytes, Ordering::Release);
        if !self.rules.data_file {
            self.data_bytes.store(file_bytes, Ordering::Release);
        }
    }

    /// Adds L1 entries that name no table, so that there are `entries`.
    pub(super) fn grow(&self, entries: usize) {
        self.l1.grow(entries);
    }

    fn data_bytes(&self) -> u64 {
        self.data_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn l1(&self) -> impl Iterator<Item = u64> {
        self.l1.entries()
    }

    fn cluster_bytes(&self) -> u64 {
        1 << self.rules.cluster_bits
    }

    /// Guest bytes that an L2 table covers, as a power of two.
    fn table_coverage_bits(&self) -> u32 {
        2 * self.rules.cluster_bits - self.entry_bits
    }

    /// As [`Layer::find`](crate::layer::Layer::find).
    pub(crate) fn find(&self, at: u64, len_bytes: u64) -> (Found, u64) {
        let coverage = 1 << self.coverage_bits;
        let rest_of_slice = coverage - (at & (coverage - 1));
        let in_slice = len_bytes.min(rest_of_slice);
        let answer = self.slices.look(at >> self.coverage_bits, |entries| match self.plain(entries, at, len_bytes) {
            Some(offset) => (Found::Data(offset), len_bytes),
            None => self.run(entries, at, in_slice),
        });
        match answer {
            Some(answer) => answer,
            None => self.find_in_l1(at, len_bytes, in_slice),
        }
    }

    /// The short way of most reads: plain data of one cluster, all of which is in the file. `None` sends a read the long
    /// way, [`Map::run`], which knows all kinds of entries.
    #[inline]
    fn plain(&self, entries: &Entries, at: u64, len_bytes: u64) -> Option<StoreOffset> {
        let (cluster, coverage) = (self.cluster_bytes(), 1u64 << self.coverage_bits);
        let (within, index) = (at & (cluster - 1), (at & (coverage - 1)) >> self.rules.cluster_bits);
        let word = |at: u64| Some(entries.get(at as usize)?.load(Ordering::Relaxed));
        let host = !COPIED
            & match self.rules.extended {
                false => word(index)?,
                true if word(index * 2 + 1)? == u64::from(u32::MAX) => word(index * 2)?,
                true => return None,
            };
        let is_plain = host != 0 && host & self.not_plain == 0;
        let is_whole = within + len_bytes <= cluster && host + cluster <= self.data_bytes();
        (is_plain && is_whole && !self.lies_elsewhere(host, at)).then_some(StoreOffset(host + within))
    }

    /// [`Map::find`] where the slice is not in memory: a hole as far as L1 tells, else a miss.
    fn find_in_l1(&self, at: u64, len_bytes: u64, in_slice: u64) -> (Found, u64) {
        let bits = self.table_coverage_bits();
        let first = (at >> bits) as usize;
        let last = ((at + len_bytes).div_ceil(1 << bits) as usize).min(self.l1.len());
        let holes = (first..last).take_while(|number| self.l1.get(*number) == 0).count() as u64;
        match holes {
            0 => (Found::Miss(self.piece(at)), in_slice),
            _ => (Found::Below, len_bytes.min(((first as u64 + holes) << bits) - at)),
        }
    }

    /// The piece of the map that is asked for: named by cluster, so that a fault of one entry can be told.
    fn piece(&self, at: u64) -> MapPiece {
        MapPiece(at >> self.rules.cluster_bits)
    }

    /// The run from `at`, which lies in the slice of `entries`, as does all of `len_bytes`.
    fn run(&self, entries: &Entries, at: u64, len_bytes: u64) -> (Found, u64) {
        let within = at & (self.cluster_bytes() - 1);
        let (kind, mut len) = self.part(entries, at);
        while len < len_bytes {
            let next = at + len;
            let (other, more) = self.part(entries, next);
            let goes_on = match (kind, other) {
                (Kind::Data(start), Kind::Data(other)) => other == start + len,
                (Kind::Zero, Kind::Zero) | (Kind::Below, Kind::Below) => true,
                _ => false,
            };
            if !goes_on {
                break;
            }
            len += more;
        }
        let found = match kind {
            Kind::Data(host) => Found::Data(StoreOffset(host)),
            Kind::Zero => Found::Zero,
            Kind::Below => Found::Below,
            Kind::Encoded(entry) => Found::Encoded { unit: EncodedUnit(entry), within_bytes: within as u32 },
            Kind::Fault => Found::Miss(self.piece(at)),
        };
        (found, len.min(len_bytes))
    }

    /// What the entry of the cluster at `at` says of `at`, and for how many bytes, at most to the end of the cluster.
    fn part(&self, entries: &Entries, at: u64) -> (Kind, u64) {
        let within = at & (self.cluster_bytes() - 1);
        let rest = self.cluster_bytes() - within;
        let (entry, cluster) = self.entry(entries, at);
        match cluster {
            Ok(Cluster::Data(host)) => self.data(host, at, rest),
            Ok(Cluster::Unallocated) => (Kind::Below, rest),
            Ok(Cluster::Zero(_)) => (Kind::Zero, rest),
            Ok(Cluster::Compressed(_)) => (Kind::Encoded(entry), rest),
            Ok(Cluster::Mixed { host, allocated, zero }) => {
                let bits = self.rules.cluster_bits - SUBCLUSTERS.ilog2();
                let (chosen, same) = subclusters(allocated, zero, (within >> bits) as u32);
                let rest = (u64::from(same) << bits) - (within & ((1 << bits) - 1));
                match (chosen, host) {
                    (Subcluster::Allocated, Some(host)) => self.data(host, at, rest),
                    (Subcluster::Zero, _) => (Kind::Zero, rest),
                    _ => (Kind::Below, rest),
                }
            }
            Err(_) => (Kind::Fault, rest),
        }
    }

    /// True when guest offset `at` is said to lie in a cluster at `host` of a data file, and the guest has it elsewhere.
    fn lies_elsewhere(&self, host: u64, at: u64) -> bool {
        self.rules.data_file && host != at & !(self.cluster_bytes() - 1)
    }

    /// The data of guest offset `at`, whose cluster lies at `host`. The last cluster of the file may be cut short: what is missing reads as
    /// zeroes. A cluster that begins past the end is a fault.
    fn data(&self, host: u64, at: u64, rest: u64) -> (Kind, u64) {
        if self.lies_elsewhere(host, at) {
            return (Kind::Fault, rest);
        }
        let at = host + (at & (self.cluster_bytes() - 1));
        match self.data_bytes() {
            end if host >= end => (Kind::Fault, rest),
            end if at >= end => (Kind::Zero, rest),
            end => (Kind::Data(at), rest.min(end - at)),
        }
    }

    fn entry(&self, entries: &Entries, at: u64) -> (u64, Result<Cluster, EntryFault>) {
        let (entry, bitmap) = self.words(entries, at);
        (entry, self.rules.cluster(entry, bitmap))
    }

    /// The number of the first word of an entry in its slice.
    fn word_index(&self, at: u64) -> usize {
        let index = (at & ((1 << self.coverage_bits) - 1)) >> self.rules.cluster_bits;
        (index << (self.entry_bits - 3)) as usize
    }

    fn words(&self, entries: &Entries, at: u64) -> (u64, u64) {
        let index = self.word_index(at);
        let word = |at: usize| entries[at].load(Ordering::Relaxed);
        (word(index), if self.rules.extended { word(index + 1) } else { 0 })
    }

    /// As [`Layer::load`](crate::layer::Layer::load).
    pub(crate) async fn load<S: Store>(&self, store: &S, piece: MapPiece) -> Result<()> {
        let at = piece.0 << self.rules.cluster_bits;
        let slice = at >> self.coverage_bits;
        if self.slices.look(slice, |_| ()).is_none() {
            self.load_slice(store, slice).await?;
        }
        match self.slices.look(slice, |entries| self.entry(entries, at)) {
            Some((entry, Err(fault))) => Err(entry_error("L2", entry, at, fault)),
            Some((entry, Ok(Cluster::Data(host) | Cluster::Mixed { host: Some(host), .. })))
                if self.lies_elsewhere(host, at) =>
            {
                let what = format!(
                    "the L2 entry {entry:#018x} of guest offset {at:#x} says that it lies elsewhere in the data file than the guest has it"
                );
                Err(Error::new(ErrorKind::Corrupt, what))
            }
            Some((entry, Ok(Cluster::Data(host) | Cluster::Mixed { host: Some(host), .. })))
                if host >= self.data_bytes() =>
            {
                let what =
                    format!("the L2 entry {entry:#018x} of guest offset {at:#x} points past the end of the data");
                Err(Error::new(ErrorKind::Corrupt, what))
            }
            _ => Ok(()),
        }
    }

    async fn load_slice<S: Store>(&self, store: &S, slice: u64) -> Result<()> {
        let _one = self.loads.exclusive(slice..slice + 1).await;
        if self.slices.look(slice, |_| ()).is_some() {
            return Ok(());
        }
        let Some(offset) = self.slice_offset(slice)? else { return Ok(()) };
        let bytes = Segments::zeroed(1 << self.slice_bits);
        store.read_at(StoreOffset(offset), &bytes, Via::Cached).await.at_offset(offset)?;
        let bytes = bytes.to_vec();
        let step = 1 << (self.entry_bits - 3);
        let prove = |(at, word): (usize, u64)| if self.is_writable && at % step == 0 { unproved(word) } else { word };
        self.slices.insert(slice, decode(&bytes).enumerate().map(prove));
        Ok(())
    }

    /// Where a slice lies in the image; `None` when its L2 table does not exist.
    fn slice_offset(&self, slice: u64) -> Result<Option<u64>> {
        let at = slice << self.coverage_bits;
        let entry = self.l1.get(self.table_of(at));
        let table = self.rules.l2_table(entry).map_err(|fault| entry_error("L1", entry, at, fault))?;
        let Some(table) = table else { return Ok(None) };
        let in_table = 1u64 << (self.rules.cluster_bits - self.slice_bits);
        let offset = table + ((slice & (in_table - 1)) << self.slice_bits);
        match offset + (1 << self.slice_bits) <= self.file_bytes.load(Ordering::Relaxed) {
            true => Ok(Some(offset)),
            false => Err(Error::new(
                ErrorKind::Corrupt,
                format!("the L2 table of guest offset {at:#x} goes past the end of the file"),
            )
            .at_offset(offset)),
        }
    }

    /// The number of the L2 table for guest offset `at`.
    pub(super) fn table_of(&self, at: u64) -> usize {
        (at >> self.table_coverage_bits()) as usize
    }

    /// The L1 entry of a table; COPIED is set when its refcount is known to be 1.
    pub(super) fn l1_entry(&self, table: usize) -> u64 {
        self.l1.get(table)
    }

    pub(super) fn set_l1_entry(&self, table: usize, entry: u64) {
        self.l1.set(table, entry);
    }

    /// Holds all of a table: nobody reads or changes an entry of it in the file.
    pub(super) async fn hold_table(&self, table: usize) -> RangeGuard<'_> {
        let slices = self.rules.cluster_bits - self.slice_bits;
        let first = (table as u64) << slices;
        self.loads.exclusive(first..first + (1 << slices)).await
    }

    /// The L2 entry for guest offset `at`. COPIED is set when the refcount is known to be 1.
    pub(super) async fn entry_of<S: Store>(&self, store: &S, at: u64) -> Result<(u64, u64)> {
        let slice = at >> self.coverage_bits;
        loop {
            if let Some(words) = self.slices.look(slice, |entries| self.words(entries, at)) {
                return Ok(words);
            }
            if self.l1_entry(self.table_of(at)) == 0 {
                return Ok((0, 0));
            }
            Box::pin(self.load_slice(store, slice)).await?;
        }
    }

    /// Where the L2 entry for guest offset `at` lies, in a table that exists.
    fn entry_offset(&self, at: u64) -> Result<u64> {
        let slice = self.slice_offset(at >> self.coverage_bits)?;
        let slice = slice.ok_or_else(|| Error::new(ErrorKind::Corrupt, "an L2 table is gone"))?;
        Ok(slice + 8 * self.word_index(at) as u64)
    }

    /// The L2 entry for guest offset `at` as the file has it. The caller keeps others from changing it.
    pub(super) async fn entry_in_file<S: Store>(&self, store: &S, at: u64) -> Result<(u64, u64)> {
        let slice = at >> self.coverage_bits;
        let _held = self.loads.shared(slice..slice + 1).await;
        let bytes = Segments::zeroed(1 << self.entry_bits);
        let offset = self.entry_offset(at)?;
        store.read_at(StoreOffset(offset), &bytes, Via::Cached).await.at_offset(offset)?;
        let bytes = bytes.to_vec();
        let mut words = decode(&bytes);
        Ok((words.next().unwrap_or(0), words.next().unwrap_or(0)))
    }

    /// Writes the L2 entry for guest offset `at`, whose table exists and is this map's alone, to the file and then to memory; there with
    /// COPIED only if `is_own`, when the refcount is known to be 1. The caller keeps others from changing it.
    pub(super) async fn set_entry<S: Store>(&self, store: &S, at: u64, words: (u64, u64), is_own: bool) -> Result<()> {
        let slice = at >> self.coverage_bits;
        let _held = self.loads.shared(slice..slice + 1).await;
        let offset = self.entry_offset(at)?;
        let bytes = [words.0.to_be_bytes(), words.1.to_be_bytes()].concat();
        let bytes = Segments::copied(&bytes[..1 << self.entry_bits]);
        store.write_at(StoreOffset(offset), &bytes, Via::Cached).await.at_offset(offset)?;
        self.update(at, (if is_own { words.0 } else { unproved(words.0) }, words.1));
        Ok(())
    }

    /// Sets COPIED of the entry in memory: the refcount was seen to be 1.
    pub(super) fn prove(&self, at: u64, words: (u64, u64)) {
        self.update(at, (words.0 | COPIED, words.1));
    }

    fn update(&self, at: u64, words: (u64, u64)) {
        let words = [words.0, words.1];
        self.slices.update(at >> self.coverage_bits, self.word_index(at), &words[..1 << (self.entry_bits - 3)]);
    }

    /// Where the compressed data of an L2 entry lie that [`Map::find`] gave out.
    pub(crate) fn compressed(&self, unit: EncodedUnit) -> Result<Compressed> {
        match self.rules.cluster(unit.0, 0) {
            Ok(Cluster::Compressed(place)) => Ok(place),
            _ => Err(Error::new(ErrorKind::InvalidInput, "this is no compressed cluster")),
        }
    }
}

/// An entry whose refcount nobody has looked at: without COPIED, where that says nothing of where the entry points.
fn unproved(entry: u64) -> u64 {
    if entry & OFFSET_MASK != 0 { entry & !COPIED } else { entry }
}

pub(super) fn entry_error(table: &str, entry: u64, at: u64, fault: EntryFault) -> Error {
    let what = format!("the {table} entry {entry:#018x} of guest offset {at:#x} cannot be followed: {fault}");
    Error::new(ErrorKind::Corrupt, what)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Subcluster {
    Allocated,
    Zero,
    Below,
}

/// What subcluster `first` is, and how many from there on are the same, to the end of the cluster.
fn subclusters(allocated: u32, zero: u32, first: u32) -> (Subcluster, u32) {
    let (chosen, same) = match (allocated >> first & 1, zero >> first & 1) {
        (1, _) => (Subcluster::Allocated, allocated),
        (_, 1) => (Subcluster::Zero, zero),
        _ => (Subcluster::Below, !(allocated | zero)),
    };
    // The bits shifted in from above are 0, so the count ends with the cluster.
    (chosen, (same >> first).trailing_ones())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_of_subclusters_agree_with_a_plain_walk(allocated in any::<u32>(), zero in any::<u32>(), first in 0u32..32) {
            let zero = zero & !allocated;
            let kind = |n: u32| (allocated >> n & 1, zero >> n & 1);
            let (_, same) = subclusters(allocated, zero, first);
            let expected = (first..32).take_while(|n| kind(*n) == kind(first)).count() as u32;
            prop_assert_eq!(same, expected);
        }
    }
}
