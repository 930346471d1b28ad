//! The system calls of the Xen stand-in that the compiler cannot check: copies between processes, and pages that come and
//! go inside one mapping. The only place of this crate with `unsafe` in it.
#![allow(unsafe_code)]

mod atomic;
mod pages;
mod remote;

pub(crate) use atomic::compare_exchange_u32;
pub(crate) use pages::{Window, map_run};
pub(crate) use remote::{BATCH, Piece, Remote, transfer};
