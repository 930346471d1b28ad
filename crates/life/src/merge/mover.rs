//! [`Mover`]: moves what a layer has into its parent, one batch after the other.
//!
//! While one batch is copied, the one before is made durable in the parent and given up by the layer, so the storage has always something
//! to do. The layer's file gives the space back once no reader is left that could want it, some batches later: at most four batches take
//! space in two places.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;

use futures_util::future::{join, join_all};
use spile_core::{Disk, Extent, Files, Result};
use spile_image::{Broken, Sinking};
use spile_node::Aligned;

use crate::lanes::{A_TURN, COUNTED_AT_ONCE, Lane, Lanes};
use crate::work::{GraphOf, Work};

/// The units of a batch are together at most so many times as long as what is copied of them.
const UNITS_PER_BATCH: u64 = 4;

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
        Self { work, source, target, sinking, lanes, done_bytes: Cell::new(0) }
    }

    fn whole(&self) -> Extent {
        Extent::from_range(0..self.source.size_bytes())
    }

    /// The units that the layer has in `within`, until they are `most_bytes` long or longer.
    fn units(&self, within: Extent, most_bytes: u64) -> Vec<Extent> {
        let (mut units, mut bytes, mut at) = (Vec::new(), 0, within.start());
        while bytes < most_bytes
            && at < within.end()
            && let Some(held) = self.source.next_own(Extent::from_range(at..within.end()))
        {
            let unit = self.source.unit_of(held);
            (bytes, at) = (bytes + unit.len_bytes, unit.end());
            units.push(unit);
        }
        units
    }

    /// The units of the next batch, from `from` on: so many that about [`Sizes::batch_bytes`](crate::Sizes) are copied. Most units are not
    /// full, and each batch costs syncs.
    async fn next_units(&self, from: u64) -> Result<Vec<Extent>> {
        let most_bytes = self.work.sizes.batch_bytes;
        let mut units = self.units(Extent::from_range(from..self.whole().end()), most_bytes * UNITS_PER_BATCH);
        let held = join_all(units.iter().map(|unit| self.source.own_bytes(*unit))).await;
        let (mut bytes, mut count) = (0, 0);
        for held_bytes in held {
            bytes += held_bytes?;
            count += usize::from(bytes <= most_bytes || count == 0);
        }
        units.truncate(count);
        Ok(units)
    }

    /// How many bytes the layer has in all. A large disk has millions of units, and guests are served between some thousand of them.
    async fn total_bytes(&self) -> u64 {
        let (mut total_bytes, mut at, end) = (0, 0, self.whole().end());
        for counted in 1_u64.. {
            let held = (at < end).then(|| self.source.next_own(Extent::from_range(at..end))).flatten();
            let Some(unit) = held.map(|held| self.source.unit_of(held)) else { break };
            (total_bytes, at) = (total_bytes + unit.len_bytes, unit.end());
            if counted.is_multiple_of(COUNTED_AT_ONCE) {
                self.work.timer.sleep(A_TURN).await;
            }
        }
        total_bytes
    }

    /// Moves all that the layer has.
    pub(super) async fn run(&self) -> Result<()> {
        self.work.job.set_total(self.total_bytes().await);
        let (mut from, mut copied) = (0, Batch::default());
        loop {
            let units = self.next_units(from).await?;
            match units.last() {
                Some(last) => from = last.end(),
                // What a change has allocated behind the mover while the merge began.
                None if copied.units.is_empty() && from > 0 => {
                    from = 0;
                    continue;
                }
                None if copied.units.is_empty() => return Ok(()),
                None => {}
            }
            copied = self.step(copied, units).await?;
        }
    }

    /// Copies `units`, and meanwhile has the layer give up the batch that was copied before. When something fails, both have come to
    /// their end.
    async fn step(&self, before: Batch, units: Vec<Extent>) -> Result<Batch> {
        if let Some(sinking) = &self.sinking {
            let both = before.units.iter().chain(&units).copied().collect();
            self.work.put(self.source.sinking(sinking, both)).await?;
        }
        let failures = self.failures();
        let copy = self.copy(&units, true);
        let (settled, copied) = match self.work.broken {
            Broken::ForgetBeforeSync => (self.settle(before).await, copy.await),
            _ => join(self.settle(before), copy).await,
        };
        settled.and(copied)?;
        Ok(Batch { units, failures })
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
        // With this the layer's file gives the space back.
        self.source.flush_own().await?;
        match self.work.broken {
            Broken::ForgetBeforeSync => self.target.flush().await,
            _ => Ok(()),
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
            lane.piece(piece.len_bytes, copy).await?;
            if counts {
                self.done_bytes.set(self.done_bytes.get() + piece.len_bytes);
                self.work.job.set_done(self.done_bytes.get());
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
