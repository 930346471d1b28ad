//! [`Lanes`]: how many pieces a job moves at a time.
//!
//! While guests have requests, a job has one lane: it moves one small piece after the other and leaves guests their share of the time
//! ([`Job::piece`](crate::jobs::Job)). When no guest has had a request for some pieces, it opens more lanes and moves larger pieces, so
//! that the storage always has several operations in flight. The first request of a guest closes them again: what it may have to wait
//! for is what is in flight by then.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use futures_util::future::join_all;
use spile_core::{Files, Result, Segments};

use crate::work::Work;

/// So many pieces or units are counted before guests have their turn.
pub(crate) const COUNTED_AT_ONCE: u64 = 4096;
/// Long enough for all that is ready to be done.
pub(crate) const A_TURN: Duration = Duration::from_micros(1);
/// After so many pieces without a request of a guest, guests are taken to be quiet.
const QUIET_AFTER: u32 = 16;

/// The lanes of a job.
pub(crate) struct Lanes<'a, 'w, F: Files> {
    work: &'a Work<'w, F>,
    /// The count of guests' requests when it was last looked at.
    guests: Cell<u64>,
    /// So many pieces more without a request, and guests are quiet.
    left: Cell<u32>,
    /// Buffers that no lane uses now.
    buffers: RefCell<Vec<Segments>>,
}

/// One lane while it is open.
pub(crate) struct Lane<'l, 'w, F: Files> {
    lanes: &'l Lanes<'l, 'w, F>,
    is_first: bool,
    buffer: Segments,
}

impl<'a, 'w, F: Files> Lanes<'a, 'w, F> {
    pub fn new(work: &'a Work<'w, F>) -> Self {
        let guests = work.guests();
        // A disk that has had no request is used by nobody but the job.
        let left = if guests == 0 { 0 } else { QUIET_AFTER };
        Self { work, guests: Cell::new(guests), left: Cell::new(left), buffers: RefCell::default() }
    }

    /// True when several pieces may be moved at a time: guests are quiet, and the job has no rate to keep.
    pub fn is_quiet(&self) -> bool {
        self.look() && self.left.get() == 0 && self.work.job.wishes().limit_bytes_per_s.is_none()
    }

    /// Looks whether guests have had requests. False when they have.
    fn look(&self) -> bool {
        let guests = self.work.guests();
        let is_same = self.guests.replace(guests) == guests;
        if !is_same {
            self.left.set(QUIET_AFTER);
        }
        is_same
    }

    /// Runs `step` in each lane again and again, until it says that nothing is left, or has failed in one.
    ///
    /// # Errors
    /// Those of `step`. No step is under way any more.
    pub async fn run(&self, step: impl AsyncFn(&Lane<'_, 'w, F>) -> Result<bool>) -> Result<()> {
        let is_over = Cell::new(false);
        while !is_over.get() {
            self.stretch(&step, &is_over).await?;
        }
        Ok(())
    }

    /// One stretch of [`Lanes::run`]. It ends before that is over when only the first lane is open and guests have become quiet: the next
    /// stretch opens the others again.
    async fn stretch(&self, step: &impl AsyncFn(&Lane<'_, 'w, F>) -> Result<bool>, is_over: &Cell<bool>) -> Result<()> {
        let count = self.work.sizes.lanes.max(1);
        let open = Cell::new(count);
        let lane = async |number: usize| {
            let (mut lane, mut result) = (None, Ok(()));
            let opens_others = |steps: u32| number == 0 && steps > 0 && count > 1 && open.get() == 1 && self.is_quiet();
            for steps in 0.. {
                if is_over.get() || (number > 0 && !self.is_quiet()) || opens_others(steps) {
                    break;
                }
                let lane = lane.get_or_insert_with(|| self.open(number));
                let done = step(lane).await;
                is_over.set(is_over.get() || !matches!(done, Ok(true)));
                result = done.map(|_| ());
            }
            open.set(open.get() - 1);
            if let Some(lane) = lane {
                self.buffers.borrow_mut().push(lane.buffer);
            }
            result
        };
        join_all((0..count).map(lane)).await.into_iter().collect()
    }

