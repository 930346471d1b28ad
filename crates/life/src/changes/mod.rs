//! Changed blocks: which blocks of a disk may differ from what they held at a checkpoint.
//!
//! # What is kept
//! A *checkpoint* is a moment that has a name. From one checkpoint to the next is an *interval*; each has one bit for each block. Requests
//! set bits of the last interval only. What has changed since a checkpoint are the bits of all intervals from there on. A
//! checkpoint that is removed has its interval's bits added to the interval before.
//!
//! A bit that is set too much costs the copy of a block. A bit that is missing costs a backup. So all doubt is decided for
//! "changed": blocks that an interval has no bits for, an interval whose checksum is wrong, a file that cannot be read, a disk that
//! another program has written to.
//!
//! # The order of writes
//! The bits lie in memory that is a part of the file ([`Store::map`]), so the death of the process loses none. A power cut loses what was not
//! synced. To sync each new bit would cost a sync for each of many writes. So the disk is divided into *areas* of 64 MiB, each with a
//! *mark*; after a power cut all blocks of a marked area count as changed.
//!
//! 1. Before a request sets a bit, the mark of its area is durable. Requests that wait for that share a sync.
//! 2. A bit is set before the data go on. A request that finds its bits set goes on at once: rule 1 was kept by whoever set them. If it fails,
//!    its bits stay. What changes by other ways than requests has its bits set in the same order ([`Changes::note`]): requests go on beside that.
//! 3. A mark is cleared after a sync of the bits. First the area is taken from those in which bits may be set; then comes the sync; then the
//!    mark is cleared, unless a request has begun to wait for it anew. That happens at a guest's flush, at most every ten
//!    seconds, for areas without a new bit since the time before.
//! 4. The header names the boot of the host, and the mount of the file system. It is durable before the first bit is set in them, and it is written
//!    only after the marks of earlier ones were turned into bits and those were synced. So a crash on the way turns them into bits again. (A file
//!    system that was mounted anew may have lost its storage, and with it what the page cache held.)
//! 5. An interval is *settled*, with a checksum of its bits, after all requests that set them have ended and the bits were synced. It is
//!    unsettled, durably, before bits are set in it again. Marks of settled intervals do not count.
//! 6. A checkpoint: the place of the new interval is zeroed and synced. Then requests set the bits of the old and of the new interval. When all
//!    requests of before have ended, that is the moment of the checkpoint. The disk is flushed: a power cut must not take it back to what
//!    it was before that moment. The header with the new interval becomes durable; then requests set only the new bits; then the old
//!    interval is settled.
//! 7. A checkpoint is removed after its bits were added to the interval before and were synced there.
//! 8. Each change of the header is written to its first copy, synced, written to its second copy and synced.
//!
//! # When the file fails
//! Bits or marks that cannot be made durable fail no request. The file's name is removed, durably, and then requests go on: the next process finds no
//! checkpoints, and until then everything counts as changed. A file that can be read and not be written when the disk is opened is given up in the
//! same way. Where the name cannot be removed, the header is overwritten, so that it says nothing.
//!
//! # Other programs
//! What the image looks like from outside is noted when it is closed in order, and compared when it is opened next. After a process that was
//! killed, only the file itself can be compared, and what its times tell ([`Found`]): nothing records when such a process wrote last.
//!
//! # Another image
//! When the disk gets another image at another place, its file is copied there first, while requests set the bits in both ([`Changes::carry`]). All areas are marked
//! there beforehand, so that no request waits for the storage of that place before the disk is there; a power cut until that is over has all count as changed. To
//! another host it is sent ([`Changes::pack`]), which notes from its arrival on what comes to the disk's image there.
//!
//! # Bitmaps of the image
//! A bitmap inside the image is a checkpoint, too, while Spile has the disk ([`Changes::follow_bitmaps`]): its bits are taken up, and the image gets them back when it is
//! closed.
//!
//! A checkpoint that is made around a snapshot of the disk serves the snapshot, too: see [`Changes::checkpoint_with`].

