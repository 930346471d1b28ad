//! [`Saver`]: keeps what a disk held at a point in time from the requests that come after it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_lock::RwLock;
use event_listener::Event;
use futures_util::future::{Either, select};
use spile_core::{
    Disk, Env, Error, ErrorKind, Extent, Io, Result, Segment, Segments, Store, StoreOffset, Timer, Via, format_size,
};
use spile_node::{Node, Pending, Stage};

use super::{Around, Broken, Room};
use crate::changes::bits::Bits;
use crate::work::{MOST_GRAIN_BYTES, grain_bytes};

/// So many bytes at most are saved at once.
const SAVE_BYTES: u64 = 1 << 20;
/// So many saves of one request are under way at once.
const SAVES_AT_ONCE: usize = 4;
/// So much is saved before somebody looks again how much room there is.
const LOOK_BYTES: u64 = 16 << 20;
/// A save that takes longer has the backup fail, so that the guest goes on.
const PATIENCE: Duration = Duration::from_secs(20);

/// Saves what requests are about to change, unit by unit. See [`super`].
pub(super) struct Saver<S, G: Disk> {
    /// Not kept alive: a backup whose target hangs must not keep the disk's files open.
    node: Weak<Node<G>>,
    /// None once it is closed: that waits for whoever just reads or writes it.
    fleece: RwLock<Option<S>>,
    limit_bytes: u64,
    room: Room,
    unit_bytes: u64,
    most_kept_bytes: u64,
    /// The size of the disk at the point in time.
    size_bytes: u64,
    env: Arc<dyn Env>,
    timer: Arc<dyn Timer>,
    broken: Broken,
    /// Requests may change these units: they are saved, or the backup has read them. It is looked at without the lock.
    clear: Bits,
    /// Nothing is saved any more.
    is_over: AtomicBool,
    state: Mutex<State>,
    /// A unit became clear, or nothing is saved any more.
    changed: Event,
}

struct State {
    /// The units that were saved and that the backup has not read. They are clear.
    saved: Bits,
    /// The units of which the fleece has bytes. Saved units that are not here hold zeroes.
    held: Bits,
    held_bytes: u64,
    /// What is saved and not written to the fleece yet, by its first unit.
    kept: BTreeMap<u64, Kept>,
    kept_bytes: u64,
    /// The fleece may hold so much before somebody has to look again how much room its file system has.
    room_bytes: u64,
    /// What is being saved now.
    saving: Vec<Range<u64>>,
    failure: Option<Error>,
}

/// Saved units in memory.
struct Kept {
    units: Range<u64>,
    bytes: Segments,
}

impl State {
    /// Where the unit is in memory: the save that has it.
    fn kept(&self, unit: u64) -> Option<&Kept> {
        self.kept.range(..=unit).next_back().map(|(_, kept)| kept).filter(|kept| kept.units.contains(&unit))
    }
}

/// What a request has to do before it may go on.
enum Next {
    Save(Range<u64>),
    Wait,
    GoOn,
}

fn bits(count: u64) -> Bits {
    Bits::new(Segment::zeroed(count.div_ceil(64).max(1) as usize * 8), count)
}

impl<S: Store, G: Disk> Saver<S, G> {
    /// A saver for the disk `node`, of which nothing is read yet. It keeps what it saves in `fleece`.
    pub fn new(node: &Arc<Node<G>>, fleece: S, limit_bytes: u64, room: Room, around: &Around) -> Arc<Self> {
        let size_bytes = node.size_bytes();
        let unit_bytes = around.unit_bytes.unwrap_or_else(|| grain_bytes(size_bytes));
        let units = size_bytes.div_ceil(unit_bytes);
        let state = State {
            saved: bits(units),
            held: bits(units),
            held_bytes: 0,
            kept: BTreeMap::new(),
            kept_bytes: 0,
            room_bytes: 0,
            saving: Vec::new(),
            failure: None,
        };
        Arc::new(Self {
            node: Arc::downgrade(node),
            fleece: RwLock::new(Some(fleece)),
            limit_bytes,
            room,
            unit_bytes,
            most_kept_bytes: around.most_kept_bytes,
            size_bytes,
            env: around.env.clone(),
            timer: around.timer.clone(),
            broken: around.broken,
            clear: bits(units),
            is_over: AtomicBool::new(false),
            state: Mutex::new(state),
            changed: Event::new(),
        })
    }

    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The disk, while somebody else has it open.
    pub fn node(&self) -> Result<Arc<Node<G>>> {
        self.node.upgrade().ok_or_else(|| Error::new(ErrorKind::Shutdown, "the disk is closed"))
    }

