//! Filling a new image from the disk's first cluster to its last: clusters are written one behind the other, each L2 table
//! behind the clusters that it names, each refcount block once all its clusters are in use, and at the end L1 and the
//! refcount table. Nothing is written twice and nothing is read.
//!
//! The header is written last, behind a sync of all else. Until then the file is no image.
//!
//! Memory: one L2 table, the counts of one refcount block, the first levels of both, and what is being written: up to
//! [`IN_FLIGHT`] writes of [`WRITE_BYTES`] or a cluster each.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use spile_core::{Error, ErrorKind, Result, Segments, Store, StoreOffset, Via};

use super::codec::COPIED;
use super::codec::header::Header;
use super::codec::refcount;
use super::codec::table::{Cluster, Compressed, Rules, SUBCLUSTERS};
use super::create::{Plan, write};
use super::layout::{Refcounts, l1_clusters};
use super::open::rules;
use crate::create::{Compression, NewImage};

/// Bytes that are gathered before they are written.
const WRITE_BYTES: usize = 1 << 20;
/// Writes at a time.
const IN_FLIGHT: usize = 8;
/// Parts that are zero are written all the same where they are shorter than this, in bytes: one more write costs more.
const GAP_BYTES: u64 = 16 << 10;
/// Pieces that are shorter than this are copied together, in bytes: a write takes a limited number of pieces.
const SMALL_BYTES: usize = 16 << 10;
/// Offsets of guest data end here.
const MAX_OFFSET: u64 = 1 << 56;

/// What a cluster of the disk holds. One that is left out reads as zeroes.
#[derive(Debug)]
pub enum Content {
    /// These bytes, a cluster of them.
    Plain(Segments),
    /// What these bytes decompress to.
    Compressed(Vec<u8>),
}

/// A new image that is being filled.
pub struct Filler<S: Store> {
    plan: Plan,
    rules: Rules,
    out: Output<S>,
    space: Space,
    l1: Vec<u64>,
    /// The L2 table that is being filled, and its number.
    l2: Vec<u8>,
    l2_number: usize,
    /// The table has an entry.
    l2_is_used: bool,
}

impl<S: Store> Filler<S> {
    /// An image in `store`, which is an empty file or a device. What a device held is no image any more when this returns.
    ///
    /// # Errors
    /// `InvalidInput` for what the format cannot express; the store's.
    pub async fn begin(store: S, new: &NewImage) -> Result<Self> {
        let plan = Plan::new(new)?;
        let header = &plan.header;
        if !store.info().grows_zeroed {
            write(&store, 0, &vec![0; header.cluster_bytes() as usize]).await?;
            store.sync().await?;
        }
        Ok(Self {
            rules: rules(header),
            out: Output::new(store),
            space: Space::new(header),
            l1: vec![0; header.needed_l1_entries() as usize],
            l2: vec![0; header.cluster_bytes() as usize],
            l2_number: 0,
            l2_is_used: false,
            plan,
        })
    }

