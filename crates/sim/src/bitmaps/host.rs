//! What the runs of [`super`] do in a life, and what they know of the disk.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use spile_core::{
    Disk, ErrorKind, Extent, Files, GuestOffset, OpenMode, Result, Segments, Store, StoreOffset, Via, WriteZeroes,
};
use spile_image::bitmaps::KeptBitmaps;
use spile_image::check::Severity;
use spile_image::layer::Layer;
use spile_image::{Format, Graph, OpenOptions};
use spile_life::changes::header::{Grain, Stamp};
use spile_life::changes::{self, Changes, Found, Surroundings};
use spile_life::names;
use spile_node::Node;

use super::raw::{self, DISABLED, LEFT_IN_USE, NOTING, Raw};
use super::{BitmapsSummary, Broken};
use crate::checkpoints::heed_alarm;
use crate::exec::block_on;
use crate::rng::Rng;
use crate::store::{SimFiles, SimStore};
use crate::turns::Seconds;
use crate::world::World;

const DISK: &str = "/images/disk.qcow2";
/// The disk has a sum of its content for each piece of so many bytes: no granularity is finer.
const PIECE_BYTES: usize = 512;

type Tracker = Arc<Changes<SimFiles>>;
type Disks = Arc<Node<Graph<SimStore>>>;
pub(super) type Opened = (Disks, Tracker);

/// What stays over the lives of the process.
pub(super) struct Host {
    pub world: World,
    pub summary: Cell<BitmapsSummary>,
    broken: Broken,
    grain: Grain,
    has_left_in_use: bool,
    faults_before: Cell<u64>,
    /// Something has failed, so that the changed blocks may be lost.
    has_failed: Cell<bool>,
    /// Some life was cut off, or another program cleared the bitmap, so that space may be leaked.
    may_leak: Cell<bool>,
    /// The image grew, so that the disabled bitmap may be in use now.
    has_grown: Cell<bool>,
    /// What the disk held when the bitmap was made.
    base: RefCell<Vec<u8>>,
    /// What the image looks like from outside.
    stamp: Cell<u8>,
    /// What its parents look like, if it had some.
    parents: Cell<u8>,
    /// These were written to since the bitmap was made, which it does not tell: from then on everything counts as changed.
    has_other_parents: Cell<bool>,
    /// The disk was opened since then: from there on the bitmap is in use, or all of it is set.
    has_noticed_parents: Cell<bool>,
    /// Another program has written to the image while the bitmap was in use: nobody knows any more what has changed since that was made.
    is_lost: Cell<bool>,
    /// What notes changes in this life.
    tracker: RefCell<Option<Tracker>>,
    /// The file of changed blocks says too little, and its alarm has an operator remove it.
    must_be_removed: Cell<bool>,
}

impl Host {
    pub fn new(world: World, broken: Broken, rng: &mut Rng) -> Self {
        let cluster_bytes = *rng.pick(&[512, 4096, 4096, 16384]);
        let size = match cluster_bytes {
            // More than one cluster of bits at the finest granularity.
            512 => rng.between(520, 560) * 4096,
            _ => rng.between(8, 128) * 4096,
        };
        let granularity_bits = *rng.pick(&[9, 9, 12, 13, 16, 24]);
        let has_left_in_use = rng.chance(1, 2);
        world.install(DISK, &raw::image(size, cluster_bytes, granularity_bits, has_left_in_use));
        let block_bytes = *rng.pick(&[4096, 4096, 16384]);
        Self {
            world,
            summary: Cell::default(),
            broken,
            grain: Grain { block_bytes, area_bytes: block_bytes << rng.below(5) },
            has_left_in_use,
            faults_before: Cell::default(),
            has_failed: Cell::default(),
            may_leak: Cell::default(),
            has_grown: Cell::default(),
            base: RefCell::new(vec![0; size as usize]),
            stamp: Cell::default(),
            parents: Cell::default(),
            has_other_parents: Cell::default(),
            has_noticed_parents: Cell::default(),
            is_lost: Cell::default(),
            tracker: RefCell::default(),
            must_be_removed: Cell::default(),
        }
    }

    pub fn count(&self, add: impl FnOnce(&mut BitmapsSummary)) {
        let mut summary = self.summary.get();
        add(&mut summary);
        self.summary.set(summary);
    }

    pub fn begin_life(&self) {
        self.faults_before.set(self.world.faults_fired());
    }

