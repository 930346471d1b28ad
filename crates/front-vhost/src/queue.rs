//! One virtqueue at work: a task on one worker that pops, executes, answers and notifies.
//!
//! Its turns are those of every ring ([`serve_ring`]). The task ends when it is told to stop, or when the driver has
//! broken the ring, and nothing is in flight any more. This process or another one can start the queue again where it
//! ended.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use spile_core::Disk;
use spile_core::metrics::span::{Moment, Spans, What, stamp};
use spile_core::metrics::{Begun, Ended as Answered, now_ns, push_run, turn_ns};
use spile_engine::{Event, Pollable, pin_memory};
use spile_front::{FrontCounters, GuestRing, Inbox, QueueWaker, Slots, serve_ring, virtio};

use crate::execute::Target;
use crate::inflight::InflightQueue;
use crate::log::Log;
use crate::memory::GuestMemory;
use crate::request::{Parser, Request};
use crate::ring::{Broken, Ring, used_bytes};

/// The most requests of one queue in flight.
const MAX_IN_FLIGHT: usize = 512;
/// The most answers that wait to be published together, so that a driver that polls can go on while we work.
const PUBLISH: usize = 16;

/// What a queue's task shares with the connection that controls it.
#[derive(Default)]
pub(crate) struct Link {
    pub(crate) waker: Arc<QueueWaker>,
    stop: AtomicBool,
    /// What is rung to notify the driver of answers. The front end may change it at any time.
    call: Mutex<Option<Arc<Event>>>,
    /// True when `call` has changed: the driver may have missed a notification in between.
    has_new_call: AtomicBool,
}

impl Link {
    /// Has the queue take no more requests; its task ends when nothing is in flight.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// A new link for the queue's next start, with the same `call`.
    pub(crate) fn fresh(&self) -> Self {
        Self { call: Mutex::new(self.call()), has_new_call: AtomicBool::new(true), ..Self::default() }
    }

    /// Changes what is rung to notify the driver. A queue at work rings it once, because the driver may have missed a
    /// notification in between.
    pub(crate) fn set_call(&self, call: Option<Arc<Event>>) {
        *self.call.lock().unwrap_or_else(|e| e.into_inner()) = call;
        self.has_new_call.store(true, Ordering::Release);
        self.waker.wake();
    }

    pub(crate) fn call(&self) -> Option<Arc<Event>> {
        self.call.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    fn ring_call(&self) {
        if let Some(event) = &*self.call.lock().unwrap_or_else(|e| e.into_inner()) {
            event.ring();
        }
    }
}

/// Where the writes of a queue are logged.
pub(crate) struct QueueLog {
    pub(crate) log: Log,
    /// True when writes of data and status are logged.
    pub(crate) logs_data: bool,
    /// The address under which the used ring is logged, if it is.
    pub(crate) used_addr: Option<u64>,
}

/// What a queue needs to start.
pub(crate) struct Setup<D> {
    pub(crate) target: Arc<Target<D>>,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) ring: Ring,
    pub(crate) has_indirect: bool,
    pub(crate) inflight: Option<InflightQueue>,
    /// Chains that another server has popped and not answered, oldest first.
    pub(crate) again: Vec<u16>,
    pub(crate) log: Option<QueueLog>,
    pub(crate) kick: Arc<Event>,
    pub(crate) pins_memory: bool,
    pub(crate) link: Arc<Link>,
    pub(crate) counters: Arc<FrontCounters>,
}

/// How a queue ended.
pub(crate) struct Ended {
    /// The index of the next element of the available ring.
    pub(crate) next_avail: u16,
    /// Chains that were popped and not answered when there is no in-flight region that notes them.
    pub(crate) left: Vec<u16>,
    /// The number of all chains that were popped and not answered.
    pub(crate) undone: usize,
    /// Why the queue cannot go on, if it cannot.
    pub(crate) broken: Option<Broken>,
    /// True when memory that the front end shares was lost.
    pub(crate) is_lost: bool,
}

