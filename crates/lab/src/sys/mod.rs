//! The system calls of the Xen stand-in that the compiler cannot check: copies between processes, and pages that come and
//! go inside one mapping; and the devices by which a program is a front end on a real Xen. The only place of this crate
//! with `unsafe` in it.
#![allow(unsafe_code)]

mod atomic;
mod gntalloc;
mod pages;
mod remote;

pub(crate) use atomic::compare_exchange_u32;
pub use gntalloc::{Gntalloc, Granted, UnboundPort};
pub(crate) use pages::{Window, map_run};
pub(crate) use remote::{BATCH, Piece, Remote, transfer};
