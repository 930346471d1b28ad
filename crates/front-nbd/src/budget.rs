//! [`Holder`]: what an NBD connection holds of the memory that the requests of all NBD connections of one worker share.
//!
//! Each connection may always hold [`ALLOWANCE_BYTES`], so that small requests never wait for others and cost nothing here. What it holds
//! beyond that is taken from the budget of its worker ([`spile_core::budget`]). A connection waits with one request at a time, so each gets
//! its turn.
//!
//! A client that takes none of its replies, or sends no more of a write's payload, keeps what it holds. While others wait in line, one that
//! has taken or sent nothing for two looks, [`LOOK`] apart, is hung up on: the one that holds most.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use spile_core::budget::{Budget, Share, Turn, Wanted};
use spile_core::metrics::now_ns;
use spile_front::Presence;

/// What each connection may hold in any case, in bytes.
pub(crate) const ALLOWANCE_BYTES: u64 = 1 << 20;
/// What all connections of a worker may hold together beyond that, in bytes. When it is used up, each disk that holds nothing of it gets
/// one request all the same, of 32 MiB at most.
pub(crate) const BUDGET_BYTES: u64 = 128 << 20;
/// The time between two looks at those that hold memory, while somebody waits for some.
const LOOK: Duration = Duration::from_secs(5);

thread_local! {
    static OF_WORKER: Rc<Holders> = Rc::new(Holders::new(BUDGET_BYTES));
}

/// The connections of one worker and their memory.
struct Holders {
    budget: Rc<Budget>,
    all: RefCell<Vec<Weak<Holder>>>,
}

/// What one connection holds.
pub(crate) struct Holder {
    holders: Rc<Holders>,
    share: Rc<Share>,
    held_bytes: Cell<u64>,
    /// Replies on their way to the client.
    sends: Way,
    /// A payload on its way from the client.
    receives: Way,
    presence: Arc<Presence>,
    /// Wakes the request that waits, if there is one.
    waits: RefCell<Option<Waker>>,
}

/// How data move one way between the client and us.
#[derive(Default)]
struct Way {
    /// True while some are awaited, and how many steps there were.
    is_busy: Cell<bool>,
    steps: Cell<u64>,
    /// The number of steps at a look, and when that was.
    seen: Cell<(u64, u64)>,
}

impl Way {
    fn step(&self, is_busy: bool) {
        self.is_busy.set(is_busy);
        self.steps.set(self.steps.get() + 1);
    }

    /// True when nothing has moved since a look that was [`LOOK`] ago, although something was to.
    fn is_stuck(&self, now_ns: u64) -> bool {
        let (steps, since_ns) = self.seen.get();
        if !self.is_busy.get() || steps != self.steps.get() {
            self.seen.set((self.steps.get(), now_ns));
            return false;
        }
        now_ns.saturating_sub(since_ns) >= LOOK.as_nanos() as u64
    }
}

impl Holders {
    fn new(bytes: u64) -> Self {
        Self { budget: Budget::new(bytes), all: RefCell::default() }
    }

    /// A connection of the disk at this address that holds nothing yet.
    fn join(self: &Rc<Self>, presence: Arc<Presence>, disk: usize) -> Rc<Holder> {
        let holder = Rc::new(Holder {
            holders: self.clone(),
            share: self.budget.share_of(disk),
            held_bytes: Cell::new(0),
            sends: Way::default(),
            receives: Way::default(),
            presence,
            waits: RefCell::default(),
        });
        let mut all = self.all.borrow_mut();
        all.retain(|other| other.strong_count() > 0);
        all.push(Rc::downgrade(&holder));
        holder
    }

