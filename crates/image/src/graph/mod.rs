//! [`Graph`]: a leaf and its parents as one disk.
//!
//! A graph is a list of layers that never changes. Whoever wants another list (a new leaf, a parent merged away) makes
//! another graph from the same layers and lets new requests go there, while those that began under the old graph end
//! under it. Layers are shared by graphs and keep their identity.
//!
//! # Layers that are not sealed
//!
//! A leaf that has become a parent still takes the writes of requests that began before. Until it is sealed
//! ([`Graph::seal_parents`]), these rules hold:
//!
//! 1. **Its map is looked up on every read**, never from the merged map of the parents, which covers sealed layers only.
//! 2. **A flush covers it**, for a guest's flush promises what was acknowledged under an older graph, too.
//! 3. **Readers enter its grace period**, for the older requests may release blocks.
//! 4. **What lies below the leaf is not known to be zero**: no block of the leaf is released because of it. (A write could
//!    land below between the look and the release, and come to light again although it was overwritten in the leaf.)
//! 5. **Nothing is copied from it into the leaf before the older requests have ended**: the copy would hide what they write afterwards. A write
//!    into a part of a unit waits for them ([`Disk::follows`] tells which they are).

mod disk;
mod extents;
mod layers;
mod map;
mod moves;
mod moving;
mod read;
mod write;
mod zones;

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use spile_core::metrics::span::{Moment, stamp};
use spile_core::metrics::{Meter, Op};
use spile_core::{
    Disk, DiskInfo, Env, Error, ErrorKind, Extent, ExtentKind, Files, Locator, Result, Segments, Store, Via,
};

pub use self::extents::{Known, PlacedRun};
pub use self::layers::{GraphLayer, LayerId};
use self::moving::Moving;
pub use self::moving::{Broken, Sinking};
use self::zones::Zones;
use crate::facts::LayerInfo;
use crate::formats::AnyLayer;
use crate::grace::Reader;
use crate::layer::Layer;
use crate::open::{OpenOptions, check_parent, open_layers};

/// The longest chain, leaf included.
pub const MAX_LAYERS: usize = 255;

/// How many runs of a map are asked for at a time, and how many bytes are read, where a disk is searched for data.
const RUNS_AT_ONCE: usize = 1000;
const READ_AT_ONCE_BYTES: u64 = 1 << 20;

/// A leaf and its parents.
pub struct Graph<S: Store> {
    /// Leaf first; never empty.
    layers: Vec<Arc<GraphLayer<S>>>,
    /// How many layers from the leaf on are not in the merged map: the leaf, and every parent above and including the
    /// lowest that was not sealed when last looked at.
    walked: AtomicUsize,
    zones: Arc<Zones>,
    /// But for the size, which the leaf knows.
    info: DiskInfo,
    /// What is being moved between the layers, if something is.
    moving: Option<Moving<S>>,
    /// A guest's flush covers so many layers at most, from the leaf on.
    most_flushed: usize,
}

/// A request that reads, counted in the grace periods of all layers that may change.
struct Readers<'a> {
    _leaf: Option<Reader<'a>>,
    /// Empty, and without an allocation, but for the time after an exchange.
    _parents: Vec<Reader<'a>>,
}

impl<S: Store> Graph<S> {
    /// Opens the image at `at` and all its parents.
    ///
    /// # Errors
    /// What is wrong with which file: unknown format, corrupt metadata, a parent that is missing, another than
    /// expected, outside the allowed folders, or part of a loop; a parent that cannot be made durable.
    pub async fn open<F: Files<Store = S>>(
        files: &F,
        env: Arc<dyn Env>,
        at: impl Into<Locator>,
        options: &OpenOptions,
    ) -> Result<Self> {
        let layers = open_layers(files, &env, &at.into(), options).await?;
        Ok(Self::with_new_zones(layers, options.metadata_cache_bytes / 2))
    }

    /// Begins what the first writes would wait for, beside them, when the disk takes writes. Not part of opening it, so that a
    /// disk that is opened and then refused is not changed.
    pub fn begin(&self) {
        if !self.is_read_only() {
            self.leaf().begin();
        }
    }

    /// Waits until the image that takes the disk's writes has all that was acknowledged, durably, and nothing is written to its file any more. Called
    /// while no request is in flight: then a copy of the files is the disk.
    ///
    /// # Errors
    /// As a flush.
    pub async fn come_to_rest(&self) -> Result<()> {
        self.flush_all().await?;
        self.leaf().rest().await;
        // What ran beside the flush may have written something since.
        self.flush_all().await
    }

    /// The whole of `store` as a disk, for stores that hold no image (`null:`, `mem:`).
    pub fn from_raw_store(store: S, read_only: bool) -> Self {
        let layer = GraphLayer::new(AnyLayer::bare(store), read_only);
        Self::with_new_zones(vec![layer], 0)
    }

