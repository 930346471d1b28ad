//! The clients of a disk under test. They make random requests and report each to the oracle. A reader checks everything that was
//! ever written.
//!
//! A finding is a panic: it unwinds to [`crate::explore`], like the panics of the code under test.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

use spile_core::{Disk, Error, ErrorKind, Extent, ExtentKind, ExtentStatus, Segment, Segments, WriteZeroes};

use crate::exec::Executor;
use crate::oracle::{Change, Oracle, Pending};
use crate::plan::{Plan, Weights};
use crate::rng::Rng;
use crate::stamp::{self, SECTOR};
use crate::turns::turns;
use crate::world::World;

/// What is in a client's memory before it is read into.
pub(crate) const UNREAD: u8 = 0xA5;

/// The work on one disk in one life: the disk, and what its clients share.
pub(crate) struct Workload<D> {
    pub disk: D,
    pub world: World,
    pub oracle: Rc<RefCell<Oracle>>,
    pub plan: Rc<Plan>,
    /// The number of faults that were injected before this life.
    pub faults_before: u64,
    /// Only syncs fail in this life: then a failed flush must be followed by failing ones.
    pub only_syncs_fail: bool,
    /// The disk's images change. A write with FUA makes only its own bytes durable, and may do so in a new leaf after a flush
    /// that failed for an image below.
    pub is_exchanged: bool,
    /// Requests wait until trouble has passed: then none may fail for trouble that may pass.
    pub waits: bool,
    /// A flush has failed. Whoever knows that the disk has left behind what failed sets it back.
    pub flush_failed: Rc<Cell<bool>>,
}

fn extent(sectors: &Range<u64>) -> Extent {
    Extent::from_range(sectors.start * SECTOR as u64..sectors.end * SECTOR as u64)
}

fn len_bytes(sectors: &Range<u64>) -> usize {
    (sectors.end - sectors.start) as usize * SECTOR
}

fn found(what: Result<(), String>) {
    if let Err(what) = what {
        panic!("{what}");
    }
}

impl<D: Disk> Workload<D> {
    /// The work on a disk whose images change, in a life that began after `faults_before` faults. A sync that failed for one image is none of
    /// another's, so a flush that follows a failed one may succeed.
    pub fn of_changing(
        disk: D,
        world: &World,
        oracle: &Rc<RefCell<Oracle>>,
        plan: &Rc<Plan>,
        faults_before: u64,
    ) -> Rc<Self> {
        let (world, oracle, plan) = (world.clone(), oracle.clone(), plan.clone());
        let (only_syncs_fail, is_exchanged, waits) = (false, true, false);
        let flush_failed = Rc::default();
        Rc::new(Self { disk, world, oracle, plan, faults_before, only_syncs_fail, is_exchanged, waits, flush_failed })
    }

    /// Gives a new disk something to hold, and closes it in order.
    pub async fn fill(self: Rc<Self>, mut rng: Rng) {
        let requests = rng.between(3, 30);
        self.clone().client(rng, requests).await;
        self.close().await;
    }

    /// Begins to read what was written before, and one to three clients of so many requests each.
    pub fn begin_all(self: &Rc<Self>, executor: &mut Executor, rng: &mut Rng, requests: u64)
    where
        D: 'static,
    {
        executor.spawn(self.clone().verify(Rng::new(rng.word()), false));
        for _ in 0..rng.between(1, 3) {
            executor.spawn(self.clone().client(Rng::new(rng.word()), requests));
        }
    }

    /// Makes `requests` requests, one after the other.
    pub async fn client(self: Rc<Self>, mut rng: Rng, requests: u64) {
        for _ in 0..requests {
            self.request(&mut rng).await;
        }
    }

    async fn request(&self, rng: &mut Rng) {
        let Weights { write, fua, read, flush, discard, zeroes, extents } = self.plan.weights.clone();
        let mut choice = rng.below(write + fua + read + flush + discard + zeroes + extents);
        let mut is = |weight: u64| {
            let hit = choice < weight;
            choice = choice.wrapping_sub(weight);
            hit
        };
        let places = &self.plan.places;
        if is(write) {
            self.write(self.place(rng, places.max_write), false, rng).await;
        } else if is(fua) {
            self.write(self.place(rng, places.max_write), true, rng).await;
        } else if is(read) {
            self.read(self.place(rng, 128)).await;
        } else if is(flush) {
            self.flush().await;
        } else if is(discard) {
            self.discard(self.place(rng, places.max_discard)).await;
        } else if is(zeroes) {
            self.zeroes(self.place(rng, places.max_discard), rng).await;
        } else {
            self.extents(self.place(rng, places.block * 4)).await;
        }
    }