mod answer;
mod bitmaps;
pub(crate) mod bits;
mod carry;
pub mod header;
mod loss;
mod packed;
mod tracked;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_lock::{Mutex, MutexGuard};
use spile_core::{
    Disk, Env, Error, ErrorKind, Files, OpenMode, Result, Segment, Segments, Store, StoreOffset, Timer, Via,
};
use spile_node::{Node, Place, Stage};

use crate::names;
pub use answer::Changed;
pub use bitmaps::{Followed, Keeper};
use header::{COPY_BYTES, Grain, Header, Interval, LONGEST_NAME_BYTES, MOST_CHECKPOINTS, Stamp, Unreadable};
use loss::Giving;
pub use loss::Loss;
pub use packed::Packed;
use tracked::{Tracked, Tracking};

/// A rule of the order of writes that the simulator breaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Broken {
    /// No rule.
    #[default]
    Nothing,
    /// Bits are set after the data.
    BitAfterData,
    /// Nobody waits until a mark is durable.
    MarkNotDurable,
    /// Marks are cleared before the bits are synced, and in areas where bits may be set.
    MarksClearedEarly,
    /// An interval is settled before its bits are synced, and nobody compares their checksum.
    SettledEarly,
    /// A checkpoint does not wait for the requests that began before.
    CheckpointWithoutWait,
    /// A checkpoint does not flush the disk.
    CheckpointWithoutFlush,
    /// Requests set the bits beside a disk's new image only from the next process on.
    CarriedLate,
    /// A header of this boot is written before the marks of an earlier one are bits.
    BootBeforeBits,
}

/// A checkpoint, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its name.
    pub name: String,
    /// When it was made, in seconds since 1970 UTC.
    pub created_unix_s: u64,
    /// Bytes in blocks that have changed since, or may have.
    pub changed_bytes: u64,
    /// It is a bitmap of the disk's image.
    pub is_bitmap: bool,
}

/// What surrounds the changed blocks of a disk.
#[derive(Clone)]
pub struct Surroundings<F> {
    /// Where the file is.
    pub files: F,
    /// Clock and boot.
    pub env: Arc<dyn Env>,
    /// Tells when the bits were last made durable.
    pub timer: Arc<dyn Timer>,
    /// Is told why changes are not tracked any more.
    pub alarm: fn(&Path, &Error),
    /// A rule that the simulator breaks.
    pub broken: Broken,
}

/// The image of a disk, as it is found when the disk or its file of changed blocks is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// What it looks like.
    pub stamp: Stamp,
    /// Its times show that it was written since the last process that had it open, or nobody can tell. It counts only when that one was killed.
    pub is_written_behind: bool,
    /// The number of the mount that the file of changed blocks is in: no other mount of this boot has it. 0: it is not known.
    pub mount_id: u64,
}

/// The changed blocks of one disk that is open for writing.
pub struct Changes<F: Files> {
    around: Surroundings<F>,
    path: PathBuf,
    store: Arc<F::Store>,
    state: Mutex<State<F::Store>>,
    giving: Arc<Giving>,
    /// The disk is open for reading only: nothing is written to the file.
    is_read_only: bool,
}

/// The header as it is in the file, and its intervals in memory, in the same order.
struct State<S> {
    header: Header,
    tracked: Vec<Arc<Tracked<S>>>,
    /// The file could not be read, so nobody knows which checkpoints there were.
    is_damaged: bool,
    /// A header could not be written, so nobody knows which one is in the file.
    is_stuck: bool,
    /// Nobody has written to the disk's image since the last process closed it in order.
    is_as_left: bool,
    /// The image's parents are not what they were when that was last noted: no bitmap of the image tells what has changed in them.
    has_other_parents: bool,
    /// Another file has taken this one's place: nothing is noted here any more.
    is_replaced: bool,
    /// The image does not say that its bitmaps lack what its parents have got: so the parents stay others than they were noted to be.
    stays_behind: bool,
}

