//! The explorer: takes a subject through the lives of a plan, crashes it, opens it again, and checks everything.

use std::cell::{Cell, RefCell};
use std::ops::AddAssign;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Once;

use spile_core::Disk;

use crate::exec::{Executor, block_on};
use crate::faults::{Faults, Sabotage};
use crate::oracle::{Crash, Oracle};
use crate::plan::{Life, Plan};
use crate::rng::Rng;
use crate::subject::Subject;
use crate::workload::Workload;
use crate::world::World;

/// The sums of a run that found nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// A hash of everything that the run did: two runs with the same hash did the same.
    pub trace_hash: u64,
    /// The number of steps of all lives.
    pub steps: u64,
    /// The number of steps of the first life of the last layer.
    pub first_life_steps: u64,
    /// The number of crashes.
    pub crashes: u64,
}

/// An error that a run found.
#[derive(Clone, Debug)]
pub struct Finding {
    /// What was wrong, and in which part of the run.
    pub message: String,
    /// The trace, if it was kept.
    pub trace: Vec<String>,
}

/// Options of a run.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The trace is kept.
    pub trace: bool,
    /// How the store breaks its promises, from the leaf's first life to the last but one.
    pub sabotage: Sabotage,
}

thread_local! {
    static EXPLORING: Cell<bool> = const { Cell::new(false) };
    static PANIC_AT: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Panics on exploring threads are findings: kept, not printed.
fn catch_panics_quietly() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !EXPLORING.get() {
                return before(info);
            }
            let place = info.location().map(ToString::to_string).unwrap_or_default();
            PANIC_AT.set(place);
        }));
    });
}

/// Runs `plan` on `subject`.
///
/// # Errors
/// The error that was found.
pub fn explore<S: Subject>(subject: S, plan: Plan, options: &Options) -> Result<Summary, Finding> {
    let world = World::new(plan.seed, plan.hardware.clone());
    if options.trace {
        world.keep_trace();
    }
    let mut run = Run::new(world.clone(), subject, plan, options);
    catch_findings(&world, move || run.all())
}

/// Runs one short life such as `quiet`, and a second one, ended at each step of the first: by a death and by a power cut. A third one ends some steps after
/// it began. `crashes` tells how many lives of a sum have ended so.
///
/// # Errors
/// What was found.
pub(crate) fn every_step<S: Copy + Default + AddAssign>(
    quiet: Life,
    crashes: impl Fn(S) -> u64,
    run: impl Fn(Vec<Life>) -> Result<S, Finding>,
) -> Result<S, Finding> {
    let mut all = S::default();
    let life = |crash_at, crash| Life { crash_at, crash, ..quiet.clone() };
    for step in 1.. {
        let before = crashes(all);
        for crash in [Crash::Death, Crash::PowerCut] {
            all +=
                run(vec![life(None, Crash::Death), life(Some(step), crash), life(Some(step % 37), Crash::PowerCut)])?;
        }
        // Only the third life crashes when the second is shorter than so many steps.
        if crashes(all) - before <= 2 {
            return Ok(all);
        }
    }
    Ok(all)
}

/// Does `work`; a panic in it is a finding.
pub(crate) fn catch_findings<T>(world: &World, work: impl FnOnce() -> T) -> Result<T, Finding> {
    catch_panics_quietly();
    EXPLORING.set(true);
    let ended = catch_unwind(AssertUnwindSafe(work));
    EXPLORING.set(false);
    ended.map_err(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
            .unwrap_or_else(|| "a panic without a message".to_owned());
        let place = PANIC_AT.take();
        Finding { message: format!("{text}\n  at {place}"), trace: world.trace() }
    })
}

/// Runs `plan` once for every step of its first life and both kinds of crash.
///
/// # Errors
/// The first finding, with the step and the kind of crash.
pub fn explore_every_step<S: Subject + Clone>(subject: &S, plan: &Plan, options: &Options) -> Result<u64, Finding> {
    let steps = explore(subject.clone(), plan.clone(), options)?.first_life_steps;
    for step in 0..steps {
        for crash in [Crash::Death, Crash::PowerCut] {
            let mut plan = plan.clone();
            (plan.lives[0].crash_at, plan.lives[0].crash) = (Some(step), crash);
            explore(subject.clone(), plan, options).map_err(|mut finding| {
                finding.message = format!("{crash:?} at step {step}: {}", finding.message);
                finding
            })?;
        }
    }
    Ok(steps)
}

struct Run<S: Subject> {
    world: World,
    subject: Rc<S>,
    plan: Rc<Plan>,
    oracle: Rc<RefCell<Oracle>>,
    rng: Rng,
    sabotage: Sabotage,
    summary: Summary,
}

/// A value that a task leaves for its caller.
type Slot<T> = Rc<RefCell<Option<T>>>;

impl<S: Subject> Run<S> {
    fn new(world: World, subject: S, plan: Plan, options: &Options) -> Self {
        let oracle = Rc::new(RefCell::new(Oracle::default()));
        let rng = Rng::new(plan.seed).split(20);
        let (subject, plan) = (Rc::new(subject), Rc::new(plan));
        let (sabotage, summary) = (options.sabotage.clone(), Summary::default());
        Self { world, subject, plan, oracle, rng, sabotage, summary }
    }

