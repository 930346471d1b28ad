//! [`Spans`]: gives spans to the requests of one ring or connection, and ends them.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use probe::probe;

use super::{Anchor, Moment, Record, Span, SpanLog, What, calibrate, count_now, leave_work_for};
use crate::metrics::is_counting;

/// Gets each request that has ended.
pub type Sink = Box<dyn Fn(&Record)>;

/// The spans of one ring or connection, on the thread that serves it.
pub struct Spans {
    log: Arc<SpanLog>,
    own: Vec<&'static Span>,
    free: Vec<&'static Span>,
    /// Requests that were answered. The guest has not been notified.
    answered: Vec<&'static Span>,
    /// Some of these have exact times.
    has_exact: bool,
    /// When the guest could see them.
    shown: Anchor,
    sink: Option<Sink>,
}

/// When a request was taken.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    pub(super) time: u64,
    pub(super) is_exact: bool,
}

impl Spans {
    /// No request yet. What is to be kept goes to `log`.
    pub fn new(log: Arc<SpanLog>) -> Self {
        Self {
            log,
            own: Vec::new(),
            free: Vec::new(),
            answered: Vec::new(),
            has_exact: false,
            shown: Anchor::NONE,
            sink: None,
        }
    }

    /// The same with exact moments for all requests, which `sink` gets.
    pub fn with_sink(mut self, sink: Sink) -> Self {
        calibrate();
        self.sink = Some(sink);
        self
    }

    /// The moment of now for requests that are just taken. `now_ns` is what their front takes for it.
    #[inline]
    pub fn taken(&self, now_ns: u64) -> Taken {
        match self.log.is_traced.load(Relaxed) | self.sink.is_some() {
            true => Taken { time: count_now(), is_exact: true },
            false => Taken { time: now_ns, is_exact: false },
        }
    }

    /// A request begins, which was taken before. `None` when this process counts nothing.
    #[inline]
    pub fn begin(&mut self, taken: Taken, what: What) -> Option<&'static Span> {
        if !is_counting() {
            return None;
        }
        let span = match self.free.pop() {
            Some(span) => span,
            None => self.one_more(),
        };
        span.begin(what, taken);
        Some(span)
    }

    #[cold]
    fn one_more(&mut self) -> &'static Span {
        let span = self.log.lend();
        self.own.push(span);
        span
    }

    /// A request is answered. The guest does not see that yet.
    #[inline]
    pub fn answered(&mut self, span: &'static Span, failed: bool) {
        leave_work_for(span);
        span.failed.store(failed, Relaxed);
        probe!(spile, stored, span.id());
        if span.is_exact.load(Relaxed) {
            self.has_exact = true;
            stored_exactly(span);
        }
        self.answered.push(span);
    }

    /// A request will not be answered here.
    pub fn leave(&mut self, span: &'static Span) {
        span.rest();
        self.free.push(span);
    }

    /// The guest can see all answers since `now_ns`.
    #[inline]
    pub fn shown(&mut self, now_ns: u64) {
        self.shown.at_ns = now_ns;
        for span in &self.answered {
            probe!(spile, shown, span.id());
        }
        if self.has_exact {
            self.shown_exactly();
        }
    }

    #[cold]
    fn shown_exactly(&mut self) {
        self.has_exact = false;
        self.shown = Anchor::now();
        let exact = self.answered.iter().filter(|span| span.is_exact.load(Relaxed));
        exact.for_each(|span| {
            span.charge(self.shown.count);
            span.phase.store(Moment::Shown as u8, Relaxed);
        });
    }

    /// The guest was notified of the answers that it can see, or need not be: their requests are over.
    #[inline]
    pub fn end(&mut self) {
        if self.answered.is_empty() {
            return;
        }
        let shown_ns = self.shown.at_ns;
        let mut least_ns = self.log.slowest.least_ns(shown_ns);
        for span in &self.answered {
            probe!(spile, notified, span.id());
            if span.is_exact.load(Relaxed) {
                end_exact(&self.log, self.sink.as_ref(), span, self.shown);
            } else if shown_ns.saturating_sub(span.taken.load(Relaxed)) > least_ns {
                self.log.slowest.keep(&ended(span, shown_ns));
                least_ns = self.log.slowest.least_ns(shown_ns);
            }
            span.rest();
        }
        self.free.append(&mut self.answered);
    }
}