impl<S> State<S> {
    fn new(header: Header) -> Self {
        Self {
            header,
            tracked: Vec::new(),
            is_damaged: false,
            is_stuck: false,
            is_as_left: false,
            has_other_parents: false,
            is_replaced: false,
            stays_behind: false,
        }
    }

    /// True when everything counts as changed since the checkpoint that the interval of this number begins with.
    fn is_all_unknown(&self, number: usize) -> bool {
        self.header.intervals[number..].iter().any(|interval| interval.covered_bytes == 0)
    }
}

impl<F: Files + Clone> Changes<F> {
    /// The changed blocks of the disk at `disk`, which is open for writing; `None` when the disk has none. No request may change the
    /// disk before [`Changes::attach`].
    ///
    /// Where the file can be read and not be written, as on a full file system, its checkpoints are lost, and the disk opens ([`Changes::loss`]).
    ///
    /// # Errors
    /// `Unsupported` when a newer program has written the file; `Busy` when another process has it open; the system's, where it can neither be
    /// read nor be given up.
    pub async fn open(around: Surroundings<F>, disk: &Path, disk_bytes: u64, found: Found) -> Result<Option<Self>> {
        let opened = Self::read(around, disk, disk_bytes, OpenMode::ReadWrite).await?;
        let Some(changes) = opened else { return Ok(None) };
        if let Err(error) = changes.recover(disk_bytes, found).await {
            changes.giving.up(&error).await;
            changes.state.lock().await.tracked.clear();
            if changes.loss().is_some_and(|loss| !loss.is_void) {
                return Err(error.hint("remove this file: then the disk has no checkpoints"));
            }
        }
        Ok(Some(changes))
    }

    /// As [`Changes::open`], of a disk that is open for reading only. Nothing is written.
    ///
    /// # Errors
    /// As there.
    pub async fn open_to_read(
        around: Surroundings<F>,
        disk: &Path,
        disk_bytes: u64,
        found: Found,
    ) -> Result<Option<Self>> {
        let opened = Self::read(around, disk, disk_bytes, OpenMode::ReadOnly).await?;
        let Some(changes) = opened else { return Ok(None) };
        let mut state = changes.state.lock().await;
        let header = state.header.clone();
        state.header = changes.take_all_up(&mut state, header, disk_bytes, found).await?;
        drop(state);
        Ok(Some(changes))
    }

    /// The file of the disk at `disk` with its header; `None` when there is none.
    async fn read(around: Surroundings<F>, disk: &Path, disk_bytes: u64, mode: OpenMode) -> Result<Option<Self>> {
        let path = names::changes(disk);
        if !names::fits(&path) {
            return Ok(None);
        }
        // It has the owner of the disk, for whom others may make it.
        let opened = around.files.open_own(&path, mode, Some(disk)).await?;
        let Some(store) = opened.map(Arc::new) else { return Ok(None) };
        let is_read_only = mode == OpenMode::ReadOnly;
        let bytes = Segments::zeroed(store.len_bytes().min(2 * COPY_BYTES as u64) as usize);
        if !bytes.is_empty() {
            store.read_at(StoreOffset(0), &bytes, Via::Cached).await?;
        }
        let (header, is_damaged) = match Header::of_file(&bytes.to_vec()) {
            Ok(header) => (header, false),
            // Its making was cut off, so there was never a checkpoint.
            Err(Unreadable::Damaged) if store.len_bytes() < 2 * COPY_BYTES as u64 => {
                drop(store);
                if !is_read_only {
                    around.files.remove(&path).await?;
                }
                return Ok(None);
            }
            Err(Unreadable::Damaged) => (new_header(disk_bytes, Grain::default()), true),
            Err(Unreadable::Version(version)) => return Err(newer(&path, version)),
        };
        let state = Mutex::new(State { is_damaged, ..State::new(header) });
        let giving = Arc::new(Giving::new(&around, &path, store.clone()));
        Ok(Some(Self { around, path, store, state, giving, is_read_only }))
    }

