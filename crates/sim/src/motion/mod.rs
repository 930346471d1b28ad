//! Disks that are moved while clients work, and while everything may end at any step.
//!
//! The disk is a raw image, a VHD or a qcow2 image, perhaps over parents of its own format. In each life a job of `spile-life` moves it to a new place, or
//! goes on where the life before has left it. The next move begins at the new place. What has to hold:
//!
//! - **For the guest nothing happens.** One oracle judges all reads over all moves and crashes.
//! - **One of the two paths is the disk**: there is an image at the old path or at the new one, never at both; and the disk that is found so holds
//!   all that was acknowledged. When a process has ended between the two names, the next open of the old path takes that back.
//! - **A move that is done has its disk at the new path**, and one that has failed at the old one. Then nothing half-made is left.
//! - **What a half holds is taken up only as far as it is durable there**, and only when it is that half: all that has changed since is copied anew.
//! - **What is said to have changed since a checkpoint misses nothing**, wherever the disk is ([`crate::checkpoints`]).
//! - **Work that was interrupted comes to its end** in the lives after, without anybody but the note beside the disk.
//!
//! In some seeds ([`has_copies`]) jobs copy the disk instead, which stays where it is ([`copies`]):
//!
//! - **A copy that is done is the disk as it was** at one moment between the call to end it and its end, also when its job went on where a process before
//!   had left it: after a death or a power cut right after the moment has moved forward since which it is noted what changes, too.

mod copies;
pub(crate) mod job;
pub(crate) mod marks;

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use spile_core::{ErrorKind, Files, Result};
use spile_image::formats::vhd::codec::footer::DiskType;
use spile_image::formats::vhd::{CreateParams, VhdParent};
use spile_image::{Format, Graph, OpenOptions};
use spile_life::{Sizes, changes, motion, names, recover};
use spile_node::Node;

pub use spile_image::Broken;

use crate::checkpoints::Checkpoints;
use crate::exec::{Ended, Executor, block_on};
use crate::explore::{Finding, catch_findings};
use crate::faults::Faults;
use crate::oracle::Oracle;
use crate::plan::{Life, Plan};
use crate::qcow2::{self, Form};
use crate::rng::Rng;
use crate::store::SimStore;
use crate::workload::Workload;
use crate::world::World;
use copies::{Copies, has_copies};
use marks::Tracking;

type MotionNode = Arc<Node<Graph<SimStore>>>;

/// The names of the first image's parents, if it has some: the last ones of these, the lowest first. Their extension is its own.
const PARENTS: [&str; 2] = ["/images/base", "/images/parent"];

/// The folder to which disks go with their parents: some find them there.
const SHARED: &str = "/array/shared";

/// What stays over the lives of the process.
struct Host {
    world: World,
    plan: Rc<Plan>,
    broken: Broken,
    size_bytes: u64,
    block_bytes: u32,
    /// The form of every qcow2 image.
    form: Form,
    /// The first image, and its parents, are qcow2 where they are not raw; else they are VHDs.
    is_qcow2: bool,
    /// Draws which disks go to a qcow2 image; none do where this is left out.
    qcow2_rng: Option<RefCell<Rng>>,
    sizes: Sizes,
    /// Where the disk is, as far as its operator knows: a move that was told to have ended is at its new place.
    at: RefCell<PathBuf>,
    /// Where a move may have taken it since.
    to: RefCell<Option<PathBuf>>,
    /// How many moves were begun: each has a place of its own.
    begun: Cell<u64>,
    /// What the guest may read.
    oracle: Rc<RefCell<Oracle>>,
    /// Draws where a life ends in the middle of a hand-over.
    window_rng: RefCell<Rng>,
    faults_before: Cell<u64>,
    /// There were faults in a life since the move to this place began.
    had_faults: Cell<bool>,
    summary: Cell<MotionSummary>,
    tracking: Tracking,
    copies: Copies,
}

