//! Adaptive polling: a worker that has run out of work looks at memory for a while before it sleeps.
//!
//! A guest's queue that has no request at the moment is *watched*: its guest does not have to kick, because the worker
//! looks at the queue itself. Before the worker sleeps, it spins: it looks at the watched queues again and again, for
//! the time of its *window*. When the window is over without work, the worker *arms* the queues, which asks their
//! guests to kick, and does not watch them until they have had work again. So an idle disk is watched for one window,
//! and then costs nothing.
//!
//! A worker whose other queues are busy may never sleep. So a queue that has brought no work for [`PATIENCE`] turns is
//! armed by itself: what a turn costs depends on the queues that have work, and not on all that there are.
//!
//! The window adapts itself. A *gap* is the time from running out of work to the next work. Each gap is compared with
//! the limit (`--poll`). After a gap within the limit, the window moves towards twice the gap. After a longer gap it
//! falls to a quarter, and below [`LEAST`] to nothing. A disk whose gaps are long thus costs one spin, and then the
//! worker sleeps as if there were no polling. A single short gap brings the window back.
//!
//! What the worker waits for decides how long it takes. While no request is with a device, it waits for a guest; else it most
//! likely waits for the device. Both have a window of their own: at depth 1 on a device that takes longer than the limit, the
//! worker sleeps while the device works, and spins for the guest's next request.
//!
//! When `n` requests are with a device, a wake-up delays only the one that ends, but spinning would use the processor
//! for as long as the device works. So the limit is divided by `n`: the worker sleeps while a device works on a deep queue.

use std::cell::Cell;
use std::rc::Rc;
use std::task::Waker;
use std::time::{Duration, Instant};

use crate::worker;

/// The shortest window. A shorter one would save less than looking at the clock costs.
const LEAST: Duration = Duration::from_micros(2);
/// The time that a wake-up takes. With polling, a gap would have been shorter by that.
const WAKE: Duration = Duration::from_micros(15);

/// So many turns of the worker without work end a watch.
const PATIENCE: u32 = 64;

/// Something in memory that another process changes.
pub trait Pollable {
    /// True when there is work. Changes nothing.
    fn is_ready(&self) -> bool;

    /// Asks the other side to ring from now on. True when there is work already.
    fn arm(&self) -> bool;
}

struct Watched {
    pollable: Rc<dyn Pollable>,
    waker: Waker,
    /// The number of its requests that are with a device.
    in_flight: usize,
    /// Turns of the worker in which it had no work.
    quiet_turns: u32,
    place: Rc<Place>,
}

/// Where something is among what is watched; [`NOWHERE`] while it is not.
type Place = Cell<usize>;
const NOWHERE: usize = usize::MAX;

/// What the worker watches now.
#[derive(Default)]
pub(crate) struct Watches {
    entries: Vec<Watched>,
}

impl Watches {
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Requests that are with a device.
    pub(crate) fn in_flight(&self) -> u32 {
        let count: usize = self.entries.iter().map(|watched| watched.in_flight).sum();
        count.min(1 << 16) as u32
    }

    /// True when a watched thing has work. Wakes nobody.
    pub(crate) fn any_ready(&self) -> bool {
        self.entries.iter().any(|watched| watched.pollable.is_ready())
    }

    /// Ends a turn: wakes the tasks of those that have work, and ends watching them. Those that have had none for long
    /// are armed, and watched no more either.
    pub(crate) fn take_ready(&mut self, woken: &mut Vec<Waker>) {
        let mut at = 0;
        while let Some(watched) = self.entries.get_mut(at) {
            watched.quiet_turns += 1;
            let is_over = watched.quiet_turns > PATIENCE;
            let has_work = if is_over { watched.pollable.arm() } else { watched.pollable.is_ready() };
            if !is_over && !has_work {
                at += 1;
                continue;
            }
            let ended = self.remove(at);
            if has_work {
                woken.push(ended.waker);
            }
        }
    }

    /// Arms all, wakes the tasks of those that have work already, and ends watching.
    pub(crate) fn arm(&mut self, woken: &mut Vec<Waker>) {
        for watched in self.entries.drain(..) {
            watched.place.set(NOWHERE);
            if watched.pollable.arm() {
                woken.push(watched.waker);
            }
        }
    }

    fn insert(&mut self, watched: Watched) {
        watched.place.set(self.entries.len());
        self.entries.push(watched);
    }

    fn remove(&mut self, at: usize) -> Watched {
        let removed = self.entries.swap_remove(at);
        removed.place.set(NOWHERE);
        if let Some(moved) = self.entries.get(at) {
            moved.place.set(at);
        }
        removed
    }
}

/// Something pollable that this worker watches, from time to time. When it is dropped, the worker watches it no more.
pub struct Watch {
    pollable: Rc<dyn Pollable>,
    place: Rc<Place>,
}

impl Watch {
    /// Watches nothing yet.
    pub fn new(pollable: Rc<dyn Pollable>) -> Self {
        Self { pollable, place: Rc::new(Cell::new(NOWHERE)) }
    }

