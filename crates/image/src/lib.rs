//! Image formats and chains: they answer where a guest's bytes lie, and keep that answer true through crashes.
//!
//! A format maps, it does not move data: [`Chain`] walks the layers by a loop and does the I/O. Everything runs on
//! the traits of `core`, so the same code serves guests on io_uring and is broken on purpose under the simulator.
#![forbid(unsafe_code)]

mod aligned;
mod chain;
mod format;
pub mod formats;
mod grace;
mod layer;
mod parents;
mod range_lock;
mod raw;
pub mod vhd;
mod zones;

pub use aligned::Aligned;
pub use chain::{Chain, MAX_CHAIN_LAYERS, OpenOptions};
pub use format::Format;
pub use layer::{LayerFacts, LayerInfo};
