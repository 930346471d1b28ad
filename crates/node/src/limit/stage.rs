//! [`DiskLimits`]: the limits of one disk, as a stage.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use spile_core::{Io, Op, Result, Timer};

use super::bucket::Cost;
use super::group::{Group, State, Step};
use super::line::{Member, Ticket};
use super::rates::Limits;
use crate::stage::{Pending, Stage};

/// The limits of one disk: its own, its group's and its job's.
pub struct DiskLimits {
    timer: Arc<dyn Timer>,
    place: Mutex<Place>,
    delayed: AtomicU64,
    delay_ns: AtomicU64,
    /// Whether requests meet these limits now. Changes of that wait for each other.
    pub(crate) is_attached: async_lock::Mutex<bool>,
}

/// Where the disk stands in line.
struct Place {
    group: Arc<Group>,
    /// The disk's number in the group.
    number: u64,
    /// So many callers want no request to wait now.
    hurries: u32,
}

/// What was counted of requests that had to wait, since the disk was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delays {
    /// Requests that had to wait.
    pub requests: u64,
    /// How long all of them have waited, in nanoseconds; those that wait now are not in it.
    pub time_ns: u64,
    /// Requests that wait now.
    pub waiting: u64,
}

impl DiskLimits {
    /// A disk without limits, in no group.
    pub fn new(timer: Arc<dyn Timer>) -> Arc<Self> {
        let group = Group::new("", timer.clone());
        let (number, _) = group.lock(|state| state.add(Member::default(), 0));
        Arc::new(Self {
            timer,
            place: Mutex::new(Place { group, number, hurries: 0 }),
            delayed: AtomicU64::new(0),
            delay_ns: AtomicU64::new(0),
            is_attached: async_lock::Mutex::new(false),
        })
    }

    fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has `act` see the disk's group, the disk's number there and how many callers hurry, and then wakes whoever is to be woken.
    fn with<T>(&self, act: impl FnOnce(&mut State, u64, &mut u32) -> T) -> T {
        let mut place = self.place();
        let Place { group, number, hurries } = &mut *place;
        let (done, wakes) = group.lock(|state| act(state, *number, hurries));
        drop(place);
        wakes.into_iter().for_each(Waker::wake);
        done
    }

    /// The disk's own limits.
    pub fn own(&self) -> Limits {
        self.with(|state, number, _| state.member(number).own.limits())
    }

    /// The limits that the disk's job asks for.
    pub fn job(&self) -> Limits {
        self.with(|state, number, _| state.member(number).job.limits())
    }

    /// The group that the disk is in.
    pub fn group(&self) -> Option<Arc<Group>> {
        Some(self.place().group.clone()).filter(|group| !group.name().is_empty())
    }

    /// What was counted of requests that had to wait.
    pub fn delays(&self) -> Delays {
        let waiting = self.with(|state, number, _| state.member(number).waiting() as u64);
        Delays { requests: self.delayed.load(Relaxed), time_ns: self.delay_ns.load(Relaxed), waiting }
    }

    /// True when something limits the disk.
    pub(crate) fn are_needed(&self) -> bool {
        self.with(|state, number, _| state.limits_of(number).iter().any(|limits| !limits.is_none()))
    }

    pub(crate) fn set_own(&self, limits: Limits) {
        self.change(|member, now_ns| member.own.set(limits, now_ns));
    }

    pub(crate) fn set_job(&self, limits: Limits) {
        self.change(|member, now_ns| member.job.set(limits, now_ns));
    }

    fn change(&self, change: impl FnOnce(&mut Member, u64)) {
        let now_ns = self.timer.now_ns();
        self.with(|state, number, _| {
            change(state.member(number), now_ns);
            state.serve(now_ns);
        });
    }

    /// Takes the disk with its requests that wait to another group; `None`: to none.
    pub(crate) fn join(&self, group: Option<Arc<Group>>) {
        let group = group.unwrap_or_else(|| Group::new("", self.timer.clone()));
        let mut place = self.place();
        if Arc::ptr_eq(&place.group, &group) {
            return;
        }
        let now_ns = self.timer.now_ns();
        let (member, mut wakes) = place.group.lock(|state| state.remove(place.number));
        let (number, more) = group.lock(|state| state.add(member, now_ns));
        (place.group, place.number) = (group, number);
        drop(place);
        wakes.extend(more);
        wakes.into_iter().for_each(Waker::wake);
    }

