//! A guest's queue under load, whatever its ring: what vhost-user's transport and blkif's have in common.

use std::time::Duration;

use spile_core::{Result, Segments};

use super::pump::{STUCK_AFTER, stuck};
use super::transport::{Kind, Shape, Transport};

/// A queue of a guest of ours.
pub trait GuestQueue: Send {
    /// Its ring's operations.
    type Op: Copy + Send;

    /// The operation of a kind of request.
    fn op(kind: Kind) -> Self::Op;

    /// Requests in flight at most.
    fn slots(&self) -> usize;

    /// The data of a slot's request.
    fn data(&self, slot: usize) -> &Segments;

    /// Puts a request into a slot.
    fn submit(&mut self, slot: usize, op: Self::Op, offset_bytes: u64, len_bytes: u32);

    /// Shows the server what was submitted.
    fn publish(&mut self);

    /// Looks for an answer without sleeping; false when the time is over.
    ///
    /// # Errors
    /// When the connection is lost.
    fn spin(&mut self, timeout: Duration) -> Result<bool>;

    /// Sleeps until there is an answer; false when the time is over.
    ///
    /// # Errors
    /// When the connection is lost.
    fn sleep(&mut self, timeout: Duration) -> Result<bool>;

    /// False while the server is gone and somebody else waits for it to come back.
    fn is_served(&self) -> bool {
        true
    }

    /// Takes an answer's slot; `asked` has what each slot's request was.
    ///
    /// # Errors
    /// When the server has refused the request or broken the protocol.
    fn take(&mut self, asked: &[(Self::Op, u64)]) -> Result<Option<usize>>;
}

/// One queue.
pub struct GuestTransport<Q: GuestQueue> {
    queue: Q,
    block_bytes: u32,
    poll: bool,
    /// The operation and offset of each slot.
    asked: Vec<(Q::Op, u64)>,
    /// One block, for data that are made or looked at.
    block: Vec<u8>,
}

impl<Q: GuestQueue> GuestTransport<Q> {
    /// Puts `queue` under a load of that shape. With `poll` it looks for answers all the time.
    pub fn new(queue: Q, shape: Shape, poll: bool) -> Self {
        let asked = vec![(Q::op(Kind::Flush), 0); queue.slots()];
        Self { queue, block_bytes: shape.block_bytes, poll, asked, block: vec![0; shape.block_bytes as usize] }
    }
}

impl<Q: GuestQueue> Transport for GuestTransport<Q> {
    fn fill(&mut self, slot: usize, fill: impl FnOnce(&mut [u8])) {
        fill(&mut self.block);
        self.queue.data(slot).copy_from_slice(0, &self.block);
    }

    fn issue(&mut self, slot: usize, kind: Kind, offset_bytes: u64, _fua: bool) {
        let len = if kind == Kind::Flush { 0 } else { self.block_bytes };
        self.asked[slot] = (Q::op(kind), offset_bytes);
        self.queue.submit(slot, Q::op(kind), offset_bytes, len);
    }

    fn submit(&mut self) -> Result<()> {
        self.queue.publish();
        Ok(())
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<bool> {
        let patience = timeout.unwrap_or(STUCK_AFTER);
        let ready = if self.poll { self.queue.spin(patience)? } else { self.queue.sleep(patience)? };
        let is_stuck = !ready && timeout.is_none() && self.queue.is_served();
        if is_stuck { Err(stuck()) } else { Ok(ready) }
    }

    fn take(&mut self) -> Result<Option<usize>> {
        self.queue.take(&self.asked)
    }

    fn data(&mut self, slot: usize) -> &[u8] {
        self.queue.data(slot).copy_to_slice(0, &mut self.block);
        &self.block
    }

    fn finish(&mut self) {}
}
