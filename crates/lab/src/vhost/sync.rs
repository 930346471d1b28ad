//! One request at a time, for tests and for short jobs: submitted, slept for, judged.

use std::time::Duration;

use spile_core::{Error, ErrorKind, Result};

use super::queue::{Completion, Queue};
use super::request::{Op, STATUS_OK, STATUS_UNSUPP};

/// How long one request may take.
const PATIENCE: Duration = Duration::from_secs(30);

impl Queue {
    /// Runs one request in slot 0 and returns the server's answer, good or bad. No other may be outstanding.
    ///
    /// # Errors
    /// `TimedOut` after 30 s, or when the connection is lost.
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
    /// `Unsupported` or `Io`, as the server says.
    pub fn run_well(&mut self, op: Op, offset_bytes: u64, len_bytes: u32) -> Result<()> {
        let status = self.run(op, offset_bytes, len_bytes)?.status;
        if status == STATUS_OK { Ok(()) } else { Err(refusal(op, offset_bytes, status)) }
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

    /// Asks for the disk's name, without the zeroes at its end.
    ///
    /// # Errors
    /// As [`Queue::run_well`].
    pub fn disk_id(&mut self) -> Result<Vec<u8>> {
        self.run_well(Op::GetId, 0, 0)?;
        let mut id = self.id(0).to_vec();
        let len = id.iter().position(|byte| *byte == 0).unwrap_or(id.len());
        id.truncate(len);
        Ok(id)
    }
}

/// The error for a request that was answered with a bad `status`.
pub fn refusal(op: Op, offset_bytes: u64, status: u8) -> Error {
    let kind = if status == STATUS_UNSUPP { ErrorKind::Unsupported } else { ErrorKind::Io };
    Error::new(kind, format!("the server answered {op:?} with status {status}")).at_offset(offset_bytes)
}
