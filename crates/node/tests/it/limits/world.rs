//! Guests and a clock that a test moves on: time passes when no guest has anything to do.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use spile_core::{Disk, DiskInfo, Epoch, Extent, ExtentStatus, Io, Result, Segments, Timer};
use spile_node::{DiskLimits, Limits, Node};

pub const SECOND: u64 = 1_000_000_000;
pub const SIZE: u64 = 1 << 30;

/// A graph that does nothing, at once.
pub struct Nothing;

impl Disk for Nothing {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            size_bytes: SIZE,
            request_align_bytes: 1,
            memory_align_bytes: 1,
            preferred_bytes: 4096,
            discard_align_bytes: 4096,
            read_only: false,
            fast_zero: true,
        }
    }

    async fn execute(&self, _: Io<'_>) -> Result<()> {
        Ok(())
    }

    async fn extents(&self, _: Extent, _: usize) -> Result<Vec<ExtentStatus>> {
        Ok(Vec::new())
    }

    async fn resize(&self, _: u64) -> Result<()> {
        Ok(())
    }

    fn follows(&self, _: &[Arc<dyn Epoch>]) {}

    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

pub type TestNode = Arc<Node<Nothing>>;

/// The clock, with those who wait for a moment.
#[derive(Default)]
pub struct Clock {
    now_ns: AtomicU64,
    /// So much later than asked does a sleep end, as on a busy host.
    pub late_ns: AtomicU64,
    sleepers: Mutex<Vec<Arc<Sleeper>>>,
}

struct Sleeper {
    end_ns: u64,
    waker: Mutex<Waker>,
    is_gone: AtomicBool,
}

impl Clock {
    pub fn now_ns(&self) -> u64 {
        self.now_ns.load(SeqCst)
    }

    /// How many wait for a moment.
    pub fn sleepers(&self) -> usize {
        let mut sleepers = self.sleepers.lock().unwrap();
        sleepers.retain(|sleeper| !sleeper.is_gone.load(SeqCst));
        sleepers.len()
    }

    fn next_ns(&self) -> Option<u64> {
        self.sleepers();
        self.sleepers.lock().unwrap().iter().map(|sleeper| sleeper.end_ns).min()
    }

    /// Moves on, and wakes whoever waits for a moment up to `now_ns`.
    pub fn go_to(&self, now_ns: u64) {
        self.now_ns.store(now_ns, SeqCst);
        let mut sleepers = self.sleepers.lock().unwrap();
        for due in sleepers.extract_if(.., |sleeper| sleeper.end_ns <= now_ns) {
            due.waker.lock().unwrap().wake_by_ref();
        }
    }
}

/// The clock as a disk has it.
pub struct TestTimer(pub Arc<Clock>);

struct Sleep(Arc<Clock>, Arc<Sleeper>);

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.1.waker.lock().unwrap().clone_from(cx.waker());
        if self.0.now_ns() >= self.1.end_ns { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.1.is_gone.store(true, SeqCst);
    }
}

impl TestTimer {
    fn sleep_until(&self, end_ns: u64) -> Pin<Box<dyn Future<Output = ()>>> {
        let sleeper = Sleeper { end_ns, waker: Mutex::new(Waker::noop().clone()), is_gone: AtomicBool::new(false) };
        let sleeper = Arc::new(sleeper);
        self.0.sleepers.lock().unwrap().push(sleeper.clone());
        Box::pin(Sleep(self.0.clone(), sleeper))
    }
}

impl Timer for TestTimer {
    fn sleep(&self, time: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        self.sleep_until(self.now_ns() + time.as_nanos() as u64 + self.0.late_ns.load(SeqCst))
    }

    fn now_ns(&self) -> u64 {
        self.0.now_ns()
    }
}

/// The clock for others than the limits: it is never late.
pub struct Punctual(pub Arc<TestTimer>);

impl Timer for Punctual {
    fn sleep(&self, time: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        self.0.sleep_until(self.0.now_ns() + time.as_nanos() as u64)
    }

    fn now_ns(&self) -> u64 {
        self.0.now_ns()
    }
}

/// True when a task is to be polled.
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, SeqCst);
    }
}

type Task = Pin<Box<dyn Future<Output = ()>>>;

