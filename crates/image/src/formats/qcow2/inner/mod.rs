//! Snapshots inside an image: made, applied and deleted while nobody uses the image.
//!
//! A snapshot has an L1 table of its own and shares L2 tables and clusters with the disk and with other snapshots; each L1 table on the way
//! to a cluster counts once in its refcount. Everything is checked before anything is changed: an image that contradicts itself is refused, and so is one
//! whose refcounts have no room.
//!
//! # Order of writes
//!
//! A sync stands between two steps. Space for new tables is taken first, counted durably.
//!
//! Made:
//!
//! 1. COPIED is cleared in the active tables.
//! 2. All that the active L1 table names is counted once more. The copy of that table and the new table of snapshots are written.
//! 3. One write of the header names the new table of snapshots.
//! 4. The old table of snapshots is free.
//!
//! Applied:
//!
//! 1. COPIED is cleared in the tables of the snapshot.
//! 2. All that its L1 table names is counted once more. A copy of that table, as long as the disk's size then needs, is written.
//! 3. Whoever notes what changes of the disk is told that all of it does. One write of the header names the copy as the active table, with its length and the disk's size.
//! 4. All that the old active table names is counted once less, and the old table is free. COPIED stays clear: all is shared with the
//!    snapshot.
//!
//! Deleted:
//!
//! 1. The new table of snapshots is written.
//! 2. One write of the header names it.
//! 3. All that the snapshot's L1 table names is counted once less. That table and the old table of snapshots are free.
//! 4. COPIED is set in the active tables where a refcount is 1 now.
//!
//! Why: the header's fields are within one sector, so the image is the old one or the new one. No count is ever lower than its references, and no entry says
//! COPIED while its count is not 1: nothing is given away or written in place that somebody else has. After a power cut, counts may be too high, and COPIED may be clear where the count is 1:
//! the one leaks space, and the other costs a copy. A change that is begun anew after that ends as it should.

mod list;
mod tree;

use std::ops::Range;

use spile_core::{Error, ErrorKind, Result, ResultExt as _, Store};

use super::Qcow2;
use super::check::{count, refuse_full};
use super::codec::COPIED;
use super::codec::header::Header;
use super::codec::snapshot::Snapshot;
use super::codec::table::encode;
use super::create::write;
use super::layout::{l1_clusters, max_size_bytes};
use super::lists::all_snapshots;
use super::open::read_l1;
use super::resize::{SIZE_AT, fields};
use super::writing::Writing;
use crate::inner::{InnerChange, InnerSnapshot, InnerWatch, Which};
use crate::layer::Layer as _;

/// All sizes of disks are multiples of it.
const SECTOR_BYTES: u64 = 512;
/// Where the header has the number of snapshots and the place of their table.
const SNAPSHOTS_AT: u64 = 60;

impl<S: Store> Qcow2<S> {
    /// All snapshots inside the image.
    pub(super) async fn list_inner(&self) -> Result<Vec<InnerSnapshot>> {
        Ok(list::told_all(&self.inner_entries().await?))
    }

    async fn inner_entries(&self) -> Result<Vec<Snapshot>> {
        let list = all_snapshots(&self.store, &self.now.head()).await;
        let Some(fault) = list.fault else { return Ok(list.entries) };
        let read = list.entries.len();
        let what = format!("of {} snapshots inside the image only {read} can be read: {fault}", list.count);
        Err(Error::new(ErrorKind::Corrupt, what).at_path(self.store.path()))
    }

    /// Makes, applies or deletes a snapshot, and seals the image. Returns the snapshot.
    pub(super) async fn change_inner_alone(
        &self,
        change: &InnerChange,
        watch: &dyn InnerWatch,
    ) -> Result<InnerSnapshot> {
        if self.has_data_file() {
            let error = self.unsupported("an image with an external data file has no snapshots inside it");
            return Err(error.hint("a snapshot that is an image of its own: spile snapshot"));
        }
        let all = self.inner_entries().await?;
        let changed = match change {
            InnerChange::Create { name, now_unix_s } => self.make_inner(&all, name, *now_unix_s).await,
            InnerChange::Apply(which) => self.apply_inner(&all, which, watch).await,
            InnerChange::Delete(which) => self.delete_inner(&all, which).await,
        };
        let snapshot = changed.at_path(self.store.path())?;
        self.seal_writing(self.writing().await?).await.map_err(done_but)?;
        Ok(list::told(&snapshot))
    }

