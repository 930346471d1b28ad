//! A guest of a measurement: a process with a blkfront for each of its disks, which does what it is told.
//!
//! Orders come as lines of JSON on stdin; each is answered by a line on stdout. All its orders are obeyed at once by all
//! guests: an order that is to begin together says when, by a clock that all processes share.

use std::io::{BufRead, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use spile_core::metrics::now_ns as now;
use spile_core::{Error, ErrorKind, Result};
use spile_lab::GuestQueue;
use spile_lab::xen::blkfront::{BlkfrontOptions, Op, Queue};
use spile_lab::xen::{Blkfront, Guest};
use spile_xen::DomId;

use super::Direction;
use super::transfer::Moved;

/// The hidden subcommand that is a guest.
pub const COMMAND: &str = "bench-guest";

/// How long a request may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A disk of a guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DiskSetup {
    /// Its number.
    pub device: u32,
    /// Segments of an indirect request; 0: only requests of 11 segments.
    pub indirect_segments: u32,
    /// The front end asks for persistent grants.
    pub is_persistent: bool,
    /// The front end asks for a ring of its own for responses.
    pub is_split: bool,
    /// Requests that the rings hold.
    pub ring_slots: u32,
    /// The longest request of a program in the guest.
    pub max_request_bytes: u64,
}

impl DiskSetup {
    /// Bytes of the largest request that goes into the ring.
    pub fn part_bytes(&self) -> u64 {
        u64::from(self.indirect_segments.max(11)) * 4096
    }

    /// Parts of the longest request, as far as the rings hold them; two at least, whose pages lie between each other.
    fn slots(&self) -> u64 {
        self.max_request_bytes.div_ceil(self.part_bytes()).clamp(2, self.ring_slots.into())
    }

    /// The memory that its pages need, with persistent grants those of the programs too.
    pub fn memory_bytes(&self) -> u64 {
        let part = self.part_bytes().min(self.max_request_bytes.next_multiple_of(4096));
        let copies = if self.is_persistent { 2 } else { 1 };
        // The ring and the pages of segments: a few, generously.
        self.slots() * (part * copies + 4096) + (64 << 10)
    }

    fn options(&self) -> BlkfrontOptions {
        BlkfrontOptions {
            depth: self.slots() as usize,
            data_bytes: self.part_bytes().min(self.max_request_bytes.next_multiple_of(4096)) as u32,
            indirect_segments: self.indirect_segments,
            persistent: self.is_persistent,
            split_response_order: self.is_split.then_some(0),
            // Xen maps and copies page by page, wherever they lie. Here neighbours could be mapped as one.
            scatter: true,
            ..BlkfrontOptions::default()
        }
    }
}

/// What is wanted of a guest. Requests go one after the other, from the disk's start to `span_bytes` and round again.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Becomes a domain.
    Create {
        /// The host's folder.
        lab: PathBuf,
        /// Its number.
        domain: u16,
        /// Its memory.
        memory_bytes: u64,
    },
    /// Connects to its disks, which are numbered from 0 then in this order.
    Connect(Vec<DiskSetup>),
    /// So many requests on one disk, each with its times.
    Each {
        /// The disk.
        disk: usize,
        /// Which way.
        direction: Direction,
        /// Bytes of a request.
        request_bytes: u64,
        /// How many.
        requests: u32,
        /// The part of the disk that is used.
        span_bytes: u64,
    },
    /// Requests on one disk until all bytes are moved or the time is over, one at least.
    Once {
        /// The disk.
        disk: usize,
        /// Which way.
        direction: Direction,
        /// Bytes of a request.
        request_bytes: u64,
        /// The first address.
        start_bytes: u64,
        /// All bytes that are to be moved; each place is used once.
        total_bytes: u64,
        /// No request begins after this time.
        limit: Duration,
    },
    /// Requests on all these disks at once, as many as go.
    Stream {
        /// The disks.
        disks: Vec<usize>,
        /// Which way.
        direction: Direction,
        /// Bytes of a request.
        request_bytes: u64,
        /// The part of each disk that is used.
        span_bytes: u64,
        /// When to begin and to end, in ns of CLOCK_MONOTONIC.
        from_until_ns: (u64, u64),
    },
}

/// The times of a request as the guest sees them, in ns of CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times {
    /// Before anything of it was done.
    pub started: u64,
    /// All its parts that the ring holds are in it, and the back end was told.
    pub kicked: u64,
    /// The guest is awake to take the last answer.
    pub woken: u64,
    /// Grants are ended, and with persistent grants data are copied.
    pub done: u64,
}

