//! qcow2: versions 2 and 3, all that qemu-img makes, except encrypted images.
//!
//! An image that is open for reading only is never changed, and its refcounts are not looked at: feature bits that speak of
//! writing (dirty, corrupt, lazy refcounts, autoclear bits) do not hinder reading. One that is dirty gets new refcounts when it is opened
//! for writing (`dirty`). The head of `write` says in which order an image
//! that is open for writing is changed.
//!
//! Memory: L1 entries as the virtual size needs them (256 KiB at 16 TiB and 64 KiB clusters, 32 MiB at most), and L2 in
//! 4 KiB slices through a cache of the size that the caller sets (`slices`), never more than the file has L2 tables;
//! 1 MiB of decompressed clusters, or two clusters (`clusters`).
//!
//! docs/qcow2.md says what is read, what is refused and why.

mod alloc;
mod amend;
mod bitmaps;
mod check;
mod clusters;
pub mod codec;
mod create;
mod data_file;
mod dirty;
mod entries;
mod facts;
pub mod fill;
mod first_cluster;
mod flush;
mod forget;
mod inner;
mod l1;
mod layout;
mod lists;
mod map;
mod now;
mod open;
mod parent;
mod refcounts;
mod reparent;
mod resize;
mod room;
mod slices;
mod write;
mod writing;

use std::path::PathBuf;
use std::sync::Arc;

use spile_core::{Env, Error, ErrorKind, Extent, Result, Segments, Store, Timer, Via};

pub use self::dirty::is_dirty;

use self::bitmaps::SeenDirectory;
use self::clusters::Clusters;
use self::codec::table::Rules;
use self::lists::Lists;
use self::map::Map;
use self::now::Now;
use self::open::Head;
use self::write::ClusterReserved;
use self::writing::Writing;
use super::{About, ImageFormat, OpenLayer};
use crate::amend::{Amended, Amendment};
use crate::bitmaps::{BitmapPart, InnerBitmap, KeptBitmaps};
use crate::check::{Lost, Report};
use crate::create::{NewImage, NewParent};
use crate::facts::Facts;
use crate::grace::Reader;
use crate::inner::{InnerChange, InnerSnapshot, InnerWatch};
use crate::layer::{EncodedUnit, Found, GivenBack, Identity, Layer, MapPiece, ParentRef};
use crate::measure::Space;
use crate::range_lock::RangeGuard;
use crate::room::HearRoom;

/// The format.
pub struct Qcow2Format;

impl ImageFormat for Qcow2Format {
    const ABOUT: About = About {
        name: "qcow2",
        aliases: &[],
        extensions: &["qcow2"],
        subformats: &[],
        has_parents: true,
        has_options: true,
        size_unit_bytes: 512,
        identity_mark: Some(parent::IDENTITY_MARK),
    };
    type Layer<S: Store> = Qcow2<S>;

    async fn open<S: Store>(store: S, _: &Arc<dyn Env>, how: OpenLayer) -> Result<Qcow2<S>> {
        open::open(store, how).await
    }

    async fn named_parent<S: Store>(store: &S) -> Result<Option<ParentRef>> {
        parent::parent(&open::read_head(store).await?)
    }

    async fn named_data_file<S: Store>(store: &S) -> Result<Option<PathBuf>> {
        parent::data_file(&open::read_head(store).await?)
    }

    async fn create<S: Store>(store: &S, _: &dyn Env, new: &NewImage) -> Result<()> {
        create::create(store, new).await
    }

    fn space(new: &NewImage) -> Result<Space> {
        create::Plan::new(new).map(|plan| plan.space())
    }

    async fn check<S: Store>(store: &S, _: &dyn Env) -> Result<Report> {
        check::check(store).await
    }

    async fn repair<S: Store>(store: &S, _: &dyn Env, _: Lost) -> Result<Report> {
        check::repair(store).await.map(|outcome| outcome.found)
    }
}

/// An open image.
pub struct Qcow2<S> {
    store: S,
    /// The external data file, where the guest's data lie in one.
    data: Option<S>,
    /// The head as it was when the image was opened: what of it may change is in `now`.
    head: Head,
    now: Now,
    rules: Rules,
    map: Map,
    clusters: Clusters,
    lists: Lists,
    seen_directory: SeenDirectory,
    via: Via,
    /// `None` when the image is open for reading only.
    writing: Option<Writing>,
}

impl<S: Store> Layer<S> for Qcow2<S> {
    type Reserved<'a>
        = ClusterReserved<'a, S>
    where
        S: 'a;

    fn store(&self) -> &S {
        &self.store
    }

    fn data_store(&self) -> &S {
        self.data.as_ref().unwrap_or(&self.store)
    }

    fn data_file(&self) -> Result<Option<PathBuf>> {
        parent::data_file(&self.head)
    }

    fn attach_data_file(&mut self, store: S) {
        self.map.set_data_bytes(store.len_bytes());
        self.via = open::via(&store, &self.head.header, self.writing.is_some());
        self.data = Some(store);
    }

    fn size_bytes(&self) -> u64 {
        self.now.size_bytes()
    }

    fn via(&self) -> Via {
        self.via
    }

    fn request_align_bytes(&self) -> u32 {
        1
    }

    fn find(&self, at: u64, len_bytes: u64) -> (Found, u64) {
        self.map.find(at, len_bytes)
    }

    async fn load(&self, piece: MapPiece) -> Result<()> {
        self.map.load(&self.store, piece).await
    }