    /// Has the connection hung up on that holds most of those whose clients have taken or sent nothing since the look before. With `only` it
    /// is a connection with this share.
    fn look(&self, only: Option<&Rc<Share>>, now_ns: u64) {
        let all = self.all.borrow();
        let holders = all.iter().filter_map(Weak::upgrade);
        let holders = holders.filter(|holder| only.is_none_or(|share| Rc::ptr_eq(&holder.share, share)));
        let stuck = holders.filter(|holder| holder.is_stuck(now_ns)).max_by_key(|holder| holder.held_bytes.get());
        if let Some(holder) = stuck.filter(|holder| holder.held_bytes.get() > ALLOWANCE_BYTES) {
            tracing::warn!(
                held_bytes = holder.held_bytes.get(),
                "NBD: a client takes no replies, or sends no more of a payload, while others wait for the memory that these hold: it is hung up on"
            );
            holder.presence.cut();
        }
    }
}

impl Holder {
    /// A connection of this worker to `disk` that holds nothing yet.
    pub(crate) fn new<D>(presence: Arc<Presence>, disk: &Arc<D>) -> Rc<Self> {
        OF_WORKER.with(|holders| holders.join(presence, Arc::as_ptr(disk).addr()))
    }

    /// What the connection holds, in bytes.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held_bytes.get()
    }

    /// Takes memory for a request, if nobody has to wait for it.
    pub(crate) fn try_take(&self, bytes: u64) -> bool {
        let beyond = self.beyond_allowance(bytes);
        if beyond > 0 && self.budget().try_take(&self.share, wanted(beyond)).is_none() {
            return false;
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
        self.budget().give_back(&self.share, granted_bytes - needed);
    }

    /// Waits in the line. Returns what was taken from the budget. The look at those that hold memory is the task of the first one. When
    /// that waits because its own disk holds much, it looks at the connections of this disk only.
    async fn wait_in_line(&self, bytes: u64) -> u64 {
        let turn = self.budget().line_up(&self.share, wanted(self.beyond_allowance(bytes)));
        while !self.wait_for_turn(&turn, bytes).await {
            if turn.is_first_of_disk() {
                self.holders.look(turn.waits_for_own_disk().then_some(&self.share), now_ns());
            }
        }
        *self.waits.borrow_mut() = None;
        turn.accept().unwrap_or(0)
    }

    /// Waits for the turn, or until the allowance has room: true. Not longer than to the next look: false.
    async fn wait_for_turn(&self, turn: &Turn, bytes: u64) -> bool {
        let mut look = std::pin::pin!(spile_engine::sleep(LOOK));
        poll_fn(|cx| {
            *self.waits.borrow_mut() = Some(cx.waker().clone());
            if turn.poll(cx).is_ready() || self.beyond_allowance(bytes) == 0 {
                return Poll::Ready(true);
            }
            look.as_mut().poll(cx).map(|()| false)
        })
        .await
    }

    /// Gives back what a request held.
    pub(crate) fn give_back(&self, bytes: u64) {
        let before = self.held_bytes.get();
        self.held_bytes.set(before - bytes);
        if before > ALLOWANCE_BYTES {
            self.budget().give_back(&self.share, before - (before - bytes).max(ALLOWANCE_BYTES));
        }
        if let Some(waker) = &*self.waits.borrow() {
            waker.wake_by_ref();
        }
    }

    fn budget(&self) -> &Rc<Budget> {
        &self.holders.budget
    }

    /// How much of `bytes` more is beyond the allowance.
    fn beyond_allowance(&self, bytes: u64) -> u64 {
        let beyond = |held: u64| held.saturating_sub(ALLOWANCE_BYTES);
        beyond(self.held_bytes.get() + bytes) - beyond(self.held_bytes.get())
    }

    /// Notes that replies are being sent, or were sent.
    pub(crate) fn sends(&self, is_sending: bool) {
        self.sends.step(is_sending);
    }

    /// Notes that more of a payload is awaited, or that it has come.
    pub(crate) fn receives(&self, is_receiving: bool) {
        self.receives.step(is_receiving);
    }

    /// True when the client has taken or sent nothing that was to be taken or sent since a look that was [`LOOK`] ago.
    fn is_stuck(&self, now_ns: u64) -> bool {
        // Both look.
        self.sends.is_stuck(now_ns) | self.receives.is_stuck(now_ns)
    }
}

