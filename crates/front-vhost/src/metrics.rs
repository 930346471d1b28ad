//! What a queue counts. Plain numbers with one writer: no locked instruction on the way of a request.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spile_front::virtio;

use crate::request::{Command, Request};

/// What one queue has done since its server began, over restarts of the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueMetrics {
    /// Reads popped, and their bytes.
    pub reads: u64,
    /// Bytes of the reads.
    pub read_bytes: u64,
    /// Writes popped.
    pub writes: u64,
    /// Bytes of the writes.
    pub write_bytes: u64,
    /// Everything else that was popped.
    pub others: u64,
    /// Answered, with success or not.
    pub answered: u64,
    /// Answered with an error.
    pub failed: u64,
    /// Times the driver was told of answers.
    pub calls: u64,
    /// Times the queue was started.
    pub starts: u64,
    /// Times it was stopped.
    pub stops: u64,
}

impl QueueMetrics {
    /// Adds another's.
    pub fn merge(&mut self, other: &Self) {
        self.reads += other.reads;
        self.read_bytes += other.read_bytes;
        self.writes += other.writes;
        self.write_bytes += other.write_bytes;
        self.others += other.others;
        self.answered += other.answered;
        self.failed += other.failed;
        self.calls += other.calls;
        self.starts += other.starts;
        self.stops += other.stops;
    }
}

#[derive(Default)]
pub(crate) struct QueueCounters {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    write_bytes: AtomicU64,
    others: AtomicU64,
    answered: AtomicU64,
    failed: AtomicU64,
    calls: AtomicU64,
    starts: AtomicU64,
    stops: AtomicU64,
}

fn add(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Relaxed) + count, Relaxed);
}

impl QueueCounters {
    pub(crate) fn popped(&self, request: &Request) {
        let len = request.data.len() as u64;
        match request.command {
            Command::Read => {
                add(&self.reads, 1);
                add(&self.read_bytes, len);
            }
            Command::Write => {
                add(&self.writes, 1);
                add(&self.write_bytes, len);
            }
            _ => add(&self.others, 1),
        }
    }

    pub(crate) fn answered(&self, status: u8) {
        add(&self.answered, 1);
        if status != virtio::OK {
            add(&self.failed, 1);
        }
    }

    pub(crate) fn called(&self) {
        add(&self.calls, 1);
    }

    pub(crate) fn started(&self) {
        add(&self.starts, 1);
    }

    pub(crate) fn stopped(&self) {
        add(&self.stops, 1);
    }

    pub(crate) fn read(&self) -> QueueMetrics {
        QueueMetrics {
            reads: self.reads.load(Relaxed),
            read_bytes: self.read_bytes.load(Relaxed),
            writes: self.writes.load(Relaxed),
            write_bytes: self.write_bytes.load(Relaxed),
            others: self.others.load(Relaxed),
            answered: self.answered.load(Relaxed),
            failed: self.failed.load(Relaxed),
            calls: self.calls.load(Relaxed),
            starts: self.starts.load(Relaxed),
            stops: self.stops.load(Relaxed),
        }
    }
}