    /// Looks at what a life has left. `is_closed`: it came to its end.
    pub fn end_life(&self, is_closed: bool) {
        if self.has_faults() {
            self.has_failed.set(true);
        }
        if !is_closed || self.has_faults() {
            self.may_leak.set(true);
        }
        let tracker = self.tracker.take();
        if tracker.as_ref().and_then(|tracker| tracker.loss()).is_some_and(|loss| !loss.is_void) {
            self.must_be_removed.set(true);
        }
        self.look(is_closed && !self.has_failed.get() && !self.is_lost.get());
    }

    fn has_faults(&self) -> bool {
        self.world.faults_fired() > self.faults_before.get()
    }

    /// The bitmaps in the file. A directory that could not be read once is called consistent no more.
    fn bitmaps(&self) -> Option<Vec<Raw>> {
        let file = self.world.view(Path::new(DISK)).expect("the disk is there");
        let all = raw::read(&file);
        assert!(all.is_some() || self.has_failed.get(), "the image calls its bitmaps inconsistent");
        all
    }

    /// Looks at the file while nobody has it open. `must_be_true`: the bitmap that notes changes is to be believed.
    fn look(&self, must_be_true: bool) {
        let Some(all) = self.bitmaps() else { return };
        let find = |name: &str| all.iter().find(|bitmap| bitmap.name == name);
        assert_eq!(find(LEFT_IN_USE).is_some(), self.has_left_in_use);
        assert!(find(LEFT_IN_USE).is_none_or(|bitmap| bitmap.is_in_use), "a bitmap that was in use is called true");
        let disabled = find(DISABLED).expect("the disabled bitmap is there");
        let is_as_it_was = !disabled.is_in_use && disabled.bits.iter().all(|bit| *bit);
        assert!(is_as_it_was || self.has_grown.get(), "the disabled bitmap is another one");
        let noting = find(NOTING).expect("the bitmap is there");
        assert!(
            noting.is_in_use || !self.is_lost.get(),
            "a bitmap that lacks what another program wrote is called true"
        );
        assert!(
            noting.is_in_use || !self.has_noticed_parents.get() || noting.bits.iter().all(|bit| *bit),
            "a bitmap that lacks what its parents have got is called true"
        );
        assert!(!(must_be_true && noting.is_in_use), "the bitmap is in use after a life that ended in order");
        self.count(|summary| match noting.is_in_use {
            true => summary.in_use += 1,
            false => summary.believed += 1,
        });
        let world = self.world.clone();
        let now = block_on(&self.world, async move { content_of(&world).await });
        if !noting.is_in_use {
            self.compare(&now, noting);
        }
    }

    /// Each block that differs from what it was is set in `bitmap`.
    fn compare(&self, now: &[u8], bitmap: &Raw) {
        let granularity = bitmap.granularity_bytes as usize;
        let base = self.base.borrow();
        self.count(|summary| summary.useful += u64::from(bitmap.bits.iter().any(|bit| !bit)));
        for (number, piece) in now.chunks(PIECE_BYTES).enumerate() {
            let at = number * PIECE_BYTES;
            let is_same = base.get(at..at + piece.len()) == Some(piece);
            assert!(
                is_same || bitmap.bits[at / granularity],
                "the piece at {at} has changed since the bitmap was made, and is not set in it"
            );
        }
    }

    /// No life was cut off any more for some time.
    pub fn look_at_the_end(&self) {
        self.look(!self.has_failed.get() && !self.is_lost.get());
        let world = self.world.clone();
        let report = block_on(&self.world, async move {
            let store = world.files().open(&Path::new(DISK).into(), OpenMode::ReadOnly).await?;
            Format::Qcow2.check(&store, &*world.env()).await
        });
        let report = report.unwrap_or_else(|error| panic!("the image cannot be checked: {error:?}"));
        assert!(report.worst() != Some(Severity::Corruption), "the image contradicts itself: {:?}", report.findings);
        assert!(self.may_leak.get() || report.findings.is_empty(), "space is leaked: {:?}", report.findings);
    }

