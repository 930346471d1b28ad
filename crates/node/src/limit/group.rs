//! [`Group`]: disks that share limits, and the order in which their requests pass.
//!
//! Each disk has a count of what it has had of the group's rate. Of the disks whose first request may pass, the one that has had
//! least comes first (start-time fair queuing). A disk that wanted nothing for a while, or was held back by a limit of its own, saves
//! up no more than [`MOST_LAG`]: it goes on from there. A disk in no group is alone in one without limits.
//!
//! A disk with few requests in flight has none in line for some of the time, until its guest has seen the answers and asks for more. So a
//! disk that is [`AHEAD`] of another one leaves half of the group's burst alone: whatever the other one asks for next passes at
//! once, until it has caught up. No rate is lost, because a bucket that is half full keeps all that comes.
//!
//! The requests that wait have one timer among them: one of them is the *keeper*. It sleeps until the first may pass, lets pass
//! whoever may, and wakes them. When its own turn comes, another one is the keeper.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

use spile_core::{Result, Timer};

use super::bucket::{Buckets, Cost};
use super::line::{Member, Ticket};
use super::rates::Limits;

/// The keeper sleeps at least so long, in nanoseconds: at high rates it lets several requests pass together. No rate is lost, as the
/// allowance of a shorter time than the least burst adds up.
const GRAIN_NS: u64 = 500_000;

/// A disk that has had so much more than another one leaves half of the burst to it. As all shares: time of the group's rate, in
/// 2⁻³² ns.
const AHEAD: u128 = 5_000_000 << 32;

/// What a disk may catch up, as a share.
const MOST_LAG: u128 = 4 * AHEAD;

/// A disk whose last request is longer ago wants nothing, in nanoseconds.
const ACTIVE_NS: u64 = 1_000_000_000;

/// For so long it is not looked anew which disk has had least, in nanoseconds.
const LEAST_NS: u64 = 1_000_000;

/// Disks that share limits.
pub struct Group {
    name: String,
    timer: Arc<dyn Timer>,
    state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    buckets: Buckets,
    members: BTreeMap<u64, Member>,
    next_member: u64,
    /// How many requests wait in all lines.
    waiting: usize,
    /// The most that a disk had had when one of its requests passed in its turn.
    begun: u128,
    /// What the disk has had that has had least of those that want something, and when that was found.
    least: u128,
    least_at_ns: u64,
    keeper: Option<Arc<Ticket>>,
    /// When the keeper wakes up by itself.
    armed_ns: u64,
    /// Who is to be woken once the lock is free.
    wakes: Vec<Waker>,
}

/// What a request that waits has to do.
pub(super) enum Step {
    /// Go on.
    Pass,
    /// Wait until it is woken.
    Wait,
    /// Look again after this time: it is the keeper.
    Keep(Duration),
}

impl Group {
    /// A group of this name, without limits and disks.
    pub fn new(name: impl Into<String>, timer: Arc<dyn Timer>) -> Arc<Self> {
        Arc::new(Self { name: name.into(), timer, state: Mutex::default() })
    }

    /// The group's name; empty for the group of a disk that is in none.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The limits that the group's disks share.
    pub fn limits(&self) -> Limits {
        self.with(|state| state.buckets.limits())
    }

    /// Changes the limits that the group's disks share, also for requests that wait already. A disk whose requests meet no limit yet has
    /// to be told ([`Node::place_limits`](crate::Node::place_limits)).
    ///
    /// # Errors
    /// As [`Limits::check`].
    pub fn set_limits(&self, limits: Limits) -> Result<()> {
        limits.check()?;
        let now_ns = self.timer.now_ns();
        self.with(|state| {
            state.buckets.set(limits, now_ns);
            state.serve(now_ns);
        });
        Ok(())
    }

    /// How many disks are in the group.
    pub fn disks(&self) -> usize {
        self.with(|state| state.members.len())
    }

    /// Has `act` see the state under its lock, and then wakes whoever is to be woken.
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let (done, wakes) = self.lock(act);
        wakes.into_iter().for_each(Waker::wake);
        done
    }

    /// Has `act` see the state under its lock. Returns who is to be woken once the caller has no lock any more.
    pub(super) fn lock<T>(&self, act: impl FnOnce(&mut State) -> T) -> (T, Vec<Waker>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let done = act(&mut state);
        (done, std::mem::take(&mut state.wakes))
    }
}

const IS_THERE: &str = "a disk stays in its group while its place says so";

