//! [`Copier`]: copies what the [`Mirror`] has marked.

use std::cell::Cell;
use std::pin::pin;
use std::time::{Duration, Instant};

use futures_util::future::{Either, join_all, select};
use spile_core::{Disk, Error, Extent, ExtentKind, Files, Result, Segments, WriteZeroes};
use spile_node::{Aligned, OldEpoch};

use super::handover::{self, Left, Tried};
use super::mirror::Mirror;
use super::note::Moved;
use super::status::{Phase, Status};
use crate::jobs::State;
use crate::work::{GraphOf, Work};

/// So many pieces are copied at a time.
const LANES: usize = 16;
/// So many runs of the disk's map are asked for at a time.
const RUNS_AT_ONCE: usize = 1000;
/// Long enough for all that is ready to be done.
const A_TURN: Duration = Duration::from_micros(1);
/// What is left for the hand-over is copied in about this time.
const REST: Duration = Duration::from_millis(20);
/// The most that is left for the hand-over.
const MOST_REST_BYTES: u64 = 8 << 20;
/// How often writes that are held back are looked at.
const TICK: Duration = Duration::from_millis(20);
/// For how many ticks a write is held back at most: at first, and when that is not enough.
const FIRST_PATIENCE: u64 = 1;
const MOST_PATIENCE: u64 = 10;
/// The longest pause after a hand-over that was put off.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Zeroes that are copied take no space where that can be done.
const ZEROES: WriteZeroes = WriteZeroes { may_unmap: true, only_if_fast: false };

/// One disk as the copier uses it.
pub(super) type End<F> = Aligned<std::sync::Arc<GraphOf<F>>>;

/// Copies a disk to another place.
pub(super) struct Copier<'a, 'w, F: Files> {
    pub work: &'a Work<'w, F>,
    pub source: End<F>,
    pub target: End<F>,
    pub mirror: &'a Mirror,
    pub status: &'a Status,
    buffers: Vec<Segments>,
    copied_bytes: Cell<u64>,
    /// Bytes and nanoseconds of the last batches, the older ones counting less and less.
    speed: Cell<(u64, u64)>,
    patience: Cell<u64>,
}

impl<'a, 'w, F: Files> Copier<'a, 'w, F> {
    pub fn new(work: &'a Work<'w, F>, source: End<F>, target: End<F>, mirror: &'a Mirror, status: &'a Status) -> Self {
        let buffers = (0..LANES).map(|_| Segments::zeroed(work.sizes.piece_bytes as usize)).collect();
        let (copied_bytes, speed, patience) = (Cell::new(0), Cell::new((0, 0)), Cell::new(0));
        Self { work, source, target, mirror, status, buffers, copied_bytes, speed, patience }
    }

    /// Copies until the disk has been handed over. Returns the epoch before that.
    ///
    /// # Errors
    /// The disks'; `Shutdown` when the job is to end. Each with what is left of a hand-over.
    pub async fn until_over(&self, moved: &Moved) -> Result<OldEpoch<GraphOf<F>>, (Error, Left)> {
        // Also while the job waits: no write is held back for ever.
        self.ticking(Box::pin(self.steps(moved))).await
    }

    async fn steps(&self, moved: &Moved) -> Result<OldEpoch<GraphOf<F>>, (Error, Left)> {
        let nothing = |error| (error, Left::Nothing);
        self.mark_all().await.map_err(nothing)?;
        self.round(true).await.map_err(nothing)?;
        let mut put_off = 0;
        loop {
            self.catch_up().await.map_err(nothing)?;
            self.status.set_phase(Phase::InStep);
            match Box::pin(handover::attempt(self, moved)).await? {
                Tried::HandedOver(old) => return Ok(old),
                Tried::PutOff(why) => {
                    put_off += 1;
                    self.status.set_trouble(Some(format!("the hand-over was put off {put_off} times: {why}")));
                    self.work.timer.sleep((TICK * put_off).min(LONGEST_PAUSE)).await;
                }
            }
        }
    }

    /// Marks what the disk holds. What it does not hold is zero in the new image, too.
    async fn mark_all(&self) -> Result<()> {
        let (mut at, size_bytes) = (0, self.source.size_bytes());
        while at < size_bytes {
            for run in self.source.extents(Extent::from_range(at..size_bytes), RUNS_AT_ONCE).await? {
                if run.kind == ExtentKind::Data {
                    self.mirror.mark(run.extent);
                }
                at = run.extent.end();
            }
            // A large disk has millions of runs, and guests are served between some of them.
            self.work.timer.sleep(A_TURN).await;
        }
        Ok(())
    }

