//! [`Span`]: the moments of one request in flight, from the ring to the guest.
//!
//! A front takes a span for each request ([`Spans::begin`]), and says which span the code that runs now works for
//! ([`with`]). Every layer below stamps that span ([`stamp`]) without knowing whose it is. When the answers are shown, the front
//! ends the spans ([`Spans::end`]): the slowest requests are kept ([`SpanLog::slowest`]), and all of them while a trace runs
//! ([`SpanLog::trace`]).
//!
//! What is measured are phases: the time from one moment to the next. By default a phase is only noted, by one store, and time
//! passes between polls: what a request has waited since its last poll is charged to the phase in which it was then
//! ([`turn_ns`]). So a request that never waits costs no look at the clock, and what a worker computes within one turn shows up at
//! the end, in the phase `answer`. While a trace runs, each moment is read from the processor's time stamp counter.
//!
//! Each moment is also a static probe of the provider `spile` (USDT), of the same name: a `nop` until somebody attaches.
//!
//! Spans are made once and used again. So a request allocates nothing here, and anybody may look at what is in flight.

mod log;
mod slowest;
mod spans;

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, Ordering::Relaxed, fence};

use probe::probe;
use quanta::Clock;

pub use log::{SpanLog, SpanTrace};
pub use spans::{Sink, Spans, Taken};

use super::{Op, now_ns, turn_ns};

/// A moment of a request, in the order in which they come. A request that waits for a limit or for trouble to pass goes on from there as if the
/// disk had just begun ([`go_on_from`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Moment {
    /// The front has taken the request from the ring or the socket.
    Taken,
    /// The request has its memory, and its data if it writes: they were copied in, or are mapped.
    Loaded,
    /// The request begins to wait for a limit, or for the end of a pause.
    HeldBack,
    /// The disk begins.
    DiskBegan,
    /// An operation on a store for the request's data is submitted: it is known where the bytes lie.
    Submitted,
    /// The last operation that was in flight has completed.
    Completed,
    /// The request has failed, and begins to wait for the trouble below the disk to pass.
    Troubled,
    /// The disk is done.
    DiskEnded,
    /// The data are where the guest wants them: copied out, unmapped, or put together with others for the socket.
    Stored,
    /// The answer is shown to the guest, or sent.
    Shown,
    /// The guest was notified, if it wanted that.
    Notified,
}

impl Moment {
    /// The number of moments.
    pub const COUNT: usize = Self::ALL.len();

    /// All moments, in their order.
    pub const ALL: [Self; 11] = [
        Self::Taken,
        Self::Loaded,
        Self::HeldBack,
        Self::DiskBegan,
        Self::Submitted,
        Self::Completed,
        Self::Troubled,
        Self::DiskEnded,
        Self::Stored,
        Self::Shown,
        Self::Notified,
    ];

    /// Its name: that of the static probe.
    pub fn name(self) -> &'static str {
        match self {
            Self::Taken => "taken",
            Self::Loaded => "loaded",
            Self::HeldBack => "held_back",
            Self::DiskBegan => "disk_began",
            Self::Submitted => "submitted",
            Self::Completed => "completed",
            Self::Troubled => "troubled",
            Self::DiskEnded => "disk_ended",
            Self::Stored => "stored",
            Self::Shown => "shown",
            Self::Notified => "notified",
        }
    }
}

/// The time from one moment on, until another one comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    /// Its name.
    pub name: &'static str,
    /// What happens in it.
    pub about: &'static str,
}

