//! [`Mover`]: moves what a layer has into its parent, one batch after the other.
//!
//! While one batch is copied, the one before is made durable in the parent and given up by the layer, so the storage has always something
//! to do.
//!
//! The layer's file will be removed, and its space with it. To give back a piece of it before that takes many file systems long. So it does that
//! only while the files of the layer and of its parent together take more than before, by [`Sizes::held_bytes`](crate::Sizes). Then it gives
//! the space of a batch back once no reader is left that could want it, some batches later: at most four batches take space in two places.
//! All requests to the file wait while a piece of it is given back, so that is done bit by bit ([`Portion`]), and never in a flush.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join, join_all};
use spile_core::{Disk, Error, ErrorKind, Extent, Files, Result};
use spile_image::layer::{GIVEN_BACK_A_FLUSH, GivenBack};
use spile_image::{Broken, Sinking};
use spile_node::Aligned;

use super::portion::Portion;
use crate::lanes::{A_TURN, COUNTED_AT_ONCE, Lane, Lanes};
use crate::work::{GraphOf, Work};

/// The units of a batch are together at most so many times as long as what is copied of them.
const UNITS_PER_BATCH: u64 = 4;

/// So many units are looked at before the first of them is moved.
const WINDOW: usize = 64 << 10;

/// A batch takes about so long at most: what a kill makes a merge do again is the batch that is copied and the one that is given up. A unit, the
/// least that a layer gives up, may take longer.
const LONGEST_BATCH: Duration = Duration::from_millis(400);

/// So many flushes have the layer's file give back what it holds, or much of it: the first may have to wait for readers.
const FLUSHES_FOR_SPACE: u32 = 4;

/// So many portions are given back before somebody looks again whether that is enough.
const GIVEN_BACK_BETWEEN_LOOKS: u32 = 16;
/// A rest beside guests is so many times as long as the portion before it.
const REST: u32 = 2;
/// The longest rest after a portion: a file system that has hung for a second must not hang the merge for another one.
const LONGEST_REST: Duration = Duration::from_millis(50);

/// The files have at most so many bytes more than they may hold ([`Sizes::held_bytes`](crate::Sizes)) when the next batch begins although a
/// request to the layer does not end.
const MOST_BESIDE_READERS_BYTES: u64 = 16 << 20;
/// So long a merge waits at most until it looks again whether such requests have ended.
const LONGEST_WAIT: Duration = Duration::from_millis(250);

/// A merge that moves data.
pub(super) struct Mover<'a, 'w, F: Files> {
    work: &'a Work<'w, F>,
    /// The graph whose leaf is merged.
    source: Arc<GraphOf<F>>,
    /// The parent with what is below it.
    target: Aligned<Arc<GraphOf<F>>>,
    /// When the leaf of the disk itself is merged.
    sinking: Option<Arc<Sinking<F::Store>>>,
    lanes: Lanes<'a, 'w, F>,
    done_bytes: Cell<u64>,
    /// How long the units are that are not copied yet.
    left_bytes: Cell<u64>,
    /// What the files of the layer and of its parent took when the merge began, in bytes; `None` when nobody can tell.
    taken_before_bytes: Cell<Option<u64>>,
    portion: Cell<Portion>,
    /// How many bytes were copied with the last batch, and how many nanoseconds that took.
    last_batch: Cell<Option<(u64, u64)>>,
    /// Why units of this pass stayed in the layer, where the parent had no space for them.
    stayed: RefCell<Option<Error>>,
}

/// Units that are moved together.
#[derive(Default)]
struct Batch {
    units: Vec<Extent>,
    /// How many changes of guests had failed before these units were copied.
    failures: u64,
}

impl<'a, 'w, F: Files> Mover<'a, 'w, F> {
    pub(super) fn new(
        work: &'a Work<'w, F>,
        source: Arc<GraphOf<F>>,
        target: Arc<GraphOf<F>>,
        sinking: Option<Arc<Sinking<F::Store>>>,
    ) -> Self {
        let (target, lanes) = (Aligned::new(target), Lanes::new(work));
        let (done_bytes, left_bytes, taken_before_bytes, portion, last_batch, stayed) = <_>::default();
        Self {
            work,
            source,
            target,
            sinking,
            lanes,
            done_bytes,
            left_bytes,
            taken_before_bytes,
            portion,
            last_batch,
            stayed,
        }
    }

    fn whole(&self) -> Extent {
        Extent::from_range(0..self.source.size_bytes())
    }

