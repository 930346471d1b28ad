//! A disk whose changed blocks are tracked, while clients work, checkpoints are made and removed, and everything may end at any step.
//!
//! The disk is a raw image. In each life clients write, zero and discard, and somebody makes and removes checkpoints, asks what has
//! changed, and lets the disk grow. In some seeds changes are noted beside that, as ways back note them. A life ends in order, by the death of the
//! process or by a power cut; in some the host's operations fail. What has to hold, whenever somebody asks:
//!
//! - **Each block whose content differs from the checkpoint's counts as changed.**
//! - **Where there was no power cut, no block counts as changed that no request was for**, but for those by which the disk grew.
//! - **What was noted counts as changed, after every crash.**
//! - **A checkpoint that was made is there after every crash**, and one that was removed is not.
//! - **A disk whose changes cannot be noted any more goes on**, and has no checkpoints from the next life on.
//! - **After another program has written to the disk, everything counts as changed.**

mod host;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use spile_image::Graph;
use spile_node::Node;

pub use spile_life::changes::Broken;

use crate::exec::Executor;
use crate::explore::{Finding, catch_findings, every_step};
use crate::faults::Faults;
use crate::oracle::Crash;
use crate::plan::{Life, Plan};
use crate::rng::Rng;
use crate::store::SimStore;
use crate::world::World;
use host::Host;

type Disks = Arc<Node<Graph<SimStore>>>;

summary! {
    /// What a run that found nothing did.
    pub struct ChangesSummary {
        /// Steps of all lives.
        pub steps: u64,
        /// Lives that ended in a crash.
        pub crashes: u64,
        /// Checkpoints that were made.
        pub made: u64,
        /// Checkpoints that were removed.
        pub removed: u64,
        /// Questions what has changed since a checkpoint that is older than the life.
        pub asked: u64,
        /// Such questions whose answer had to be exact.
        pub exact: u64,
        /// Lives in which tracking was given up.
        pub given_up: u64,
        /// How often something was noted beside requests.
        pub noted: u64,
    }
}

/// Runs one seed.
///
/// # Errors
/// What was found.
pub fn run_changes(seed: u64, broken: Broken, trace: bool) -> Result<ChangesSummary, Finding> {
    run_plan(seed, draw(seed), broken, trace)
}

/// Runs one short life of a seed, and a second one, ended at each step of the first: by a death and by a power cut. The second one ends some steps
/// after it began.
///
/// # Errors
/// What was found.
pub fn run_every_step(seed: u64, broken: Broken) -> Result<ChangesSummary, Finding> {
    every_step(
        Life::quiet(12, 2),
        |all: ChangesSummary| all.crashes,
        |lives| run_plan(seed, Plan { lives, ..draw(seed) }, broken, false),
    )
}

fn draw(seed: u64) -> Plan {
    let mut plan = Plan::draw(seed, 1 << 20, 64 << 10);
    plan.hardware.devices = false;
    plan.lives.truncate(5);
    plan
}

fn run_plan(seed: u64, plan: Plan, broken: Broken, trace: bool) -> Result<ChangesSummary, Finding> {
    let world = World::new(seed, plan.hardware.clone());
    if trace {
        world.keep_trace();
    }
    let mut rng = Rng::new(seed).split(70);
    let host = Rc::new(Host::new(world.clone(), broken, &mut rng, seed));
    catch_findings(&world, move || {
        // The last two are quiet: what a crash has left is seen for sure.
        for life in plan.lives.iter().cloned().chain([Life::quiet(8, 2), Life::quiet(0, 2)]) {
            live(&host, &life, &mut rng);
        }
        host.summary.get()
    })
}

/// One life of the process.
fn live(host: &Rc<Host>, life: &Life, rng: &mut Rng) {
    host.faults_before.set(host.world.faults_fired());
    let mut executor = Executor::new(host.world.clone(), Rng::new(rng.word()));
    let ended = phases(host, &mut executor, life, rng);
    host.count(|summary| summary.steps += executor.steps());
    let crash = ended.is_none().then_some(life.crash);
    host.world.end(crash);
    if crash == Some(Crash::PowerCut) {
        host.lose_exactness();
    }
    drop(executor);
    host.note_loss();
    host.world.set_faults(Faults::default());
    host.count(|summary| summary.crashes += u64::from(ended.is_none()));
    host.forget_requests();
}

/// Open, check, work, check, close; `None` when the process ended on the way. Faults begin with the work.
fn phases(host: &Rc<Host>, executor: &mut Executor, life: &Life, rng: &mut Rng) -> Option<()> {
    let limit = life.crash_at.unwrap_or(u64::MAX);
    let opened: Rc<RefCell<Option<host::Opened>>> = Rc::default();
    let (own, into) = (host.clone(), opened.clone());
    executor.spawn(async move { *into.borrow_mut() = Some(own.open().await) });
    executor.finish(limit)?;
    let (node, changes) = opened.take().expect("the disk is open");
    host.world.set_faults(life.faults.clone());
    for _ in 0..life.clients.min(4) {
        executor.spawn(host.clone().client(node.clone(), Rng::new(rng.word()), life.requests / 2));
    }
    if let Some(rng) = &host.noted_rng {
        let rng = Rng::new(rng.borrow_mut().word());
        executor.spawn(host.clone().notes(node.clone(), changes.clone(), rng, life.requests / 4));
    }
    executor.spawn(host.clone().checkpoints(node.clone(), changes.clone(), Rng::new(rng.word()), life.requests / 8));
    executor.finish(limit)?;
    let own = host.clone();
    let word = Rng::new(rng.word());
    executor.spawn(async move { own.close(node, changes, word).await });
    executor.finish(limit)
}