/// What a guest answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// It is done.
    Done,
    /// To [`Order::Each`].
    Times(Vec<Times>),
    /// To [`Order::Once`].
    Moved(Moved),
    /// To [`Order::Stream`]: bytes in a second, of all disks together.
    BytesPerSecond(f64),
    /// It is not.
    Failed(String),
}

/// Obeys until stdin ends.
///
/// # Errors
/// When stdin or stdout are gone. What fails in an order is answered.
pub fn run() -> Result<()> {
    let lost = |e| Error::io("cannot hear or answer", e);
    let mut at_work = AtWork::default();
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(lost)?;
        let order = serde_json::from_str(&line);
        let order = order.map_err(|e| Error::new(ErrorKind::InvalidInput, "no order for a guest").caused_by(e));
        let answer = order.and_then(|order| at_work.obey(order));
        let answer = answer.unwrap_or_else(|error| Answer::Failed(error.to_string()));
        let text = serde_json::to_string(&answer).expect("plain fields");
        let mut out = std::io::stdout().lock();
        writeln!(out, "{text}").and_then(|()| out.flush()).map_err(lost)?;
    }
    Ok(())
}

#[derive(Default)]
struct AtWork {
    guest: Option<Arc<Guest>>,
    disks: Vec<Disk>,
}

impl AtWork {
    fn obey(&mut self, order: Order) -> Result<Answer> {
        match order {
            Order::Create { lab, domain, memory_bytes } => self.create(&lab, domain, memory_bytes),
            Order::Connect(setups) => self.connect(&setups),
            Order::Each { disk, direction, request_bytes, requests, span_bytes } => {
                let disk = self.disks.get_mut(disk).ok_or_else(|| no_disk(disk))?;
                disk.at = 0;
                let times = (0..requests).map(|_| disk.next(direction, request_bytes, span_bytes));
                Ok(Answer::Times(times.collect::<Result<_>>()?))
            }
            Order::Once { disk, direction, request_bytes, start_bytes, total_bytes, limit } => {
                let disk = self.disks.get_mut(disk).ok_or_else(|| no_disk(disk))?;
                disk.once(direction, request_bytes, start_bytes..start_bytes + total_bytes, limit).map(Answer::Moved)
            }
            Order::Stream { disks, direction, request_bytes, span_bytes, from_until_ns } => {
                let stream = |disk: &mut Disk| disk.stream(direction, request_bytes, span_bytes, from_until_ns);
                self.on_all(&disks, &stream)
            }
        }
    }

    fn create(&mut self, lab: &Path, domain: u16, memory_bytes: u64) -> Result<Answer> {
        self.guest = Some(Arc::new(Guest::create(lab, DomId(domain), memory_bytes as usize)?));
        Ok(Answer::Done)
    }

    fn connect(&mut self, setups: &[DiskSetup]) -> Result<Answer> {
        let guest = self.guest.as_ref().ok_or_else(|| Error::new(ErrorKind::InvalidInput, "there is no guest yet"))?;
        for setup in setups {
            let mut front = Blkfront::new(guest.clone(), setup.device, setup.options())?;
            let queue = front.start()?.remove(0);
            let part_bytes = u64::from(front.max_request_bytes());
            for slot in 0..queue.slots() {
                // Not zeroes, which a disk may treat as a hole.
                queue.data(slot).fill(0x5a);
            }
            let free = (0..queue.slots()).rev().collect();
            self.disks.push(Disk { queue, _front: front, free, part_bytes, at: 0 });
        }
        Ok(Answer::Done)
    }

    /// One thread for each disk, as a program has that copies from or to one.
    fn on_all(&mut self, numbers: &[usize], work: &(dyn Fn(&mut Disk) -> Result<f64> + Sync)) -> Result<Answer> {
        let is_wanted = |number: &usize| numbers.contains(number);
        let disks = self.disks.iter_mut().enumerate().filter(|(number, _)| is_wanted(number)).map(|(_, disk)| disk);
        let rates: Vec<Result<f64>> = std::thread::scope(|scope| {
            let threads: Vec<_> = disks.map(|disk| scope.spawn(move || work(disk))).collect();
            threads.into_iter().map(|thread| thread.join().expect("a guest's thread panicked")).collect()
        });
        Ok(Answer::BytesPerSecond(rates.into_iter().sum::<Result<f64>>()?))
    }
}

fn no_disk(number: usize) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("the guest has no disk {number}"))
}

