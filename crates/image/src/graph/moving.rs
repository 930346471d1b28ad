//! What is being moved between the layers of a graph while requests run, and what a change must do because of that.
//!
//! # A leaf that sinks into its parent
//!
//! From the begin of such a merge the leaf takes nothing new: a change to a unit (a block) that the leaf lacks goes to the
//! parent. So the leaf only becomes smaller, and the merge ends whatever the guest does. The units that are being moved now are
//! the *batch*. These rules hold:
//!
//! 1. **Outside the batch a unit is in one place**: a change goes to the leaf if the leaf has something of the unit, else to the parent.
//!    Not so for parts of a unit: a change of one part may copy what lies below around it into the leaf, and would hide what another
//!    change writes there meanwhile. A change that began before the leaf sank may be copying so just now, and so may one that begins when
//!    it sinks no more: a change keeps such copies out of its unit while it looks who has that, and while it changes the parent.
//! 2. **A change to a unit in the batch goes to both**, so that the copy in the parent is right however often the guest writes.
//!    It holds its range alone meanwhile: two changes of one sector end in the same order in both places, and the copy of
//!    a piece waits for the changes of that piece only.
//! 3. **The leaf gives a unit up only after a sync of the parent** that began after the unit was copied.
//! 4. **A flush covers both.** It makes durable what the leaf has given up, together with what was written to the parent since:
//!    else old bytes of the leaf would hide the newer ones of the parent after a power cut.
//! 5. **A change that failed in one of the two places** has the batch copied anew before anything of it is given up.
//! 6. **A discard of a unit in the batch does nothing.** In the leaf alone it would show zeroes now and the parent's bytes later.
//!
//! A batch begins and ends with an exchange of the graph. What began under the graph before has ended when the first piece
//! is copied, so no older change is missed.
//!
//! # A leaf that is filled from its parents
//!
//! What the leaf lacks is copied into it piece by piece. A guest's change holds its range together with others, the copy of a
//! piece holds the piece alone: so no copy overwrites what a guest has written meanwhile.

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::future::join_all;
use spile_core::{Disk, Extent, Io, Result, Segments, Store, Timer, WriteZeroes};

use super::Graph;
use crate::layer::{GivenBack, Layer};
use crate::range_lock::{RangeGuard, RangeLock};

/// A rule that is broken on purpose, so that the simulator can prove that it would find that. Everywhere else it is `Nothing`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Broken {
    /// No rule.
    #[default]
    Nothing,
    /// A change to a unit in the batch goes to the leaf only.
    BatchInLeafOnly,
    /// A change goes to the parent when the leaf lacks its part, though it has other parts of the unit.
    PartsForUnits,
    /// A flush covers the leaf only.
    FlushOfLeafOnly,
    /// A change goes to the parent while an older one may copy what lies there into the leaf.
    CopiedMeanwhile,
    /// The leaf gives units up before the parent is synced.
    ForgetBeforeSync,
    /// The merged layer is removed before its child names another parent.
    RemoveBeforeNames,
    /// The parent of a merged layer takes its name before the layer's children name the parent.
    NameBeforeChildren,
    /// The merged layer loses its name before its parent gets that.
    NoNameBetween,
    /// The copy of a piece does not keep guests out of it.
    CopyWithoutLock,
    /// While a disk is moved, a block counts as copied from the moment on when it was read, and not from before.
    ClearAfterRead,
    /// While a disk is moved, a block is marked when a write to it begins, and not when it has ended.
    MarkBeforeWrite,
    /// A moved disk is handed over while requests to the old place are in flight.
    HandOverInFlight,
    /// A moved disk is handed over before all of it is durable at its new place.
    HandOverUnflushed,
    /// A move notes how far its copy is before that is durable.
    NotedBeforeFlush,
    /// From where on changes are noted moves forward before what has changed until then is copied, and durable.
    ForwardBeforeFlush,
    /// A move that goes on takes any file of the half's name for its half.
    AnyHalf,
    /// A move back takes the old image as it was left, whoever has written to it since.
    OldImageAsIs,
    /// A move with the chain leaves alone what the disk's own image has given up since it was copied.
    GivenUpLeftOut,
    /// Requests set the bits beside a disk's new image only from the next process on.
    CarriedLate,
    /// A move that goes on copies what it had not copied, and nothing of what has changed since.
    ChangesLeftOut,
    /// A moved disk gets its new name before its old one is gone.
    TwoNames,
    /// A moved disk loses its old name before a note says where it is.
    NotNoted,
    /// A moved disk loses its old name before the host that takes it in knows that it may have it.
    NotTold,
    /// A copy gets its name on another host before a note says that nothing is written to it any more.
    NamingNotNoted,
    /// A parent gets its name on another host before it is durable there.
    ParentUnflushed,
}

