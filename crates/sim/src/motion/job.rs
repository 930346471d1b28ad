//! The jobs of [`super`], and those who meddle with them.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use spile_core::{Env, ErrorKind, Files, Locator};
use spile_image::{Format, LayerInfo};
use spile_life::jobs::{Job, Plan, State, Wishes};
use spile_life::motion::{CameFrom, Move, old_image};
use spile_life::{Work, names};

use super::marks::Marked;
use super::{Host, MotionNode, SHARED};
use crate::jobs;
use crate::rng::Rng;
use crate::turns::{Turns, pause, turns};

impl Host {
    /// Goes on with the job that the note names, then begins another one.
    pub(super) async fn jobs(self: Rc<Self>, node: MotionNode, mut rng: Rng) {
        if let Some(note) = jobs::left(&self.world.files(), &self.at(), || self.has_faults()).await {
            self.count(|summary| {
                summary.resumed += 1;
                summary.taken_up += u64::from(note.copied.is_some());
            });
            if self.job(&node, note.plan, &mut rng).await == State::Stopped {
                return;
            }
        }
        for _ in 0..rng.between(0, 2) {
            pause(&mut rng, 100).await;
            self.begun.set(self.begun.get() + 1);
            let format = *rng.pick(&[Format::Vhd, Format::Vhd, Format::Raw]);
            let is_qcow2 = self.qcow2_rng.as_ref().is_some_and(|rng| rng.borrow_mut().chance(1, 2));
            let format = if is_qcow2 && format == Format::Vhd { Format::Qcow2 } else { format };
            let to = PathBuf::from(format!("/array/{}/disk.{format}", self.begun.get()));
            // Now and then back to where the disk came from.
            let came = CameFrom::read(&self.world.files(), &self.at()).await.ok().flatten();
            let (to, format) = match came.filter(|_| rng.chance(1, 2)) {
                Some(came) => (came.from, came.format),
                None => (to, format),
            };
            // Now and then with its parents.
            let has_parents = node.graph().await.handles().len() > 1;
            let keeps_chain = has_parents && rng.chance(2, 3);
            let (to, format) = match keeps_chain && (format == Format::Raw || rng.chance(3, 4)) {
                true => {
                    let format = if is_qcow2 { Format::Qcow2 } else { Format::Vhd };
                    (Path::new(SHARED).join(format!("disk{}.{format}", self.begun.get())), format)
                }
                false => (to, format),
            };
            let plan = Plan::Move(Move {
                to: Locator::Path(to),
                format,
                deletes_source: rng.chance(1, 3),
                keeps_chain,
                stays: false,
                has_no_mark: false,
                id: None,
            });
            let plan = self.copy_instead().unwrap_or(plan);
            if self.job(&node, plan, &mut rng).await == State::Stopped {
                return;
            }
        }
    }

    /// One job, and what must be true when it has ended.
    async fn job(self: &Rc<Self>, node: &MotionNode, plan: Plan, rng: &mut Rng) -> State {
        let Plan::Move(Move { to: Locator::Path(to), deletes_source, keeps_chain, stays, .. }) = &plan else {
            panic!("a job that nobody has begun: {plan:?}")
        };
        let at = self.at();
        let was = self.to.replace((!stays).then(|| to.clone()));
        let before = if *stays { self.copies.to() } else { was };
        if before.as_ref() != Some(to) {
            self.had_faults.set(false);
        }
        let limit_bytes_per_s = rng.chance(1, 4).then_some(1 << 20);
        let job = Arc::new(Job::new(Wishes { limit_bytes_per_s, ..Wishes::default() }));
        if *stays {
            self.begin_copy(&job, node, to);
        }
        if rng.chance(1, 2) {
            crate::exec::spawn_beside(Box::pin(jobs::meddle(job.clone(), Rng::new(rng.word()), 8)));
        }
        crate::exec::spawn_beside(Box::pin(self.clone().watch(job.clone())));
        let (files, env, timer): (_, Arc<dyn Env>, _) = (self.world.files(), self.world.env(), Turns::of_time());
        let marked = Marked::new(&self.tracking, node);
        let work = Work {
            files: &files,
            asking: &files,
            env: &env,
            timer: &timer,
            node,
            job: &job,
            neighbours: &Vec::new(),
            marks: Some(&marked),
            sizes: self.sizes,
            broken: self.broken,
        };
        let before = jobs::requests(node);
        let comes_back = self.names_old_image(&at, to).await;
        let layers = node.graph().await.layers();
        let finds = if *keeps_chain { self.spoil_parents(&layers, to).await } else { false };
        let is_there = async |path: PathBuf| files.canonical(&path).await.is_ok();
        let was_there = is_there(to.clone()).await;
        let ended = spile_life::run(&work, &plan).await;
        let leaf = node.graph().await.handles()[0].path().to_owned();
        match ended {
            Ok(()) if *stays => {
                assert_eq!(leaf, at, "a copy has taken the disk away");
                assert!(is_there(to.clone()).await && is_there(at.clone()).await, "the names are wrong");
                let [copy, hidden] = [to, &names::moving(to)].map(|path| self.world.file_number(path));
                // An operator may have put another image there.
                assert!(copy != hidden || self.has_faults(), "the copy has its hidden name still");
                self.compare_copy(to, was_there).await;
            }
            Ok(()) => {
                assert_eq!(leaf, *to, "the disk is not at its new place");
                assert!(is_there(to.clone()).await && !is_there(at.clone()).await, "the names are wrong");
                let is_kept = is_there(old_image(&at)).await;
                assert!(is_kept != *deletes_source || self.has_faults(), "the old image is kept: {is_kept}");
                self.note_moved(to.clone());
                let has_chain = *keeps_chain && layers.len() > 1;
                if has_chain && !comes_back {
                    let new = node.graph().await.layers();
                    assert_eq!(new.len(), layers.len(), "the chain was not kept: {new:?}");
                    assert!(new.iter().all(|layer| layer.path.parent() == to.parent()), "another folder: {new:?}");
                }
                let is_busy = jobs::requests(node) > before;
                self.count(|summary| {
                    (summary.moved, summary.busy) = (summary.moved + 1, summary.busy + u64::from(is_busy));
                    summary.back += u64::from(comes_back && !self.has_faults());
                    summary.kept += u64::from(has_chain);
                    summary.reused += u64::from(has_chain && finds);
                });
            }
            Err(error) => {
                assert_eq!(leaf, at, "a move that has failed has changed the disk: {error:?}");
                let was_told = matches!(job.state(), State::Cancelled | State::Stopped);
                let fine = (was_told && error.kind() == ErrorKind::Shutdown) || self.has_faults();
                // Guests may use smaller units than the new image takes.
                let fine = fine || error.to_string().contains("cannot take the disk's place");
                // A new name that could be neither used nor removed in a life before is in the way.
                let fine = fine || (error.kind() == ErrorKind::Exists && self.had_faults.get());
                // The old image of a way that was not taken back is in the way of the next one.
                let fine = fine || error.to_string().contains("there is an old image of an earlier move");
                // Somebody has written to a parent there, and perhaps over what says where its data are.
                let fine = fine || error.to_string().contains("another file has it");
                let fine = fine || (error.kind() == ErrorKind::Corrupt && self.summary.get().spoiled > 0);
                assert!(fine, "{plan:?} failed without a fault: {error:?}");
                // The next process goes on with the half.
                let has_half = is_there(names::moving(to)).await && job.state() != State::Stopped;
                let is_tidy = is_there(at.clone()).await && !has_half && !is_there(to.clone()).await;
                assert!(
                    is_tidy || self.has_faults() || self.had_faults.get(),
                    "a move that has ended has left something: {error:?}"
                );
                self.count(|summary| summary.ended_early += 1);
            }
        }
        let has_half_parent = is_there(names::moving_parent(to)).await;
        assert!(!has_half_parent || self.has_faults(), "half a parent is left");
        jobs::check_note(&files, &at, job.state(), || self.has_faults()).await;
        job.state()
    }