/// The phases of a request, in order. The last one comes after the guest can see the answer; the others add up to the latency.
pub const PHASES: [Phase; Moment::COUNT - 1] = [
    Phase { name: "load", about: "data copied in, or pages mapped" },
    Phase { name: "queue", about: "waits for a slot of the front" },
    Phase { name: "limit", about: "waits for a limit of the disk, its group or its job, or for the end of a pause" },
    Phase { name: "map", about: "finds where the bytes lie; waits for locks and for pieces of maps" },
    Phase { name: "store", about: "operations on stores for its data are in flight" },
    Phase { name: "commit", about: "between and after these: makes what was written the guest's" },
    Phase { name: "trouble", about: "has failed, and waits for space, or for other trouble below the disk to pass" },
    Phase { name: "unload", about: "data copied out or unmapped, or put together for the socket" },
    Phase { name: "answer", about: "until the guest can see the answer" },
    Phase { name: "notify", about: "after the answer, until the guest is notified" },
];

/// What a request is, as its front took it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct What {
    /// What it does.
    pub op: Op,
    /// Where it begins on the disk, in bytes.
    pub offset_bytes: u64,
    /// How many bytes it is for.
    pub len_bytes: u64,
}

/// The last phase that is part of the latency.
const ANSWER: usize = Moment::Stored as usize;

/// One request in flight. It is written by the thread of its front's queue alone; anybody may read it.
#[derive(Debug, Default)]
pub struct Span {
    /// When the request was taken. 0 as long as the span has none.
    taken: AtomicU64,
    /// Up to when time is charged to phases.
    charged: AtomicU64,
    /// The time of each phase, in the order of [`PHASES`].
    phases: [AtomicU64; PHASES.len()],
    /// Any of `phases` may be above 0.
    has_waited: AtomicBool,
    /// All times are counts of the time stamp counter, not nanoseconds.
    is_exact: AtomicBool,
    failed: AtomicBool,
    /// The phase in which it is, as an index of [`PHASES`].
    phase: AtomicU8,
    /// As of [`OPERATIONS`].
    operations: AtomicU64,
    op: AtomicU8,
    offset_bytes: AtomicU64,
    len_bytes: AtomicU64,
}

/// What a span says of its request, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// What the request is.
    pub what: What,
    /// It failed.
    pub failed: bool,
    /// Operations on stores that were submitted for its data.
    pub store_operations: u64,
    /// When the request was taken, in nanoseconds of CLOCK_MONOTONIC.
    pub taken_ns: u64,
    /// The time of each phase, in the order of [`PHASES`].
    pub phases_ns: [u64; PHASES.len()],
    /// The phase in which it is, as an index of [`PHASES`]; the last one for a request that has ended.
    pub phase: usize,
}

impl Record {
    /// From the moment when it was taken to the one when its answer was shown, in nanoseconds: all phases but the last one.
    pub fn latency_ns(&self) -> u64 {
        self.phases_ns[..=ANSWER].iter().sum()
    }
}

/// The time stamp counter together with the clock, at one moment: so counts become times.
#[derive(Clone, Copy, Debug)]
struct Anchor {
    count: u64,
    at_ns: u64,
}

static COUNTER: OnceLock<Clock> = OnceLock::new();

/// Finds out how fast the time stamp counter counts, the first time: for up to a fifth of a second. Where there is none, or none to
/// be trusted, the clock takes its place. Whoever has a trace made calls this before, so that no worker waits for it.
pub fn calibrate() {
    COUNTER.get_or_init(Clock::new);
}

/// The time stamp counter now; 0 before it was calibrated.
#[inline]
fn count_now() -> u64 {
    COUNTER.get().map_or(0, Clock::raw)
}

impl Anchor {
    /// For requests whose moments are times already.
    const NONE: Self = Self { count: 0, at_ns: 0 };

    fn now() -> Self {
        Self { count: count_now(), at_ns: now_ns() }
    }

    /// The time at which the counter showed `count`.
    fn time_of(self, count: u64) -> u64 {
        let Some(clock) = COUNTER.get() else { return self.at_ns };
        match count <= self.count {
            true => self.at_ns.saturating_sub(clock.delta_as_nanos(count, self.count)),
            false => self.at_ns + clock.delta_as_nanos(self.count, count),
        }
    }
}

/// The time stamp counter's `count` as nanoseconds.
fn ns_of(count: u64) -> u64 {
    COUNTER.get().map_or(0, |clock| clock.delta_as_nanos(0, count))
}

