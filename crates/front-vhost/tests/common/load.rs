//! Verified load: every answer is checked, and a request that is lost or answered twice is noticed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use spile_lab::GuestQueue;
use spile_lab::vhost::{Op, Queue, STATUS_OK};

use super::PATIENCE;

/// Bytes of one request.
pub const LEN: u32 = 4096;

/// Each slot of a queue writes a new stamp to a place of its own, reads it back and looks whether it is that.
pub struct Load {
    queue: Queue,
    /// Where the first slot's place is, in bytes.
    base: u64,
    /// The last stamp of each slot, and whether it is being read.
    slots: Vec<(u8, bool)>,
}

impl Load {
    pub fn new(queue: Queue, base: u64) -> Self {
        let slots = vec![(0, true); queue.slots()];
        Self { queue, base, slots }
    }

    fn submit(&mut self, slot: usize) {
        let at = self.base + slot as u64 * u64::from(LEN);
        let (stamp, reads) = &mut self.slots[slot];
        let data = self.queue.data(slot);
        *reads = !*reads;
        match *reads {
            true => data.fill(!*stamp),
            false => {
                *stamp = stamp.wrapping_add(1);
                data.fill(*stamp);
            }
        }
        let op = if *reads { Op::Read } else { Op::Write };
        self.queue.submit(slot, op, at, LEN);
    }

    /// Works until `stop`, and counts the requests that were answered.
    pub fn run(&mut self, stop: &AtomicBool, answered: &AtomicU64) {
        (0..self.slots.len()).for_each(|slot| self.submit(slot));
        self.queue.publish();
        while self.queue.outstanding() > 0 {
            let goes_on = !stop.load(Ordering::Relaxed);
            self.take_all(goes_on, answered);
        }
    }

    fn take_all(&mut self, goes_on: bool, answered: &AtomicU64) {
        while let Some(done) = self.queue.take().expect("each request is answered once") {
            assert_eq!(done.status, STATUS_OK);
            answered.fetch_add(1, Ordering::Relaxed);
            let (stamp, reads) = self.slots[done.slot];
            if reads {
                let data = self.queue.data(done.slot).to_vec();
                assert!(data.iter().all(|byte| *byte == stamp), "slot {}: not what was written", done.slot);
            }
            if goes_on {
                self.submit(done.slot);
            }
        }
        self.queue.publish();
        if self.queue.outstanding() > 0 {
            assert!(self.queue.sleep(PATIENCE).unwrap(), "a request is lost");
        }
    }
}

/// Runs `meanwhile` while all queues are under load. It is told how many requests were answered so far.
pub fn under_load(queues: Vec<Queue>, meanwhile: impl FnOnce(&AtomicU64)) {
    let (stop, answered) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let mut base = 0;
        for queue in queues {
            let mut load = Load::new(queue, base);
            base += load.slots.len() as u64 * u64::from(LEN);
            let (stop, answered) = (&stop, &answered);
            scope.spawn(move || load.run(stop, answered));
        }
        let _stops = StopOnDrop(&stop);
        meanwhile(&answered);
    });
}

/// The load ends also when the test fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits until some more requests have been answered.
pub fn wait_for_more(answered: &AtomicU64) {
    let goal = answered.load(Ordering::Relaxed) + 50;
    super::until("requests go on", || answered.load(Ordering::Relaxed) >= goal);
}