    /// Makes the file of a disk that has none, and whose image is as `found`. It has no checkpoint yet.
    ///
    /// # Errors
    /// `Unsupported` when its name would be too long; the system's. Nothing is left then.
    pub async fn create(
        around: Surroundings<F>,
        disk: &Path,
        disk_bytes: u64,
        grain: Grain,
        found: Found,
    ) -> Result<Self> {
        let path = names::changes(disk);
        if !names::fits(&path) {
            let what = "the disk's name is too long for a file of changed blocks beside it";
            return Err(Error::new(ErrorKind::Unsupported, what).at_path(disk).hint("rename it"));
        }
        let store = Arc::new(around.files.create(&path, 0).await?);
        let (Found { stamp, mount_id, .. }, id) = (found, around.env.random_16());
        let header = Header { stamp, mount_id, id, ..new_header(disk_bytes, grain) };
        let state = Mutex::new(State::new(header));
        let giving = Arc::new(Giving::new(&around, &path, store.clone()));
        let changes = Self { around, path, store, state, giving, is_read_only: false };
        let mut state = changes.state.lock().await;
        let header = state.header.clone();
        let written = changes.write(&mut state, header).await;
        drop(state);
        if let Err(error) = written {
            let _ = changes.leave().await;
            return Err(error);
        }
        Ok(changes)
    }

    /// Takes up what the last process has left, and notes that bits may be set from now on.
    async fn recover(&self, disk_bytes: u64, found: Found) -> Result<()> {
        let mut state = self.state.lock().await;
        let left = state.header.clone();
        let boot_id = self.around.env.boot_id();
        if self.around.broken == Broken::BootBeforeBits {
            let early = Header { boot_id, ..left.clone() };
            self.write(&mut state, early).await?;
        }
        let mut header = self.take_all_up(&mut state, left, disk_bytes, found).await?;
        if !header.intervals.is_empty() {
            self.store.sync().await?;
        }
        state.tracked.iter().for_each(|tracked| tracked.clear_marks());
        // That its parents are others is known as long as it was not closed in order.
        header.set_stamp(found.stamp.with_parents_of(&header.stamp));
        header.mount_id = found.mount_id;
        for (interval, tracked) in header.intervals.iter_mut().zip(&state.tracked) {
            interval.settled = Some(tracked.bits().crc().await);
        }
        if let Some(last) = header.intervals.last_mut() {
            last.settled = None;
        }
        (header.boot_id, header.disk_bytes) = (boot_id, disk_bytes);
        if header.id == [0; 16] {
            header.id = self.around.env.random_16();
        }
        if state.is_damaged { Ok(()) } else { self.write(&mut state, header).await }
    }

    /// Takes up the bits of all intervals of `header`, which the last process has left. The result is what is known of them.
    async fn take_all_up(
        &self,
        state: &mut MutexGuard<'_, State<F::Store>>,
        mut header: Header,
        disk_bytes: u64,
        found: Found,
    ) -> Result<Header> {
        let is_same_mount = header.mount_id == found.mount_id && found.mount_id != 0;
        let is_same_boot = header.boot_id == self.around.env.boot_id() && is_same_mount;
        let was_closed = header.intervals.iter().all(|interval| interval.settled.is_some());
        let grain = header.grain;
        let block_bytes = u64::from(grain.block_bytes);
        for interval in &mut header.intervals {
            state.tracked.push(Arc::new(self.take_up(interval, grain, is_same_boot).await?));
            if disk_bytes < interval.covered_bytes {
                interval.covered_bytes = disk_bytes / block_bytes * block_bytes;
            }
        }
        let is_as_left = match was_closed {
            true => header.stamp == found.stamp,
            false => header.stamp.is_same_file(&found.stamp) && !found.is_written_behind,
        };
        state.is_as_left = is_as_left && was_closed;
        state.has_other_parents = !header.stamp.has_same_parents(&found.stamp);
        if !is_as_left {
            forget_last(&mut header);
        }
        Ok(header)
    }

