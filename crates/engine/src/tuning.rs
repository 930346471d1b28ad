//! Switches between two ways to do the same thing, so that a benchmark can run both beside each other in one program.
//! Their defaults are what was measured to be faster; nothing but a benchmark changes them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A cached read is first tried with preadv2(RWF_NOWAIT), which answers from the page cache without the ring.
pub static READ_AT_ONCE: AtomicBool = AtomicBool::new(true);
/// A cached write of at most this many bytes is done by the worker itself.
pub static WRITE_AT_ONCE_BYTES: AtomicUsize = AtomicUsize::new(0);
/// A send is first tried without waiting, before it goes to the ring.
pub static SEND_AT_ONCE: AtomicBool = AtomicBool::new(true);
/// A receive is first tried without waiting, before it goes to the ring.
pub static RECV_AT_ONCE: AtomicBool = AtomicBool::new(false);

pub(crate) fn is_on(switch: &AtomicBool) -> bool {
    switch.load(Ordering::Relaxed)
}

pub(crate) fn write_at_once_bytes() -> usize {
    WRITE_AT_ONCE_BYTES.load(Ordering::Relaxed)
}
