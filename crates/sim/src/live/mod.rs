//! Disks whose graphs are exchanged while clients work, and while everything may end at any step.
//!
//! Each disk is a [`Node`] over a chain: a raw image or a VHD and VHDs over it, or qcow2 images. A task puts a new leaf on top
//! of some of the disks at once, again and again, by the code that makes snapshots ([`spile_life::snapshot`]): with the names of files, links
//! and renames of a real folder. Once the old epoch has ended, the old leaf is sealed. Meanwhile disks may grow, and in some lives
//! the host's operations fail: a snapshot, a sealing or a growth that fails leaves the disk as it was. What has to hold:
//!
//! - **For the guest nothing happens.** One oracle for each disk judges all reads over all exchanges and crashes, as for any
//!   disk; so each flush keeps its promise over an exchange, and after a flush that failed no later one succeeds.
//! - **A frozen parent is the disk at the exchange**: exactly what was acknowledged by then, and any part of what was in flight.
//!   From the end of its epoch on it never changes, over crashes and power cuts either.
//! - **Disks that are exchanged together have one point in time.** A client writes a number to one disk, then, when that is
//!   acknowledged, to the next; no frozen disk may have a number that its forerunner lacks.
//! - **Trouble that passes is not seen.** Files hang for a while; and in some lives the disks' policy is to wait when an
//!   operation fails or the host is full, and then no request may fail for that.
//! - **The disk's path names its leaf**, at every moment and after every crash, and nothing half-made is left once the disk was opened.
//! - **A set of snapshots that is there in part says so**, once its disks were opened again.
//! - **A size that was told stays.** So a disk does not grow while its snapshot is made.
//! - **What is said to have changed since a checkpoint misses nothing** ([`noted`]), in the seeds that have checkpoints: also when a disk goes back.
//! - **A disk that goes back** to what a snapshot holds, while nobody uses it or while clients work, holds that or what it held, whatever ends the
//!   process; and what it holds, once it has gone back, for ever. No request that was answered falls between the two.

mod brink;
mod exchange;
mod files;
mod going_back;
mod graph;
mod noted;
mod trouble;

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use spile_core::{Disk, Error, ErrorKind, Result};
use spile_image::formats::vhd::CreateParams;
use spile_image::formats::vhd::codec::footer::DiskType;
use spile_image::{Format, Graph, OpenOptions};
use spile_life::{changes, recover};
use spile_node::Node;

use crate::checkpoints::Checkpoints;
use crate::exec::{Executor, block_on};
use crate::explore::{Finding, catch_findings};
use crate::faults::Faults;
use crate::motion::marks::Tracking;
use crate::oracle::{Crash, Oracle};
use crate::plan::{Life, Plan};
use crate::qcow2::{self, Form};
use crate::rng::Rng;
use crate::workload::Workload;
use crate::world::World;
use brink::Brink;
use files::LiveFiles;
use going_back::GoingBack;
pub use graph::Broken;
use graph::{LiveGraph, Tail};

type LiveNode = Arc<Node<LiveGraph>>;

/// A disk over all lives of the process.
struct LiveDisk {
    /// Its first image is raw, and the others are VHDs.
    is_raw: bool,
    /// All its images are qcow2, and the first one has this form; else they are VHDs.
    form: Option<Form>,
    /// What the guest may read.
    oracle: Rc<RefCell<Oracle>>,
    /// A flush of it has failed in this life.
    flush_failed: Rc<Cell<bool>>,
    /// A snapshot or a growth of it is under way: one at a time.
    is_claimed: Cell<bool>,
    /// How many snapshots were begun: each gets a name of its own.
    snapshots: Cell<usize>,
    /// A way back that was begun and not looked at since.
    going_back: RefCell<Option<GoingBack>>,
    /// Its changed blocks, in the seeds that have checkpoints.
    tracking: Tracking,
    /// The size that was told last, when it was durable; and the largest that was asked for.
    told_bytes: Cell<u64>,
    asked_bytes: Cell<u64>,
}

/// An old leaf that has been sealed, and what it may hold.
struct Frozen {
    disk: usize,
    path: PathBuf,
    oracle: Rc<RefCell<Oracle>>,
}

