//! A compare-and-exchange in shared memory.

use std::sync::atomic::{AtomicU32, Ordering};

use spile_mem::Segment;

/// Writes `new` at byte `at` if `current` is there. The error is the value that is there instead.
///
/// # Panics
/// When the number is not inside the segment, or its address is not a multiple of four.
pub(crate) fn compare_exchange_u32(segment: &Segment, at: usize, current: u32, new: u32) -> Result<u32, u32> {
    assert!(at <= segment.len() && segment.len() - at >= 4, "number at {at} of {}", segment.len());
    let ptr = segment.as_ptr().wrapping_add(at);
    assert!((ptr as usize).is_multiple_of(4), "number at an odd address");
    // SAFETY: in bounds, aligned and alive; everyone who shares it uses it atomically or takes what comes.
    unsafe { AtomicU32::from_ptr(ptr.cast()) }.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
}
