//! The way back: when the disks of a life are closed, one of them goes back to what one of its snapshots holds.
//!
//! The process may end at any step of it. Then the disk is as it was or has gone back, as its path tells; and once the way back has
//! succeeded, no crash undoes it.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use spile_core::Result;
use spile_image::create::{NewImage, NewParent};
use spile_life::revert::revert;

use super::files::LiveFiles;
use super::graph::Broken;
use super::{Host, LiveDisk};
use crate::oracle::Oracle;
use crate::rng::Rng;

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

impl Host {
    /// Has one disk go back, if it has a snapshot.
    pub(super) async fn go_back(self: Rc<Self>, mut rng: Rng) {
        crate::turns::pause(&mut rng, 20).await;
        let chosen = {
            let frozen = self.frozen.borrow();
            (!frozen.is_empty()).then(|| {
                let chosen = &frozen[rng.index(frozen.len())];
                (chosen.disk, chosen.path.clone(), chosen.oracle.clone())
            })
        };
        let Some((disk, snapshot, oracle)) = chosen else { return };
        if let Err(error) = self.go_back_to(disk, &snapshot, &oracle).await {
            self.accept("a way back", &error);
            // As after any error that comes behind a change: the path tells what the disk is.
            self.settle_way_back(disk);
        }
        // Time for a crash behind it.
        crate::turns::pause(&mut rng, 200).await;
    }

    async fn go_back_to(&self, disk: usize, snapshot: &Path, oracle: &Rc<RefCell<Oracle>>) -> Result<()> {
        let path = self.path(disk);
        let graph = self.open(disk, &path, false).await?.graph;
        let base = self.open(disk, snapshot, true).await?.graph;
        let layers = base.layers();
        let name = snapshot.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let parent = NewParent {
            relative_path: name.clone(),
            name,
            format: layers[0].format,
            identity: layers[0].identity,
            changed_unix_s: layers[0].facts.changed_unix_s,
        };
        let size_bytes = layers[0].virtual_bytes;
        let new = NewImage { parent: Some(parent), ..NewImage::new(size_bytes) };
        let old_file = self.world.file_number(&path);
        let begun = GoingBack { old_file, oracle: oracle.borrow().clone(), size_bytes, is_done: false };
        *self.disks[disk].going_back.borrow_mut() = Some(begun);
        // The rules of the snapshot are broken elsewhere.
        let broken = match self.broken {
            Broken::BackNotDurable => Broken::RenameNotDurable,
            Broken::BackLeafNotDurable => Broken::LeafNotDurable,
            _ => Broken::Nothing,
        };
        let files = LiveFiles::new(self.world.files(), broken);
        revert(&files, self.world.env(), &graph, &layers, &new, None).await?;
        if let Some(begun) = &mut *self.disks[disk].going_back.borrow_mut() {
            begun.is_done = true;
        }
        self.count(|summary| summary.went_back += 1);
        Ok(())
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
