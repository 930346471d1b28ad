//! What a merge has left behind whose process ended after the disk had lost the layer.

use std::path::{Path, PathBuf};

use spile_core::{Error, ErrorKind, Extent, Files, OpenMode, Result, Store};
use spile_image::layer::Layer as _;
use spile_image::{OpenOptions, open_layer};

use super::check::just_gone;
use super::middle::rename_parent;
use super::named;
use crate::jobs::Merged;
use crate::work::{LayerOf, Work, size_of};

/// Removes the file of a layer that the disk has no more, once it is proven that nobody needs it: it is the layer that was merged, it has
/// nothing of its own, and no image names it as its parent. Children that name it are renamed first.
pub(super) async fn finish<F: Files>(work: &Work<'_, F>, plan: &Merged) -> Result<()> {
    if plan.keeps_name {
        return named::finish(work, plan).await;
    }
    let graph = work.node.graph().await;
    // When the leaf was merged, its parent has its path.
    if graph.handles().iter().any(|layer| layer.path() == plan.path) {
        return Ok(());
    }
    let Some(parent) = graph.handles().iter().find(|layer| layer.path() == plan.parent) else { return Ok(()) };
    match pass_children_on(work, plan, parent).await? {
        Some(alone) => work.files.remove_file(alone.image().store(), &plan.path).await,
        None => Ok(()),
    }
}

/// Opens the file of a layer that the disk has no more, which nobody else has open then, and has the children that still name it name `parent`, durably. `None` when
/// another image has its name by now, or none; and when somebody has written to it as to a disk of its own since it was emptied: then it goes on as one.
pub(super) async fn pass_children_on<F: Files>(
    work: &Work<'_, F>,
    plan: &Merged,
    parent: &LayerOf<F>,
) -> Result<Option<LayerOf<F>>> {
    let options = OpenOptions::default();
    let layer = match open_layer(work.files, work.env.clone(), plan.path.as_path(), &options).await {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    // Another image may have taken the name.
    if layer.which() != Some(plan.identity) {
        return Ok(None);
    }
    let mut neighbours = work.neighbours.list().await?;
    // The disk has the layer no more, and this may be another folder.
    neighbours.extend(work.neighbours.beside(&plan.path).await?);
    let children = work.other_children(&neighbours, &layer, &[layer.path()]).await?;
    if layer.image().next_own(Extent::from_range(0..size_of(&layer))).await?.is_some() {
        let Some(child) = children.first() else { return Ok(None) };
        let what = "the layer has something of its own, and is no layer of the disk any more";
        let error = Error::new(ErrorKind::Corrupt, what).at_path(layer.path());
        return Err(error.hint(format!("nothing was removed; see what {} shows, which is its child", child.display())));
    }
    for child in children {
        rename_parent(work, &child, parent).await?;
    }
    settle_children(work, &neighbours, &plan.parent, parent).await?;
    Ok(Some(layer))
}

/// Makes durable that children name `parent` by the name `path`, before the name goes by which they knew what they need until now. Whoever gave a child
/// its new parent may have been killed just before that was durable: it is seen then, and a power cut would bring the old name back.
pub(super) async fn settle_children<F: Files>(
    work: &Work<'_, F>,
    neighbours: &[PathBuf],
    path: &Path,
    parent: &LayerOf<F>,
) -> Result<()> {
    for child in work.children_at(neighbours, path, parent.image().identity(), &[]).await? {
        let opened = work.asking.open(&child.as_path().into(), OpenMode::ReadOnly).await;
        opened.map_err(|error| just_gone(error, &child))?.sync().await?;
    }
    Ok(())
}