impl Span {
    /// What the probes call this request: as long as it is in flight, no other one has this number.
    #[inline]
    fn id(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// The span is that of another request from now on.
    #[inline]
    fn begin(&self, what: What, taken: Taken) {
        if self.has_waited.load(Relaxed) {
            self.has_waited.store(false, Relaxed);
            self.phases.iter().for_each(|phase| phase.store(0, Relaxed));
        }
        self.is_exact.store(taken.is_exact, Relaxed);
        self.phase.store(Moment::Taken as u8, Relaxed);
        self.operations.store(0, Relaxed);
        self.op.store(what.op as u8, Relaxed);
        self.offset_bytes.store(what.offset_bytes, Relaxed);
        self.len_bytes.store(what.len_bytes, Relaxed);
        self.charged.store(taken.time, Relaxed);
        self.taken.store(taken.time, Ordering::Release);
        probe!(spile, taken, self.id(), what.op as u8, what.offset_bytes, what.len_bytes);
    }

    /// The span has no request any more.
    #[inline]
    fn rest(&self) {
        self.taken.store(0, Relaxed);
        fence(Ordering::Release);
    }

    /// Charges the time up to `now` to the phase in which the request is.
    #[inline]
    fn charge(&self, now: u64) {
        let charged = self.charged.load(Relaxed);
        if now > charged {
            let phase = &self.phases[usize::from(self.phase.load(Relaxed)).min(PHASES.len() - 1)];
            phase.store(phase.load(Relaxed) + (now - charged), Relaxed);
            self.charged.store(now, Relaxed);
            self.has_waited.store(true, Relaxed);
        }
    }

    /// The request has reached `moment`, while its front works for it outside of [`with`]. It may have waited.
    #[inline]
    pub fn reach(&self, moment: Moment) {
        if moment == Moment::Loaded {
            probe!(spile, loaded, self.id());
        }
        self.charge(if self.is_exact.load(Relaxed) { count_now() } else { turn_ns() });
        self.phase.store(moment as u8, Relaxed);
    }

    /// What there is to know of the request, if the span has one.
    fn look(&self) -> Option<Record> {
        let before = self.taken.load(Ordering::Acquire);
        let raw = self.raw();
        fence(Ordering::Acquire);
        // Another request that has the span since then shows another time, or has begun in the same turn and is as old.
        let is_whole = before > 0 && self.taken.load(Relaxed) == before;
        is_whole.then(|| raw.record(Anchor::now()))
    }

    fn raw(&self) -> Raw {
        let op = Op::ALL[usize::from(self.op.load(Relaxed)) % Op::COUNT];
        let what = What { op, offset_bytes: self.offset_bytes.load(Relaxed), len_bytes: self.len_bytes.load(Relaxed) };
        Raw {
            what,
            failed: self.failed.load(Relaxed),
            is_exact: self.is_exact.load(Relaxed),
            store_operations: self.operations.load(Relaxed) >> 32,
            taken: self.taken.load(Relaxed),
            phases: std::array::from_fn(|phase| self.phases[phase].load(Relaxed)),
            phase: self.phase.load(Relaxed),
        }
    }
}

/// A copy of what a span holds. Its times may be counts of the time stamp counter.
#[derive(Clone, Copy, Debug)]
struct Raw {
    what: What,
    failed: bool,
    is_exact: bool,
    store_operations: u64,
    taken: u64,
    phases: [u64; PHASES.len()],
    phase: u8,
}

impl Raw {
    /// The request in nanoseconds.
    fn record(self, anchor: Anchor) -> Record {
        let Self { what, failed, is_exact, store_operations, taken, phases, phase } = self;
        let (taken_ns, phases_ns) = match is_exact {
            true => (anchor.time_of(taken), phases.map(ns_of)),
            false => (taken, phases),
        };
        Record { what, failed, store_operations, taken_ns, phases_ns, phase: phase.into() }
    }
}

/// One operation on a store in flight, and one that was submitted.
const ONE_OPERATION: u64 = 1 << 32 | 1;

// For which request this thread works now. What changes often lies here and not in the span, so that to note a moment takes an instruction
// or two. Each is a variable of its own, because the compiler finds those at once.
thread_local! {
    static SPAN: Cell<Option<&'static Span>> = const { Cell::new(None) };
    static IS_EXACT: Cell<bool> = const { Cell::new(false) };
    /// As of [`Span::phase`].
    static PHASE: Cell<u8> = const { Cell::new(0) };
    /// Operations on stores for the request's data: those in flight, and 2^32 times all that were submitted.
    static OPERATIONS: Cell<u64> = const { Cell::new(0) };
}

/// What the probes call the request.
#[inline(always)]
fn current_id() -> usize {
    SPAN.get().map_or(0, Span::id)
}

/// The request is in another phase from now on.
#[inline(always)]
fn enter(moment: Moment) {
    if IS_EXACT.get() {
        charge_exactly();
    }
    PHASE.set(moment as u8);
}

#[cold]
#[inline(never)]
fn charge_exactly() {
    if let Some(span) = SPAN.get() {
        span.phase.store(PHASE.get(), Relaxed);
        span.charge(count_now());
    }
}

/// The request for which this thread works now has reached `moment`. While several operations on stores are in flight, it is in
/// the phase `store`, whichever of them has completed. Where this thread works for no request, nothing comes of it, and the probes
/// get 0 for the request.
#[inline(always)]
pub fn stamp(moment: Moment) {
    match moment {
        Moment::Loaded => probe!(spile, loaded, current_id()),
        Moment::HeldBack => probe!(spile, held_back, current_id()),
        Moment::DiskBegan => probe!(spile, disk_began, current_id()),
        Moment::Submitted => {
            probe!(spile, submitted, current_id());
            OPERATIONS.set(OPERATIONS.get().wrapping_add(ONE_OPERATION));
        }
        Moment::Completed => {
            probe!(spile, completed, current_id());
            let left = OPERATIONS.get().wrapping_sub(1);
            OPERATIONS.set(left);
            if left as u32 > 0 {
                return;
            }
        }
        Moment::Troubled => probe!(spile, troubled, current_id()),
        Moment::DiskEnded => probe!(spile, disk_ended, current_id()),
        // The front says these to the span itself.
        Moment::Taken | Moment::Stored | Moment::Shown | Moment::Notified => return,
    }
    enter(moment);
}

/// The request for which this thread works now has waited for long enough: from now on its time is that of `moment` again.
#[inline(always)]
pub fn go_on_from(moment: Moment) {
    enter(moment);
}

/// What `work` does is done for the request of `span`. Since the last time, the request has waited.
#[inline(always)]
pub fn with<T>(span: Option<&'static Span>, work: impl FnOnce() -> T) -> T {
    if let Some(span) = span {
        go_on(span);
    }
    let result = work();
    stop();
    result
}

#[inline]
fn go_on(span: &'static Span) {
    if !span.is_exact.load(Relaxed) {
        span.charge(turn_ns());
    }
    start(span);
}

/// From here to the end of [`with`], what is done is done for the request of `span`, which has not waited.
#[inline(always)]
pub fn start(span: &'static Span) {
    SPAN.set(Some(span));
    PHASE.set(span.phase.load(Relaxed));
    OPERATIONS.set(span.operations.load(Relaxed));
    IS_EXACT.set(span.is_exact.load(Relaxed));
}

#[inline(always)]
fn stop() {
    if let Some(span) = SPAN.take() {
        span.phase.store(PHASE.get(), Relaxed);
        span.operations.store(OPERATIONS.get(), Relaxed);
        IS_EXACT.set(false);
    }
}

/// Ends what [`start`] began, if it is for `span`.
fn leave_work_for(span: &Span) {
    if SPAN.get().is_some_and(|current| std::ptr::eq(current, span)) {
        stop();
    }
}