    /// The size of a cluster in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        self.plan.header.cluster_bytes()
    }

    /// How clusters have to be compressed.
    pub fn compression(&self) -> Compression {
        self.plan.header.compression()
    }

    /// Writes the cluster of the disk number `number`, which lies behind all that were written before. Returns how many bytes
    /// of data that takes.
    ///
    /// # Errors
    /// The store's, also of earlier clusters; `OutOfRange` for a file beyond what an entry can say.
    pub async fn put(&mut self, number: u64, content: Content) -> Result<u64> {
        let per_table = 1u64 << (self.plan.header.cluster_bits - self.plan.header.l2_entry_bits());
        let table = (number / per_table) as usize;
        if table != self.l2_number {
            self.end_table().await?;
            self.l2_number = table;
        }
        let (entry, written) = match content {
            Content::Plain(bytes) => self.put_plain(bytes).await?,
            Content::Compressed(bytes) => self.put_compressed(&bytes).await?,
        };
        let at = ((number % per_table) << self.plan.header.l2_entry_bits()) as usize;
        self.l2[at..at + 8].copy_from_slice(&entry.0.to_be_bytes());
        if self.rules.extended {
            self.l2[at + 8..at + 16].copy_from_slice(&entry.1.to_be_bytes());
        }
        self.l2_is_used = true;
        self.settle().await?;
        Ok(written)
    }

    async fn put_plain(&mut self, bytes: Segments) -> Result<((u64, u64), u64)> {
        let host = self.space.take(1) * self.cluster_bytes();
        check_offset(host)?;
        let parts = if self.rules.extended { SUBCLUSTERS } else { 1 };
        let part_bytes = self.cluster_bytes() / u64::from(parts);
        let part = |n: u32| (u64::from(n) * part_bytes) as usize..(u64::from(n + 1) * part_bytes) as usize;
        let allocated = (0..parts).filter(|n| parts == 1 || !bytes.slice(part(*n)).is_zero());
        let allocated = allocated.fold(0u32, |bits, n| bits | 1 << n);
        for run in runs(allocated, parts, (GAP_BYTES / part_bytes) as u32) {
            let range = part(run.start).start..part(run.end - 1).end;
            self.out.add(host + range.start as u64, bytes.slice(range)).await?;
        }
        let written = u64::from(allocated.count_ones()) * part_bytes;
        let cluster = match self.rules.extended {
            false => Cluster::Data(host),
            true => Cluster::Mixed { host: Some(host), allocated, zero: 0 },
        };
        let (entry, bitmap) = self.rules.encode(cluster);
        Ok(((entry | COPIED, bitmap), written))
    }

    async fn put_compressed(&mut self, bytes: &[u8]) -> Result<((u64, u64), u64)> {
        let place = Compressed { offset: self.space.pack(bytes.len() as u64), len_bytes: bytes.len() as u64 };
        let (entry, bitmap) = self.rules.encode(Cluster::Compressed(place));
        // With large clusters, an entry has fewer bits for the offset of compressed data.
        match self.rules.cluster(entry, bitmap) {
            Ok(Cluster::Compressed(said)) if said.offset == place.offset => {}
            _ => check_offset(MAX_OFFSET)?,
        }
        self.out.add(place.offset, Segments::copied(bytes)).await?;
        Ok(((entry, bitmap), place.len_bytes))
    }

    /// Writes the L2 table, if it has an entry.
    async fn end_table(&mut self) -> Result<()> {
        if !self.l2_is_used {
            return Ok(());
        }
        let at = self.space.take(1) * self.cluster_bytes();
        self.out.add(at, Segments::copied(&self.l2)).await?;
        self.l1[self.l2_number] = at | COPIED;
        self.l2.fill(0);
        self.l2_is_used = false;
        self.settle().await
    }

    /// Writes refcount blocks of which all clusters are in use.
    async fn settle(&mut self) -> Result<()> {
        while let Some(block) = self.space.full_block() {
            let at = self.space.place_block() * self.cluster_bytes();
            self.out.add(at, Segments::copied(&block)).await?;
        }
        Ok(())
    }

    /// Completes the image and makes it durable.
    ///
    /// # Errors
    /// The store's; `OutOfRange` when a refcount table cannot count so many clusters.
    pub async fn finish(mut self) -> Result<()> {
        self.end_table().await?;
        let cluster = self.cluster_bytes();
        let l1_at = self.space.take(l1_clusters(&self.plan.header, self.l1.len() as u64)) * cluster;
        let mut l1: Vec<u8> = self.l1.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        l1.resize(l1.len().next_multiple_of(cluster as usize), 0);
        self.out.add(l1_at, Segments::copied(&l1)).await?;
        self.settle().await?;
        let last = self.space.finish()?;
        for (at, block) in last.blocks {
            self.out.add(at * cluster, Segments::copied(&block)).await?;
        }
        let mut table: Vec<u8> = self.space.table.iter().flat_map(|at| (at * cluster).to_be_bytes()).collect();
        table.resize((last.table_clusters * cluster) as usize, 0);
        self.out.add(last.table * cluster, Segments::copied(&table)).await?;
        let header = &mut self.plan.header;
        (header.l1_offset, header.l1_entries) = (l1_at, self.l1.len() as u32);
        header.refcount_table_offset = last.table * cluster;
        // Within 8 MiB, as was checked.
        header.refcount_table_clusters = last.table_clusters as u32;
        let store = self.out.finish().await?;
        if store.info().grows_zeroed {
            store.set_len(self.space.next * cluster).await?;
        }
        store.sync().await?;
        write(&*store, 0, &self.plan.head_bytes()).await?;
        store.sync().await
    }
}

fn check_offset(host: u64) -> Result<()> {
    match host < MAX_OFFSET {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::OutOfRange, "the file is longer than entries of its tables can say")
            .at_offset(host)
            .hint("choose a larger --cluster-size for plain data, a smaller one for compressed data")),
    }
}

/// The runs of set bits below `parts`, joined where fewer than `gap` clear bits lie between them.
fn runs(bits: u32, parts: u32, gap: u32) -> Vec<std::ops::Range<u32>> {
    let mut runs: Vec<std::ops::Range<u32>> = Vec::new();
    for n in (0..parts).filter(|n| bits >> n & 1 == 1) {
        match runs.last_mut() {
            Some(last) if n - last.end < gap.max(1) => last.end = n + 1,
            _ => runs.push(n..n + 1),
        }
    }
    runs
}