    /// Another program takes a backup, and clears the bitmap.
    pub fn clear_by_another(&self) {
        let bitmap = self.bitmaps().into_iter().flatten().find(|bitmap| bitmap.name == NOTING && !bitmap.is_in_use);
        let Some(bitmap) = bitmap else { return };
        let world = self.world.clone();
        let (at, len) = bitmap.table();
        let now = block_on(&self.world, async move {
            let store = world.files().open(&Path::new(DISK).into(), OpenMode::ReadWrite).await.expect("it opens");
            store.write_at(StoreOffset(at), &Segments::zeroed(len as usize), Via::Cached).await.expect("it is written");
            drop(store);
            content_of(&world).await
        });
        self.world.settle(Path::new(DISK));
        *self.base.borrow_mut() = now;
        self.has_other_parents.set(false);
        self.has_noticed_parents.set(false);
        self.stamp.set(self.stamp.get().wrapping_add(1));
        self.may_leak.set(true);
        self.count(|summary| summary.cleared += 1);
    }

    /// Another program writes to the image that a life has left behind, whose end nobody noted: it clears what it does not know in the header, and believes no
    /// bitmap that is in use.
    pub fn write_by_another(&self) {
        if !self.bitmaps().into_iter().flatten().any(|bitmap| bitmap.name == NOTING && bitmap.is_in_use) {
            return;
        }
        let world = self.world.clone();
        block_on(&self.world, async move {
            let graph = open_graph(&world, false).await;
            let from = Segments::zeroed(4096);
            from.fill(99);
            let written = graph.write(Extent { offset: GuestOffset(4096), len_bytes: 4096 }, &from, false).await;
            written.unwrap_or_else(|error| panic!("another program cannot write: {error:?}"));
            graph.close().await.unwrap_or_else(|error| panic!("another program cannot close: {error:?}"));
        });
        self.world.settle(Path::new(DISK));
        self.is_lost.set(true);
        self.may_leak.set(true);
        self.count(|summary| summary.behind += 1);
    }

    /// Another program writes to the image's parents, while the bitmap of the image is true.
    pub fn write_to_parents(&self) {
        if self.bitmaps().into_iter().flatten().any(|bitmap| bitmap.name == NOTING && !bitmap.is_in_use) {
            self.parents.set(self.parents.get().wrapping_add(1));
            self.has_other_parents.set(true);
            self.count(|summary| summary.parents += 1);
        }
    }

    fn stamp(&self) -> Stamp {
        // The same file, whatever it holds.
        let mut bytes = [7; 32];
        (bytes[16], bytes[24]) = (self.stamp.get(), self.parents.get());
        Stamp(bytes)
    }

    /// Opens the disk with its checkpoints and bitmaps, and checks what the checkpoint says.
    pub async fn open(&self) -> Opened {
        if self.must_be_removed.get() {
            let (files, disk) = (self.world.files(), Path::new(DISK));
            heed_alarm(&files, disk).await;
            // As a server does first of all: a power cut does not bring the file back.
            files.sync_names(disk).await.unwrap_or_else(|error| panic!("names cannot be synced: {error:?}"));
            self.must_be_removed.set(false);
        }
        let graph = open_graph(&self.world, false).await;
        let around = Surroundings {
            files: self.world.files(),
            env: self.world.env(),
            timer: Arc::new(Seconds::default()),
            alarm: |_, _| {},
            broken: changes::Broken::Nothing,
        };
        let (disk, bytes) = (Path::new(DISK), graph.info().size_bytes);
        let found = Found { stamp: self.stamp(), is_written_behind: false, mount_id: 1 };
        let opened = Changes::open(around.clone(), disk, bytes, found).await;
        let changes = match opened.unwrap_or_else(|error| panic!("the changed blocks do not open: {error:?}")) {
            Some(changes) => changes,
            None => {
                // Without the file nobody knows what the parents were.
                self.has_other_parents.set(false);
                let made = Changes::create(around, disk, bytes, self.grain, found).await;
                made.unwrap_or_else(|error| panic!("cannot make the file of changed blocks: {error:?}"))
            }
        };
        let changes = Arc::new(changes);
        *self.tracker.borrow_mut() = Some(changes.clone());
        self.follow(&graph, &changes).await;
        self.has_noticed_parents.set(self.has_other_parents.get());
        let node = Arc::new(Node::new(graph));
        self.check(&node, &changes).await;
        changes.attach(&*node).await.unwrap_or_else(|error| panic!("cannot attach: {error:?}"));
        (node, changes)
    }

