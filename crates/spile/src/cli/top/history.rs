//! What a disk did before: requests per second for its trend, and latencies by bucket for its heat map. Both are bounded.

use std::collections::VecDeque;

use spile_core::metrics::{BUCKETS, Latency, bounds_of};

/// So many intervals are kept: a terminal has rarely more columns.
const KEPT: usize = 400;
/// A row of the heat map is a half of a power of two: so many buckets of a histogram.
const BUCKETS_OF_ROW: usize = 16;
/// How many rows a heat map can have.
pub const ROWS: usize = BUCKETS / BUCKETS_OF_ROW;

/// What a disk did in its last intervals.
#[derive(Clone, Debug, Default)]
pub struct History {
    rates: VecDeque<f64>,
    /// For each interval the rows that are not empty, with their counts. An idle disk needs no memory here.
    latencies: VecDeque<Box<[(u8, u64)]>>,
}

impl History {
    /// Adds an interval: requests per second, and the latencies of those that ended.
    pub fn push(&mut self, requests_per_s: f64, latency: &Latency) {
        let rows = latency.counts.chunks(BUCKETS_OF_ROW).enumerate();
        let rows = rows.map(|(row, counts)| (row as u8, counts.iter().sum())).filter(|(_, count)| *count > 0);
        self.rates.push_back(requests_per_s);
        self.latencies.push_back(rows.collect());
        if self.rates.len() > KEPT {
            self.rates.pop_front();
            self.latencies.pop_front();
        }
    }

    /// Requests per second in the last intervals, at most `most` of them, the newest last.
    pub fn rates(&self, most: usize) -> impl Iterator<Item = f64> + Clone {
        self.rates.iter().skip(self.rates.len().saturating_sub(most)).copied()
    }

    /// How many requests ended in each of the last intervals, at most `most` of them, the newest last, by row of the heat map.
    pub fn latencies(&self, most: usize) -> impl Iterator<Item = &[(u8, u64)]> + Clone {
        self.latencies.iter().skip(self.latencies.len().saturating_sub(most)).map(AsRef::as_ref)
    }
}

/// The shortest latency of a row of the heat map, in nanoseconds.
pub fn row_start_ns(row: usize) -> u64 {
    bounds_of((row * BUCKETS_OF_ROW).min(BUCKETS - 1)).start
}

#[cfg(test)]
mod tests {
    use spile_core::metrics::bucket_of;

    use super::*;

    fn latency(latencies_ns: &[u64]) -> Latency {
        let mut counts = vec![0; BUCKETS];
        latencies_ns.iter().for_each(|ns| counts[bucket_of(*ns)] += 1);
        Latency { counts, ..Latency::default() }
    }

    #[test]
    fn rows_are_halves_of_powers_of_two() {
        let mut history = History::default();
        history.push(3.0, &latency(&[1 << 20, (1 << 20) + (1 << 19), (1 << 21) - 1, u64::MAX]));
        let rows: Vec<_> = history.latencies(9).next().unwrap().to_vec();
        assert_eq!(rows.iter().map(|(_, count)| *count).collect::<Vec<_>>(), [1, 2, 1]);
        assert_eq!((row_start_ns(rows[0].0.into()), row_start_ns(rows[1].0.into())), (1 << 20, (1 << 20) + (1 << 19)));
        assert_eq!(usize::from(rows[2].0), ROWS - 1);
    }

    #[test]
    fn only_the_last_intervals_are_kept() {
        let mut history = History::default();
        (0..KEPT + 5).for_each(|n| history.push(n as f64, &Latency::default()));
        assert_eq!(history.rates(usize::MAX).count(), KEPT);
        assert_eq!(history.rates(2).collect::<Vec<_>>(), [KEPT as f64 + 3.0, KEPT as f64 + 4.0]);
        assert!(history.latencies(3).all(<[_]>::is_empty));
    }
}
