//! Requests in flight of one ring: long-lived futures, one for each request at a time, polled by the queue's own task.
//!
//! A request that the disk answers at once never leaves the queue's task: no task is made or woken for it, nothing is
//! allocated and nothing is moved, for a slot's future reads its request into its own memory. One that waits has a waker
//! of its own, which puts its number on the queue's list and wakes the queue's task; so all requests that end in one turn
//! of the worker are answered together.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Wake, Waker};

/// What wakes a queue: its requests, and whoever controls it from another thread.
#[derive(Default)]
pub struct Bell {
    state: Mutex<BellState>,
}

#[derive(Default)]
struct BellState {
    /// Requests to be polled.
    ready: Vec<u32>,
    queue: Option<Waker>,
}

impl Bell {
    fn lock(&self) -> MutexGuard<'_, BellState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Wakes the queue.
    pub fn ring(&self) {
        let waker = self.lock().queue.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn ready(&self, number: u32) {
        let mut state = self.lock();
        state.ready.push(number);
        let waker = state.queue.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Takes the requests to be polled, and wakes `waker` when there are more, or the bell rings.
    fn take(&self, into: &mut Vec<u32>, waker: &Waker) {
        let mut state = self.lock();
        into.append(&mut state.ready);
        match &mut state.queue {
            Some(old) => old.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }
}

struct SlotWake {
    number: u32,
    bell: Arc<Bell>,
}

impl Wake for SlotWake {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.bell.ready(self.number);
    }
}

/// Where a slot's future finds its next request, and says that it has answered.
pub struct Desk<T> {
    work: Cell<Option<T>>,
    has_answered: Cell<bool>,
}

impl<T> Desk<T> {
    fn new() -> Self {
        Self { work: Cell::new(None), has_answered: Cell::new(false) }
    }

    /// The next request.
    pub async fn next(&self) -> T {
        poll_fn(|_| self.work.take().map_or(Poll::Pending, Poll::Ready)).await
    }

    /// The request is answered.
    pub fn answered(&self) {
        self.has_answered.set(true);
    }
}

struct Slot<F, T> {
    future: Pin<Box<F>>,
    desk: Rc<Desk<T>>,
    waker: Waker,
}

/// The slots of a queue. They are made as they are needed and stay.
pub struct Slots<F, M, T> {
    bell: Arc<Bell>,
    make: M,
    slots: Vec<Slot<F, T>>,
    free: Vec<u32>,
    ready: Vec<u32>,
}

impl<F: Future<Output = ()>, M: Fn(Rc<Desk<T>>) -> F, T> Slots<F, M, T> {
    /// `make` makes the future that answers the requests of one desk, one after the other, for ever.
    pub fn new(bell: Arc<Bell>, make: M) -> Self {
        Self { bell, make, slots: Vec::new(), free: Vec::new(), ready: Vec::new() }
    }

    /// Requests in flight.
    pub fn busy(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Starts a request.
    pub fn start(&mut self, work: T) {
        let number = self.free.pop().unwrap_or_else(|| self.add());
        self.slots[number as usize].desk.work.set(Some(work));
        self.poll(number);
    }

    fn add(&mut self) -> u32 {
        let number = self.slots.len() as u32;
        let desk = Rc::new(Desk::new());
        let waker = Waker::from(Arc::new(SlotWake { number, bell: self.bell.clone() }));
        self.slots.push(Slot { future: Box::pin((self.make)(desk.clone())), desk, waker });
        number
    }

    /// Polls one; frees it when it has answered.
    fn poll(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        let is_pending = slot.future.as_mut().poll(&mut Context::from_waker(&slot.waker)).is_pending();
        debug_assert!(is_pending, "a slot's future never ends");
        if slot.desk.has_answered.take() {
            self.free.push(number);
        }
    }

    /// Polls what was woken. The task of `context` is woken when there is more. True when any was polled.
    pub fn poll_ready(&mut self, context: &Context<'_>) -> bool {
        let mut ready = std::mem::take(&mut self.ready);
        self.bell.take(&mut ready, context.waker());
        let any = !ready.is_empty();
        ready.drain(..).for_each(|number| self.poll(number));
        self.ready = ready;
        any
    }
}
