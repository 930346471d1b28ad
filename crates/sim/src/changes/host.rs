//! What the runs of [`super`] do in a life, and what they know of the disk.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use spile_core::{Disk, Error, ErrorKind, Extent, Files, GuestOffset, Result, Segments, WriteZeroes};
use spile_image::{Format, Graph, OpenOptions};
use spile_life::changes::header::{Grain, Stamp};
use spile_life::changes::{Broken, Changes, Found, Surroundings};
use spile_life::names;
use spile_node::Node;

use super::{ChangesSummary, Disks};
use crate::checkpoints::heed_alarm;
use crate::pages::Pages;
use crate::rng::Rng;
use crate::store::SimFiles;
use crate::turns::{Seconds, pause};
use crate::world::World;

const DISK: &str = "/images/disk.raw";

pub(super) type Tracker = Arc<Changes<SimFiles>>;
pub(super) type Opened = (Disks, Tracker);

/// A checkpoint as the run knows it.
struct Known {
    name: String,
    /// What the disk held.
    content: Pages,
    /// The bytes that requests were for since.
    written: Vec<Range<u64>>,
    /// The bytes that were noted since, durably.
    noted: Vec<Range<u64>>,
    /// No power cut and no other program came since.
    is_exact: bool,
    /// The call that makes it has returned.
    is_made: bool,
    /// A call to remove it has begun.
    is_going: bool,
}

/// What stays over the lives of the process.
pub(super) struct Host {
    pub world: World,
    pub faults_before: Cell<u64>,
    pub summary: Cell<ChangesSummary>,
    /// Draws what is noted beside requests. The seeds that have none stay what they were before there were any.
    pub noted_rng: Option<RefCell<Rng>>,
    broken: Broken,
    grain: Grain,
    known: RefCell<Vec<Known>>,
    /// The bytes of each request of this life, and whether it has ended.
    requests: RefCell<Vec<(Range<u64>, bool)>>,
    names: Cell<u64>,
    /// What the image looks like from outside.
    stamp: Cell<u8>,
    /// The changed blocks of the life that is under way.
    tracker: RefCell<Option<Tracker>>,
    /// Tracking was given up in the last life.
    is_lost: Cell<bool>,
    /// The life before had faults.
    may_be_damaged: Cell<bool>,
}

/// A part of the disk that a request may be for.
fn draw_extent(node: &Disks, rng: &mut Rng) -> Extent {
    let unit = u64::from(node.info().request_align_bytes.max(512));
    let units = node.size_bytes() / unit;
    let start = rng.below(units);
    let len = rng.skewed(32).min(units - start);
    Extent { offset: GuestOffset(start * unit), len_bytes: len * unit }
}

impl Host {
    pub fn new(world: World, broken: Broken, rng: &mut Rng, seed: u64) -> Self {
        // No smaller than what the host aligns to: a request that is not aligned takes its surroundings with it.
        let block_bytes = *rng.pick(&[4096, 4096, 16384]);
        let area_bytes = block_bytes << rng.below(5);
        world.install_empty(DISK, rng.between(8, 128) * 4096);
        Self {
            world,
            faults_before: Cell::default(),
            summary: Cell::default(),
            noted_rng: (seed % 5 == 3).then(|| RefCell::new(Rng::new(seed).split(71))),
            broken,
            grain: Grain { block_bytes, area_bytes },
            known: RefCell::default(),
            requests: RefCell::default(),
            names: Cell::default(),
            stamp: Cell::default(),
            tracker: RefCell::default(),
            is_lost: Cell::default(),
            may_be_damaged: Cell::default(),
        }
    }

    /// Takes note of what the end of a life means for the checkpoints: after a loss there is none.
    pub fn note_loss(&self) {
        let tracker = self.tracker.take();
        self.may_be_damaged.set(self.has_faults());
        if let Some(loss) = tracker.as_ref().and_then(|tracker| tracker.loss()) {
            assert!(self.has_faults(), "tracking was given up without a fault: {loss:?}");
            self.count(|summary| summary.given_up += 1);
            self.known.borrow_mut().clear();
            self.is_lost.set(!loss.is_void);
        } else if self.has_faults() && self.world.file_number(&names::changes(Path::new(DISK))).is_none() {
            // The process ended between the removal of the file and its telling.
            self.known.borrow_mut().clear();
        }
    }

