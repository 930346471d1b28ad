//! Stores: the bytes under an image, on this host ([`FileStore`]), in memory ([`MemStore`]) and nowhere ([`NullStore`]).
//!
//! [`AnyStore`] is any of them, and [`OsFiles`] opens, creates, renames and removes the files among them.
//!
//! Operations run on the worker of the engine that polls them, and panic elsewhere, unless the store is in memory.
#![forbid(unsafe_code)]

mod file;
mod files;
mod memory;
mod sync_gate;

pub use file::FileStore;
pub use files::{AnyStore, CacheMode, OsFiles};
pub use memory::{MemStore, NullStore};
