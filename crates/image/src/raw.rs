//! Raw: the guest's bytes at the same offsets of the store, from its start. Also the data of a fixed VHD.
//!
//! Write order: none is needed; there is no metadata. A size that is not a multiple of the store's alignment is
//! served through the page cache as a whole, because its last bytes cannot be reached directly.

use spile_core::{Error, ErrorKind, Extent, Result, Segments, Store, StoreOffset, Via, WriteZeroes};

/// A run of guest bytes kept as they are.
pub(crate) struct Raw<S> {
    store: S,
    size_bytes: u64,
    via: Via,
}

impl<S: Store> Raw<S> {
    /// The first `size_bytes` of `store`.
    pub(crate) fn new(store: S, size_bytes: u64) -> Self {
        let aligned = size_bytes.is_multiple_of(u64::from(store.info().offset_align_bytes));
        Self { store, size_bytes, via: if aligned { Via::Direct } else { Via::Cached } }
    }

    pub(crate) fn store(&self) -> &S {
        &self.store
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    pub(crate) fn via(&self) -> Via {
        self.via
    }

    pub(crate) async fn write(&self, extent: Extent, from: &Segments) -> Result<()> {
        self.store.write_at(StoreOffset(extent.start()), from, self.via).await
    }

    /// Punches; where the store cannot, a discard may leave the bytes as they are.
    pub(crate) async fn discard(&self, extent: Extent) -> Result<()> {
        if !self.store.info().punches {
            return Ok(());
        }
        self.store.punch_hole(StoreOffset(extent.start()), extent.len_bytes).await
    }

    pub(crate) async fn write_zeroes(&self, extent: Extent, how: WriteZeroes) -> Result<()> {
        let punches = self.store.info().punches;
        if how.only_if_fast && !punches {
            return Err(
                Error::new(ErrorKind::Unsupported, "zeroes are not fast on this store").at_path(self.store.path())
            );
        }
        match how.may_unmap && punches {
            true => self.store.punch_hole(StoreOffset(extent.start()), extent.len_bytes).await,
            false => self.store.zero_range(StoreOffset(extent.start()), extent.len_bytes).await,
        }
    }
}
