//! Neighbours that come in the same turn of a worker go to the graph as one request.
//!
//! A request first lines up and gives way: the ring or connection goes on to start the other requests of its turn. When the request
//! goes on, at the end of that turn, all neighbours that were there are in line, too. The first of them takes the others with it. So no
//! request is held back for one that might come, and one without a neighbour loses no time.
//!
//! Order: requests in flight together have none, but a group has no two requests that overlap, unless both read; and a request of
//! another kind (a flush, a write with `fua`, a discard) ends the group. Only requests of one group are merged.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use slab::Slab;
use spile_core::{Extent, Io, Op, Result, SHARDS, Segments, shard_number};

/// The most segments of a merged request: a kernel takes 1024 at once.
const MAX_SEGMENTS: usize = 512;

/// The requests that have lined up, by worker.
pub(super) struct Merger {
    max_bytes: u64,
    turns: Box<[Mutex<Turn>]>,
}

/// The requests of one worker that have lined up and have not ended.
#[derive(Default)]
struct Turn {
    requests: Slab<Request>,
    group: u64,
}

struct Request {
    op: Op,
    extent: Extent,
    segments: Segments,
    group: u64,
    state: State,
}

enum State {
    /// It may be taken.
    InLine,
    /// Another one has taken it, and wakes it when that has ended.
    Taken(Option<Waker>),
    /// The request that took it has ended: well, or with an error that may be a neighbour's.
    Ended { well: bool },
}

/// What becomes of a request at the end of its turn.
enum Lot {
    /// It has no neighbour, and is no longer in line.
    Alone,
    /// It takes neighbours along.
    Leads(Merged),
    /// Another one takes it.
    Follows,
}

/// Several requests as one.
struct Merged {
    extent: Extent,
    segments: Segments,
    /// The numbers of the requests but for the one that leads.
    followers: Vec<usize>,
}

