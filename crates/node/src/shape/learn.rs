//! [`Learner`]: into how many parts a disk's large requests are best split, found out with the disk's own requests.
//!
//! Reads and writes of each power of two of lengths are learned apart. Of each, turns of some requests take the number of
//! parts that is known as best and a candidate by turns, and their throughputs are compared: bytes that have ended, by the time in
//! which any of these requests was in flight.
//!
//! What trials may cost is bounded, so that learning is never worse than no split by more than a few percent:
//! - Candidates have 2, 4, 8 … parts, in this order. One that loses ends the climb: more parts would do worse. One that clearly loses its
//!   first turn gets no second one.
//! - A candidate's turn ends early once it has taken twice the time that the best one would have taken.
//! - Then the best number of parts is kept for many turns, twice as many after each climb that has found nothing new. Where
//!   that is one part, requests of these turns but for the last one are not looked at: they go on as without a shape.
//!
//! A candidate must win clearly to be kept, and one part (no split) must lose clearly to stay away.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use spile_core::{Io, Op};

/// Shorter requests are not split, in bytes.
pub(super) const LEAST_BYTES: u64 = 128 << 10;
/// Parts have at least so many bytes.
const LEAST_PART_BYTES: u64 = 8 << 10;
/// The most parts of a request, as a power of two.
const MAX_POWER: u32 = 6;
/// The powers of two of lengths that are learned apart: from [`LEAST_BYTES`] up to 8 MiB and more.
const CLASSES: usize = 7;

/// A turn has at least so many requests, and four times as many as are in flight together.
const TURN_REQUESTS: u64 = 16;
/// A turn takes at least so long, unless it has so many requests: what is shorter is not measured well.
const TURN_NS: u64 = 4_000_000;
const TURN_REQUESTS_MOST: u64 = 256;
/// The pairs of turns that are compared before a candidate is kept.
const PAIRS: usize = 3;
/// A candidate is kept when it has so many times the throughput of the best one so far.
const WINS: f64 = 1.08;
/// A candidate with less than so many times the throughput has lost.
const LOSES: f64 = 0.95;
/// A candidate with less than so many times the throughput in its first turn gets no second one. What else the host does can look like a
/// smaller loss.
const LOSES_CLEARLY: f64 = 0.75;
/// Turns between two climbs, at first and at most.
const REST_TURNS: (u64, u64) = (64, 4096);

/// What is known of one kind of large requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Learned {
    /// True for writes, false for reads.
    pub writes: bool,
    /// The kind's shortest requests, in bytes; the longest ones are just below twice as long.
    pub from_bytes: u64,
    /// The number of parts that has served them best; 1: no split.
    pub parts: u64,
}

/// Learns of all large requests of a disk.
#[derive(Default)]
pub(super) struct Learner {
    /// By [`class_of`].
    kinds: [Kind; 2 * CLASSES],
}

/// One kind of requests.
#[derive(Default)]
struct Kind {
    /// So many requests are not looked at. Workers that change this at the same moment may count one request for two: nothing
    /// depends on it.
    passing: AtomicU64,
    known: Mutex<Known>,
}

/// A request that [`Learner::end`] is to be told of.
pub(super) struct Trial {
    class: usize,
    turn: u64,
    /// The request's bytes, if it counts.
    bytes: u64,
}

impl Learner {
    /// False when the read or write `io` stays whole, and nothing is to be learned from it. To be asked once for each request.
    pub(super) fn concerns(&self, io: &Io<'_>) -> bool {
        if io.extent.len_bytes < LEAST_BYTES {
            return false;
        }
        let passing = &self.kinds[class_of(io)].passing;
        let left = passing.load(Ordering::Relaxed);
        if left > 0 {
            passing.store(left - 1, Ordering::Relaxed);
        }
        left == 0
    }