    fn all(&mut self) -> Summary {
        let last = self.subject.layers() - 1;
        for layer in 0..last {
            self.create(layer);
            let life = self.parents_life(layer);
            self.life(layer, &life);
            self.age(layer);
        }
        self.create(last);
        for (at, life) in self.plan.clone().lives.iter().enumerate() {
            self.world.set_sabotage(self.sabotage.clone());
            let steps = self.life(last, life);
            self.world.set_sabotage(Sabotage::None);
            if at == 0 {
                self.summary.first_life_steps = steps;
                self.age(last);
            }
        }
        self.life(last, &Life::quiet(10, 3));
        self.life(last, &Life::quiet(0, 3));
        let (subject, world) = (self.subject.clone(), self.world.clone());
        let ended = block_on(&self.world, async move { subject.end(&world).await });
        ended.unwrap_or_else(|what| panic!("at the end of all: {what}"));
        self.summary.trace_hash = self.world.trace_hash();
        self.summary
    }

    /// A short life that leaves data in a layer that becomes a parent. Some end in a crash: a snapshot may follow one.
    fn parents_life(&self, layer: usize) -> Life {
        let mut rng = Rng::new(self.plan.seed).split(40 + layer as u64);
        let mut life = Life::quiet(40, 3);
        if rng.chance(1, 2) {
            life.crash_at = Some(rng.between(20, 600));
            life.crash = if rng.chance(1, 4) { Crash::PowerCut } else { Crash::Death };
        }
        life
    }

    fn create(&mut self, layer: usize) {
        let (subject, world) = (self.subject.clone(), self.world.clone());
        let made = block_on(&self.world, async move { subject.create(&world, layer).await });
        made.unwrap_or_else(|error| panic!("cannot create layer {layer}: {error:?}"));
        // A new image is durable once it is made. Data that an earlier life left in the layers below may not be.
        self.world.settle(&self.subject.path(layer));
    }

    fn age(&self, layer: usize) {
        let (subject, world) = (self.subject.clone(), self.world.clone());
        let aged = block_on(&self.world, async move { subject.age(&world, layer).await });
        aged.unwrap_or_else(|error| panic!("layer {layer} cannot be made older: {error:?}"));
    }

    fn check(&self, clean: bool) {
        let (subject, world) = (self.subject.clone(), self.world.clone());
        let checked = block_on(&self.world, async move { subject.check(&world, clean).await });
        checked.unwrap_or_else(|what| panic!("the check (clean: {clean}) found: {what}"));
    }

    /// One life of the process. Returns the number of its steps.
    fn life(&mut self, layer: usize, life: &Life) -> u64 {
        let limit = life.crash_at.unwrap_or(u64::MAX);
        let mut executor = Executor::new(self.world.clone(), Rng::new(self.rng.word()));
        self.world.set_faults(life.faults.clone());
        let faults_before = self.world.faults_fired();
        let closed = self.phases(&mut executor, layer, life, limit);
        let steps = executor.steps();
        self.summary.steps += steps;
        let by_crash = closed.is_none() || life.crash_at.is_some() || self.rng.chance(1, 4);
        let crash = if by_crash { Some(life.crash) } else { None };
        let clean = closed.is_some() && self.world.faults_fired() == faults_before;
        self.end(executor, crash);
        self.world.set_faults(Faults::default());
        if layer + 1 == self.subject.layers() {
            self.check(clean);
        }
        steps
    }

    /// The process or the host ends. The world ends first, so that tasks have no effect on it while they are dropped.
    fn end(&mut self, executor: Executor, crash: Option<Crash>) {
        self.world.end(crash);
        drop(executor);
        if let Some(crash) = crash {
            self.oracle.borrow_mut().crash(crash);
            self.summary.crashes += 1;
        }
    }

    /// Opens the image, verifies it, runs the workload, verifies again, and closes. `None` when the life was stopped
    /// before its end.
    fn phases(&mut self, executor: &mut Executor, layer: usize, life: &Life, limit: u64) -> Option<()> {
        let work = self.open(executor, layer, life, limit)?;
        if life.verify_first {
            executor.spawn(work.clone().verify(Rng::new(self.rng.word()), false));
            executor.finish(limit)?;
        }
        let clients = life.clients.min(life.requests.max(1));
        for _ in 0..clients {
            let rng = Rng::new(self.rng.word());
            executor.spawn(work.clone().client(rng, life.requests.div_ceil(clients)));
        }
        executor.finish(limit)?;
        let whole = life.crash_at.is_none() && work.disk.info().size_bytes <= 4 << 20;
        executor.spawn(work.clone().verify(Rng::new(self.rng.word()), whole));
        executor.finish(limit)?;
        executor.spawn(work.close());
        executor.finish(limit)
    }

    fn open(
        &mut self,
        executor: &mut Executor,
        layer: usize,
        life: &Life,
        limit: u64,
    ) -> Option<Rc<Workload<S::Disk>>> {
        let faults_before = self.world.faults_fired();
        let slot: Slot<_> = Rc::default();
        let (subject, world, into) = (self.subject.clone(), self.world.clone(), slot.clone());
        executor.spawn(async move {
            let opened = subject.open(&world, layer).await;
            *into.borrow_mut() = Some(opened);
        });
        executor.finish(limit)?;
        let disk = match slot.take()? {
            Ok(disk) => disk,
            Err(error) => {
                let fired = self.world.faults_fired() > faults_before;
                assert!(fired, "the open failed without a fault: {error:?}");
                return None;
            }
        };
        let only_syncs_fail = life.faults.only_syncs_fail();
        let (world, oracle, plan) = (self.world.clone(), self.oracle.clone(), self.plan.clone());
        let (is_exchanged, flush_failed) = (false, Rc::default());
        let waits = false;
        let work =
            Workload { disk, world, oracle, plan, faults_before, only_syncs_fail, is_exchanged, waits, flush_failed };
        Some(Rc::new(work))
    }
}
