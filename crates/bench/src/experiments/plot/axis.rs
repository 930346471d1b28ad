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
    /// Sizes in bytes, each twice the one before; a figure shows as many of their texts as there is room for.
    pub fn sizes(label: &str, sizes: &[u64]) -> Self {
        let (Some(least), Some(most)) = (sizes.first().copied(), sizes.last().copied()) else {
            return Self::names(label, &[]);
        };
        let (least, most) = (least.max(1), most.max(1));
        let ticks = sizes.iter().map(|size| (*size as f64, format_size(*size))).collect();
        // A single size stands in the middle.
        let ends = if least == most { (least as f64 / 2.0, most as f64 * 2.0) } else { (least as f64, most as f64) };
        Self { label: label.to_owned(), scale: Scale::Log, ends, ticks }
    }

    /// From a round number below positive `values` to one above them: with texts at 1, 2 and 5 where the powers of ten are few, else at these.
    pub fn log(label: &str, values: impl Iterator<Item = f64> + Clone) -> Self {
        const FEW_DECADES: f64 = 3.0;
        let values = values.filter(|value| *value > 0.0);
        let least = values.clone().fold(f64::INFINITY, f64::min);
        let most = values.fold(0.0, f64::max);
        let (least, most) = if most > 0.0 { (least, most) } else { (1.0, 10.0) };
        let digits: &[f64] = if (most / least).log10() <= FEW_DECADES { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let powers = least.log10().floor() as i32..=most.log10().ceil() as i32 + 1;
        let round: Vec<f64> =
            powers.flat_map(|power| digits.iter().map(move |digit| digit * 10f64.powi(power))).collect();
        let low = round.iter().rposition(|value| *value <= least * 1.0001).unwrap_or(0);
        let high =
            round.iter().position(|value| *value >= most * 0.9999).unwrap_or(round.len() - 1).max(low + digits.len());
        let ticks = round[low..=high].iter().map(|value| (*value, plain(*value))).collect();
        Self { label: label.to_owned(), scale: Scale::Log, ends: (round[low], round[high]), ticks }
    }

    /// From 0 to a round number above `most`.
    pub fn linear(label: &str, most: f64) -> Self {
        let most = if most > 0.0 { most } else { 1.0 };
        let step = step(most);
        let count = (most / step - 1e-9).ceil() as u32;
        let ticks = (0..=count).map(|number| f64::from(number) * step).map(|value| (value, plain(value))).collect();
        Self { label: label.to_owned(), scale: Scale::Linear, ends: (0.0, f64::from(count) * step), ticks }
    }

    /// From `low` to `high`, with texts at round numbers.
    pub fn between(label: &str, low: f64, high: f64) -> Self {
        let high = if high > low { high } else { low + 1.0 };
        let step = step(high - low);
        let (first, last) = ((low / step - 1e-9).ceil() as i64, (high / step + 1e-9).floor() as i64);
        let ticks = (first..=last).map(|number| number as f64 * step).map(|value| (value, plain(value))).collect();
        Self { label: label.to_owned(), scale: Scale::Linear, ends: (low, high), ticks }
    }

    /// Ratios from 0 on, so that twice is twice as high; 1 is among them.
    pub fn ratios(label: &str, values: impl Iterator<Item = f64>) -> Self {
        Self::linear(label, values.fold(1.0, f64::max) * 1.02)
    }

    /// A text at each of `values`, which come in order, such as numbers of guests. With a value that is not above 0 the scale is
    /// linear.
    pub fn at(label: &str, scale: Scale, values: &[f64]) -> Self {
        let (Some(least), Some(most)) = (values.first().copied(), values.last().copied()) else {
            return Self::names(label, &[]);
        };
        let scale = if least > 0.0 { scale } else { Scale::Linear };
        // A single value stands in the middle.
        let ends = match (least == most, scale) {
            (false, _) => (least, most),
            (true, Scale::Log) => (least / 2.0, most * 2.0),
            (true, Scale::Linear) => (least - 1.0, most + 1.0),
        };
        let ticks = values.iter().map(|value| (*value, plain(*value))).collect();
        Self { label: label.to_owned(), scale, ends, ticks }
    }

    /// Names side by side; the place of the first is 0, of the second 1.
    pub fn names(label: &str, names: &[&str]) -> Self {
        let ticks = names.iter().enumerate().map(|(number, name)| (number as f64, (*name).to_owned())).collect();
        let ends = (-0.5, names.len().max(1) as f64 - 0.5);
        Self { label: label.to_owned(), scale: Scale::Linear, ends, ticks }
    }

    /// A value as the axis writes it.
    pub fn text(&self, value: f64) -> String {
        let tick = self.ticks.iter().find(|(tick, _)| (tick - value).abs() <= tick.abs() * 1e-9);
        tick.map_or_else(|| plain(value), |(_, text)| text.clone())
    }

    /// True for a value past the upper end, which is drawn at that end.
    pub fn is_beyond(&self, value: f64) -> bool {
        value > self.ends.1 * (1.0 + 1e-9)
    }

    /// Where a value is, from 0 at one end to 1 at the other; what is past an end is there.
    pub fn place(&self, value: f64) -> f64 {
        let (low, high) = self.ends;
        let place = match self.scale {
            Scale::Linear => (value - low) / (high - low),
            Scale::Log => (value.max(f64::MIN_POSITIVE) / low).ln() / (high / low).ln(),
        };
        if place.is_nan() { 0.0 } else { place.clamp(0.0, 1.0) }
    }
}

