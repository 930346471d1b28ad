//! One request at a time, for tests and for short jobs: submitted, slept for, judged.

use std::time::Duration;

use spile_core::{Error, ErrorKind, Result};
use spile_xen::blkif::status;

use super::queue::{Completion, Queue};
use super::slots::Op;

/// How long one request may take.
const PATIENCE: Duration = Duration::from_secs(30);

impl Queue {
    /// Runs one request in slot 0 and returns the back end's answer, good or bad. No other may be outstanding.
    ///
    /// # Errors
    /// `TimedOut` after 30 s, or as [`Queue::take`].
    pub fn run(&mut self, op: Op, offset_bytes: u64, len_bytes: u32) -> Result<Completion> {
        self.submit(0, op, offset_bytes, len_bytes);
        self.publish();
        loop {
            if let Some(completion) = self.take()? {
                return Ok(completion);
            }
            if !self.sleep(PATIENCE)? {
                return Err(Error::new(ErrorKind::TimedOut, format!("no answer to {op:?}")).at_offset(offset_bytes));
            }
        }
    }

    /// [`Queue::run`], where any status but "good" is an error.
    ///
    /// # Errors
    /// `Unsupported` or `Io`, as the back end says.
    pub fn run_well(&mut self, op: Op, offset_bytes: u64, len_bytes: u32) -> Result<()> {
        let answer = self.run(op, offset_bytes, len_bytes)?.status;
        if answer == status::OKAY { Ok(()) } else { Err(refusal(op, offset_bytes, answer)) }
    }

    /// Reads; at most what a slot holds.
    ///
    /// # Errors
    /// As [`Queue::run_well`].
    pub fn read(&mut self, offset_bytes: u64, len_bytes: u32) -> Result<Vec<u8>> {
        self.run_well(Op::Read, offset_bytes, len_bytes)?;
        Ok(self.data(0).slice(0..len_bytes as usize).to_vec())
    }

    /// Writes; at most what a slot holds.
    ///
    /// # Errors
    /// As [`Queue::run_well`].
    pub fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        self.data(0).copy_from_slice(0, bytes);
        self.run_well(Op::Write, offset_bytes, bytes.len() as u32)
    }
}

/// The error for a request that was answered with a bad status.
pub fn refusal(op: Op, offset_bytes: u64, answer: i16) -> Error {
    let kind = if answer == status::EOPNOTSUPP { ErrorKind::Unsupported } else { ErrorKind::Io };
    Error::new(kind, format!("the back end answered {op:?} with status {answer}")).at_offset(offset_bytes)
}