summary! {
    /// What a run that found nothing did.
    pub struct MotionSummary {
        /// Steps of all lives.
        pub steps: u64,
        /// Moves that were done.
        pub moved: u64,
        /// Hand-overs while clients had requests.
        pub busy: u64,
        /// Disks that were found at their new place by the next process only.
        pub found: u64,
        /// Disks of which a hand-over was taken back by the next process.
        pub taken_back: u64,
        /// Jobs of which a hand-over was put off, because guests or the new place were too slow.
        pub put_off: u64,
        /// Jobs that went on after a crash.
        pub resumed: u64,
        /// Such jobs that found a half of which something was noted.
        pub taken_up: u64,
        /// Halves that somebody replaced between two lives.
        pub replaced: u64,
        /// Disks that went back to where their old image was.
        pub back: u64,
        /// Old images that somebody wrote to before the disk went back.
        pub written_behind: u64,
        /// Moves that were done with the parents.
        pub kept: u64,
        /// Such moves that found a parent there.
        pub reused: u64,
        /// Parents there that somebody had written to before.
        pub spoiled: u64,
        /// Jobs that were cancelled, or failed by a fault.
        pub ended_early: u64,
        /// Questions what has changed since a checkpoint.
        pub asked: u64,
        /// Such questions whose answer left some block out.
        pub useful: u64,
        /// Copies of disks that stayed, which were compared with their disk.
        pub copied: u64,
        /// Such copies that a process before had given their name.
        pub named_before: u64,
        /// How often a later moment took the place of the one since which a job notes what changes.
        pub forward: u64,
        /// Lives that ended right after that.
        pub ended_forward: u64,
    }
}

/// Small pieces. Blocks are as those of large disks, so that what is copied at once holds what several clients change.
pub(crate) fn sizes(rng: &mut Rng) -> Sizes {
    let piece_bytes = 4096 << rng.below(5);
    Sizes { batch_bytes: 1 << 20, piece_bytes, marked_bytes: Some(piece_bytes), ..Sizes::default() }
}

/// Runs one seed.
///
/// # Errors
/// What was found.
pub fn run_motion(seed: u64, broken: Broken, trace: bool) -> Result<MotionSummary, Finding> {
    let mut rng = Rng::new(seed).split(80);
    let (size_bytes, block_bytes) = (rng.between(4, 48) << 14, *rng.pick(&[4096_u32, 16 << 10, 64 << 10]));
    let mut plan = Plan::draw(seed, size_bytes, block_bytes.into());
    plan.hardware.devices = false;
    // The last steps of a move are changes of names. Where every operation may fail, few moves come so far.
    for life in &mut plan.lives {
        if rng.chance(1, 4) {
            life.faults = Faults { names_eio: rng.between(1000, 9000), ..Faults::default() };
        }
    }
    let world = World::new(seed, plan.hardware.clone());
    if trace {
        world.keep_trace();
    }
    let sizes = Sizes { noted_bytes: Rng::new(seed).split(82).below(16) << 12, ..sizes(&mut rng) };
    let tracked = match broken {
        Broken::CarriedLate => changes::Broken::CarriedLate,
        _ => changes::Broken::Nothing,
    };
    let mut qcow2_rng = Rng::new(seed).split(83);
    let is_qcow2 = qcow2::is_drawn(seed) && qcow2_rng.chance(2, 3);
    let form = Form::draw(&mut qcow2_rng, block_bytes);
    let first = match (rng.chance(1, 3), is_qcow2) {
        (true, _) => "/images/disk.raw",
        (false, true) => "/images/disk.qcow2",
        (false, false) => "/images/disk.vhd",
    };
    let host = Rc::new(Host {
        world: world.clone(),
        plan: Rc::new(plan),
        broken,
        size_bytes,
        block_bytes,
        form,
        is_qcow2,
        qcow2_rng: qcow2::is_drawn(seed).then(|| RefCell::new(qcow2_rng)),
        sizes,
        at: RefCell::new(first.into()),
        to: RefCell::default(),
        begun: Cell::new(0),
        oracle: Rc::default(),
        window_rng: RefCell::new(Rng::new(seed).split(81)),
        faults_before: Cell::new(0),
        had_faults: Cell::new(false),
        summary: Cell::default(),
        tracking: Tracking::new(world.clone(), tracked),
        copies: Copies::new(seed),
    });
    catch_findings(&world, move || host.all(&mut rng))
}

