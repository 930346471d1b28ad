//! Locks on ranges of a disk or on its blocks: shared holders may overlap each other, an exclusive one nothing.
//!
//! Writers hold their range shared: two guests' writes to the same sectors may land in either order, as on a real
//! disk. Read-modify-write and the release of a block hold theirs exclusively.
//!
//! While nobody wants a range exclusively, a shared holder is noted in its thread's own shard, and no two threads touch
//! the same memory. While somebody holds a range exclusively or waits for one, all who come stand in one line. Each waits
//! for those that stand before it and conflict with it, and for nobody behind it. So no stream of shared holders can keep
//! an exclusive one waiting, nor the other way round.
//!
//! Whoever waits may hold other ranges only if it takes them in ascending order, or does not wait for the one to give back
//! the other: else two could wait for each other.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use slab::Slab;
use spile_core::{SHARDS, shard_number};

/// A set of locked ranges. There are never more holders than requests in flight, so a linear search is fast.
pub struct RangeLock {
    shards: Box<[Shard]>,
    /// How many stand in the line for an exclusive hold. It changes before a shard is searched for conflicts, so whoever
    /// locks that shard later sees it: relaxed loads under a shard's lock are enough.
    exclusives: AtomicUsize,
    line: Mutex<Line>,
}

/// The shared holders of some threads, on a cache line of their own.
#[derive(Default)]
#[repr(align(128))]
struct Shard(Mutex<Slab<Range<u64>>>);

/// Those who hold or wait, in the order in which they came.
#[derive(Default)]
struct Line {
    places: VecDeque<Place>,
    next_id: u64,
}

struct Place {
    id: u64,
    range: Range<u64>,
    is_exclusive: bool,
    /// False while it waits.
    holds: bool,
    waker: Option<Waker>,
}

/// Releases its range when dropped.
pub struct RangeGuard<'a> {
    lock: &'a RangeLock,
    at: At,
}

/// Where a holder is noted.
#[derive(Clone, Copy)]
enum At {
    Shard { shard: usize, key: usize },
    Line { id: u64 },
}

impl Default for RangeLock {
    fn default() -> Self {
        let shards = (0..SHARDS).map(|_| Shard::default()).collect();
        Self { shards, exclusives: AtomicUsize::new(0), line: Mutex::default() }
    }
}

