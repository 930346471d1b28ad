//! The jobs of [`super`], and what must be true when they have ended.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use spile_core::{Disk as _, Env, Error, ErrorKind, Extent, Locator, Segments};
use spile_image::layer::Identity;
use spile_image::{Format, Graph, OpenOptions};
use spile_life::Work;
use spile_life::jobs::note::There;
use spile_life::jobs::{Job, Plan, State, Wishes};
use spile_life::motion::{Move, Received, old_image};
use spile_life::names;
use spile_node::Aligned;

use super::house::FOLDER;
use super::link::export;
use super::{Broken, Host, LinkNode};
use crate::jobs;
use crate::motion::marks::Marked;
use crate::rng::Rng;
use crate::turns::{Turns, pause, turns};

/// The name there of the disk that a move takes to `to`.
fn name_of(to: &Locator) -> String {
    to.to_string().rsplit('/').next().unwrap_or_default().to_owned()
}

impl Host {
    /// Goes on with the job that the note names, then begins others, until the disk is gone.
    pub(super) async fn jobs(self: Rc<Self>, node: LinkNode, mut rng: Rng) {
        if let Some(note) = jobs::left(&self.files(), &self.at, || self.has_faults()).await {
            self.count(|summary| {
                summary.resumed += 1;
                summary.taken_up += u64::from(note.copied.is_some());
            });
            // All that is left to do is that the copy gets its name: it was compared before, or its process has ended too soon.
            self.is_ended.set(note.there == Some(There::Naming));
            if self.job(&node, note.plan, &mut rng).await == State::Stopped {
                return;
            }
        }
        self.is_ended.set(false);
        for _ in 0..rng.between(1, 2) {
            pause(&mut rng, 100).await;
            if !self.is_here() {
                return;
            }
            self.begun.set(self.begun.get() + 1);
            let stays = rng.chance(1, 5);
            // Who writes to a copy that is whole writes to its file.
            let extension = if stays || rng.chance(1, 2) { "raw" } else { "vhd" };
            // A copy that stays is raw, and has no parents.
            let keeps_chain = !self.parents.is_empty() && !stays && rng.chance(3, 4);
            let extension = if keeps_chain { "vhd" } else { extension };
            let is_qcow2 = self.qcow2_rng.as_ref().is_some_and(|rng| rng.borrow_mut().chance(1, 2));
            let extension = if is_qcow2 && extension == "vhd" { "qcow2" } else { extension };
            let name = format!("disk{}.{extension}", self.begun.get());
            // Back to where it came from, once: when such a move is given up, and that host does not hear it, no other one gets the name.
            let came_as = if stays { None } else { self.came_as.take() };
            let name = came_as.unwrap_or(name);
            let plan = Plan::Move(Move {
                to: export(&name),
                format: Format::Raw,
                deletes_source: rng.chance(1, 3),
                keeps_chain,
                stays,
                has_no_mark: false,
                id: Some(Identity(self.here.env().random_16())),
            });
            if self.job(&node, plan, &mut rng).await == State::Stopped {
                return;
            }
        }
    }