    /// The units that the layer has from `from` on, [`WINDOW`] at most, in the order in which they lie in its file: what lies side by side is
    /// read together, and its space is given back together. A large disk has millions of units, and guests are served between some
    /// thousand of them.
    async fn window(&self, from: u64) -> Result<Vec<Extent>> {
        let (mut units, mut at, end) = (Vec::new(), from, self.whole().end());
        while units.len() < WINDOW
            && at < end
            && let Some(held) = self.source.next_own(Extent::from_range(at..end)).await?
        {
            let unit = self.source.unit_of(held);
            at = unit.end();
            units.push((self.source.own_offset(held), unit));
            if (units.len() as u64).is_multiple_of(COUNTED_AT_ONCE) {
                self.work.timer.sleep(A_TURN).await;
            }
        }
        units.sort_unstable_by_key(|(offset, unit)| (*offset, unit.start()));
        Ok(units.into_iter().map(|(_, unit)| unit).collect())
    }

    /// How many bytes to copy with the next batch: [`Sizes::batch_bytes`](crate::Sizes), and fewer where they would take longer than
    /// [`LONGEST_BATCH`], because the job has a low rate or leaves the storage to guests.
    fn batch_bytes(&self) -> u64 {
        let limit = self.work.job.wishes().limit_bytes_per_s;
        let (bytes, took_ns) = match (limit, self.last_batch.get()) {
            (Some(limit), _) => (limit, 1_000_000_000),
            (None, Some(last)) => last,
            (None, None) => return self.work.sizes.batch_bytes,
        };
        let bytes = u128::from(bytes) * LONGEST_BATCH.as_nanos() / u128::from(took_ns.max(1));
        bytes.min(self.work.sizes.batch_bytes.into()) as u64
    }

    /// How many of `units`, the next ones, make a batch: so many that about [`Mover::batch_bytes`] are copied. Most units are not full, and each
    /// batch costs syncs.
    async fn count_of_batch(&self, units: &[Extent]) -> Result<usize> {
        let most_bytes = self.batch_bytes();
        let mut len_bytes = 0;
        let candidates = units.iter().take(GIVEN_BACK_A_FLUSH).take_while(|unit| {
            let is_first = len_bytes == 0;
            len_bytes += unit.len_bytes;
            is_first || len_bytes <= most_bytes * UNITS_PER_BATCH
        });
        let held = join_all(candidates.map(|unit| self.source.own_bytes(*unit))).await;
        let (mut bytes, mut count) = (0, 0);
        for held_bytes in held {
            bytes += held_bytes?;
            count += usize::from(bytes <= most_bytes || count == 0);
        }
        Ok(count)
    }

    /// How many bytes the layer's units have in all.
    async fn units_bytes(&self) -> Result<u64> {
        let (mut total_bytes, mut at, end) = (0, 0, self.whole().end());
        for counted in 1_u64.. {
            let rest = Extent::from_range(at..end);
            let held = if at < end { self.source.next_own(rest).await? } else { None };
            let Some(unit) = held.map(|held| self.source.unit_of(held)) else { break };
            (total_bytes, at) = (total_bytes + unit.len_bytes, unit.end());
            if counted.is_multiple_of(COUNTED_AT_ONCE) {
                self.work.timer.sleep(A_TURN).await;
                // Whoever cancels or pauses the job does not wait until all is counted.
                self.work.job.go_on().await?;
            }
        }
        Ok(total_bytes)
    }

    /// Moves all that the layer has. Whoever goes on to use the layer afterwards has it hold its space no longer.
    pub(super) async fn run(&self) -> Result<()> {
        self.taken_before_bytes.set(self.taken_bytes().await);
        self.left_bytes.set(self.units_bytes().await?);
        self.tell();
        // A change may have allocated something behind the mover while the merge began.
        let mut done_before = self.done_bytes.get();
        while self.pass().await? {
            // What was moved makes room for what has stayed. When nothing was moved, nothing does.
            if let Some(no_space) = self.stayed.take()
                && self.done_bytes.get() == done_before
            {
                return Err(no_space);
            }
            done_before = self.done_bytes.get();
        }
        self.work.job.set_total(self.done_bytes.get());
        Ok(())
    }

    /// Moves all that the layer has, from the start of the disk to its end. False when there was nothing.
    async fn pass(&self) -> Result<bool> {
        let (mut from, mut copied, mut any) = (0, Batch::default(), false);
        loop {
            let window = self.window(from).await?;
            let Some(end) = window.iter().map(|unit| unit.end()).max() else { break };
            (from, any) = (end, true);
            let mut rest = &window[..];
            while !rest.is_empty() {
                let (units, later) = rest.split_at(self.count_of_batch(rest).await?);
                copied = self.step(copied, units.to_vec()).await?;
                rest = later;
            }
        }
        self.step(copied, Vec::new()).await?;
        Ok(any)
    }

