//! [`Tracked`]: the bits and marks of one interval while the disk is open, and [`Tracking`], the stage that sets them.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use spile_core::{Error, ErrorKind, Extent, Io, Op, Result, Segment, Store, StoreOffset, Timer, yield_now};
use spile_node::{Pending, Stage};

use super::Broken;
use super::bits::{Bits, PART_BITS};
use super::header::{Grain, Interval};
use super::loss::Giving;

/// A guest's flush makes the bits durable when the last time is longer ago than this.
const CYCLE: Duration = Duration::from_secs(10);

/// The bits and marks of one interval. Requests set them while it is the last one, or about to be.
pub(super) struct Tracked<S> {
    store: Arc<S>,
    bits: Bits,
    marks: Bits,
    block_shift: u32,
    area_shift: u32,
    areas: Mutex<Areas>,
    /// When the bits were last made durable, on the clock of the timer.
    synced_ns: AtomicU64,
    giving: Arc<Giving>,
    broken: Broken,
}

/// What is known of the areas, by their numbers.
struct Areas {
    /// The mark is set, and durable.
    is_durable: Vec<bool>,
    /// A bit was set since the last cycle began.
    is_touched: Vec<bool>,
    /// So many wait until the mark of the area is durable.
    awaited: Vec<u32>,
}

impl<S: Store> Tracked<S> {
    /// The bits of `interval`, whose place in the file has its space.
    ///
    /// # Errors
    /// As [`Store::map`].
    pub fn map(store: Arc<S>, interval: &Interval, grain: Grain, giving: Arc<Giving>, broken: Broken) -> Result<Self> {
        let (at, marks_bytes) = (interval.offset_bytes, interval.marks_bytes(grain));
        let map = |at, len| if len == 0 { Ok(Segment::zeroed(0)) } else { store.map(StoreOffset(at), len as usize) };
        let bits = map(at + marks_bytes, interval.bits_bytes(grain))?;
        let marks = map(at, marks_bytes)?;
        let count = interval.areas(grain) as usize;
        let areas = vec![false; count];
        Ok(Self {
            store,
            bits: Bits::new(bits, interval.blocks(grain)),
            marks: Bits::new(marks, interval.areas(grain)),
            block_shift: grain.block_bytes.ilog2(),
            area_shift: grain.area_bytes.ilog2(),
            areas: Mutex::new(Areas { is_durable: areas.clone(), is_touched: areas, awaited: vec![0; count] }),
            synced_ns: AtomicU64::new(0),
            giving,
            broken,
        })
    }

    pub fn bits(&self) -> &Bits {
        &self.bits
    }

    /// True when the bits do not tell what has changed.
    pub fn is_lost(&self) -> bool {
        self.has_lost_memory() || self.giving.has_begun()
    }

    fn areas(&self) -> MutexGuard<'_, Areas> {
        self.areas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The blocks that `extent` has a part of.
    fn blocks_of(&self, extent: Extent) -> Range<u64> {
        let end = extent.offset.0 + extent.len_bytes;
        let size = 1u64 << self.block_shift;
        self.bits.clip(extent.offset.0 >> self.block_shift..end.div_ceil(size))
    }

    /// The areas that `blocks` have a part of.
    fn areas_of(&self, blocks: &Range<u64>) -> Range<u64> {
        let shift = self.area_shift - self.block_shift;
        blocks.start >> shift..(blocks.end + (1 << shift) - 1) >> shift
    }

    /// True when the bits of `extent` are set already.
    #[inline]
    fn has_set(&self, extent: Extent) -> bool {
        self.bits.all_set(self.blocks_of(extent))
    }

    /// Sets the bits of `extent`, without marks, in an interval that is not in the header yet: whoever calls this syncs them before it is.
    pub fn set_unused(&self, extent: Extent) {
        let _areas = self.areas();
        self.bits.set(self.blocks_of(extent));
    }

    /// Sets the bits of `extent` if that can be done at once.
    #[inline]
    fn try_set(&self, extent: Extent) -> bool {
        self.has_set(extent) || self.try_set_new(self.blocks_of(extent))
    }

    /// Sets bits whose areas all have durable marks; else nothing. Once tracking was given up, no bit matters.
    fn try_set_new(&self, blocks: Range<u64>) -> bool {
        if self.giving.loss().is_some() {
            return true;
        }
        let mut areas = self.areas();
        let concerned = self.areas_of(&blocks);
        if !concerned.clone().all(|area| areas.is_durable[area as usize]) {
            return false;
        }
        concerned.for_each(|area| areas.is_touched[area as usize] = true);
        self.bits.set(blocks);
        !self.has_lost_memory()
    }

