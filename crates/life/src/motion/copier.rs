//! [`Copier`]: copies what the [`Mirror`] has marked.

use std::cell::{Cell, RefCell};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::{Either, join_all, select};
use spile_core::{Disk, Error, ErrorKind, Extent, ExtentKind, Files, Result, Segments, WriteZeroes};
use spile_image::Broken;
use spile_node::{Aligned, OldEpoch};

use super::blocks::Blocks;
use super::handover::{self, Bounds, Tried};
use super::mirror::Mirror;
use super::pauses::Pauses;
use super::place::Place;
use super::progress::{MARK, Progress};
use super::status::{Phase, Status};
use crate::jobs::State;
use crate::work::{GraphOf, MOST_GRAIN_BYTES, Work};

/// So many pieces are copied at a time: their sizes together.
const LANES: usize = 16;
/// So many runs are copied at a time where guests have changed little here and there. A link with a long way takes them together.
const MOST_RUNS: usize = 64;
/// In so much of the disk it is asked at a time what has changed.
const ASKED_AT_ONCE_BYTES: u64 = 64 << 30;
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
/// A copy that stays in step rests for so long between two rounds.
const BREATH: Duration = Duration::from_millis(50);
/// So much of a place that may hold anything is made zero at once.
const ZEROED_AT_ONCE_BYTES: u64 = 1 << 30;
/// Zeroes that are copied take no space where that can be done.
const ZEROES: WriteZeroes = WriteZeroes { may_unmap: true, only_if_fast: false };

/// One disk as the copier uses it.
type End<F> = Aligned<Arc<GraphOf<F>>>;

/// Why a copy does not go on.
pub(super) enum Failure {
    /// The disk fails, or the job is to end. So does the move.
    Disk(Error),
    /// The new place fails. If it is on another host, it may come back.
    Place(Error),
    /// The names of both images could not be put back. On this host both stay, so that the next open of the disk can do that. A half on another host was given up: nothing is to lead
    /// to it any more.
    Names(Error),
}

/// How a move ends well.
pub(super) enum Over<F: Files> {
    /// The disk is at its new place. The epoch before.
    HandedOver(OldEpoch<GraphOf<F>>),
    /// The new place has what the disk held at one point in time, and the disk is where it was.
    Copied,
}

/// Both disks, and what is needed to copy from the one to the other.
struct Ends<F: Files> {
    source: End<F>,
    target: End<F>,
    mirror: Arc<Mirror>,
    /// What was copied since the target was flushed.
    unflushed: Blocks,
    /// The room of all that is copied at a time.
    buffer: Segments,
    block_bytes: u64,
    /// Below both disks lies the same: only what their own images have is copied.
    is_over_parents: bool,
    /// What the new image may have itself, where that is on another host, and so cannot be looked up.
    touched: Option<Rc<Blocks>>,
    /// What has ended a write that the new place may still do.
    late: RefCell<Option<Error>>,
    broken: Broken,
}

/// Copies a disk to another place.
pub(super) struct Copier<'a, 'w, F: Files> {
    pub work: &'a Work<'w, F>,
    pub source: Arc<GraphOf<F>>,
    pub mirror: Arc<Mirror>,
    pub status: &'a Status,
    pub place: &'a Place,
    pub progress: &'a Progress,
    ends: RefCell<Rc<Ends<F>>>,
    /// Those before the new place is opened again.
    pauses: Pauses,
    copied_bytes: Cell<u64>,
    unflushed_bytes: Cell<u64>,
    /// Bytes and nanoseconds of the last batches, the older ones counting less and less.
    speed: Cell<(u64, u64)>,
    patience: Cell<u64>,
    /// The names are prepared for the hand-over.
    pub is_named: Cell<bool>,
    /// Why the new name of a disk that was handed over may not last.
    pub doubt: Cell<Option<Error>>,
    /// Why the disk's checkpoints do not go along.
    pub not_carried: Cell<Option<Error>>,
    /// How often they could not be sent to another host.
    pub unsent: Cell<u32>,
}

