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

    /// Checks the files while nobody has them open. Leaks are allowed, unless the leaf was closed in order (`clean`).
    ///
    /// # Errors
    /// What is wrong.
    fn check(&self, world: &World, clean: bool) -> impl Future<Output = Result<(), String>>;
}
