//! A qcow2 disk with bitmaps inside it, while clients work, the disk grows, and everything may end at any step.
//!
//! The image has a bitmap that notes all changes, one that notes none, and in some runs one that was in use before anybody looked. Lives end in order, by the
//! death of the process or by a power cut; in some the host's operations fail; and between two of them another program may take a backup, and clear the bitmap, may write to the
//! image that was left behind, or to its parents. What has to
//! hold whenever nobody has the disk open, and whoever reads the file:
//!
//! - **A bitmap that is called consistent and is not in use has each block set that differs from what the disk held when it was made.**
//! - **Once the disk was opened over parents that another program wrote to, such a bitmap has all blocks set**, also when the process dies before its first change.
//! - **The bitmap that notes nothing stays as it is, and the one that was in use stays in use.**
//! - **The disk's checkpoint of the bitmap's name tells each such block, too, in every life.**
//! - **A life that ends in order leaves a true bitmap**, whatever was before, as long as nothing has failed, and nobody else has written while it was in use: then
//!   it stays so.
//! - **The image contradicts itself never**, and leaks nothing where no life was cut off.

mod host;
mod raw;

use std::cell::RefCell;
use std::rc::Rc;

pub use spile_image::bitmaps::BrokenBitmaps as Broken;

use crate::exec::Executor;
use crate::explore::{Finding, catch_findings, every_step};
use crate::faults::Faults;
use crate::plan::{Life, Plan};
use crate::rng::Rng;
use crate::world::World;
use host::Host;

summary! {
    /// What a run that found nothing did.
    pub struct BitmapsSummary {
        /// Steps of all lives.
        pub steps: u64,
        /// Lives that ended in a crash.
        pub crashes: u64,
        /// Looks at a bitmap that was to be believed.
        pub believed: u64,
        /// Such looks in which some block was not set.
        pub useful: u64,
        /// Looks at a bitmap that was in use.
        pub in_use: u64,
        /// Backups by another program.
        pub cleared: u64,
        /// Writes by another program while the bitmap was in use.
        pub behind: u64,
        /// Writes by another program to the image's parents.
        pub parents: u64,
    }
}

/// Runs one seed.
///
/// # Errors
/// What was found.
pub fn run_bitmaps(seed: u64, broken: Broken, trace: bool) -> Result<BitmapsSummary, Finding> {
    run_plan(seed, draw(seed), broken, trace)
}

/// Runs one short life of a seed, and a second one, ended at each step of the first: by a death and by a power cut. The second one ends some steps
/// after it began.
///
/// # Errors
/// What was found.
pub fn run_every_step(seed: u64, broken: Broken) -> Result<BitmapsSummary, Finding> {
    every_step(
        Life::quiet(6, 2),
        |all: BitmapsSummary| all.crashes,
        |lives| run_plan(seed, Plan { lives, ..draw(seed) }, broken, false),
    )
}

fn draw(seed: u64) -> Plan {
    let mut plan = Plan::draw(seed, 1 << 20, 64 << 10);
    plan.hardware.devices = false;
    plan.lives.truncate(4);
    plan
}

fn run_plan(seed: u64, plan: Plan, broken: Broken, trace: bool) -> Result<BitmapsSummary, Finding> {
    let world = World::new(seed, plan.hardware.clone());
    if trace {
        world.keep_trace();
    }
    let mut rng = Rng::new(seed).split(80);
    let host = Rc::new(Host::new(world.clone(), broken, &mut rng));
    catch_findings(&world, move || {
        // The last two are quiet: what a crash has left is seen for sure.
        for life in plan.lives.iter().cloned().chain([Life::quiet(8, 2), Life::quiet(0, 2)]) {
            live(&host, &life, &mut rng);
        }
        host.look_at_the_end();
        host.summary.get()
    })
}

/// One life of the process.
fn live(host: &Rc<Host>, life: &Life, rng: &mut Rng) {
    host.begin_life();
    let mut executor = Executor::new(host.world.clone(), Rng::new(rng.word()));
    let ended = phases(host, &mut executor, life, rng);
    host.count(|summary| summary.steps += executor.steps());
    host.world.end(ended.is_none().then_some(life.crash));
    drop(executor);
    host.world.set_faults(Faults::default());
    host.end_life(ended.is_some());
    host.count(|summary| summary.crashes += u64::from(ended.is_none()));
    match ended {
        Some(()) if rng.chance(1, 5) => host.clear_by_another(),
        Some(()) if rng.chance(1, 8) => host.write_to_parents(),
        None if rng.chance(1, 8) => host.write_by_another(),
        _ => {}
    }
}

/// Open, check, work, close; `None` when the process ended on the way. Faults begin with the work.
fn phases(host: &Rc<Host>, executor: &mut Executor, life: &Life, rng: &mut Rng) -> Option<()> {
    let limit = life.crash_at.unwrap_or(u64::MAX);
    let opened: Rc<RefCell<Option<host::Opened>>> = Rc::default();
    let (own, into) = (host.clone(), opened.clone());
    executor.spawn(async move { *into.borrow_mut() = Some(own.open().await) });
    executor.finish(limit)?;
    let (node, changes) = opened.take().expect("the disk is open");
    host.world.set_faults(life.faults.clone());
    for _ in 0..life.clients.min(3) {
        executor.spawn(host.clone().client(node.clone(), Rng::new(rng.word()), life.requests.min(60) / 2));
    }
    executor.finish(limit)?;
    let own = host.clone();
    executor.spawn(async move { own.close(node, changes).await });
    executor.finish(limit)
}
