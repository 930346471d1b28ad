//! The checkpoints of the disks of [`super`]: what is noted of their changes, by requests and by ways back.
//!
//! A way back changes a disk without a request. So what differs counts as changed before the disk goes back, and nobody makes a checkpoint in between.

use std::path::PathBuf;
use std::rc::Rc;

use async_lock::MutexGuardArc;
use spile_core::Result;
use spile_image::Graph;
use spile_life::changes::Changes;
use spile_life::revert::Noting;

use super::graph::{Broken, LiveGraph};
use super::{Host, LiveNode};
use crate::exec::{Ended, Executor};
use crate::motion::marks::{OnTop, Tracking, around, found_at};
use crate::rng::Rng;
use crate::store::{SimFiles, SimStore};

/// True for the seeds in which disks have checkpoints. The other seeds stay what they were before there were any.
pub(super) fn has_checkpoints(seed: u64) -> bool {
    seed.is_multiple_of(7)
}

impl OnTop for LiveGraph {
    fn path(&self) -> PathBuf {
        self.graph.path()
    }
}

/// What is noted of a way back of a disk that is used.
pub(super) struct Noted<'a> {
    tracking: &'a Tracking,
    broken: Broken,
}

impl Noting<SimStore> for Noted<'_> {
    type Turn = Option<MutexGuardArc<()>>;

    async fn note_difference(&self, from: &Graph<SimStore>, to: &Graph<SimStore>) -> Result<Self::Turn> {
        let turn = self.tracking.turn().await;
        let changes = self.tracking.tracker.borrow().clone();
        if let Some(changes) = changes {
            if self.broken != Broken::BackNotedLate {
                changes.note_difference(from, to).await?;
            }
            // The disk gets a number of its own.
            changes.note_surely(&[Host::numbers_at()]).await?;
        }
        Ok((self.broken != Broken::BackBesideCheckpoints).then_some(turn))
    }
}

impl Host {
    /// What is noted when this disk goes back.
    pub(super) fn noted(&self, disk: usize) -> Noted<'_> {
        Noted { tracking: &self.disks[disk].tracking, broken: self.broken }
    }

    /// The changed blocks of a disk that was just opened, and what they say.
    pub(super) async fn open_noted(&self, disk: usize, node: &LiveNode) {
        if has_checkpoints(self.plan.seed) {
            let tracking = &self.disks[disk].tracking;
            tracking.open(node).await;
            tracking.check(node, true, &|| self.has_faults()).await;
        }
    }

    /// Has users make, remove and look at checkpoints of the disks.
    pub(super) fn use_noted(self: &Rc<Self>, executor: &mut Executor, nodes: &[LiveNode]) {
        if !has_checkpoints(self.plan.seed) {
            return;
        }
        for (disk, node) in nodes.iter().cloned().enumerate() {
            let mut rng = self.noted_rng.borrow_mut();
            let (host, uses) = (self.clone(), (rng.below(30), Rng::new(rng.word())));
            executor.spawn(async move {
                let tracking = &host.disks[disk].tracking;
                tracking.be_used(&node, uses, &|| host.has_faults(), &|| true).await;
            });
        }
    }

    /// The disk `node` has another image on top.
    pub(super) async fn note_image(&self, disk: usize) {
        let changes = self.disks[disk].tracking.tracker.borrow().clone();
        if let Some(changes) = changes
            && let Err(error) = changes.note_image(found_at(&self.world, &self.path(disk)).stamp).await
        {
            self.accept("the note of a new image", &error);
        }
    }

    /// The disk, whose graph was `from`, has gone back to `to` while it was used.
    pub(super) async fn note_way_back(&self, disk: usize, from: &Graph<SimStore>, to: &Graph<SimStore>) -> Result<()> {
        self.note_image(disk).await;
        let changes = self.disks[disk].tracking.tracker.borrow().clone();
        let Some(changes) = changes else { return Ok(()) };
        let has_some = !changes.names().await.0.is_empty();
        self.count(|summary| summary.went_back_noted += u64::from(has_some));
        if self.broken == Broken::BackNotedLate {
            changes.note_difference(from, to).await?;
        }
        Ok(())
    }

    /// Runs the work of a life. In many lives that have checkpoints the process ends soon after these know that a disk has gone back: before, everything
    /// would count as changed.
    pub(super) fn run_to_way_back(&self, executor: &mut Executor, limit: u64) -> Option<()> {
        let (is_armed, times, later) = {
            let mut rng = self.noted_rng.borrow_mut();
            (has_checkpoints(self.plan.seed) && rng.chance(1, 2), rng.between(1, 4), rng.below(8))
        };
        let went_back = || self.summary.get().went_back_noted;
        let (until, mut limit) = (went_back() + times, limit);
        while is_armed && went_back() < until {
            match executor.run(limit.min(executor.steps() + 2)) {
                Ended::Stopped if !executor.is_at_end(limit) => {}
                _ => break,
            }
        }
        if is_armed && went_back() >= until {
            limit = limit.min(executor.steps() + later);
        }
        executor.finish(limit)
    }

    /// Closes the changed blocks of a disk that is closed.
    pub(super) async fn close_noted(&self, disk: usize, node: &LiveNode) {
        let tracking = &self.disks[disk].tracking;
        let closed = tracking.close(&*node.graph().await).await;
        if let Err(error) = closed {
            self.accept("the close of changed blocks", &error);
        }
        tracking.tracker.take();
    }

    /// The changed blocks of a disk that nobody uses, whose graph is `graph`.
    pub(super) async fn changes_of(&self, disk: usize, graph: &Graph<SimStore>) -> Result<Option<Changes<SimFiles>>> {
        use spile_core::Disk as _;
        if !has_checkpoints(self.plan.seed) {
            return Ok(None);
        }
        let (path, around) = (self.path(disk), around(&self.world, self.disks[disk].tracking.broken));
        Changes::open(around, &path, graph.info().size_bytes, found_at(&self.world, &path)).await
    }
}
