//! Requests in flight of one ring: long-lived futures, one for each request at a time, polled by the ring's own task.
//!
//! A request that the disk answers at once never leaves the ring's task: no task is made or woken for it, nothing is
//! allocated and nothing is moved, because a slot's future reads its request into its own memory. A request that waits
//! has a waker of its own, which puts its slot's number on the ring's list and wakes the ring's task. So all requests
//! that end in one turn of the worker are answered together.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Wake, Waker};

use spile_core::metrics::span::{self, Span};

/// Wakes the task of one ring. Its slots do so when their requests can go on, and so does whoever controls the ring
/// from another thread.
#[derive(Default)]
pub struct QueueWaker {
    state: Mutex<WakeState>,
}

#[derive(Default)]
struct WakeState {
    /// Slots to be polled.
    ready: Vec<u32>,
    task: Option<Waker>,
}

impl QueueWaker {
    fn lock(&self) -> MutexGuard<'_, WakeState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Wakes the ring's task.
    pub fn wake(&self) {
        let waker = self.lock().task.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn slot_is_ready(&self, number: u32) {
        let mut state = self.lock();
        state.ready.push(number);
        let waker = state.task.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Takes the slots to be polled. From now on the next slot that is ready wakes `waker`, and so does
    /// [`QueueWaker::wake`].
    fn take(&self, into: &mut Vec<u32>, waker: &Waker) {
        let mut state = self.lock();
        into.append(&mut state.ready);
        match &mut state.task {
            Some(old) => old.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }
}

struct SlotWake {
    number: u32,
    waker: Arc<QueueWaker>,
}

impl Wake for SlotWake {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.waker.slot_is_ready(self.number);
    }
}

/// Where a slot's future finds its next request, and says that it has answered the last one.
pub struct Inbox<T> {
    request: Cell<Option<T>>,
    has_answered: Cell<bool>,
    span: Cell<Option<&'static Span>>,
}

impl<T> Inbox<T> {
    fn new() -> Self {
        Self { request: Cell::new(None), has_answered: Cell::new(false), span: Cell::new(None) }
    }

    /// The next request.
    pub async fn next(&self) -> T {
        poll_fn(|_| self.request.take().map_or(Poll::Pending, Poll::Ready)).await
    }

    /// Says which span is the request's, if it has one: what the slot does from now on is stamped there.
    #[inline]
    pub fn stamps_go_to(&self, span: Option<&'static Span>) {
        self.span.set(span);
        if let Some(span) = span {
            span::start(span);
        }
    }

    /// Says that the request is answered: the slot is free.
    pub fn answered(&self) {
        self.span.set(None);
        self.has_answered.set(true);
    }
}

struct Slot<F, T> {
    future: Pin<Box<F>>,
    inbox: Rc<Inbox<T>>,
    waker: Waker,
}

/// The slots of one ring. A slot is made when all others are taken, and stays.
pub struct Slots<F, M, T> {
    waker: Arc<QueueWaker>,
    make: M,
    slots: Vec<Slot<F, T>>,
    free: Vec<u32>,
    ready: Vec<u32>,
}

impl<F: Future<Output = ()>, M: Fn(Rc<Inbox<T>>) -> F, T> Slots<F, M, T> {
    /// `make` makes the future that answers the requests of one inbox, one after the other, for ever.
    pub fn new(waker: Arc<QueueWaker>, make: M) -> Self {
        Self { waker, make, slots: Vec::new(), free: Vec::new(), ready: Vec::new() }
    }

    /// Requests in flight.
    pub fn busy(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Starts a request.
    #[inline]
    pub fn start(&mut self, request: T) {
        let number = self.free.pop().unwrap_or_else(|| self.add());
        self.slots[number as usize].inbox.request.set(Some(request));
        self.poll(number);
    }

    fn add(&mut self) -> u32 {
        let number = self.slots.len() as u32;
        let inbox = Rc::new(Inbox::new());
        let waker = Waker::from(Arc::new(SlotWake { number, waker: self.waker.clone() }));
        self.slots.push(Slot { future: Box::pin((self.make)(inbox.clone())), inbox, waker });
        number
    }

    /// Polls one slot; frees it when it has answered.
    fn poll(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        let mut context = Context::from_waker(&slot.waker);
        let is_pending = span::with(slot.inbox.span.get(), || slot.future.as_mut().poll(&mut context)).is_pending();
        debug_assert!(is_pending, "a slot's future never ends");
        if slot.inbox.has_answered.take() {
            self.free.push(number);
        }
    }

    /// Polls the slots that were woken. The task of `context` is woken when there are more. True when any was polled.
    pub fn poll_ready(&mut self, context: &Context<'_>) -> bool {
        let mut ready = std::mem::take(&mut self.ready);
        self.waker.take(&mut ready, context.waker());
        let any = !ready.is_empty();
        ready.drain(..).for_each(|number| self.poll(number));
        self.ready = ready;
        any
    }
}
