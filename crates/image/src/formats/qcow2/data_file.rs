//! Writing where the guest's data lie in an external data file, raw or not.
//!
//! The guest's offset is the offset in the data file, always: an entry says only whether these bytes are the guest's. Refcounts know nothing of
//! them, so all of the data file is an entry's own. Tables and counts lie in the image, and keep the order that `write` and `alloc` say.
//!
//! # Order of writes
//!
//! Where an entry does not show the data file, that holds anything: what was there before it had this name, what a discard has left, half a write of
//! a process that was killed. So the rule "what is new is zero" does not hold there.
//!
//! 1. A first write makes the rest of its cluster (of its subclusters) right: zero, or as the parents have it.
//! 2. The data file is durable before an entry shows more of it. Writes that wait for that share a sync.
//! 3. A flush syncs the data file, and then the image.
//! 4. Zeroes and discards leave the entry that shows the data file, and make the data file itself zero. So its space goes back to the host, and
//!    neither a sync nor an entry is needed to write there again.
//!
//! A raw data file (autoclear bit 1) is the disk, also for a program that knows nothing of the image. So nothing may come into it that the
//! entries do not show:
//!
//! 5. A cluster that is not shown as a whole is made zero there, durably; then its entry shows it, durably; and only then are data written. An
//!    image whose clusters all have their places from the start, as QEMU and Spile make it, never waits for that.
//! 6. No entry stops showing it. When the disk becomes longer, entries show what it has gained before the header tells the new size: programs that
//!    write to the data file alone are right from then on.

use spile_core::{Error, ErrorKind, Extent, Result, Store, StoreOffset, yield_now};

use super::Qcow2;
use super::codec::COPIED;
use super::codec::header::{Header, feature};
use super::codec::table::{Cluster, SUBCLUSTERS};
use super::write::{Old, Part};
use super::writing::Writing;
use crate::layer::Layer as _;

/// So many entries are written in one turn.
const SHOWN_AT_ONCE: u64 = 256;

/// True when the data file of the image of `header` is the disk's content as it is.
pub(super) fn is_raw(header: &Header) -> bool {
    header.has(feature::DATA_FILE) && header.autoclear & feature::RAW_DATA_FILE != 0
}

/// The autoclear feature that calls a data file raw which the image does not have. It means nothing here; for the specification, and for QEMU, such an image
/// is corrupt.
pub(super) fn stray_autoclear(header: &Header) -> u64 {
    if header.has(feature::DATA_FILE) { 0 } else { header.autoclear & feature::RAW_DATA_FILE }
}

/// The autoclear features that are known here and mean something.
pub(super) fn sound_autoclear(header: &Header) -> u64 {
    header.autoclear & feature::KNOWN_AUTOCLEAR & !stray_autoclear(header)
}

/// Autoclear features that stay true while the image is written.
pub(super) fn kept_autoclear(header: &Header) -> u64 {
    if is_raw(header) { feature::RAW_DATA_FILE } else { 0 }
}

/// What keeps the image of `header` from being written because its data lie in another file, if something does: what is wrong, and what to do.
pub(super) fn hindrance(header: &Header) -> Option<(&'static str, &'static str)> {
    match () {
        () if !header.has(feature::DATA_FILE) => None,
        () if header.snapshots > 0 => Some((
            "an image with an external data file and internal snapshots is not written: the snapshots' data are in the same places",
            "open it for reading only, or convert it",
        )),
        () if is_raw(header) && header.backing.is_some() => Some((
            "an image whose external data file is raw has no parent, and this one names one: it is not written",
            "open it for reading only, or convert it",
        )),
        () => None,
    }
}

/// What a first write does to an entry.
pub(super) struct FirstWrite {
    /// The bitmap of an extended entry.
    pub bitmap: u64,
    /// How many bytes around the part are to be written, too.
    pub around: (u64, u64),
}

impl<S: Store> Qcow2<S> {
    pub(super) fn has_data_file(&self) -> bool {
        self.rules.data_file
    }

    pub(super) fn is_raw_data_file(&self) -> bool {
        is_raw(&self.head.header)
    }

    /// Refuses to change an image whose data file is not open.
    pub(super) fn check_data_file(&self) -> Result<()> {
        match (self.has_data_file(), &self.data) {
            (true, None) => {
                let what = "this cannot be done to an image that keeps its data in another file";
                let hint = "copy the disk into one file first: spile convert";
                Err(self.unsupported(what).hint(hint))
            }
            _ => Ok(()),
        }
    }

