//! Joins loads of the same piece of a map: a request for a piece that is being loaded waits for that load.
//!
//! The first that asks for a piece runs the load in its own task; all others, on any worker, wait for its outcome.
//! When it fails, every waiter gets the error. Requests are never cancelled by dropping, so a load runs to its end.
//! Should its task be dropped all the same, because a worker ends, one of the waiters starts the load again.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use event_listener::Event;
use spile_core::Result;

/// The loads that are under way. There are never more than requests in flight, so a linear search finds one fast.
pub(crate) struct Loads<K, T> {
    running: Mutex<Vec<(K, Arc<Load<T>>)>>,
}

struct Load<T> {
    /// Set when the load has ended; `None` inside when its task was dropped before it had an outcome.
    outcome: OnceLock<Option<Result<T>>>,
    ended: Event,
}

/// The right to run a load. Dropped, it ends the load and wakes the waiters.
struct Runner<'a, K, T> {
    loads: &'a Loads<K, T>,
    load: Arc<Load<T>>,
}

enum Turn<'a, K, T> {
    Run(Runner<'a, K, T>),
    Wait(Arc<Load<T>>),
}

impl<K, T> Default for Loads<K, T> {
    fn default() -> Self {
        Self { running: Mutex::default() }
    }
}

impl<K: Copy + PartialEq, T: Clone> Loads<K, T> {
    /// The outcome of `load`, or of the load of the same `key` that is under way already.
    pub(crate) async fn join(&self, key: K, load: impl Future<Output = Result<T>>) -> Result<T> {
        loop {
            match self.turn(key) {
                Turn::Run(runner) => {
                    let outcome = load.await;
                    let _ = runner.load.outcome.set(Some(duplicate(&outcome)));
                    return outcome;
                }
                Turn::Wait(load) => {
                    if let Some(outcome) = load.wait().await {
                        return outcome;
                    }
                }
            }
        }
    }

    fn turn(&self, key: K) -> Turn<'_, K, T> {
        let mut running = self.lock();
        if let Some((_, load)) = running.iter().find(|(other, _)| *other == key) {
            return Turn::Wait(load.clone());
        }
        let load = Arc::new(Load { outcome: OnceLock::new(), ended: Event::new() });
        running.push((key, load.clone()));
        Turn::Run(Runner { loads: self, load })
    }
}

impl<K, T> Loads<K, T> {
    fn lock(&self) -> MutexGuard<'_, Vec<(K, Arc<Load<T>>)>> {
        self.running.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl<T: Clone> Load<T> {
    /// Waits for the end of the load. `None` when it ended without an outcome.
    async fn wait(&self) -> Option<Result<T>> {
        loop {
            let listener = self.ended.listen();
            // The outcome is read after the listener was made, so that the end cannot be missed.
            if let Some(outcome) = self.outcome.get() {
                return outcome.as_ref().map(duplicate);
            }
            listener.await;
        }
    }
}

impl<K, T> Drop for Runner<'_, K, T> {
    fn drop(&mut self) {
        self.loads.lock().retain(|(_, load)| !Arc::ptr_eq(load, &self.load));
        let _ = self.load.outcome.set(None);
        self.load.ended.notify(usize::MAX);
    }
}

fn duplicate<T: Clone>(outcome: &Result<T>) -> Result<T> {
    match outcome {
        Ok(value) => Ok(value.clone()),
        Err(error) => Err(error.duplicate()),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use spile_core::{Error, ErrorKind};

    use super::*;

    fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    /// Ends when `go` is set; counts its start.
    async fn load(started: &Cell<u32>, go: &Event, fails: bool) -> Result<u32> {
        started.set(started.get() + 1);
        go.listen().await;
        if fails { Err(Error::new(ErrorKind::Io, "the load fails")) } else { Ok(started.get()) }
    }

    #[test]
    fn two_that_want_the_same_share_one_load_and_its_failure() {
        for fails in [false, true] {
            let (loads, started, go) = (Loads::default(), Cell::new(0), Event::new());
            let mut a = pin!(loads.join(7, load(&started, &go, fails)));
            let mut b = pin!(loads.join(7, load(&started, &go, fails)));
            let mut other = pin!(loads.join(8, async { Ok(99) }));
            assert!(poll(a.as_mut()).is_pending() && poll(b.as_mut()).is_pending());
            assert!(matches!(poll(other.as_mut()), Poll::Ready(Ok(99))));
            go.notify(usize::MAX);
            for outcome in [poll(a.as_mut()), poll(b.as_mut())] {
                assert!(matches!((outcome, fails), (Poll::Ready(Ok(1)), false) | (Poll::Ready(Err(_)), true)));
            }
            assert_eq!((started.get(), loads.lock().len()), (1, 0));
        }
    }

    #[test]
    fn a_waiter_takes_over_when_the_first_is_dropped() {
        let (loads, started, go) = (Loads::default(), Cell::new(0), Event::new());
        let mut first = Box::pin(loads.join(7, load(&started, &go, false)));
        let mut waiter = pin!(loads.join(7, load(&started, &go, false)));
        assert!(poll(first.as_mut()).is_pending() && poll(waiter.as_mut()).is_pending());
        drop(first);
        assert!(poll(waiter.as_mut()).is_pending());
        go.notify(usize::MAX);
        assert!(matches!(poll(waiter.as_mut()), Poll::Ready(Ok(2))));
    }
}
