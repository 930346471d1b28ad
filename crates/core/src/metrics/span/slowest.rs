//! [`Slowest`]: the slowest requests of the interval that runs, and those of the one before.
//!
//! One thread writes at a time, without a lock; readers look again when entries have changed meanwhile.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{PHASES, Record, What};
use crate::metrics::Op;
use crate::metrics::version::Version;

/// How many requests of an interval are kept.
pub const KEPT: usize = 8;
/// The length of an interval in nanoseconds. It ends with the first request that is answered after it.
pub const INTERVAL_NS: u64 = 60_000_000_000;

/// Where the latency is among the words of an entry: behind the phases.
const LATENCY: usize = PHASES.len();
/// The phases, then: the latency, when it was taken, offset, length, store operations, kind, whether it failed.
const WORDS: usize = LATENCY + 7;

/// A record as numbers; the latency is 0 where there is none.
#[derive(Debug, Default)]
struct Entry([AtomicU64; WORDS]);

impl Entry {
    fn latency_ns(&self) -> u64 {
        self.0[LATENCY].load(Relaxed)
    }

    fn put(&self, words: &[u64; WORDS]) {
        self.0.iter().zip(words).for_each(|(to, word)| to.store(*word, Relaxed));
    }

    fn words(&self) -> [u64; WORDS] {
        std::array::from_fn(|word| self.0[word].load(Relaxed))
    }
}

/// The slowest requests.
#[derive(Debug, Default)]
pub struct Slowest {
    version: Version,
    ends_ns: AtomicU64,
    least_ns: AtomicU64,
    now: [Entry; KEPT],
    before: [Entry; KEPT],
}

impl Slowest {
    /// Requests are worth keeping when they took longer than what this returns, in nanoseconds. It is asked once for all requests
    /// that are answered at `now_ns`.
    #[inline]
    pub fn least_ns(&self, now_ns: u64) -> u64 {
        if now_ns >= self.ends_ns.load(Relaxed) {
            self.turn(now_ns);
        }
        self.least_ns.load(Relaxed)
    }

    /// Begins an interval. What is older than the last one is forgotten.
    #[cold]
    fn turn(&self, now_ns: u64) {
        let is_old = now_ns >= self.ends_ns.load(Relaxed).saturating_add(INTERVAL_NS);
        self.version.change(|| {
            for (before, now) in self.before.iter().zip(&self.now) {
                before.put(&if is_old { [0; WORDS] } else { now.words() });
                now.put(&[0; WORDS]);
            }
        });
        self.ends_ns.store(now_ns + INTERVAL_NS, Relaxed);
        self.least_ns.store(0, Relaxed);
    }

    /// Keeps a request in the place of the fastest one that was kept.
    #[cold]
    pub fn keep(&self, record: &Record) {
        let Some(place) = self.now.iter().min_by_key(|entry| entry.latency_ns()) else { return };
        self.version.change(|| place.put(&words_of(record)));
        let least_ns = self.now.iter().map(Entry::latency_ns).min();
        self.least_ns.store(least_ns.unwrap_or(0), Relaxed);
    }

    /// The requests of both intervals. Where nothing was answered for long they may be much older.
    pub fn read(&self) -> Vec<Record> {
        let words = |entries: &[Entry; KEPT]| entries.each_ref().map(Entry::words);
        let both = self.version.read(|| [words(&self.now), words(&self.before)]);
        both.as_flattened().iter().filter(|words| words[LATENCY] > 0).map(record_of).collect()
    }
}

fn words_of(record: &Record) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    let (phases, rest) = words.split_at_mut(LATENCY);
    phases.copy_from_slice(&record.phases_ns);
    rest.copy_from_slice(&[
        record.latency_ns().max(1),
        record.taken_ns,
        record.what.offset_bytes,
        record.what.len_bytes,
        record.store_operations,
        record.what.op as u64,
        record.failed.into(),
    ]);
    words
}

fn record_of(words: &[u64; WORDS]) -> Record {
    let (phases, rest) = words.split_first_chunk().expect("the words begin with the phases");
    let op = Op::ALL[rest[5] as usize % Op::COUNT];
    Record {
        what: What { op, offset_bytes: rest[2], len_bytes: rest[3] },
        failed: rest[6] != 0,
        store_operations: rest[4],
        taken_ns: rest[1],
        phases_ns: *phases,
        phase: PHASES.len() - 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(taken_ns: u64, latency_ns: u64) -> Record {
        let mut phases_ns = [0; PHASES.len()];
        phases_ns[3] = latency_ns;
        let what = What { op: Op::Discard, offset_bytes: taken_ns, len_bytes: 512 };
        Record { what, failed: true, store_operations: 3, taken_ns, phases_ns, phase: PHASES.len() - 1 }
    }

    fn offer(slowest: &Slowest, now_ns: u64, latency_ns: u64) {
        if latency_ns > slowest.least_ns(now_ns) {
            slowest.keep(&record(now_ns - latency_ns, latency_ns));
        }
    }

    fn latencies(slowest: &Slowest) -> Vec<u64> {
        let mut all: Vec<_> = slowest.read().iter().map(Record::latency_ns).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn the_slowest_of_two_intervals_are_kept() {
        let (slowest, start_ns) = (Slowest::default(), INTERVAL_NS);
        (1..=20).for_each(|latency_ns| offer(&slowest, start_ns, latency_ns));
        assert_eq!(latencies(&slowest), (13..=20).collect::<Vec<_>>());
        offer(&slowest, start_ns + INTERVAL_NS, 5);
        assert_eq!(latencies(&slowest), [5, 13, 14, 15, 16, 17, 18, 19, 20]);
        offer(&slowest, start_ns + 2 * INTERVAL_NS, 6);
        assert_eq!(latencies(&slowest), [5, 6]);
        // A disk that was idle for long: the one before is not the last interval any more.
        offer(&slowest, start_ns + 9 * INTERVAL_NS, 7);
        assert_eq!(latencies(&slowest), [7]);
    }

    #[test]
    fn a_record_comes_back_as_it_went() {
        let slowest = Slowest::default();
        let kept = record(INTERVAL_NS, 77);
        slowest.keep(&kept);
        assert_eq!(slowest.read(), [kept]);
    }
}
