//! Disks whose graphs are exchanged while clients work, and while everything may end at any step.
//!
//! Each disk is a [`Node`] over a chain of dynamic and differencing VHDs. A task puts a new leaf on top of some of the
//! disks at once, again and again: the new image is durable before the exchange and names the old leaf as its parent; once the
//! old epoch has ended, the old leaf is sealed. What has to hold:
//!
//! - **For the guest nothing happens.** One oracle for each disk judges all reads over all exchanges and crashes, as for any
//!   disk; so each flush keeps its promise over an exchange.
//! - **A frozen parent is the disk at the exchange**: exactly what was acknowledged by then, and any part of what was in flight.
//!   From the end of its epoch on it never changes, over crashes and power cuts either.
//! - **Disks that are exchanged together have one point in time.** A client writes a number to one disk, then, when that is
//!   acknowledged, to the next; no frozen disk may have a number that its forerunner lacks.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::path::PathBuf;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use futures_util::future::join;
use spile_core::{Disk, DiskInfo, Extent, ExtentStatus, Files, Io, Op, OpenMode, Result, Segments};
use spile_image::formats::vhd::codec::footer::DiskType;
use spile_image::formats::vhd::{self, CreateParams, VhdParent};
use spile_image::layer::Layer;
use spile_image::{Graph, OpenOptions, open_layer};
use spile_node::{Node, OldEpoch, close_gates};

use crate::exec::{Ended, Executor, block_on};
use crate::explore::{Finding, catch_findings};
use crate::oracle::{Crash, Oracle};
use crate::plan::{Life, Plan};
use crate::rng::Rng;
use crate::store::SimStore;
use crate::workload::Shared;
use crate::world::World;

/// The end of each disk that the oracle does not watch: the numbers of the third rule are there.
const NUMBER_BYTES: u64 = 4096;

/// A rule of the exchange that is broken on purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Broken {
    /// None.
    #[default]
    Nothing,
    /// The disks are exchanged one after the other, with requests in between.
    OneByOne,
    /// The old leaf is sealed without waiting for the old epoch; the merged map of the parents then covers a layer that changes.
    SealedEarly,
    /// A flush covers the new leaf only.
    FlushOfLeaf,
}

/// The graph under test, which can be made to break a rule.
struct LiveGraph {
    graph: Graph<SimStore>,
    broken: Broken,
}

impl Disk for LiveGraph {
    fn info(&self) -> DiskInfo {
        self.graph.info()
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        match io.op {
            Op::Flush if self.broken == Broken::FlushOfLeaf => self.graph.handles()[0].image().flush().await,
            _ => self.graph.execute(io).await,
        }
    }

    async fn extents(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        self.graph.extents(extent, max_runs).await
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.graph.resize(size_bytes).await
    }

    async fn close(&self) -> Result<()> {
        self.graph.close().await
    }
}

/// A disk without its last [`NUMBER_BYTES`].
struct Head<D>(D);

impl<D: Disk> Disk for Head<D> {
    fn info(&self) -> DiskInfo {
        let info = self.0.info();
        DiskInfo { size_bytes: info.size_bytes - NUMBER_BYTES, ..info }
    }

    async fn execute(&self, io: Io<'_>) -> Result<()> {
        self.0.execute(io).await
    }

    async fn extents(&self, extent: Extent, max_runs: usize) -> Result<Vec<ExtentStatus>> {
        self.0.extents(extent, max_runs).await
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.0.resize(size_bytes + NUMBER_BYTES).await
    }

    async fn close(&self) -> Result<()> {
        self.0.close().await
    }
}

/// An old leaf that has been sealed, and what it may hold.
struct Frozen {
    disk: usize,
    generation: usize,
    oracle: Rc<RefCell<Oracle>>,
}

/// What stays over the lives of the process.
struct Host {
    world: World,
    plan: Rc<Plan>,
    broken: Broken,
    size_bytes: u64,
    block_bytes: u32,
    /// For each disk: what the guest may read, and which image is the leaf.
    oracles: Vec<Rc<RefCell<Oracle>>>,
    leaves: Vec<Cell<usize>>,
    frozen: RefCell<Vec<Frozen>>,
    life: Cell<u64>,
    exchanges: Cell<u64>,
    /// Exchanges are still to come in this life.
    is_exchanging: Cell<bool>,
}

type LiveNode = Arc<Node<LiveGraph>>;

/// An image in a chain, just exchanged.
struct Exchanged {
    disk: usize,
    generation: usize,
    oracle: Oracle,
    epoch: OldEpoch<LiveGraph>,
}

