//! Neighbours that come in the same turn of a worker go to the graph as one request.
//!
//! A request first lines up. The first one in line gives way: the ring or connection goes on to start the other requests of its turn.
//! It gives way again as long as others have lined up meanwhile, because a connection starts the next request only when the one
//! before it waits. Then it ends the line: neighbours become runs, and every other request goes on alone. The last request
//! of a run that brings its memory takes the others with it. So no request is held back for one that might come, and one without a
//! neighbour loses no time.
//!
//! Order: a request waits for every earlier write (or other change) of its worker that it overlaps until that has ended, and a change
//! waits for the overlapping reads that have lined up, too.
//! The protocols of the fronts do not ask for that. But a merged request begins late, and when it fails its requests begin once more. So
//! without this rule the requests that are never merged (large and durable writes, discards, writes of zeroes) would overtake
//! writes that came before them. Moreover, each of these and each flush ends a group, and only requests of one group are merged.

mod line;

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use spile_core::metrics::span::{Moment, stamp};
use spile_core::{Io, Result, SHARDS, shard_number, yield_now};

use line::{Line, State};

/// A line of so many requests ends at once.
const LONG_LINE: usize = 256;

/// The requests that have come and have not ended, by worker.
pub(super) struct Merger {
    lines: Box<[Mutex<Line>]>,
}

impl Merger {
    /// Merged requests have at most `max_bytes`.
    pub(super) fn new(max_bytes: u64) -> Self {
        Self { lines: (0..SHARDS).map(|_| Mutex::new(Line::new(max_bytes))).collect() }
    }

    /// Executes `io` alone or with its neighbours. `on` executes a request.
    pub(super) async fn execute(
        &self,
        merges: &AtomicU64,
        io: Io<'_>,
        on: impl AsyncFn(Io<'_>) -> Result<()>,
    ) -> Result<()> {
        let (place, mut state) = Place::take(&self.lines[shard_number()], &io);
        if state == State::Waits {
            state = place.change_of(state).await;
        }
        if state == State::InLine {
            if place.is_first() {
                place.end_line().await;
            }
            state = place.change_of(state).await;
        }
        if let State::InRun { run, at } = state
            && place.run(run, at, merges, io, &on).await
        {
            return Ok(());
        }
        // Alone, or after a merged request has failed: the error may be due to a neighbour's part of it, so each finds its own.
        on(io).await
    }
}

/// A request's place among those of its worker, until the request has ended.
struct Place<'a> {
    line: &'a Mutex<Line>,
    number: usize,
}

impl<'a> Place<'a> {
    /// The place of `io`, which has just come, and what becomes of it first.
    fn take(line: &'a Mutex<Line>, io: &Io<'_>) -> (Self, State) {
        let (number, state) = lock(line).come(io);
        (Self { line, number }, state)
    }

    /// Has `work` change the line, and wakes whom that concerns when nobody holds the lock any more.
    fn with<T>(&self, work: impl FnOnce(&mut Line) -> T) -> T {
        let mut line = lock(self.line);
        let result = work(&mut line);
        let woken = line.take_woken();
        drop(line);
        woken.into_iter().for_each(Waker::wake);
        result
    }

    /// Waits until the request's state is no longer `state`. Returns the new one.
    async fn change_of(&self, state: State) -> State {
        poll_fn(|context| match lock(self.line).state(self.number, state, context.waker()) {
            Some(other) => Poll::Ready(other),
            None => Poll::Pending,
        })
        .await
    }

    /// True when the request is the first one in line.
    fn is_first(&self) -> bool {
        lock(self.line).first() == Some(self.number)
    }

    /// Gives way as long as others line up, then has all in line go on.
    async fn end_line(&self) {
        let mut seen = 0;
        loop {
            let length = lock(self.line).length();
            if length == seen || length >= LONG_LINE {
                break;
            }
            seen = length;
            yield_now().await;
        }
        self.with(Line::end);
    }

    /// Goes on with the others of its run, in which it is number `at`. True when the merged request has ended well.
    async fn run(
        &self,
        run: u64,
        at: usize,
        merges: &AtomicU64,
        io: Io<'_>,
        on: impl AsyncFn(Io<'_>) -> Result<()>,
    ) -> bool {
        let Some(merged) = lock(self.line).bring(run, at, io.segments) else {
            // The whole run waits for the store, whichever of its requests took the others along.
            stamp(Moment::Submitted);
            let state = self.change_of(State::InRun { run, at }).await;
            stamp(Moment::Completed);
            return state == State::Ended { well: true };
        };
        merges.fetch_add(merged.requests - 1, Ordering::Relaxed);
        let result = on(Io { op: io.op, extent: merged.extent, segments: &merged.segments }).await;
        self.with(|line| line.end_run(run, result.is_ok()));
        result.is_ok()
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.with(|line| line.leave(self.number));
    }
}

fn lock(line: &Mutex<Line>) -> MutexGuard<'_, Line> {
    line.lock().unwrap_or_else(PoisonError::into_inner)
}