/// What stays over the lives of the process.
struct Host {
    world: World,
    plan: Rc<Plan>,
    broken: Broken,
    block_bytes: u32,
    disks: Vec<LiveDisk>,
    frozen: RefCell<Vec<Frozen>>,
    /// The snapshots' paths of each set that has not told that it is whole, or that nothing is left of it.
    sets: RefCell<Vec<Vec<PathBuf>>>,
    life: Cell<u64>,
    /// Faults injected before this life, and whether only syncs fail in it.
    faults_before: Cell<u64>,
    only_syncs_fail: Cell<bool>,
    /// In this life the disks' requests wait until trouble has passed.
    waits: Cell<bool>,
    /// Draws what came to the simulator later, so that older choices of a seed stay.
    later_rng: RefCell<Rng>,
    /// Draws the ways back.
    back_rng: RefCell<Rng>,
    /// Draws those of disks in use.
    in_use_rng: RefCell<Rng>,
    /// Draws those who make checkpoints.
    noted_rng: RefCell<Rng>,
    /// Draws the ends that come near.
    brink_rng: RefCell<Rng>,
    brink: Brink,
    /// The process before this one was killed.
    was_killed: Cell<bool>,
    summary: Cell<LiveSummary>,
    /// Exchanges are still to come in this life.
    is_exchanging: Cell<bool>,
}

summary! {
    /// What a run that found nothing did.
    pub struct LiveSummary {
        /// Steps of all lives.
        pub steps: u64,
        /// Disks that were exchanged, over all lives.
        pub exchanges: u64,
        /// Exchanges that failed, or were refused because a disk had another size by then.
        pub failed: u64,
        /// Old leaves that were sealed and read.
        pub sealed: u64,
        /// Disks that grew.
        pub grown: u64,
        /// Disks that went back to a snapshot.
        pub went_back: u64,
        /// Disks that went back while clients worked.
        pub went_back_in_use: u64,
        /// Such disks that had checkpoints.
        pub went_back_noted: u64,
        /// Questions what has changed since a checkpoint.
        pub asked: u64,
        /// Such questions whose answer left some block out.
        pub useful: u64,
        /// Sets of snapshots that were found there in part, once their disks were opened again.
        pub half_sets: u64,
    }
}

/// Runs one seed.
///
/// # Errors
/// What was found.
pub fn run_live(seed: u64, broken: Broken, trace: bool) -> Result<LiveSummary, Finding> {
    let mut rng = Rng::new(seed).split(50);
    let (watched_bytes, block_bytes) = (rng.between(4, 64) << 14, *rng.pick(&[4096, 16 << 10, 64 << 10]));
    let mut plan = Plan::draw(seed, watched_bytes, block_bytes.into());
    plan.hardware.devices = false;
    let world = World::new(seed, plan.hardware.clone());
    if trace {
        world.keep_trace();
    }
    let size_bytes = watched_bytes + u64::from(block_bytes);
    let mut of_form = Rng::new(seed).split(54);
    let count = rng.between(1, 3);
    let mut disk = || {
        let is_raw = rng.chance(1, 3);
        let is_qcow2 = !is_raw && qcow2::is_drawn(seed) && of_form.chance(3, 4);
        let form = is_qcow2.then(|| Form::draw(&mut of_form, block_bytes));
        LiveDisk::new(&world, is_raw, form, size_bytes)
    };
    let mut disks: Vec<LiveDisk> = (0..count).map(|_| disk()).collect();
    for (number, disk) in disks.iter_mut().enumerate() {
        disk.tracking.at = Some(disk.path(number));
    }
    let host = Rc::new(Host {
        world: world.clone(),
        plan: Rc::new(plan),
        broken,
        block_bytes,
        disks,
        frozen: RefCell::default(),
        sets: RefCell::default(),
        life: Cell::new(0),
        faults_before: Cell::new(0),
        only_syncs_fail: Cell::new(true),
        waits: Cell::new(false),
        later_rng: RefCell::new(Rng::new(seed).split(51)),
        back_rng: RefCell::new(Rng::new(seed).split(52)),
        in_use_rng: RefCell::new(Rng::new(seed).split(53)),
        noted_rng: RefCell::new(Rng::new(seed).split(55)),
        brink_rng: RefCell::new(Rng::new(seed).split(56)),
        brink: Brink::default(),
        was_killed: Cell::new(false),
        summary: Cell::default(),
        is_exchanging: Cell::new(false),
    });
    catch_findings(&world, move || host.all(&mut rng))
}

impl LiveDisk {
    fn new(world: &World, is_raw: bool, form: Option<Form>, size_bytes: u64) -> Self {
        let (told_bytes, asked_bytes) = (Cell::new(size_bytes), Cell::new(size_bytes));
        let (is_claimed, snapshots) = (Cell::new(false), Cell::new(0));
        let (oracle, flush_failed, going_back) = Default::default();
        let tracking = Tracking::new(world.clone(), changes::Broken::Nothing);
        Self {
            is_raw,
            form,
            oracle,
            flush_failed,
            is_claimed,
            snapshots,
            going_back,
            tracking,
            told_bytes,
            asked_bytes,
        }
    }

