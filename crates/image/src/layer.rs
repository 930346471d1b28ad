//! [`Layer`]: one image as a graph sees it. This is the seam between the formats and everything that names none.
//!
//! A format maps, it does not move data: a layer says where guest bytes lie in its store, and the graph reads and
//! writes them there. The exception is [`Found::Encoded`]: only the format can decode such a run.
//!
//! An answer from memory ([`Layer::find`]) needs no await and no allocation. When a piece of the map is not in memory,
//! the answer is [`Found::Miss`]; the caller loads that piece ([`Layer::load`]) and asks again.
//!
//! A format that cannot be written implements the methods without a default, and `type Reserved<'a> = NeverReserved`.

use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use spile_core::{Error, ErrorKind, Extent, ExtentKind, Result, Segments, Store, StoreOffset, Timer, Via};

use crate::amend::{Amended, Amendment};
use crate::bitmaps::{BitmapPart, InnerBitmap, KeptBitmaps};
use crate::create::NewParent;
use crate::facts::Facts;
use crate::formats::Format;
use crate::grace::Reader;
use crate::inner::{InnerChange, InnerSnapshot, InnerWatch};
use crate::range_lock::RangeGuard;
use crate::room::HearRoom;

/// A flush gives the space of so many units back to the store at most, those first that were given up last ([`Layer::forget`]).
pub const GIVEN_BACK_A_FLUSH: usize = 256;

/// What a layer has given back at once ([`Layer::give_back`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GivenBack {
    /// How many bytes of its file that were; 0 when there is nothing, or not before the next flush.
    pub bytes: u64,
    /// How long requests to the file may have waited for it. How long it waited itself for a flush is not in it.
    pub took: Duration,
    /// True when requests that began before keep more from being given back.
    pub has_readers: bool,
}

/// What a layer knows of a run of guest bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The bytes lie in the layer's store, at this offset.
    Data(StoreOffset),
    /// The run reads as zeroes, whatever the layers below have there.
    Zero,
    /// The layer has nothing here: the next layer down decides; without one the run reads as zeroes.
    Below,
    /// The bytes are in the layer's store in encoded form; [`Layer::read_encoded`] decodes them.
    Encoded {
        /// Which encoded unit holds the run.
        unit: EncodedUnit,
        /// Where the run starts in the decoded unit, in bytes.
        within_bytes: u32,
    },
    /// The answer is in a piece of the map that is not in memory: load that piece, then ask again.
    Miss(MapPiece),
}

/// A layer's own name for a piece of its map that can be loaded, such as a block or a slice of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MapPiece(pub u64);

/// A layer's own name for an encoded unit, such as a compressed cluster. Only the layer that gave it can read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EncodedUnit(pub u64);

/// What tells an image from every other, if its format keeps such a thing: a VHD's UUID. A child that notes its
/// parent's identity notices when another image has taken the parent's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity(pub [u8; 16]);

/// How a child names its parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParentRef {
    /// Where the parent may lie, best first; relative paths are relative to the child's folder. Input from whoever
    /// wrote the image: the graph follows a path only into folders that its policy allows.
    pub names: Vec<PathBuf>,
    /// The parent's format, if the child names it. A format is never probed from content.
    pub format: Option<Format>,
    /// The identity that the parent must have, if it reports one.
    pub identity: Option<Identity>,
}

/// Place for one write, with all locks that the write needs. Dropped before it is published or committed, it changes nothing that a
/// reader can see.
pub trait Reserved {
    /// Where in the layer's store the data go.
    fn offset(&self) -> StoreOffset;

    /// How many bytes before and after the part are to be written as well before the commit, with what the disk shows there now: a
    /// format that maps larger units than the part copies the rest of them. They lie before and behind [`Reserved::offset`].
    fn around(&self) -> (u64, u64) {
        (0, 0)
    }

    /// True when [`Reserved::publish`] has something to do.
    fn publishes(&self) -> bool {
        false
    }

    /// Does the part of the commit that needs not come after the data, because the place reads as the guest's old bytes until they are there. The
    /// data may be written at the same time. The locks stay.
    ///
    /// # Errors
    /// Errors of the store.
    fn publish(&mut self) -> impl Future<Output = Result<()>> {
        std::future::ready(Ok(()))
    }

    /// The place is not needed: the write to it has failed and is over. (When the reservation is dropped instead, a write may be under way still.)
    fn abandon(self)
    where
        Self: Sized,
    {
    }

    /// Makes the data that were written at [`Reserved::offset`] the guest's, where that is not done yet. When it returns, they survive the death of
    /// the process.
    ///
    /// # Errors
    /// Errors of the store.
    fn commit(self) -> impl Future<Output = Result<()>>;
}

