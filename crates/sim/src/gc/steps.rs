//! What the processes of [`super`] do.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use spile_core::{Disk, ErrorKind, Files, Result};
use spile_life::base::refuse_unfit;
use spile_life::gc::{Family, Kind, collect, look, tidy};
use spile_life::jobs::{Job, Merged, Plan, Wishes};
use spile_life::snapshot::{self, new_child};
use spile_life::{Later, Neighbours, NoteChild, Sizes, Work, delete, merge, names};
use spile_node::Node;

use super::{Broken, Fate, GcNode, Host};
use crate::rng::Rng;
use crate::store::SimFiles;
use crate::turns::{Turns, pause};
use crate::world::World;

/// The names that snapshots and clones get: few, so that they come again.
const NAMES: [&str; 5] = ["n0", "n1", "n2", "n3", "n4"];
/// The disk that nobody deletes.
const DISK: &str = "disk";

/// The files of the folder, which change.
enum Listed {
    Anew(World),
    /// A rule is broken: they are looked at once.
    Once(Vec<PathBuf>),
}

impl Neighbours for Listed {
    fn list(&self) -> Pin<Box<dyn Future<Output = Result<Vec<PathBuf>>> + '_>> {
        let files = match self {
            Self::Anew(world) => world.names(),
            Self::Once(files) => files.clone(),
        };
        Box::pin(async { Ok(files) })
    }
}

impl NoteChild for Listed {
    fn note_child<'a>(&'a self, parent: &'a Path, child: &'a Path) -> Later<'a, ()> {
        ().note_child(parent, child)
    }
}

/// A disk that is served.
pub(super) struct Served {
    pub disk: PathBuf,
    pub node: GcNode,
    /// The files as its server sees them.
    pub files: SimFiles,
}

impl Host {
    /// A name that nobody has.
    fn free_name(&self, rng: &mut Rng) -> Option<PathBuf> {
        let taken = self.list();
        let free: Vec<_> = NAMES.iter().map(|name| self.named(name)).filter(|name| !taken.contains(name)).collect();
        (!free.is_empty()).then(|| rng.pick(&free).clone())
    }

    /// Opens a disk as a server does, now and then with a snapshot first. No other process works yet.
    pub(super) async fn serve(&self, rng: &mut Rng) -> Option<Served> {
        let leaves = self.leaves().await;
        if leaves.is_empty() {
            return None;
        }
        let (disk, files) = (rng.pick(&leaves).clone(), self.files());
        let opened = self.open(&files, &disk, false).await;
        let mut graph = opened.unwrap_or_else(|error| panic!("{} does not open: {error:?}", disk.display()));
        let name = self.free_name(rng).filter(|_| rng.chance(3, 4));
        if let Some(path) = name
            && self.world.names().iter().all(|path| *path != names::job(&disk))
        {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let plan = snapshot::Plan::new(&graph.layers(), None, &name, &[]).unwrap_or_else(|e| panic!("{e:?}"));
            let oracle = self.oracle(&disk);
            self.know(&path, oracle.borrow().clone(), Fate::Open, false);
            let flushed = oracle.borrow_mut().begin_flush();
            let prepared = snapshot::prepare(&files, self.env(), &(), &graph, &plan).await;
            let (made, new) = prepared.unwrap_or_else(|error| panic!("no snapshot: {error:?}")).into_parts();
            oracle.borrow_mut().end_flush(flushed);
            let settled = snapshot::settle(&files, &made, &new).await;
            settled.unwrap_or_else(|error| panic!("the snapshot is not sealed: {error:?}"));
            self.know(&path, oracle.borrow().clone(), Fate::Kept, false);
            self.count(|summary| summary.snapshots += 1);
            graph = new;
        }
        graph.begin();
        Some(Served { disk, node: Arc::new(Node::new(graph)), files })
    }

    /// Deletes images and makes clones, as commands do.
    pub(super) async fn delete_and_clone(self: Rc<Self>, mut rng: Rng, mostly_deletes: bool) {
        for _ in 0..rng.between(1, 6) {
            pause(&mut rng, 100).await;
            match rng.chance(if mostly_deletes { 3 } else { 1 }, 4) {
                true => self.delete_one(&mut rng).await,
                false => self.clone_one(&mut rng).await,
            }
        }
    }