    pub fn count(&self, add: impl FnOnce(&mut ChangesSummary)) {
        let mut summary = self.summary.get();
        add(&mut summary);
        self.summary.set(summary);
    }

    /// True when a fault was injected in this life.
    fn has_faults(&self) -> bool {
        self.world.faults_fired() > self.faults_before.get()
    }

    pub fn lose_exactness(&self) {
        self.known.borrow_mut().iter_mut().for_each(|known| known.is_exact = false);
    }

    pub fn forget_requests(&self) {
        self.requests.borrow_mut().clear();
    }

    fn stamp(&self) -> Stamp {
        Stamp([self.stamp.get(); 32])
    }

    fn content(&self) -> Pages {
        self.world.view(Path::new(DISK)).expect("the disk is there")
    }

    /// Opens the disk and its changed blocks, and checks what they say before anything else happens.
    pub async fn open(&self) -> Opened {
        if self.is_lost.take() {
            heed_alarm(&self.world.files(), Path::new(DISK)).await;
        }
        let options = OpenOptions { format: Some(Format::Raw), ..OpenOptions::default() };
        let graph = Graph::open(&self.world.files(), self.world.env(), Path::new(DISK), &options).await;
        let node = Arc::new(Node::new(graph.unwrap_or_else(|error| panic!("the disk does not open: {error:?}"))));
        let around = Surroundings {
            files: self.world.files(),
            env: self.world.env(),
            timer: Arc::new(Seconds::default()),
            alarm: |_, _| {},
            broken: self.broken,
        };
        let (disk, bytes) = (Path::new(DISK), node.size_bytes());
        let found = Found { stamp: self.stamp(), is_written_behind: false, mount_id: 1 };
        let opened = Changes::open(around.clone(), disk, bytes, found).await;
        let opened = opened.unwrap_or_else(|error| panic!("the changed blocks do not open: {error:?}"));
        let changes = match opened {
            Some(changes) => changes,
            None => {
                assert!(
                    !self.known.borrow().iter().any(|known| known.is_made && !known.is_going),
                    "the changed blocks are gone"
                );
                let made = Changes::create(around, disk, bytes, self.grain, found).await;
                made.unwrap_or_else(|error| panic!("cannot make the file of changed blocks: {error:?}"))
            }
        };
        self.check_names(&changes, &node).await;
        self.check_all(&changes, &node).await;
        changes.attach(&*node).await.unwrap_or_else(|error| panic!("cannot attach: {error:?}"));
        let changes = Arc::new(changes);
        *self.tracker.borrow_mut() = Some(changes.clone());
        (node, changes)
    }

    /// What was made is there, and what was removed is not.
    async fn check_names(&self, changes: &Changes<SimFiles>, node: &Disks) {
        let is_damaged = changes.damage().await.is_some();
        let there: Vec<_> = changes.checkpoints(node.size_bytes()).await.into_iter().map(|one| one.name).collect();
        let mut known = self.known.borrow_mut();
        // After a failed write or sync the file is given up; a power cut before its name is gone brings back what is left of it.
        if is_damaged && self.may_be_damaged.get() {
            known.clear();
        }
        assert!(!is_damaged || !known.iter().any(|known| known.is_made), "the file is damaged");
        for known in known.iter().filter(|known| known.is_made && !known.is_going) {
            assert!(there.contains(&known.name), "the checkpoint {} is gone", known.name);
        }
        known.retain(|known| there.contains(&known.name));
        for name in &there {
            assert!(known.iter().any(|known| known.name == *name), "the checkpoint {name} is there again");
        }
        known.iter_mut().for_each(|known| (known.is_made, known.is_going) = (true, false));
    }

    async fn check_all(&self, changes: &Changes<SimFiles>, node: &Disks) {
        let names: Vec<_> =
            self.known.borrow().iter().filter(|known| known.is_made).map(|known| known.name.clone()).collect();
        for name in names {
            self.check(changes, node, &name).await;
        }
    }