    /// True when the memory of bits or marks is no part of the file any more: what is set there is seen by nobody.
    fn has_lost_memory(&self) -> bool {
        self.bits.is_lost() || self.marks.is_lost()
    }

    async fn give_up_memory(&self) {
        let what = "the memory of changed blocks is no part of their file any more: the file was cut short, or its storage fails";
        self.giving.up(&Error::new(ErrorKind::Io, what)).await;
    }

    /// Sets the bits of `extent` once the marks of its areas are durable. When they cannot become that, tracking is given up.
    async fn set(&self, extent: Extent) {
        let blocks = self.blocks_of(extent);
        if self.giving.loss().is_some() {
            return;
        }
        if self.has_lost_memory() {
            return self.give_up_memory().await;
        }
        if self.bits.all_set(blocks.clone()) {
            return;
        }
        match self.set_marked(&[blocks]).await {
            Err(error) => self.giving.up(&error).await,
            Ok(()) if self.has_lost_memory() => self.give_up_memory().await,
            Ok(()) => {}
        }
    }

    /// Sets the bits of all `extents` as requests do, which may set others meanwhile. What needs marks shares one sync. From then on a power cut does not
    /// undo it.
    ///
    /// # Errors
    /// Those of a sync.
    pub async fn set_runs(&self, extents: &[Extent]) -> Result<()> {
        let unset = extents.iter().filter(|extent| !extent.is_empty() && !self.try_set(**extent));
        let unset: Vec<_> = unset.map(|extent| self.blocks_of(*extent)).collect();
        if unset.is_empty() { Ok(()) } else { self.set_marked(&unset).await }
    }

    /// Sets the bits of all `runs` of blocks once the marks of their areas are durable.
    ///
    /// # Errors
    /// Those of a sync. No bit is set then.
    async fn set_marked(&self, runs: &[Range<u64>]) -> Result<()> {
        let concerned = || runs.iter().flat_map(|blocks| self.areas_of(blocks));
        // All of them are awaited, so that no cycle clears one meanwhile.
        {
            let mut areas = self.areas();
            for area in concerned() {
                self.marks.set(area..area + 1);
                areas.awaited[area as usize] += 1;
            }
        }
        let synced = match self.broken {
            Broken::MarkNotDurable => Ok(()),
            _ => self.store.sync().await,
        };
        if synced.is_ok() {
            self.set_in_parts(runs).await;
        }
        let mut areas = self.areas();
        for area in concerned() {
            areas.awaited[area as usize] -= 1;
            if synced.is_ok() {
                areas.is_durable[area as usize] = true;
                areas.is_touched[area as usize] = true;
            }
        }
        synced
    }

    /// Sets the bits of all `runs`. No request waits for more than a part of them.
    async fn set_in_parts(&self, runs: &[Range<u64>]) {
        for Range { start, end } in runs.iter().cloned() {
            for at in (start..end).step_by(PART_BITS as usize) {
                if at > start {
                    yield_now().await;
                }
                let _areas = self.areas();
                self.bits.set(at..end.min(at + PART_BITS));
            }
        }
    }

    /// Has the marks of all areas be durable, so that no request waits for one until the next cycle but one begins. It is to be called before requests set
    /// bits.
    ///
    /// # Errors
    /// Those of a sync.
    pub async fn mark_everywhere(&self, now_ns: u64) -> Result<()> {
        self.marks.set(0..self.marks.count());
        self.store.sync().await?;
        self.areas().is_durable.fill(true);
        self.synced_ns.store(now_ns, Relaxed);
        Ok(())
    }

    /// True when the bits are to be made durable. The caller that gets this answer does it.
    fn begins_cycle(&self, now_ns: u64) -> bool {
        let last = self.synced_ns.load(Relaxed);
        let is_due = now_ns.saturating_sub(last) >= CYCLE.as_nanos() as u64;
        is_due && self.synced_ns.compare_exchange(last, now_ns, Relaxed, Relaxed).is_ok()
    }

