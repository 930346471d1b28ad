//! Giving up what a child has: the part reads as what lies below from then on.
//!
//! # Order of writes
//!
//! Whoever gives up a part has made sure that the same bytes are below, durably. So the entry without the part may become durable at any
//! time. It is written, cached, before the call returns: the part does not come back when the process dies. The cluster that it pointed at
//! goes the way of all clusters that nothing refers to any more (`flush`): its count falls when a sync has made the entry durable and its
//! last reader is gone. What an internal snapshot shares stays the snapshot's: an L2 table is copied first, and the count of a cluster falls
//! by one.
//!
//! A cluster goes as a whole, or by subclusters where the image has such.

use std::sync::atomic::Ordering;
use std::time::Duration;

use spile_core::{Extent, Result, Store, Timer, yield_now};

use super::Qcow2;
use super::codec::COPIED;
use super::codec::table::Cluster;
use super::write::{Old, Part};
use super::writing::Writing;
use crate::layer::{Found, GivenBack, Layer as _};

/// So many runs are looked at in one turn.
const LOOKED_AT_ONCE: u64 = 1024;

impl<S: Store> Qcow2<S> {
    /// Gives up `part`.
    pub(super) async fn forget_part(&self, part: &Part) -> Result<()> {
        let writing = self.writing().await?;
        if !self.has_parent() {
            return Err(self.unsupported("the image has no parent that it could show instead of its own bytes"));
        }
        self.bound_given_up(writing).await?;
        let _alone = writing.clusters.exclusive(part.cluster..part.cluster + 1).await;
        let at = self.start_of(part.cluster);
        let old = self.old(writing, at).await?;
        let words = match old.cluster {
            Cluster::Unallocated => return Ok(()),
            _ if self.is_whole(part) => (0, 0),
            _ => self.without_subclusters(part, &old).ok_or_else(|| {
                self.unsupported("a part of a cluster cannot be given up, where it is no whole number of subclusters")
            })?,
        };
        self.own_table(writing, at).await?;
        self.change_entry(writing, at, &old, words).await
    }

    /// The entry without the subclusters of `part`, where these are whole.
    fn without_subclusters(&self, part: &Part, old: &Old) -> Option<(u64, u64)> {
        let (allocated, zero) = match old.cluster {
            Cluster::Data(_) => (u32::MAX, 0),
            Cluster::Zero(_) => (0, u32::MAX),
            Cluster::Mixed { allocated, zero, .. } => (allocated, zero),
            Cluster::Unallocated | Cluster::Compressed(_) => return None,
        };
        let touched = self.whole_subclusters(part)?;
        let (allocated, zero) = (allocated & !touched, zero & !touched);
        if allocated | zero == 0 {
            return Some((0, 0));
        }
        let entry = if old.is_own { old.words.0 } else { old.words.0 & !COPIED };
        Some((entry, u64::from(zero) << 32 | u64::from(allocated)))
    }

    /// The first run of `extent`, within one cluster, that the image has: bytes, or zeroes that hide what lies below.
    pub(super) async fn next_own_run(&self, extent: Extent) -> Result<Option<Extent>> {
        let mut at = extent.start();
        for looked in 1_u64.. {
            if at >= extent.end() {
                break;
            }
            if looked.is_multiple_of(LOOKED_AT_ONCE) {
                yield_now().await;
            }
            match self.map.find(at, extent.end() - at) {
                (Found::Below, len) => at += len,
                (Found::Zero, len) if !self.has_parent() => at += len,
                (Found::Miss(piece), _) => self.map.load(&self.store, piece).await?,
                (_, len) => {
                    let within = self.part(Extent::from_range(at..extent.end())).within;
                    return Ok(Some(Extent::from_range(at..at + len.min(within.end - within.start))));
                }
            }
        }
        Ok(None)
    }

    /// Has flushes keep what was given up, or no longer. What they have kept until then is unused space in the file, which new data take.
    pub(super) fn hold_given_up(&self, writing: &Writing, holds: bool) {
        let held = writing.holds.swap(holds, Ordering::AcqRel);
        let mut space = writing.space();
        space.turns_to_keep = 0;
        if held && !holds {
            let mut settled = std::mem::take(&mut space.settled);
            space.kept.append(&mut settled);
            space.turns_to_keep = u8::from(space.waiting.is_some()) + u8::from(!space.fresh.is_empty());
        }
    }

    /// Gives about `most_bytes` of what was given up, and is settled, back to the store.
    pub(super) async fn give_back_settled(
        &self,
        writing: &Writing,
        most_bytes: u64,
        timer: &dyn Timer,
    ) -> Result<GivenBack> {
        if writing.is_sealed() || writing.is_broken() {
            return Ok(GivenBack::default());
        }
        let bits = self.head.header.cluster_bits;
        let mut counts = writing.counts.lock().await;
        let (run, has_readers) = {
            let mut space = writing.space();
            let waiting = space.waiting.as_ref().map(|(phase, _)| *phase);
            let run = space.settled.pop().map(|run| {
                let cut = run.end.saturating_sub((most_bytes >> bits).max(1)).max(run.start);
                if cut > run.start {
                    space.settled.push(run.start..cut);
                }
                cut..run.end
            });
            (run, waiting.is_some_and(|phase| !writing.grace.is_over(phase)))
        };
        let Some(run) = run else { return Ok(GivenBack { has_readers, ..GivenBack::default() }) };
        let (begun_ns, bytes) = (timer.now_ns(), (run.end - run.start) << bits);
        self.release(&mut counts, run).await?;
        let took = Duration::from_nanos(timer.now_ns().saturating_sub(begun_ns));
        Ok(GivenBack { bytes, took, has_readers })
    }
}
