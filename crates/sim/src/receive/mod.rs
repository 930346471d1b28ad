//! A disk that moves to another host, where the real [`Receiver`](spile_life::motion::Receiver) takes it in, while clients work, and while everything may end at any
//! step.
//!
//! There are two hosts ([`World`]), and links between them ([`link`]) that are cut before or after what was sent is done. In each life of the first host's process
//! a job of `spile-life` moves the disk to the other one, or goes on where the life before has left it. The process there dies meanwhile, its host
//! loses power, twice in a row now and then, and it comes back; so does the first one. Orders are given twice. Once the disk is there, its guest goes on
//! through the link. What has to hold:
//!
//! - **For the guest nothing happens** but what a lost link does: one oracle judges all reads, wherever the disk is by then.
//! - **There is one disk at every moment**: the old name, or the new one there; never both. When there is none yet, a note beside the old name leads to
//!   the copy, which gets its name by the same order as before.
//! - **A move goes on through every trouble of the other host** once it has begun, and one that is given up leaves nothing there that cannot be removed.
//! - **Nobody writes to a copy that is whole**, and that somebody uses there.
//! - **A parent has its name there only when it is the parent**: in one seed of four a disk has parents, and most moves take them along.
//! - **A copy that is whole is the disk as it was** at one moment between the call to end it and its end, also when its job went on where a process before had left it.
//!
//! In some seeds ([`is_tracked`]) users make checkpoints, too, and a disk that has got there comes back by a job of the other host, as from there:
//!
//! - **What is said to have changed since a checkpoint misses nothing**, here, there, and back here ([`crate::checkpoints`]). One that has got there stays.
//! - **The old image is used again only as it was left**: now and then somebody has written to it.

mod house;
mod job;
mod link;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use spile_core::{ErrorKind, Locator, Result};
use spile_image::formats::vhd::codec::footer::DiskType;
use spile_image::formats::vhd::{CreateParams, VhdParent};
use spile_image::{Broken as BrokenMove, Format, Graph, OpenOptions};
use spile_life::{Sizes, motion, names, recover};
use spile_node::Node;

use crate::checkpoints::{Asked, Checkpoints};
use crate::exec::{Ended, Executor, block_on};
use crate::explore::{Finding, catch_findings};
use crate::faults::Faults;
use crate::jobs;
use crate::motion::marks::{Marked, Tracking};
use crate::oracle::{Crash, Oracle};
use crate::plan::{Life, Plan};
use crate::qcow2::{self, Form};
use crate::rng::Rng;
use crate::turns::turns;
use crate::workload::Workload;
use crate::world::World;
use house::{FOLDER, There};
use link::{EndStore, LinkFiles, export};

/// The parents of a disk that has some, the lowest first.
const PARENTS: [&[&str]; 3] = [&["base.vhd"], &["base.raw", "parent.vhd"], &["base.vhd", "parent.vhd"]];

/// Those of a qcow2 image.
const PARENTS_OF_QCOW2: [&[&str]; 4] =
    [&["base.qcow2"], &["base.raw", "parent.qcow2"], &["base.qcow2", "parent.qcow2"], &["base.vhd", "parent.qcow2"]];

/// The image at `disk` is a parent, by its name.
fn is_parent_name(disk: &Path) -> bool {
    PARENTS.iter().chain(&PARENTS_OF_QCOW2).flat_map(|names| names.iter()).any(|name| disk.ends_with(name))
}

/// True for the seeds in which checkpoints go along, and disks come back. The other seeds stay what they were before there were any.
fn is_tracked(seed: u64) -> bool {
    matches!(seed % 7, 3 | 5)
}

type LinkNode = Arc<Node<Graph<EndStore>>>;

/// The process that moves the disk.
const HERE: crate::exec::Process = 0;

/// A life that takes more steps does not come to its end.
const MOST_STEPS: u64 = 4_000_000;

/// A rule that is broken on purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Broken {
    /// No rule.
    #[default]
    Nothing,
    /// One of the job that moves the disk.
    Move(BrokenMove),
    /// What comes by an old link is written, also when another one has come in its place.
    LinksNotFenced,
    /// A write that got no answer is sent again, by another connection of the same link.
    SentAgain,
    /// A process that was started anew may go on with a copy that is whole.
    WholeIsHalf,
    /// The note says that there is a half before that is durable.
    HalfNotDurable,
    /// The other host says that the copy has its name before that is so.
    FinishedLate,
    /// The other host keeps no name for a disk that is about to be handed over.
    NameNotKept,
    /// The other host says that it notes what comes to its image before that is so.
    MarksLate,
    /// The other host has what has changed of a disk, and notes nothing more.
    MarksNotMet,
    /// Nobody looks whether an old image was written to before it is used again.
    OldImageAsIs,
}

