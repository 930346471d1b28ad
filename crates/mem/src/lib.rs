//! Memory that I/O runs on: segments that keep their bytes alive, and an aligned pool.
//!
//! The contract: a [`Segment`] owns a share of the memory under it, so an operation in flight that holds a
//! clone can never be left with a dangling address, whatever happens to the task that started it. Clones share
//! their bytes, as the pages of a guest do; who may write when is settled above this crate (a request's
//! buffer belongs to the request until its completion). Nothing here hands out `&[u8]` on shared bytes: all
//! access copies, because a device or a guest may be writing at the same moment.
//!
//! This crate is the lowest of the workspace. It holds `unsafe` so that `core`, `image` and the filters need none.

mod mapping;
mod pool;
mod segment;

pub use pool::{Pool, PoolStats};
pub use segment::{PAGE_BYTES, Segment, Segments};
