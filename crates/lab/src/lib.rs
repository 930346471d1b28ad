//! The other side of Spile's fronts, in ordinary processes: what guests and virtual machine monitors do. Tests and load
//! generators use it.
//!
//! [`vhost`] is a front end of vhost-user-blk: it owns memory as a guest does, drives split virtqueues in it, and speaks
//! to a server over its socket. [`xen`] is a Xen host: a xenstored, grants, event channels, and guests with a blkfront.
//! The queues of both are [`GuestQueue`]s. Tests can also break the protocols: they can write every message and every
//! byte of a ring.
#![deny(unsafe_code)]

mod queue;
mod sys;
pub mod vhost;
pub mod xen;

pub use queue::{Completion, GuestQueue};