    /// The format of all its images but a raw first one.
    fn format(&self) -> Format {
        if self.form.is_some() { Format::Qcow2 } else { Format::Vhd }
    }

    /// The path of the disk of this number.
    fn path(&self, number: usize) -> PathBuf {
        PathBuf::from(format!("/images/disk{number}.{}", self.format()))
    }

    /// Claims the disk for a change of its images. False while another one is under way.
    fn claim(&self, broken: Broken) -> bool {
        !self.is_claimed.replace(true) || broken == Broken::GrownMeanwhile
    }
}

impl Host {
    fn all(self: &Rc<Self>, rng: &mut Rng) -> LiveSummary {
        for disk in 0..self.disks.len() {
            let (host, size_bytes) = (self.clone(), self.disks[disk].told_bytes.get());
            let made = block_on(&self.world, async move { host.create(disk, size_bytes).await });
            made.unwrap_or_else(|error| panic!("cannot create a base: {error:?}"));
        }
        let lives = self.plan.lives.iter().take(3).cloned();
        for life in lives.chain([Life::quiet(0, 1)]) {
            let steps = self.live(&life, rng);
            self.count(|summary| summary.steps += steps);
        }
        for Checkpoints { asked, useful, .. } in self.disks.iter().map(|disk| &disk.tracking.checkpoints) {
            self.count(|summary| {
                (summary.asked, summary.useful) = (summary.asked + asked.get(), summary.useful + useful.get());
            });
        }
        self.summary.get()
    }

    fn count(&self, add: impl FnOnce(&mut LiveSummary)) {
        let mut summary = self.summary.get();
        add(&mut summary);
        self.summary.set(summary);
    }

    fn has_faults(&self) -> bool {
        self.world.faults_fired() > self.faults_before.get()
    }

    /// An error is right only when a fault was injected in this life.
    fn accept(&self, what: &str, error: &Error) {
        assert!(self.has_faults(), "{what} failed without a fault: {error:?}");
        self.world.note("failed", [0; 3]);
    }

    fn path(&self, disk: usize) -> PathBuf {
        self.disks[disk].path(disk)
    }

    /// Makes the first image of a disk, durable.
    async fn create(&self, disk: usize, size_bytes: u64) -> Result<()> {
        let path = self.path(disk);
        if self.disks[disk].is_raw {
            self.world.install_empty(&path, size_bytes);
            return Ok(());
        }
        if let Some(form) = self.disks[disk].form {
            self.world.install_empty(&path, 0);
            return form.install(&self.world, &path, size_bytes, self.block_bytes, None).await;
        }
        let params =
            CreateParams { block_size_bytes: self.block_bytes, ..CreateParams::new(DiskType::Dynamic, size_bytes) };
        self.world.install_vhd(&path, &params).await
    }

    /// The format of the image at `path`. An operator knows which disk is raw; here the file that was made first tells.
    fn format_at(&self, disk: usize, path: &Path) -> Format {
        let is_first = self.world.file_number(path) == Some(disk);
        if self.disks[disk].is_raw && is_first { Format::Raw } else { self.disks[disk].format() }
    }

    async fn open(&self, disk: usize, path: &Path, read_only: bool) -> Result<LiveGraph> {
        let options = OpenOptions { format: Some(self.format_at(disk, path)), read_only, ..OpenOptions::default() };
        let files = self.files();
        let graph = Graph::open(&files, self.world.env(), path, &options).await?;
        if !read_only && self.broken != Broken::NotTakenBack {
            recover(&files, &graph).await?;
        }
        Ok(LiveGraph { graph, broken: self.broken })
    }

    /// The files, with the rule broken that the run is to break.
    fn files(&self) -> LiveFiles {
        LiveFiles::new(self.world.files(), self.broken, self.brink.clone())
    }

