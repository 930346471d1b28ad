//! [`Line`]: which requests of one worker wait for each other, and which go on together.

use std::collections::BTreeMap;
use std::task::Waker;

use slab::Slab;
use spile_core::{Extent, Io, Op, Segments};

/// The most segments of a merged request: a kernel takes 1024 at once.
const MAX_SEGMENTS: usize = 512;

/// The requests of one worker that have come and have not ended.
pub(super) struct Line {
    /// The most bytes of a merged request.
    max_bytes: u64,
    requests: Slab<Request>,
    /// Requests that wait for earlier ones, in the order in which they came.
    waiting: Vec<usize>,
    /// Requests that are in line, in the order in which they lined up.
    in_line: Vec<usize>,
    /// Requests by where they begin, so that overlaps are found fast: no two of these overlap. They are all those that change data or have
    /// lined up, but for those that wait.
    places: BTreeMap<u64, usize>,
    /// By a number that no other run ever has: whoever comes late with an old one finds nothing.
    runs: BTreeMap<u64, Run>,
    next_run: u64,
    /// The group of requests that come now.
    group: u64,
    /// Those to be woken when nobody holds the lock of the line any more.
    woken: Vec<Waker>,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// It waits for earlier requests that it overlaps.
    Waits,
    /// It is in line.
    InLine,
    /// It goes on by itself.
    Alone,
    /// It is number `at` of the run `run`, in the order of the disk.
    InRun { run: u64, at: usize },
    /// The merged request of its run has ended: well, or with an error that may be a neighbour's.
    Ended { well: bool },
}

struct Request {
    piece: Piece,
    /// It may be merged.
    can_merge: bool,
    state: State,
    /// Wakes the request when its state changes.
    waker: Option<Waker>,
    /// Nobody waits for the request any more, but the merged request of its run is in flight.
    is_gone: bool,
}

/// A request or several neighbours.
#[derive(Clone, Copy)]
struct Piece {
    op: Op,
    extent: Extent,
    /// The number of its segments.
    segments: usize,
    group: u64,
}

/// Neighbours that go on as one request.
struct Run {
    extent: Extent,
    /// The numbers of its requests, in the order of the disk.
    requests: Vec<usize>,
    /// The memory of each, as far as they have brought it.
    segments: Vec<Segments>,
    /// So many have not brought it.
    missing: usize,
    /// The number of the request that executes the merged one, which has begun.
    leader: Option<usize>,
}

/// Several requests as one.
pub(super) struct Merged {
    pub(super) extent: Extent,
    pub(super) segments: Segments,
    /// The number of requests.
    pub(super) requests: u64,
}

impl Piece {
    /// True when both overlap and one of them changes data.
    fn conflicts(&self, other: &Self) -> bool {
        (self.op.changes_data() || other.op.changes_data()) && self.extent.overlaps(&other.extent)
    }

    /// Takes `next` in, if that goes on where this ends and both may be one request. True when it has.
    fn join(&mut self, next: &Self, max_bytes: u64) -> bool {
        let fits = self.extent.end() == next.extent.start()
            && (self.op, self.group) == (next.op, next.group)
            && self.extent.len_bytes + next.extent.len_bytes <= max_bytes
            && self.segments + next.segments <= MAX_SEGMENTS;
        if fits {
            self.extent = Extent::from_range(self.extent.start()..next.extent.end());
            self.segments += next.segments;
        }
        fits
    }
}

impl Line {
    pub(super) fn new(max_bytes: u64) -> Self {
        Self {
            max_bytes,
            requests: Slab::new(),
            waiting: Vec::new(),
            in_line: Vec::new(),
            places: BTreeMap::new(),
            runs: BTreeMap::new(),
            next_run: 0,
            group: 0,
            woken: Vec::new(),
        }
    }

    /// A request comes. Returns its number, and its state.
    pub(super) fn come(&mut self, io: &Io<'_>) -> (usize, State) {
        let is_plain = matches!(io.op, Op::Read | Op::Write { fua: false });
        let can_merge = is_plain && !io.extent.is_empty() && io.extent.len_bytes < self.max_bytes;
        if !can_merge && io.op != Op::Read {
            self.group += 1;
        }
        let piece = Piece { op: io.op, extent: io.extent, segments: io.segments.as_slice().len(), group: self.group };
        let number =
            self.requests.insert(Request { piece, can_merge, state: State::Waits, waker: None, is_gone: false });
        match self.must_wait(number, self.waiting.len()) {
            true => self.waiting.push(number),
            false => self.let_go(number),
        }
        (number, self.requests[number].state)
    }

