//! Another size: longer while the image is in use, longer or shorter while nobody uses it.
//!
//! # Order of writes
//!
//! The size, the length of the L1 table and its place are next to each other in the first sector of the header, and are written at once. So
//! the image opens with its old size or with the new one, whatever ends meanwhile.
//!
//! Longer:
//!
//! 1. Entries behind the old end go, if there are some: an image that became shorter may have been cut off before they went. What the last
//!    cluster has behind the old end becomes zero.
//! 2. If the clusters of the L1 table have room, the entries to come are zeroed there. Else a new table is made from clusters that are
//!    counted durably, with all entries of the old one; nobody changes an entry meanwhile. Then a sync.
//! 3. A data file becomes zero behind the old end, and as long as the disk is to be; sync.
//! 4. The header; sync. Then the size is told, and the clusters of the old table are given up. Of an image with a raw data file the header gets
//!    the new table only; entries come that show what the disk gains; sync; then the header gets the size, too; sync.
//!
//! Shorter, for whoever gives up what lies behind the new end:
//!
//! 1. What the last cluster has behind the new end becomes zero; sync.
//! 2. The header with the new size; sync. The L1 table stays as long as it is.
//! 3. Entries behind the new end go, and with them their clusters and tables.
//! 4. When that is durable, a data file ends with the disk.

use std::ops::Range;

use spile_core::{Error, ErrorKind, Result, ResultExt, SECTOR_BYTES, Segments, Store, StoreOffset, Via, yield_now};

use super::Qcow2;
use super::codec::header::Header;
use super::codec::table::{Cluster, decode};
use super::codec::{COPIED, OFFSET_MASK};
use super::create::write;
use super::entries::{host_of, references};
use super::layout::{l1_clusters, max_size_bytes};
use super::map::entry_error;
use super::open::{read, read_l1};
use super::write::Old;
use super::writing::Writing;
use crate::layer::Layer as _;

/// Where the header has the size, what is encrypted (nothing is), and the length and the place of the L1 table.
pub(super) const SIZE_AT: u64 = 24;
/// So many entries are looked at in one turn.
const LOOKED_AT_ONCE: u64 = 4096;
/// A run of clusters is looked for among so many times as many.
const MOST_TAKEN: u64 = 16;

/// The fields of the header from [`SIZE_AT`] on.
pub(super) fn fields(header: &Header) -> Vec<u8> {
    let (size, l1) = (header.size_bytes.to_be_bytes(), header.l1_entries.to_be_bytes());
    [&size[..], &header.crypt_method.to_be_bytes(), &l1, &header.l1_offset.to_be_bytes()].concat()
}

/// Refuses what the image of `header` cannot become.
fn check_size(header: &Header, size_bytes: u64) -> Result<()> {
    let most = max_size_bytes(header);
    if size_bytes == 0 || !size_bytes.is_multiple_of(SECTOR_BYTES) {
        let what = format!("a size of {size_bytes} bytes is no whole number of sectors, or none at all");
        return Err(Error::new(ErrorKind::InvalidInput, what).hint("choose a multiple of 512"));
    }
    if size_bytes > most {
        let what = format!("a disk of {size_bytes} bytes is too large for the clusters of this image");
        let hint = format!("at most {most} bytes; convert it to one with larger clusters for more");
        return Err(Error::new(ErrorKind::InvalidInput, what).hint(hint));
    }
    if header.version < 3 && header.snapshots > 0 {
        let what = "an image of version 2 with internal snapshots keeps its size: the snapshots do not tell theirs";
        return Err(Error::new(ErrorKind::Unsupported, what)
            .hint("delete the snapshots first: spile internal-snapshot --delete"));
    }
    Ok(())
}

impl<S: Store> Qcow2<S> {
    /// Makes the image longer, while it may be in use.
    pub(super) async fn grow(&self, size_bytes: u64) -> Result<()> {
        let writing = self.writing().await?;
        let _one = writing.resizing.lock().await;
        writing.check(&self.store)?;
        let old = self.now.head().header.clone();
        self.check_new_size(&old, size_bytes)?;
        if size_bytes == old.size_bytes {
            return Ok(());
        }
        self.use_bitmaps_of_other_size(writing, size_bytes).await?;
        self.clear_behind(writing, &old, old.size_bytes).await?;
        self.zero_tail(writing, old.size_bytes).await?;
        self.grow_data_file(old.size_bytes, size_bytes).await?;
        let mut new = Header { size_bytes, ..old.clone() };
        let needed = new.needed_l1_entries();
        new.l1_entries = new.l1_entries.max(needed as u32);
        let room = l1_clusters(&old, u64::from(old.l1_entries)) * old.cluster_bytes() / 8;
        if self.is_raw_data_file() {
            // Its entries come first, and need the table.
            new.size_bytes = old.size_bytes;
        }
        match needed <= room {
            true => self.grow_in_place(&old, &new).await?,
            false => self.grow_with_table(writing, &old, new).await?,
        }
        match self.is_raw_data_file() {
            true => self.grow_shown(writing, size_bytes).await,
            false => Ok(()),
        }
    }