impl Merger {
    /// Merged requests have at most `max_bytes`.
    pub(super) fn new(max_bytes: u64) -> Self {
        Self { max_bytes, turns: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }

    /// False for a request that is too large to be merged. It would pass those in line, which does no harm: it may overlap them, but
    /// requests in flight together have no order.
    pub(super) fn concerns(&self, io: &Io<'_>) -> bool {
        io.extent.len_bytes < self.max_bytes
    }

    /// Executes `io` alone or with its neighbours. `on` executes a request.
    pub(super) async fn execute(
        &self,
        merges: &AtomicU64,
        io: Io<'_>,
        on: impl AsyncFn(Io<'_>) -> Result<()>,
    ) -> Result<()> {
        let turn = &self.turns[shard_number()];
        let Some(number) = lock(turn).line_up(&io) else { return on(io).await };
        give_way().await;
        let lot = lock(turn).draw(number, self.max_bytes);
        let ended_well = match lot {
            Lot::Alone => false,
            Lot::Follows => poll_fn(|context| lock(turn).poll_taken(number, context.waker())).await,
            Lot::Leads(merged) => {
                merges.fetch_add(merged.followers.len() as u64, Ordering::Relaxed);
                let result = on(Io { op: io.op, extent: merged.extent, segments: &merged.segments }).await;
                let wakers = lock(turn).end(number, &merged.followers, result.is_ok());
                wakers.into_iter().for_each(Waker::wake);
                result.is_ok()
            }
        };
        // The error of a merged request may be due to a neighbour's part of it: each finds its own.
        if ended_well { Ok(()) } else { on(io).await }
    }
}

fn lock(turn: &Mutex<Turn>) -> MutexGuard<'_, Turn> {
    turn.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Turn {
    /// Puts a request in line. `None` for one of a kind that is never merged; those in line are not merged with later ones then.
    fn line_up(&mut self, io: &Io<'_>) -> Option<usize> {
        let is_plain = matches!(io.op, Op::Read | Op::Write { fua: false }) && !io.extent.is_empty();
        if !is_plain || self.has_conflict(io) {
            self.group += 1;
        }
        is_plain.then(|| {
            self.requests.insert(Request {
                op: io.op,
                extent: io.extent,
                segments: io.segments.clone(),
                group: self.group,
                state: State::InLine,
            })
        })
    }

    /// True when a request in line and `io` overlap and one of them writes.
    fn has_conflict(&self, io: &Io<'_>) -> bool {
        let in_line = self.requests.iter().map(|(_, request)| request).filter(|request| request.is_in_line(self.group));
        in_line
            .filter(|request| request.op.changes_data() || io.op.changes_data())
            .any(|request| request.extent.overlaps(&io.extent))
    }

    /// Decides what becomes of the request `number`.
    fn draw(&mut self, number: usize, max_bytes: u64) -> Lot {
        if !matches!(self.requests[number].state, State::InLine) {
            return Lot::Follows;
        }
        let first = &self.requests[number];
        let Some(neighbour) = self.neighbour(first, &Run::of(first), max_bytes) else {
            self.requests.remove(number);
            return Lot::Alone;
        };
        let run = self.run_from(number, neighbour, max_bytes);
        let (mut segments, mut followers) = (Segments::new(), Vec::with_capacity(run.len() - 1));
        let (start, end) = (self.requests[run[0]].extent.start(), self.requests[run[run.len() - 1]].extent.end());
        for other in run {
            let request = &mut self.requests[other];
            request.segments.iter().for_each(|segment| segments.push_joined(segment.clone()));
            request.state = State::Taken(None);
            if other != number {
                followers.push(other);
            }
        }
        Lot::Leads(Merged { extent: Extent::from_range(start..end), segments, followers })
    }

    /// The numbers of the requests that go on where others end, in the order of the disk: `number`, its `neighbour`, and all others.
    fn run_from(&self, number: usize, neighbour: usize, max_bytes: u64) -> VecDeque<usize> {
        let first = &self.requests[number];
        let (mut numbers, mut run) = (VecDeque::from([number]), Run::of(first));
        let mut next = Some(neighbour);
        while let Some(number) = next {
            let request = &self.requests[number];
            match request.extent.start() == run.extent.end() {
                true => numbers.push_back(number),
                false => numbers.push_front(number),
            }
            run.grow(request);
            next = self.neighbour(first, &run, max_bytes);
        }
        numbers
    }

    /// The number of a request in line that `run`, which `first` leads, can take along.
    fn neighbour(&self, first: &Request, run: &Run, max_bytes: u64) -> Option<usize> {
        let found = self.requests.iter().find(|(_, request)| {
            (request.extent.start() == run.extent.end() || request.extent.end() == run.extent.start())
                && request.is_in_line(first.group)
                && request.op == first.op
                && run.extent.len_bytes + request.extent.len_bytes <= max_bytes
                && run.segments + request.segments.as_slice().len() <= MAX_SEGMENTS
        });
        found.map(|(number, _)| number)
    }

    /// Ends a merged request: takes its leader out of the line, and tells its followers. Their wakers are returned.
    fn end(&mut self, leader: usize, followers: &[usize], well: bool) -> Vec<Waker> {
        self.requests.remove(leader);
        let states = followers.iter().map(|number| {
            let state = &mut self.requests[*number].state;
            std::mem::replace(state, State::Ended { well })
        });
        let wakers = states.filter_map(|state| match state {
            State::Taken(waker) => waker,
            State::InLine | State::Ended { .. } => None,
        });
        wakers.collect()
    }

    /// Waits for the end of the request that has taken `number`. True when it has ended well.
    fn poll_taken(&mut self, number: usize, waker: &Waker) -> Poll<bool> {
        match &mut self.requests[number].state {
            State::Ended { well } => {
                let well = *well;
                self.requests.remove(number);
                Poll::Ready(well)
            }
            State::Taken(known) => {
                *known = Some(waker.clone());
                Poll::Pending
            }
            State::InLine => unreachable!("it was taken"),
        }
    }
}

impl Request {
    /// True when it may be merged with others of the group `group`.
    fn is_in_line(&self, group: u64) -> bool {
        self.group == group && matches!(self.state, State::InLine)
    }
}

/// What requests that follow each other on the disk have together.
struct Run {
    extent: Extent,
    /// So many segments.
    segments: usize,
}

impl Run {
    fn of(request: &Request) -> Self {
        Self { extent: request.extent, segments: request.segments.as_slice().len() }
    }

    /// Takes a neighbour in.
    fn grow(&mut self, request: &Request) {
        let (mine, its) = (self.extent.range(), request.extent.range());
        self.extent = Extent::from_range(mine.start.min(its.start)..mine.end.max(its.end));
        self.segments += request.segments.as_slice().len();
    }
}

/// Lets the worker start the other requests of this turn.
async fn give_way() {
    let mut gave_way = false;
    poll_fn(|context| {
        if std::mem::replace(&mut gave_way, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
