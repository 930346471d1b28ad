//! [`Mirror`]: the stage at [`Place::Mirror`](spile_node::Place::Mirror) while a disk is moved.
//!
//! It writes nothing itself. A request that changes the disk is counted *in flight* until it has ended; then, whatever its result, its blocks
//! are marked as lacking in the copy. So at every moment a block is the same in the copy unless its bit is set, a request to it is in flight, or
//! the copier is at it. The copier clears a bit before it reads the block: a change that the read does not see ends later, and sets the bit again.
//!
//! A request never fails because of the copy. When guests write faster than the copier copies, it has each write wait for a bounded time
//! after it has ended ([`Mirror::hold`]).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use event_listener::Event;
use spile_core::{Extent, Io, Op, Result};
use spile_image::Broken;
use spile_node::{Pending, Stage};

use super::blocks::Blocks;

/// Nobody is held back.
const FREE: u64 = u64::MAX;

/// The stage.
pub(super) struct Mirror {
    blocks: Blocks,
    /// Requests that change the disk and have not ended.
    in_flight: AtomicU64,
    /// Bytes that the copier is at.
    copying_bytes: AtomicU64,
    /// Writes wait while the copy lacks more than this.
    hold_above_bytes: AtomicU64,
    /// How many ticks a write waits at most.
    patience: AtomicU64,
    ticks: AtomicU64,
    /// A tick, or the copy has caught up a little.
    progress: Event,
    /// Writes begin to be held back.
    began_to_hold: Event,
    /// Somebody waits for a mark.
    is_awaited: AtomicBool,
    marked: Event,
    held: AtomicU64,
    has_flush_failed: AtomicBool,
    broken: Broken,
}

impl Mirror {
    /// Nothing is marked.
    pub fn new(size_bytes: u64, block_bytes: u64, broken: Broken) -> Self {
        Self {
            blocks: Blocks::new(size_bytes, block_bytes),
            in_flight: AtomicU64::new(0),
            copying_bytes: AtomicU64::new(0),
            hold_above_bytes: AtomicU64::new(FREE),
            patience: AtomicU64::new(0),
            ticks: AtomicU64::new(0),
            progress: Event::new(),
            began_to_hold: Event::new(),
            is_awaited: AtomicBool::new(false),
            marked: Event::new(),
            held: AtomicU64::new(0),
            has_flush_failed: AtomicBool::new(false),
            broken,
        }
    }

    /// The copy may lack `extent`.
    pub fn mark(&self, extent: Extent) {
        self.blocks.mark(extent);
        if self.is_awaited.load(SeqCst) && self.is_awaited.swap(false, SeqCst) {
            self.marked.notify(usize::MAX);
        }
    }

    /// Waits until the copy lacks something.
    pub async fn lags(&self) {
        loop {
            let marked = self.marked.listen();
            self.is_awaited.store(true, SeqCst);
            if self.lag_bytes() > 0 {
                return;
            }
            marked.await;
        }
    }

    /// Waits until writes are held back.
    pub async fn holds(&self) {
        loop {
            let began = self.began_to_hold.listen();
            if self.is_holding() {
                return;
            }
            began.await;
        }
    }

    /// How many bytes the copy may lack.
    pub fn lag_bytes(&self) -> u64 {
        self.blocks.bytes() + self.copying_bytes.load(SeqCst)
    }

    /// True when the copy holds what the disk holds. A request that ends between the two looks is seen by the second one.
    pub fn is_in_step(&self) -> bool {
        let in_flight = self.in_flight.load(SeqCst);
        in_flight == 0 && self.lag_bytes() == 0
    }

    /// True when a flush of a guest has failed: nobody knows what was lost.
    pub fn has_flush_failed(&self) -> bool {
        self.has_flush_failed.load(SeqCst)
    }

    /// The next run that the copy may lack, from `from` on and `most_bytes` long at most. It counts as copied from now on, unless it is marked
    /// again; the caller says by [`Mirror::end_copy`] when it is.
    pub fn begin_copy(&self, from: u64, most_bytes: u64) -> Option<Extent> {
        let run = self.blocks.next(from, most_bytes)?;
        // First this, so that the lag is never too small.
        self.copying_bytes.fetch_add(run.len_bytes, SeqCst);
        if self.broken != Broken::ClearAfterRead {
            self.blocks.take(run);
        }
        Some(run)
    }

    /// The copier has read `run` from the disk.
    pub fn was_read(&self, run: Extent) {
        if self.broken == Broken::ClearAfterRead {
            self.blocks.take(run);
        }
    }

    /// The copier is done with `run`.
    pub fn end_copy(&self, run: Extent, is_copied: bool) {
        if !is_copied {
            self.mark(run);
        }
        self.copying_bytes.fetch_sub(run.len_bytes, SeqCst);
        self.progress.notify(usize::MAX);
    }

    /// From now on a write waits, after it has ended, while the copy lacks more than `above_bytes`, but no longer than `patience` ticks.
    pub fn hold(&self, above_bytes: u64, patience: u64) {
        self.patience.store(patience, SeqCst);
        self.hold_above_bytes.store(above_bytes, SeqCst);
        self.began_to_hold.notify(usize::MAX);
    }

