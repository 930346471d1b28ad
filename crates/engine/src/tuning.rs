//! Switches between two ways to do the same thing, so that a benchmark can run both beside each other in one program
//! (`examples/request_loop.rs`). Nothing but a benchmark changes them.
//!
//! The figures are microseconds of server CPU for one 4 KiB request over a Unix socket, one connection, on a virtual
//! machine with Linux 6.18 and two processors; a system call more or less shows at depth 1, batching at depth 32.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A cached read is first tried with preadv2(RWF_NOWAIT), which answers from the page cache without the ring.
/// Depth 1: 8.1 instead of 9.0; depth 32 and 128: no difference.
pub static READ_AT_ONCE: AtomicBool = AtomicBool::new(true);

/// A cached write of at most this many bytes is done by the worker itself. Else every one of them goes to a helper
/// thread (through the ring to a kernel thread, for ext4 has no buffered write that does not wait). Depth 1: 17 instead
/// of 26, depth 32: 14 instead of 21. The price: when the system has too many dirty pages, the worker itself is slowed down.
pub static WRITE_AT_ONCE_BYTES: AtomicUsize = AtomicUsize::new(64 << 10);

/// A send is first tried without waiting, before it goes to the ring, when no other task of the worker is ready.
/// Depth 1: 8.7 instead of 9.2, and one system call less. Were it tried always, a sender that does not gather would
/// send each reply alone: at depth 32 4.6 instead of 1.9.
pub static SEND_AT_ONCE: AtomicBool = AtomicBool::new(true);

/// A receive is first tried without waiting, before it goes to the ring. Off: it loses at depth 1 (8.4 instead of 8.1)
/// and wins nothing above.
pub static RECV_AT_ONCE: AtomicBool = AtomicBool::new(false);

pub(crate) fn is_on(switch: &AtomicBool) -> bool {
    switch.load(Ordering::Relaxed)
}

pub(crate) fn write_at_once_bytes() -> usize {
    WRITE_AT_ONCE_BYTES.load(Ordering::Relaxed)
}
