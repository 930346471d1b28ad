//! A Xen host made of ordinary processes.
//!
//! A [`Host`] owns a folder with sockets: `xenstored` (and `xenstored-N` for guest N), which speak xenstore's protocol,
//! and `hypervisor`, over which processes find each other. A [`Guest`] is a process with memory and a grant table that
//! it shares; a [`Hypervisor`] uses what guests grant, as `spile_xen::Grants` and `spile_xen::EventChannels`.
//! [`toolstack`] writes what `xl` would, and a [`Blkfront`] is the guest's side of a disk. On a *real* Xen a program has
//! [`Gntalloc`] and [`UnboundPort`] in the place of a [`Guest`]: the example `hostile_front` is one that uses them.
//!
//! What is as on Xen:
//! - Every operation is checked against the guest's table in shared memory, and fails as there: piece by piece. The host
//!   is asked once about a domain, never about an operation.
//! - Marks of use keep a guest from revoking what is in use, and what is in use stays where it is.
//! - A copy is done by the kernel between two processes, all pieces of a call at once. A map makes page table entries
//!   inside one mapping of the guest's memory, an unmap removes them and flushes TLBs: all pages of a call with one
//!   system call each (from Linux 6.15 on; before, one for each run of pages that lie side by side).
//! - A channel rings when it is bound, a dead back end's successor can bind it again, a domain's nodes outlive it.
//!
//! What is not: absolute costs. Orders and shapes can be seen here, Xen's own figures cannot. Marks of use are counted in
//! each back end's process by itself, and a guest in the back end's own process is reached by a mapping of ours, for its
//! own may go under a copy.

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

pub use crate::sys::{Gntalloc, Granted, UnboundPort};
