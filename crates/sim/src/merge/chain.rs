//! The chain of [`super`], and the second child of one of its layers. All images are VHDs, or all are qcow2, but for a raw base.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use spile_core::{ErrorKind, Files as _, OpenMode, Result};
use spile_image::check::Severity;
use spile_image::formats::vhd::codec::footer::DiskType;
use spile_image::formats::vhd::{CreateParams, VhdParent};
use spile_image::{Format, Graph, OpenOptions};

use super::Host;
use crate::exec::block_on;
use crate::oracle::Oracle;
use crate::qcow2::Form;
use crate::rng::Rng;
use crate::store::SimStore;

/// A chain as a seed draws it. The disk's own image is the last.
pub(super) struct Chain {
    /// How many images it has at first.
    pub layers: usize,
    /// Its base is raw; else it is of the format of the others.
    pub is_raw: bool,
    /// All images but a raw base are qcow2, of this form each, base first; else they are VHDs.
    forms: Option<Vec<Form>>,
    /// Where the disk is.
    pub disk: PathBuf,
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
    /// Draws a chain; `of_kind` says its format.
    pub(super) fn draw(rng: &mut Rng, mut of_kind: Rng) -> Self {
        let layers = rng.between(2, 4) as usize;
        let usual = *rng.pick(&[4096, 16 << 10, 64 << 10]);
        let is_mixed = rng.chance(1, 3);
        let blocks: Vec<u32> =
            (0..layers).map(|_| if is_mixed { *rng.pick(&[4096, 16 << 10, 64 << 10]) } else { usual }).collect();
        let has_second = layers > 2 && rng.chance(1, 4);
        let parent = rng.below(layers as u64 - 1) as usize;
        let second = has_second.then(|| Second { parent, oracle: Rc::default() });
        let is_qcow2 = of_kind.chance(1, 2);
        let forms = is_qcow2.then(|| blocks.iter().map(|block| Form::draw(&mut of_kind, *block)).collect());
        Self {
            layers,
            forms,
            disk: Path::new("/images").join(if is_qcow2 { "disk.qcow2" } else { "disk.vhd" }),
            is_raw: rng.chance(1, 4),
            size_bytes: rng.between(4, 48) << 14,
            block_bytes: blocks[layers - 1],
            blocks,
            second,
        }
    }

    /// True when the images are qcow2.
    pub(super) fn is_qcow2(&self) -> bool {
        self.forms.is_some()
    }

    fn extension(&self) -> &'static str {
        if self.is_qcow2() { "qcow2" } else { "vhd" }
    }

    /// The path of the second child.
    fn second_path(&self) -> PathBuf {
        Path::new("/images").join(format!("second.{}", self.extension()))
    }

    /// The name of an image of the chain.
    fn name(&self, number: usize) -> String {
        match number {
            0 if self.is_raw => "layer0.raw".to_owned(),
            number if number + 1 == self.layers => format!("disk.{}", self.extension()),
            number => format!("layer{number}.{}", self.extension()),
        }
    }

    fn path(&self, number: usize) -> PathBuf {
        Path::new("/images").join(self.name(number))
    }

    /// All images that there were.
    pub(super) fn paths(&self) -> Vec<PathBuf> {
        let second = self.second.as_ref().map(|_| self.second_path());
        (0..self.layers).map(|number| self.path(number)).chain(second).collect()
    }

    /// The path of the second child's parent.
    pub(super) fn second_parent(&self) -> Option<PathBuf> {
        self.second.as_ref().map(|second| self.path(second.parent))
    }
}

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
                let (host, path) = (self.clone(), self.chain.second_path());
                let made = block_on(&self.world, async move { host.make(number, &path, Some(number)).await });
                made.unwrap_or_else(|error| panic!("cannot create an image: {error:?}"));
            }
        }
    }

    /// Makes an empty image, durable, that names the image of number `parent`.
    async fn make(&self, number: usize, path: &Path, parent: Option<usize>) -> Result<()> {
        let size_bytes = self.chain.size_bytes;
        if let Some(forms) = self.chain.forms.as_ref().filter(|_| parent.is_some() || !self.chain.is_raw) {
            let parent = parent.map(|parent| (self.chain.name(parent), parent == 0 && self.chain.is_raw));
            let parent = parent.as_ref().map(|(name, is_raw)| (name.as_str(), if *is_raw { "raw" } else { "qcow2" }));
            self.world.install_empty(path, 0);
            return forms[number].install(&self.world, path, size_bytes, self.chain.blocks[number], parent).await;
        }
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
        self.open(&self.chain.disk, read_only).await
    }

    /// The second child reads as when it was made.
    pub(super) async fn verify_second(&self) {
        let Some(second) = &self.chain.second else { return };
        let graph = match self.open(&self.chain.second_path(), true).await {
            Ok(graph) => graph,
            // Its files cannot be read in this life.
            Err(error) if self.has_faults() && error.kind() == ErrorKind::Io => return,
            Err(error) => panic!("the second child does not open: {error:?}"),
        };
        self.workload(graph, &second.oracle).verify(Rng::new(second.parent as u64), true).await;
    }

    /// No qcow2 image contradicts itself.
    pub(super) async fn check_images(&self) {
        for path in self.chain.paths() {
            if Format::from_extension(&path) != Some(Format::Qcow2) || self.world.file_number(&path).is_none() {
                continue;
            }
            let checked = async {
                let store = self.world.files().open(&path.as_path().into(), OpenMode::ReadOnly).await?;
                Format::Qcow2.check(&store, &*self.world.env()).await
            };
            let report =
                checked.await.unwrap_or_else(|error| panic!("{} cannot be checked: {error:?}", path.display()));
            let bad = report.findings.iter().find(|found| found.severity == Severity::Corruption);
            assert!(bad.is_none(), "{}: {bad:?}", path.display());
        }
    }
}