    async fn delete_one(&self, rng: &mut Rng) {
        let there = self.list();
        let may_go = |fate| matches!(fate, Fate::Kept | Fate::Marked | Fate::Open);
        let disk = self.named(DISK);
        let of_users = |path: &&PathBuf| **path != disk && self.images.borrow().contains_key(*path);
        let mut images: Vec<_> = there.iter().filter(of_users).filter(|path| may_go(self.fate(path))).collect();
        images.retain(|path| !self.deleting.borrow().contains(*path));
        if images.is_empty() {
            return;
        }
        let path = (*rng.pick(&images)).clone();
        let before = self.fate(&path);
        self.deleting.borrow_mut().insert(path.clone());
        self.set_fate(&path, Fate::Open);
        match self.delete(&path).await {
            Ok(true) => {
                self.set_fate(&path, Fate::Marked);
                self.count(|summary| summary.marked += 1);
            }
            Ok(false) => {
                assert_eq!(self.world.file_number(&path), None, "{} was removed, and is there", path.display());
                self.set_fate(&path, Fate::Gone);
                self.count(|summary| summary.removed += 1);
            }
            Err(error) => {
                // Somebody else may have merged or removed what was deleted before.
                // So may its child or a parent be that was asked for just before.
                let is_others = error.kind() == ErrorKind::NotFound && error.path().is_some_and(|at| at != path);
                let is_away = before != Fate::Kept || is_others;
                let is_refusal = matches!(error.kind(), ErrorKind::Denied | ErrorKind::Busy);
                assert!(is_refusal || is_away || self.has_faults(), "a delete failed without a fault: {error:?}");
                if is_refusal || is_others {
                    self.set_fate(&path, before);
                }
                self.count(|summary| summary.refused += 1);
            }
        }
        self.deleting.borrow_mut().remove(&path);
    }

    /// As `spile delete`. True when the image was marked.
    async fn delete(&self, path: &Path) -> Result<bool> {
        let (files, asking, env) = (self.files(), self.world.files(), self.env());
        let tools = self.tools(&files, &asking, &env);
        let early = self.list();
        if let [child] = Family::ask(&tools, &early).await.children_of(path)? {
            let list = async || Ok(self.list());
            return delete::mark(&tools, path, None, child, list).await.map(|()| true);
        }
        let graph = self.open(&files, path, false).await?;
        let list = async || Ok(if self.broken == Broken::AskedBeforeLock { early.clone() } else { self.list() });
        delete::remove(&tools, &graph, true, list).await.map(|_| false)
    }

    async fn clone_one(&self, rng: &mut Rng) {
        let mut bases = self.of_fate(Fate::Kept);
        bases.retain(|path| self.world.file_number(path).is_some());
        // The user may have merged all away.
        let (false, Some(path)) = (bases.is_empty(), self.free_name(rng)) else { return };
        let base = rng.pick(&bases).clone();
        // Nobody deletes what is not made yet, and no two commands make the same file.
        if !self.deleting.borrow_mut().insert(path.clone()) {
            return;
        }
        let oracle = self.oracle(&base).borrow().clone();
        self.know(&path, oracle.clone(), Fate::Open, true);
        match self.clone_of(&base, &path).await {
            Ok(()) => {
                self.know(&path, oracle, Fate::Kept, true);
                self.count(|summary| summary.cloned += 1);
            }
            // It may have been deleted by now, and the clone's name may be taken.
            Err(error) => {
                let fine = self.fate(&base) != Fate::Kept || error.kind() == ErrorKind::Exists;
                assert!(
                    fine || error.kind() == ErrorKind::Busy || self.has_faults(),
                    "a clone failed without a fault: {error:?}"
                );
            }
        }
        self.deleting.borrow_mut().remove(&path);
    }

    /// As `spile clone`: the base is open until the child names it, and the child gets its name when it is whole.
    async fn clone_of(&self, base: &Path, path: &Path) -> Result<()> {
        let (files, asking, env) = (self.files(), self.world.files(), self.env());
        let graph = self.open(&files, base, true).await?;
        refuse_unfit(&self.tools(&files, &asking, &env), base, &self.list()).await?;
        let new = new_child(&graph.layers()[0], self.size_bytes, base)?;
        let unnamed = PathBuf::from(format!("/unnamed/{}", self.next_process.get()));
        let store = Files::create(&files, &unnamed, 0).await?;
        self.format().create(&store, &*env, &new).await?;
        drop(store);
        files.link(&unnamed, path).await?;
        drop(graph);
        Ok(())
    }

    /// Merges the disk that is served, as its server does when a collection asks for it, or its user.
    pub(super) async fn collect_live(self: Rc<Self>, served: Rc<Served>, is_busy: bool, mut rng: Rng) {
        let Served { disk, node, files } = &*served;
        let (asking, env) = (self.world.files(), self.env());
        let tools = self.tools(files, &asking, &env);
        for _ in 0..3 {
            pause(&mut rng, 300).await;
            let run = async |plan, _: Wishes| self.merge(files, node, plan, is_busy).await;
            if let Err(error) = collect(&tools, node, async || Ok(self.list()), run).await {
                self.accept("a collection", &error);
            }
            if rng.chance(1, 4) {
                self.user_merges(files, node, disk, is_busy).await;
            }
        }
    }