impl Broken {
    fn of_mover(self) -> BrokenMove {
        match self {
            Self::Move(broken) => broken,
            // Two rules see to that.
            Self::WholeIsHalf => BrokenMove::NamingNotNoted,
            _ => BrokenMove::Nothing,
        }
    }
}

/// What happens to the other host, or to the links.
#[derive(Clone, Copy, Debug)]
enum Event {
    Cut,
    Crash(Crash),
    Start,
}

/// What stays over all lives.
struct Host {
    here: World,
    there: Arc<There>,
    plan: Rc<Plan>,
    broken: Broken,
    size_bytes: u64,
    block_bytes: u32,
    /// The form of every qcow2 image.
    form: Form,
    /// Draws which disks go to a qcow2 image; none do where this is left out.
    qcow2_rng: Option<RefCell<Rng>>,
    sizes: Sizes,
    /// The name that the disk had there before it came here, by which it is to go back.
    came_as: RefCell<Option<String>>,
    /// The disk's path, for as long as it is here.
    at: PathBuf,
    /// Its parents, the lowest first.
    parents: &'static [&'static str],
    /// The name there of the last move.
    to: RefCell<Option<String>>,
    begun: Cell<u64>,
    /// Copies that were asked for, and those that somebody uses.
    copies: RefCell<BTreeSet<String>>,
    used: RefCell<BTreeSet<String>>,
    /// What happens, and after how many steps of the run, the last one first.
    events: RefCell<Vec<(u64, Event)>>,
    oracle: Rc<RefCell<Oracle>>,
    window_rng: RefCell<Rng>,
    faults_before: Cell<u64>,
    tracking: Tracking,
    /// It was looked which checkpoints have got there.
    has_looked: Cell<bool>,
    /// The number of a move whose copy is told to end, and when that was.
    ending: Cell<Option<(u64, u64)>>,
    /// The move that a process before has left is a copy that only lacks its name.
    is_ended: Cell<bool>,
    summary: Cell<ReceiveSummary>,
}

summary! {
    /// What a run that found nothing did.
    pub struct ReceiveSummary {
        /// Steps of all lives.
        pub steps: u64,
        /// Disks that were moved.
        pub moved: u64,
        /// While clients had requests.
        pub busy: u64,
        /// While links were cut, or the other host's process ended.
        pub troubled: u64,
        /// Disks that were found there by the next process only.
        pub found: u64,
        /// Jobs that went on after a crash.
        pub resumed: u64,
        /// Such jobs that found a half of which something was noted.
        pub taken_up: u64,
        /// Disks that were moved with their parents.
        pub kept: u64,
        /// Parents that were there when a move began that needed them.
        pub parents_found: u64,
        /// Copies of disks that stayed.
        pub copied: u64,
        /// Such copies that somebody used.
        pub used: u64,
        /// How often a later moment took the place of the one since which a job notes what changes.
        pub forward: u64,
        /// Jobs that were cancelled, or failed by a fault.
        pub ended_early: u64,
        /// Halves that an operator removed.
        pub left: u64,
        /// Links that were cut.
        pub cuts: u64,
        /// Ends of the process here, and of the process there.
        pub crashes: u64,
        /// The latter alone.
        pub crashes_there: u64,
        /// Copies that were compared with the disk.
        pub compared: u64,
        /// Checkpoints that have got there with their disk.
        pub arrived: u64,
        /// Questions what has changed since a checkpoint.
        pub asked: u64,
        /// Such questions whose answer left some block out.
        pub useful: u64,
        /// Disks that went back, from the other host, into their old image.
        pub back: u64,
        /// Of these, those for which less was copied than half of the disk.
        pub back_by_less: u64,
        /// Those that were to keep their chain: they have the old parents there.
        pub back_with_chain: u64,
        /// Old images that somebody wrote to.
        pub written_behind: u64,
    }
}