    /// The units that `extent` has a part of: none when it is empty, also inside of a unit, as at the end of a disk.
    fn units_of(&self, extent: Extent) -> Range<u64> {
        if extent.is_empty() {
            return 0..0;
        }
        self.clear.clip(extent.start() / self.unit_bytes..extent.end().div_ceil(self.unit_bytes))
    }

    /// The place of a unit on the disk, in bytes.
    pub fn offset_of(&self, unit: u64) -> u64 {
        unit * self.unit_bytes
    }

    /// The size of `units`, in bytes. The last unit of a disk counts as a whole one.
    fn bytes_of(&self, units: &Range<u64>) -> u64 {
        (units.end - units.start) * self.unit_bytes
    }

    /// The bytes of `units`, up to the end of the disk.
    fn extent_of(&self, units: &Range<u64>) -> Extent {
        Extent::from_range(self.offset_of(units.start)..self.offset_of(units.end).min(self.size_bytes))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Saves nothing any more, and lets all requests go on that wait.
    pub fn end(&self) {
        let _state = self.state();
        self.is_over.store(true, Ordering::SeqCst);
        self.changed.notify(usize::MAX);
    }

    /// Closes the fleece, which has no name: that frees its space. Whoever holds on to this, such as a copy whose target hangs, keeps no space.
    pub async fn free(&self) {
        drop(self.fleece.write().await.take());
    }

    /// As [`Saver::end`], because of `error`.
    pub fn fail(&self, error: Error) {
        self.state().failure.get_or_insert(error);
        self.end();
    }

    /// Why the backup has failed, if it has.
    ///
    /// # Errors
    /// Just that.
    pub fn check(&self) -> Result<()> {
        match &self.state().failure {
            Some(error) => Err(error.duplicate()),
            None if self.is_over.load(Ordering::SeqCst) => Err(ended()),
            None => Ok(()),
        }
    }

    /// Waits until the backup has failed.
    pub async fn failed(&self) {
        loop {
            let changed = self.changed.listen();
            if self.state().failure.is_some() {
                return;
            }
            changed.await;
        }
    }

    /// Bytes that the fleece holds now.
    pub fn held_bytes(&self) -> u64 {
        self.state().held_bytes
    }

    /// Waits until `units` are clear, and saves those that nobody else saves. A large request is many saves: its time begins anew
    /// whenever some more of it is saved.
    async fn make_clear(self: &Arc<Self>, units: Range<u64>) {
        let mut left = units;
        let mut patience = pin!(self.timer.sleep(PATIENCE));
        loop {
            let changed = self.changed.listen();
            match self.next(&left) {
                Next::GoOn => return,
                Next::Wait => {}
                Next::Save(claimed) => {
                    self.begin_save(claimed).await;
                    // Another one may begin beside it.
                    continue;
                }
            }
            if let Either::Right(_) = select(changed, patience.as_mut()).await {
                let what = format!("to save what a guest was about to change has taken {} s", PATIENCE.as_secs());
                return self
                    .fail(Error::new(ErrorKind::TimedOut, what).hint("put the fleece on faster storage: --fleece"));
            }
            let is_clear = |unit: &u64| self.clear.all_set(*unit..unit + 1);
            let done = left.clone().take_while(is_clear).count() as u64;
            if done > 0 {
                left.start += done;
                patience.set(self.timer.sleep(PATIENCE));
            }
        }
    }

    /// What is to be done for `units` now. Units that are to be saved are claimed.
    fn next(&self, units: &Range<u64>) -> Next {
        let mut state = self.state();
        if self.is_over.load(Ordering::SeqCst) {
            return Next::GoOn;
        }
        let own = state.saving.iter().filter(|saving| saving.start < units.end && units.start < saving.end).count();
        if own >= SAVES_AT_ONCE {
            return Next::Wait;
        }
        let is_saving = |unit: u64| state.saving.iter().any(|saving| saving.contains(&unit));
        let is_clear = |unit: u64| self.clear.all_set(unit..unit + 1);
        let Some(first) = units.clone().find(|unit| !is_clear(*unit) && !is_saving(*unit)) else {
            return if self.clear.all_set(units.clone()) { Next::GoOn } else { Next::Wait };
        };
        let most = self.wanted_end(&state, first, units.end).min(first + SAVE_BYTES / self.unit_bytes);
        let end = (first + 1..most).find(|unit| is_clear(*unit) || is_saving(*unit)).unwrap_or(most);
        state.saving.push(first..end);
        Next::Save(first..end)
    }

    /// Up to where units are saved from `first` on, for a request that ends with `end`. One that goes on where another one ended is likely to be followed
    /// by the next: what they all change is saved at once.
    fn wanted_end(&self, state: &State, first: u64, end: u64) -> u64 {
        let follows = first > 0 && state.saved.all_set(first - 1..first);
        let together = MOST_GRAIN_BYTES / self.unit_bytes;
        if follows { end.max((first / together + 1) * together).min(self.clear.count()) } else { end }
    }

    /// As [`Env::spawn`].
    pub fn spawn(&self, work: Pin<Box<dyn Future<Output = ()>>>) -> bool {
        self.env.spawn(work)
    }

    /// Saves `units` in a task of its own: it is polled to its end whatever becomes of the request.
    async fn begin_save(self: &Arc<Self>, units: Range<u64>) {
        let (saver, claimed) = (self.clone(), units.clone());
        if !self.env.spawn(Box::pin(async move { saver.save(claimed).await })) {
            self.save(units).await;
        }
    }

    async fn save(&self, units: Range<u64>) {
        let mut data = Vec::new();
        let (is_kept, written) = match self.read(&units, &mut data).await {
            Ok(bytes) => (self.keep(&units, &bytes), self.write_to_fleece(&units, &data, &bytes).await),
            Err(error) => (false, Err(error)),
        };
        let needless = {
            let mut state = self.state();
            if is_kept {
                state.kept.remove(&units.start);
                state.kept_bytes -= self.bytes_of(&units);
            }
            match written {
                Ok(()) if is_kept => {}
                Ok(()) => self.note_saved(&mut state, &units),
                // One that has ended cannot fail.
                Err(_) if self.is_over.load(Ordering::SeqCst) => {}
                Err(error) => {
                    state.failure.get_or_insert(error);
                    self.is_over.store(true, Ordering::SeqCst);
                }
            }
            state.saving.retain(|saving| *saving != units);
            // The backup may have read it meanwhile, from the disk or from memory.
            runs(data.into_iter().flatten().filter(|unit| !state.saved.all_set(*unit..unit + 1)))
        };
        self.changed.notify(usize::MAX);
        self.punch(needless).await;
    }

    /// Reads `units` from the disk. `data` are those that are not zero; the fleece has room for them.
    async fn read(&self, units: &Range<u64>, data: &mut Vec<Range<u64>>) -> Result<Segments> {
        let extent = self.extent_of(units);
        let bytes = Segments::zeroed(self.bytes_of(units) as usize);
        let into = bytes.slice(0..extent.len_bytes as usize);
        let node = self.node()?;
        let cannot = |error: Error| error.hint("what the disk held could not be saved before a guest changed it");
        node.look(async |graph| graph.execute(Io::read(extent, &into)).await).await.map_err(cannot)?;
        drop(node);
        let is_data = |unit: &u64| !self.unit_in(units, &bytes, *unit).is_zero();
        for run in runs(units.clone().filter(is_data)) {
            self.look_for_room(self.bytes_of(&run)).await?;
            self.take_room(&run)?;
            data.push(run);
        }
        Ok(bytes)
    }

    /// A unit in the `bytes` of several.
    fn unit_in(&self, units: &Range<u64>, bytes: &Segments, unit: u64) -> Segments {
        self.slice_of(units, bytes, &(unit..unit + 1))
    }

    /// The units `part` in the `bytes` of `units`.
    fn slice_of(&self, units: &Range<u64>, bytes: &Segments, part: &Range<u64>) -> Segments {
        let place = |unit: u64| ((unit - units.start) * self.unit_bytes) as usize;
        bytes.slice(place(part.start)..place(part.end))
    }

    /// Keeps what was read in memory until it is in the fleece, and lets requests go on. False when there is too much already.
    fn keep(&self, units: &Range<u64>, bytes: &Segments) -> bool {
        let mut state = self.state();
        let kept_bytes = state.kept_bytes + self.bytes_of(units);
        let is_kept = kept_bytes <= self.most_kept_bytes;
        if is_kept {
            state.kept_bytes = kept_bytes;
            state.kept.insert(units.start, Kept { units: units.clone(), bytes: bytes.clone() });
            self.note_saved(&mut state, units);
            state.saving.retain(|saving| saving != units);
        }
        drop(state);
        self.changed.notify(usize::MAX);
        is_kept
    }

    /// `units` are saved: requests may change them from now on.
    fn note_saved(&self, state: &mut State, units: &Range<u64>) {
        // The backup may have read some meanwhile.
        let unread = units.clone().filter(|unit| !self.clear.all_set(*unit..unit + 1));
        runs(unread).into_iter().for_each(|run| state.saved.set(run));
        self.clear.set(units.clone());
    }

    /// Writes the runs `data` of `units` to the fleece.
    async fn write_to_fleece(&self, units: &Range<u64>, data: &[Range<u64>], bytes: &Segments) -> Result<()> {
        for run in data {
            let bytes = self.slice_of(units, bytes, run);
            let fleece = self.fleece.read().await;
            let fleece = fleece.as_ref().ok_or_else(ended)?;
            fleece.write_at(StoreOffset(self.offset_of(run.start)), &bytes, Via::Direct).await.map_err(|error| {
                error.hint("what guests changed could not be kept for the backup; --fleece names another folder")
            })?;
        }
        Ok(())
    }

    /// Refuses to save `bytes` more where guests would lack the space: their disks may grow in the same file system.
    async fn look_for_room(&self, bytes: u64) -> Result<()> {
        let held_bytes = {
            let state = self.state();
            if state.held_bytes + bytes <= state.room_bytes {
                return Ok(());
            }
            state.held_bytes
        };
        let spare_bytes = (self.room)().await.unwrap_or(u64::MAX).min(LOOK_BYTES);
        if spare_bytes < bytes {
            let what = "the file system of the fleece is almost full, and the rest is left to guests";
            return Err(Error::new(ErrorKind::NoSpace, what).hint("--fleece names another folder; or a faster target"));
        }
        self.state().room_bytes = held_bytes + spare_bytes;
        Ok(())
    }

    /// Counts `units` as held by the fleece.
    fn take_room(&self, units: &Range<u64>) -> Result<()> {
        let mut state = self.state();
        let bytes = state.held_bytes + self.bytes_of(units);
        if bytes > self.limit_bytes {
            let what = format!(
                "guests have changed more than {} that was not copied yet: the limit of the fleece",
                format_size(self.limit_bytes)
            );
            return Err(Error::new(ErrorKind::NoSpace, what).hint("a larger --fleece-limit, or a faster target"));
        }
        state.held_bytes = bytes;
        state.held.set(units.clone());
        Ok(())
    }

    /// Takes the bytes of `extent`, which begins with a unit and ends with one or with the disk, as they were at the point in time. `read`
    /// is what the disk holds there now, read after the point in time. From now on requests may change these units, and their space in the
    /// fleece is free.
    pub async fn take(&self, extent: Extent, read: &Segments) -> Result<()> {
        let units = self.units_of(extent);
        let (mut in_memory, mut in_fleece) = (Vec::new(), Vec::new());
        let (saved, held): (Vec<_>, Vec<_>) = {
            let state = self.state();
            // A unit that is being saved was not changed yet: what was read is right.
            let saved = match self.broken {
                Broken::NotReadAgain => Vec::new(),
                _ => state.saved.ones_in(units.clone()).collect(),
            };
            let held: Vec<_> = saved.iter().copied().filter(|unit| state.held.all_set(*unit..unit + 1)).collect();
            for &unit in &held {
                match state.kept(unit).filter(|_| self.broken != Broken::FleeceTooEarly) {
                    Some(kept) => in_memory.push((unit, self.unit_in(&kept.units, &kept.bytes, unit))),
                    None => in_fleece.push(unit),
                }
            }
            self.clear.set(units.clone());
            (saved, held)
        };
        self.changed.notify(usize::MAX);
        self.check()?;
        let into = |run: &Range<u64>| {
            let part = self.extent_of(run);
            read.slice((part.start() - extent.start()) as usize..(part.end() - extent.start()) as usize)
        };
        runs(saved.into_iter()).iter().for_each(|run| into(run).fill(0));
        let copy = |run: &Range<u64>, bytes: &Segments| into(run).copy_from(&bytes.slice(0..into(run).len()));
        for run in runs(in_fleece.into_iter()) {
            let whole = Segments::zeroed(self.bytes_of(&run) as usize);
            let fleece = self.fleece.read().await;
            let fleece = fleece.as_ref().ok_or_else(ended)?;
            let from_fleece = fleece.read_at(StoreOffset(self.offset_of(run.start)), &whole, Via::Direct);
            from_fleece.await.map_err(|error| error.hint("what was saved of the disk cannot be read"))?;
            copy(&run, &whole);
        }
        in_memory.iter().for_each(|(unit, bytes)| copy(&(*unit..unit + 1), bytes));
        let held = runs(held.into_iter());
        self.state().saved.clear(units);
        self.punch(held).await;
        Ok(())
    }

    /// Says that the backup does not need `extent` any more, or not at all, but for units that were saved: their numbers are returned.
    pub fn pass_over(&self, extent: Extent) -> Vec<u64> {
        let units = self.units_of(extent);
        let state = self.state();
        let saved: Vec<u64> = state.saved.ones_in(units.clone()).collect();
        self.clear.set(units);
        drop(state);
        self.changed.notify(usize::MAX);
        saved
    }

    /// Frees the space of units that nobody reads any more.
    pub async fn forget(&self, units: impl Iterator<Item = u64>) {
        let held: Vec<u64> = {
            let state = self.state();
            let units = units.inspect(|unit| state.saved.clear(*unit..unit + 1));
            units.filter(|unit| state.held.all_set(*unit..unit + 1)).collect()
        };
        self.punch(runs(held.into_iter())).await;
    }

    async fn punch(&self, units: Vec<Range<u64>>) {
        for run in units {
            let fleece = self.fleece.read().await;
            let Some(fleece) = fleece.as_ref() else { return };
            let punched = fleece.punch_hole(StoreOffset(self.offset_of(run.start)), self.bytes_of(&run));
            // Where the space cannot be freed, the limit goes on counting it.
            if punched.await.is_ok() {
                let mut state = self.state();
                let freed = state.held.ones_in(run.clone()).count() as u64;
                state.held_bytes -= freed * self.unit_bytes;
                state.held.clear(run);
            }
        }
    }
}

fn ended() -> Error {
    Error::new(ErrorKind::Shutdown, "the backup was told to end")
}

/// The runs of numbers that follow each other.
fn runs(units: impl Iterator<Item = u64>) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for unit in units {
        match runs.last_mut() {
            Some(last) if last.end == unit => last.end += 1,
            _ => runs.push(unit..unit + 1),
        }
    }
    runs
}

/// The stage at [`Place::Backup`](spile_node::Place::Backup). It never fails a request.
pub(super) struct Saving<S, G: Disk>(pub Arc<Saver<S, G>>);

impl<S: Store, G: Disk> Saving<S, G> {
    fn clear<'a>(&'a self, io: Io<'a>) -> Option<Pending<'a>> {
        let Self(saver) = self;
        if !io.op.changes_data() || saver.is_over.load(Ordering::Relaxed) {
            return None;
        }
        let units = saver.units_of(io.extent);
        if saver.clear.all_set(units.clone()) {
            return None;
        }
        Some(Box::pin(async move {
            saver.make_clear(units).await;
            Ok(())
        }))
    }
}

impl<S: Store, G: Disk> Stage for Saving<S, G> {
    fn before<'a>(&'a self, io: Io<'a>) -> Option<Pending<'a>> {
        if self.0.broken == Broken::SavedLate { None } else { self.clear(io) }
    }

    fn after<'a>(&'a self, io: Io<'a>, result: &Result<()>) -> Option<Pending<'a>> {
        let _ = result;
        if self.0.broken == Broken::SavedLate { self.clear(io) } else { None }
    }
}
