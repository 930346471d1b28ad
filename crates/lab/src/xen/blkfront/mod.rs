//! A front end of blkif: what a guest's block driver is to a back end.
//!
//! A [`Blkfront`] does the handshake through xenstore and starts [`Queue`]s; a queue is the data path of one ring,
//! without an allocation per request. A queue is watchful: an answer must be to what is outstanding, with its
//! operation, and with its pages given back. And it can be rude: the [`Ring`]'s bytes and indices, requests, grants,
//! and every key in xenstore can be written as one likes.
//!
//! Written from public/io/blkif.h and ring.h; where they leave a choice, it does what Linux does.

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
