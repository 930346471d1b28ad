//! Xenstore: a tree of small texts, in which a host and its guests describe their devices and watch each other's
//! changes.
//!
//! [`wire`] encodes and decodes the messages, for both sides, without I/O (public/io/xs_wire.h,
//! docs/misc/xenstore.txt). [`XenStore`] is a client: over a Unix socket of the store's daemon, or over the device
//! /dev/xen/xenbus, which speaks the same messages.

mod client;
mod connection;
#[cfg(test)]
mod tests;
pub mod wire;

pub use client::{Tx, XenStore};
pub use connection::WatchEvent;
pub use wire::{Access, Permission};