    /// Has this worker watch it, and wake `waker` when it has work. `in_flight` of its requests are with a device. The
    /// watch ends with that wake-up, or when the worker arms it.
    ///
    /// # Panics
    /// Outside a worker.
    pub fn begin(&self, waker: &Waker, in_flight: usize) {
        worker::with(|w| {
            let mut watches = w.watches.borrow_mut();
            match watches.entries.get_mut(self.place.get()) {
                Some(watched) => {
                    watched.waker.clone_from(waker);
                    watched.in_flight = in_flight;
                    watched.quiet_turns = 0;
                }
                None => {
                    let (pollable, waker, place) = (self.pollable.clone(), waker.clone(), self.place.clone());
                    watches.insert(Watched { pollable, waker, in_flight, quiet_turns: 0, place });
                }
            }
        });
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let place = self.place.get();
        if place == NOWHERE {
            return;
        }
        // Without a worker, the worker itself ends, and watches nothing any more. The entry is dropped after the borrow has
        // ended: its waker may come back here.
        let ended = worker::try_with(|w| w.watches.borrow_mut().remove(place));
        drop(ended);
    }
}

/// A time in which the worker has no work.
pub(crate) struct Gap {
    since: Instant,
    /// The requests that were with a device when it began.
    in_flight: u32,
}

impl Gap {
    /// The worker has run out of work now.
    pub(crate) fn begin(in_flight: u32) -> Self {
        Self { since: Instant::now(), in_flight }
    }

    /// How long it has taken up to now.
    pub(crate) fn length(&self) -> Duration {
        self.since.elapsed()
    }
}

/// How long the worker spins before it sleeps, by what it waits for.
pub(crate) struct Windows {
    guest: Window,
    device: Window,
}

impl Windows {
    /// Windows of at most `limit`.
    pub(crate) fn new(limit: Duration) -> Self {
        Self { guest: Window::new(limit), device: Window::new(limit) }
    }

    /// How long to spin when `in_flight` requests are with a device.
    pub(crate) fn length(&self, in_flight: u32) -> Duration {
        if in_flight == 0 { self.guest.length(0) } else { self.device.length(in_flight) }
    }

    /// Adapts the window of a gap that is over. `has_slept`: the worker slept at its end.
    pub(crate) fn learn(&mut self, gap: &Gap, has_slept: bool) {
        self.learn_length(gap.in_flight, gap.length(), has_slept);
    }

    fn learn_length(&mut self, in_flight: u32, length: Duration, has_slept: bool) {
        let window = if in_flight == 0 { &mut self.guest } else { &mut self.device };
        window.learn(length, has_slept);
    }
}

/// How long the worker spins for one kind of work.
struct Window {
    limit: Duration,
    now: Duration,
}

impl Window {
    fn new(limit: Duration) -> Self {
        Self { limit, now: Duration::ZERO }
    }

    /// How long to spin when `in_flight` requests are with a device.
    fn length(&self, in_flight: u32) -> Duration {
        let length = self.now.min(self.limit / in_flight.max(1));
        if length < LEAST { Duration::ZERO } else { length }
    }

    /// Adapts the window to a gap. `has_slept`: the worker slept at the end of the gap.
    fn learn(&mut self, gap: Duration, has_slept: bool) {
        let gap = if has_slept { gap.saturating_sub(WAKE) } else { gap };
        self.now = match gap <= self.limit {
            true => ((self.now + 2 * gap) / 2).max(gap).max(LEAST).min(self.limit),
            false => self.now / 4,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn short_gaps_open_the_window_and_one_long_gap_nearly_closes_it() {
        let mut window = Window::new(50 * US);
        assert_eq!(window.length(1), Duration::ZERO);
        window.learn(25 * US, true);
        assert!(window.length(1) >= 10 * US, "{:?}", window.length(1));
        for _ in 0..8 {
            window.learn(10 * US, false);
        }
        assert!((19 * US..=20 * US).contains(&window.length(1)), "{:?}", window.length(1));
        window.learn(10_000 * US, true);
        assert!(window.length(1) <= 5 * US);
        window.learn(10_000 * US, true);
        assert_eq!(window.length(1), Duration::ZERO);
    }

    #[test]
    fn requests_with_a_device_share_the_window() {
        let mut window = Window::new(50 * US);
        (0..20).for_each(|_| window.learn(50 * US, false));
        assert_eq!([0, 1, 2, 10, 25, 26].map(|n| window.length(n).as_micros()), [50, 50, 25, 5, 2, 0]);
    }

    #[test]
    fn a_slow_device_does_not_take_the_window_of_its_guest() {
        let mut windows = Windows::new(50 * US);
        for _ in 0..20 {
            windows.learn_length(1, 90 * US, true);
            windows.learn_length(0, 10 * US, false);
        }
        assert_eq!(windows.length(1), Duration::ZERO);
        assert!((19 * US..=20 * US).contains(&windows.length(0)), "{:?}", windows.length(0));
        (0..20).for_each(|_| windows.learn_length(1, 20 * US, false));
        (0..20).for_each(|_| windows.learn_length(0, 1000 * US, true));
        assert!(windows.length(1) > 30 * US && windows.length(0).is_zero(), "{:?}", windows.length(1));
    }

    #[test]
    fn the_window_keeps_to_its_limit() {
        let mut window = Window::new(50 * US);
        (0..20).for_each(|_| window.learn(50 * US, false));
        assert_eq!(window.length(1), 50 * US);
        let mut off = Window::new(Duration::ZERO);
        off.learn(US, false);
        // A short sleep counts as no gap at all.
        off.learn(US, true);
        assert_eq!(off.length(1), Duration::ZERO);
    }
}
