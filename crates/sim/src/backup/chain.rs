//! A chain of backups of a disk whose changed blocks are tracked: a full one, and then what has changed since the one before, while clients write and
//! the process or the host ends at any step.
//!
//! Each backup is put onto a copy of the one before, as another host keeps it. A backup that was not whole when a life ended is forgotten, and the next
//! life goes on from the last whole one. What has to hold for each whole backup:
//!
//! - **Each page holds what it held at the backup's moment**: the last write that was answered before, or one that was in flight. What an increment
//!   does not have it has from the backups before.
//! - **The digests are those of what was copied**, and of what was there before.
//! - **The checkpoint of a whole backup is there after every crash.**

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use spile_core::{Disk, Extent, Segments, WriteZeroes};
use spile_life::backup::{Around, Begun, Beneath, Copy, Digests, PIECE_BYTES, Subject, any_room, begin, fleece};
use spile_life::changes::header::{Grain, Stamp};
use spile_life::changes::{Broken as BrokenChanges, Changes, Found, Surroundings};
use spile_life::jobs::{Job, Wishes};
use spile_node::Node;

use super::{BackupSummary, Broken, SimDisk, Still, open_raw};
use crate::exec::{Ended, Executor};
use crate::explore::{Finding, catch_findings};
use crate::oracle::Crash;
use crate::pages::{PAGE, Pages};
use crate::plan::Plan;
use crate::rng::Rng;
use crate::store::{SimFiles, SimStore};
use crate::turns::{Seconds, pause, turns};
use crate::world::World;

const DISK: &str = "/images/chain.raw";

type Tracker = Arc<Changes<SimFiles>>;
type Point = Begun<SimStore, spile_image::Graph<SimStore>>;

/// A write to a page: 0 for zeroes. Moments are counted by [`Host::tick`].
#[derive(Clone, Copy)]
struct Wrote {
    stamp: u64,
    began: u64,
    ended: Option<u64>,
}

/// The last backup that is whole.
struct Base {
    checkpoint: String,
    content: Pages,
    digests: Digests,
}

struct Host {
    world: World,
    broken: Broken,
    around: Around,
    grain: Grain,
    /// The writes of this life to each page. The first one is what the page held at its begin.
    wrote: RefCell<Vec<Vec<Wrote>>>,
    moment: Cell<u64>,
    stamps: Cell<u64>,
    backups: Cell<u64>,
    base: RefCell<Option<Base>>,
    is_done: Cell<bool>,
    /// Clients that are at work.
    clients: Cell<u64>,
    summary: Cell<BackupSummary>,
}

/// Runs one seed.
///
/// # Errors
/// What was found.
pub(super) fn run(seed: u64, broken: Broken, trace: bool) -> Result<BackupSummary, Finding> {
    let mut plan = Plan::draw(seed, 1 << 20, 64 << 10);
    plan.hardware.devices = false;
    plan.lives.truncate(4);
    let world = World::new(seed, plan.hardware.clone());
    if trace {
        world.keep_trace();
    }
    let mut rng = Rng::new(seed).split(91);
    world.install_empty(DISK, rng.between(20, 2 * PIECE_BYTES / PAGE + 40) * PAGE);
    let block_bytes = *rng.pick(&[4096, 16384, 65536]);
    let host = Rc::new(Host {
        world: world.clone(),
        broken,
        around: super::around(&world, seed, broken),
        grain: Grain { block_bytes, area_bytes: block_bytes << rng.below(5) },
        wrote: RefCell::default(),
        moment: Cell::default(),
        stamps: Cell::default(),
        backups: Cell::default(),
        base: RefCell::default(),
        is_done: Cell::default(),
        clients: Cell::default(),
        summary: Cell::default(),
    });
    catch_findings(&world, move || {
        let ends = plan.lives.iter().map(|life| (life.crash_at, life.crash));
        // The last one is whole: what a crash has left is seen for sure.
        for (crash_at, crash) in ends.chain([(None, Crash::Death)]) {
            host.live(crash_at, crash, &mut rng);
        }
        host.summary.get()
    })
}

impl Host {
    /// One life of the process.
    fn live(self: &Rc<Self>, crash_at: Option<u64>, crash: Crash, rng: &mut Rng) {
        self.is_done.set(false);
        self.clients.set(0);
        let mut executor = Executor::new(self.world.clone(), Rng::new(rng.word()));
        executor.spawn(self.clone().work(Rng::new(rng.word())));
        let ended = executor.run(crash_at.unwrap_or(u64::MAX));
        assert!(ended != Ended::Stuck, "something waits for ever");
        self.world.end((ended == Ended::Stopped).then_some(crash));
        drop(executor);
        self.count(|summary| summary.crashes += u64::from(ended == Ended::Stopped));
    }

