//! Rules that are broken on purpose, and the seeds that find them.

use std::fmt::Debug;
use std::iter::once;
use std::ops::Range;

use spile_sim::explore::Finding;

/// `first`, which is one that found something once, and then `seeds`, for it may do so no more when the simulator draws something else for it.
pub fn tried(first: u64, seeds: Range<u64>) -> impl Iterator<Item = u64> {
    once(first).chain(seeds)
}

/// One of `seeds` finds the rule that `broken` breaks, by a message with `sign`, and nothing with `sound`, while the rule is kept.
///
/// They come as [`tried`] says. When `first` finds nothing any more, that takes longer, and the output names a new one.
pub fn bites<B: Copy + Debug, S>(
    run: impl Fn(u64, B) -> Result<S, Finding>,
    (broken, sound): (B, B),
    (first, seeds): (u64, Range<u64>),
    sign: &str,
) {
    let found = tried(first, seeds.clone()).find_map(|seed| {
        let finding = run(seed, broken).err().filter(|found| found.message.contains(sign))?;
        run(seed, sound).is_ok().then_some((seed, finding))
    });
    match found {
        Some((seed, finding)) => println!("{broken:?}: seed {seed}: {}", finding.message),
        None => panic!("no seed of {seeds:?} found {broken:?}"),
    }
}