    async fn read_encoded(&self, unit: EncodedUnit, within_bytes: u32, into: &Segments) -> Result<()> {
        let place = self.map.compressed(unit)?;
        let cluster = self.clusters.read(&self.store, unit.0, place).await?;
        let start = within_bytes as usize;
        match cluster.get(start..start + into.len()) {
            Some(bytes) => {
                into.copy_from_slice(0, bytes);
                Ok(())
            }
            None => Err(Error::new(ErrorKind::InvalidInput, "a read goes past the end of a compressed cluster")),
        }
    }

    fn enter(&self) -> Option<Reader<'_>> {
        self.writing.as_ref().filter(|writing| !writing.is_sealed()).map(|writing| writing.grace.enter())
    }

    fn part_len(&self, extent: Extent) -> u64 {
        let within = self.part(extent).within;
        within.end - within.start
    }

    fn unit(&self, part: Extent) -> Extent {
        let bytes = self.head.header.cluster_bytes();
        let start = part.start() / bytes * bytes;
        Extent::from_range(start..start + bytes)
    }

    fn next_held(&self, extent: Extent) -> Option<Extent> {
        self.next_held_part(extent)
    }

    async fn next_own(&self, extent: Extent) -> Result<Option<Extent>> {
        self.next_own_run(extent).await
    }

    fn has_inner_snapshots(&self) -> bool {
        self.head.header.snapshots > 0
    }

    async fn reserve(&self, part: Extent) -> Result<ClusterReserved<'_, S>> {
        self.reserve_part(self.part(part)).await
    }

    async fn zero(&self, part: Extent, may_unmap: bool, below_is_zero: bool) -> Result<bool> {
        self.zero_part(&self.part(part), may_unmap, below_is_zero).await
    }

    async fn unmap(&self, part: Extent, below_is_zero: bool) -> Result<()> {
        self.unmap_part(&self.part(part), below_is_zero).await
    }

    async fn keep_copies_out(&self, part: Extent) -> Option<RangeGuard<'_>> {
        let (writing, cluster) = (self.writing.as_ref()?, self.part(part).cluster);
        Some(writing.clusters.shared(cluster..cluster + 1).await)
    }

    async fn forget(&self, part: Extent) -> Result<()> {
        self.forget_part(&self.part(part)).await
    }

    fn hold_space(&self, holds: bool) {
        if let Some(writing) = &self.writing {
            self.hold_given_up(writing, holds);
        }
    }

    async fn give_back(&self, most_bytes: u64, timer: &dyn Timer) -> Result<GivenBack> {
        match &self.writing {
            Some(writing) => self.give_back_settled(writing, most_bytes, timer).await,
            None => Ok(GivenBack::default()),
        }
    }

    async fn set_parent(&self, parent: Option<&NewParent>) -> Result<()> {
        self.name_parent(parent).await
    }

    fn check_name(&self, parent: &NewParent) -> Result<()> {
        self.check_parent_name(parent)
    }

    async fn flush(&self) -> Result<()> {
        match &self.writing {
            Some(writing) => self.flush_writing(writing).await,
            None => Ok(()),
        }
    }

    async fn seal(&self) -> Result<()> {
        match &self.writing {
            Some(writing) => self.seal_writing(writing).await,
            None => Ok(()),
        }
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.grow(size_bytes).await
    }

    fn check_resize(&self, size_bytes: u64) -> Result<()> {
        self.check_new_size(&self.now.head().header, size_bytes)
    }

    async fn resize_unused(&self, size_bytes: u64) -> Result<()> {
        self.resize_alone(size_bytes).await
    }

    async fn amend(&self, asked: &Amendment) -> Result<Amended> {
        self.amend_alone(asked).await
    }

    async fn inner_snapshots(&self) -> Result<Vec<InnerSnapshot>> {
        self.list_inner().await
    }

    async fn change_inner_unused(&self, change: &InnerChange, watch: &dyn InnerWatch) -> Result<InnerSnapshot> {
        Box::pin(self.change_inner_alone(change, watch)).await
    }

    async fn bitmaps(&self) -> Result<Option<Vec<InnerBitmap>>> {
        self.list_bitmaps().await
    }

    async fn bitmap_part(&self, name: &str, within: std::ops::Range<u64>) -> Result<BitmapPart> {
        self.read_bitmap_part(name, within).await
    }

    async fn keep_bitmaps(&self, kept: KeptBitmaps) -> Result<Vec<String>> {
        self.keep_sound_bitmaps(kept).await
    }

    async fn remove_bitmap(&self, name: &str) -> Result<()> {
        Box::pin(self.remove_kept_bitmap(name)).await
    }

    fn allocations(&self) -> u64 {
        self.writing.as_ref().map_or(0, |writing| writing.space().given_out)
    }

    fn watch_room(&self, hear: HearRoom) -> bool {
        let Some(writing) = self.writing.as_ref().filter(|_| !self.store.info().grows_zeroed) else { return false };
        writing.room.set(hear);
        true
    }

    async fn look_for_room(&self) -> Result<()> {
        self.look_for_more().await
    }

    async fn parent(&self) -> Result<Option<ParentRef>> {
        parent::parent(&self.now.head())
    }

    fn identity(&self) -> Option<Identity> {
        Some(parent::identity(&self.now.head(), self.map.l1()))
    }

    fn facts(&self) -> Facts {
        facts::facts(self)
    }
}
