//! The merge of a disk's leaf into its parent.

use std::sync::Arc;

use spile_core::{Disk, Files, OpenMode, Result, Store};
use spile_image::Sinking;
use spile_image::layer::Layer as _;

use super::check::Checked;
use super::middle::keep_parent;
use super::mover::Mover;
use crate::work::{GraphOf, LayerOf, Work, size_of};

/// Merges the leaf of `old` into its parent.
pub(super) async fn merge<F: Files>(work: &Work<'_, F>, old: &Arc<GraphOf<F>>, checked: &Checked) -> Result<()> {
    let parent = work.reopen(&old.handles()[1], OpenMode::ReadWrite).await?;
    let mut layers = old.handles().to_vec();
    layers[1] = parent.clone();
    let graph = Arc::new(old.with_layers(layers)?);
    let merged = move_and_rename(work, &graph, &parent, checked).await;
    match merged {
        Ok(()) => Ok(()),
        Err(error) => {
            put_back(work, &graph, &parent).await?;
            Err(error)
        }
    }
}

/// `graph` has the parent open for writing.
async fn move_and_rename<F: Files>(
    work: &Work<'_, F>,
    graph: &Arc<GraphOf<F>>,
    parent: &LayerOf<F>,
    checked: &Checked,
) -> Result<()> {
    // Nobody uses the parent as it was open before, once this epoch has begun and the one before has ended.
    let graph = work.put(graph.with_layers(graph.handles().to_vec())?).await?;
    checked.check_again(work, &graph, 0).await?;
    grow::<F>(&graph, parent).await?;
    let below = Arc::new(super::from::<F>(&graph, 1)?);
    below.begin();
    let sinking = Sinking::new(below.clone(), work.broken);
    // From here on the leaf takes nothing new. The first batch begins when nobody is left who could give it more.
    work.put(graph.sinking(&sinking, Vec::new())).await?;
    // The disk may have grown until then; now it cannot.
    grow::<F>(&graph, parent).await?;
    Mover::new(work, graph.clone(), below.clone(), Some(sinking)).run().await?;
    // What the leaf has given up must stay so before only the parent is flushed.
    graph.flush_own().await?;
    below.flush().await?;
    take_place(work, &graph, parent).await?;
    work.put(super::from::<F>(&graph, 1)?).await?;
    Ok(())
}

/// Makes the parent as long as the leaf of `graph`, if it is shorter.
async fn grow<F: Files>(graph: &GraphOf<F>, parent: &LayerOf<F>) -> Result<()> {
    let size_bytes = size_of(&graph.handles()[0]);
    match size_of(parent) < size_bytes {
        true => parent.image().resize(size_bytes).await,
        false => Ok(()),
    }
}

/// Gives the parent's file the name of the leaf, which has nothing any more.
async fn take_place<F: Files>(work: &Work<'_, F>, graph: &GraphOf<F>, parent: &LayerOf<F>) -> Result<()> {
    let (disk, old_path) = (graph.handles()[0].path().to_owned(), parent.path().to_owned());
    work.note_new_name(graph, parent, &disk).await?;
    let (leaf, new) = (graph.handles()[0].image().store(), parent.image().store());
    work.files.rename_file((new, &old_path), (&disk, Some(leaf))).await?;
    parent.image().store().set_path(&disk);
    Ok(())
}

/// Has guests write to the leaf again, and seals the parent.
async fn put_back<F: Files>(work: &Work<'_, F>, graph: &GraphOf<F>, parent: &LayerOf<F>) -> Result<()> {
    // From now on flushes of guests give back what is given up; what the leaf has held until now stays in its file.
    graph.hold_own_space(false);
    // The parent may have become the leaf already.
    let now = work.node.graph().await;
    if now.handles()[0].id() == parent.id() {
        return Ok(());
    }
    // A rename that has failed may have happened: then the leaf's file has no name any more, and nobody would find what is written to it.
    // While that is not known, the leaf goes on sinking: it has nothing, so all that guests write goes to the parent.
    let disk = graph.handles()[0].path();
    if work.files.is_at(parent.image().store(), disk).await? {
        parent.image().store().set_path(disk);
        work.put(super::from::<F>(graph, 1)?).await?;
        return Ok(());
    }
    work.put(graph.with_layers(graph.handles().to_vec())?).await?;
    let mut layers = graph.handles().to_vec();
    layers[1] = work.sealed(parent).await?;
    keep_parent(work, &layers[0], parent).await;
    work.put(graph.with_layers(layers)?).await?;
    Ok(())
}
