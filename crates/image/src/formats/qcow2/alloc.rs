//! Allocation: the one place where host clusters are given out and taken back.
//!
//! A cluster is free when its refcount is 0, wherever it lies; the end of the file says nothing. Clusters are made ready in
//! batches: they read as zeroes, their refcounts are 1, and both are durable before the first of them is given out. So no table
//! ever points at a cluster whose count a power cut could set back. The next batch is made ready while half of the last one is left: by one
//! write that has its place and its entry already. Other writes do not wait for its sync, which takes as long as the page cache has data to write.
//! What is ready when a process ends is leaked: `check` finds it, and it does no harm.
//!
//! A cluster that was given up goes back only when its release can no longer be undone (`flush`).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::MutexGuard;

use spile_core::{Error, ErrorKind, Result, Segments, Store, StoreOffset, Via, yield_now};

use super::Qcow2;
use super::refcounts::Refcounts;
use super::writing::Writing;

/// A batch has as many clusters as were given out since the image was opened, within these bounds: so there are few syncs, and a
/// process that is killed leaks no more than it has used, or this little. Of a file it is length only, and takes no space on the host.
const BATCH_MIN_BYTES: u64 = 1 << 20;
const BATCH_MAX_BYTES: u64 = 1 << 30;
/// The most on a device, where each cluster is zeroed, and what a killed process leaks is missed: a 256th of it, but no more than this.
const DEVICE_BATCH_BYTES: u64 = 16 << 20;
/// The most clusters in a batch: each is kept in memory until it is used.
const BATCH_MAX_CLUSTERS: u64 = 16 << 10;
/// So many free clusters inside the file are taken at a time: each may have to be emptied by itself.
const RECYCLED_AT_ONCE: u64 = 256;
/// With so many of them the file does not grow yet.
const ENOUGH_RECYCLED: u64 = 32;
/// So many pieces of refcounts are searched for free clusters before the file grows instead.
const PIECES_AT_ONCE: u64 = 64;

/// Clusters on their way.
#[derive(Default)]
pub(super) struct Space {
    /// May be used: durably counted, and zero.
    pub ready: VecDeque<u64>,
    /// Given up since the last turn of the grace period.
    pub fresh: Vec<Range<u64>>,
    /// Waiting until no reader of that phase is left.
    pub waiting: Option<(usize, Vec<Range<u64>>)>,
    /// Without readers; a sync that began later has ended.
    pub settled: Vec<Range<u64>>,
    /// As these, but flushes leave them in the file, for new data.
    pub kept: Vec<Range<u64>>,
    /// So many turns of the grace period bring what is to be kept so.
    pub turns_to_keep: u8,
    /// Counted, but used by nothing: a write to them failed or was given up, and may still be under way.
    pub lost: Vec<u64>,
    /// How many clusters were given out since the image was opened.
    pub given_out: u64,
    /// With less clusters ready than this, the next batch is made: half of what was ready after the last one, and 0 after a failure, so that the next one
    /// is made when a write needs it.
    low: usize,
}

/// Clusters that are counted and zero.
struct Batch {
    clusters: Vec<u64>,
    /// That is so durably.
    is_durable: bool,
    /// There was no space for more.
    is_scarce: bool,
}

impl Writing {
    fn is_running_low(&self) -> bool {
        let space = self.space();
        space.ready.len() < space.low
    }

    pub(super) fn space(&self) -> MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// True when clusters are on their way to be free.
    pub(super) fn is_releasing(&self) -> bool {
        self.space().is_releasing()
    }

    /// Notes that nothing refers to `clusters` any more, once each.
    pub(super) fn give_up(&self, clusters: Range<u64>) {
        let fresh = &mut self.space().fresh;
        match fresh.last_mut() {
            Some(run) if run.end == clusters.start => run.end = clusters.end,
            _ => fresh.push(clusters),
        }
    }
}

impl Space {
    fn is_releasing(&self) -> bool {
        !(self.fresh.is_empty() && self.settled.is_empty() && self.kept.is_empty()) || self.waiting.is_some()
    }

    /// Takes back clusters that were given out, and not used.
    pub fn put_back(&mut self, clusters: Vec<u64>) {
        self.given_out = self.given_out.saturating_sub(clusters.len() as u64);
        self.ready.extend(clusters);
    }
}

