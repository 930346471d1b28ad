//! The counters of a disk's rings, and where their sums are shown.
//!
//! Each ring's counters have one writer, the ring's task. At the end of a turn the sums of a disk's rings are shown on
//! its [`Board`], if it has one.

use std::ops::AddAssign;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use spile_core::metrics::span::SpanLog;
use spile_core::metrics::{Op, OpSums};
use spile_front::{Breakdown, FrontCounters, FrontReading};

/// Sums of a disk's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestSums {
    /// Reads.
    pub reads: OpSums,
    /// Writes, barriers among them.
    pub writes: OpSums,
    /// Flushes.
    pub flushes: OpSums,
    /// Discards.
    pub discards: OpSums,
}

impl RequestSums {
    fn of(ring: &FrontCounters) -> Self {
        let [reads, writes, flushes, discards] =
            [Op::Read, Op::Write, Op::Flush, Op::Discard].map(|op| ring.requests.sums(op));
        Self { reads, writes, flushes, discards }
    }

    /// Requests that were answered with an error.
    pub fn errors(&self) -> u64 {
        self.reads.errors + self.writes.errors + self.flushes.errors + self.discards.errors
    }
}

impl AddAssign<&RequestSums> for RequestSums {
    fn add_assign(&mut self, other: &Self) {
        self.reads += &other.reads;
        self.writes += &other.writes;
        self.flushes += &other.flushes;
        self.discards += &other.discards;
    }
}

/// Where the sums of a disk's rings are put for others to see.
pub trait Board: Send + Sync {
    /// Puts the sums there. Called at the ends of turns, by one ring at a time, with numbers that never fall; it must
    /// not wait.
    fn show(&self, sums: &RequestSums);
}

/// The counters of all rings of a disk.
#[derive(Default)]
pub struct DiskCounters {
    rings: Mutex<Vec<Arc<FrontCounters>>>,
    board: OnceLock<Arc<dyn Board>>,
}

impl DiskCounters {
    fn rings(&self) -> MutexGuard<'_, Vec<Arc<FrontCounters>>> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The counters of one ring. They begin at zero when the ring is new, and go on when a guest connects again.
    pub fn of_ring(&self, number: usize) -> Arc<FrontCounters> {
        let mut rings = self.rings();
        while rings.len() <= number {
            rings.push(Arc::default());
        }
        rings[number].clone()
    }

    /// What is kept of the requests of each ring.
    pub fn spans(&self) -> Vec<Arc<SpanLog>> {
        self.rings().iter().map(|ring| ring.spans.clone()).collect()
    }

    /// What each ring has counted up to now.
    pub fn metrics(&self) -> Vec<FrontReading> {
        self.rings().iter().map(|ring| FrontCounters::read([&**ring], Breakdown::Sum)).collect()
    }

    /// What all rings have counted together up to now, and each of them if `breakdown` says so.
    pub fn total(&self, breakdown: Breakdown) -> FrontReading {
        FrontCounters::read(self.rings().iter().map(|ring| &**ring), breakdown)
    }

    /// From now on the sums are shown on `board`. A disk has one board for its whole life; a second one is ignored.
    pub fn show_on(&self, board: Arc<dyn Board>) {
        let _ = self.board.set(board);
        self.show();
    }

    /// Shows the sums as they are now.
    pub fn show(&self) {
        let Some(board) = self.board.get() else { return };
        // The lock is held until the sums are shown: no ring puts older numbers over newer ones.
        let rings = self.rings();
        let mut sums = RequestSums::default();
        rings.iter().for_each(|ring| sums += &RequestSums::of(ring));
        board.show(&sums);
    }
}

#[cfg(test)]
mod tests {
    use spile_core::metrics::Ended;

    use super::*;

    #[derive(Default)]
    struct Slate(Mutex<Vec<RequestSums>>);

    impl Board for Slate {
        fn show(&self, sums: &RequestSums) {
            self.0.lock().unwrap().push(*sums);
        }
    }

    #[test]
    fn rings_of_a_disk_sum_up_on_its_board() {
        let (disk, slate) = (DiskCounters::default(), Arc::new(Slate::default()));
        let (one, other) = (disk.of_ring(1), disk.of_ring(0));
        for ring in [&one, &other] {
            ring.requests.begin(Op::Read, 4096, 1000);
            ring.requests.begin(Op::Write, 512, 1000);
        }
        let end = |ring: &FrontCounters, op, failed, now_ns| {
            ring.requests.end(Ended { op, failed, begun_ns: 1000 }, now_ns);
        };
        end(&one, Op::Read, false, 6000);
        end(&other, Op::Read, true, 3000);
        end(&other, Op::Write, false, 1500);
        disk.show();
        assert!(slate.0.lock().unwrap().is_empty(), "not the board of this disk yet");
        disk.show_on(slate.clone());
        let sums = slate.0.lock().unwrap()[0];
        let OpSums { begun, ended, bytes, latency_sum_ns, latency_max_ns, .. } = sums.reads;
        assert_eq!((begun, bytes, ended, latency_sum_ns, latency_max_ns), (2, 8192, 2, 7000, 5000));
        let OpSums { begun, ended, bytes, latency_sum_ns, latency_max_ns, .. } = sums.writes;
        assert_eq!((begun, bytes, ended, latency_sum_ns, latency_max_ns), (2, 1024, 1, 500, 500));
        assert_eq!(sums.errors(), 1);
    }
}