    async fn make_inner(&self, old: &[Snapshot], name: &str, now_unix_s: u64) -> Result<Snapshot> {
        let (id, head) = (list::new_id(old, name)?, self.now.head());
        let header = &head.header;
        self.refuse_contradictions().await?;
        refuse_full(&self.store, header.l1_offset, header.l1_entries).await?;
        let writing = self.writing().await?;
        let mut new = extended(old, header);
        new.push(list::entry(&id, name, now_unix_s, header));
        let l1_room = l1_clusters(header, header.l1_entries.into());
        let table_room = self.clusters_for(list::to_bytes(&new)?.len() as u64);
        let room = self.take_room(writing, l1_room + table_room).await?;
        let made = Snapshot { l1_offset: self.start_of_room(room.start, l1_room), ..new[old.len()].clone() };
        new[old.len()] = made.clone();
        let l1 = self.unmark_active(header).await?;
        self.store.sync().await?;
        self.count_up(writing, &l1).await?;
        write(&self.store, made.l1_offset, &encode(&l1)).await?;
        self.name_table(writing, old, &new, room.start + l1_room).await?;
        Ok(made)
    }

    async fn apply_inner(&self, all: &[Snapshot], which: &Which, watch: &dyn InnerWatch) -> Result<Snapshot> {
        let snapshot = &all[which.find(&list::told_all(all))?];
        let head = self.now.head();
        let old = &head.header;
        let mut new = self.applied(old, snapshot)?;
        let needed = u64::from(new.l1_entries);
        // What lies behind the end of the disk, such as the state of a guest, stays the snapshot's alone.
        let shared = needed.min(snapshot.l1_entries.into());
        self.refuse_contradictions().await?;
        refuse_full(&self.store, snapshot.l1_offset, shared as u32).await?;
        let writing = self.writing().await?;
        let mut l1 = read_l1(&self.store, snapshot.l1_offset, shared, shared).await?;
        let room = self.take_room(writing, l1_clusters(&new, needed)).await?;
        new.l1_offset = self.start_of_room(room.start, room.end - room.start);
        self.clear_copied(&l1).await?;
        self.store.sync().await?;
        self.count_up(writing, &l1).await?;
        l1.iter_mut().for_each(|entry| *entry &= !COPIED);
        l1.resize(needed as usize, 0);
        write(&self.store, new.l1_offset, &encode(&l1)).await?;
        self.store.sync().await?;
        // Whoever is refused until here has lost nothing.
        self.use_bitmaps_of_other_size(writing, new.size_bytes).await?;
        watch.before_apply().await?;
        self.name_durably(writing, SIZE_AT, &fields(&new)).await?;
        self.give_up_tree(writing, old.l1_offset, old.l1_entries).await.map_err(done_but)?;
        Ok(snapshot.clone())
    }

    /// The header of the image once `snapshot` is applied, but for the place of the L1 table.
    fn applied(&self, old: &Header, snapshot: &Snapshot) -> Result<Header> {
        let size_bytes = snapshot.disk_bytes().unwrap_or(old.size_bytes);
        let most = max_size_bytes(old);
        if size_bytes == 0 || size_bytes > most || !size_bytes.is_multiple_of(SECTOR_BYTES) {
            let what = format!(
                "the snapshot says that its disk has {size_bytes} bytes, and the image can have whole sectors, and no more than {most} bytes"
            );
            return Err(
                Error::new(ErrorKind::Corrupt, what).hint("the disk of now can be read and copied: spile convert")
            );
        }
        let new = Header { size_bytes, ..old.clone() };
        Ok(Header { l1_entries: new.needed_l1_entries() as u32, ..new })
    }

    async fn delete_inner(&self, old: &[Snapshot], which: &Which) -> Result<Snapshot> {
        let number = which.find(&list::told_all(old))?;
        let (gone, head) = (&old[number], self.now.head());
        self.refuse_contradictions().await?;
        let writing = self.writing().await?;
        let mut new = extended(old, &head.header);
        new.remove(number);
        let room = self.take_room(writing, self.clusters_for(list::to_bytes(&new)?.len() as u64)).await?;
        self.name_table(writing, old, &new, room.start).await?;
        let given_up = async {
            self.give_up_tree(writing, gone.l1_offset, gone.l1_entries).await?;
            self.store.sync().await?;
            self.set_copied(writing, &head.header).await
        };
        given_up.await.map_err(done_but)?;
        Ok(gone.clone())
    }

