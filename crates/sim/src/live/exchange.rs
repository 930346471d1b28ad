//! The tasks of [`super`] that exchange graphs, and judge what the old leaves hold.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::future::join;
use spile_core::{Disk, Error, Extent, Result, Segments};
use spile_life::set::Set;
use spile_life::snapshot::{self, Made, Plan};
use spile_node::{OldEpoch, close_gates};

use super::brink::Place;
use super::graph::{Broken, LiveGraph};
use super::{Frozen, Host, LiveNode};
use crate::exec::spawn_beside;
use crate::oracle::{Crash, Oracle};
use crate::rng::Rng;
use crate::store::SimStore;
use crate::turns::pause;

/// The bytes of a number, at the start of the part of each disk that its oracle does not watch.
const NUMBER_BYTES: u64 = 4096;

/// An image in a chain, just exchanged.
pub(super) struct Exchanged {
    pub disk: usize,
    pub made: Made<SimStore>,
    pub oracle: Oracle,
    pub epoch: OldEpoch<LiveGraph>,
    /// The graph right over it.
    pub new: Arc<LiveGraph>,
}

/// A disk by its number, its snapshot, and the graph that it is to have.
type NewGraph = (usize, Made<SimStore>, Arc<LiveGraph>);

impl Host {
    pub(super) fn numbers_at() -> Extent {
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
                    // The next disk must not have what this one may lack. Nor is it tried again: a disk without room answers at
                    // once, and the rest of the host would never get a turn.
                    self.accept("the write of a number", &error);
                    return;
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

    /// Has `to` hold the number that `from` holds.
    pub(super) async fn copy_number(&self, from: &LiveGraph, to: &LiveGraph) -> Result<()> {
        let page = Segments::zeroed(NUMBER_BYTES as usize);
        from.read(Self::numbers_at(), &page).await?;
        to.write(Self::numbers_at(), &page, false).await
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
            disks.retain(|disk| self.disks[*disk].claim(self.broken));
            if rng.chance(1, 2) {
                disks.reverse();
            }
            let exchanged = self.exchange(&nodes, &disks, &mut rng).await;
            disks.iter().for_each(|disk| self.disks[*disk].is_claimed.set(false));
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
        let mut plans = Vec::new();
        for &disk in disks {
            plans.push((disk, self.plan(&nodes[disk], disk).await));
        }
        let paths: Vec<_> = plans.iter().map(|(_, plan)| plan.snapshot().to_owned()).collect();
        self.sets.borrow_mut().push(paths.clone());
        let set = match self.broken {
            Broken::SetNotNoted => None,
            _ => match Set::begin(&self.files(), &paths).await {
                Ok(set) => Some(set),
                Err(error) => {
                    self.accept_refusal(&error);
                    return Vec::new();
                }
            },
        };
        let exchanged = self.exchange_planned(nodes, plans, rng).await;
        let ended = match set {
            Some(set) => set.end(&self.files(), !exchanged.is_empty()).await,
            None => Ok(()),
        };
        match ended {
            // What could not be taken back stays, with its note.
            Ok(()) if exchanged.is_empty() && self.has_faults() => {}
            Ok(()) => self.sets.borrow_mut().retain(|set| *set != paths),
            Err(error) => self.accept("the end of a set's notes", &error),
        }
        exchanged
    }

    async fn exchange_planned(&self, nodes: &[LiveNode], plans: Vec<(usize, Plan)>, rng: &mut Rng) -> Vec<Exchanged> {
        let (mut graphs, count) = (Vec::new(), plans.len());
        for (disk, plan) in plans {
            match self.with_new_leaf(&nodes[disk], &plan, rng).await {
                Ok((made, graph)) => graphs.push((disk, made, Arc::new(graph))),
                Err(error) => {
                    self.accept_refusal(&error);
                    self.take_back(graphs).await;
                    return Vec::new();
                }
            }
        }
        let at_once = if self.broken == Broken::OneByOne { 1 } else { count.max(1) };
        let mut exchanged = Vec::new();
        while !graphs.is_empty() {
            let group = graphs.drain(..at_once.min(graphs.len())).collect();
            exchanged.extend(self.exchange_at_once(nodes, group, rng).await);
            pause(rng, if self.broken == Broken::OneByOne { 200 } else { 30 }).await;
        }
        exchanged
    }

    async fn take_back(&self, graphs: Vec<NewGraph>) {
        for (_, made, _) in graphs {
            if let Err(error) = snapshot::take_back(&self.files(), &made).await {
                self.accept("the way back from a snapshot", &error);
            }
        }
    }

    async fn exchange_at_once(&self, nodes: &[LiveNode], group: Vec<NewGraph>, rng: &mut Rng) -> Vec<Exchanged> {
        let changes = group.iter().map(|(disk, _, graph)| (&*nodes[*disk], graph.clone())).collect();
        let gates = match close_gates(changes).await {
            Ok(gates) => gates,
            Err(error) => {
                self.accept_refusal(&error);
                self.take_back(group).await;
                return Vec::new();
            }
        };
        pause(rng, 30).await;
        let oracles: Vec<_> = group.iter().map(|(disk, ..)| self.disks[*disk].oracle.borrow().clone()).collect();
        let opened = gates.open().into_iter().zip(oracles).zip(group);
        let exchanged: Vec<_> =
            opened.map(|((epoch, oracle), (disk, made, new))| Exchanged { disk, made, oracle, epoch, new }).collect();
        self.count(|summary| summary.exchanges += exchanged.len() as u64);
        if self.brink.at(Place::Exchanged) {
            // What a flush promises right then is what a new graph may break.
            for one in &exchanged {
                let disk = nodes[one.disk].clone();
                let work = self.workload(disk, &self.disks[one.disk].oracle, self.waits.get());
                spawn_beside(Box::pin(async move { work.flush().await }));
            }
        }
        for one in &exchanged {
            self.note_image(one.disk).await;
        }
        exchanged
    }

    /// A snapshot may fail by a fault.
    fn accept_refusal(&self, error: &Error) {
        self.count(|summary| summary.failed += 1);
        self.accept("a snapshot", error);
    }

    pub(super) async fn plan(&self, node: &LiveNode, disk: usize) -> Plan {
        let number = self.disks[disk].snapshots.replace(self.disks[disk].snapshots.get() + 1);
        let layers = node.graph().await.graph.layers();
        let plan = Plan::new(&layers, None, &format!("disk{disk}-{number}"), &[]);
        plan.unwrap_or_else(|error| panic!("a snapshot cannot be planned: {error:?}"))
    }

    /// The disk's graph with a new image on top, whose file has the disk's path. The disk may grow while it is made.
    async fn with_new_leaf(&self, node: &LiveNode, plan: &Plan, rng: &mut Rng) -> Result<(Made<SimStore>, LiveGraph)> {
        let old = node.graph().await;
        let prepared = snapshot::prepare(&self.files(), self.world.env(), &(), &old.graph, plan).await?;
        pause(rng, 60).await;
        let (made, graph) = prepared.into_parts();
        Ok((made, LiveGraph { graph, broken: self.broken }))
    }

    /// Waits for the old epochs, seals their leaves, and judges what these hold, twice.
    pub(super) async fn seal(self: Rc<Self>, exchanged: Vec<Exchanged>, mut rng: Rng) {
        let mut numbers = Vec::new();
        for Exchanged { disk, made, mut oracle, epoch, new } in exchanged {
            let old = epoch.graph().clone();
            if self.broken != Broken::SealedEarly {
                epoch.ended().await;
            }
            let sealed = snapshot::settle(&self.files(), &made, &new.graph).await;
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
                    self.brink.at(Place::Sealed);
                    let path = made.plan().snapshot().to_owned();
                    self.frozen.borrow_mut().push(Frozen { disk, path, oracle });
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
