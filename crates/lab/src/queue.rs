//! A guest's queue, whatever its ring: virtio's or Xen's.
//!
//! A queue has slots with fixed memory. Each slot can hold one request at a time. [`GuestQueue`] is the way to run many
//! requests at once, without an allocation for each; and, in [`GuestQueue::run`] and the methods built on it, the way to
//! run one and wait for its answer, for tests and short jobs.

use std::fmt::Debug;
use std::time::Duration;

use spile_core::{Error, ErrorKind, Result};
use spile_mem::Segments;

/// How long one request may take in [`GuestQueue::run`].
const PATIENCE: Duration = Duration::from_secs(600);

/// A request that the server has answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion<S> {
    /// The request's slot, free again.
    pub slot: usize,
    /// The server's answer, in the words of the ring's protocol.
    pub status: S,
}

/// A queue of a guest. It belongs to one thread.
pub trait GuestQueue: Send {
    /// The operations of the ring's protocol.
    type Op: Copy + Debug + Send;

    /// The statuses of the ring's protocol.
    type Status: Copy + Debug;

    /// The operation that reads.
    const READ: Self::Op;

    /// The operation that writes.
    const WRITE: Self::Op;

    /// The operation that makes earlier writes durable.
    const FLUSH: Self::Op;

    /// The number of slots: of requests that can be in flight.
    fn slots(&self) -> usize;

    /// The number of requests in flight.
    fn outstanding(&self) -> usize;

    /// True while the slot's request is in flight.
    fn is_outstanding(&self, slot: usize) -> bool;

    /// The data of a slot's request, in the guest's memory.
    fn data(&self, slot: usize) -> &Segments;

    /// Puts a request into a free slot. The server sees it after [`GuestQueue::publish`]. Offset and length are whole
    /// sectors, unless the test is how the server takes others. The data of a write are in [`GuestQueue::data`] already.
    ///
    /// # Panics
    /// When the slot is taken, or its memory is too small for the data.
    fn submit(&mut self, slot: usize, op: Self::Op, offset_bytes: u64, len_bytes: u32);

    /// Shows the server what was submitted, and wakes it if it wants that.
    fn publish(&mut self);

    /// Takes the next answer, if there is one.
    ///
    /// # Errors
    /// `Protocol` when the server breaks the ring's protocol; for one, when it answers a request that is not in flight.
    fn take(&mut self) -> Result<Option<Completion<Self::Status>>>;

    /// Sleeps until there is an answer. False when `timeout` is over first.
    ///
    /// # Errors
    /// When the connection is lost for good, or the system does not let us wait.
    fn sleep(&mut self, timeout: Duration) -> Result<bool>;

    /// Looks at the ring until there is an answer, without sleeping. False when `timeout` is over first.
    ///
    /// # Errors
    /// When the connection is lost for good.
    fn spin(&mut self, timeout: Duration) -> Result<bool>;

    /// False while the connection is broken and may come back.
    fn is_served(&self) -> bool {
        true
    }

    /// The kind of error that a status stands for; `None` when it says that the request was done.
    fn error_kind(status: Self::Status) -> Option<ErrorKind>;

    /// Makes an error of an answer, unless its status is good.
    ///
    /// # Errors
    /// As [`GuestQueue::error_kind`] says.
    fn check(status: Self::Status, op: Self::Op, offset_bytes: u64) -> Result<()> {
        match Self::error_kind(status) {
            None => Ok(()),
            Some(kind) => {
                let message = format!("the server answered {op:?} with status {status:?}");
                Err(Error::new(kind, message).at_offset(offset_bytes))
            }
        }
    }

    /// Runs one request in slot 0 and returns the server's answer, good or bad. No other request may be in flight.
    ///
    /// # Errors
    /// `TimedOut` after 30 s; or as [`GuestQueue::take`] and [`GuestQueue::sleep`].
    fn run(&mut self, op: Self::Op, offset_bytes: u64, len_bytes: u32) -> Result<Completion<Self::Status>> {
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

    /// As [`GuestQueue::run`], where any status but a good one is an error.
    ///
    /// # Errors
    /// As [`GuestQueue::run`] and [`GuestQueue::check`].
    fn run_well(&mut self, op: Self::Op, offset_bytes: u64, len_bytes: u32) -> Result<()> {
        Self::check(self.run(op, offset_bytes, len_bytes)?.status, op, offset_bytes)
    }

    /// Reads as many bytes as a slot holds at most.
    ///
    /// # Errors
    /// As [`GuestQueue::run_well`].
    fn read(&mut self, offset_bytes: u64, len_bytes: u32) -> Result<Vec<u8>> {
        self.run_well(Self::READ, offset_bytes, len_bytes)?;
        Ok(self.data(0).slice(0..len_bytes as usize).to_vec())
    }

    /// Writes as many bytes as a slot holds at most.
    ///
    /// # Errors
    /// As [`GuestQueue::run_well`].
    fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        self.data(0).copy_from_slice(0, bytes);
        self.run_well(Self::WRITE, offset_bytes, bytes.len() as u32)
    }
}