/// What a run that found nothing did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LiveSummary {
    /// Steps of all lives.
    pub steps: u64,
    /// Disks that were exchanged, over all lives.
    pub exchanges: u64,
    /// Old leaves that were sealed and read.
    pub sealed: u64,
}

/// Runs one seed.
///
/// # Errors
/// What was found.
pub fn run_live(seed: u64, broken: Broken, trace: bool) -> Result<LiveSummary, Finding> {
    let mut rng = Rng::new(seed).split(50);
    let (size_bytes, block_bytes) = (rng.between(4, 64) << 14, *rng.pick(&[4096, 16 << 10, 64 << 10]));
    let mut plan = Plan::draw(seed, size_bytes - NUMBER_BYTES, block_bytes.into());
    plan.hardware.devices = false;
    let world = World::new(seed, plan.hardware.clone());
    if trace {
        world.keep_trace();
    }
    let disks = rng.between(1, 3) as usize;
    let host = Rc::new(Host {
        world: world.clone(),
        plan: Rc::new(plan),
        broken,
        size_bytes,
        block_bytes,
        oracles: (0..disks).map(|_| Rc::default()).collect(),
        leaves: (0..disks).map(|_| Cell::new(0)).collect(),
        frozen: RefCell::default(),
        life: Cell::new(0),
        exchanges: Cell::new(0),
        is_exchanging: Cell::new(false),
    });
    catch_findings(&world, move || host.all(&mut rng))
}

impl Host {
    fn all(self: &Rc<Self>, rng: &mut Rng) -> LiveSummary {
        for disk in 0..self.leaves.len() {
            let host = self.clone();
            let made = block_on(&self.world, async move { host.create(disk, 0, None).await });
            made.unwrap_or_else(|error| panic!("cannot create a base: {error:?}"));
        }
        let mut summary = LiveSummary::default();
        let lives = self.plan.lives.iter().take(3).cloned();
        for life in lives.chain([quiet()]) {
            summary.steps += self.live(&life, rng);
        }
        (summary.exchanges, summary.sealed) = (self.exchanges.get(), self.frozen.borrow().len() as u64);
        summary
    }

    fn path(&self, disk: usize, generation: usize) -> PathBuf {
        PathBuf::from(format!("/images/{}", file_name(disk, generation)))
    }

    /// Makes an image, durable, that names the one before it as its parent.
    async fn create(&self, disk: usize, generation: usize, parent_uuid: Option<[u8; 16]>) -> Result<()> {
        let mut params = match parent_uuid {
            None => CreateParams::new(DiskType::Dynamic, self.size_bytes),
            Some(uuid) => {
                let name = file_name(disk, generation - 1);
                let (relative_path, absolute_path, timestamp) = (name.clone(), None, 0);
                CreateParams::child(self.size_bytes, VhdParent { relative_path, absolute_path, uuid, timestamp, name })
            }
        };
        params.block_size_bytes = self.block_bytes;
        let path = self.path(disk, generation);
        self.world.install_empty(&path, 0);
        let store = self.world.files().open(&path.as_path().into(), OpenMode::ReadWrite).await?;
        vhd::create(&store, &*self.world.env(), &params).await?;
        self.world.settle(&path);
        Ok(())
    }

    async fn open(&self, disk: usize, generation: usize, read_only: bool) -> Result<LiveGraph> {
        let options = OpenOptions { read_only, ..OpenOptions::default() };
        let path = self.path(disk, generation);
        let graph = Graph::open(&self.world.files(), self.world.env(), &path, &options).await?;
        Ok(LiveGraph { graph, broken: self.broken })
    }

    /// One life of the process; answers its steps.
    fn live(self: &Rc<Self>, life: &Life, rng: &mut Rng) -> u64 {
        self.life.set(self.life.get() + 1);
        let mut executor = Executor::new(self.world.clone(), Rng::new(rng.word()));
        let ended = self.phases(&mut executor, life, rng);
        let steps = executor.steps();
        match (ended, life.crash) {
            (None, Crash::PowerCut) => self.world.cut_power(),
            _ => self.world.kill(),
        }
        drop(executor);
        if ended.is_none() {
            self.oracles.iter().for_each(|oracle| oracle.borrow_mut().crash(life.crash));
            self.frozen.borrow().iter().for_each(|frozen| frozen.oracle.borrow_mut().crash(life.crash));
        }
        steps
    }