    /// Makes the bits durable, and clears the marks of areas in which none was set since the last cycle. When the bits cannot be made durable, tracking is
    /// given up.
    pub async fn cycle(&self) {
        let retired = self.retire();
        if self.broken != Broken::MarksClearedEarly
            && let Err(error) = self.store.sync().await
        {
            // The kernel may give up the bits of a sync that has failed, and would then show old ones.
            return self.giving.up(&error).await;
        }
        // A request that needs one of these marks meanwhile has begun to wait for it, and keeps it.
        let areas = self.areas();
        for area in retired {
            if !areas.is_durable[area as usize] && areas.awaited[area as usize] == 0 {
                self.marks.clear(area..area + 1);
            }
        }
    }

    /// From now on no bit is set in the areas that were not touched since the last cycle, unless their marks become durable anew.
    fn retire(&self) -> Vec<u64> {
        let mut areas = self.areas();
        let Areas { is_durable, is_touched, .. } = &mut *areas;
        let mut retired = Vec::new();
        for (area, (is_durable, is_touched)) in is_durable.iter_mut().zip(is_touched).enumerate() {
            let was_touched = std::mem::take(is_touched) && self.broken != Broken::MarksClearedEarly;
            if *is_durable && !was_touched {
                *is_durable = false;
                retired.push(area as u64);
            }
        }
        retired
    }

    /// Sets the bits that `other` has set, and those that it does not have. They are not durable then. Requests that set bits meanwhile set them
    /// here, too.
    pub async fn take_in(&self, other: &Self) {
        for start in (0..self.bits.count()).step_by(PART_BITS as usize) {
            {
                let _areas = self.areas();
                self.bits.or(&other.bits, start..start + PART_BITS);
            }
            yield_now().await;
        }
    }

    /// After a power cut: all blocks of areas that are marked have changed.
    pub fn expand_marks(&self) {
        let per_area = 1 << (self.area_shift - self.block_shift);
        for area in self.marks.ones() {
            self.bits.set(self.bits.clip(area * per_area..(area + 1) * per_area));
        }
    }

    /// Clears all marks. No request may set bits meanwhile, and all bits are durable.
    pub fn clear_marks(&self) {
        let mut areas = self.areas();
        areas.is_durable.fill(false);
        areas.is_touched.fill(false);
        self.marks.clear(0..self.marks.count());
    }
}

/// The stage at [`Place::ChangeTracking`](spile_node::Place::ChangeTracking). It has one interval; while a checkpoint is made or removed, two, and each
/// request sets the bits of both.
pub(super) struct Tracking<S> {
    pub intervals: Vec<Arc<Tracked<S>>>,
    pub timer: Arc<dyn Timer>,
}

impl<S: Store> Tracking<S> {
    async fn set(&self, extent: Extent) -> Result<()> {
        for interval in &self.intervals {
            interval.set(extent).await;
        }
        Ok(())
    }

    fn bits_come_late(&self) -> bool {
        self.intervals.iter().any(|interval| interval.broken == Broken::BitAfterData)
    }

    async fn cycle(&self) {
        for interval in &self.intervals {
            interval.cycle().await;
        }
    }
}

impl<S: Store> Stage for Tracking<S> {
    fn passes(&self, io: &Io<'_>) -> bool {
        match io.op {
            // The bits are made durable now and then, after a flush.
            Op::Flush => false,
            op if op.changes_data() => {
                !self.bits_come_late() && self.intervals.iter().all(|interval| interval.has_set(io.extent))
            }
            _ => true,
        }
    }

    fn before<'a>(&'a self, io: Io<'a>) -> Option<Pending<'a>> {
        if !io.op.changes_data() || self.bits_come_late() {
            return None;
        }
        let mut is_done = true;
        for interval in &self.intervals {
            is_done &= interval.try_set(io.extent);
        }
        if is_done { None } else { Some(Box::pin(self.set(io.extent))) }
    }

    fn after<'a>(&'a self, io: Io<'a>, result: &Result<()>) -> Option<Pending<'a>> {
        if io.op.changes_data() && self.bits_come_late() {
            return Some(Box::pin(self.set(io.extent)));
        }
        if io.op != Op::Flush || result.is_err() {
            return None;
        }
        let now_ns = self.timer.now_ns();
        let mut is_due = false;
        for interval in &self.intervals {
            is_due |= interval.begins_cycle(now_ns);
        }
        is_due.then(|| -> Pending<'a> {
            Box::pin(async {
                self.cycle().await;
                Ok(())
            })
        })
    }
}