    /// Tells how far the merge is. Units are not full: what is to be moved becomes less as they are looked at.
    fn tell(&self) {
        self.work.job.set_done(self.done_bytes.get());
        self.work.job.set_total(self.done_bytes.get() + self.left_bytes.get());
    }

    /// Copies `units`, and meanwhile has the layer give up the batch that was copied before. When something fails, both have come to
    /// their end.
    async fn step(&self, before: Batch, mut units: Vec<Extent>) -> Result<Batch> {
        if let Some(sinking) = &self.sinking {
            let mut both: Vec<_> = before.units.iter().chain(&units).copied().collect();
            both.sort_unstable_by_key(|unit| unit.start());
            self.work.put(self.source.sinking(sinking, both)).await?;
        }
        let (failures, begun_ns) = (self.failures(), self.work.timer.now_ns());
        let counted = self.counts();
        let copy = self.copy(&units, true);
        let (settled, copied) = match self.work.broken {
            Broken::ForgetBeforeSync => (self.settle(before).await, copy.await),
            _ => join(self.settle(before), copy).await,
        };
        settled?;
        let mut copied = copied;
        // Guests may take what is given back before the copy does.
        while let Err(error) = copied {
            if error.kind() != ErrorKind::NoSpace {
                return Err(error);
            }
            self.count(counted);
            copied = match self.give_back_for_want_of_space(error).await {
                Ok(()) => self.copy(&units, true).await,
                Err(error) if error.kind() == ErrorKind::NoSpace => {
                    units = self.copy_what_fits(&units, error).await?;
                    Ok(())
                }
                Err(error) => return Err(error),
            };
        }
        let copied_bytes = self.done_bytes.get() - counted.0;
        if copied_bytes > 0 {
            self.last_batch.set(Some((copied_bytes, self.work.timer.now_ns().saturating_sub(begun_ns))));
        }
        Ok(Batch { units, failures })
    }

    fn counts(&self) -> (u64, u64) {
        (self.done_bytes.get(), self.left_bytes.get())
    }

    fn count(&self, (done_bytes, left_bytes): (u64, u64)) {
        self.done_bytes.set(done_bytes);
        self.left_bytes.set(left_bytes);
    }

    /// Copies those of `units` that the parent takes without more space, and returns them. The others stay in the layer for another pass: what
    /// these give back may be enough for them.
    async fn copy_what_fits(&self, units: &[Extent], no_space: Error) -> Result<Vec<Extent>> {
        let mut fitting = Vec::new();
        for unit in units {
            let counted = self.counts();
            match self.copy(std::slice::from_ref(unit), true).await {
                Ok(()) => fitting.push(*unit),
                Err(error) if error.kind() == ErrorKind::NoSpace => self.count(counted),
                Err(error) => return Err(error),
            }
        }
        if fitting.len() < units.len() {
            self.stayed.replace(Some(no_space));
        }
        Ok(fitting)
    }

    /// Has the layer's file give back so much of what it holds that a batch finds space, which has found none. The error is `no_space` when it
    /// held nothing.
    async fn give_back_for_want_of_space(&self, no_space: Error) -> Result<()> {
        // A merge before this one may have left some.
        self.source.hold_own_space(true);
        let before = self.source.own_taken_bytes().await;
        let wanted_bytes = self.work.sizes.batch_bytes * 2;
        for _ in 0..FLUSHES_FOR_SPACE {
            self.source.flush_own().await?;
            while self.give_back_portion().await?.bytes > 0 {
                let now = self.source.own_taken_bytes().await;
                if now.zip(before).is_some_and(|(now, before)| now.saturating_add(wanted_bytes) <= before) {
                    return Ok(());
                }
            }
        }
        if self.source.own_taken_bytes().await < before { Ok(()) } else { Err(no_space) }
    }

    /// Makes a batch durable in the parent, and has the layer give it up.
    async fn settle(&self, mut batch: Batch) -> Result<()> {
        if batch.units.is_empty() {
            return Ok(());
        }
        loop {
            if self.work.broken != Broken::ForgetBeforeSync {
                self.target.flush().await?;
            }
            if self.forget(&batch).await? {
                break;
            }
            batch.failures = self.failures();
            self.copy(&batch.units, false).await?;
        }
        self.source.hold_own_space(true);
        // With this the layer's file may give back what nobody reads any more.
        self.source.flush_own().await?;
        let mut wait = Duration::from_millis(4);
        while self.give_back().await? {
            self.work.timer.sleep(wait).await;
            wait = (wait * 2).min(LONGEST_WAIT);
            self.work.job.go_on().await?;
            self.source.flush_own().await?;
        }
        match self.work.broken {
            Broken::ForgetBeforeSync => self.target.flush().await,
            _ => Ok(()),
        }
    }

