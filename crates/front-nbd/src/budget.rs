//! [`Budget`]: the memory that the requests of all NBD connections of one worker may hold together.
//!
//! Each connection may always hold [`ALLOWANCE_BYTES`], so that small requests never wait for others and cost nothing here. What it holds
//! beyond that is taken from the budget of its worker. When that is used up, requests wait in one line, first come, first served; a
//! connection waits with one request at a time, so each gets its turn. A worker's connections share no memory with other threads, so
//! nothing here is atomic.
//!
//! The connections of one disk together may hold at most as much as is left for others. So a disk that waits for trouble to pass, and whose
//! requests keep what they hold, leaves half of the budget to the other disks, and two such disks leave a third. A request that waits for
//! its own disk's share is passed over in the line.
//!
//! A client that takes none of its replies keeps what it holds. While others wait in line, one that has taken nothing for two
//! looks, [`LOOK`] apart, is hung up on: the one that holds most.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use spile_core::metrics::now_ns;
use spile_front::Presence;

/// What each connection may hold in any case, in bytes.
pub(crate) const ALLOWANCE_BYTES: u64 = 1 << 20;
/// What all connections of a worker may hold together beyond that, in bytes.
pub(crate) const BUDGET_BYTES: u64 = 128 << 20;
/// The time between two looks at those that hold memory, while somebody waits for some.
const LOOK: Duration = Duration::from_secs(5);

thread_local! {
    static OF_WORKER: Rc<Budget> = Rc::new(Budget::new(BUDGET_BYTES));
}

/// The memory of one worker.
pub(crate) struct Budget {
    free_bytes: Cell<u64>,
    line: RefCell<VecDeque<Rc<Ticket>>>,
    holders: RefCell<Vec<Weak<Holder>>>,
}

/// What all connections of one disk hold of a worker's budget.
struct Share {
    /// The disk's address. No other disk has it as long as a connection keeps the disk.
    disk: usize,
    held_bytes: Cell<u64>,
}

/// A place in the line.
struct Ticket {
    share: Rc<Share>,
    wanted_bytes: u64,
    is_granted: Cell<bool>,
    waker: RefCell<Waker>,
}

/// What one connection holds.
pub(crate) struct Holder {
    budget: Rc<Budget>,
    share: Rc<Share>,
    held_bytes: Cell<u64>,
    /// True while replies are being sent, and how many sends there were.
    is_sending: Cell<bool>,
    sends: Cell<u64>,
    /// The number of sends at a look, and when that was.
    seen: Cell<(u64, u64)>,
    presence: Arc<Presence>,
    /// The place in the line of a request that waits.
    waits: RefCell<Option<Rc<Ticket>>>,
}

impl Budget {
    fn new(bytes: u64) -> Self {
        Self { free_bytes: Cell::new(bytes), line: RefCell::default(), holders: RefCell::default() }
    }

    /// A connection of the disk at this address that holds nothing yet.
    fn join(self: &Rc<Self>, presence: Arc<Presence>, disk: usize) -> Rc<Holder> {
        let holder = Rc::new(Holder {
            budget: self.clone(),
            share: self.share_of(disk),
            held_bytes: Cell::new(0),
            is_sending: Cell::new(false),
            sends: Cell::new(0),
            seen: Cell::new((0, 0)),
            presence,
            waits: RefCell::default(),
        });
        let mut holders = self.holders.borrow_mut();
        holders.retain(|other| other.strong_count() > 0);
        holders.push(Rc::downgrade(&holder));
        holder
    }

    fn share_of(&self, disk: usize) -> Rc<Share> {
        let holders = self.holders.borrow();
        let share = holders.iter().filter_map(Weak::upgrade).map(|holder| holder.share.clone());
        let known = share.into_iter().find(|share| share.disk == disk);
        known.unwrap_or_else(|| Rc::new(Share { disk, held_bytes: Cell::new(0) }))
    }