    /// Compares what is said to have changed since a checkpoint with what has. The disk is looked at before the question.
    async fn check(&self, changes: &Changes<SimFiles>, node: &Disks, name: &str) {
        let (now, size) = (self.content(), node.size_bytes());
        let changed = match changes.since(name, size).await {
            Ok(changed) => changed,
            Err(error) => {
                let known = self.known.borrow();
                let is_going = !known.iter().any(|known| known.name == name && !known.is_going);
                return assert!(error.kind() == ErrorKind::NotFound && is_going, "{name}: {error:?}");
            }
        };
        if changed.warning.is_some() && self.has_faults() {
            self.lose_exactness();
        }
        // A file whose making was cut off has the usual grain.
        let block_bytes = u64::from(changed.block_bytes);
        let blocks: BTreeSet<u64> = changed
            .ranges
            .iter()
            .flat_map(|range| range.offset.0 / block_bytes..(range.offset.0 + range.len_bytes).div_ceil(block_bytes))
            .collect();
        let known = self.known.borrow();
        let Some(known) = known.iter().find(|known| known.name == name) else { return };
        self.count(|summary| {
            summary.asked += 1;
            summary.exact += u64::from(known.is_exact);
        });
        let (mut one, mut other) = (vec![0; block_bytes as usize], vec![0; block_bytes as usize]);
        for block in 0..size.div_ceil(block_bytes) {
            now.read(block * block_bytes, &mut one);
            known.content.read(block * block_bytes, &mut other);
            assert!(
                one == other || blocks.contains(&block),
                "block {block} has changed since {name}, and is not marked"
            );
        }
        for noted in &known.noted {
            let all = noted.start / block_bytes..noted.end.div_ceil(block_bytes);
            let missing = all.clone().find(|block| !blocks.contains(block));
            assert!(missing.is_none(), "of the blocks {all:?}, noted since {name}, {missing:?} is not marked");
        }
        for block in blocks.iter().filter(|_| known.is_exact) {
            let bytes = block * block_bytes..(block + 1) * block_bytes;
            let is_new = bytes.end > known.content.len();
            let is_written = known.written.iter().any(|written| written.start < bytes.end && bytes.start < written.end);
            assert!(is_new || is_written, "block {block} is marked since {name}, and nobody wrote to it");
        }
    }

    /// Notes a request. Its bytes count as written since each checkpoint.
    fn begin(&self, extent: Extent) -> usize {
        let bytes = extent.offset.0..extent.offset.0 + extent.len_bytes;
        self.known.borrow_mut().iter_mut().for_each(|known| known.written.push(bytes.clone()));
        self.requests.borrow_mut().push((bytes, false));
        self.requests.borrow().len() - 1
    }

    /// Notes what changes by other ways than requests, again and again, while there are requests.
    pub async fn notes(self: Rc<Self>, node: Disks, changes: Tracker, mut rng: Rng, actions: u64) {
        for _ in 0..actions {
            pause(&mut rng, 30).await;
            let extents: Vec<_> = (0..rng.between(1, 3)).map(|_| draw_extent(&node, &mut rng)).collect();
            let numbers: Vec<_> = extents.iter().map(|extent| self.begin(*extent)).collect();
            let noted = changes.note_surely(&extents).await;
            numbers.into_iter().for_each(|number| self.requests.borrow_mut()[number].1 = true);
            self.allow(&noted);
            if noted.is_ok() {
                self.count(|summary| summary.noted += 1);
                let ranges = || extents.iter().map(|extent| extent.offset.0..extent.end());
                self.known.borrow_mut().iter_mut().for_each(|known| known.noted.extend(ranges()));
            }
        }
    }

    /// So many requests, one after the other.
    pub async fn client(self: Rc<Self>, node: Disks, mut rng: Rng, requests: u64) {
        for _ in 0..requests {
            let extent = draw_extent(&node, &mut rng);
            let number = self.begin(extent);
            let done = match rng.below(8) {
                0 => node.discard(extent).await,
                1 => node.write_zeroes(extent, WriteZeroes::default()).await,
                2 | 3 => node.flush().await,
                kind => {
                    let from = Segments::zeroed(extent.len_bytes as usize);
                    from.fill(rng.below(4) as u8);
                    node.write(extent, &from, kind == 4).await
                }
            };
            self.requests.borrow_mut()[number].1 = true;
            self.allow(&done);
        }
    }