    /// A run of at most `max` sectors, on the disk's alignment.
    fn place(&self, rng: &mut Rng, max: u64) -> Range<u64> {
        let (info, places) = (self.disk.info(), &self.plan.places);
        let (size, align) = (info.size_bytes / 512, u64::from(info.request_align_bytes).max(512) / 512);
        let near = if rng.chance(places.anywhere, 100) {
            rng.below(size)
        } else if rng.chance(1, 5) {
            rng.below(size / places.block + 1) * places.block
        } else {
            *rng.pick(&places.hot)
        };
        let mut start = (near + rng.below(places.spread)).saturating_sub(places.spread / 2);
        let mut len = rng.skewed(max);
        if rng.chance(1, 3) {
            (start, len) = (start & !7, len.next_multiple_of(8));
        }
        if rng.chance(1, 8) && max >= places.block {
            (start, len) = (near / places.block * places.block, places.block);
        }
        let start = start.min(size - 1) / align * align;
        let end = (start + len).next_multiple_of(align).min(size / align * align);
        if start < end { start..end } else { 0..align }
    }

    /// An error is right only when a fault was injected in this life.
    fn accept(&self, what: &str, sectors: &Range<u64>, error: &Error) {
        let fired = self.world.faults_fired() > self.faults_before;
        assert!(fired, "{what} of sectors {sectors:#x?} failed without a fault: {error:?}");
        let is_request = !matches!(what, "extents" | "close");
        assert!(
            !(self.waits && is_request && error.may_pass()),
            "{what} of sectors {sectors:#x?} did not wait: {error:?}"
        );
        self.world.note("failed", [sectors.start, sectors.end, 0]);
    }

    fn begin(&self, sectors: &Range<u64>, change: Change, fua: bool) -> Pending {
        let pending = self.oracle.borrow_mut().begin(sectors.clone(), change, fua);
        self.world.note("begin", [pending.write, sectors.start, sectors.end]);
        pending
    }

    fn end(&self, what: &str, sectors: &Range<u64>, pending: &Pending, done: &spile_core::Result<()>) {
        if let Err(error) = done {
            self.accept(what, sectors, error);
        }
        self.world.note("end", [pending.write, u64::from(done.is_ok()), 0]);
        self.oracle.borrow_mut().end(pending, done.is_ok());
    }

    async fn write(&self, sectors: Range<u64>, fua: bool, rng: &mut Rng) {
        let failed_before = self.flush_failed.get();
        let pending = self.begin(&sectors, Change::Data, fua);
        let mut bytes = vec![0; len_bytes(&sectors)];
        for (sector, bytes) in sectors.clone().zip(bytes.chunks_exact_mut(SECTOR)) {
            stamp::stamp(sector, pending.write, bytes);
        }
        let from = self.buffer(bytes.len(), rng);
        from.copy_from_slice(0, &bytes);
        let done = self.disk.write(extent(&sectors), &from, fua).await;
        self.end("write", &sectors, &pending, &done);
        if fua && !self.is_exchanged {
            self.no_flush_after_failure(failed_before, done.is_ok());
        }
    }

    /// A buffer in one or two segments, each on the disk's alignment for memory.
    fn buffer(&self, len: usize, rng: &mut Rng) -> Segments {
        let align = self.disk.info().memory_align_bytes as usize;
        let first = rng.index(len / align) * align;
        let mut buffer = Segments::zeroed(first);
        buffer.push(Segment::zeroed(len - first));
        if rng.chance(1, 2) { Segments::zeroed(len) } else { buffer }
    }

    async fn zeroes(&self, sectors: Range<u64>, rng: &mut Rng) {
        let how = WriteZeroes { may_unmap: rng.chance(1, 2), only_if_fast: rng.chance(1, 6) };
        let pending = self.begin(&sectors, Change::Zeroes, false);
        let done = self.disk.write_zeroes(extent(&sectors), how).await;
        match &done {
            Err(error) if how.only_if_fast && error.kind() == ErrorKind::Unsupported => {
                self.oracle.borrow_mut().withdraw(&pending);
            }
            _ => self.end("write_zeroes", &sectors, &pending, &done),
        }
    }

    async fn discard(&self, sectors: Range<u64>) {
        let pending = self.begin(&sectors, Change::Discard, false);
        let done = self.disk.discard(extent(&sectors)).await;
        self.end("discard", &sectors, &pending, &done);
    }

    pub async fn flush(&self) {
        let failed_before = self.flush_failed.get();
        let issued = self.oracle.borrow_mut().begin_flush();
        let done = self.disk.flush().await;
        match &done {
            Ok(()) => self.oracle.borrow_mut().end_flush(issued),
            Err(error) => self.accept("flush", &(0..0), error),
        }
        self.world.note("flushed", [issued, u64::from(done.is_ok()), 0]);
        self.no_flush_after_failure(failed_before, done.is_ok());
    }

