//! What is asked before a merge begins. Nothing has changed when it is refused.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use spile_core::{Disk, Error, ErrorKind, Files, OpenMode, Result, Store};
use spile_image::layer::Layer as _;
use spile_image::{Format, Graph};

use super::{by_content, refuse};
use crate::gone::Gone;
use crate::jobs::Merged;
use crate::motion::is_parent;
use crate::names;
use crate::snapshot::name_of;
use crate::work::{GraphOf, LayerOf, Work, refuse_data_file, refuse_inner_snapshots, size_of};

/// What was found before a merge begins.
pub(super) struct Checked {
    /// The layer keeps its name.
    keeps_name: bool,
    /// Children of the layer that the disk does not use.
    pub others: Vec<PathBuf>,
}

/// What to do where a data file keeps an image from being merged.
const NO_MERGE_HINT: &str = "flatten the disk: then it needs no parent; or copy it: spile convert";

/// The number of the layer of `graph` that is called `name`: a path, a file name, or that without its extension or without the disk's name in front.
/// Without a name, the leaf.
///
/// # Errors
/// `NotFound` with the names that there are; `InvalidInput` when several layers are called so.
pub fn find_layer<S: Store>(graph: &Graph<S>, name: Option<&str>) -> Result<usize> {
    let Some(name) = name else { return Ok(0) };
    let layers = graph.handles();
    let found = find_path(layers[0].path(), layers.iter().map(|layer| layer.path()), name);
    found.map_err(|error| error.at_path(layers[0].path()))
}

/// True when the image at `path` is called `name`, as a layer of the disk at `disk`: its path, its file name, that without its extension, or the name of a
/// snapshot of that disk.
pub fn is_called(disk: &Path, path: &Path, name: &str) -> bool {
    path == Path::new(name)
        || path.file_name().is_some_and(|file| file == name)
        || path.file_stem().is_some_and(|stem| stem == name)
        || (path != disk && name_of(disk, path) == name)
}

/// The number of the only one of `paths` that is called `name`. A whole path goes before a file name, and that before a part of one.
fn find_path<'a>(disk: &Path, paths: impl Iterator<Item = &'a Path> + Clone, name: &str) -> Result<usize> {
    let is_file = |path: &Path| path.file_name().is_some_and(|file| file == name);
    let ways: [&dyn Fn(&Path) -> bool; 3] =
        [&|path| path == Path::new(name), &is_file, &|path| is_called(disk, path, name)];
    let all = |is_it: &dyn Fn(&Path) -> bool| -> Vec<usize> {
        paths.clone().enumerate().filter(|(_, path)| is_it(path)).map(|(number, _)| number).collect()
    };
    let found = ways.iter().map(|way| all(way)).find(|found| !found.is_empty()).unwrap_or_default();
    if let [number] = found[..] {
        return Ok(number);
    }
    let shown = |path: &Path| path.display().to_string();
    match found.is_empty() {
        true => {
            let names: Vec<_> = paths.filter_map(|path| path.file_name()).map(|name| name.to_string_lossy()).collect();
            let error = Error::new(ErrorKind::NotFound, format!("the disk has no layer called {name:?}"));
            Err(error.hint(format!("its layers are {}", names.join(", "))))
        }
        false => {
            let of_name: Vec<_> = paths.enumerate().filter(|(n, _)| found.contains(n)).map(|(_, p)| shown(p)).collect();
            let error = Error::new(ErrorKind::InvalidInput, format!("several layers of the disk are called {name:?}"));
            Err(error.hint(format!("say which: {}", of_name.join(", "))))
        }
    }
}

/// The plan to merge the layer called `name` of `graph` into its parent.
///
/// # Errors
/// `NotFound` as [`find_layer`]; `InvalidInput` for a layer without a parent; `Unsupported` for a leaf
/// whose parent cannot take its name.
pub fn plan<S: Store>(graph: &Graph<S>, name: Option<&str>) -> Result<Merged> {
    plan_of(graph, find_layer(graph, name)?)
}

/// The plan to merge the layer of this number of `graph` into its parent, which was deleted and takes the layer's name in the end.
///
/// # Errors
/// As [`plan`]'s; `Unsupported` also when the parent cannot take the layer's name.
pub fn plan_keeping<S: Store>(graph: &Graph<S>, number: usize) -> Result<Merged> {
    let merged = plan_of(graph, number)?;
    check_takes_place(graph, number)?;
    Ok(Merged { keeps_name: number > 0, ..merged })
}