    /// A large read or write begins at `now_ns`. The first result is the size in bytes of the parts that it is to be split into; the request is
    /// not split when it is no longer than that.
    pub(super) fn begin(&self, io: &Io<'_>, now_ns: u64) -> (u64, Trial) {
        let class = class_of(io);
        let mut known = self.lock(class);
        let part_bytes = match known.power() {
            0 => u64::MAX,
            power => from_bytes(class) >> power,
        };
        let bytes = known.begin(io.extent.len_bytes, now_ns);
        (part_bytes, Trial { class, turn: known.turn.number, bytes })
    }

    /// The request has ended at `now_ns`, well or not.
    pub(super) fn end(&self, trial: Trial, well: bool, now_ns: u64) {
        let bytes = if well { trial.bytes } else { 0 };
        let mut known = self.lock(trial.class);
        known.end(trial.turn, bytes, now_ns, most_power(trial.class));
        let passing = std::mem::take(&mut known.passing);
        if passing > 0 {
            self.kinds[trial.class].passing.store(passing, Ordering::Relaxed);
        }
    }

    /// Of which requests something is known.
    pub(super) fn learned(&self) -> Vec<Learned> {
        let kinds = (0..2 * CLASSES).map(|class| (class, self.lock(class)));
        let known = kinds.filter(|(_, known)| known.turn.number > 0);
        known
            .map(|(class, known)| Learned {
                writes: class >= CLASSES,
                from_bytes: from_bytes(class),
                parts: 1 << known.best,
            })
            .collect()
    }

    fn lock(&self, class: usize) -> MutexGuard<'_, Known> {
        self.kinds[class].known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where in [`Learner::kinds`] requests like `io` are.
fn class_of(io: &Io<'_>) -> usize {
    let size = (io.extent.len_bytes.max(LEAST_BYTES) / LEAST_BYTES).ilog2() as usize;
    let direction = if io.op == Op::Read { 0 } else { CLASSES };
    direction + size.min(CLASSES - 1)
}

/// The length of the shortest requests of a class, in bytes.
fn from_bytes(class: usize) -> u64 {
    LEAST_BYTES << (class % CLASSES)
}

/// The most parts that a request of a class is split into, as a power of two.
fn most_power(class: usize) -> u32 {
    (from_bytes(class) / LEAST_PART_BYTES).ilog2().min(MAX_POWER)
}

/// What is known of one kind of requests, and what is being tried.
struct Known {
    /// The best number of parts, as a power of two.
    best: u32,
    doing: Doing,
    turn: Turn,
    /// Requests in flight that began in earlier turns. While there are any, nothing is measured.
    earlier: u64,
    /// So many turns the next rest has.
    rest_turns: u64,
    /// True when this climb has found a better number of parts.
    has_found: bool,
    /// The requests of the last turn that was not given up.
    turn_requests: u64,
    /// So many requests need not be looked at from now on.
    passing: u64,
}

enum Doing {
    /// The best is kept for so many turns.
    Rest { turns: u64 },
    /// `candidate` is compared with the best.
    Compare(Comparison),
}

/// Turns with the best number of parts and with a candidate.
struct Comparison {
    candidate: u32,
    /// Bytes per nanosecond of the turns so far.
    rates: Vec<f64>,
    /// The time that the last turn with the best one took.
    best_ns: u64,
}

/// Which turns of a comparison are the candidate's. Who comes first changes from pair to pair, so that a drift helps neither.
const IS_CANDIDATES: [bool; 2 * PAIRS] = [false, true, true, false, false, true];

/// What is measured of a turn.
#[derive(Default)]
struct Turn {
    number: u64,
    /// Requests of this turn in flight now, and at most.
    in_flight: u64,
    most_in_flight: u64,
    /// Since when the time of requests in flight is not in `busy_ns`; `None` while there are none.
    since_ns: Option<u64>,
    busy_ns: u64,
    requests: u64,
    bytes: u64,
}

impl Turn {
    /// True when it has as many requests and has taken as long as it must.
    fn is_over(&self) -> bool {
        let least = TURN_REQUESTS.max(4 * self.most_in_flight);
        self.requests >= least && (self.busy_ns >= TURN_NS || self.requests >= least.max(TURN_REQUESTS_MOST))
    }

