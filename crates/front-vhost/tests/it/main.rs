//! The server over real sockets and real shared memory, on each engine: what the specifications ask for, and front ends
//! and guests that keep to none of it.
#![forbid(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;

mod chains;
mod config;
mod connections;
mod dirty;
mod gate;
mod handover;
mod inflight;
mod memory;
mod messages;
mod requests;
mod restart;
mod rings;
mod wakeups;