    fn count(&self, add: impl FnOnce(&mut BackupSummary)) {
        let mut summary = self.summary.get();
        add(&mut summary);
        self.summary.set(summary);
    }

    fn tick(&self) -> u64 {
        self.moment.set(self.moment.get() + 1);
        self.moment.get()
    }

    async fn work(self: Rc<Self>, mut rng: Rng) {
        let (node, changes) = self.open().await;
        for _ in 0..2 {
            crate::exec::spawn_beside(Box::pin(self.clone().client(node.clone(), Rng::new(rng.word()))));
        }
        for _ in 0..rng.between(1, 3) {
            pause(&mut rng, 200).await;
            self.back_up(&node, &changes).await;
        }
        self.is_done.set(true);
        while self.clients.get() > 0 {
            turns(1).await;
        }
        node.close().await.unwrap_or_else(|error| panic!("the disk does not close: {error:?}"));
        let closed = changes.close(Stamp([1; 32])).await;
        closed.unwrap_or_else(|error| panic!("the changed blocks do not close: {error:?}"));
    }

    async fn open(&self) -> (SimDisk, Tracker) {
        let path = Path::new(DISK);
        let node = open_raw(&self.world, path).await;
        let view = self.world.view(path).expect("the disk is there");
        let held = |page| Wrote { stamp: stamp_at(&view, page), began: 0, ended: Some(0) };
        *self.wrote.borrow_mut() = (0..view.len() / PAGE).map(|page| vec![held(page)]).collect();
        let around = Surroundings {
            files: self.world.files(),
            env: self.world.env(),
            timer: Arc::new(Seconds::default()),
            alarm: |_, _| {},
            broken: BrokenChanges::Nothing,
        };
        let found = Found { stamp: Stamp([1; 32]), is_written_behind: false, mount_id: 1 };
        let opened = Changes::open(around.clone(), path, node.size_bytes(), found).await;
        let changes = match opened.unwrap_or_else(|error| panic!("the changed blocks do not open: {error:?}")) {
            Some(changes) => changes,
            None => {
                assert!(self.base.borrow().is_none(), "the changed blocks are gone");
                let made = Changes::create(around, path, node.size_bytes(), self.grain, found).await;
                made.unwrap_or_else(|error| panic!("cannot make the file of changed blocks: {error:?}"))
            }
        };
        changes.attach(&*node).await.unwrap_or_else(|error| panic!("cannot attach: {error:?}"));
        (node, Arc::new(changes))
    }

    /// Writes until the backups are done.
    async fn client(self: Rc<Self>, node: SimDisk, mut rng: Rng) {
        let pages = node.size_bytes() / PAGE;
        self.clients.set(self.clients.get() + 1);
        while !self.is_done.get() {
            // Most requests meet in a few places.
            let first = (rng.skewed(pages) - 1) * 7 % pages;
            let range = first..(first + rng.between(1, 20)).min(pages);
            self.request(&node, range, &mut rng).await;
            pause(&mut rng, 20).await;
        }
        self.clients.set(self.clients.get() - 1);
    }

    async fn request(&self, node: &Node<impl Disk>, pages: Range<u64>, rng: &mut Rng) {
        let is_zero = rng.chance(1, 5);
        self.stamps.set(self.stamps.get() + 1);
        let (stamp, began) = (if is_zero { 0 } else { self.stamps.get() }, self.tick());
        for page in pages.clone() {
            self.wrote.borrow_mut()[page as usize].push(Wrote { stamp, began, ended: None });
        }
        self.count(|summary| summary.requests += 1);
        let extent = Extent::from_range(pages.start * PAGE..pages.end * PAGE);
        let done = match is_zero {
            true => node.write_zeroes(extent, WriteZeroes { may_unmap: rng.chance(1, 2), only_if_fast: false }).await,
            false => {
                let bytes = Segments::zeroed(extent.len_bytes as usize);
                for page in 0..pages.end - pages.start {
                    bytes.copy_from_slice((page * PAGE) as usize, &stamp.to_le_bytes());
                }
                node.write(extent, &bytes, rng.chance(1, 8)).await
            }
        };
        done.unwrap_or_else(|error| panic!("a request failed: {error:?}"));
        let ended = self.tick();
        for page in pages {
            let mut wrote = self.wrote.borrow_mut();
            let own = wrote[page as usize].iter_mut().find(|one| one.began == began);
            own.expect("it was noted").ended = Some(ended);
        }
        if rng.chance(1, 10) {
            node.flush().await.unwrap_or_else(|error| panic!("a flush failed: {error:?}"));
        }
    }

