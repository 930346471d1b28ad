//! A guest's ring at work: one task on one worker that pops, executes, answers and notifies, in ring.
//!
//! A turn: answer what has ended, pop and start what is new, publish the answers, notify the guest once. When there is
//! nothing to do, the worker watches the ring ([`spile_engine::Watch`]), and asks the guest for kicks only before it
//! sleeps. The task ends when the ring takes no new request and none is in flight.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use spile_core::{Disk, Error};
use spile_engine::{Event, Pollable, Watch, sleep};

use crate::slots::{Inbox, Slots};

/// So many requests are popped before the task looks at what has ended.
const BATCH: usize = 64;
/// So many turns follow each other before other tasks of the worker may run.
const TURNS: usize = 4;

/// So many kicks with nothing new behind them may follow each other before the worker looks less often.
const IDLE_KICKS: u32 = 64;
/// The least and the longest time between two looks then.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(16)];

/// Kicks with nothing new behind them. One that never ends, such as an eventfd whose count nobody can read down, must not keep a
/// processor busy.
#[derive(Default)]
struct IdleKicks {
    count: u32,
    pause: Option<Pin<Box<dyn Future<Output = ()>>>>,
}

impl IdleKicks {
    /// There was something to do.
    #[inline]
    fn end(&mut self) {
        if self.count > 0 {
            *self = Self::default();
        }
    }

    /// Counts a kick.
    fn note(&mut self) {
        self.count += 1;
        if let Some(over) = self.count.checked_sub(IDLE_KICKS) {
            let [least, longest] = PAUSES;
            let pause = least.saturating_mul(1 << over.min(8)).min(longest);
            self.count = self.count.min(IDLE_KICKS + 8);
            self.pause = Some(Box::pin(sleep(pause)));
        }
    }

    /// True while no kick is heard.
    fn is_pausing(&mut self, context: &mut Context<'_>) -> bool {
        let Some(pause) = &mut self.pause else { return false };
        let is_pausing = pause.as_mut().poll(context).is_pending();
        if !is_pausing {
            self.pause = None;
        }
        is_pausing
    }
}

/// A ring that a guest shares with us, as the task that serves it sees it.
pub trait GuestRing {
    /// What a slot gets to execute.
    type Request;

    /// The next request.
    fn pop(&mut self) -> Option<Self::Request>;

    /// False once no new request is wanted: the ring is to stop, or is broken.
    fn takes_new(&self) -> bool;

    /// True once the ring is told to stop: somebody waits for its end. Nobody does for that of a ring which is only broken.
    fn is_to_stop(&self) -> bool;

    /// True while there may be something to pop: a new request, or an old one that another process has left.
    fn may_pop(&self) -> bool {
        self.takes_new()
    }

    /// The most requests in flight. More wait in the ring.
    fn max_in_flight(&self) -> usize;

    /// Ends a turn: shows the guest what was answered. `has_worked` is true when the turn did anything.
    fn end_turn(&mut self, has_worked: bool);

    /// The guest has kicked, although there is nothing new.
    fn kicked(&mut self) {}

    /// The guest's kicks cannot be received any more.
    fn kicks_failed(&mut self, error: Error);

    /// Tells the guest that it need not kick: the worker looks at the ring by itself.
    fn suppress(&self);
}

/// Has a disk hold no request back while a ring comes to its end: somebody waits for that.
struct Hurry<'a, D: Disk> {
    disk: &'a D,
    has_begun: bool,
}

impl<D: Disk> Hurry<'_, D> {
    fn begin(&mut self) {
        if !std::mem::replace(&mut self.has_begun, true) {
            self.disk.hurry(true);
        }
    }
}

impl<D: Disk> Drop for Hurry<'_, D> {
    fn drop(&mut self) {
        if self.has_begun {
            self.disk.hurry(false);
        }
    }
}

/// Serves `ring`, whose requests go to `disk`, to its end. `watched` is the same ring, for the worker to look at; `kick` is what the
/// guest rings.
///
/// # Panics
/// Outside a worker.
pub async fn serve_ring<T, F, M>(
    ring: &mut T,
    slots: &mut Slots<F, M, T::Request>,
    watched: Rc<dyn Pollable>,
    kick: &Event,
    disk: &impl Disk,
) where
    T: GuestRing,
    F: Future<Output = ()>,
    M: Fn(Rc<Inbox<T::Request>>) -> F,
{
    let watch = Watch::new(watched);
    let mut kicked = Box::pin(kick.wait());
    let mut hurry = Hurry { disk, has_begun: false };
    let mut idle = IdleKicks::default();
    poll_fn(|context| {
        for _ in 0..TURNS {
            if turn(ring, slots, context) {
                idle.end();
                continue;
            }
            if !ring.may_pop() && slots.busy() == 0 {
                return Poll::Ready(());
            }
            if ring.is_to_stop() {
                hurry.begin();
            }
            if !ring.takes_new() {
                return Poll::Pending;
            }
            // With every slot taken there is nothing to look for: an answer will wake us.
            if slots.busy() >= ring.max_in_flight() {
                return Poll::Pending;
            }
            if idle.is_pausing(context) {
                watch.begin(context.waker(), slots.busy());
                return Poll::Pending;
            }
            match kicked.as_mut().poll(context) {
                Poll::Ready(Ok(())) => {
                    idle.note();
                    kicked.set(kick.wait());
                    ring.kicked();
                }
                Poll::Ready(Err(error)) => ring.kicks_failed(error),
                Poll::Pending => {
                    ring.suppress();
                    watch.begin(context.waker(), slots.busy());
                    return Poll::Pending;
                }
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// One turn; true when there was anything to do.
#[inline]
fn turn<T, F, M>(ring: &mut T, slots: &mut Slots<F, M, T::Request>, context: &Context<'_>) -> bool
where
    T: GuestRing,
    F: Future<Output = ()>,
    M: Fn(Rc<Inbox<T::Request>>) -> F,
{
    let mut has_worked = slots.poll_ready(context);
    let mut started = 0;
    while started < BATCH && slots.busy() < ring.max_in_flight() && ring.may_pop() {
        let Some(request) = ring.pop() else { break };
        started += 1;
        slots.start(request);
    }
    has_worked |= started > 0;
    ring.end_turn(has_worked);
    has_worked
}
