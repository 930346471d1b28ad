//! A folder of disks, snapshots and clones of which some are deleted, while others collect what nobody needs, and while everything may end
//! at any step.
//!
//! In each life one process serves a disk, with clients or without: it may begin with a snapshot, and it merges the disk into what was
//! deleted, and snapshots that are kept into what was deleted below them. Beside it two commands collect in the folder, each disk under its lock, and others delete images and make clones. All of them
//! run the code of `spile-life`. Some names are used again and again. What has to hold:
//!
//! - **No image that its user did not delete ever goes or changes**, over crashes and power cuts.
//! - **Every disk reads right.** One oracle for each judges all reads over all merges.
//! - **An image that was removed stays away**, and what is asked to go goes in the end: when nothing disturbs it any more, nothing is left that
//!   could be merged.

mod steps;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use spile_core::{Disk, Error, ErrorKind, Result};
use spile_image::formats::vhd::CreateParams;
use spile_image::formats::vhd::codec::footer::DiskType;
use spile_image::{Format, Graph, OpenOptions};
use spile_life::gc::{Family, Tools};
use spile_life::{names, recover};
use spile_node::Node;

use crate::exec::{Executor, block_on};
use crate::explore::{Finding, catch_findings};
use crate::faults::Faults;
use crate::names::Change;
use crate::oracle::{Crash, Oracle};
use crate::plan::{Life, Plan};
use crate::qcow2::Form;
use crate::rng::Rng;
use crate::store::{SimFiles, SimStore};
use crate::workload::Workload;
use crate::world::{Behind, World};
use steps::Served;

/// Where all images lie.
const FOLDER: &str = "/images";

type GcNode = Arc<Node<Graph<SimStore>>>;

/// A rule that is broken on purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Broken {
    /// None.
    #[default]
    Nothing,
    /// The folder is asked for children before the image that is to go is locked.
    AskedBeforeLock,
    /// The folder is asked for children only before a merge locks their parent.
    CloneBesideMerge,
    /// A rule of the order in which the parent of a snapshot that is kept takes its name.
    Names(spile_image::Broken),
}

/// An image, as its user knows it.
struct Image {
    /// What it holds.
    oracle: Rc<RefCell<Oracle>>,
    fate: Fate,
    /// Guests may write to it: it is no snapshot.
    is_disk: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It is there, and is to stay.
    Kept,
    /// It is being made or deleted, or that was broken off: nobody may say whether it is there.
    Open,
    /// It was deleted while it had a child.
    Marked,
    /// It was deleted, and is gone.
    Gone,
}

/// True when an image gets the name of another one ([`names::taking`]).
fn is_taken(change: &Change) -> bool {
    matches!(change, Change::Rename(from, to) if *from == names::taking(to))
}

/// What stays over the lives of the process.
struct Host {
    world: World,
    plan: Rc<Plan>,
    broken: Broken,
    size_bytes: u64,
    block_bytes: u32,
    /// The form of the first image, where all are qcow2; else they are VHDs.
    form: Option<Form>,
    images: RefCell<BTreeMap<PathBuf, Image>>,
    /// Images that a command is making or deleting, or merging the disk into.
    deleting: RefCell<BTreeSet<PathBuf>>,
    /// The number of the next process.
    next_process: Cell<u64>,
    faults_before: Cell<u64>,
    /// The process before was killed close behind a change of names.
    was_killed_there: Cell<bool>,
    brink_rng: RefCell<Rng>,
    summary: Cell<GcSummary>,
}

summary! {
    /// What a run that found nothing did.
    pub struct GcSummary {
        /// Steps of all lives.
        pub steps: u64,
        /// Images that were marked.
        pub marked: u64,
        /// Images that were removed at once.
        pub removed: u64,
        /// Images whose removal or mark was refused.
        pub refused: u64,
        /// Clones that were made.
        pub cloned: u64,
        /// Snapshots that were made.
        pub snapshots: u64,
        /// Marked images that were merged with their child.
        pub merged: u64,
        /// Marked images that have the name of a snapshot now that was kept.
        pub kept: u64,
        /// Merges beside which clients had a disk in use.
        pub busy: u64,
        /// Marks that said nothing any more, and were removed.
        pub stale: u64,
        /// Things that a collection found and left for a reason.
        pub waited: u64,
        /// Merges that went on after a crash.
        pub resumed: u64,
    }
}