impl Host {
    fn all(self: &Rc<Self>, rng: &mut Rng) -> MotionSummary {
        self.fill(rng);
        let lives = self.plan.lives.iter().take(4).cloned();
        // The last two finish what was begun, and read everything.
        for life in lives.chain([Life::quiet(4, 1), Life::quiet(0, 1)]) {
            let steps = self.live(&life, rng);
            self.count(|summary| summary.steps += steps);
        }
        let Checkpoints { asked, useful, .. } = &self.tracking.checkpoints;
        self.count(|summary| {
            (summary.asked, summary.useful) = (asked.get(), useful.get());
            summary.forward = self.tracking.forward.get();
        });
        self.summary.get()
    }

    fn count(&self, add: impl FnOnce(&mut MotionSummary)) {
        let mut summary = self.summary.get();
        add(&mut summary);
        self.summary.set(summary);
    }

    /// True when a fault was injected in this life.
    fn has_faults(&self) -> bool {
        self.world.faults_fired() > self.faults_before.get()
    }

    fn at(&self) -> PathBuf {
        self.at.borrow().clone()
    }

    /// Makes the first image, durable, with something in it; and now and then parents with something in them.
    fn fill(self: &Rc<Self>, rng: &mut Rng) {
        let first = self.at();
        let has_parent = first.extension().is_some_and(|extension| extension != "raw") && rng.chance(1, 2);
        let parents = match has_parent {
            true => self.parents().split_off(self.window_rng.borrow_mut().below(2) as usize),
            false => Vec::new(),
        };
        let images: Vec<PathBuf> = parents.into_iter().chain([first]).collect();
        for (number, path) in images.iter().cloned().enumerate() {
            let (host, word) = (self.clone(), rng.word());
            let parent = number.checked_sub(1).map(|below| images[below].clone());
            block_on(&self.world, async move {
                let made = host.make(&path, parent.as_deref()).await;
                made.unwrap_or_else(|error| panic!("cannot create an image: {error:?}"));
                let opened = Graph::open(&host.world.files(), host.world.env(), path, &OpenOptions::default()).await;
                let graph = opened.unwrap_or_else(|error| panic!("a new image does not open: {error:?}"));
                host.workload(Arc::new(Node::new(graph))).fill(Rng::new(word)).await;
            });
        }
    }

    /// Where the parents of the first image are, or would be.
    fn parents(&self) -> Vec<PathBuf> {
        let extension = if self.is_qcow2 { "qcow2" } else { "vhd" };
        PARENTS.iter().map(|name| Path::new(name).with_extension(extension)).collect()
    }

    async fn make(&self, path: &Path, parent: Option<&Path>) -> Result<()> {
        self.make_as(path, Format::from_extension(path).unwrap_or(Format::Vhd), parent).await
    }

