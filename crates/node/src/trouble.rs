//! [`Troubles`]: what becomes of a request that fails because of trouble below the disk.
//!
//! No space, a failing device, a server that is away, a time-out: such trouble passes ([`Error::may_pass`]). Under
//! [`OnError::Report`] the request fails. Under [`OnError::Pause`] it waits in the node and is tried again, and the guest
//! sees latency and no error. Fronts know nothing of it, so the policy is the same for all of them.
//!
//! - A request waits only when it has failed itself. On a full file system reads and rewrites go on.
//! - While requests wait, one of them is the *probe*: it is tried again after a pause that grows. When it succeeds, all others are
//!   tried once as well. When it fails, the request that has waited for longest is the next probe: a request that can
//!   never succeed does not hold up the others.
//! - All are tried at once when [`Troubles::try_again`] is called.
//! - A request that has waited as long as [`Policy::pause_at_most`] says fails with its last error. So do all when the policy
//!   becomes `Report`.
//! - When the server ends, a request that waits ends with `Shutdown` ([`Troubles::leave`]). Fronts give no answer to such a request:
//!   the guest must not take it for a failure, and the next server does it.
//! - When the client of a request is gone, the request ends with `Shutdown`, too. It is not tried once more: the client may be back
//!   already, on another connection, and may have written something newer to the same place.
//!
//! A disk that finds no room below may have somebody make some ([`Troubles::with_room_maker`]). While that is under way, requests that find no
//! room wait under either policy. Room may come between the failure of a request and the moment in which it would begin to wait, so it is tried
//! once more first, as any other try: not when its client is gone, and not when the server ends. When nobody makes room any more ([`Troubles::look_again`]), `Report` reports what has still found none.
//!
//! A waiting request holds its memory, and nothing else: no lock of a range and no share of an epoch. Trying a write again
//! is safe because the guest has no answer to it. Whatever it writes to the same place meanwhile is concurrent with this
//! write, and either may be the last. A failed flush is tried again only when no sync has failed: what a failed sync
//! has lost cannot be known, and stores mark its error as permanent.
//!
//! There is a timer only while a request waits.

use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use event_listener::Event;
use spile_core::metrics::Op;
use spile_core::metrics::span::{Moment, go_on_from, stamp};
use spile_core::{Error, ErrorKind, Result, Timer};

/// The first pause before a probe; each probe that fails doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// The longest pause before a probe.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// What is done with a request that fails because of trouble that may pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// The guest gets the error.
    #[default]
    Report,
    /// The request waits until it succeeds.
    Pause,
}

impl fmt::Display for OnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Report => "report",
            Self::Pause => "pause",
        })
    }
}

impl FromStr for OnError {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "report" => Ok(Self::Report),
            "pause" => Ok(Self::Pause),
            other => Err(Error::new(ErrorKind::InvalidInput, format!("there is no policy {other:?} for errors"))
                .hint("use report or pause")),
        }
    }
}

/// What a disk does about trouble below it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// What is done with a request that fails.
    pub on_error: OnError,
    /// The longest time that a request waits; `None`: until it succeeds.
    pub pause_at_most: Option<Duration>,
}

/// What a disk waits for.
#[derive(Debug)]
pub struct Waiting {
    /// How many requests wait now.
    pub requests: u64,
    /// When the first of them began to wait, in seconds since 1970-01-01 UTC.
    pub since_unix_s: u64,
    /// How long ago that is.
    pub time: Duration,
    /// The operation that failed last.
    pub op: Op,
    /// Its error.
    pub error: Error,
}

/// What an operator wants to hear of.
#[derive(Debug)]
pub enum News {
    /// A request begins to wait, and no other did.
    Begins(Waiting),
    /// No request waits any more.
    Ends {
        /// How long the disk has had requests that waited.
        time: Duration,
        /// How many requests waited in that time.
        requests: u64,
        /// How many of them were reported to the guest as failed in the end.
        reported: u64,
        /// How many of them were left to the next server.
        left: u64,
    },
}

/// Hears the news of one disk. It is called by the worker that executes the request, and must not wait.
pub type Tell = Box<dyn Fn(&News) + Send + Sync>;