    /// True when so many bytes more would give the disk more than would be left for others. A disk that holds nothing may take all.
    fn is_too_much(&self, share: &Share, bytes: u64) -> bool {
        let held_bytes = share.held_bytes.get();
        held_bytes > 0 && held_bytes + bytes > self.free_bytes.get().saturating_sub(bytes)
    }

    fn take(&self, share: &Share, bytes: u64) {
        self.free_bytes.set(self.free_bytes.get() - bytes);
        share.held_bytes.set(share.held_bytes.get() + bytes);
    }

    fn give_back(&self, share: &Share, bytes: u64) {
        self.free_bytes.set(self.free_bytes.get() + bytes);
        share.held_bytes.set(share.held_bytes.get() - bytes);
        self.serve_line();
    }

    /// Serves the line as far as there is memory.
    fn serve_line(&self) {
        while let Some(ticket) = self.next_of_line() {
            self.take(&ticket.share, ticket.wanted_bytes);
            ticket.is_granted.set(true);
            ticket.waker.borrow().wake_by_ref();
        }
    }

    /// Takes the next one out of the line, if there is memory for it. The requests of one disk keep their order.
    fn next_of_line(&self) -> Option<Rc<Ticket>> {
        let mut line = self.line.borrow_mut();
        let is_first = |at: usize| !line.iter().take(at).any(|other| Rc::ptr_eq(&other.share, &line[at].share));
        let has_turn = |at: usize| !self.is_too_much(&line[at].share, line[at].wanted_bytes) && is_first(at);
        let next = (0..line.len()).find(|&at| has_turn(at))?;
        if line[next].wanted_bytes > self.free_bytes.get() { None } else { line.remove(next) }
    }

    /// True when a new request of the disk has to let one of the line go first.
    fn has_line_for(&self, share: &Rc<Share>) -> bool {
        let goes_first = |ticket: &Rc<Ticket>| {
            Rc::ptr_eq(&ticket.share, share) || !self.is_too_much(&ticket.share, ticket.wanted_bytes)
        };
        self.line.borrow().iter().any(goes_first)
    }

    /// True for the first one of its disk.
    fn is_first(&self, ticket: &Rc<Ticket>) -> bool {
        let line = self.line.borrow();
        let first = line.iter().find(|other| Rc::ptr_eq(&other.share, &ticket.share));
        first.is_some_and(|first| Rc::ptr_eq(first, ticket))
    }

    /// Has the connection hung up on that holds most of those whose clients have taken nothing since the look before. While a
    /// request waits for the share of its own disk, that is a connection of this disk.
    fn look(&self, ticket: &Ticket, now_ns: u64) {
        let waits_for_own = self.is_too_much(&ticket.share, ticket.wanted_bytes);
        let holders = self.holders.borrow();
        let holders = holders.iter().filter_map(Weak::upgrade);
        let holders = holders.filter(|holder| !waits_for_own || Rc::ptr_eq(&holder.share, &ticket.share));
        let stuck = holders.filter(|holder| holder.is_stuck(now_ns)).max_by_key(|holder| holder.held_bytes.get());
        if let Some(holder) = stuck.filter(|holder| holder.held_bytes.get() > ALLOWANCE_BYTES) {
            tracing::warn!(
                held_bytes = holder.held_bytes.get(),
                "NBD: a client takes no replies while others wait for the memory that these hold: it is hung up on"
            );
            holder.presence.cut();
        }
    }
}

impl Holder {
    /// A connection of this worker to `disk` that holds nothing yet.
    pub(crate) fn new<D>(presence: Arc<Presence>, disk: &Arc<D>) -> Rc<Self> {
        OF_WORKER.with(|budget| budget.join(presence, Arc::as_ptr(disk).addr()))
    }