    /// A merge that its user asks for: the parent is no snapshot any more.
    async fn user_merges(&self, files: &SimFiles, node: &GcNode, disk: &Path, is_busy: bool) {
        let graph = node.graph().await;
        let Some(parent) = graph.handles().get(1).map(|layer| layer.path().to_owned()) else { return };
        let Ok(plan) = merge::plan(&graph, None) else { return };
        drop(graph);
        let is_left = self.list().contains(&names::job(disk));
        if is_left || self.fate(&parent) != Fate::Kept || !self.deleting.borrow_mut().insert(parent.clone()) {
            return;
        }
        self.set_fate(&parent, Fate::Open);
        if let Err(error) = self.merge(files, node, Plan::Coalesce(plan), is_busy).await {
            let is_refusal = matches!(error.kind(), ErrorKind::Busy | ErrorKind::Denied);
            assert!(is_refusal || self.has_faults(), "a merge failed without a fault: {error:?}");
            // Nothing has changed when another image needs the parent, or somebody has it open.
            if is_refusal && !self.has_faults() {
                self.set_fate(&parent, Fate::Kept);
            }
        }
        self.deleting.borrow_mut().remove(&parent);
    }

    /// Runs a job on the disk `node`.
    async fn merge(&self, files: &SimFiles, node: &GcNode, plan: Plan, is_busy: bool) -> Result<()> {
        let (asking, env, timer) = (self.world.files(), self.env(), Turns::default());
        let neighbours = match self.broken {
            Broken::CloneBesideMerge => Listed::Once(self.list()),
            _ => Listed::Anew(self.world.clone()),
        };
        let job = Job::new(Wishes::default());
        let work = Work {
            files,
            asking: &asking,
            env: &env,
            timer: &timer,
            node,
            job: &job,
            neighbours: &neighbours,
            marks: None,
            sizes: Sizes { batch_bytes: 64 << 10, piece_bytes: 16 << 10, ..Sizes::default() },
            broken: match self.broken {
                Broken::Names(broken) => broken,
                _ => spile_image::Broken::Nothing,
            },
        };
        let done = spile_life::run(&work, &plan).await;
        if let (Ok(()), Plan::Coalesce(Merged { parent, keeps_name, .. })) = (&done, &plan) {
            // Where there is an image of that name, it was made since: the merge goes on where a life before has left it.
            let is_away = self.world.file_number(parent).is_none();
            assert!(
                !is_away || self.fate(parent) != Fate::Kept,
                "{} was merged away, and nobody has deleted it",
                parent.display()
            );
            self.count(|summary| {
                (summary.merged, summary.busy) = (summary.merged + 1, summary.busy + u64::from(is_busy));
                summary.kept += u64::from(*keeps_name);
            });
        }
        done
    }

    /// As `spile gc`.
    pub(super) async fn collect(self: Rc<Self>, mut rng: Rng) {
        pause(&mut rng, 500).await;
        let (files, asking, env) = (self.files(), self.world.files(), self.env());
        let tools = self.tools(&files, &asking, &env);
        let mut disks = Vec::new();
        for found in look(&tools, &self.list()).await {
            let Some(disk) = found.disk else {
                self.count(|summary| summary.waited += 1);
                continue;
            };
            if matches!(found.kind, Kind::StaleNote | Kind::SecondName) {
                match tidy(&tools, &self.list(), &disk).await {
                    Ok(()) => self.count(|summary| summary.stale += 1),
                    Err(error) => self.accept("the removal of a note", &error),
                }
                continue;
            }
            self.count(|summary| summary.resumed += u64::from(found.kind == Kind::Job));
            if !disks.contains(&disk) {
                disks.push(disk);
            }
        }
        for disk in disks {
            pause(&mut rng, 100).await;
            if let Err(error) = self.work_on(&files, &disk).await {
                // A clone may have been deleted meanwhile.
                let is_away = !self.images.borrow().get(&disk).is_some_and(|image| image.fate == Fate::Kept);
                assert!(
                    is_away || self.has_faults() || error.kind() == ErrorKind::Busy,
                    "a collection failed without a fault: {error:?}"
                );
            }
        }
    }

    async fn work_on(&self, files: &SimFiles, disk: &Path) -> Result<()> {
        let (asking, env) = (self.world.files(), self.env());
        let tools = self.tools(files, &asking, &env);
        let graph = self.open(files, disk, false).await?;
        // A disk that is a parent by now is not written to.
        if !Family::ask(&tools, &self.list()).await.children_of(disk)?.is_empty() {
            return Ok(());
        }
        let node = Arc::new(Node::new(graph));
        let run = async |plan, _: Wishes| self.merge(files, &node, plan, false).await;
        let done = collect(&tools, &node, async || Ok(self.list()), run).await;
        done.and(node.close().await)
    }
}