    /// True when the request `number` conflicts with an earlier one: with one that has a place, or with one of the first `earlier` that wait.
    fn must_wait(&self, number: usize, earlier: usize) -> bool {
        let piece = &self.requests[number].piece;
        let mut waiting = self.waiting[..earlier].iter().map(|other| &self.requests[*other].piece);
        waiting.any(|other| other.conflicts(piece)) || self.placed_in(&piece.extent).any(|other| other.conflicts(piece))
    }

    /// The requests with a place that overlap `extent`.
    fn placed_in(&self, extent: &Extent) -> impl Iterator<Item = &Piece> {
        let start = extent.start();
        let before_end = self.places.range(..extent.end()).rev().map(|(_, number)| &self.requests[*number].piece);
        before_end.take_while(move |piece| piece.extent.end() > start)
    }

    /// The request `number` does not wait for others, or no longer: it lines up, if it may be merged.
    fn let_go(&mut self, number: usize) {
        let Request { piece, can_merge, .. } = self.requests[number];
        // A read may overlap another one, which has its place already.
        let has_room = piece.op.changes_data() || self.placed_in(&piece.extent).next().is_none();
        if has_room && !piece.extent.is_empty() && (can_merge || piece.op.changes_data()) {
            self.places.insert(piece.extent.start(), number);
        }
        match has_room && can_merge {
            true => {
                self.in_line.push(number);
                self.set(number, State::InLine);
            }
            false => self.set(number, State::Alone),
        }
    }

    fn set(&mut self, number: usize, state: State) {
        let request = &mut self.requests[number];
        request.state = state;
        self.woken.extend(request.waker.take());
    }

    /// Takes the wakers of all requests whose state has changed.
    pub(super) fn take_woken(&mut self) -> Vec<Waker> {
        std::mem::take(&mut self.woken)
    }

