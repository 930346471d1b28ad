//! Refcounts of an image that is open for writing: looked up and changed in pieces of 4 KiB, a bounded number of which is in
//! memory. Each change goes to the file at once (cached). When it must be durable is up to `alloc` and `flush`.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use spile_core::{Error, ErrorKind, Result, ResultExt, Segments, Store, StoreOffset, Via};

use super::codec::header::Header;
use super::codec::table::{decode, encode};
use super::codec::{MAX_REFCOUNT_TABLE_BYTES, OFFSET_MASK, refcount};
use super::open::read;

/// The most of a refcount block that is read at once, as a power of two: 4 KiB.
const MAX_PIECE_BITS: u32 = 12;
/// The most pieces in memory: 1 MiB.
const MOST_PIECES: usize = 256;

/// The refcounts, and which clusters hold metadata.
pub(super) struct Refcounts {
    pub cluster_bits: u32,
    order: u32,
    piece_bits: u32,
    /// Offsets of the blocks; 0 = none.
    table: Vec<u64>,
    /// The clusters of the table.
    table_at: Range<u64>,
    pieces: HashMap<u64, Vec<u8>>,
    /// Clusters that hold the active tables and their blocks. They are never guest data, whatever an entry says.
    metadata: HashSet<u64>,
    /// No free cluster is known before this one.
    pub hint: u64,
    /// No search has come further than this. What lies before it was in use then, but for `free_before` clusters at most.
    passed: u64,
    free_before: u64,
}

/// A refcount table that replaces another one.
pub(super) struct OtherTable {
    table: Vec<u64>,
    at: Range<u64>,
}

impl Refcounts {
    /// Reads the refcount table of the image, whose L1 table has the entries `l1`.
    ///
    /// # Errors
    /// `Corrupt` when tables or blocks cannot lie where they are said to; the store's.
    pub(super) async fn open<S: Store>(store: &S, header: &Header, l1: &[u64]) -> Result<Self> {
        header.check_refcount_table()?;
        let (bits, at) = (header.cluster_bits, header.refcount_table_offset);
        let len = u64::from(header.refcount_table_clusters) << bits;
        if at + len > store.len_bytes() {
            return Err(corrupt("the refcount table goes past the end of the file".into()).at_offset(at));
        }
        let table: Vec<u64> = decode(&read(store, at, len).await?).collect();
        let first = at >> bits;
        let table_at = first..first + u64::from(header.refcount_table_clusters);
        let (piece_bits, pieces) = (MAX_PIECE_BITS.min(bits), HashMap::new());
        let order = header.refcount_order;
        let mut counts = Self {
            cluster_bits: bits,
            order,
            piece_bits,
            table,
            table_at,
            pieces,
            metadata: HashSet::new(),
            hint: 0,
            passed: 0,
            free_before: 0,
        };
        counts.note_tables(store, header, l1)?;
        Ok(counts)
    }

    /// Notes where the metadata lie. No two of them may lie in one place.
    fn note_tables<S: Store>(&mut self, store: &S, header: &Header, l1: &[u64]) -> Result<()> {
        let bits = self.cluster_bits;
        let l1_first = header.l1_offset >> bits;
        let l1_end = (header.l1_offset + u64::from(header.l1_entries) * 8).div_ceil(1 << bits);
        let blocks = self.table.iter().filter(|entry| **entry != 0);
        let l2 = l1.iter().map(|entry| entry & OFFSET_MASK).filter(|offset| *offset != 0);
        let mut clusters: Vec<u64> = vec![0];
        clusters.extend(l1_first..l1_end.max(l1_first));
        clusters.extend(self.table_at.clone());
        for entry in blocks {
            let offset = refcount::block(*entry, bits)?.unwrap_or_default();
            if offset & !OFFSET_MASK != 0 || offset + (1 << bits) > store.len_bytes() {
                return Err(corrupt("a refcount block lies past the end of the file".into()).at_offset(offset));
            }
            clusters.push(offset >> bits);
        }
        clusters.extend(l2.map(|offset| offset >> bits));
        for cluster in clusters {
            if !self.metadata.insert(cluster) {
                let what = "two tables of the image lie in one cluster".to_owned();
                return Err(corrupt(what).at_offset(cluster << bits));
            }
        }
        Ok(())
    }

