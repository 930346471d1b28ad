//! [`LogLimit`]: a guest, a client or a server decides how often it makes a mistake, but not how long our log gets.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts events of one kind and says which of them go to the log: the first, then each time their number has doubled.
#[derive(Debug, Default)]
pub struct LogLimit(AtomicU64);

impl LogLimit {
    /// Counts one more event. Its number, counted from 1, when it is to be logged.
    pub fn count(&self) -> Option<u64> {
        Some(self.0.fetch_add(1, Ordering::Relaxed) + 1).filter(|number| number.is_power_of_two())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_logged_and_then_each_doubling() {
        let limit = LogLimit::default();
        let logged: Vec<_> = (0..20).filter_map(|_| limit.count()).collect();
        assert_eq!(logged, [1, 2, 4, 8, 16]);
    }
}
