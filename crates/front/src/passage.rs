//! A disk that goes to another host together with its guest, or comes from there.

use spile_core::{Error, ErrorKind, Result};

/// Whether guests may use a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passage {
    /// They may.
    Open,
    /// Not yet: the disk is still on its way from another host.
    Coming,
    /// Not any more: the disk was handed over to another host.
    Gone,
}

/// A way by which guests come to one disk. It can be shut while the disk moves to another host.
pub trait Door: Send + Sync {
    /// Whether guests may use the disk by this way now.
    fn passage(&self) -> Passage;

    /// True when a guest wants to use the disk by this way, and has not shared its memory.
    fn lacks_memory(&self) -> bool {
        false
    }

    /// From now on no guest uses the disk by this way, because it is handed over to another host: requests wait. Not to be called on a worker.
    ///
    /// # Errors
    /// `Busy` when a guest uses the disk, or it has not come to this host yet; then nothing has changed.
    fn shut(&self) -> Result<()>;

    /// Guests may use the disk from now on; those that wait go on. Not to be called on a worker.
    ///
    /// # Errors
    /// When they cannot be let in now.
    fn let_in(&self) -> Result<()>;
}

/// The refusal to hand over a disk that is not open to guests now.
#[must_use]
pub fn not_open() -> Error {
    Error::new(ErrorKind::Busy, "the disk is already on its way to another host, or from there")
        .hint("`spile resume` lets guests use it here, once it is certain that they do not use it elsewhere")
}