/// A connected disk.
struct Disk {
    queue: Queue,
    /// Its connection to xenstore.
    _front: Blkfront,
    /// Slots without a request.
    free: Vec<usize>,
    /// Bytes of the largest request that goes into the ring.
    part_bytes: u64,
    /// Where the next request goes.
    at: u64,
}

impl Disk {
    fn next(&mut self, direction: Direction, request_bytes: u64, span_bytes: u64) -> Result<Times> {
        if self.at + request_bytes > span_bytes {
            self.at = 0;
        }
        let offset = self.at;
        self.at += request_bytes;
        self.request(direction.op(), offset, request_bytes)
    }

    /// One request of a program: split into what the ring takes, and issued together as far as there are slots.
    fn request(&mut self, op: Op, offset_bytes: u64, len_bytes: u64) -> Result<Times> {
        let mut times = Times { started: now(), ..Times::default() };
        let (mut at, end) = (offset_bytes, offset_bytes + len_bytes);
        while at < end || self.queue.outstanding() > 0 {
            if at < end && !self.free.is_empty() {
                at = self.issue(op, at, end);
                if times.kicked == 0 {
                    times.kicked = now();
                }
            }
            if !self.queue.sleep(PATIENCE)? {
                let message = format!("no answer for {} s", PATIENCE.as_secs());
                return Err(Error::new(ErrorKind::TimedOut, message).at_offset(offset_bytes));
            }
            times.woken = now();
            while let Some(completion) = self.queue.take()? {
                Queue::check(completion.status, op, offset_bytes)?;
                self.free.push(completion.slot);
            }
        }
        times.done = now();
        Ok(times)
    }

    /// Puts parts of a request into the ring from byte `at` on, as many as there are slots; where it has come to.
    fn issue(&mut self, op: Op, mut at: u64, end: u64) -> u64 {
        while at < end
            && let Some(slot) = self.free.pop()
        {
            let len = (end - at).min(self.part_bytes);
            self.queue.submit(slot, op, at, len as u32);
            at += len;
        }
        self.queue.publish();
        at
    }

    /// Requests from the start of `bytes` on, until there is no place for a whole one or the time is over.
    fn once(&mut self, direction: Direction, request_bytes: u64, bytes: Range<u64>, limit: Duration) -> Result<Moved> {
        let begun = Instant::now();
        let mut at = bytes.start;
        while at + request_bytes <= bytes.end && (at == bytes.start || begun.elapsed() < limit) {
            self.request(direction.op(), at, request_bytes)?;
            at += request_bytes;
        }
        Ok(Moved { bytes: at - bytes.start, seconds: begun.elapsed().as_secs_f64() })
    }

    /// Requests from one moment to another; bytes in a second up to the end of the last request.
    fn stream(&mut self, direction: Direction, request_bytes: u64, span_bytes: u64, when: (u64, u64)) -> Result<f64> {
        let (from, until) = when;
        self.at = 0;
        std::thread::sleep(Duration::from_nanos(from.saturating_sub(now())));
        let (start, mut bytes) = (now(), 0);
        let mut end = start;
        while end < until || bytes == 0 {
            end = self.next(direction, request_bytes, span_bytes)?.done;
            bytes += request_bytes;
        }
        Ok(bytes as f64 * 1e9 / (end - start).max(1) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup(indirect_segments: u32, max_request_bytes: u64) -> DiskSetup {
        DiskSetup {
            device: 51712,
            indirect_segments,
            is_persistent: false,
            is_split: false,
            ring_slots: 32,
            max_request_bytes,
        }
    }

    #[test]
    fn slots_hold_the_longest_request_as_far_as_a_ring_does() {
        assert_eq!((setup(0, 4 << 20).part_bytes(), setup(0, 4 << 20).slots()), (44 << 10, 32));
        assert_eq!((setup(256, 4 << 20).part_bytes(), setup(256, 4 << 20).slots()), (1 << 20, 4));
        assert_eq!(setup(0, 512).slots(), 2);
    }

    #[test]
    fn persistent_grants_need_the_pages_twice() {
        let one = setup(256, 1 << 20);
        let two = DiskSetup { is_persistent: true, ..one.clone() };
        assert_eq!(two.memory_bytes() - one.memory_bytes(), 2 << 20);
    }

    #[test]
    fn orders_are_lines() {
        let order = Order::Connect(vec![setup(0, 4096)]);
        let text = serde_json::to_string(&order).unwrap();
        assert!(!text.contains('\n'));
        let back: Order = serde_json::from_str(&text).unwrap();
        assert_eq!(format!("{back:?}"), format!("{order:?}"));
    }
}