/// Which clusters of the file are in use, and by how many.
struct Space {
    cluster_bits: u32,
    order: u32,
    /// The next cluster that nothing uses.
    next: u64,
    /// Where the next compressed cluster may begin, in bytes: behind the last one.
    pack: Option<u64>,
    /// The counts of the clusters from `counted` on.
    counts: Vec<u32>,
    /// The first cluster whose count is in no block yet.
    counted: u64,
    /// The clusters of refcount blocks.
    table: Vec<u64>,
}

/// What is left to be written of the refcounts.
struct Last {
    blocks: Vec<(u64, Vec<u8>)>,
    table: u64,
    table_clusters: u64,
}

impl Space {
    /// The first cluster is the header's.
    fn new(header: &Header) -> Self {
        let (cluster_bits, order) = (header.cluster_bits, header.refcount_order);
        Self { cluster_bits, order, next: 1, pack: None, counts: vec![1], counted: 0, table: Vec::new() }
    }

    fn per_block(&self) -> usize {
        refcount::counts_per_block(self.cluster_bits, self.order) as usize
    }

    /// Takes `clusters` clusters in a row and returns the first.
    fn take(&mut self, clusters: u64) -> u64 {
        let first = self.next;
        self.next += clusters;
        self.counts.resize(self.counts.len() + clusters as usize, 1);
        first
    }

    /// A place for `len` compressed bytes, less than a cluster: behind the last ones, where that can be.
    fn pack(&mut self, len: u64) -> u64 {
        let cluster = 1u64 << self.cluster_bits;
        let most = u32::try_from((1u128 << (1u32 << self.order)) - 1).unwrap_or(u32::MAX);
        let at = self.pack.filter(|at| {
            let number = at >> self.cluster_bits;
            let fits = at % cluster + len <= cluster || number + 1 == self.next;
            fits && number >= self.counted && self.counts[(number - self.counted) as usize] < most
        });
        let at = at.unwrap_or(self.next << self.cluster_bits);
        for number in at >> self.cluster_bits..=(at + len - 1) >> self.cluster_bits {
            if number == self.next {
                self.take(1);
            } else {
                self.counts[(number - self.counted) as usize] += 1;
            }
        }
        let end = at + len;
        self.pack = (!end.is_multiple_of(cluster)).then_some(end);
        at
    }

    /// The next refcount block, if all its clusters are in use.
    fn full_block(&mut self) -> Option<Vec<u8>> {
        let per_block = self.per_block();
        (self.counts.len() >= per_block).then(|| self.block(per_block))
    }

    /// A block with the next `len` counts, which leave the list.
    fn block(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; 1 << self.cluster_bits];
        for (index, count) in (0u64..).zip(self.counts.drain(..len)) {
            // No count goes over its width: `pack` looks at that.
            refcount::set(&mut bytes, self.order, index, u64::from(count));
        }
        self.counted += len as u64;
        bytes
    }

    /// The cluster for a block that was made.
    fn place_block(&mut self) -> u64 {
        let at = self.take(1);
        self.table.push(at);
        at
    }

    /// Makes the last blocks, and the places of these and of the table.
    fn finish(&mut self) -> Result<Last> {
        let (per_block, per_table_cluster) = (self.per_block() as u64, 1u64 << (self.cluster_bits - 3));
        let mut all = Refcounts { blocks: 0, table_clusters: 0 };
        loop {
            let blocks = (self.counts.len() as u64 + all.clusters()).div_ceil(per_block);
            let table_clusters = (self.table.len() as u64 + blocks).div_ceil(per_table_cluster);
            let next = Refcounts { blocks, table_clusters };
            if next == all {
                break;
            }
            all = next;
        }
        if !all.fits(self.cluster_bits) {
            let what = format!("a refcount table cannot count the {} clusters of the file", self.next);
            return Err(Error::new(ErrorKind::OutOfRange, what)
                .hint("choose a larger --cluster-size, or narrower --refcount-bits"));
        }
        let first = self.take(all.clusters());
        let mut blocks = Vec::new();
        for at in first..first + all.blocks {
            let len = self.counts.len().min(per_block as usize);
            blocks.push((at, self.block(len)));
            self.table.push(at);
        }
        Ok(Last { blocks, table: first + all.blocks, table_clusters: all.table_clusters })
    }
}

type Write = Pin<Box<dyn Future<Output = Result<()>>>>;

/// Writes to a store, gathered and several at a time.
struct Output<S> {
    store: Arc<S>,
    at: u64,
    gathered: Segments,
    /// What follows `gathered`, in small pieces.
    small: Vec<u8>,
    writes: FuturesUnordered<Write>,
}

