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

/// The value that the share `share` of `values` is below, between two of them by their distances; 0 of nothing.
pub fn quantile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let Some(last) = values.len().checked_sub(1) else { return 0.0 };
    let place = share.clamp(0.0, 1.0) * last as f64;
    let (below, above) = (values[place.floor() as usize], values[place.ceil() as usize]);
    below + (above - below) * place.fract()
}

/// A median and how far what was measured lies around it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// A tenth of what was measured is below this.
    pub p10: f64,
    /// Half of what was measured is below this.
    pub p50: f64,
    /// Nine tenths of what was measured are below this.
    pub p90: f64,
}

impl Spread {
    /// Of repeated measurements; all 0 when there are none.
    pub fn of(values: &[f64]) -> Self {
        let at = |share| quantile(values.to_vec(), share);
        Self { p10: at(0.1), p50: median(values.to_vec()), p90: at(0.9) }
    }

    /// From the columns in which a row keeps it; `None` when one of them is empty.
    pub fn of_columns(p10: Option<f64>, p50: Option<f64>, p90: Option<f64>) -> Option<Self> {
        Some(Self { p10: p10?, p50: p50?, p90: p90? })
    }

    /// Of the ratios of one side to the other, which were measured in turns: the first of one to the first of the other, and so
    /// on. `None` when there are none.
    pub fn of_ratios(these: &[f64], others: &[f64]) -> Option<Self> {
        let ratios: Vec<f64> =
            these.iter().zip(others).filter(|(_, other)| **other > 0.0).map(|(this, other)| this / other).collect();
        (!ratios.is_empty()).then(|| Self::of(&ratios))
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

    #[test]
    fn nine_of_ten_lie_below_the_ninth_tenth() {
        let spread = Spread::of(&(0..=100).rev().map(f64::from).collect::<Vec<f64>>());
        assert_eq!(spread, Spread { p10: 10.0, p50: 50.0, p90: 90.0 });
        assert_eq!(Spread::of(&[2.0]), Spread { p10: 2.0, p50: 2.0, p90: 2.0 });
        assert_eq!(Spread::of(&[]), Spread::default());
        assert_eq!(quantile(vec![1.0, 2.0], 0.5), 1.5);
    }

    #[test]
    fn ratios_are_of_what_was_measured_together() {
        let spread = Spread::of_ratios(&[2.0, 4.0, 9.0], &[1.0, 2.0, 3.0]).unwrap();
        assert_eq!((spread.p50, spread.p90), (2.0, 2.8));
        assert_eq!(Spread::of_ratios(&[1.0], &[0.0]), None);
    }

    #[test]
    fn a_row_without_a_median_or_an_end_has_no_spread() {
        assert_eq!(Spread::of_columns(Some(1.0), Some(2.0), Some(3.0)), Some(Spread { p10: 1.0, p50: 2.0, p90: 3.0 }));
        assert_eq!(Spread::of_columns(Some(1.0), None, Some(3.0)), None);
        assert_eq!(Spread::of_columns(None, Some(2.0), Some(3.0)), None);
    }
}
