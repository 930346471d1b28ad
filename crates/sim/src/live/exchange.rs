//! The tasks of [`super`] that exchange graphs, and judge what the old leaves hold.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use futures_util::future::join;
use spile_core::{Disk, Error, ErrorKind, Extent, Result, Segments};
use spile_image::{OpenOptions, open_layer};
use spile_node::{OldEpoch, close_gates};

use super::graph::{Broken, LiveGraph};
use super::{Frozen, Host, LiveNode};
use crate::oracle::{Crash, Oracle};
use crate::rng::Rng;

/// The bytes of a number, at the start of the part of each disk that its oracle does not watch.
const NUMBER_BYTES: u64 = 4096;

/// An image in a chain, just exchanged.
struct Exchanged {
    disk: usize,
    generation: usize,
    oracle: Oracle,
    epoch: OldEpoch<LiveGraph>,
}

/// Disks by their numbers, and the graphs that they are to have.
type NewGraphs = Vec<(usize, Arc<LiveGraph>)>;

impl Host {
    fn numbers_at() -> Extent {
        Extent::from_range(0..NUMBER_BYTES)
    }

    /// Numbers of this life are larger than those of the lives before.
    fn first_number(&self) -> u64 {
        self.life.get() << 32
    }

    /// Writes each number to all disks, to the next one when it is acknowledged by the one before.
    pub(super) async fn write_numbers(self: Rc<Self>, nodes: Vec<LiveNode>) {
        for number in 0.. {
            if !self.is_exchanging.get() {
                return;
            }
            for node in &nodes {
                let page = Segments::zeroed(NUMBER_BYTES as usize);
                page.copy_from_slice(0, &(self.first_number() + number).to_le_bytes());
                if let Err(error) = node.write(Self::numbers_at(), &page, false).await {
                    // The next disk must not have what this one may lack.
                    self.accept("the write of a number", &error);
                    break;
                }
            }
        }
    }

    async fn number_of(&self, graph: &LiveGraph) -> Result<u64> {
        let page = Segments::zeroed(NUMBER_BYTES as usize);
        graph.read(Self::numbers_at(), &page).await?;
        let mut number = [0; 8];
        page.copy_to_slice(0, &mut number);
        Ok(u64::from_le_bytes(number))
    }

    /// Exchanges some of the disks, `rounds` times; each round's old leaves are sealed while the next round goes on.
    pub(super) fn exchanges(
        self: Rc<Self>,
        nodes: Vec<LiveNode>,
        mut rng: Rng,
        rounds: u64,
    ) -> Pin<Box<dyn Future<Output = ()>>> {
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

    /// Puts a new leaf on each of `disks`, all at one point in time; on none of them when one fails.
    async fn exchange(&self, nodes: &[LiveNode], disks: &[usize], rng: &mut Rng) -> Vec<Exchanged> {
        let mut graphs = Vec::new();
        for &disk in disks {
            match self.with_new_leaf(&nodes[disk], disk, rng).await {
                Ok(graph) => graphs.push((disk, Arc::new(graph))),
                Err(error) => {
                    self.accept_refusal(&error);
                    return Vec::new();
                }
            }
        }
        let at_once = if self.broken == Broken::OneByOne { 1 } else { disks.len().max(1) };
        let mut exchanged = Vec::new();
        for group in graphs.chunks(at_once) {
            exchanged.extend(self.exchange_at_once(nodes, group.to_vec(), rng).await);
            pause(rng, if self.broken == Broken::OneByOne { 200 } else { 30 }).await;
        }
        exchanged
    }

    async fn exchange_at_once(&self, nodes: &[LiveNode], group: NewGraphs, rng: &mut Rng) -> Vec<Exchanged> {
        let changes = group.iter().map(|(disk, graph)| (&*nodes[*disk], graph.clone())).collect();
        let gates = match close_gates(changes).await {
            Ok(gates) => gates,
            Err(error) => {
                self.accept_refusal(&error);
                return Vec::new();
            }
        };
        // From here on the disks' paths lead to the new leaves. No disk can grow before the gates are open.
        group.iter().for_each(|(disk, _)| self.disks[*disk].leaf.set(self.disks[*disk].leaf.get() + 1));
        pause(rng, 30).await;
        let oracles: Vec<_> = group.iter().map(|(disk, _)| self.disks[*disk].oracle.borrow().clone()).collect();
        let opened = gates.open().into_iter().zip(oracles).zip(group);
        let exchanged: Vec<_> = opened
            .map(|((epoch, oracle), (disk, _))| {
                let generation = self.disks[disk].leaf.get() - 1;
                Exchanged { disk, generation, oracle, epoch }
            })
            .collect();
        self.count(|summary| summary.exchanges += exchanged.len() as u64);
        exchanged
    }

    /// An exchange may fail by a fault, or because a disk has grown since its new leaf was made.
    fn accept_refusal(&self, error: &Error) {
        self.count(|summary| summary.failed += 1);
        let has_grown = error.kind() == ErrorKind::InvalidInput && self.summary.get().grown > 0;
        if !has_grown {
            self.accept("an exchange", error);
        }
    }

    /// The disk's graph with a new image on top. The disk may grow while it is made.
    async fn with_new_leaf(&self, node: &LiveNode, disk: usize, rng: &mut Rng) -> Result<LiveGraph> {
        let (old, size_bytes) = (node.graph().await, node.info().size_bytes);
        let uuid = old.graph.layers()[0].identity.map_or([0; 16], |identity| identity.0);
        let generation = self.disks[disk].leaf.get() + 1;
        self.create(disk, generation, size_bytes, Some(uuid)).await?;
        pause(rng, 60).await;
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
            let sealed = seal_all(&old).await;
            epoch.ended().await;
            // What was in flight at the exchange has ended: it is in the old leaf or it is not.
            match self.world.faults_fired() > self.faults_before.get() {
                true => oracle.fail_in_flight(),
                false => oracle.crash(Crash::Death),
            }
            if sealed.is_ok() {
                let flushed = oracle.begin_flush();
                oracle.end_flush(flushed);
            }
            let oracle = Rc::new(RefCell::new(oracle));
            self.workload(old.clone(), &oracle, false).verify(rng.split(1), false).await;
            match self.number_of(&old).await {
                Ok(number) => numbers.push((disk, number)),
                Err(error) => self.accept("the read of a number", &error),
            }
            pause(&mut rng, 200).await;
            self.workload(old, &oracle, false).verify(rng.split(2), false).await;
            match sealed {
                Ok(()) => {
                    self.frozen.borrow_mut().push(Frozen { disk, generation, oracle });
                    self.count(|summary| summary.sealed += 1);
                }
                // Nothing more is promised of it; the disk's flushes go on to cover it.
                Err(error) => self.accept("a sealing", &error),
            }
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

/// Seals every layer of a graph that nobody writes to any more, lowest first.
async fn seal_all(graph: &LiveGraph) -> Result<()> {
    graph.graph.seal_parents().await?;
    graph.graph.handles()[0].seal().await
}

/// Lets up to `most` steps of this task pass.
pub(crate) async fn pause(rng: &mut Rng, most: u64) {
    turns(rng.skewed(most)).await;
}

/// Lets others run so many times.
pub(crate) async fn turns(mut left: u64) {
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
