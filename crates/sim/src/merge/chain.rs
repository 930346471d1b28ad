//! The chain of [`super`], and the second child of one of its layers.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use spile_core::Result;
use spile_image::formats::vhd::codec::footer::DiskType;
use spile_image::formats::vhd::{CreateParams, VhdParent};
use spile_image::{Graph, OpenOptions};

use super::Host;
use crate::exec::block_on;
use crate::oracle::Oracle;
use crate::rng::Rng;
use crate::store::SimStore;

/// Where the disk is.
pub(super) const DISK: &str = "/images/disk.vhd";

/// A chain as a seed draws it. The disk's own image is the last.
pub(super) struct Chain {
    /// How many images it has at first.
    pub layers: usize,
    /// Its base is raw; else it is a dynamic VHD.
    pub is_raw: bool,
    /// The size of all images in bytes.
    pub size_bytes: u64,
    /// The size of a block of each image in bytes, base first.
    blocks: Vec<u32>,
    /// That of the leaf.
    pub block_bytes: u32,
    /// A second child of one of the layers.
    pub second: Option<Second>,
}

/// An image that nobody writes to.
pub(super) struct Second {
    /// The number of its parent, the base is 0.
    pub parent: usize,
    /// What it holds.
    pub oracle: Rc<RefCell<Oracle>>,
}

impl Chain {
    pub(super) fn draw(rng: &mut Rng) -> Self {
        let layers = rng.between(2, 4) as usize;
        let usual = *rng.pick(&[4096, 16 << 10, 64 << 10]);
        let is_mixed = rng.chance(1, 3);
        let blocks: Vec<u32> =
            (0..layers).map(|_| if is_mixed { *rng.pick(&[4096, 16 << 10, 64 << 10]) } else { usual }).collect();
        let has_second = layers > 2 && rng.chance(1, 4);
        let parent = rng.below(layers as u64 - 1) as usize;
        let second = has_second.then(|| Second { parent, oracle: Rc::default() });
        Self {
            layers,
            is_raw: rng.chance(1, 4),
            size_bytes: rng.between(4, 48) << 14,
            block_bytes: blocks[layers - 1],
            blocks,
            second,
        }
    }

    /// The name of an image of the chain. The second child's is 9.
    fn name(&self, number: usize) -> String {
        match number {
            0 if self.is_raw => "layer0.raw".to_owned(),
            number if number + 1 == self.layers => "disk.vhd".to_owned(),
            number => format!("layer{number}.vhd"),
        }
    }

    fn path(&self, number: usize) -> PathBuf {
        Path::new("/images").join(self.name(number))
    }

    /// All images that there were.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        let second = self.second.as_ref().map(|_| PathBuf::from(SECOND));
        (0..self.layers).map(|number| self.path(number)).chain(second).collect()
    }

    /// The path of the second child's parent.
    pub(super) fn second_parent(&self) -> Option<PathBuf> {
        self.second.as_ref().map(|second| self.path(second.parent))
    }
}

const SECOND: &str = "/images/second.vhd";

impl Host {
    /// Makes the images, base first, each with something of its own.
    pub(super) fn fill(self: &Rc<Self>, rng: &mut Rng) {
        for number in 0..self.chain.layers {
            let (host, word) = (self.clone(), rng.word());
            block_on(&self.world, async move {
                let made = host.make(number, &host.chain.path(number), number.checked_sub(1)).await;
                made.unwrap_or_else(|error| panic!("cannot create an image: {error:?}"));
                let opened = host.open(&host.chain.path(number), false).await;
                let graph = opened.unwrap_or_else(|error| panic!("a new image does not open: {error:?}"));
                host.workload(spile_node::Node::new(graph), &host.oracle).fill(Rng::new(word)).await;
            });
            if let Some(second) = self.chain.second.as_ref().filter(|second| second.parent == number) {
                *second.oracle.borrow_mut() = self.oracle.borrow().clone();
                let host = self.clone();
                let made =
                    block_on(&self.world, async move { host.make(number, Path::new(SECOND), Some(number)).await });
                made.unwrap_or_else(|error| panic!("cannot create an image: {error:?}"));
            }
        }
    }

    /// Makes an empty image, durable, that names the image of number `parent`.
    async fn make(&self, number: usize, path: &Path, parent: Option<usize>) -> Result<()> {
        let size_bytes = self.chain.size_bytes;
        let mut params = match parent {
            None if self.chain.is_raw => {
                self.world.install_empty(path, size_bytes);
                return Ok(());
            }
            None => CreateParams::new(DiskType::Dynamic, size_bytes),
            Some(parent) => {
                let uuid = self.open(&self.chain.path(parent), true).await?.layers()[0].identity;
                let (name, absolute_path, timestamp) = (self.chain.name(parent), None, 0);
                let (relative_path, uuid) = (name.clone(), uuid.map_or([0; 16], |identity| identity.0));
                CreateParams::child(size_bytes, VhdParent { relative_path, absolute_path, uuid, timestamp, name })
            }
        };
        params.block_size_bytes = self.chain.blocks[number];
        self.world.install_vhd(path, &params).await
    }

    async fn open(&self, path: &Path, read_only: bool) -> Result<Graph<SimStore>> {
        let options = OpenOptions { read_only, ..OpenOptions::default() };
        Graph::open(&self.world.files(), self.world.env(), path, &options).await
    }

    pub(super) async fn open_disk(&self, read_only: bool) -> Result<Graph<SimStore>> {
        self.open(Path::new(DISK), read_only).await
    }

    /// The second child reads as when it was made.
    pub(super) async fn verify_second(&self) {
        let Some(second) = &self.chain.second else { return };
        let graph = self.open(Path::new(SECOND), true).await;
        let graph = graph.unwrap_or_else(|error| panic!("the second child does not open: {error:?}"));
        self.workload(graph, &second.oracle).verify(Rng::new(second.parent as u64), true).await;
    }
}