/// Says whether somebody makes room now for requests that have found none. It must not wait.
pub type MakesRoom = Box<dyn Fn() -> bool + Send + Sync>;

/// The policy of one disk, and its requests that wait.
pub struct Troubles {
    timer: Arc<dyn Timer>,
    tell: Tell,
    makes_room: Option<MakesRoom>,
    state: Mutex<State>,
    /// Something has changed for a request that waits.
    changed: Event,
    waited: AtomicU64,
    waited_ns: AtomicU64,
}

/// What was counted of requests that have waited for trouble to pass, since the disk was made. Those that wait now are not in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waited {
    /// How many have waited.
    pub requests: u64,
    /// How long all of them have waited, in nanoseconds, tries in between included.
    pub time_ns: u64,
}

struct State {
    policy: Policy,
    /// Requests end with `Shutdown` instead of waiting.
    is_leaving: bool,
    /// Raised whenever all requests that wait are to be tried.
    round: u64,
    has_probe: bool,
    /// The pause before the next probe.
    pause: Duration,
    /// While requests wait.
    period: Option<Period>,
}

/// The time during which at least one request waits.
struct Period {
    began_ns: u64,
    since_unix_s: u64,
    waiting: u64,
    total: u64,
    reported: u64,
    left: u64,
    op: Op,
    error: Error,
}

/// What a request that waits has to do.
enum Step {
    Try,
    Report,
    /// The server ends.
    Leave,
    /// The client is gone.
    Forget,
    /// Look again when something has changed, or after this time.
    Wait(Option<Duration>),
}

impl Troubles {
    /// A disk's policy. `tell` hears when requests begin and cease to wait.
    pub fn new(policy: Policy, timer: Arc<dyn Timer>, tell: Tell) -> Self {
        let state = State { policy, is_leaving: false, round: 0, has_probe: false, pause: FIRST_PAUSE, period: None };
        let [waited, waited_ns] = [0, 0].map(AtomicU64::new);
        Self { timer, tell, makes_room: None, state: Mutex::new(state), changed: Event::new(), waited, waited_ns }
    }

    /// The same policy, for a disk for which somebody can make room. Whoever does that calls [`Troubles::try_again`] while it is still said to be
    /// under way, and [`Troubles::look_again`] when it is not any more.
    pub fn with_room_maker(self, makes_room: MakesRoom) -> Self {
        Self { makes_room: Some(makes_room), ..self }
    }

    /// Has all requests that wait look again whether they have something to wait for.
    pub fn look_again(&self) {
        self.changed.notify(usize::MAX);
    }

