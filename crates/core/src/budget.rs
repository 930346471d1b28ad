//! [`Budget`]: memory that the requests of all disks on one worker may hold together.
//!
//! When it is used up, requests wait in one line, first come, first served. The requests of one disk together may hold at most as
//! much as is left for others. So a disk that hangs, or that waits for trouble to pass, and whose requests keep what they hold,
//! leaves half of the budget to the other disks, and two such disks leave a third. A request that waits for its own disk's share
//! is passed over in the line.
//!
//! A budget belongs to one worker, so nothing here is atomic.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// The memory of one worker.
pub struct Budget {
    /// What there is when nobody holds anything.
    total_bytes: i64,
    /// Below zero when disks that held nothing got their least.
    free_bytes: Cell<i64>,
    line: RefCell<VecDeque<Rc<Ticket>>>,
    shares: RefCell<Vec<Rc<Share>>>,
}

/// What the requests of one disk hold of a budget.
pub struct Share {
    /// The disk's address. No other disk has it as long as the share is in use.
    disk: usize,
    held_bytes: Cell<i64>,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// What it needs, or could use.
    pub bytes: u64,
    /// What it gets in any case, at once, if its disk holds nothing and there is not enough for `bytes`. With 0 it waits.
    pub least_bytes: u64,
}

/// A place in the line.
struct Ticket {
    share: Rc<Share>,
    wanted: Wanted,
    granted_bytes: Cell<Option<u64>>,
    waker: RefCell<Waker>,
}

impl Budget {
    /// A budget of so many bytes.
    pub fn new(bytes: u64) -> Rc<Self> {
        let (total_bytes, free_bytes) = (bytes as i64, Cell::new(bytes as i64));
        Rc::new(Self { total_bytes, free_bytes, line: RefCell::default(), shares: RefCell::default() })
    }

    /// What is left. Less than nothing when many disks have got their least.
    pub fn free_bytes(&self) -> i64 {
        self.free_bytes.get()
    }

    /// The share of the disk at this address. Whoever has it must not outlive the disk.
    pub fn share_of(&self, disk: usize) -> Rc<Share> {
        let mut shares = self.shares.borrow_mut();
        if let Some(known) = shares.iter().find(|share| share.disk == disk) {
            return known.clone();
        }
        // Those that nobody uses are kept until now, so that a request seldom has to make one.
        shares.retain(|share| Rc::strong_count(share) > 1);
        let new = Rc::new(Share { disk, held_bytes: Cell::new(0) });
        shares.push(new.clone());
        new
    }

    /// True when so many bytes more would give the disk more than would be left for others. A disk that holds nothing may take all.
    fn is_too_much(&self, share: &Share, bytes: u64) -> bool {
        let (held_bytes, bytes) = (share.held_bytes.get(), bytes as i64);
        held_bytes > 0 && held_bytes + bytes > self.free_bytes.get() - bytes
    }

    /// How much a request of the disk would get now.
    fn grant(&self, share: &Share, wanted: Wanted) -> Option<u64> {
        let fits = wanted.bytes as i64 <= self.free_bytes.get() && !self.is_too_much(share, wanted.bytes);
        let gets_least = share.held_bytes.get() == 0 && wanted.least_bytes > 0;
        match fits {
            true => Some(wanted.bytes),
            false => gets_least.then_some(wanted.least_bytes.min(wanted.bytes)),
        }
    }

    fn take(&self, share: &Share, bytes: u64) {
        self.free_bytes.set(self.free_bytes.get() - bytes as i64);
        share.held_bytes.set(share.held_bytes.get() + bytes as i64);
    }

    /// Takes memory for a request, if it need not wait. Returns how much that is.
    pub fn try_take(&self, share: &Rc<Share>, wanted: Wanted) -> Option<u64> {
        let bytes = self.grant(share, wanted).filter(|_| !self.has_line_for(share))?;
        self.take(share, bytes);
        Some(bytes)
    }

    /// Gives back what a request held, or a part of it.
    pub fn give_back(&self, share: &Share, bytes: u64) {
        self.free_bytes.set(self.free_bytes.get() + bytes as i64);
        share.held_bytes.set(share.held_bytes.get() - bytes as i64);
        self.serve_line();
    }

    /// Puts a request at the end of the line. If it can be served now, it is.
    pub fn line_up(self: &Rc<Self>, share: &Rc<Share>, wanted: Wanted) -> Turn {
        let (granted_bytes, waker) = (Cell::new(None), RefCell::new(Waker::noop().clone()));
        let ticket = Rc::new(Ticket { share: share.clone(), wanted, granted_bytes, waker });
        self.line.borrow_mut().push_back(ticket.clone());
        self.serve_line();
        Turn { budget: self.clone(), ticket }
    }