    fn allow<T>(&self, done: &Result<T>) {
        if let Err(error) = done {
            assert!(self.has_faults() || error.kind() == ErrorKind::Unsupported, "failed without a fault: {error:?}");
        }
    }

    /// Makes and removes checkpoints, asks what has changed, and lets the disk grow.
    pub async fn checkpoints(self: Rc<Self>, node: Disks, changes: Tracker, mut rng: Rng, actions: u64) {
        for _ in 0..actions + 1 {
            pause(&mut rng, 60).await;
            match rng.below(8) {
                0..3 => self.make(&node, &changes).await,
                3 => self.remove(&node, &changes, &mut rng).await,
                4 if rng.chance(1, 3) => self.allow(&node.resize(node.size_bytes() + rng.between(1, 8) * 4096).await),
                _ => self.check_all(&changes, &node).await,
            }
        }
    }

    async fn make(&self, node: &Disks, changes: &Tracker) {
        let name = format!("c{}", self.names.replace(self.names.get() + 1));
        let is_done = |(_, is_done): &(_, bool)| *is_done;
        let done: BTreeSet<usize> = self
            .requests
            .borrow()
            .iter()
            .enumerate()
            .filter(|(_, request)| is_done(request))
            .map(|(number, _)| number)
            .collect();
        let made = changes.checkpoint_with(&**node, &name, async || {
            let requests = self.requests.borrow();
            let counts = requests.iter().enumerate().filter(|(number, _)| !done.contains(number));
            let known = Known {
                name: name.clone(),
                content: self.content(),
                written: counts.map(|(_, (bytes, _))| bytes.clone()).collect(),
                noted: Vec::new(),
                is_exact: true,
                is_made: false,
                is_going: false,
            };
            self.known.borrow_mut().push(known);
            Ok(())
        });
        let made = made.await;
        self.allow(&made);
        if made.is_ok() {
            self.count(|summary| summary.made += 1);
            let mut known = self.known.borrow_mut();
            known.iter_mut().filter(|known| known.name == name).for_each(|known| known.is_made = true);
        }
    }

    async fn remove(&self, node: &Disks, changes: &Tracker, rng: &mut Rng) {
        let name = {
            let mut known = self.known.borrow_mut();
            let count = known.iter().filter(|known| known.is_made).count();
            let Some(known) = known.iter_mut().filter(|known| known.is_made).nth(rng.index(count)) else { return };
            known.is_going = true;
            known.name.clone()
        };
        match changes.remove(&**node, &name).await {
            Ok(()) => {
                self.count(|summary| summary.removed += 1);
                self.known.borrow_mut().retain(|known| known.name != name);
            }
            Err(error) => self.allow::<()>(&Err(error)),
        }
    }

    /// Closes in order. Now and then another program writes to the disk then.
    pub async fn close(&self, node: Disks, changes: Tracker, mut rng: Rng) {
        self.check_all(&changes, &node).await;
        let closed = node.close().await;
        self.allow(&closed);
        if closed.is_err() {
            return;
        }
        self.allow(&changes.close(self.stamp()).await);
        if rng.chance(1, 8) && !self.has_faults() {
            self.stamp.set(self.stamp.get().wrapping_add(1));
            self.lose_exactness();
            self.write_behind_our_back(&mut rng).await;
        }
    }

    async fn write_behind_our_back(&self, rng: &mut Rng) {
        use spile_core::{OpenMode, Store, StoreOffset, Via};
        let path = Path::new(DISK);
        let store = match self.world.files().open(&path.into(), OpenMode::ReadWrite).await {
            Err(error) if error.kind() == ErrorKind::Busy => return,
            opened => opened.unwrap_or_else(|error: Error| panic!("{error:?}")),
        };
        let bytes = Segments::zeroed(4096);
        bytes.fill(9);
        let at = StoreOffset(rng.below(8) * 4096);
        store.write_at(at, &bytes, Via::Cached).await.unwrap_or_else(|error| panic!("{error:?}"));
        self.world.settle(path);
    }
}