    /// With `true` no request waits any more: those that wait go on at once, and those that come do not begin to wait. What they cost
    /// is taken all the same, but for what would be a debt of more than a moment. Each such call needs one with `false` to end it.
    pub fn hurry(&self, begins: bool) {
        let now_ns = self.timer.now_ns();
        self.with(|state, number, hurries| match begins {
            true => {
                *hurries += 1;
                state.pass_all(number, now_ns);
            }
            false => *hurries -= 1,
        });
    }

    /// Lets a request pass that need not wait.
    fn try_pass(&self, cost: Cost, now_ns: u64) -> bool {
        self.with(|state, number, hurries| match *hurries {
            0 => state.try_pass(number, cost, now_ns),
            _ => {
                state.count_in_haste(number, cost, now_ns);
                true
            }
        })
    }

    async fn wait(&self, cost: Cost, since_ns: u64) -> Result<()> {
        let mut waiting =
            pin!(Waiting { limits: self, ticket: Ticket::new(cost, since_ns), is_in_line: false, timer: None });
        std::future::poll_fn(|cx| waiting.as_mut().poll(cx)).await;
        Ok(())
    }
}

impl Drop for DiskLimits {
    /// The disk leaves its group.
    fn drop(&mut self) {
        self.with(|state, number, _| drop(state.remove(number)));
    }
}

impl Stage for DiskLimits {
    fn before<'a>(&'a self, io: Io<'a>) -> Option<Pending<'a>> {
        let cost = cost_of(&io)?;
        let now_ns = self.timer.now_ns();
        if self.try_pass(cost, now_ns) {
            return None;
        }
        Some(Box::pin(self.wait(cost, now_ns)))
    }

    fn after<'a>(&'a self, _: Io<'a>, _: &Result<()>) -> Option<Pending<'a>> {
        None
    }
}

/// What a request costs; `None` for a flush.
fn cost_of(io: &Io<'_>) -> Option<Cost> {
    let bytes = io.extent.len_bytes;
    match io.op {
        Op::Read => Some(Cost { writes: false, requests: 1, bytes }),
        Op::Write { .. } | Op::WriteZeroes(_) => Some(Cost { writes: true, requests: 1, bytes }),
        Op::Discard => Some(Cost { writes: true, requests: 1, bytes: 0 }),
        Op::Flush => None,
    }
}

/// A request while it waits.
struct Waiting<'a> {
    limits: &'a DiskLimits,
    ticket: Arc<Ticket>,
    is_in_line: bool,
    /// While it is the keeper.
    timer: Option<Pin<Box<dyn Future<Output = ()>>>>,
}

impl Future for Waiting<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if !std::mem::replace(&mut self.is_in_line, true) {
            if self.line_up() {
                return Poll::Ready(());
            }
            self.limits.delayed.fetch_add(1, Relaxed);
        }
        self.ticket.set_waker(cx.waker());
        loop {
            let now_ns = self.limits.timer.now_ns();
            match self.limits.with(|state, _, _| state.step(&self.ticket, now_ns)) {
                Step::Pass => return Poll::Ready(()),
                Step::Wait => {
                    self.timer = None;
                    return Poll::Pending;
                }
                Step::Keep(time) => {
                    let mut timer = self.limits.timer.sleep(time);
                    if timer.as_mut().poll(cx).is_pending() {
                        self.timer = Some(timer);
                        return Poll::Pending;
                    }
                }
            }
        }
    }
}

impl Waiting<'_> {
    /// Lines up. True when the request need not wait: it has passed at once, or nobody waits any more meanwhile.
    fn line_up(&self) -> bool {
        let now_ns = self.limits.timer.now_ns();
        self.limits.with(|state, number, hurries| {
            state.line_up(number, &self.ticket, now_ns);
            if *hurries > 0 {
                state.pass_all(number, now_ns);
            }
            self.ticket.passes()
        })
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let now_ns = self.limits.timer.now_ns();
        self.limits.delay_ns.fetch_add(now_ns.saturating_sub(self.ticket.since_ns), Relaxed);
        if self.is_in_line && !self.ticket.passes() {
            self.limits.with(|state, number, _| state.withdraw(number, &self.ticket, now_ns));
        }
    }
}
