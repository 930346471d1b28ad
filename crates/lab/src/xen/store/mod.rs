//! A xenstored: the tree, who may do what with it, watches and transactions. Pure state; sockets are the host's.
//!
//! As the C xenstored does it, where docs/misc/xenstore.txt leaves a choice: missing nodes above a new one are made, a new
//! node has its parent's permissions and belongs to the domain that made it, a transaction fails when a node that it has
//! looked at has been changed, siblings made at once cross each other, a removed folder's nodes are told to those only
//! who watch them by name.

mod outbox;
mod server;
#[cfg(test)]
mod tests;
mod tree;
mod view;

pub(super) use server::{ConnId, Xenstored};
