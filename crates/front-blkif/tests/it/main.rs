//! The back end over a Xen of ordinary processes: what the specification asks for, and guests that keep to none of it.
#![forbid(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;

mod hostile_requests;
mod hostile_ring;
mod requests;
mod restart;
mod states;