    /// The L1 table of an image with a raw data file has room: what the disk gains is shown, and then is the disk's.
    async fn grow_shown(&self, writing: &Writing, size_bytes: u64) -> Result<()> {
        let head = self.now.head();
        let new = Header { size_bytes, ..head.header.clone() };
        self.map.grow(new.needed_l1_entries() as usize);
        self.show_added(writing, head.header.size_bytes, size_bytes).await?;
        self.write_size(&new).await?;
        self.tell_size(&new);
        Ok(())
    }

    /// Refuses what the image of the header `old` does not become while it is in use.
    pub(super) fn check_new_size(&self, old: &Header, size_bytes: u64) -> Result<()> {
        check_size(old, size_bytes).and_then(|()| self.check_growth(old, size_bytes)).at_path(self.store.path())
    }

    fn check_growth(&self, old: &Header, size_bytes: u64) -> Result<()> {
        let old_bytes = old.size_bytes;
        if size_bytes < old_bytes {
            let what = format!("the disk has {old_bytes} bytes and cannot shrink to {size_bytes} while it is in use");
            return Err(Error::new(ErrorKind::Unsupported, what)
                .hint("`spile resize --shrink` makes it shorter while nobody uses it"));
        }
        let align = u64::from(self.data_store().info().offset_align_bytes);
        if self.via == Via::Direct && !size_bytes.is_multiple_of(align) {
            let what = format!("the last bytes of a size of {size_bytes} could not be reached by direct I/O");
            return Err(Error::new(ErrorKind::InvalidInput, what).hint(format!("choose a multiple of {align}")));
        }
        Ok(())
    }

    /// The L1 table has room.
    async fn grow_in_place(&self, old: &Header, new: &Header) -> Result<()> {
        let added = (new.l1_entries - old.l1_entries) as usize * 8;
        write(&self.store, old.l1_offset + u64::from(old.l1_entries) * 8, &vec![0; added]).await?;
        self.store.sync().await?;
        self.write_size(new).await?;
        self.tell_size(new);
        Ok(())
    }

    async fn write_size(&self, header: &Header) -> Result<()> {
        self.write_header(SIZE_AT, &fields(header)).await?;
        self.store.sync().await
    }

    fn tell_size(&self, header: &Header) {
        self.map.grow(header.needed_l1_entries() as usize);
        self.now.set_size(header);
    }

    /// The L1 table gets another place.
    async fn grow_with_table(&self, writing: &Writing, old: &Header, mut new: Header) -> Result<()> {
        let bits = old.cluster_bits;
        let run = self.take_run(writing, l1_clusters(&new, u64::from(new.l1_entries))).await?;
        new.l1_offset = run.start << bits;
        // From here on nobody changes an entry.
        let _alone = writing.l1.write().await;
        let made = async {
            writing.check(&self.store)?;
            let table = read(&self.store, old.l1_offset, u64::from(old.l1_entries) * 8).await?;
            write(&self.store, new.l1_offset, &table).await?;
            self.store.sync().await
        };
        if let Err(error) = made.await {
            // A write to them may be under way still.
            writing.space().lost.extend(run);
            return Err(error);
        }
        {
            let mut counts = writing.counts.lock().await;
            run.for_each(|cluster| counts.add_metadata(cluster));
        }
        // When this fails, nobody knows which table counts.
        self.write_size(&new).await.inspect_err(|_| writing.refuse_writes())?;
        self.tell_size(&new);
        let first = old.l1_offset >> bits;
        let clusters = l1_clusters(old, u64::from(old.l1_entries));
        if clusters > 0 {
            writing.give_up(first..first + clusters);
        }
        Ok(())
    }