    fn open(&self, number: usize) -> Lane<'_, 'w, F> {
        let most_bytes = self.work.sizes.piece_bytes.max(self.work.sizes.quiet_piece_bytes) as usize;
        let buffer = self.buffers.borrow_mut().pop().unwrap_or_else(|| Segments::zeroed(most_bytes));
        Lane { lanes: self, is_first: number == 0, buffer }
    }
}

impl<F: Files> Lane<'_, '_, F> {
    /// How long the next piece may be.
    pub fn piece_bytes(&self) -> u64 {
        let sizes = &self.lanes.work.sizes;
        if self.lanes.is_quiet() { sizes.quiet_piece_bytes } else { sizes.piece_bytes }
    }

    /// As long as a piece, or longer.
    pub fn buffer(&self) -> &Segments {
        &self.buffer
    }

    /// Moves one piece, once it may. `work` says how many bytes it has copied.
    ///
    /// # Errors
    /// `Shutdown` when the job is to end here; those of the move.
    pub async fn piece(&self, work: impl Future<Output = Result<u64>>) -> Result<()> {
        let Work { job, timer, .. } = self.lanes.work;
        job.piece_in_lane(*timer, self.is_first, || self.lanes.work.guests(), || false, work).await?;
        if self.lanes.look() {
            self.lanes.left.set(self.lanes.left.get().saturating_sub(1));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;

    use spile_core::{Disk as _, Env, Extent};
    use spile_engine::{Config, Engine, OsEnv};
    use spile_image::{Broken, Graph};
    use spile_node::Node;
    use spile_store::{AnyStore, CacheMode, MemStore, OsFiles};

    use super::*;
    use crate::jobs::testing::Sleeps;
    use crate::jobs::{Job, Wishes};
    use crate::work::Sizes;

    /// Moves 300 pieces on a disk that was read before. `between` is done beside the 100th piece. The most pieces under way at a time, in each hundred.
    async fn lanes_of(between: impl AsyncFn(&Node<Graph<AnyStore>>)) -> [u32; 3] {
        let node = Node::new(Graph::from_raw_store(AnyStore::Mem(MemStore::new(1 << 20)), false));
        let read = async |node: &Node<Graph<AnyStore>>| {
            node.read(Extent::from_range(0..4096), &Segments::zeroed(4096)).await.unwrap();
        };
        read(&node).await;
        let (files, neighbours) = (OsFiles::new(CacheMode::Page), Vec::<PathBuf>::new());
        let (env, job): (Arc<dyn Env>, _) = (Arc::new(OsEnv), Job::new(Wishes::default()));
        // A lane leaves guests as much time as its piece took, by the clock: this one does not see how long the machine lets the test wait.
        let timer = Sleeps::default();
        let work = Work {
            files: &files,
            asking: &files,
            env: &env,
            timer: &timer,
            node: &node,
            job: &job,
            neighbours: &neighbours,
            marks: None,
            sizes: Sizes::default(),
            broken: Broken::Nothing,
        };
        let (begun, open, most) = (Cell::new(0_usize), Cell::new(0), Cell::new([0; 3]));
        let step = async |lane: &Lane<'_, '_, OsFiles>| {
            let number = begun.replace(begun.get() + 1);
            if number >= 300 {
                return Ok(false);
            }
            let piece = async {
                open.set(open.get() + 1);
                let mut all = most.get();
                all[number / 100] = all[number / 100].max(open.get());
                most.set(all);
                if number == 100 {
                    between(&node).await;
                }
                spile_core::yield_now().await;
                open.set(open.get() - 1);
                Ok(4096)
            };
            lane.piece(piece).await.map(|()| true)
        };
        Lanes::new(&work).run(step).await.unwrap();
        most.get()
    }

    #[test]
    fn lanes_open_when_guests_have_become_quiet_and_again_after_a_request() {
        let engine = Engine::start(Config { workers: 1, ..Config::default() }).unwrap();
        engine.run_on(0, || async {
            assert_eq!(lanes_of(async |_| {}).await, [8, 8, 8]);
            let [_, beside, after] = lanes_of(async |node| {
                node.read(Extent::from_range(0..4096), &Segments::zeroed(4096)).await.unwrap();
            })
            .await;
            assert_eq!((beside, after), (8, 8));
        });
        engine.shutdown();
    }
}