    /// Once, before the first change: the data file is as long as the disk, so that each cluster has its bytes there; durably.
    pub(super) async fn begin_data_file(&self) -> Result<()> {
        let Some(data) = &self.data else { return Ok(()) };
        self.make_data_file_long(self.now.size_bytes()).await?;
        data.sync().await
    }

    /// Makes the data file `size_bytes` long, where it is shorter.
    pub(super) async fn make_data_file_long(&self, size_bytes: u64) -> Result<()> {
        let Some(data) = self.data.as_ref().filter(|data| data.len_bytes() < size_bytes) else { return Ok(()) };
        if !data.info().grows_zeroed && data.look_for_growth().await? < size_bytes {
            let what = format!("the data file has {} bytes, and the disk {size_bytes}", data.len_bytes());
            let error = Error::new(ErrorKind::NoSpace, what).at_path(data.path());
            return Err(error.hint("enlarge the volume that holds the data"));
        }
        if data.len_bytes() < size_bytes {
            data.set_len(size_bytes).await?;
        }
        self.map.set_data_bytes(data.len_bytes());
        Ok(())
    }

    /// Makes the data file as long as the disk that grows to `size_bytes`, and zero behind its old end at `end_bytes`; durably.
    pub(super) async fn grow_data_file(&self, end_bytes: u64, size_bytes: u64) -> Result<()> {
        let Some(data) = &self.data else { return Ok(()) };
        self.make_data_file_long(size_bytes).await?;
        // The caller has seen to the rest of the last cluster, which guests write to.
        let start = end_bytes.next_multiple_of(self.head.header.cluster_bytes());
        self.zero_in_data_file(start, size_bytes.saturating_sub(start), true).await?;
        data.sync().await
    }

    /// Makes the data file as long as the disk of `size_bytes`, which became shorter.
    pub(super) async fn cut_data_file(&self, size_bytes: u64) -> Result<()> {
        let Some(data) = &self.data else { return Ok(()) };
        if data.len_bytes() > size_bytes && data.info().grows_zeroed {
            self.map.set_data_bytes(size_bytes);
            data.set_len(size_bytes).await?;
        }
        data.sync().await
    }

    /// What an entry of the cluster at guest offset `at` means, whose place nobody else can have. The caller holds the cluster alone.
    pub(super) async fn old_in_data_file(&self, at: u64, words: (u64, u64), cluster: Cluster) -> Result<Old> {
        let old = Old { words, cluster, is_own: true };
        match old.host() {
            Some(host) if host != at => Err(self
                .corrupt(host, "guest data are said to lie elsewhere in the data file than the guest has them")
                .await),
            Some(_) => {
                self.map.prove(at, words);
                Ok(old)
            }
            None => Ok(Old { is_own: false, ..old }),
        }
    }

    /// Makes zero what the data file has behind the disk's end in its last cluster, which `end` is from the start of: an entry shows all of it, and it would
    /// come to light when another program makes the disk longer. The caller holds the cluster alone.
    async fn zero_behind_end(&self, cluster: u64, end: u64) -> Result<()> {
        let behind = self.head.header.cluster_bytes() - end;
        self.zero_in_data_file(self.start_of(cluster) + end, behind, true).await
    }

    /// The first write to `part` where the data file is not raw: what is around it there becomes right, or is said.
    pub(super) async fn first_write(&self, part: &Part, old: &Old) -> Result<FirstWrite> {
        let end = self.end_of(part.cluster);
        self.zero_behind_end(part.cluster, end).await?;
        let all = u64::from(u32::MAX);
        let some = |allocated: u32, zero: u32| {
            let touched = self.touched(part);
            let bitmap = u64::from(zero & !touched) << 32 | u64::from(allocated | touched);
            FirstWrite { bitmap, around: self.edges(part, touched & !allocated, end) }
        };
        match old.cluster {
            Cluster::Mixed { allocated, zero, .. } => Ok(some(allocated, zero)),
            Cluster::Unallocated if self.has_parent() && self.rules.extended => Ok(some(0, 0)),
            Cluster::Unallocated if self.has_parent() => {
                Ok(FirstWrite { bitmap: all, around: (part.within.start, end - part.within.end) })
            }
            _ => {
                self.zero_in_data_file(self.start_of(part.cluster), end, true).await?;
                Ok(FirstWrite { bitmap: all, around: (0, 0) })
            }
        }
    }