    /// Copies rounds until little is left. When that does not become less, guests' writes are held back from then on.
    async fn catch_up(&self) -> Result<()> {
        loop {
            let before = self.mirror.lag_bytes();
            if before <= self.rest_bytes() {
                return Ok(());
            }
            self.status.set_phase(Phase::CatchingUp);
            self.round(false).await?;
            let after = self.mirror.lag_bytes();
            if after > self.rest_bytes() && after > before / 4 * 3 {
                self.patience.set((self.patience.get() * 2).clamp(FIRST_PATIENCE, MOST_PATIENCE));
                self.mirror.hold(self.rest_bytes() / 2, self.patience.get());
            }
        }
    }

    /// What is copied so fast that it may be left for the hand-over.
    fn rest_bytes(&self) -> u64 {
        let (bytes, took_ns) = self.speed.get();
        let rest = u128::from(bytes) * REST.as_nanos() / u128::from(took_ns.max(1));
        (rest as u64).clamp(self.work.sizes.piece_bytes, MOST_REST_BYTES)
    }

    /// Copies all that is marked, from the start of the disk to its end. `is_polite`: guests get half of the time.
    async fn round(&self, is_polite: bool) -> Result<()> {
        let (begun, mut at) = (Instant::now(), 0);
        loop {
            self.work.job.go_on().await?;
            let batch = self.take(&mut at);
            let bytes = batch.iter().map(|run| run.len_bytes).sum();
            if batch.is_empty() {
                break;
            }
            self.work.job.set_total(self.copied_bytes.get() + self.mirror.lag_bytes());
            let guests = || if is_polite { self.work.guests() } else { 0 };
            self.work.job.piece(self.work.timer, bytes, guests, Box::pin(self.copy(&batch))).await?;
            self.copied_bytes.set(self.copied_bytes.get() + bytes);
            self.work.job.set_done(self.copied_bytes.get());
        }
        self.status.set_copied_until(begun);
        Ok(())
    }

    /// The next runs that are to be copied at once, from `at` on.
    pub fn take(&self, at: &mut u64) -> Vec<Extent> {
        let mut batch = Vec::new();
        while batch.len() < LANES
            && let Some(run) = self.mirror.begin_copy(*at, self.work.sizes.piece_bytes)
        {
            *at = run.end();
            batch.push(run);
        }
        batch
    }

    /// Copies runs that were taken. What is not copied is marked again.
    ///
    /// # Errors
    /// The first one of both disks.
    pub async fn copy(&self, batch: &[Extent]) -> Result<()> {
        let begun_ns = self.work.timer.now_ns();
        let copies = batch.iter().zip(&self.buffers).map(async |(run, buffer)| {
            let copied = self.copy_run(*run, buffer).await;
            self.mirror.end_copy(*run, copied.is_ok());
            copied
        });
        let done: Result<()> = join_all(copies).await.into_iter().collect();
        let bytes: u64 = batch.iter().map(|run| run.len_bytes).sum();
        let (old_bytes, old_ns) = self.speed.get();
        let took_ns = self.work.timer.now_ns().saturating_sub(begun_ns);
        self.speed.set((old_bytes / 2 + bytes, old_ns / 2 + took_ns));
        done
    }

    async fn copy_run(&self, run: Extent, buffer: &Segments) -> Result<()> {
        let bytes = buffer.slice(0..run.len_bytes as usize);
        self.source.read(run, &bytes).await?;
        self.mirror.was_read(run);
        let block = super::BLOCK_BYTES as usize;
        let mut at = 0;
        while at < bytes.len() {
            let is_zero = |from: usize| bytes.slice(from..bytes.len().min(from + block)).is_zero();
            let is_hole = is_zero(at);
            let mut end = at + block;
            while end < bytes.len() && is_zero(end) == is_hole {
                end += block;
            }
            let part = at..end.min(bytes.len());
            let extent = Extent::from_range(run.start() + part.start as u64..run.start() + part.end as u64);
            match is_hole {
                true => self.target.write_zeroes(extent, ZEROES).await?,
                false => self.target.write(extent, &bytes.slice(part.clone()), false).await?,
            }
            at = part.end;
        }
        Ok(())
    }

    /// Does `work`. Writes that are held back meanwhile go on when their time is over.
    async fn ticking<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            match select(work.as_mut(), pin!(self.work.timer.sleep(TICK))).await {
                Either::Left((done, _)) => return done,
                // Nobody is held back while the job waits for its users.
                Either::Right(_) if self.work.job.state() == State::Paused => self.mirror.release(),
                Either::Right(_) => self.mirror.tick(),
            }
        }
    }
}
