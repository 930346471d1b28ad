//! The words and seams of Spile: extents, errors, limits, and the traits that fronts, disks, images and stores meet at.
//!
//! No I/O and no `unsafe` here. Every trait is static: an async method returns its future by type, so that a
//! read costs no allocation on its way down. Futures are not `Send`: they belong to the worker that polls them,
//! while the objects themselves are shared by all workers.
#![forbid(unsafe_code)]

pub mod budget;
mod code;
mod disk;
mod error;
mod extent;
mod io;
mod locator;
mod log_limit;
pub mod metrics;
mod path_cell;
mod shard;
mod store;
mod text;
mod units;
mod yield_now;

pub use code::{Code, coded_text, split_code};
pub use disk::{Disk, DiskInfo, Epoch, ExtentKind, ExtentStatus};
pub use error::{Error, ErrorKind, Result, ResultExt};
pub use extent::{Extent, GuestOffset, StoreOffset};
pub use io::{Io, Op, WriteZeroes};
pub use locator::{Locator, parse_size};
pub use log_limit::LogLimit;
pub use path_cell::PathCell;
pub use shard::{SHARDS, act_as_shard, shard_number};
pub use spile_mem::{Segment, Segments};
pub use store::{Env, Files, OpenMode, Store, StoreExtent, StoreInfo, Timer, Via, Work, exchanged, lost, taken};
pub use text::{exact_json, is_unseen, printable, printable_lines};
pub use units::format_size;
pub use yield_now::yield_now;

/// The sector of VHD, blkif and virtio-blk, in bytes.
pub const SECTOR_BYTES: u64 = 512;

/// The largest single request a front may pass on, in bytes (NBD's customary 32 MiB).
pub const MAX_REQUEST_BYTES: u64 = 32 << 20;
