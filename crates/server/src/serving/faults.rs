//! Faults that a test or a measurement asks for, by variables of the environment. No option does that: nobody else needs them.
//!
//! - `SPILE_TEST_PANIC=N[:SEED]` has about one in N requests of each disk panic, half of them before the image has them and half when
//!   it has done them. Without a seed each process has its own.
//! - `SPILE_TEST_SLOW=MS:BYTES` has each request that touches the first BYTES of a disk take MS milliseconds longer.

use std::sync::Arc;
use std::time::Duration;

use spile_core::{Env, Error, ErrorKind, Extent, Result};
use spile_engine::{Engine, OsEnv};
use spile_node::{Effect, Fault, Faults, Place};

use super::disks::Open;

const PANIC_VARIABLE: &str = "SPILE_TEST_PANIC";
/// The variable that has some requests take longer.
pub const SLOW_VARIABLE: &str = "SPILE_TEST_SLOW";

/// Puts the faults of the environment, if it names any, before a disk that was just opened.
///
/// # Errors
/// `InvalidInput` when a variable is not understood.
pub(super) fn attach(engine: &Engine, open: &Open) -> Result<()> {
    let panics = given(PANIC_VARIABLE, "N or N:SEED", parse)?;
    let slow = given(SLOW_VARIABLE, "MS:BYTES", parse_slow)?;
    if panics.is_none() && slow.is_none() {
        return Ok(());
    }
    let seed = panics.and_then(|(_, seed)| seed);
    let seed = seed.unwrap_or_else(|| u128::from_ne_bytes(OsEnv.random_16()) as u64);
    let mut rules = Vec::new();
    if let Some((one_in, _)) = panics {
        tracing::warn!("{PANIC_VARIABLE}: about one in {one_in} requests of {} panics, by seed {seed}", open.label);
        // Each of both effects has half.
        let rule = |effect| Fault { ops: Vec::new(), extent: None, per_million: 500_000 / one_in, effect };
        rules.extend([Effect::Panic, Effect::PanicAfter].map(rule));
    }
    if let Some((delay, end_bytes)) = slow {
        tracing::debug!(
            "{SLOW_VARIABLE}: requests to the first {end_bytes} bytes of {} take {delay:?} longer",
            open.label
        );
        let extent = Some(Extent::from_range(0..end_bytes));
        rules.push(Fault { ops: Vec::new(), extent, per_million: 1_000_000, effect: Effect::Delay(delay) });
    }
    let (disk, faults) = (open.disk.clone(), Arc::new(Faults::new(rules, seed, Arc::new(OsEnv))));
    engine.run_on(0, move || async move { disk.attach(Place::Fault, faults).await })
}

/// What a variable says, if it is there.
fn given<T>(variable: &str, usage: &str, parse: impl FnOnce(&str) -> Option<T>) -> Result<Option<T>> {
    let Some(text) = std::env::var_os(variable) else { return Ok(None) };
    let said = text.to_str().and_then(parse).ok_or_else(|| {
        let what = format!("{variable}={text:?} is not understood");
        Error::new(ErrorKind::InvalidInput, what).hint(format!("use {usage}"))
    });
    said.map(Some)
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

/// `MS:BYTES`.
fn parse_slow(text: &str) -> Option<(Duration, u64)> {
    let (ms, bytes) = text.split_once(':')?;
    let bytes = bytes.parse().ok().filter(|bytes| *bytes > 0)?;
    Some((Duration::from_millis(ms.parse().ok()?), bytes))
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

    #[test]
    fn the_other_variable_says_how_long_and_how_far() {
        assert_eq!(parse_slow("100:4096"), Some((Duration::from_millis(100), 4096)));
        assert!(["", "5", "5:", ":5", "5:0", "x:5"].iter().all(|text| parse_slow(text).is_none()));
    }
}