    /// Serves the line as far as there is memory.
    fn serve_line(&self) {
        while let Some((ticket, bytes)) = self.next_of_line() {
            self.take(&ticket.share, bytes);
            ticket.granted_bytes.set(Some(bytes));
            ticket.waker.borrow().wake_by_ref();
        }
    }

    /// Takes the next one out of the line, if there is memory for it. The requests of one disk keep their order.
    fn next_of_line(&self) -> Option<(Rc<Ticket>, u64)> {
        let mut line = self.line.borrow_mut();
        let next = (0..line.len()).find(|&at| self.has_turn(&line, at))?;
        let bytes = self.grant(&line[next].share, line[next].wanted)?;
        line.remove(next).map(|ticket| (ticket, bytes))
    }

    /// True when a new request of the disk has to let one of the line go first.
    fn has_line_for(&self, share: &Rc<Share>) -> bool {
        let line = self.line.borrow();
        (0..line.len()).any(|at| Rc::ptr_eq(&line[at].share, share) || self.has_turn(&line, at))
    }

    /// True when the request at this place of the line is the first one of its disk, and not too much for it: it waits only until there is
    /// memory.
    fn has_turn(&self, line: &VecDeque<Rc<Ticket>>, at: usize) -> bool {
        let Ticket { share, wanted, .. } = &*line[at];
        let is_first = || !line.iter().take(at).any(|other| Rc::ptr_eq(&other.share, share));
        !self.is_too_much(share, wanted.bytes) && is_first()
    }
}

impl Share {
    /// What the requests of the disk hold.
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes.get() as u64
    }
}

/// The turn of a request that waits. When it is dropped, the request has left the line and holds nothing, unless it has accepted.
pub struct Turn {
    budget: Rc<Budget>,
    ticket: Rc<Ticket>,
}

impl Turn {
    /// Ready with what the request has got, once it has its turn. It holds that from then on, if it accepts.
    pub fn poll(&self, context: &mut Context<'_>) -> Poll<u64> {
        self.ticket.waker.borrow_mut().clone_from(context.waker());
        self.ticket.granted_bytes.get().map_or(Poll::Pending, Poll::Ready)
    }

    /// Takes what was granted, if anything was. Else the request leaves the line.
    pub fn accept(self) -> Option<u64> {
        self.ticket.granted_bytes.take()
    }

    /// True when the request would have to wait even if no other disk held anything.
    pub fn waits_for_own_disk(&self) -> bool {
        let (before, bytes) = (self.ticket.share.held_bytes.get(), self.ticket.wanted.bytes as i64);
        before > 0 && before + bytes > self.budget.total_bytes - (before + bytes)
    }

