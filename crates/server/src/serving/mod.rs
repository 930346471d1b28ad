//! Serving disks: what `spile serve` is made of.
//!
//! - [`disks`]: the images, open. [`fronts`]: the servers over them and their sockets.
//! - [`control`]: the control socket and who asks on it. [`takeover`]: a server that gives all it has to its successor.

pub mod api;
pub mod control;
pub mod disks;
pub mod fronts;
pub mod identity;
pub mod server;
pub mod takeover;