/// From this moment on a request of `member` may pass, when the disk that has had least of `group` has had `least`.
fn ready_ns(group: &mut Buckets, member: &mut Member, cost: Cost, least: u128) -> u64 {
    let mut group_ns = group.ready_ns(cost);
    if member.had > least.saturating_add(AHEAD) && group_ns > 0 {
        group_ns = group_ns.saturating_add(group.limits().burst_ns() / 2);
    }
    group_ns.max(member.ready_ns(cost))
}

impl State {
    /// Takes a disk in. The result is its number in this group.
    pub(super) fn add(&mut self, mut member: Member, now_ns: u64) -> u64 {
        member.had = 0;
        self.waiting += member.waiting();
        self.next_member += 1;
        self.members.insert(self.next_member, member);
        self.serve(now_ns);
        self.next_member
    }

    /// Takes a disk out, with its limits and its requests that wait.
    pub(super) fn remove(&mut self, number: u64) -> Member {
        let mut member = self.members.remove(&number).unwrap_or_default();
        self.waiting -= member.waiting();
        let all = member.take_all();
        self.keeper.take_if(|keeper| all.iter().any(|ticket| Arc::ptr_eq(ticket, keeper)));
        all.into_iter().for_each(|ticket| member.line(ticket.writes).push_back(ticket));
        self.find_keeper();
        member
    }

    /// What limits a disk: its group, itself and its job.
    pub(super) fn limits_of(&mut self, number: u64) -> [Limits; 3] {
        let group = self.buckets.limits();
        let member = self.member(number);
        [group, member.own.limits(), member.job.limits()]
    }

    pub(super) fn member(&mut self, number: u64) -> &mut Member {
        self.members.get_mut(&number).expect(IS_THERE)
    }

    /// Lets a request pass that need not wait. False when it has to, and for one that passes in parts: these are taken in line.
    pub(super) fn try_pass(&mut self, number: u64, cost: Cost, now_ns: u64) -> bool {
        // Whoever may pass now and waits already comes first.
        self.serve(now_ns);
        if now_ns.saturating_sub(self.least_at_ns) >= LEAST_NS {
            self.find_least(now_ns);
        }
        let Self { buckets: group, members, least, .. } = &mut *self;
        let member = members.get_mut(&number).expect(IS_THERE);
        let is_whole = member.part_of(group.part_of(cost)).bytes == cost.bytes;
        let is_first = is_whole && member.line(cost.writes).is_empty();
        let passes = is_first && ready_ns(group, member, cost, *least) <= now_ns;
        if passes {
            self.begin(number, cost, now_ns);
        }
        passes
    }

    /// A request of this disk passes in its turn.
    fn begin(&mut self, number: u64, cost: Cost, now_ns: u64) {
        let floor = self.floor();
        let member = self.member(number);
        member.had = member.had.max(floor);
        self.begun = self.begun.max(self.member(number).had);
        self.count(number, cost, now_ns);
    }

    /// A disk that has had less counts as one that has had this.
    fn floor(&self) -> u128 {
        self.begun.saturating_sub(MOST_LAG)
    }

    /// Finds out what the disk has had that has had least of those that want something.
    fn find_least(&mut self, now_ns: u64) {
        let is_active = |member: &&Member| member.waiting() > 0 || now_ns.saturating_sub(member.passed_ns) < ACTIVE_NS;
        let least = match self.members.len() {
            0 | 1 => None,
            _ => self.members.values().filter(is_active).map(|member| member.had).min(),
        };
        self.least = least.map_or(u128::MAX, |least| least.max(self.floor()));
        self.least_at_ns = now_ns;
    }

    /// A request of this disk passes in its turn. Takes what it costs from all limits.
    fn count(&mut self, number: u64, cost: Cost, now_ns: u64) {
        let share = self.buckets.share(cost);
        self.buckets.take(cost, now_ns);
        let member = self.member(number);
        member.had = member.had.saturating_add(share);
        member.passed_ns = now_ns;
        member.take(cost, now_ns);
    }

    /// A request of this disk passes out of its turn, because nobody may wait. It leaves a small debt at most, in the group, too, and puts the disk
    /// behind the others by no more than a disk may catch up.
    pub(super) fn count_in_haste(&mut self, number: u64, cost: Cost, now_ns: u64) {
        let share = self.buckets.share(cost);
        self.buckets.take_in_haste(cost, now_ns);
        let most_had = self.begun.saturating_add(MOST_LAG);
        let member = self.member(number);
        member.had = member.had.saturating_add(share).min(most_had.max(member.had));
        member.passed_ns = now_ns;
        member.take_in_haste(cost, now_ns);
    }