    /// This graph with `leaf` on top: the leaf of now becomes its parent, and changes no more once the requests that began
    /// under this graph have ended.
    ///
    /// # Errors
    /// `Unsupported` when the chain would be too long; `Corrupt` when `leaf` names another parent than the leaf of now.
    pub async fn with_leaf(&self, leaf: Arc<GraphLayer<S>>) -> Result<Self> {
        check_parent(leaf.image(), self.leaf()).await?;
        let layers = [leaf].into_iter().chain(self.layers.iter().cloned()).collect();
        let graph = self.with_layers(layers)?;
        graph.begin();
        Ok(graph)
    }

    /// A graph of these layers, leaf first. What is known of the parents of this graph is kept where it holds for the new
    /// one, too: where the new one is this one with layers on top.
    ///
    /// # Errors
    /// `Unsupported` when there are too many layers, `InvalidInput` when there is none.
    pub fn with_layers(&self, layers: Vec<Arc<GraphLayer<S>>>) -> Result<Self> {
        if layers.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, "a graph without layers"));
        }
        check_length(layers.len(), layers[0].image().store().path())?;
        match self.zones.extend_to(&line(&layers)) {
            true => Ok(Self::assemble(layers, self.zones.clone())),
            false => Ok(Self::with_new_zones(layers, self.zones.budget_bytes())),
        }
    }

    fn with_new_zones(layers: Vec<Arc<GraphLayer<S>>>, budget_bytes: usize) -> Self {
        let zones = Arc::new(Zones::new(budget_bytes, line(&layers)));
        Self::assemble(layers, zones)
    }

    fn assemble(layers: Vec<Arc<GraphLayer<S>>>, zones: Arc<Zones>) -> Self {
        let info = disk_info(layers[0].image(), layers[0].is_sealed());
        let walked = AtomicUsize::new(layers.len());
        Self { walked, layers, zones, info, moving: None, most_flushed: usize::MAX }
    }

    /// The layers themselves, leaf first; other graphs may hold them, too.
    pub fn handles(&self) -> &[Arc<GraphLayer<S>>] {
        &self.layers
    }

    /// What there is to know of each layer, leaf first.
    pub fn layers(&self) -> Vec<LayerInfo> {
        self.layers.iter().map(|layer| layer.info()).collect()
    }

    /// Seals every parent that is not sealed yet, lowest first. No request that began under an older graph is in flight
    /// any more; requests of this graph may be.
    ///
    /// # Errors
    /// The store's; what could not be sealed stays as it was.
    pub async fn seal_parents(&self) -> Result<()> {
        for layer in self.layers[1..].iter().rev() {
            layer.seal().await?;
        }
        Ok(())
    }

    /// The first byte of `extent` that is not zero.
    ///
    /// # Errors
    /// As reads.
    pub async fn first_nonzero(&self, extent: Extent) -> Result<Option<u64>> {
        let mut at = extent.start();
        while at < extent.end() {
            for run in self.extents(Extent::from_range(at..extent.end()), RUNS_AT_ONCE).await? {
                let found = if run.kind == ExtentKind::Data { self.nonzero_in(run.extent).await? } else { None };
                if found.is_some() {
                    return Ok(found);
                }
                at = run.extent.end();
            }
        }
        Ok(None)
    }

    async fn nonzero_in(&self, extent: Extent) -> Result<Option<u64>> {
        let mut at = extent.start();
        while at < extent.end() {
            let len = READ_AT_ONCE_BYTES.min(extent.end() - at);
            let bytes = Segments::zeroed(len as usize);
            self.read_extent(Extent::from_range(at..at + len), &bytes).await?;
            if let Some(first) = bytes.to_vec().iter().position(|byte| *byte != 0) {
                return Ok(Some(at + first as u64));
            }
            at += len;
        }
        Ok(None)
    }

    /// Makes the leaf `size_bytes` long and ends all use of it. Nobody else uses the image: not another graph, and no request. A
    /// process or host that ends meanwhile leaves an image of its old size or of the new one.
    ///
    /// # Errors
    /// `ReadOnly`; `Unsupported` where the format cannot do that, and for a child that would show bytes of a parent that is longer
    /// than it; `InvalidInput` for the size; `NoSpace`; the store's.
    pub async fn resize_unused(self, size_bytes: u64) -> Result<()> {
        if self.is_read_only() {
            let error = Error::new(ErrorKind::ReadOnly, "the disk is open for reading only");
            return Err(error.at_path(self.leaf().store().path()));
        }
        self.check_hides_parent(size_bytes)?;
        self.leaf().resize_unused(size_bytes).await
    }

    /// Refuses a size at which the leaf shows more of its parent: what a disk gains is zeroes.
    fn check_hides_parent(&self, size_bytes: u64) -> Result<()> {
        let old_bytes = self.leaf().size_bytes();
        match self.layers.get(1).map(|parent| parent.image().size_bytes()) {
            Some(parent_bytes) if size_bytes > old_bytes && parent_bytes > old_bytes => {
                let what = format!(
                    "the parent has {parent_bytes} bytes: the disk would show what lies there behind {old_bytes}"
                );
                let error = Error::new(ErrorKind::Unsupported, what).at_path(self.leaf().store().path());
                Err(error.hint("copy the disk to a larger one: spile convert --size"))
            }
            _ => Ok(()),
        }
    }

    fn leaf(&self) -> &AnyLayer<S> {
        self.layers[0].image()
    }

    fn image(&self, number: usize) -> &AnyLayer<S> {
        self.layers[number].image()
    }

    fn meter(&self, number: usize) -> &Meter {
        self.layers[number].meter()
    }

    /// Stamps `work` as a request's time at the store. In a parent it counts as a piece of a request that was found there; the leaf
    /// counts whole requests itself.
    async fn at_store<T>(
        &self,
        layer: usize,
        op: Op,
        len_bytes: u64,
        work: Pin<&mut impl Future<Output = Result<T>>>,
    ) -> Result<T> {
        stamp(Moment::Submitted);
        let result = match layer {
            0 => work.await,
            parent => self.meter(parent).measure_by_turns(op, len_bytes, work).await,
        };
        stamp(Moment::Completed);
        result
    }

    fn is_read_only(&self) -> bool {
        self.layers[0].is_sealed()
    }

    /// How many layers from the leaf on are looked up one by one; the others are sealed.
    fn walked(&self) -> usize {
        match self.walked.load(Ordering::Acquire) {
            1 => 1,
            walked => self.walked_now(walked),
        }
    }

    /// Sealing goes one way, so the number only falls.
    #[cold]
    fn walked_now(&self, mut walked: usize) -> usize {
        while walked > 1 && self.layers[walked - 1].is_sealed() {
            walked -= 1;
        }
        self.walked.fetch_min(walked, Ordering::AcqRel).min(walked)
    }

    /// Counts a reader in, until the value is dropped.
    #[inline]
    fn enter(&self) -> Readers<'_> {
        let parents = match self.walked() {
            1 => Vec::new(),
            walked => self.enter_parents(walked),
        };
        Readers { _leaf: self.leaf().enter(), _parents: parents }
    }

    #[cold]
    fn enter_parents(&self, walked: usize) -> Vec<Reader<'_>> {
        self.layers[1..walked].iter().filter_map(|layer| layer.image().enter()).collect()
    }

    fn check(&self, extent: Extent, aligned: bool) -> Result<()> {
        if extent.end() > self.size_bytes() {
            return Err(self.error(ErrorKind::OutOfRange, extent, "past the end of the disk"));
        }
        if aligned && !extent.is_aligned(u64::from(self.info.request_align_bytes)) {
            return Err(self.error(ErrorKind::InvalidInput, extent, "not on the disk's alignment"));
        }
        Ok(())
    }

    fn check_write(&self, extent: Extent) -> Result<()> {
        match self.is_read_only() {
            true => Err(self.error(ErrorKind::ReadOnly, extent, "the disk is open for reading only")),
            false => self.check(extent, true),
        }
    }

    fn error(&self, kind: ErrorKind, extent: Extent, why: &str) -> Error {
        Error::new(kind, format!("{why}: {extent} of {:#x} bytes", self.size_bytes()))
            .at_path(self.leaf().store().path())
    }
}

/// The identities of `layers`, base first.
fn line<S: Store>(layers: &[Arc<GraphLayer<S>>]) -> Vec<LayerId> {
    layers.iter().rev().map(|layer| layer.id()).collect()
}

/// Refuses a chain that is too long.
pub(crate) fn check_length(layers: usize, leaf: &Path) -> Result<()> {
    match layers > MAX_LAYERS {
        true => Err(Error::new(ErrorKind::Unsupported, format!("the chain is longer than {MAX_LAYERS}"))
            .at_path(leaf)
            .hint("coalesce some of its parents")),
        false => Ok(()),
    }
}

fn disk_info<S: Store>(leaf: &AnyLayer<S>, read_only: bool) -> DiskInfo {
    let store = leaf.data_store().info();
    let direct = leaf.via() == Via::Direct;
    let least = leaf.request_align_bytes();
    DiskInfo {
        size_bytes: leaf.size_bytes(),
        request_align_bytes: if direct { store.offset_align_bytes.max(least) } else { least },
        memory_align_bytes: if direct { store.memory_align_bytes } else { 1 },
        preferred_bytes: 4096,
        discard_align_bytes: 4096,
        read_only,
        fast_zero: store.punches,
    }
}
