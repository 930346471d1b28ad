//! Flush and close: one sync makes durable all that was acknowledged, and what was given up before goes back after it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use spile_core::{Error, ErrorKind, Result, Store, StoreOffset};

use super::Qcow2;
use super::alloc::runs;
use super::refcounts::Refcounts;
use super::writing::Writing;
use crate::layer::GIVEN_BACK_A_FLUSH;

/// So many runs of clusters are given up before a discard waits for a flush: each is kept in memory.
const MOST_GIVEN_UP: usize = 64 << 10;

/// Joins flushes: a caller is served by any run that begins after its call.
#[derive(Default)]
pub(super) struct Flushes {
    running: async_lock::Mutex<()>,
    begun: AtomicU64,
    /// The last run that ended, and how.
    ended: Mutex<(u64, Option<Error>)>,
}

impl<S: Store> Qcow2<S> {
    /// Makes everything that was acknowledged before the call durable.
    pub(super) async fn flush_writing(&self, writing: &Writing) -> Result<()> {
        let flushes = &writing.flushes;
        let came = flushes.begun.load(Ordering::SeqCst);
        let _running = flushes.running.lock().await;
        {
            let ended = flushes.ended.lock().unwrap_or_else(|e| e.into_inner());
            if ended.0 > came {
                return ended.1.as_ref().map_or(Ok(()), |error| Err(error.duplicate()));
            }
        }
        let run = flushes.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let result = self.flush_once(writing, GIVEN_BACK_A_FLUSH).await;
        let error = result.as_ref().err().map(Error::duplicate);
        *flushes.ended.lock().unwrap_or_else(|e| e.into_inner()) = (run, error);
        result
    }

    async fn flush_once(&self, writing: &Writing, most_runs: usize) -> Result<()> {
        if writing.is_sealed() {
            return Ok(());
        }
        let (gone, is_kept) = take_gone(writing);
        if let Some(data) = &self.data {
            data.sync().await?;
        }
        // After a failed sync what was given up may still be referred to in the file, and stays as it is.
        self.store.sync().await?;
        {
            let mut space = writing.space();
            let settled = if is_kept { &mut space.kept } else { &mut space.settled };
            settled.extend(gone);
        }
        if writing.is_broken() {
            return Ok(());
        }
        let most_runs = if writing.holds.load(Ordering::Acquire) { 0 } else { most_runs };
        let next = {
            let settled = &mut writing.space().settled;
            // What is not given back now is kept in memory.
            let rest = settled.len().saturating_sub(most_runs).min(MOST_GIVEN_UP);
            settled.split_off(rest)
        };
        if next.is_empty() {
            return Ok(());
        }
        let mut counts = writing.counts.lock().await;
        for run in next {
            // All that was acknowledged is durable. When this fails, the space is free already, or leaked.
            if let Err(error) = self.release(&mut counts, run).await
                && error.kind() == ErrorKind::Corrupt
            {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Counts references of `run` down: nothing refers to them in the file, durably, and nobody reads them. What is free then goes back
    /// to the store. Nobody can take it before that is done, for the caller holds the refcounts.
    pub(super) async fn release(&self, counts: &mut Refcounts, run: std::ops::Range<u64>) -> Result<()> {
        let bits = counts.cluster_bits;
        let free = match counts.release(&self.store, run.clone()).await {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                return Err(self.corrupt(run.start << bits, "a cluster that was in use has the refcount 0").await);
            }
            free => free?,
        };
        if self.store.info().punches {
            for run in free {
                self.store.punch_hole(StoreOffset(run.start << bits), (run.end - run.start) << bits).await?;
            }
        }
        Ok(())
    }

    /// Flushes when much was given up, so that memory stays bounded.
    pub(super) async fn bound_given_up(&self, writing: &Writing) -> Result<()> {
        let runs = writing.space().fresh.len();
        if runs < MOST_GIVEN_UP { Ok(()) } else { self.flush_writing(writing).await }
    }

    /// Ends all writing: what was prepared and not used goes back, and the file ends behind the last cluster in use.
    pub(super) async fn seal_writing(&self, writing: &Writing) -> Result<()> {
        if writing.is_sealed() {
            return Ok(());
        }
        self.flush_writing(writing).await?;
        Box::pin(self.save_bitmaps(writing)).await;
        if writing.has_begun() && !writing.is_broken() {
            self.give_all_back(writing).await?;
        }
        writing.seal();
        Ok(())
    }

    async fn give_all_back(&self, writing: &Writing) -> Result<()> {
        let _running = writing.flushes.running.lock().await;
        self.flush_once(writing, usize::MAX).await?;
        // A reader may still be at what is left. It keeps its bytes, for nothing takes a free cluster any more.
        let (left, mut ready) = {
            let mut space = writing.space();
            let mut left = std::mem::take(&mut space.settled);
            left.append(&mut space.kept);
            left.append(&mut space.fresh);
            left.extend(space.waiting.take().into_iter().flat_map(|(_, runs)| runs));
            let mut ready: Vec<u64> = space.ready.drain(..).collect();
            ready.append(&mut space.lost);
            (left, ready)
        };
        ready.sort_unstable();
        let mut counts = writing.counts.lock().await;
        self.store.sync().await?;
        for run in left.into_iter().chain(runs(&ready)) {
            counts.release(&self.store, run).await?;
        }
        self.store.sync().await?;
        self.cut_tail(counts.cluster_bits, ready).await
    }

    /// Cuts off unused clusters at the end of the file.
    async fn cut_tail(&self, bits: u32, mut free: Vec<u64>) -> Result<()> {
        let len = self.store.len_bytes();
        let mut end = len >> bits;
        while end > 0 && free.pop_if(|last| *last == end - 1).is_some() {
            end -= 1;
        }
        if end << bits < len && self.store.info().grows_zeroed {
            self.map.set_file_bytes(end << bits);
            self.store.set_len(end << bits).await?;
            self.store.sync().await?;
        }
        Ok(())
    }
}

/// What was given up and has no reader any more; a sync that begins now settles it. True when it is to stay in the file then.
fn take_gone(writing: &Writing) -> (Vec<std::ops::Range<u64>>, bool) {
    let mut space = writing.space();
    if space.waiting.is_none() && !space.fresh.is_empty() {
        space.waiting = Some((writing.grace.turn(), std::mem::take(&mut space.fresh)));
    }
    let is_over = space.waiting.as_ref().is_some_and(|(phase, _)| writing.grace.is_over(*phase));
    let Some((_, gone)) = space.waiting.take_if(|_| is_over) else { return (Vec::new(), false) };
    let is_kept = space.turns_to_keep > 0;
    space.turns_to_keep = space.turns_to_keep.saturating_sub(1);
    (gone, is_kept)
}
