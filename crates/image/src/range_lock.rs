//! Locks on ranges of a disk or on its blocks: shared holders may overlap each other, an exclusive one nothing.
//!
//! Writers hold their range shared: two guests' writes to the same sectors may land in either order, as on a real
//! disk. Read-modify-write and the release of a block hold theirs exclusively.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use event_listener::Event;

/// A set of locked ranges. There are never more holders than requests in flight, so a linear search is fast.
#[derive(Default)]
pub struct RangeLock {
    held: Mutex<Vec<Held>>,
    released: Event,
}

struct Held {
    range: Range<u64>,
    exclusive: bool,
    id: u64,
}

/// Releases its range when dropped.
pub struct RangeGuard<'a> {
    lock: &'a RangeLock,
    id: u64,
}

impl RangeLock {
    /// Waits until no exclusive holder overlaps `range`, then holds it shared.
    pub async fn shared(&self, range: Range<u64>) -> RangeGuard<'_> {
        self.acquire(range, false).await
    }

    /// Waits until no holder overlaps `range`, then holds it exclusively.
    pub async fn exclusive(&self, range: Range<u64>) -> RangeGuard<'_> {
        self.acquire(range, true).await
    }

    /// Holds `range` shared, if nobody holds any of it exclusively now.
    pub fn try_shared(&self, range: Range<u64>) -> Option<RangeGuard<'_>> {
        self.try_acquire(&range, false)
    }

    /// Holds `range` exclusively, if nobody holds any of it now.
    pub(crate) fn try_exclusive(&self, range: Range<u64>) -> Option<RangeGuard<'_>> {
        self.try_acquire(&range, true)
    }

    async fn acquire(&self, range: Range<u64>, exclusive: bool) -> RangeGuard<'_> {
        loop {
            if let Some(guard) = self.try_acquire(&range, exclusive) {
                return guard;
            }
            let listener = self.released.listen();
            // The listener is there now, so a release cannot be missed: try once more.
            if let Some(guard) = self.try_acquire(&range, exclusive) {
                return guard;
            }
            listener.await;
        }
    }

    fn try_acquire(&self, range: &Range<u64>, exclusive: bool) -> Option<RangeGuard<'_>> {
        let mut held = self.lock();
        let conflict = |h: &Held| (exclusive || h.exclusive) && h.range.start < range.end && range.start < h.range.end;
        if held.iter().any(conflict) {
            return None;
        }
        let id = held.iter().map(|h| h.id + 1).max().unwrap_or(0);
        held.push(Held { range: range.clone(), exclusive, id });
        Some(RangeGuard { lock: self, id })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Held>> {
        self.held.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut held = self.lock.lock();
        if let Some(at) = held.iter().position(|h| h.id == self.id) {
            held.swap_remove(at);
        }
        drop(held);
        self.lock.released.notify(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_holders_overlap_and_exclusive_ones_do_not() {
        let lock = RangeLock::default();
        let a = lock.try_acquire(&(0..10), false).unwrap();
        let b = lock.try_acquire(&(5..15), false).unwrap();
        assert!(lock.try_exclusive(9..20).is_none());
        assert!(lock.try_exclusive(15..20).is_some());
        drop((a, b));
        let _c = lock.try_exclusive(9..20).unwrap();
        assert!(lock.try_acquire(&(0..10), false).is_none());
        assert!(lock.try_acquire(&(0..9), false).is_some());
    }
}
