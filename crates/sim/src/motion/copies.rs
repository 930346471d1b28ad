//! Copies of the disk of [`super`], which stays where it is: a job keeps the copy in step until it is told to end it.
//!
//! Such a job notes what changes since some moment, and now and then a later one takes its place. When the process ends right after that, all that had
//! changed before must be durable in the copy: the next process copies only what has changed since.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use spile_core::{Disk as _, ErrorKind, Extent, Locator, Segments};
use spile_image::{Format, Graph, OpenOptions};
use spile_life::jobs::{Job, Plan};
use spile_life::motion::Move;
use spile_node::Aligned;

use super::{Host, MotionNode};
use crate::exec::{Ended, Executor};
use crate::rng::Rng;
use crate::turns::{pause, turns};
use crate::workload::Workload;

/// True for the seeds in which disks are copied. The other seeds stay what they were before there were copies.
pub(super) fn has_copies(seed: u64) -> bool {
    seed.is_multiple_of(7)
}

/// A client makes so many requests at most while a disk is copied. One that never rests may have the end of the copy put off for ever.
const MOST_REQUESTS: u64 = 500;

/// What stays over the lives of a process that copies its disk.
pub(super) struct Copies {
    /// Where the last copy was begun.
    to: RefCell<Option<PathBuf>>,
    /// The copy is told to end since that moment.
    ending: Cell<Option<u64>>,
    rng: RefCell<Rng>,
}

impl Copies {
    pub fn new(seed: u64) -> Self {
        Self { to: RefCell::default(), ending: Cell::new(None), rng: RefCell::new(Rng::new(seed).split(84)) }
    }

    /// Where the last copy was begun.
    pub fn to(&self) -> Option<PathBuf> {
        self.to.borrow().clone()
    }
}

impl Host {
    /// In most jobs of the seeds that have copies: the job copies the disk to a new place.
    pub(super) fn copy_instead(&self) -> Option<Plan> {
        let mut rng = self.copies.rng.borrow_mut();
        if !has_copies(self.plan.seed) || rng.chance(1, 4) {
            return None;
        }
        let format = *rng.pick(&[Format::Raw, Format::Raw, Format::Vhd, Format::Qcow2]);
        Some(Plan::Move(Move {
            to: Locator::Path(format!("/copies/{}/copy.{format}", self.begun.get()).into()),
            format,
            deletes_source: false,
            keeps_chain: false,
            stays: true,
            has_no_mark: false,
            id: None,
        }))
    }

    /// The job copies the disk `node` to `to`, and is told to end that later. A client goes on with its work until then.
    pub(super) fn begin_copy(self: &Rc<Self>, job: &Arc<Job>, node: &MotionNode, to: &Path) {
        self.copies.to.replace(Some(to.to_owned()));
        let draw = || Rng::new(self.copies.rng.borrow_mut().word());
        crate::exec::spawn_beside(Box::pin(self.clone().finish_later(job.clone(), draw())));
        crate::exec::spawn_beside(Box::pin(Self::work_on(self.workload(node.clone()), job.clone(), draw())));
    }

    async fn work_on(work: Rc<Workload<MotionNode>>, job: Arc<Job>, mut rng: Rng) {
        for _ in 0..MOST_REQUESTS {
            if job.state().is_over() {
                return;
            }
            pause(&mut rng, 100).await;
            let word = rng.word();
            work.clone().client(Rng::new(word), 1).await;
        }
    }

    /// Tells a copy that stays in step to end: mostly when the moment has moved forward some times since which it is noted what changes.
    async fn finish_later(self: Rc<Self>, job: Arc<Job>, mut rng: Rng) {
        let until = self.tracking.forward.get() + rng.below(5);
        let mut looks = 400;
        while self.tracking.forward.get() < until && looks > 0 {
            looks -= 1;
            turns(16).await;
        }
        pause(&mut rng, 600).await;
        if !job.state().is_over() {
            self.copies.ending.set(Some(self.oracle.borrow_mut().begin_read()));
        }
        job.finish();
    }

    /// Nothing is told to end any more.
    pub(super) fn forget_ending(&self) {
        if let Some(issued) = self.copies.ending.take() {
            self.oracle.borrow_mut().abandon_read(issued);
        }
    }

    /// Compares the copy at `to`, which is done, with what the disk may have held since its job was told to end it. `was_there`: a process before has given it
    /// its name, and it is older.
    pub(super) async fn compare_copy(&self, to: &Path, was_there: bool) {
        if was_there {
            self.count(|summary| summary.named_before += 1);
            return self.forget_ending();
        }
        let issued = self.copies.ending.take().expect("a copy is done, and nobody has told it to end");
        let format = Format::from_extension(to);
        let options = OpenOptions { format, read_only: true, ..OpenOptions::default() };
        let opened = Graph::open(&self.world.files(), self.world.env(), to, &options).await;
        let bytes = Segments::zeroed(self.size_bytes as usize);
        let read = match opened {
            Ok(graph) => Aligned::new(Arc::new(graph)).read(Extent::from_range(0..self.size_bytes), &bytes).await,
            Err(error) => Err(error),
        };
        if let Err(error) = read {
            let is_fault = error.kind() == ErrorKind::Io && self.has_faults();
            assert!(is_fault, "the copy cannot be read: {error:?}");
            return self.oracle.borrow_mut().abandon_read(issued);
        }
        let judged = self.oracle.borrow_mut().end_read(issued, 0, &bytes.to_vec());
        judged.unwrap_or_else(|error| panic!("the copy is not the disk: {error}"));
        self.count(|summary| summary.copied += 1);
    }

    /// Runs the work of a life. In many lives the process ends right after the moment has moved forward since which a copy notes what changes, where
    /// chance alone would seldom end it.
    pub(super) fn run_to_forward(&self, executor: &mut Executor, limit: u64) -> Option<()> {
        let most = {
            let mut rng = self.copies.rng.borrow_mut();
            if rng.chance(1, 4) { u64::MAX } else { rng.between(1, 3) }
        };
        let before = self.tracking.forward.get();
        loop {
            let until = limit.min(executor.steps() + 2);
            match executor.run(until) {
                Ended::Done => return Some(()),
                Ended::Stopped if self.tracking.forward.get() - before >= most => {
                    self.count(|summary| summary.ended_forward += 1);
                    return None;
                }
                Ended::Stopped if until == limit => return None,
                Ended::Stopped => {}
                Ended::Stuck => panic!("requests are left that nothing will wake"),
            }
        }
    }
}