/// Runs one seed.
///
/// # Errors
/// What was found.
pub fn run_receive(seed: u64, broken: Broken, trace: bool) -> Result<ReceiveSummary, Finding> {
    let mut rng = Rng::new(seed).split(90);
    let (size_bytes, block_bytes) = (rng.between(4, 48) << 14, *rng.pick(&[4096_u32, 16 << 10, 64 << 10]));
    let mut plan = Plan::draw(seed, size_bytes, block_bytes.into());
    plan.hardware.devices = false;
    let here = World::new(seed, plan.hardware.clone());
    let there = World::new(seed ^ 0x5eed, plan.hardware.clone());
    if trace {
        here.keep_trace();
        there.keep_trace();
    }
    let tracking = tracking(here.clone(), is_tracked(seed));
    let sizes = crate::motion::sizes(&mut rng);
    // Drawn beside all else: a seed without parents does what it did before there were any.
    let mut qcow2_rng = Rng::new(seed).split(94);
    let is_qcow2 = qcow2::is_drawn(seed) && qcow2_rng.chance(2, 3);
    let form = Form::draw(&mut qcow2_rng, block_bytes);
    let parents = {
        let mut rng = rng.split(93);
        match rng.chance(1, 4) {
            true if is_qcow2 => *rng.pick(&PARENTS_OF_QCOW2),
            true => *rng.pick(&PARENTS),
            false => &[][..],
        }
    };
    let their_rng = rng.split(91);
    let noted_bytes = rng.below(16) << 12;
    let first = match rng.chance(1, 3) && parents.is_empty() {
        true => "/images/disk.raw",
        false if is_qcow2 => "/images/disk.qcow2",
        false => "/images/disk.vhd",
    };
    let host = Rc::new(Host {
        here: here.clone(),
        there: Arc::new(There::new(there.clone(), (FOLDER, is_tracked(seed)), their_rng, broken)),
        plan: Rc::new(plan),
        broken,
        size_bytes,
        block_bytes,
        form,
        qcow2_rng: qcow2::is_drawn(seed).then(|| RefCell::new(qcow2_rng)),
        sizes: Sizes { noted_bytes, ..sizes },
        came_as: RefCell::default(),
        at: first.into(),
        parents,
        to: RefCell::default(),
        begun: Cell::new(0),
        copies: RefCell::default(),
        used: RefCell::default(),
        events: RefCell::default(),
        oracle: Rc::default(),
        window_rng: RefCell::new(rng.split(92)),
        faults_before: Cell::new(0),
        tracking,
        has_looked: Cell::new(false),
        ending: Cell::new(None),
        is_ended: Cell::new(false),
        summary: Cell::default(),
    });
    catch_findings(&here, move || host.all(&mut rng)).map_err(|mut finding| {
        finding.trace.extend(there.trace().into_iter().map(|line| format!("there {line}")));
        finding
    })
}

/// What notes changes of the disk on the host `world`.
fn tracking(world: World, goes_far: bool) -> Tracking {
    Tracking { goes_far, ..Tracking::new(world, spile_life::changes::Broken::Nothing) }
}

impl Host {
    fn all(self: &Rc<Self>, rng: &mut Rng) -> ReceiveSummary {
        self.fill(rng);
        self.journey(rng);
        let Some(back) = self.way_back(rng) else { return self.summary.get() };
        back.journey(rng);
        let mut summary = self.summary.get();
        summary += back.summary.get();
        summary
    }