    /// An interval as the last process has left it. One that is damaged counts as changed as a whole.
    async fn take_up(&self, interval: &mut Interval, grain: Grain, is_same_boot: bool) -> Result<Tracked<F::Store>> {
        if interval.place(grain).end > self.store.len_bytes() {
            // Its place in the file is gone, so it gets none.
            (interval.covered_bytes, interval.room_bytes, interval.settled) = (0, 0, Some(0));
            interval.offset_bytes = Header::first_free();
        }
        let tracked = self.map(interval, grain).await?;
        match interval.settled {
            Some(crc) if tracked.bits().crc().await != crc && self.around.broken != Broken::SettledEarly => {
                interval.covered_bytes = 0
            }
            None if !is_same_boot => tracked.expand_marks(),
            _ => {}
        }
        Ok(tracked)
    }

    /// Maps an interval, whose pages are in memory then. A request that sets a bit waits for storage only where the kernel has taken such a page
    /// away since, or lets the first store to it after a sync wait for the file system's journal. An interval that was in use when its process died
    /// is written anew, as the kernel forgets pages whose sync has failed.
    async fn map(&self, interval: &Interval, grain: Grain) -> Result<Tracked<F::Store>> {
        let place = interval.place(grain);
        let chunk = Segment::zeroed(CHUNK_BYTES);
        for at in place.clone().step_by(CHUNK_BYTES) {
            let part = Segments::from(chunk.slice(0..(place.end - at).min(CHUNK_BYTES as u64) as usize));
            self.store.read_at(StoreOffset(at), &part, Via::Cached).await?;
            if interval.settled.is_none() && !self.is_read_only {
                self.store.write_at(StoreOffset(at), &part, Via::Cached).await?;
            }
        }
        Tracked::map(self.store.clone(), interval, grain, self.giving.clone(), self.around.broken)
    }

    /// Makes `header` durable. After an error the file has the old one or the new one: both are true as long as requests go on to set bits
    /// as they did, and the header is not changed any more.
    async fn write(&self, state: &mut State<F::Store>, mut header: Header) -> Result<()> {
        self.check_usable(state)?;
        state.is_stuck = true;
        header.number = state.header.number + 1;
        let bytes = Segments::copied(&header.to_bytes());
        for copy in 0..2 {
            self.store.write_at(StoreOffset(copy * COPY_BYTES as u64), &bytes, Via::Cached).await?;
            self.store.sync().await?;
        }
        state.header = header;
        state.is_stuck = false;
        Ok(())
    }

    /// The file.
    pub fn store(&self) -> &F::Store {
        &self.store
    }

    /// Refuses to change a header that may be another one in the file.
    fn check_usable(&self, state: &State<F::Store>) -> Result<()> {
        if self.is_read_only {
            let error = Error::new(ErrorKind::ReadOnly, "the disk is open for reading only").at_path(&self.path);
            return Err(error.hint("its checkpoints stay as they are"));
        }
        let what = "the file of changed blocks could not be written before";
        let error = || Error::new(ErrorKind::Io, what).at_path(&self.path);
        match self.giving.loss() {
            Some(loss) if loss.is_removed => Err(error().caused_by(loss.why.clone()).hint("make a new checkpoint")),
            Some(loss) => Err(error().caused_by(loss.why.clone()).hint("serve the disk anew")),
            None if state.is_stuck => Err(error().hint("serve the disk anew")),
            None => Ok(()),
        }
    }

    /// Has requests to `node` set the bits of the last interval, if there is one. It is to be called before the first request that changes
    /// the disk.
    ///
    /// # Errors
    /// `Shutdown` when the disk is closed.
    pub async fn attach<G: Disk>(&self, node: &Node<G>) -> Result<()> {
        let state = self.state.lock().await;
        self.meet(node, state.tracked.last()).await
    }