    /// Makes a backup: a full one, or the changes since the last whole one.
    async fn back_up(&self, node: &SimDisk, changes: &Tracker) {
        let number = self.backups.replace(self.backups.get() + 1);
        let (checkpoint, asked) = (format!("c{number}"), self.tick());
        let (come, begun) = (Cell::new(0), RefCell::new(None));
        let point = async || {
            let point = self.begin(node).await;
            come.set(self.tick());
            *begun.borrow_mut() = Some(point);
            Ok(())
        };
        let made = if self.broken == Broken::CheckpointLate {
            point().await.expect("it cannot fail");
            turns(50).await;
            changes.checkpoint(&**node, &checkpoint).await
        } else {
            changes.checkpoint_with(&**node, &checkpoint, point).await
        };
        made.unwrap_or_else(|error| panic!("no checkpoint: {error:?}"));
        let (point, before) = begun.take().expect("it has begun");
        // Requests of before may still have to note what they change.
        before.ended().await;
        let since = self.base.borrow().as_ref().map(|base| base.checkpoint.clone());
        let mut changed = None;
        if let Some(since) = since {
            let found = changes.since(&since, node.size_bytes()).await;
            changed = Some(found.unwrap_or_else(|error| panic!("{since} is gone: {error:?}")).ranges);
        }
        let to = PathBuf::from(format!("/images/backup{number}.raw"));
        let (beneath, mut digests) = match &*self.base.borrow() {
            Some(base) => {
                let mut bytes = vec![0; base.content.len() as usize];
                base.content.read(0, &mut bytes);
                self.world.install(&to, &bytes);
                (Beneath::Anything, base.digests.clone())
            }
            None => {
                self.world.install_empty(&to, node.size_bytes());
                (Beneath::Zeroes, Digests::default())
            }
        };
        let (target, job) = (open_raw(&self.world, &to).await, Job::new(Wishes::default()));
        let copy = Copy { from: &point, to: &*target, beneath, changed: changed.as_deref(), job: &job, timer: &Still };
        copy.run(&mut digests).await.unwrap_or_else(|error| panic!("the backup failed: {error:?}"));
        point.end().await;
        let whole = async |at: Extent, _: Option<Segments>, fits: bool| {
            assert!(fits, "the digest of {at:?} is wrong");
            Ok(())
        };
        let compared = digests.compare(&*target, target.size_bytes(), whole).await;
        compared.unwrap_or_else(|error| panic!("the backup cannot be read: {error:?}"));
        target.close().await.unwrap_or_else(|error| panic!("the backup does not close: {error:?}"));
        let content = self.world.view(&to).expect("the backup is there");
        self.check(&content, asked, come.get());
        self.count(|summary| {
            summary.copied += 1;
            summary.increments += u64::from(changed.is_some());
        });
        let older = self.base.replace(Some(Base { checkpoint, content, digests }));
        if let Some(older) = older {
            let removed = changes.remove(&**node, &older.checkpoint).await;
            removed.unwrap_or_else(|error| panic!("a checkpoint is not removed: {error:?}"));
        }
    }

    async fn begin(&self, node: &SimDisk) -> Point {
        let fleece = fleece(&self.world.files(), Path::new(DISK), None, node.size_bytes()).await;
        let fleece = fleece.unwrap_or_else(|error| panic!("there is no fleece: {error:?}"));
        let subject = Subject { node, fleece, limit_bytes: u64::MAX, room: any_room() };
        let mut begun = begin(vec![subject], &self.around).await.unwrap_or_else(|error| panic!("no point: {error:?}"));
        begun.pop().expect("one disk has one point in time")
    }

    /// Each page holds what a write has left that was under way, or the last one, at a moment between `asked` and `come`.
    fn check(&self, content: &Pages, asked: u64, come: u64) {
        for (page, wrote) in self.wrote.borrow().iter().enumerate() {
            let found = stamp_at(content, page as u64);
            let is_lost = |one: &Wrote| {
                let after = |later: &Wrote| one.ended.is_some_and(|ended| later.began > ended);
                wrote.iter().any(|later| after(later) && later.ended.is_some_and(|ended| ended <= asked))
            };
            let may_be = |one: &Wrote| one.stamp == found && one.began <= come && !is_lost(one);
            assert!(
                wrote.iter().any(may_be),
                "page {page} holds {found}, which it did not hold at the moment of the backup"
            );
        }
    }
}

/// The first word of a page.
fn stamp_at(content: &Pages, page: u64) -> u64 {
    let mut bytes = [0; 8];
    content.read(page * PAGE, &mut bytes);
    u64::from_le_bytes(bytes)
}
