//! What an L1 table names, table by table: references are counted up and down, and COPIED bits cleared and set.
//!
//! One L2 table is in memory at a time, and the numbers of the clusters that it names.

use spile_core::{Result, ResultExt as _, Store, yield_now};

use crate::formats::qcow2::Qcow2;
use crate::formats::qcow2::alloc::runs;
use crate::formats::qcow2::codec::COPIED;
use crate::formats::qcow2::codec::header::Header;
use crate::formats::qcow2::codec::table::{decode, encode};
use crate::formats::qcow2::create::write;
use crate::formats::qcow2::entries::{places, references};
use crate::formats::qcow2::open::{read, read_l1};
use crate::formats::qcow2::writing::Writing;

impl<S: Store> Qcow2<S> {
    /// The L2 tables that these entries of an L1 table name.
    fn tables(&self, l1: &[u64]) -> impl Iterator<Item = u64> {
        l1.iter().filter_map(|entry| self.rules.l2_table(*entry).ok().flatten())
    }

    async fn words_of(&self, table: u64) -> Result<Vec<u64>> {
        // Whoever works through many tables lets others run between two.
        yield_now().await;
        let bytes = read(&self.store, table, self.head.header.cluster_bytes()).await.at_offset(table)?;
        Ok(decode(&bytes).collect())
    }

    /// The clusters of the file that count the L2 table at `table`: its own, and for each of its entries those that the entry refers to.
    /// They ascend, and one is there several times when it has several references.
    async fn counted_by(&self, table: u64) -> Result<Vec<u64>> {
        let words = self.words_of(table).await?;
        let mut clusters: Vec<u64> = references(&self.rules, &words).flatten().collect();
        clusters.push(table >> self.head.header.cluster_bits);
        clusters.sort_unstable();
        Ok(clusters)
    }

    /// Clears COPIED in all L2 tables that the L1 entries `l1` name.
    pub(super) async fn clear_copied(&self, l1: &[u64]) -> Result<()> {
        for table in self.tables(l1) {
            let mut words = self.words_of(table).await?;
            let places: Vec<_> = places(&self.rules, &words).filter(|(at, _)| words[*at] & COPIED != 0).collect();
            if places.is_empty() {
                continue;
            }
            places.into_iter().for_each(|(at, _)| words[at] &= !COPIED);
            write(&self.store, table, &encode(&words)).await.at_offset(table)?;
        }
        Ok(())
    }

    /// Counts one more reference to all that the L1 entries `l1` name.
    pub(super) async fn count_up(&self, writing: &Writing, l1: &[u64]) -> Result<()> {
        for table in self.tables(l1) {
            let clusters = self.counted_by(table).await?;
            let mut counts = writing.counts.lock().await;
            for run in runs(&clusters) {
                // A count of 0 says that nobody uses the cluster, which is not so.
                let more = |count: u64| count.checked_add(1).filter(|more| *more > 1);
                counts.change(&self.store, run, more).await?;
            }
        }
        Ok(())
    }

    /// Counts one reference less to all that the L1 entries `l1` name, which nothing does any more, durably. What is free then goes back to the
    /// store.
    pub(super) async fn count_down(&self, writing: &Writing, l1: &[u64]) -> Result<()> {
        for table in self.tables(l1) {
            let clusters = self.counted_by(table).await?;
            let mut counts = writing.counts.lock().await;
            for run in runs(&clusters) {
                self.release(&mut counts, run).await?;
            }
        }
        Ok(())
    }

    /// Sets COPIED in the active tables of `header` wherever a refcount is 1.
    pub(super) async fn set_copied(&self, writing: &Writing, header: &Header) -> Result<()> {
        let entries = u64::from(header.l1_entries);
        let old = read_l1(&self.store, header.l1_offset, entries, entries).await?;
        let mut new = old.clone();
        for entry in &mut new {
            let Ok(Some(table)) = self.rules.l2_table(*entry) else { continue };
            // What a shared table names is shared, too.
            if self.is_alone(writing, table).await? {
                self.set_copied_in(writing, table).await?;
                *entry |= COPIED;
            }
        }
        if new != old {
            write(&self.store, header.l1_offset, &encode(&new)).await.at_offset(header.l1_offset)?;
        }
        Ok(())
    }

    async fn set_copied_in(&self, writing: &Writing, table: u64) -> Result<()> {
        let mut words = self.words_of(table).await?;
        let places: Vec<_> = places(&self.rules, &words).filter(|(at, _)| words[*at] & COPIED == 0).collect();
        let mut is_changed = false;
        for (at, host) in places {
            if self.is_alone(writing, host).await? {
                words[at] |= COPIED;
                is_changed = true;
            }
        }
        match is_changed {
            true => write(&self.store, table, &encode(&words)).await.at_offset(table),
            false => Ok(()),
        }
    }

    /// True when the refcount of the cluster at `offset` is 1.
    async fn is_alone(&self, writing: &Writing, offset: u64) -> Result<bool> {
        let cluster = offset >> self.head.header.cluster_bits;
        Ok(writing.counts.lock().await.get(&self.store, cluster).await? == 1)
    }
}
