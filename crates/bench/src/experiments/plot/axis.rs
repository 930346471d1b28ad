//! Scales and their ticks.

use spile_server::units::format_size;

/// How values become places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// By their size.
    Linear,
    /// By their logarithm.
    Log,
}

/// An axis.
#[derive(Clone, Debug)]
pub struct Axis {
    /// What it shows, with the unit.
    pub label: String,
    /// How.
    pub scale: Scale,
    /// The values at its ends.
    pub ends: (f64, f64),
    /// Values with a text.
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Sizes in bytes, each twice the one before: every second has a text, or each if they are few.
    ///
    /// # Panics
    /// When there are none.
    pub fn sizes(label: &str, sizes: &[u64]) -> Self {
        let (least, most) = (sizes[0], *sizes.last().expect("there are sizes"));
        let step = if sizes.len() > 7 { 2 } else { 1 };
        let ticks = sizes.iter().step_by(step).map(|size| (*size as f64, format_size(*size))).collect();
        // A single size stands in the middle.
        let ends = if least == most { (least as f64 / 2.0, most as f64 * 2.0) } else { (least as f64, most as f64) };
        Self { label: label.to_owned(), scale: Scale::Log, ends, ticks }
    }

    /// Powers of ten around positive `values`, with ticks at 1, 2 and 5 where there are few.
    pub fn log(label: &str, values: impl Iterator<Item = f64> + Clone) -> Self {
        let values = values.filter(|value| *value > 0.0);
        let least = values.clone().fold(f64::INFINITY, f64::min);
        let most = values.fold(0.0, f64::max);
        let (least, most) = if most > 0.0 { (least, most) } else { (1.0, 10.0) };
        let (low, high) =
            (least.log10().floor() as i32, (most.log10().ceil() as i32).max(least.log10().floor() as i32 + 1));
        let digits: &[f64] = if high - low <= 2 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let ends = (10f64.powi(low), 10f64.powi(high));
        let all = (low..=high).flat_map(|power| digits.iter().map(move |digit| digit * 10f64.powi(power)));
        let ticks = all.filter(|value| *value <= ends.1 * 1.0001).map(|value| (value, plain(value))).collect();
        Self { label: label.to_owned(), scale: Scale::Log, ends, ticks }
    }

    /// From 0 to a round number above `most`.
    pub fn linear(label: &str, most: f64) -> Self {
        let most = if most > 0.0 { most } else { 1.0 };
        let rough = most / 5.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|digit| digit * power).find(|step| *step >= rough);
        let step = step.unwrap_or(rough);
        let count = (most / step - 1e-9).ceil() as u32;
        let ticks = (0..=count).map(|number| f64::from(number) * step).map(|value| (value, plain(value))).collect();
        Self { label: label.to_owned(), scale: Scale::Linear, ends: (0.0, f64::from(count) * step), ticks }
    }

    /// Where a value is, from 0 at one end to 1 at the other; what is past an end is there.
    pub fn place(&self, value: f64) -> f64 {
        let (low, high) = self.ends;
        let place = match self.scale {
            Scale::Linear => (value - low) / (high - low),
            Scale::Log => (value.max(f64::MIN_POSITIVE) / low).ln() / (high / low).ln(),
        };
        place.clamp(0.0, 1.0)
    }
}

/// A number with as many digits as it needs, at most four after the point.
fn plain(value: f64) -> String {
    let text = format!("{value:.4}");
    let short = text.trim_end_matches('0').trim_end_matches('.').to_owned();
    if value >= 10_000.0 {
        short.len().checked_sub(3).map_or(short.clone(), |at| format!("{} {}", &short[..at], &short[at..]))
    } else {
        short
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_axes_end_at_a_round_number() {
        let axis = Axis::linear("", 7.3);
        assert_eq!((axis.ends, axis.ticks.len()), ((0.0, 8.0), 5));
        assert_eq!((axis.place(4.0), axis.place(9.0)), (0.5, 1.0));
        assert_eq!(Axis::linear("", 0.0).ends, (0.0, 1.0));
        assert_eq!(Axis::linear("", 10.0).ends.1, 10.0);
    }

    #[test]
    fn logarithmic_axes_hold_all_values() {
        let axis = Axis::log("", [3.0, 4200.0].into_iter());
        assert_eq!(axis.ends, (1.0, 10_000.0));
        assert_eq!(
            axis.ticks.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>(),
            ["1", "10", "100", "1000", "10 000"]
        );
        let few = Axis::log("", [1.0].into_iter());
        assert_eq!((few.ends, few.ticks.len()), ((1.0, 10.0), 4));
        assert!(Axis::log("", [0.0].into_iter()).ends.1 > 0.0);
    }

    #[test]
    fn sizes_are_a_power_of_two_apart() {
        let axis = Axis::sizes("", &[512, 1024, 2048]);
        assert_eq!((axis.place(512.0), axis.place(1024.0), axis.place(2048.0)), (0.0, 0.5, 1.0));
        assert_eq!(axis.ticks[1].1, "1 KiB");
        assert_eq!(Axis::sizes("", &[4096]).place(4096.0), 0.5);
    }
}