    /// Gives out `count` clusters that lie side by side, each counted once and zero, both durably.
    pub(super) async fn take_run(&self, writing: &Writing, count: u64) -> Result<Range<u64>> {
        let mut taken = Vec::new();
        let mut found = self.look_for_run(writing, count, &mut taken).await;
        if matches!(found, Ok(None)) && self.store.info().grows_zeroed {
            // What is free in the file lies scattered. Behind its end all is free.
            let hint = self.leave_scattered(writing, &mut taken).await;
            found = self.look_for_run(writing, count, &mut taken).await;
            let mut counts = writing.counts.lock().await;
            counts.hint = counts.hint.min(hint);
        }
        let run = found.as_ref().ok().cloned().flatten();
        taken.retain(|cluster| run.as_ref().is_none_or(|run| !run.contains(cluster)));
        writing.space().put_back(taken);
        found?.ok_or_else(|| {
            let what = format!("the image has no {count} free clusters side by side for a table");
            let error = Error::new(ErrorKind::NoSpace, what).at_path(self.store.path());
            error.hint("copy the disk to a larger one, with larger clusters: spile convert --size")
        })
    }

    /// Takes clusters, a bounded number of them, until `count` of those in `taken` lie side by side.
    async fn look_for_run(&self, writing: &Writing, count: u64, taken: &mut Vec<u64>) -> Result<Option<Range<u64>>> {
        for _ in 0..MOST_TAKEN {
            for _ in 0..count {
                taken.push(self.take_cluster(writing).await?);
            }
            taken.sort_unstable();
            let found = super::alloc::runs(taken).find(|run| run.end - run.start >= count);
            if let Some(run) = found {
                return Ok(Some(run.start..run.start + count));
            }
        }
        Ok(None)
    }

    /// Takes all that is ready, and has the next clusters come from behind the end of the file. Returns from where on they were looked for before.
    async fn leave_scattered(&self, writing: &Writing, taken: &mut Vec<u64>) -> u64 {
        let mut counts = writing.counts.lock().await;
        let mut space = writing.space();
        space.given_out += space.ready.len() as u64;
        taken.extend(space.ready.drain(..));
        std::mem::replace(&mut counts.hint, self.store.len_bytes() >> self.head.header.cluster_bits)
    }

    /// Makes the image longer or shorter while nobody uses it, and seals it.
    pub(super) async fn resize_alone(&self, size_bytes: u64) -> Result<()> {
        let writing = self.writing().await?;
        match size_bytes < self.now.size_bytes() {
            true => self.shrink(writing, size_bytes).await?,
            false => self.grow(size_bytes).await?,
        }
        self.seal_writing(writing).await
    }

    async fn shrink(&self, writing: &Writing, size_bytes: u64) -> Result<()> {
        let old = self.now.head().header.clone();
        check_size(&old, size_bytes).at_path(self.store.path())?;
        self.use_bitmaps_of_other_size(writing, size_bytes).await?;
        self.zero_tail(writing, size_bytes).await?;
        self.flush_writing(writing).await?;
        let new = Header { size_bytes, ..old };
        self.write_size(&new).await?;
        self.now.set_size(&new);
        self.clear_behind(writing, &new, size_bytes).await?;
        self.flush_writing(writing).await?;
        self.cut_data_file(size_bytes).await
    }

    /// Gives up all that the tables of the image of `header` name behind `end_bytes`.
    async fn clear_behind(&self, writing: &Writing, header: &Header, end_bytes: u64) -> Result<()> {
        let per_table_bits = header.l2_coverage_bits() - header.cluster_bits;
        let first = end_bytes.div_ceil(header.cluster_bytes());
        let first_table = end_bytes.div_ceil(1 << header.l2_coverage_bits());
        for cluster in first..first_table << per_table_bits {
            if cluster.is_multiple_of(LOOKED_AT_ONCE) {
                yield_now().await;
            }
            self.drop_cluster(writing, cluster).await?;
        }
        let entries = u64::from(header.l1_entries);
        let l1 = read_l1(&self.store, header.l1_offset, entries, entries).await?;
        for (number, entry) in l1.into_iter().enumerate().skip(first_table as usize) {
            if entry & OFFSET_MASK != 0 {
                self.drop_table(writing, number, entry).await?;
            }
        }
        Ok(())
    }

    /// Clears the entry of a cluster behind the end.
    async fn drop_cluster(&self, writing: &Writing, cluster: u64) -> Result<()> {
        let at = self.start_of(cluster);
        if self.map.entry_of(&self.store, at).await? == (0, 0) {
            return Ok(());
        }
        self.bound_given_up(writing).await?;
        let _alone = writing.clusters.exclusive(cluster..cluster + 1).await;
        let old = self.old(writing, at).await?;
        self.own_table(writing, at).await?;
        self.change_entry(writing, at, &old, (0, 0)).await
    }

