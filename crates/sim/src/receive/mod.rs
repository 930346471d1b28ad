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
use spile_life::{Sizes, changes, motion, names, recover};
use spile_node::Node;

use crate::exec::{Ended, Executor, block_on};
use crate::explore::{Finding, catch_findings};
use crate::faults::Faults;
use crate::motion::marks::Tracking;
use crate::oracle::{Crash, Oracle};
use crate::plan::{Life, Plan};
use crate::rng::Rng;
use crate::turns::turns;
use crate::workload::Workload;
use crate::world::World;
use house::There;
use job::there_at;
use link::{EndStore, LinkFiles, export};

/// The parents of a disk that has some, the lowest first.
const PARENTS: [&[&str]; 3] = [&["base.vhd"], &["base.raw", "parent.vhd"], &["base.vhd", "parent.vhd"]];

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
    sizes: Sizes,
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
    let tracking = Tracking::new(here.clone(), changes::Broken::Nothing);
    let sizes = Sizes { batch_bytes: 1 << 20, piece_bytes: 4096 << rng.below(5), ..Sizes::default() };
    // Drawn beside all else: a seed without parents does what it did before there were any.
    let parents = {
        let mut rng = rng.split(93);
        if rng.chance(1, 4) { *rng.pick(&PARENTS) } else { &[][..] }
    };
    let host = Rc::new(Host {
        here: here.clone(),
        there: Arc::new(There::new(there.clone(), rng.split(91), broken)),
        plan: Rc::new(plan),
        broken,
        size_bytes,
        block_bytes,
        sizes: Sizes { noted_bytes: rng.below(16) << 12, ..sizes },
        at: if rng.chance(1, 3) && parents.is_empty() { "/images/disk.raw" } else { "/images/disk.vhd" }.into(),
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
        summary: Cell::default(),
    });
    catch_findings(&here, move || host.all(&mut rng)).map_err(|mut finding| {
        finding.trace.extend(there.trace().into_iter().map(|line| format!("there {line}")));
        finding
    })
}

impl Host {
    fn all(self: &Rc<Self>, rng: &mut Rng) -> ReceiveSummary {
        self.fill(rng);
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
        self.count(|summary| summary.steps = executor.steps());
        self.summary.get()
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
        if path.extension().is_some_and(|extension| extension == "raw") {
            self.here.install_empty(path, self.size_bytes);
            return Ok(());
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
            *into.borrow_mut() = Some(node);
        });
        self.run(executor, limit)?;
        let node = opened.take().expect("the disk is open");
        self.here.set_faults(life.faults.clone());
        let work = self.workload(node.clone());
        work.begin_all(executor, rng, life.requests);
        if life.requests > 0 && self.is_here() {
            executor.spawn(self.clone().jobs(node.clone(), Rng::new(rng.word())));
        }
        self.run(executor, limit)?;
        let (verify, host) = (Rng::new(rng.word()), self.clone());
        executor.spawn(async move {
            work.clone().verify(verify, true).await;
            let graph = node.graph().await;
            work.close().await;
            let closed = host.tracking.close(&graph).await;
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
        let disk = there_at(name);
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
                    assert!(self.there.has_disk(&there_at(&name)), "a disk is used that has no name");
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

    /// What the clients and the reader of everything need.
    fn workload(&self, disk: LinkNode) -> Rc<Workload<LinkNode>> {
        Workload::of_changing(disk, &self.here, &self.oracle, &self.plan, self.faults_before.get())
    }
}