/// Runs one seed.
///
/// # Errors
/// What was found.
pub fn run_gc(seed: u64, broken: Broken, trace: bool) -> Result<GcSummary, Finding> {
    let mut rng = Rng::new(seed).split(100);
    let (size_bytes, block_bytes) = (rng.between(4, 24) << 14, *rng.pick(&[4096_u32, 16 << 10, 64 << 10]));
    let mut of_kind = Rng::new(seed).split(101);
    let mut plan = Plan::draw(seed, size_bytes, block_bytes.into());
    plan.hardware.devices = false;
    // The last steps of all that is done here are changes of names. Where every operation may fail, little comes so far.
    for life in &mut plan.lives {
        life.faults = match rng.below(8) {
            0 => Faults { names_eio: rng.between(1000, 9000), ..Faults::default() },
            1 => Faults { read_eio: rng.between(200, 3000), ..Faults::default() },
            _ => life.faults.clone(),
        };
    }
    let world = World::new(seed, plan.hardware.clone());
    if trace {
        world.keep_trace();
    }
    let host = Rc::new(Host {
        world: world.clone(),
        plan: Rc::new(plan),
        broken,
        size_bytes,
        block_bytes,
        form: of_kind.chance(1, 2).then(|| Form::draw(&mut of_kind, block_bytes)),
        images: RefCell::default(),
        deleting: RefCell::default(),
        next_process: Cell::new(1),
        faults_before: Cell::new(0),
        was_killed_there: Cell::new(false),
        brink_rng: RefCell::new(Rng::new(seed).split(102)),
        summary: Cell::default(),
    });
    catch_findings(&world, move || host.all(&mut rng))
}

impl Host {
    fn all(self: &Rc<Self>, rng: &mut Rng) -> GcSummary {
        self.fill(rng);
        let lives = self.plan.lives.iter().take(5).cloned();
        // The last two finish what was begun, and read everything.
        for life in lives.chain([Life::quiet(4, 1), Life::quiet(0, 1)]) {
            let steps = self.live(&life, rng);
            self.count(|summary| summary.steps += steps);
        }
        let host = self.clone();
        block_on(&self.world, async move { host.check_end().await });
        self.summary.get()
    }

    fn count(&self, add: impl FnOnce(&mut GcSummary)) {
        let mut summary = self.summary.get();
        add(&mut summary);
        self.summary.set(summary);
    }

    /// True when a fault was injected in this life.
    fn has_faults(&self) -> bool {
        self.world.faults_fired() > self.faults_before.get()
    }

    /// An error is right when a fault was injected in this life, or when another process is in the way.
    fn accept(&self, what: &str, error: &Error) {
        let fine = self.has_faults() || error.kind() == ErrorKind::Busy;
        assert!(fine, "{what} failed without a fault: {error:?}");
    }

    /// The files as one more process sees them.
    fn files(&self) -> SimFiles {
        let process = self.next_process.replace(self.next_process.get() + 1);
        self.world.files().of_process(process)
    }

    /// Makes the first disk, durable.
    fn fill(self: &Rc<Self>, rng: &mut Rng) {
        let path = self.named("disk");
        self.know(&path, Oracle::default(), Fate::Kept, true);
        let (host, word) = (self.clone(), rng.word());
        block_on(&self.world, async move {
            let made = host.make(&path).await;
            made.unwrap_or_else(|error| panic!("cannot create an image: {error:?}"));
            let opened = host.open(&host.world.files(), &path, false).await;
            let graph = opened.unwrap_or_else(|error| panic!("a new image does not open: {error:?}"));
            host.workload(Node::new(graph), &host.oracle(&path)).fill(Rng::new(word)).await;
        });
    }

    /// The format of all images.
    fn format(&self) -> Format {
        if self.form.is_some() { Format::Qcow2 } else { Format::Vhd }
    }

    /// The path of the image of this name.
    fn named(&self, stem: &str) -> PathBuf {
        Path::new(FOLDER).join(format!("{stem}.{}", self.format()))
    }

