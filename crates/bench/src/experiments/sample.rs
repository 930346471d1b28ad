//! What is kept of measured times, and what is said of them.

/// The share of requests that is dropped at either end: of 100 the fastest 20 and the slowest 20.
const DROPPED: f64 = 0.2;

/// The middle of `samples` by `key`, in order: without the fastest and the slowest fifth. Of fewer than five, all.
pub fn trimmed<T>(mut samples: Vec<T>, key: impl Fn(&T) -> u64) -> Vec<T> {
    samples.sort_by_key(key);
    let dropped = (samples.len() as f64 * DROPPED) as usize;
    samples.truncate(samples.len() - dropped);
    samples.drain(..dropped);
    samples
}

/// The arithmetic mean; 0 of nothing.
pub fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (count, sum) = values.into_iter().fold((0u64, 0.0), |(count, sum), value| (count + 1, sum + value));
    if count == 0 { 0.0 } else { sum / count as f64 }
}

/// The middle one, or the mean of the two in the middle; 0 of nothing.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        len if len % 2 == 1 => values[len / 2],
        len => (values[len / 2 - 1] + values[len / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twenty_of_a_hundred_go_at_either_end() {
        let kept = trimmed((0..100).rev().collect(), |value| *value);
        assert_eq!(kept, (20..80).collect::<Vec<u64>>());
    }

    #[test]
    fn a_few_are_all_kept() {
        assert_eq!(trimmed(vec![4, 1, 3], |value| *value), [1, 3, 4]);
        assert_eq!(trimmed(vec![5, 4, 1, 3, 9], |value| *value), [3, 4, 5]);
        assert!(trimmed(Vec::<u64>::new(), |value| *value).is_empty());
    }

    #[test]
    fn one_wild_request_does_not_count() {
        let mut samples = vec![10; 99];
        samples.push(1_000_000);
        assert_eq!(mean(trimmed(samples, |value| *value).into_iter().map(|ns| ns as f64)), 10.0);
    }

    #[test]
    fn middles() {
        assert_eq!((median(vec![3.0, 1.0, 2.0]), median(vec![4.0, 1.0, 2.0, 3.0]), median(vec![])), (2.0, 2.5, 0.0));
        assert_eq!((mean([1.0, 2.0, 6.0]), mean([])), (3.0, 0.0));
    }
}
