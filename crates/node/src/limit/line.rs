//! [`Member`]: a disk in a group, with its limits and its requests that wait.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

use super::bucket::{Buckets, Cost};

/// A request that waits.
pub(super) struct Ticket {
    pub(super) writes: bool,
    /// When it came.
    pub(super) since_ns: u64,
    rest: Mutex<Rest>,
    passes: AtomicBool,
    waker: Mutex<Waker>,
}

/// What of a request has not passed yet.
#[derive(Clone, Copy)]
pub(super) struct Rest {
    pub(super) cost: Cost,
    /// When it came, or when its last part passed: the disk's other line comes first if it has waited for longer.
    pub(super) since_ns: u64,
}

impl Ticket {
    pub(super) fn new(cost: Cost, since_ns: u64) -> Arc<Self> {
        let waker = Mutex::new(Waker::noop().clone());
        let rest = Mutex::new(Rest { cost, since_ns });
        Arc::new(Self { writes: cost.writes, since_ns, rest, passes: AtomicBool::new(false), waker })
    }

    /// What has not passed yet.
    pub(super) fn rest(&self) -> Rest {
        *self.rest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A part of it has passed. True when nothing is left.
    pub(super) fn pass_part(&self, part: Cost, now_ns: u64) -> bool {
        let mut rest = self.rest.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = rest.cost.bytes - part.bytes;
        *rest = Rest { cost: Cost { requests: 0, bytes, ..rest.cost }, since_ns: now_ns };
        bytes == 0
    }

    /// True once it waits no more.
    pub(super) fn passes(&self) -> bool {
        self.passes.load(Ordering::Acquire)
    }

    /// Who is woken when something has changed for it.
    pub(super) fn set_waker(&self, waker: &Waker) {
        self.waker.lock().unwrap_or_else(PoisonError::into_inner).clone_from(waker);
    }

    pub(super) fn waker(&self) -> Waker {
        self.waker.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets it pass.
    pub(super) fn pass(&self) -> Waker {
        self.passes.store(true, Ordering::Release);
        self.waker()
    }
}

/// A disk in a group.
#[derive(Default)]
pub(super) struct Member {
    pub(super) own: Buckets,
    pub(super) job: Buckets,
    /// Reads that wait, and writes that wait; the first one has waited for longest.
    lines: [VecDeque<Arc<Ticket>>; 2],
    /// What the disk has had of the group's rate, as [`Buckets::share`] counts it.
    pub(super) had: u128,
    /// When its last request passed.
    pub(super) passed_ns: u64,
    /// Its place among the disks whose requests wait: what it had had when it was put there.
    pub(super) lined_at: Option<u128>,
}

impl Member {
    /// From this moment on the request may pass, as far as the disk's own limits and its job's go.
    pub(super) fn ready_ns(&mut self, cost: Cost) -> u64 {
        self.own.ready_ns(cost).max(self.job.ready_ns(cost))
    }

    /// The part of a request that these limits let pass at once.
    pub(super) fn part_of(&mut self, cost: Cost) -> Cost {
        self.job.part_of(self.own.part_of(cost))
    }

    /// Takes what the request costs from these limits.
    pub(super) fn take(&mut self, cost: Cost, now_ns: u64) {
        self.own.take(cost, now_ns);
        self.job.take(cost, now_ns);
    }

    /// As [`Buckets::take_in_haste`].
    pub(super) fn take_in_haste(&mut self, cost: Cost, now_ns: u64) {
        self.own.take_in_haste(cost, now_ns);
        self.job.take_in_haste(cost, now_ns);
    }

    pub(super) fn line(&mut self, writes: bool) -> &mut VecDeque<Arc<Ticket>> {
        &mut self.lines[usize::from(writes)]
    }

    pub(super) fn waiting(&self) -> usize {
        self.lines.iter().map(VecDeque::len).sum()
    }

    /// What has not passed yet of the first request of each line.
    pub(super) fn heads(&self) -> impl Iterator<Item = Rest> + use<> {
        let heads = self.lines.each_ref().map(|line| line.front().map(|ticket| ticket.rest()));
        heads.into_iter().flatten()
    }

    /// The request that came last to one of the lines. Of all it is likely to wait for longest.
    pub(super) fn last(&self) -> Option<&Arc<Ticket>> {
        self.lines.iter().filter_map(VecDeque::back).max_by_key(|ticket| ticket.since_ns)
    }

    /// Takes a request out of its line. False when it is in none.
    pub(super) fn withdraw(&mut self, ticket: &Arc<Ticket>) -> bool {
        let line = self.line(ticket.writes);
        let at = line.iter().position(|other| Arc::ptr_eq(other, ticket));
        at.is_some_and(|at| line.remove(at).is_some())
    }

    /// Takes all requests out of the lines.
    pub(super) fn take_all(&mut self) -> Vec<Arc<Ticket>> {
        self.lines.iter_mut().flat_map(|line| line.drain(..)).collect()
    }
}