/// A leaf that sinks into its parent: what stays the same from batch to batch.
pub struct Sinking<S: Store> {
    /// The parent with what is below it, as a disk of its own.
    below: Arc<Graph<S>>,
    /// Changes of the batch hold their range alone, as does the copy of a piece.
    ranges: RangeLock,
    /// Changes that failed in the batch.
    failures: AtomicU64,
    broken: Broken,
}

impl<S: Store> Sinking<S> {
    /// The leaf of a graph is to sink into that of `below`, which is the rest of that graph.
    pub fn new(below: Arc<Graph<S>>, broken: Broken) -> Arc<Self> {
        // It takes writes from now on, over parents that nobody changes. When it becomes the disk's leaf, such writes are still in flight, and must
        // not wait for themselves.
        below.follows(&[]);
        Arc::new(Self { below, ranges: RangeLock::default(), failures: AtomicU64::new(0), broken })
    }

    /// The parent with what is below it.
    pub fn below(&self) -> &Arc<Graph<S>> {
        &self.below
    }

    /// Keeps changes of the batch out of `range`.
    pub async fn hold(&self, range: Range<u64>) -> RangeGuard<'_> {
        self.ranges.exclusive(range).await
    }

    /// How many changes to units in a batch have failed so far.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::SeqCst)
    }

    /// Has the parent do `io`. In a box, as the parent is a graph itself.
    fn below_does<'a>(&'a self, io: Io<'a>) -> Pin<Box<dyn Future<Output = Result<()>> + 'a>> {
        Box::pin(self.below.execute(io))
    }

    async fn in_both(
        &self,
        in_leaf: impl Future<Output = Result<()>>,
        in_parent: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        let (leaf, parent) = match self.broken {
            Broken::BatchInLeafOnly => (in_leaf.await, Ok(())),
            _ => futures_util::future::join(in_leaf, in_parent).await,
        };
        let both = leaf.and(parent);
        if both.is_err() {
            self.failures.fetch_add(1, Ordering::SeqCst);
        }
        both
    }
}

/// What is being moved in a graph.
pub(super) enum Moving<S: Store> {
    /// The leaf sinks; these units, in order, are the batch.
    Sinking(Arc<Sinking<S>>, Vec<Extent>),
    /// The leaf is filled.
    Filling(Arc<RangeLock>),
}

/// A change of a part of the disk.
#[derive(Clone, Copy)]
pub(super) enum Change<'a> {
    Write(&'a Segments),
    Zero(WriteZeroes),
    Discard,
}

impl<S: Store> Graph<S> {
    /// This graph while its leaf sinks, with these units, in order, as the batch.
    #[must_use]
    pub fn sinking(&self, sinking: &Arc<Sinking<S>>, batch: Vec<Extent>) -> Self {
        let mut graph = Self::assemble(self.layers.clone(), self.zones.clone());
        graph.moving = Some(Moving::Sinking(sinking.clone(), batch));
        graph
    }

    /// This graph while its leaf is filled: whoever holds a range of `ranges` alone keeps changes out of it.
    #[must_use]
    pub fn filling(&self, ranges: &Arc<RangeLock>) -> Self {
        let mut graph = Self::assemble(self.layers.clone(), self.zones.clone());
        graph.moving = Some(Moving::Filling(ranges.clone()));
        graph
    }

    /// This graph, in which a guest's flush covers the leaf only. It is for parents that are open for writing because one is merged
    /// into the other, and that hold nothing of a guest that is not durable.
    #[must_use]
    pub fn flushing_leaf_only(&self) -> Self {
        let mut graph = Self::assemble(self.layers.clone(), self.zones.clone());
        graph.most_flushed = 1;
        graph
    }

    /// True while the leaf sinks.
    pub(super) fn is_sinking(&self) -> bool {
        matches!(self.moving, Some(Moving::Sinking(..)))
    }

