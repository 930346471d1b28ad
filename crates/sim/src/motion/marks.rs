//! The changed blocks of the disk that is moved: [`Marked`] notes for a job what changes.

use std::ops::Range;
use std::sync::Arc;

use spile_core::{Disk, ErrorKind, Extent, Files, Timer};
use spile_image::Graph;
use spile_life::changes::header::{Grain, Stamp};
use spile_life::changes::{Broken, Changes, Found, Surroundings};
use spile_life::{Later, Marks, names};

use super::job::Turns;
use super::{Host, MotionNode};
use crate::store::{SimFiles, SimStore};

pub(super) type Tracker = Arc<Changes<SimFiles>>;

/// A disk and what is noted of its changes.
pub(super) struct Marked<'a> {
    pub host: &'a Host,
    pub node: &'a MotionNode,
}

impl Host {
    fn around(&self) -> Surroundings<SimFiles> {
        let timer: Arc<dyn Timer> = Arc::new(Turns::default());
        Surroundings {
            files: self.world.files(),
            env: self.world.env(),
            timer,
            alarm: |_, _| {},
            broken: Broken::Nothing,
        }
    }

    /// What the image of `graph` looks like: which file it is.
    fn found(&self, graph: &Graph<SimStore>) -> Found {
        let number = self.world.file_number(graph.handles()[0].path()).unwrap_or_default();
        Found { stamp: Stamp([number as u8; 32]), is_written_behind: false, mount_id: 1 }
    }

    /// Opens what lies beside the disk that was just opened.
    pub(super) async fn open_changes(&self, node: &MotionNode) {
        let graph = node.graph().await;
        let disk = graph.handles()[0].path().to_owned();
        let before = self.tracker.take();
        if before.as_ref().and_then(|before| before.loss()).is_some_and(|loss| !loss.is_void) {
            // An operator does that: the alarm says so.
            let _ = self.world.files().remove(&names::changes(&disk)).await;
        }
        drop(before);
        let opened = Changes::open(self.around(), &disk, node.size_bytes(), self.found(&graph)).await;
        let opened = opened.unwrap_or_else(|error| panic!("the changed blocks do not open: {error:?}"));
        if let Some(changes) = opened {
            changes.attach(&**node).await.unwrap_or_else(|error| panic!("cannot attach: {error:?}"));
            *self.tracker.borrow_mut() = Some(Arc::new(changes));
        }
    }

    /// Closes them in order, after the disk of `graph`.
    pub(super) async fn close_changes(&self, graph: &Graph<SimStore>) {
        let Some(changes) = self.tracker.borrow().clone() else { return };
        let is_beside = spile_core::Store::path(changes.store()) == names::changes(graph.handles()[0].path());
        let closed = match is_beside {
            true => changes.close(self.found(graph).stamp).await,
            false => changes.leave().await,
        };
        assert!(closed.is_ok() || self.has_faults(), "the changed blocks do not close: {closed:?}");
    }
}

impl Marks for Marked<'_> {
    fn begin<'a>(&'a self, name: &'a str) -> Later<'a, ()> {
        Box::pin(async move {
            self.end(name).await?;
            let known = self.host.tracker.borrow().clone().filter(|changes| changes.loss().is_none());
            let changes = match known {
                Some(changes) => changes,
                None => {
                    let graph = self.node.graph().await;
                    let (disk, bytes) = (graph.handles()[0].path(), self.node.size_bytes());
                    let grain = Grain { block_bytes: 4096, area_bytes: 16 << 10 };
                    let made = Changes::create(self.host.around(), disk, bytes, grain, self.host.found(&graph)).await?;
                    let made = Arc::new(made);
                    *self.host.tracker.borrow_mut() = Some(made.clone());
                    made
                }
            };
            changes.checkpoint(self.node, name).await
        })
    }

    fn changed<'a>(&'a self, name: &'a str, within: Range<u64>) -> Later<'a, Option<Vec<Extent>>> {
        Box::pin(async move {
            let Some(changes) = self.host.tracker.borrow().clone() else { return Ok(None) };
            match changes.between(name, None, within, self.node.size_bytes()).await {
                Ok(changed) => Ok(changed.warning.is_none().then_some(changed.ranges)),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            }
        })
    }

    fn end<'a>(&'a self, name: &'a str) -> Later<'a, ()> {
        Box::pin(async move {
            let Some(changes) = self.host.tracker.borrow().clone() else { return Ok(()) };
            match changes.remove(self.node, name).await {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                removed => removed?,
            }
            if changes.names().await.0.is_empty() {
                changes.leave().await?;
                self.host.tracker.take();
            }
            Ok(())
        })
    }
}