    /// Each disk was opened: its file has one name, and no half-made file is left. A set of snapshots that is there in part says so.
    fn check_names(&self) {
        for set in self.sets.borrow().iter() {
            let there: Vec<_> = set.iter().filter(|path| self.world.file_number(path).is_some()).collect();
            let is_noted = |path: &&PathBuf| self.world.file_number(&spile_life::names::set(path)).is_some();
            let is_in_part = !there.is_empty() && there.len() < set.len();
            assert!(
                !is_in_part || there.iter().copied().all(|path| is_noted(&path)),
                "half a set does not say so: {there:?}"
            );
            self.count(|summary| summary.half_sets += u64::from(is_in_part));
        }
        let of_a_set =
            |path: &PathBuf| self.sets.borrow().iter().flatten().any(|of| spile_life::names::set(of) == *path);
        let mut names = self.world.names();
        let is_of_changes =
            |path: &PathBuf| (0..self.disks.len()).any(|disk| spile_life::names::changes(&self.path(disk)) == *path);
        names.retain(|path| !of_a_set(path) && !is_of_changes(path));
        for (number, path) in names.iter().enumerate() {
            let file = self.world.file_number(path);
            let other = names[..number].iter().find(|other| self.world.file_number(other) == file);
            assert!(other.is_none(), "{} and {other:?} are left as two names of a file", path.display());
            assert!(spile_life::names::disk_of(path).is_none(), "{} is left half-made", path.display());
        }
    }

    /// One life of the process. Returns the number of its steps.
    fn live(self: &Rc<Self>, life: &Life, rng: &mut Rng) -> u64 {
        self.life.set(self.life.get() + 1);
        // Then the power goes in this life, which changes no names.
        let is_on_brink = self.brink.begin_life(self.was_killed.get()) && life.requests > 0;
        let crash = if is_on_brink { Crash::PowerCut } else { life.crash };
        self.faults_before.set(self.world.faults_fired());
        self.only_syncs_fail.set(life.faults.only_syncs_fail());
        self.waits.set(trouble::passes(life) && self.later_rng.borrow_mut().chance(1, 2));
        for disk in &self.disks {
            disk.oracle.borrow_mut().tries_again(self.waits.get());
            disk.flush_failed.set(false);
        }
        let mut executor = Executor::new(self.world.clone(), Rng::new(rng.word()));
        let ended = self.phases(&mut executor, life, rng, is_on_brink);
        let steps = executor.steps();
        self.world.end(ended.is_none().then_some(crash));
        self.was_killed.set(ended.is_none() && crash == Crash::Death);
        drop(executor);
        if self.has_faults() {
            self.disks.iter().for_each(|disk| disk.tracking.checkpoints.note_failure());
        }
        self.world.set_faults(Faults::default());
        if ended.is_none() {
            self.disks.iter().for_each(|disk| disk.oracle.borrow_mut().crash(crash));
            self.frozen.borrow().iter().for_each(|frozen| frozen.oracle.borrow_mut().crash(crash));
        }
        steps
    }

    /// Open, verify, work, verify, close; `None` when the process ended on the way. Faults begin with the work.
    fn phases(self: &Rc<Self>, executor: &mut Executor, life: &Life, rng: &mut Rng, keeps_names: bool) -> Option<()> {
        let limit = life.crash_at.unwrap_or(u64::MAX);
        let nodes: Rc<RefCell<Vec<LiveNode>>> = Rc::default();
        let (host, into) = (self.clone(), nodes.clone());
        executor.spawn(async move {
            for disk in 0..host.disks.len() {
                let path = host.path(disk);
                host.settle_way_back(disk);
                let opened = host.open(disk, &path, false).await;
                let graph = opened.unwrap_or_else(|error| panic!("disk {disk} does not open: {error:?}"));
                host.check_size(disk, graph.info().size_bytes);
                host.disks[disk].is_claimed.set(false);
                let node = Node::new(graph);
                let node = if host.waits.get() { node.with_troubles(trouble::policy(host.broken)) } else { node };
                let node = Arc::new(node);
                host.open_noted(disk, &node).await;
                into.borrow_mut().push(node);
            }
            host.check_names();
            host.verify_frozen().await;
        });
        executor.finish(limit)?;
        self.world.set_faults(life.faults.clone());
        let nodes = nodes.take();
        let all: Vec<_> = nodes
            .iter()
            .zip(&self.disks)
            .map(|(node, disk)| self.workload(node.clone(), &disk.oracle, self.waits.get()))
            .collect();
        for work in &all {
            work.begin_all(executor, rng, life.requests / 2);
        }
        if life.requests > 0 {
            let mut later = self.later_rng.borrow_mut();
            let (grows, rounds, exchanges) = (Rng::new(rng.word()), rng.between(1, 5), Rng::new(rng.word()));
            // Some lives change no names, so that what the life before has left is as it was when the power goes.
            self.is_exchanging.set(!later.chance(1, 4) && !keeps_names);
            self.brink.draw(&mut self.brink_rng.borrow_mut(), self.is_exchanging.get());
            executor.spawn(self.clone().write_numbers(nodes.clone()));
            executor.spawn(self.clone().grow(nodes.clone(), grows));
            if self.is_exchanging.get() {
                executor.spawn(self.clone().exchanges(nodes.clone(), exchanges, rounds));
            }
            let mut in_use = self.in_use_rng.borrow_mut();
            if self.is_exchanging.get() && (in_use.chance(2, 3) || noted::has_checkpoints(self.plan.seed)) {
                executor.spawn(self.clone().go_back_in_use(nodes.clone(), Rng::new(in_use.word())));
            }
            self.use_noted(executor, &nodes);
            // Whoever opens the disks again finds no share of them here.
            drop(nodes);
            executor.spawn(self.clone().hang(Rng::new(later.word())));
            executor.spawn(self.clone().relieve(life.faults.clone(), Rng::new(later.word())));
        }
        self.run_to_way_back(executor, limit)?;
        for (disk, work) in all.into_iter().enumerate() {
            let (host, rng) = (self.clone(), Rng::new(rng.word()));
            executor.spawn(async move {
                work.clone().verify(rng, true).await;
                let node = work.disk.disk.clone();
                work.close().await;
                host.close_noted(disk, &node).await;
            });
        }
        executor.finish(limit)?;
        let mut back = self.back_rng.borrow_mut();
        if life.requests > 0 {
            executor.spawn(self.clone().go_back(Rng::new(back.word())));
        }
        executor.finish(limit)
    }

