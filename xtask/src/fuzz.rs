//! `cargo xtask fuzz`: the fuzz targets in `fuzz/`, or only their corpora.
//!
//! A long run needs cargo-fuzz and a nightly toolchain. The corpora need neither: `--corpus` runs
//! each kept input once through the same functions, as ordinary tests do.

use crate::Result;

/// Runs each target for `--seconds N`, or only the corpora with `--corpus`.
pub fn run(_arguments: &[String]) -> Result<()> {
    Err("no fuzz targets yet".into())
}
