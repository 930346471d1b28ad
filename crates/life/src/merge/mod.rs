//! Merges a layer of a disk into its parent, while the disk is in use, and removes it.
//!
//! # A layer between others
//!
//! The layer and its parent are opened for writing, and every read looks their maps up meanwhile. Guests never write to them.
//!
//! 1. What the layer has is copied into the parent, a batch of a bounded size at a time ([`mover`]).
//! 2. The parent is synced.
//! 3. The layer gives up the batch, and with it the space.
//! 4. When it has nothing left, its children name the parent, durably.
//! 5. The disk's graph is exchanged for one without the layer, and the file of the layer is removed.
//!
//! What the layer still has is what is left to do: so a process that is killed loses one batch of work, and every state in between
//! is a chain that any program reads right.
//!
//! Where the layer is a snapshot that its user keeps, and its parent was deleted, the parent takes its name instead of step 5 ([`named`]).
//!
//! # The leaf
//!
//! The leaf sinks ([`spile_image::Sinking`]): what guests write goes to the parent wherever the leaf has nothing, so the leaf only becomes
//! smaller. When it has nothing left, the parent's file takes the leaf's name, and the leaf is gone.

mod by_content;
mod check;
mod leaf;
mod left;
mod middle;
mod mover;
mod named;
mod portion;

use spile_core::{Error, ErrorKind, Extent, Files, Result};
use spile_image::layer::Layer as _;

use crate::gone::Gone;
use crate::jobs::{Merged, Note, Plan};
use crate::names;
use crate::snapshot::remove_if_there;
use crate::work::{GraphOf, Work, size_of};

pub use self::check::{find_layer, is_called, plan, plan_keeping};

/// Does what `plan` says, from wherever it was left, and says in the job how it ended. The note beside the disk is there while it works,
/// and stays when the job was stopped.
///
/// # Errors
/// What refuses the merge, and then nothing has changed; the stores'. What is done by then is valid.
pub async fn coalesce<F: Files>(work: &Work<'_, F>, plan: &Merged) -> Result<()> {
    let disk = work.disk_path().await;
    let result = begin(work, plan).await;
    crate::finish(work, &disk, &Plan::Coalesce(plan.clone()), result).await
}

/// True when the disk has no more the layer that `plan` merges: only its file may be left.
pub(crate) async fn has_taken_out<F: Files>(work: &Work<'_, F>, plan: &Plan) -> bool {
    match plan {
        Plan::Coalesce(merged) => number_of(&*work.node.graph().await, merged).is_none(),
        Plan::Flatten | Plan::Move(_) => false,
    }
}

/// True when the disk may have no more the layer that `plan` merges. When the layer has nothing left, its child was about to name another
/// parent: where that has failed, the file may say the new name or the old one, and only the next open shows which.
pub(crate) async fn may_have_taken_out<F: Files>(work: &Work<'_, F>, plan: &Plan) -> bool {
    let Plan::Coalesce(merged) = plan else { return false };
    let graph = work.node.graph().await;
    match number_of(&graph, merged) {
        None => true,
        // The leaf has no child, and its parent takes its name in one step.
        Some(0) => false,
        Some(number) => {
            let layer = &graph.handles()[number];
            // What cannot be looked up may be nothing.
            !matches!(layer.image().next_own(Extent::from_range(0..size_of(layer))).await, Ok(Some(_)))
        }
    }
}

/// Removes what `plan` has left, once the disk has the layer no more.
pub(crate) async fn finish_left<F: Files>(work: &Work<'_, F>, plan: &Plan) -> Result<()> {
    match plan {
        Plan::Coalesce(merged) => finish_rest(work, merged).await,
        Plan::Flatten | Plan::Move(_) => Ok(()),
    }
}

/// Removes what `plan` has left: the disk has not the layer that it merges.
async fn finish_rest<F: Files>(work: &Work<'_, F>, plan: &Merged) -> Result<()> {
    refuse_copies(&*work.node.graph().await, plan)?;
    left::finish(work, plan).await?;
    remove_marks(work, plan).await
}

async fn begin<F: Files>(work: &Work<'_, F>, plan: &Merged) -> Result<()> {
    let graph = work.settled().await?;
    let Some(number) = number_of(&graph, plan) else { return finish_rest(work, plan).await };
    let disk = graph.handles()[0].path();
    crate::finish_left(work, disk).await?;
    if is_overtaken(work.asking, &graph, plan).await? {
        // The merge is refused below, and its note would keep the other one waiting for ever.
        Plan::Coalesce(plan.clone()).remove_own(work.files, disk).await?;
    }
    check::check_names(work, &graph, number).await?;
    let checked = check::check(work, &graph, number, plan.keeps_name).await?;
    let note = Note::new(Plan::Coalesce(plan.clone()), work.job.wishes(), None);
    note.write(work.files, disk).await?;
    work.job.accept();
    // Their folder may have moved since this was planned.
    let at = |number: usize| graph.handles()[number].path().to_owned();
    let here = Merged { path: at(number), parent: at(number + 1), ..plan.clone() };
    match number {
        0 => leaf::merge(work, &graph, &checked).await?,
        _ => middle::merge(work, &graph, number, checked, &here).await?,
    }
    // The layer's children are opened once more, and this graph has one of them open.
    drop(graph);
    if number > 0 && here.keeps_name {
        named::finish(work, &here).await?;
    }
    remove_marks(work, &here).await
}