fn plan_of<S: Store>(graph: &Graph<S>, number: usize) -> Result<Merged> {
    let layer = &graph.handles()[number];
    let Some(parent) = graph.handles().get(number + 1) else {
        let what = "the layer has no parent that it could be merged into".to_owned();
        return Err(refuse(ErrorKind::InvalidInput, what, layer.path(), "the last layer of a chain stays"));
    };
    if number == 0 {
        check_takes_place(graph, number)?;
    }
    let identity = layer.which().unwrap_or(Merged::UNKNOWN);
    let (path, parent) = (layer.path().to_owned(), parent.path().to_owned());
    Ok(Merged { identity, path, parent, keeps_name: false })
}

/// Refuses a merge of the layer `number` when its file, or that of its parent, is not at its path: another file would lose the name.
pub(super) async fn check_names<F: Files>(work: &Work<'_, F>, graph: &GraphOf<F>, number: usize) -> Result<()> {
    let (layer, parent) = (&graph.handles()[number], &graph.handles()[number + 1]);
    for one in [layer, parent] {
        if work.files.is_at(one.image().store(), one.path()).await? {
            continue;
        }
        let not_merged = match Arc::ptr_eq(one, layer) {
            true => format!("not merged into {}", parent.path().display()),
            false => format!("{} is not merged into it", layer.path().display()),
        };
        let what = format!("{not_merged}: the file that is open is not at this path any more");
        let error = Error::new(ErrorKind::Busy, what).at_path(one.path());
        return Err(error.hint("give it its name back; another file of this name was left as it is"));
    }
    Ok(())
}

/// Refuses what cannot be merged.
pub(super) async fn check<F: Files>(
    work: &Work<'_, F>,
    graph: &GraphOf<F>,
    number: usize,
    keeps_name: bool,
) -> Result<Checked> {
    let (layer, Some(parent)) = (&graph.handles()[number], graph.handles().get(number + 1)) else {
        let what = "the layer has no parent that it could be merged into".to_owned();
        return Err(refuse(ErrorKind::InvalidInput, what, graph.handles()[number].path(), "the last layer stays"));
    };
    for image in [layer, parent] {
        check_place(image.path())?;
        refuse_data_file(image, "it is not merged", NO_MERGE_HINT)?;
    }
    if number > 1 {
        // Its file is opened anew to name the parent.
        refuse_data_file(&graph.handles()[number - 1], "its parent is not merged", NO_MERGE_HINT)?;
    }
    refuse_inner_snapshots(layer, "they would go with its file")?;
    check_sizes(graph, number)?;
    if size_of(parent) < size_of(layer) {
        // It is asked once more when it grows; by then the merge has begun.
        parent.image().check_resize(size_of(layer))?;
    }
    if number == 0 || keeps_name {
        check_takes_place(graph, number)?;
    }
    check_mark(work, graph, number, keeps_name).await?;
    let others = other_children(work, graph, number).await?;
    for other in &others {
        if let Some(disk) = names::disk_of(other).filter(|disk| names::new_leaf(disk) == *other) {
            let what = format!("a snapshot of {} was broken off, and has left a child of this image", disk.display());
            return Err(refuse(
                ErrorKind::Busy,
                what,
                layer.path(),
                "spile gc removes that; then begin the merge again",
            ));
        }
        if let Some(image) = names::disk_of(other).filter(|image| names::taking(image) == *other) {
            let what = format!("a merge is just giving a child of this image the name {}", image.display());
            let hint = "try again when that has ended; spile gc removes what one that was broken off has left";
            return Err(refuse(ErrorKind::Busy, what, layer.path(), hint));
        }
        let Some(format) = Format::from_extension(other).filter(|format| format.about().has_parents) else {
            let what =
                format!("{} is a child of this image, too, and its name does not say its format", other.display());
            return Err(refuse(ErrorKind::Unsupported, what, layer.path(), "give it the extension of its format"));
        };
        // Somebody who has it open would go on with a parent that is gone.
        let opened = work.files.open(&other.as_path().into(), OpenMode::ReadWrite).await;
        let store = opened.map_err(|error| just_gone(error, other))?;
        if format.named_data_file(&store).await?.is_some() {
            let what = format!("{} is a child of this image, too, and keeps its data in another file", other.display());
            return Err(refuse(ErrorKind::Unsupported, what, layer.path(), NO_MERGE_HINT));
        }
    }
    by_content::check(work, graph, number, &others).await?;
    if number == 0
        && let Some(other) = others.first()
    {
        let what = format!("{} is a child of this disk", other.display());
        return Err(refuse(ErrorKind::Denied, what, layer.path(), "its parent would be gone"));
    }
    Ok(Checked { keeps_name, others })
}

