//! Stores: the bytes under an image, on this host ([`FileStore`]), in memory ([`MemStore`]), on an NBD server ([`NbdStore`]) and
//! nowhere ([`NullStore`]).
//!
//! [`AnyStore`] is any of them. [`OsFiles`] opens them by their locators, and creates, renames and removes files. [`MeteredStore`]
//! counts what goes to a store. [`openers`]: which processes have a file open, and a wait for those that are about to let go of it.
//!
//! Operations run on the worker of the engine that polls them, and panic elsewhere, unless the store is in memory.
#![forbid(unsafe_code)]

mod behind;
mod cut;
mod device;
mod file;
mod files;
pub mod folder;
mod held;
mod memory;
mod metered;
mod nbd;
pub mod openers;
mod opening;
pub mod own;
pub mod own_folder;
mod sync_gate;
mod times;
mod zeroes;

pub use file::{FileId, FileStore};
pub use files::{AnyStore, CacheMode, OsFiles};
pub use folder::{Folder, Place};
pub use memory::{MemStore, NullStore};
pub use metered::{HostFiles, HostStore, MeteredFiles, MeteredStore};
pub use nbd::{
    LINK_CONTEXT, NbdFacts, NbdOptions, NbdStore, READER_CONTEXT, canonical_address, may_be_same_export,
    on_doubtful_export, on_lost_export,
};
pub use times::FileTimes;
