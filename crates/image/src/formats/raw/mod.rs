//! Raw: the guest's bytes at the same offsets of the store, from its start. Also the data of a fixed VHD.
//!
//! Write order: none is needed; there is no metadata. A size that is not a multiple of the store's alignment is
//! served through the page cache as a whole, because its last bytes cannot be reached directly.
//!
//! A raw image can grow while it is in use: the store's new length is durable before a reader can see it. Data are
//! reached as was chosen when the image was opened, directly or through the page cache; a size for which that is not
//! possible is refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_lock::Mutex;
use spile_core::{Env, Error, ErrorKind, Extent, ExtentKind, Result, ResultExt, SECTOR_BYTES, Store, StoreOffset, Via};

use super::{About, ImageFormat, OpenLayer};
use crate::check::{Lost, Mend, Report, Severity};
use crate::create::NewImage;
use crate::facts::Facts;
use crate::layer::{Found, Layer, MapPiece, NeverReserved, ParentRef};
use crate::measure::Space;

/// The unit in which the page cache holds a file.
const PAGE_BYTES: u64 = 4096;

/// The format.
pub struct RawFormat;

impl ImageFormat for RawFormat {
    const ABOUT: About = About {
        name: "raw",
        aliases: &[],
        extensions: &["raw", "img"],
        subformats: &[],
        has_parents: false,
        has_options: false,
        size_unit_bytes: 1,
        identity_mark: None,
    };
    type Layer<S: Store> = Raw<S>;

    async fn open<S: Store>(store: S, _: &Arc<dyn Env>, _: OpenLayer) -> Result<Raw<S>> {
        let size = store.len_bytes();
        Ok(Raw::new(store, size))
    }

    async fn named_parent<S: Store>(_: &S) -> Result<Option<ParentRef>> {
        Ok(None)
    }

    async fn create<S: Store>(store: &S, _: &dyn Env, new: &NewImage) -> Result<()> {
        if store.info().grows_zeroed {
            store.set_len(new.size_bytes).await?;
        }
        store.sync().await
    }

    fn space(new: &NewImage) -> Result<Space> {
        Ok(Space::whole(new.size_bytes, 0))
    }

    /// A check of a raw image looks at its size only: there is no metadata that could be wrong.
    async fn check<S: Store>(store: &S, _: &dyn Env) -> Result<Report> {
        let (mut report, size) = (Report::default(), store.len_bytes());
        if !size.is_multiple_of(SECTOR_BYTES) {
            let message = format!("{size} bytes are not a whole number of sectors: perhaps an unfinished copy");
            report.add(Severity::Note, size, Mend::No, message);
        }
        Ok(report)
    }

    /// A repair changes nothing, because there is no metadata.
    async fn repair<S: Store>(store: &S, env: &dyn Env, _: Lost) -> Result<Report> {
        Self::check(store, env).await
    }
}

/// A run of guest bytes kept as they are.
pub struct Raw<S> {
    store: S,
    size_bytes: AtomicU64,
    via: Via,
    /// Held while the store grows: of two growths at once, the smaller could cut off what the larger has added.
    growing: Mutex<()>,
}

impl<S: Store> Raw<S> {
    /// The first `size_bytes` of `store`.
    pub(crate) fn new(store: S, size_bytes: u64) -> Self {
        let aligned = size_bytes.is_multiple_of(u64::from(store.info().offset_align_bytes));
        let via = if aligned { Via::Direct } else { Via::Cached };
        Self { store, size_bytes: AtomicU64::new(size_bytes), via, growing: Mutex::new(()) }
    }

    /// Tells the size `size_bytes` once `make_room`, which gets the old size, has made that durable in the store.
    pub(crate) async fn grow(&self, size_bytes: u64, make_room: impl AsyncFnOnce(u64) -> Result<()>) -> Result<()> {
        let _alone = self.growing.lock().await;
        self.check_growth(size_bytes).at_path(self.store.path())?;
        make_room(self.size_bytes()).await?;
        self.size_bytes.store(size_bytes, Ordering::Release);
        Ok(())
    }

    fn check_growth(&self, size_bytes: u64) -> Result<()> {
        let (old_bytes, info) = (self.size_bytes(), self.store.info());
        let align = u64::from(info.offset_align_bytes);
        let refuse = |kind, what: String, hint: &str| Err(Error::new(kind, what).hint(hint));
        check_sectors(size_bytes)?;
        if size_bytes < old_bytes {
            let what = format!("the disk has {old_bytes} bytes and cannot shrink to {size_bytes}");
            let hint = "`spile resize --shrink` makes it shorter while nobody uses it";
            return refuse(ErrorKind::InvalidInput, what, hint);
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

fn check_sectors(size_bytes: u64) -> Result<()> {
    if size_bytes.is_multiple_of(SECTOR_BYTES) {
        return Ok(());
    }
    let what = format!("a size of {size_bytes} bytes is no whole number of sectors");
    Err(Error::new(ErrorKind::InvalidInput, what).hint("choose a multiple of 512"))
}

impl<S: Store> Layer<S> for Raw<S> {
    type Reserved<'a>
        = NeverReserved
    where
        S: 'a;

    fn store(&self) -> &S {
        &self.store
    }

    /// The size now. When it has grown, the store is as long already.
    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    fn via(&self) -> Via {
        self.via
    }

    fn request_align_bytes(&self) -> u32 {
        1
    }

    fn find(&self, at: u64, len_bytes: u64) -> (Found, u64) {
        (Found::Data(StoreOffset(at)), len_bytes)
    }

    async fn load(&self, _: MapPiece) -> Result<()> {
        Ok(())
    }

    fn hole_kind(&self) -> ExtentKind {
        ExtentKind::Hole
    }

    fn next_held(&self, extent: Extent) -> Option<Extent> {
        (!extent.is_empty()).then_some(extent)
    }

    fn in_place(&self, extent: Extent) -> Option<StoreOffset> {
        Some(StoreOffset(extent.start()))
    }

    async fn zero(&self, part: Extent, may_unmap: bool, _: bool) -> Result<bool> {
        match may_unmap && self.store.info().punches {
            true => self.store.punch_hole(StoreOffset(part.start()), part.len_bytes).await?,
            false => self.store.zero_range(StoreOffset(part.start()), part.len_bytes).await?,
        }
        Ok(true)
    }

    /// Where the store cannot punch, a discard may leave the bytes as they are.
    async fn unmap(&self, part: Extent, _: bool) -> Result<()> {
        match self.store.info().punches {
            true => self.store.punch_hole(StoreOffset(part.start()), part.len_bytes).await,
            false => Ok(()),
        }
    }

    async fn flush(&self) -> Result<()> {
        self.store.sync().await
    }

    async fn seal(&self) -> Result<()> {
        self.store.sync().await
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.grow(size_bytes, async |_| {
            self.store.set_len(size_bytes).await?;
            self.store.sync().await
        })
        .await
    }

    /// Longer as [`Layer::resize`]; shorter by a cut, which loses what lay behind the new end.
    async fn resize_unused(&self, size_bytes: u64) -> Result<()> {
        if size_bytes >= self.size_bytes() {
            return self.resize(size_bytes).await;
        }
        check_sectors(size_bytes).at_path(self.store.path())?;
        self.store.set_len(size_bytes).await?;
        self.store.sync().await
    }

    async fn parent(&self) -> Result<Option<ParentRef>> {
        Ok(None)
    }

    fn facts(&self) -> Facts {
        Facts::default()
    }
}