    async fn make_as(&self, path: &Path, format: Format, parent: Option<&Path>) -> Result<()> {
        if format == Format::Raw {
            self.world.install_empty(path, self.size_bytes);
            return Ok(());
        }
        if format == Format::Qcow2 {
            let name = parent.and_then(|at| at.file_name()).map(|name| name.to_string_lossy());
            let parent = name.as_deref().map(|name| (name, "qcow2"));
            self.world.install_empty(path, 0);
            return self.form.install(&self.world, path, self.size_bytes, self.block_bytes, parent).await;
        }
        let files = self.world.files();
        let mut params = match parent {
            None => CreateParams::new(DiskType::Dynamic, self.size_bytes),
            Some(at) => {
                let options = OpenOptions { read_only: true, ..OpenOptions::default() };
                let parent = Graph::open(&files, self.world.env(), at, &options).await?;
                let uuid = parent.layers()[0].identity.map_or([0; 16], |identity| identity.0);
                let name = at.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let (absolute_path, timestamp) = (None, 0);
                let relative_path = name.clone();
                CreateParams::child(self.size_bytes, VhdParent { relative_path, absolute_path, uuid, timestamp, name })
            }
        };
        params.block_size_bytes = self.block_bytes;
        self.world.install_vhd(path, &params).await
    }

    /// One life of the process. Returns the number of its steps.
    fn live(self: &Rc<Self>, life: &Life, rng: &mut Rng) -> u64 {
        self.faults_before.set(self.world.faults_fired());
        let mut executor = Executor::new(self.world.clone(), Rng::new(rng.word()));
        let ended = self.phases(&mut executor, life, rng);
        let steps = executor.steps();
        self.world.end(ended.is_none().then_some(life.crash));
        drop(executor);
        self.had_faults.set(self.had_faults.get() || self.has_faults());
        if self.has_faults() {
            self.tracking.checkpoints.note_failure();
        }
        self.world.set_faults(Faults::default());
        self.forget_ending();
        if ended.is_none() {
            self.oracle.borrow_mut().crash(life.crash);
        }
        steps
    }

    /// Find, open, verify, work, verify, close; `None` when the process ended on the way. Faults begin with the work.
    fn phases(self: &Rc<Self>, executor: &mut Executor, life: &Life, rng: &mut Rng) -> Option<()> {
        let limit = life.crash_at.map_or(u64::MAX, |at| at * 3);
        let opened: Rc<RefCell<Option<MotionNode>>> = Rc::default();
        let (host, into) = (self.clone(), opened.clone());
        executor.spawn(async move {
            let graph = host.open().await;
            graph.begin();
            let node = Arc::new(Node::new(graph));
            host.tracking.open(&node).await;
            host.tracking.check(&node, true, &|| host.has_faults()).await;
            *into.borrow_mut() = Some(node);
        });
        executor.finish(limit)?;
        let node = opened.take().expect("the disk is open");
        self.world.set_faults(life.faults.clone());
        let work = self.workload(node.clone());
        work.begin_all(executor, rng, life.requests);
        if life.requests > 0 {
            executor.spawn(self.clone().jobs(node.clone(), Rng::new(rng.word())));
            let (host, node, uses) = (self.clone(), node.clone(), (rng.below(6), Rng::new(rng.word())));
            executor.spawn(async move {
                host.tracking.be_used(&node, uses, &|| host.has_faults(), &|| true).await;
            });
        }
        match has_copies(self.plan.seed) {
            true => self.run_to_forward(executor, limit)?,
            false => self.run_to_window(executor, limit)?,
        }
        let (verify, host) = (Rng::new(rng.word()), self.clone());
        executor.spawn(async move {
            work.clone().verify(verify, true).await;
            host.tracking.check(&node, false, &|| host.has_faults()).await;
            let graph = node.graph().await;
            work.close().await;
            let closed = host.tracking.close(&*graph).await;
            assert!(closed.is_ok() || host.has_faults(), "the changed blocks do not close: {closed:?}");
        });
        executor.finish(limit)
    }

    /// Runs the work of a life. Now and then the process ends between the two names of a hand-over, or right after the second one, where chance
    /// alone would seldom end it.
    fn run_to_window(&self, executor: &mut Executor, limit: u64) -> Option<()> {
        let (is_armed, is_between) = {
            let mut rng = self.window_rng.borrow_mut();
            (rng.chance(1, 4), rng.chance(1, 2))
        };
        if !is_armed {
            return executor.finish(limit);
        }
        loop {
            let until = limit.min(executor.steps() + 2);
            match executor.run(until) {
                Ended::Done => return Some(()),
                Ended::Stopped if until == limit || self.is_in_window(is_between) => return None,
                Ended::Stopped => {}
                Ended::Stuck => panic!("requests are left that nothing will wake"),
            }
        }
    }

