//! The parent of a layer takes the layer's name: the layer is a snapshot that its user keeps, and the parent was deleted.
//!
//! The layer has nothing left, and its children name the parent by the name that this has had so far. From then on, each step durable
//! before the next:
//!
//! 1. The parent's file gets a second name beside the layer ([`names::taking`]), which then becomes the layer's in one step. The layer's file is gone: it
//!    was empty, so the name reads the same before and after, and whoever names the parent by its old name finds it, too.
//! 2. The children name the parent by its new name.
//! 3. The old name goes, and with it the mark that the image was deleted.
//!
//! A child knows its parent by the parent's identity as well, so no step can be left out: under the layer's name its children would refuse the parent.

use std::sync::Arc;

use spile_core::{Error, ErrorKind, Files, Result, Store};
use spile_image::Broken;
use spile_image::layer::Layer as _;

use super::left::{pass_children_on, settle_children};
use super::middle::{name_parent, rename_parent};
use crate::gone::Gone;
use crate::jobs::Merged;
use crate::names;
use crate::snapshot::{remove_if_there, remove_own};
use crate::work::{GraphOf, LayerOf, Work};

/// Goes on where a process before has left it, or another disk with the same layers has done it: the disk has no more the layer that `plan` merges.
pub(super) async fn finish<F: Files>(work: &Work<'_, F>, plan: &Merged) -> Result<()> {
    let graph = work.node.graph().await;
    let at = |path| graph.handles().iter().skip(1).find(move |layer| layer.path() == path);
    if let Some(parent) = at(&*plan.path) {
        return take(work, plan, parent, None).await;
    }
    let Some(parent) = at(&*plan.parent) else { return Ok(()) };
    if work.files.is_at(parent.image().store(), &plan.path).await? {
        return take(work, plan, parent, None).await;
    }
    match pass_children_on(work, plan, parent).await? {
        // Nobody makes a child of the layer any more while it is open here.
        Some(alone) => take(work, plan, parent, Some(&alone)).await,
        None => Ok(()),
    }
}

/// Has `parent`, which is sealed, take the name of the layer that `plan` merges, from wherever that was left. No image names the layer, and nobody else has
/// it open. `layer` is the one that has the name still.
pub(super) async fn take<F: Files>(
    work: &Work<'_, F>,
    plan: &Merged,
    parent: &LayerOf<F>,
    layer: Option<&LayerOf<F>>,
) -> Result<()> {
    let (files, store) = (work.files, parent.image().store());
    if !files.is_at(store, &plan.path).await? {
        give_name(work, plan, parent, layer).await?;
    }
    remove_if_there(files, &names::taking(&plan.path)).await?;
    if !files.is_at(store, &plan.parent).await? {
        return Ok(());
    }
    let graph = work.node.graph().await;
    let child =
        graph.handles().iter().position(|layer| layer.id() == parent.id()).and_then(|number| number.checked_sub(1));
    let own = child.map(|number| graph.handles()[number].path());
    let neighbours = work.neighbours.list().await?;
    let known: Vec<_> = own.into_iter().chain([&*plan.path]).collect();
    let others = work.children_at(&neighbours, &plan.parent, parent.image().identity(), &known).await?;
    store.set_path(&plan.path);
    if work.broken == Broken::RemoveBeforeNames {
        files.remove(&plan.parent).await?;
    }
    if let Some(number) = child {
        name_own(work, &graph, number, parent).await?;
    }
    for other in &others {
        rename_parent(work, other, parent).await?;
    }
    settle_children(work, &neighbours, &plan.path, parent).await?;
    remove_own(files, store, &plan.parent).await?;
    Gone::remove(files, &plan.parent).await
}

/// Step 1.
async fn give_name<F: Files>(
    work: &Work<'_, F>,
    plan: &Merged,
    parent: &LayerOf<F>,
    layer: Option<&LayerOf<F>>,
) -> Result<()> {
    let (files, store, taking) = (work.files, parent.image().store(), names::taking(&plan.path));
    let mut over = layer.map(|layer| layer.image().store());
    if !files.is_at(store, &plan.parent).await? {
        let error = Error::new(ErrorKind::NotFound, "the image is not at its path any more").at_path(&plan.parent);
        return Err(error.hint("give it its name back: its child is merged into it"));
    }
    work.note_new_name(&*work.node.graph().await, parent, &plan.path).await?;
    remove_if_there(files, &taking).await?;
    files.link_file((store, &plan.parent), &taking).await?;
    if work.broken == Broken::NoNameBetween {
        files.remove(&plan.path).await?;
        over = None;
    }
    files.rename_file((store, &taking), (&plan.path, over)).await
}

/// Step 2 for the disk's own layer of this number.
async fn name_own<F: Files>(
    work: &Work<'_, F>,
    graph: &Arc<GraphOf<F>>,
    number: usize,
    parent: &LayerOf<F>,
) -> Result<()> {
    let named = name_parent(work, graph, number, parent).await?;
    if number == 0 {
        return Ok(());
    }
    let mut layers = graph.handles().to_vec();
    layers[number] = named;
    work.put(graph.with_layers(layers)?).await.map(drop)
}