    /// Shows all of the cluster at guest offset `at` in a raw data file, where it was not shown as a whole: zeroes where it was not. The caller
    /// holds the cluster alone, and has its table.
    pub(super) async fn show_raw(&self, writing: &Writing, cluster: u64, old: &Old) -> Result<()> {
        let (at, end) = (self.start_of(cluster), self.end_of(cluster));
        let allocated = match old.cluster {
            Cluster::Mixed { allocated, .. } => allocated,
            _ => 0,
        };
        let part_bytes = if allocated == 0 { end } else { self.head.header.cluster_bytes() / u64::from(SUBCLUSTERS) };
        let hidden = (0..SUBCLUSTERS).filter(|number| allocated >> number & 1 == 0);
        for start in hidden.map(|number| u64::from(number) * part_bytes).take_while(|start| *start < end) {
            self.zero_in_data_file(at + start, part_bytes.min(end - start), true).await?;
        }
        self.zero_behind_end(cluster, end).await?;
        self.flush_writing(writing).await?;
        self.show_whole(writing, at, old).await?;
        self.flush_writing(writing).await
    }

    /// Has the entry of the cluster at guest offset `at` show all of it in the data file. The caller holds the cluster alone, and has its table.
    async fn show_whole(&self, writing: &Writing, at: u64, old: &Old) -> Result<()> {
        let (entry, bitmap) = self.rules.encode(Cluster::Data(at));
        self.change_entry(writing, at, old, (entry | COPIED, bitmap)).await
    }

    /// Shows all clusters of a raw data file that lie between the ends of a disk that grows: what another program writes to the file is there,
    /// and no write has to wait for its entry. They are zero, durably ([`Qcow2::grow_data_file`]).
    pub(super) async fn show_added(&self, writing: &Writing, end_bytes: u64, size_bytes: u64) -> Result<()> {
        let bits = self.head.header.cluster_bits;
        for cluster in end_bytes.div_ceil(1 << bits)..size_bytes.div_ceil(1 << bits) {
            if cluster.is_multiple_of(SHOWN_AT_ONCE) {
                yield_now().await;
            }
            let at = self.start_of(cluster);
            let _alone = writing.clusters.exclusive(cluster..cluster + 1).await;
            let old = self.old(writing, at).await?;
            if matches!(old.cluster, Cluster::Unallocated) {
                self.own_table(writing, at).await?;
                self.show_whole(writing, at, &old).await?;
            }
        }
        self.flush_writing(writing).await
    }

    /// Makes bytes of the data file zero, as far as it goes; `may_unmap` gives their space back where that can be done.
    pub(super) async fn zero_in_data_file(&self, offset: u64, len_bytes: u64, may_unmap: bool) -> Result<()> {
        let data = self.data_store();
        let len_bytes = len_bytes.min(data.len_bytes().saturating_sub(offset));
        match len_bytes {
            0 => Ok(()),
            _ if may_unmap && data.info().punches => data.punch_hole(StoreOffset(offset), len_bytes).await,
            _ => data.zero_range(StoreOffset(offset), len_bytes).await,
        }
    }

    /// A change to zeroes of `part` in the data file itself, where its entry stays. False when the entry is to say that it is zero.
    pub(super) async fn zero_shown(&self, part: &Part, old: &Old, may_unmap: bool) -> Result<bool> {
        // A raw one is zero then, also where the entry has not shown it.
        let stays = self.is_raw_data_file() || matches!(old.cluster, Cluster::Data(_));
        if stays {
            let within = &part.within;
            let start = self.start_of(part.cluster) + within.start;
            self.zero_in_data_file(start, within.end - within.start, may_unmap).await?;
        }
        Ok(stays)
    }

    /// Gives back the space of `part` where the data file is not shown any more.
    pub(super) async fn give_back_hidden(&self, part: &Part) -> Result<()> {
        match self.has_data_file() && self.data_store().info().punches {
            true => {
                let extent = Extent::from_range(part.within.clone());
                self.zero_in_data_file(self.start_of(part.cluster) + extent.start(), extent.len_bytes, true).await
            }
            false => Ok(()),
        }
    }
}
