//! Raw: the guest's bytes at the same offsets of the store, from its start. Also the data of a fixed VHD.
//!
//! Write order: none is needed; there is no metadata. A size that is not a multiple of the store's alignment is
//! served through the page cache as a whole, because its last bytes cannot be reached directly.
//!
//! It can grow while it is in use: the store's new length is durable before anybody is told of it. The way to the bytes
//! stays the one that was chosen at the open, so a size that this way cannot serve is refused.

use std::sync::atomic::{AtomicU64, Ordering};

use async_lock::Mutex;
use spile_core::{
    Error, ErrorKind, Extent, Result, ResultExt, SECTOR_BYTES, Segments, Store, StoreOffset, Via, WriteZeroes,
};

/// The unit in which the page cache holds a file.
const PAGE_BYTES: u64 = 4096;

/// A run of guest bytes kept as they are.
pub(crate) struct Raw<S> {
    store: S,
    size_bytes: AtomicU64,
    via: Via,
    /// Held while it grows: of two at once, the smaller could cut off what the larger has added.
    growing: Mutex<()>,
}

impl<S: Store> Raw<S> {
    /// The first `size_bytes` of `store`.
    pub(crate) fn new(store: S, size_bytes: u64) -> Self {
        let aligned = size_bytes.is_multiple_of(u64::from(store.info().offset_align_bytes));
        let via = if aligned { Via::Direct } else { Via::Cached };
        Self { store, size_bytes: AtomicU64::new(size_bytes), via, growing: Mutex::new(()) }
    }

    pub(crate) fn store(&self) -> &S {
        &self.store
    }

    /// The size now. Whoever sees a new one finds the store that long.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
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

    /// As `Disk::resize`.
    pub(crate) async fn resize(&self, size_bytes: u64) -> Result<()> {
        let _alone = self.growing.lock().await;
        self.check_growth(size_bytes).at_path(self.store.path())?;
        self.store.set_len(size_bytes).await?;
        self.store.sync().await?;
        self.size_bytes.store(size_bytes, Ordering::Release);
        Ok(())
    }

    fn check_growth(&self, size_bytes: u64) -> Result<()> {
        let (old_bytes, info) = (self.size_bytes(), self.store.info());
        let align = u64::from(info.offset_align_bytes);
        let refuse = |kind, what: String, hint: &str| Err(Error::new(kind, what).hint(hint));
        if !size_bytes.is_multiple_of(SECTOR_BYTES) {
            let what = format!("a size of {size_bytes} bytes is no whole number of sectors");
            return refuse(ErrorKind::InvalidInput, what, "choose a multiple of 512");
        }
        if size_bytes < old_bytes {
            let what = format!("the disk has {old_bytes} bytes and cannot shrink to {size_bytes}");
            return refuse(ErrorKind::InvalidInput, what, "only growing is possible; copy the data to a smaller disk");
        }
        if self.via == Via::Direct && !size_bytes.is_multiple_of(align) {
            let what = format!("the last bytes of a size of {size_bytes} could not be reached by direct I/O");
            return refuse(ErrorKind::InvalidInput, what, &format!("choose a multiple of {align}"));
        }
        // As a file grows, the kernel zeroes the rest of the page that it ended in: a cached write to that page. A direct
        // write to it at that moment makes every later sync fail (ext4, Linux 6.18: "Page cache invalidation failure").
        let is_direct_file = self.via == Via::Direct && align > 1 && info.grows_zeroed;
        if is_direct_file && size_bytes > old_bytes && !old_bytes.is_multiple_of(PAGE_BYTES) {
            let what = format!("the file ends within a page, at {old_bytes} bytes, and is written to directly");
            return refuse(ErrorKind::Unsupported, what, "grow it while nobody uses it, or use it by the page cache");
        }
        Ok(())
    }
}
