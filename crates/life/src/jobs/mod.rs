//! Jobs: long work on a disk's images, which can be watched, paused, slowed, cancelled, and begun again after a crash.
//!
//! A job moves pieces. Between two pieces it asks its [`Job`] whether it may go on ([`Job::go_on`]): there it waits while it is paused,
//! keeps its rate, and learns that it is to end. What it has done by then stays done and is valid. The [`note`] beside the disk says what the
//! job is; how far it has come is seen in the images.

pub mod note;
mod pace;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use event_listener::Event;
use spile_core::{Error, ErrorKind, Result, Timer};

pub use self::note::{Merged, Note, Plan, Wishes, which};
use self::pace::Pace;
use crate::motion::{Motion, Status};

/// What has become of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It works.
    Running,
    /// It waits until it is resumed.
    Paused,
    /// It has done all there was to do.
    Done,
    /// It was cancelled; what it had done stays.
    Cancelled,
    /// It has ended with its process, and the next one that opens the disk for writing goes on with it.
    Stopped,
    /// It has failed; what it had done stays.
    Failed,
}

impl State {
    /// Its name in JSON and in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Done => "done",
            Self::Cancelled => "cancelled",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
        }
    }

    /// True when the job does no more.
    pub fn is_over(self) -> bool {
        !matches!(self, Self::Running | Self::Paused)
    }
}

/// A job that has worked for less has no rate.
const LEAST_WORKED_NS: u64 = 1_000_000;

/// What those who look are told of a job.
#[derive(Debug)]
pub struct Report {
    /// What has become of it.
    pub state: State,
    /// Bytes that are moved. It never falls.
    pub done_bytes: u64,
    /// Bytes that are to be moved in all, as far as is known.
    pub total_bytes: u64,
    /// The rate that it must not exceed, in bytes a second; `None`: as fast as the guest leaves room for.
    pub limit_bytes_per_s: Option<u64>,
    /// Bytes a second that it moved on average, pauses left out.
    pub bytes_per_s: u64,
    /// How long it will take at this rate, in seconds.
    pub eta_s: Option<u64>,
    /// Why it has failed.
    pub error: Option<Error>,
    /// How far it is, when it moves the disk.
    pub motion: Option<Motion>,
}

/// What its users want of a job, and what has become of it.
struct Control {
    state: State,
    /// The state in which it is to end at the next border, if it is.
    ending: Option<State>,
    limit_bytes_per_s: Option<u64>,
    /// Nothing has refused the job: it changes images.
    is_accepted: bool,
    /// A job that would go on for ever is to come to its end.
    is_to_finish: bool,
    error: Option<Error>,
    status: Option<Arc<Status>>,
}

/// One job: what its users want of it, and how far it is. Shared by whoever does the work and whoever looks.
pub struct Job {
    control: Mutex<Control>,
    changed: Event,
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
    /// Time spent on pieces, their delays included.
    worked_ns: AtomicU64,
}

impl Job {
    /// A job that has not begun, of which its users want this. A rate of 0 is none.
    pub fn new(wishes: Wishes) -> Self {
        let state = if wishes.is_paused { State::Paused } else { State::Running };
        let limit_bytes_per_s = wishes.limit_bytes_per_s.filter(|limit| *limit > 0);
        let control = Control {
            state,
            ending: None,
            limit_bytes_per_s,
            is_accepted: false,
            is_to_finish: false,
            error: None,
            status: None,
        };
        Self {
            control: Mutex::new(control),
            changed: Event::new(),
            done_bytes: AtomicU64::new(0),
            total_bytes: AtomicU64::new(0),
            worked_ns: AtomicU64::new(0),
        }
    }

    /// Has the job wait at the next border.
    pub fn pause(&self) {
        self.change(|control| control.state = State::Paused);
    }

    /// Has a paused job go on.
    pub fn resume(&self) {
        self.change(|control| control.state = State::Running);
    }

    /// Has the job end at the next border and not go on later.
    pub fn cancel(&self) {
        self.change(|control| control.ending = Some(State::Cancelled));
    }

    /// Has the job end at the next border; the next process that opens the disk for writing goes on with it.
    pub fn stop(&self) {
        self.change(|control| _ = control.ending.get_or_insert(State::Stopped));
    }

    /// Has a job that would go on for ever come to its end.
    pub fn finish(&self) {
        self.change(|control| control.is_to_finish = true);
    }

    /// The job is not to come to its end any more, unless it is about to.
    pub fn take_finish_back(&self) {
        self.change(|control| control.is_to_finish = false);
    }

    /// True when the job is to come to its end.
    pub(crate) fn is_to_finish(&self) -> bool {
        self.control().is_to_finish
    }

    /// Waits until the job is told what to do: to come to its end, or to end here.
    pub(crate) async fn told_to_finish(&self) {
        self.wait_for(|control| control.is_to_finish || control.ending.is_some()).await;
    }

