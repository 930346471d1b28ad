//! A Xen host made of ordinary processes.
//!
//! A [`Host`] owns a folder with sockets: `xenstored` (and `xenstored-N` for guest N), which speak xenstore's protocol,
//! and `hypervisor`, over which processes find each other. A [`Guest`] is a process with memory and a grant table that
//! it shares; a [`Hypervisor`] uses what guests grant, as `spile_xen::Grants` and `spile_xen::EventChannels`.
//! [`toolstack`] writes what `xl` would, and a [`Blkfront`] is the guest's side of a disk. On a *real* Xen a program has
//! [`Gntalloc`] and [`UnboundPort`] in the place of a [`Guest`]: the example `hostile_front` is one that uses them.
//!
//! These things are as on Xen:
//! - Every operation is checked against the guest's table in shared memory. Each piece of an operation fails by itself.
//!   A process asks the host once about a domain, never about an operation.
//! - Marks of use keep a guest from revoking a grant that is in use, and from moving it to another page.
//! - A copy is done by the kernel between two processes, all pieces of a call at once. A map makes page table entries
//!   inside one mapping of the guest's memory, an unmap removes them and flushes TLBs: all pages of a call with one
//!   system call each (from Linux 6.15 on; before, one for each run of pages that lie side by side).
//! - A channel is signalled when it is bound. After the death of a back end its successor can bind the channel again. A
//!   domain's nodes in xenstore stay after its end.
//!
//! These things differ from Xen:
//! - Absolute costs. What costs more than what can be seen here, Xen's own figures cannot.
//! - Each process of a back end counts marks of use by itself.
//! - A guest in the back end's own process is reached by a mapping of the back end's, because the guest may unmap its own
//!   memory during a copy.

pub mod blkfront;
mod copy;
mod domain;
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

pub use crate::sys::{Gntalloc, Granted, UnboundPort};
