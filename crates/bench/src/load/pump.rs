//! One connection under load, whatever the way to the server is.
//!
//! A round is: take the time, fill every free slot, submit all that waits, then wait once and take as many answers as there
//! are. Latency runs from just before the submission to just after the wait; the depth is integrated apart from it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use spile_core::{Error, ErrorKind, Result};

use super::model::Model;
use super::plan::{Direction, Plan};
use super::stamp::{self, Expected, Mismatch};
use super::stats::{Counters, Stats};
use super::transport::{Kind, Transport};

/// Mismatches kept for the report; the run stops at the first.
const MISMATCHES_KEPT: usize = 10;
/// Whoever has nothing to do looks this often whether the run is over.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);
/// A server that answers nothing for so long will not do it any more.
pub const STUCK_AFTER: Duration = Duration::from_secs(30);

/// What one connection is to do.
#[derive(Clone, Debug)]
pub struct Task {
    /// Requests in flight.
    pub depth: u32,
    /// Bytes in a request.
    pub block_bytes: u32,
    /// Writes ask to be durable.
    pub fua: bool,
    /// A flush after this many writes; 0 = none.
    pub flush_every: u64,
    /// Requests a second; `None` = as many as go.
    pub rate: Option<f64>,
    /// Stop after this many requests.
    pub ios: Option<u64>,
    /// Stop after this long.
    pub runtime: Option<Duration>,
    /// Stop when this becomes true.
    pub stop: Arc<AtomicBool>,
}

/// Where the requests come from.
#[derive(Debug)]
pub enum Source {
    /// A mixed load.
    Plan(Plan),
    /// Every block that the model says was written, once.
    Readback {
        /// The block to go on from.
        next: u64,
    },
}

/// What came of it. Complete even when the connection was lost.
#[derive(Debug)]
pub struct Outcome {
    /// Latencies, counts, depth.
    pub stats: Stats,
    /// The versions, when the load was verified.
    pub model: Option<Model>,
    /// The first wrong sectors.
    pub mismatches: Vec<Mismatch>,
    /// Why it stopped early.
    pub error: Option<Error>,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    kind: Kind,
    block: u64,
    version: u32,
    acked_at_issue: u32,
    issued_ns: u64,
}

/// One connection under load.
pub struct Pump<T> {
    task: Task,
    source: Source,
    model: Option<Model>,
    transport: T,
    counters: Arc<Counters>,
    epoch: Instant,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Blocks with a write in flight, when the load is verified.
    writing: Vec<u64>,
    issued: u64,
    writes_since_flush: u64,
    stats: Stats,
    mismatches: Vec<Mismatch>,
}

impl<T: Transport> Pump<T> {
    /// A connection ready to run; `epoch` is the run's common start.
    pub fn new(
        task: Task,
        source: Source,
        model: Option<Model>,
        mut transport: T,
        counters: Arc<Counters>,
        epoch: Instant,
    ) -> Self {
        let depth = task.depth as usize;
        if let Source::Plan(_) = source {
            // Not zeroes, which a server may treat as a hole.
            (0..depth).for_each(|slot| transport.fill(slot, |block| stamp::write(block, slot as u64, 0, 1)));
        }
        let idle = Slot { kind: Kind::Flush, block: 0, version: 0, acked_at_issue: 0, issued_ns: 0 };
        Self {
            free: (0..depth).rev().collect(),
            writing: Vec::new(),
            slots: vec![idle; depth],
            issued: 0,
            writes_since_flush: 0,
            stats: Stats::new(),
            mismatches: Vec::new(),
            task,
            source,
            model,
            transport,
            counters,
            epoch,
        }
    }

    /// Runs to the end of the task, or to the first error or mismatch.
    pub async fn run(mut self) -> Outcome {
        let error = self.rounds().await.err();
        Outcome { stats: self.stats, model: self.model, mismatches: self.mismatches, error }
    }

    async fn rounds(&mut self) -> Result<()> {
        loop {
            let now_ns = self.now_ns();
            let wait = self.fill(now_ns);
            self.transport.submit();
            if self.in_flight() == 0 {
                match wait {
                    Wait::Over => return Ok(()),
                    Wait::Until(due_ns) => self.sleep_until(due_ns).await,
                    Wait::Reply => return Err(stuck()),
                }
                continue;
            }
            let timeout = match wait {
                Wait::Until(due_ns) => Some(Duration::from_nanos(due_ns.saturating_sub(self.now_ns()))),
                Wait::Reply | Wait::Over => None,
            };
            if self.transport.wait(timeout).await? {
                self.take_all()?;
            }
        }
    }