    /// Has requests that begin from now on set the bits of `intervals`, and waits for all that began before.
    async fn meet<'a, G: Disk>(
        &self,
        node: &Node<G>,
        intervals: impl IntoIterator<Item = &'a Arc<Tracked<F::Store>>>,
    ) -> Result<()> {
        let intervals: Vec<_> = intervals.into_iter().cloned().collect();
        let has_some = !intervals.is_empty();
        let stage = Arc::new(Tracking { intervals, timer: self.around.timer.clone() });
        node.replace(Place::ChangeTracking, has_some.then_some(stage as Arc<dyn Stage>)).await
    }

    /// Makes a checkpoint: a moment while this call is under way.
    ///
    /// # Errors
    /// `Exists` when there is one of this name; `InvalidInput` for a name that cannot be kept, or when there are too many;
    /// `Exhausted` when their bits would make the file too large; `ReadOnly`; the system's. There is no new checkpoint then, but after an
    /// error of writing the file there may be one when the disk is opened next.
    pub async fn checkpoint<G: Disk>(&self, node: &Node<G>, name: &str) -> Result<()> {
        self.checkpoint_with(node, name, async || Ok(())).await
    }

    /// As [`Changes::checkpoint`], and `meanwhile` runs while requests set the bits of both intervals. If it exchanges the disk's graph, as a
    /// snapshot does, then the checkpoint serves the snapshot, too: what differs from it is marked as changed.
    ///
    /// Nobody else looks at these changed blocks while `meanwhile` runs: an image with bitmaps that are kept up ([`Keeper`]) must not be closed in it, for that
    /// would wait for ever.
    ///
    /// # Errors
    /// As there, and those of `meanwhile`.
    pub async fn checkpoint_with<G: Disk>(
        &self,
        node: &Node<G>,
        name: &str,
        meanwhile: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut state = self.state.lock().await;
        self.check_usable(&state)?;
        check_name(&state.header, name)?;
        let disk_bytes = node.size_bytes();
        let interval = self.new_interval(&state.header, name, disk_bytes).await?;
        let new = Arc::new(self.map(&interval, state.header.grain).await?);
        let old = state.tracked.last().cloned();
        if self.around.broken != Broken::CheckpointWithoutWait {
            self.meet(node, old.iter().chain([&new])).await?;
        }
        let mut header = state.header.clone();
        (header.disk_bytes, header.boot_id) = (disk_bytes, self.around.env.boot_id());
        header.intervals.push(interval);
        let is_ready = match meanwhile().await {
            Ok(()) if self.around.broken != Broken::CheckpointWithoutFlush => node.flush_once().await,
            other => other,
        };
        if let Err(error) = is_ready {
            self.meet(node, &old).await?;
            return Err(error);
        }
        self.write(&mut state, header).await?;
        state.is_damaged = false;
        state.tracked.push(new.clone());
        self.meet(node, [&new]).await?;
        if let Some(before) = state.header.intervals.len().checked_sub(2) {
            // The checkpoint is made. What cannot be settled now is at the next opening.
            drop(self.settle(&mut state, before).await);
        }
        Ok(())
    }

    /// An interval for a checkpoint `name`. Its place in the file holds durable zeroes.
    async fn new_interval(&self, header: &Header, name: &str, disk_bytes: u64) -> Result<Interval> {
        let mut interval = Interval {
            name: name.to_owned(),
            created_unix_s: self.around.env.now_unix_s(),
            offset_bytes: 0,
            covered_bytes: disk_bytes,
            room_bytes: disk_bytes,
            settled: None,
            is_bitmap: false,
        };
        let place = interval.place(header.grain);
        interval.offset_bytes = header.free_place(place.end - place.start);
        if !interval.fits(header.grain) {
            let what = format!("the file of changed blocks has no room for bits of {disk_bytes} bytes more");
            return Err(Error::new(ErrorKind::Exhausted, what).at_path(&self.path).hint("remove a checkpoint"));
        }
        let end = interval.place(header.grain).end;
        let zeroes = Segment::zeroed(CHUNK_BYTES);
        for at in (interval.offset_bytes..end).step_by(CHUNK_BYTES) {
            let part = zeroes.slice(0..(end - at).min(CHUNK_BYTES as u64) as usize);
            self.store.write_at(StoreOffset(at), &part.into(), Via::Cached).await?;
        }
        self.store.sync().await?;
        Ok(interval)
    }

    /// Notes that the bits of an interval are durable and that no request sets them any more, which must be so but for the sync. When that fails, tracking is
    /// given up.
    async fn settle(&self, state: &mut MutexGuard<'_, State<F::Store>>, number: usize) -> Result<()> {
        if self.around.broken != Broken::SettledEarly
            && let Err(error) = self.store.sync().await
        {
            // The kernel may give up the bits of a sync that has failed, and the next process would believe what is left.
            self.giving.up(&error).await;
            return Err(error);
        }
        let mut header = state.header.clone();
        let (interval, tracked) = (&mut header.intervals[number], &state.tracked[number]);
        let crc = tracked.bits().crc().await;
        if tracked.bits().is_lost() {
            interval.covered_bytes = 0;
        }
        interval.settled = Some(crc);
        self.write(state, header).await
    }

    /// Settles all intervals that are not: no request sets bits any more.
    async fn settle_all(&self, state: &mut MutexGuard<'_, State<F::Store>>, stamp: Stamp) -> Result<()> {
        if self.around.broken != Broken::SettledEarly {
            self.store.sync().await?;
        }
        let mut header = state.header.clone();
        let is_noted = !state.stays_behind;
        header.set_stamp(if is_noted { stamp } else { stamp.with_parents_of(&header.stamp) });
        for (interval, tracked) in header.intervals.iter_mut().zip(&state.tracked) {
            if tracked.is_lost() {
                interval.covered_bytes = 0;
            }
            if interval.settled.is_none() || tracked.is_lost() {
                interval.settled = Some(tracked.bits().crc().await);
            }
        }
        self.write(state, header).await
    }

    /// Gives a checkpoint another name, which no other one has.
    ///
    /// # Errors
    /// `NotFound`; `Exists`; the system's.
    pub async fn rename(&self, name: &str, to: &str) -> Result<()> {
        let mut state = self.state.lock().await;
        let number = find(&state.header, name)?;
        let mut header = state.header.clone();
        header.intervals.remove(number);
        check_name(&header, to)?;
        header = state.header.clone();
        header.intervals[number].name = to.to_owned();
        self.write(&mut state, header).await
    }

    /// Removes a checkpoint. What has changed since earlier ones stays known.
    ///
    /// # Errors
    /// `NotFound`; the system's.
    pub async fn remove<G: Disk>(&self, node: &Node<G>, name: &str) -> Result<()> {
        self.remove_for(node, name, None).await
    }

    /// Removes a checkpoint, and gives its name to the checkpoint `heir`: at every moment, and after every crash, there is one of that name.
    ///
    /// # Errors
    /// `NotFound` when one of them is not there; the system's.
    pub async fn replace<G: Disk>(&self, node: &Node<G>, name: &str, heir: &str) -> Result<()> {
        self.remove_for(node, name, Some(heir)).await
    }

    async fn remove_for<G: Disk>(&self, node: &Node<G>, name: &str, heir: Option<&str>) -> Result<()> {
        let mut state = self.state.lock().await;
        let number = find(&state.header, name)?;
        heir.map(|heir| find(&state.header, heir)).transpose()?;
        let is_last = number + 1 == state.header.intervals.len();
        if let Some(before) = number.checked_sub(1) {
            let mut header = state.header.clone();
            header.intervals[before].settled = None;
            header.boot_id = self.around.env.boot_id();
            self.write(&mut state, header).await?;
            let (into, from) = (state.tracked[before].clone(), state.tracked[number].clone());
            if is_last {
                into.clear_marks();
                self.meet(node, [&into, &from]).await?;
            }
            into.take_in(&from).await;
            self.store.sync().await?;
        }
        let mut header = state.header.clone();
        if let Some(heir) = heir {
            let heir = find(&header, heir)?;
            header.intervals[heir].name = name.to_owned();
        }
        let removed = header.intervals.remove(number);
        if let Some(before) = number.checked_sub(1) {
            let interval = &mut header.intervals[before];
            let is_lost = state.tracked[number].is_lost();
            interval.covered_bytes = if is_lost { 0 } else { interval.covered_bytes.min(removed.covered_bytes) };
            interval.settled = if is_last { None } else { Some(state.tracked[before].bits().crc().await) };
        }
        self.write(&mut state, header).await?;
        state.tracked.remove(number);
        if is_last { self.meet(node, state.tracked.last()).await } else { Ok(()) }
    }
}

