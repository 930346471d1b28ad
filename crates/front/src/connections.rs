//! [`Connections`]: how many a server has, where they are, and whether there is room for one more.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Counts the open connections of a server by worker, and limits them.
pub struct Connections {
    front: &'static str,
    max: usize,
    /// By worker.
    open: Mutex<Vec<usize>>,
    one_is_over: Condvar,
}

/// One open connection. It counts for as long as this lives.
pub struct Place {
    connections: Arc<Connections>,
    worker: usize,
}

impl Connections {
    /// At most `max` connections at a time, spread over so many workers. `front` is the server's name in the log.
    pub fn new(front: &'static str, max: usize, workers: usize) -> Arc<Self> {
        Arc::new(Self { front, max, open: Mutex::new(vec![0; workers]), one_is_over: Condvar::new() })
    }

    fn open(&self) -> MutexGuard<'_, Vec<usize>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for one more connection, on the worker that has the fewest; `None` when there are too many.
    pub fn enter(self: &Arc<Self>) -> Option<Place> {
        let mut open = self.open();
        if open.iter().sum::<usize>() >= self.max {
            tracing::debug!("{}: there are too many connections, one was turned away", self.front);
            return None;
        }
        Some(self.enter_locked(&mut open))
    }

    /// A place for one more connection even when there are too many: one that another process has handed over.
    pub fn enter_anyway(self: &Arc<Self>) -> Place {
        self.enter_locked(&mut self.open())
    }

    fn enter_locked(self: &Arc<Self>, open: &mut [usize]) -> Place {
        let worker = (0..open.len()).min_by_key(|worker| open[*worker]).unwrap_or(0);
        open[worker] += 1;
        Place { connections: self.clone(), worker }
    }

    /// How many connections are open.
    pub fn count(&self) -> usize {
        self.open().iter().sum()
    }

    /// Waits until no connection is open, at most for `patience`. True when none is.
    pub fn wait_for_none(&self, patience: Duration) -> bool {
        let busy = |open: &mut Vec<usize>| open.iter().sum::<usize>() > 0;
        let waited = self.one_is_over.wait_timeout_while(self.open(), patience, busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

impl Place {
    /// The worker that is to serve the connection.
    pub fn worker(&self) -> usize {
        self.worker
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.open()[self.worker] -= 1;
        self.connections.one_is_over.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_spread_and_limited() {
        let connections = Connections::new("test", 3, 2);
        let places: Vec<_> = (0..3).map(|_| connections.enter().unwrap()).collect();
        assert_eq!(places.iter().map(Place::worker).collect::<Vec<_>>(), [0, 1, 0]);
        assert!(connections.enter().is_none());
        let one_more = connections.enter_anyway();
        assert_eq!((one_more.worker(), connections.count()), (1, 4));
        drop(places);
        assert_eq!(connections.enter().unwrap().worker(), 0);
    }

    #[test]
    fn the_end_of_the_last_connection_is_noticed() {
        let connections = Connections::new("test", 3, 1);
        let place = connections.enter().unwrap();
        assert!(!connections.wait_for_none(Duration::from_millis(1)));
        let waiter = connections.clone();
        let thread = std::thread::spawn(move || waiter.wait_for_none(Duration::from_secs(60)));
        drop(place);
        assert!(thread.join().unwrap());
    }
}