    async fn follow(&self, graph: &Graph<SimStore>, changes: &Tracker) {
        let image = graph.handles()[0].image();
        let followed = changes.follow_bitmaps(image, image.size_bytes()).await;
        let followed = followed.unwrap_or_else(|error| panic!("the bitmaps cannot be followed: {error:?}"));
        let (names, is_behind) = (followed.kept, followed.is_behind);
        match self.is_lost.get() {
            true => assert!(names.is_empty(), "these are kept: {names:?}"),
            false => assert!(self.has_failed.get() || names == [NOTING], "these are kept: {names:?}"),
        }
        let changed = Arc::new(changes.keeper(&names).await);
        let kept = KeptBitmaps { names: names.clone(), changed, is_behind, broken: self.broken };
        let kept = image.keep_bitmaps(kept).await;
        let kept = kept.unwrap_or_else(|error| panic!("the bitmaps cannot be kept: {error:?}"));
        assert_eq!(kept, names, "something else uses the space of a bitmap");
    }

    /// Compares what is said to have changed since the bitmap was made with what has.
    async fn check(&self, node: &Disks, changes: &Tracker) {
        let now = content(&**node).await;
        let changed = match changes.since(NOTING, now.len() as u64).await {
            Err(error) if error.kind() == ErrorKind::NotFound && (self.has_failed.get() || self.is_lost.get()) => {
                return;
            }
            changed => changed.unwrap_or_else(|error| panic!("the bitmap is no checkpoint: {error:?}")),
        };
        let is_marked = |at: u64| changed.ranges.iter().any(|range| range.start() <= at && at < range.end());
        let base = self.base.borrow();
        for (number, piece) in now.chunks(PIECE_BYTES).enumerate() {
            let at = number * PIECE_BYTES;
            let is_same = base.get(at..at + piece.len()) == Some(piece);
            let must_be_marked = !is_same || self.has_other_parents.get();
            assert!(!must_be_marked || is_marked(at as u64), "the piece at {at} has changed, and is not marked");
        }
    }

    /// So many requests, one after the other; now and then the disk grows.
    pub async fn client(self: Rc<Self>, node: Disks, mut rng: Rng, requests: u64) {
        for _ in 0..requests {
            let unit = u64::from(node.info().request_align_bytes.max(512));
            let units = node.size_bytes() / unit;
            let start = rng.below(units);
            let len = rng.skewed(16).min(units - start);
            let extent = Extent { offset: GuestOffset(start * unit), len_bytes: len * unit };
            let done = match rng.below(12) {
                0 => node.discard(extent).await,
                1 => node.write_zeroes(extent, WriteZeroes::default()).await,
                2..4 => node.flush().await,
                4 if rng.chance(1, 4) => {
                    self.has_grown.set(true);
                    node.resize(node.size_bytes() + rng.between(1, 8) * 4096).await
                }
                kind => {
                    let from = Segments::zeroed(extent.len_bytes as usize);
                    from.fill(rng.below(4) as u8);
                    node.write(extent, &from, kind == 5).await
                }
            };
            self.allow(&done);
        }
    }

    fn allow<T>(&self, done: &Result<T>) {
        if let Err(error) = done {
            assert!(self.has_faults() || error.kind() == ErrorKind::Unsupported, "failed without a fault: {error:?}");
        }
    }

    pub async fn close(&self, node: Disks, changes: Tracker) {
        let closed = node.close().await;
        self.allow(&closed);
        if closed.is_ok() {
            self.allow(&changes.close(self.stamp()).await);
        }
        if self.has_faults() && self.world.file_number(&names::changes(Path::new(DISK))).is_none() {
            self.has_failed.set(true);
        }
    }
}

async fn open_graph(world: &World, read_only: bool) -> Graph<SimStore> {
    let options = OpenOptions { format: Some(Format::Qcow2), read_only, ..OpenOptions::default() };
    let graph = Graph::open(&world.files(), world.env(), Path::new(DISK), &options).await;
    graph.unwrap_or_else(|error| panic!("the disk does not open: {error:?}"))
}

/// All that the disk holds, which nobody has open.
async fn content_of(world: &World) -> Vec<u8> {
    content(&open_graph(world, true).await).await
}

async fn content(disk: &impl Disk) -> Vec<u8> {
    let (size, mut all) = (disk.info().size_bytes, Vec::new());
    for start in (0..size).step_by(1 << 20) {
        let len_bytes = (size - start).min(1 << 20);
        let into = Segments::zeroed(len_bytes as usize);
        let read = disk.read(Extent { offset: GuestOffset(start), len_bytes }, &into).await;
        read.unwrap_or_else(|error| panic!("the disk cannot be read: {error:?}"));
        all.extend(into.to_vec());
    }
    all
}
