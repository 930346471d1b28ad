//! A xenstored: the tree, permissions, watches and transactions. This module is pure state; the host owns the sockets.
//!
//! Where docs/misc/xenstore.txt leaves a choice, this does what the C xenstored does:
//! - Missing nodes above a new one are made. A new node gets its parent's permissions and belongs to the domain that made
//!   it.
//! - A transaction fails when a node that it has read was changed meanwhile. Two siblings that are made at the same time
//!   are such a conflict.
//! - When a folder is removed, a node in it causes events only for watches of that very node.

mod outbox;
mod server;
#[cfg(test)]
mod tests;
mod tree;
mod view;

pub(super) use server::{ConnId, Xenstored};
