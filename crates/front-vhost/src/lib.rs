//! The vhost-user-blk front: serves a disk to virtual machines through the virtqueues in their memory.
//!
//! The front end (QEMU, Cloud Hypervisor) connects to a Unix socket and shares the guest's memory; from then on
//! requests come straight from the guest's rings and data goes straight between the guest's memory and the disk. The
//! protocol is QEMU's `docs/interop/vhost-user.rst`; rings and requests are those of Virtual I/O Device Version 1.2,
//! split virtqueues. Guests and front ends are hostile: every number is read once, then checked, then used, and what is
//! wrong costs that request, that queue or that connection, never another.
//!
//! - [`wire`], `config`: messages and the configuration space as bytes; pure.
//! - `ring`, `request`, `memory`, `inflight`, `log`: what is in shared memory.
//! - `execute`: a request to its status. `queue`: a virtqueue at work on its worker.
//! - `channel`, `session`, `vring`, `server`: the socket, what the front end has told us, and when queues work.
//! - `shared`: front ends that do not share their guests' memory. `gate`: a disk that is on its way to another host, or from there. [`Handover`]: a connection that goes on in another process.
#![forbid(unsafe_code)]

mod channel;
mod config;
mod execute;
#[doc(hidden)]
pub mod fuzz;
mod gate;
mod handover;
mod inflight;
mod log;
mod memory;
mod queue;
mod request;
mod ring;
mod server;
mod session;
mod shared;
mod vring;
pub mod wire;

pub use gate::Pass;
pub use handover::{ConnectionState, Handover};
pub use server::{Config, Server};
pub use shared::Tell;
pub use spile_front::Passage;
