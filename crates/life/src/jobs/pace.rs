//! How long a job waits after a piece.

use std::time::Duration;

/// No wait is longer than this, so that a change of the rate, a pause or a cancel has its effect soon.
const LONGEST: Duration = Duration::from_millis(50);

/// A piece that was moved.
pub(super) struct Pace {
    /// When it was begun.
    pub begun_ns: u64,
    /// Its length.
    pub bytes: u64,
    /// How long the move itself took.
    pub took_ns: u64,
    /// Guests had requests meanwhile.
    pub is_busy: bool,
}

impl Pace {
    /// How long to wait from now on before one looks again; `None` when the next piece may begin. A job without a limit waits as long as
    /// its piece took while guests work, and not at all while they do not.
    pub(super) fn pause(&self, limit_bytes_per_s: Option<u64>, now_ns: u64) -> Option<Duration> {
        let piece_ns = match limit_bytes_per_s {
            Some(limit) => u128::from(self.bytes) * 1_000_000_000 / u128::from(limit.max(1)),
            None if self.is_busy => u128::from(self.took_ns) * 2,
            None => 0,
        };
        let waited_ns = u128::from(now_ns.saturating_sub(self.begun_ns));
        let left_ns = piece_ns.checked_sub(waited_ns).filter(|left| *left > 0)?;
        Some(Duration::from_nanos(left_ns.min(u64::MAX.into()) as u64).min(LONGEST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_keeps_its_rate_and_leaves_guests_half_of_the_time() {
        let ms = |ms: u64| ms * 1_000_000;
        let pace = Pace { begun_ns: ms(100), bytes: 1 << 20, took_ns: ms(4), is_busy: true };
        assert_eq!(pace.pause(None, ms(104)), Some(Duration::from_millis(4)));
        assert_eq!(pace.pause(None, ms(108)), None);
        assert_eq!(Pace { is_busy: false, ..pace }.pause(None, ms(104)), None);
        let slow = Pace { begun_ns: ms(100), bytes: 1 << 20, took_ns: ms(4), is_busy: true };
        // 1 MiB at 100 MiB/s takes 10 ms; at 1 MiB/s the wait is looked at again soon.
        assert_eq!(slow.pause(Some(100 << 20), ms(104)), Some(Duration::from_millis(6)));
        assert_eq!(slow.pause(Some(1 << 20), ms(104)), Some(LONGEST));
    }
}
