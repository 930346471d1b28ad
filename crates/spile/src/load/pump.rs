//! One connection under load, on one thread.
//!
//! A round is: take the time, fill every free slot, send all that waits in one `sendmsg`, then one blocking
//! `recv` for as many replies as there are. Sending never blocks (a server may stop reading until its replies
//! are taken); only when the socket is full does a round wait in `poll` for both directions. Latency runs from
//! just before the send to just after the recv; the depth is integrated apart from it.

use std::collections::VecDeque;
use std::io::{ErrorKind as IoKind, IoSlice, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use smallvec::SmallVec;
use spile_core::{Error, ErrorKind, Result};

use super::model::Model;
use super::plan::{Direction, Plan};
use super::stamp::{self, Expected, Mismatch};
use super::stats::{Counters, Stats};
use crate::nbd_client::{
    Command, FLAG_FUA, REPLY_BYTES, REQUEST_BYTES, Stream, parse_reply, request_header, server_error,
};

/// Mismatches kept for the report; the run stops at the first.
const MISMATCHES_KEPT: usize = 10;
/// Whoever has nothing to do looks this often whether the run is over.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);
/// Slices in one `sendmsg` (the system allows 1024).
const SLICES: usize = 256;

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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Flush,
}

#[derive(Debug)]
struct Slot {
    kind: Kind,
    /// The cookie of the request in flight; 0 = free.
    cookie: u64,
    block: u64,
    version: u32,
    acked_at_issue: u32,
    issued_ns: u64,
    header: [u8; REQUEST_BYTES],
    payload: Vec<u8>,
}

/// Bytes from the socket that were not looked at yet.
#[derive(Debug)]
struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// A read's data that nobody wants: its slot, and the bytes still to come.
    skipping: Option<(usize, usize)>,
}

/// One connection under load.
pub struct Pump<'a> {
    task: Task,
    source: Source,
    model: Option<Model>,
    stream: Stream,
    counters: &'a Counters,
    epoch: Instant,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Blocks with a write in flight, when the load is verified.
    writing: Vec<u64>,
    outgoing: VecDeque<usize>,
    /// Bytes of the first outgoing request that were sent.
    sent: usize,
    inbox: Inbox,
    issued: u64,
    writes_since_flush: u64,
    next_cookie: u64,
    stats: Stats,
    mismatches: Vec<Mismatch>,
}

impl<'a> Pump<'a> {
    /// A connection ready to run; `epoch` is the run's common start.
    pub fn new(
        task: Task,
        source: Source,
        model: Option<Model>,
        stream: Stream,
        counters: &'a Counters,
        epoch: Instant,
    ) -> Self {
        let reply = task.block_bytes as usize + REPLY_BYTES;
        let slots: Vec<Slot> = (0..task.depth).map(|i| Slot::new(&task, &source, i)).collect();
        Self {
            free: (0..slots.len()).rev().collect(),
            writing: Vec::new(),
            outgoing: VecDeque::with_capacity(slots.len()),
            slots,
            sent: 0,
            inbox: Inbox::new((2 * reply).max(256 << 10)),
            issued: 0,
            writes_since_flush: 0,
            next_cookie: 1,
            stats: Stats::new(),
            mismatches: Vec::new(),
            task,
            source,
            model,
            stream,
            counters,
            epoch,
        }
    }

    /// Runs to the end of the task, or to the first error or mismatch.
    pub fn run(mut self) -> Outcome {
        let error = self.rounds().err();
        if error.is_none() {
            // Nothing is in flight: the orderly end. Whether the server hears it changes nothing.
            let _ = self.stream.write_all(&request_header(Command::Disconnect, 0, 0, 0, 0));
        }
        Outcome { stats: self.stats, model: self.model, mismatches: self.mismatches, error }
    }