    /// What the connection holds, in bytes.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held_bytes.get()
    }

    /// Takes memory for a request, if nobody has to wait for it.
    pub(crate) fn try_take(&self, bytes: u64) -> bool {
        let beyond = self.beyond_allowance(bytes);
        let budget = &*self.budget;
        if beyond > 0 {
            let is_there = beyond <= budget.free_bytes.get() && !budget.is_too_much(&self.share, beyond);
            if !is_there || budget.has_line_for(&self.share) {
                return false;
            }
            budget.take(&self.share, beyond);
        }
        self.held_bytes.set(self.held_bytes.get() + bytes);
        true
    }

    /// Takes memory for a request as soon as its turn comes, or as soon as the connection's own allowance has room.
    pub(crate) async fn take(&self, bytes: u64) {
        if self.try_take(bytes) {
            return;
        }
        let granted_bytes = self.wait_in_line(bytes).await;
        let needed = self.beyond_allowance(bytes);
        self.held_bytes.set(self.held_bytes.get() + bytes);
        // Requests of this connection may have ended meanwhile.
        self.budget.give_back(&self.share, granted_bytes - needed);
    }

    /// Waits in the line. Returns what was taken from the budget. The look at those that hold memory is the task of the first one.
    async fn wait_in_line(&self, bytes: u64) -> u64 {
        let (wanted_bytes, waker) = (self.beyond_allowance(bytes), RefCell::new(Waker::noop().clone()));
        let share = self.share.clone();
        let ticket = Rc::new(Ticket { share, wanted_bytes, is_granted: Cell::new(false), waker });
        self.budget.line.borrow_mut().push_back(ticket.clone());
        *self.waits.borrow_mut() = Some(ticket.clone());
        loop {
            let mut look = std::pin::pin!(spile_engine::sleep(LOOK));
            let is_over = poll_fn(|cx| {
                ticket.waker.borrow_mut().clone_from(cx.waker());
                if ticket.is_granted.get() || self.beyond_allowance(bytes) == 0 {
                    return Poll::Ready(true);
                }
                look.as_mut().poll(cx).map(|()| false)
            });
            if is_over.await {
                break;
            }
            if self.budget.is_first(&ticket) {
                self.budget.look(&ticket, now_ns());
            }
        }
        *self.waits.borrow_mut() = None;
        if ticket.is_granted.get() {
            return wanted_bytes;
        }
        self.budget.line.borrow_mut().retain(|other| !Rc::ptr_eq(other, &ticket));
        // The next one may fit where this one did not.
        self.budget.serve_line();
        0
    }

    /// Gives back what a request held.
    pub(crate) fn give_back(&self, bytes: u64) {
        let before = self.held_bytes.get();
        self.held_bytes.set(before - bytes);
        if before > ALLOWANCE_BYTES {
            self.budget.give_back(&self.share, before - (before - bytes).max(ALLOWANCE_BYTES));
        }
        if let Some(ticket) = &*self.waits.borrow() {
            ticket.waker.borrow().wake_by_ref();
        }
    }

    /// How much of `bytes` more is beyond the allowance.
    fn beyond_allowance(&self, bytes: u64) -> u64 {
        let beyond = |held: u64| held.saturating_sub(ALLOWANCE_BYTES);
        beyond(self.held_bytes.get() + bytes) - beyond(self.held_bytes.get())
    }

    /// Notes that replies are being sent, or were sent.
    pub(crate) fn sends(&self, is_sending: bool) {
        self.is_sending.set(is_sending);
        self.sends.set(self.sends.get() + 1);
    }

    /// True when the client has taken nothing since a look that was [`LOOK`] ago.
    fn is_stuck(&self, now_ns: u64) -> bool {
        let (sends, since_ns) = self.seen.get();
        if !self.is_sending.get() || sends != self.sends.get() {
            self.seen.set((self.sends.get(), now_ns));
            return false;
        }
        now_ns.saturating_sub(since_ns) >= LOOK.as_nanos() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection to a disk of its own.
    fn holder(budget: &Rc<Budget>) -> Rc<Holder> {
        let disk = budget.holders.borrow().len();
        holder_of(budget, disk)
    }

    fn holder_of(budget: &Rc<Budget>, disk: usize) -> Rc<Holder> {
        budget.join(Arc::new(Presence::default()), disk)
    }

    fn ticket(share: &Rc<Share>, wanted_bytes: u64) -> Rc<Ticket> {
        let waker = RefCell::new(Waker::noop().clone());
        Rc::new(Ticket { share: share.clone(), wanted_bytes, is_granted: Cell::new(false), waker })
    }

    #[test]
    fn a_disk_whose_requests_wait_leaves_memory_for_others() {
        let budget = Rc::new(Budget::new(12));
        let paused = [holder_of(&budget, 1), holder_of(&budget, 1)];
        paused.iter().for_each(|holder| assert!(holder.try_take(ALLOWANCE_BYTES + 3)));
        assert!(!paused[0].try_take(1), "one disk has more than is left for others");
        let waits = ticket(&paused[0].share, 1);
        budget.line.borrow_mut().push_back(waits.clone());
        let other = holder_of(&budget, 2);
        assert!(other.try_take(ALLOWANCE_BYTES + 3), "a disk that waits holds up another one");
        let of_other = ticket(&holder_of(&budget, 3).share, 4);
        budget.line.borrow_mut().push_back(of_other.clone());
        other.give_back(ALLOWANCE_BYTES + 3);
        assert!(of_other.is_granted.get() && !waits.is_granted.get());
        paused[1].give_back(ALLOWANCE_BYTES + 3);
        assert!(waits.is_granted.get());
    }

    #[test]
    fn an_allowance_is_always_there_and_the_rest_is_shared() {
        let budget = Rc::new(Budget::new(10));
        let (one, two) = (holder(&budget), holder(&budget));
        assert!(one.try_take(ALLOWANCE_BYTES + 10));
        assert!(two.try_take(ALLOWANCE_BYTES) && !two.try_take(1));
        one.give_back(4);
        assert!(two.try_take(4) && !two.try_take(1));
        // Memory within the allowance is no part of the budget.
        one.give_back(ALLOWANCE_BYTES + 6);
        assert_eq!((one.held_bytes(), budget.free_bytes.get()), (0, 6));
        two.give_back(ALLOWANCE_BYTES + 4);
        assert_eq!(budget.free_bytes.get(), 10);
    }

    #[test]
    fn a_client_is_stuck_when_one_send_lasts_over_two_looks() {
        let budget = Rc::new(Budget::new(10));
        let (stuck, busy) = (holder(&budget), holder(&budget));
        [&stuck, &busy].into_iter().for_each(|holder| {
            assert!(holder.try_take(ALLOWANCE_BYTES + 5));
            holder.sends(true);
        });
        let look_ns = LOOK.as_nanos() as u64;
        let waiting = ticket(&holder(&budget).share, 1);
        budget.look(&waiting, look_ns);
        budget.look(&waiting, 2 * look_ns - 1);
        assert!(!stuck.presence.is_cut(), "the looks were too close");
        busy.sends(false);
        busy.sends(true);
        budget.look(&waiting, 2 * look_ns);
        assert!(stuck.presence.is_cut() && !busy.presence.is_cut());
    }

    #[test]
    fn a_line_is_served_in_its_order() {
        let budget = Rc::new(Budget::new(10));
        let one = holder(&budget);
        let others = [8, 1, 9].map(|wanted_bytes| (holder(&budget), wanted_bytes));
        let tickets = others.each_ref().map(|(other, wanted_bytes)| ticket(&other.share, *wanted_bytes));
        assert!(one.try_take(ALLOWANCE_BYTES + 10));
        budget.line.borrow_mut().extend(tickets.iter().cloned());
        let granted = || tickets.iter().map(|ticket| ticket.is_granted.get()).collect::<Vec<_>>();
        one.give_back(5);
        assert_eq!(granted(), [false; 3], "the second one would fit, but waits for its turn");
        assert!(!holder(&budget).try_take(ALLOWANCE_BYTES + 1), "nobody jumps the line");
        one.give_back(4);
        assert_eq!(granted(), [true, true, false]);
    }
}
