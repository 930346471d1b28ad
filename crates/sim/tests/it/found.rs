//! Rules that are broken on purpose, and the seeds that find them.

use std::fmt::Debug;
use std::iter::once;

use spile_sim::explore::Finding;

/// So many seeds are tried.
const SEEDS: u64 = 5000;

/// A seed finds the rule that `broken` breaks, by a message with `sign`, and nothing with `sound`, while the rule is kept.
///
/// `first` is tried before all others. It is one that found the rule once; when it does so no more, because the simulator draws something
/// else for it, the others are tried: that takes longer, and the output names a new one.
pub fn bites<B: Copy + Debug, S>(
    run: impl Fn(u64, B) -> Result<S, Finding>,
    (broken, sound): (B, B),
    first: u64,
    sign: &str,
) {
    let found = once(first).chain(0..SEEDS).find_map(|seed| {
        let finding = run(seed, broken).err().filter(|found| found.message.contains(sign))?;
        run(seed, sound).is_ok().then_some((seed, finding))
    });
    match found {
        Some((seed, finding)) => println!("{broken:?}: seed {seed}: {}", finding.message),
        None => panic!("no seed below {SEEDS} found {broken:?}"),
    }
}