    /// The other host, with the disk that has got there, for its way back here.
    fn way_back(&self, rng: &Rng) -> Option<Rc<Self>> {
        let name = self.to.borrow().clone().filter(|_| self.tracking.goes_far && !self.is_here())?;
        let mut rng = rng.split(95);
        self.there.end();
        if rng.chance(1, 3) {
            self.there.world.cut_power();
            self.oracle.borrow_mut().crash(Crash::PowerCut);
        }
        let (there, old) = (self.here.clone(), motion::old_image(&self.at));
        if rng.chance(1, 4)
            && let Some(content) = there.view(&old)
        {
            // An operator has written to it.
            there.poke(&old, content.len() / 2 / 4096 * 4096, &[77; 512]);
            there.settle(&old);
            self.count(|summary| summary.written_behind += 1);
        }
        let came_as = self.at.file_name().map(|name| name.to_string_lossy().into_owned());
        let here = self.there.world.clone();
        let checkpoints = self.tracking.checkpoints.hand_on();
        // A disk that has gone without them has none.
        let has_parents = self.parents.iter().all(|name| self.there.has_disk(&self.there.at(name)));
        let (to, begun, copies, used, events, faults_before) = Default::default();
        let (has_looked, ending, is_ended, summary) = Default::default();
        Some(Rc::new(Self {
            here: here.clone(),
            there: Arc::new(There::new(there, ("/images", true), rng.split(91), self.broken)),
            plan: self.plan.clone(),
            broken: self.broken,
            size_bytes: self.size_bytes,
            block_bytes: self.block_bytes,
            form: self.form,
            qcow2_rng: self.qcow2_rng.as_ref().map(|_| RefCell::new(rng.split(94))),
            sizes: self.sizes,
            came_as: RefCell::new(came_as),
            at: self.there.at(&name),
            parents: if has_parents { self.parents } else { &[] },
            to,
            begun,
            copies,
            used,
            events,
            oracle: self.oracle.clone(),
            window_rng: RefCell::new(rng.split(92)),
            faults_before,
            tracking: Tracking { checkpoints, ..tracking(here, true) },
            has_looked,
            ending,
            is_ended,
            summary,
        }))
    }

    /// The lives of both hosts until the disk is there, or stays for good.
    fn journey(self: &Rc<Self>, rng: &mut Rng) {
        let mut executor = Executor::new(self.here.clone(), Rng::new(rng.word()));
        executor.add_world(self.there.world.clone());
        let lives: Vec<_> = self.plan.lives.iter().take(4).cloned().collect();
        for life in &lives {
            self.draw_events(executor.steps(), rng);
            self.live(&mut executor, life, rng);
        }
        // The last ones finish what was begun, and read everything.
        self.events.take();
        self.there.is_slow.store(false, SeqCst);
        for life in [Life::quiet(4, 1), Life::quiet(0, 1)] {
            self.happen(&mut executor, Event::Start);
            self.live(&mut executor, &life, rng);
        }
        self.use_copies();
        let host = self.clone();
        executor.spawn(async move {
            host.check_parents().await;
            host.clean_up().await;
        });
        executor.finish(u64::MAX);
        let Checkpoints { asked, useful, .. } = &self.tracking.checkpoints;
        self.count(|summary| {
            (summary.steps, summary.asked, summary.useful) = (executor.steps(), asked.get(), useful.get());
            summary.forward = self.tracking.forward.get();
        });
    }

    /// What happens there in the next life.
    fn draw_events(&self, begin: u64, rng: &mut Rng) {
        let mut events = self.events.borrow_mut();
        events.clear();
        let mut at = begin;
        if self.there.house().is_none() {
            events.push((at + rng.skewed(400), Event::Start));
        }
        // Now and then the link is bad: it is slow, and cut again and again while the disk is copied.
        let is_bad = rng.chance(1, 10);
        self.there.is_slow.store(is_bad, SeqCst);
        if is_bad {
            for _ in 0..rng.between(5, 20) {
                at += rng.between(20, 300);
                events.push((at, Event::Cut));
            }
        }
        for _ in 0..rng.below(7) {
            at += if rng.chance(1, 3) { rng.skewed(200) } else { rng.skewed(4000) };
            match rng.below(4) {
                0 | 1 => events.push((at, Event::Cut)),
                kind => {
                    let crash = if kind == 2 { Crash::Death } else { Crash::PowerCut };
                    events.push((at, Event::Crash(crash)));
                    at += rng.skewed(400);
                    events.push((at, Event::Start));
                }
            }
        }
        events.reverse();
    }

    fn happen(&self, executor: &mut Executor, event: Event) {
        match event {
            Event::Cut => {
                self.there.cut_links();
                self.count(|summary| summary.cuts += 1);
            }
            Event::Start => self.there.start(),
            Event::Crash(crash) => {
                // What the guest has written there and not flushed is gone with the power.
                if !self.is_here() && crash == Crash::PowerCut {
                    self.oracle.borrow_mut().crash(crash);
                }
                self.there.crash(executor, crash);
                self.count(|summary| summary.crashes_there += 1);
            }
        }
    }

    fn count(&self, add: impl FnOnce(&mut ReceiveSummary)) {
        let mut summary = self.summary.get();
        add(&mut summary);
        self.summary.set(summary);
    }

