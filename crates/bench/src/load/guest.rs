//! A guest's queue under load, whatever its ring: what vhost-user's transport and blkif's have in common.

use std::future::Future;
use std::time::Duration;

use futures_util::FutureExt;
use spile_core::Result;
use spile_lab::GuestQueue;

use super::pump::{STUCK_AFTER, stuck};
use super::transport::{Kind, Ready, Shape, Transport};

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
        let asked = vec![(Q::FLUSH, 0); queue.slots()];
        Self { queue, block_bytes: shape.block_bytes, poll, asked, block: vec![0; shape.block_bytes as usize] }
    }
}

/// A guest's queue has a thread of its own and waits by blocking it.
impl<Q: GuestQueue + Send + 'static> Ready for GuestTransport<Q> {
    type Transport = Self;

    fn block_on<T, Fut>(self, work: impl FnOnce(Self) -> Fut + Send + 'static) -> T
    where
        T: Send + 'static,
        Fut: Future<Output = T> + 'static,
    {
        work(self).now_or_never().expect("a guest's waits block, and so never pend")
    }
}

impl<Q: GuestQueue + 'static> Transport for GuestTransport<Q> {
    fn fill(&mut self, slot: usize, fill: impl FnOnce(&mut [u8])) {
        fill(&mut self.block);
        self.queue.data(slot).copy_from_slice(0, &self.block);
    }

    fn issue(&mut self, slot: usize, kind: Kind, offset_bytes: u64, _fua: bool) {
        let len = if kind == Kind::Flush { 0 } else { self.block_bytes };
        let op = match kind {
            Kind::Read => Q::READ,
            Kind::Write => Q::WRITE,
            Kind::Flush => Q::FLUSH,
        };
        self.asked[slot] = (op, offset_bytes);
        self.queue.submit(slot, op, offset_bytes, len);
    }

    fn submit(&mut self) {
        self.queue.publish();
    }

    async fn wait(&mut self, timeout: Option<Duration>) -> Result<bool> {
        let patience = timeout.unwrap_or(STUCK_AFTER);
        let ready = if self.poll { self.queue.spin(patience)? } else { self.queue.sleep(patience)? };
        let is_stuck = !ready && timeout.is_none() && self.queue.is_served();
        if is_stuck { Err(stuck()) } else { Ok(ready) }
    }

    async fn pause(&mut self, duration: Duration) {
        std::thread::sleep(duration);
    }

    fn take(&mut self) -> Result<Option<usize>> {
        let Some(done) = self.queue.take()? else { return Ok(None) };
        let (op, offset_bytes) = self.asked[done.slot];
        Q::check(done.status, op, offset_bytes)?;
        Ok(Some(done.slot))
    }

    fn data(&mut self, slot: usize) -> &[u8] {
        self.queue.data(slot).copy_to_slice(0, &mut self.block);
        &self.block
    }
}
