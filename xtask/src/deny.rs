//! `cargo xtask deny`: cargo-deny's bans, licences and sources, by the rules in `deny.toml`.
//!
//! Its advisories need a site that a build must not depend on, so they are not asked for.

use crate::{Result, shell};

/// Runs cargo-deny; a counted skip where it is not installed.
pub fn run(_arguments: &[String]) -> Result<()> {
    if !shell::on_path("cargo-deny") {
        println!("SKIP deny: cargo-deny is not installed (cargo install --locked cargo-deny)");
        println!("0 passed, 0 failed, 1 skipped");
        return Ok(());
    }
    let checks = ["bans", "licenses", "sources"];
    let arguments = ["deny", "--log-level", "error", "check"];
    shell::run(shell::cargo().args(arguments).args(checks))?;
    println!("{} passed, 0 failed, 0 skipped", checks.len());
    Ok(())
}
