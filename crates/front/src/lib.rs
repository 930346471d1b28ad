//! What all fronts share. A front speaks one wire protocol to guests or clients: NBD, vhost-user-blk, blkif.
//!
//! - [`serve_ring`] runs a ring that a guest shares with us, in turns; [`Slots`] are its requests in flight.
//! - [`Listeners`] accept connections; [`Connections`] limits and counts those that are open.
//! - [`FrontCounters`] count what each front counts; [`FrontReading`] is what they say.
//! - [`log_failure`] writes failed requests to the log at a bounded rate ([`LogLimit`]).
//! - [`Door`] is what is shut while a disk moves to another host with its guest.
//! - [`WireStatus`] is the one table from kinds of error to the numbers of each wire.
#![forbid(unsafe_code)]

mod accept;
mod connections;
mod errors;
mod log;
mod metrics;
mod passage;
mod ring;
mod slots;

pub use accept::Listeners;
pub use connections::{Connections, Peer, Place, Presence, has_hung_up, is_ready};
pub use errors::{WireStatus, blkif, nbd, virtio};
pub use log::{FailedRequest, Reason, log_failure};
pub use metrics::{Breakdown, FRONT_METRICS, FrontCounters, FrontMetric, FrontReading, QueueReading};
pub use passage::{Door, Passage, not_open};
pub use ring::{GuestRing, serve_ring};
pub use slots::{Inbox, QueueWaker, Slots};
pub use spile_core::LogLimit;
