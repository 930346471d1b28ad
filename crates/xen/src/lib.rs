//! Xen's interfaces as both sides of a virtual disk use them.
//!
//! - [`Grants`] and [`EventChannels`] are the traits by which the same front serves a guest of a real Xen ([`sys`]) and
//!   a guest of the stand-in for Xen (crate `lab`).
//! - [`blkif`] is the ring's layout, as pure code.
//! - [`store`] speaks to xenstore: over the device on a real Xen, over a socket elsewhere.
#![deny(unsafe_code)]

pub mod blkif;
mod grants;
pub mod store;
pub mod sys;

pub use grants::{Channel, CopyOp, DomId, EventChannels, GrantRef, GrantStatus, Grants, Port, Way};

/// The size in bytes of a page that a guest grants. It does not depend on the size of this host's pages.
pub const XEN_PAGE_BYTES: usize = 4096;
