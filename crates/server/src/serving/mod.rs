//! Serving disks: what `spile serve` and `spile xen-disk` are made of.
//!
//! - [`server`]: the main loop of both. [`serve`]: `spile serve` itself; `spile xen-disk` is [`crate::xen::disk`].
//! - [`disks`]: the images, open; `faults.rs` has them fail for tests. [`fronts`]: the servers over them. [`sockets`]: where they listen.
//! - [`failed_syncs`]: failed syncs, remembered for the next server. [`trouble`]: what the log and the service manager hear of disks that wait for trouble below to pass.
//! - `passages.rs`: disks that move between hosts with their guests, remembered for the next server.
//! - [`events`]: what has happened, for callers that wait for it.
//! - `attaching.rs`: disks that come; `changes.rs`: those that go. `bitmaps.rs`: changed blocks for NBD clients. `life.rs`: snapshots of disks that are served. [`pausing`]: disks whose guests wait. `resizing.rs`: new sizes. [`growing`]: devices that become longer under thin disks. [`Claims`](claims::Claims):
//!   one change of a disk's images at a time.
//! - [`offline`]: the jobs of commands on disks that no server has, seen and steered as those of a server.
//! - [`metrics`]: what was counted, for Prometheus.
//! - [`control`]: lines on the control socket. [`api`]: HTTP on the same socket. [`takeover`]: a server that gives all it has to
//!   its successor, and the messages for that. [`successor`]: what that serves beside its command line.

pub mod api;
mod attaching;
mod bitmaps;
mod changes;
mod claims;
pub mod control;
pub mod disks;
pub mod doors;
pub mod events;
pub mod failed_syncs;
pub mod faults;
pub mod fronts;
pub mod growing;
mod handover;
pub mod identity;
pub mod jobs;
mod life;
pub mod limits;
pub mod metrics;
pub mod offline;
pub(crate) mod passages;
pub mod pausing;
mod resizing;
mod reverting;
pub mod serve;
pub mod server;
pub mod sockets;
pub mod successor;
pub mod takeover;
pub(crate) mod trouble;
