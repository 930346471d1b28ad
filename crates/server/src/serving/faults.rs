//! Panics that a test asks for: `SPILE_TEST_PANIC=N[:SEED]` in the environment has about one in N requests of each disk
//! panic, half of them before the image has them and half when it has done them. Without a seed each process has its own. No
//! option does that: nobody needs it but tests of what becomes of guests then.

use std::sync::Arc;

use spile_core::{Env, Error, ErrorKind, Result};
use spile_engine::{Engine, OsEnv};
use spile_node::{Effect, Fault, Faults, Place};

use super::disks::Open;

const VARIABLE: &str = "SPILE_TEST_PANIC";

/// Puts the faults of the environment, if it names any, before a disk that was just opened.
///
/// # Errors
/// `InvalidInput` when the variable is not understood.
pub(super) fn attach(engine: &Engine, open: &Open) -> Result<()> {
    let Some(text) = std::env::var_os(VARIABLE) else { return Ok(()) };
    let (one_in, seed) = text.to_str().and_then(parse).ok_or_else(|| {
        Error::new(ErrorKind::InvalidInput, format!("{VARIABLE}={text:?} is not understood")).hint("use N or N:SEED")
    })?;
    let seed = seed.unwrap_or_else(|| u128::from_ne_bytes(OsEnv.random_16()) as u64);
    tracing::warn!("{VARIABLE}: about one in {one_in} requests of {} panics, by seed {seed}", open.label);
    // Each of both effects has half.
    let rule = |effect| Fault { ops: Vec::new(), extent: None, per_million: 500_000 / one_in, effect };
    let rules = [Effect::Panic, Effect::PanicAfter].map(rule).to_vec();
    let (disk, faults) = (open.disk.clone(), Arc::new(Faults::new(rules, seed, Arc::new(OsEnv))));
    engine.run_on(0, move || async move { disk.attach(Place::Fault, faults).await })
}

/// `N` or `N:SEED`.
fn parse(text: &str) -> Option<(u32, Option<u64>)> {
    let (one_in, seed) = text.split_once(':').map_or((text, None), |(one_in, seed)| (one_in, Some(seed)));
    let one_in = one_in.parse().ok().filter(|one_in| *one_in > 0)?;
    match seed {
        None => Some((one_in, None)),
        Some(seed) => Some((one_in, Some(seed.parse().ok()?))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_says_how_often_and_perhaps_the_seed() {
        assert_eq!(parse("200"), Some((200, None)));
        assert_eq!(parse("200:7"), Some((200, Some(7))));
        assert!(["", "0", "x", "1:", "1:x", "-1"].iter().all(|text| parse(text).is_none()));
    }
}