    /// One job, and what must be true when it has ended.
    async fn job(self: &Rc<Self>, node: &LinkNode, plan: Plan, rng: &mut Rng) -> State {
        let Plan::Move(Move { to, deletes_source, stays, keeps_chain, .. }) = &plan else {
            panic!("a job that nobody has begun: {plan:?}")
        };
        let name = name_of(to);
        *self.to.borrow_mut() = Some(name.clone());
        if *stays {
            self.copies.borrow_mut().insert(name.clone());
        }
        let found =
            self.parents.iter().filter(|name| *keeps_chain && self.there.has_disk(&self.there.at(name))).count();
        self.count(|summary| summary.parents_found += found as u64);
        let (troubles, was_there) = (self.there.troubles.load(SeqCst), self.there.house().is_some());
        let limit_bytes_per_s = rng.chance(1, 4).then_some(1 << 20);
        let job = Arc::new(Job::new(Wishes { limit_bytes_per_s, ..Wishes::default() }));
        if *stays {
            let rng = Rng::new(rng.word());
            crate::exec::spawn_beside(Box::pin(self.clone().finish_later(job.clone(), rng)));
        }
        if rng.chance(1, 3) {
            crate::exec::spawn_beside(Box::pin(jobs::meddle(job.clone(), Rng::new(rng.word()), 8)));
        }
        let (files, env, timer): (_, Arc<dyn Env>, _) = (self.files(), self.here.env(), Turns::of_time());
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
            broken: self.broken.of_mover(),
        };
        let old = old_image(&self.there.at(&name));
        let had_old = self.there.has(&old);
        let has_chain = *keeps_chain && node.graph().await.handles().len() > 1;
        // An earlier move may have left them, whose link was cut before it could say that it ends.
        let halves: Vec<_> = self.parents.iter().filter(|name| self.has_half(name)).cloned().collect();
        let before = jobs::requests(node);
        let ended = spile_life::run(&work, &plan).await;
        let is_busy = jobs::requests(node) > before;
        let had_trouble = self.there.troubles.load(SeqCst) > troubles || !was_there;
        let is_at = node.graph().await.handles()[0].path().to_owned();
        match ended {
            Ok(()) if *stays => {
                assert!(self.is_here() && is_at == self.at, "a copy has taken the disk away");
                assert!(self.there.has_disk(&self.there.at(&name)), "a copy that is done has no name");
                self.count(|summary| summary.copied += 1);
                self.compare_copy(&name);
            }
            Ok(()) => {
                assert!(is_at.ends_with(&name), "the disk is not at its new place, but at {}", is_at.display());
                assert!(!self.is_here(), "the disk has its old name still");
                // A job that was stopped leaves the new name to the next process.
                let is_named = self.there.has_disk(&self.there.at(&name));
                assert!(is_named || job.is_stopping() || self.has_faults(), "a move that is done has no name there");
                let is_kept = self.here.file_number(&old_image(&self.at)).is_some();
                let may_be_kept = self.has_faults() || !is_named;
                assert!(is_kept != *deletes_source || may_be_kept, "the old image is kept: {is_kept}");
                self.count(|summary| {
                    (summary.moved, summary.busy) = (summary.moved + 1, summary.busy + u64::from(is_busy));
                    summary.troubled += u64::from(had_trouble);
                    summary.kept += u64::from(*keeps_chain);
                });
                if had_old && !self.there.has(&old) {
                    self.count_way_back(&job, has_chain);
                }
            }
            Err(error) => {
                assert!(is_at == self.at && self.is_here(), "a move that has failed has changed the disk: {error:?}");
                let was_told = matches!(job.state(), State::Cancelled | State::Stopped);
                let fine = (was_told && error.kind() == ErrorKind::Shutdown) || self.has_faults();
                let fine = fine || error.to_string().contains("cannot take the disk's place");
                // Nothing was copied yet.
                let has_begun = job.report().motion.is_some();
                let fine = fine || had_trouble && !has_begun;
                let fine = fine || had_trouble && self.has_only_asked(&job, &error);
                // Where it came from, its old parents have their names, and no move has brought them.
                let is_taken =
                    error.kind() == ErrorKind::Exists && error.to_string().contains("not come here as a parent");
                let fine = fine || *keeps_chain && is_taken && self.is_way_back();
                // A copy got its name, and the process ended before it was told.
                let is_whole_copy = *stays && self.there.has_disk(&self.there.at(&name));
                let fine = fine || (error.kind() == ErrorKind::Denied && is_whole_copy);
                assert!(fine, "{plan:?} failed without a fault: {error:?}");
                if job.state() != State::Stopped && !had_trouble && !self.has_faults() {
                    // An order to drop it may be on its way still.
                    turns(1).await;
                    let is_left = self.has_half(&name) && !is_whole_copy;
                    assert!(!is_left, "a move that was given up has left a half there: {error:?}");
                    let half = self.parents.iter().find(|name| self.has_half(name) && !halves.contains(name));
                    assert!(half.is_none(), "a move that was given up has left a half of {half:?} there: {error:?}");
                }
                self.count(|summary| summary.ended_early += 1);
            }
        }
        jobs::check_note(&self.files(), &self.at, job.state(), || self.has_faults()).await;
        job.state()
    }

    /// The disk is on the host that it has gone to.
    fn is_way_back(&self) -> bool {
        self.at.starts_with(FOLDER)
    }

    /// The disk has gone back into its old image.
    fn count_way_back(&self, job: &Job, has_chain: bool) {
        let is_less = job.report().done_bytes < self.size_bytes / 2;
        self.count(|summary| {
            (summary.back, summary.back_by_less) = (summary.back + 1, summary.back_by_less + u64::from(is_less));
            summary.back_with_chain += u64::from(has_chain);
        });
    }

    /// The other host was only asked what has become of the old image there when the job failed with `error`: as any move to a host that does not answer.
    fn has_only_asked(&self, job: &Job, error: &Error) -> bool {
        let said = error.to_string();
        let is_trouble =
            error.kind() == ErrorKind::TimedOut || said.contains("connection") || said.contains("nobody listens");
        self.is_way_back() && is_trouble && job.report().done_bytes == 0
    }

    /// Something of a move to `name` is there that is not whole.
    pub(super) fn has_half(&self, name: &str) -> bool {
        let disk = self.there.at(name);
        self.there.has(&names::receiving(&disk))
            || self.there.has(&names::received(&disk)) && !self.there.has_disk(&disk)
    }

    /// Somebody on the other host uses the copies that are whole, and nobody else writes to them from then on.
    pub(super) fn use_copies(&self) {
        for name in self.copies.borrow().iter() {
            let (disk, world) = (self.there.at(name), &self.there.world);
            let is_whole = world.view(&names::received(&disk)).is_some_and(|note| {
                let mut text = vec![0; note.len() as usize];
                note.read(0, &mut text);
                String::from_utf8_lossy(&text).contains("\nstate whole\n")
            });
            let Some(view) = world.view(&disk).filter(|_| is_whole) else { continue };
            let mut first = [0; USED.len()];
            view.read(0, &mut first);
            if self.used.borrow_mut().insert(name.clone()) {
                world.poke(&disk, 0, USED);
                self.count(|summary| summary.used += 1);
            } else {
                assert_eq!(&first[..], USED, "somebody has written to a copy that is whole, and in use");
            }
        }
    }

    /// Each parent that has its name on the other host shows there what it shows here.
    pub(super) async fn check_parents(&self) {
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        for name in self.parents.iter().filter(|name| self.there.has_disk(&self.there.at(name))) {
            let (one, other) = (self.here_at(name), self.there.at(name));
            let here = Graph::open(&self.here.files(), self.here.env(), one.as_path(), &options).await;
            let there = Graph::open(&self.there.world.files(), self.there.world.env(), other.as_path(), &options).await;
            let (here, there) = (Arc::new(here.expect("a parent opens")), there);
            let there =
                Arc::new(there.unwrap_or_else(|error| panic!("the parent {name} does not open there: {error:?}")));
            let bytes = [here, there].map(|graph| (Aligned::new(graph), Segments::zeroed(self.size_bytes as usize)));
            for (disk, into) in &bytes {
                disk.read(Extent::from_range(0..self.size_bytes), into).await.expect("a parent reads");
            }
            assert!(bytes[0].1.to_vec() == bytes[1].1.to_vec(), "the parent {name} there is another one than here");
        }
    }

    /// An operator removes the halves of moves that nobody goes on with.
    pub(super) async fn clean_up(&self) {
        let files = self.there.world.files();
        let disks =
            (1..=self.begun.get()).flat_map(|number| ["raw", "vhd", "qcow2"].map(|end| format!("disk{number}.{end}")));
        let last = self.to.borrow().clone();
        for name in disks.chain(self.parents.iter().map(|name| (*name).to_owned())).chain(last) {
            let note = Received::read(&files, &self.there.at(&name)).await;
            let note = note.unwrap_or_else(|error| panic!("a note there cannot be read: {error:?}"));
            // Without a note, any move may ask for that.
            let id = note.map_or(Identity([0; 16]), |note| note.id);
            let was_left = self.has_half(&name);
            let house = self.there.house().expect("the process there has begun");
            let dropped = house.with_receiver(async |receiver| receiver.drop_half(&name, id).await).await;
            match dropped {
                Ok(()) => self.count(|summary| summary.left += 1),
                Err(error) => {
                    let is_whole = self.there.has_disk(&self.there.at(&name));
                    assert!(!was_left || is_whole, "what was left cannot be removed: {error:?}");
                }
            }
        }
        let is_tidy = |path: &PathBuf| {
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            !path.starts_with(FOLDER)
                || !file.starts_with('.') && self.there.has_disk(path)
                || names::disk_of(path).is_some_and(|disk| {
                    // A name more of a disk that is whole goes when the order is given again.
                    [names::received(&disk), names::changes(&disk)].contains(path) && self.there.has_disk(&disk)
                })
        };
        let left: Vec<_> = self.there.world.names().into_iter().filter(|path| !is_tidy(path)).collect();
        assert!(left.is_empty() || self.broken != Broken::Nothing, "this is left on the other host: {left:?}");
    }
}

const USED: &[u8] = b"this copy is in use";

impl Host {
    /// Tells a copy that stays in step to end.
    async fn finish_later(self: Rc<Self>, job: Arc<Job>, mut rng: Rng) {
        pause(&mut rng, 600).await;
        if !self.is_ended.get() && !job.state().is_over() {
            let issued = self.oracle.borrow_mut().begin_read();
            self.ending.set(Some((self.begun.get(), issued)));
        }
        job.finish();
    }

    /// Compares the copy `name`, which is whole, with what the disk may have held since its job was told to end it.
    fn compare_copy(&self, name: &str) {
        let Some((_, issued)) = self.ending.take().filter(|(number, _)| *number == self.begun.get()) else { return };
        let content = self.there.world.view(&self.there.at(name)).expect("a copy that has its name is there");
        let mut bytes = vec![0; content.len() as usize];
        content.read(0, &mut bytes);
        let read = self.oracle.borrow_mut().end_read(issued, 0, &bytes);
        read.unwrap_or_else(|error| panic!("the copy is not the disk: {error}"));
        self.count(|summary| summary.compared += 1);
    }
}
