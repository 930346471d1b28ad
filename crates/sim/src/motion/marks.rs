//! The changed blocks of the disk that is moved: [`Marked`] notes for a job what changes.

use std::cell::RefCell;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use spile_core::{Disk, Error, ErrorKind, Extent, Files, Result, Store, Timer};
use spile_image::Graph;
use spile_life::changes::header::{Grain, Stamp};
use spile_life::changes::{Broken, Changes, Found, Surroundings};
use spile_life::{Later, Marks, names};
use spile_node::Node;

use crate::store::SimFiles;
use crate::turns::Turns;
use crate::world::World;

/// What stays over the lives of a process that notes changes.
pub(crate) struct Tracking {
    pub world: World,
    pub broken: Broken,
    /// The changed blocks of the life that is under way, or of the one before.
    pub tracker: RefCell<Option<Arc<Changes<SimFiles>>>>,
}

/// A disk and what is noted of its changes.
pub(crate) struct Marked<'a, S: Store> {
    pub of: &'a Tracking,
    pub node: &'a Node<Graph<S>>,
    /// What is beside another image, too, and the name of its last checkpoint.
    pub carrying: RefCell<Option<(Changes<SimFiles>, Option<String>)>>,
}

impl Tracking {
    fn around(&self) -> Surroundings<SimFiles> {
        let timer: Arc<dyn Timer> = Arc::new(Turns::of_time());
        Surroundings { files: self.world.files(), env: self.world.env(), timer, alarm: |_, _| {}, broken: self.broken }
    }

    /// What the image of `graph` looks like: which file it is.
    fn found<S: Store>(&self, graph: &Graph<S>) -> Found {
        self.found_at(graph.handles()[0].path())
    }

    fn found_at(&self, image: &Path) -> Found {
        let number = self.world.file_number(image).unwrap_or_default();
        Found { stamp: Stamp([number as u8; 32]), is_written_behind: false, mount_id: 1 }
    }

    /// Which files these are, and a hash of what they hold: a host tells less, the times of the last writes.
    fn look(&self, paths: &[PathBuf]) -> Option<String> {
        let one = |path: &PathBuf| {
            let (number, content) = (self.world.file_number(path)?, self.world.view(path)?);
            let mut page = [0; 4096];
            let mut hash = content.len();
            for at in (0..content.len()).step_by(page.len()) {
                content.read(at, &mut page);
                hash = page.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3));
            }
            Some(format!("{number} {hash:x}"))
        };
        paths.iter().map(one).collect::<Option<Vec<_>>>().map(|all| all.join(" / "))
    }

    /// Opens what lies beside the disk that was just opened.
    pub async fn open<S: Store>(&self, node: &Node<Graph<S>>) {
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
            changes.attach(node).await.unwrap_or_else(|error| panic!("cannot attach: {error:?}"));
            *self.tracker.borrow_mut() = Some(Arc::new(changes));
        }
    }

    /// Closes them in order, after the disk of `graph`.
    pub async fn close<S: Store>(&self, graph: &Graph<S>) -> Result<()> {
        let Some(changes) = self.tracker.borrow().clone() else { return Ok(()) };
        let is_beside = Store::path(changes.store()) == names::changes(graph.handles()[0].path());
        match is_beside {
            true => changes.close(self.found(graph).stamp).await,
            false => changes.leave().await,
        }
    }
}

impl<S: Store> Marks for Marked<'_, S> {
    fn begin<'a>(&'a self, name: &'a str) -> Later<'a, ()> {
        Box::pin(async move {
            self.end(name).await?;
            let known = self.of.tracker.borrow().clone().filter(|changes| changes.loss().is_none());
            let changes = match known {
                Some(changes) => changes,
                None => {
                    let graph = self.node.graph().await;
                    let (disk, bytes) = (graph.handles()[0].path(), self.node.size_bytes());
                    let grain = Grain { block_bytes: 4096, area_bytes: 16 << 10 };
                    let made = Changes::create(self.of.around(), disk, bytes, grain, self.of.found(&graph)).await?;
                    let made = Arc::new(made);
                    *self.of.tracker.borrow_mut() = Some(made.clone());
                    made
                }
            };
            changes.checkpoint(self.node, name).await
        })
    }

    fn changed<'a>(&'a self, name: &'a str, within: Range<u64>) -> Later<'a, Option<Vec<Extent>>> {
        Box::pin(async move {
            let Some(changes) = self.of.tracker.borrow().clone() else { return Ok(None) };
            match changes.between(name, None, within, self.node.size_bytes()).await {
                Ok(changed) => Ok(changed.warning.is_none().then_some(changed.ranges)),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            }
        })
    }

    fn end<'a>(&'a self, name: &'a str) -> Later<'a, ()> {
        Box::pin(async move {
            let Some(changes) = self.of.tracker.borrow().clone() else { return Ok(()) };
            match changes.remove(self.node, name).await {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                removed => removed?,
            }
            if changes.names().await.0.is_empty() {
                changes.leave().await?;
                self.of.tracker.take();
            }
            Ok(())
        })
    }

    fn rename<'a>(&'a self, name: &'a str, to: &'a str) -> Later<'a, ()> {
        Box::pin(async move {
            self.end(to).await?;
            let changes = self.of.tracker.borrow().clone();
            changes.ok_or_else(|| Error::new(ErrorKind::NotFound, "nothing is noted"))?.rename(name, to).await
        })
    }

    fn carry<'a>(&'a self, half: &'a Path, to: &'a Path, since: Option<&'a str>) -> Later<'a, bool> {
        Box::pin(async move {
            let known = self.of.tracker.borrow().clone().filter(|changes| changes.loss().is_none());
            let Some(changes) = known else { return Ok(false) };
            let found = self.of.found_at(half);
            let new = changes.carry(self.of.around(), self.node, (to, found), since).await?;
            self.carrying.replace(Some((new, since.map(str::to_owned))));
            Ok(true)
        })
    }

    fn carried<'a>(&'a self, is_there: bool) -> Later<'a, ()> {
        Box::pin(async move {
            let carrying = self.carrying.take();
            let known = self.of.tracker.borrow().clone();
            let (Some((new, since)), Some(old)) = (carrying, known) else { return Ok(()) };
            if !is_there {
                return old.left_behind(self.node, new).await;
            }
            let carried = new.carried(self.node, since.as_deref()).await;
            *self.of.tracker.borrow_mut() = Some(Arc::new(new));
            carried.and(old.leave().await)
        })
    }

    fn look<'a>(&'a self, paths: &'a [PathBuf]) -> Later<'a, Option<String>> {
        Box::pin(async move { Ok(self.of.look(paths)) })
    }
}