    /// The disk has lost its old path to a hand-over, and has the new one or has it not yet.
    fn is_in_window(&self, is_between: bool) -> bool {
        let is_there = |path: &PathBuf| self.world.file_number(path).is_some();
        !is_there(&self.at.borrow()) && self.to.borrow().as_ref().is_some_and(|to| is_there(to) != is_between)
    }

    /// Finds the disk as an operator would who knows the old path, and perhaps the new one, and opens it as a server does.
    async fn open(&self) -> Graph<SimStore> {
        let files = self.world.files();
        let is_there = async |path: &Path| files.canonical(path).await.is_ok();
        let (at, to) = (self.at(), self.to.borrow().clone());
        let is_at_both = is_there(&at).await && to.is_some() && is_there(to.as_deref().expect("it was asked")).await;
        // A new name that could be neither used nor removed says nothing: the old path is the disk.
        assert!(!is_at_both || self.had_faults.get(), "there is an image at both paths: {at:?} and {to:?}");
        let mut found = None;
        if !is_there(&at).await {
            match motion::take_back(&files, &at, true).await {
                Ok(true) => self.count(|summary| summary.taken_back += 1),
                Ok(false) => panic!("the disk is gone: there is no image at {at:?}, and no note"),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::NotFound, "{error:?}");
                    let to = to.unwrap_or_else(|| panic!("the disk was moved, and nobody had asked for it: {error:?}"));
                    assert!(error.to_string().contains(&to.display().to_string()), "another place: {error:?}");
                    found = Some(to);
                    self.count(|summary| summary.found += 1);
                }
            }
        }
        let at = found.clone().unwrap_or(at);
        if found.is_none() {
            self.replace_half().await;
        }
        let opened = Graph::open(&files, self.world.env(), at.as_path(), &OpenOptions::default()).await;
        let graph = opened.unwrap_or_else(|error| panic!("the disk does not open: {error:?}"));
        recover(&files, &graph).await.unwrap_or_else(|error| panic!("the disk is not recovered: {error:?}"));
        assert!(!is_there(&names::moving(&at)).await, "a second name is left");
        // From here on a power cut cannot take the new name away. Before, the old path is the disk.
        if let Some(to) = found {
            self.note_moved(to);
        }
        graph
    }

    /// Now and then an operator has put another image in the place of the half.
    async fn replace_half(&self) {
        let to = self.to.borrow().clone().or_else(|| self.copies.to());
        let half = to.as_deref().map(names::moving);
        let Some(half) = half.filter(|half| self.world.file_number(half).is_some()) else { return };
        if !self.window_rng.borrow_mut().chance(1, 6) {
            return;
        }
        let removed = self.world.files().remove(&half).await;
        removed.unwrap_or_else(|error| panic!("a half cannot be removed: {error:?}"));
        let format = to.as_deref().and_then(Format::from_extension);
        let made = self.make_as(&half, format.unwrap_or(Format::Raw), None).await;
        made.unwrap_or_else(|error| panic!("cannot create an image: {error:?}"));
        self.world.settle(&half);
        self.count(|summary| summary.replaced += 1);
    }

    /// The disk is at its new place.
    fn note_moved(&self, to: PathBuf) {
        *self.at.borrow_mut() = to;
        *self.to.borrow_mut() = None;
        self.had_faults.set(false);
    }

    /// What the clients and the reader of everything need.
    fn workload(&self, disk: MotionNode) -> Rc<Workload<MotionNode>> {
        Workload::of_changing(disk, &self.world, &self.oracle, &self.plan, self.faults_before.get())
    }
}
