//! A layer as graphs hold it: with an identity, and shared.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use async_lock::Mutex;
use spile_core::metrics::Meter;
use spile_core::{Result, Store, Via};

use crate::facts::LayerInfo;
use crate::formats::AnyLayer;
use crate::layer::Layer;

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
    meter: Meter,
}

impl<S: Store> GraphLayer<S> {
    /// A layer for `image`. `sealed`: the image is open for reading only, and durable.
    pub(crate) fn new(image: AnyLayer<S>, sealed: bool) -> Arc<Self> {
        let (sealed, sealing, meter) = (AtomicBool::new(sealed), Mutex::new(()), Meter::new());
        Arc::new(Self { id: LayerId::next(), image, sealed, sealing, meter })
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

    /// Counts of what graphs have asked of this layer: reads and writes of the guest's data (a request that lies in several
    /// pieces counts as several), flushes, and changes of space. The layer's own metadata are not among them.
    pub fn meter(&self) -> &Meter {
        &self.meter
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
            unflushed: image.is_unflushed(),
            facts: image.facts(),
        }
    }
}