/// A request waits for all of its memory. When its disk holds nothing, it gets that in any case: other disks, which may hang, hold
/// up none.
fn wanted(bytes: u64) -> Wanted {
    Wanted { bytes, least_bytes: bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection to a disk of its own.
    fn holder(holders: &Rc<Holders>) -> Rc<Holder> {
        let disk = holders.all.borrow().len();
        holders.join(Arc::new(Presence::default()), disk)
    }

    #[test]
    fn an_allowance_is_always_there_and_the_rest_is_shared() {
        let holders = Rc::new(Holders::new(10));
        let (one, two) = (holder(&holders), holder(&holders));
        assert!(one.try_take(ALLOWANCE_BYTES + 9));
        assert!(two.try_take(ALLOWANCE_BYTES + 1) && !two.try_take(1));
        one.give_back(3);
        assert!(two.try_take(1) && !two.try_take(1));
        // Memory within the allowance is no part of the budget.
        one.give_back(ALLOWANCE_BYTES + 6);
        assert_eq!((one.held_bytes(), holders.budget.free_bytes()), (0, 8));
        two.give_back(ALLOWANCE_BYTES + 2);
        assert_eq!(holders.budget.free_bytes(), 10);
    }

    #[test]
    fn connections_of_a_disk_have_one_share() {
        let holders = Rc::new(Holders::new(12));
        let paused = [1, 1].map(|disk| holders.join(Arc::new(Presence::default()), disk));
        paused.iter().for_each(|holder| assert!(holder.try_take(ALLOWANCE_BYTES + 3)));
        assert!(!paused[0].try_take(1), "one disk has more than is left for others");
        assert!(holder(&holders).try_take(ALLOWANCE_BYTES + 3), "a disk that waits holds up another one");
    }

    /// Three disks hang, and leave less than the largest request takes.
    #[test]
    fn a_disk_that_holds_nothing_gets_its_request_however_much_others_hold() {
        let holders = Rc::new(Holders::new(128));
        let dead = [64, 32, 16].map(|bytes| {
            let holder = holder(&holders);
            assert!(holder.try_take(ALLOWANCE_BYTES + bytes));
            holder
        });
        let kept = dead.each_ref().map(|holder| holders.budget.line_up(&holder.share, wanted(32)));
        let [large, small] = [holder(&holders), holder(&holders)];
        assert!(large.try_take(ALLOWANCE_BYTES + 32), "it would wait for ever");
        assert!(small.try_take(ALLOWANCE_BYTES + 1), "it would wait behind the others");
        assert!(!large.try_take(1) && !dead[2].try_take(1), "a disk that holds something gets more");
        drop(kept);
    }

    #[test]
    fn a_client_is_stuck_when_one_send_or_payload_lasts_over_two_looks() {
        is_stuck_while(Holder::sends);
        is_stuck_while(Holder::receives);
    }

    fn is_stuck_while(moves: impl Fn(&Holder, bool)) {
        let holders = Rc::new(Holders::new(10));
        let (stuck, busy) = (holder(&holders), holder(&holders));
        [&stuck, &busy].into_iter().for_each(|holder| {
            assert!(holder.try_take(ALLOWANCE_BYTES + 5));
            moves(holder, true);
        });
        let look_ns = LOOK.as_nanos() as u64;
        holders.look(None, look_ns);
        holders.look(None, 2 * look_ns - 1);
        assert!(!stuck.presence.is_cut(), "the looks were too close");
        moves(&busy, false);
        moves(&busy, true);
        holders.look(Some(&busy.share), 2 * look_ns);
        assert!(!stuck.presence.is_cut(), "a connection of another disk");
        holders.look(None, 2 * look_ns);
        assert!(stuck.presence.is_cut() && !busy.presence.is_cut());
    }
}