/// True when the layer that `plan` merges is to keep its name, and was deleted itself since: its own child is merged into it first, and `plan` is
/// of no use any more. No other image names the layer's parent yet, for whoever has deleted the layer has found it to be the parent of its
/// only child ([`crate::delete::mark`]): so nothing is left half done.
///
/// # Errors
/// The system's.
pub(crate) async fn is_overtaken<F: Files>(asking: &F, graph: &GraphOf<F>, plan: &Merged) -> Result<bool> {
    let Some(number) = number_of(graph, plan).filter(|number| plan.keeps_name && *number > 0) else { return Ok(false) };
    let (child, layer) = (&graph.handles()[number - 1], &graph.handles()[number]);
    Ok(Gone::of(asking, layer).await?.is_some_and(|gone| Some(gone.child) == child.which()))
}

/// Removes the mark that one of the two images was deleted ([`Gone`]), once that image has its name no more; and that of the parent, when it has kept its own:
/// that mark says that the layer is about to be merged into it.
async fn remove_marks<F: Files>(work: &Work<'_, F>, plan: &Merged) -> Result<()> {
    for path in [&plan.path, &plan.parent] {
        if work.files.canonical(path).await.is_err_and(|error| error.kind() == ErrorKind::NotFound) {
            Gone::remove(work.files, path).await?;
            remove_if_there(work.files, &names::set(path)).await?;
        }
    }
    let graph = work.node.graph().await;
    let Some(parent) = graph.handles().iter().find(|layer| layer.path() == plan.parent) else { return Ok(()) };
    match Gone::of(work.asking, parent).await? {
        Some(gone) if gone.is_merged && gone.child == plan.identity => Gone::remove(work.files, &plan.parent).await,
        _ => Ok(()),
    }
}

/// The number of the layer that `plan` merges; `None` when the disk has it no more. Its folder may have moved; a copy under another name
/// has the same identity, and is not meant.
fn number_of<S: spile_core::Store>(graph: &spile_image::Graph<S>, plan: &Merged) -> Option<usize> {
    let is_it = |layer: &std::sync::Arc<spile_image::GraphLayer<S>>| {
        layer.path().file_name() == plan.path.file_name() && layer.which() == Some(plan.identity)
    };
    // Where nobody can tell which file it is, its parent's name has to do: once that has taken the layer's name, the two are not there any more.
    let is_unknown = |number: &usize| plan.identity == Merged::UNKNOWN && graph.handles()[*number].which().is_none();
    graph.handles().iter().position(is_it).or_else(|| pair_of(graph, plan).filter(is_unknown))
}

/// The number of the layer that has the name of the one that `plan` merges, over one that has the name of its parent.
fn pair_of<S: spile_core::Store>(graph: &spile_image::Graph<S>, plan: &Merged) -> Option<usize> {
    let is_it = |pair: &[std::sync::Arc<spile_image::GraphLayer<S>>]| {
        pair[0].path().file_name() == plan.path.file_name() && pair[1].path().file_name() == plan.parent.file_name()
    };
    graph.handles().windows(2).position(is_it)
}

/// Refuses to take a merge for done whose layer lies over its parent still, though both are other files by now: copies, which a backup has brought back.
fn refuse_copies<S: spile_core::Store>(graph: &spile_image::Graph<S>, plan: &Merged) -> Result<()> {
    let Some(number) = pair_of(graph, plan) else { return Ok(()) };
    let layer = &graph.handles()[number];
    // One that lasts has told that the layer is another image.
    if layer.image().format().has_lasting_identities() {
        return Ok(());
    }
    let what = format!(
        "a merge of it into {} was begun with other files of these names, and is not finished",
        graph.handles()[number + 1].path().display()
    );
    let note = names::job(graph.handles()[0].path());
    let hint = format!(
        "when these are copies of them: remove {}, and merge the layer again (spile coalesce --layer), or flatten the disk",
        note.display()
    );
    Err(refuse(ErrorKind::Denied, what, layer.path(), &hint))
}

/// The graph without its first `count` layers.
fn from<F: Files>(graph: &GraphOf<F>, count: usize) -> Result<GraphOf<F>> {
    graph.with_layers(graph.handles()[count..].to_vec())
}

fn refuse(kind: ErrorKind, what: String, path: &std::path::Path, hint: &str) -> Error {
    Error::new(kind, what).at_path(path).hint(hint)
}
