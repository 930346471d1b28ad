//! The back end over a Xen of ordinary processes: what the specification asks for, and guests that keep to none of it.
#![forbid(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;

mod faults;
mod gate;
mod hostile_ends;
mod hostile_grants;
mod hostile_requests;
mod hostile_ring;
mod hostile_store;
mod requests;
mod restart;
mod split;
mod states;
