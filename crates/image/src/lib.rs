//! Image formats and graphs of layers: they answer where a guest's bytes lie, and keep that answer true through crashes.
//!
//! A format maps, it does not move data: [`Graph`] walks the layers by a loop and does the I/O. Everything runs on
//! the traits of `core`, so the same code serves guests on io_uring and is broken on purpose under the simulator.
#![forbid(unsafe_code)]

pub mod amend;
pub mod bitmaps;
pub mod check;
mod children;
pub mod create;
pub mod facts;
pub mod formats;
mod grace;
mod graph;
pub mod inner;
pub mod layer;
mod loads;
pub mod measure;
mod open;
mod parents;
mod range_lock;
mod room;

pub use children::is_child_of;
pub use facts::LayerInfo;
pub use formats::Format;
pub use graph::{Broken, Graph, GraphLayer, Known, LayerId, MAX_LAYERS, PlacedRun, Sinking};
pub use open::{Described, OpenOptions, describe, made_layer, make_durable, open_layer, reopen_layer};
pub use parents::{check_new_child, check_parents};
pub use range_lock::{RangeGuard, RangeLock};
pub use room::{HearRoom, Room};
