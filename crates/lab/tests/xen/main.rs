//! The Xen host of ordinary processes: grants, event channels and xenstore as a back end sees them.

mod backend;
mod blkfront;
mod common;
mod events;
mod grants;
mod processes;
