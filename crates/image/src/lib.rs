//! Image formats and chains: they answer where a guest's bytes lie, and keep that answer true through crashes.
//!
//! A format maps, it does not move data: [`Chain`] walks the layers by a loop and does the I/O. Everything runs on
//! the traits of `core`, so the same code serves guests on io_uring and is broken on purpose under the simulator.
#![forbid(unsafe_code)]

mod chain;
pub mod check;
pub mod create;
pub mod facts;
pub mod formats;
mod grace;
pub mod layer;
mod open;
mod parents;
mod range_lock;
mod zones;

pub use chain::{Chain, MAX_CHAIN_LAYERS};
pub use facts::LayerInfo;
pub use formats::Format;
pub use open::OpenOptions;
pub use range_lock::{RangeGuard, RangeLock};