/// A round number that divides a length into about five.
fn step(length: f64) -> f64 {
    let rough = length / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|digit| digit * power);
    steps.into_iter().find(|step| *step >= rough).unwrap_or(rough)
}

/// A number with as many digits as it needs, at most four after the point; from 10 000 on with spaces between thousands.
pub fn plain(value: f64) -> String {
    let text = format!("{value:.4}");
    let short = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    if value.abs() < 10_000.0 || !value.is_finite() {
        return if short == "-0" { "0".to_owned() } else { short.to_owned() };
    }
    let (whole, rest) = short.split_at(short.find('.').unwrap_or(short.len()));
    let (sign, digits) = whole.split_at(usize::from(whole.starts_with('-')));
    let first = digits.len() % 3;
    let groups = digits.as_bytes()[first..].chunks(3).map(|group| String::from_utf8_lossy(group).into_owned());
    let head = (first > 0).then(|| digits[..first].to_owned());
    format!("{sign}{}{rest}", head.into_iter().chain(groups).collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_axes_end_at_a_round_number() {
        assert_eq!(Axis::ratios("", [0.5].into_iter()).ends.1, 1.25);
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
    fn numbers_are_written_with_as_many_digits_as_they_need() {
        let texts = [0.0, -0.00001, 0.25, 1000.0, 12_345.5, 1_234_567.0, -20_000.0].map(plain);
        assert_eq!(texts, ["0", "0", "0.25", "1000", "12 345.5", "1 234 567", "-20 000"]);
    }

    #[test]
    fn names_and_values_have_their_places() {
        let names = Axis::names("", &["a", "b"]);
        assert_eq!((names.place(0.0), names.place(1.0), names.text(1.0)), (0.25, 0.75, "b".to_owned()));
        let guests = Axis::at("guests", Scale::Log, &[1.0, 2.0, 4.0]);
        assert_eq!((guests.place(2.0), guests.text(4.0)), (0.5, "4".to_owned()));
        assert_eq!(Axis::at("guests", Scale::Linear, &[3.0]).place(3.0), 0.5);
        let seconds = Axis::between("s", -60.0, 0.0);
        assert_eq!((seconds.ends, seconds.ticks.len()), ((-60.0, 0.0), 4));
    }

    #[test]
    fn sizes_are_a_power_of_two_apart() {
        let axis = Axis::sizes("", &[512, 1024, 2048]);
        assert_eq!((axis.place(512.0), axis.place(1024.0), axis.place(2048.0)), (0.0, 0.5, 1.0));
        assert_eq!(axis.ticks[1].1, "1 KiB");
        assert_eq!(Axis::sizes("", &[4096]).place(4096.0), 0.5);
    }
}