    pub(super) fn is_metadata(&self, cluster: u64) -> bool {
        self.metadata.contains(&cluster)
    }

    /// Notes that a cluster holds a table from now on.
    pub(super) fn add_metadata(&mut self, cluster: u64) {
        self.metadata.insert(cluster);
    }

    /// A search has come to `end` and has `found` free clusters, which ascend and are taken now. The next one goes on behind the last of them.
    pub(super) fn pass(&mut self, found: &[u64], end: u64) {
        self.hint = found.last().map_or(end, |last| last + 1);
        let known = found.partition_point(|cluster| *cluster < self.passed) as u64;
        self.free_before = self.free_before.saturating_sub(known);
        self.passed = self.passed.max(self.hint);
    }

    /// True once a search has been made.
    pub(super) fn was_searched(&self) -> bool {
        self.passed > 0
    }

    /// How many of the first `clusters` clusters are free, as far as searches have come. What is in use behind that counts as free.
    pub(super) fn free_within(&self, clusters: u64) -> u64 {
        clusters.saturating_sub(self.passed) + self.free_before.min(clusters)
    }

    /// Clusters that one block counts, as a power of two.
    fn block_bits(&self) -> u32 {
        self.cluster_bits + 3 - self.order
    }

    /// Clusters that one piece counts, as a power of two.
    pub(super) fn count_bits(&self) -> u32 {
        self.piece_bits + 3 - self.order
    }

    /// How many clusters the table can count.
    pub(super) fn capacity(&self) -> u64 {
        (self.table.len() as u64) << self.block_bits()
    }

    /// The first cluster behind those that the piece of `cluster` counts.
    pub(super) fn end_of_piece(&self, cluster: u64) -> u64 {
        ((cluster >> self.count_bits()) + 1) << self.count_bits()
    }

    /// Where the piece that counts `cluster` lies; `None` when its block does not exist.
    fn piece_offset(&self, cluster: u64) -> Option<u64> {
        let block = *self.table.get((cluster >> self.block_bits()) as usize)?;
        let within = (cluster >> self.count_bits()) & ((1 << (self.cluster_bits - self.piece_bits)) - 1);
        (block != 0).then_some(block + (within << self.piece_bits))
    }

    /// True when counts of `cluster` and its neighbours have a place.
    pub(super) fn has_block(&self, cluster: u64) -> bool {
        self.piece_offset(cluster).is_some()
    }

    async fn piece<S: Store>(&mut self, store: &S, cluster: u64) -> Result<Option<&mut Vec<u8>>> {
        let Some(offset) = self.piece_offset(cluster) else { return Ok(None) };
        let number = cluster >> self.count_bits();
        if !self.pieces.contains_key(&number) {
            let bytes = read(store, offset, 1 << self.piece_bits).await.at_offset(offset)?;
            if self.pieces.len() >= MOST_PIECES {
                // All of them can be read again; which one goes matters little.
                let other = self.pieces.keys().next().copied().unwrap_or_default();
                self.pieces.remove(&other);
            }
            self.pieces.insert(number, bytes);
        }
        Ok(self.pieces.get_mut(&number))
    }

    /// The refcount of a cluster.
    pub(super) async fn get<S: Store>(&mut self, store: &S, cluster: u64) -> Result<u64> {
        let (order, index) = (self.order, cluster & ((1 << self.count_bits()) - 1));
        Ok(self.piece(store, cluster).await?.map_or(0, |piece| refcount::get(piece, order, index)))
    }