impl<S: Store> Qcow2<S> {
    /// Gives out a cluster: counted once, zero, both durably. The number is of clusters in the file.
    pub(super) async fn take_cluster(&self, writing: &Writing) -> Result<u64> {
        let mut flushes = 0;
        loop {
            let next = {
                let mut space = writing.space();
                let next = space.ready.pop_front();
                space.given_out += u64::from(next.is_some());
                next
            };
            if let Some(cluster) = next {
                return Ok(cluster);
            }
            match self.prepare(writing).await {
                // What was given up is free after two flushes.
                Err(error) if error.kind() == ErrorKind::NoSpace && writing.is_releasing() && flushes < 3 => {
                    flushes += 1;
                    self.flush_writing(writing).await?;
                }
                done => done?,
            }
        }
    }

    /// Makes clusters ready, unless another task has just done that.
    async fn prepare(&self, writing: &Writing) -> Result<()> {
        let _one = writing.preparing.lock().await;
        let mut counts = writing.counts.lock().await;
        if !writing.space().ready.is_empty() {
            return Ok(());
        }
        let counted = self.count_batch(writing, &mut counts).await;
        self.tell_room(&counts, &counted);
        drop(counts);
        self.make_ready(writing, counted?).await
    }

    /// Makes the next batch ready before the last one is used up, unless another task does that. That there is no space is not told here: the caller has
    /// its cluster, and the first write that finds none gets the error.
    ///
    /// # Errors
    /// Only when the image takes no more writes.
    pub(super) async fn prepare_early(&self, writing: &Writing) -> Result<()> {
        if !writing.is_running_low() {
            return Ok(());
        }
        let (Some(_one), Some(mut counts)) = (writing.preparing.try_lock(), writing.counts.try_lock()) else {
            return Ok(());
        };
        if !writing.is_running_low() {
            return Ok(());
        }
        writing.space().low = 0;
        let counted = self.count_batch(writing, &mut counts).await;
        if counted.is_ok() {
            self.tell_room(&counts, &counted);
        }
        drop(counts);
        let prepared = match counted {
            Ok(batch) => self.make_ready(writing, batch).await,
            Err(error) => Err(error),
        };
        if writing.is_broken() { prepared } else { Ok(()) }
    }

    /// Makes clusters that are counted durably so, and ready.
    async fn make_ready(&self, writing: &Writing, batch: Batch) -> Result<()> {
        if !batch.is_durable {
            // When this fails, they are leaked.
            self.store.sync().await?;
        }
        let mut space = writing.space();
        space.ready.extend(batch.clusters);
        space.low = if batch.is_scarce { 0 } else { space.ready.len() / 2 };
        Ok(())
    }

    /// Empties free clusters and counts them.
    async fn count_batch(&self, writing: &Writing, counts: &mut Refcounts) -> Result<Batch> {
        writing.check(&self.store)?;
        let mut found = self.find_free(counts, self.batch(writing)).await?;
        if found.is_empty() && self.recycle(writing, counts).await? {
            found = self.find_free(counts, self.batch(writing)).await?;
        }
        // Whoever runs out asks whether the device is longer by now, and nobody else does.
        if found.is_empty() && self.has_grown().await? {
            found = self.find_free(counts, self.batch(writing)).await?;
        }
        let capacity = counts.capacity();
        if found.first().is_some_and(|first| *first >= capacity) {
            self.grow_table(writing, counts).await?;
            found = self.find_free(counts, self.batch(writing)).await?;
        }
        let capacity = counts.capacity();
        found.retain(|cluster| *cluster < capacity);
        if found.is_empty() {
            return Err(self.no_space());
        }
        let mut is_scarce = false;
        match self.empty(counts.cluster_bits, &found).await {
            // What one cluster needs, and a block that counts it, may be there when what a batch needs is not.
            Err(error) if error.kind() == ErrorKind::NoSpace && found.len() > 2 => {
                is_scarce = true;
                found.truncate(2);
                self.empty(counts.cluster_bits, &found).await?;
            }
            emptied => emptied?,
        }
        let (clusters, is_durable) = self.count(writing, counts, found).await?;
        Ok(Batch { clusters, is_durable, is_scarce })
    }

