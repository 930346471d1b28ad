//! What rings count.
//!
//! Each counter has one writer, its ring's task, so counting is a load and a store. At the end of a turn the sums of a
//! disk's rings are shown on its [`Board`], if it has one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use serde::Serialize;
use spile_core::SECTOR_BYTES;
use spile_xen::blkif::status;

use crate::request::{Command, Request};

/// Counters of one ring; they go on when a guest connects again.
#[derive(Debug, Default)]
pub struct RingCounters {
    runs: AtomicU64,
    stops: AtomicU64,
    reads: AtomicU64,
    read_sectors: AtomicU64,
    writes: AtomicU64,
    written_sectors: AtomicU64,
    flushes: AtomicU64,
    discards: AtomicU64,
    answered: AtomicU64,
    failed: AtomicU64,
    held: AtomicU64,
    notices: AtomicU64,
    read_times: Times,
    write_times: Times,
}

/// How long the requests of a kind took, from being taken to being answered.
#[derive(Debug, Default)]
struct Times {
    count: AtomicU64,
    sum_ns: AtomicU64,
    max_ns: AtomicU64,
}

impl Times {
    fn add(&self, time_ns: u64) {
        add(&self.count, 1);
        add(&self.sum_ns, time_ns);
        if time_ns > get(&self.max_ns) {
            self.max_ns.store(time_ns, Ordering::Relaxed);
        }
    }
}

/// Counters of one ring as they are now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RingMetrics {
    /// The ring is served.
    pub is_served: bool,
    /// Reads taken.
    pub reads: u64,
    /// Bytes they asked for.
    pub read_bytes: u64,
    /// Writes taken, barriers among them.
    pub writes: u64,
    /// Bytes they asked for.
    pub written_bytes: u64,
    /// Flushes taken.
    pub flushes: u64,
    /// Discards taken.
    pub discards: u64,
    /// Requests answered.
    pub answered: u64,
    /// Of these, with an error.
    pub failed: u64,
    /// Flushes that failed and are not answered.
    pub held: u64,
    /// Notices to the guest.
    pub notices: u64,
    /// Reads that have ended.
    pub reads_ended: u64,
    /// From taking them to answering them, all together.
    pub read_time_ns: u64,
    /// The slowest.
    pub read_max_ns: u64,
    /// Writes that have ended, barriers among them.
    pub writes_ended: u64,
    /// From taking them to answering them, all together.
    pub write_time_ns: u64,
    /// The slowest.
    pub write_max_ns: u64,
}

impl RingMetrics {
    /// Adds another ring's.
    pub fn merge(&mut self, other: &Self) {
        self.is_served |= other.is_served;
        self.reads += other.reads;
        self.read_bytes += other.read_bytes;
        self.writes += other.writes;
        self.written_bytes += other.written_bytes;
        self.flushes += other.flushes;
        self.discards += other.discards;
        self.answered += other.answered;
        self.failed += other.failed;
        self.held += other.held;
        self.notices += other.notices;
        self.reads_ended += other.reads_ended;
        self.read_time_ns += other.read_time_ns;
        self.read_max_ns = self.read_max_ns.max(other.read_max_ns);
        self.writes_ended += other.writes_ended;
        self.write_time_ns += other.write_time_ns;
        self.write_max_ns = self.write_max_ns.max(other.write_max_ns);
    }
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

fn add(counter: &AtomicU64, count: u64) {
    // One ring has one writer at a time.
    counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
}

impl RingCounters {
    pub(crate) fn started(&self) {
        add(&self.runs, 1);
    }

    /// What was not answered, never will be here: it counts as ended, or it would seem to be in flight for ever.
    pub(crate) fn stopped(&self) {
        add(&self.stops, 1);
        for (taken, times) in [(&self.reads, &self.read_times), (&self.writes, &self.write_times)] {
            times.count.store(get(taken), Ordering::Relaxed);
        }
    }

    pub(crate) fn taken(&self, requests: &[Box<Request>]) {
        for request in requests {
            let sectors = u64::from(request.len_bytes) / SECTOR_BYTES;
            match request.command {
                Command::Read => {
                    add(&self.reads, 1);
                    add(&self.read_sectors, sectors);
                }
                Command::Write | Command::Barrier => {
                    add(&self.writes, 1);
                    add(&self.written_sectors, sectors);
                }
                Command::Flush => add(&self.flushes, 1),
                Command::Discard(_) => add(&self.discards, 1),
            }
        }
    }

    /// `now` is the time of answering in ns, on the clock of the request's stamps.
    pub(crate) fn answered(&self, request: &Request, status: i16, now: u64) {
        add(&self.answered, 1);
        add(&self.failed, u64::from(status != status::OKAY));
        let time_ns = now.saturating_sub(request.stamps.taken);
        match request.command {
            Command::Read => self.read_times.add(time_ns),
            Command::Write | Command::Barrier => self.write_times.add(time_ns),
            Command::Flush | Command::Discard(_) => {}
        }
    }

    pub(crate) fn held(&self) {
        add(&self.held, 1);
    }

    pub(crate) fn notified(&self) {
        add(&self.notices, 1);
    }

