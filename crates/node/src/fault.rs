//! [`Faults`]: a stage that fails or delays requests, or panics, for tests and trials. A seed decides, so a run can be repeated.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use spile_core::metrics::Op;
use spile_core::{Error, ErrorKind, Extent, Io, Result, Timer};

use crate::stage::{Pending, Stage};

/// One rule: which requests it strikes, how often, and what happens to them.
#[derive(Clone, Debug)]
pub struct Fault {
    /// The operations it strikes; empty: all.
    pub ops: Vec<Op>,
    /// It strikes requests that touch this extent; `None`: any request. A flush touches no extent.
    pub extent: Option<Extent>,
    /// So many of a million such requests are struck.
    pub per_million: u32,
    /// What happens to them.
    pub effect: Effect,
}

/// What a fault does to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The request fails and does not reach the graph.
    Fail(ErrorKind),
    /// The request goes on so much later. Several delays add up.
    Delay(Duration),
    /// The thread panics before the request reaches the graph.
    Panic,
    /// The thread panics when the graph has done the request, before anybody is told.
    PanicAfter,
}

/// The stage. Whether a rule strikes depends on the seed, the rule, and how many requests came before.
pub struct Faults {
    rules: Vec<Fault>,
    seed: u64,
    timer: Arc<dyn Timer>,
    /// Requests that have come, and those that the graph has done.
    begun: AtomicU64,
    done: AtomicU64,
}

/// What all rules together have for one request.
#[derive(Default)]
struct Struck {
    delay: Duration,
    failure: Option<ErrorKind>,
    panics: bool,
}

const ASKED_FOR: &str = "a fault that was asked for";

impl Faults {
    /// A stage with these rules; `timer` makes the delays.
    pub fn new(rules: Vec<Fault>, seed: u64, timer: Arc<dyn Timer>) -> Self {
        Self { rules, seed, timer, begun: AtomicU64::new(0), done: AtomicU64::new(0) }
    }

    /// The effects of the rules that strike the request of this number.
    fn strikes(&self, number: u64, io: Io<'_>) -> impl Iterator<Item = Effect> {
        let rules = self.rules.iter().enumerate().filter(move |(rule, fault)| {
            let draw = mix(self.seed ^ mix(number ^ mix(*rule as u64))) % 1_000_000;
            draw < u64::from(fault.per_million) && fault.concerns(&io)
        });
        rules.map(|(_, fault)| fault.effect)
    }

    /// What the rules have for a request before it reaches the graph.
    fn struck(&self, io: Io<'_>) -> Struck {
        let mut struck = Struck::default();
        for effect in self.strikes(self.begun.fetch_add(1, Ordering::Relaxed), io) {
            match effect {
                Effect::Fail(kind) => struck.failure = struck.failure.or(Some(kind)),
                Effect::Delay(more) => struck.delay = struck.delay.saturating_add(more),
                Effect::Panic => struck.panics = true,
                Effect::PanicAfter => {}
            }
        }
        struck
    }
}

impl Fault {
    fn concerns(&self, io: &Io<'_>) -> bool {
        let op: Op = io.op.into();
        (self.ops.is_empty() || self.ops.contains(&op)) && self.extent.is_none_or(|extent| extent.overlaps(&io.extent))
    }
}

impl Stage for Faults {
    fn before<'a>(&'a self, io: Io<'a>) -> Option<Pending<'a>> {
        let Struck { delay, failure, panics } = self.struck(io);
        if delay.is_zero() && failure.is_none() && !panics {
            return None;
        }
        Some(Box::pin(async move {
            if !delay.is_zero() {
                self.timer.sleep(delay).await;
            }
            assert!(!panics, "{ASKED_FOR}");
            match failure {
                Some(kind) => Err(Error::new(kind, ASKED_FOR).at_offset(io.extent.start())),
                None => Ok(()),
            }
        }))
    }

    fn after<'a>(&'a self, io: Io<'a>, _: &Result<()>) -> Option<Pending<'a>> {
        let number = self.done.fetch_add(1, Ordering::Relaxed);
        let panics = self.strikes(number, io).any(|effect| effect == Effect::PanicAfter);
        assert!(!panics, "{ASKED_FOR}");
        None
    }
}

/// Spreads the bits of `seed` (the finisher of splitmix64).
fn mix(seed: u64) -> u64 {
    let mut mixed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}
