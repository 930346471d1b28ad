//! Which direct transfers of a worker go to the kernel, where there are more than it may have at a time: each store has a share.
//! io_uring and AIO have their shares apart.
//!
//! A store that does not answer keeps its transfers for ever. So the transfers of one file system (or block device) may take at most
//! half of what those of the others leave over, as the jobs of the helper threads do (module `lanes`). The rest waits here, and is
//! in nobody's way. Where the kernel sets no limit of its own, each store may have some transfers in any case, however many stores
//! are dead.

use std::collections::VecDeque;

/// The shares of the stores.
pub(crate) struct Shares {
    /// The most transfers at a time, of which the stores have their shares.
    most: usize,
    /// So many transfers each store may have in any case.
    least: usize,
    /// The transfers that have a place.
    taken: usize,
    /// The transfers that have none.
    waiting: usize,
    /// By the stores' numbers (`Lane::store`).
    stores: Vec<Share>,
}

#[derive(Default)]
struct Share {
    taken: usize,
    waiting: VecDeque<u64>,
}

impl Shares {
    /// Shares of `most` places. Each store may have `least` transfers in any case, also when there are more than `most` then.
    pub(crate) fn new(most: usize, least: usize) -> Self {
        Self { most, least, taken: 0, waiting: 0, stores: Vec::new() }
    }

    /// Gives a place to the transfer of this key, or has it wait: false. No other store has this number until the last of its
    /// transfers has left.
    pub(crate) fn enter(&mut self, store: usize, key: u64) -> bool {
        if store >= self.stores.len() {
            self.stores.resize_with(store + 1, Share::default);
        }
        let goes = self.stores[store].waiting.is_empty() && self.has_place(&self.stores[store]);
        if goes {
            self.take(store);
        } else {
            self.stores[store].waiting.push_back(key);
            self.waiting += 1;
        }
        goes
    }

    /// A transfer gives its place back.
    pub(crate) fn leave(&mut self, store: usize) {
        self.taken -= 1;
        self.stores[store].taken -= 1;
    }

    /// Gives a place to a transfer that waits, if there is one. Returns its key.
    pub(crate) fn next(&mut self) -> Option<u64> {
        if self.waiting == 0 {
            return None;
        }
        let store = self.stores.iter().position(|share| !share.waiting.is_empty() && self.has_place(share))?;
        self.take(store);
        self.waiting -= 1;
        self.stores[store].waiting.pop_front()
    }

    /// How many transfers have a place, and how many wait for one.
    #[cfg(test)]
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.taken, self.waiting)
    }

    fn has_place(&self, share: &Share) -> bool {
        let left = self.most.saturating_sub(self.taken - share.taken);
        share.taken < (left / 2).max(self.least)
    }

    fn take(&mut self, store: usize) {
        self.taken += 1;
        self.stores[store].taken += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_many_dead_stores_leaves_places_for_the_next() {
        let mut shares = Shares::new(64, 2);
        let mut entered = |store| (0..1000).filter(|key| shares.enter(store, *key)).count();
        assert_eq!([0, 1, 2, 3, 4, 5, 6].map(&mut entered), [32, 16, 8, 4, 2, 2, 2]);
    }

    #[test]
    fn what_waits_goes_in_order_when_there_is_a_place() {
        let (mut shares, [slow, other]) = (Shares::new(4, 1), [1, 0]);
        let entered = (0..5).map(|key| shares.enter(slow, key));
        assert!(entered.eq([true, true, false, false, false]));
        assert!(shares.enter(other, 9) && shares.next().is_none());
        // The other store has one place, so a half of what it leaves is one.
        shares.leave(slow);
        assert_eq!(shares.next(), None);
        shares.leave(slow);
        assert_eq!((shares.next(), shares.next()), (Some(2), None));
        shares.leave(other);
        assert_eq!((shares.next(), shares.next()), (Some(3), None));
        (0..2).for_each(|_| shares.leave(slow));
        assert_eq!((shares.next(), shares.counts()), (Some(4), (1, 0)));
        shares.leave(slow);
        assert_eq!(shares.counts(), (0, 0));
    }
}
