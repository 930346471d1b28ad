//! A vhost-user-blk front end: what QEMU and a guest's virtio-blk driver are to a server.
//!
//! - A [`Device`] connects, negotiates, gives the server its memory and starts queues.
//! - A [`Queue`] is the data path of one virtqueue. It allocates nothing for a request.
//! - A [`Watch`] looks after the connection while queues work on other threads. It takes the connection up again when the
//!   server comes back.
//!
//! Tests also use the parts below: [`GuestMemory`], the [`Ring`] with raw access to all of its parts, [`Connection`] with
//! one method for each message, and [`Socket`] for messages that no well-behaved front end would send.
//!
//! Written from the vhost-user specification (as of QEMU 10) and from virtio 1.2. Where the former leaves a choice, this
//! front end does what QEMU does. Little-endian rings (virtio 1), one byte order with the server for messages.

mod backend;
mod config;
mod connection;
mod device;
mod link;
mod log;
mod memory;
pub mod proto;
mod queue;
mod raw;
mod request;
mod ring;
mod watch;

pub use backend::{BackendChannel, BackendRequest};
pub use config::BlkConfig;
pub use connection::Connection;
pub use device::{Device, DeviceOptions, QueueOptions};
pub use link::{Link, LinkState};
pub use log::DirtyLog;
pub use memory::{Area, GuestMemory, MemoryOptions, Region};
pub use queue::Queue;
pub use raw::{Message, Socket};
pub use request::{Op, STATUS_IOERR, STATUS_OK, STATUS_UNSUPP};
pub use ring::{Descriptor, DescriptorTable, Ring, RingParts, Used};
pub use watch::{OnConfig, Watch};