impl<'a, 'w, F: Files> Copier<'a, 'w, F> {
    pub fn new(
        work: &'a Work<'w, F>,
        source: &Arc<GraphOf<F>>,
        target: Arc<GraphOf<F>>,
        mirror: &Arc<Mirror>,
        status: &'a Status,
        (place, progress): (&'a Place, &'a Progress),
    ) -> Self {
        let ends = Ends::new(work, source, target, mirror, place.is_over_parents.get());
        let touched = place.may_come_back().then(|| {
            let touched = ends.new_blocks();
            if progress.reached_bytes() > 0 {
                touched.mark(Extent::from_range(0..source.size_bytes()));
            }
            Rc::new(touched)
        });
        let ends = Ends { touched, ..ends };
        Self {
            work,
            source: source.clone(),
            mirror: mirror.clone(),
            status,
            place,
            progress,
            ends: RefCell::new(Rc::new(ends)),
            pauses: Pauses::new(),
            copied_bytes: Cell::new(place.parents_bytes()),
            unflushed_bytes: Cell::new(0),
            speed: Cell::new((0, 0)),
            patience: Cell::new(0),
            is_named: Cell::new(false),
            doubt: Cell::new(None),
            not_carried: Cell::new(None),
            unsent: Cell::new(0),
        }
    }

    /// The disk's checkpoints do not go along, because of `error`. Where it has none, there is nothing to tell.
    pub fn leave_checkpoints(&self, error: Error) -> bool {
        let has_some = self.work.marks.is_some_and(|marks| marks.are_seen());
        let told = error.hint("the disk's checkpoints did not go along: make new ones");
        self.not_carried.set(has_some.then_some(told));
        false
    }

    fn ends(&self) -> Rc<Ends<F>> {
        self.ends.borrow().clone()
    }

    /// The new image.
    pub fn target(&self) -> Arc<GraphOf<F>> {
        self.ends().target.inner().clone()
    }

    /// Copies until the disk has been handed over, or the copy is to be left as it is.
    ///
    /// # Errors
    /// The disks'; `Shutdown` when the job is to end.
    pub async fn until_over(&self) -> Result<Over<F>, Failure> {
        // Also while the job waits: no write is held back for ever.
        self.ticking(Box::pin(self.steps())).await
    }

    async fn steps(&self) -> Result<Over<F>, Failure> {
        let mut is_marked = false;
        loop {
            match Box::pin(self.until_failure(&mut is_marked)).await {
                Err(Failure::Place(error)) if self.place.may_come_back() => {
                    self.refuse_late()?;
                    self.come_back(&error).await?;
                }
                over => return over,
            }
        }
    }

    /// Fails when another server than `spile receive` may still do a write that got no answer in time. That one lets nothing in that comes by an old link; any other may do it after
    /// newer ones of the next link, and even after the hand-over.
    fn refuse_late(&self) -> Result<(), Failure> {
        let Some(late) = self.ends().late.take().filter(|_| self.place.taken_in().is_none()) else { return Ok(()) };
        let what = "a write got no answer in time, and the server may still do it, after newer ones";
        let hint = format!(
            "the disk stays where it is: look why {} hangs, have its server started anew, so that it does nothing late, and move the disk again",
            self.place.moved.to
        );
        Err(Failure::Place(Error::new(ErrorKind::TimedOut, what).caused_by(late).hint(hint)))
    }

    async fn until_failure(&self, is_marked: &mut bool) -> Result<Over<F>, Failure> {
        if !*is_marked {
            self.mark_first().await?;
            *is_marked = true;
        }
        self.round(true).await?;
        let mut put_off = 0;
        loop {
            self.work.job.go_on().await.map_err(Failure::Disk)?;
            self.catch_up().await?;
            if !self.place.stays || self.work.job.is_to_finish() {
                match Box::pin(handover::attempt(self, Bounds::after(put_off))).await? {
                    Tried::Over(over) => return Ok(over),
                    Tried::PutOff(why) => {
                        put_off += 1;
                        self.status.set_trouble(Some(format!("the hand-over was put off {put_off} times: {why}")));
                        self.rest_after(Bounds::after(put_off)).await;
                    }
                }
                continue;
            }
            self.stay_in_step().await?;
        }
    }

