//! What a server counts of each export.
//!
//! Contract: each export has counters for each worker, and only that worker writes them; anybody may read them. A
//! request is in flight from the end of the receive that completed it to the end of the send that carried its reply.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use spile_core::metrics::Op;
use spile_core::metrics::span::SpanLog;
use spile_front::{Breakdown, FrontCounters, FrontReading};

use crate::wire::request::Command;

/// The kind under which a request is counted.
pub(crate) fn op_of(command: Command) -> Op {
    match command {
        Command::Read => Op::Read,
        Command::Write => Op::Write,
        Command::Flush => Op::Flush,
        Command::Trim => Op::Discard,
        Command::WriteZeroes => Op::WriteZeroes,
        Command::BlockStatus => Op::Extents,
        Command::Cache | Command::Disconnect | Command::Unknown(_) => Op::Other,
    }
}

/// The counters of one export.
pub(crate) struct ExportMetrics {
    by_worker: Box<[FrontCounters]>,
    /// Connections in the transmission phase.
    pub(crate) connections: AtomicUsize,
}

impl ExportMetrics {
    pub(crate) fn new(workers: usize) -> Self {
        let by_worker = (0..workers).map(|_| FrontCounters::default()).collect();
        Self { by_worker, connections: AtomicUsize::new(0) }
    }

    pub(crate) fn of_worker(&self, worker: usize) -> &FrontCounters {
        &self.by_worker[worker % self.by_worker.len()]
    }

    /// What is kept of the requests on each worker.
    pub(crate) fn spans(&self) -> Vec<Arc<SpanLog>> {
        self.by_worker.iter().map(|counters| counters.spans.clone()).collect()
    }

    pub(crate) fn read(&self, breakdown: Breakdown) -> FrontReading {
        let connections = self.connections.load(SeqCst) as u64;
        FrontReading { connections, ..FrontCounters::read(&self.by_worker, breakdown) }
    }
}
