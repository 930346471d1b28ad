//! `spile xen-lab`: a Xen host made of ordinary processes.

use std::path::PathBuf;

use clap::Args;
use spile_core::{Error, Result};
use spile_lab::xen::Host;

use super::{Exit, try_say};
use crate::notify::notify;
use crate::signals::EndSignals;

/// Be a Xen for other processes of this machine: xenstore, grants and event channels, without a hypervisor
///
/// Back ends find it by `spile xen-backend --lab DIR`, and a guest with a load by `spile load xen-lab:DIR`. Each guest is
/// a process with memory and a grant table of its own; what it grants is checked and copied or mapped as on Xen.
/// Such a Xen shows the order and the shape of costs, not Xen's own costs. Ends by SIGTERM or SIGINT.
#[derive(Debug, Args)]
pub struct XenLabArgs {
    /// A folder for its sockets, which is made if there is none
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Runs `spile xen-lab`.
///
/// # Errors
/// When the folder or its sockets cannot be made.
pub fn run(args: &XenLabArgs) -> Result<Exit> {
    let signals = EndSignals::block()?;
    std::fs::create_dir_all(&args.dir).map_err(|source| Error::io("make the folder", source).at_path(&args.dir))?;
    let host = Host::start(&args.dir)?;
    let _ = try_say(format_args!("a Xen of ordinary processes in {}", host.dir().display()));
    notify("READY=1");
    signals.wait()?;
    Ok(Exit::Ok)
}