    /// Open, verify, work, verify, close; `None` when the process ended on the way.
    fn phases(self: &Rc<Self>, executor: &mut Executor, life: &Life, rng: &mut Rng) -> Option<()> {
        let limit = life.crash_at.unwrap_or(u64::MAX);
        let nodes: Rc<RefCell<Vec<LiveNode>>> = Rc::default();
        let (host, into) = (self.clone(), nodes.clone());
        executor.spawn(async move {
            for disk in 0..host.leaves.len() {
                let opened = host.open(disk, host.leaves[disk].get(), false).await;
                let graph = opened.unwrap_or_else(|error| panic!("disk {disk} does not open: {error:?}"));
                into.borrow_mut().push(Arc::new(Node::new(graph)));
            }
            host.verify_frozen().await;
        });
        run(executor, limit)?;
        let nodes = nodes.take();
        for (disk, node) in nodes.iter().enumerate() {
            let shared = self.shared(node.clone(), &self.oracles[disk]);
            executor.spawn(shared.clone().verify(Rng::new(rng.word()), false));
            for _ in 0..rng.between(1, 3) {
                executor.spawn(shared.clone().client(Rng::new(rng.word()), life.requests / 2));
            }
        }
        if life.requests > 0 {
            self.is_exchanging.set(true);
            executor.spawn(self.clone().write_numbers(nodes.clone()));
            let rounds = rng.between(1, 5);
            let rng = Rng::new(rng.word());
            executor.spawn(self.clone().exchanges(nodes.clone(), rng, rounds));
        }
        run(executor, limit)?;
        for (disk, node) in nodes.into_iter().enumerate() {
            let shared = self.shared(node, &self.oracles[disk]);
            let rng = Rng::new(rng.word());
            executor.spawn(async move {
                shared.clone().verify(rng, true).await;
                shared.close().await;
            });
        }
        run(executor, limit)
    }

    /// What the clients and the reader of everything need.
    fn shared<D: Disk>(&self, disk: D, oracle: &Rc<RefCell<Oracle>>) -> Rc<Shared<Head<D>>> {
        Rc::new(Shared {
            disk: Head(disk),
            world: self.world.clone(),
            oracle: oracle.clone(),
            plan: self.plan.clone(),
            faults_before: 0,
            only_syncs_fail: true,
            flush_failed: Cell::new(false),
        })
    }

    /// Reads every old leaf again that was sealed in lives before: it is as it was.
    async fn verify_frozen(&self) {
        let frozen: Vec<_> = {
            let list = self.frozen.borrow();
            list.iter().map(|frozen| (frozen.disk, frozen.generation, frozen.oracle.clone())).collect()
        };
        for (disk, generation, oracle) in frozen {
            let graph = self.open(disk, generation, true).await;
            let graph = graph.unwrap_or_else(|error| panic!("a frozen parent does not open: {error:?}"));
            self.shared(graph, &oracle).verify(Rng::new(generation as u64), false).await;
        }
    }

    fn numbers_at(&self) -> Extent {
        Extent::from_range(self.size_bytes - NUMBER_BYTES..self.size_bytes)
    }

    /// Numbers of this life are larger than those of the lives before.
    fn first_number(&self) -> u64 {
        self.life.get() << 32
    }

    /// Writes each number to all disks, to the next one when it is acknowledged by the one before.
    async fn write_numbers(self: Rc<Self>, nodes: Vec<LiveNode>) {
        for number in 0.. {
            if !self.is_exchanging.get() {
                return;
            }
            for node in &nodes {
                let page = Segments::zeroed(NUMBER_BYTES as usize);
                page.copy_from_slice(0, &(self.first_number() + number).to_le_bytes());
                node.write(self.numbers_at(), &page, false).await.expect("no fault was injected");
            }
        }
    }

    async fn number_of(&self, graph: &LiveGraph) -> u64 {
        let page = Segments::zeroed(NUMBER_BYTES as usize);
        graph.read(self.numbers_at(), &page).await.expect("no fault was injected");
        let mut number = [0; 8];
        page.copy_to_slice(0, &mut number);
        u64::from_le_bytes(number)
    }