    /// True for the first one in line of its disk.
    pub fn is_first_of_disk(&self) -> bool {
        let line = self.budget.line.borrow();
        let first = line.iter().find(|other| Rc::ptr_eq(&other.share, &self.ticket.share));
        first.is_some_and(|first| Rc::ptr_eq(first, &self.ticket))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.budget.line.borrow_mut().retain(|other| !Rc::ptr_eq(other, &self.ticket));
        match self.ticket.granted_bytes.take() {
            Some(bytes) => self.budget.give_back(&self.ticket.share, bytes),
            // The next one may fit where this one did not.
            None => self.budget.serve_line(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(bytes: u64) -> Wanted {
        Wanted { bytes, least_bytes: 0 }
    }

    fn granted(turn: &Turn) -> Option<u64> {
        turn.ticket.granted_bytes.get()
    }

    #[test]
    fn a_disk_whose_requests_wait_leaves_memory_for_others() {
        let budget = Budget::new(12);
        let [paused, other, third] = [1, 2, 3].map(|disk| budget.share_of(disk));
        (0..2).for_each(|_| assert_eq!(budget.try_take(&paused, all(3)), Some(3)));
        assert_eq!(budget.try_take(&paused, all(1)), None, "one disk has more than is left for others");
        let waits = budget.line_up(&paused, all(1));
        assert!(budget.try_take(&other, all(3)).is_some(), "a disk that waits holds up another one");
        let of_third = budget.line_up(&third, all(4));
        assert!(waits.waits_for_own_disk() && !of_third.waits_for_own_disk());
        budget.give_back(&other, 3);
        assert_eq!((granted(&of_third), granted(&waits)), (Some(4), None));
        budget.give_back(&paused, 3);
        assert_eq!(granted(&waits), Some(1));
    }

    #[test]
    fn a_line_is_served_in_its_order() {
        let budget = Budget::new(10);
        let shares = [1, 2, 3, 4, 5].map(|disk| budget.share_of(disk));
        assert!(budget.try_take(&shares[0], all(10)).is_some());
        let turns = [(1, 8), (2, 1), (3, 9)].map(|(disk, bytes)| budget.line_up(&shares[disk], all(bytes)));
        budget.give_back(&shares[0], 5);
        assert_eq!(turns.each_ref().map(granted), [None; 3], "the second one would fit, but waits for its turn");
        assert_eq!(budget.try_take(&shares[4], all(1)), None, "nobody jumps the line");
        budget.give_back(&shares[0], 4);
        assert_eq!(turns.each_ref().map(granted), [Some(8), Some(1), None]);
    }

    #[test]
    fn a_disk_that_holds_nothing_gets_its_least() {
        let budget = Budget::new(16);
        let wanted = Wanted { bytes: 4, least_bytes: 1 };
        let dead: Vec<_> = (1..20).map(|disk| budget.share_of(disk)).collect();
        dead.iter().for_each(|share| while budget.try_take(share, wanted).is_some() {});
        let kept: Vec<_> = dead.iter().map(|share| budget.line_up(share, wanted)).collect();
        let healthy = budget.share_of(20);
        assert_eq!(budget.try_take(&healthy, wanted), Some(1));
        let second = budget.line_up(&healthy, wanted);
        assert_eq!(granted(&second), None);
        budget.give_back(&healthy, 1);
        assert_eq!(granted(&second), Some(1));
        drop((kept, second));
        dead.iter().for_each(|share| budget.give_back(share, share.held_bytes()));
        assert_eq!((budget.free_bytes(), healthy.held_bytes()), (16, 0));
    }

    /// Two requests of a disk that hangs wait: the first one is too much for the disk's share, the second one is not.
    #[test]
    fn a_line_of_a_disk_that_hangs_holds_up_no_other_disk() {
        let budget = Budget::new(64);
        let [dead, healthy] = [1, 2].map(|disk| budget.share_of(disk));
        assert!(budget.try_take(&dead, all(31)).is_some());
        let kept = [8, 1].map(|bytes| budget.line_up(&dead, all(bytes)));
        assert_eq!(budget.try_take(&healthy, all(2)), Some(2));
        assert_eq!(kept.each_ref().map(granted), [None; 2], "the requests of one disk keep their order");
    }

    #[test]
    fn who_lines_up_while_there_is_memory_gets_it_at_once() {
        let budget = Budget::new(64);
        let turn = budget.line_up(&budget.share_of(1), all(2));
        assert_eq!(granted(&turn), Some(2), "nobody gives anything back, so nobody would serve the line");
    }

    #[test]
    fn a_request_waits_for_its_own_disk_only_when_that_disk_holds_too_much_of_all() {
        let budget = Budget::new(64);
        let [hog, healthy] = [1, 2].map(|disk| budget.share_of(disk));
        assert!(budget.try_take(&hog, all(50)).is_some());
        assert!(budget.try_take(&healthy, all(4)).is_some());
        let [of_hog, of_healthy] = [&hog, &healthy].map(|share| budget.line_up(share, all(8)));
        assert_eq!([&of_hog, &of_healthy].map(granted), [None; 2]);
        assert!(of_hog.waits_for_own_disk() && !of_healthy.waits_for_own_disk());
    }

    #[test]
    fn a_turn_that_is_dropped_gives_back_what_it_was_granted() {
        let budget = Budget::new(10);
        let [one, two] = [1, 2].map(|disk| budget.share_of(disk));
        assert!(budget.try_take(&one, all(10)).is_some());
        let [first, second] = [6, 8].map(|bytes| budget.line_up(&two, all(bytes)));
        budget.give_back(&one, 10);
        assert_eq!((granted(&first), granted(&second)), (Some(6), None));
        drop(first);
        assert_eq!(second.accept(), Some(8));
        assert_eq!((budget.free_bytes(), two.held_bytes()), (2, 8));
    }

    #[test]
    fn a_share_is_made_once_for_each_disk_in_use() {
        let budget = Budget::new(10);
        let one = budget.share_of(1);
        (2..100).for_each(|disk| drop(budget.share_of(disk)));
        assert!(Rc::ptr_eq(&one, &budget.share_of(1)) && budget.shares.borrow().len() == 2);
    }
}