    async fn make(&self, path: &Path) -> Result<()> {
        if let Some(form) = self.form {
            self.world.install_empty(path, 0);
            return form.install(&self.world, path, self.size_bytes, self.block_bytes, None).await;
        }
        let params = CreateParams {
            block_size_bytes: self.block_bytes,
            ..CreateParams::new(DiskType::Dynamic, self.size_bytes)
        };
        self.world.install_vhd(path, &params).await
    }

    async fn open(&self, files: &SimFiles, path: &Path, read_only: bool) -> Result<Graph<SimStore>> {
        let options = OpenOptions { read_only, ..OpenOptions::default() };
        let graph = Graph::open(files, self.world.env(), path, &options).await?;
        if !read_only {
            recover(files, &graph).await?;
        }
        Ok(graph)
    }

    fn know(&self, path: &Path, oracle: Oracle, fate: Fate, is_disk: bool) {
        let image = Image { oracle: Rc::new(RefCell::new(oracle)), fate, is_disk };
        self.images.borrow_mut().insert(path.to_owned(), image);
    }

    fn oracle(&self, path: &Path) -> Rc<RefCell<Oracle>> {
        self.images.borrow()[path].oracle.clone()
    }

    fn set_fate(&self, path: &Path, fate: Fate) {
        self.images.borrow_mut().get_mut(path).expect("the image is known").fate = fate;
    }

    fn fate(&self, path: &Path) -> Fate {
        self.images.borrow()[path].fate
    }

    /// The images with this fate.
    fn of_fate(&self, fate: Fate) -> Vec<PathBuf> {
        self.images.borrow().iter().filter(|(_, image)| image.fate == fate).map(|(path, _)| path.clone()).collect()
    }

    /// One life of all processes. Returns the number of its steps.
    fn live(self: &Rc<Self>, life: &Life, rng: &mut Rng) -> u64 {
        self.faults_before.set(self.world.faults_fired());
        self.deleting.take();
        let (change, crash) = self.draw_end(life);
        self.world.end_behind(change);
        let mut executor = Executor::new(self.world.clone(), Rng::new(rng.word()));
        let ended = self.phases(&mut executor, life, rng);
        let steps = executor.steps();
        self.world.end(ended.is_none().then_some(crash));
        self.was_killed_there.set(ended.is_none() && change.is_some() && crash == Crash::Death);
        drop(executor);
        self.world.set_faults(Faults::default());
        if ended.is_none() {
            self.images.borrow().values().for_each(|image| image.oracle.borrow_mut().crash(crash));
        }
        steps
    }

    /// Where a life ends that is to end close behind a change of names, and how. Most steps have little to do with these. What a process has seen that was killed
    /// there need not be durable: the next one may build on it, and lose its power.
    fn draw_end(&self, life: &Life) -> (Option<Behind>, Crash) {
        let (mut rng, was_there) = (self.brink_rng.borrow_mut(), self.was_killed_there.get());
        // Half of them lie where an image gets the name of another one, whose children are given its name next.
        let is_taking = rng.chance(1, 2) && !was_there;
        let left = if is_taking { 0 } else { rng.skewed(30) };
        let change = Behind { is_it: if is_taking { is_taken } else { |_| true }, left, steps: rng.skewed(100) };
        let is_drawn = life.crash_at.is_some() && (rng.chance(1, 3) || was_there);
        (is_drawn.then_some(change), if was_there { Crash::PowerCut } else { life.crash })
    }