/// The reservation of a layer that is never written, or always in place: it cannot exist.
pub enum NeverReserved {}

impl Reserved for NeverReserved {
    fn offset(&self) -> StoreOffset {
        match *self {}
    }

    async fn commit(self) -> Result<()> {
        match self {}
    }
}

/// One image of a graph. Requests may overlap in time, from several workers.
///
/// Methods that change the image are called only while the layer is the leaf of a graph (or was, for requests that
/// began then), with extents inside the size and on [`Layer::request_align_bytes`].
pub trait Layer<S: Store>: Send + Sync + 'static {
    /// What [`Layer::reserve`] returns.
    type Reserved<'a>: Reserved
    where
        Self: 'a;

    /// Where the image's bytes are.
    fn store(&self) -> &S;

    /// Where data that [`Layer::find`] found are: the image's own store, unless the guest's data lie in another file.
    fn data_store(&self) -> &S {
        self.store()
    }

    /// The name of another file that holds the guest's data, if there is one: a path, relative to the image's folder.
    /// Input from whoever wrote the image.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported` when the name makes no sense.
    fn data_file(&self) -> Result<Option<PathBuf>> {
        Ok(None)
    }

    /// Gives the layer the file that [`Layer::data_file`] names, before anything is read.
    fn attach_data_file(&mut self, store: S) {
        let _ = store;
    }

    /// The size that the image shows to a guest, in bytes.
    fn size_bytes(&self) -> u64;

    /// How data are reached: directly only where no 4 KiB page of the store holds both data and metadata.
    fn via(&self) -> Via;

    /// The format's own unit for requests, in bytes (a power of two): 1 or 512. The store may want more.
    fn request_align_bytes(&self) -> u32;

    /// Where the bytes from `at` lie, and for how many bytes that answer holds: at least 1, at most `len_bytes`. The run lies
    /// within the size.
    fn find(&self, at: u64, len_bytes: u64) -> (Found, u64);

    /// [`Layer::find`] for bytes that are known to be this layer's own (data or encoded). A format that knows the place
    /// of a run without looking up whether it has the run answers from less of its map here.
    fn locate(&self, at: u64, len_bytes: u64) -> (Found, u64) {
        self.find(at, len_bytes)
    }

    /// Brings a piece of the map into memory. Callers that want the same piece at the same time share one load.
    ///
    /// # Errors
    /// Errors of the store; `Corrupt` when the piece makes no sense.
    fn load(&self, piece: MapPiece) -> impl Future<Output = Result<()>>;

    /// Fills `into` with decoded bytes of `unit`, from `within_bytes` on.
    ///
    /// # Errors
    /// Errors of the store; `Corrupt` when the unit cannot be decoded.
    fn read_encoded(&self, unit: EncodedUnit, within_bytes: u32, into: &Segments) -> impl Future<Output = Result<()>> {
        let _ = (unit, within_bytes, into);
        async { Err(self.unsupported("this format has no encoded data")) }
    }

    /// The kind that a map shows where this layer says [`Found::Data`] and its store has a hole. A hole of a raw image
    /// was never written; in other formats the space belongs to the image.
    fn hole_kind(&self) -> ExtentKind {
        ExtentKind::Zero
    }

    /// Counts a reader in, until the value is dropped. Until then no place that the reader may have looked up is given
    /// to other data. `None` for a format that never moves data.
    fn enter(&self) -> Option<Reader<'_>> {
        None
    }

    /// How many bytes from the start of `extent` one reservation, one `zero` or one `unmap` can cover.
    fn part_len(&self, extent: Extent) -> u64 {
        extent.len_bytes
    }

    /// The unit of space (block, cluster) around `part`, whose release depends on what lies below the whole of it.
    fn unit(&self, part: Extent) -> Extent {
        part
    }

    /// The first part of `extent` for which this layer has space of its own; no longer than [`Layer::part_len`]. In it,
    /// [`Layer::find`] says run by run what the layer has; that can be nothing, where a process was killed.
    fn next_held(&self, extent: Extent) -> Option<Extent> {
        let _ = extent;
        None
    }

    /// The first part of `extent` that this layer has something of: bytes, or zeroes that hide what lies below. No longer than
    /// [`Layer::part_len`]. As [`Layer::next_held`] says, but the map is brought into memory where that is needed to know.
    ///
    /// # Errors
    /// As [`Layer::load`].
    fn next_own(&self, extent: Extent) -> impl Future<Output = Result<Option<Extent>>> {
        let held = self.next_held(extent);
        async move { Ok(held) }
    }

    /// Where the bytes of `extent` go, if they can be written there as they are: with no lock, nothing to commit, and no map
    /// to change. Else the graph asks [`Layer::reserve`] for each part.
    fn in_place(&self, extent: Extent) -> Option<StoreOffset> {
        let _ = extent;
        None
    }

    /// Finds or makes place for the bytes of `part`, and holds the locks that a write there needs.
    ///
    /// # Errors
    /// `ReadOnly`, `NoSpace`; errors of the store.
    fn reserve(&self, part: Extent) -> impl Future<Output = Result<Self::Reserved<'_>>> {
        let _ = part;
        async { Err(self.read_only_error()) }
    }

    /// Makes `part` read as zeroes. `below_is_zero`: what lies below the whole [`Layer::unit`] reads as zeroes and stays so. False when the
    /// format cannot express that where other bytes are around the part: nothing was changed, and the caller writes zeroes.
    ///
    /// # Errors
    /// `ReadOnly`, `NoSpace`; errors of the store.
    fn zero(&self, part: Extent, may_unmap: bool, below_is_zero: bool) -> impl Future<Output = Result<bool>> {
        let _ = (part, may_unmap, below_is_zero);
        async { Err(self.read_only_error()) }
    }

    /// Frees what can be freed of `part`; what was freed reads as zeroes, the rest stays as it is.
    ///
    /// # Errors
    /// `ReadOnly`; errors of the store.
    fn unmap(&self, part: Extent, below_is_zero: bool) -> impl Future<Output = Result<()>> {
        let _ = (part, below_is_zero);
        async { Err(self.read_only_error()) }
    }

    /// Until the value is dropped, no write copies what lies below `part` into this layer, and none is just doing that: what is written below meanwhile
    /// is not hidden. At most one [`Layer::part_len`]. `None` for a format that never copies what lies below, and for an image that takes no writes.
    fn keep_copies_out(&self, part: Extent) -> impl Future<Output = Option<RangeGuard<'_>>> {
        let _ = part;
        async { None }
    }

    /// Gives up what the layer has of `part`, one [`Layer::part_len`] at most: it reads as what lies below. Whoever calls this has
    /// made sure that the bytes below are the same and durable, and that no request writes to `part` meanwhile. Readers may be at it, and
    /// requests may write elsewhere, in the same [`Layer::unit`], too.
    ///
    /// When it returns, the part does not come back if the process dies, so other bytes may be written below. After a power cut it
    /// may come back with its old bytes, until a flush of this layer that began later has ended: a write below is durable only when this
    /// layer was flushed, too.
    ///
    /// [`Layer::next_held`] does not show a unit again of which nothing is left. A unit is best given up as a whole: that waits
    /// for no sync, and frees the unit's space, which three flushes of this layer give back to the store (the first of them once
    /// all readers from before have ended). A smaller part may wait for flushes of this layer; its bytes stay in the file, unused, until the
    /// rest of the unit is given up, too.
    ///
    /// # Errors
    /// `ReadOnly`; `Unsupported` where the format cannot do that, and for an image without a parent; errors of the store. After an
    /// error the part is still this layer's.
    fn forget(&self, part: Extent) -> impl Future<Output = Result<()>> {
        let _ = part;
        async { Err(self.unsupported("this format cannot give up a part of an image")) }
    }

    /// While it holds its space, flushes do not give back what was given up ([`Layer::forget`]). That is for a layer that will soon be removed
    /// as a whole: a file system may take long for each piece. When it holds its space no longer, what it has held until then is unused
    /// space in its file, which new data take: flushes do not give back that either, for guests wait for them.
    fn hold_space(&self, holds: bool) {
        let _ = holds;
    }

    /// Gives back to the store about `most_bytes` of the space of what was given up, where flushes hold it ([`Layer::hold_space`]). Requests
    /// to the store may have to wait meanwhile, so whoever has them in mind asks for little at a time.
    ///
    /// # Errors
    /// Errors of the store.
    fn give_back(&self, most_bytes: u64, timer: &dyn Timer) -> impl Future<Output = Result<GivenBack>> {
        let _ = (most_bytes, timer);
        async { Ok(GivenBack::default()) }
    }

    /// Gives the layer zeroes of its own where it has space in `part`, one [`Layer::part_len`] at most, but no bytes. Whoever calls this has made
    /// sure that zeroes lie below there, and keeps changes out of the part. It leaves less to do to [`Layer::set_parent`] with `None`.
    ///
    /// # Errors
    /// `ReadOnly`; errors of the store.
    fn own_zeroes(&self, part: Extent) -> impl Future<Output = Result<()>> {
        let _ = part;
        async { Ok(()) }
    }

    /// Has the image name `parent` as its parent in the place of the one it has, or none. Whoever calls this has made sure that the disk reads
    /// the same with it, and that nobody calls [`Layer::forget`] meanwhile; requests may be in flight. With `None`, what the image lacks must read
    /// as zeroes below; it takes long where [`Layer::own_zeroes`] was not called before.
    ///
    /// The change is durable when it returns; a process or host that ends meanwhile leaves an image that names the old parent
    /// or the new one. The layers of a graph stay as they are: only who opens the image the next time finds the new parent.
    ///
    /// # Errors
    /// `ReadOnly`; `Unsupported` where the format cannot do that, and for an image without a parent that is to get one;
    /// `InvalidInput` for a name that the format cannot express; `NoSpace`; errors of the store. After an error of the store the image may name either parent in
    /// the file, so both must stay until another call has succeeded.
    fn set_parent(&self, parent: Option<&NewParent>) -> impl Future<Output = Result<()>> {
        let _ = parent;
        async { Err(self.unsupported("this format cannot change an image's parent")) }
    }

    /// Whether [`Layer::set_parent`] can write down what `parent` is called.
    ///
    /// # Errors
    /// `InvalidInput` for a name that the format cannot express.
    fn check_name(&self, parent: &NewParent) -> Result<()> {
        let _ = parent;
        Ok(())
    }

    /// Begins what the first writes would wait for, beside them ([`Env::spawn`](spile_core::Env::spawn)). Called when the layer
    /// is put to use as a leaf that takes writes.
    fn begin(&self) {}

    /// Makes all that was acknowledged before the call survive a power cut.
    ///
    /// # Errors
    /// Errors of the store. After a failed sync every later flush fails too.
    fn flush(&self) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }

    /// Waits until nothing writes to the image but requests. Called while there is none: then the file does not change any more.
    fn rest(&self) -> impl Future<Output = ()> {
        async {}
    }

    /// Ends all writing: flushes, leaves the image as other programs expect it, and refuses writes from then on. No
    /// write may be in flight; reads may.
    ///
    /// # Errors
    /// Errors of the store.
    fn seal(&self) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }

    /// Makes the image `size_bytes` long, as `Disk::resize` says.
    ///
    /// # Errors
    /// `Unsupported` where the format cannot do that while it is in use; `InvalidInput`; errors of the store.
    fn resize(&self, size_bytes: u64) -> impl Future<Output = Result<()>> {
        let _ = size_bytes;
        async { Err(self.unsupported("this format cannot grow while it is in use")) }
    }

    /// Refuses a size that [`Layer::resize`] does not give the image. It asks no storage, and changes nothing.
    ///
    /// # Errors
    /// Those of [`Layer::resize`] that the image's format has.
    fn check_resize(&self, size_bytes: u64) -> Result<()> {
        let _ = size_bytes;
        Ok(())
    }

    /// Makes the image `size_bytes` long while nobody uses it, and seals it: no request is in flight, and the layer is dropped
    /// afterwards. What lies behind the end of a shorter image is lost, and is zero when it grows again. An image that is ended at any moment meanwhile opens with its old size or with the new one.
    ///
    /// # Errors
    /// `Unsupported` where the format cannot do that; `InvalidInput`; `NoSpace`; errors of the store.
    fn resize_unused(&self, size_bytes: u64) -> impl Future<Output = Result<()>> {
        let _ = size_bytes;
        async { Err(self.unsupported("this format cannot be resized")) }
    }

    /// Gives the image another version, or other features, while nobody uses it, and seals it: no request is in flight, and the layer is dropped
    /// afterwards. The disk shows what it showed. An image that is ended at any moment meanwhile is what it was, or all that was asked for.
    ///
    /// # Errors
    /// `Unsupported` where the format cannot do that, or when something of the image would be lost; `InvalidInput` for what there is not; `Corrupt` for an
    /// image that contradicts itself; `ReadOnly`; errors of the store.
    fn amend(&self, asked: &Amendment) -> impl Future<Output = Result<Amended>> {
        let _ = asked;
        async { Err(self.unsupported("only a qcow2 image has a version and lazy refcounts to choose")) }
    }

    /// What the image says of its parent; `None` when it has none.
    ///
    /// # Errors
    /// Errors of the store; `Corrupt` when what it says makes no sense; `Unsupported` for a format name that is not known.
    fn parent(&self) -> impl Future<Output = Result<Option<ParentRef>>>;

    /// What tells this image from others, if its format keeps such a thing.
    fn identity(&self) -> Option<Identity> {
        None
    }

    /// True when the image holds other states of a disk besides the one that it shows: snapshots inside it, which go with its file, and which read
    /// from the image's parent, too.
    fn has_inner_snapshots(&self) -> bool {
        false
    }

    /// The snapshots inside the image, in the order of its table.
    ///
    /// # Errors
    /// `Unsupported` where the format has none; `Corrupt` when not all of them can be read; errors of the store.
    fn inner_snapshots(&self) -> impl Future<Output = Result<Vec<InnerSnapshot>>> {
        async { Err(self.unsupported("an image of this format has no snapshots inside it")) }
    }

    /// Changes the snapshots inside the image while nobody uses it, and seals it: no request is in flight, and the layer is dropped
    /// afterwards. Returns the snapshot that was made, applied or deleted. An image that is ended at any moment meanwhile opens as it was or
    /// as it is to be; space may be leaked. `watch` hears of it.
    ///
    /// # Errors
    /// `Unsupported` where the format has none, and for an image that has no room for one more; `Corrupt` for an image that contradicts itself; `NotFound`,
    /// `Exists`, `InvalidInput` for a name; `NoSpace`: in all these cases nothing was changed. `ReadOnly`; errors of the store, and of `watch`.
    fn change_inner_unused(
        &self,
        change: &InnerChange,
        watch: &dyn InnerWatch,
    ) -> impl Future<Output = Result<InnerSnapshot>> {
        let _ = (change, watch);
        async { Err(self.unsupported("an image of this format has no snapshots inside it")) }
    }

    /// The bitmaps inside the image, in the order of its directory; `None` where they cannot be told, or the image says that none of them is
    /// consistent.
    ///
    /// # Errors
    /// Errors of the store.
    fn bitmaps(&self) -> impl Future<Output = Result<Option<Vec<InnerBitmap>>>> {
        async { Ok(Some(Vec::new())) }
    }

    /// What is set in the bitmap `name` of the image, as its file has it, from the start of `within` on; some of what lies before that and behind its end may be
    /// told, too.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt` for a bitmap that cannot be read; errors of the store.
    fn bitmap_part(&self, name: &str, within: Range<u64>) -> impl Future<Output = Result<BitmapPart>> {
        let _ = (name, within);
        async { Err(self.unsupported("an image of this format has no bitmaps inside it")) }
    }

    /// From now on somebody knows what has changed since these bitmaps of the image were made: when it is sealed, it has that in them. Called before
    /// the first change. Bitmaps that nobody keeps up are not to be believed after a change. Returns the names of those that can be kept up.
    ///
    /// # Errors
    /// `ReadOnly`; errors of the store.
    fn keep_bitmaps(&self, kept: KeptBitmaps) -> impl Future<Output = Result<Vec<String>>> {
        let _ = kept;
        async { Ok(Vec::new()) }
    }

    /// Removes a bitmap that is kept up from the image, durably; requests may be in flight. One that is not there any more is no error.
    ///
    /// # Errors
    /// `Unsupported` where that cannot be done while the image is in use; `NoSpace`; errors of the store.
    fn remove_bitmap(&self, name: &str) -> impl Future<Output = Result<()>> {
        let _ = name;
        async { Ok(()) }
    }

    /// True when a process that was killed left acknowledged writes that only an open for writing makes durable.
    fn is_unflushed(&self) -> bool {
        false
    }

    /// How many units of space (blocks, clusters) the layer has taken for data since it was opened.
    fn allocations(&self) -> u64 {
        0
    }

    /// Has `hear` told of the image's room on a device: when the image has taken some of it, and when it has found none. Nobody is told by an image
    /// whose store grows by itself, or which needs no more room ever. False for such a one, and for an image that is open for reading only.
    fn watch_room(&self, hear: HearRoom) -> bool {
        let _ = hear;
        false
    }

    /// Takes up what the device below has gained, and tells the room anew. An image that finds no room does that by itself.
    ///
    /// # Errors
    /// `ReadOnly`; errors of the store.
    fn look_for_room(&self) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }

    /// Facts about the image, for people and programs.
    fn facts(&self) -> Facts;

    /// The error of a change to an image that is open for reading only.
    fn read_only_error(&self) -> Error {
        Error::new(ErrorKind::ReadOnly, "the image is open for reading only").at_path(self.store().path())
    }

    /// An error that says what the format or this image cannot do.
    fn unsupported(&self, what: &str) -> Error {
        Error::new(ErrorKind::Unsupported, what).at_path(self.store().path())
    }
}
