//! [`Subject`]: what is put to the test, a disk that can be created, opened again after a crash, and checked.

use std::path::PathBuf;

use spile_core::{Disk, Result};

use crate::world::World;

/// A kind of disk under test, over a [`World`].
pub trait Subject: 'static {
    /// The disk it opens.
    type Disk: Disk;

    /// How many layers there are: 1, or more for a chain. The workload goes through the layers from the base (0) up.
    fn layers(&self) -> usize {
        1
    }

    /// The path of the file of `layer`.
    fn path(&self, layer: usize) -> PathBuf;

    /// Makes the file of `layer`; the layers below it exist.
    fn create(&self, world: &World, layer: usize) -> impl Future<Output = Result<()>>;

    /// Opens the disk whose leaf is `layer`.
    fn open(&self, world: &World, layer: usize) -> impl Future<Output = Result<Self::Disk>>;

    /// After the first life of `layer`, while nobody has the files open: what has happened to them besides, which changes nothing of what the disk holds.
    fn age(&self, _world: &World, _layer: usize) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }

    /// Looks, at the end of all, at what [`Subject::age`] has left.
    ///
    /// # Errors
    /// What is wrong.
    fn end(&self, _world: &World) -> impl Future<Output = Result<(), String>> {
        async { Ok(()) }
    }

    /// Checks the files while nobody has them open. Leaks are allowed, unless the leaf was closed in order (`clean`).
    ///
    /// # Errors
    /// What is wrong.
    fn check(&self, world: &World, clean: bool) -> impl Future<Output = Result<(), String>>;
}