    /// Gives each cluster of `clusters` the count that `to` makes of its old one, and writes that to the file.
    ///
    /// # Errors
    /// `Corrupt` when `to` refuses a count, or where there is no place for it: that piece is not changed. The store's: the counts
    /// may be the old ones or the new ones.
    pub(super) async fn change<S: Store>(
        &mut self,
        store: &S,
        clusters: Range<u64>,
        to: impl Fn(u64) -> Option<u64>,
    ) -> Result<()> {
        let mut at = clusters.start;
        while at < clusters.end {
            let end = self.end_of_piece(at).min(clusters.end);
            self.change_piece(store, at..end, &to).await?;
            at = end;
        }
        Ok(())
    }

    async fn change_piece<S: Store>(
        &mut self,
        store: &S,
        clusters: Range<u64>,
        to: &impl Fn(u64) -> Option<u64>,
    ) -> Result<()> {
        let (order, mask, bits) = (self.order, (1 << self.count_bits()) - 1, self.cluster_bits);
        let wrong = |cluster: u64, what: String| corrupt(what).at_offset(cluster << bits);
        let offset = self.piece_offset(clusters.start);
        let (Some(offset), Some(piece)) = (offset, self.piece(store, clusters.start).await?) else {
            return Err(wrong(clusters.start, "a cluster in use has no refcount".into()));
        };
        let mut changed = piece.clone();
        for cluster in clusters.clone() {
            let count = refcount::get(&changed, order, cluster & mask);
            let done = to(count).is_some_and(|count| refcount::set(&mut changed, order, cluster & mask, count));
            if !done {
                return Err(wrong(cluster, format!("a cluster has the refcount {count}, which cannot be")));
            }
        }
        let first = ((clusters.start & mask) << order) / 8;
        let last = ((((clusters.end - 1) & mask) + 1) << order).div_ceil(8);
        let bytes = Segments::copied(&changed[first as usize..last as usize]);
        let number = clusters.start >> self.count_bits();
        let written = store.write_at(StoreOffset(offset + first), &bytes, Via::Cached).await;
        match &written {
            Ok(()) => self.pieces.insert(number, changed),
            Err(_) => self.pieces.remove(&number),
        };
        written.at_offset(offset + first)
    }

    /// Has the cluster `at`, which is zero, count the clusters around it, itself among them, in memory only. Returns the number of the
    /// table's entry for it.
    pub(super) fn add_block(&mut self, at: u64) -> usize {
        let entry = (at >> self.block_bits()) as usize;
        self.set_block(entry, at);
        entry
    }

    fn set_block(&mut self, entry: usize, at: u64) {
        if let Some(place) = self.table.get_mut(entry) {
            *place = at << self.cluster_bits;
            self.metadata.insert(at);
        }
    }

    /// Forgets blocks that were added in memory only, and all pieces, which may differ from the file.
    pub(super) fn drop_blocks(&mut self, entries: &[usize]) {
        for entry in entries {
            let offset = std::mem::take(&mut self.table[*entry]);
            self.metadata.remove(&(offset >> self.cluster_bits));
        }
        self.pieces.clear();
    }

    /// Writes the table's entries of new blocks, whose content is durable.
    pub(super) async fn publish<S: Store>(&self, store: &S, entries: &[usize]) -> Result<()> {
        for entry in entries {
            let offset = (self.table_at.start << self.cluster_bits) + *entry as u64 * 8;
            let bytes = Segments::copied(&self.table[*entry].to_be_bytes());
            store.write_at(StoreOffset(offset), &bytes, Via::Cached).await.at_offset(offset)?;
        }
        Ok(())
    }