impl<S: Store> Output<S> {
    fn new(store: S) -> Self {
        let (gathered, small) = (Segments::new(), Vec::new());
        Self { store: Arc::new(store), at: 0, gathered, small, writes: FuturesUnordered::new() }
    }

    /// Adds bytes. They are written some time; an error may come from bytes that were added before.
    async fn add(&mut self, at: u64, bytes: Segments) -> Result<()> {
        let len = self.gathered.len() + self.small.len();
        if self.at + len as u64 != at || len >= WRITE_BYTES {
            self.write_gathered();
            self.at = at;
        }
        if bytes.len() < SMALL_BYTES {
            let from = self.small.len();
            self.small.resize(from + bytes.len(), 0);
            bytes.copy_to_slice(0, &mut self.small[from..]);
        } else {
            self.join_small();
            bytes.iter().for_each(|segment| self.gathered.push_joined(segment.clone()));
        }
        self.wait(IN_FLIGHT).await
    }

    fn join_small(&mut self) {
        let small = Segments::copied(&std::mem::take(&mut self.small));
        small.iter().for_each(|segment| self.gathered.push(segment.clone()));
    }

    fn write_gathered(&mut self) {
        self.join_small();
        let bytes = std::mem::replace(&mut self.gathered, Segments::new());
        if bytes.is_empty() {
            return;
        }
        let (store, at) = (self.store.clone(), self.at);
        self.writes.push(Box::pin(async move { store.write_at(StoreOffset(at), &bytes, Via::Cached).await }));
    }

    /// Lets writes go on until at most `most` are left.
    async fn wait(&mut self, most: usize) -> Result<()> {
        poll_fn(|context| {
            loop {
                match self.writes.poll_next_unpin(context) {
                    Poll::Ready(Some(Ok(()))) => {}
                    Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(error)),
                    Poll::Pending if self.writes.len() > most => return Poll::Pending,
                    Poll::Ready(None) | Poll::Pending => return Poll::Ready(Ok(())),
                }
            }
        })
        .await
    }

    async fn finish(&mut self) -> Result<Arc<S>> {
        self.write_gathered();
        self.wait(0).await?;
        Ok(self.store.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn space(cluster_bits: u32, order: u32) -> Space {
        Space { cluster_bits, order, next: 1, pack: None, counts: vec![1], counted: 0, table: Vec::new() }
    }

    #[test]
    fn gaps_are_written_where_they_are_short() {
        assert_eq!(runs(0b1011_0001, 32, 3), [0..1, 4..8]);
        assert_eq!(runs(0b1011_0001, 32, 4), vec![0..8]);
        assert_eq!(runs(1, 1, 0), vec![0..1]);
        assert!(runs(0, 32, 4).is_empty());
    }

    #[test]
    fn a_narrow_count_does_not_overflow() {
        let mut space = space(9, 0);
        let places: Vec<u64> = (0..3).map(|_| space.pack(100)).collect();
        assert_eq!(places, [512, 1024, 1536]);
        assert_eq!(space.counts, [1; 4]);
    }

    proptest! {
        /// Every count is the number of what lies in its cluster, and is in exactly one block.
        #[test]
        fn counts_are_what_was_placed(
            order in 0u32..=6, sizes in proptest::collection::vec(prop_oneof![Just(512u64), 1u64..512], 0..2000),
        ) {
            let mut space = space(9, order);
            let mut used = std::collections::BTreeMap::from([(0u64, 1u64)]);
            let mut blocks = Vec::new();
            for len in sizes {
                let at = if len == 512 { space.take(1) << 9 } else { space.pack(len) };
                (at >> 9..=(at + len - 1) >> 9).for_each(|cluster| *used.entry(cluster).or_default() += 1);
                while let Some(block) = space.full_block() {
                    *used.entry(space.place_block()).or_default() += 1;
                    blocks.push(block);
                }
            }
            let last = space.finish().unwrap();
            for (at, block) in last.blocks {
                *used.entry(at).or_default() += 1;
                blocks.push(block);
            }
            (last.table..last.table + last.table_clusters).for_each(|at| *used.entry(at).or_default() += 1);
            let per_block = refcount::counts_per_block(9, order);
            for cluster in 0..blocks.len() as u64 * per_block {
                let count = refcount::get(&blocks[(cluster / per_block) as usize], order, cluster % per_block);
                prop_assert_eq!(count, used.get(&cluster).copied().unwrap_or(0), "cluster {}", cluster);
            }
            prop_assert!(used.keys().all(|cluster| *cluster < blocks.len() as u64 * per_block));
            prop_assert_eq!(space.table.len(), blocks.len());
        }
    }
}