    /// The size that was told is there, and no more than was asked for. A growth that was not told may show now, and be gone
    /// after a power cut.
    fn check_size(&self, disk: usize, size_bytes: u64) {
        let LiveDisk { told_bytes, asked_bytes, .. } = &self.disks[disk];
        let allowed = told_bytes.get()..=asked_bytes.get();
        assert!(allowed.contains(&size_bytes), "disk {disk} has {size_bytes} bytes, and not one of {allowed:?}");
    }

    /// What the clients and the reader of everything need. `waits`: the disk's requests wait for trouble to pass.
    fn workload<D: Disk>(&self, disk: D, oracle: &Rc<RefCell<Oracle>>, waits: bool) -> Rc<Workload<Tail<D>>> {
        let of_disk = self.disks.iter().find(|of| Rc::ptr_eq(&of.oracle, oracle));
        let flush_failed = of_disk.map_or_else(Rc::default, |of| of.flush_failed.clone());
        Rc::new(Workload {
            disk: Tail { disk, skipped_bytes: self.block_bytes.into() },
            world: self.world.clone(),
            oracle: oracle.clone(),
            plan: self.plan.clone(),
            faults_before: self.faults_before.get(),
            only_syncs_fail: self.only_syncs_fail.get(),
            is_exchanged: true,
            waits,
            flush_failed,
        })
    }

    /// Reads every old leaf again that was sealed in lives before: it is as it was.
    async fn verify_frozen(&self) {
        let frozen: Vec<_> = {
            let list = self.frozen.borrow();
            list.iter().map(|frozen| (frozen.disk, frozen.path.clone(), frozen.oracle.clone())).collect()
        };
        for (number, (disk, path, oracle)) in frozen.into_iter().enumerate() {
            let graph = self.open(disk, &path, true).await;
            let graph = graph.unwrap_or_else(|error| panic!("a frozen parent does not open: {error:?}"));
            self.workload(graph, &oracle, false).verify(Rng::new(number as u64), false).await;
        }
    }

    /// Makes disks longer now and then.
    async fn grow(self: Rc<Self>, nodes: Vec<LiveNode>, mut rng: Rng) {
        for _ in 0..rng.below(4) {
            crate::turns::pause(&mut rng, 200).await;
            let number = rng.index(nodes.len());
            let (node, disk) = (&nodes[number], &self.disks[number]);
            let size_bytes = node.info().size_bytes.next_multiple_of(4096) + (rng.between(1, 8) << 14);
            if !disk.claim(self.broken) {
                continue;
            }
            let has_failed_before = disk.asked_bytes.get() > disk.told_bytes.get();
            disk.asked_bytes.set(disk.asked_bytes.get().max(size_bytes));
            match node.resize(size_bytes).await {
                Ok(()) => {
                    disk.told_bytes.set(size_bytes);
                    self.count(|summary| summary.grown += 1);
                }
                // After a growth that failed, and before the image is opened anew.
                Err(error) if error.kind() == ErrorKind::Unsupported && self.has_faults() => {}
                // A growth that has failed may have taken effect, and then the image is a parent.
                Err(error) if error.kind() == ErrorKind::Unsupported && has_failed_before => {}
                Err(error) => self.accept("a growth", &error),
            }
            disk.is_claimed.set(false);
        }
    }
}
