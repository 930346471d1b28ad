//! One ring at work: a task on one worker that takes requests, executes, answers and notifies.
//!
//! Its turns are those of every ring ([`serve_ring`]). In addition, one call copies the pieces of all requests that
//! begin in a turn, and one call those of all requests that end in it. The way of a request: it is taken from the ring
//! and noted in the journal → *waiting* → it gets memory, and its data if it writes → *ready* → it is executed → *done*
//! → its data are brought to the guest → it is answered.

#![expect(clippy::vec_box, reason = "requests move from list to list, and the disk holds on to one while it works")]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use spile_core::metrics::span::{Moment, Spans, stamp};
use spile_core::metrics::{now_ns, runs};
use spile_core::{Disk, Error};
use spile_engine::{Event, Pollable};
use spile_front::{FrontCounters, GuestRing, Inbox, LogLimit, QueueWaker, Slots, serve_ring};
use spile_xen::blkif::{Response, status};
use spile_xen::{DomId, Grants};

use crate::execute::{Outcome, Target};
use crate::journal::Journal;
use crate::metrics::DiskCounters;
use crate::pages::{Access, Pages};
use crate::request::{Command, Limits, Refusal, Request};
use crate::ring::{Broken, Ring, SLOT_BYTES, Slot};
use crate::trace::Trace;

/// The most requests that get memory at a time.
const BATCH: usize = 64;
/// The most bytes that are copied at a time, before the disk begins with them or the guest is told of them. What was
/// copied should still be in the processor's cache then.
const BATCH_BYTES: usize = 512 << 10;
/// The most bytes of a disk's requests that have memory at a time: buffers, and, where both are needed, the guest's
/// pages as well. Each ring may always have one request, whatever its size.
const BUDGET_BYTES: usize = 32 << 20;
/// The most answers that wait to be published together, so that a guest that polls can go on while we work.
const PUBLISH: usize = 16;

/// What a ring's task shares with the device that controls it.
#[derive(Default)]
pub struct Link {
    waker: Arc<QueueWaker>,
    stop: AtomicBool,
    is_forsaken: AtomicBool,
    /// Requests that are held back, and end when the guest has gone.
    waiting: Mutex<Vec<Waker>>,
}

impl Link {
    /// Has the ring take no more requests. Its task ends when those that were taken are answered.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// The guest has gone: no request that was taken begins any more, and those that are held back end. They get no answer. What the disk is doing
    /// is not cancelled.
    pub fn forsake(&self) {
        self.is_forsaken.store(true, Ordering::SeqCst);
        let waiting = std::mem::take(&mut *self.waiting());
        waiting.into_iter().for_each(Waker::wake);
        self.stop();
    }

    /// True when the guest has gone.
    pub(crate) fn is_forsaken(&self) -> bool {
        self.is_forsaken.load(Ordering::SeqCst)
    }

