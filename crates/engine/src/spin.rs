//! Adaptive polling: a worker that has run out of work looks at memory for a while before it sleeps.
//!
//! A guest's queue that has no request at the moment is *watched*: its guest does not have to kick, because the worker
//! looks at the queue itself. Before the worker sleeps, it spins: it looks at the watched queues again and again, for
//! the time of its *window*. When the window is over without work, the worker *arms* the queues, which asks their
//! guests to kick, and does not watch them until they have had work again. So an idle disk is watched for one window,
//! and then costs nothing.
//!
//! The window adapts itself. A *gap* is the time from running out of work to the next work. Each gap is compared with
//! the limit (`--poll`). After a gap within the limit, the window moves towards twice the gap. After a longer gap it
//! falls to a quarter, and below [`LEAST`] to nothing. A disk whose gaps are long thus costs one spin, and then the
//! worker sleeps as if there were no polling. A single short gap brings the window back.
//!
//! When `n` requests are with a device, a wake-up delays only the one that ends, but spinning would use the processor
//! for as long as the device works. So the limit is divided by `n`. The worker then spins for a guest that waits for
//! each answer, or whose requests need no device, and sleeps while a device works on a deep queue.

use std::rc::Rc;
use std::task::Waker;
use std::time::Duration;

use slab::Slab;

use crate::worker;

/// The shortest window. A shorter one would save less than looking at the clock costs.
const LEAST: Duration = Duration::from_micros(2);
/// The time that a wake-up takes. With polling, a gap would have been shorter by that.
const WAKE: Duration = Duration::from_micros(15);

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
}

/// What the worker watches now.
#[derive(Default)]
pub(crate) struct Watches {
    entries: Slab<Watched>,
}

impl Watches {
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Requests that are with a device.
    pub(crate) fn in_flight(&self) -> u32 {
        let count: usize = self.entries.iter().map(|(_, watched)| watched.in_flight).sum();
        count.min(1 << 16) as u32
    }

    /// True when a watched thing has work. Wakes nobody.
    pub(crate) fn any_ready(&self) -> bool {
        self.entries.iter().any(|(_, watched)| watched.pollable.is_ready())
    }

    /// Wakes the tasks of those that have work, and ends watching them.
    pub(crate) fn take_ready(&mut self, woken: &mut Vec<Waker>) {
        self.take_if(woken, |pollable| pollable.is_ready());
    }

    /// Arms all, wakes the tasks of those that have work already, and ends watching.
    pub(crate) fn arm(&mut self, woken: &mut Vec<Waker>) {
        self.take_if(woken, |pollable| pollable.arm());
        self.entries.clear();
    }

    fn take_if(&mut self, woken: &mut Vec<Waker>, is_wanted: impl Fn(&dyn Pollable) -> bool) {
        self.entries.retain(|_, watched| {
            let wanted = is_wanted(&*watched.pollable);
            if wanted {
                woken.push(watched.waker.clone());
            }
            !wanted
        });
    }
}

/// Has this worker watch `pollable`, and wake `waker` when it has work. `in_flight` of its requests are with a device.
/// The watch ends with that wake-up.
///
/// # Panics
/// Outside a worker.
pub fn watch(pollable: &Rc<dyn Pollable>, waker: &Waker, in_flight: usize) {
    worker::with(|w| {
        let mut watches = w.watches.borrow_mut();
        let known = watches.entries.iter_mut().find(|(_, watched)| Rc::ptr_eq(&watched.pollable, pollable));
        match known {
            Some((_, watched)) => {
                watched.waker.clone_from(waker);
                watched.in_flight = in_flight;
            }
            None => {
                watches.entries.insert(Watched { pollable: pollable.clone(), waker: waker.clone(), in_flight });
            }
        }
    });
}

/// Ends watching `pollable` on this worker.
///
/// # Panics
/// Outside a worker.
pub fn unwatch(pollable: &Rc<dyn Pollable>) {
    worker::with(|w| w.watches.borrow_mut().entries.retain(|_, watched| !Rc::ptr_eq(&watched.pollable, pollable)));
}

/// How long the worker spins before it sleeps.
pub(crate) struct Window {
    limit: Duration,
    now: Duration,
}

impl Window {
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, now: Duration::ZERO }
    }

    /// How long to spin when `in_flight` requests are with a device.
    pub(crate) fn length(&self, in_flight: u32) -> Duration {
        let length = self.now.min(self.limit / in_flight.max(1));
        if length < LEAST { Duration::ZERO } else { length }
    }

    /// Adapts the window to a gap. `has_slept`: the worker slept at the end of the gap.
    pub(crate) fn learn(&mut self, gap: Duration, has_slept: bool) {
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
