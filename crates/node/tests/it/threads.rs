//! Real threads: requests from several workers while graphs are exchanged as fast as can be.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::task::{Context, Poll, Wake};
use std::thread::{self, Thread};

use spile_core::{Disk, DiskInfo, Epoch, Extent, ExtentStatus, Io, Result, act_as_shard};
use spile_node::{Node, exchange};

const THREADS: u64 = 4;
const EXCHANGES: u64 = 2_000;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Arc::new(Unpark(thread::current())).into();
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}

/// A graph that knows its number, and notices a request that comes after its epoch has ended.
struct Numbered {
    number: u64,
    last_seen: Arc<AtomicU64>,
    is_over: AtomicBool,
    requests: AtomicU64,
}

impl Numbered {
    fn new(number: u64, last_seen: &Arc<AtomicU64>) -> Self {
        let (is_over, requests) = (AtomicBool::new(false), AtomicU64::new(0));
        Self { number, last_seen: last_seen.clone(), is_over, requests }
    }
}

impl Disk for Numbered {
    fn info(&self) -> DiskInfo {
        crate::common::TestGraph::new().info
    }

    async fn execute(&self, _: Io<'_>) -> Result<()> {
        for _ in 0..2 {
            assert!(!self.is_over.load(SeqCst), "a request runs in an epoch that has ended");
            self.requests.fetch_add(1, SeqCst);
            thread::yield_now();
        }
        self.last_seen.fetch_max(self.number, SeqCst);
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

/// Each round exchanges both disks at once, waits for the old epochs, and says that they are over.
fn exchange_often(disks: &[Node<Numbered>; 2], seen: &[Arc<AtomicU64>; 2]) {
    for number in 1..=EXCHANGES {
        let [a, b] = [0, 1].map(|disk| Arc::new(Numbered::new(number, &seen[disk])));
        let changes = match number % 2 {
            0 => vec![(&disks[0], a), (&disks[1], b)],
            _ => vec![(&disks[1], b), (&disks[0], a)],
        };
        for epoch in block_on(exchange(changes)).unwrap() {
            block_on(epoch.ended());
            epoch.graph().is_over.store(true, SeqCst);
        }
    }
}

/// A write to one disk, then one to the other: the second must not meet an older graph than the first was seen to meet.
fn depend(disks: &[Node<Numbered>; 2], seen: &[Arc<AtomicU64>; 2], is_over: &AtomicBool, first: usize) {
    while !is_over.load(SeqCst) {
        block_on(disks[first].flush()).unwrap();
        let before = seen[first].load(SeqCst);
        block_on(disks[1 - first].flush()).unwrap();
        let after = seen[1 - first].load(SeqCst);
        assert!(after >= before, "a request met graph {after} after one that had met {before}");
    }
}

#[test]
fn no_request_outlives_its_epoch_and_none_falls_between_two_disks() {
    let seen: [Arc<AtomicU64>; 2] = Default::default();
    let disks = [0, 1].map(|disk| Node::new(Numbered::new(0, &seen[disk])));
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let (disks, seen, is_over) = (&disks, &seen, &is_over);
        let workers: Vec<_> =
            (0..THREADS).map(|number| scope.spawn(move || depend(disks, seen, is_over, number as usize % 2))).collect();
        let exchanging = scope.spawn(move || exchange_often(disks, seen));
        let result = exchanging.join();
        is_over.store(true, SeqCst);
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        result.unwrap();
    });
    let last = block_on(disks[0].graph());
    assert_eq!(last.number, EXCHANGES);
}

/// More threads than shards: one that looks at the graph shares its shard with a worker that does requests.
#[test]
fn the_graph_can_be_looked_at_while_another_thread_enters_it() {
    let node = Node::new(Numbered::new(7, &Arc::default()));
    let is_over = AtomicBool::new(false);
    let requests = || {
        act_as_shard(1);
        (0..200_000).for_each(|_| drop(block_on(node.extents(crate::common::at(0, 512), 1)).unwrap()));
        is_over.store(true, SeqCst);
    };
    thread::scope(|scope| {
        scope.spawn(requests);
        act_as_shard(1);
        while !is_over.load(SeqCst) {
            assert!(node.graph_now().is_some(), "no exchange is under way");
        }
    });
}