    /// The counters now.
    pub fn metrics(&self) -> RingMetrics {
        RingMetrics {
            is_served: get(&self.runs) > get(&self.stops),
            reads: get(&self.reads),
            read_bytes: get(&self.read_sectors) * SECTOR_BYTES,
            writes: get(&self.writes),
            written_bytes: get(&self.written_sectors) * SECTOR_BYTES,
            flushes: get(&self.flushes),
            discards: get(&self.discards),
            answered: get(&self.answered),
            failed: get(&self.failed),
            held: get(&self.held),
            notices: get(&self.notices),
            reads_ended: get(&self.read_times.count),
            read_time_ns: get(&self.read_times.sum_ns),
            read_max_ns: get(&self.read_times.max_ns),
            writes_ended: get(&self.write_times.count),
            write_time_ns: get(&self.write_times.sum_ns),
            write_max_ns: get(&self.write_times.max_ns),
        }
    }
}

/// Where the sums of a disk's rings are put for others to see.
pub trait Board: Send + Sync {
    /// Puts them there. Called at the ends of turns, by one ring at a time, with numbers that never fall; it must
    /// not wait.
    fn show(&self, sums: &RingMetrics);
}

/// The counters of all rings of a disk.
#[derive(Default)]
pub struct DiskCounters {
    rings: Mutex<Vec<Arc<RingCounters>>>,
    board: OnceLock<Arc<dyn Board>>,
}

impl DiskCounters {
    fn rings(&self) -> MutexGuard<'_, Vec<Arc<RingCounters>>> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those of one ring, which begin at zero when there are none yet.
    pub fn of_ring(&self, number: usize) -> Arc<RingCounters> {
        let mut rings = self.rings();
        while rings.len() <= number {
            rings.push(Arc::default());
        }
        rings[number].clone()
    }

    /// Those of each ring, as they are now.
    pub fn metrics(&self) -> Vec<RingMetrics> {
        self.rings().iter().map(|ring| ring.metrics()).collect()
    }

    /// From now on the sums are shown there. A disk has one board for its whole life; another is not taken.
    pub fn show_on(&self, board: Arc<dyn Board>) {
        let _ = self.board.set(board);
        self.show();
    }

    /// Shows the sums as they are now.
    pub fn show(&self) {
        let Some(board) = self.board.get() else { return };
        // Held until they are shown: no ring puts older numbers over newer ones.
        let rings = self.rings();
        let mut sums = RingMetrics::default();
        rings.iter().for_each(|ring| sums.merge(&ring.metrics()));
        board.show(&sums);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(command: Command, len_bytes: u32, taken: u64) -> Box<Request> {
        let mut request = Request { command, len_bytes, ..Request::default() };
        request.stamps.taken = taken;
        Box::new(request)
    }

    #[derive(Default)]
    struct Slate(Mutex<Vec<RingMetrics>>);

    impl Board for Slate {
        fn show(&self, sums: &RingMetrics) {
            self.0.lock().unwrap().push(*sums);
        }
    }

    #[test]
    fn rings_of_a_disk_sum_up_on_its_board() {
        let (disk, slate) = (DiskCounters::default(), Arc::new(Slate::default()));
        let (one, other) = (disk.of_ring(1), disk.of_ring(0));
        let requests = [request(Command::Read, 4096, 1000), request(Command::Barrier, 512, 1000)];
        one.taken(&requests);
        other.taken(&requests);
        one.answered(&requests[0], status::OKAY, 6000);
        other.answered(&requests[0], status::ERROR, 3000);
        other.answered(&requests[1], status::OKAY, 1500);
        disk.show();
        assert!(slate.0.lock().unwrap().is_empty(), "not the board of this disk yet");
        disk.show_on(slate.clone());
        let sums = slate.0.lock().unwrap()[0];
        assert_eq!((sums.reads, sums.read_bytes, sums.reads_ended), (2, 8192, 2));
        assert_eq!((sums.read_time_ns, sums.read_max_ns), (7000, 5000));
        assert_eq!((sums.writes, sums.written_bytes, sums.writes_ended), (2, 1024, 1));
        assert_eq!((sums.write_time_ns, sums.write_max_ns), (500, 500));
        assert_eq!((sums.answered, sums.failed), (3, 1));
    }

    #[test]
    fn nothing_is_in_flight_in_a_ring_that_has_stopped() {
        let ring = RingCounters::default();
        ring.started();
        ring.taken(&[request(Command::Read, 512, 0), request(Command::Write, 512, 0)]);
        ring.stopped();
        let metrics = ring.metrics();
        assert_eq!((metrics.reads_ended, metrics.writes_ended, metrics.answered), (1, 1, 0));
        assert!(!metrics.is_served);
    }

    #[test]
    fn flushes_and_discards_are_neither_reads_nor_writes() {
        let ring = RingCounters::default();
        let requests = [request(Command::Flush, 0, 0), request(Command::Discard(8), 0, 0)];
        ring.taken(&requests);
        requests.iter().for_each(|request| ring.answered(request, status::OKAY, 10));
        let metrics = ring.metrics();
        assert_eq!((metrics.flushes, metrics.discards, metrics.answered), (1, 1, 2));
        assert_eq!(
            (metrics.reads_ended, metrics.writes_ended, metrics.read_time_ns, metrics.write_time_ns),
            (0, 0, 0, 0)
        );
    }
}
