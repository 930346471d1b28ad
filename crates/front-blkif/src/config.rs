//! The settings with which a device is served, and the ways in which serving it can end.

use std::path::PathBuf;

use crate::keeping::FailedSyncs;
use crate::pages::Access;

/// How a disk is served to a guest.
#[derive(Clone)]
pub struct Config {
    /// The disk's name in messages.
    pub name: String,
    /// The back end's path in xenstore.
    pub backend_path: String,
    /// The image that was opened, as the toolstack has named it there (`params`).
    pub params: String,
    /// How the guest's pages are reached.
    pub access: Access,
    /// The most rings that a guest may use, 1 to 64.
    pub max_queues: u16,
    /// The largest ring that a guest may use has 2^`max_order` pages, 0 to 4.
    pub max_order: u32,
    /// The most segments of an indirect request, 0 to 256.
    pub max_indirect: u16,
    /// Refuse writes even if disk and toolstack would allow them.
    pub read_only: bool,
    /// Offer separate rings for responses ([`spile_xen::blkif::split`]).
    pub splits_rings: bool,
    /// The number of last requests whose times are kept in a file in `run_dir`; 0 for no such file ([`crate::trace`]).
    pub trace_records: u32,
    /// The folder in which a device keeps what its successor needs. It lies in memory: the next boot finds it empty.
    pub run_dir: PathBuf,
    /// Where failed syncs of the image are noted, from before it is opened until it is closed.
    pub failed_syncs: FailedSyncs,
}

/// How serving a device ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// This process was told to stop. The guest still has the disk, and waits for the next process.
    Stopped,
    /// The guest or the toolstack has closed the disk for good.
    Closed,
    /// The toolstack has asked for a pause ([`crate::pause`]). The guest still has the disk, and waits. Whoever opened
    /// the image closes it and then tells the toolstack ([`crate::pause::tell`]).
    Paused,
    /// A sync of the image had failed, so no flush could succeed any more, and the guest that waited for its flush has
    /// gone. The image has to be opened again before the next guest is served.
    FailedSync,
}