    fn no_space(&self) -> Error {
        Error::new(ErrorKind::NoSpace, "no cluster of the image is free")
            .at_path(self.store.path())
            .at_offset(self.store.len_bytes())
            .hint("enlarge the volume under the image: the next write takes that up; or discard what the guest does not need")
    }

    /// How many clusters to make ready now.
    fn batch(&self, writing: &Writing) -> u64 {
        let ready = writing.space().ready.len() as u64;
        self.most_ready(writing).saturating_sub(ready).max(1)
    }

    /// The most clusters that are ready at a time.
    fn most_ready(&self, writing: &Writing) -> u64 {
        let bits = self.head.header.cluster_bits;
        let most = match self.store.info().grows_zeroed {
            true => BATCH_MAX_BYTES,
            false => (self.store.len_bytes() / 256).min(DEVICE_BATCH_BYTES),
        };
        let bytes = (writing.space().given_out << bits).max(BATCH_MIN_BYTES).min(most);
        (bytes >> bits).clamp(1, BATCH_MAX_CLUSTERS)
    }

    /// Up to `count` free clusters: inside the file, then, where it grows, behind it.
    async fn find_free(&self, counts: &mut Refcounts, count: u64) -> Result<Vec<u64>> {
        let grows = self.store.info().grows_zeroed;
        let end = self.store.len_bytes() >> counts.cluster_bits;
        let (mut found, mut at, mut pieces) = (Vec::new(), counts.hint, 0);
        let most = count.min(RECYCLED_AT_ONCE);
        while at < end && (found.len() as u64) < most && (!grows || pieces < PIECES_AT_ONCE) {
            let piece_end = counts.end_of_piece(at).min(end);
            self.find_in(counts, at..piece_end, most, &mut found).await?;
            yield_now().await;
            (at, pieces) = (piece_end, pieces + 1);
        }
        // What was passed is in use, or about to be.
        counts.pass(&found, at);
        if found.len() as u64 >= most.min(ENOUGH_RECYCLED) {
            return Ok(found);
        }
        let mut at = end;
        while grows && (found.len() as u64) < count {
            let piece_end = counts.end_of_piece(at);
            self.find_in(counts, at..piece_end, count, &mut found).await?;
            yield_now().await;
            at = piece_end;
        }
        Ok(found)
    }

    async fn find_in(&self, counts: &mut Refcounts, within: Range<u64>, most: u64, found: &mut Vec<u64>) -> Result<()> {
        for cluster in within {
            if found.len() as u64 >= most {
                break;
            }
            if counts.get(&self.store, cluster).await? != 0 {
                continue;
            }
            if counts.is_metadata(cluster) {
                return Err(self.corrupt(cluster << counts.cluster_bits, "a table has the refcount 0").await);
            }
            found.push(cluster);
        }
        Ok(())
    }

    /// Counts the free clusters `found`, which are zero. A cluster whose count has no place becomes the block of counts. Returns the others, and whether all
    /// is durable: it is when there are new blocks.
    async fn count(&self, writing: &Writing, counts: &mut Refcounts, found: Vec<u64>) -> Result<(Vec<u64>, bool)> {
        let (mut blocks, mut clusters) = (Vec::new(), Vec::new());
        for cluster in &found {
            match counts.has_block(*cluster) {
                true => clusters.push(*cluster),
                false => blocks.push(counts.add_block(*cluster)),
            }
        }
        let counted = async {
            for run in runs(&found) {
                counts.change(&self.store, run, |count| (count == 0).then_some(1)).await?;
            }
            if blocks.is_empty() { Ok(()) } else { self.store.sync().await }
        };
        if let Err(error) = counted.await {
            // Nothing in the file names the new blocks. Counts in others may be 1 now: leaks.
            counts.drop_blocks(&blocks);
            return Err(error);
        }
        if !blocks.is_empty() {
            let published = async {
                counts.publish(&self.store, &blocks).await?;
                self.store.sync().await
            };
            // The table in the file may differ from the one in memory.
            published.await.inspect_err(|_| writing.refuse_writes())?;
        }
        Ok((clusters, !blocks.is_empty()))
    }

