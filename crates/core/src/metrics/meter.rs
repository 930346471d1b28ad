//! [`Meter`]: counters that several threads write, each its own.

use std::cell::Cell;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll};

use pin_project_lite::pin_project;

use super::{Counters, Ended, Op, Reading, is_counting, now_ns, turn_ns};
use crate::Result;

/// So many threads count without waiting for each other; more than any host has workers of one process.
const THREADS: usize = 64;

/// Counts the requests of one place, such as a disk or a store, on any thread. A request may end on another thread than
/// the one on which it began.
#[derive(Debug)]
pub struct Meter {
    made_ns: u64,
    /// By the number of the thread, made when the thread first counts here.
    own: [OnceLock<Box<Counters>>; THREADS],
    /// For threads beyond [`THREADS`].
    common: Mutex<Counters>,
}

impl Default for Meter {
    fn default() -> Self {
        Self::new()
    }
}

impl Meter {
    /// A meter that has counted nothing.
    pub fn new() -> Self {
        Self { made_ns: now_ns(), own: [const { OnceLock::new() }; THREADS], common: Mutex::default() }
    }

    /// When this meter was made, in nanoseconds of CLOCK_MONOTONIC. A meter that was made at another moment is another one, with counts of
    /// its own.
    pub fn made_ns(&self) -> u64 {
        self.made_ns
    }

    /// Counts a request from its worker's turn on, until the result is ended.
    #[inline]
    pub fn begin(&self, op: Op, len_bytes: u64) -> InFlight<'_> {
        let mut begun_ns = 0;
        self.here(|counters| {
            begun_ns = turn_ns();
            counters.begin(op, len_bytes, begun_ns);
        });
        InFlight { meter: self, request: Ended { op, failed: true, begun_ns } }
    }

    /// Counts `work` as one request.
    ///
    /// # Errors
    /// The work's own.
    pub async fn measure<T>(&self, op: Op, len_bytes: u64, work: impl Future<Output = Result<T>>) -> Result<T> {
        let in_flight = self.begin(op, len_bytes);
        let result = work.await;
        in_flight.end(result.is_err());
        result
    }

    /// Counts `work` as one request that begins and ends with the worker's turns: its times are those of [`turn_ns`]. Work
    /// that never has to wait takes no time, and is counted without a look at the clock.
    ///
    /// Give it a large future pinned (`pin!(work)`): one that is given by value is copied.
    #[inline]
    pub fn measure_by_turns<T, F: Future<Output = Result<T>>>(
        &self,
        op: Op,
        len_bytes: u64,
        work: F,
    ) -> ByTurns<'_, F> {
        ByTurns { meter: self, op, len_bytes, in_flight: None, work }
    }

    /// What was counted up to now, on all threads.
    pub fn read(&self) -> Reading {
        let mut sum = Reading::default();
        self.own.iter().filter_map(OnceLock::get).for_each(|counters| sum += &counters.read(0));
        // Threads that count here wait for this lock, so it is taken last.
        sum += &self.lock_common().read(0);
        // The clock is read last: nothing that was counted lies after the moment of the reading.
        sum.advance_to(now_ns());
        sum
    }

    #[inline]
    fn here(&self, count: impl FnOnce(&Counters)) {
        match self.own.get(NUMBER.get()).and_then(OnceLock::get) {
            Some(own) => count(own),
            None => self.elsewhere(count),
        }
    }

    /// This thread counts here for the first time, has no number, or counts nothing.
    #[cold]
    fn elsewhere(&self, count: impl FnOnce(&Counters)) {
        let number = match NUMBER.get() {
            UNKNOWN => take_number(),
            known => known,
        };
        match self.own.get(number) {
            Some(own) => count(own.get_or_init(Box::default)),
            None if number == NOT_COUNTING => {}
            None => count(&self.lock_common()),
        }
    }

    fn lock_common(&self) -> MutexGuard<'_, Counters> {
        self.common.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pin_project! {
    /// Work that is counted by turns: what [`Meter::measure_by_turns`] returns.
    #[must_use = "futures do nothing unless they are awaited"]
    pub struct ByTurns<'a, F> {
        meter: &'a Meter,
        op: Op,
        len_bytes: u64,
        // Once the work has had to wait.
        in_flight: Option<InFlight<'a>>,
        #[pin]
        work: F,
    }
}

impl<T, F: Future<Output = Result<T>>> Future for ByTurns<'_, F> {
    type Output = Result<T>;

    #[inline]
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        let this = self.project();
        let Poll::Ready(result) = this.work.poll(context) else {
            if this.in_flight.is_none() {
                *this.in_flight = Some(this.meter.begin(*this.op, *this.len_bytes));
            }
            return Poll::Pending;
        };
        match this.in_flight.take() {
            None => this.meter.here(|counters| counters.begin_and_end(*this.op, *this.len_bytes, result.is_err())),
            Some(in_flight) => in_flight.end_in_turn(result.is_err()),
        }
        Poll::Ready(result)
    }
}

