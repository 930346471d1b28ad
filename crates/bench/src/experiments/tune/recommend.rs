//! The shape that follows from the figures of `spile tune`.

use spile_node::Shape;

use super::Row;
use crate::experiments::sample::median;

/// Lengths of requests for which splitting has to pay, in bytes.
const LARGE_BYTES: [u64; 4] = [512 << 10, 1 << 20, 2 << 20, 4 << 20];
/// Sizes of parts that may be recommended, in bytes.
const PARTS_BYTES: std::ops::RangeInclusive<u64> = 4 << 10..=256 << 10;
/// A request is split into so many parts at most: one that would have more gets larger parts.
const MOST_PARTS: u64 = 64;
/// Splitting is recommended when large requests become so many times as fast.
const PAYS: f64 = 1.15;
/// Of sizes that are almost as good as the best one, the largest is recommended: fewer parts cost less work.
const ALMOST: f64 = 0.97;

/// The median throughput of one pair of sizes.
pub fn rate(rows: &[Row], outstanding_bytes: u64, block_bytes: u64) -> Option<f64> {
    let rows = rows.iter().filter(|row| (row.outstanding_bytes, row.block_bytes) == (outstanding_bytes, block_bytes));
    let rates: Vec<f64> = rows.map(|row| row.bytes_per_s).collect();
    (!rates.is_empty()).then(|| median(rates))
}

/// How many times as fast requests of all [`LARGE_BYTES`] are in parts of this size as whole, in the geometric mean; `None` when one of
/// them was not measured. All sizes of parts are judged by the same requests, and as Spile splits them.
fn gain(rows: &[Row], part_bytes: u64) -> Option<f64> {
    let gain = |size: u64| {
        let parts = rate(rows, size, part_bytes.max(size / MOST_PARTS))?;
        Some((parts / rate(rows, size, size)?).max(1e-6).ln())
    };
    let gains: Vec<f64> = LARGE_BYTES.into_iter().map(gain).collect::<Option<_>>()?;
    Some((gains.iter().sum::<f64>() / gains.len() as f64).exp())
}

/// The shape that suits the device, and how many times as fast parts of the best size are; 0 when no size of parts was measured
/// with all requests.
pub fn shape(rows: &[Row]) -> (Shape, f64) {
    let sizes = std::iter::successors(Some(*PARTS_BYTES.start()), |size| Some(size * 2));
    let gains: Vec<(u64, f64)> = sizes
        .take_while(|size| PARTS_BYTES.contains(size))
        .filter_map(|size| Some((size, gain(rows, size)?)))
        .collect();
    let best = gains.iter().map(|(_, gain)| *gain).fold(0.0, f64::max);
    let good = gains.iter().rev().find(|(_, gain)| *gain >= ALMOST * best);
    match good {
        Some((size, _)) if best >= PAYS => (Shape::Split(*size as u32), best),
        _ => (Shape::Off, best),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{rows, spinning};
    use super::*;

    #[test]
    fn a_device_with_channels_gets_parts() {
        // A request keeps one channel busy, whatever its size; there are eight.
        let ssd = rows(|block, depth| 1e8 * depth.min(8) as f64 * (block as f64 / (block as f64 + 4096.0)));
        let (shape, gain) = shape(&ssd);
        assert!(matches!(shape, Shape::Split(bytes) if (32 << 10..=64 << 10).contains(&bytes)), "{shape}");
        assert!(gain > 3.0, "{gain}");
    }

    #[test]
    fn small_parts_are_not_judged_by_the_smallest_requests_alone() {
        // Requests of 512 KiB gain twice as much as longer ones, in parts of any size. Parts of 256 KiB are the best ones.
        let rate = |block: u64, depth: u64| match (block * depth, depth) {
            (_, 1) => 1e9,
            (total, _) if total > 512 << 10 => 1.2e9 + block as f64,
            _ => 2e9 + block as f64,
        };
        assert_eq!(shape(&rows(rate)).0, Shape::Split(256 << 10));
        // Parts that were not measured with all lengths of requests are not recommended.
        let mut some = rows(rate);
        some.retain(|row| row.outstanding_bytes < 4 << 20 || row.queue_depth != 16);
        assert_eq!(shape(&some).0, Shape::Split(128 << 10));
    }

    #[test]
    fn a_spinning_disk_keeps_whole_requests() {
        assert_eq!(shape(&rows(spinning)).0, Shape::Off);
    }

    #[test]
    fn a_little_more_is_not_worth_it() {
        assert_eq!(shape(&rows(|_, depth| if depth > 1 { 1.1e9 } else { 1e9 })).0, Shape::Off);
        assert_eq!(shape(&[]), (Shape::Off, 0.0));
    }
}
