//! The way back: a disk goes back to what one of its snapshots holds, when the disks of a life are closed, or while clients work.
//!
//! The process may end at any step of it. Then the disk is as it was or has gone back, as its path tells; and once the way back has
//! succeeded, no crash undoes it.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use spile_core::{Disk, Result};
use spile_image::create::{NewImage, NewParent};
use spile_image::{Graph, OpenOptions};
use spile_life::revert::Back;

use super::exchange::Exchanged;
use super::files::LiveFiles;
use super::graph::{Broken, LiveGraph};
use super::noted::has_checkpoints;
use super::{Frozen, Host, LiveDisk, LiveNode};
use crate::motion::marks::found_at;
use crate::oracle::Oracle;
use crate::rng::Rng;
use crate::store::SimStore;
use crate::turns::pause;

/// A way back that was begun.
pub(super) struct GoingBack {
    /// The file that had the disk's path before.
    old_file: Option<usize>,
    /// What the disk holds when it has gone back.
    oracle: Oracle,
    size_bytes: u64,
    /// It has succeeded.
    is_done: bool,
}

/// So often a disk in use looks whether there is a snapshot that it can go back to.
const MOST_LOOKS: u32 = 60;

/// A snapshot that a disk may go back to.
struct Chosen {
    disk: usize,
    path: PathBuf,
    oracle: Oracle,
}

impl Host {
    fn choose(&self, rng: &mut Rng) -> Option<Chosen> {
        let frozen = self.frozen.borrow();
        (!frozen.is_empty()).then(|| {
            let Frozen { disk, path, oracle } = &frozen[rng.index(frozen.len())];
            Chosen { disk: *disk, path: path.clone(), oracle: oracle.borrow().clone() }
        })
    }

    /// Has one disk go back, if it has a snapshot.
    pub(super) async fn go_back(self: Rc<Self>, mut rng: Rng) {
        pause(&mut rng, 20).await;
        let Some(chosen) = self.choose(&mut rng) else { return };
        let disk = chosen.disk;
        // One that was begun while the disk was in use, and has failed.
        self.settle_way_back(disk);
        if let Err(error) = self.go_back_to(chosen).await {
            self.accept("a way back", &error);
            // As after any error that comes behind a change: the path tells what the disk is.
            self.settle_way_back(disk);
        }
        // Time for a crash behind it.
        pause(&mut rng, 200).await;
    }

    async fn go_back_to(&self, chosen: Chosen) -> Result<()> {
        let path = self.path(chosen.disk);
        let graph = self.open(chosen.disk, &path, false).await?.graph;
        let base = self.open(chosen.disk, &chosen.path, true).await?.graph;
        let new = Self::new_leaf(&chosen, &base, base.size_bytes());
        self.begin_way_back(&chosen, base.size_bytes());
        let files = self.files_of_way_back();
        let back = Back { files: &files, env: self.world.env(), base: &base, notes: &(), new: &new, given: None };
        let changes = self.changes_of(chosen.disk, &graph).await?;
        if let Some(changes) = &changes {
            changes.note_difference(&graph, &base).await?;
        }
        back.revert(&graph).await?;
        if let Some(begun) = &mut *self.disks[chosen.disk].going_back.borrow_mut() {
            begun.is_done = true;
        }
        if let Some(changes) = changes {
            changes.close(found_at(&self.world, &path).stamp).await?;
        }
        self.count(|summary| summary.went_back += 1);
        Ok(())
    }

    /// Has one disk go back while clients use it, if it has a snapshot. Where disks have checkpoints, they do so again and again.
    pub(super) async fn go_back_in_use(self: Rc<Self>, nodes: Vec<LiveNode>, mut rng: Rng) {
        for _ in 0..MOST_LOOKS {
            pause(&mut rng, 200).await;
            if let Some(chosen) = self.choose(&mut rng)
                && self.disks[chosen.disk].claim(self.broken)
            {
                self.clone().go_back_claimed(&nodes[chosen.disk], chosen, rng.split(0)).await;
                if !has_checkpoints(self.plan.seed) {
                    return;
                }
                rng = rng.split(1);
            }
        }
    }

    async fn go_back_claimed(self: Rc<Self>, node: &LiveNode, chosen: Chosen, mut rng: Rng) {
        let disk = chosen.disk;
        match self.exchange_back(node, chosen, &mut rng).await {
            Ok(kept) => {
                self.disks[disk].is_claimed.set(false);
                self.seal(kept.into_iter().collect(), rng).await;
            }
            // A disk whose number is not known any more gets no snapshot with others.
            Err(error) => self.accept("a way back of a disk in use", &error),
        }
    }

