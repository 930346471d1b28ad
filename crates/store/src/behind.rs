//! Writing back behind a copy: what was written to a file leaves the page cache soon, instead of filling it.
//!
//! A copy of a whole disk writes each byte once. Left alone, the kernel keeps these bytes for as long as there is memory, and gives up
//! for them what guests read again and again; and each page has to be found anew. Here the kernel is told at once to write back what
//! was written, and to forget it when it is on its way to the medium for some time. So a copy uses the same few pages again.
//!
//! This is no sync: nothing is durable before [`Store::sync`](spile_core::Store::sync).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// So many bytes are written before they are written back together.
const WINDOW_BYTES: u64 = 8 << 20;
/// So many windows are written back at a time. The oldest one is waited for.
const WINDOWS: usize = 4;
/// Shorter writes are not counted: they are metadata, which will be written again.
const LEAST_BYTES: u64 = 32 << 10;

/// What has been written and not yet left the page cache.
#[derive(Default)]
pub(crate) struct Behind(Mutex<State>);

#[derive(Default)]
struct State {
    /// Covers what was written since the last window was full, of which there are so many bytes.
    range: Range<u64>,
    written_bytes: u64,
    /// The windows that are being written back, the oldest first.
    begun: VecDeque<Range<u64>>,
}

/// What is to be done with a full window.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// The range to begin to write back.
    pub begin: Range<u64>,
    /// The range to wait for, and to forget.
    pub leave: Option<Range<u64>>,
}

impl Behind {
    /// Notes a write; says what to do when it has filled a window.
    pub(crate) fn note(&self, written: Range<u64>) -> Option<Step> {
        let len_bytes = written.end - written.start;
        if len_bytes < LEAST_BYTES {
            return None;
        }
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.range = match state.written_bytes {
            0 => written,
            _ => state.range.start.min(written.start)..state.range.end.max(written.end),
        };
        state.written_bytes += len_bytes;
        if state.written_bytes < WINDOW_BYTES {
            return None;
        }
        state.written_bytes = 0;
        let begin = state.range.clone();
        state.begun.push_back(begin.clone());
        let leave = if state.begun.len() > WINDOWS { state.begun.pop_front() } else { None };
        Some(Step { begin, leave })
    }
}

#[cfg(test)]
impl Behind {
    /// How many windows are being written back.
    pub(crate) fn begun(&self) -> usize {
        self.0.lock().unwrap().begun.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_left_some_windows_later() {
        let behind = Behind::default();
        let mut steps = Vec::new();
        for at in (0..6 * WINDOW_BYTES).step_by(1 << 20) {
            steps.extend(behind.note(at..at + (1 << 20)));
            // A short write does not count, wherever it is.
            assert_eq!(behind.note(0..512), None);
        }
        let window = |number: u64| number * WINDOW_BYTES..(number + 1) * WINDOW_BYTES;
        let begun: Vec<_> = steps.iter().map(|step| step.begin.clone()).collect();
        assert_eq!(begun, (0..6).map(window).collect::<Vec<_>>());
        let left: Vec<_> = steps.into_iter().filter_map(|step| step.leave).collect();
        assert_eq!(left, [window(0), window(1)]);
    }
}
