//! A Xen host made of ordinary processes.
//!
//! A [`Host`] owns a folder with sockets: `xenstored` (and `xenstored-N` for guest N), which speak xenstore's protocol,
//! and `hypervisor`, over which processes find each other. A [`Guest`] is a process with memory and a grant table that
//! it shares; a [`Hypervisor`] uses what guests grant, as `spile_xen::Grants` and `spile_xen::EventChannels`. [`toolstack`] writes what `xl` would, and a
//! [`Blkfront`] is the guest's side of a disk.
//!
//! What is as on Xen: every operation is checked against the guest's table; marks of use keep a guest from revoking
//! what is in use; a copy is done by the kernel between two processes, all pieces of a call at once; a map makes page
//! table entries, an unmap removes them and flushes TLBs. What is not: absolute costs.

pub mod blkfront;
mod copy;
mod domains;
mod guest;
mod host;
mod hypervisor;
mod message;
mod pins;
mod serve;
pub mod state;
mod store;
mod table;
pub mod toolstack;

pub use blkfront::Blkfront;
pub use guest::{EventPort, Frames, GRANT_ENTRIES, Guest};
pub use host::Host;
pub use hypervisor::Hypervisor;
pub use table::{Entry, Table, flag};