    /// Exchanges some of the disks, `rounds` times; each round's old leaves are sealed while the next round goes on.
    fn exchanges(self: Rc<Self>, nodes: Vec<LiveNode>, mut rng: Rng, rounds: u64) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(async move {
            pause(&mut rng, 60).await;
            let mut disks: Vec<usize> = (0..nodes.len()).filter(|_| rng.chance(2, 3)).collect();
            if rng.chance(1, 2) {
                disks.reverse();
            }
            let exchanged = self.exchange(&nodes, &disks, &mut rng).await;
            let seal = self.clone().seal(exchanged, rng.split(rounds));
            match rounds {
                0 | 1 => {
                    self.is_exchanging.set(false);
                    seal.await;
                }
                _ => drop(join(seal, self.exchanges(nodes, rng, rounds - 1)).await),
            }
        })
    }

    /// Puts a new leaf on each of `disks`, all at one point in time.
    async fn exchange(&self, nodes: &[LiveNode], disks: &[usize], rng: &mut Rng) -> Vec<Exchanged> {
        let mut graphs = Vec::new();
        for &disk in disks {
            graphs.push((disk, Arc::new(self.with_new_leaf(&nodes[disk], disk).await.expect("no fault was injected"))));
        }
        // From here on the disk's path leads to the new leaf.
        disks.iter().for_each(|&disk| self.leaves[disk].set(self.leaves[disk].get() + 1));
        let at_once = if self.broken == Broken::OneByOne { 1 } else { disks.len().max(1) };
        let mut exchanged = Vec::new();
        for group in graphs.chunks(at_once) {
            let changes = group.iter().map(|(disk, graph)| (&*nodes[*disk], graph.clone())).collect();
            let gates = close_gates(changes).await.unwrap_or_else(|error| panic!("no exchange: {error:?}"));
            pause(rng, 30).await;
            let oracles: Vec<_> = group.iter().map(|(disk, _)| self.oracles[*disk].borrow().clone()).collect();
            for ((epoch, oracle), (disk, _)) in gates.open().into_iter().zip(oracles).zip(group) {
                let generation = self.leaves[*disk].get() - 1;
                exchanged.push(Exchanged { disk: *disk, generation, oracle, epoch });
            }
            pause(rng, if self.broken == Broken::OneByOne { 200 } else { 30 }).await;
        }
        self.exchanges.set(self.exchanges.get() + exchanged.len() as u64);
        exchanged
    }

    /// The disk's graph with a new image on top.
    async fn with_new_leaf(&self, node: &LiveNode, disk: usize) -> Result<LiveGraph> {
        let old = node.graph().await;
        let uuid = old.graph.layers()[0].identity.map_or([0; 16], |identity| identity.0);
        let generation = self.leaves[disk].get() + 1;
        self.create(disk, generation, Some(uuid)).await?;
        let (files, path) = (self.world.files(), self.path(disk, generation));
        let leaf = open_layer(&files, self.world.env(), &path, &OpenOptions::default()).await?;
        Ok(LiveGraph { graph: old.graph.with_leaf(leaf).await?, broken: self.broken })
    }

    /// Waits for the old epochs, seals their leaves, and judges what these hold, twice.
    async fn seal(self: Rc<Self>, exchanged: Vec<Exchanged>, mut rng: Rng) {
        let mut numbers = Vec::new();
        for Exchanged { disk, generation, mut oracle, epoch } in exchanged {
            let old = epoch.graph().clone();
            if self.broken != Broken::SealedEarly {
                epoch.ended().await;
            }
            old.graph.seal_parents().await.expect("no fault was injected");
            old.graph.handles()[0].seal().await.expect("no fault was injected");
            epoch.ended().await;
            // What was in flight at the exchange has ended: it is in the old leaf or it is not.
            oracle.crash(Crash::Death);
            let sealed = oracle.begin_flush();
            oracle.end_flush(sealed);
            let oracle = Rc::new(RefCell::new(oracle));
            self.shared(old.clone(), &oracle).verify(rng.split(1), false).await;
            numbers.push((disk, self.number_of(&old).await));
            pause(&mut rng, 200).await;
            self.shared(old, &oracle).verify(rng.split(2), false).await;
            self.frozen.borrow_mut().push(Frozen { disk, generation, oracle });
        }
        self.check_numbers(&numbers);
    }

    /// Each disk has every number of this life that a later disk has.
    fn check_numbers(&self, numbers: &[(usize, u64)]) {
        for (before, one) in numbers {
            for (after, other) in numbers.iter().filter(|(after, _)| after > before) {
                assert!(
                    other <= one || *other < self.first_number(),
                    "frozen at one point in time, disk {after} has number {other:#x} and disk {before} only {one:#x}"
                );
            }
        }
    }
}

fn file_name(disk: usize, generation: usize) -> String {
    format!("disk{disk}-{generation}.vhd")
}

/// Lets up to `most` steps of this task pass.
async fn pause(rng: &mut Rng, most: u64) {
    let mut left = rng.skewed(most);
    poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(());
        }
        left -= 1;
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

fn run(executor: &mut Executor, limit: u64) -> Option<()> {
    match executor.run(limit) {
        Ended::Done => Some(()),
        Ended::Stopped => None,
        Ended::Stuck => panic!("requests are left that nothing will wake"),
    }
}

/// A last life that only reads.
fn quiet() -> Life {
    let (crash_at, crash, clients) = (None, Crash::Death, 1);
    Life { crash_at, crash, requests: 0, clients, verify_first: true, faults: crate::faults::Faults::default() }
}
