//! Which of a worker's transfers by AIO go to the kernel, where there are more than it takes: each store has a share.
//!
//! A store that does not answer keeps its transfers for ever. So the transfers of one file system (or block device) may take at most
//! half of what those of the others leave over, as the jobs of the helper threads do (module `lanes`). The rest waits here, and is
//! in nobody's way.

use std::collections::VecDeque;

use crate::lanes::Owner;

/// The shares of the stores with transfers.
pub(crate) struct Shares {
    /// The most transfers at a time.
    most: usize,
    /// The transfers that have a place.
    taken: usize,
    /// The transfers that have none.
    waiting: usize,
    stores: Vec<Share>,
}

struct Share {
    owner: Owner,
    taken: usize,
    waiting: VecDeque<u64>,
}

impl Shares {
    pub(crate) fn new(most: usize) -> Self {
        Self { most, taken: 0, waiting: 0, stores: Vec::new() }
    }

    /// Gives a place to the transfer of this key, or has it wait: false.
    pub(crate) fn enter(&mut self, owner: &Owner, key: u64) -> bool {
        let known = self.stores.iter().position(|share| share.owner == *owner);
        let index = known.unwrap_or_else(|| {
            self.stores.push(Share { owner: owner.clone(), taken: 0, waiting: VecDeque::new() });
            self.stores.len() - 1
        });
        let goes = self.stores[index].waiting.is_empty() && self.has_place(&self.stores[index]);
        if goes {
            self.take(index);
        } else {
            self.stores[index].waiting.push_back(key);
            self.waiting += 1;
        }
        goes
    }

    /// A transfer gives its place back.
    pub(crate) fn leave(&mut self, owner: &Owner) {
        let index = self.stores.iter().position(|share| share.owner == *owner).expect("it has a place");
        self.taken -= 1;
        let share = &mut self.stores[index];
        share.taken -= 1;
        if share.taken == 0 && share.waiting.is_empty() {
            self.stores.swap_remove(index);
        }
    }

    /// Gives a place to a transfer that waits, if there is one. Returns its key.
    pub(crate) fn next(&mut self) -> Option<u64> {
        if self.waiting == 0 {
            return None;
        }
        let index = self.stores.iter().position(|share| !share.waiting.is_empty() && self.has_place(share))?;
        self.take(index);
        self.waiting -= 1;
        self.stores[index].waiting.pop_front()
    }

    /// How many transfers wait.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    fn has_place(&self, share: &Share) -> bool {
        let left = self.most.saturating_sub(self.taken - share.taken);
        share.taken < (left / 2).max(1)
    }

    fn take(&mut self, index: usize) {
        self.taken += 1;
        self.stores[index].taken += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_many_dead_stores_leaves_places_for_the_next() {
        let mut shares = Shares::new(64);
        let mut entered = |device| (0..1000).filter(|key| shares.enter(&Owner::Device(device), *key)).count();
        assert_eq!([1, 2, 3, 4].map(&mut entered), [32, 16, 8, 4]);
    }

    #[test]
    fn what_waits_goes_in_order_when_there_is_a_place() {
        let (mut shares, [slow, other]) = (Shares::new(4), [1, 2].map(Owner::Device));
        let entered = (0..5).map(|key| shares.enter(&slow, key));
        assert!(entered.eq([true, true, false, false, false]));
        assert!(shares.enter(&other, 9) && shares.next().is_none());
        // The other store has one place, so a half of what it leaves is one.
        shares.leave(&slow);
        assert_eq!(shares.next(), None);
        shares.leave(&slow);
        assert_eq!((shares.next(), shares.next()), (Some(2), None));
        shares.leave(&other);
        assert_eq!((shares.next(), shares.next()), (Some(3), None));
        (0..2).for_each(|_| shares.leave(&slow));
        assert_eq!((shares.next(), shares.waiting()), (Some(4), 0));
        shares.leave(&slow);
        assert!(shares.stores.is_empty() && shares.taken == 0);
    }
}