    fn rate(&self) -> f64 {
        self.bytes as f64 / self.busy_ns.max(1) as f64
    }
}

impl Default for Known {
    fn default() -> Self {
        let (turn, doing) = (Turn::default(), Doing::Rest { turns: 1 });
        let rest_turns = REST_TURNS.0;
        Self { best: 0, doing, turn, earlier: 0, rest_turns, has_found: false, turn_requests: 0, passing: 0 }
    }
}

impl Known {
    /// The number of parts for a request that begins now, as a power of two.
    fn power(&self) -> u32 {
        match &self.doing {
            Doing::Compare(comparison) if comparison.tries_candidate() => comparison.candidate,
            _ => self.best,
        }
    }

    /// A request begins. Returns the bytes by which it counts.
    fn begin(&mut self, len_bytes: u64, now_ns: u64) -> u64 {
        let turn = &mut self.turn;
        turn.in_flight += 1;
        turn.most_in_flight = turn.most_in_flight.max(turn.in_flight);
        if self.earlier > 0 {
            return 0;
        }
        turn.since_ns.get_or_insert(now_ns);
        len_bytes
    }

    /// A request of the turn `number` has ended.
    fn end(&mut self, number: u64, bytes: u64, now_ns: u64, most_power: u32) {
        let turn = &mut self.turn;
        if number != turn.number {
            self.earlier -= 1;
            if self.earlier == 0 && turn.in_flight > 0 {
                turn.since_ns = Some(now_ns);
            }
            return;
        }
        turn.in_flight -= 1;
        let Some(since_ns) = turn.since_ns else { return };
        turn.busy_ns += now_ns.saturating_sub(since_ns);
        turn.since_ns = (turn.in_flight > 0).then_some(now_ns);
        turn.requests += 1;
        turn.bytes += bytes;
        if turn.is_over() || self.doing.gives_up(&self.turn) {
            self.next_turn(most_power);
        }
    }

    /// The next turn begins, with what is to be tried next.
    fn next_turn(&mut self, most_power: u32) {
        let ended = std::mem::take(&mut self.turn);
        self.turn.number = ended.number + 1;
        self.earlier = ended.in_flight;
        if ended.is_over() {
            self.turn_requests = ended.requests;
        }
        match &mut self.doing {
            Doing::Rest { turns } if *turns > 1 => *turns -= 1,
            Doing::Rest { .. } => self.climb(0, most_power),
            Doing::Compare(comparison) => {
                comparison.note(&ended);
                let candidate = comparison.candidate;
                match comparison.verdict(self.best) {
                    None => {}
                    Some(Verdict::Better) => {
                        (self.best, self.has_found) = (candidate, true);
                        self.climb(candidate + 1, most_power);
                    }
                    Some(Verdict::Worse) if candidate > self.best => self.rest(),
                    Some(Verdict::Worse | Verdict::NoBetter) => self.climb(candidate + 1, most_power),
                }
            }
        }
    }

    /// Compares the next candidate from the power `from` on: none, one step fewer parts than the best, and all steps with more.
    fn climb(&mut self, from: u32, most_power: u32) {
        let best = self.best;
        match (from..=most_power).find(|power| *power != best && (*power == 0 || power + 1 >= best)) {
            Some(candidate) => self.doing = Doing::Compare(Comparison { candidate, rates: Vec::new(), best_ns: 0 }),
            None => self.rest(),
        }
    }

    /// The climb is over: the best is kept for a while.
    fn rest(&mut self) {
        self.rest_turns = match std::mem::take(&mut self.has_found) {
            true => REST_TURNS.0,
            false => (2 * self.rest_turns).min(REST_TURNS.1),
        };
        let turns = match self.best {
            // The last turn is looked at, so that what passed has ended when candidates are compared.
            0 => {
                self.passing = (self.rest_turns - 1) * self.turn_requests;
                1
            }
            _ => self.rest_turns,
        };
        self.doing = Doing::Rest { turns };
    }
}

impl Doing {
    /// True when the candidate of `turn` has taken too long to be worth more time.
    fn gives_up(&self, turn: &Turn) -> bool {
        matches!(self, Self::Compare(it) if it.tries_candidate() && it.best_ns > 0 && turn.busy_ns > 2 * it.best_ns)
    }
}

enum Verdict {
    Better,
    NoBetter,
    Worse,
}

impl Comparison {
    /// True when the present turn is the candidate's.
    fn tries_candidate(&self) -> bool {
        IS_CANDIDATES[self.rates.len()]
    }

