//! Spile: serves virtual disks to guests.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    spile::cli::run()
}
