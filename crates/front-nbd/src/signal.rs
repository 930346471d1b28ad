//! Wake-ups: [`Signal`] wakes one task of the same worker, [`Stop`] tells all connections on any thread that the server
//! ends.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Waker};

use slab::Slab;

/// A wake-up for one task of the same worker. `notify` wakes the task that waits, or lets its next wait return at once.
#[derive(Default)]
pub(crate) struct Signal {
    set: Cell<bool>,
    waiter: RefCell<Option<Waker>>,
}

impl Signal {
    pub(crate) fn notify(&self) {
        self.set.set(true);
        let waiter = self.waiter.borrow_mut().take();
        if let Some(waker) = waiter {
            waker.wake();
        }
    }

    pub(crate) async fn wait(&self) {
        poll_fn(|cx| self.poll_wait(cx)).await;
    }

    pub(crate) fn poll_wait(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.set.take() {
            self.waiter.borrow_mut().take();
            return Poll::Ready(());
        }
        let mut waiter = self.waiter.borrow_mut();
        match waiter.as_mut() {
            Some(waker) => waker.clone_from(cx.waker()),
            None => *waiter = Some(cx.waker().clone()),
        }
        Poll::Pending
    }
}

/// How far the end of the server has come. The level never falls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Level {
    /// Serve.
    Run = 0,
    /// Take no new connection and no new request; finish what is in flight.
    Drain = 1,
    /// Close all connections that are left.
    HangUp = 2,
}

/// Tells every connection on every worker how far the end of the server has come.
#[derive(Default)]
pub(crate) struct Stop {
    level: AtomicU8,
    waiters: Mutex<Slab<Waker>>,
}

impl Stop {
    pub(crate) fn level(&self) -> Level {
        match self.level.load(Ordering::Acquire) {
            0 => Level::Run,
            1 => Level::Drain,
            _ => Level::HangUp,
        }
    }

    pub(crate) fn raise(&self, level: Level) {
        self.level.fetch_max(level as u8, Ordering::AcqRel);
        let waiters = self.waiters.lock().unwrap_or_else(|e| e.into_inner());
        waiters.iter().for_each(|(_, waker)| waker.wake_by_ref());
    }

    /// A place among those who wait for a higher level. Dropping it gives it up.
    pub(crate) fn watch(&self) -> Watch<'_> {
        Watch { stop: self, place: None }
    }
}

/// A place among those who wait for a higher level ([`Stop::watch`]).
pub(crate) struct Watch<'a> {
    stop: &'a Stop,
    place: Option<usize>,
}

impl Watch<'_> {
    /// Ready when the level is above `seen`.
    pub(crate) fn poll_above(&mut self, seen: Level, cx: &mut Context<'_>) -> Poll<Level> {
        // The lock is taken before the level is read. A `raise` after that finds the waker, because it needs the lock.
        let mut waiters = self.stop.waiters.lock().unwrap_or_else(|e| e.into_inner());
        let level = self.stop.level();
        if level > seen {
            return Poll::Ready(level);
        }
        match self.place {
            Some(place) => waiters[place].clone_from(cx.waker()),
            None => self.place = Some(waiters.insert(cx.waker().clone())),
        }
        Poll::Pending
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.stop.waiters.lock().unwrap_or_else(|e| e.into_inner()).remove(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    #[test]
    fn a_notice_before_the_wait_is_not_lost_and_counts_once() {
        let (signal, mut cx) = (Signal::default(), Context::from_waker(Waker::noop()));
        signal.notify();
        signal.notify();
        assert!(signal.poll_wait(&mut cx).is_ready());
        assert!(signal.poll_wait(&mut cx).is_pending());
    }

    #[test]
    fn a_watch_leaves_nothing_behind() {
        let (stop, mut cx) = (Stop::default(), Context::from_waker(Waker::noop()));
        let mut watch = stop.watch();
        assert!(watch.poll_above(Level::Run, &mut cx).is_pending());
        assert_eq!(stop.waiters.lock().unwrap().len(), 1);
        stop.raise(Level::HangUp);
        stop.raise(Level::Drain);
        assert_eq!(watch.poll_above(Level::Run, &mut cx), Poll::Ready(Level::HangUp));
        drop(watch);
        assert!(stop.waiters.lock().unwrap().is_empty());
    }
}