    /// The rate that the job must not exceed from now on, in bytes a second.
    pub fn set_limit(&self, limit_bytes_per_s: Option<u64>) {
        self.change(|control| control.limit_bytes_per_s = limit_bytes_per_s);
    }

    /// What its users want of it now. A job that was told to end keeps what they wanted before.
    pub(crate) fn wishes(&self) -> Wishes {
        let control = self.control();
        Wishes { is_paused: control.state == State::Paused, limit_bytes_per_s: control.limit_bytes_per_s }
    }

    /// Changes what is wanted of a job that is not over.
    fn change(&self, change: impl FnOnce(&mut Control)) {
        let mut control = self.control();
        if !control.state.is_over() {
            change(&mut control);
        }
        drop(control);
        self.changed.notify(usize::MAX);
    }

    fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What has become of the job.
    pub fn state(&self) -> State {
        self.control().state
    }

    /// Waits until the job is over.
    pub async fn over(&self) -> State {
        self.wait_for(|control| control.state.is_over()).await;
        self.state()
    }

    /// True once nothing has refused the job.
    pub fn is_accepted(&self) -> bool {
        self.control().is_accepted
    }

    /// Waits until it is known whether the job is refused.
    ///
    /// # Errors
    /// Why it is refused; then nothing has changed.
    pub async fn accepted(&self) -> Result<()> {
        self.wait_for(|control| control.is_accepted || control.state.is_over()).await;
        let control = self.control();
        match &control.error {
            Some(error) if !control.is_accepted => Err(error.duplicate()),
            _ => Ok(()),
        }
    }

    async fn wait_for(&self, is_there: impl Fn(&Control) -> bool) {
        loop {
            let changed = self.changed.listen();
            if is_there(&self.control()) {
                return;
            }
            changed.await;
        }
    }

    /// Says that nothing refuses the job.
    pub fn accept(&self) {
        self.change(|control| control.is_accepted = true);
    }

    /// Where those who look find how far the move is.
    pub(crate) fn set_status(&self, status: Arc<Status>) {
        self.control().status = Some(status);
    }

    /// Waits until the job is told to end, or is over.
    pub async fn told_to_end(&self) {
        self.wait_for(|control| control.ending.is_some() || control.state.is_over()).await;
    }

    /// True when the job is to end because its process does.
    pub fn is_stopping(&self) -> bool {
        self.control().ending == Some(State::Stopped)
    }

    /// What there is to tell now.
    pub fn report(&self) -> Report {
        let control = self.control();
        let done_bytes = self.done_bytes.load(Ordering::Relaxed);
        let total_bytes = self.total_bytes.load(Ordering::Relaxed).max(done_bytes);
        // What had nothing to copy has no rate.
        let worked_ns = Some(self.worked_ns.load(Ordering::Relaxed)).filter(|worked_ns| *worked_ns >= LEAST_WORKED_NS);
        let rate = |worked_ns| u128::from(done_bytes) * 1_000_000_000 / u128::from(worked_ns);
        let bytes_per_s = worked_ns.map_or(0, rate).min(u64::MAX.into()) as u64;
        let is_under_way = control.state == State::Running && bytes_per_s > 0;
        Report {
            state: control.state,
            done_bytes,
            total_bytes,
            limit_bytes_per_s: control.limit_bytes_per_s,
            bytes_per_s,
            eta_s: is_under_way.then(|| (total_bytes - done_bytes).div_ceil(bytes_per_s)),
            error: control.error.as_ref().map(Error::duplicate),
            motion: control.status.as_ref().map(|status| status.look()),
        }
    }

    /// Says how many bytes there are to move in all, those that are moved already included.
    pub(crate) fn set_total(&self, total_bytes: u64) {
        self.total_bytes.store(total_bytes, Ordering::Relaxed);
    }

    /// Says that so many bytes are moved in all.
    pub(crate) fn set_done(&self, done_bytes: u64) {
        self.done_bytes.fetch_max(done_bytes, Ordering::Relaxed);
    }

    /// How a job ends whose work ended with `result`.
    pub(crate) fn outcome(&self, result: &Result<()>) -> State {
        match (result, self.control().ending) {
            (Ok(()), _) => State::Done,
            (Err(error), Some(ending)) if error.kind() == ErrorKind::Shutdown => ending,
            (Err(_), _) => State::Failed,
        }
    }

    /// Says how the job has ended.
    pub fn end(&self, result: &Result<()>) {
        let state = self.outcome(result);
        let mut control = self.control();
        control.state = state;
        control.error = result.as_ref().err().filter(|_| state == State::Failed).map(Error::duplicate);
        drop(control);
        self.changed.notify(usize::MAX);
    }

    /// Asks whether the job may go on with its next piece: waits while it is paused.
    ///
    /// # Errors
    /// `Shutdown` when it is to end here.
    pub(crate) async fn go_on(&self) -> Result<Option<u64>> {
        loop {
            let changed = self.changed.listen();
            {
                let control = self.control();
                if control.ending.is_some() || control.state.is_over() {
                    return Err(Error::new(ErrorKind::Shutdown, "the job was told to end"));
                }
                if control.state != State::Paused {
                    return Ok(control.limit_bytes_per_s);
                }
            }
            changed.await;
        }
    }

