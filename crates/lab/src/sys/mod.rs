//! The only place of this crate with `unsafe`: system calls that the compiler cannot check. They copy between processes,
//! put pages into a mapping and take them out again, and use the devices by which a program is a front end on a real Xen.
#![allow(unsafe_code)]

mod atomic;
mod gntalloc;
mod pages;
mod remote;

pub(crate) use atomic::compare_exchange_u32;
pub use gntalloc::{Gntalloc, Granted, UnboundPort};
pub(crate) use pages::{Window, map_run};
pub(crate) use remote::{BATCH, Piece, Remote, transfer};
