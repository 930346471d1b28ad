//! How a device is served, and how that ends.

use std::path::PathBuf;

use crate::keeping::FailedSyncs;
use crate::pages::Access;

/// How a disk is served to a guest.
#[derive(Clone)]
pub struct Config {
    /// For messages.
    pub name: String,
    /// The back end's path in xenstore.
    pub backend_path: String,
    /// How the guest's pages are reached.
    pub access: Access,
    /// Rings at most, 1 to 64.
    pub max_queues: u16,
    /// A ring has at most 2^`max_order` pages, 0 to 4.
    pub max_order: u32,
    /// Segments of an indirect request at most, 0 to 256.
    pub max_indirect: u16,
    /// Refuse writes even if disk and toolstack would allow them.
    pub read_only: bool,
    /// Offer rings of their own for responses ([`spile_xen::blkif::split`]).
    pub splits_rings: bool,
    /// Note the times of the last so many requests in a file in `run_dir`; 0 for none ([`crate::trace`]).
    pub trace_records: u32,
    /// Where what a successor needs is kept: a folder in memory, that the next boot finds empty.
    pub run_dir: PathBuf,
    /// Told by whoever has the image, from before it is opened until it is closed.
    pub failed_syncs: FailedSyncs,
}

/// How a device ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It was stopped; the guest still has it, and waits.
    Stopped,
    /// Guest or toolstack have closed it for good.
    Closed,
    /// The toolstack wants the image ([`crate::pause`]); the guest still has the disk, and waits. Whoever has the image
    /// closes it and says so ([`crate::pause::tell`]).
    Paused,
    /// A sync had failed, so that no flush could succeed any more, and the guest whom that kept waiting has gone. For the
    /// next one the image is to be opened anew.
    Worn,
}