    /// True when a request has failed for want of room, and somebody makes some now.
    fn is_room_made(&self, error: &Error) -> bool {
        error.kind() == ErrorKind::NoSpace && self.makes_room.as_ref().is_some_and(|makes_room| makes_room())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The policy now.
    pub fn policy(&self) -> Policy {
        self.lock().policy
    }

    /// Changes the policy, also for requests that wait already.
    pub fn set_policy(&self, policy: Policy) {
        self.lock().policy = policy;
        self.changed.notify(usize::MAX);
    }

    /// Tries all requests that wait at once. Returns how many there are.
    pub fn try_again(&self) -> u64 {
        let mut state = self.lock();
        state.round += 1;
        state.pause = FIRST_PAUSE;
        let waiting = state.period.as_ref().map_or(0, |period| period.waiting);
        drop(state);
        self.changed.notify(usize::MAX);
        waiting
    }

    /// From now on no request waits: one that would ends with `Shutdown`, and so do those that wait now.
    pub fn leave(&self) {
        self.lock().is_leaving = true;
        self.changed.notify(usize::MAX);
    }

    /// What the disk waits for; `None` when no request waits.
    pub fn waiting(&self) -> Option<Waiting> {
        self.lock().period.as_ref().map(|period| self.describe(period))
    }

    /// What was counted of requests that have waited.
    pub fn waited(&self) -> Waited {
        Waited { requests: self.waited.load(Relaxed), time_ns: self.waited_ns.load(Relaxed) }
    }

    fn describe(&self, period: &Period) -> Waiting {
        Waiting {
            requests: period.waiting,
            since_unix_s: period.since_unix_s,
            time: self.since(period.began_ns),
            op: period.op,
            error: period.error.duplicate(),
        }
    }

    fn since(&self, began_ns: u64) -> Duration {
        Duration::from_nanos(self.timer.now_ns().saturating_sub(began_ns))
    }

    /// Takes a request that has failed with `error` to its end; `again` executes it once more, and may have to wait for that. `gone` ends
    /// when its client is gone.
    ///
    /// # Errors
    /// `error` itself when nobody waits for its end; the last error after the longest time; `Shutdown` when the server ends or
    /// the client is gone.
    pub(crate) async fn see_through<G: Future<Output = ()>>(
        &self,
        op: Op,
        mut error: Error,
        mut gone: Pin<&mut G>,
        again: impl AsyncFn(Pin<&mut G>) -> Result<()>,
    ) -> Result<()> {
        let mut round = self.lock().round;
        while self.makes_room.is_some() && error.kind() == ErrorKind::NoSpace && error.may_pass() {
            let before = round;
            if self.lock().is_leaving {
                return Err(left_undone());
            }
            if has_ended(gone.as_mut()).await {
                return Err(forsaken());
            }
            error = match again(gone.as_mut()).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            round = self.lock().round;
            // Else room has come meanwhile, and others have taken it.
            if round == before {
                break;
            }
        }
        let waits = self.policy().on_error == OnError::Pause || self.is_room_made(&error);
        if !error.may_pass() || !waits {
            return Err(error);
        }
        let mut request = Patient::new(self, op, error, round);
        loop {
            stamp(Moment::Troubled);
            let step = request.next_step(gone.as_mut()).await;
            go_on_from(Moment::DiskBegan);
            match step {
                Step::Leave => return Err(request.leave()),
                Step::Forget => return Err(forsaken()),
                Step::Report => return Err(request.report()),
                Step::Try | Step::Wait(_) => {}
            }
            match again(gone.as_mut()).await {
                Err(error) if error.may_pass() => request.has_failed(error),
                Ok(()) => {
                    request.has_succeeded();
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    }
}

fn left_undone() -> Error {
    Error::new(
        ErrorKind::Shutdown,
        "the request waits for its disk, and the server ends: it is left to the next server",
    )
}

/// The error of a request whose client is gone.
pub(crate) fn forsaken() -> Error {
    Error::new(ErrorKind::Shutdown, "the request waits for its disk, and its client is gone: it is not tried again")
}

/// A request that waits, from its first failure to its end.
struct Patient<'a> {
    troubles: &'a Troubles,
    op: Op,
    /// Its last error.
    error: Error,
    began_ns: u64,
    round: u64,
    /// While it is the probe: when it is tried again.
    probe_at_ns: Option<u64>,
    /// It was the probe a moment ago, and others come first.
    has_just_probed: bool,
}

impl<'a> Patient<'a> {
    /// A request that has failed in the round `round`, or before.
    fn new(troubles: &'a Troubles, op: Op, error: Error, round: u64) -> Self {
        let now_ns = troubles.timer.now_ns();
        let mut state = troubles.lock();
        let begins = state.period.is_none();
        let period = state.period.get_or_insert_with(|| Period {
            began_ns: now_ns,
            since_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            waiting: 0,
            total: 0,
            reported: 0,
            left: 0,
            op,
            error: error.duplicate(),
        });
        period.waiting += 1;
        period.total += 1;
        let news = begins.then(|| News::Begins(troubles.describe(period)));
        drop(state);
        news.iter().for_each(|news| (troubles.tell)(news));
        Self { troubles, op, error, began_ns: now_ns, round, probe_at_ns: None, has_just_probed: false }
    }

    /// Waits until there is something to do. Before each try it asks whether the client is gone.
    async fn next_step(&mut self, mut gone: Pin<&mut impl Future<Output = ()>>) -> Step {
        loop {
            let changed = self.troubles.changed.listen();
            if has_ended(gone.as_mut()).await {
                return Step::Forget;
            }
            let time = match self.look() {
                Step::Wait(time) => time,
                step => return step,
            };
            match time {
                Some(time) => either(changed, self.troubles.timer.sleep(time)).await,
                None => changed.await,
            }
            self.has_just_probed = false;
        }
    }

    fn look(&mut self) -> Step {
        let now_ns = self.troubles.timer.now_ns();
        let is_room_made = self.troubles.is_room_made(&self.error);
        let mut state = self.troubles.lock();
        if state.is_leaving {
            return Step::Leave;
        }
        if state.round != self.round {
            self.round = state.round;
            return Step::Try;
        }
        let deadline_ns = state.policy.pause_at_most.map(|most| self.began_ns.saturating_add(in_ns(most)));
        let has_to_wait = state.policy.on_error == OnError::Pause || is_room_made;
        if !has_to_wait || deadline_ns.is_some_and(|deadline| deadline <= now_ns) {
            return Step::Report;
        }
        let is_alone = state.period.as_ref().is_none_or(|period| period.waiting == 1);
        if !state.has_probe && (is_alone || !self.has_just_probed) {
            state.has_probe = true;
            self.probe_at_ns = Some(now_ns.saturating_add(in_ns(state.pause)));
        }
        if self.probe_at_ns.is_some_and(|probe| probe <= now_ns) {
            return Step::Try;
        }
        let next_ns = [deadline_ns, self.probe_at_ns].into_iter().flatten().min();
        Step::Wait(next_ns.map(|next| Duration::from_nanos(next - now_ns)))
    }

    /// It was tried, in vain.
    fn has_failed(&mut self, error: Error) {
        let mut state = self.troubles.lock();
        if let Some(period) = &mut state.period {
            (period.op, period.error) = (self.op, error.duplicate());
        }
        self.error = error;
        if self.probe_at_ns.take().is_some() {
            self.has_just_probed = true;
            state.has_probe = false;
            state.pause = (state.pause * 2).min(LONGEST_PAUSE);
            drop(state);
            self.troubles.changed.notify(1);
        }
    }

    /// It was tried, with success. When it was the probe, the others are tried, too.
    fn has_succeeded(&mut self) {
        if self.probe_at_ns.is_some() {
            self.troubles.try_again();
        }
    }

    /// The error that the guest gets.
    fn report(&mut self) -> Error {
        if let Some(period) = &mut self.troubles.lock().period {
            period.reported += 1;
        }
        self.error.duplicate()
    }

    /// The error that has the front give no answer.
    fn leave(&mut self) -> Error {
        if let Some(period) = &mut self.troubles.lock().period {
            period.left += 1;
        }
        left_undone()
    }
}

impl Drop for Patient<'_> {
    /// The request has ended: another one may have to be the probe, or nobody waits any more.
    fn drop(&mut self) {
        self.troubles.waited.fetch_add(1, Relaxed);
        let waited_ns = self.troubles.timer.now_ns().saturating_sub(self.began_ns);
        self.troubles.waited_ns.fetch_add(waited_ns, Relaxed);
        let mut state = self.troubles.lock();
        if self.probe_at_ns.is_some() {
            state.has_probe = false;
        }
        let Some(period) = &mut state.period else { return };
        period.waiting -= 1;
        let mut news = None;
        if period.waiting == 0 {
            let time = self.troubles.since(period.began_ns);
            let (requests, reported, left) = (period.total, period.reported, period.left);
            news = Some(News::Ends { time, requests, reported, left });
            state.period = None;
            state.pause = FIRST_PAUSE;
        }
        let lacks_probe = state.period.is_some() && !state.has_probe;
        drop(state);
        if lacks_probe {
            self.troubles.changed.notify(1);
        }
        news.iter().for_each(|news| (self.troubles.tell)(news));
    }
}

fn in_ns(time: Duration) -> u64 {
    time.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// True when `future` has ended by now.
async fn has_ended(mut future: Pin<&mut impl Future<Output = ()>>) -> bool {
    poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_ready())).await
}

/// Ends when one of the two does.
async fn either(one: impl Future<Output = ()>, other: impl Future<Output = ()>) {
    let (mut one, mut other) = (pin!(one), pin!(other));
    poll_fn(|context| match (one.as_mut().poll(context), other.as_mut().poll(context)) {
        (Poll::Pending, Poll::Pending) => Poll::Pending,
        _ => Poll::Ready(()),
    })
    .await;
}
