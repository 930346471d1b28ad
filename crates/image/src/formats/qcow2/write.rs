//! Writes, zeroes and discards, one cluster at a time.
//!
//! # Order of writes
//!
//! 1. A cluster is counted and zero, durably, before anything points at it (`alloc`).
//! 2. The entry of a cluster is written, cached, before the answer: an acknowledged write survives the death of the process. Where the guest
//!    saw zeroes before, entry and data are written at the same time, and need no sync: should the end of the process or a power cut keep
//!    the entry and lose the data, the cluster reads as zeroes still. Where the guest saw other bytes, the data and what is copied around
//!    them are durable before the entry is written; writes that wait for that share a sync.
//! 3. An L2 table is durable (zero, or a copy) before the L1 entry that names it.
//! 4. Data are written in place only where the entry says COPIED and the refcount is 1, both looked at.
//! 5. A cluster that nothing refers to any more goes back when that is durable and its last reader is gone (`flush`).
//! 6. What a cluster shows at its own place stays shown as long as the cluster has the place: zeroes go to the place itself. Were it hidden, the next
//!    write would go there before its entry is changed. Whoever began to read when the place was shown would have the new bytes, and whoever
//!    reads after that zeroes.
//!
//! Where the data lie in an external data file, `data_file` says what is different.

use std::ops::Range;

use spile_core::{Error, ErrorKind, Extent, Result, ResultExt, Segments, Store, StoreOffset, Via};

use super::Qcow2;
use super::codec::table::{Cluster, SUBCLUSTERS, decode};
use super::codec::{COPIED, OFFSET_MASK};
use super::entries::{clusters_of, host_of};
use super::map::entry_error;
use super::writing::Writing;
use crate::layer::{Found, Layer as _, Reserved};
use crate::range_lock::RangeGuard;

/// A part of one cluster: `within` is in bytes from the cluster's start.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub cluster: u64,
    pub within: Range<u64>,
}

/// What the entry of a cluster says, and whether the cluster it points at is this entry's alone.
pub(super) struct Old {
    pub words: (u64, u64),
    pub cluster: Cluster,
    /// The refcount is 1, and the entry says so.
    pub is_own: bool,
}

impl Old {
    pub fn host(&self) -> Option<u64> {
        host_of(&self.cluster)
    }
}

/// A part of a cluster with a place, locked for one write.
pub struct ClusterReserved<'a, S: Store> {
    image: &'a Qcow2<S>,
    part: Part,
    host: u64,
    /// `None` for a write in place. In a box, so that the reservations of other formats stay small.
    new: Option<Box<New<'a>>>,
    held: RangeGuard<'a>,
}

/// The change of an entry to come.
struct New<'a> {
    writing: &'a Writing,
    old: Old,
    words: (u64, u64),
    /// How many bytes around the part are to be written, too.
    around: (u64, u64),
    /// The guest saw something else than zeroes in what changes.
    needs_sync: bool,
    is_published: bool,
    /// A cluster of the file that nothing refers to yet.
    fresh: Option<u64>,
}

impl Drop for New<'_> {
    fn drop(&mut self) {
        // A write to it may be under way still.
        if let Some(cluster) = self.fresh {
            self.writing.space().lost.push(cluster);
        }
    }
}

impl<S: Store> Reserved for ClusterReserved<'_, S> {
    fn offset(&self) -> StoreOffset {
        StoreOffset(self.host + self.part.within.start)
    }

    fn around(&self) -> (u64, u64) {
        self.new.as_ref().map_or((0, 0), |new| new.around)
    }

    fn publishes(&self) -> bool {
        self.new.as_ref().is_some_and(|new| !new.needs_sync)
    }

    async fn publish(&mut self) -> Result<()> {
        match &mut self.new {
            Some(new) => Box::pin(self.image.publish_new(&self.part, new)).await,
            None => Ok(()),
        }
    }

    fn abandon(mut self) {
        if let Some(new) = &mut self.new
            && let Some(cluster) = new.fresh.take()
        {
            new.writing.give_up(cluster..cluster + 1);
        }
    }

    async fn commit(self) -> Result<()> {
        let Self { image, part, host: _, new, held } = self;
        match new {
            None => Ok(()),
            Some(new) => Box::pin(image.commit_new(&part, *new, held)).await,
        }
    }
}

