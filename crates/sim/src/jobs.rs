//! Jobs over several lives of the process that works on them, and who meddles with them.

use std::path::Path;
use std::sync::Arc;

use spile_core::metrics::Op;
use spile_core::{Disk, Files};
use spile_life::jobs::{Job, Note, State};
use spile_life::names;
use spile_node::Node;

use crate::rng::Rng;
use crate::turns::pause;

/// What the note beside the disk says that a life before has left to do. It can be read, unless there were faults in this life.
pub(crate) async fn left<F: Files>(files: &F, disk: &Path, has_faults: impl Fn() -> bool) -> Option<Note> {
    let note = Note::read(files, disk).await;
    note.unwrap_or_else(|error| {
        assert!(has_faults(), "the note cannot be read: {error:?}");
        None
    })
}

/// The note is there exactly when the next process is to go on with a job that has come to `state`.
pub(crate) async fn check_note<F: Files>(files: &F, disk: &Path, state: State, has_faults: impl Fn() -> bool) {
    let there = files.canonical(&names::job(disk)).await.is_ok();
    let is_right = there == (state == State::Stopped);
    assert!(is_right || has_faults(), "after a job that is {state:?} its note is there: {there}");
}

/// How many requests of clients have ended.
pub(crate) fn requests<G: Disk>(node: &Node<G>) -> u64 {
    let reading = node.meter().read();
    Op::ALL.iter().map(|op| reading.op(*op).ended).sum()
}

/// Pauses and resumes the job, slows it, and ends it now and then: each in one of `one_in` times.
pub(crate) async fn meddle(job: Arc<Job>, mut rng: Rng, one_in: u64) {
    for _ in 0..rng.below(4) {
        pause(&mut rng, 300).await;
        match rng.below(one_in) {
            0 => job.cancel(),
            1 => job.stop(),
            2 => job.set_limit(Some(rng.between(1, 64) << 16)),
            3 => job.set_limit(None),
            _ => {
                job.pause();
                pause(&mut rng, 200).await;
                job.resume();
            }
        }
    }
}
