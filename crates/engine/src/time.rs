//! Sleeping tasks: each worker has a sorted list of deadlines. The nearest one is the time-out of the reactor's next
//! wait, so there is a kernel timer only while a task sleeps.

use std::collections::BTreeMap;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::op::Stays;
use crate::worker;

type Key = (Instant, u64);

/// The tasks that sleep, by their deadlines.
#[derive(Default)]
pub(crate) struct Timers {
    sleepers: BTreeMap<Key, Waker>,
    next: u64,
}

impl Timers {
    fn add(&mut self, deadline: Instant, waker: Waker) -> Key {
        self.next += 1;
        let key = (deadline, self.next);
        self.sleepers.insert(key, waker);
        key
    }

    /// The time until the nearest deadline; `None` when no task sleeps.
    pub(crate) fn time_left(&self) -> Option<Duration> {
        let (deadline, _) = self.sleepers.keys().next()?;
        Some(deadline.saturating_duration_since(Instant::now()))
    }

    /// Takes out the wakers of all deadlines that have passed, earliest first. True when there were any.
    pub(crate) fn expire(&mut self, woken: &mut Vec<Waker>) -> bool {
        if self.sleepers.is_empty() {
            return false;
        }
        let before = woken.len();
        let now = Instant::now();
        while let Some(entry) = self.sleepers.first_entry() {
            if entry.key().0 > now {
                break;
            }
            woken.push(entry.remove());
        }
        woken.len() > before
    }
}

struct Sleep {
    deadline: Option<Instant>,
    key: Option<Key>,
    stays: Stays,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        // A deadline that is too far away to be represented never comes.
        let Some(deadline) = self.deadline else { return Poll::Pending };
        if deadline <= Instant::now() {
            return Poll::Ready(());
        }
        let old = self.key.take();
        let key = worker::with(|w| {
            let mut timers = w.timers.borrow_mut();
            let _replaced = old.and_then(|key| timers.sleepers.remove(&key));
            timers.add(deadline, context.waker().clone())
        });
        self.key = Some(key);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            // The waker is dropped after the borrow has ended.
            let _waker = worker::try_with(|w| w.timers.borrow_mut().sleepers.remove(&key));
        }
    }
}

/// Sleeps for at least `d`. Dropping the future cancels it. There is no timer when no task sleeps.
///
/// # Panics
/// Outside a worker.
pub async fn sleep(d: Duration) {
    Sleep { deadline: Instant::now().checked_add(d), key: None, stays: PhantomData }.await;
}