    fn has_faults(&self) -> bool {
        self.here.faults_fired() > self.faults_before.get()
    }

    fn files(&self) -> LinkFiles {
        LinkFiles { files: self.here.files(), here: self.here.clone(), there: self.there.clone() }
    }

    /// The disk has its name here.
    fn is_here(&self) -> bool {
        self.here.file_number(&self.at).is_some()
    }

    /// Makes the disk, durable, with something in it, over parents with something in them.
    fn fill(self: &Rc<Self>, rng: &mut Rng) {
        let images: Vec<PathBuf> =
            self.parents.iter().map(|name| self.here_at(name)).chain([self.at.clone()]).collect();
        for (number, path) in images.iter().cloned().enumerate() {
            let (host, word) = (self.clone(), rng.word());
            let parent = number.checked_sub(1).map(|below| images[below].clone());
            block_on(&self.here, async move {
                let made = host.make(&path, parent).await;
                made.unwrap_or_else(|error| panic!("cannot create an image: {error:?}"));
                let (files, env) = (host.files(), host.here.env());
                let opened = Graph::open(&files, env, path.as_path(), &OpenOptions::default()).await;
                let graph = opened.unwrap_or_else(|error| panic!("a new image does not open: {error:?}"));
                host.workload(Arc::new(Node::new(graph))).fill(Rng::new(word)).await;
            });
        }
    }

    /// The path of the image `name` here.
    fn here_at(&self, name: &str) -> PathBuf {
        self.at.with_file_name(name)
    }

    async fn make(&self, path: &Path, parent: Option<PathBuf>) -> Result<()> {
        match Format::from_extension(path) {
            Some(Format::Raw) => {
                self.here.install_empty(path, self.size_bytes);
                return Ok(());
            }
            Some(Format::Qcow2) => {
                self.here.install_empty(path, 0);
                let parent = parent.as_ref().map(|at| (at.file_name().unwrap_or_default().to_string_lossy(), at));
                let parent = parent.as_ref().map(|(name, at)| (&**name, word_of(at)));
                return self.form.install(&self.here, path, self.size_bytes, self.block_bytes, parent).await;
            }
            _ => {}
        }
        let mut params = match parent {
            None => CreateParams::new(DiskType::Dynamic, self.size_bytes),
            Some(at) => {
                let options = OpenOptions { read_only: true, ..OpenOptions::default() };
                let parent = Graph::open(&self.here.files(), self.here.env(), at.as_path(), &options).await?;
                let uuid = parent.layers()[0].identity.map_or([0; 16], |identity| identity.0);
                let name = at.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let (relative_path, absolute_path, timestamp) = (name.clone(), None, 0);
                CreateParams::child(self.size_bytes, VhdParent { relative_path, absolute_path, uuid, timestamp, name })
            }
        };
        params.block_size_bytes = self.block_bytes;
        self.here.install_vhd(path, &params).await
    }

    /// One life of the process here.
    fn live(self: &Rc<Self>, executor: &mut Executor, life: &Life, rng: &mut Rng) {
        self.faults_before.set(self.here.faults_fired());
        self.use_copies();
        let ended = self.phases(executor, life, rng);
        self.here.end(ended.is_none().then_some(life.crash));
        if ended.is_none() {
            self.there.cut_links();
            executor.end_process(HERE);
            self.count(|summary| summary.crashes += 1);
            // What has its place there loses nothing with the power here.
            let crash = if self.is_here() { life.crash } else { Crash::Death };
            self.oracle.borrow_mut().crash(crash);
        }
        self.tracking.tracker.take();
        if self.has_faults() {
            self.tracking.checkpoints.note_failure();
        }
        if let Some((_, issued)) = self.ending.take() {
            self.oracle.borrow_mut().abandon_read(issued);
        }
        self.check_one_disk();
        self.here.set_faults(Faults::default());
    }