/// Serves a queue to its end.
pub(crate) async fn run<D: Disk>(setup: Setup<D>) -> Ended {
    if let Some((log, used_addr)) = setup.log.as_ref().and_then(|log| Some((&log.log, log.used_addr?))) {
        // Another server may have been killed after it wrote to the used ring and before it marked that in the log.
        log.mark(used_addr, used_bytes(setup.ring.size()) as u64);
    }
    let Setup { target, memory, ring, inflight, again, log, kick, link, counters, has_indirect, pins_memory } = setup;
    let wanted = memory.regions().iter().filter(|_| pins_memory);
    let _pinned: Vec<_> = wanted.map(|region| pin_memory(&region.bytes)).collect();
    let parser = Parser::new(has_indirect, log.as_ref().is_some_and(|log| log.logs_data));
    let ring = Rc::new(ring);
    let side = DriverSide {
        ring: ring.clone(),
        memory,
        parser,
        inflight,
        log,
        spans: Spans::new(counters.spans.clone()),
        counters,
        link: link.clone(),
        batch: Vec::new(),
        begun: Vec::new(),
        answered: Vec::new(),
        left: Vec::new(),
        undone: 0,
        broken: None,
    };
    let side = Rc::new(RefCell::new(side));
    let make = |inbox: Rc<Inbox<u16>>| answer_all(inbox, side.clone(), target.clone());
    let mut slots = Slots::new(link.waker.clone(), make);
    let mut queue = QueueTask { ring: ring.clone(), side: side.clone(), link, again, again_at: 0 };
    side.borrow().counters.ring_started();
    serve_ring(&mut queue, &mut slots, ring.clone(), &kick, &target.disk).await;
    side.borrow().counters.ring_stopped();
    let mut side = side.borrow_mut();
    let left = std::mem::take(&mut side.left);
    Ended { next_avail: ring.next_avail(), left, undone: side.undone, broken: side.broken, is_lost: side.is_lost() }
}