    /// Where a larger table goes, if it is placed at `first` or behind, and behind all that this one counts: the clusters of the table, then those
    /// of blocks that count them.
    ///
    /// # Errors
    /// `Unsupported` when the table has its greatest size.
    pub(super) fn plan_table(&self, first: u64) -> Result<(Range<u64>, Range<u64>)> {
        let first = first.max(self.capacity());
        let (bits, per_block) = (self.cluster_bits, 1u64 << self.block_bits());
        let (mut table, mut blocks) = ((self.table_at.end - self.table_at.start) * 2, 1);
        loop {
            let end = first + table + blocks;
            let needed_blocks = end.div_ceil(per_block) - first / per_block;
            let needed_table = (end.div_ceil(per_block) * 8).div_ceil(1 << bits);
            if needed_table << bits > MAX_REFCOUNT_TABLE_BYTES {
                let what = "the image cannot grow: its refcount table has its greatest size";
                return Err(Error::new(ErrorKind::Unsupported, what).hint("convert it to one with larger clusters"));
            }
            if needed_blocks <= blocks && needed_table <= table {
                let most = MAX_REFCOUNT_TABLE_BYTES >> bits;
                let table = table.min(most.max(needed_table));
                return Ok((first..first + table, first + table..first + table + blocks));
            }
            (blocks, table) = (blocks.max(needed_blocks), table.max(needed_table));
        }
    }

    /// Has a table at `at` and blocks at `blocks` count all clusters, in memory only. Their clusters are zero and lie behind all that
    /// the old table counts. Returns the old table.
    pub(super) fn replace_table(&mut self, at: Range<u64>, blocks: Range<u64>) -> OtherTable {
        let mut table = self.table.clone();
        table.resize((((at.end - at.start) << self.cluster_bits) / 8) as usize, 0);
        let old = OtherTable {
            table: std::mem::replace(&mut self.table, table),
            at: std::mem::replace(&mut self.table_at, at.clone()),
        };
        self.metadata.extend(at.clone());
        let first = (at.start >> self.block_bits()) as usize;
        for (number, block) in blocks.enumerate() {
            self.set_block(first + number, block);
        }
        old
    }

    /// Goes back to the old table: the new one was not written.
    pub(super) fn restore_table(&mut self, old: OtherTable, blocks: Range<u64>) {
        for cluster in self.table_at.clone().chain(blocks) {
            self.metadata.remove(&cluster);
        }
        (self.table, self.table_at) = (old.table, old.at);
        self.pieces.clear();
    }

    /// The old table is in use no more; its clusters are returned.
    pub(super) fn drop_table(&mut self, old: OtherTable) -> Range<u64> {
        for cluster in old.at.clone() {
            self.metadata.remove(&cluster);
        }
        old.at
    }

    /// Writes the whole table where it is to lie.
    pub(super) async fn write_table<S: Store>(&self, store: &S) -> Result<()> {
        let offset = self.table_at.start << self.cluster_bits;
        store
            .write_at(StoreOffset(offset), &Segments::copied(&encode(&self.table)), Via::Cached)
            .await
            .at_offset(offset)
    }

    /// The header's fields that say where the table is.
    pub(super) fn table_fields(&self) -> Vec<u8> {
        let clusters = (self.table_at.end - self.table_at.start) as u32;
        [&(self.table_at.start << self.cluster_bits).to_be_bytes()[..], &clusters.to_be_bytes()].concat()
    }

    /// Counts references of `clusters` down by one. Returns the runs of those that are free now.
    pub(super) async fn release<S: Store>(&mut self, store: &S, clusters: Range<u64>) -> Result<Vec<Range<u64>>> {
        self.change(store, clusters.clone(), |count| count.checked_sub(1)).await?;
        let mut free: Vec<Range<u64>> = Vec::new();
        for cluster in clusters {
            if self.get(store, cluster).await? != 0 {
                continue;
            }
            self.metadata.remove(&cluster);
            self.hint = self.hint.min(cluster);
            self.free_before += u64::from(cluster < self.passed);
            match free.last_mut() {
                Some(run) if run.end == cluster => run.end += 1,
                _ => free.push(cluster..cluster + 1),
            }
        }
        Ok(free)
    }
}

fn corrupt(what: String) -> Error {
    Error::new(ErrorKind::Corrupt, what)
        .hint("check the image: spile check; spile check --repair mends counts and flags")
}