#[derive(Default)]
pub struct World {
    pub clock: Arc<Clock>,
    tasks: Vec<(Option<Task>, Arc<Flag>)>,
    /// How often a task was polled.
    pub polls: u64,
}

impl World {
    pub fn timer(&self) -> Arc<TestTimer> {
        Arc::new(TestTimer(self.clock.clone()))
    }

    /// A disk with these limits.
    pub fn disk(&self, limits: Limits) -> TestNode {
        let node = Arc::new(Node::new(Nothing).with_limits(DiskLimits::new(self.timer())));
        crate::common::now(node.set_limits(limits)).unwrap();
        node
    }

    /// Adds a task. The result takes it away again.
    pub fn spawn(&mut self, task: impl Future<Output = ()> + 'static) -> usize {
        self.tasks.push((Some(Box::pin(task)), Arc::new(Flag(AtomicBool::new(true)))));
        self.tasks.len() - 1
    }

    pub fn drop_task(&mut self, task: usize) {
        self.tasks[task].0 = None;
    }

    /// A request that notes when it has ended.
    pub fn request(&mut self, node: &TestNode, what: What) -> Rc<Cell<Option<u64>>> {
        let (ended, node, clock) = (Rc::new(Cell::new(None)), node.clone(), self.clock.clone());
        let noted = ended.clone();
        self.spawn(async move {
            what.execute(&node).await.unwrap();
            noted.set(Some(clock.now_ns()));
        });
        ended
    }

    /// So many requests at once for ever, as `what` says by number. The result counts those that have ended, and their bytes.
    pub fn guest(
        &mut self,
        node: &TestNode,
        depth: usize,
        what: impl Fn(u64) -> What + 'static,
    ) -> Rc<Cell<(u64, u64)>> {
        let (counts, begun, what) = (Rc::new(Cell::new((0, 0))), Rc::new(Cell::new(0)), Rc::new(what));
        for _ in 0..depth {
            let (node, counts, begun, what) = (node.clone(), counts.clone(), begun.clone(), what.clone());
            self.spawn(async move {
                loop {
                    let what = what(begun.replace(begun.get() + 1));
                    what.execute(&node).await.unwrap();
                    let (requests, bytes) = counts.get();
                    counts.set((requests + 1, bytes + what.len_bytes()));
                }
            });
        }
        counts
    }

    /// Polls tasks until none has anything to do at this moment.
    pub fn settle(&mut self) {
        while self.poll_some() {}
    }

    fn poll_some(&mut self) -> bool {
        let mut has_polled = false;
        for (task, flag) in &mut self.tasks {
            let Some(future) = task.as_mut().filter(|_| flag.0.swap(false, SeqCst)) else { continue };
            has_polled = true;
            self.polls += 1;
            let waker = Waker::from(flag.clone());
            if future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                *task = None;
            }
        }
        has_polled
    }

    /// Lets time pass.
    pub fn run(&mut self, time_ns: u64) {
        let end_ns = self.clock.now_ns() + time_ns;
        self.settle();
        while let Some(next_ns) = self.clock.next_ns().filter(|next_ns| *next_ns <= end_ns) {
            self.clock.go_to(next_ns);
            self.settle();
        }
        self.clock.go_to(end_ns);
        self.settle();
    }
}

/// One request.
#[derive(Clone, Copy)]
pub enum What {
    Read(u64),
    Write(u64),
    Zeroes(u64),
    Discard(u64),
    Flush,
}

impl What {
    pub fn len_bytes(self) -> u64 {
        match self {
            Self::Read(len) | Self::Write(len) | Self::Zeroes(len) | Self::Discard(len) => len,
            Self::Flush => 0,
        }
    }

    /// Data are not moved: the graph does nothing.
    pub async fn execute(self, node: &Node<Nothing>) -> Result<()> {
        let (extent, memory) = (Extent::from_range(0..self.len_bytes()), Segments::new());
        match self {
            Self::Read(_) => node.execute(Io::read(extent, &memory)).await,
            Self::Write(_) => node.execute(Io::write(extent, &memory, false)).await,
            Self::Zeroes(_) => node.write_zeroes(extent, Default::default()).await,
            Self::Discard(_) => node.discard(extent).await,
            Self::Flush => node.flush().await,
        }
    }
}