    /// Puts a request at the end of its line.
    pub(super) fn line_up(&mut self, number: u64, ticket: &Arc<Ticket>, now_ns: u64) {
        self.member(number).line(ticket.writes).push_back(ticket.clone());
        self.waiting += 1;
        self.serve(now_ns);
    }

    /// The request is not wanted any more.
    pub(super) fn withdraw(&mut self, number: u64, ticket: &Arc<Ticket>, now_ns: u64) {
        if self.member(number).withdraw(ticket) {
            self.waiting -= 1;
        }
        self.keeper.take_if(|keeper| Arc::ptr_eq(keeper, ticket));
        self.serve(now_ns);
    }

    /// Lets all requests of a disk pass.
    pub(super) fn pass_all(&mut self, number: u64, now_ns: u64) {
        let all = self.member(number).take_all();
        self.waiting -= all.len();
        for ticket in all {
            self.count_in_haste(number, ticket.rest().cost, now_ns);
            self.wakes.push(ticket.pass());
        }
        self.find_keeper();
    }

    /// What a request that waits has to do now.
    pub(super) fn step(&mut self, ticket: &Arc<Ticket>, now_ns: u64) -> Step {
        let is_keeper = |state: &Self| state.keeper.as_ref().is_some_and(|keeper| Arc::ptr_eq(keeper, ticket));
        if is_keeper(self) {
            // Its timer has ended, or something has changed.
            self.armed_ns = 0;
            self.serve(now_ns);
        }
        match ticket.passes() {
            true => Step::Pass,
            false if is_keeper(self) => {
                self.armed_ns = self.next_ns().max(now_ns.saturating_add(GRAIN_NS));
                Step::Keep(Duration::from_nanos(self.armed_ns - now_ns))
            }
            false => Step::Wait,
        }
    }

    /// Lets all requests pass whose turn has come.
    pub(super) fn serve(&mut self, now_ns: u64) {
        if self.waiting == 0 {
            return;
        }
        self.find_least(now_ns);
        while let Some((number, writes)) = self.next(now_ns) {
            self.pass_next(number, writes, now_ns);
            self.find_least(now_ns);
        }
        self.find_keeper();
        if self.next_ns().max(now_ns.saturating_add(GRAIN_NS)) < self.armed_ns
            && let Some(keeper) = &self.keeper
        {
            self.wakes.push(keeper.waker());
        }
    }

    /// The first request of a line passes, or as much of it as may pass at once. It keeps its place with the rest.
    fn pass_next(&mut self, number: u64, writes: bool, now_ns: u64) {
        let Self { buckets: group, members, .. } = &mut *self;
        let member = members.get_mut(&number).expect(IS_THERE);
        let Some(ticket) = member.line(writes).front().cloned() else { return };
        let part = member.part_of(group.part_of(ticket.rest().cost));
        self.begin(number, part, now_ns);
        if ticket.pass_part(part, now_ns) {
            self.member(number).line(writes).pop_front();
            self.waiting -= 1;
            self.wakes.push(ticket.pass());
        }
    }

    /// The disk and the line whose first request is the next to pass. `None` when none may pass now.
    fn next(&mut self, now_ns: u64) -> Option<(u64, bool)> {
        let (group, least, floor) = (&mut self.buckets, self.least, self.begun.saturating_sub(MOST_LAG));
        let candidates = self.members.iter_mut().filter_map(|(number, member)| {
            let heads = member.heads();
            let ready = heads.filter(|rest| ready_ns(group, member, rest.cost, least) <= now_ns);
            let rest = ready.min_by_key(|rest| rest.since_ns)?;
            Some((member.had.max(floor), *number, rest.cost.writes))
        });
        candidates.min().map(|(_, number, writes)| (number, writes))
    }

    /// When the next request may pass, if nothing changes.
    fn next_ns(&mut self) -> u64 {
        let (group, least) = (&mut self.buckets, self.least);
        let of_member = |member: &mut Member| {
            let heads = member.heads();
            heads.map(|rest| ready_ns(group, member, rest.cost, least)).min()
        };
        self.members.values_mut().filter_map(of_member).min().unwrap_or(u64::MAX)
    }

    /// Makes one of the requests that wait the keeper, unless one is.
    fn find_keeper(&mut self) {
        self.keeper.take_if(|keeper| keeper.passes());
        if self.keeper.is_none() && self.waiting > 0 {
            self.keeper = self.members.values().find_map(Member::last).cloned();
            // It has no timer yet: it is woken, and makes one.
            self.armed_ns = 0;
            self.wakes.extend(self.keeper.iter().map(|keeper| keeper.waker()));
        }
    }
}
