//! What is asked before a merge begins. Nothing has changed when it is refused.

use std::path::{Path, PathBuf};

use spile_core::{Disk, Error, ErrorKind, Files, OpenMode, Result, Store};
use spile_image::Graph;
use spile_image::layer::Layer as _;

use super::refuse;
use crate::jobs::Merged;
use crate::work::{GraphOf, Work, size_of};

/// What was found before a merge begins.
pub(super) struct Checked {
    /// Children of the layer that the disk does not use.
    pub others: Vec<PathBuf>,
}

/// The number of the layer of `graph` that is called `name`: a path, a file name, or a file name without its extension. Without a
/// name, the leaf.
///
/// # Errors
/// `NotFound` with the names that there are.
pub fn find_layer<S: Store>(graph: &Graph<S>, name: Option<&str>) -> Result<usize> {
    let Some(name) = name else { return Ok(0) };
    let is_called = |path: &Path| {
        path == Path::new(name)
            || path.file_name().is_some_and(|file| file == name)
            || path.file_stem().is_some_and(|stem| stem == name)
    };
    let layers = graph.handles();
    layers.iter().position(|layer| is_called(layer.path())).ok_or_else(|| {
        let names: Vec<_> =
            layers.iter().filter_map(|layer| layer.path().file_name()).map(|name| name.to_string_lossy()).collect();
        Error::new(ErrorKind::NotFound, format!("the disk has no layer called {name:?}"))
            .at_path(layers[0].path())
            .hint(format!("its layers are {}", names.join(", ")))
    })
}

/// The plan to merge the layer called `name` of `graph` into its parent.
///
/// # Errors
/// `NotFound` as [`find_layer`]; `InvalidInput` for a layer without a parent; `Unsupported` for a format without identities.
pub fn plan<S: Store>(graph: &Graph<S>, name: Option<&str>) -> Result<Merged> {
    let number = find_layer(graph, name)?;
    let layer = &graph.handles()[number];
    let Some(parent) = graph.handles().get(number + 1) else {
        let what = "the layer has no parent that it could be merged into".to_owned();
        return Err(refuse(ErrorKind::InvalidInput, what, layer.path(), "the last layer of a chain stays"));
    };
    let Some(identity) = layer.image().identity() else {
        let what = format!("a {} image cannot be merged into its parent yet", layer.image().format());
        return Err(refuse(ErrorKind::Unsupported, what, layer.path(), "copy the disk by spile convert"));
    };
    Ok(Merged { identity, path: layer.path().to_owned(), parent: parent.path().to_owned() })
}

/// Refuses what cannot be merged.
pub(super) async fn check<F: Files>(work: &Work<'_, F>, graph: &GraphOf<F>, number: usize) -> Result<Checked> {
    let (layer, Some(parent)) = (&graph.handles()[number], graph.handles().get(number + 1)) else {
        let what = "the layer has no parent that it could be merged into".to_owned();
        return Err(refuse(ErrorKind::InvalidInput, what, graph.handles()[number].path(), "the last layer stays"));
    };
    for image in [layer, parent] {
        let format = image.image().format();
        if format.about().is_read_only {
            let what = format!("a {format} image cannot be written yet");
            return Err(refuse(ErrorKind::Unsupported, what, image.path(), "copy the disk by spile convert"));
        }
    }
    check_sizes(graph, number)?;
    if number == 0 {
        check_takes_place(graph)?;
    }
    if let Some(other) = work.other_children(parent, layer.path()).await?.first() {
        let what = format!("{} is a child of this image, too: a merge would change it", other.display());
        let hint = "flatten the disk instead: then it needs no parent";
        return Err(refuse(ErrorKind::Busy, what, parent.path(), hint));
    }
    let child = graph.handles()[number.saturating_sub(1)].path();
    let others = work.other_children(layer, child).await?;
    for other in &others {
        // Somebody who has it open would go on with a parent that is gone.
        work.files.open(&other.as_path().into(), OpenMode::ReadWrite).await?;
    }
    if number == 0
        && let Some(other) = others.first()
    {
        let what = format!("{} is a child of this disk", other.display());
        return Err(refuse(ErrorKind::Denied, what, layer.path(), "its parent would be gone"));
    }
    Ok(Checked { others })
}

/// Sizes must be such that the disk reads the same without the layer.
fn check_sizes<S: Store>(graph: &Graph<S>, number: usize) -> Result<()> {
    let layers = graph.handles();
    let (size, parent) = (size_of(&layers[number]), size_of(&layers[number + 1]));
    let hidden = layers[number + 2..].iter().map(|layer| size_of(layer)).max().unwrap_or(0);
    let why = match () {
        () if parent > size => {
            format!("its parent is longer: {parent} bytes, and the layer hides what lies behind {size}")
        }
        () if parent < size && hidden > parent => {
            format!(
                "its parent has {parent} bytes and would have to grow to {size}, and what it hides would come to light"
            )
        }
        () => return Ok(()),
    };
    let hint = "flatten the disk, or copy it by spile convert";
    Err(refuse(ErrorKind::Unsupported, why, layers[number].path(), hint))
}

/// The leaf's parent must be able to take the leaf's name.
fn check_takes_place<S: Store>(graph: &Graph<S>) -> Result<()> {
    let (leaf, parent) = (&graph.handles()[0], &graph.handles()[1]);
    let (format, of_parent) = (leaf.image().format(), parent.image().format());
    if format != of_parent {
        let what = format!("its parent is a {of_parent} image and cannot take the name of a {format} image");
        return Err(refuse(ErrorKind::Unsupported, what, leaf.path(), "flatten the disk: then it needs no parent"));
    }
    if leaf.path().parent() != parent.path().parent() {
        let what = format!("its parent {} lies in another folder and cannot take its name", parent.path().display());
        return Err(refuse(ErrorKind::Unsupported, what, leaf.path(), "flatten the disk: then it needs no parent"));
    }
    let below = graph.with_layers(graph.handles()[1..].to_vec())?.info();
    let above = graph.info();
    if below.request_align_bytes > above.request_align_bytes || below.memory_align_bytes > above.memory_align_bytes {
        let what = "its parent wants requests on larger borders than the disk has promised".to_owned();
        return Err(refuse(ErrorKind::Unsupported, what, leaf.path(), "flatten the disk instead"));
    }
    Ok(())
}
