//! How runs of data are put onto a disk, with what is zero left out.

use std::ops::Range;

use spile_core::{Disk, Extent, Result, Segments, WriteZeroes};

/// What a destination reads as before it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beneath {
    /// It is new.
    Zeroes,
    /// It is overwritten: zeroes have to be written too.
    Anything,
}

/// Makes the range read as zeroes, where it may read as something else.
///
/// # Errors
/// The disk's.
pub async fn zero(dst: &impl Disk, beneath: Beneath, range: Range<u64>) -> Result<()> {
    if beneath == Beneath::Zeroes || range.is_empty() {
        return Ok(());
    }
    dst.write_zeroes(Extent::from_range(range), WriteZeroes { may_unmap: true, only_if_fast: false }).await
}

/// Writes `bytes` at `start`, but for those that are zero; returns how many bytes of data were written.
///
/// # Errors
/// The disk's.
pub async fn put(dst: &impl Disk, beneath: Beneath, start: u64, bytes: &Segments) -> Result<u64> {
    let (mut at, mut written) = (start, 0);
    for run in data_runs(bytes) {
        written += run.len() as u64;
        let extent = Extent::from_range(start + run.start as u64..start + run.end as u64);
        zero(dst, beneath, at..extent.start()).await?;
        dst.write(extent, &bytes.slice(run), false).await?;
        at = extent.end();
    }
    zero(dst, beneath, at..start + bytes.len() as u64).await?;
    Ok(written)
}

/// Zeroes are looked for in units of this many bytes.
const GRANULE: usize = 4096;
/// A gap of zeroes this long or longer is left out.
const GAP: usize = 32 << 10;

/// The runs of `bytes` that are not all zeroes, in units of 4 KiB. Gaps of less than 32 KiB between them are included, because one more
/// request costs more than these bytes.
pub fn data_runs(bytes: &Segments) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for start in (0..bytes.len()).step_by(GRANULE) {
        let end = bytes.len().min(start + GRANULE);
        if bytes.slice(start..end).is_zero() {
            continue;
        }
        match runs.last_mut() {
            Some(last) if start - last.end < GAP => last.end = end,
            _ => runs.push(start..end),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_are_left_out_where_it_pays() {
        let bytes = Segments::zeroed(200_000);
        assert!(data_runs(&bytes).is_empty());
        bytes.copy_from_slice(5000, &[1]);
        bytes.copy_from_slice(20_000, &[1]);
        bytes.copy_from_slice(100_000, &[1]);
        bytes.copy_from_slice(199_999, &[1]);
        assert_eq!(data_runs(&bytes), [4096..20_480, 98_304..102_400, 196_608..200_000]);
    }
}