    /// True when the disk at `at` came from `to`, and its old image is there still. Now and then an operator has written to that.
    async fn names_old_image(&self, at: &Path, to: &Path) -> bool {
        let image = old_image(to);
        let came = CameFrom::read(&self.world.files(), at).await.ok().flatten();
        if came.is_none_or(|came| came.from != *to) || self.world.file_number(&image).is_none() {
            return false;
        }
        let is_written = !self.has_faults() && self.window_rng.borrow_mut().chance(1, 6);
        if is_written {
            self.write_to_old_image(&image).await;
            self.count(|summary| summary.written_behind += 1);
        }
        !is_written
    }

    /// True when a parent of the disk, which has these layers, is at the place `to` already. Now and then an operator has written to that.
    async fn spoil_parents(&self, layers: &[LayerInfo], to: &Path) -> bool {
        let parents = self.parents();
        let copies = parents.iter().filter_map(|parent| parent.file_name().map(|name| to.with_file_name(name)));
        let there: Vec<_> = copies.filter(|copy| self.world.file_number(copy).is_some()).collect();
        let free: Vec<_> = there.iter().filter(|copy| layers.iter().all(|layer| layer.path != **copy)).collect();
        // A half that goes on is a child of them.
        let has_half = self.world.file_number(&names::moving(to)).is_some();
        let is_written = !self.has_faults() && !has_half && self.window_rng.borrow_mut().chance(1, 8);
        if let Some(copy) = free.first().filter(|_| is_written) {
            self.write_to_old_image(copy).await;
            self.count(|summary| summary.spoiled += 1);
        }
        !there.is_empty()
    }

    /// Now and then an operator writes to the old image that the disk at `disk` has left.
    async fn write_to_old_image(&self, image: &Path) {
        use spile_core::{OpenMode, Segments, Store, StoreOffset, Via};
        let opened = self.world.files().open(&image.into(), OpenMode::ReadWrite).await;
        let store = opened.unwrap_or_else(|error| panic!("the old image does not open: {error:?}"));
        let (bytes, at) = (Segments::zeroed(4096), store.len_bytes() / 2 / 4096 * 4096);
        bytes.fill(77);
        let written = store.write_at(StoreOffset(at), &bytes, Via::Cached).await;
        written.unwrap_or_else(|error| panic!("{error:?}"));
        drop(store);
        self.world.settle(image);
    }

    /// Looks whether a hand-over of the job is put off.
    async fn watch(self: Rc<Self>, job: Arc<Job>) {
        let mut is_put_off = false;
        while !job.state().is_over() && !is_put_off {
            turns(8).await;
            let trouble = job.report().motion.and_then(|motion| motion.trouble);
            is_put_off = trouble.is_some_and(|trouble| trouble.contains("put off"));
        }
        self.count(|summary| summary.put_off += u64::from(is_put_off));
    }
}