    /// Find, open, verify, work, verify, close; `None` when the process ended on the way. Faults begin with the work.
    fn phases(self: &Rc<Self>, executor: &mut Executor, life: &Life, rng: &mut Rng) -> Option<()> {
        let limit = life.crash_at.map_or(u64::MAX, |at| executor.steps() + at * 4);
        let opened: Rc<RefCell<Option<LinkNode>>> = Rc::default();
        let (host, into) = (self.clone(), opened.clone());
        executor.spawn(async move {
            let graph = host.open().await;
            graph.begin();
            let node = Arc::new(Node::new(graph));
            if host.is_here() {
                host.tracking.open(&node).await;
            }
            host.look_at_checkpoints(&node).await;
            *into.borrow_mut() = Some(node);
        });
        self.run(executor, limit)?;
        let node = opened.take().expect("the disk is open");
        self.here.set_faults(life.faults.clone());
        let work = self.workload(node.clone());
        work.begin_all(executor, rng, life.requests);
        if life.requests > 0 && self.is_here() {
            executor.spawn(self.clone().jobs(node.clone(), Rng::new(rng.word())));
            if self.tracking.goes_far {
                let (host, node, uses) = (self.clone(), node.clone(), (rng.below(6), Rng::new(rng.word())));
                executor.spawn(async move {
                    host.tracking.be_used(&node, uses, &|| host.has_faults(), &|| host.is_here()).await;
                });
            }
        }
        self.run(executor, limit)?;
        let (verify, host) = (Rng::new(rng.word()), self.clone());
        executor.spawn(async move {
            work.clone().verify(verify, true).await;
            host.check_checkpoints(&node).await;
            let graph = node.graph().await;
            work.close().await;
            let closed = host.tracking.close(&*graph).await;
            assert!(closed.is_ok() || host.has_faults(), "the changed blocks do not close: {closed:?}");
        });
        self.run(executor, limit)
    }

    /// Runs until all is done, or to the limit, where the process here ends. Now and then it, or the one there, ends right after the disk has lost its old name,
    /// where chance alone would seldom end it; and people there do what they are allowed to.
    fn run(&self, executor: &mut Executor, limit: u64) -> Option<()> {
        let (armed, which) = {
            let mut rng = self.window_rng.borrow_mut();
            (limit < u64::MAX && rng.chance(1, 3), rng.below(3))
        };
        let (begin, mut was_here) = (executor.steps(), self.is_here());
        loop {
            let next = self.events.borrow().last().map_or(u64::MAX, |(at, _)| (*at).max(executor.steps()));
            let until = limit.min(next).min(executor.steps() + 3);
            let ended = executor.run(until);
            self.check_one_disk();
            match ended {
                Ended::Done => return Some(()),
                Ended::Stopped if executor.steps() >= limit => return None,
                Ended::Stuck if next == u64::MAX => panic!("requests are left that nothing will wake"),
                Ended::Stuck | Ended::Stopped => {}
            }
            if next <= executor.steps() || ended == Ended::Stuck {
                let event = self.events.borrow_mut().pop();
                self.happen(executor, event.expect("there is a next one").1);
            }
            if armed && was_here && !self.is_here() {
                was_here = false;
                let crash = if self.window_rng.borrow_mut().chance(1, 2) { Crash::Death } else { Crash::PowerCut };
                match which {
                    0 => return None,
                    _ => {
                        self.happen(executor, Event::Crash(crash));
                        let meddles = self.window_rng.borrow_mut().below(4);
                        if let Some(name) = self.to.borrow().as_ref().filter(|_| meddles < 2) {
                            self.there.meddle(name, meddles == 0);
                        }
                        if which == 2 {
                            return None;
                        }
                        let mut events = self.events.borrow_mut();
                        let after = executor.steps() + self.window_rng.borrow_mut().skewed(600);
                        events.push((after, Event::Start));
                    }
                }
            }
            assert!(executor.steps() < begin + MOST_STEPS, "the life does not come to its end");
        }
    }

    /// The old name is the disk, or the new one there is; or neither, and the note leads to a copy that has no name yet.
    fn check_one_disk(&self) {
        let to = self.to.borrow();
        let Some(name) = to.as_ref().filter(|name| !self.copies.borrow().contains(*name)) else {
            assert!(self.is_here(), "the disk is gone, and nobody has moved it");
            return;
        };
        let disk = self.there.at(name);
        let (is_here, is_there) = (self.is_here(), self.there.has_disk(&disk));
        assert!(!(is_here && is_there), "there is a disk at both paths: {} and {}", self.at.display(), disk.display());
        let is_coming =
            self.there.has(&names::receiving(&disk)) && self.here.file_number(&names::moved(&self.at)).is_some();
        assert!(is_here || is_there || is_coming, "there is no disk at all");
    }