    /// Lets guests go on undisturbed for a while, after a hand-over that was put off.
    async fn rest_after(&self, bounds: Bounds) {
        let _either = select(self.work.timer.sleep(bounds.pause()), pin!(self.work.job.told_to_end())).await;
        if self.patience.get() > 0 {
            self.mirror.hold(self.rest_bytes() / 2, self.patience.get());
        }
    }

    /// Copies what has changed, and waits until something changes, or somebody wants something.
    async fn stay_in_step(&self) -> Result<(), Failure> {
        self.mirror.release();
        self.patience.set(0);
        if self.mirror.lag_bytes() > 0 || self.unflushed_bytes.get() > 0 {
            self.round(false).await?;
            self.flush().await?;
            self.status.set_phase(Phase::InStep);
        }
        if self.progress.begins_to_move(self.work, self.copied_bytes.get()).await {
            let is_early = self.work.broken == Broken::ForwardBeforeFlush;
            if is_early {
                self.progress.moves_forward(self.work).await;
            }
            self.round(false).await?;
            self.flush().await?;
            if !is_early {
                self.progress.moves_forward(self.work).await;
            }
        }
        self.work.timer.sleep(BREATH).await;
        let (lags, told) = (pin!(self.mirror.lags()), pin!(self.work.job.told_to_finish()));
        let wakes = select(lags, told);
        match self.progress.moves_in(self.work, self.copied_bytes.get()) {
            Some(time) => _ = select(wakes, self.work.timer.sleep(time)).await,
            None => _ = wakes.await,
        }
        self.work.job.go_on().await.map(drop).map_err(Failure::Disk)
    }

    /// Waits until the new place can be used again. What was not flushed there may be lost, and is copied again.
    async fn come_back(&self, error: &Error) -> Result<(), Failure> {
        self.mirror.release();
        self.status.note_failure(error.to_string());
        self.lose_unflushed();
        self.progress.fall_back();
        loop {
            // A place may open each time, and fail each time at the first write, as one that is full.
            self.work.timer.sleep(self.pauses.next()).await;
            self.work.job.go_on().await.map_err(Failure::Disk)?;
            match Box::pin(self.place.open_again(self.work, &self.source)).await {
                Ok(target) => {
                    let before = self.ends();
                    let ends =
                        Ends::new(self.work, &self.source, Arc::new(target), &self.mirror, before.is_over_parents);
                    let ends = Ends { touched: before.touched.clone(), ..ends };
                    *self.ends.borrow_mut() = Rc::new(ends);
                    return Ok(());
                }
                Err(error) => self.status.note_failure(error.to_string()),
            }
        }
    }

    /// Marks again what was copied since the last flush of the new place.
    fn lose_unflushed(&self) {
        let (ends, mut at) = (self.ends(), 0);
        while let Some(run) = ends.unflushed.next(at, u64::MAX) {
            self.mirror.mark(run);
            at = run.end();
        }
        self.unflushed_bytes.set(0);
    }

    /// Marks what the new place may lack: what the disk holds; or, when a process before has copied some of it, the rest, and what has changed since.
    async fn mark_first(&self) -> Result<(), Failure> {
        match self.progress.reached_bytes() {
            0 => self.mark_from(0, self.place.is_new()).await,
            until => {
                self.mark_changed().await?;
                // Where the disk holds nothing, the half had zeroes when it was flushed first.
                self.mark_from(until, true).await
            }
        }
    }

    async fn mark_changed(&self) -> Result<(), Failure> {
        let (mut at, size_bytes) = (0, self.source.size_bytes());
        while at < size_bytes && self.work.broken != Broken::ChangesLeftOut {
            self.work.job.go_on().await.map_err(Failure::Disk)?;
            let within = at..size_bytes.min(at + ASKED_AT_ONCE_BYTES);
            let changed = match self.work.marks {
                Some(marks) => marks.changed(MARK, within.clone()).await.map_err(Failure::Disk)?,
                None => None,
            };
            // What is not known any more is copied.
            let changed = changed.unwrap_or_else(|| vec![Extent::from_range(within.clone())]);
            changed.into_iter().for_each(|run| self.mirror.mark(run));
            at = within.end;
            self.work.timer.sleep(A_TURN).await;
        }
        Ok(())
    }