/// A request without exact moments, whose answer was shown at `shown_ns`. What was not charged to another phase is time of the answer.
fn ended(span: &Span, shown_ns: u64) -> Record {
    span.phase.store(Moment::Stored as u8, Relaxed);
    span.charge(shown_ns);
    span.phase.store(Moment::Shown as u8, Relaxed);
    span.raw().record(Anchor::NONE)
}

#[cold]
fn stored_exactly(span: &Span) {
    span.charge(count_now());
    span.phase.store(Moment::Stored as u8, Relaxed);
}

/// Ends a request with exact moments, whose answer was shown at `shown`.
#[cold]
fn end_exact(log: &SpanLog, sink: Option<&Sink>, span: &Span, shown: Anchor) {
    span.charge(count_now());
    let request = span.raw();
    let record = request.record(shown);
    if record.latency_ns() > log.slowest.least_ns(shown.at_ns) {
        log.slowest.keep(&record);
    }
    if let Some(sink) = sink {
        sink(&record);
    }
    log.note(request);
}

impl Drop for Spans {
    fn drop(&mut self) {
        self.log.take_back(&self.own);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ANSWER, go_on_from, stamp, start, with};
    use super::*;
    use crate::metrics::{Op, begin_turn, now_ns, turn_ns};

    const WHAT: What = What { op: Op::Read, offset_bytes: 8192, len_bytes: 512 };

    fn turn() -> u64 {
        std::thread::sleep(std::time::Duration::from_micros(100));
        begin_turn();
        turn_ns()
    }

    /// A request with two operations on stores, one beside the other. It waits a turn in each phase before the answer is shown, and
    /// in the store for three. Returns the turns.
    fn request(spans: &mut Spans) -> Vec<u64> {
        use Moment::{Completed, DiskBegan, DiskEnded, Submitted};
        let mut turns = vec![turn()];
        let span = spans.begin(spans.taken(turns[0]), WHAT).unwrap();
        turns.push(turn());
        span.reach(Moment::Loaded);
        for moment in [DiskBegan, Submitted, Submitted, Completed, Completed, DiskEnded] {
            turns.push(turn());
            with(Some(span), || stamp(moment));
        }
        turns.push(turn());
        span.reach(Moment::DiskEnded);
        spans.answered(span, false);
        turns.push(turn());
        spans.shown(turns[9]);
        spans.end();
        turns
    }

    fn one(records: &[Record]) -> Record {
        assert_eq!(records.len(), 1);
        records[0]
    }

    #[test]
    fn time_is_charged_to_the_phase_in_which_the_request_waits() {
        let log = Arc::<SpanLog>::default();
        let turns = request(&mut Spans::new(log.clone()));
        let kept = one(&log.slowest());
        assert_eq!((kept.what, kept.failed, kept.store_operations), (WHAT, false, 2));
        let [t0, t1, t2, t3, _, _, t6, t7, t8, t9] = turns[..] else { panic!("{turns:?}") };
        assert_eq!(kept.taken_ns, t0);
        assert_eq!(kept.phases_ns, [t1 - t0, t2 - t1, 0, t3 - t2, t6 - t3, t7 - t6, 0, t8 - t7, t9 - t8, 0]);
        assert_eq!(kept.latency_ns(), t9 - t0);
    }

    #[test]
    fn a_request_that_never_waits_takes_the_time_until_its_answer() {
        let log = Arc::<SpanLog>::default();
        let mut spans = Spans::new(log.clone());
        let begun_ns = turn();
        let span = spans.begin(spans.taken(begun_ns), WHAT).unwrap();
        let stamps = [Moment::Loaded, Moment::DiskBegan, Moment::Submitted, Moment::Completed, Moment::DiskEnded];
        with(None, || {
            start(span);
            stamps.into_iter().for_each(stamp);
        });
        spans.answered(span, true);
        spans.shown(begun_ns + 500);
        spans.end();
        let kept = one(&log.slowest());
        assert_eq!((kept.failed, kept.store_operations, kept.latency_ns()), (true, 1, 500));
        assert_eq!(kept.phases_ns[ANSWER], 500);
    }

