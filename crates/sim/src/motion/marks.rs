//! The changed blocks of the disk that is moved: [`Marked`] notes for a job what changes.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_lock::{Mutex, MutexGuardArc};
use spile_core::{Disk, Error, ErrorKind, Extent, Files, Result, Store, Timer};
use spile_image::Graph;
use spile_life::changes::header::{Grain, Stamp};
use spile_life::changes::{Broken, Changes, Found, Packed, Surroundings, is_hidden};
use spile_life::{Later, Marks, Put, names};
use spile_node::{Node, Place};

use crate::checkpoints::{Action, Asked, Checkpoints};
use crate::rng::Rng;
use crate::store::{SimFiles, SimStore};
use crate::turns::Turns;
use crate::world::World;

/// What stays over the lives of a process that notes changes.
pub(crate) struct Tracking {
    pub world: World,
    pub broken: Broken,
    /// The changed blocks of the life that is under way, or of the one before.
    pub tracker: RefCell<Option<Arc<Changes<SimFiles>>>>,
    /// Whoever makes or removes checkpoints, or takes them to another place, has this.
    pub turn: RefCell<Arc<Mutex<()>>>,
    /// What is known of those that users make.
    pub checkpoints: Checkpoints,
    /// They go along to another host, too, which takes files of the usual grain only.
    pub goes_far: bool,
    /// How often what a job has noted since some moment has taken the place of what it had noted since an earlier one.
    pub forward: Cell<u64>,
    /// The disk's path, where it stays there: while a snapshot is made, its image has got another name already.
    pub at: Option<PathBuf>,
}

/// What is beside the new image, the name of its last checkpoint, and the turn.
type Carrying = (Changes<SimFiles>, Option<String>, MutexGuardArc<()>);

/// A disk and what is noted of its changes.
pub(crate) struct Marked<'a, S: Store> {
    pub of: &'a Tracking,
    pub node: &'a Node<Graph<S>>,
    /// What is beside another image, too, and the name of its last checkpoint. Nobody makes or removes one meanwhile.
    carrying: RefCell<Option<Carrying>>,
    /// The same while there is nothing to take along.
    held: RefCell<Option<MutexGuardArc<()>>>,
    /// The same while they go to another host; and what is to be sent.
    sending: RefCell<Option<MutexGuardArc<()>>>,
    packed: RefCell<Option<Packed<SimStore>>>,
}

/// What surrounds the changed blocks of a disk of `world`.
pub(crate) fn around(world: &World, broken: Broken) -> Surroundings<SimFiles> {
    let timer: Arc<dyn Timer> = Arc::new(Turns::of_time());
    Surroundings { files: world.files(), env: world.env(), timer, alarm: |_, _| {}, broken }
}

/// What the image at `path` looks like: which file it is.
pub(crate) fn found_at(world: &World, path: &Path) -> Found {
    let number = world.file_number(path).unwrap_or_default();
    Found { stamp: Stamp([number as u8; 32]), is_written_behind: false, mount_id: 1 }
}

