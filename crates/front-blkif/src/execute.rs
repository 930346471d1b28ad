//! Executes requests on the disk, and turns the disk's results into blkif's statuses.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use spile_core::{Disk, Error, ErrorKind, Extent, Io, Result, SECTOR_BYTES};
use spile_front::{FailedRequest, LogLimit, Reason, WireStatus, log_failure};
use spile_xen::blkif::status;

use crate::queue::Link;
use crate::request::{Command, Refusal, Request};

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The request is answered with this status.
    Answer(i16),
    /// The request is a flush that failed, and is not answered. A Linux guest takes an error for the answer of a disk
    /// that cannot flush, and never flushes again. A guest that gets no answer waits, and loses nothing.
    Held,
    /// The request is undone, because the server ends or the guest has gone. It is not answered: the next process does it, unless the guest has
    /// gone.
    Left,
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

impl Failure {
    fn is_left_undone(&self) -> bool {
        matches!(self, Self::Disk(error) | Self::Flush(error) if error.kind() == ErrorKind::Shutdown)
    }
}

/// What a request comes to.
enum Work<'a> {
    /// One request of the disk.
    Io(Io<'a>),
    /// A flush, and a write after it when the request has data.
    Flush { then_write: Option<Extent> },
}

impl<D: Disk> Target<D> {
    /// Does what the request asks for, unless the guest of `link` has gone, and returns how it ended.
    pub async fn execute(&self, request: &Request, link: &Link) -> Outcome {
        if link.is_forsaken() {
            return Outcome::Left;
        }
        let failure = match self.work(request) {
            Ok(Work::Io(io)) => self.disk.execute_for(io, link.forsaken()).await.err().map(Failure::Disk),
            Ok(Work::Flush { then_write }) => self.flush(request, then_write, link).await.err(),
            Err(refusal) => Some(Failure::Refused(refusal)),
        };
        match failure {
            None => Outcome::Answer(status::OKAY),
            Some(failure) => self.fail(request, &failure),
        }
    }

    #[inline]
    fn work<'a>(&self, request: &'a Request) -> Result<Work<'a>, Refusal> {
        if let Some(refusal) = request.refusal {
            return Err(refusal);
        }
        let extent = || request.extent(self.disk.size_bytes());
        Ok(match request.command {
            Command::Read => Work::Io(Io::read(extent()?, &request.data)),
            Command::Write => Work::Io(Io::write(extent()?, &request.data, false)),
            Command::Discard(_) => Work::Io(Io::discard(extent()?)),
            Command::Flush | Command::Barrier if request.len_bytes == 0 => Work::Flush { then_write: None },
            Command::Flush | Command::Barrier => Work::Flush { then_write: Some(extent()?) },
        })
    }

    async fn flush(&self, request: &Request, then_write: Option<Extent>, link: &Link) -> Result<(), Failure> {
        if self.has_failed_flush.load(Ordering::Acquire) {
            let what = "an earlier flush has failed, and the data that it was to make durable may be lost";
            return Err(Failure::Flush(Error::new(ErrorKind::Io, what)));
        }
        if let Err(error) = self.disk.execute_for(Io::flush(), link.forsaken()).await {
            if error.kind() != ErrorKind::Shutdown {
                self.has_failed_flush.store(true, Ordering::Release);
            }
            return Err(Failure::Flush(error));
        }
        let Some(extent) = then_write else { return Ok(()) };
        let is_durable = request.command == Command::Barrier;
        let write = Io::write(extent, &request.data, is_durable);
        let written = self.disk.execute_for(write, link.forsaken()).await;
        // The failure may be that of the barrier's sync, and not of its write.
        let is_flush = self.has_failed_flush.load(Ordering::Acquire);
        written.map_err(|error| if is_flush { Failure::Flush(error) } else { Failure::Disk(error) })
    }

    #[cold]
    fn fail(&self, request: &Request, failure: &Failure) -> Outcome {
        if failure.is_left_undone() {
            return Outcome::Left;
        }
        self.log_failure(request, failure);
        match failure {
            Failure::Refused(refusal) => Outcome::Answer(refusal.status),
            Failure::Flush(_) => Outcome::Held,
            Failure::Disk(error) => Outcome::Answer(WireStatus::of(error.kind()).blkif),
        }
    }

    fn log_failure(&self, request: &Request, failure: &Failure) {
        let words;
        let (outcome, reason): (_, &(dyn std::error::Error + 'static)) = match failure {
            Failure::Refused(refusal) => {
                words = Reason(refusal.reason);
                ("refused", &words)
            }
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
