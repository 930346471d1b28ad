//! A front end of blkif: what a guest's block driver is to a back end.
//!
//! A [`Blkfront`] does the handshake through xenstore and starts [`Queue`]s. A queue is the data path of one ring. It
//! allocates nothing for a request.
//!
//! A queue checks its back end: each answer must belong to a request in flight, name its operation, and come after the
//! back end has given the pages back. A test can also break the rules: it can write the bytes and indices of the [`Ring`],
//! requests, grants, and every key in xenstore.
//!
//! Written from public/io/blkif.h and ring.h. Where these leave a choice, this front end does what Linux does.

mod bell;
mod device;
mod options;
mod queue;
mod ring;
mod slots;
#[cfg(test)]
mod tests;

pub use device::Blkfront;
pub use options::{BlkfrontOptions, Disk, Features};
pub use queue::Queue;
pub use ring::Ring;
pub use slots::Op;
