//! The jobs of [`super`], and those who meddle with them.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use spile_core::{Env, Error, ErrorKind, Files};
use spile_life::jobs::{Job, Merged, Plan, State, Wishes};
use spile_life::{Work, merge};

use super::{Host, MergeNode};
use crate::jobs;
use crate::rng::Rng;
use crate::turns::{Turns, pause};

impl Host {
    /// Goes on with the job that the note names, then begins others.
    pub(super) async fn jobs(self: Rc<Self>, node: MergeNode, mut rng: Rng) {
        if let Some(note) = jobs::left(&self.world.files(), self.chain.disk.as_path(), || self.has_faults()).await {
            self.count(|summary| summary.resumed += 1);
            if self.job(&node, note.plan, &mut rng).await == State::Stopped {
                return;
            }
        }
        for _ in 0..rng.between(0, 2) {
            pause(&mut rng, 100).await;
            let graph = node.graph().await;
            let layers = graph.handles().len();
            if layers == 1 {
                return;
            }
            let plan = match rng.chance(1, 4) {
                true => Plan::Flatten,
                false => {
                    let number = rng.index(layers - 1);
                    let name = graph.handles()[number].path().display().to_string();
                    match merge::plan(&graph, Some(&name)) {
                        Ok(merged) => Plan::Coalesce(merged),
                        Err(error) => {
                            let [layer, parent] = [number, number + 1].map(|number| graph.handles()[number].path());
                            let is_foreign = number == 0 && parent.extension() != layer.extension();
                            assert!(is_foreign && error.kind() == ErrorKind::Unsupported, "{error:?}");
                            self.count(|summary| summary.refused += 1);
                            continue;
                        }
                    }
                }
            };
            drop(graph);
            if self.job(&node, plan, &mut rng).await == State::Stopped {
                return;
            }
        }
    }

    /// One job, and what must be true when it has ended.
    async fn job(self: &Rc<Self>, node: &MergeNode, plan: Plan, rng: &mut Rng) -> State {
        let before = self.paths_of(node).await;
        let must_be_refused = self.must_be_refused(&before, &plan);
        if let Plan::Coalesce(Merged { path, parent, .. }) = &plan
            && path != self.chain.disk.as_path()
        {
            self.moved.borrow_mut().insert(path.clone(), parent.clone());
        }
        let job =
            Arc::new(Job::new(Wishes { limit_bytes_per_s: rng.chance(1, 4).then_some(1 << 20), ..Wishes::default() }));
        if rng.chance(1, 2) {
            crate::exec::spawn_beside(Box::pin(jobs::meddle(job.clone(), Rng::new(rng.word()), 6)));
        }
        let (files, env, timer): (_, Arc<dyn Env>, _) = (self.world.files(), self.world.env(), Turns::default());
        let neighbours = self.chain.paths();
        let work = Work {
            files: &files,
            asking: &files,
            env: &env,
            timer: &timer,
            node,
            job: &job,
            neighbours: &neighbours,
            marks: None,
            sizes: self.sizes,
            broken: self.broken,
        };
        let begun_unix_s = env.now_unix_s();
        let ended = spile_life::run(&work, &plan).await;
        match &ended {
            Ok(()) => {
                assert!(
                    !must_be_refused,
                    "{plan:?} was not refused: {before:?}, second child of {:?}",
                    self.second_parent()
                );
                self.check_done(node, &plan, &before).await;
            }
            Err(error) if must_be_refused => self.check_refused(node, error, &before).await,
            Err(error) => {
                let was_told = matches!(job.state(), State::Cancelled | State::Stopped);
                let fine = (was_told && error.kind() == ErrorKind::Shutdown) || self.has_faults();
                assert!(fine, "{plan:?} failed without a fault: {error:?}");
                if was_told && !self.has_faults() {
                    self.check_time(node, &plan, begun_unix_s).await;
                }
                self.count(|summary| summary.ended_early += 1);
            }
        }
        jobs::check_note(&files, self.chain.disk.as_path(), job.state(), || self.has_faults()).await;
        job.state()
    }

    async fn paths_of(&self, node: &MergeNode) -> Vec<PathBuf> {
        node.graph().await.handles().iter().map(|layer| layer.path().to_owned()).collect()
    }

    /// True when another image needs what the merge would change, or the leaf's parent cannot take its name.
    fn must_be_refused(&self, paths: &[PathBuf], plan: &Plan) -> bool {
        let Plan::Coalesce(Merged { path, parent: planned, .. }) = plan else { return false };
        let Some(number) = paths.iter().position(|layer| layer == path) else { return false };
        // With another parent, or none, the merge was done before, but for its note.
        let Some(parent) = paths.get(number + 1).filter(|parent| *parent == planned) else { return false };
        let is_foreign = number == 0 && parent.extension() != path.extension();
        is_foreign || self.second_parent().as_ref().is_some_and(|second| second == parent)
    }

    /// Where the second child's parent is now: layers that were merged, and whose files are gone, have passed the child on. How the job
    /// ended does not tell that: it may have failed behind that step.
    fn second_parent(&self) -> Option<PathBuf> {
        let mut parent = self.chain.second_parent()?;
        let names = self.world.names();
        while !names.contains(&parent)
            && let Some(next) = self.moved.borrow().get(&parent)
        {
            parent.clone_from(next);
        }
        Some(parent)
    }

    async fn check_refused(&self, node: &MergeNode, error: &Error, before: &[PathBuf]) {
        let is_refusal = matches!(error.kind(), ErrorKind::Busy | ErrorKind::Unsupported | ErrorKind::Denied);
        assert!(is_refusal || self.has_faults(), "a merge that must be refused failed otherwise: {error:?}");
        assert_eq!(self.paths_of(node).await, before, "a merge that was refused has changed the chain");
        self.count(|summary| summary.refused += 1);
    }

    /// A merge that was broken off has written to the parent. A VHD holds a later time for it than before.
    async fn check_time(&self, node: &MergeNode, plan: &Plan, begun_unix_s: u64) {
        let Plan::Coalesce(Merged { path, .. }) = plan else { return };
        if self.chain.is_qcow2() {
            return;
        }
        let graph = node.graph().await;
        let Some(layer) = graph.layers().into_iter().find(|layer| layer.path == *path) else { return };
        let held = layer.facts.parent_changed_unix_s;
        assert!(held >= Some(begun_unix_s), "{} holds the time {held:?} for its parent", path.display());
    }

    async fn check_done(&self, node: &MergeNode, plan: &Plan, before: &[PathBuf]) {
        let files = self.world.files();
        let after = self.paths_of(node).await;
        assert_eq!(after[0], self.chain.disk.as_path(), "the leaf is not called as the disk any more");
        match plan {
            Plan::Move(_) => panic!("nobody has begun a move here"),
            Plan::Flatten => {
                assert_eq!(after.len(), 1, "a flattened disk has parents: {after:?}");
                self.count(|summary| summary.flattened += 1);
            }
            Plan::Coalesce(Merged { path, parent, .. }) => {
                let gone = if path == self.chain.disk.as_path() { parent } else { path };
                assert!(files.canonical(gone).await.is_err(), "{} is still there", gone.display());
                assert!(!after.contains(gone), "{} is still a layer", gone.display());
                let (leaf, was_layer) = (path == self.chain.disk.as_path(), before.contains(path));
                self.count(|summary| match leaf {
                    true => summary.leaves += 1,
                    false => summary.merged += u64::from(was_layer),
                });
                if self.second_parent().as_ref() == Some(parent) {
                    self.verify_second().await;
                }
            }
        }
    }
}
