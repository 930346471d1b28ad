//! The seeded executor. It has one thread, which is several workers by turns, and does one thing in each step, chosen by
//! the seed: a task that was woken runs until it waits again, or an operation in flight goes on. The run can be stopped
//! between any two steps.

use std::cell::RefCell;
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
    static BESIDE: RefCell<Vec<Task>> = const { RefCell::new(Vec::new()) };
}

/// Adds a task to the run on this thread.
pub(crate) fn spawn_beside(work: Task) {
    BESIDE.with_borrow_mut(|beside| beside.push(work));
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

/// The tasks of one run, and the simulated host that they run on.
pub struct Executor {
    world: World,
    rng: Rng,
    tasks: Vec<Option<Task>>,
    woken: Arc<Woken>,
    steps: u64,
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
        Self { world, rng, tasks: Vec::new(), woken: Arc::default(), steps: 0 }
    }

    /// Adds a task.
    pub fn spawn(&mut self, future: impl Future<Output = ()> + 'static) {
        self.tasks.push(Some(Box::pin(future)));
        let task = self.tasks.len() - 1;
        self.woken.with(|list| list.push(task));
    }

    /// The number of steps taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
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
        while self.tasks.iter().any(Option::is_some) {
            if self.steps >= limit {
                return Ended::Stopped;
            }
            let woken = self.woken.with(|list| list.len());
            let due = self.world.due(woken == 0);
            if woken + due == 0 {
                return Ended::Stuck;
            }
            self.steps += 1;
            let choice = self.rng.index(woken + due);
            if choice < woken {
                self.poll(choice)
            } else {
                self.world.advance(choice - woken)
            }
            BESIDE.take().into_iter().for_each(|task| self.spawn(task));
        }
        Ended::Done
    }

    fn poll(&mut self, choice: usize) {
        let task = self.woken.with(|list| list.swap_remove(choice));
        let Some(future) = &mut self.tasks[task] else { return };
        let waker = Waker::from(Arc::new(TaskWaker { task, woken: self.woken.clone() }));
        // What workers do not share is found by this number.
        act_as_shard(task % WORKERS);
        if let Poll::Ready(()) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            self.tasks[task] = None;
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