    /// Moves one piece, once it may. `work` says how many bytes count for the rate: zeroes and holes that are passed over cost no time. `busy`
    /// counts the requests of guests: while there are some, the job lets them have half of the time.
    ///
    /// # Errors
    /// `Shutdown` when the job is to end here; those of the move.
    pub(crate) async fn piece(
        &self,
        timer: &dyn Timer,
        busy: impl Fn() -> u64,
        work: impl Future<Output = Result<u64>>,
    ) -> Result<()> {
        self.piece_in_lane(timer, true, busy, || false, work).await
    }

    /// As [`Self::piece`], for one of several pieces that are moved at the same time: those of the first lane count as the job's time. When
    /// `is_over`, because another lane has failed, this one waits no longer for its next piece.
    ///
    /// # Errors
    /// As there.
    pub(crate) async fn piece_in_lane(
        &self,
        timer: &dyn Timer,
        is_first: bool,
        busy: impl Fn() -> u64,
        is_over: impl Fn() -> bool,
        work: impl Future<Output = Result<u64>>,
    ) -> Result<()> {
        self.go_on().await?;
        let (begun_ns, busy_before) = (timer.now_ns(), busy());
        let bytes = work.await?;
        let took_ns = timer.now_ns().saturating_sub(begun_ns);
        let pace = Pace { begun_ns, bytes, took_ns, is_busy: busy() != busy_before };
        while !is_over()
            && let Some(pause) = pace.pause(self.go_on().await?, timer.now_ns())
        {
            timer.sleep(pause).await;
        }
        if is_first {
            self.worked_ns.fetch_add(timer.now_ns().saturating_sub(begun_ns), Ordering::Relaxed);
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use std::pin::Pin;
    use std::time::Duration;

    use super::*;

    /// A clock that moves with each sleep, and with nothing else.
    #[derive(Default)]
    pub(crate) struct Sleeps(AtomicU64);

    impl Timer for Sleeps {
        fn sleep(&self, time: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
            self.0.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
            Box::pin(async {})
        }

        fn now_ns(&self) -> u64 {
            self.0.load(Ordering::Relaxed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::Sleeps;
    use super::*;

    #[test]
    fn a_job_that_is_over_changes_no_more() {
        let job = Job::new(Wishes { limit_bytes_per_s: Some(7), ..Wishes::default() });
        job.pause();
        assert_eq!(job.state(), State::Paused);
        job.resume();
        job.cancel();
        // A stop does not make a job that was cancelled go on later.
        job.stop();
        job.end(&Err(Error::new(ErrorKind::Shutdown, "ended")));
        assert_eq!(job.state(), State::Cancelled);
        job.pause();
        job.set_limit(None);
        assert_eq!((job.state(), job.report().limit_bytes_per_s), (State::Cancelled, Some(7)));
    }

    #[test]
    fn what_is_passed_over_takes_nothing_of_a_jobs_rate() {
        let job = Job::new(Wishes { limit_bytes_per_s: Some(1 << 20), ..Wishes::default() });
        let slept = |copied_bytes: u64| {
            let timer = Sleeps::default();
            let piece = job.piece(&timer, || 0, async { Ok(copied_bytes) });
            futures_util::FutureExt::now_or_never(piece).expect("nothing waits").unwrap();
            timer.now_ns()
        };
        assert_eq!([slept(0), slept(1 << 20), slept(256 << 10)], [0, 1_000_000_000, 250_000_000]);
    }

    #[test]
    fn a_job_that_is_stopped_keeps_what_was_wanted_of_it() {
        let job = Job::new(Wishes { is_paused: false, limit_bytes_per_s: Some(0) });
        assert_eq!(job.wishes(), Wishes::default());
        job.set_limit(Some(9));
        job.pause();
        job.stop();
        let wishes = job.wishes();
        assert_eq!(wishes, Wishes { is_paused: true, limit_bytes_per_s: Some(9) });
        assert_eq!(Job::new(wishes).state(), State::Paused);
    }

    #[test]
    fn a_failure_is_told_also_when_the_job_was_to_end() {
        let job = Job::new(Wishes::default());
        job.stop();
        job.end(&Err(Error::new(ErrorKind::NoSpace, "the volume is full")));
        let report = job.report();
        assert_eq!(report.state, State::Failed);
        assert!(report.error.unwrap().to_string().contains("the volume is full"));
    }

    #[test]
    fn progress_never_falls_and_never_passes_the_end() {
        let job = Job::new(Wishes::default());
        job.set_total(100);
        job.set_done(60);
        job.set_done(40);
        assert_eq!((job.report().done_bytes, job.report().total_bytes), (60, 100));
        job.set_done(120);
        assert_eq!(job.report().total_bytes, 120);
    }
}