    /// Comes when the guest has gone.
    pub(crate) fn forsaken(&self) -> impl Future<Output = ()> {
        poll_fn(|context| {
            let mut waiting = self.waiting();
            if self.is_forsaken() {
                return Poll::Ready(());
            }
            if !waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Waker>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a ring needs to start.
pub struct Setup<D, G> {
    /// The disk.
    pub target: Arc<Target<D>>,
    /// How the guest's pages are reached.
    pub grants: Arc<G>,
    /// The guest.
    pub domain: DomId,
    /// The way to the guest's pages.
    pub access: Access,
    /// What the guest may ask for.
    pub limits: Limits,
    /// The number of rings among which the limits of the disk are shared out.
    pub share: usize,
    /// Limits messages about mistakes of the guest.
    pub complaints: Arc<LogLimit>,
    /// The ring.
    pub ring: Ring,
    /// The ring's journal.
    pub journal: Journal,
    /// Requests that another back end has taken and not answered, oldest first.
    pub again: Vec<(u16, Slot)>,
    /// What the guest rings.
    pub kick: Arc<Event>,
    /// What we ring.
    pub call: Arc<Event>,
    /// By which the ring is told to stop.
    pub link: Arc<Link>,
    /// The ring's counters.
    pub counters: Arc<FrontCounters>,
    /// The counters of all rings of the disk.
    pub disk_counters: Arc<DiskCounters>,
    /// Where the times of requests are noted, if they are traced.
    pub trace: Option<Arc<Trace>>,
}

/// How a ring's task has ended.
pub struct Over {
    /// Why the ring is broken, if that is the reason.
    pub broken: Option<Broken>,
    /// The guest has asked for more, which was not taken.
    pub has_more: bool,
}

/// Serves a ring to its end.
///
/// # Panics
/// Outside a worker.
pub async fn run<D: Disk, G: Grants>(setup: Setup<D, G>) -> Over {
    let Setup { target, grants, domain, access, limits, share, ring, journal, again, kick, call, .. } = setup;
    let (link, counters, disk_counters, trace) = (setup.link, setup.counters, setup.disk_counters, setup.trace);
    let ring = Rc::new(ring);
    let room = ring.max_in_flight() as usize;
    let done = Rc::new(RefCell::new(Vec::with_capacity(room)));
    let make = |inbox: Rc<Inbox<Box<Request>>>| answer_all(inbox, done.clone(), target.clone(), link.clone());
    let mut slots = Slots::new(link.waker.clone(), make);
    let mut queue = RingTask {
        ring: ring.clone(),
        journal,
        pages: Pages::new(grants, domain, access, share, setup.complaints),
        limits,
        budget_bytes: BUDGET_BYTES / share,
        call,
        link: link.clone(),
        spans: spans_of(&counters, trace),
        answered_ns: 0,
        counters,
        disk_counters,
        taken: Vec::with_capacity(room),
        waiting: VecDeque::with_capacity(room),
        ready: VecDeque::with_capacity(BATCH),
        done: done.clone(),
        answers: Vec::with_capacity(room),
        free: Vec::with_capacity(room),
        in_flight: 0,
        in_flight_bytes: 0,
        has_barrier: false,
        has_undone: false,
        // The process before us may have been killed before it notified the guest.
        must_notify: true,
        broken: None,
    };
    queue.counters.ring_started();
    queue.take_again(again);
    serve_ring(&mut queue, &mut slots, ring.clone(), &kick, &target.disk).await;
    queue.counters.ring_stopped();
    queue.disk_counters.show();
    let has_more = queue.broken.is_none() && ring.has_next();
    Over { broken: queue.broken, has_more }
}

type Done = Rc<RefCell<Vec<(Box<Request>, Outcome)>>>;

/// The future of one slot: executes one request after the other.
async fn answer_all<D: Disk>(inbox: Rc<Inbox<Box<Request>>>, done: Done, target: Arc<Target<D>>, link: Arc<Link>) {
    loop {
        let request = inbox.next().await;
        inbox.stamps_go_to(request.span);
        stamp(Moment::DiskBegan);
        let outcome = target.execute(&request, &link).await;
        stamp(Moment::DiskEnded);
        done.borrow_mut().push((request, outcome));
        inbox.answered();
    }
}

/// The spans of a ring. A trace gets each of its requests.
fn spans_of(counters: &FrontCounters, trace: Option<Arc<Trace>>) -> Spans {
    let spans = Spans::new(counters.spans.clone());
    match trace {
        Some(trace) => spans.with_sink(Box::new(move |record| trace.note(record))),
        None => spans,
    }
}

/// The worker looks at the ring through this.
impl Pollable for Ring {
    fn is_ready(&self) -> bool {
        self.has_next()
    }

    fn arm(&self) -> bool {
        self.arm()
    }
}

/// The ring as its task sees it.
struct RingTask<G> {
    ring: Rc<Ring>,
    journal: Journal,
    pages: Pages<G>,
    limits: Limits,
    budget_bytes: usize,
    call: Arc<Event>,
    link: Arc<Link>,
    counters: Arc<FrontCounters>,
    disk_counters: Arc<DiskCounters>,
    /// Requests that were just taken from the ring, or are just getting their memory.
    taken: Vec<Box<Request>>,
    waiting: VecDeque<Box<Request>>,
    ready: VecDeque<Box<Request>>,
    done: Done,
    /// Requests that are being answered.
    answers: Vec<Box<Request>>,
    free: Vec<Box<Request>>,
    /// The number of requests that are ready or being executed.
    in_flight: usize,
    in_flight_bytes: usize,
    /// True when a barrier is in flight. It is the only request then.
    has_barrier: bool,
    /// True when a request was not answered. The next process does it, so no barrier may overtake it.
    has_undone: bool,
    must_notify: bool,
    broken: Option<Broken>,
    spans: Spans,
    /// When the last answers were written.
    answered_ns: u64,
}

impl<G: Grants> RingTask<G> {
    /// Takes the requests that another back end has left.
    fn take_again(&mut self, again: Vec<(u16, Slot)>) {
        for (entry, slot) in again {
            self.decode(entry, &slot);
        }
        self.sort_in();
    }

    /// Takes all requests that are in the ring. None may stay there, because the worker would look at the ring again
    /// and again.
    fn take_new(&mut self) {
        let mut slot = [0; SLOT_BYTES];
        while self.broken.is_none() && !self.link.stop.load(Ordering::Acquire) {
            let index = self.ring.req_cons();
            match self.ring.pop(&mut slot) {
                Ok(true) => {
                    let entry = self.journal.take(index, &slot);
                    self.decode(entry, &slot);
                }
                Ok(false) => break,
                Err(broken) => self.broken = Some(broken),
            }
        }
        self.ring.give_back();
        self.sort_in();
    }

    fn decode(&mut self, entry: u16, slot: &Slot) {
        let mut request = self.free.pop().unwrap_or_default();
        request.entry = entry;
        request.decode(self.ring.abi(), slot, &self.limits);
        self.taken.push(request);
    }

    fn sort_in(&mut self) {
        if self.taken.is_empty() {
            return;
        }
        // One look at the clock for all of them.
        let taken_ns = now_ns();
        self.taken.iter_mut().for_each(|request| request.taken_ns = taken_ns);
        let taken = self.spans.taken(taken_ns);
        self.pages.read_indirect(&mut self.taken);
        self.counters.requests.begin_all(runs(self.taken.iter().map(|request| request.begun())));
        for request in &mut self.taken {
            request.span = self.spans.begin(taken, request.what());
        }
        self.waiting.extend(self.taken.drain(..));
    }

    /// Gives memory to the requests that wait, as many as may begin now.
    fn make_ready(&mut self) {
        let mut bytes = 0;
        while self.taken.len() < BATCH && bytes < BATCH_BYTES && !self.has_barrier {
            let Some(next) = self.waiting.front() else { break };
            let (is_barrier, len) = (next.command == Command::Barrier, next.len_bytes as usize);
            let is_full = self.in_flight_bytes + len > self.budget_bytes;
            if (self.in_flight > 0 && (is_barrier || is_full)) || (is_barrier && self.has_undone) {
                break;
            }
            self.in_flight += 1;
            self.in_flight_bytes += len;
            bytes += len;
            self.has_barrier = is_barrier;
            self.taken.extend(self.waiting.pop_front());
        }
        self.pages.load(&mut self.taken);
        self.taken.iter().filter_map(|request| request.span).for_each(|span| span.reach(Moment::Loaded));
        self.ready.extend(self.taken.drain(..));
    }

    /// Answers the requests that have ended.
    fn answer(&mut self) {
        let (done, mut bytes) = (self.done.clone(), 0);
        for (mut request, outcome) in done.borrow_mut().drain(..) {
            self.in_flight -= 1;
            self.in_flight_bytes -= request.len_bytes as usize;
            // After a barrier that is not answered, nothing may begin.
            let is_answered = matches!(outcome, Outcome::Answer(_));
            self.has_barrier &= !is_answered && request.command == Command::Barrier;
            self.has_undone |= !is_answered;
            let Outcome::Answer(status) = outcome else {
                if outcome == Outcome::Held {
                    self.journal.flush_failed();
                    self.counters.flush_held();
                }
                request.clear();
                request.span.take().into_iter().for_each(|span| self.spans.leave(span));
                self.free.push(request);
                continue;
            };
            if status != status::OKAY {
                request.refusal.get_or_insert(Refusal { status, reason: "the disk failed" });
            }
            bytes += request.len_bytes as usize;
            self.answers.push(request);
            if bytes >= BATCH_BYTES {
                self.bring();
                bytes = 0;
            }
        }
        self.bring();
    }

    /// Brings the data of reads to the guest, unmaps its pages, and writes the answers.
    fn bring(&mut self) {
        if self.answers.is_empty() {
            return;
        }
        self.pages.store(&mut self.answers);
        // The pages are unmapped before the guest is told, because it takes them back then.
        self.answers.iter_mut().for_each(|request| request.clear());
        self.answered_ns = now_ns();
        self.counters.requests.end_all(runs(self.answers.iter().map(|request| request.ended())), self.answered_ns);
        let mut answers = std::mem::take(&mut self.answers);
        for mut request in answers.drain(..) {
            if let Some(span) = request.span.take() {
                self.spans.answered(span, request.status() != status::OKAY);
            }
            self.put(&request);
            self.free.push(request);
        }
        self.answers = answers;
    }

    fn put(&mut self, request: &Request) {
        let ring = &self.ring;
        self.journal.answer(request.entry, ring.rsp_prod());
        ring.put(&Response { id: request.id, op: request.response_op, status: request.status() });
        if ring.rsp_prod().wrapping_sub(ring.published()) as usize >= PUBLISH {
            self.publish();
        }
    }

    /// Shows the guest what was answered, and notifies it if it wants that.
    fn publish(&mut self) {
        let ring = &self.ring;
        let (before, next) = (ring.published(), ring.rsp_prod());
        if before != next {
            self.journal.will_show(next);
            ring.publish();
            self.journal.has_shown(next);
            self.must_notify |= ring.wants_notice(before);
            self.spans.shown(self.answered_ns);
            if !self.must_notify {
                self.counters.not_notified();
            }
        }
        if std::mem::take(&mut self.must_notify) {
            self.counters.notified();
            self.call.ring();
        }
        self.spans.end();
    }
}

impl<G: Grants> GuestRing for RingTask<G> {
    type Request = Box<Request>;

    fn pop(&mut self) -> Option<Box<Request>> {
        if self.ready.is_empty() {
            self.take_new();
            self.make_ready();
        }
        self.ready.pop_front()
    }

    fn takes_new(&self) -> bool {
        self.broken.is_none() && !self.is_to_stop()
    }

    fn is_to_stop(&self) -> bool {
        self.link.stop.load(Ordering::Acquire)
    }

    /// Requests that were taken are done even when the ring is to stop, unless they wait for a barrier that failed or may not begin.
    fn may_pop(&self) -> bool {
        let is_barrier_next = self.waiting.front().is_some_and(|next| next.command == Command::Barrier);
        let waits_for_barrier = self.has_barrier || (self.has_undone && is_barrier_next);
        let is_stuck = waits_for_barrier && self.in_flight == 0;
        self.takes_new() || !self.ready.is_empty() || (!self.waiting.is_empty() && !is_stuck)
    }

    fn max_in_flight(&self) -> usize {
        self.ring.max_in_flight() as usize
    }

    fn end_turn(&mut self, has_worked: bool) {
        self.answer();
        self.publish();
        if has_worked {
            self.disk_counters.show();
        }
    }

    fn kicks_failed(&mut self, error: Error) {
        tracing::warn!(%error, "blkif: a ring's event channel cannot be read");
        self.broken = Some(Broken("its event channel cannot be read"));
    }

    /// Nothing has to be written: a guest notifies only when it passes the index that [`Ring::arm`] has set.
    fn suppress(&self) {}
}
