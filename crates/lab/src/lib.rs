//! The other side of Spile's fronts, in ordinary processes: what a guest and its monitor do, for tests and for load.
//!
//! [`vhost`] is a front end of vhost-user-blk: it owns memory as a guest does, drives split virtqueues in it, and speaks
//! to a server over its socket. [`xen`] is a Xen host: a xenstored, grants, event channels, and guests with a blkfront.
//! Both can also be rude: every message and every ring byte can be written as one likes.
#![deny(unsafe_code)]

mod queue;
mod sys;
pub mod vhost;
pub mod xen;

pub use queue::{Completion, GuestQueue};