    /// Returns the snapshot of what the disk held before, if that was kept.
    async fn exchange_back(&self, node: &LiveNode, chosen: Chosen, rng: &mut Rng) -> Result<Option<Exchanged>> {
        let disk = &self.disks[chosen.disk];
        let old = node.graph().await;
        let base = self.open(chosen.disk, &chosen.path, true).await?.graph;
        // The disk went back to a shorter one before. One that is used keeps its size.
        let size_bytes = node.info().size_bytes;
        if base.size_bytes() > size_bytes {
            return Ok(None);
        }
        let plan = match rng.chance(1, 2) {
            true => Some(self.plan(node, chosen.disk).await),
            false => None,
        };
        let (new, files) = (Self::new_leaf(&chosen, &base, size_bytes), self.files_of_way_back());
        let back = Back { files: &files, env: self.world.env(), base: &base, notes: &(), new: &new, given: None };
        // What is kept has the disk's path by then.
        let wrap = |graph| {
            self.begin_way_back(&chosen, size_bytes);
            LiveGraph { graph, broken: self.broken }
        };
        let (noted, options) = (self.noted(chosen.disk), OpenOptions::default());
        let ready = back.make_ready(&old.graph, plan.as_ref(), &noted, &options, wrap).await?;
        pause(rng, 60).await;
        let in_flight = node.hold().await?;
        if self.broken != Broken::BackInFlight {
            in_flight.ended().await;
        }
        let before = disk.oracle.borrow().clone();
        let exchanged = back.exchange(node, &old.graph, &ready).await;
        let mut copied = Ok(());
        if exchanged.is_ok() {
            disk.oracle.borrow_mut().go_back(&chosen.oracle);
            disk.going_back.take();
            // What could not be made durable is not the disk's any more.
            disk.flush_failed.set(false);
            self.count(|summary| summary.went_back_in_use += 1);
            // The numbers of this life are not what has gone back.
            copied = self.copy_number(&old, ready.graph()).await;
        }
        node.let_go().await;
        let epoch = match exchanged {
            Ok(epoch) => epoch,
            Err(failure) => return Err(back.take_back(&old.graph, ready, failure).await),
        };
        copied?;
        let (_, kept) = ready.into_parts();
        self.note_way_back(chosen.disk, &old.graph, &base).await?;
        let exchanged = |(made, over)| {
            let new = Arc::new(LiveGraph { graph: over, broken: self.broken });
            Exchanged { disk: chosen.disk, made, oracle: before, epoch, new }
        };
        Ok(kept.map(exchanged))
    }

    /// The new leaf of a disk that goes back.
    fn new_leaf(chosen: &Chosen, base: &Graph<SimStore>, size_bytes: u64) -> NewImage {
        let layers = base.layers();
        let name = chosen.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let parent = NewParent {
            relative_path: name.clone(),
            name,
            format: layers[0].format,
            identity: layers[0].identity,
            changed_unix_s: layers[0].facts.changed_unix_s,
        };
        NewImage { parent: Some(parent), ..NewImage::new(size_bytes) }
    }

    /// Notes that the way back begins: the disk's path is what it was before.
    fn begin_way_back(&self, chosen: &Chosen, size_bytes: u64) {
        let old_file = self.world.file_number(&self.path(chosen.disk));
        let begun = GoingBack { old_file, oracle: chosen.oracle.clone(), size_bytes, is_done: false };
        *self.disks[chosen.disk].going_back.borrow_mut() = Some(begun);
    }

    /// The rules of the snapshot are broken elsewhere.
    fn files_of_way_back(&self) -> LiveFiles {
        let broken = match self.broken {
            Broken::BackNotDurable => Broken::RenameNotDurable,
            Broken::BackLeafNotDurable => Broken::LeafNotDurable,
            _ => Broken::Nothing,
        };
        LiveFiles::new(self.world.files(), broken, self.brink.clone())
    }

    /// Looks what has become of the way back of a disk: nobody uses the disk.
    pub(super) fn settle_way_back(&self, disk: usize) {
        let Some(begun) = self.disks[disk].going_back.take() else { return };
        let GoingBack { old_file, oracle, size_bytes, is_done } = begun;
        if self.world.file_number(&self.path(disk)) == old_file {
            assert!(!is_done, "disk {disk} has gone back, and is as it was before");
            return;
        }
        let LiveDisk { oracle: of_disk, told_bytes, asked_bytes, .. } = &self.disks[disk];
        *of_disk.borrow_mut() = oracle;
        told_bytes.set(size_bytes);
        asked_bytes.set(size_bytes);
    }
}