    /// Marks what the disk holds from `at` on. What it does not hold is zero in a new image, too; elsewhere it is made zero.
    async fn mark_from(&self, mut at: u64, is_zero: bool) -> Result<(), Failure> {
        let size_bytes = self.source.size_bytes();
        while at < size_bytes && self.place.is_over_parents.get() {
            self.work.job.go_on().await.map_err(Failure::Disk)?;
            let rest = Extent::from_range(at..size_bytes);
            let own = self.source.own_runs_of(1, rest, RUNS_AT_ONCE).await.map_err(Failure::Disk)?;
            own.iter().for_each(|run| self.mirror.mark(*run));
            at = own.get(RUNS_AT_ONCE - 1).map_or(size_bytes, |last| last.end());
            self.work.timer.sleep(A_TURN).await;
        }
        while at < size_bytes {
            self.work.job.go_on().await.map_err(Failure::Disk)?;
            let rest = Extent::from_range(at..size_bytes);
            for run in self.source.extents(rest, RUNS_AT_ONCE).await.map_err(Failure::Disk)? {
                match run.kind {
                    ExtentKind::Data => self.mirror.mark(run.extent),
                    _ if is_zero => {}
                    _ => self.make_zero(run.extent).await?,
                }
                at = run.extent.end();
            }
            // A large disk has millions of runs, and guests are served between some of them.
            self.work.timer.sleep(A_TURN).await;
        }
        Ok(())
    }

    /// A change of a guest to `run` meanwhile is marked when it ends, and copied after all of this.
    async fn make_zero(&self, run: Extent) -> Result<(), Failure> {
        let mut at = run.start();
        while at < run.end() {
            self.work.job.go_on().await.map_err(Failure::Disk)?;
            let part = Extent::from_range(at..run.end().min(at + ZEROED_AT_ONCE_BYTES));
            let ends = self.ends();
            self.unless_told(Box::pin(async move {
                ends.unflushed.mark(part);
                ends.target.write_zeroes(part, ZEROES).await.map_err(|error| ends.not_written(error))
            }))
            .await?;
            at = part.end();
        }
        Ok(())
    }