    /// The contract of a disk: after a failed sync every later flush fails.
    fn no_flush_after_failure(&self, failed_before: bool, success: bool) {
        if self.only_syncs_fail {
            // It may be set back by now.
            let has_failed = self.flush_failed.get();
            assert!(!(success && failed_before && has_failed), "a flush succeeds after one that failed");
            self.flush_failed.set(has_failed || !success);
        }
    }

    async fn read(&self, sectors: Range<u64>) {
        let issued = self.oracle.borrow_mut().begin_read();
        let into = Segments::zeroed(len_bytes(&sectors));
        into.fill(UNREAD);
        let before = self.world.slow_begun();
        let done = self.disk.read(extent(&sectors), &into).await;
        let slow = before..self.world.slow_begun();
        while !slow.is_empty() && self.world.has_slow_reads(slow.clone()) {
            turns(1).await;
        }
        self.world.note("read-done", [sectors.start, sectors.end, u64::from(done.is_ok())]);
        let mut oracle = self.oracle.borrow_mut();
        match done {
            Ok(()) => found(oracle.end_read(issued, sectors.start, &into.to_vec())),
            Err(error) => {
                oracle.abandon_read(issued);
                self.accept("read", &sectors, &error);
            }
        }
    }

    async fn extents(&self, sectors: Range<u64>) {
        let issued = self.oracle.borrow_mut().begin_read();
        let asked = extent(&sectors);
        let answer = self.disk.extents(asked, 1000).await;
        let mut oracle = self.oracle.borrow_mut();
        match answer {
            Ok(runs) => {
                let has_faults = self.world.faults_fired() > self.faults_before;
                found(check_runs(asked, &runs, has_faults));
                let zero = |run: &&ExtentStatus| run.kind != ExtentKind::Data;
                let sectors = |run: &ExtentStatus| run.extent.start() / 512..run.extent.end() / 512;
                let zeroes: Vec<Range<u64>> = runs.iter().filter(zero).map(sectors).collect();
                found(oracle.end_zeroes(issued, &zeroes).map_err(|e| format!("by the map, {e}")));
            }
            Err(error) => {
                oracle.abandon_read(issued);
                self.accept("extents", &sectors, &error);
            }
        }
    }

    /// Closes the disk in order.
    pub async fn close(self: Rc<Self>) {
        let issued = self.oracle.borrow_mut().begin_flush();
        match self.disk.close().await {
            Ok(()) => self.oracle.borrow_mut().end_flush(issued),
            Err(error) => self.accept("close", &(0..0), &error),
        }
        self.world.note("closed", [issued, 0, 0]);
    }

    /// Reads everything that was ever written, and some of what was not.
    pub async fn verify(self: Rc<Self>, mut rng: Rng, whole: bool) {
        let info = self.disk.info();
        let (size, align) = (info.size_bytes / 512, u64::from(info.request_align_bytes).max(512) / 512);
        let touched = self.oracle.borrow().touched(256);
        for run in touched {
            let (start, end) = (run.start / align * align, run.end.next_multiple_of(align).min(size / align * align));
            // A growth that no flush covered may be gone, and what was written there.
            if start < end {
                self.read(start..end).await;
            }
        }
        for _ in 0..4 {
            self.read(self.place(&mut rng, 64)).await;
        }
        for start in (0..if whole { size } else { 0 }).step_by(2048) {
            self.read(start..(start + 2048).min(size / align * align)).await;
        }
    }
}

/// Checks that the runs cover what was asked for from its start, in order. Where a piece of the map cannot be read (`may_stop`), what comes
/// before it is an answer.
fn check_runs(asked: Extent, runs: &[ExtentStatus], may_stop: bool) -> Result<(), String> {
    let mut at = asked.start();
    for run in runs {
        if run.extent.start() != at || run.extent.is_empty() || run.extent.end() > asked.end() {
            return Err(format!("the map of {asked} has a wrong run {run:?}"));
        }
        at = run.extent.end();
    }
    let alike = |pair: &[ExtentStatus]| {
        pair[0].kind == pair[1].kind && (pair[0].depth == pair[1].depth || pair[0].kind == ExtentKind::Hole)
    };
    if runs.windows(2).any(alike) {
        return Err(format!("the map of {asked} has adjacent runs alike: {runs:?}"));
    }
    if runs.is_empty() || (at < asked.end() && runs.len() < 1000 && !may_stop) {
        return Err(format!("the map of {asked} stops at {at:#x} after {} runs", runs.len()));
    }
    Ok(())
}