impl<S: Store> Qcow2<S> {
    pub(super) fn start_of(&self, cluster: u64) -> u64 {
        cluster << self.head.header.cluster_bits
    }

    /// The first part of `extent`: to the end of its cluster at most.
    pub(super) fn part(&self, extent: Extent) -> Part {
        let bytes = self.head.header.cluster_bytes();
        let within = extent.start() % bytes;
        let end = (within + extent.len_bytes).min(bytes);
        Part { cluster: extent.start() / bytes, within: within..end }
    }

    /// The end of a cluster, or of the disk within it.
    pub(super) fn end_of(&self, cluster: u64) -> u64 {
        self.head.header.cluster_bytes().min(self.now.size_bytes() - self.start_of(cluster))
    }

    pub(super) fn is_whole(&self, part: &Part) -> bool {
        part.within == (0..self.end_of(part.cluster))
    }

    /// Makes place for the bytes of `part`.
    pub(super) async fn reserve_part(&self, part: Part) -> Result<ClusterReserved<'_, S>> {
        let writing = self.writing().await?;
        let (lock, at) = (part.cluster..part.cluster + 1, self.start_of(part.cluster));
        {
            let held = writing.clusters.shared(lock).await;
            // Whoever had the cluster before may have failed to change its entry, or to change it back.
            writing.check(&self.store)?;
            let words = self.map.entry_of(&self.store, at).await?;
            if words.0 & COPIED != 0
                && let Ok(cluster) = self.rules.cluster(words.0, words.1)
                && let Some(host) = self.in_place(&Old { words, cluster, is_own: true }, &part)
            {
                return Ok(ClusterReserved { image: self, part, host, new: None, held });
            }
        }
        // In a box, so that the futures of other writes stay small.
        Box::pin(self.reserve_new(writing, part)).await
    }

    /// Changes the entry of the cluster of `part`, whose bytes are written and which `held` keeps for the caller.
    async fn commit_new(&self, part: &Part, mut new: New<'_>, held: RangeGuard<'_>) -> Result<()> {
        if new.needs_sync {
            self.flush_writing(new.writing).await?;
        }
        if !new.is_published {
            self.publish_new(part, &mut new).await?;
        }
        drop(held);
        self.prepare_early(new.writing).await
    }

    /// Changes the entry of the cluster of `part`.
    async fn publish_new(&self, part: &Part, new: &mut New<'_>) -> Result<()> {
        self.change_entry(new.writing, self.start_of(part.cluster), &new.old, new.words).await?;
        (new.fresh, new.is_published) = (None, true);
        Ok(())
    }

    /// As [`Qcow2::reserve_part`], where the entry is to change.
    async fn reserve_new<'a>(&'a self, writing: &'a Writing, part: Part) -> Result<ClusterReserved<'a, S>> {
        let at = self.start_of(part.cluster);
        let held = writing.clusters.exclusive(part.cluster..part.cluster + 1).await;
        writing.check(&self.store)?;
        let old = self.old(writing, at).await?;
        if let Some(host) = self.in_place(&old, &part) {
            return Ok(ClusterReserved { image: self, part, host, new: None, held });
        }
        self.own_table(writing, at).await?;
        if self.is_raw_data_file() {
            self.show_raw(writing, part.cluster, &old).await?;
            return Ok(ClusterReserved { image: self, part, host: at, new: None, held });
        }
        let (host, new) = self.place(writing, &part, old).await?;
        Ok(ClusterReserved { image: self, part, host, new: Some(Box::new(new)), held })
    }

    /// Where the cluster lies, if `part` of it can be written as it is.
    fn in_place(&self, old: &Old, part: &Part) -> Option<u64> {
        // Whatever an entry says, nothing is written elsewhere in a data file.
        if self.has_data_file() && old.host() != Some(self.start_of(part.cluster)) {
            return None;
        }
        match old.cluster {
            Cluster::Data(host) if old.is_own => Some(host),
            Cluster::Mixed { host: Some(host), allocated, .. } if old.is_own => {
                let bits = self.touched(part);
                (allocated & bits == bits).then_some(host)
            }
            _ => None,
        }
    }

    /// The size of a subcluster as a power of two.
    fn subcluster_bits(&self) -> u32 {
        self.head.header.cluster_bits - SUBCLUSTERS.ilog2()
    }

    /// The subclusters that `part` touches.
    pub(super) fn touched(&self, part: &Part) -> u32 {
        let bits = self.subcluster_bits();
        let (first, last) = (part.within.start >> bits, (part.within.end - 1) >> bits);
        (u32::MAX << first) & (u32::MAX >> (31 - last))
    }

    /// What the entry at `at` says, with what it points at looked at. The caller holds the cluster alone.
    pub(super) async fn old(&self, writing: &Writing, at: u64) -> Result<Old> {
        let in_memory = self.map.entry_of(&self.store, at).await?;
        let is_proved = in_memory.0 & COPIED != 0;
        let words = match is_proved || in_memory.0 == 0 {
            true => in_memory,
            false => self.map.entry_in_file(&self.store, at).await?,
        };
        let cluster = self
            .rules
            .cluster(words.0, words.1)
            .map_err(|fault| entry_error("L2", words.0, at, fault))
            .at_path(self.path())?;
        if self.has_data_file() {
            return self.old_in_data_file(at, words, cluster).await;
        }
        let mut old = Old { words, cluster, is_own: is_proved };
        let (bits, says_own) = (self.head.header.cluster_bits, words.0 & COPIED != 0);
        if let Cluster::Compressed(place) = cluster {
            for cluster in clusters_of(place, bits) {
                self.check_use(writing, cluster).await?;
            }
        } else if let Some(host) = old.host().filter(|_| !is_proved) {
            let count = self.check_use(writing, host >> bits).await?;
            old.is_own = says_own && count == 1;
            if old.is_own {
                self.map.prove(at, words);
            }
        }
        Ok(old)
    }

    fn path(&self) -> &std::path::Path {
        self.store.path()
    }

    /// Checks that guest data may lie in `cluster` of the file. Returns its refcount.
    async fn check_use(&self, writing: &Writing, cluster: u64) -> Result<u64> {
        let (is_metadata, count) = {
            let mut counts = writing.counts.lock().await;
            (counts.is_metadata(cluster), counts.get(&self.store, cluster).await?)
        };
        let offset = self.start_of(cluster);
        match count {
            _ if is_metadata => Err(self.corrupt(offset, "guest data are said to lie in a table of the image").await),
            0 => Err(self.corrupt(offset, "guest data are said to lie in a cluster with the refcount 0").await),
            _ if offset >= self.store.len_bytes() => {
                let what = "guest data are said to lie past the end of the file";
                Err(Error::new(ErrorKind::Corrupt, what).at_path(self.path()).at_offset(offset))
            }
            count => Ok(count),
        }
    }

    /// The place of a write that changes the entry of its cluster.
    async fn place<'a>(&self, writing: &'a Writing, part: &Part, old: Old) -> Result<(u64, New<'a>)> {
        let bits = self.head.header.cluster_bits;
        if self.has_data_file() {
            let first = self.first_write(part, &old).await?;
            let host = self.start_of(part.cluster);
            let words = (host | COPIED, if self.rules.extended { first.bitmap } else { 0 });
            return Ok((
                host,
                New { writing, old, words, around: first.around, needs_sync: true, is_published: false, fresh: None },
            ));
        }
        if let (Some(host), true) = (old.host(), old.is_own) {
            return self.place_in_own(writing, part, old, host).await;
        }
        let fresh = self.take_cluster(writing).await?;
        let host = fresh << bits;
        let end = self.end_of(part.cluster);
        let all = u64::from(u32::MAX);
        let new = match old.cluster {
            // The rest of the cluster is zero already.
            Cluster::Zero(_) => (all, (0, 0), false),
            Cluster::Unallocated if !self.has_parent() => (all, (0, 0), false),
            Cluster::Unallocated if self.rules.extended => {
                let touched = self.touched(part);
                (u64::from(touched), self.edges(part, touched, end), true)
            }
            Cluster::Mixed { host: None, zero, .. } => {
                let touched = self.touched(part);
                let left = u64::from(zero & !touched) << 32;
                (left | u64::from(touched), self.edges(part, touched, end), true)
            }
            _ => (all, (part.within.start, end - part.within.end), true),
        };
        let (bitmap, around, needs_sync) = new;
        let words = (host | COPIED, if self.rules.extended { bitmap } else { 0 });
        Ok((host, New { writing, old, words, around, needs_sync, is_published: false, fresh: Some(fresh) }))
    }

    /// The place of a write into a cluster that the entry has for itself, but whose bytes do not count yet, or not all of them.
    async fn place_in_own<'a>(&self, writing: &'a Writing, part: &Part, old: Old, host: u64) -> Result<(u64, New<'a>)> {
        let end = self.end_of(part.cluster);
        let (bitmap, around) = match old.cluster {
            Cluster::Mixed { allocated, zero, .. } => {
                let touched = self.touched(part);
                let left = u64::from(zero & !touched) << 32;
                (left | u64::from(allocated | touched), self.edges(part, touched & !allocated, end))
            }
            // What lies there was not shown.
            _ => {
                self.store.zero_range(StoreOffset(host), self.head.header.cluster_bytes()).await?;
                (u64::from(u32::MAX), (0, 0))
            }
        };
        let words = (host | COPIED, if self.rules.extended { bitmap } else { 0 });
        Ok((host, New { writing, old, words, around, needs_sync: true, is_published: false, fresh: None }))
    }

    /// How many bytes before and after `part` belong to subclusters that it touches and that are `new`.
    pub(super) fn edges(&self, part: &Part, new: u32, end: u64) -> (u64, u64) {
        let bits = self.subcluster_bits();
        let (first, last) = (part.within.start >> bits, (part.within.end - 1) >> bits);
        let before = if new >> first & 1 == 1 { part.within.start - (first << bits) } else { 0 };
        let stop = ((last + 1) << bits).min(end);
        (before, if new >> last & 1 == 1 { stop - part.within.end } else { 0 })
    }

    pub(super) fn has_parent(&self) -> bool {
        self.now.has_parent()
    }

    /// Sees that the L2 table for `at` exists and is this map's alone.
    pub(super) async fn own_table(&self, writing: &Writing, at: u64) -> Result<()> {
        let table = self.map.table_of(at);
        let entry = self.map.l1_entry(table);
        if entry & COPIED != 0 {
            return Ok(());
        }
        let (bits, offset) = (self.head.header.cluster_bits, entry & OFFSET_MASK);
        self.rules.l2_table(entry).map_err(|fault| entry_error("L1", entry, at, fault)).at_path(self.path())?;
        // Before the table is held: reads wait for that.
        let count = match offset {
            0 => None,
            _ => Some(writing.counts.lock().await.get(&self.store, offset >> bits).await?),
        };
        let _alone = self.map.hold_table(table).await;
        if self.map.l1_entry(table) & COPIED != 0 {
            return Ok(());
        }
        match count {
            Some(0) => return Err(self.corrupt(offset, "an L2 table has the refcount 0").await),
            // The entry names the same table either way: when this fails, it keeps the bit that is right.
            Some(1) => return self.set_table(writing, table, offset | COPIED, offset | COPIED).await,
            _ => {}
        }
        let fresh = self.take_cluster(writing).await?;
        let done = async {
            if offset != 0 {
                let bytes = Segments::zeroed(1 << bits);
                self.store.read_at(StoreOffset(offset), &bytes, Via::Cached).await?;
                self.store.write_at(StoreOffset(fresh << bits), &bytes, Via::Cached).await?;
                self.store.sync().await?;
            }
            writing.counts.lock().await.add_metadata(fresh);
            self.set_table(writing, table, entry, fresh << bits | COPIED).await
        };
        match done.await {
            Ok(()) if offset != 0 => writing.give_up(offset >> bits..(offset >> bits) + 1),
            Ok(()) => {}
            Err(error) => {
                writing.space().lost.push(fresh);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Writes an L1 entry to the file and to memory. The caller holds the table.
    pub(super) async fn set_table(&self, writing: &Writing, table: usize, old: u64, entry: u64) -> Result<()> {
        let _stays = writing.l1.read().await;
        let at = self.now.head().header.l1_offset + table as u64 * 8;
        let write = async |entry: u64| {
            self.store.write_at(StoreOffset(at), &Segments::copied(&entry.to_be_bytes()), Via::Cached).await
        };
        if let Err(error) = write(entry).await {
            // It may have taken effect all the same.
            if write(old).await.is_err() && !self.l1_still_names(at, old).await {
                writing.refuse_writes();
            }
            return Err(error.at_offset(at));
        }
        self.map.set_l1_entry(table, entry);
        Ok(())
    }

    /// True when the file holds this L1 entry at `at`, as far as it names a table. A full file system takes no write into a hole, and what lies there is
    /// read all the same.
    async fn l1_still_names(&self, at: u64, entry: u64) -> bool {
        let bytes = Segments::zeroed(8);
        let read = self.store.read_at(StoreOffset(at), &bytes, Via::Cached).await;
        read.is_ok() && decode(&bytes.to_vec()).next().is_some_and(|word| (word ^ entry) & !COPIED == 0)
    }

    /// The same of the L2 entry for guest offset `at`.
    async fn still_names(&self, at: u64, words: (u64, u64)) -> bool {
        let is_it = |now: (u64, u64)| (now.0 ^ words.0) & !COPIED == 0 && now.1 == words.1;
        self.map.entry_in_file(&self.store, at).await.is_ok_and(is_it)
    }

    /// Changes an entry, and gives up what the old one pointed at and the new one does not. The caller holds the cluster alone and
    /// has its table.
    pub(super) async fn change_entry(&self, writing: &Writing, at: u64, old: &Old, words: (u64, u64)) -> Result<()> {
        writing.check(&self.store)?;
        if let Err(error) = self.map.set_entry(&self.store, at, words, words.0 & COPIED != 0).await {
            // It may have taken effect all the same, and what is written to the old place later would be lost.
            if self.map.set_entry(&self.store, at, old.words, old.is_own).await.is_err()
                && !self.still_names(at, old.words).await
            {
                writing.refuse_writes();
            }
            return Err(error);
        }
        let bits = self.head.header.cluster_bits;
        let gone = match (old.cluster, old.host()) {
            (Cluster::Compressed(place), _) => clusters_of(place, bits),
            (_, Some(host)) if words.0 & OFFSET_MASK != host && !self.has_data_file() => {
                host >> bits..(host >> bits) + 1
            }
            _ => return Ok(()),
        };
        writing.give_up(gone);
        Ok(())
    }

    /// Makes `part` read as zeroes. False when that needs a write of zeroes, and nothing was changed.
    pub(super) async fn zero_part(&self, part: &Part, may_unmap: bool, below_is_zero: bool) -> Result<bool> {
        let writing = self.writing().await?;
        self.bound_given_up(writing).await?;
        let _alone = writing.clusters.exclusive(part.cluster..part.cluster + 1).await;
        let at = self.start_of(part.cluster);
        let old = self.old(writing, at).await?;
        if self.has_data_file() && self.zero_shown(part, &old, may_unmap).await? {
            return Ok(true);
        }
        let words = match old.cluster {
            Cluster::Zero(_) => return Ok(true),
            Cluster::Unallocated if below_is_zero || !self.has_parent() => return Ok(true),
            Cluster::Data(host) if old.is_own && !(may_unmap && self.is_whole(part)) => {
                self.zero_data(part, host, may_unmap).await?;
                return Ok(true);
            }
            _ if self.is_whole(part) && !self.stays_shown(part, &old, may_unmap) => {
                match self.zero_words(below_is_zero) {
                    Some(words) => words,
                    None => return Ok(false),
                }
            }
            Cluster::Unallocated | Cluster::Mixed { .. } | Cluster::Data(_) if self.rules.extended => {
                match self.zero_subclusters(part, &old) {
                    Some(words) => words,
                    None => return Ok(false),
                }
            }
            _ => return Ok(false),
        };
        if words != old.words {
            self.own_table(writing, at).await?;
            self.change_entry(writing, at, &old, words).await?;
        }
        if self.stays_shown(part, &old, may_unmap) {
            self.zero_in_place(part, &old, may_unmap).await?;
        }
        if may_unmap {
            self.give_back_hidden(part).await?;
        }
        Ok(true)
    }

    /// True when a cluster whose subclusters differ keeps its place when `part` is made zero, and what it shows there stays shown. A data file
    /// has no other place for it.
    fn stays_shown(&self, part: &Part, old: &Old, may_unmap: bool) -> bool {
        let is_placed = matches!(old.cluster, Cluster::Mixed { host: Some(_), .. });
        is_placed && old.is_own && (self.has_data_file() || !(may_unmap && self.is_whole(part)))
    }

    /// The entry of a whole cluster that is zero and has no place; `None` where the format has none.
    fn zero_words(&self, below_is_zero: bool) -> Option<(u64, u64)> {
        match below_is_zero {
            true => Some((0, 0)),
            false => (self.rules.version >= 3).then(|| self.rules.encode(Cluster::Zero(None))),
        }
    }

    /// The entry with the subclusters of `part` zero, where these are whole: but for those that it shows at its own place.
    fn zero_subclusters(&self, part: &Part, old: &Old) -> Option<(u64, u64)> {
        let touched = self.whole_subclusters(part)?;
        let (allocated, zero) = match old.cluster {
            Cluster::Data(_) => (u32::MAX, 0),
            Cluster::Mixed { allocated, zero, .. } => (allocated, zero),
            _ => (0, 0),
        };
        let (entry, allocated) = match old.is_own {
            true => (old.words.0, allocated),
            false => (old.words.0 & !COPIED, allocated & !touched),
        };
        Some((entry, u64::from(zero | touched & !allocated) << 32 | u64::from(allocated)))
    }

    /// Makes zero what the cluster shows of `part` at its own place, where its subclusters differ.
    async fn zero_in_place(&self, part: &Part, old: &Old, may_unmap: bool) -> Result<()> {
        let Cluster::Mixed { host: Some(host), allocated, .. } = old.cluster else { return Ok(()) };
        let bits = self.subcluster_bits();
        let mut left = allocated & self.touched(part);
        while left != 0 {
            let first = left.trailing_zeros();
            let end = first + (left >> first).trailing_ones();
            let within = part.within.start.max(u64::from(first) << bits)..part.within.end.min(u64::from(end) << bits);
            self.zero_data(&Part { cluster: part.cluster, within }, host, may_unmap).await?;
            left &= u32::MAX.checked_shl(end).unwrap_or(0);
        }
        Ok(())
    }

    /// The subclusters of `part`, where these are whole; none in an image without subclusters.
    pub(super) fn whole_subclusters(&self, part: &Part) -> Option<u32> {
        let size = 1u64 << self.subcluster_bits();
        let is_end = part.within.end == self.end_of(part.cluster);
        let is_whole = part.within.start.is_multiple_of(size) && (is_end || part.within.end.is_multiple_of(size));
        (self.rules.extended && is_whole).then(|| self.touched(part))
    }

    async fn zero_data(&self, part: &Part, host: u64, may_unmap: bool) -> Result<()> {
        let (offset, len) = (StoreOffset(host + part.within.start), part.within.end - part.within.start);
        let store = self.data_store();
        match may_unmap && store.info().punches {
            true => store.punch_hole(offset, len).await,
            false => store.zero_range(offset, len).await,
        }
    }

    /// Frees what can be freed of `part`.
    pub(super) async fn unmap_part(&self, part: &Part, below_is_zero: bool) -> Result<()> {
        let writing = self.writing().await?;
        self.bound_given_up(writing).await?;
        let _alone = writing.clusters.exclusive(part.cluster..part.cluster + 1).await;
        let at = self.start_of(part.cluster);
        let old = self.old(writing, at).await?;
        if self.has_data_file() && (self.is_raw_data_file() || matches!(old.cluster, Cluster::Data(_))) {
            // Where zeroes would have to be written, the bytes may stay.
            let frees = self.data_store().info().punches;
            return if frees { self.zero_shown(part, &old, true).await.map(drop) } else { Ok(()) };
        }
        let words = match old.cluster {
            Cluster::Unallocated => return Ok(()),
            _ if self.stays_shown(part, &old, true) => {
                let frees = self.data_store().info().punches;
                return if frees { self.zero_in_place(part, &old, true).await } else { Ok(()) };
            }
            _ if self.is_whole(part) => match self.zero_words(below_is_zero) {
                Some(words) => words,
                None => return Ok(()),
            },
            Cluster::Data(host) if old.is_own && self.store.info().punches => {
                return self.zero_data(part, host, true).await;
            }
            _ => return Ok(()),
        };
        if words == old.words {
            return Ok(());
        }
        self.own_table(writing, at).await?;
        self.change_entry(writing, at, &old, words).await?;
        self.give_back_hidden(part).await
    }

    /// The first part of `extent` that may have space in the file.
    pub(super) fn next_held_part(&self, extent: Extent) -> Option<Extent> {
        let mut at = extent.start();
        while at < extent.end() {
            match self.map.find(at, extent.end() - at) {
                // A raw data file may hold something there all the same.
                (Found::Below | Found::Zero, len) if !self.is_raw_data_file() => at += len,
                _ => {
                    let rest = Extent::from_range(at..extent.end());
                    let part = self.part(rest);
                    return Some(Extent::from_range(at..at + (part.within.end - part.within.start)));
                }
            }
        }
        None
    }
}