/// The future of one slot: answers one chain after the other.
async fn answer_all<D: Disk>(inbox: Rc<Inbox<u16>>, side: Rc<RefCell<DriverSide>>, target: Arc<Target<D>>) {
    let mut request = Request::default();
    loop {
        let head = inbox.next().await;
        let keeps_rules = side.borrow_mut().parse(head, &mut request);
        if keeps_rules {
            inbox.stamps_go_to(request.span);
            stamp(Moment::Loaded);
            stamp(Moment::DiskBegan);
            let outcome = target.execute(&request).await;
            stamp(Moment::DiskEnded);
            match outcome {
                Some((status, written_bytes)) => side.borrow_mut().answer(&request, status, written_bytes),
                None => side.borrow_mut().leave(&request),
            }
            request.clear();
        }
        inbox.answered();
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

/// The driver's side of a queue: requests come from it and answers go to it.
struct DriverSide {
    ring: Rc<Ring>,
    memory: Arc<GuestMemory>,
    parser: Parser,
    inflight: Option<InflightQueue>,
    log: Option<QueueLog>,
    counters: Arc<FrontCounters>,
    spans: Spans,
    link: Arc<Link>,
    /// Heads of chains that are in the used ring and not published.
    batch: Vec<u16>,
    /// Requests that have begun in this turn, to be counted together, with the number of equal ones.
    begun: Vec<(Begun, u64)>,
    /// The requests of `batch`, to be counted when they are published, with the number of equal ones.
    answered: Vec<(Answered, u64)>,
    /// As of [`Ended::left`].
    left: Vec<u16>,
    /// As of [`Ended::undone`].
    undone: usize,
    broken: Option<Broken>,
}

impl DriverSide {
    fn is_lost(&self) -> bool {
        self.memory.is_lost()
            || self.ring.is_lost()
            || self.inflight.as_ref().is_some_and(InflightQueue::is_lost)
            || self.log.as_ref().is_some_and(|log| log.log.is_lost())
    }

    fn break_if_lost(&mut self) {
        if self.is_lost() {
            self.broken = Some(Broken("a file of the guest's shared memory was cut short"));
        }
    }

    /// Reads a chain; false when it has broken the ring.
    fn parse(&mut self, head: u16, request: &mut Request) -> bool {
        request.begun_ns = turn_ns();
        let taken = self.spans.taken(request.begun_ns);
        match self.parser.parse(&self.ring, &self.memory, head, request) {
            Ok(()) => {
                let (op, len_bytes) = (request.command.op(), request.data.len() as u64);
                push_run(&mut self.begun, Begun { op, len_bytes, begun_ns: request.begun_ns });
                let offset_bytes = request.offset.map_or(0, |offset| offset.0);
                request.span = self.spans.begin(taken, What { op, offset_bytes, len_bytes });
                true
            }
            Err(broken) => {
                self.broken = Some(broken);
                // The chain was not started and never will be: the next server must not do it again.
                if let Some(inflight) = &self.inflight {
                    inflight.unnote(&[head], self.ring.published());
                }
                false
            }
        }
    }

    fn answer(&mut self, request: &Request, status: u8, written_bytes: u32) {
        if let Some(span) = request.span {
            self.spans.answered(span, status != virtio::OK);
        }
        // The parser has checked that the status byte lies in the guest's memory.
        self.memory.write_byte(request.status_addr, status);
        if let Some(log) = self.log.as_ref().filter(|log| log.logs_data) {
            request.written.iter().for_each(|(addr, len)| log.log.mark(*addr, u64::from(*len)));
            log.log.mark(request.status_addr, 1);
        }
        let (op, begun_ns) = (request.command.op(), request.begun_ns);
        push_run(&mut self.answered, Answered { op, failed: status != virtio::OK, begun_ns });
        self.put(request.head, written_bytes + 1);
        if self.batch.len() >= PUBLISH {
            self.publish_and_call();
        }
    }

    /// Leaves a chain to the next server, which finds it in the in-flight region, or gets its number with the queue.
    fn leave(&mut self, request: &Request) {
        request.span.into_iter().for_each(|span| self.spans.leave(span));
        self.undone += 1;
        if self.inflight.is_none() {
            self.left.push(request.head);
        }
    }

    fn put(&mut self, head: u16, written_bytes: u32) {
        self.ring.add_used(head, written_bytes);
        if let Some(inflight) = &self.inflight {
            inflight.link(head);
        }
        self.batch.push(head);
    }

    /// Shows the driver what was answered. Returns the used index before that; `None` when there was nothing to show.
    fn publish(&mut self) -> Option<u16> {
        self.count_begun();
        if self.batch.is_empty() {
            return None;
        }
        // One look at the clock for all of them.
        let now_ns = now_ns();
        self.counters.requests.end_all(self.answered.drain(..), now_ns);
        let before = self.ring.published();
        self.ring.publish();
        self.spans.shown(now_ns);
        if let Some(inflight) = &self.inflight {
            inflight.unnote(&self.batch, self.ring.published());
        }
        if let Some((log, used_addr)) = self.log.as_ref().and_then(|log| Some((&log.log, log.used_addr?))) {
            self.ring.written_since(before).for_each(|(offset, len)| log.mark(used_addr.saturating_add(offset), len));
        }
        self.batch.clear();
        Some(before)
    }

    fn count_begun(&mut self) {
        if !self.begun.is_empty() {
            self.counters.requests.begin_all(self.begun.drain(..));
        }
    }

    /// Publishes what was answered, and notifies the driver if it wants that.
    fn publish_and_call(&mut self) {
        let published = self.publish();
        let wants_call = published.is_some_and(|before| self.ring.wants_call(before));
        if wants_call || self.link.has_new_call.swap(false, Ordering::Acquire) {
            self.counters.notified();
            self.link.ring_call();
        } else if published.is_some() {
            self.counters.not_notified();
        }
        self.spans.end();
    }
}

/// The queue as its task sees it.
struct QueueTask {
    ring: Rc<Ring>,
    side: Rc<RefCell<DriverSide>>,
    link: Arc<Link>,
    again: Vec<u16>,
    again_at: usize,
}

impl GuestRing for QueueTask {
    type Request = u16;

    /// The next chain. Those that another server has left come first.
    fn pop(&mut self) -> Option<u16> {
        if let Some(head) = self.again.get(self.again_at) {
            self.again_at += 1;
            return Some(*head);
        }
        let mut side = self.side.borrow_mut();
        match self.ring.pop() {
            Ok(head) => {
                if let (Some(head), Some(inflight)) = (head, &side.inflight) {
                    inflight.note(head);
                }
                head
            }
            Err(broken) => {
                side.broken = Some(broken);
                None
            }
        }
    }

    fn takes_new(&self) -> bool {
        self.side.borrow().broken.is_none() && !self.is_to_stop()
    }

    fn is_to_stop(&self) -> bool {
        self.link.stop.load(Ordering::Acquire)
    }

    /// Chains that another server has left are done even when the queue is to stop: the next server goes on from our
    /// index and would not know of them.
    fn may_pop(&self) -> bool {
        self.takes_new() || (self.side.borrow().broken.is_none() && self.again_at < self.again.len())
    }

    fn max_in_flight(&self) -> usize {
        MAX_IN_FLIGHT.min(usize::from(self.ring.size()))
    }

    fn end_turn(&mut self, has_worked: bool) {
        let mut side = self.side.borrow_mut();
        side.publish_and_call();
        if has_worked {
            side.break_if_lost();
        }
    }

    /// The turn before this has touched the ring, and may have found that its memory is gone.
    fn kicked(&mut self) {
        self.side.borrow_mut().break_if_lost();
    }

    fn kicks_failed(&mut self, error: spile_core::Error) {
        tracing::warn!(%error, "vhost-user: a queue's kicks cannot be received");
        self.side.borrow_mut().broken = Some(Broken("its kicks cannot be received"));
    }

    fn suppress(&self) {
        self.ring.suppress();
    }
}