    /// Clears the L1 entry of a table behind the end. Each cluster that the table names counts it once, also when a snapshot shares the
    /// table.
    async fn drop_table(&self, writing: &Writing, number: usize, entry: u64) -> Result<()> {
        let header = &self.head.header;
        let at = (number as u64) << header.l2_coverage_bits();
        let table = self.rules.l2_table(entry).map_err(|fault| entry_error("L1", entry, at, fault))?;
        let Some(offset) = table else { return Ok(()) };
        let bytes = read(&self.store, offset, header.cluster_bytes()).await.at_offset(offset)?;
        self.set_table(writing, number, entry, 0).await?;
        let words: Vec<u64> = decode(&bytes).collect();
        // What cannot be followed is leaked at most.
        for gone in references(&self.rules, &words) {
            if self.are_counted(writing, &gone).await? {
                self.bound_given_up(writing).await?;
                writing.give_up(gone);
            }
        }
        let own = offset >> header.cluster_bits..(offset >> header.cluster_bits) + 1;
        if writing.counts.lock().await.get(&self.store, own.start).await? > 0 {
            writing.give_up(own);
        }
        Ok(())
    }

    /// True when `clusters` are in use, and not by a table.
    async fn are_counted(&self, writing: &Writing, clusters: &Range<u64>) -> Result<bool> {
        let mut counts = writing.counts.lock().await;
        for cluster in clusters.clone() {
            if counts.is_metadata(cluster) || counts.get(&self.store, cluster).await? == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Makes zero what the cluster around `end_bytes` has behind it.
    async fn zero_tail(&self, writing: &Writing, end_bytes: u64) -> Result<()> {
        let (cluster, within) =
            (end_bytes >> self.head.header.cluster_bits, end_bytes % self.head.header.cluster_bytes());
        if within == 0 {
            return Ok(());
        }
        let _alone = writing.clusters.exclusive(cluster..cluster + 1).await;
        if self.has_data_file() {
            return self.zero_in_data_file(end_bytes, self.head.header.cluster_bytes() - within, true).await;
        }
        let at = self.start_of(cluster);
        let old = self.old(writing, at).await?;
        let mut bytes = match old.cluster {
            Cluster::Compressed(place) => self.clusters.read(&self.store, old.words.0, place).await?.to_vec(),
            Cluster::Data(host) | Cluster::Mixed { host: Some(host), .. } => self.read_cluster(host).await?,
            Cluster::Unallocated | Cluster::Zero(_) | Cluster::Mixed { host: None, .. } => return Ok(()),
        };
        let tail = &mut bytes[within as usize..];
        if tail.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        tail.fill(0);
        match host_of(&old.cluster).filter(|_| old.is_own) {
            Some(host) => {
                self.store.zero_range(StoreOffset(host + within), self.head.header.cluster_bytes() - within).await
            }
            None => self.copy_out(writing, at, &old, &bytes).await,
        }
    }

    /// The bytes of a cluster of the file; those behind its end are zero.
    async fn read_cluster(&self, host: u64) -> Result<Vec<u8>> {
        let len = self.head.header.cluster_bytes();
        let bytes = Segments::zeroed(len as usize);
        let there = self.store.len_bytes().saturating_sub(host).min(len);
        if there > 0 {
            self.store.read_at(StoreOffset(host), &bytes.slice(0..there as usize), self.via).await.at_offset(host)?;
        }
        Ok(bytes.to_vec())
    }

    /// Gives the cluster at guest offset `at`, which is compressed or shared, a place of its own, with `bytes`. The caller holds it alone.
    async fn copy_out(&self, writing: &Writing, at: u64, old: &Old, bytes: &[u8]) -> Result<()> {
        let fresh = self.take_cluster(writing).await?;
        let host = fresh << self.head.header.cluster_bits;
        let bitmap = match old.cluster {
            _ if !self.rules.extended => 0,
            Cluster::Mixed { allocated, zero, .. } => u64::from(zero) << 32 | u64::from(allocated),
            _ => u64::from(u32::MAX),
        };
        let copied = async {
            let memory = Segments::zeroed(bytes.len());
            memory.copy_from_slice(0, bytes);
            self.store.write_at(StoreOffset(host), &memory, self.via).await?;
            self.store.sync().await?;
            self.own_table(writing, at).await?;
            self.change_entry(writing, at, old, (host | COPIED, bitmap)).await
        };
        copied.await.inspect_err(|_| writing.space().lost.push(fresh))
    }
}