    /// Copies rounds until little is left. When that does not become less, guests' writes are held back from then on.
    pub async fn catch_up(&self) -> Result<(), Failure> {
        loop {
            let before = self.mirror.lag_bytes();
            if before <= self.rest_bytes() {
                self.status.set_phase(Phase::InStep);
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
    pub fn rest_bytes(&self) -> u64 {
        let (bytes, took_ns) = self.speed.get();
        let rest = u128::from(bytes) * REST.as_nanos() / u128::from(took_ns.max(1));
        (rest as u64).clamp(self.work.sizes.piece_bytes, MOST_REST_BYTES)
    }

    /// Copies all that is marked, from the start of the disk to its end. `is_polite`: guests get half of the time.
    async fn round(&self, is_polite: bool) -> Result<(), Failure> {
        let (begun, mut at) = (Instant::now(), 0);
        loop {
            self.work.job.go_on().await.map_err(Failure::Disk)?;
            let batch = self.take(&mut at);
            let bytes = batch.iter().map(|run| run.len_bytes).sum();
            if batch.is_empty() {
                break;
            }
            self.work.job.set_total(self.copied_bytes.get() + self.mirror.lag_bytes());
            let guests = || if is_polite { self.work.guests() } else { 0 };
            let failed = RefCell::new(None);
            // What has failed is told by its side; the job only hears that this was no piece.
            let copied = async {
                self.copy(&batch).await.map_err(|failure| {
                    failed.replace(Some(failure));
                    Error::new(ErrorKind::Io, "a piece could not be copied")
                })?;
                Ok(bytes)
            };
            let piece = self.work.job.piece(self.work.timer, guests, Box::pin(copied)).await;
            piece.map_err(|told| failed.take().unwrap_or(Failure::Disk(told)))?;
            self.copied_bytes.set(self.copied_bytes.get() + bytes);
            self.work.job.set_done(self.copied_bytes.get());
            self.progress.reach(at);
            let is_much = self.unflushed_bytes.get() > self.work.sizes.noted_bytes;
            if is_much || self.progress.is_due(self.work.timer.now_ns()) {
                self.flush().await?;
            }
        }
        self.progress.reach(self.source.size_bytes());
        self.status.set_copied_until(begun);
        Ok(())
    }

    /// The next runs that are to be copied at once, from `at` on.
    pub fn take(&self, at: &mut u64) -> Vec<Extent> {
        let ends = self.ends();
        let (mut batch, mut room) = (Vec::new(), ends.buffer.len() as u64);
        while batch.len() < MOST_RUNS
            && room >= ends.block_bytes
            && let Some(run) = self.mirror.begin_copy(*at, self.work.sizes.piece_bytes.min(room))
        {
            *at = run.end();
            room -= run.len_bytes;
            batch.push(run);
        }
        batch
    }

    /// Copies runs that were taken. What is not copied is marked again.
    ///
    /// # Errors
    /// The first one of both disks.
    pub async fn copy(&self, batch: &[Extent]) -> Result<(), Failure> {
        let (begun_ns, ends, runs) = (self.work.timer.now_ns(), self.ends(), batch.to_vec());
        let done = self.unless_told(Box::pin(async move { ends.copy(&runs).await })).await;
        let bytes: u64 = batch.iter().map(|run| run.len_bytes).sum();
        self.unflushed_bytes.set(self.unflushed_bytes.get() + bytes);
        let (old_bytes, old_ns) = self.speed.get();
        let took_ns = self.work.timer.now_ns().saturating_sub(begun_ns);
        self.speed.set((old_bytes / 2 + bytes, old_ns / 2 + took_ns));
        done
    }

    /// Makes all that was copied durable at the new place.
    ///
    /// # Errors
    /// That of the place.
    pub async fn flush(&self) -> Result<(), Failure> {
        let (ends, reached_bytes) = (self.ends(), self.progress.reached_bytes());
        if self.work.broken == Broken::NotedBeforeFlush {
            self.progress.note(self.work, reached_bytes).await;
        }
        let flushed = self.unless_told(Box::pin(async move {
            ends.target.flush().await.map_err(Failure::Place)?;
            let mut at = 0;
            while let Some(run) = ends.unflushed.next(at, u64::MAX) {
                ends.unflushed.take(run);
                at = run.end();
            }
            Ok(())
        }));
        flushed.await?;
        self.pauses.begin_anew();
        self.unflushed_bytes.set(0);
        self.progress.note(self.work, reached_bytes).await;
        Ok(())
    }

    /// Does `work`. A place on another host may let it wait for long: when the job is told to end meanwhile, `work` goes on by itself.
    async fn unless_told(&self, work: Pin<Box<dyn Future<Output = Result<(), Failure>>>>) -> Result<(), Failure> {
        if !self.place.may_come_back() {
            return work.await;
        }
        match select(work, pin!(self.work.job.told_to_end())).await {
            Either::Left((done, _)) => done,
            Either::Right(((), work)) => {
                self.work.env.spawn(Box::pin(async move { drop(work.await) }));
                Err(Failure::Disk(Error::new(ErrorKind::Shutdown, "the job was told to end")))
            }
        }
    }

    /// Does `work`. Writes that are held back meanwhile go on when their time is over.
    async fn ticking<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            let tick = async {
                self.mirror.holds().await;
                self.work.timer.sleep(TICK).await;
            };
            match select(work.as_mut(), pin!(tick)).await {
                Either::Left((done, _)) => return done,
                // Nobody is held back while the job waits for its users.
                Either::Right(_) if self.work.job.state() == State::Paused => self.mirror.release(),
                Either::Right(_) => self.mirror.tick(),
            }
        }
    }
}

impl<F: Files> Ends<F> {
    fn new(
        work: &Work<'_, F>,
        source: &Arc<GraphOf<F>>,
        target: Arc<GraphOf<F>>,
        mirror: &Arc<Mirror>,
        is_over_parents: bool,
    ) -> Self {
        let block_bytes = super::block_bytes(work, source.size_bytes());
        Self {
            is_over_parents,
            touched: None,
            late: RefCell::default(),
            broken: work.broken,
            source: Aligned::new(source.clone()),
            target: Aligned::new(target),
            mirror: mirror.clone(),
            unflushed: Blocks::new(source.size_bytes(), block_bytes),
            buffer: Segments::zeroed(LANES * work.sizes.piece_bytes as usize),
            block_bytes,
        }
    }