/// Which files these are, and a hash of what they hold: a host tells less, the times of the last writes.
pub(crate) fn look_of(world: &World, paths: &[PathBuf]) -> Option<String> {
    let one = |path: &PathBuf| {
        let (number, content) = (world.file_number(path)?, world.view(path)?);
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

/// A disk with an image on top, which has the disk's path.
pub(crate) trait OnTop: Disk {
    fn path(&self) -> PathBuf;
}

impl<S: Store> OnTop for Graph<S> {
    fn path(&self) -> PathBuf {
        self.handles()[0].path().to_owned()
    }
}

impl Tracking {
    /// Nothing is noted yet.
    pub fn new(world: World, broken: Broken) -> Self {
        let (tracker, turn, checkpoints, forward) = Default::default();
        Self { world, broken, tracker, turn, checkpoints, goes_far: false, forward, at: None }
    }

    pub async fn turn(&self) -> MutexGuardArc<()> {
        let turn = self.turn.borrow().clone();
        turn.lock_arc().await
    }

    fn around(&self) -> Surroundings<SimFiles> {
        around(&self.world, self.broken)
    }

    fn path<G: OnTop>(&self, graph: &G) -> PathBuf {
        self.at.clone().unwrap_or_else(|| graph.path())
    }

    fn found<G: OnTop>(&self, graph: &G) -> Found {
        found_at(&self.world, &self.path(graph))
    }

    /// Opens what lies beside the disk that was just opened.
    pub async fn open<G: OnTop>(&self, node: &Node<G>) {
        let graph = node.graph().await;
        let disk = self.path(&*graph);
        self.turn.take();
        let before = self.tracker.take();
        if before.as_ref().and_then(|before| before.loss()).is_some_and(|loss| !loss.is_void) {
            // An operator does that: the alarm says so.
            let _ = self.world.files().remove(&names::changes(&disk)).await;
        }
        drop(before);
        let opened = Changes::open(self.around(), &disk, node.size_bytes(), self.found(&*graph)).await;
        let opened = opened.unwrap_or_else(|error| panic!("the changed blocks do not open: {error:?}"));
        if let Some(changes) = opened {
            changes.attach(node).await.unwrap_or_else(|error| panic!("cannot attach: {error:?}"));
            *self.tracker.borrow_mut() = Some(Arc::new(changes));
        }
    }

    /// The changed blocks of the disk, for a new checkpoint: there may be none yet.
    async fn made<G: OnTop>(&self, node: &Node<G>) -> Result<Arc<Changes<SimFiles>>> {
        let known = self.tracker.borrow().clone().filter(|changes| changes.loss().is_none());
        if let Some(changes) = known {
            return Ok(changes);
        }
        let graph = node.graph().await;
        let (disk, bytes) = (self.path(&*graph), node.size_bytes());
        let area_bytes = if self.goes_far { Grain::default().area_bytes } else { 16 << 10 };
        let grain = Grain { block_bytes: 4096, area_bytes };
        let made = Arc::new(Changes::create(self.around(), &disk, bytes, grain, self.found(&*graph)).await?);
        *self.tracker.borrow_mut() = Some(made.clone());
        Ok(made)
    }

    /// Users make and remove checkpoints, and ask what has changed since, so many times, for as long as the disk is on this host.
    pub async fn be_used<G: OnTop>(
        &self,
        node: &Node<G>,
        (times, mut rng): (u64, Rng),
        has_failed: &dyn Fn() -> bool,
        is_here: &dyn Fn() -> bool,
    ) {
        let disk = Asked { node, tracker: &|| self.tracker.borrow().clone(), has_failed };
        for _ in 0..times {
            let action = Checkpoints::next(&mut rng).await;
            let turn = self.turn().await;
            if !is_here() {
                return;
            }
            let known = self.tracker.borrow().clone();
            match action {
                Action::Make => match self.made(node).await {
                    Ok(changes) => self.checkpoints.make(&disk, &changes).await,
                    Err(error) => assert!(has_failed(), "nothing can be noted, without a fault: {error:?}"),
                },
                Action::Remove => {
                    if let Some(changes) = known {
                        self.checkpoints.remove(&disk, &changes, &mut rng).await;
                    }
                }
                Action::Check => {
                    drop(turn);
                    self.checkpoints.check(&disk).await;
                }
            }
        }
    }

    /// Compares what is known of the checkpoints with what there is. `is_new`: the disk was just opened.
    pub async fn check<G: OnTop>(&self, node: &Node<G>, is_new: bool, has_failed: &dyn Fn() -> bool) {
        let disk = Asked { node, tracker: &|| self.tracker.borrow().clone(), has_failed };
        match is_new {
            true => self.checkpoints.look(&disk).await,
            false => self.checkpoints.check(&disk).await,
        }
    }

    /// Closes them in order, after the disk of `graph`.
    pub async fn close<G: OnTop>(&self, graph: &G) -> Result<()> {
        let Some(changes) = self.tracker.borrow().clone() else { return Ok(()) };
        let is_beside = Store::path(changes.store()) == names::changes(&self.path(graph));
        match is_beside {
            true => changes.close(self.found(graph).stamp).await,
            false => changes.leave().await,
        }
    }
}

impl<'a, S: Store> Marked<'a, S> {
    pub fn new(of: &'a Tracking, node: &'a Node<Graph<S>>) -> Self {
        let (carrying, held, sending, packed) = Default::default();
        Self { of, node, carrying, held, sending, packed }
    }

    /// Nothing goes along, and nobody makes a checkpoint that would stay behind.
    fn hold(&self, turn: MutexGuardArc<()>) -> bool {
        self.held.replace(Some(turn));
        false
    }

    async fn end_one(&self, name: &str) -> Result<()> {
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
    }
}

impl<S: Store> Marks for Marked<'_, S> {
    fn begin<'a>(&'a self, name: &'a str) -> Later<'a, ()> {
        Box::pin(async move {
            let _turn = self.of.turn().await;
            self.end_one(name).await?;
            self.of.made(self.node).await?.checkpoint(self.node, name).await
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
            let _turn = self.of.turn().await;
            self.end_one(name).await
        })
    }

    fn names(&self) -> Later<'_, Vec<String>> {
        Box::pin(async move {
            let Some(changes) = self.of.tracker.borrow().clone().filter(|_| self.of.goes_far) else {
                return Ok(Vec::new());
            };
            Ok(changes.names().await.0.into_iter().filter(|name| is_hidden(name)).collect())
        })
    }

    fn rename<'a>(&'a self, name: &'a str, to: &'a str) -> Later<'a, ()> {
        Box::pin(async move {
            let _turn = self.of.turn().await;
            let changes = self.of.tracker.borrow().clone();
            let changes = changes.ok_or_else(|| Error::new(ErrorKind::NotFound, "nothing is noted"))?;
            if !changes.names().await.0.iter().any(|known| known == to) {
                return changes.rename(name, to).await;
            }
            changes.replace(self.node, to, name).await?;
            self.of.forward.set(self.of.forward.get() + 1);
            Ok(())
        })
    }

    fn carry<'a>(&'a self, half: &'a Path, to: &'a Path, since: Option<&'a str>) -> Later<'a, bool> {
        Box::pin(async move {
            let turn = self.of.turn().await;
            let known = self.of.tracker.borrow().clone().filter(|changes| changes.loss().is_none());
            let Some(changes) = known else { return Ok(self.hold(turn)) };
            if since.is_none() && changes.names().await.0.iter().all(|name| is_hidden(name)) {
                return Ok(self.hold(turn));
            }
            let found = found_at(&self.of.world, half);
            let new = changes.carry(self.of.around(), self.node, (to, found), since).await?;
            self.carrying.replace(Some((new, since.map(str::to_owned), turn)));
            Ok(true)
        })
    }

    fn pack<'a>(&'a self, since: Option<&'a str>, goes: bool) -> Later<'a, Option<u64>> {
        Box::pin(async move {
            if !self.of.goes_far {
                return Ok(None);
            }
            let turn = self.of.turn().await;
            let known = self.of.tracker.borrow().clone().filter(|changes| changes.loss().is_none());
            let packed = match known {
                Some(changes) => changes.pack(self.node.size_bytes(), since, goes).await?,
                None => None,
            };
            let len_bytes = packed.as_ref().map(Packed::len_bytes);
            self.sending.replace(Some(turn));
            self.packed.replace(packed);
            Ok(len_bytes)
        })
    }

    fn send<'a>(&'a self, put: Put<'a>) -> Later<'a, ()> {
        Box::pin(async move {
            let packed = self.packed.take();
            match packed {
                Some(packed) => packed.send(put).await,
                None => Ok(()),
            }
        })
    }

    fn carried<'a>(&'a self, is_there: bool) -> Later<'a, ()> {
        Box::pin(async move {
            drop(self.packed.take());
            if self.sending.take().is_some() && is_there {
                // Nobody takes what lies beside the old image for what has changed of that.
                let known = self.of.tracker.borrow().clone();
                return match known {
                    Some(changes) => changes.note_image(Stamp([0xff; 32])).await,
                    None => Ok(()),
                };
            }
            let held = self.held.take();
            let carrying = self.carrying.take();
            let known = self.of.tracker.borrow().clone();
            let Some(old) = known else { return Ok(()) };
            let Some((new, since, _turn)) = carrying else {
                if is_there && held.is_some() && old.loss().is_none() {
                    self.node.replace(Place::ChangeTracking, None).await?;
                    self.of.tracker.take();
                    old.leave().await?;
                }
                return Ok(());
            };
            if !is_there {
                return old.left_behind(self.node, new).await;
            }
            let carried = new.carried(self.node, since.as_deref()).await;
            *self.of.tracker.borrow_mut() = Some(Arc::new(new));
            carried.and(old.leave().await)
        })
    }

    fn look<'a>(&'a self, paths: &'a [PathBuf]) -> Later<'a, Option<String>> {
        Box::pin(async move { Ok(look_of(&self.of.world, paths)) })
    }
}
