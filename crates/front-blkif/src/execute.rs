//! Executes requests on the disk, and turns the disk's results into blkif's statuses.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use spile_core::{Disk, Error, ErrorKind, Result, SECTOR_BYTES};
use spile_front::{FailedRequest, LogLimit, WireStatus, log_failure};
use spile_xen::blkif::status;

use crate::request::{Command, Refusal, Request};

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The request is answered with this status.
    Answer(i16),
    /// The request is a flush that failed, and is not answered. A Linux guest takes an error for the answer of a disk
    /// that cannot flush, and never flushes again. A guest that gets no answer waits, and loses nothing.
    Held,
}

/// The disk with what the requests of its rings need.
pub struct Target<D> {
    /// The disk.
    pub disk: D,
    /// The disk's name in messages.
    pub name: String,
    /// Limits messages about failed requests.
    pub failures: Arc<LogLimit>,
    /// True once a flush has failed, in this process or in one before it. No flush can succeed after that, whatever the
    /// disk says.
    pub has_failed_flush: Arc<AtomicBool>,
}

enum Failure {
    Refused(Refusal),
    Disk(Error),
    Flush(Error),
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl<D: Disk> Target<D> {
    /// Does what the request asks for, and returns how it ended.
    pub async fn execute(&self, request: &Request) -> Outcome {
        match self.run(request).await {
            Ok(()) => Outcome::Answer(status::OKAY),
            Err(failure) => {
                self.log_failure(request, &failure);
                match failure {
                    Failure::Refused(refusal) => Outcome::Answer(refusal.status),
                    Failure::Flush(_) => Outcome::Held,
                    Failure::Disk(error) => Outcome::Answer(WireStatus::of(error.kind()).blkif),
                }
            }
        }
    }

    async fn run(&self, request: &Request) -> Result<(), Failure> {
        if let Some(refusal) = request.refusal {
            return Err(refusal.into());
        }
        let extent = |request: &Request| request.extent(self.disk.info().size_bytes);
        match request.command {
            Command::Read => self.disk.read(extent(request)?, &request.data).await.map_err(Failure::Disk),
            Command::Write => self.disk.write(extent(request)?, &request.data, false).await.map_err(Failure::Disk),
            Command::Discard(_) => self.disk.discard(extent(request)?).await.map_err(Failure::Disk),
            Command::Flush | Command::Barrier => {
                let extent = if request.len_bytes > 0 { Some(extent(request)?) } else { None };
                if self.has_failed_flush.load(Ordering::Acquire) {
                    let what = "an earlier flush has failed, and the data that it was to make durable may be lost";
                    return Err(Failure::Flush(Error::new(ErrorKind::Io, what)));
                }
                if let Err(error) = self.disk.flush().await {
                    self.has_failed_flush.store(true, Ordering::Release);
                    return Err(Failure::Flush(error));
                }
                let Some(extent) = extent else { return Ok(()) };
                let is_durable = request.command == Command::Barrier;
                let written = self.disk.write(extent, &request.data, is_durable).await;
                // The failure may be that of the barrier's sync, and not of its write.
                let is_flush = self.has_failed_flush.load(Ordering::Acquire);
                written.map_err(|error| if is_flush { Failure::Flush(error) } else { Failure::Disk(error) })
            }
        }
    }

    fn log_failure(&self, request: &Request, failure: &Failure) {
        let (outcome, reason): (_, &dyn Display) = match failure {
            Failure::Refused(refusal) => ("refused", &refusal.reason),
            Failure::Disk(error) => ("failed", error),
            Failure::Flush(error) => ("failed and stays unanswered, because it was to flush", error),
        };
        let failed = FailedRequest {
            front: "blkif",
            disk: &self.name,
            command: &request.command,
            offset_bytes: Some(request.sector.saturating_mul(SECTOR_BYTES)),
            len_bytes: request.len_bytes.into(),
            outcome,
            reason,
        };
        log_failure(&self.failures, &failed);
    }
}
