//! Chains whose layers are merged and whose leaves are flattened while clients work, and while everything may end at any step.
//!
//! The disk is a [`Node`](spile_node::Node) over a chain of two to four images that all hold something. In each life a job of
//! `spile-life` works on it, or goes on where the life before has left it: the merge of a layer, of the leaf, or a flatten. It is
//! paused and cancelled now and then, and in some lives the host's operations fail. Besides the disk there may be a second child of one of
//! the layers. What has to hold:
//!
//! - **For the guest nothing happens.** One oracle judges all reads over all jobs and crashes.
//! - **The chain opens after every crash**, and so does the second child, which reads the same for ever.
//! - **A merge that is done has removed its layer**, and the chain is shorter by it. A flatten that is done leaves one layer.
//! - **What must be refused is refused before anything changes**: a parent with a second child, a leaf whose parent has another format.
//! - **Work that was interrupted comes to its end** in the lives after, without anybody but the note beside the disk.

mod chain;
mod job;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use spile_core::Disk;
use spile_image::Graph;
use spile_life::Sizes;
use spile_node::Node;

pub use spile_image::Broken;

use crate::exec::Executor;
use crate::explore::{Finding, catch_findings};
use crate::faults::Faults;
use crate::oracle::Oracle;
use crate::plan::{Life, Plan};
use crate::rng::Rng;
use crate::store::SimStore;
use crate::workload::Workload;
use crate::world::World;
use chain::Chain;

type MergeNode = Arc<Node<Graph<SimStore>>>;

/// What stays over the lives of the process.
struct Host {
    world: World,
    plan: Rc<Plan>,
    broken: Broken,
    chain: Chain,
    /// What the guest may read.
    oracle: Rc<RefCell<Oracle>>,
    sizes: Sizes,
    /// Into which parent each layer was last to be merged.
    moved: RefCell<BTreeMap<PathBuf, PathBuf>>,
    faults_before: Cell<u64>,
    only_syncs_fail: Cell<bool>,
    summary: Cell<MergeSummary>,
}

summary! {
    /// What a run that found nothing did.
    pub struct MergeSummary {
        /// Steps of all lives.
        pub steps: u64,
        /// Layers that were merged, the leaf not counted.
        pub merged: u64,
        /// Leaves that were merged.
        pub leaves: u64,
        /// Leaves that were flattened.
        pub flattened: u64,
        /// Jobs that went on from where a life before had left them.
        pub resumed: u64,
        /// Jobs that were cancelled, or failed by a fault.
        pub ended_early: u64,
        /// Jobs that were refused.
        pub refused: u64,
    }
}

/// Runs one seed.
///
/// # Errors
/// What was found.
pub fn run_merge(seed: u64, broken: Broken, trace: bool) -> Result<MergeSummary, Finding> {
    let mut rng = Rng::new(seed).split(60);
    let chain = Chain::draw(&mut rng, Rng::new(seed).split(69));
    let mut plan = Plan::draw(seed, chain.size_bytes, chain.block_bytes.into());
    plan.hardware.devices = false;
    // The last step of a merge is a rename. Where every operation may fail, few merges come so far.
    let mut of_names = Rng::new(seed).split(61);
    for life in &mut plan.lives {
        if of_names.chance(1, 4) {
            life.faults = Faults { names_eio: of_names.between(1000, 9000), ..Faults::default() };
        }
    }
    let world = World::new(seed, plan.hardware.clone());
    if trace {
        world.keep_trace();
    }
    let (batch_bytes, piece_bytes) = (rng.between(1, 6) << 14, 4096 << rng.below(5));
    let mut of_lanes = Rng::new(seed).split(62);
    let (quiet_piece_bytes, lanes) = (4096 << of_lanes.below(5), of_lanes.between(1, 4) as usize);
    // Often the layer's file holds its space to the end, often for a while or not at all.
    let held_bytes = [0, 64 << 10, u64::MAX / 2][Rng::new(seed).split(63).index(3)];
    let sizes = Sizes { batch_bytes, held_bytes, piece_bytes, quiet_piece_bytes, lanes, ..Sizes::default() };
    let host = Rc::new(Host {
        world: world.clone(),
        plan: Rc::new(plan),
        broken,
        chain,
        oracle: Rc::default(),
        sizes,
        moved: RefCell::default(),
        faults_before: Cell::new(0),
        only_syncs_fail: Cell::new(true),
        summary: Cell::default(),
    });
    catch_findings(&world, move || host.all(&mut rng))
}

impl Host {
    fn all(self: &Rc<Self>, rng: &mut Rng) -> MergeSummary {
        self.fill(rng);
        let lives = self.plan.lives.iter().take(4).cloned();
        // The last two finish what was begun, and read everything.
        for life in lives.chain([Life::quiet(4, 1), Life::quiet(0, 1)]) {
            let steps = self.live(&life, rng);
            self.count(|summary| summary.steps += steps);
        }
        self.summary.get()
    }

    fn count(&self, add: impl FnOnce(&mut MergeSummary)) {
        let mut summary = self.summary.get();
        add(&mut summary);
        self.summary.set(summary);
    }

    /// True when a fault was injected in this life.
    fn has_faults(&self) -> bool {
        self.world.faults_fired() > self.faults_before.get()
    }

    /// One life of the process. Returns the number of its steps.
    fn live(self: &Rc<Self>, life: &Life, rng: &mut Rng) -> u64 {
        self.faults_before.set(self.world.faults_fired());
        self.only_syncs_fail.set(life.faults.only_syncs_fail());
        let mut executor = Executor::new(self.world.clone(), Rng::new(rng.word()));
        let ended = self.phases(&mut executor, life, rng);
        let steps = executor.steps();
        self.world.end(ended.is_none().then_some(life.crash));
        drop(executor);
        self.world.set_faults(Faults::default());
        if ended.is_none() {
            self.oracle.borrow_mut().crash(life.crash);
            self.chain.second.iter().for_each(|second| second.oracle.borrow_mut().crash(life.crash));
        }
        steps
    }

    /// Open, verify, work, verify, close; `None` when the process ended on the way. Faults begin with the work.
    fn phases(self: &Rc<Self>, executor: &mut Executor, life: &Life, rng: &mut Rng) -> Option<()> {
        let limit = life.crash_at.map_or(u64::MAX, |at| at * 2);
        let opened: Rc<RefCell<Option<MergeNode>>> = Rc::default();
        let (host, into) = (self.clone(), opened.clone());
        executor.spawn(async move {
            host.check_images().await;
            host.verify_second().await;
            let graph = host.open_disk(false).await.unwrap_or_else(|error| panic!("the disk does not open: {error:?}"));
            graph.begin();
            *into.borrow_mut() = Some(Arc::new(Node::new(graph)));
        });
        executor.finish(limit)?;
        let node = opened.take().expect("the disk is open");
        self.world.set_faults(life.faults.clone());
        let work = self.workload(node.clone(), &self.oracle);
        work.begin_all(executor, rng, life.requests / 2);
        if life.requests > 0 {
            executor.spawn(self.clone().jobs(node.clone(), Rng::new(rng.word())));
        }
        executor.finish(limit)?;
        let verify = Rng::new(rng.word());
        executor.spawn(async move {
            work.clone().verify(verify, true).await;
            work.close().await;
        });
        executor.finish(limit)
    }

    /// What the clients and the reader of everything need.
    fn workload<D: Disk>(&self, disk: D, oracle: &Rc<RefCell<Oracle>>) -> Rc<Workload<D>> {
        Workload::of_changing(disk, &self.world, oracle, &self.plan, self.faults_before.get())
    }
}