    /// Notes what has been measured in the present turn.
    fn note(&mut self, turn: &Turn) {
        if !self.tries_candidate() {
            self.best_ns = turn.busy_ns;
        }
        self.rates.push(turn.rate());
    }

    /// What is to be thought of the candidate; `None` before enough is known. `best` is the power that it is compared with.
    fn verdict(&self, best: u32) -> Option<Verdict> {
        let mut ratios: Vec<f64> = self.rates.chunks_exact(2).zip(IS_CANDIDATES.chunks_exact(2)).map(ratio).collect();
        if self.rates.len() == 2 && ratios[0] < LOSES_CLEARLY {
            return Some(Verdict::Worse);
        }
        if ratios.len() < PAIRS {
            return None;
        }
        ratios.sort_by(f64::total_cmp);
        let wins = match self.candidate {
            0 => LOSES,
            fewer if fewer < best => 1.0,
            _ => WINS,
        };
        Some(match ratios[PAIRS / 2] {
            ratio if ratio >= wins => Verdict::Better,
            ratio if ratio < LOSES => Verdict::Worse,
            _ => Verdict::NoBetter,
        })
    }
}

/// How many times the throughput of the best one the candidate has had in a pair of turns.
fn ratio((rates, is_candidates): (&[f64], &[bool])) -> f64 {
    let (best, candidate) = if is_candidates[0] { (rates[1], rates[0]) } else { (rates[0], rates[1]) };
    candidate / best.max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    use spile_core::{Extent, Segments};

    use super::*;

    /// A device on simulated time. A part takes one step for each of its pages, one after the other; a step takes the page's channel for
    /// `page_ns`, and the first one `part_ns` more.
    struct Device {
        page_ns: u64,
        part_ns: u64,
        /// Until when each channel is taken.
        channels: Vec<u64>,
    }

    const PAGE: u64 = 16 << 10;

    impl Device {
        /// Several small requests are faster than one large one.
        fn ssd() -> Self {
            Self { page_ns: 50_000, part_ns: 5_000, channels: vec![0; 16] }
        }

        /// Each request costs a turn of the disk.
        fn spinning() -> Self {
            Self { page_ns: 100_000, part_ns: 4_000_000, channels: vec![0] }
        }

        /// Splitting changes nothing.
        fn even() -> Self {
            Self { page_ns: 50_000, part_ns: 0, channels: vec![0] }
        }

        /// When a request that begins at `now` ends.
        fn serve(&mut self, now: u64, start: u64, len: u64, part_bytes: u64) -> u64 {
            let parts = (start..start + len).step_by(part_bytes.min(len) as usize);
            let ends = parts.map(|part| {
                let (mut at, end) = (now, (part + part_bytes.min(len)).min(start + len));
                for page in part / PAGE..end.div_ceil(PAGE) {
                    let channels = self.channels.len() as u64;
                    let free = &mut self.channels[(page % channels) as usize];
                    at = at.max(*free) + self.page_ns + if page == part / PAGE { self.part_ns } else { 0 };
                    *free = at;
                }
                at
            });
            ends.collect::<Vec<_>>().into_iter().max().unwrap()
        }
    }

    /// The time in seconds that `requests` reads of `len` bytes take, `depth` in flight, and what was learned. Without a learner they are
    /// not split.
    fn run(mut device: Device, learner: Option<&Learner>, len: u64, depth: usize, requests: u64) -> f64 {
        let memory = Segments::new();
        let (mut now, mut in_flight) = (0, BinaryHeap::new());
        let mut trials = Vec::new();
        for number in 0..requests {
            if in_flight.len() == depth {
                let Reverse((ended, number)) = in_flight.pop().unwrap();
                now = ended;
                end(learner, &mut trials, number, now);
            }
            let start = number * len;
            let io = Io::read(Extent::from_range(start..start + len), &memory);
            let looks = learner.filter(|learner| learner.concerns(&io));
            let (part_bytes, trial) = looks.map(|learner| learner.begin(&io, now)).unzip();
            trials.push(trial);
            in_flight.push(Reverse((device.serve(now, start, len, part_bytes.unwrap_or(u64::MAX)), number)));
        }
        while let Some(Reverse((ended, number))) = in_flight.pop() {
            now = ended;
            end(learner, &mut trials, number, now);
        }
        now as f64 / 1e9
    }

    fn end(learner: Option<&Learner>, trials: &mut [Option<Trial>], number: u64, now: u64) {
        if let (Some(learner), Some(trial)) = (learner, trials[number as usize].take()) {
            learner.end(trial, true, now);
        }
    }

    #[test]
    fn where_splitting_pays_it_is_learned() {
        let learner = Learner::default();
        let (off_s, auto_s) =
            (run(Device::ssd(), None, 1 << 20, 1, 4000), run(Device::ssd(), Some(&learner), 1 << 20, 1, 4000));
        assert!(auto_s < off_s / 5.0, "{auto_s} s with auto, {off_s} s without");
        let learned = learner.learned();
        assert_eq!((learned.len(), learned[0].from_bytes, learned[0].writes), (1, 1 << 20, false));
        assert!(learned[0].parts >= 8, "{learned:?}");
    }

    #[test]
    fn where_splitting_hurts_it_costs_next_to_nothing_to_find_out() {
        for (depth, len) in [(1, 1 << 20), (8, 1 << 20), (1, 4 << 20), (3, 192 << 10)] {
            let learner = Learner::default();
            let off_s = run(Device::spinning(), None, len, depth, 5000);
            let auto_s = run(Device::spinning(), Some(&learner), len, depth, 5000);
            assert!(auto_s < off_s * 1.03, "depth {depth}, {len} bytes: {auto_s} s with auto, {off_s} s without");
            assert_eq!(learner.learned()[0].parts, 1);
        }
    }

    #[test]
    fn where_splitting_changes_nothing_requests_stay_whole() {
        let learner = Learner::default();
        let off_s = run(Device::even(), None, 1 << 20, 4, 3000);
        let auto_s = run(Device::even(), Some(&learner), 1 << 20, 4, 3000);
        assert!(auto_s < off_s * 1.01 && learner.learned()[0].parts == 1, "{auto_s} s with auto, {off_s} s without");
    }

    #[test]
    fn at_rest_hardly_any_whole_request_is_looked_at() {
        let (learner, memory) = (Learner::default(), Segments::new());
        run(Device::spinning(), Some(&learner), 1 << 20, 4, 20_000);
        let io = Io::read(Extent::from_range(0..1 << 20), &memory);
        let (mut device, mut now, mut looks) = (Device::spinning(), u64::MAX / 2, 0);
        device.channels.fill(now);
        for _ in 0..20_000 {
            let trial = learner.concerns(&io).then(|| learner.begin(&io, now));
            now = device.serve(now, 0, 1 << 20, u64::MAX);
            looks += u32::from(trial.is_some());
            trial.into_iter().for_each(|(_, trial)| learner.end(trial, true, now));
        }
        assert!((1..1000).contains(&looks), "{looks} of 20000");
    }

    #[test]
    fn what_no_longer_pays_is_given_up() {
        let learner = Learner::default();
        run(Device::ssd(), Some(&learner), 1 << 20, 1, 4000);
        assert!(learner.learned()[0].parts > 1);
        run(Device::spinning(), Some(&learner), 1 << 20, 1, 200_000);
        assert_eq!(learner.learned()[0].parts, 1);
    }
}
