//! `spile resize`: a disk that is being served grows under its guests.

use std::path::PathBuf;

use clap::Args;
use spile_core::{Error, ErrorKind, Result};

use super::Exit;
use crate::serving::control::{Link, Request};
use crate::units::parse_size;

/// Make a disk longer while it is served
///
/// Guests see the new size at once, without a reboot (vhost-user); NBD clients see it when they connect anew. Raw
/// images and block devices can grow; a block device has to be made longer first (lvextend). A disk is never
/// made shorter.
#[derive(Debug, Args)]
pub struct ResizeArgs {
    /// The control socket of the server: --control of `spile serve`
    control: PathBuf,
    /// The new size
    #[arg(value_parser = parse_size)]
    size: u64,
    /// The export, if it is not the server's first disk
    #[arg(long, value_name = "EXPORT", default_value = "")]
    name: String,
}

/// Runs `spile resize`.
///
/// # Errors
/// When nobody listens on the control socket, or the disk cannot get that size.
pub fn run(args: &ResizeArgs) -> Result<Exit> {
    let link = Link::connect(&args.control)?;
    let mut link = link.ok_or_else(|| {
        Error::new(ErrorKind::NotFound, "no server listens on this control socket")
            .at_path(&args.control)
            .hint("start `spile serve` with --control")
    })?;
    link.ask(&Request::Resize { export: args.name.clone(), size_bytes: args.size })?;
    Ok(Exit::Ok)
}
