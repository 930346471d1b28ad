//! Memory that a ring has registered: the kernel has looked up and pinned its pages once, not for each transfer.
//!
//! The first part of a worker's own arena is registered at the first direct transfer. A guest's memory is registered if
//! its server was told to ([`pin_memory`]). Memory that cannot be registered (the kernel is too old, the process may
//! not lock so much memory, the table is full) is used as it is: that is a little slower, and never an error.

use std::marker::PhantomData;

use io_uring::IoUring;
use spile_core::Segment;
use spile_mem::Pool;

use crate::op::{Op, Stays};
use crate::worker;

/// The bytes of the pool's arena that are registered. The chunk that was freed last is used first, so a small part at
/// the start of the arena serves most requests. Registered memory is pinned, and counts against RLIMIT_MEMLOCK.
const ARENA_BYTES: usize = 8 << 20;
const LEAST_ARENA_BYTES: usize = 1 << 20;
/// The kernel's limit for one registered buffer.
const BUFFER_BYTES: usize = 1 << 30;
/// The size of the table.
const ENTRIES: u16 = 256;

/// A ring's table of registered buffers.
#[derive(Default)]
pub(crate) struct FixedBuffers {
    /// Whether the table could be made; `None` before that was tried.
    is_usable: Option<bool>,
    has_arena: bool,
    used: Vec<Fixed>,
}

/// One registered buffer.
struct Fixed {
    base: usize,
    len: usize,
    index: u16,
    /// How many users want it registered. The arena stays registered for ever.
    users: u32,
}

impl FixedBuffers {
    /// Makes the table at the first call.
    fn is_usable(&mut self, ring: &IoUring) -> bool {
        *self.is_usable.get_or_insert_with(|| {
            // Before Linux 5.13 this call waits until nothing is in flight, but the read of the doorbell always is.
            ring.params().is_feature_resource_tagging()
                && ring.submitter().register_buffers_sparse(u32::from(ENTRIES)).is_ok()
        })
    }

    /// Registers the first part of the arena at the first call. When that is above the limits of this process, half of
    /// it is tried, and so on.
    pub(crate) fn register_arena(&mut self, ring: &IoUring, pool: &Pool) {
        if std::mem::replace(&mut self.has_arena, true) || !self.is_usable(ring) {
            return;
        }
        let (base, arena_len) = pool.arena();
        let mut len = ARENA_BYTES.min(arena_len);
        // The reactor holds the pool, and with it the arena, for longer than the ring.
        while len >= LEAST_ARENA_BYTES && !self.register(ring, base as usize, len) {
            len /= 2;
        }
    }

    /// Registers memory whose owner keeps it until [`FixedBuffers::release`]. False when it cannot be.
    fn register(&mut self, ring: &IoUring, base: usize, len: usize) -> bool {
        if !self.is_usable(ring) {
            return false;
        }
        if let Some(fixed) = self.used.iter_mut().find(|fixed| (fixed.base, fixed.len) == (base, len)) {
            fixed.users += 1;
            return true;
        }
        let is_free = |index: &u16| self.used.iter().all(|fixed| fixed.index != *index);
        let Some(index) = (0..ENTRIES).find(is_free) else { return false };
        let done = update(ring, index, libc::iovec { iov_base: base as *mut _, iov_len: len });
        if done {
            self.used.push(Fixed { base, len, index, users: 1 });
        }
        done
    }

    /// Ends the registration of memory by [`FixedBuffers::register`]. Transfers in flight keep its pages until they
    /// end.
    fn release(&mut self, ring: &IoUring, base: usize, len: usize) {
        let Some(at) = self.used.iter().position(|fixed| (fixed.base, fixed.len) == (base, len)) else { return };
        self.used[at].users -= 1;
        if self.used[at].users == 0 {
            let fixed = self.used.swap_remove(at);
            update(ring, fixed.index, libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 });
        }
    }

    /// The index of the registered buffer in which the operation's only segment lies, if there is one.
    pub(crate) fn covering(&self, op: &Op) -> Option<u16> {
        let [one] = op.segments.as_slice() else { return None };
        let (start, end) = (one.as_ptr() as usize, one.as_ptr() as usize + one.len());
        let covers = |fixed: &&Fixed| start >= fixed.base && end <= fixed.base + fixed.len;
        self.used.iter().find(covers).map(|fixed| fixed.index)
    }
}

fn update(ring: &IoUring, index: u16, buffer: libc::iovec) -> bool {
    // SAFETY: the memory outlives its registration: the arena lives as long as the reactor, and what is pinned is kept
    // by `Pinned`, which lets go of the registration first.
    unsafe { ring.submitter().register_buffers_update(u32::from(index), &[buffer], None).is_ok() }
}

/// Memory registered with one worker's ring, until this is dropped, on that worker.
pub struct Pinned {
    memory: Segment,
    /// The offset and length of each part, in bytes.
    parts: Vec<(usize, usize)>,
    _stays: Stays,
}

/// Registers `memory` with this worker's ring, as far as possible. That pins its pages: they stay in memory, and
/// transfers of this worker use those pages even when the file under the mapping gets others (when a balloon punches
/// holes, for example). It takes time for memory that was never touched.
///
/// # Panics
/// Outside a worker.
pub fn pin_memory(memory: &Segment) -> Pinned {
    let starts = (0..memory.len()).step_by(BUFFER_BYTES);
    let wanted = starts.map(|start| (start, BUFFER_BYTES.min(memory.len() - start)));
    let (base, mut parts) = (memory.as_ptr() as usize, Vec::new());
    worker::with(|w| {
        w.reactor.borrow_mut().with_fixed(|ring, fixed| {
            parts.extend(wanted.filter(|(at, len)| fixed.register(ring, base + at, *len)));
        });
    });
    Pinned { memory: memory.clone(), parts, _stays: PhantomData }
}

impl Pinned {
    /// How many bytes are registered.
    pub fn len_bytes(&self) -> usize {
        self.parts.iter().map(|(_, len)| len).sum()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let base = self.memory.as_ptr() as usize;
        // There is no worker only when the worker has ended, and its ring with it.
        worker::try_with(|w| {
            w.reactor.borrow_mut().with_fixed(|ring, fixed| {
                self.parts.iter().for_each(|(at, len)| fixed.release(ring, base + at, *len));
            });
        });
    }
}