/// `error` of opening the child at `other`: one that was there a moment ago was deleted, or has another name now.
pub(super) fn just_gone(error: Error, other: &Path) -> Error {
    if error.kind() != ErrorKind::NotFound {
        return error;
    }
    let what = "the file was a child of an image that is merged, and has just gone".to_owned();
    refuse(ErrorKind::Busy, what, other, "begin the merge again: it looks for the image's children anew")
}

impl Checked {
    /// Asks for children anew, once the layer of this number and its parent are locked against everybody else: a child that was made since
    /// they were asked for first would be changed, or lose its parent. From now on nobody can make another one, because who makes a child
    /// has its parent open until the child has its name. All files are asked again, because one may have taken the name of another.
    ///
    /// # Errors
    /// `Busy` when there is a new child; the storage's.
    pub(super) async fn check_again<F: Files>(
        &self,
        work: &Work<'_, F>,
        graph: &GraphOf<F>,
        number: usize,
    ) -> Result<()> {
        if self.keeps_name {
            // Who deletes it looks for this lock once the mark is there.
            refuse_deleted(work, &graph.handles()[number]).await?;
        }
        let others = other_children(work, graph, number).await?;
        match others.iter().find(|other| !self.others.contains(other)) {
            Some(new) => {
                let what = format!("{} has just become a child of this image", new.display());
                let hint = "nothing was merged; begin the merge again, and it goes on with the new child";
                Err(refuse(ErrorKind::Busy, what, graph.handles()[number].path(), hint))
            }
            None => Ok(()),
        }
    }
}

/// The children of the layer of this number that the disk does not use. Refuses a layer whose parent has another child.
async fn other_children<F: Files>(work: &Work<'_, F>, graph: &GraphOf<F>, number: usize) -> Result<Vec<PathBuf>> {
    let (layer, parent) = (&graph.handles()[number], &graph.handles()[number + 1]);
    let neighbours = work.neighbours.list().await?;
    // The layer's child may name the parent already: by a merge that has failed at that step.
    let child = graph.handles()[number.saturating_sub(1)].path();
    if let Some(other) = work.other_children(&neighbours, parent, &[layer.path(), child]).await?.first() {
        let what = format!("{} is a child of this image, too: a merge would change it", other.display());
        let hint = "flatten the disk instead: then it needs no parent";
        return Err(refuse(ErrorKind::Busy, what, parent.path(), hint));
    }
    work.other_children(&neighbours, layer, &[child]).await
}