    /// Makes clusters that are free read as zeroes; the file grows to hold them.
    async fn empty(&self, bits: u32, clusters: &[u64]) -> Result<()> {
        let info = self.store.info();
        let end = self.store.len_bytes();
        for run in runs(clusters) {
            let (start, stop) = (run.start << bits, (run.end << bits).min(end));
            match start < stop {
                true if info.punches => self.store.punch_hole(StoreOffset(start), stop - start).await?,
                true => self.store.zero_range(StoreOffset(start), stop - start).await?,
                false => {}
            }
        }
        let needed = clusters.iter().max().map_or(0, |last| (last + 1) << bits);
        if needed > end {
            self.store.set_len(needed).await?;
            self.map.set_file_bytes(needed);
        }
        Ok(())
    }

    /// Puts a refcount table of twice the size behind all clusters that the old one counts, with blocks that count it. In a file that is behind
    /// its end; on a device the clusters there are free, for nothing counts them.
    ///
    /// The new table and its blocks are durable before the header names them; the old table is free after that is durable. A power cut before
    /// leaves bytes that nothing refers to, behind all that the old table counts: they are as free as before.
    async fn grow_table(&self, writing: &Writing, counts: &mut Refcounts) -> Result<()> {
        let bits = counts.cluster_bits;
        let grows = self.store.info().grows_zeroed;
        let first = if grows { self.store.len_bytes().div_ceil(1 << bits) } else { 0 };
        let (table, blocks) = counts.plan_table(first)?;
        let all = table.start..blocks.end;
        if !grows {
            self.check_place(counts, all.clone()).await?;
        }
        self.empty(bits, &all.clone().collect::<Vec<_>>()).await?;
        let old = counts.replace_table(table, blocks.clone());
        let written = async {
            counts.change(&self.store, all.clone(), |count| (count == 0).then_some(1)).await?;
            counts.write_table(&self.store).await?;
            self.store.sync().await
        };
        if let Err(error) = written.await {
            counts.restore_table(old, blocks);
            return Err(error);
        }
        let named = async {
            self.write_header(48, &counts.table_fields()).await?;
            self.store.sync().await
        };
        named.await.inspect_err(|_| writing.refuse_writes())?;
        // A search may have passed what is counted only now.
        counts.hint = counts.hint.min(all.start);
        let old = counts.drop_table(old);
        counts.release(&self.store, old).await.map(drop)
    }

    /// Refuses clusters of a device that are not there, or that hold a table which the image does not count.
    async fn check_place(&self, counts: &Refcounts, clusters: Range<u64>) -> Result<()> {
        let bits = counts.cluster_bits;
        if clusters.end << bits > self.store.len_bytes() {
            self.has_grown().await?;
        }
        if clusters.end << bits > self.store.len_bytes() {
            return Err(self.no_space());
        }
        match clusters.into_iter().find(|cluster| counts.is_metadata(*cluster)) {
            Some(cluster) => Err(self.corrupt(cluster << bits, "a table has the refcount 0").await),
            None => Ok(()),
        }
    }

    /// Writes a few bytes of the header, within one sector.
    pub(super) async fn write_header(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let _alone = match &self.writing {
            Some(writing) => Some(writing.header.lock().await),
            None => None,
        };
        self.store.write_at(StoreOffset(at), &Segments::copied(bytes), Via::Cached).await
    }

    /// Frees what was given up and is settled, and searches from the start again. False when that frees nothing.
    async fn recycle(&self, writing: &Writing, counts: &mut Refcounts) -> Result<bool> {
        let began = std::mem::take(&mut counts.hint);
        let settled = {
            let mut space = writing.space();
            [std::mem::take(&mut space.settled), std::mem::take(&mut space.kept)].concat()
        };
        for run in &settled {
            counts.release(&self.store, run.clone()).await?;
        }
        Ok(began > 0 || !settled.is_empty())
    }
}

/// The runs of neighbours in `clusters`, which ascend.
pub(super) fn runs(clusters: &[u64]) -> impl Iterator<Item = Range<u64>> {
    clusters.chunk_by(|one, next| one + 1 == *next).map(|run| run[0]..run[run.len() - 1] + 1)
}
