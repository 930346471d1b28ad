//! Rules that are broken on purpose, and the seeds that find them.

use std::fmt::Debug;
use std::iter::once;
use std::ops::Range;

use spile_sim::explore::Finding;

/// One of `seeds` finds the rule that `broken` breaks, by a message with `sign`, and nothing with `sound`, while the rule is kept.
///
/// `first` is tried before all others. It is one that found the rule once; when it does so no more, because the simulator draws something
/// else for it, the others are tried: that takes longer, and the output names a new one.
pub fn bites<B: Copy + Debug, S>(
    run: impl Fn(u64, B) -> Result<S, Finding>,
    (broken, sound): (B, B),
    (first, seeds): (u64, Range<u64>),
    sign: &str,
) {
    let found = once(first).chain(seeds.clone()).find_map(|seed| {
        let finding = run(seed, broken).err().filter(|found| found.message.contains(sign))?;
        run(seed, sound).is_ok().then_some((seed, finding))
    });
    match found {
        Some((seed, finding)) => println!("{broken:?}: seed {seed}: {}", finding.message),
        None => panic!("no seed of {seeds:?} found {broken:?}"),
    }
}
