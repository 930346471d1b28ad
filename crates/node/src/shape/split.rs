//! One large read or write becomes several parts that are in flight together.
//!
//! Parts share the memory of the request: nothing is copied. They begin at multiples of their size on the disk, so a part lies in no
//! more blocks or clusters of an image than it must. The request ends when all parts have ended, with the error of the first part
//! on the disk that has failed.

use futures_util::future::join_all;
use spile_core::{Extent, Io, Op, Result};

/// The most parts of a request. A request that would have more gets larger parts.
const MAX_PARTS: u64 = 64;

/// Executes `io` in parts of `part_bytes` (a power of two). `on` executes a part.
///
/// A write with `fua` promises itself only, not the parts before it. So parts are written without it, and one flush then promises them
/// all.
pub(super) async fn execute(part_bytes: u64, io: Io<'_>, on: impl AsyncFn(Io<'_>) -> Result<()>) -> Result<()> {
    let (op, must_flush) = match io.op {
        Op::Write { fua } => (Op::Write { fua: false }, fua),
        op => (op, false),
    };
    let on = &on;
    let parts = parts(io.extent, part_bytes).map(|part| async move {
        let start = (part.start() - io.extent.start()) as usize;
        let segments = io.segments.slice(start..start + part.len_bytes as usize);
        on(Io { op, extent: part, segments: &segments }).await
    });
    join_all(parts).await.into_iter().collect::<Result<()>>()?;
    match must_flush {
        true => on(Io::flush()).await,
        false => Ok(()),
    }
}

/// The parts of `whole`, in order: at most [`MAX_PARTS`], of at least `part_bytes` but for the first and the last.
fn parts(whole: Extent, part_bytes: u64) -> impl Iterator<Item = Extent> {
    let mut part_bytes = part_bytes;
    while whole.len_bytes.div_ceil(part_bytes) > MAX_PARTS {
        part_bytes *= 2;
    }
    let first = whole.start() / part_bytes * part_bytes;
    let starts = (first..whole.end()).step_by(part_bytes as usize);
    starts.map(move |start| Extent::from_range(start.max(whole.start())..(start + part_bytes).min(whole.end())))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parts_begin_at_multiples_of_their_size() {
        let found: Vec<_> = parts(Extent::from_range(3000..20000), 8192).map(|part| part.range()).collect();
        assert_eq!(found, [3000..8192, 8192..16384, 16384..20000]);
        assert_eq!(parts(Extent::from_range(0..4 << 20), 64 << 10).count(), 64);
        assert_eq!(parts(Extent::from_range(0..8 << 20), 64 << 10).count(), 64);
    }

    proptest! {
        #[test]
        fn parts_cover_the_request_once(start in 0..1_u64 << 40, len in 1..64_u64 << 20, power in 12..25_u32) {
            let whole = Extent::from_range(start..start + len);
            let parts: Vec<_> = parts(whole, 1 << power).collect();
            prop_assert!(parts.len() as u64 <= MAX_PARTS + 1, "{} parts", parts.len());
            prop_assert_eq!(parts[0].start(), whole.start());
            prop_assert_eq!(parts.last().unwrap().end(), whole.end());
            prop_assert!(parts.windows(2).all(|two| two[0].end() == two[1].start() && two[1].start() % (1 << power) == 0));
        }
    }
}