    /// Nobody is held back any more.
    pub fn release(&self) {
        self.hold_above_bytes.store(FREE, SeqCst);
        self.progress.notify(usize::MAX);
    }

    /// True when writes are held back.
    pub fn is_holding(&self) -> bool {
        self.hold_above_bytes.load(SeqCst) != FREE
    }

    /// How many writes were held back.
    pub fn held(&self) -> u64 {
        self.held.load(SeqCst)
    }

    /// Time has gone by: whoever has waited for long enough goes on.
    pub fn tick(&self) {
        self.ticks.fetch_add(1, SeqCst);
        self.progress.notify(usize::MAX);
    }

    async fn wait(&self) -> Result<()> {
        self.held.fetch_add(1, SeqCst);
        let until = self.ticks.load(SeqCst) + self.patience.load(SeqCst);
        loop {
            let progress = self.progress.listen();
            if self.ticks.load(SeqCst) >= until || self.lag_bytes() <= self.hold_above_bytes.load(SeqCst) {
                return Ok(());
            }
            progress.await;
        }
    }
}

impl Stage for Mirror {
    fn before<'a>(&'a self, io: Io<'a>) -> Option<Pending<'a>> {
        if io.op.changes_data() {
            self.in_flight.fetch_add(1, SeqCst);
            if self.broken == Broken::MarkBeforeWrite {
                self.mark(io.extent);
            }
        }
        None
    }

    fn after<'a>(&'a self, io: Io<'a>, result: &Result<()>) -> Option<Pending<'a>> {
        if io.op.changes_data() {
            if self.broken != Broken::MarkBeforeWrite {
                self.mark(io.extent);
            }
            self.in_flight.fetch_sub(1, SeqCst);
            let waits = result.is_ok() && self.lag_bytes() > self.hold_above_bytes.load(SeqCst);
            return waits.then(|| -> Pending<'a> { Box::pin(self.wait()) });
        }
        if io.op == Op::Flush && result.is_err() {
            self.has_flush_failed.store(true, SeqCst);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    use spile_core::{Error, ErrorKind, Segments};

    use super::*;

    fn poll(future: &mut Pending<'_>) -> Poll<Result<()>> {
        Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    fn extent() -> Extent {
        Extent::from_range(0..4096)
    }

    #[test]
    fn a_write_in_flight_and_a_copy_under_way_are_not_in_step() {
        let (mirror, bytes) = (Mirror::new(1 << 20, 64 << 10, Broken::Nothing), Segments::zeroed(4096));
        let io = Io::write(extent(), &bytes, false);
        assert!(mirror.is_in_step());
        assert!(mirror.before(io).is_none() && !mirror.is_in_step());
        // A write that fails may have changed something.
        assert!(mirror.after(io, &Err(Error::new(ErrorKind::Io, "no"))).is_none());
        assert_eq!((mirror.is_in_step(), mirror.lag_bytes()), (false, 64 << 10));
        let run = mirror.begin_copy(0, 1 << 20).unwrap();
        assert_eq!((mirror.is_in_step(), mirror.lag_bytes()), (false, 64 << 10));
        mirror.end_copy(run, false);
        assert_eq!((mirror.is_in_step(), mirror.lag_bytes()), (false, 64 << 10));
        let run = mirror.begin_copy(0, 1 << 20).unwrap();
        mirror.end_copy(run, true);
        assert!(mirror.is_in_step());
    }

    #[test]
    fn a_write_is_held_until_the_copy_catches_up_or_its_time_is_over() {
        let (mirror, bytes) = (Mirror::new(1 << 20, 64 << 10, Broken::Nothing), Segments::zeroed(4096));
        let io = Io::write(extent(), &bytes, false);
        let write = || {
            assert!(mirror.before(io).is_none());
            mirror.after(io, &Ok(()))
        };
        assert!(write().is_none());
        mirror.hold(0, 2);
        let mut held = write().expect("it is held");
        mirror.tick();
        assert!(poll(&mut held).is_pending());
        mirror.tick();
        mirror.tick();
        assert!(matches!(poll(&mut held), Poll::Ready(Ok(()))));
        let mut held = write().expect("it is held");
        assert!(poll(&mut held).is_pending());
        let run = mirror.begin_copy(0, 1 << 20).unwrap();
        assert!(poll(&mut held).is_pending());
        mirror.end_copy(run, true);
        assert!(poll(&mut held).is_ready());
        mirror.mark(extent());
        let mut held = write().expect("it is held");
        assert!(poll(&mut held).is_pending());
        mirror.release();
        assert!(poll(&mut held).is_ready() && write().is_none());
        assert_eq!(mirror.held(), 3);
    }

    #[test]
    fn a_flush_that_fails_is_remembered() {
        let mirror = Mirror::new(1 << 20, 64 << 10, Broken::Nothing);
        assert!(mirror.before(Io::flush()).is_none() && mirror.after(Io::flush(), &Ok(())).is_none());
        assert!(!mirror.has_flush_failed());
        assert!(mirror.after(Io::flush(), &Err(Error::new(ErrorKind::Io, "no"))).is_none());
        assert!(mirror.has_flush_failed());
    }
}
