//! A guest's ring at work: one task on one worker that pops, executes, answers and notifies, in turns.
//!
//! A turn: answer what has ended, pop and start what is new, publish, notify the guest once. When there is nothing to do
//! the worker watches the ring ([`crate::watch`]), and asks the guest for kicks only before it sleeps. The task ends
//! when the ring takes nothing any more and nothing is in flight.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll};

use spile_core::Error;

use crate::event::Event;
use crate::slots::{Desk, Slots};
use crate::spin::{Pollable, unwatch, watch};

/// Requests that are popped before what has ended is looked at.
const BATCH: usize = 64;
/// Turns before other tasks of the worker get theirs.
const TURNS: usize = 4;

/// A ring that a guest shares.
pub trait Turns {
    /// What a request's slot gets.
    type Work;

    /// The next request.
    fn pop(&mut self) -> Option<Self::Work>;

    /// False once no new request is wanted: the ring is to stop, or is broken.
    fn takes_new(&self) -> bool;

    /// True while there may be something to pop, which may be more than what is new.
    fn may_pop(&self) -> bool {
        self.takes_new()
    }

    /// Requests in flight at most: the rest waits in the ring.
    fn max_in_flight(&self) -> usize;

    /// Shows the guest what was answered; `has_worked` when the turn did anything.
    fn end_turn(&mut self, has_worked: bool);

    /// The guest has kicked, though there is nothing new.
    fn kicked(&mut self) {}

    /// The guest's kicks cannot be heard any more.
    fn kicks_failed(&mut self, error: Error);

    /// Kicks are not wanted for now.
    fn suppress(&self);
}

/// Serves a ring to its end. `watched` is the ring, for the worker to look at.
///
/// # Panics
/// Outside a worker.
pub async fn serve<T, F, M>(turns: &mut T, slots: &mut Slots<F, M, T::Work>, watched: &Rc<dyn Pollable>, kick: &Event)
where
    T: Turns,
    F: Future<Output = ()>,
    M: Fn(Rc<Desk<T::Work>>) -> F,
{
    let mut kicked = Box::pin(kick.wait());
    poll_fn(|context| {
        for _ in 0..TURNS {
            if turn(turns, slots, context) {
                continue;
            }
            if !turns.may_pop() && slots.busy() == 0 {
                return Poll::Ready(());
            }
            // With every slot taken there is nothing to look for: an answer will wake us.
            if !turns.takes_new() || slots.busy() >= turns.max_in_flight() {
                return Poll::Pending;
            }
            match kicked.as_mut().poll(context) {
                Poll::Ready(Ok(())) => {
                    kicked.set(kick.wait());
                    turns.kicked();
                }
                Poll::Ready(Err(error)) => turns.kicks_failed(error),
                Poll::Pending => {
                    turns.suppress();
                    watch(watched, context.waker(), slots.busy());
                    return Poll::Pending;
                }
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
    unwatch(watched);
}

/// One turn; true when there was anything to do.
fn turn<T, F, M>(turns: &mut T, slots: &mut Slots<F, M, T::Work>, context: &Context<'_>) -> bool
where
    T: Turns,
    F: Future<Output = ()>,
    M: Fn(Rc<Desk<T::Work>>) -> F,
{
    let mut has_worked = slots.poll_ready(context);
    let mut started = 0;
    while started < BATCH && slots.busy() < turns.max_in_flight() && turns.may_pop() {
        let Some(work) = turns.pop() else { break };
        started += 1;
        slots.start(work);
    }
    has_worked |= started > 0;
    turns.end_turn(has_worked);
    has_worked
}