    /// Refuses an image that contradicts itself.
    async fn refuse_contradictions(&self) -> Result<()> {
        let counted = count(&self.store).await?;
        if let Some(place) = counted.claims_past_end {
            let what = "a compressed cluster claims space past the end of the file, and nobody can tell whether it is counted: nothing was changed";
            let error = Error::new(ErrorKind::Corrupt, what).at_offset(place);
            return Err(error.hint("spile convert copies the disk into a new image"));
        }
        let Some(wrong) = counted.report.corruption() else { return Ok(()) };
        let error = wrong.error("the image contradicts itself, and nothing was changed");
        Err(error.hint("spile check tells all that is wrong; spile check --repair mends counts and flags"))
    }

    /// How many clusters a table of `len_bytes` takes.
    fn clusters_for(&self, len_bytes: u64) -> u64 {
        len_bytes.div_ceil(self.head.header.cluster_bytes())
    }

    /// Takes clusters side by side for new tables. None is taken where none is needed.
    async fn take_room(&self, writing: &Writing, clusters: u64) -> Result<Range<u64>> {
        if clusters == 0 { Ok(0..0) } else { self.take_run(writing, clusters).await }
    }

    /// Where a table of `clusters` clusters starts, of which `first` is the first; 0 for one that has none.
    fn start_of_room(&self, first: u64, clusters: u64) -> u64 {
        if clusters == 0 { 0 } else { self.start_of(first) }
    }

    /// Clears COPIED in all active tables. Returns the entries of the active L1 table.
    async fn unmark_active(&self, header: &Header) -> Result<Vec<u64>> {
        let entries = u64::from(header.l1_entries);
        let old = read_l1(&self.store, header.l1_offset, entries, entries).await?;
        self.clear_copied(&old).await?;
        let new: Vec<u64> = old.iter().map(|entry| entry & !COPIED).collect();
        if new != old {
            write(&self.store, header.l1_offset, &encode(&new)).await?;
        }
        Ok(new)
    }

    /// Writes the table `new` to the cluster `first` and those behind it, has the header name it in the place of the table `old`, and frees that.
    async fn name_table(&self, writing: &Writing, old: &[Snapshot], new: &[Snapshot], first: u64) -> Result<()> {
        let bytes = list::to_bytes(new)?;
        let offset = self.start_of_room(first, self.clusters_for(bytes.len() as u64));
        write(&self.store, offset, &bytes).await?;
        self.store.sync().await?;
        let place = [&(new.len() as u32).to_be_bytes()[..], &offset.to_be_bytes()].concat();
        self.name_durably(writing, SNAPSHOTS_AT, &place).await?;
        let old_bytes: u64 = old.iter().map(|snapshot| snapshot.to_bytes().len() as u64).sum();
        self.free(writing, self.head.header.snapshots_offset, old_bytes).await.map_err(done_but)
    }

    /// Writes fields of the header that say which tables count, durably.
    async fn name_durably(&self, writing: &Writing, at: u64, bytes: &[u8]) -> Result<()> {
        let named = async {
            self.write_header(at, bytes).await?;
            self.store.sync().await
        };
        // When this fails, nobody knows which tables count.
        named.await.map_err(|error| {
            writing.refuse_writes();
            error.hint("it may be done, or not: spile internal-snapshot --list tells")
        })
    }

    /// Gives up the L1 table at `offset`, which nothing names any more, durably, with all its references.
    async fn give_up_tree(&self, writing: &Writing, offset: u64, entries: u32) -> Result<()> {
        let len = u64::from(entries);
        let l1 = read_l1(&self.store, offset, len, len).await?;
        self.count_down(writing, &l1).await?;
        self.free(writing, offset, len * 8).await
    }

    /// Frees the clusters of a table that nothing names any more, durably.
    async fn free(&self, writing: &Writing, offset: u64, len_bytes: u64) -> Result<()> {
        let first = offset >> self.head.header.cluster_bits;
        let mut counts = writing.counts.lock().await;
        self.release(&mut counts, first..first + self.clusters_for(len_bytes)).await
    }
}

/// The error of what comes after the change itself.
fn done_but(error: Error) -> Error {
    error.hint(
        "the change itself is done; space that is not needed any more may be lost: spile check --repair reclaims it",
    )
}

/// The entries for a new table: each tells the size of its disk, which is that of now where the old entry does not say it.
fn extended(all: &[Snapshot], header: &Header) -> Vec<Snapshot> {
    all.iter().map(|snapshot| snapshot.clone().extended(header.size_bytes)).collect()
}