/// So much of the file is read or zeroed at once.
const CHUNK_BYTES: usize = 1 << 20;

/// The header of a file that has no checkpoint.
fn new_header(disk_bytes: u64, grain: Grain) -> Header {
    let (boot_id, mount_id, stamp, intervals) = ([0; 16], 0, Stamp::default(), Vec::new());
    Header { number: 0, disk_bytes, boot_id, mount_id, stamp, grain, id: [0; 16], intervals }
}

/// Has everything count as changed since each checkpoint.
fn forget_last(header: &mut Header) {
    if let Some(last) = header.intervals.last_mut() {
        last.covered_bytes = 0;
    }
}

/// The number of the interval that begins with the checkpoint `name`.
fn find(header: &Header, name: &str) -> Result<usize> {
    let found = header.intervals.iter().position(|interval| interval.name == name);
    found.ok_or_else(|| {
        let names = header.intervals.iter().map(|interval| interval.name.as_str());
        let names: Vec<_> = names.filter(|name| !is_hidden(name)).collect();
        let there =
            if names.is_empty() { "there is none".to_owned() } else { format!("there are: {}", names.join(", ")) };
        Error::new(ErrorKind::NotFound, format!("the disk has no checkpoint {name:?}; {there}"))
    })
}

/// The names of checkpoints that no user makes or sees begin so.
const HIDDEN: char = '\u{1}';

