//! Whether this process counts at all. It does, unless somebody measures what counting costs.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static IS_COUNTING: AtomicBool = AtomicBool::new(true);

/// True unless [`stop_counting`] was called.
#[inline]
pub fn is_counting() -> bool {
    IS_COUNTING.load(Relaxed)
}

/// From now on nothing is counted in this process: a means to measure what counting costs. To be called at the start, before
/// anything was counted.
pub fn stop_counting() {
    IS_COUNTING.store(false, Relaxed);
}
