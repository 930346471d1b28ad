//! The merge of a layer that is not the leaf into its parent.

use std::path::Path;
use std::sync::Arc;

use spile_core::{Error, ErrorKind, Files, OpenMode, Result};
use spile_image::create::NewParent;
use spile_image::layer::Layer as _;
use spile_image::{Broken, GraphLayer, OpenOptions, open_layer};

use super::check::{Checked, just_gone};
use super::mover::Mover;
use super::named;
use crate::jobs::Merged;
use crate::names::relative;
use crate::work::{GraphOf, LayerOf, Work, size_of};

/// The two layers of a merge, open for writing, and the disk's graph with them.
struct Opened<F: Files> {
    graph: Arc<GraphOf<F>>,
    /// The number of the layer that is merged; its parent is the next.
    number: usize,
    upper: LayerOf<F>,
    lower: LayerOf<F>,
}

/// Merges the layer of this number of `old` into its parent.
pub(super) async fn merge<F: Files>(
    work: &Work<'_, F>,
    old: &Arc<GraphOf<F>>,
    number: usize,
    checked: Checked,
    plan: &Merged,
) -> Result<()> {
    let lower = work.reopen(&old.handles()[number + 1], OpenMode::ReadWrite).await?;
    let upper = match work.reopen(&old.handles()[number], OpenMode::ReadWrite).await {
        Ok(upper) => upper,
        Err(error) => {
            let mut layers = old.handles().to_vec();
            layers[number + 1] = work.sealed(&lower).await?;
            work.put(old.with_layers(layers)?).await?;
            return Err(error);
        }
    };
    let mut layers = old.handles().to_vec();
    (layers[number], layers[number + 1]) = (upper.clone(), lower.clone());
    let graph = Arc::new(old.with_layers(layers)?.flushing_leaf_only());
    let opened = Opened { graph, number, upper, lower };
    let merged = opened.move_all(work, &checked).await;
    let named = match merged {
        Ok(()) => opened.take_out(work, &checked, plan).await,
        Err(error) => Err(error),
    };
    if named.is_err() {
        opened.put_back(work).await?;
    }
    named
}

impl<F: Files> Opened<F> {
    /// Moves all that the layer has into its parent.
    async fn move_all(&self, work: &Work<'_, F>, checked: &Checked) -> Result<()> {
        let graph = work.put(self.graph.with_layers(self.graph.handles().to_vec())?.flushing_leaf_only()).await?;
        checked.check_again(work, &graph, self.number).await?;
        let size_bytes = size_of(&self.upper);
        if size_of(&self.lower) < size_bytes {
            self.lower.image().resize(size_bytes).await?;
        }
        let source = Arc::new(super::from::<F>(&graph, self.number)?);
        let target = Arc::new(super::from::<F>(&graph, self.number + 1)?);
        target.begin();
        Mover::new(work, source, target, None).run().await
    }

    /// Has the children of the layer, which has nothing any more, name its parent, and removes it.
    async fn take_out(&self, work: &Work<'_, F>, checked: &Checked, plan: &Merged) -> Result<()> {
        if work.broken == Broken::NameBeforeChildren && plan.keeps_name {
            return named::take(work, plan, &work.sealed(&self.lower).await?, Some(&self.upper)).await;
        }
        if work.broken == Broken::RemoveBeforeNames {
            work.files.remove(self.upper.path()).await?;
        }
        // The name goes, and not the file: it must be this one that has it.
        if !work.files.is_at(self.upper.image().store(), self.upper.path()).await? {
            let error = Error::new(ErrorKind::Busy, "another file has the name of the layer that was merged");
            return Err(error.at_path(self.upper.path()).hint("move that file away, and begin the same merge again"));
        }
        // What it has given up must stay so.
        self.upper.image().flush().await?;
        let lower = work.sealed(&self.lower).await?;
        let child = name_parent(work, &self.graph, self.number - 1, &lower).await?;
        let mut layers = self.graph.handles().to_vec();
        layers[self.number - 1] = child;
        layers[self.number + 1] = lower.clone();
        layers.remove(self.number);
        work.put(self.graph.with_layers(layers)?).await?;
        // Only now: while the disk still has the layer, its parent must have no other child.
        for other in &checked.others {
            rename_parent(work, other, &self.lower).await?;
        }
        // The name of an image that is kept does not go: what is left to do is in [`named`].
        if plan.keeps_name || work.broken == Broken::RemoveBeforeNames {
            return Ok(());
        }
        work.files.remove_file(self.upper.image().store(), self.upper.path()).await
    }