/// True for the name of a checkpoint that no user makes or sees.
pub fn is_hidden(name: &str) -> bool {
    name.starts_with(HIDDEN)
}

fn check_name(header: &Header, name: &str) -> Result<()> {
    let refuse = |kind, what: String| Err(Error::new(kind, what));
    let shown = name.strip_prefix(HIDDEN).unwrap_or(name);
    if shown.is_empty() || name.len() > LONGEST_NAME_BYTES || shown.chars().any(char::is_control) {
        let what = format!(
            "{name:?} cannot be the name of a checkpoint: it has 1 to {LONGEST_NAME_BYTES} bytes, none a control character"
        );
        return refuse(ErrorKind::InvalidInput, what);
    }
    if find(header, name).is_ok() {
        return refuse(ErrorKind::Exists, format!("the disk has a checkpoint {name:?} already"));
    }
    if header.intervals.len() == MOST_CHECKPOINTS {
        return refuse(
            ErrorKind::InvalidInput,
            format!("the disk has {MOST_CHECKPOINTS} checkpoints already: delete one first"),
        );
    }
    Ok(())
}

fn newer(path: &Path, version: u32) -> Error {
    let what = format!("the file of changed blocks has version {version}, which this program does not know");
    let error = Error::new(ErrorKind::Unsupported, what).at_path(path);
    error.hint("use the program that has written it, or remove the file: then the disk has no checkpoints")
}