    /// Finds the disk as an operator would who knows the old path, and opens it as a server does.
    async fn open(&self) -> Graph<EndStore> {
        let (files, options) = (self.files(), OpenOptions::default());
        if self.is_here() {
            let opened = Graph::open(&files, self.here.env(), self.at.as_path(), &options).await;
            let graph = opened.unwrap_or_else(|error| panic!("the disk does not open: {error:?}"));
            recover(&files, &graph).await.unwrap_or_else(|error| panic!("the disk is not recovered: {error:?}"));
            return graph;
        }
        let name = self.to.borrow().clone().unwrap_or_else(|| panic!("nobody had asked for a move"));
        let options = OpenOptions { format: Some(Format::Raw), ..options };
        for tries in 0.. {
            match motion::take_back(&files, &self.at, true).await {
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::NotFound, "{error:?}");
                    assert!(error.to_string().contains(&name), "another place: {error:?}");
                }
                told => panic!("the disk is gone, and there is no note of it: {told:?}"),
            }
            let to: Locator = export(&name);
            match Graph::open(&files, self.here.env(), to, &options).await {
                Ok(graph) => {
                    assert!(self.there.has_disk(&self.there.at(&name)), "a disk is used that has no name");
                    self.count(|summary| summary.found += 1);
                    return graph;
                }
                // Its host comes back.
                Err(error) => assert!(tries < 300, "the disk does not open there: {error:?}"),
            }
            turns(20 + tries).await;
        }
        unreachable!()
    }

    /// Looks which checkpoints the disk has that was just opened, wherever it is.
    async fn look_at_checkpoints(&self, node: &LinkNode) {
        if !self.tracking.goes_far {
            return;
        }
        if self.is_here() {
            if jobs::left(&self.files(), &self.at, || self.has_faults()).await.is_none() {
                let marked = Marked::new(&self.tracking, node);
                let forgotten = motion::forget_what_is_over(&self.files(), &self.at, &marked).await;
                forgotten.unwrap_or_else(|error| panic!("what is over is not forgotten: {error:?}"));
            }
            return self.tracking.check(node, true, &|| self.has_faults()).await;
        }
        let Some(name) = self.to.borrow().clone() else { return };
        // A link may have been cut meanwhile.
        if !self.there.has_open(&name) {
            return;
        }
        let checkpoints = &self.tracking.checkpoints;
        if self.has_looked.replace(true) {
            return self.check_there(node, &name, true).await;
        }
        if self.there.troubles.load(SeqCst) > 0 || self.here.faults_fired() > 0 {
            // They could not be sent, perhaps.
            checkpoints.note_failure();
        }
        self.check_there(node, &name, true).await;
        self.count(|summary| summary.arrived += checkpoints.count());
    }

    /// Compares what is said to have changed with what has.
    async fn check_checkpoints(&self, node: &LinkNode) {
        let name = self.to.borrow().clone();
        match name {
            _ if !self.tracking.goes_far => {}
            Some(name) if !self.is_here() => {
                // Those that could not be sent are not there.
                if self.has_looked.get() {
                    self.check_there(node, &name, false).await;
                }
            }
            _ => self.tracking.check(node, false, &|| self.has_faults()).await,
        }
    }

    /// As [`Tracking::check`], of the disk `name` there.
    async fn check_there(&self, node: &LinkNode, name: &str, is_new: bool) {
        let troubles = self.there.troubles.load(SeqCst);
        let has_failed = || self.has_faults() || self.there.troubles.load(SeqCst) > troubles;
        let tracker = || self.there.changes_of(name);
        let asked = Asked { node, tracker: &tracker, has_failed: &has_failed };
        match is_new {
            true => self.tracking.checkpoints.look(&asked).await,
            false => self.tracking.checkpoints.check(&asked).await,
        }
    }

    /// What the clients and the reader of everything need.
    fn workload(&self, disk: LinkNode) -> Rc<Workload<LinkNode>> {
        Workload::of_changing(disk, &self.here, &self.oracle, &self.plan, self.faults_before.get())
    }
}

/// What qcow2 calls the format of the image at `path`.
fn word_of(path: &Path) -> &'static str {
    match Format::from_extension(path) {
        Some(Format::Raw) => "raw",
        Some(Format::Vhd) => "vpc",
        _ => "qcow2",
    }
}