    /// The state of the request `number`, unless that is still `known`: then `waker` is woken when it changes.
    pub(super) fn state(&mut self, number: usize, known: State, waker: &Waker) -> Option<State> {
        let request = &mut self.requests[number];
        if request.state != known {
            return Some(request.state);
        }
        match &mut request.waker {
            Some(old) => old.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
        None
    }

    /// The number of the request that is first in line.
    pub(super) fn first(&self) -> Option<usize> {
        self.in_line.first().copied()
    }

    /// How many requests are in line.
    pub(super) fn length(&self) -> usize {
        self.in_line.len()
    }

    /// All requests in line go on, neighbours as runs.
    pub(super) fn end(&mut self) {
        let mut line = std::mem::take(&mut self.in_line);
        line.sort_unstable_by_key(|number| self.requests[*number].piece.extent.start());
        let mut rest = &line[..];
        while let Some((first, others)) = rest.split_first() {
            let mut whole = self.requests[*first].piece;
            let joined = others.iter().take_while(|next| whole.join(&self.requests[**next].piece, self.max_bytes));
            let (run, others) = rest.split_at(1 + joined.count());
            self.go_on(run, whole.extent);
            rest = others;
        }
        line.clear();
        self.in_line = line;
    }

    /// The requests `numbers`, which are neighbours, go on. Together they are `extent`.
    fn go_on(&mut self, numbers: &[usize], extent: Extent) {
        if let [number] = numbers {
            return self.set(*number, State::Alone);
        }
        let missing = numbers.len();
        let segments = vec![Segments::new(); missing];
        let run = self.next_run;
        self.next_run += 1;
        self.runs.insert(run, Run { extent, requests: numbers.to_vec(), segments, missing, leader: None });
        for (at, number) in numbers.iter().enumerate() {
            self.set(*number, State::InRun { run, at });
        }
    }

    /// A request brings its memory, the segments of number `at` of the run `run`. The last one gets the merged request.
    pub(super) fn bring(&mut self, run: u64, at: usize, segments: &Segments) -> Option<Merged> {
        let run = self.runs.get_mut(&run)?;
        run.segments[at] = segments.clone();
        run.missing -= 1;
        run.leader = (run.missing == 0).then(|| run.requests[at]);
        (run.missing == 0).then(|| {
            let mut segments = Segments::new();
            run.segments.drain(..).for_each(|own| own.iter().for_each(|one| segments.push_joined(one.clone())));
            Merged { extent: run.extent, segments, requests: run.requests.len() as u64 }
        })
    }

    /// The merged request of the run `run` has ended, or never comes about.
    pub(super) fn end_run(&mut self, run: u64, well: bool) {
        let requests = self.runs.remove(&run).map(|run| run.requests);
        for number in requests.into_iter().flatten() {
            self.set(number, State::Ended { well });
            if self.requests[number].is_gone {
                self.leave(number);
            }
        }
    }

    /// The request `number` has ended: those that wait for nothing else go on. One that ends early because of a panic leaves nobody
    /// waiting. As long as its bytes are on their way to the disk in a merged request, it keeps its place.
    pub(super) fn leave(&mut self, number: usize) {
        match self.requests[number].state {
            State::InRun { run, .. } if self.is_led_by_another(run, number) => {
                self.requests[number].is_gone = true;
                return;
            }
            State::Waits => self.waiting.retain(|other| *other != number),
            State::InLine => {
                let was_first = self.first() == Some(number);
                self.in_line.retain(|other| *other != number);
                if was_first {
                    self.end();
                }
            }
            State::InRun { run, .. } => self.end_run(run, false),
            State::Alone | State::Ended { .. } => {}
        }
        let extent = self.requests.remove(number).piece.extent;
        if self.places.get(&extent.start()) == Some(&number) {
            self.places.remove(&extent.start());
        }
        self.let_go_those_that_waited_for(extent);
    }

    /// True when the merged request of the run `run` has begun, and another request than `number` executes it.
    fn is_led_by_another(&self, run: u64, number: usize) -> bool {
        self.runs.get(&run).and_then(|run| run.leader).is_some_and(|leader| leader != number)
    }

    /// A request for `extent` has ended.
    fn let_go_those_that_waited_for(&mut self, extent: Extent) {
        let mut at = 0;
        while let Some(number) = self.waiting.get(at).copied() {
            if !self.requests[number].piece.extent.overlaps(&extent) || self.must_wait(number, at) {
                at += 1;
            } else {
                self.waiting.remove(at);
                self.let_go(number);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use spile_core::GuestOffset;

    use super::*;

    const PAGE: u64 = 4096;

    fn write_comes(line: &mut Line, page: u64) -> (usize, State) {
        let segments = Segments::zeroed(PAGE as usize);
        let extent = Extent { offset: GuestOffset(page * PAGE), len_bytes: PAGE };
        line.come(&Io::write(extent, &segments, false))
    }

    /// Two neighbours from that page on, as a run.
    fn neighbours(line: &mut Line, page: u64) -> ([usize; 2], u64) {
        let numbers = [page, page + 1].map(|page| write_comes(line, page).0);
        line.end();
        let State::InRun { run, .. } = line.requests[numbers[0]].state else { panic!("no run") };
        (numbers, run)
    }

    fn bring(line: &mut Line, number: usize) -> bool {
        let State::InRun { run, at } = line.requests[number].state else { panic!("no run") };
        line.bring(run, at, &Segments::zeroed(PAGE as usize)).is_some()
    }

    #[test]
    fn a_request_that_is_gone_keeps_its_place_as_long_as_its_bytes_are_in_flight() {
        let mut line = Line::new(16 * PAGE);
        let ([follower, leader], run) = neighbours(&mut line, 0);
        assert!(!bring(&mut line, follower) && bring(&mut line, leader));
        line.leave(follower);
        let (later, state) = write_comes(&mut line, 0);
        assert_eq!((state, line.requests[leader].state), (State::Waits, State::InRun { run, at: 1 }));
        line.end_run(run, true);
        assert_eq!(line.requests[leader].state, State::Ended { well: true });
        assert_eq!(line.requests[later].state, State::InLine);
    }

    #[test]
    fn a_run_that_is_over_ends_no_other_one() {
        let mut line = Line::new(16 * PAGE);
        let ([first, second], old) = neighbours(&mut line, 0);
        assert!(!bring(&mut line, first));
        // The run can never come about. The other request goes on alone.
        line.leave(first);
        assert_eq!(line.requests[second].state, State::Ended { well: false });
        let (others, new) = neighbours(&mut line, 8);
        line.end_run(old, true);
        assert!(line.bring(old, 1, &Segments::zeroed(PAGE as usize)).is_none());
        assert!(
            others.iter().all(|number| matches!(line.requests[*number].state, State::InRun { run, .. } if run == new))
        );
    }
}
