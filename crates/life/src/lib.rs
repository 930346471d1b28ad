//! The life of a disk: what is done to its images while it is served, and while it is not.
//!
//! Everything here works on the traits of `core` and on nodes, and names no format: so the same code
//! changes the disks of a running server, works on files from the command line, and is ended at any step by the simulator.
//!
//! The path of a disk names its writable leaf at every moment. Work that is under way leaves files beside the disk, whose names
//! [`names`] gives; whoever opens the disk next finds them there, and goes on or takes back.
#![forbid(unsafe_code)]

pub mod backup;
pub mod base;
pub mod changes;
pub mod delete;
pub mod flatten;
pub mod gc;
pub mod gone;
pub mod jobs;
mod lanes;
pub mod merge;
pub mod motion;
pub mod names;
pub mod rebase;
mod recover;
pub mod revert;
pub mod set;
pub mod snapshot;
mod work;

use std::path::Path;

use spile_core::{ErrorKind, Files, Result};

use jobs::{Note, Plan, State};
pub use recover::recover;
pub use work::{Later, Marks, Neighbours, NoteChild, Put, Sizes, Work};

/// Goes on with what `plan` says.
///
/// # Errors
/// As [`merge::coalesce`], [`flatten::flatten`] and [`motion::run`].
pub async fn run<F: Files>(work: &Work<'_, F>, plan: &Plan) -> Result<()> {
    match plan {
        Plan::Coalesce(merged) => merge::coalesce(work, merged).await,
        Plan::Flatten => flatten::flatten(work).await,
        // A long future, which those of other jobs need not hold.
        Plan::Move(to) => Box::pin(motion::run(work, to)).await,
    }
}

/// Says in the job how it ended. The note of `disk` stays only when something is left that the next process, or the next job, is to do: a
/// job that was stopped, or a layer that the disk has no more, or may have no more, and whose file is still there. The note of another
/// job stays in any case.
async fn finish<F: Files>(work: &Work<'_, F>, disk: &Path, plan: &Plan, result: Result<()>) -> Result<()> {
    let stays = match work.job.outcome(&result) {
        State::Stopped => {
            let note = Note::new(plan.clone(), work.job.wishes(), None);
            // When that fails, the note that is there has what was wanted when the job began.
            let _ = note.replace(work.files, disk).await;
            // It may have been cancelled meanwhile.
            work.job.outcome(&result) == State::Stopped
        }
        State::Failed => merge::may_have_taken_out(work, plan).await,
        _ => false,
    };
    let result = match (stays, result) {
        (true, result) => result,
        // The move has removed its note itself, or said why it could not.
        (false, Ok(())) if matches!(plan, Plan::Move(moved) if !moved.stays) => Ok(()),
        (false, Ok(())) => plan.remove_own(work.files, disk).await,
        // A job that was cancelled has failed when its note stays: the next server would go on with it.
        (false, Err(ended)) if ended.kind() == ErrorKind::Shutdown => {
            plan.remove_own(work.files, disk).await.and(Err(ended))
        }
        (false, failed) => {
            let _ = plan.remove_own(work.files, disk).await;
            failed
        }
    };
    work.job.end(&result);
    result
}

/// Does what a merge has left to do whose layer the disk has no more.
async fn finish_left<F: Files>(work: &Work<'_, F>, disk: &Path) -> Result<()> {
    match Plan::read(work.files, disk).await? {
        Some(plan) if merge::has_taken_out(work, &plan).await => {
            merge::finish_left(work, &plan).await?;
            Plan::remove(work.files, disk).await
        }
        _ => Ok(()),
    }
}
