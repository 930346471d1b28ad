//! A layer as graphs hold it: with an identity, and shared.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use async_lock::Mutex;
use spile_core::metrics::Meter;
use spile_core::{Epoch, Result, Store, Via};

use crate::facts::LayerInfo;
use crate::formats::AnyLayer;
use crate::layer::{Identity, Layer};

/// What tells a layer from every other that this process has opened. It never changes while the layer lives, and is never
/// given again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerId(u64);

impl LayerId {
    fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// One open image, which several graphs may hold.
pub struct GraphLayer<S: Store> {
    id: LayerId,
    image: AnyLayer<S>,
    /// The image changes no more, and all of it is durable.
    sealed: AtomicBool,
    sealing: Mutex<()>,
    /// The epochs in which the disk had another leaf, as of the time when this layer became its leaf.
    before: OnceLock<Vec<Arc<dyn Epoch>>>,
    meter: Meter,
    map_loads: AtomicU64,
}

impl<S: Store> GraphLayer<S> {
    /// A layer for `image`. `sealed`: the image is open for reading only, and durable.
    pub(crate) fn new(image: AnyLayer<S>, sealed: bool) -> Arc<Self> {
        let (sealed, sealing, before) = (AtomicBool::new(sealed), Mutex::new(()), OnceLock::new());
        let (meter, map_loads) = (Meter::new(), AtomicU64::new(0));
        Arc::new(Self { id: LayerId::next(), image, sealed, sealing, before, meter, map_loads })
    }

    /// Its identity.
    pub fn id(&self) -> LayerId {
        self.id
    }

    /// The image.
    pub fn image(&self) -> &AnyLayer<S> {
        &self.image
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        self.image.store().path()
    }

    /// Counts of what was asked of this image. As a leaf it counts each request of the disk, from the moment when the image code takes it to
    /// the moment when it has answered: with looking up and loading maps, with locks, with what its parents and the stores do. As a
    /// parent it counts the pieces of reads that were found in it, and the flushes that it still needs.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Counts a request that needs a piece of the map that is not in memory.
    pub(crate) fn loads_map(&self) {
        self.map_loads.fetch_add(1, Ordering::Relaxed);
    }

    /// How often a request needed a piece of the image's map that was not in memory, and waited for it.
    pub fn map_loads(&self) -> u64 {
        self.map_loads.load(Ordering::Relaxed)
    }

    /// True when the image changes no more and all of it is durable.
    pub fn is_sealed(&self) -> bool {
        self.sealed.load(Ordering::Acquire)
    }

    /// Makes the image durable and read-only. No request that may change it is in flight; reads may be.
    ///
    /// # Errors
    /// The store's; the layer stays unsealed then.
    pub async fn seal(&self) -> Result<()> {
        let _one = self.sealing.lock().await;
        if !self.is_sealed() {
            self.image.seal().await?;
            self.sealed.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// From now on requests come here as to the leaf of a disk, while those of `epochs` may still change its parents. Graphs that come later and have
    /// this leaf change nothing: what began under them and the ones before meets at the image's own locks.
    pub(crate) fn becomes_leaf(&self, epochs: &[Arc<dyn Epoch>]) {
        self.before.get_or_init(|| epochs.to_vec());
    }

    /// True when no request is in flight any more that may change a parent because it began before this layer was the leaf.
    pub(crate) fn do_parents_rest(&self) -> bool {
        self.before.get().into_iter().flatten().all(|epoch| epoch.has_ended())
    }

    /// Waits until they do.
    pub(crate) async fn parents_rest(&self) {
        for epoch in self.before.get().into_iter().flatten() {
            epoch.ended().await;
        }
    }

    /// Which image it is, for a note that is read when the image was written to: its own identity, where that stays the same then, else that
    /// of its file. `None` where nobody can tell later.
    pub fn which(&self) -> Option<Identity> {
        let image = &self.image;
        let own = if image.format().has_lasting_identities() { image.identity() } else { None };
        own.or_else(|| image.store().file_identity().map(Identity))
    }

    /// What there is to know of the layer.
    pub fn info(&self) -> LayerInfo {
        let image = &self.image;
        LayerInfo {
            path: image.store().path().to_owned(),
            format: image.format(),
            virtual_bytes: image.size_bytes(),
            file_bytes: image.store().len_bytes(),
            direct: image.via() == Via::Direct,
            identity: image.identity(),
            which: self.which(),
            unflushed: image.is_unflushed(),
            facts: image.facts(),
        }
    }
}