/// Refuses an image on a block device: nobody can tell which other devices hold children of it, and neither can it be removed nor take
/// another's name.
fn check_place(path: &Path) -> Result<()> {
    if !path.starts_with("/dev") {
        return Ok(());
    }
    let what = "an image on a block device cannot be merged: its children on other devices are not known".to_owned();
    Err(refuse(ErrorKind::Unsupported, what, path, "flatten the disk: then it needs no parent"))
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

/// What the mark of a parent that was deleted says ([`Gone`]): once the merge of its child into it has begun, no other image may be merged into
/// it, for the file may have the name of that child by now, too. A layer keeps its name only where such a mark is, and when it was not deleted itself.
async fn check_mark<F: Files>(work: &Work<'_, F>, graph: &GraphOf<F>, number: usize, keeps_name: bool) -> Result<()> {
    let (layer, parent) = (&graph.handles()[number], &graph.handles()[number + 1]);
    let neighbours = work.neighbours.list().await?;
    for image in [layer, parent] {
        refuse_two_names(work, image, &neighbours).await?;
    }
    if number > 0 && Gone::of(work.asking, layer).await?.is_some_and(|gone| gone.is_merged) {
        let what = "another image was merged into this one, and that is not finished".to_owned();
        return Err(refuse(ErrorKind::Busy, what, layer.path(), "spile gc finishes it"));
    }
    if is_parent(work.asking, parent.path()).await? {
        let what = "it has come here as a parent, and a disk that is moved here may need it as it is".to_owned();
        let hint =
            "flatten the disk instead; or, when no move brings another child, `spile delete` it: then it may change";
        return Err(refuse(ErrorKind::Denied, what, parent.path(), hint));
    }
    let gone = Gone::of(work.asking, parent).await?.filter(|gone| gone.is_merged);
    let is_ours = gone.map(|gone| Some(gone.child) == layer.which());
    if is_ours == Some(false) {
        let what = "another image was merged into this one, and that is not finished".to_owned();
        return Err(refuse(ErrorKind::Busy, what, parent.path(), "spile gc finishes it"));
    }
    if !keeps_name {
        return Ok(());
    }
    if is_ours.is_none() {
        let what = "only an image that was deleted gives up its name for that of its child".to_owned();
        return Err(refuse(ErrorKind::Denied, what, parent.path(), "spile delete marks it, and spile gc merges"));
    }
    refuse_deleted(work, layer).await
}

/// Refuses a layer that is to keep its name, and was deleted.
async fn refuse_deleted<F: Files>(work: &Work<'_, F>, layer: &LayerOf<F>) -> Result<()> {
    match Gone::of(work.asking, layer).await? {
        Some(_) => {
            let what = "the image was deleted itself: its own child is merged into it first".to_owned();
            Err(refuse(ErrorKind::Busy, what, layer.path(), "spile gc does one after the other"))
        }
        None => Ok(()),
    }
}

/// Refuses an image that has the name of an image that was deleted, too: it was about to lose that, and children may name it by either.
async fn refuse_two_names<F: Files>(work: &Work<'_, F>, image: &LayerOf<F>, neighbours: &[PathBuf]) -> Result<()> {
    let path = work.files.canonical(image.path()).await?;
    for note in neighbours.iter().filter(|note| names::is_gone(note)) {
        let Some(other) = names::disk_of(note).filter(|other| *other != path) else { continue };
        if work.files.is_at(image.image().store(), &other).await? {
            let what = format!("the image has the name {}, too: a merge was broken off", other.display());
            return Err(refuse(ErrorKind::Busy, what, &path, "spile gc finishes it"));
        }
    }
    Ok(())
}

/// The parent of this layer must be able to take the layer's name.
fn check_takes_place<S: Store>(graph: &Graph<S>, number: usize) -> Result<()> {
    let (leaf, parent) = (&graph.handles()[number], &graph.handles()[number + 1]);
    let (format, of_parent) = (leaf.image().format(), parent.image().format());
    if format != of_parent {
        let what = format!("its parent is a {of_parent} image and cannot take the name of a {format} image");
        return Err(refuse(ErrorKind::Unsupported, what, leaf.path(), "flatten the disk: then it needs no parent"));
    }
    if leaf.path().parent() != parent.path().parent() {
        let what = format!("its parent {} lies in another folder and cannot take its name", parent.path().display());
        return Err(refuse(ErrorKind::Unsupported, what, leaf.path(), "flatten the disk: then it needs no parent"));
    }
    if number > 0 {
        return Ok(());
    }
    let below = graph.with_layers(graph.handles()[1..].to_vec())?.info();
    let above = graph.info();
    if below.request_align_bytes > above.request_align_bytes || below.memory_align_bytes > above.memory_align_bytes {
        let what = "its parent wants requests on larger borders than the disk has promised".to_owned();
        return Err(refuse(ErrorKind::Unsupported, what, leaf.path(), "flatten the disk instead"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_several_layers_have_finds_none() {
        let paths = ["/vm/a.vhd", "/vm/a.raw", "/base/b.vhd", "/vm/b.vhd"];
        let disk = Path::new(paths[0]);
        let find = |name: &str| find_path(disk, paths.iter().map(Path::new), name).map_err(|error| error.kind());
        assert_eq!((find("a.vhd"), find("a.raw"), find("/vm/b.vhd")), (Ok(0), Ok(1), Ok(3)));
        for several in ["a", "b.vhd", "b"] {
            assert_eq!(find(several), Err(ErrorKind::InvalidInput), "{several}");
        }
        assert_eq!(find("c"), Err(ErrorKind::NotFound));
        // A snapshot of the disk: its name alone, or with the disk's in front.
        let paths = ["/vm/a.vhd", "/vm/a-daily.vhd", "/vm/daily-b.vhd"];
        let find = |name: &str| find_path(disk, paths.iter().map(Path::new), name).map_err(|error| error.kind());
        assert_eq!(
            (find("daily"), find("a-daily"), find("daily-b"), find("b")),
            (Ok(1), Ok(1), Ok(2), Err(ErrorKind::NotFound))
        );
    }

    #[test]
    fn what_lies_on_a_device_is_not_merged() {
        for device in ["/dev/vg/base", "/dev/dm-3"] {
            let error = check_place(Path::new(device)).unwrap_err();
            assert_eq!((error.kind(), error.path()), (ErrorKind::Unsupported, Some(Path::new(device))));
        }
        check_place(Path::new("/vm/dev/base.vhd")).unwrap();
    }
}