    fn rounds(&mut self) -> Result<()> {
        loop {
            let now_ns = self.now_ns();
            let wait = self.fill(now_ns);
            self.send()?;
            if self.in_flight() == 0 {
                match wait {
                    Wait::Over => return Ok(()),
                    Wait::Until(due_ns) => self.sleep_until(due_ns),
                    Wait::Reply => return Err(stuck()),
                }
                continue;
            }
            if self.ready_to_receive(wait)? {
                self.receive()?;
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
            self.outgoing.push_back(slot);
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
        entry.kind = kind;
        entry.block = block;
        entry.cookie = self.next_cookie << 32 | slot as u64;
        self.next_cookie = self.next_cookie % u64::from(u32::MAX) + 1;
        if let Some(model) = &mut self.model {
            match kind {
                Kind::Write => {
                    entry.version = model.issue(block);
                    stamp::write(&mut entry.payload, model.run(), offset_bytes, entry.version);
                }
                Kind::Read => entry.acked_at_issue = model.expected(block).acked,
                Kind::Flush => {}
            }
        }
        self.writes_since_flush += u64::from(kind == Kind::Write);
        let fua = if self.task.fua && kind == Kind::Write { FLAG_FUA } else { 0 };
        let (command, len) = match kind {
            Kind::Read => (Command::Read, self.task.block_bytes),
            Kind::Write => (Command::Write, self.task.block_bytes),
            Kind::Flush => (Command::Flush, 0),
        };
        let offset = if kind == Kind::Flush { 0 } else { offset_bytes };
        entry.header = request_header(command, fua, entry.cookie, offset, len);
    }

    /// Sends as much of what is outgoing as the socket takes.
    fn send(&mut self) -> Result<()> {
        while !self.outgoing.is_empty() {
            let slices = self.slices();
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let control = &mut SendAncillaryBuffer::default();
            let result = sendmsg(self.stream.as_fd(), &slices, control, flags);
            drop(slices);
            match result {
                Ok(len) => self.note_sent(len),
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Error::io("the connection was lost while sending", e.into())),
            }
        }
        Ok(())
    }

    fn slices(&self) -> SmallVec<[IoSlice<'_>; SLICES]> {
        let mut slices = SmallVec::new();
        let mut skip = self.sent;
        for slot in &self.outgoing {
            if slices.len() + 2 > SLICES {
                break;
            }
            for part in self.slots[*slot].parts() {
                let cut = skip.min(part.len());
                skip -= cut;
                if cut < part.len() {
                    slices.push(IoSlice::new(&part[cut..]));
                }
            }
        }
        slices
    }

    fn note_sent(&mut self, len: usize) {
        self.sent += len;
        while let Some(slot) = self.outgoing.front() {
            let whole: usize = self.slots[*slot].parts().iter().map(|part| part.len()).sum();
            if self.sent < whole {
                break;
            }
            self.sent -= whole;
            self.outgoing.pop_front();
        }
    }

    /// Waits where a blocking receive would wait for the wrong thing; true when a receive is due.
    fn ready_to_receive(&mut self, wait: Wait) -> Result<bool> {
        let (events, timeout) = match wait {
            _ if !self.outgoing.is_empty() => (PollFlags::IN | PollFlags::OUT, None),
            Wait::Until(due_ns) => (PollFlags::IN, Some(due_ns.saturating_sub(self.now_ns()))),
            Wait::Reply | Wait::Over => return Ok(true),
        };
        let timeout = Duration::from_nanos(timeout.unwrap_or(30_000_000_000));
        let mut fds = [PollFd::new(&self.stream, events)];
        let timeout = Timespec::try_from(timeout).ok();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) if !self.outgoing.is_empty() => Err(stuck()),
            Ok(_) => Ok(fds[0].revents().intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR)),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(e) => Err(Error::io("poll", e.into())),
        }
    }

    /// Sleeps until that time, but not so long that the end of the run is missed.
    fn sleep_until(&self, due_ns: u64) {
        std::thread::sleep(Duration::from_nanos(due_ns.saturating_sub(self.now_ns())).min(LONGEST_SLEEP));
    }

    fn receive(&mut self) -> Result<()> {
        let space = self.inbox.space();
        let len = match self.stream.read(space) {
            Ok(0) => return Err(Error::new(ErrorKind::Io, "the server closed the connection")),
            Ok(len) => len,
            Err(e) if e.kind() == IoKind::Interrupted => return Ok(()),
            Err(e) if e.kind() == IoKind::WouldBlock => return Err(stuck()),
            Err(e) => return Err(Error::io("the connection was lost while receiving", e)),
        };
        self.inbox.end += len;
        let now_ns = self.now_ns();
        let before = self.in_flight();
        let result = self.take_replies(now_ns);
        self.stats.depth_is(now_ns, before, self.in_flight());
        self.counters.publish(&self.stats);
        result
    }

    fn take_replies(&mut self, now_ns: u64) -> Result<()> {
        while self.skip_data(now_ns) && self.next_reply()? {}
        Ok(())
    }

    /// Passes over data that nobody wants; false when more of it is to come.
    fn skip_data(&mut self, now_ns: u64) -> bool {
        let Some((slot, left)) = self.inbox.skipping.take() else { return true };
        let taken = left.min(self.inbox.len());
        self.inbox.start += taken;
        if taken < left {
            self.inbox.skipping = Some((slot, left - taken));
            return false;
        }
        self.complete(slot, now_ns);
        true
    }

    /// Takes one reply from the inbox; false when it is not there yet.
    fn next_reply(&mut self) -> Result<bool> {
        let Some(head) = self.inbox.unread().first_chunk::<REPLY_BYTES>() else {
            return Ok(false);
        };
        let reply = parse_reply(head)?;
        let slot = self.slot_of(reply.cookie)?;
        if reply.errno != 0 {
            return Err(self.refused(slot, reply.errno));
        }
        let reads = self.slots[slot].kind == Kind::Read;
        let data = if reads { self.task.block_bytes as usize } else { 0 };
        if self.model.is_some() && self.inbox.len() < REPLY_BYTES + data {
            return Ok(false);
        }
        if self.model.is_some() {
            self.check(slot, data);
        }
        self.inbox.start += REPLY_BYTES;
        self.inbox.skipping = Some((slot, data));
        Ok(true)
    }

    fn slot_of(&self, cookie: u64) -> Result<usize> {
        let slot = (cookie & 0xffff_ffff) as usize;
        match self.slots.get(slot) {
            Some(entry) if entry.cookie == cookie => Ok(slot),
            _ => Err(Error::new(ErrorKind::Protocol, "the server answered what was not asked")),
        }
    }

    fn refused(&self, slot: usize, errno: u32) -> Error {
        let entry = &self.slots[slot];
        let command = match entry.kind {
            Kind::Read => Command::Read,
            Kind::Write => Command::Write,
            Kind::Flush => Command::Flush,
        };
        server_error(command, entry.block * u64::from(self.task.block_bytes), errno)
    }

    fn check(&mut self, slot: usize, data: usize) {
        let entry = &self.slots[slot];
        let (Kind::Read, Some(model)) = (entry.kind, &self.model) else { return };
        let expected = Expected { acked: entry.acked_at_issue, issued: model.expected(entry.block).issued };
        let bytes = &self.inbox.unread()[REPLY_BYTES..REPLY_BYTES + data];
        let offset_bytes = entry.block * u64::from(self.task.block_bytes);
        let mismatches = &mut self.mismatches;
        stamp::check(bytes, model.run(), offset_bytes, expected, |mismatch| {
            if mismatches.len() < MISMATCHES_KEPT {
                mismatches.push(mismatch);
            }
        });
    }

    fn complete(&mut self, slot: usize, now_ns: u64) {
        let entry = &mut self.slots[slot];
        entry.cookie = 0;
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

fn stuck() -> Error {
    Error::new(ErrorKind::TimedOut, "the server did not answer for 30 seconds")
}

impl Slot {
    fn new(task: &Task, source: &Source, number: u32) -> Self {
        let len = match source {
            Source::Plan(_) => task.block_bytes as usize,
            Source::Readback { .. } => 0,
        };
        let mut payload = vec![0; len];
        // Not zeroes, which a server may treat as a hole.
        stamp::write(&mut payload, u64::from(number), 0, 1);
        Self {
            kind: Kind::Read,
            cookie: 0,
            block: 0,
            version: 0,
            acked_at_issue: 0,
            issued_ns: 0,
            header: [0; REQUEST_BYTES],
            payload,
        }
    }

    fn parts(&self) -> [&[u8]; 2] {
        match self.kind {
            Kind::Write => [&self.header, &self.payload],
            Kind::Read | Kind::Flush => [&self.header, &[]],
        }
    }
}

impl Inbox {
    fn new(capacity: usize) -> Self {
        Self { bytes: vec![0; capacity], start: 0, end: 0, skipping: None }
    }

    fn len(&self) -> usize {
        self.end - self.start
    }

    fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Room to receive into; never empty, since less than one reply is left unread.
    fn space(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.bytes.len() - self.end < self.bytes.len() / 2 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.len());
        }
        &mut self.bytes[self.end..]
    }
}