impl RangeLock {
    /// Holds `range` shared, once all who came before and want some of it exclusively are gone.
    pub async fn shared(&self, range: Range<u64>) -> RangeGuard<'_> {
        match self.enter_shard(&range) {
            Some(guard) => guard,
            None => self.stand_in_line(range, false).wait().await,
        }
    }

    /// Holds `range` exclusively, once all who came before and want some of it are gone.
    pub async fn exclusive(&self, range: Range<u64>) -> RangeGuard<'_> {
        self.stand_in_line(range, true).wait().await
    }

    /// Holds `range` shared, if nobody holds any of it exclusively or waits for that.
    #[inline]
    pub fn try_shared(&self, range: Range<u64>) -> Option<RangeGuard<'_>> {
        self.enter_shard(&range).or_else(|| self.stand_in_line(range, false).if_it_holds())
    }

    /// Holds `range` exclusively, if nobody holds any of it or waits for it.
    pub(crate) fn try_exclusive(&self, range: Range<u64>) -> Option<RangeGuard<'_>> {
        self.stand_in_line(range, true).if_it_holds()
    }

    /// Notes a shared holder in this thread's shard; `None` when the line is in use.
    #[inline]
    fn enter_shard(&self, range: &Range<u64>) -> Option<RangeGuard<'_>> {
        let shard = shard_number();
        let mut held = self.shards[shard].lock();
        if self.exclusives.load(Ordering::Relaxed) != 0 {
            return None;
        }
        let key = held.insert(range.clone());
        Some(RangeGuard { lock: self, at: At::Shard { shard, key } })
    }

    #[cold]
    fn stand_in_line(&self, range: Range<u64>, is_exclusive: bool) -> RangeGuard<'_> {
        let mut line = self.line();
        if is_exclusive {
            self.exclusives.fetch_add(1, Ordering::Relaxed);
        }
        let id = line.next_id;
        line.next_id += 1;
        let waits = line.conflicts(line.places.len(), &range, is_exclusive) || (is_exclusive && self.is_held(&range));
        line.places.push_back(Place { id, range, is_exclusive, holds: !waits, waker: None });
        RangeGuard { lock: self, at: At::Line { id } }
    }

    /// True when somebody noted in a shard holds any of `range`.
    fn is_held(&self, range: &Range<u64>) -> bool {
        self.shards.iter().any(|shard| shard.lock().iter().any(|(_, held)| overlap(held, range)))
    }

    /// Lets everybody hold who need not wait any more, now that `freed` is.
    #[cold]
    fn let_in(&self, mut line: MutexGuard<'_, Line>, freed: &Range<u64>) {
        let mut woken = Vec::new();
        for at in 0..line.places.len() {
            let place = &line.places[at];
            let stays = place.holds
                || !overlap(&place.range, freed)
                || line.conflicts(at, &place.range, place.is_exclusive)
                || (place.is_exclusive && self.is_held(&place.range));
            if !stays {
                line.places[at].holds = true;
                woken.extend(line.places[at].waker.take());
            }
        }
        drop(line);
        woken.into_iter().for_each(Waker::wake);
    }

    fn leave_line(&self, id: u64) {
        let mut line = self.line();
        let at = line.find(id);
        let Some(left) = line.places.remove(at) else { return };
        if left.is_exclusive {
            self.exclusives.fetch_sub(1, Ordering::Relaxed);
        }
        self.let_in(line, &left.range);
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shard {
    #[inline]
    fn lock(&self) -> MutexGuard<'_, Slab<Range<u64>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    /// True when one of the first `count` places conflicts with such a hold.
    fn conflicts(&self, count: usize, range: &Range<u64>, is_exclusive: bool) -> bool {
        let mut before = self.places.iter().take(count);
        before.any(|place| (is_exclusive || place.is_exclusive) && overlap(&place.range, range))
    }

    fn find(&self, id: u64) -> usize {
        self.places.binary_search_by_key(&id, |place| place.id).expect("who has a guard stands in the line")
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl RangeGuard<'_> {
    /// Waits until it holds its range.
    async fn wait(self) -> Self {
        poll_fn(|context| {
            let At::Line { id } = self.at else { return Poll::Ready(()) };
            let mut line = self.lock.line();
            let at = line.find(id);
            let place = &mut line.places[at];
            if place.holds {
                return Poll::Ready(());
            }
            place.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
        self
    }

    /// Gives up its place unless it holds its range already.
    fn if_it_holds(self) -> Option<Self> {
        let At::Line { id } = self.at else { return Some(self) };
        let line = self.lock.line();
        let holds = line.places[line.find(id)].holds;
        drop(line);
        holds.then_some(self)
    }
}

impl Drop for RangeGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        match self.at {
            At::Line { id } => self.lock.leave_line(id),
            At::Shard { shard, key } => {
                let mut held = self.lock.shards[shard].lock();
                let freed = held.remove(key);
                // Seen under the shard's lock: whoever has found this range there has announced itself before.
                let is_wanted = self.lock.exclusives.load(Ordering::Relaxed) != 0;
                drop(held);
                if is_wanted {
                    self.lock.let_in(self.lock.line(), &freed);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64};
    use std::task::{Context, Wake};
    use std::thread::Thread;

    use super::*;

    #[test]
    fn shared_holders_overlap_and_exclusive_ones_do_not() {
        let lock = RangeLock::default();
        let a = lock.try_shared(0..10).unwrap();
        let b = lock.try_shared(5..15).unwrap();
        assert!(lock.try_exclusive(9..20).is_none());
        assert!(lock.try_exclusive(15..20).is_some());
        drop((a, b));
        let _c = lock.try_exclusive(9..20).unwrap();
        assert!(lock.try_shared(0..10).is_none());
        assert!(lock.try_shared(0..9).is_some());
        assert!(lock.try_exclusive(19..30).is_none());
        assert!(lock.try_exclusive(20..30).is_some());
    }

    fn poll<F: Future>(future: Pin<&mut F>) -> Option<F::Output> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }

    #[test]
    fn who_comes_later_waits_behind_an_exclusive_that_waits() {
        let lock = RangeLock::default();
        let first = lock.try_shared(0..10).unwrap();
        let mut exclusive = pin!(lock.exclusive(5..6));
        assert!(poll(exclusive.as_mut()).is_none());
        // A stream of shared holders would have got in here for ever.
        let mut later = pin!(lock.shared(0..10));
        assert!(poll(later.as_mut()).is_none() && lock.try_shared(5..6).is_none());
        // Elsewhere, nobody waits.
        assert!(lock.try_shared(6..10).is_some() && lock.try_exclusive(10..20).is_some());
        drop(first);
        let held = poll(exclusive.as_mut()).expect("the first one is gone");
        assert!(poll(later.as_mut()).is_none());
        drop(held);
        assert!(poll(later.as_mut()).is_some());
    }

    #[test]
    fn who_gives_up_waiting_is_in_nobodys_way() {
        let lock = RangeLock::default();
        let first = lock.try_shared(0..10).unwrap();
        {
            let mut exclusive = pin!(lock.exclusive(0..10));
            assert!(poll(exclusive.as_mut()).is_none());
            assert!(lock.try_shared(0..10).is_none());
        }
        assert!(lock.try_shared(0..10).is_some());
        drop(first);
        assert!(lock.line().places.is_empty() && lock.exclusives.load(Ordering::Relaxed) == 0);
        assert!(lock.shards.iter().all(|shard| shard.lock().is_empty()));
    }

    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    fn block_on<F: Future>(future: F) -> F::Output {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut future = pin!(future);
        loop {
            match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(output) => return output,
                Poll::Pending => std::thread::park(),
            }
        }
    }

    /// Threads hold ranges of a few numbers, most of them shared. Each exclusive holder of a number must be alone with
    /// it, and all must come to their end: a lost wake-up would hang the test.
    #[test]
    fn threads_never_meet_an_exclusive_holder() {
        const NUMBERS: usize = 8;
        const ROUNDS: u64 = 20_000;
        let lock = RangeLock::default();
        let (holders, is_exclusive) = <([AtomicU64; NUMBERS], [AtomicBool; NUMBERS])>::default();
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (lock, holders, is_exclusive) = (&lock, &holders, &is_exclusive);
                scope.spawn(move || {
                    let mut random = thread + 1;
                    for _ in 0..ROUNDS {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        let start = (random >> 33) as usize % NUMBERS;
                        let end = (start + 1 + (random >> 40) as usize % 2).min(NUMBERS);
                        let (range, alone) = (start as u64..end as u64, (random >> 50).is_multiple_of(8));
                        let guard = match alone {
                            true => block_on(lock.exclusive(range)),
                            false => block_on(lock.shared(range)),
                        };
                        for number in start..end {
                            let others = holders[number].fetch_add(1, Ordering::SeqCst);
                            let met = is_exclusive[number].swap(alone, Ordering::SeqCst);
                            assert!(!met && (!alone || others == 0), "{number} is held exclusively, and not alone");
                        }
                        for number in start..end {
                            is_exclusive[number].store(false, Ordering::SeqCst);
                            holders[number].fetch_sub(1, Ordering::SeqCst);
                        }
                        drop(guard);
                    }
                });
            }
        });
        assert!(lock.line().places.is_empty() && lock.exclusives.load(Ordering::Relaxed) == 0);
    }
}