    fn now_ns(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Issues as much as may be issued now, and says what the next thing to wait for is.
    fn fill(&mut self, now_ns: u64) -> Wait {
        let before = self.in_flight();
        let mut wait = Wait::Reply;
        while let Some(&slot) = self.free.last() {
            if self.is_over(now_ns) {
                wait = Wait::Over;
                break;
            }
            if let Some(due_ns) = self.due_ns().filter(|due_ns| *due_ns > now_ns) {
                wait = Wait::Until(due_ns);
                break;
            }
            match self.next_request(slot) {
                Next::Issued => {}
                Next::Blocked => break,
                Next::End => {
                    wait = Wait::Over;
                    break;
                }
            }
            self.free.pop();
            self.issued += 1;
            self.slots[slot].issued_ns = now_ns;
        }
        self.stats.depth_is(now_ns, before, self.in_flight());
        wait
    }

    fn is_over(&self, now_ns: u64) -> bool {
        self.task.ios.is_some_and(|ios| self.issued >= ios)
            || self.task.runtime.is_some_and(|runtime| u128::from(now_ns) >= runtime.as_nanos())
            || !self.mismatches.is_empty()
            || self.task.stop.load(Ordering::Relaxed)
    }

    fn due_ns(&self) -> Option<u64> {
        self.task.rate.map(|rate| (self.issued as f64 / rate * 1e9) as u64)
    }

    fn next_request(&mut self, slot: usize) -> Next {
        if self.task.flush_every > 0 && self.writes_since_flush >= self.task.flush_every {
            self.writes_since_flush = 0;
            self.issue(slot, Kind::Flush, 0);
            return Next::Issued;
        }
        let (direction, block) = match &mut self.source {
            Source::Plan(plan) => (plan.direction(), plan.block()),
            Source::Readback { next } => {
                let Some(block) = self.model.as_ref().and_then(|m| m.next_written(*next)) else {
                    return Next::End;
                };
                *next = block + 1;
                (Direction::Read, block)
            }
        };
        match direction {
            Direction::Read => self.issue(slot, Kind::Read, block),
            Direction::Write => match self.block_to_write(block) {
                Some(block) => self.issue(slot, Kind::Write, block),
                None => return Next::Blocked,
            },
        }
        Next::Issued
    }

    /// A verified load writes a block only when no other write of it is in flight: the order of two would be unknown.
    fn block_to_write(&mut self, block: u64) -> Option<u64> {
        let Some(model) = &self.model else { return Some(block) };
        let region = model.blocks();
        let len = region.end - region.start;
        let tries = len.min(self.writing.len() as u64 + 1);
        let block = (0..tries)
            .map(|step| region.start + (block - region.start + step) % len)
            .find(|block| !self.writing.contains(block))?;
        self.writing.push(block);
        Some(block)
    }

    fn issue(&mut self, slot: usize, kind: Kind, block: u64) {
        let offset_bytes = block * u64::from(self.task.block_bytes);
        let entry = &mut self.slots[slot];
        (entry.kind, entry.block) = (kind, block);
        if let Some(model) = &mut self.model {
            match kind {
                Kind::Write => {
                    let (run, version) = (model.run(), model.issue(block));
                    entry.version = version;
                    self.transport.fill(slot, |payload| stamp::write(payload, run, offset_bytes, version));
                }
                Kind::Read => entry.acked_at_issue = model.expected(block).acked,
                Kind::Flush => {}
            }
        }
        self.writes_since_flush += u64::from(kind == Kind::Write);
        let fua = self.task.fua && kind == Kind::Write;
        self.transport.issue(slot, kind, offset_bytes, fua);
    }

    /// Sleeps until that time, but not so long that the end of the run is missed.
    async fn sleep_until(&mut self, due_ns: u64) {
        let left = Duration::from_nanos(due_ns.saturating_sub(self.now_ns()));
        self.transport.pause(left.min(LONGEST_SLEEP)).await;
    }

    fn take_all(&mut self) -> Result<()> {
        let now_ns = self.now_ns();
        let before = self.in_flight();
        let result = self.take_each(now_ns);
        self.stats.depth_is(now_ns, before, self.in_flight());
        self.counters.publish(&self.stats);
        result
    }

    fn take_each(&mut self, now_ns: u64) -> Result<()> {
        while let Some(slot) = self.transport.take()? {
            self.check(slot);
            self.complete(slot, now_ns);
        }
        Ok(())
    }

    fn check(&mut self, slot: usize) {
        let entry = &self.slots[slot];
        let (Kind::Read, Some(model)) = (entry.kind, &self.model) else { return };
        let expected = Expected { acked: entry.acked_at_issue, issued: model.expected(entry.block).issued };
        let bytes = self.transport.data(slot);
        let offset_bytes = entry.block * u64::from(self.task.block_bytes);
        let mismatches = &mut self.mismatches;
        stamp::check(bytes, model.run(), offset_bytes, expected, |mismatch| {
            if mismatches.len() < MISMATCHES_KEPT {
                mismatches.push(mismatch);
            }
        });
    }

    fn complete(&mut self, slot: usize, now_ns: u64) {
        let entry = &self.slots[slot];
        self.free.push(slot);
        let latency_ns = now_ns - entry.issued_ns;
        match entry.kind {
            Kind::Read => self.stats.read.record(latency_ns, self.task.block_bytes),
            Kind::Flush => self.stats.flush.record(latency_ns, 0),
            Kind::Write => {
                self.stats.write.record(latency_ns, self.task.block_bytes);
                if let Some(model) = &mut self.model {
                    model.acknowledge(entry.block, entry.version);
                    self.writing.retain(|block| *block != entry.block);
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Wait {
    /// For a reply.
    Reply,
    /// For this time, or a reply.
    Until(u64),
    /// For what is in flight; nothing more will be issued.
    Over,
}

enum Next {
    Issued,
    Blocked,
    End,
}

/// The error for a server that answers nothing.
pub fn stuck() -> Error {
    let message = format!("the server did not answer for {} seconds", STUCK_AFTER.as_secs());
    Error::new(ErrorKind::TimedOut, message)
}
