//! The seeded executor. It has one thread, which is several workers by turns, and does one thing in each step, chosen by
//! the seed: a task that was woken runs until it waits again, or an operation in flight goes on. The run can be stopped
//! between any two steps.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use spile_core::act_as_shard;

use crate::rng::Rng;
use crate::world::World;

/// The workers that the tasks belong to.
const WORKERS: usize = 3;

type Task = Pin<Box<dyn Future<Output = ()>>>;

thread_local! {
    /// What was begun beside the requests of the run on this thread, and is no task of the executor yet.
    static BESIDE: RefCell<Vec<(Process, Task)>> = const { RefCell::new(Vec::new()) };
    /// After how many more steps the run on this thread is to end, when a task has said so.
    static ENDS_IN: Cell<Option<u64>> = const { Cell::new(None) };
    /// The process whose task runs.
    static RUNNING: Cell<Process> = const { Cell::new(0) };
}

/// The number of a process among those of the run. All of its tasks end with it.
pub(crate) type Process = u32;

/// Adds a task to the run on this thread, of the process that runs now.
pub(crate) fn spawn_beside(work: Task) {
    spawn_in(RUNNING.get(), work);
}

/// Adds a task of this process to the run on this thread.
pub(crate) fn spawn_in(process: Process, work: Task) {
    BESIDE.with_borrow_mut(|beside| beside.push((process, work)));
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Every task finished.
    Done,
    /// The limit of steps was reached: the point of the crash.
    Stopped,
    /// Tasks are left, but nothing can wake them.
    Stuck,
}

/// Has the run on this thread end after so many more steps, as at its limit, if it does not end before.
pub(crate) fn end_in(steps: u64) {
    ENDS_IN.set(Some(steps));
}

/// The tasks of one run, and the simulated hosts that they run on.
pub struct Executor {
    worlds: Vec<World>,
    rng: Rng,
    tasks: Vec<Option<(Process, Task)>>,
    /// How many of them have not ended.
    alive: usize,
    woken: Arc<Woken>,
    steps: u64,
    /// The step at which a task has the run end.
    ends_at: u64,
}

/// The queue of tasks that were woken. Each task is in it at most once.
#[derive(Default)]
struct Woken {
    list: Mutex<Vec<usize>>,
}

impl Woken {
    fn with<T>(&self, f: impl FnOnce(&mut Vec<usize>) -> T) -> T {
        f(&mut self.list.lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
    }
}

struct TaskWaker {
    task: usize,
    woken: Arc<Woken>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.woken.with(|list| {
            if !list.contains(&self.task) {
                list.push(self.task);
            }
        });
    }
}

impl Executor {
    /// An executor whose choices come from `rng`.
    pub fn new(world: World, rng: Rng) -> Self {
        // What a run that was stopped has left there ended with its process.
        drop(BESIDE.take());
        ENDS_IN.take();
        Self {
            worlds: vec![world],
            rng,
            tasks: Vec::new(),
            alive: 0,
            woken: Arc::default(),
            steps: 0,
            ends_at: u64::MAX,
        }
    }

    /// Lets the operations of one more host go on in this run.
    pub(crate) fn add_world(&mut self, world: World) {
        self.worlds.push(world);
    }

    /// Adds a task.
    pub fn spawn(&mut self, future: impl Future<Output = ()> + 'static) {
        self.add(0, Box::pin(future));
    }

    /// Ends all tasks of a process, in the midst of what they do.
    pub(crate) fn end_process(&mut self, process: Process) {
        let (gone, kept): (Vec<_>, Vec<_>) = BESIDE.take().into_iter().partition(|(of, _)| *of == process);
        BESIDE.set(kept);
        drop(gone);
        for task in &mut self.tasks {
            if let Some(gone) = task.take_if(|(of, _)| *of == process) {
                self.alive -= 1;
                drop(gone);
            }
        }
    }

    fn add(&mut self, process: Process, task: Task) {
        self.tasks.push(Some((process, task)));
        self.alive += 1;
        let task = self.tasks.len() - 1;
        self.woken.with(|list| list.push(task));
    }

    /// The number of steps taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// True when `limit` steps have been taken in all, or a task has had the run end here.
    pub(crate) fn is_at_end(&self, limit: u64) -> bool {
        self.steps >= limit.min(self.ends_at)
    }

    /// As [`Self::run`]; `None` when the limit was met.
    ///
    /// # Panics
    /// When tasks are left that nothing will wake.
    pub fn finish(&mut self, limit: u64) -> Option<()> {
        match self.run(limit) {
            Ended::Done => Some(()),
            Ended::Stopped => None,
            Ended::Stuck => panic!("requests are left that nothing will wake"),
        }
    }

    /// Runs until all tasks are done, or `limit` steps have been taken in all.
    pub fn run(&mut self, limit: u64) -> Ended {
        while self.alive > 0 {
            if self.is_at_end(limit) {
                return Ended::Stopped;
            }
            let woken = self.woken.with(|list| list.len());
            let due = self.due(woken == 0);
            let all = woken + due.iter().sum::<usize>();
            if all == 0 {
                return Ended::Stuck;
            }
            self.steps += 1;
            let mut choice = self.rng.index(all);
            if choice < woken {
                self.poll(choice)
            } else {
                choice -= woken;
                for (world, due) in self.worlds.iter().zip(due) {
                    if choice < due {
                        world.advance(choice);
                        break;
                    }
                    choice -= due;
                }
            }
            BESIDE.take().into_iter().for_each(|(process, task)| self.add(process, task));
            if let Some(more) = ENDS_IN.take() {
                self.ends_at = self.ends_at.min(self.steps + more);
            }
        }
        Ended::Done
    }

    /// How many operations of each host can move on. When nothing can, and `idle` says that no task can either, the clock of one moves forward.
    fn due(&self, idle: bool) -> Vec<usize> {
        if let [world] = &self.worlds[..] {
            return vec![world.due(idle)];
        }
        let mut due: Vec<usize> = self.worlds.iter().map(|world| world.due(false)).collect();
        for (world, due_there) in self.worlds.iter().zip(0..) {
            if idle && due.iter().sum::<usize>() == 0 {
                due[due_there] = world.due(true);
            }
        }
        due
    }

    fn poll(&mut self, choice: usize) {
        let task = self.woken.with(|list| list.swap_remove(choice));
        let Some((process, future)) = &mut self.tasks[task] else { return };
        RUNNING.set(*process);
        let waker = Waker::from(Arc::new(TaskWaker { task, woken: self.woken.clone() }));
        // What workers do not share is found by this number.
        act_as_shard(task % WORKERS);
        if let Poll::Ready(()) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            self.tasks[task] = None;
            self.alive -= 1;
        }
    }
}

/// Runs one future to its end, without a crash.
///
/// # Panics
/// When the future waits for something that cannot happen.
pub fn block_on<T: 'static>(world: &World, future: impl Future<Output = T> + 'static) -> T {
    let seed = world.trace_hash();
    let out = std::rc::Rc::new(std::cell::RefCell::new(None));
    let into = out.clone();
    let mut executor = Executor::new(world.clone(), Rng::new(seed));
    executor.spawn(async move {
        let value = future.await;
        *into.borrow_mut() = Some(value);
    });
    let ended = executor.run(10_000_000);
    let value = out.borrow_mut().take();
    value.unwrap_or_else(|| panic!("the task did not finish: {ended:?}"))
}