    /// Has the layer's file give back what it need not hold, bit by bit. True when too much is left because a request to the layer does not
    /// end: it may hang in a store below.
    async fn give_back(&self) -> Result<bool> {
        loop {
            let mut left_bytes = self.excess_bytes().await;
            if left_bytes == 0 {
                return Ok(false);
            }
            // What the files take is asked now and then only.
            for _ in 0..GIVEN_BACK_BETWEEN_LOOKS {
                let given = self.give_back_portion().await?;
                if given.bytes == 0 {
                    let knows = self.taken_before_bytes.get().is_some();
                    return Ok(given.has_readers && knows && left_bytes > MOST_BESIDE_READERS_BYTES);
                }
                left_bytes = left_bytes.saturating_sub(given.bytes);
                if left_bytes == 0 {
                    break;
                }
            }
        }
    }

    /// Has the layer's file give back one portion. A rest follows while guests have requests, which wait for a portion: so they have most of
    /// the time.
    async fn give_back_portion(&self) -> Result<GivenBack> {
        self.work.job.go_on().await?;
        let (is_busy, mut portion) = (!self.lanes.is_quiet(), self.portion.get());
        let given = self.source.give_back_own(portion.next_bytes(is_busy), self.work.timer).await?;
        if given.bytes > 0 {
            portion.note(given.bytes, given.took);
            self.portion.set(portion);
            if is_busy {
                self.work.timer.sleep((given.took * REST).min(LONGEST_REST)).await;
            }
        }
        Ok(given)
    }

    /// What the files of the layer and of its parent take now, in bytes; `None` when nobody can tell.
    async fn taken_bytes(&self) -> Option<u64> {
        Some(self.source.own_taken_bytes().await? + self.target.inner().own_taken_bytes().await?)
    }

    /// How many bytes the layer's file is to give back now.
    async fn excess_bytes(&self) -> u64 {
        match (self.taken_before_bytes.get(), self.taken_bytes().await) {
            (Some(before), Some(now)) => now.saturating_sub(before + self.work.sizes.held_bytes),
            _ => u64::MAX,
        }
    }

    fn failures(&self) -> u64 {
        self.sinking.as_ref().map_or(0, |sinking| sinking.failures())
    }

    /// Copies `units`, in as many lanes as guests leave room for. `counts`: they were not copied before.
    async fn copy(&self, units: &[Extent], counts: bool) -> Result<()> {
        let pieces = RefCell::new(Pieces { units: units.iter(), unit: Extent::from_range(0..0) });
        let step = async |lane: &Lane<'_, '_, F>| {
            let next = pieces.borrow_mut().next(lane.piece_bytes());
            let Some(piece) = next else { return Ok(false) };
            let copy = async {
                let _alone = match &self.sinking {
                    Some(sinking) if self.work.broken != Broken::CopyWithoutLock => {
                        Some(sinking.hold(range(piece)).await)
                    }
                    _ => None,
                };
                self.source.copy_own(piece, &self.target, lane.buffer()).await
            };
            let mut copied_bytes = 0;
            let copy = async {
                copied_bytes = copy.await?;
                Ok(copied_bytes)
            };
            lane.piece(copy).await?;
            if counts {
                self.done_bytes.set(self.done_bytes.get() + copied_bytes);
                self.left_bytes.set(self.left_bytes.get().saturating_sub(piece.len_bytes));
                self.tell();
            }
            Ok(true)
        };
        self.lanes.run(step).await
    }

    /// Has the layer give up the units of `batch`, whose copies are durable. False when a guest's change has failed since they were
    /// copied: then the copies of the units that are left may be wrong.
    async fn forget(&self, batch: &Batch) -> Result<bool> {
        for unit in &batch.units {
            let _alone = match &self.sinking {
                Some(sinking) => Some(sinking.hold(range(*unit)).await),
                None => None,
            };
            if self.failures() != batch.failures {
                return Ok(false);
            }
            self.source.forget_own(*unit).await?;
        }
        Ok(true)
    }
}

/// Cuts units into pieces.
struct Pieces<'a> {
    units: std::slice::Iter<'a, Extent>,
    /// What is left of the unit that is cut.
    unit: Extent,
}

impl Pieces<'_> {
    /// The next piece, `most_bytes` long at most.
    fn next(&mut self, most_bytes: u64) -> Option<Extent> {
        if self.unit.is_empty() {
            self.unit = *self.units.next()?;
        }
        let (start, end) = (self.unit.start(), self.unit.end());
        let cut = end.min(start + most_bytes);
        self.unit = Extent::from_range(cut..end);
        Some(Extent::from_range(start..cut))
    }
}

fn range(extent: Extent) -> Range<u64> {
    extent.start()..extent.end()
}