    /// No block is marked.
    fn new_blocks(&self) -> Blocks {
        Blocks::new(self.source.size_bytes(), self.block_bytes)
    }

    async fn copy(&self, runs: &[Extent]) -> Result<(), Failure> {
        let mut room = 0;
        let places = runs.iter().map(|run| {
            let from = room;
            room += run.len_bytes as usize;
            from..room
        });
        let copies = runs.iter().zip(places).map(async |(run, place)| {
            let copied = self.copy_run(*run, &self.buffer.slice(place)).await;
            self.mirror.end_copy(*run, copied.is_ok());
            copied
        });
        join_all(copies).await.into_iter().collect()
    }

    async fn copy_run(&self, run: Extent, bytes: &Segments) -> Result<(), Failure> {
        // Asked before the read, as the mark was cleared before: what a guest changes from then on is marked again.
        let parts = if self.is_over_parents { self.own_runs(run).await? } else { vec![run] };
        if !parts.is_empty() {
            self.source.read(run, bytes).await.map_err(Failure::Disk)?;
        }
        self.mirror.was_read(run);
        self.unflushed.mark(run);
        for part in parts {
            let within = (part.start() - run.start()) as usize..(part.end() - run.start()) as usize;
            put(&self.target, part, &bytes.slice(within)).await.map_err(|error| self.not_written(error))?;
        }
        Ok(())
    }

    /// A write to the new place has failed with `error`. A link says of one for which it has waited in vain that it took too long, and for good: it cannot be tried again.
    fn not_written(&self, error: Error) -> Failure {
        if error.kind() == ErrorKind::TimedOut && error.is_permanent() {
            self.late.replace(Some(error.duplicate()));
        }
        Failure::Place(error)
    }

    /// What the disk's own image has of `run`, and what the new one has. What both lack is the same; what only the new one has, the disk's own image has
    /// given up since it was copied.
    async fn own_runs(&self, run: Extent) -> Result<Vec<Extent>, Failure> {
        if let Some(touched) = &self.touched {
            let may_have = touched.has_any(run);
            touched.mark(run);
            if may_have && self.broken != Broken::GivenUpLeftOut {
                // All that the disk shows there is right, whichever image has it.
                return Ok(vec![run]);
            }
            return self.source.inner().own_runs_of(1, run, usize::MAX).await.map_err(Failure::Disk);
        }
        let mut runs = self.source.inner().own_runs_of(1, run, usize::MAX).await.map_err(Failure::Disk)?;
        if self.broken != Broken::GivenUpLeftOut {
            runs.extend(self.target.inner().own_runs_of(1, run, usize::MAX).await.map_err(Failure::Place)?);
        }
        runs.sort_unstable_by_key(|run| run.start());
        let mut joined: Vec<Extent> = Vec::new();
        for run in runs {
            match joined.last_mut() {
                Some(last) if last.end() >= run.start() => {
                    *last = Extent::from_range(last.start()..last.end().max(run.end()));
                }
                _ => joined.push(run),
            }
        }
        Ok(joined)
    }
}

/// Writes `bytes` to `run` of the new image `target`. Zeroes take no space there.
///
/// # Errors
/// Its own.
pub(super) async fn put(target: &impl Disk, run: Extent, bytes: &Segments) -> Result<()> {
    let block = MOST_GRAIN_BYTES as usize;
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
            true => target.write_zeroes(extent, ZEROES).await?,
            false => target.write(extent, &bytes.slice(part.clone()), false).await?,
        }
        at = part.end;
    }
    Ok(())
}