/// A request in flight. One that is dropped without an end, by a panic, counts as failed.
#[derive(Debug)]
pub struct InFlight<'a> {
    meter: &'a Meter,
    request: Ended,
}

impl InFlight<'_> {
    /// The request ends now.
    #[inline]
    pub fn end(mut self, failed: bool) {
        self.request.failed = failed;
    }

    /// The request ends with the worker's turn, that is at [`turn_ns`]: no look at the clock of its own.
    #[inline]
    fn end_in_turn(mut self, failed: bool) {
        self.request.failed = failed;
        self.meter.here(|counters| counters.end(self.request, turn_ns()));
        std::mem::forget(self);
    }
}

impl Drop for InFlight<'_> {
    #[inline]
    fn drop(&mut self) {
        self.meter.here(|counters| counters.end(self.request, now_ns()));
    }
}

/// Numbers of threads that live, the lowest free one first. A number that was given back goes to another thread through
/// this lock, which therefore sees all that the last one has counted.
static TAKEN: Mutex<u64> = Mutex::new(0);

/// The thread has no number, because all are taken or because it ends.
const COMMON: usize = THREADS;
/// The thread has not asked for a number.
const UNKNOWN: usize = THREADS + 1;
/// This process counts nothing.
const NOT_COUNTING: usize = THREADS + 2;

thread_local! {
    /// This thread's number. It lies apart from what gives it back, so that a look at it is one load.
    static NUMBER: Cell<usize> = const { Cell::new(UNKNOWN) };
    static GIVES_BACK: GivesBack = const { GivesBack };
}

/// Gives this thread's number back when the thread ends.
struct GivesBack;

/// Takes a number for this thread. [`COMMON`] when there is none.
#[cold]
fn take_number() -> usize {
    if !is_counting() {
        NUMBER.set(NOT_COUNTING);
        return NOT_COUNTING;
    }
    let number = match GIVES_BACK.try_with(|_| ()) {
        Ok(()) => {
            let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
            let number = taken.trailing_ones() as usize;
            if number < THREADS {
                *taken |= 1 << number;
            }
            number
        }
        Err(_) => COMMON,
    };
    NUMBER.set(number);
    number
}

impl Drop for GivesBack {
    fn drop(&mut self) {
        let number = NUMBER.replace(COMMON);
        if number < THREADS {
            *TAKEN.lock().unwrap_or_else(PoisonError::into_inner) &= !(1 << number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, ErrorKind};

    #[test]
    fn the_integral_is_the_sum_of_the_times_in_flight() {
        let meter = Meter::new();
        let long = meter.begin(Op::Read, 4096);
        let short = meter.begin(Op::Write, 512);
        let before = meter.read();
        std::thread::sleep(std::time::Duration::from_millis(2));
        short.end(false);
        let middle = meter.read();
        let writes = middle.op(Op::Write);
        assert_eq!((middle.in_flight(), writes.ended, writes.bytes, writes.errors), (1, 1, 512, 0));
        long.end(true);
        let after = meter.read();
        let depth = middle.average_depth_since(&before);
        assert!((1.0..=2.0).contains(&depth), "{depth}");
        assert_eq!(after.op(Op::Read).errors, 1);
        // Nothing is in flight any more: the integral stands still.
        assert_eq!(meter.read().depth_integral_ns, after.depth_integral_ns);
        assert!(after.depth_integral_ns >= middle.depth_integral_ns);
    }

    #[test]
    fn requests_may_end_on_another_thread() {
        let meter = Meter::new();
        let begun = meter.read();
        let request = meter.begin(Op::Flush, 0);
        std::thread::scope(|scope| scope.spawn(|| request.end(false)).join().unwrap());
        let reading = meter.read();
        assert_eq!((reading.in_flight(), reading.op(Op::Flush).ended), (0, 1));
        assert!(reading.depth_integral_ns <= reading.at_ns - begun.at_ns);
    }

    #[test]
    fn no_count_is_lost_with_more_threads_than_numbers() {
        let meter = Meter::new();
        std::thread::scope(|scope| {
            for _ in 0..THREADS + 20 {
                scope.spawn(|| (0..100).for_each(|_| meter.begin(Op::Write, 2).end(false)));
            }
            (0..100).for_each(|_| meter.begin(Op::Write, 2).end(false));
        });
        let writes = meter.read().ops[Op::Write as usize].clone();
        let requests = (THREADS as u64 + 21) * 100;
        assert_eq!((writes.begun, writes.ended, writes.bytes), (requests, requests, 2 * requests));
        assert_eq!(writes.latency.count(), requests);
    }

    #[test]
    fn errors_are_counted_and_so_is_what_panics() {
        let meter = Meter::new();
        let mut work = Box::pin(meter.measure(Op::Discard, 8, async { Err::<(), _>(Error::new(ErrorKind::Io, "x")) }));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let polled = work.as_mut().poll(&mut context);
        assert!(matches!(polled, std::task::Poll::Ready(Err(_))));
        drop(meter.begin(Op::Discard, 8));
        let discards = meter.read().ops[Op::Discard as usize].clone();
        assert_eq!((discards.ended, discards.errors), (2, 2));
    }
}