    /// A change of `extent` while something is moved. In a box, so that the futures of all other changes stay small.
    #[cold]
    pub(super) fn change_moving<'a>(
        &'a self,
        moving: &'a Moving<S>,
        extent: Extent,
        change: Change<'a>,
    ) -> Pin<Box<dyn Future<Output = Result<()>> + 'a>> {
        Box::pin(async move {
            match moving {
                Moving::Filling(ranges) => {
                    let _held = ranges.shared(extent.start()..extent.end()).await;
                    self.change_leaf(extent, change).await
                }
                Moving::Sinking(sinking, batch) => {
                    let parts = self.parts(extent).into_iter();
                    let changes = parts.map(|part| self.change_part(sinking, batch, extent, part, change));
                    join_all(changes).await.into_iter().collect()
                }
            }
        })
    }

    /// The parts of `extent`, one for each unit of the leaf.
    fn parts(&self, extent: Extent) -> Vec<Extent> {
        let (mut parts, mut at) = (Vec::new(), extent.start());
        while at < extent.end() {
            let len = self.leaf().part_len(Extent::from_range(at..extent.end()));
            parts.push(Extent::from_range(at..at + len));
            at += len;
        }
        parts
    }

    /// Changes a part of one unit while the leaf sinks. Whether the leaf has the unit is looked up under the lock, where it may be
    /// given up meanwhile.
    async fn change_part(
        &self,
        sinking: &Sinking<S>,
        batch: &[Extent],
        whole: Extent,
        part: Extent,
        change: Change<'_>,
    ) -> Result<()> {
        let after = batch.partition_point(|unit| unit.end() <= part.start());
        let is_moved = batch.get(after).is_some_and(|unit| unit.start() < part.end());
        let _alone = match is_moved {
            true => Some(sinking.ranges.exclusive(part.start()..part.end()).await),
            false => None,
        };
        let memory;
        let change = match change {
            Change::Write(from) => {
                let start = (part.start() - whole.start()) as usize;
                memory = from.slice(start..start + part.len_bytes as usize);
                Change::Write(&memory)
            }
            other => other,
        };
        let in_parent = sinking.below_does(match change {
            Change::Write(from) => Io::write(part, from, false),
            Change::Zero(how) => Io::write_zeroes(part, WriteZeroes { only_if_fast: false, ..how }),
            Change::Discard => Io::discard(part),
        });
        let looked_at = if sinking.broken == Broken::PartsForUnits { part } else { self.unit_of(part) };
        let mut kept_out = match sinking.broken {
            Broken::CopiedMeanwhile => None,
            _ => self.leaf().keep_copies_out(part).await,
        };
        let is_own = self.leaf().next_own(looked_at).await?.is_some();
        if is_own {
            // The leaf takes that lock itself.
            drop(kept_out.take());
        }
        match (is_own, change) {
            (false, _) => in_parent.await,
            (true, Change::Discard) if is_moved => Ok(()),
            (true, change) if is_moved => sinking.in_both(self.change_unit(part, change), in_parent).await,
            (true, change) => self.change_unit(part, change).await,
        }
    }

    /// Changes a part of a unit that the leaf has.
    async fn change_unit(&self, part: Extent, change: Change<'_>) -> Result<()> {
        match change {
            Change::Write(from) => self.write_part(part, from).await,
            Change::Zero(how) => self.zero_leaf_part(part, how.may_unmap, false).await,
            Change::Discard => self.leaf().unmap(part, false).await,
        }
    }

    /// A flush while the leaf sinks, or while parents are merged.
    #[cold]
    pub(super) async fn flush_moving(&self, walked: usize) -> Result<()> {
        let broken = match &self.moving {
            Some(Moving::Sinking(sinking, _)) => sinking.broken,
            _ => Broken::Nothing,
        };
        let layers = match broken {
            Broken::FlushOfLeafOnly => 1,
            _ => walked.min(self.most_flushed),
        };
        let flushes = (0..layers).map(|layer| self.flush(layer));
        join_all(flushes).await.into_iter().collect()
    }

    /// The first part of `extent` that the leaf has something of, one unit at most.
    ///
    /// # Errors
    /// As [`Layer::load`].
    pub async fn next_own(&self, extent: Extent) -> Result<Option<Extent>> {
        self.leaf().next_own(extent).await
    }

    /// The units of the leaf around `extent`.
    pub fn unit_of(&self, extent: Extent) -> Extent {
        let unit = self.leaf().unit(extent);
        Extent::from_range(unit.start()..unit.end().min(self.size_bytes()))
    }

    /// Has the leaf give up the unit `part`. Whoever calls this has made sure that the bytes below are the same and durable, and keeps
    /// changes out of the unit.
    ///
    /// # Errors
    /// As [`Layer::forget`].
    pub async fn forget_own(&self, part: Extent) -> Result<()> {
        self.leaf().forget(part).await
    }

    /// Has flushes of the leaf keep the space of what it has given up, or no longer ([`Layer::hold_space`]).
    pub fn hold_own_space(&self, holds: bool) {
        self.leaf().hold_space(holds);
    }

    /// Has the leaf give back about `most_bytes` of what it holds so ([`Layer::give_back`]).
    ///
    /// # Errors
    /// The store's.
    pub async fn give_back_own(&self, most_bytes: u64, timer: &dyn Timer) -> Result<GivenBack> {
        self.leaf().give_back(most_bytes, timer).await
    }

    /// How many bytes the leaf's file takes on its host; `None` where nobody can tell.
    pub async fn own_taken_bytes(&self) -> Option<u64> {
        self.leaf().store().taken_bytes().await
    }

    /// Flushes the leaf, and no other layer.
    ///
    /// # Errors
    /// The store's.
    pub async fn flush_own(&self) -> Result<()> {
        self.flush(0).await
    }
}