    /// Has the disk go on with its layers as they are, closed for writing.
    async fn put_back(&self, work: &Work<'_, F>) -> Result<()> {
        let now = work.node.graph().await;
        if !now.handles().iter().any(|layer| layer.id() == self.upper.id()) {
            return Ok(());
        }
        let mut layers = self.graph.handles().to_vec();
        // Sealing cuts off the free end of the layer's file. Reads that began before the last blocks were given up may be on their way there.
        work.put(self.graph.with_layers(layers.clone())?.flushing_leaf_only()).await?;
        layers[self.number + 1] = work.sealed(&self.lower).await?;
        keep_parent(work, &self.upper, &self.lower).await;
        layers[self.number] = work.sealed(&self.upper).await?;
        work.put(self.graph.with_layers(layers)?).await?;
        Ok(())
    }
}

/// Has the layer of this number of the disk's graph name `parent` as its parent. Returns it as it is to be in the graph.
pub(super) async fn name_parent<F: Files>(
    work: &Work<'_, F>,
    graph: &GraphOf<F>,
    number: usize,
    parent: &LayerOf<F>,
) -> Result<LayerOf<F>> {
    let child = &graph.handles()[number];
    let parent = new_parent(work, child.path(), parent).await?;
    if number == 0 {
        child.image().set_parent(Some(&parent)).await?;
        return Ok(child.clone());
    }
    let writable = work.reopen(child, OpenMode::ReadWrite).await?;
    let named = writable.image().set_parent(Some(&parent)).await;
    let sealed = work.sealed(&writable).await?;
    named.map(|()| sealed)
}

/// Has the image at `child`, which nobody uses, name `parent` as its parent.
pub(super) async fn rename_parent<F: Files>(
    work: &Work<'_, F>,
    child: &Path,
    parent: &GraphLayer<F::Store>,
) -> Result<()> {
    // First of all: a child that is gone by now is told as such here.
    let opened = open_layer(work.files, work.env.clone(), child, &OpenOptions::default()).await;
    let child = opened.map_err(|error| just_gone(error, child))?;
    let named = new_parent(work, child.path(), parent).await?;
    child.image().set_parent(Some(&named)).await?;
    child.seal().await
}

/// Has `child`, which is open for writing and stays the child of `parent`, hold the time of now for it: the parent was written for this
/// child's good, and no program is to take that for a change behind the child's back. When it fails, there is only a doubt more.
pub(super) async fn keep_parent<F: Files>(work: &Work<'_, F>, child: &LayerOf<F>, parent: &LayerOf<F>) {
    if let Ok(named) = new_parent(work, child.path(), parent).await {
        let _ = child.image().set_parent(Some(&named)).await;
    }
}

/// `parent` as the image at `child` is to name it. That it will is noted beside the parent.
async fn new_parent<F: Files>(work: &Work<'_, F>, child: &Path, parent: &GraphLayer<F::Store>) -> Result<NewParent> {
    let (child, path) = (work.files.canonical(child).await?, work.files.canonical(parent.path()).await?);
    let relative_path = relative(child.parent().unwrap_or(Path::new("/")), &path).ok_or_else(|| {
        let what = "an image cannot name a parent whose path is not UTF-8";
        Error::new(ErrorKind::InvalidInput, what).at_path(&path).hint("rename the parent, or its folder")
    })?;
    work.neighbours.note_child(&path, &child).await?;
    let info = parent.info();
    Ok(NewParent {
        relative_path,
        name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        format: info.format,
        identity: info.identity,
        // The parent has been written until now, and for this child.
        changed_unix_s: Some(work.env.now_unix_s()),
    })
}