    /// Look at all images, open a disk, work, verify, close; `None` when the processes ended on the way. Faults begin with the work.
    fn phases(self: &Rc<Self>, executor: &mut Executor, life: &Life, rng: &mut Rng) -> Option<()> {
        let limit = life.crash_at.map_or(u64::MAX, |at| at * 3);
        let opened: Rc<RefCell<Option<Served>>> = Rc::default();
        let (host, into, mut of_open) = (self.clone(), opened.clone(), Rng::new(rng.word()));
        executor.spawn(async move {
            host.check_all().await;
            *into.borrow_mut() = host.serve(&mut of_open).await;
        });
        executor.finish(limit)?;
        // All disks may have children: then nobody may write to one. What was deleted is collected all the same.
        let Some(served) = opened.take().map(Rc::new) else {
            executor.spawn(self.clone().collect(rng.split(0)));
            return executor.finish(limit);
        };
        self.world.set_faults(life.faults.clone());
        let work = self.workload(served.node.clone(), &self.oracle(&served.disk));
        let is_busy = rng.chance(1, 2);
        if is_busy {
            executor.spawn(work.clone().verify(Rng::new(rng.word()), false));
            executor.spawn(work.clone().client(Rng::new(rng.word()), life.requests / 2));
        }
        if life.requests > 0 {
            for number in 0..2 {
                executor.spawn(self.clone().delete_and_clone(Rng::new(rng.word()), number == 0));
            }
        }
        executor.spawn(self.clone().collect_live(served, is_busy, Rng::new(rng.word())));
        for _ in 0..2 {
            executor.spawn(self.clone().collect(Rng::new(rng.word())));
        }
        executor.finish(limit)?;
        let verify = Rng::new(rng.word());
        executor.spawn(async move {
            work.clone().verify(verify, true).await;
            work.close().await;
        });
        executor.finish(limit)?;
        self.world.set_faults(Faults::default());
        // Once more, when nobody has the disk open.
        executor.spawn(self.clone().collect(Rng::new(rng.word())));
        executor.finish(limit)
    }

    /// Every image that is to stay is there, and reads right; what was removed is away.
    async fn check_all(&self) {
        for path in self.of_fate(Fate::Gone) {
            assert_eq!(self.world.file_number(&path), None, "{} was removed, and is there again", path.display());
        }
        for (number, path) in self.of_fate(Fate::Kept).into_iter().enumerate() {
            let there = self.world.file_number(&path).is_some();
            assert!(there, "{} is gone, and nobody has deleted it", path.display());
            let graph = self.open(&self.world.files(), &path, true).await;
            let graph = graph.unwrap_or_else(|error| panic!("{} does not open: {error:?}", path.display()));
            self.workload(graph, &self.oracle(&path)).verify(Rng::new(number as u64), true).await;
        }
    }

    /// Nothing is left that could be merged, and all that is to stay is there.
    async fn check_end(&self) {
        self.faults_before.set(self.world.faults_fired());
        self.check_all().await;
        let (files, env) = (self.world.files(), self.env());
        let found = spile_life::gc::look(&self.tools(&files, &files, &env), &self.list()).await;
        let is_left = |found: &spile_life::gc::Found| found.disk.is_some() && found.why.is_none();
        let left: Vec<_> = found.iter().filter(|found| is_left(found)).collect();
        assert!(left.is_empty(), "nobody is in the way, and a collection has left {left:?}");
    }

    fn env(&self) -> Arc<dyn spile_core::Env> {
        self.world.env()
    }

    fn tools<'a>(
        &self,
        files: &'a SimFiles,
        asking: &'a SimFiles,
        env: &'a Arc<dyn spile_core::Env>,
    ) -> Tools<'a, SimFiles> {
        Tools { files, asking, env }
    }

    /// The files of the folder.
    fn list(&self) -> Vec<PathBuf> {
        let mut names = self.world.names();
        names.retain(|path| path.starts_with(FOLDER));
        names
    }

    /// The disks without a child that guests may write to.
    async fn leaves(&self) -> Vec<PathBuf> {
        let (files, env) = (self.world.files(), self.env());
        let list = self.list();
        let family = Family::ask(&self.tools(&files, &files, &env), &list).await;
        let mut leaves = self.of_fate(Fate::Kept);
        // A server refuses a disk with a child under any of its names, and one that has two names because a merge was broken off.
        let is_free = |path: &PathBuf| {
            let file = self.world.file_number(path);
            let all: Vec<_> = list.iter().filter(|other| self.world.file_number(other) == file).collect();
            let has_children = all.iter().any(|name| family.children_of(name).is_ok_and(|found| !found.is_empty()));
            let is_half_merged = all.len() > 1 && all.iter().any(|name| list.contains(&names::gone(name)));
            !has_children && !is_half_merged
        };
        leaves.retain(|path| self.images.borrow()[path].is_disk && is_free(path));
        leaves
    }

    /// What the clients and the reader of everything need.
    fn workload<D: Disk>(&self, disk: D, oracle: &Rc<RefCell<Oracle>>) -> Rc<Workload<D>> {
        Workload::of_changing(disk, &self.world, oracle, &self.plan, self.faults_before.get())
    }
}