    #[test]
    fn waits_for_a_limit_and_for_trouble_are_phases_of_their_own() {
        let log = Arc::<SpanLog>::default();
        let mut spans = Spans::new(log.clone());
        let t0 = turn();
        let span = spans.begin(spans.taken(t0), WHAT).unwrap();
        with(Some(span), || [Moment::DiskBegan, Moment::HeldBack].into_iter().for_each(stamp));
        let t1 = turn();
        with(Some(span), || {
            go_on_from(Moment::DiskBegan);
            [Moment::Submitted, Moment::Completed, Moment::Troubled].into_iter().for_each(stamp);
        });
        let t2 = turn();
        with(Some(span), || go_on_from(Moment::DiskBegan));
        let t3 = turn();
        with(Some(span), || stamp(Moment::DiskEnded));
        spans.answered(span, false);
        spans.shown(t3);
        spans.end();
        let phases_ns = one(&log.slowest()).phases_ns;
        assert_eq!(phases_ns, [0, 0, t1 - t0, t3 - t2, 0, 0, t2 - t1, 0, 0, 0]);
    }

    #[test]
    fn an_answer_may_come_while_the_front_still_works_for_its_request() {
        let log = Arc::<SpanLog>::default();
        let mut spans = Spans::new(log.clone());
        let mut trace = log.trace(1).unwrap();
        let span = spans.begin(spans.taken(turn()), WHAT).unwrap();
        with(None, || {
            start(span);
            stamp(Moment::DiskEnded);
            turn();
            spans.answered(span, false);
        });
        spans.shown(turn());
        spans.end();
        let mut taken = Vec::new();
        trace.take(|record| taken.push(record));
        let phases_ns = one(&taken).phases_ns;
        assert!(phases_ns[7..9].iter().all(|phase_ns| *phase_ns > 50_000), "{phases_ns:?}");
    }

    #[test]
    fn what_does_not_run_for_a_request_changes_none() {
        let log = Arc::<SpanLog>::default();
        let mut spans = Spans::new(log.clone());
        let span = spans.begin(spans.taken(turn()), WHAT).unwrap();
        with(Some(span), || stamp(Moment::Loaded));
        stamp(Moment::DiskBegan);
        assert_eq!(one(&log.in_flight()).phase, Moment::Loaded as usize);
        spans.leave(span);
        assert!(log.in_flight().is_empty() && log.slowest().is_empty());
    }

    #[test]
    fn spans_are_used_again() {
        let log = Arc::<SpanLog>::default();
        let mut spans = Spans::new(log.clone());
        (0..5).for_each(|_| drop(request(&mut spans)));
        assert_eq!(spans.own.len(), 1);
        let span = spans.begin(spans.taken(now_ns()), WHAT).unwrap();
        let begun = one(&log.in_flight());
        assert_eq!((begun.store_operations, begun.phases_ns), (0, [0; 10]));
        spans.leave(span);
        drop(spans);
        assert!(log.in_flight().is_empty());
    }

    #[test]
    fn a_trace_has_all_requests_for_which_there_is_room() {
        let log = Arc::<SpanLog>::default();
        let mut spans = Spans::new(log.clone());
        request(&mut spans);
        let begun_ns = now_ns();
        let mut trace = log.trace(2).unwrap();
        assert!(log.trace(2).is_err(), "one trace at a time");
        let mut taken = Vec::new();
        (0..3).for_each(|_| drop(request(&mut spans)));
        assert_eq!(trace.take(|record| taken.push(record)), 1);
        request(&mut spans);
        assert_eq!(trace.take(|record| taken.push(record)), 0);
        drop(trace);
        request(&mut spans);
        assert_eq!(taken.len(), 3);
        for record in &taken {
            assert_eq!((record.what, record.store_operations), (WHAT, 2));
            assert!(record.taken_ns + 100_000_000 > begun_ns && record.taken_ns < now_ns() + 100_000_000);
            // Each of these has a sleep in it.
            let waited = |phase: usize| record.phases_ns[phase] > 50_000;
            assert!((0..9).all(|phase| waited(phase) != [2, 6].contains(&phase)), "{record:?}");
        }
        // The slowest ones are kept as well, traced or not.
        assert_eq!(log.slowest().len(), 6);
    }
}
