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
//!
//! What a request costs does not depend on the number of disks in the group: the disks whose requests wait are kept in order, and all of them are
//! looked at only when the keeper wakes up, when limits change, and when it is found out anew which disk has had least.

use std::collections::{BTreeMap, BTreeSet};
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
    /// The disks whose requests wait, each with what it has had: the first one has had least.
    lined: BTreeSet<(u128, u64)>,
    /// Before this moment none of these requests may pass, if nothing changes.
    next_ns: u64,
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
    #[cfg(test)]
    tests::LOOKS.set(tests::LOOKS.get() + 1);
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
        member.lined_at = None;
        self.members.insert(self.next_member, member);
        self.put_in_order(self.next_member);
        self.serve(now_ns);
        self.next_member
    }

    /// Takes a disk out, with its limits and its requests that wait.
    pub(super) fn remove(&mut self, number: u64) -> Member {
        let mut member = self.members.remove(&number).unwrap_or_default();
        self.lined.retain(|(_, other)| *other != number);
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
        if now_ns.saturating_sub(self.least_at_ns) >= LEAST_NS {
            let before = self.least;
            self.find_least(now_ns);
            // A disk may be ahead of nobody now.
            if self.least != before {
                self.serve(now_ns);
            }
        }
        if now_ns >= self.armed_ns {
            self.serve(now_ns);
        }
        let floor = self.floor();
        let Self { buckets: group, members, lined, least, next_ns, .. } = &mut *self;
        let member = members.get_mut(&number).expect(IS_THERE);
        let is_whole = member.part_of(group.part_of(cost)).bytes == cost.bytes;
        let is_first = is_whole && member.line(cost.writes).is_empty();
        // Whoever may pass now and waits already comes first, unless this disk is the next one.
        let is_next = || lined.first().is_none_or(|(had, _)| member.had.max(floor) < *had);
        let passes = is_first && (now_ns < *next_ns || is_next()) && ready_ns(group, member, cost, *least) <= now_ns;
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
        self.put_in_order(number);
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
        self.put_in_order(number);
    }

    /// Puts a disk to its place among those whose requests wait, after what it has had or its lines have changed.
    fn put_in_order(&mut self, number: u64) {
        let member = self.members.get_mut(&number).expect(IS_THERE);
        let place = (member.waiting() > 0).then_some(member.had);
        if place == member.lined_at {
            return;
        }
        if let Some(before) = std::mem::replace(&mut member.lined_at, place) {
            self.lined.remove(&(before, number));
        }
        self.lined.extend(place.map(|had| (had, number)));
    }

    /// The first request in one of the disk's lines is another one: it may be the next of all to pass.
    fn note_head(&mut self, number: u64, now_ns: u64) {
        let (group, least) = (&mut self.buckets, self.least);
        let member = self.members.get_mut(&number).expect(IS_THERE);
        let heads = member.heads();
        let ready_ns = heads.map(|rest| ready_ns(group, member, rest.cost, least)).min().unwrap_or(u64::MAX);
        self.next_ns = self.next_ns.min(ready_ns);
        self.find_keeper();
        self.hurry_keeper(now_ns);
    }

    /// Wakes the keeper if it sleeps for longer than until the next request may pass.
    fn hurry_keeper(&mut self, now_ns: u64) {
        if self.next_ns.max(now_ns.saturating_add(GRAIN_NS)) < self.armed_ns
            && let Some(keeper) = &self.keeper
        {
            self.wakes.push(keeper.waker());
        }
    }

    /// Puts a request at the end of its line.
    pub(super) fn line_up(&mut self, number: u64, ticket: &Arc<Ticket>, now_ns: u64) {
        self.member(number).line(ticket.writes).push_back(ticket.clone());
        self.waiting += 1;
        self.put_in_order(number);
        if self.member(number).line(ticket.writes).len() == 1 {
            self.note_head(number, now_ns);
        }
    }

    /// The request is not wanted any more.
    pub(super) fn withdraw(&mut self, number: u64, ticket: &Arc<Ticket>, now_ns: u64) {
        if self.member(number).withdraw(ticket) {
            self.waiting -= 1;
        }
        self.put_in_order(number);
        self.keeper.take_if(|keeper| Arc::ptr_eq(keeper, ticket));
        self.note_head(number, now_ns);
    }

    /// Lets all requests of a disk pass.
    pub(super) fn pass_all(&mut self, number: u64, now_ns: u64) {
        let all = self.member(number).take_all();
        self.waiting -= all.len();
        self.put_in_order(number);
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
                self.armed_ns = self.next_ns.max(now_ns.saturating_add(GRAIN_NS));
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
        let mut has_passed = true;
        while std::mem::take(&mut has_passed) {
            while let Some((number, writes)) = self.next(now_ns) {
                self.pass_next(number, writes, now_ns);
                has_passed = true;
            }
            // Those that have passed may have been the ones that had least.
            self.find_least(now_ns);
        }
        self.next_ns = self.find_next_ns();
        self.find_keeper();
        self.hurry_keeper(now_ns);
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
            self.put_in_order(number);
            self.wakes.push(ticket.pass());
        }
    }

    /// The disk and the line whose first request is the next to pass. `None` when none may pass now.
    fn next(&mut self, now_ns: u64) -> Option<(u64, bool)> {
        let Self { buckets: group, members, lined, least, .. } = &mut *self;
        lined.iter().find_map(|(_, number)| {
            let member = members.get_mut(number).expect(IS_THERE);
            let heads = member.heads();
            let ready = heads.filter(|rest| ready_ns(group, member, rest.cost, *least) <= now_ns);
            ready.min_by_key(|rest| rest.since_ns).map(|rest| (*number, rest.cost.writes))
        })
    }

    /// When the next request may pass, if nothing changes.
    fn find_next_ns(&mut self) -> u64 {
        let Self { buckets: group, members, lined, least, .. } = &mut *self;
        let of_member = |(_, number): &(u128, u64)| {
            let member = members.get_mut(number).expect(IS_THERE);
            let heads = member.heads();
            heads.map(|rest| ready_ns(group, member, rest.cost, *least)).min()
        };
        lined.iter().filter_map(of_member).min().unwrap_or(u64::MAX)
    }

    /// Makes one of the requests that wait the keeper, unless one is.
    fn find_keeper(&mut self) {
        self.keeper.take_if(|keeper| keeper.passes());
        if self.keeper.is_none() && self.waiting > 0 {
            let first = self.lined.first().and_then(|(_, number)| self.members.get(number));
            self.keeper = first.and_then(Member::last).cloned();
            // It has no timer yet: it is woken, and makes one.
            self.armed_ns = 0;
            self.wakes.extend(self.keeper.iter().map(|keeper| keeper.waker()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// How often it was looked when a request may pass.
        pub static LOOKS: Cell<u64> = const { Cell::new(0) };
    }

    const ASKED: u64 = 100;
    const COST: Cost = Cost { writes: false, requests: 1, bytes: 4096 };

    /// What is looked at for a request of one more disk in a group of so many, all of which have requests that wait.
    fn looks_of_a_request(disks: u64) -> u64 {
        let mut state = State::default();
        state.buckets.set(Limits { iops: Some(1), ..Limits::default() }, 0);
        let now_ns = 1;
        let ask = |state: &mut State| {
            let number = state.add(Member::default(), 0);
            if !state.try_pass(number, COST, now_ns) {
                state.line_up(number, &Ticket::new(COST, now_ns), now_ns);
            }
        };
        (0..=disks).for_each(|_| ask(&mut state));
        // The keeper has its timer.
        let keeper = state.keeper.clone().expect("requests wait");
        assert!(matches!(state.step(&keeper, now_ns), Step::Keep(_)));
        let others: Vec<u64> = (0..ASKED).map(|_| state.add(Member::default(), 0)).collect();
        let before = LOOKS.get();
        for number in others {
            assert!(!state.try_pass(number, COST, now_ns));
            state.line_up(number, &Ticket::new(COST, now_ns), now_ns);
        }
        (LOOKS.get() - before) / ASKED
    }

    #[test]
    fn a_request_costs_the_same_in_a_group_of_any_size() {
        assert!(looks_of_a_request(1000) <= looks_of_a_request(2) + 1);
    }
}
